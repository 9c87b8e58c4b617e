// The sums that align_conv's backward keeps over all pixels: what a block leaves of them, and their
// total by a second launch.
#pragma once

#include "cuda/align_conv_gather.cuh"

namespace mf::cuda {

// Leaves a block's sums for the prologue, of the warp's eight channels: behind those of the taps.
__device__ inline void leave_prologue(float2 shift, float2 scale, float* to, int64_t channels) {
  shift = sum_of_quads(shift);
  scale = sum_of_quads(scale);
  if (quad_of_lane() == 0) {
    store_pair(to + kTapCount * channels + channel_of_lane(), shift);
    store_pair(to + (kTapCount + 1) * channels + channel_of_lane(), scale);
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
  wait_for_previous();
  let_next_begin();
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
