// The backward of align_conv through the norm's statistics and the pointwise convolution y = m W^T, with
// W [channels, in_channels]:
//   total = dy + slope (y - mean) + offset      [pixels, channels], slope and offset from the state's gradient,
//   dm = total W                                [pixels, in_channels], for up to 128 channels, in 16 bits,
//   dW = total^T m                              [channels, in_channels], for up to 64 of m.
// align_conv_grad_y_block computes the first alone; cuBLAS then multiplies. align_conv_product_block computes
// the first two, and with kWeights all three without writing `total`: a block takes 64 pixels at a time,
// writes their total gradient to shared memory as an operand of both products, and keeps its part of dW in
// registers over all its tiles, which a second launch adds up (align_conv_sums.cuh).
#pragma once

#include "cuda/align_conv_tile.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/vec.cuh"

namespace mf::cuda {

// The part of y's gradient that flows through the norm's state, for a thread's eight channels.
struct StateGradient {
  float2 mean[4], slope[4], offset[4];

  // For the channels from `channel` on. With `writes` it also writes the gradients of the norm's
  // weight and bias.
  __device__ static StateGradient of(const AlignConvGradY& params, int64_t channel, int64_t valid_pixels, bool writes) {
    StateGradient result = {};
    if (params.grad_state == nullptr) {
      return result;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t c = channel + i;
      const NormBackward back =
          norm_backward(params.norm, params.state, params.grad_state, static_cast<float>(valid_pixels), params.channels,
                        c, params.mean_rest != nullptr ? params.mean_rest[c] : 0.0f);
      (i % 2 == 0 ? result.mean[i / 2].x : result.mean[i / 2].y) = params.state[kMean * params.channels + c];
      (i % 2 == 0 ? result.slope[i / 2].x : result.slope[i / 2].y) = back.slope;
      (i % 2 == 0 ? result.offset[i / 2].x : result.offset[i / 2].y) = back.offset;
      if (writes && params.weight != nullptr) {
        params.weight[c] = back.weight;
      }
      if (writes && params.bias != nullptr) {
        params.bias[c] = back.bias;
      }
    }
    return result;
  }

  // The gradient in all of eight channels from element `at` on, which are no padding.
  template <typename T>
  __device__ Vec<T, 8> total(const AlignConvGradY& params, int64_t at) const {
    Vec<T, 8> sum = params.grad != nullptr ? Vec<T, 8>::load(static_cast<const T*>(params.grad) + at) : Vec<T, 8>{};
    if (params.grad_state != nullptr) {
      const Vec<T, 8> y = Vec<T, 8>::load(static_cast<const T*>(params.y) + at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 grad = sum.pair(i);
        const float2 value = y.pair(i);
        sum.set_pair(i, {grad.x + (slope[i].x * (value.x - mean[i].x) + offset[i].x),
                         grad.y + (slope[i].y * (value.y - mean[i].y) + offset[i].y)});
      }
    }
    return sum;
  }
};

__device__ inline int64_t valid_pixels_of(const AlignConvGradY& params) {
  const int64_t count = params.valid_pointer != nullptr ? *params.valid_pointer : params.valid;
  return (count < 0 ? 0 : count < params.images ? count : params.images) * params.pixels;
}

// A thread keeps to eight channels.
template <typename T, int kThreads>
__device__ void align_conv_grad_y_block(const AlignConvGradY& params) {
  wait_for_previous();
  let_next_begin();
  const auto vectors = static_cast<int>(params.channels / 8);
  const int rows = kThreads / vectors;  // pixels of a block at a time
  const int64_t channel = threadIdx.x % vectors * 8;
  const int64_t valid = valid_pixels_of(params);
  if (static_cast<int>(threadIdx.x) >= rows * vectors) {
    return;
  }
  const auto gradient =
      StateGradient::of(params, channel, valid, blockIdx.x == 0 && static_cast<int>(threadIdx.x) < vectors);
  const int64_t step = static_cast<int64_t>(gridDim.x) * rows;
  for (int64_t pixel = static_cast<int64_t>(blockIdx.x) * rows + threadIdx.x / vectors;
       pixel < params.images * params.pixels; pixel += step) {
    const int64_t at = pixel * params.channels + channel;
    const Vec<T, 8> total = pixel < valid ? gradient.template total<T>(params, at) : Vec<T, 8>{};
    total.store(static_cast<T*>(params.total) + at);
  }
}

// Shared memory of align_conv_product_block, in bytes from its beginning, where the pointwise
// weights [channels][right_stride] lie.
struct ProductMemory {
  int left_stride, right_stride;  // elements from row to row
  size_t left;                    // [kTilePixels][left_stride]: the gradient in all
  size_t product;                 // [kTilePixels][kSlice + kPadding]
  size_t kept;                    // [kTilePixels][right_stride]: the depthwise convolution's result
  size_t bytes;

  MF_HD static ProductMemory of(int64_t channels, int64_t in_channels, int element, bool has_kept) {
    ProductMemory memory{};
    memory.left_stride = static_cast<int>(channels) + kPadding;
    memory.right_stride = static_cast<int>(round_up(in_channels, kSlice)) + kPadding;
    memory.left = static_cast<size_t>(channels) * memory.right_stride * element;
    memory.product = memory.left + size_t{kTilePixels} * memory.left_stride * element;
    memory.kept = memory.product + size_t{kTilePixels} * (kSlice + kPadding) * element;
    memory.bytes = memory.kept + (has_kept ? size_t{kTilePixels} * memory.right_stride * element : 0);
    return memory;
  }
};

// A warp's part of the pointwise weights' gradient, summed over the tiles of a block: units of 16
// rows (channels of y) and 32 columns, every kWarps-th from its number on.
template <int kThreads>
struct WeightSums {
  static constexpr int kWarps = kThreads / kLanes;
  static constexpr int kUnits = 128 / 16 * (kSlice / 32) / kWarps;  // of a warp
  float sum[kUnits][4][4];

  // Calls f(which of the warp's units, its first row, its first column).
  template <typename Function>
  __device__ static void each_unit(int channels, const Function& f) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = static_cast<int>(threadIdx.x) / kLanes + u * kWarps;
      if (unit < channels / 16 * (kSlice / 32)) {
        f(u, unit / 2 * 16, unit % 2 * 32);
      }
    }
  }

  // Adds a tile: left [kTilePixels][channels], transposed, times kept [kTilePixels][kSlice].
  template <typename T>
  __device__ void add(const T* left, int left_stride, const T* kept, int stride, int channels) {
    const int lane = threadIdx.x % kLanes;
    each_unit(channels, [&](int u, int row, int column) {
#pragma unroll 1
      for (int k = 0; k < kTilePixels; k += 16) {
        uint32_t a[4];
        load_transposed(a, left + (k + lane / 16 * 8 + lane % 8) * left_stride + row + lane / 8 % 2 * 8);
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          uint32_t b[4];
          load_transposed(b, kept + (k + lane % 16) * stride + column + n * 8 + lane / 16 * 8);
          mma_16x8x16(sum[u][n], a, {b[0], b[1]});
          mma_16x8x16(sum[u][n + 1], a, {b[2], b[3]});
        }
      }
    });
  }

  // Writes what the block has: [channels][in_channels]
  __device__ void write_partial(float* to, int channels, int in_channels) const {
    const int lane = threadIdx.x % kLanes;
    each_unit(channels, [&](int u, int row, int column) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int at = column + n * 8 + lane % 4 * 2;
        if (at < in_channels) {
          float* own = to + (row + lane / 4) * in_channels + at;
          store_pair(own, {sum[u][n][0], sum[u][n][1]});
          store_pair(own + 8 * in_channels, {sum[u][n][2], sum[u][n][3]});
        }
      }
    });
  }
};

// product [kTilePixels][kSlice] = left [kTilePixels][depth] times kSlice columns of weights [depth][]: a
// warp takes 16 pixels and 32 channels at a time. Rows are the strides apart.
template <typename T, int kThreads>
__device__ void multiply_chunk(const T* left, int left_stride, const T* weights, int stride, int depth, T* product) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll 1
  for (int unit = threadIdx.x / kLanes; unit < 8; unit += kThreads / kLanes) {
    const int first_row = unit % 4 * 16;
    const int first_column = unit / 4 * 32;
    float d[4][4] = {};
#pragma unroll 1
    for (int k = 0; k < depth; k += 16) {
      uint32_t a[4];
      load_rows(a, left + (first_row + lane % 16) * left_stride + k + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        uint32_t b[4];
        load_transposed(b, weights + (k + lane % 16) * stride + first_column + n * 8 + lane / 16 * 8);
        mma_16x8x16(d[n], a, {b[0], b[1]});
        mma_16x8x16(d[n + 1], a, {b[2], b[3]});
      }
    }
    T* to = product + (first_row + lane / 4) * (kSlice + kPadding) + first_column + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      store_pair(to + n * 8, {d[n][0], d[n][1]});
      store_pair(to + n * 8 + 8 * (kSlice + kPadding), {d[n][2], d[n][3]});
    }
  }
}

// The gradient of y and its product with the pointwise weights, 64 pixels at a time; with kWeights
// also what the block has of these weights' gradient.
template <typename T, int kThreads, bool kWeights>
__device__ void align_conv_product_block(const AlignConvGradY& params, const ProductMemory& memory_map,
                                         unsigned char* memory) {
  wait_for_previous();
  let_next_begin();
  const auto channels = static_cast<int>(params.channels);
  const auto in_channels = static_cast<int>(params.in_channels);
  const int vectors = channels / 8;
  const int rows = kThreads / vectors;
  const int row_of_thread = static_cast<int>(threadIdx.x) / vectors;
  const int channel = static_cast<int>(threadIdx.x) % vectors * 8;
  const int64_t valid = valid_pixels_of(params);
  const int64_t pixels = params.images * params.pixels;
  T* weights = reinterpret_cast<T*>(memory);
  T* left = reinterpret_cast<T*>(memory + memory_map.left);
  T* product = reinterpret_cast<T*>(memory + memory_map.product);
  T* kept = reinterpret_cast<T*>(memory + memory_map.kept);
  const int in_vectors = in_channels / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < channels * in_vectors; i += kThreads) {
    copy_16_bytes(weights + i / in_vectors * memory_map.right_stride + i % in_vectors * 8,
                  static_cast<const T*>(params.pointwise) + i * 8);
  }
  wait_for_copies();
  const bool has_rows = row_of_thread < rows;  // of the threads that are left over none takes a channel
  StateGradient gradient = {};
  if (has_rows) {
    gradient = StateGradient::of(params, channel, valid, blockIdx.x == 0 && row_of_thread == 0);
  }
  WeightSums<kThreads> of_weights = {};
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kTilePixels; first < pixels;
       first += static_cast<int64_t>(gridDim.x) * kTilePixels) {
    if constexpr (kWeights) {
      const T* from = static_cast<const T*>(params.kept) + first * in_channels;
#pragma unroll 1
      for (int i = threadIdx.x; i < kTilePixels * in_vectors; i += kThreads) {
        const int row = i / in_vectors;
        copy_16_bytes_or_zeros(kept + row * memory_map.right_stride + (i - row * in_vectors) * 8,
                               first + row < valid ? from + i * 8 : from, first + row < valid);
      }
    }
#pragma unroll 2
    for (int row = has_rows ? row_of_thread : kTilePixels; row < kTilePixels; row += rows) {
      const int64_t at = (first + row) * channels + channel;
      const Vec<T, 8> total = first + row < valid ? gradient.template total<T>(params, at) : Vec<T, 8>{};
      total.store(left + row * memory_map.left_stride + channel);
      if (!kWeights && first + row < pixels) {
        total.store(static_cast<T*>(params.total) + at);
      }
    }
    if constexpr (kWeights) {
      wait_for_copies();
    }
    for (int column = 0; column < in_channels; column += kSlice) {
      __syncthreads();
      if constexpr (kWeights) {
        of_weights.add(left, memory_map.left_stride, kept, memory_map.right_stride, channels);
      }
      multiply_chunk<T, kThreads>(left, memory_map.left_stride, weights + column, memory_map.right_stride, channels,
                                  product);
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < kTilePixels * kVectors; i += kThreads) {
        const int64_t pixel = first + i / kVectors;
        const int to = column + i % kVectors * 8;
        if (pixel < pixels && to < in_channels) {
          Vec<T, 8>::load(product + i / kVectors * (kSlice + kPadding) + i % kVectors * 8)
              .store(static_cast<T*>(params.map) + pixel * in_channels + to);
        }
      }
    }
  }
  if constexpr (kWeights) {
    of_weights.write_partial(params.sums + static_cast<int64_t>(blockIdx.x) * channels * in_channels, channels,
                             in_channels);
  }
}

}  // namespace mf::cuda
