// Sums by channel over a map in NHWC, in one launch and in a fixed order: the last block of a
// launch adds up what all blocks found.
//
// A thread owns kGroup adjacent channels, a block up to 64 of them (a tile, blockIdx.y) and every
// so many pixels (blockIdx.x). Within a warp parts are merged by shuffles, over the warps in shared
// memory, over the blocks by the block that takes a tile's last ticket. The order depends on the
// grid alone, so that two runs agree bit for bit; nothing waits for another block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "api/channel_grid.h"
#include "cuda/warp.cuh"

namespace mf::cuda {

// A thread's place: group `group` of the tile, and every `rows`-th pixel of what the block holds,
// from `row` on.
struct ChannelThread {
  int group;
  int row;
  int rows;
  int64_t channel;  // the first of the thread's channels

  // `shift`: of ChannelGrid.
  __device__ static ChannelThread of(int shift, unsigned tile) {
    const int group = static_cast<int>(threadIdx.x) & ((1 << shift) - 1);
    return {group, static_cast<int>(threadIdx.x) >> shift, static_cast<int>(blockDim.x) >> shift,
            ((static_cast<int64_t>(tile) << shift) + group) * kGroup};
  }
};

// Bytes of shared memory that merge_channels takes.
template <int kFields>
constexpr size_t channel_sums_shared(unsigned threads) {
  return sizeof(float) * kFields * 2 * threads + 2 * sizeof(int);
}

// Merges the values of those lanes of a warp that own the same channels, every `groups`-th; the
// lower lane's result is the one that counts.
template <int kFields, typename Merge>
__device__ void merge_lanes(float (&values)[kFields][kGroup], int groups, const Merge& merge) {
  for (int bits = groups; bits < kLanes; bits *= 2) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      float own[kFields];
      float other[kFields];
#pragma unroll
      for (int f = 0; f < kFields; ++f) {
        own[f] = values[f][i];
        other[f] = __shfl_xor_sync(0xffffffffu, own[f], bits);
      }
      merge(own, other);
#pragma unroll
      for (int f = 0; f < kFields; ++f) {
        values[f][i] = own[f];
      }
    }
  }
}

// Merges `values` [kFields][kGroup] of all threads of the launch that own the same channels:
// merge(a, b) adds b to a, two arrays of kFields numbers of which zeros are neutral. finish(c,
// total) is called once for every channel c < channels, in whichever block is the tile's last. All
// threads of a block must call this, as the last thing they do; blockDim.x is a multiple of 64.
//   shift: of ChannelGrid
//   partials [tiles][blocks][kFields][kGroup << shift]: workspace
//   tickets: two a tile, zero, as they are again afterwards
template <int kFields, typename Merge, typename Finish>
__device__ void merge_channels(float (&values)[kFields][kGroup], int shift, unsigned tile, int64_t channels,
                               float* partials, uint32_t* tickets, unsigned char* shared, const Merge& merge,
                               const Finish& finish) {
  const int groups = 1 << shift;
  const int width = kGroup << shift;  // channels of the tile
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kLanes;
  const int lane = thread % kLanes;
  const int warps = static_cast<int>(blockDim.x) / kLanes;
  auto* parts = reinterpret_cast<float*>(shared);
  auto* last = reinterpret_cast<int*>(parts + kFields * 2 * blockDim.x);

  merge_lanes(values, groups, merge);
  if (lane < groups) {
#pragma unroll
    for (int f = 0; f < kFields; ++f) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        parts[(warp * kFields + f) * width + lane * kGroup + i] = values[f][i];
      }
    }
  }
  __syncthreads();

  // Each of the first two warps brings its 32 channels to the other blocks' and asks whether it is
  // the last to do so.
  if (warp < 2) {
    if (thread < width) {
      float total[kFields] = {};
      for (int w = 0; w < warps; ++w) {
        float part[kFields];
        for (int f = 0; f < kFields; ++f) {
          part[f] = parts[(w * kFields + f) * width + thread];
        }
        merge(total, part);
      }
      float* own = partials + (static_cast<int64_t>(tile) * gridDim.x + blockIdx.x) * kFields * width;
      for (int f = 0; f < kFields; ++f) {
        own[f * width + thread] = total[f];
      }
      __threadfence();
    }
    __syncwarp();
    if (lane == 0) {
      last[warp] = warp * kLanes < width && atomicInc(tickets + 2 * tile + warp, gridDim.x - 1) == gridDim.x - 1;
    }
  }
  __syncthreads();
  if (!last[0] && !last[1]) {
    return;
  }

  __threadfence();
  const int column = thread & (width - 1);
  const int part = thread / width;
  const int count = static_cast<int>(blockDim.x) / width;
  if (last[column / kLanes]) {
    const unsigned share = (gridDim.x + count - 1) / count;
    const unsigned end = (part + 1) * share < gridDim.x ? (part + 1) * share : gridDim.x;
    // Not from this processor's own cache: other blocks wrote them.
    const volatile float* from = partials + static_cast<int64_t>(tile) * gridDim.x * kFields * width + column;
    constexpr unsigned kAhead = 8;  // partial sums that a thread waits for together
    float total[kFields] = {};
    for (unsigned b = part * share; b < end; b += kAhead) {
      float other[kAhead][kFields];
#pragma unroll
      for (unsigned a = 0; a < kAhead; ++a) {
#pragma unroll
        for (int f = 0; f < kFields; ++f) {
          other[a][f] = b + a < end ? from[(static_cast<int64_t>(b + a) * kFields + f) * width] : 0.0f;
        }
      }
#pragma unroll
      for (unsigned a = 0; a < kAhead; ++a) {
        merge(total, other[a]);
      }
    }
    for (int f = 0; f < kFields; ++f) {
      parts[(part * kFields + f) * width + column] = total[f];
    }
  }
  __syncthreads();
  const int64_t channel = static_cast<int64_t>(tile) * width + thread;
  if (thread < width && channel < channels && last[thread / kLanes]) {
    float total[kFields] = {};
    for (int p = 0; p < count; ++p) {
      float other[kFields];
      for (int f = 0; f < kFields; ++f) {
        other[f] = parts[(p * kFields + f) * width + thread];
      }
      merge(total, other);
    }
    finish(channel, total);
  }
}

}  // namespace mf::cuda
