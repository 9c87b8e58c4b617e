// The sums that align_conv's backward keeps over all pixels: what a block leaves of them, and their
// total by a second launch.
#pragma once

#include "cuda/align_conv_tile.cuh"

namespace mf::cuda {

// Adds up the block's warps. of_warp: [kWarps][kAlignConvSums][kLanes]
template <int kThreads>
__device__ void leave_sums(const AlignConvBackward& params, const float2 (&sums)[kAlignConvSums], int first_channel,
                           float2* of_warp) {
  constexpr int kWarps = kThreads / kLanes;
#pragma unroll
  for (int which = 0; which < kAlignConvSums; ++which) {
    of_warp[(threadIdx.x / kLanes * kAlignConvSums + which) * kLanes + threadIdx.x % kLanes] = sums[which];
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < kAlignConvSums * kLanes; i += kThreads) {
    float2 sum = of_warp[i];
    for (int other = 1; other < kWarps; ++other) {
      const float2 more = of_warp[other * kAlignConvSums * kLanes + i];
      sum = {sum.x + more.x, sum.y + more.y};
    }
    const int64_t to = first_channel + i % kLanes * 2;
    if (to < params.input.channels) {
      const int64_t part = static_cast<int64_t>(blockIdx.x) / slices_of(params.input.channels);
      store_pair(params.sums + (part * kAlignConvSums + i / kLanes) * params.input.channels + to, sum);
    }
  }
}

// Adds up what the blocks left: a lane a channel, the warps share the parts.
template <int kThreads>
__device__ void align_conv_sums_block(const AlignConvBackward& params, int parts, unsigned char* memory) {
  constexpr int kWarps = kThreads / kLanes;
  auto* of_warp = reinterpret_cast<float*>(memory);  // [kWarps][kLanes]
  const int64_t channels = params.input.channels;
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int which = static_cast<int>(blockIdx.x) % kAlignConvSums;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) / kAlignConvSums * kLanes + lane;
  const int parts_of_lane = channel < channels ? parts : 0;
  float sum = 0.0f;
#pragma unroll 8  // loads under way at once
  for (int part = warp; part < parts_of_lane; part += kWarps) {
    sum += params.sums[(static_cast<int64_t>(part) * kAlignConvSums + which) * channels + channel];
  }
  of_warp[warp * kLanes + lane] = sum;
  __syncthreads();
  if (warp != 0 || channel >= channels) {
    return;
  }
  for (int other = 1; other < kWarps; ++other) {
    sum += of_warp[other * kLanes + lane];
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
