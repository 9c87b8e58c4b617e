// The batch statistics of y [pixels, out_channels], in three steps: each lane sums the rounded numbers
// that it stores, over all tiles of its block (LaneMoments); a block merges its lanes once and writes
// count, mean and squared deviations [3, out_channels]; a second launch merges those of all blocks
// and writes the norm's state [kNormRows, out_channels] (align_conv_finish_block).
#pragma once

#include "cuda/align_conv_tile.cuh"
#include "cuda/launch.cuh"
#include "cuda/vec.cuh"

namespace mf::cuda {

// What a lane has seen in its N channels: sums about the first value of each. That value is one of
// those summed up, so the sum of squares is at most 1 + count times that about their mean, and
// little is lost when the one is computed from the other.
template <typename T, int N>
struct LaneMoments {
  static_assert(N == 4 || N == 8);
  float count;
  Vec<T, N> origin;
  float distance[N], squares[N];

  __device__ void add(const Vec<T, N>& y) {
    count += 1.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float from_origin = y[i] - origin[i];
      distance[i] += from_origin;
      squares[i] += from_origin * from_origin;
    }
  }

  // Merges the eight lanes that have the same channels; of these this lane gets channel `which`. Of
  // four channels two lanes get the same one, in either order: only the first of them, whose number
  // is below 4 mod 8, is to be used.
  __device__ Moments merged_over_lanes(int& which) const {
    Moments own[N];
    const float inverse = count > 0.0f ? 1.0f / count : 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float mean = distance[i] * inverse;
      own[i] = {count, origin[i] + mean, squares[i] - mean * distance[i]};
    }
    which = 0;
#pragma unroll
    for (int bit = kLanes / 2, left = N; bit >= 4; bit /= 2) {
      const bool upper = (threadIdx.x & bit) != 0;
      if (left > 1) {  // a lane keeps half of its channels and gives the other half away
        left /= 2;
        which += upper ? left : 0;
#pragma unroll
        for (int i = 0; i < left; ++i) {
          own[i] = merged(select(upper, own[left + i], own[i]), exchanged(select(upper, own[i], own[left + i]), bit));
        }
      } else {
        own[0] = merged(own[0], exchanged(own[0], bit));
      }
    }
    return own[0];
  }

  __device__ static Moments select(bool first, Moments a, Moments b) {
    return {a.count, first ? a.mean : b.mean, first ? a.squares : b.squares};
  }

  __device__ static Moments exchanged(const Moments& own, int bit) {
    return {__shfl_xor_sync(0xffffffffu, own.count, bit), __shfl_xor_sync(0xffffffffu, own.mean, bit),
            __shfl_xor_sync(0xffffffffu, own.squares, bit)};
  }
};

// Merges what the block's lanes found, and writes it. of_warps: [rows of warps][64 kChunks]
template <typename T, typename Part, int kThreads>
__device__ void write_block_moments(const AlignConvForward& params, const Part& part,
                                    const LaneMoments<T, Part::kLaneColumns>& moments, Moments* of_warps) {
  constexpr int kColumns = Part::kColumnWarps * 8 * Part::kColumnTiles;
  constexpr int kRowWarps = kThreads / kLanes / Part::kColumnWarps;
  const auto out_channels = static_cast<int>(params.out_channels);
  int which;
  const Moments of_warp = moments.merged_over_lanes(which);
  if (Part::kLaneColumns == 8 || threadIdx.x % 8 < 4) {
    of_warps[part.first_row / (16 * Part::kRowTiles) * kColumns + part.column() + which] = of_warp;
  }
  __syncthreads();
  static_assert(kColumns <= kThreads);
  if (const int column = threadIdx.x; column < out_channels) {
    Moments sum = of_warps[column];
#pragma unroll
    for (int other = 1; other < kRowWarps; ++other) {
      sum = merged(sum, of_warps[other * kColumns + column]);
    }
    float* to = params.moments + static_cast<int64_t>(blockIdx.x) * 3 * out_channels + column;
    to[0] = sum.count;
    to[out_channels] = sum.mean;
    to[2 * out_channels] = sum.squares;
  }
}

// Count, sum and sum of squares of numbers' distances from an origin.
struct SumsAboutOrigin {
  double count, distance, squares;

  __device__ void add(const SumsAboutOrigin& more) {
    count += more.count;
    distance += more.distance;
    squares += more.squares;
  }
};

// Merges the moments that the blocks wrote: a lane a channel, the warps share the parts. As sums
// about the first part's mean, in float64: adding these needs no division, so that no part waits
// for the one before it, and loses nothing.
template <int kThreads>
__device__ void align_conv_finish_block(const AlignConvForward& params, int parts, unsigned char* memory) {
  constexpr int kWarps = kThreads / kLanes;
  constexpr int kAtOnce = 8;                                   // parts under way
  auto* of_warp = reinterpret_cast<SumsAboutOrigin*>(memory);  // [kWarps][kLanes]
  const int64_t channels = params.out_channels;
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kLanes + lane;
  const float* moments = params.moments + channel;
  wait_for_previous();
  let_next_begin();
  const bool has_channel = channel < channels;
  const double origin = parts > 0 && has_channel ? moments[channels] : 0.0f;
  SumsAboutOrigin sum = {};
  for (int first = warp; first < parts && has_channel; first += kAtOnce * kWarps) {
    Moments read[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int part = first + i * kWarps;
      const float* from = moments + part * 3 * channels;
      read[i] = part < parts ? Moments{from[0], from[channels], from[2 * channels]} : Moments{};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const double distance = read[i].count == 0.0f ? 0.0 : read[i].mean - origin;
      const double total = read[i].count * distance;
      sum.add({read[i].count, total, read[i].squares + total * distance});
    }
  }
  of_warp[warp * kLanes + lane] = sum;
  __syncthreads();
  if (warp == 0 && has_channel) {
    for (int other = 1; other < kWarps; ++other) {
      sum.add(of_warp[other * kLanes + lane]);
    }
    const double mean = sum.count > 0.0 ? sum.distance / sum.count : 0.0;
    const double squares = sum.squares - mean * sum.distance;
    finish_norm(params.norm,
                {static_cast<float>(sum.count), static_cast<float>(origin + mean),
                 static_cast<float>(squares < 0.0 ? 0.0 : squares)},
                channels, channel, params.state);
    if (channel == 0 && params.norm.training && params.norm.batches != nullptr) {
      ++*params.norm.batches;
    }
  }
}

}  // namespace mf::cuda
