// Kernel body of a norm's statistics over a map.
#pragma once

#include "cuda/batch_norm_act_walk.cuh"

namespace mf::cuda {

// The moments of a thread's pixels, of their distance from an origin that all threads share.
template <typename T, bool kPrologue>
struct PixelMoments {
  static constexpr int kBatch =
      kPrologue && sizeof(T) == 4 ? 2 : 4;  // pixels that are added together, with one division

  ChannelNorm<> before;
  float origin[kGroup];
  float count = 0.0f;
  float mean[kGroup] = {};
  float squares[kGroup] = {};

  __device__ void values(const Vec<T, kGroup>& words, float (&x)[kGroup]) const {
    words.unpack(x);
    if constexpr (kPrologue) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        x[i] = rectified(before.normalised(x[i], i));
      }
    }
  }

  // The first `pixels` of a batch; all of it if kFull.
  template <bool kFull>
  __device__ void add(const Vec<T, kGroup> (&words)[kBatch], int pixels) {
    float x[kBatch][kGroup];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      values(words[j], x[j]);
    }
    const auto added = static_cast<float>(kFull ? kBatch : pixels);
    const float inverse = kFull ? 1.0f / kBatch : 1.0f / added;
    const float share = added / (count + added);
    const float weight = count * share;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        x[j][i] -= origin[i];
        sum += kFull || j < pixels ? x[j][i] : 0.0f;
      }
      const float middle = sum * inverse;
      float spread = 0.0f;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float deviation = kFull || j < pixels ? x[j][i] - middle : 0.0f;
        spread += deviation * deviation;
      }
      const float distance = middle - mean[i];
      mean[i] += distance * share;
      squares[i] += spread + distance * distance * weight;
    }
    count += added;
  }

  // All of the thread's pixels of the first `end`, of which `map` holds the first at element 0.
  __device__ void take(const T* map, int64_t channels, const Walk& walk, int end) {
    const int64_t stride = walk.step * channels;
    int pixels = walk.first < end ? 1 + (end - 1 - walk.first) / walk.step : 0;
    map += walk.first * channels;
    Vec<T, kGroup> words[kBatch] = {};
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (j < pixels) {
        words[j] = Vec<T, kGroup>::load(map + j * stride);
      }
    }
    for (; pixels >= 2 * kBatch; pixels -= kBatch) {
      map += kBatch * stride;
      Vec<T, kGroup> next[kBatch];  // arrive while the others are worked on
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        next[j] = Vec<T, kGroup>::load(map + j * stride);
      }
      add<true>(words, kBatch);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        words[j] = next[j];
      }
    }
    if (pixels > kBatch) {
      add<true>(words, kBatch);
      pixels -= kBatch;
      map += kBatch * stride;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (j < pixels) {
          words[j] = Vec<T, kGroup>::load(map + j * stride);
        }
      }
    }
    if (pixels > 0) {
      add<false>(words, pixels);
    }
  }
};

// The state of a norm from one read of its map. Moments are of the distance from the map's first
// pixel, which is exact where the spread is small beside the mean.
template <typename T, bool kPrologue>
__device__ void norm_statistics_block(const NormStatistics& params, int shift, unsigned char* shared) {
  constexpr int kFields = NormStatistics::kFields;
  wait_for_previous();
  let_next_begin();
  const unsigned which = blockIdx.z;
  const unsigned tile = blockIdx.y;
  const NormParams& norm = params.norm[which];
  const int64_t channels = params.shape.channels;
  float* state = params.state + which * kNormRows * channels;
  if (!norm.training) {
    const int64_t channel = static_cast<int64_t>(tile) * (kGroup << shift) + threadIdx.x;
    if (blockIdx.x == 0 && threadIdx.x < static_cast<unsigned>(kGroup << shift) && channel < channels) {
      finish_norm(norm, {0.0f, 0.0f, 0.0f}, channels, channel, state);
      if (which == 0 && params.mean_rest != nullptr) {
        params.mean_rest[channel] = 0.0f;
      }
    }
    return;
  }
  if (norm.batches != nullptr && blockIdx.x == 0 && tile == 0 && threadIdx.x == 0) {
    *norm.batches += 1;
  }

  const ChannelThread own = ChannelThread::of(shift, tile);
  const int valid = static_cast<int>(params.shape.valid_pixels());
  PixelMoments<T, kPrologue> moments;
  if (own.channel < channels && valid > 0) {
    if constexpr (kPrologue) {
      moments.before = ChannelNorm<>::of(params.prologue, channels, own.channel);
    }
    const T* map = static_cast<const T*>(params.map[which]) + own.channel;
    moments.values(Vec<T, kGroup>::load(map), moments.origin);
    moments.take(map, channels, Walk::of(own), valid);
  }
  float values[kFields][kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    values[0][i] = moments.count;
    values[1][i] = moments.mean[i];
    values[2][i] = moments.squares[i];
  }
  const ChannelGrid grid{shift, gridDim.y, gridDim.x};
  merge_channels<kFields>(
      values, shift, tile, channels, params.partials + which * grid.partials(kFields),
      params.tickets + which * grid.tickets(), shared,
      [](float (&a)[kFields], const float (&b)[kFields]) {
        const Moments all = merged(Moments{a[0], a[1], a[2]}, Moments{b[0], b[1], b[2]});
        a[0] = all.count;
        a[1] = all.mean;
        a[2] = all.squares;
      },
      [&](int64_t channel, const float (&total)[kFields]) {
        float origin = 0.0f;
        if (valid > 0) {
          origin = static_cast<float>(static_cast<const T*>(params.map[which])[channel]);
          if constexpr (kPrologue) {
            const float* of = params.prologue + channel;
            origin = rectified(of[kScale * channels] * (origin - of[kMean * channels]) + of[kShift * channels]);
          }
        }
        const float mean = origin + total[1];
        finish_norm(norm, {total[0], mean, total[2]}, channels, channel, state);
        if (which == 0 && params.mean_rest != nullptr) {  // exactly (Knuth's sum of two numbers)
          const float added = mean - origin;
          params.mean_rest[channel] = (origin - (mean - added)) + (total[1] - added);
        }
      });
}

}  // namespace mf::cuda
