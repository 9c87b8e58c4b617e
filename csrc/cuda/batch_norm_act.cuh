// Kernel bodies of batch norm with add and ReLU; tests/cpp runs them on the CPU too. The passes and their algebra: api/batch_norm_act.h.
//
// Bandwidth is all that counts. A thread owns eight channels and every so many pixels, reads them as words of 16 bytes, several at once,
// and keeps what it needs of the norms in registers. Each pass walks the map in the opposite direction of the one before it, so
// that what that one touched last is still in the L2: statistics forward in memory, application backward, sums forward, gradients backward.
#pragma once

#include <cmath>
#include <type_traits>

#include "api/batch_norm_act.h"
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

// Keeps NaN, as torch's ReLU does: a training that diverges must be seen.
__device__ inline float rectified(float x) {
  return x < 0.0f ? 0.0f : x;
}

__device__ inline bool passes(float x) {
  return !(x <= 0.0f);
}

// The state of a norm from one read of its map. Moments are of the distance from the map's first pixel, which is exact where the
// spread is small beside the mean; a thread takes four pixels at a time, so that it divides once for four.
template <typename T, bool kPrologue>
__device__ void norm_statistics_block(const NormStatistics& params, int shift, unsigned char* shared) {
  constexpr int kBatch = kPrologue && sizeof(T) == 4 ? 2 : 4;
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
    }
    return;
  }
  if (norm.batches != nullptr && blockIdx.x == 0 && tile == 0 && threadIdx.x == 0) {
    *norm.batches += 1;
  }

  const ChannelThread own = ChannelThread::of(shift, tile);
  const int64_t valid = params.shape.valid_pixels();
  const T* map = static_cast<const T*>(params.map[which]);
  EightNorms before;
  const auto value = [&](const Eight<T>& words, float (&x)[kGroup]) {
    unpack(words, x);
    if constexpr (kPrologue) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        x[i] = rectified(before.normalised(x[i], i));
      }
    }
  };
  float count = 0.0f;
  float mean[kGroup] = {};
  float squares[kGroup] = {};
  if (own.channel < channels && valid > 0) {
    map += own.channel;
    if constexpr (kPrologue) {
      before = EightNorms::of(params.prologue, channels, own.channel);
    }
    float origin[kGroup];
    value(load_eight(map), origin);
    const int64_t step = static_cast<int64_t>(gridDim.x) * own.rows;
    const auto fetch = [&](int64_t p, Eight<T>(&words)[kBatch]) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        words[j] = p + j * step < valid ? load_eight(map + (p + j * step) * channels) : Eight<T>{};
      }
    };
    int64_t p = static_cast<int64_t>(blockIdx.x) * own.rows + own.row;
    Eight<T> words[kBatch];
    fetch(p, words);
    for (; p < valid; p += kBatch * step) {
      float x[kBatch][kGroup];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        value(words[j], x[j]);
      }
      fetch(p + kBatch * step, words);  // arrives while these are worked on
      int pixels = 1;
#pragma unroll
      for (int j = 1; j < kBatch; ++j) {
        pixels += p + j * step < valid ? 1 : 0;
      }
      const auto added = static_cast<float>(pixels);
      const float inverse = pixels == 4 ? 0.25f : pixels == 3 ? 1.0f / 3.0f : pixels == 2 ? 0.5f : 1.0f;
      const float share = added / (count + added);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          x[j][i] -= origin[i];
          sum += j < pixels ? x[j][i] : 0.0f;
        }
        const float middle = sum * inverse;
        float spread = 0.0f;
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const float deviation = x[j][i] - middle;
          spread += j < pixels ? deviation * deviation : 0.0f;
        }
        const float distance = middle - mean[i];
        mean[i] += distance * share;
        squares[i] += spread + distance * distance * count * share;
      }
      count += added;
    }
  }
  float values[kFields][kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    values[0][i] = count;
    values[1][i] = mean[i];
    values[2][i] = squares[i];
  }
  const ChannelGrid grid{shift, gridDim.y, gridDim.x};
  merge_channels<kFields>(
      values, shift, tile, channels, params.partials + which * grid.partials(kFields), params.tickets + which * grid.tickets(), shared,
      [](float(&a)[kFields], const float(&b)[kFields]) {
        const Moments all = merged(Moments{a[0], a[1], a[2]}, Moments{b[0], b[1], b[2]});
        a[0] = all.count;
        a[1] = all.mean;
        a[2] = all.squares;
      },
      [&](int64_t channel, const float(&total)[kFields]) {
        float origin = 0.0f;
        if (valid > 0) {
          origin = static_cast<float>(static_cast<const T*>(params.map[which])[channel]);
          if constexpr (kPrologue) {
            const float* of = params.prologue + channel;
            origin = rectified(of[kScale * channels] * (origin - of[kMean * channels]) + of[kShift * channels]);
          }
        }
        finish_norm(norm, {total[0], origin + total[1], total[2]}, channels, channel, state);
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
  const int64_t pixels = params.shape.pixels();
  const int64_t valid = params.shape.valid_pixels();
  const EightNorms norms = EightNorms::of(params.state, channels, own.channel);
  EightNorms others;  // the residual's, or those before
  if constexpr (kForm == NormForm::kTwoNorms) {
    others = EightNorms::of(params.state + kNormRows * channels, channels, own.channel);
  } else if constexpr (kForm == NormForm::kPrologue) {
    others = EightNorms::of(params.prologue, channels, own.channel);
  }
  const T* x = static_cast<const T*>(params.x) + own.channel;
  const T* residual = static_cast<const T*>(params.residual);
  T* y = static_cast<T*>(params.y) + own.channel;
  const int64_t step = static_cast<int64_t>(gridDim.x) * own.rows;
  for (int64_t p = pixels - 1 - (static_cast<int64_t>(blockIdx.x) * own.rows + own.row); p >= 0; p -= kBatch * step) {
    Eight<T> words[kBatch];
    Eight<T> added[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t at = p - j * step;
      if (at >= 0 && at < valid) {
        words[j] = load_eight(x + at * channels);
        if constexpr (kResidual) {
          added[j] = load_eight(residual + at * channels + own.channel);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t at = p - j * step;
      if (at < 0) {
        break;
      }
      float z[kGroup] = {};
      unsigned bits = 0;
      if (at < valid) {
        unpack(words[j], z);
        float r[kGroup];
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
          bits |= passes(z[i]) ? 1u << i : 0u;
          z[i] = params.relu ? rectified(z[i]) : z[i];
        }
      }
      store_eight(y + at * channels, pack<T>(z));
      if (params.mask != nullptr) {
        params.mask[(at * channels + own.channel) / kGroup] = static_cast<uint8_t>(bits);
      }
    }
  }
}

// The masked sum of the incoming gradients at kBatch pixels; those not `wanted` stay zero.
template <typename T, int kBatch>
__device__ void load_gradients(const BatchNormActBackward& params, int64_t channel, const int64_t (&at)[kBatch], const bool (&wanted)[kBatch],
                               float (&g)[kBatch][kGroup]) {
  const int64_t channels = params.shape.channels;
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      g[j][i] = 0.0f;
    }
  }
  for (int k = 0; k < params.grad_count; ++k) {
    const T* grad = static_cast<const T*>(params.grads[k]) + channel;
    Eight<T> words[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (wanted[j]) {
        words[j] = load_eight(grad + at[j] * channels);
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (wanted[j]) {
        float part[kGroup];
        unpack(words[j], part);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          g[j][i] += part[i];
        }
      }
    }
  }
  if (params.mask != nullptr) {
    unsigned bits[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      bits[j] = wanted[j] ? params.mask[(at[j] * channels + channel) / kGroup] : 0u;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        g[j][i] = (bits[j] >> i & 1u) != 0 ? g[j][i] : 0.0f;
      }
    }
  }
}

// Row `which` of the norms' gradients for channel c, from sum g and sum g (x' - mean).
__device__ inline void finish_gradients(const BatchNormActBackward& params, int which, int64_t c, float sum, float product) {
  const int64_t channels = params.shape.channels;
  const float* state = params.state + which * kNormRows * channels + c;
  const float own_state[kNormRows] = {state[kMean * channels], state[kInverseStd * channels], state[kScale * channels],
                                      state[kShift * channels]};
  const float own_grad[kNormRows] = {-own_state[kScale] * sum, 0.0f, product, sum};
  NormParams norm = params.norm[which];
  norm.weight = norm.weight == nullptr ? nullptr : norm.weight + c;
  const NormBackward back = norm_backward(norm, own_state, own_grad, static_cast<float>(params.shape.valid_pixels()), 1, 0);
  float* out = params.norm_grads + which * kNormGradRows * channels + c;
  out[kGradWeight * channels] = back.weight;
  out[kGradBias * channels] = back.bias;
  out[kSlope * channels] = back.slope;
  out[kOffset * channels] = back.offset;
}

// First pass of the backward: sums of g and of g times each norm's deviation. kForm is kResidual nowhere: a residual without
// a norm takes no part.
template <typename T, NormForm kForm>
__device__ void batch_norm_act_sums_block(const BatchNormActBackward& params, int shift, unsigned char* shared) {
  constexpr int kBatch = kForm == NormForm::kPlain && sizeof(T) == 2 ? 4 : 2;
  constexpr int kFields = kForm == NormForm::kTwoNorms ? 3 : 2;
  const unsigned tile = blockIdx.y;
  const int64_t channels = params.shape.channels;
  const ChannelThread own = ChannelThread::of(shift, tile);
  float sums[kFields][kGroup] = {};
  if (own.channel < channels) {
    const int64_t valid = params.shape.valid_pixels();
    const int64_t pixels = params.g == nullptr ? valid : params.shape.pixels();
    float mean[kGroup];
    float other_mean[kGroup];
    EightNorms before;
    load_floats(params.state + kMean * channels + own.channel, mean);
    if constexpr (kForm == NormForm::kTwoNorms) {
      load_floats(params.state + (kNormRows + kMean) * channels + own.channel, other_mean);
    } else if constexpr (kForm == NormForm::kPrologue) {
      before = EightNorms::of(params.prologue, channels, own.channel);
    }
    const T* map = static_cast<const T*>(params.x) + own.channel;
    const T* residual = static_cast<const T*>(params.residual);
    T* out = static_cast<T*>(params.g);
    const int64_t step = static_cast<int64_t>(gridDim.x) * own.rows;
    for (int64_t p = static_cast<int64_t>(blockIdx.x) * own.rows + own.row; p < pixels; p += kBatch * step) {
      int64_t at[kBatch];
      bool wanted[kBatch];
      Eight<T> words[kBatch];
      Eight<T> others[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        at[j] = p + j * step;
        wanted[j] = at[j] < valid;
        if (wanted[j]) {
          words[j] = load_eight(map + at[j] * channels);
          if constexpr (kForm == NormForm::kTwoNorms) {
            others[j] = load_eight(residual + at[j] * channels + own.channel);
          }
        }
      }
      float g[kBatch][kGroup];
      load_gradients<T>(params, own.channel, at, wanted, g);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (params.g != nullptr && at[j] < pixels) {
          const Eight<T> rounded = pack<T>(g[j]);
          store_eight(out + at[j] * channels + own.channel, rounded);
          unpack(rounded, g[j]);  // the sums are of what is written, so that the gradient's own sums come out as zero
        }
        if (wanted[j]) {
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
      }
    }
  }
  merge_channels<kFields>(
      sums, shift, tile, channels, params.partials, params.tickets, shared,
      [](float(&a)[kFields], const float(&b)[kFields]) {
#pragma unroll
        for (int f = 0; f < kFields; ++f) {
          a[f] += b[f];
        }
      },
      [&](int64_t channel, const float(&total)[kFields]) {
        finish_gradients(params, 0, channel, total[0], total[1]);
        if constexpr (kForm == NormForm::kTwoNorms) {
          finish_gradients(params, 1, channel, total[0], total[2]);
        }
      });
}

// Second pass: the gradient of x, and of a residual that has a norm; with a prologue through its ReLU and its norm, whose own gradient
// comes from sums.
template <typename T, NormForm kForm>
__device__ void batch_norm_act_backward_block(const BatchNormActBackward& params, int shift, unsigned char* shared) {
  constexpr int kBatch = kForm != NormForm::kPlain ? 1 : sizeof(T) == 2 ? 3 : 2;
  constexpr int kFields = BatchNormActBackward::kPrologueFields;
  const unsigned tile = blockIdx.y;
  const int64_t channels = params.shape.channels;
  const ChannelThread own = ChannelThread::of(shift, tile);
  [[maybe_unused]] float sums[kFields][kGroup] = {};
  if (own.channel < channels) {
    const int64_t pixels = params.shape.pixels();
    const int64_t valid = params.shape.valid_pixels();
    // dx' = scale g + slope (x' - mean) + offset
    struct Line {
      float mean[kGroup], scale[kGroup], slope[kGroup], offset[kGroup];
      __device__ void load(const float* state, const float* grads, int64_t channels, int64_t channel) {
        load_floats(state + kMean * channels + channel, mean);
        load_floats(state + kScale * channels + channel, scale);
        load_floats(grads + kSlope * channels + channel, slope);
        load_floats(grads + kOffset * channels + channel, offset);
      }
      __device__ float at(float g, float x, int i) const { return scale[i] * g + (slope[i] * (x - mean[i]) + offset[i]); }
    };
    Line line;
    Line other_line;
    EightNorms before;
    line.load(params.state, params.norm_grads, channels, own.channel);
    if constexpr (kForm == NormForm::kTwoNorms) {
      other_line.load(params.state + kNormRows * channels, params.norm_grads + kNormGradRows * channels, channels, own.channel);
    } else if constexpr (kForm == NormForm::kPrologue) {
      before = EightNorms::of(params.prologue, channels, own.channel);
    }
    const T* map = static_cast<const T*>(params.x) + own.channel;
    const T* residual = static_cast<const T*>(params.residual);
    T* out = static_cast<T*>(params.x_grad) + own.channel;
    T* residual_out = static_cast<T*>(params.residual_grad);
    const int64_t step = static_cast<int64_t>(gridDim.x) * own.rows;
    for (int64_t p = pixels - 1 - (static_cast<int64_t>(blockIdx.x) * own.rows + own.row); p >= 0; p -= kBatch * step) {
      int64_t at[kBatch];
      bool wanted[kBatch];
      Eight<T> words[kBatch];
      Eight<T> others[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        at[j] = p - j * step;
        wanted[j] = at[j] >= 0 && at[j] < valid;
        if (wanted[j]) {
          words[j] = load_eight(map + at[j] * channels);
          if constexpr (kForm == NormForm::kTwoNorms) {
            others[j] = load_eight(residual + at[j] * channels + own.channel);
          }
        }
      }
      float g[kBatch][kGroup];
      load_gradients<T>(params, own.channel, at, wanted, g);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (at[j] < 0) {
          break;
        }
        float dx[kGroup] = {};
        float dr[kGroup] = {};
        if (wanted[j]) {
          float x[kGroup];
          unpack(words[j], x);
#pragma unroll
          for (int i = 0; i < kGroup; ++i) {
            if constexpr (kForm == NormForm::kPrologue) {
              const float z = before.normalised(x[i], i);
              const float dz = passes(z) ? line.at(g[j][i], rectified(z), i) : 0.0f;
              sums[0][i] += dz;
              sums[1][i] += dz * (x[i] - before.mean[i]);
              dx[i] = before.scale[i] * dz;
            } else {
              dx[i] = line.at(g[j][i], x[i], i);
            }
          }
          if constexpr (kForm == NormForm::kTwoNorms) {
            unpack(others[j], x);
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
              dr[i] = other_line.at(g[j][i], x[i], i);
            }
          }
        }
        store_eight(out + at[j] * channels, pack<T>(dx));
        if constexpr (kForm == NormForm::kTwoNorms) {
          if (params.residual_grad != nullptr) {
            store_eight(residual_out + at[j] * channels + own.channel, pack<T>(dr));
          }
        }
      }
    }
  }
  if constexpr (kForm == NormForm::kPrologue) {
    merge_channels<kFields>(
        sums, shift, tile, channels, params.partials, params.tickets, shared,
        [](float(&a)[kFields], const float(&b)[kFields]) {
          a[0] += b[0];
          a[1] += b[1];
        },
        [&](int64_t channel, const float(&total)[kFields]) {
          float* grad = params.prologue_grad + channel;
          grad[kMean * channels] = -params.prologue[kScale * channels + channel] * total[0];
          grad[kInverseStd * channels] = 0.0f;
          grad[kScale * channels] = total[1];
          grad[kShift * channels] = total[0];
        });
  }
}

}  // namespace mf::cuda
