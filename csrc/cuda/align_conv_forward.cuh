// Kernel bodies of align_conv's forward.
//
// The fused kernel rounds the depthwise convolution's result to the maps' type as the left operand
// of the product with the pointwise weights on the tensor cores. It computes the statistics of the
// rounded y from shared memory, where they are exact: mean, then squared deviations, of eight
// pixels, merged (Moments) over the block's tiles, then over blocks by a second launch.
#pragma once

#include "cuda/align_conv_tile.cuh"

namespace mf::cuda {

template <typename T, int kStride, int kThreads>
__device__ void align_conv_depthwise_block(const AlignConvDepthwise& params, const Tiles& tiles,
                                           unsigned char* memory) {
  const AlignConvInput& in = params.input;
  const int height = static_cast<int>(in.out_height());
  const int width = static_cast<int>(in.out_width());
  const auto images = static_cast<int>(in.images);
  const auto step = static_cast<int>(in.channels);
  const auto valid = static_cast<int>(in.valid_images());
  const int slices = slices_of(in.channels);
  const int first_channel = static_cast<int>(blockIdx.x) % slices * kSlice;
  const int64_t channel = first_channel + threadIdx.x % kLanes * 2;
  const bool has_channel = channel < in.channels;
  const Region region = entering<kStride>(tiles.images, tiles.height, tiles.width);
  T* staged = reinterpret_cast<T*>(memory);
  T* taps = staged + region.pixels() * kSlice;
  load_taps<T, kThreads>(in, first_channel, taps);
  for (int tile = static_cast<int>(blockIdx.x) / slices; tile < tiles.total;
       tile += static_cast<int>(gridDim.x) / slices) {
    const TileAt at = TileAt::of(tiles, tile);
    load_input_tile<T, kThreads>(in, valid, region, at.image, at.row * kStride - 1, at.column * kStride - 1,
                                 first_channel, staged);
    __syncthreads();
    T* map = static_cast<T*>(params.map) + static_cast<int64_t>(at.image) * height * width * in.channels + channel;
    if (has_channel) {
      convolve_tile<T, kStride, kThreads>(tiles, region, staged, taps, [&](int image, int row, int column, float2 sum) {
        if (at.image + image < images && at.row + row < height && at.column + column < width) {
          store_pair(map + ((image * height + at.row + row) * width + at.column + column) * step, sum);
        }
      });
    }
    __syncthreads();
  }
}

// Shared memory of a block of the fused kernel, in bytes from its beginning; every part is aligned
// to 16.
struct FusedMemory {
  int stride;     // elements from one row of an operand to the next
  size_t left;    // [kTilePixels][stride]: the depthwise convolution's result
  size_t staged;  // what enters it, then y [kTilePixels][kSlice + kPadding], then moments
  size_t taps;    // [kSlice][kTapCount]: depthwise weights
  size_t pixels;  // int [kTilePixels]: where in the map a row belongs; -1: nowhere
  size_t bytes;   // of all. The pointwise weights [out_channels up to the next 64][stride] come first

  MF_HD static FusedMemory of(int64_t channels, int64_t out_channels, size_t staged_bytes, int element, int warps) {
    FusedMemory memory{};
    memory.stride = static_cast<int>(channels) + kPadding;
    const size_t row = static_cast<size_t>(memory.stride) * element;
    const size_t y = size_t{kTilePixels} * (kSlice + kPadding) * element;
    const size_t moments = size_t{3} * kSlice * warps * sizeof(float);
    size_t shared = staged_bytes > y ? staged_bytes : y;
    shared = shared > moments ? shared : moments;
    memory.left = static_cast<size_t>(up_to(out_channels, kSlice)) * row;
    memory.staged = memory.left + kTilePixels * row;
    memory.taps = memory.staged + shared;
    memory.pixels = memory.taps + size_t{kSlice} * kTapCount * element;
    memory.bytes = memory.pixels + kTilePixels * sizeof(int);
    return memory;
  }
};

// Moments of a lane's two channels.
struct MomentsPair {
  float count;
  float2 mean, squares;

  __device__ void merge(float more, float2 its_mean, float2 its_squares) {
    const Moments x = merged({count, mean.x, squares.x}, {more, its_mean.x, its_squares.x});
    const Moments y = merged({count, mean.y, squares.y}, {more, its_mean.y, its_squares.y});
    *this = {x.count, {x.mean, y.mean}, {x.squares, y.squares}};
  }
};

// Adds rows [first, first + 8) of a chunk of y, without padding, in this lane's two columns.
template <typename T>
__device__ void take_moments(const T* y, const int* pixels, int counted_pixels, int first, MomentsPair& moments) {
  const T* column = y + first * (kSlice + kPadding) + threadIdx.x % kLanes * 2;
  unsigned counts = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    counts |= pixels[first + i] >= 0 && pixels[first + i] < counted_pixels ? 1u << i : 0u;
  }
  float2 value[8];
  float count = 0.0f;
  float2 mean = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool is_counted = (counts >> i & 1u) != 0;
    value[i] = is_counted ? pair_at(column + i * (kSlice + kPadding)) : float2{0.0f, 0.0f};
    count += is_counted ? 1.0f : 0.0f;
    mean = {mean.x + value[i].x, mean.y + value[i].y};
  }
  const float inverse = count > 0.0f ? 1.0f / count : 0.0f;
  mean = {mean.x * inverse, mean.y * inverse};
  float2 squares = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if ((counts >> i & 1u) != 0) {
      const float2 distance = {value[i].x - mean.x, value[i].y - mean.y};
      add_product(squares, distance, distance);
    }
  }
  moments.merge(count, mean, squares);
}

// Starts to copy the pointwise weights, with zeros up to the next 64 rows: wait_for_copies before
// the barrier before their use.
template <typename T, int kThreads>
__device__ void load_pointwise(const AlignConvForward& params, T* weights, int stride) {
  const auto channels = static_cast<int>(params.input.channels);
  const auto out_channels = static_cast<int>(params.out_channels);
  const int vectors = channels / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < static_cast<int>(up_to(out_channels, kSlice)) * vectors; i += kThreads) {
    const int row = i / vectors;
    T* to = weights + row * stride + i % vectors * 8;
    if (row < out_channels) {
      copy_16_bytes(to,
                    static_cast<const T*>(params.pointwise) + static_cast<int64_t>(row) * channels + i % vectors * 8);
    } else {
      Vec<T, 8>{}.store(to);
    }
  }
}

// Merges what the block's warps found for the chunk of y from channel `first` on.
// of_warp: [kWarps][kSlice]
template <int kThreads>
__device__ void leave_moments(const AlignConvForward& params, const MomentsPair& moments, int first, Moments* of_warp) {
  constexpr int kWarps = kThreads / kLanes;
  const auto out_channels = static_cast<int>(params.out_channels);
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  of_warp[warp * kSlice + 2 * lane] = {moments.count, moments.mean.x, moments.squares.x};
  of_warp[warp * kSlice + 2 * lane + 1] = {moments.count, moments.mean.y, moments.squares.y};
  __syncthreads();
  for (int column = threadIdx.x; column < kSlice && first + column < out_channels; column += kThreads) {
    Moments sum = of_warp[column];
    for (int other = 1; other < kWarps; ++other) {
      sum = merged(sum, of_warp[other * kSlice + column]);
    }
    float* to = params.moments + static_cast<int64_t>(blockIdx.x) * 3 * out_channels + first + column;
    to[0] = sum.count;
    to[out_channels] = sum.mean;
    to[2 * out_channels] = sum.squares;
  }
  __syncthreads();
}

template <typename T, int kStride, int kChunks, int kThreads>
__device__ void align_conv_forward_block(const AlignConvForward& params, const Tiles& tiles,
                                         const FusedMemory& memory_map, unsigned char* memory) {
  constexpr int kWarps = kThreads / kLanes;
  const AlignConvInput& in = params.input;
  const int height = static_cast<int>(in.out_height());
  const int width = static_cast<int>(in.out_width());
  const auto channels = static_cast<int>(in.channels);
  const auto out_channels = static_cast<int>(params.out_channels);
  const auto valid = static_cast<int>(in.valid_images());
  const int counted_pixels = valid * height * width;
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int stride = memory_map.stride;
  const Region region = entering<kStride>(tiles.images, tiles.height, tiles.width);
  T* weights = reinterpret_cast<T*>(memory);
  T* left = reinterpret_cast<T*>(memory + memory_map.left);
  T* staged = reinterpret_cast<T*>(memory + memory_map.staged);
  T* taps = reinterpret_cast<T*>(memory + memory_map.taps);
  int* pixels = reinterpret_cast<int*>(memory + memory_map.pixels);

  load_pointwise<T, kThreads>(params, weights, stride);

  MomentsPair moments[kChunks] = {};
  for (int tile = blockIdx.x; tile < tiles.total; tile += static_cast<int>(gridDim.x)) {
    const TileAt at = TileAt::of(tiles, tile);
#pragma unroll 1
    for (int row = threadIdx.x; row < kTilePixels; row += kThreads) {
      const int n = at.image + row / (tiles.height * tiles.width);
      const int h = at.row + row / tiles.width % tiles.height;
      const int w = at.column + row % tiles.width;
      const bool exists = row < tiles.images * tiles.height * tiles.width && n < in.images && h < height && w < width;
      pixels[row] = exists ? (n * height + h) * width + w : -1;
    }
    for (int first_channel = 0; first_channel < channels; first_channel += kSlice) {
      if (channels > kSlice || tile == static_cast<int>(blockIdx.x)) {
        load_taps<T, kThreads>(in, first_channel, taps);
      }
      load_input_tile<T, kThreads>(in, valid, region, at.image, at.row * kStride - 1, at.column * kStride - 1,
                                   first_channel, staged);
      __syncthreads();
      const int channel = first_channel + 2 * lane;
      if (channel < channels) {
        convolve_tile<T, kStride, kThreads>(
            tiles, region, staged, taps, [&](int image, int row, int column, float2 sum) {
              const int r = (image * tiles.height + row) * tiles.width + column;
              store_pair(left + r * stride + channel, sum);
              if (params.map != nullptr && pixels[r] >= 0) {
                store_pair(static_cast<T*>(params.map) + static_cast<int64_t>(pixels[r]) * channels + channel, sum);
              }
            });
      }
      wait_for_copies();
      __syncthreads();
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kSlice < out_channels) {
        multiply_chunk<T, false, kThreads>(left, stride, weights + chunk * kSlice * stride, stride, channels, staged);
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < kTilePixels * kVectors; i += kThreads) {
          const int column = chunk * kSlice + i % kVectors * 8;
          const int pixel = pixels[i / kVectors];
          if (pixel >= 0 && column < out_channels) {
            Vec<T, 8>::load(staged + i / kVectors * (kSlice + kPadding) + i % kVectors * 8)
                .store(static_cast<T*>(params.y) + static_cast<int64_t>(pixel) * out_channels + column);
          }
        }
#pragma unroll 1
        for (int first = warp * 8; first < kTilePixels; first += kWarps * 8) {
          take_moments(staged, pixels, counted_pixels, first, moments[chunk]);
        }
        __syncthreads();
      }
    }
  }

#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk * kSlice < out_channels) {
      leave_moments<kThreads>(params, moments[chunk], chunk * kSlice, reinterpret_cast<Moments*>(staged));
    }
  }
}

// Count, sum and sum of squares of numbers' distances from an origin.
struct SumsAboutOrigin {
  double count, distance, squares;

  __device__ void add(const SumsAboutOrigin& more) {
    count += more.count;
    distance += more.distance;
    squares += more.squares;
  }
};

// Merges the moments that the blocks left: a lane a channel, the warps share the parts. As sums
// about the first part's mean, in float64: adding these needs no division, so that no part waits
// for the one before it, and loses nothing.
template <int kThreads>
__device__ void align_conv_finish_block(const AlignConvForward& params, int parts, unsigned char* memory) {
  constexpr int kWarps = kThreads / kLanes;
  constexpr int kAtOnce = 8;                                   // parts under way
  auto* of_warp = reinterpret_cast<SumsAboutOrigin*>(memory);  // [kWarps][kLanes]
  const int64_t channels = params.out_channels;
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kLanes + lane;
  const float* moments = params.moments + channel;
  const bool has_channel = channel < channels;
  const double origin = parts > 0 && has_channel ? moments[channels] : 0.0f;
  SumsAboutOrigin sum = {};
  for (int first = warp; first < parts && has_channel; first += kAtOnce * kWarps) {
    Moments read[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int part = first + i * kWarps;
      const float* from = moments + part * 3 * channels;
      read[i] = part < parts ? Moments{from[0], from[channels], from[2 * channels]} : Moments{};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const double distance = read[i].count == 0.0f ? 0.0 : read[i].mean - origin;
      const double total = read[i].count * distance;
      sum.add({read[i].count, total, read[i].squares + total * distance});
    }
  }
  of_warp[warp * kLanes + lane] = sum;
  __syncthreads();
  if (warp == 0 && has_channel) {
    for (int other = 1; other < kWarps; ++other) {
      sum.add(of_warp[other * kLanes + lane]);
    }
    const double mean = sum.count > 0.0 ? sum.distance / sum.count : 0.0;
    const double squares = sum.squares - mean * sum.distance;
    finish_norm(params.norm,
                {static_cast<float>(sum.count), static_cast<float>(origin + mean),
                 static_cast<float>(squares < 0.0 ? 0.0 : squares)},
                channels, channel, params.state);
    if (channel == 0 && params.norm.training && params.norm.batches != nullptr) {
      ++*params.norm.batches;
    }
  }
}

}  // namespace mf::cuda
