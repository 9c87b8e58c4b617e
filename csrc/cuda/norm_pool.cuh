// Kernel bodies of the pooled norm; tests/kernels compiles them for the CPU too.
//
// The maps are small (16 pixels of 512 channels for an image) and read once: forward gives each
// thread one vector of channels of one image and all its pixels, so that nothing has to be shared.
// Backward's first blocks sum the state's gradient over the images, in a fixed order; the others
// write the map's gradient.
#pragma once

#include "api/norm_pool.h"
#include "cuda/batch_norm_act_walk.cuh"
#include "cuda/vec.cuh"

namespace mf::cuda {

template <typename T>
constexpr int kPoolVector = 16 / sizeof(T);  // channels that a thread moves at a time
constexpr int kPoolThreads = 64;             // of a forward block: vectors of channels of one image
constexpr int kPoolGradThreads = 256;        // of a backward block
constexpr int kPoolGradVectors =
    32;  // vectors of channels of one image in a backward block; its other threads take other pixels
constexpr int kPoolImages = 6;  // of a backward block's thread, whose loads it starts before it waits for the first
constexpr int kPoolStateChannels =
    8;  // channels of a block that sums the state's gradient; its other threads take other images

// Calls work for the vectors of an image's pixels in their order; a thread waits for eight of them at a
// time.
template <typename T, typename Work>
__device__ void in_turn(const T* x, int64_t channels, int64_t pixels, const Work& work) {
  constexpr int kAhead = 8;
  constexpr int kVector = kPoolVector<T>;
  int64_t pixel = 0;
  for (; pixel + kAhead <= pixels; pixel += kAhead) {
    Vec<T, kVector> words[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      words[a] = Vec<T, kVector>::load(x + (pixel + a) * channels);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      work(words[a]);
    }
  }
  for (; pixel < pixels; ++pixel) {
    work(Vec<T, kVector>::load(x + pixel * channels));
  }
}

// blockIdx.x: image; blockIdx.y: kPoolThreads vectors of channels.
template <typename T>
__device__ void norm_pool_block(const NormPoolForward& params) {
  constexpr int kVector = kPoolVector<T>;
  using Vector = Vec<T, kVector>;
  const NormPoolInput& in = params.input;
  const int64_t channel = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kVector;
  if (channel >= in.channels) {
    return;
  }
  const auto image = static_cast<int64_t>(blockIdx.x);
  const int64_t pixels = image < in.valid_images() ? in.pixels : 0;
  const T* x = static_cast<const T*>(in.x.data) + image * in.pixels * in.channels + channel;
  float total[kVector] = {}, sum[kVector] = {}, count[kVector] = {};
  if (in.state == nullptr) {
    in_turn(x, in.channels, pixels, [&](const Vector& values) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        total[k] += values[k];
      }
    });
  } else {
    const auto norm = ChannelNorm<kVector>::of(in.state, in.channels, channel);
    in_turn(x, in.channels, pixels, [&](const Vector& values) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const PooledElement element = pooled_element(values[k], norm.mean[k], norm.scale[k], norm.shift[k]);
        total[k] += element.value;
        sum[k] += element.deviation;
        count[k] += element.kept;
      }
    });
  }
  const float share = 1.0f / static_cast<float>(in.pixels);
  const int64_t at = image * in.channels + channel;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    total[k] *= share;
  }
  Vector::pack(total).store(static_cast<T*>(params.pooled.data) + at);
  if (in.state != nullptr && params.counts != nullptr) {
    Vec<float, kVector>::pack(count).store(params.counts + at);
    Vec<float, kVector>::pack(sum).store(params.sums + at);
  }
}

// Calls finish(channel, sum g sums, sum g counts), with g the gradient of a pixel's share, for every
// channel of block `block` of those that sum over the images. Shared memory: two floats a thread.
template <typename T, typename Finish>
__device__ void sum_over_images(const T* grad, const float* sums, const float* counts, int64_t images, int64_t channels,
                                float share, int64_t block, float* partial, const Finish& finish) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lanes = static_cast<int>(blockDim.x) / kPoolStateChannels;
  const int64_t channel = block * kPoolStateChannels + thread % kPoolStateChannels;
  float dscale = 0.0f;
  float dshift = 0.0f;
  const int end = channel < channels ? static_cast<int>(images) : 0;
  in_batches<kPoolImages>(thread / kPoolStateChannels, end, lanes, [&](int image, int step, int count, auto is_full) {
    constexpr int kMost = kMostOf<kPoolImages, decltype(is_full)>;
    float g[kMost], deviations[kMost], kept[kMost];
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (is_full || j < count) {
        const int64_t at = (image + j * step) * channels + channel;
        g[j] = to_float(grad[at]) * share;
        deviations[j] = sums[at];
        kept[j] = counts[at];
      }
    }
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (is_full || j < count) {
        dscale += g[j] * deviations[j];
        dshift += g[j] * kept[j];
      }
    }
  });
  partial[2 * thread] = dscale;
  partial[2 * thread + 1] = dshift;
  __syncthreads();
  if (thread < kPoolStateChannels && channel < channels) {
    for (int lane = 1; lane < lanes; ++lane) {
      dscale += partial[2 * (lane * kPoolStateChannels + thread)];
      dshift += partial[2 * (lane * kPoolStateChannels + thread) + 1];
    }
    finish(channel, dscale, dshift);
  }
}

// Block `block` of those that sum the state's gradient.
template <typename T>
__device__ void norm_pool_state_block(const NormPoolBackward& params, int64_t block, float* partial) {
  const NormPoolInput& in = params.input;
  sum_over_images(static_cast<const T*>(params.grad), params.sums, params.counts, in.valid_images(), in.channels,
                  1.0f / static_cast<float>(in.pixels), block, partial,
                  [&](int64_t channel, float dscale, float dshift) {
                    write_state_gradient(in.state, in.channels, channel, dshift, dscale, params.dstate);
                  });
}

// `block`: of those that write the map's gradient, all parts of an image one after another.
template <typename T>
__device__ void norm_pool_map_block(const NormPoolBackward& params, int64_t block) {
  constexpr int kVector = kPoolVector<T>;
  using Vector = Vec<T, kVector>;
  const NormPoolInput& in = params.input;
  const int64_t parts = (in.channels / kVector + kPoolGradVectors - 1) / kPoolGradVectors;
  const int64_t image = block / parts;
  const int64_t channel = (block % parts * kPoolGradVectors + threadIdx.x % kPoolGradVectors) * kVector;
  if (channel >= in.channels) {
    return;
  }
  const bool is_padding = image >= in.valid_images();
  const float share = 1.0f / static_cast<float>(in.pixels);
  float of_kept[kVector] = {};  // the gradient of a kept pixel, the same for all of them
  if (!is_padding) {
    const auto grad = Vector::load(static_cast<const T*>(params.grad) + image * in.channels + channel);
    float scale[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      scale[k] = 1.0f;
    }
    if (in.state != nullptr) {
      load_floats(in.state + kScale * in.channels + channel, scale);
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      of_kept[k] = grad[k] * share * scale[k];
    }
  }
  const int64_t start = image * in.pixels * in.channels + channel;
  const T* x = static_cast<const T*>(in.x.data) + start;
  T* dx = static_cast<T*>(params.dx.data) + start;
  const auto lane = static_cast<int64_t>(threadIdx.x / kPoolGradVectors);
  const auto lanes = static_cast<int64_t>(blockDim.x / kPoolGradVectors);
  if (in.state == nullptr || is_padding) {
    const auto same = Vector::pack(of_kept);
    for (int64_t pixel = lane; pixel < in.pixels; pixel += lanes) {
      same.store(dx + pixel * in.channels);
    }
    return;
  }
  const auto norm = ChannelNorm<kVector>::of(in.state, in.channels, channel);
#pragma unroll 2
  for (int64_t pixel = lane; pixel < in.pixels; pixel += lanes) {
    const auto values = Vector::load(x + pixel * in.channels);
    float gradient[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const PooledElement element = pooled_element(values[k], norm.mean[k], norm.scale[k], norm.shift[k]);
      gradient[k] = element.kept != 0.0f ? of_kept[k] : 0.0f;
    }
    Vector::pack(gradient).store(dx + pixel * in.channels);
  }
}

}  // namespace mf::cuda
