// Kernel bodies of batch norm with add and ReLU; tests/cpp runs them on the CPU too. The passes and
// their algebra: api/batch_norm_act.h.
//
// Bandwidth is all that counts. A thread owns eight channels and every so many pixels, reads them
// as words of 16 bytes, several at once, and keeps what it needs of the norms in registers. Each
// pass walks the map in the opposite direction of the one before it, so that what that one touched
// last is still in the L2: statistics forward in memory, application backward, sums forward,
// gradients backward.
#pragma once

#include <cmath>
#include <type_traits>

#include "api/batch_norm_act.h"
#include "core/relu.h"
#include "cuda/channel_sums.cuh"
#include "cuda/eight.cuh"

namespace mf::cuda {

// What surrounds the norm.
enum class NormForm { kPlain, kResidual, kTwoNorms, kPrologue };

// A norm's state for the thread's channels.
struct EightNorms {
  float mean[kGroup], scale[kGroup], shift[kGroup];

  __device__ static EightNorms of(const float* state, int64_t channels, int64_t channel) {
    EightNorms norms;
    load_floats(state + kMean * channels + channel, norms.mean);
    load_floats(state + kScale * channels + channel, norms.scale);
    load_floats(state + kShift * channels + channel, norms.shift);
    return norms;
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

// Calls work(position, step, count, is_full) for kBatch positions at a time, the last time for
// fewer: is_full says at compile time that count is kBatch, so that nothing is asked of every
// pixel. A batch is what a thread loads before it uses the first of it.
template <int kBatch, typename Work>
__device__ void in_batches(int position, int end, int step, const Work& work) {
  for (; position + (kBatch - 1) * step < end; position += kBatch * step) {
    work(position, step, kBatch, std::true_type());
  }
  if (position < end) {
    work(position, step, 1 + (end - 1 - position) / step, std::false_type());
  }
}

// The moments of a thread's pixels, of their distance from an origin that all threads share.
template <typename T, bool kPrologue>
struct PixelMoments {
  static constexpr int kBatch =
      kPrologue && sizeof(T) == 4 ? 2 : 4;  // pixels that are added together, with one division

  EightNorms before;
  float origin[kGroup];
  float count = 0.0f;
  float mean[kGroup] = {};
  float squares[kGroup] = {};

  __device__ void values(const Eight<T>& words, float (&x)[kGroup]) const {
    unpack(words, x);
    if constexpr (kPrologue) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        x[i] = rectified(before.normalised(x[i], i));
      }
    }
  }

  // The first `pixels` of a batch; all of it if kFull.
  template <bool kFull>
  __device__ void add(const Eight<T> (&words)[kBatch], int pixels) {
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
};

// The state of a norm from one read of its map. Moments are of the distance from the map's first
// pixel, which is exact where the spread is small beside the mean.
template <typename T, bool kPrologue>
__device__ void norm_statistics_block(const NormStatistics& params, int shift, unsigned char* shared) {
  constexpr int kFields = NormStatistics::kFields;
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
    constexpr int kBatch = PixelMoments<T, kPrologue>::kBatch;
    if constexpr (kPrologue) {
      moments.before = EightNorms::of(params.prologue, channels, own.channel);
    }
    const T* map = static_cast<const T*>(params.map[which]) + own.channel;
    moments.values(load_eight(map), moments.origin);
    const Walk walk = Walk::of(own);
    const int64_t stride = walk.step * channels;
    int pixels = walk.first < valid ? 1 + (valid - 1 - walk.first) / walk.step : 0;
    map += walk.first * channels;
    Eight<T> words[kBatch] = {};
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (j < pixels) {
        words[j] = load_eight(map + j * stride);
      }
    }
    for (; pixels >= 2 * kBatch; pixels -= kBatch) {
      map += kBatch * stride;
      Eight<T> next[kBatch];  // arrive while the others are worked on
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        next[j] = load_eight(map + j * stride);
      }
      moments.template add<true>(words, kBatch);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        words[j] = next[j];
      }
    }
    if (pixels > kBatch) {
      moments.template add<true>(words, kBatch);
      pixels -= kBatch;
      map += kBatch * stride;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (j < pixels) {
          words[j] = load_eight(map + j * stride);
        }
      }
    }
    if (pixels > 0) {
      moments.template add<false>(words, pixels);
    }
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

template <typename T, NormForm kForm>
__device__ void batch_norm_act_forward_block(const BatchNormActForward& params, int shift) {
  constexpr bool kResidual = kForm == NormForm::kResidual || kForm == NormForm::kTwoNorms;
  constexpr int kBatch = kResidual || sizeof(T) == 4 ? 2 : 4;
  const int64_t channels = params.shape.channels;
  const ChannelThread own = ChannelThread::of(shift, blockIdx.y);
  if (own.channel >= channels) {
    return;
  }
  const int pixels = static_cast<int>(params.shape.pixels());
  const int valid = static_cast<int>(params.shape.valid_pixels());
  const EightNorms norms = EightNorms::of(params.state, channels, own.channel);
  EightNorms others;  // the residual's, or those before
  if constexpr (kForm == NormForm::kTwoNorms) {
    others = EightNorms::of(params.state + kNormRows * channels, channels, own.channel);
  } else if constexpr (kForm == NormForm::kPrologue) {
    others = EightNorms::of(params.prologue, channels, own.channel);
  }
  const T* x = static_cast<const T*>(params.x);
  const T* residual = static_cast<const T*>(params.residual);
  T* y = static_cast<T*>(params.y);
  const bool masks = params.mask != nullptr;
  const Walk walk = Walk::of(own);
  int position = walk.first;
  for (; position < pixels - valid; position += walk.step) {  // padding
    const int64_t at = (pixels - 1 - position) * channels + own.channel;
    store_eight(y + at, Eight<T>{});
    if (masks) {
      params.mask[at / kGroup] = 0;
    }
  }
  in_batches<kBatch>(position, pixels, walk.step, [&](int position, int step, int count, auto is_full) {
    Eight<T> words[kBatch];
    [[maybe_unused]] Eight<T> added[kBatch];
    const int64_t first = (pixels - 1 - position) * channels + own.channel;
    const int64_t stride = step * channels;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (is_full || j < count) {
        words[j] = load_eight(x + (first - j * stride));
        if constexpr (kResidual) {
          added[j] = load_eight(residual + (first - j * stride));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!is_full && j >= count) {
        break;
      }
      float z[kGroup];
      [[maybe_unused]] float r[kGroup];
      unpack(words[j], z);
      if constexpr (kResidual) {
        unpack(added[j], r);
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
      store_eight(y + at, pack<T>(z));
    }
  });
}

// The masked sum of the incoming gradients at the first `count` of kBatch pixels: elements first +
// j stride. There is a gradient.
template <typename T, int kBatch, typename IsFull>
__device__ void load_gradients(const BatchNormActBackward& params, int64_t first, int64_t stride, int count,
                               IsFull is_full, float (&g)[kBatch][kGroup]) {
  unsigned bits[kBatch];
  if (params.mask != nullptr) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      bits[j] = is_full || j < count ? params.mask[(first + j * stride) / kGroup] : 0u;
    }
  }
  for (int k = 0; k < params.grad_count; ++k) {
    const T* grad = static_cast<const T*>(params.grads[k]) + first;
    Eight<T> words[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (is_full || j < count) {
        words[j] = load_eight(grad + j * stride);
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (is_full || j < count) {
        float part[kGroup];
        unpack(words[j], part);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          g[j][i] = k == 0 ? part[i] : g[j][i] + part[i];
        }
      }
    }
  }
  if (params.mask != nullptr) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        g[j][i] = (bits[j] & 1u << i) != 0 ? g[j][i] : 0.0f;
      }
    }
  }
}

// Row `which` of the norms' gradients for channel c, from sum g and sum g (x' - mean).
__device__ inline void finish_gradients(const BatchNormActBackward& params, int which, int64_t c, float sum,
                                        float product) {
  const int64_t channels = params.shape.channels;
  const float* state = params.state + which * kNormRows * channels + c;
  const float own_state[kNormRows] = {state[kMean * channels], state[kInverseStd * channels], state[kScale * channels],
                                      state[kShift * channels]};
  const float own_grad[kNormRows] = {-own_state[kScale] * sum, 0.0f, product, sum};
  NormParams norm = params.norm[which];
  norm.weight = norm.weight == nullptr ? nullptr : norm.weight + c;
  const NormBackward back =
      norm_backward(norm, own_state, own_grad, static_cast<float>(params.shape.valid_pixels()), 1, 0);
  float* out = params.norm_grads + which * kNormGradRows * channels + c;
  out[kGradWeight * channels] = back.weight;
  out[kGradBias * channels] = back.bias;
  out[kSlope * channels] = back.slope;
  out[kOffset * channels] = back.offset;
}

// First pass of the backward: sums of g and of g times each norm's deviation. kForm is kResidual
// nowhere: a residual without a norm takes no part.
template <typename T, NormForm kForm>
__device__ void batch_norm_act_sums_block(const BatchNormActBackward& params, int shift, unsigned char* shared) {
  constexpr int kBatch = (kForm == NormForm::kPlain ? 2 : 1) + (sizeof(T) == 2 ? 1 : 0);
  constexpr int kFields = kForm == NormForm::kTwoNorms ? 3 : 2;
  const unsigned tile = blockIdx.y;
  const int64_t channels = params.shape.channels;
  const ChannelThread own = ChannelThread::of(shift, tile);
  float sums[kFields][kGroup] = {};
  if (own.channel < channels) {
    const int valid = static_cast<int>(params.shape.valid_pixels());
    const int pixels = static_cast<int>(params.shape.pixels());
    float mean[kGroup];
    float other_mean[kGroup];
    EightNorms before;
    load_floats(params.state + kMean * channels + own.channel, mean);
    if constexpr (kForm == NormForm::kTwoNorms) {
      load_floats(params.state + (kNormRows + kMean) * channels + own.channel, other_mean);
    } else if constexpr (kForm == NormForm::kPrologue) {
      before = EightNorms::of(params.prologue, channels, own.channel);
    }
    const T* map = static_cast<const T*>(params.x);
    const T* residual = static_cast<const T*>(params.residual);
    T* out = static_cast<T*>(params.g);
    const Walk walk = Walk::of(own);
    in_batches<kBatch>(walk.first, valid, walk.step, [&](int position, int step, int count, auto is_full) {
      Eight<T> words[kBatch];
      [[maybe_unused]] Eight<T> others[kBatch];
      const int64_t first = position * channels + own.channel;
      const int64_t stride = step * channels;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (is_full || j < count) {
          words[j] = load_eight(map + (first + j * stride));
          if constexpr (kForm == NormForm::kTwoNorms) {
            others[j] = load_eight(residual + (first + j * stride));
          }
        }
      }
      float g[kBatch][kGroup];
      load_gradients<T>(params, first, stride, count, is_full, g);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (!is_full && j >= count) {
          break;
        }
        if (out != nullptr) {
          const Eight<T> rounded = pack<T>(g[j]);
          store_eight(out + (first + j * stride), rounded);
          unpack(rounded, g[j]);  // the sums are of what is written, so that the gradient's own sums come out as zero
        }
        float x[kGroup];
        unpack(words[j], x);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if constexpr (kForm == NormForm::kPrologue) {
            x[i] = rectified(before.normalised(x[i], i));
          }
          sums[0][i] += g[j][i];
          sums[1][i] += g[j][i] * (x[i] - mean[i]);
        }
        if constexpr (kForm == NormForm::kTwoNorms) {
          unpack(others[j], x);
#pragma unroll
          for (int i = 0; i < kGroup; ++i) {
            sums[2][i] += g[j][i] * (x[i] - other_mean[i]);
          }
        }
      }
    });
    if (out != nullptr) {
      for (int p = pixels - 1 - walk.first; p >= valid; p -= walk.step) {  // padding
        store_eight(out + (p * channels + own.channel), Eight<T>{});
      }
    }
  }
  merge_channels<kFields>(
      sums, shift, tile, channels, params.partials, params.tickets, shared,
      [](float (&a)[kFields], const float (&b)[kFields]) {
#pragma unroll
        for (int f = 0; f < kFields; ++f) {
          a[f] += b[f];
        }
      },
      [&](int64_t channel, const float (&total)[kFields]) {
        finish_gradients(params, 0, channel, total[0], total[1]);
        if constexpr (kForm == NormForm::kTwoNorms) {
          finish_gradients(params, 1, channel, total[0], total[2]);
        }
      });
}

// Second pass: the gradient of x, and of a residual that has a norm; with a prologue through its
// ReLU and its norm, whose own gradient comes from sums.
template <typename T, NormForm kForm>
__device__ void batch_norm_act_backward_block(const BatchNormActBackward& params, int shift, unsigned char* shared) {
  constexpr int kBatch = kForm != NormForm::kPlain ? 1 : sizeof(T) == 2 ? 3 : 2;
  constexpr int kFields = BatchNormActBackward::kPrologueFields;
  const unsigned tile = blockIdx.y;
  const int64_t channels = params.shape.channels;
  const ChannelThread own = ChannelThread::of(shift, tile);
  [[maybe_unused]] float sums[kFields][kGroup] = {};
  if (own.channel < channels) {
    const int pixels = static_cast<int>(params.shape.pixels());
    const int valid = static_cast<int>(params.shape.valid_pixels());
    // dx' = scale g + slope (x' - mean) + offset
    struct Line {
      float mean[kGroup], scale[kGroup], slope[kGroup], offset[kGroup];
      __device__ void load(const float* state, const float* grads, int64_t channels, int64_t channel) {
        load_floats(state + kMean * channels + channel, mean);
        load_floats(state + kScale * channels + channel, scale);
        load_floats(grads + kSlope * channels + channel, slope);
        load_floats(grads + kOffset * channels + channel, offset);
      }
      __device__ float at(float g, float x, int i) const {
        return scale[i] * g + (slope[i] * (x - mean[i]) + offset[i]);
      }
    };
    Line line;
    Line other_line;
    EightNorms before;
    line.load(params.state, params.norm_grads, channels, own.channel);
    if constexpr (kForm == NormForm::kTwoNorms) {
      other_line.load(params.state + kNormRows * channels, params.norm_grads + kNormGradRows * channels, channels,
                      own.channel);
    } else if constexpr (kForm == NormForm::kPrologue) {
      before = EightNorms::of(params.prologue, channels, own.channel);
    }
    const T* map = static_cast<const T*>(params.x);
    const T* residual = static_cast<const T*>(params.residual);
    T* out = static_cast<T*>(params.x_grad);
    T* residual_out = static_cast<T*>(params.residual_grad);
    const Walk walk = Walk::of(own);
    int position = walk.first;
    for (; position < pixels - valid; position += walk.step) {  // padding
      const int64_t at = (pixels - 1 - position) * channels + own.channel;
      store_eight(out + at, Eight<T>{});
      if (kForm == NormForm::kTwoNorms && residual_out != nullptr) {
        store_eight(residual_out + at, Eight<T>{});
      }
    }
    in_batches<kBatch>(position, pixels, walk.step, [&](int position, int step, int count, auto is_full) {
      Eight<T> words[kBatch];
      [[maybe_unused]] Eight<T> others[kBatch];
      const int64_t first = (pixels - 1 - position) * channels + own.channel;
      const int64_t stride = -step * channels;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (is_full || j < count) {
          words[j] = load_eight(map + (first + j * stride));
          if constexpr (kForm == NormForm::kTwoNorms) {
            others[j] = load_eight(residual + (first + j * stride));
          }
        }
      }
      float g[kBatch][kGroup] = {};
      load_gradients<T>(params, first, stride, count, is_full, g);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (!is_full && j >= count) {
          break;
        }
        float x[kGroup];
        float dx[kGroup];
        unpack(words[j], x);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if constexpr (kForm == NormForm::kPrologue) {
            const float z = before.normalised(x[i], i);
            const float dz = passes(z) ? line.at(g[j][i], z, i) : 0.0f;
            sums[0][i] += dz;
            sums[1][i] += dz * (x[i] - before.mean[i]);
            dx[i] = before.scale[i] * dz;
          } else {
            dx[i] = line.at(g[j][i], x[i], i);
          }
        }
        store_eight(out + (first + j * stride), pack<T>(dx));
        if constexpr (kForm == NormForm::kTwoNorms) {
          if (residual_out != nullptr) {
            unpack(others[j], x);
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
              dx[i] = other_line.at(g[j][i], x[i], i);
            }
            store_eight(residual_out + (first + j * stride), pack<T>(dx));
          }
        }
      }
    });
  }
  if constexpr (kForm == NormForm::kPrologue) {
    merge_channels<kFields>(
        sums, shift, tile, channels, params.partials, params.tickets, shared,
        [](float (&a)[kFields], const float (&b)[kFields]) {
          a[0] += b[0];
          a[1] += b[1];
        },
        [&](int64_t channel, const float (&total)[kFields]) {
          float* grad = params.prologue_grad + channel;
          grad[kMean * channels] = -params.prologue[kScale * channels + channel] * total[0];
          grad[kInverseStd * channels] = 0.0f;
          grad[kScale * channels] = total[1];
          grad[kShift * channels] = total[0];
        });
  }
}

}  // namespace mf::cuda
