// Kernel body that applies a norm, adds a residual and takes the ReLU.
#pragma once

#include "cuda/batch_norm_act_walk.cuh"

namespace mf::cuda {

template <typename T, NormForm kForm>
__device__ void batch_norm_act_forward_block(const BatchNormActForward& params, int shift) {
  constexpr bool kResidual = kForm == NormForm::kResidual || kForm == NormForm::kTwoNorms;
  constexpr int kBatch = kResidual || sizeof(T) == 4 ? 2 : 4;
  const int64_t channels = params.shape.channels;
  const ChannelThread own = ChannelThread::of(shift, blockIdx.y);
  const int pixels = static_cast<int>(params.shape.pixels());
  const Walk walk = Walk::of(own);
  const T* x = static_cast<const T*>(params.x);
  wait_for_first_pass<kBatch>(x, walk, own.channel < channels ? pixels : 0,
                              [&](int position) { return (pixels - 1 - position) * channels + own.channel; });
  if (own.channel >= channels) {
    return;
  }
  const int valid = static_cast<int>(params.shape.valid_pixels());
  const ChannelNorm<> norms = ChannelNorm<>::of(params.state, channels, own.channel);
  ChannelNorm<> others;  // the residual's, or those before
  if constexpr (kForm == NormForm::kTwoNorms) {
    others = ChannelNorm<>::of(params.state + kNormRows * channels, channels, own.channel);
  } else if constexpr (kForm == NormForm::kPrologue) {
    others = ChannelNorm<>::of(params.prologue, channels, own.channel);
  }
  const T* residual = static_cast<const T*>(params.residual);
  T* y = static_cast<T*>(params.y);
  const bool masks = params.mask != nullptr;
  int position = walk.first;
  for (; position < pixels - valid; position += walk.step) {  // padding
    const int64_t at = (pixels - 1 - position) * channels + own.channel;
    Vec<T, kGroup>{}.store(y + at);
    if (masks) {
      params.mask[at / kGroup] = 0;
    }
  }
  in_batches<kBatch>(position, pixels, walk.step, [&](int position, int step, int count, auto is_full) {
    constexpr int kMost = kMostOf<kBatch, decltype(is_full)>;
    Vec<T, kGroup> words[kMost];
    [[maybe_unused]] Vec<T, kGroup> added[kMost];
    const int64_t first = (pixels - 1 - position) * channels + own.channel;
    const int64_t stride = step * channels;
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (is_full || j < count) {
        words[j] = Vec<T, kGroup>::load_last(x + (first - j * stride));
        if constexpr (kResidual) {
          added[j] = Vec<T, kGroup>::load_last(residual + (first - j * stride));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (!is_full && j >= count) {
        break;
      }
      float z[kGroup];
      [[maybe_unused]] float r[kGroup];
      words[j].unpack(z);
      if constexpr (kResidual) {
        added[j].unpack(r);
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if constexpr (kForm == NormForm::kPrologue) {
          z[i] = rectified(others.normalised(z[i], i));
        }
        z[i] = norms.normalised(z[i], i);
        if constexpr (kForm == NormForm::kResidual) {
          z[i] += r[i];
        } else if constexpr (kForm == NormForm::kTwoNorms) {
          z[i] += others.normalised(r[i], i);
        }
      }
      const int64_t at = first - j * stride;
      if (params.relu) {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const bool passed = passes(z[i]);
          bits = passed ? bits | 1u << i : bits;
          z[i] = passed ? z[i] : 0.0f;
        }
        if (masks) {
          params.mask[at / kGroup] = static_cast<uint8_t>(bits);
        }
      }
      Vec<T, kGroup>::pack(z).store(y + at);
    }
  });
}

}  // namespace mf::cuda
