// Kernel bodies of align_conv's forward.
//
// The fused kernel rounds the depthwise convolution's result to the maps' type as the left operand
// of the product with the pointwise weights on the tensor cores. Each lane rounds what it has of the
// product, stores it, and sums the rounded numbers up over the block's tiles (LaneMoments). A block
// merges these sums once (Moments), and a second launch merges those of the blocks.
#pragma once

#include "cuda/align_conv_tile.cuh"

namespace mf::cuda {

template <typename T, int kStride, int kThreads>
__device__ void align_conv_depthwise_block(const AlignConvDepthwise& params, const ForwardTiles& tiles,
                                           unsigned char* memory) {
  wait_for_previous();
  let_next_begin();
  const AlignConvInput& in = params.input;
  const auto valid = static_cast<int>(in.valid_images());
  const auto images = static_cast<int>(in.images);
  const int image_size = tiles.out_height * tiles.out_width * tiles.channels;
  const int slices = slices_of(in.channels);
  const int first_channel = static_cast<int>(blockIdx.x) % slices * kSlice;
  const int channel = first_channel + static_cast<int>(threadIdx.x) % kLanes * 2;
  T* staged = reinterpret_cast<T*>(memory);
  T* taps = staged + tiles.region.pixels() * kSlice;
  load_taps<T, kThreads>(in, first_channel, taps);
  for (int tile = static_cast<int>(blockIdx.x) / slices; tile < tiles.total;
       tile += static_cast<int>(gridDim.x) / slices) {
    const TileAt at = TileAt::of(tiles, tile);
    load_input_tile<T, kStride, kThreads>(in, valid, tiles, at, first_channel, staged);
    __syncthreads();
    if (channel < tiles.channels) {
      T* map = static_cast<T*>(params.map) + static_cast<int64_t>(at.image) * image_size + channel;
      convolve_tile<T, kStride, kThreads, false>(tiles, at, images, staged, taps, static_cast<T*>(nullptr), 0, map);
    }
    __syncthreads();
  }
}

// Shared memory of a block of the fused kernel, in bytes from its beginning; every part is aligned
// to 16.
struct FusedMemory {
  int stride;     // elements from one row of an operand to the next
  size_t left;    // [kTilePixels][stride]: the depthwise convolution's result
  size_t staged;  // what enters it; in the end a Moments of each thread
  size_t taps;    // [kSlice][kTapCount]: depthwise weights
  size_t places;  // int [kTilePixels]: where in y, from the tile's first image on, a row belongs; -1: nowhere
  size_t bytes;   // of all. The pointwise weights [out_channels up to the next 64][stride] come first

  MF_HD static FusedMemory of(int64_t channels, int64_t out_channels, size_t staged_bytes, int element, int threads) {
    FusedMemory memory{};
    memory.stride = static_cast<int>(channels) + kPadding;
    const size_t row = static_cast<size_t>(memory.stride) * element;
    const size_t moments = threads * sizeof(Moments);
    memory.left = static_cast<size_t>(up_to(out_channels, kSlice)) * row;
    memory.staged = memory.left + kTilePixels * row;
    memory.taps = memory.staged + (staged_bytes > moments ? staged_bytes : moments);
    memory.places = memory.taps + size_t{kSlice} * kTapCount * element;
    memory.bytes = memory.places + kTilePixels * sizeof(int);
    return memory;
  }
};

// Which part of a product [kTilePixels][64 kChunks] a warp takes, so that eight warps take all of it.
// A lane gets, of each 16 rows, its two, in kLaneColumns neighbouring columns: load_pointwise has put
// the weights in the order for it.
template <int kChunks>
struct WarpPart {
  static constexpr int kColumnTiles = kChunks == 1 ? 2 : 4;  // of 8 columns
  static constexpr int kRowTiles = kChunks == 4 ? 4 : 2;     // of 16 rows
  static constexpr int kLaneColumns = 2 * kColumnTiles;
  static constexpr int kColumnWarps = 8 * kChunks / kColumnTiles;  // beside each other
  static_assert(kColumnTiles * kRowTiles * 8 == 8 * kChunks * 4, "eight warps take all");
  int first_row, first_column;

  __device__ static WarpPart of_warp() {
    const auto warp = static_cast<int>((kIsBlackwell ? thread_read_anew() : threadIdx.x) / kLanes);
    return {warp / kColumnWarps * 16 * kRowTiles, warp % kColumnWarps * 8 * kColumnTiles};
  }
  __device__ int row(int tile, int half) const {
    return first_row + tile * 16 + half * 8 + static_cast<int>(threadIdx.x) % kLanes / 4;
  }
  __device__ int column() const { return first_column + static_cast<int>(threadIdx.x) % 4 * kLaneColumns; }
  // Where in shared memory row `row` of the weights goes.
  __device__ static int place(int row) {
    const int of_lane = row % kLaneColumns;
    return row / (4 * kLaneColumns) * (4 * kLaneColumns) + of_lane / 2 * 8 + row / kLaneColumns % 4 * 2 + of_lane % 2;
  }
};

// What a lane has seen in its N channels: sums about the first value of each. That value is one of
// those summed up, so the sum of squares is at most 1 + count times that about their mean, and
// little is lost when the one is computed from the other.
template <typename T, int N>
struct LaneMoments {
  static_assert(N == 4 || N == 8);
  float count;
  Vec<T, N> origin;
  float distance[N], squares[N];

  __device__ void add(const Vec<T, N>& y) {
    count += 1.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float far = y[i] - origin[i];
      distance[i] += far;
      squares[i] += far * far;
    }
  }

  // Merges the eight lanes that have the same channels; of these this lane gets channel `which`. Of
  // four channels two lanes get the same one, in either order: only the first of them, whose number
  // is below 4 mod 8, is to be used.
  __device__ Moments merged_over_lanes(int& which) const {
    Moments own[N];
    const float inverse = count > 0.0f ? 1.0f / count : 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float mean = distance[i] * inverse;
      own[i] = {count, origin[i] + mean, squares[i] - mean * distance[i]};
    }
    which = 0;
#pragma unroll
    for (int bit = kLanes / 2, left = N; bit >= 4; bit /= 2) {
      const bool upper = (threadIdx.x & bit) != 0;
      if (left > 1) {  // a lane keeps half of its channels and gives the other half away
        left /= 2;
        which += upper ? left : 0;
#pragma unroll
        for (int i = 0; i < left; ++i) {
          own[i] = merged(chosen(upper, own[left + i], own[i]), exchanged(chosen(upper, own[i], own[left + i]), bit));
        }
      } else {
        own[0] = merged(own[0], exchanged(own[0], bit));
      }
    }
    return own[0];
  }

  __device__ static Moments chosen(bool first, Moments a, Moments b) {
    return {a.count, first ? a.mean : b.mean, first ? a.squares : b.squares};
  }

  __device__ static Moments exchanged(const Moments& own, int bit) {
    return {__shfl_xor_sync(0xffffffffu, own.count, bit), __shfl_xor_sync(0xffffffffu, own.mean, bit),
            __shfl_xor_sync(0xffffffffu, own.squares, bit)};
  }
};

// Starts to copy the pointwise weights, with zeros up to the next 64 rows: wait_for_copies before
// the barrier before their use.
template <typename T, int kChunks, int kThreads>
__device__ void load_pointwise(const AlignConvForward& params, T* weights, int stride) {
  const auto channels = static_cast<int>(params.input.channels);
  const auto out_channels = static_cast<int>(params.out_channels);
  const int vectors = channels / 8;
  const auto by_vectors = SmallDivisor::of(vectors);
#pragma unroll 1
  for (int i = threadIdx.x; i < static_cast<int>(up_to(out_channels, kSlice)) * vectors; i += kThreads) {
    const int row = by_vectors.quotient(i);
    copy_16_bytes_or_zeros(weights + WarpPart<kChunks>::place(row) * stride + (i - row * vectors) * 8,
                           static_cast<const T*>(params.pointwise) + (row < out_channels ? i * 8 : 0),
                           row < out_channels);
  }
}

// A warp's part of left [kTilePixels][depth] times the transposed weights.
template <typename T, typename Part>
__device__ void multiply_part(const Part& part, const T* left, const T* weights, int stride, int depth,
                              float (&d)[Part::kRowTiles][Part::kColumnTiles][4]) {
  const int lane = threadIdx.x % kLanes;
  const T* rows = left + (part.first_row + lane % 16) * stride + lane / 16 * 8;
  const T* columns = weights + (part.first_column + lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8;
#pragma unroll 1
  for (int k = 0; k < depth; k += 16) {
    uint32_t b[Part::kColumnTiles / 2][4];
#pragma unroll
    for (int n = 0; n < Part::kColumnTiles / 2; ++n) {
      load_rows(b[n], columns + n * 16 * stride + k);
    }
#pragma unroll
    for (int tile = 0; tile < Part::kRowTiles; ++tile) {
      uint32_t a[4];
      load_rows(a, rows + tile * 16 * stride + k);
#pragma unroll
      for (int n = 0; n < Part::kColumnTiles; ++n) {
        multiply_tile(d[tile][n], a, {b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]}, T());
      }
    }
  }
}

// Stores a warp's part of y, rounded, in the places from `y` on, and adds those that lie before
// `counted` to the moments.
template <typename T, typename Part>
__device__ void store_part(const Part& part, const float (&d)[Part::kRowTiles][Part::kColumnTiles][4],
                           const int* places, T* y, int counted, LaneMoments<T, Part::kLaneColumns>& moments) {
  constexpr int kRows = 2 * Part::kRowTiles;
  Vec<T, Part::kLaneColumns> value[kRows];
  int place[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    place[i] = places[part.row(i / 2, i % 2)];
#pragma unroll
    for (int n = 0; n < Part::kColumnTiles; ++n) {
      value[i].set_pair(n, {d[i / 2][n][i % 2 * 2], d[i / 2][n][i % 2 * 2 + 1]});
    }
    if (place[i] >= 0) {
      value[i].store(y + place[i]);
    }
  }
  if (moments.count == 0.0f) {
#pragma unroll
    for (int i = kRows - 1; i >= 0; --i) {
      if (is_index(place[i], counted)) {
        moments.origin = value[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (is_index(place[i], counted)) {
      moments.add(value[i]);
    }
  }
}

// Merges what the block's lanes found. of_warps: [rows of warps][64 kChunks]
template <typename T, typename Part, int kThreads>
__device__ void leave_moments(const AlignConvForward& params, const Part& part,
                              const LaneMoments<T, Part::kLaneColumns>& moments, Moments* of_warps) {
  constexpr int kColumns = Part::kColumnWarps * 8 * Part::kColumnTiles;
  constexpr int kRowWarps = kThreads / kLanes / Part::kColumnWarps;
  const auto out_channels = static_cast<int>(params.out_channels);
  int which;
  const Moments of_warp = moments.merged_over_lanes(which);
  if (Part::kLaneColumns == 8 || threadIdx.x % 8 < 4) {
    of_warps[part.first_row / (16 * Part::kRowTiles) * kColumns + part.column() + which] = of_warp;
  }
  __syncthreads();
  static_assert(kColumns <= kThreads);
  if (const int column = threadIdx.x; column < out_channels) {
    Moments sum = of_warps[column];
#pragma unroll
    for (int other = 1; other < kRowWarps; ++other) {
      sum = merged(sum, of_warps[other * kColumns + column]);
    }
    float* to = params.moments + static_cast<int64_t>(blockIdx.x) * 3 * out_channels + column;
    to[0] = sum.count;
    to[out_channels] = sum.mean;
    to[2 * out_channels] = sum.squares;
  }
}

template <typename T, int kStride, int kChunks, int kThreads>
__device__ void align_conv_forward_block(const AlignConvForward& params, const ForwardTiles& tiles,
                                         const FusedMemory& memory_map, unsigned char* memory) {
  static_assert(kThreads == 8 * kLanes, "WarpPart is for eight warps");
  wait_for_previous();
  let_next_begin();
  using Part = WarpPart<kChunks>;
  const AlignConvInput& in = params.input;
  const auto images = static_cast<int>(in.images);
  const int image_pixels = tiles.out_height * tiles.out_width;
  const int channels = tiles.channels;
  const auto out_channels = static_cast<int>(params.out_channels);
  const auto valid = static_cast<int>(in.valid_images());
  const int stride = memory_map.stride;
  T* weights = reinterpret_cast<T*>(memory);
  T* left = reinterpret_cast<T*>(memory + memory_map.left);
  T* staged = reinterpret_cast<T*>(memory + memory_map.staged);
  T* taps = reinterpret_cast<T*>(memory + memory_map.taps);
  int* places = reinterpret_cast<int*>(memory + memory_map.places);

  load_pointwise<T, kChunks, kThreads>(params, weights, stride);

  LaneMoments<T, Part::kLaneColumns> moments = {};
  for (int tile = blockIdx.x; tile < tiles.total; tile += static_cast<int>(gridDim.x)) {
    const TileAt at = TileAt::of(tiles, tile);
    for (int first_channel = 0; first_channel < channels; first_channel += kSlice) {
      if (channels > kSlice || tile == static_cast<int>(blockIdx.x)) {
        load_taps<T, kThreads>(in, first_channel, taps);
      }
      load_input_tile<T, kStride, kThreads>(in, valid, tiles, at, first_channel, staged);
      __syncthreads();
      if (first_channel == 0) {  // nobody is at the tile before any more
#pragma unroll 1
        for (int row = threadIdx.x; row < kTilePixels; row += kThreads) {
          const int pixel = pixel_of_row(tiles, at, images, row);
          places[row] = pixel < 0 ? -1 : pixel * out_channels;
        }
      }
      const int channel = first_channel + static_cast<int>(threadIdx.x) % kLanes * 2;
      if (channel < channels) {
        T* map = static_cast<T*>(params.map);
        if (map != nullptr) {
          map += static_cast<int64_t>(at.image) * (image_pixels * channels) + channel;
        }
        convolve_tile<T, kStride, kThreads, true>(tiles, at, images, staged, taps, left + channel, stride, map);
      }
      __syncthreads();
    }
    const Part part = Part::of_warp();
    if (part.first_column < out_channels) {
      float d[Part::kRowTiles][Part::kColumnTiles][4] = {};
      multiply_part(part, left, weights, stride, channels, d);
      if (part.column() < out_channels) {
        const int y_size = image_pixels * out_channels;
        T* y = whole(static_cast<T*>(params.y) + static_cast<int64_t>(at.image) * y_size + part.column());
        const int counted = valid > at.image ? smaller(valid - at.image, tiles.images) * y_size : 0;
        store_part(part, d, places, y, counted, moments);
      }
    }
  }
  // Orders no access to memory: tells the compiler that the lanes are together, else it makes a second way,
  // for lanes that are apart, of each shuffle.
  __syncwarp();
  leave_moments<T, Part, kThreads>(params, Part::of_warp(), moments, reinterpret_cast<Moments*>(staged));
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
  wait_for_previous();
  let_next_begin();
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
