// Kernel bodies of batch norm with add, ReLU and pool; tests/kernels compiles them for the CPU too.
#pragma once

#include "api/batch_norm_pool.h"
#include "cuda/batch_norm_act_backward.cuh"
#include "cuda/norm_pool.cuh"

namespace mf::cuda {

constexpr int kPooledGroups = 16;                     // groups of channels that lie side by side in a warp
constexpr int kPooledLanes = kLanes / kPooledGroups;  // of a warp that share an image's pixels

template <typename T>
constexpr int kPooledBatch = sizeof(T) == 2 ? 4 : 2;  // pixels whose loads a thread starts before it waits

// A thread's place: blockIdx.x is the image, blockIdx.y a warp's channels for each of the block's warps.
struct PooledThread {
  int64_t channel;  // the first of kGroup; it may lie behind the last
  int lane;         // of those that share the pixels

  __device__ static PooledThread here() {
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = static_cast<int>(blockIdx.y * (blockDim.x / kLanes)) + thread / kLanes;
    return {(static_cast<int64_t>(warp) * kPooledGroups + thread % kPooledGroups) * kGroup,
            thread % kLanes / kPooledGroups};
  }
};

// The first element of the thread's channels in its image.
__device__ inline int64_t image_start(const MapShape& shape, const PooledThread& own) {
  return blockIdx.x * shape.pixels_per_image * shape.channels + own.channel;
}

// Whether the thread's image is not padding.
__device__ inline bool is_valid_image(const MapShape& shape) {
  return blockIdx.x * shape.pixels_per_image < shape.valid_pixels();
}

template <typename T>
__device__ void batch_norm_pool_block(const BatchNormPoolForward& params) {
  constexpr int kBatch = kPooledBatch<T>;
  using Vector = Vec<T, kGroup>;
  enum Field : int { kTotal, kCount, kDeviation, kFields };
  wait_for_previous();
  const int64_t channels = params.shape.channels;
  const PooledThread own = PooledThread::here();
  const bool has_channels = own.channel < channels;
  const bool keeps = params.mask != nullptr;
  float sums[kFields][kGroup] = {};
  const int64_t start = image_start(params.shape, own);
  const int pixels = static_cast<int>(params.shape.pixels_per_image);
  const auto keep = [&](int pixel, unsigned bits) {
    if (keeps) {
      params.mask[(start + pixel * channels) / kGroup] = static_cast<uint8_t>(bits);
    }
  };
  if (has_channels && !is_valid_image(params.shape)) {
    for (int pixel = own.lane; pixel < pixels; pixel += kPooledLanes) {
      keep(pixel, 0);
    }
  } else if (has_channels) {
    const ChannelNorm<> norm = ChannelNorm<>::of(params.state, channels, own.channel);
    const T* x = static_cast<const T*>(params.x) + start;
    const T* residual = static_cast<const T*>(params.residual) + start;
    in_batches<kBatch>(own.lane, pixels, kPooledLanes, [&](int pixel, int step, int count, auto is_full) {
      constexpr int kMost = kMostOf<kBatch, decltype(is_full)>;
      Vector words[kMost], added[kMost];
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (is_full || j < count) {
          words[j] = Vector::load(x + (pixel + j * step) * channels);
          added[j] = Vector::load(residual + (pixel + j * step) * channels);
        }
      }
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (!is_full && j >= count) {
          break;
        }
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const float value = words[j][i];
          const float z = norm.normalised(value, i) + added[j][i];
          const bool passed = passes(z);
          bits = passed ? bits | 1u << i : bits;
          sums[kTotal][i] += passed ? z : 0.0f;
          sums[kCount][i] += passed ? 1.0f : 0.0f;
          sums[kDeviation][i] += passed ? value - norm.mean[i] : 0.0f;
        }
        keep(pixel + j * step, bits);
      }
    });
  }
  merge_lanes<kFields>(sums, kPooledGroups, [](float (&a)[kFields], const float (&b)[kFields]) {
#pragma unroll
    for (int f = 0; f < kFields; ++f) {
      a[f] += b[f];
    }
  });
  if (!has_channels || own.lane != 0) {
    return;
  }
  const float share = 1.0f / static_cast<float>(params.shape.pixels_per_image);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    sums[kTotal][i] *= share;
  }
  const int64_t at = blockIdx.x * channels + own.channel;
  Vector::pack(sums[kTotal]).store(static_cast<T*>(params.pooled) + at);
  if (keeps) {
    Vec<float, kGroup>::pack(sums[kCount]).store(params.counts + at);
    Vec<float, kGroup>::pack(sums[kDeviation]).store(params.sums + at);
  }
}

// The gradients of the norm's parameters, and what flows through its statistics; kPoolStateChannels
// channels a block. Shared memory: two floats a thread.
template <typename T>
__device__ void batch_norm_pool_sums_block(const BatchNormPoolBackward& params, float* partial) {
  wait_for_previous();
  let_next_begin();
  const MapShape& shape = params.shape;
  const int64_t images = shape.valid_pixels() / shape.pixels_per_image;
  sum_over_images(static_cast<const T*>(params.grad), params.sums, params.counts, images, shape.channels,
                  1.0f / static_cast<float>(shape.pixels_per_image), blockIdx.x, partial,
                  [&](int64_t channel, float product, float sum) {
                    finish_gradients(shape, params.norm, params.state, params.norm_grads, channel, sum, product);
                  });
}

template <typename T>
__device__ void batch_norm_pool_backward_block(const BatchNormPoolBackward& params) {
  constexpr int kBatch = kPooledBatch<T>;
  using Vector = Vec<T, kGroup>;
  const int64_t channels = params.shape.channels;
  const PooledThread own = PooledThread::here();
  const int64_t start = image_start(params.shape, own);
  const bool has_channels = own.channel < channels;
  const int pixels = has_channels ? static_cast<int>(params.shape.pixels_per_image) : 0;
  const T* x = static_cast<const T*>(params.x) + start;
  wait_for_first_pass<kBatch>(x, {own.lane, kPooledLanes}, pixels, [&](int pixel) { return pixel * channels; });
  if (!has_channels) {
    return;
  }
  T* x_grad = params.x_grad == nullptr ? nullptr : static_cast<T*>(params.x_grad) + start;
  T* residual_grad = params.residual_grad == nullptr ? nullptr : static_cast<T*>(params.residual_grad) + start;
  const auto store = [&](int pixel, const Vector& to_x, const Vector& to_residual) {
    if (x_grad != nullptr) {
      to_x.store(x_grad + pixel * channels);
    }
    if (residual_grad != nullptr) {
      to_residual.store(residual_grad + pixel * channels);
    }
  };
  if (!is_valid_image(params.shape)) {
    for (int pixel = own.lane; pixel < pixels; pixel += kPooledLanes) {
      store(pixel, {}, {});
    }
    return;
  }
  GradientLine line;
  line.load(params.state, params.norm_grads, channels, own.channel);
  const float share = 1.0f / static_cast<float>(pixels);
  float of_pixel[kGroup];
  Vector::load(static_cast<const T*>(params.grad) + blockIdx.x * channels + own.channel).unpack(of_pixel);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    of_pixel[i] *= share;
  }
  in_batches<kBatch>(own.lane, pixels, kPooledLanes, [&](int pixel, int step, int count, auto is_full) {
    constexpr int kMost = kMostOf<kBatch, decltype(is_full)>;
    Vector words[kMost];
    unsigned bits[kMost];
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (is_full || j < count) {
        words[j] = Vector::load(x + (pixel + j * step) * channels);
        bits[j] = params.mask[(start + (pixel + j * step) * channels) / kGroup];
      }
    }
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (!is_full && j >= count) {
        break;
      }
      float to_x[kGroup];
      float g[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        g[i] = (bits[j] & 1u << i) != 0 ? of_pixel[i] : 0.0f;
        to_x[i] = line.at(g[i], words[j][i], i);
      }
      store(pixel + j * step, Vector::pack(to_x), Vector::pack(g));
    }
  });
}

}  // namespace mf::cuda
