// The sums over all pixels of align_conv's backward: what a block writes of them, float32
// [blocks, kAlignConvSums, channels] (nine weights, then the prologue's shift and scale), or for the
// pointwise weights [blocks, channels, in_channels]; and their total by a second launch, in a fixed order.
#pragma once

#include "cuda/align_conv_gather.cuh"

namespace mf::cuda {

// The gradients of a prologue's shift and scale, in two channels.
struct PrologueSums {
  float2 shift, scale;
};

// Writes a block's sums for the prologue, in the warp's eight channels: behind those of the taps.
__device__ inline void write_partial_prologue(const PrologueSums& sums, float* to, int64_t channels) {
  const float2 shift = sum_of_quads(sums.shift);
  const float2 scale = sum_of_quads(sums.scale);
  if (quad_of_lane() == 0) {
    store_pair(to + kTapCount * channels + channel_of_lane(), shift);
    store_pair(to + (kTapCount + 1) * channels + channel_of_lane(), scale);
  }
}

// Adds up the blocks' parts, `step` apart: the warps share them. Lane l of warp 0 gets the sum of the
// numbers at `from`, which is that lane's. memory: float [kThreads]
template <int kThreads>
__device__ float sum_of_parts(const float* from, int64_t step, int parts, unsigned char* memory) {
  constexpr int kWarps = kThreads / kLanes;
  auto* of_warp = reinterpret_cast<float*>(memory);  // [kWarps][kLanes]
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  float sum = 0.0f;
#pragma unroll 8  // loads under way at once
  for (int part = warp; part < parts; part += kWarps) {
    sum += from[part * step];
  }
  of_warp[threadIdx.x] = sum;
  __syncthreads();
  if (warp == 0) {
    for (int other = 1; other < kWarps; ++other) {
      sum += of_warp[other * kLanes + lane];
    }
  }
  return sum;
}

// The gradient of the pointwise weights, a lane a weight.
template <int kThreads>
__device__ void align_conv_weights_block(const AlignConvGradY& params, int parts, unsigned char* memory) {
  const int64_t weights = params.channels * params.in_channels;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x % kLanes;
  wait_for_previous();
  let_next_begin();
  const float sum = sum_of_parts<kThreads>(params.sums + i, weights, i < weights ? parts : 0, memory);
  if (threadIdx.x < kLanes && i < weights) {
    store(params.into, i, sum);
  }
}

// The gradients of depthwise weights and prologue, a lane a channel.
template <int kThreads>
__device__ void align_conv_sums_block(const AlignConvBackward& params, int parts, unsigned char* memory) {
  const int64_t channels = params.input.channels;
  const int which = static_cast<int>(blockIdx.x) % kAlignConvSums;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) / kAlignConvSums * kLanes + threadIdx.x % kLanes;
  wait_for_previous();
  let_next_begin();
  const float sum = sum_of_parts<kThreads>(params.sums + which * channels + channel, kAlignConvSums * channels,
                                           channel < channels ? parts : 0, memory);
  if (threadIdx.x >= kLanes || channel >= channels) {
    return;
  }
  if (which < kTapCount) {
    if (params.depthwise.data != nullptr) {
      store(params.depthwise, channel * kTapCount + which, sum);
    }
  } else if (params.prologue != nullptr) {
    if (which == kTapCount) {
      params.prologue[kShift * channels + channel] = sum;
      params.prologue[kMean * channels + channel] = -params.input.prologue[kScale * channels + channel] * sum;
    } else {
      params.prologue[kScale * channels + channel] = sum;
      params.prologue[kInverseStd * channels + channel] = 0.0f;
    }
  }
}

}  // namespace mf::cuda
