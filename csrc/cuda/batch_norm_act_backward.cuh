// Kernel bodies of the backward of batch norm with add and ReLU: two passes over the map.
#pragma once

#include "cuda/batch_norm_act_walk.cuh"

namespace mf::cuda {

// The masked sum of the incoming gradients at the first `count` of kBatch pixels: elements first +
// j stride. There is a gradient. kLast: no kernel reads them soon again.
template <typename T, bool kLast, int kBatch, typename IsFull>
__device__ void load_gradients(const BatchNormActBackward& params, int64_t first, int64_t stride, int count,
                               IsFull is_full, float (&g)[kBatch][kGroup]) {
  unsigned bits[kBatch];
  if (params.mask != nullptr) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      bits[j] = is_full || j < count ? params.mask[(first + j * stride) / kGroup] : 0u;
    }
  }
  const auto add = [&](int k) {
    const T* grad = static_cast<const T*>(params.grads[k]) + first;
    Vec<T, kGroup> words[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (is_full || j < count) {
        words[j] = kLast ? Vec<T, kGroup>::load_last(grad + j * stride) : Vec<T, kGroup>::load(grad + j * stride);
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (is_full || j < count) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          g[j][i] = k == 0 ? words[j][i] : g[j][i] + words[j][i];
        }
      }
    }
  };
  if constexpr (sizeof(T) == 4) {
#pragma unroll 1  // no registers are left for the loads of several gradients
    for (int k = 0; k < params.grad_count; ++k) {
      add(k);
    }
  } else {
    for (int k = 0; k < params.grad_count; ++k) {
      add(k);
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

// The rows of NormGradRow for channel c, from sum g and sum g (x' - mean).
__device__ inline void finish_gradients(const MapShape& shape, NormParams norm, const float* state, float* norm_grads,
                                        int64_t c, float sum, float product) {
  const int64_t channels = shape.channels;
  state += c;
  const float own_state[kNormRows] = {state[kMean * channels], state[kInverseStd * channels], state[kScale * channels],
                                      state[kShift * channels]};
  const float own_grad[kNormRows] = {-own_state[kScale] * sum, 0.0f, product, sum};
  norm.weight = norm.weight == nullptr ? nullptr : norm.weight + c;
  const NormBackward back = norm_backward(norm, own_state, own_grad, static_cast<float>(shape.valid_pixels()), 1, 0);
  float* out = norm_grads + c;
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
  wait_for_previous();
  let_next_begin();
  const unsigned tile = blockIdx.y;
  const int64_t channels = params.shape.channels;
  const ChannelThread own = ChannelThread::of(shift, tile);
  float sums[kFields][kGroup] = {};
  if (own.channel < channels) {
    const int valid = static_cast<int>(params.shape.valid_pixels());
    const int pixels = static_cast<int>(params.shape.pixels());
    float mean[kGroup];
    float other_mean[kGroup];
    ChannelNorm<> before;
    load_floats(params.state + kMean * channels + own.channel, mean);
    if constexpr (kForm == NormForm::kTwoNorms) {
      load_floats(params.state + (kNormRows + kMean) * channels + own.channel, other_mean);
    } else if constexpr (kForm == NormForm::kPrologue) {
      before = ChannelNorm<>::of(params.prologue, channels, own.channel);
    }
    const T* map = static_cast<const T*>(params.x);
    const T* residual = static_cast<const T*>(params.residual);
    T* out = static_cast<T*>(params.g);
    const Walk walk = Walk::of(own);
    in_batches<kBatch>(walk.first, valid, walk.step, [&](int position, int step, int count, auto is_full) {
      constexpr int kMost = kMostOf<kBatch, decltype(is_full)>;
      Vec<T, kGroup> words[kMost];
      [[maybe_unused]] Vec<T, kGroup> others[kMost];
      const int64_t first = position * channels + own.channel;
      const int64_t stride = step * channels;
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (is_full || j < count) {
          words[j] = Vec<T, kGroup>::load(map + (first + j * stride));
          if constexpr (kForm == NormForm::kTwoNorms) {
            others[j] = Vec<T, kGroup>::load(residual + (first + j * stride));
          }
        }
      }
      float g[kMost][kGroup];
      load_gradients<T, false>(params, first, stride, count, is_full, g);
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (!is_full && j >= count) {
          break;
        }
        if (out != nullptr) {
          const auto rounded = Vec<T, kGroup>::pack(g[j]);
          rounded.store(out + (first + j * stride));
          rounded.unpack(g[j]);  // the sums are of what is written, so that the gradient's own sums come out as zero
        }
        float x[kGroup];
        words[j].unpack(x);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if constexpr (kForm == NormForm::kPrologue) {
            x[i] = rectified(before.normalised(x[i], i));
          }
          sums[0][i] += g[j][i];
          sums[1][i] += g[j][i] * (x[i] - mean[i]);
        }
        if constexpr (kForm == NormForm::kTwoNorms) {
          others[j].unpack(x);
#pragma unroll
          for (int i = 0; i < kGroup; ++i) {
            sums[2][i] += g[j][i] * (x[i] - other_mean[i]);
          }
        }
      }
    });
    if (out != nullptr) {
      for (int p = pixels - 1 - walk.first; p >= valid; p -= walk.step) {  // padding
        Vec<T, kGroup>{}.store(out + (p * channels + own.channel));
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
        finish_gradients(params.shape, params.norm[0], params.state, params.norm_grads, channel, total[0], total[1]);
        if constexpr (kForm == NormForm::kTwoNorms) {
          finish_gradients(params.shape, params.norm[1], params.state + kNormRows * channels,
                           params.norm_grads + kNormGradRows * channels, channel, total[0], total[2]);
        }
      });
}

// dx' = scale g + slope (x' - mean) + offset
struct GradientLine {
  float mean[kGroup], scale[kGroup], slope[kGroup], offset[kGroup];
  __device__ void load(const float* state, const float* grads, int64_t channels, int64_t channel) {
    load_floats(state + kMean * channels + channel, mean);
    load_floats(state + kScale * channels + channel, scale);
    load_floats(grads + kSlope * channels + channel, slope);
    load_floats(grads + kOffset * channels + channel, offset);
  }
  __device__ float at(float g, float x, int i) const { return scale[i] * g + (slope[i] * (x - mean[i]) + offset[i]); }
};

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
  const int pixels = static_cast<int>(params.shape.pixels());
  const Walk walk = Walk::of(own);
  const T* map = static_cast<const T*>(params.x);
  wait_for_first_pass<kBatch>(map, walk, own.channel < channels ? pixels : 0,
                              [&](int position) { return (pixels - 1 - position) * channels + own.channel; });
  if (own.channel < channels) {
    const int valid = static_cast<int>(params.shape.valid_pixels());
    GradientLine line;
    GradientLine other_line;
    ChannelNorm<> before;
    line.load(params.state, params.norm_grads, channels, own.channel);
    if constexpr (kForm == NormForm::kTwoNorms) {
      other_line.load(params.state + kNormRows * channels, params.norm_grads + kNormGradRows * channels, channels,
                      own.channel);
    } else if constexpr (kForm == NormForm::kPrologue) {
      before = ChannelNorm<>::of(params.prologue, channels, own.channel);
    }
    const T* residual = static_cast<const T*>(params.residual);
    T* out = static_cast<T*>(params.x_grad);
    T* residual_out = static_cast<T*>(params.residual_grad);
    int position = walk.first;
    for (; position < pixels - valid; position += walk.step) {  // padding
      const int64_t at = (pixels - 1 - position) * channels + own.channel;
      Vec<T, kGroup>{}.store(out + at);
      if (kForm == NormForm::kTwoNorms && residual_out != nullptr) {
        Vec<T, kGroup>{}.store(residual_out + at);
      }
    }
    in_batches<kBatch>(position, pixels, walk.step, [&](int position, int step, int count, auto is_full) {
      constexpr int kMost = kMostOf<kBatch, decltype(is_full)>;
      Vec<T, kGroup> words[kMost];
      [[maybe_unused]] Vec<T, kGroup> others[kMost];
      const int64_t first = (pixels - 1 - position) * channels + own.channel;
      const int64_t stride = -step * channels;
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (is_full || j < count) {
          words[j] = Vec<T, kGroup>::load_last(map + (first + j * stride));
          if constexpr (kForm == NormForm::kTwoNorms) {
            others[j] = Vec<T, kGroup>::load_last(residual + (first + j * stride));
          }
        }
      }
      float g[kMost][kGroup] = {};
      load_gradients<T, true>(params, first, stride, count, is_full, g);
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (!is_full && j >= count) {
          break;
        }
        float x[kGroup];
        float dx[kGroup];
        words[j].unpack(x);
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
        Vec<T, kGroup>::pack(dx).store(out + (first + j * stride));
        if constexpr (kForm == NormForm::kTwoNorms) {
          if (residual_out != nullptr) {
            others[j].unpack(x);
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
              dx[i] = other_line.at(g[j][i], x[i], i);
            }
            Vec<T, kGroup>::pack(dx).store(residual_out + (first + j * stride));
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
          write_state_gradient(params.prologue, channels, channel, total[0], total[1], params.prologue_grad);
        });
  }
}

}  // namespace mf::cuda
