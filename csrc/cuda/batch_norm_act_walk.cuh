// What the kernels of batch norm with add and ReLU share; tests/kernels runs them on the CPU too. The
// passes and their algebra: api/batch_norm_act.h.
//
// These kernels are bound by memory bandwidth. A thread owns eight channels and every so many
// pixels, reads them as words of 16 bytes, several at once, and keeps what it needs of the norms in
// registers. Each pass walks the map in the direction opposite to the pass before it, so that the
// elements touched last are still in the L2 cache: statistics forward in memory, application
// backward, sums forward, gradients backward.
#pragma once

#include <type_traits>

#include "api/batch_norm_act.h"
#include "core/relu.h"
#include "cuda/channel_sums.cuh"
#include "cuda/launch.cuh"
#include "cuda/vec.cuh"

namespace mf::cuda {

// What is computed before the norm, or added after it.
enum class NormForm { kPlain, kResidual, kTwoNorms, kPrologue };

// A norm's state for the thread's channels.
template <int kCount = kGroup>
struct ChannelNorm {
  float mean[kCount], scale[kCount], shift[kCount];

  __device__ static ChannelNorm of(const float* state, int64_t channels, int64_t channel) {
    ChannelNorm norm;
    load_floats(state + kMean * channels + channel, norm.mean);
    load_floats(state + kScale * channels + channel, norm.scale);
    load_floats(state + kShift * channels + channel, norm.shift);
    return norm;
  }
  __device__ float normalised(float x, int i) const { return scale[i] * (x - mean[i]) + shift[i]; }
};

// A thread's pixels in the order of a pass, which counts them from its own end: first, first +
// step, ... Numbers of pixels fit into 30 bits (the launchers check it), so that steps beyond the
// end do not overflow; elements are counted in 64.
struct Walk {
  int first, step;

  __device__ static Walk of(const ChannelThread& own) {
    return {static_cast<int>(blockIdx.x) * own.rows + own.row, static_cast<int>(gridDim.x) * own.rows};
  }
};

// The second pass' wait for the first, in which it brings what it reads first into the L2 cache: its
// first positions, `at` elements from the map's begin. Then lets the next kernel begin.
template <int kBatch, typename T, typename At>
__device__ void wait_for_first_pass(const T* map, const Walk& walk, int end, const At& at) {
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int position = walk.first + j * walk.step;
    if (position < end) {
      prefetch_to_l2(map + at(position));
    }
  }
  wait_for_previous();
  let_next_begin();
}

// The most positions for which in_batches calls its work so.
template <int kBatch, typename IsFull>
constexpr int kMostOf = IsFull::value ? kBatch : kBatch - 1;

// Calls work(position, step, count, is_full) for kBatch positions at a time, the last time for
// fewer: is_full says at compile time that count is kBatch, so that nothing is asked of every
// pixel. A batch is what a thread loads before it uses the first of it.
template <int kBatch, typename Work>
__device__ void in_batches(int position, int end, int step, const Work& work) {
  for (; position + (kBatch - 1) * step < end; position += kBatch * step) {
    work(position, step, kBatch, std::true_type());
  }
  if constexpr (kBatch > 1) {
    if (position < end) {
      work(position, step, 1 + (end - 1 - position) / step, std::false_type());
    }
  }
}

}  // namespace mf::cuda
