// The depthwise convolution of align_conv: m[h, w, c] = sum over taps (i, j) of
// x'[stride h + i - 1, stride w + j - 1, c] depthwise[c, 3 i + j], from a tile of x' in shared memory.
// A lane takes two channels, a warp 2 x kStrip output pixels at a time, whose inputs overlap.
#pragma once

#include "cuda/align_conv_load.cuh"
#include "cuda/launch.cuh"

namespace mf::cuda {

__device__ inline void add_product(float2& sum, float2 a, float2 b) {
  sum.x += a.x * b.x;
  sum.y += a.y * b.y;
}

// The weights of this lane's two channels, as they are stored: half the registers.
template <typename T>
struct Taps {
  Vec<T, 2> tap[kTapCount];

  __device__ static Taps load(const T* taps) {
    Taps of_lane;
#pragma unroll
    for (int i = 0; i < kTapCount; ++i) {
      of_lane.tap[i] = Vec<T, 2>::load(taps + i * kSlice + threadIdx.x % kLanes * 2);
    }
    return of_lane;
  }
};

// Two rows of kStrip neighbouring outputs, of two channels; `input` is what the first output takes at
// its first tap.
template <typename T, int kStride>
__device__ void convolve_strip(const T* input, int columns, const Taps<T>& taps, float2 (&sum)[2][kStrip]) {
#pragma unroll
  for (int row = 0; row < kStride + 3; ++row) {
#pragma unroll
    for (int column = 0; column < (kStrip - 1) * kStride + 3; ++column) {
      const float2 x = pair_at(input + (row * columns + column) * kSlice);
#pragma unroll
      for (int p = 0; p < 2 * kStrip; ++p) {
        const int i = row - kStride * (p / kStrip);
        const int j = column - kStride * (p % kStrip);
        if (i >= 0 && i < 3 && j >= 0 && j < 3) {
          add_product(sum[p / kStrip][p % kStrip], x, taps.tap[i * 3 + j].pair(0));
        }
      }
    }
  }
}

// Computes and stores a tile's convolution for the two channels of this lane. With kOperand output i
// of the tile goes to operand + i * stride; where map is not null it goes to its pixel of the map,
// which begins with the tile's first image.
template <typename T, int kStride, int kThreads, bool kOperand>
__device__ void convolve_tile(const ForwardTiles& tiles, const TileAt& at, int images, const T* staged, const T* taps,
                              T* operand, int stride, T* map) {
  const auto of_lane = Taps<T>::load(taps);
  const int step = tiles.channels;
  const int rows = std::min(tiles.height, tiles.out_height - at.row);
  const int columns = std::min(tiles.width, tiles.out_width - at.column);
  const bool has_map = map != nullptr;
  map = opaque_global(map);
  const InputRegion& region = tiles.region;
#pragma unroll 1
  for (int strip = threadIdx.x / kLanes;
       strip < std::min(tiles.images, images - at.image) * tiles.strips_down * tiles.strips_across;
       strip += kThreads / kLanes) {
    const int line = tiles.by_strips_across.quotient(strip);
    const int image = tiles.by_strips_down.quotient(line);
    const int row = 2 * (line - image * tiles.strips_down);
    const int column = kStrip * (strip - line * tiles.strips_across);
    float2 sum[2][kStrip] = {};
    convolve_strip<T, kStride>(
        staged + ((image * region.rows + row * kStride) * region.columns + column * kStride) * kSlice +
            threadIdx.x % kLanes * 2,
        region.columns, of_lane, sum);
    T* to_operand = operand + ((image * tiles.height + row) * tiles.width + column) * stride;
    int to_map = ((image * tiles.out_height + at.row + row) * tiles.out_width + at.column + column) * step;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
#pragma unroll
      for (int q = 0; q < kStrip; ++q) {
        const bool exists = row + p < rows && column + q < columns;
        Vec<T, 2> pair;
        pair.set_pair(0, sum[p][q]);
        if (kOperand && exists) {
          pair.store(to_operand);
        }
        if (exists && has_map) {
          pair.store(map + to_map);
        }
        to_operand += stride;
        to_map += step;
      }
      to_operand += (tiles.width - kStrip) * stride;
      to_map += (tiles.out_width - kStrip) * step;
    }
  }
}

// The depthwise convolution alone, for maps whose product with the pointwise weights is cuBLAS's.
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

}  // namespace mf::cuda
