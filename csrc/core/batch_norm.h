// Batch norm by channel: how counts, means and squared deviations merge, what a norm's state is,
// and its gradient. Shared by every kernel that ends in a norm's statistics or begins with a norm,
// so that they can be combined freely.
//
// The kernel that writes a map y (a convolution, or a pass that only reads one) also writes a
// state: mean, inverse deviation, scale and shift with
//   norm(y) = scale (y - mean) + shift,   scale = weight x inverse deviation,   shift = bias.
// (Not scale y + shift': for a mean of 1,000 deviations that would round away what is left of y.)
// The next kernel normalises while loading. Its backward treats the four rows as independent
// inputs: it writes dy = scale g, where g is the gradient of the normalised value, and the state's
// gradient, dmean = -scale sum g, dscale = sum g (y - mean), dshift = sum g. The backward of the
// kernel that wrote y adds what flows through mean and deviation, while loading:
// dy += slope (y - mean) + offset (NormBackward).
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"

namespace mf {

// Count, mean and sum of squared deviations of some numbers.
struct Moments {
  float count;
  float mean;
  float squares;
};

// The moments of the union of two sets (Chan, Golub and LeVeque 1979). Not commutative in the last
// bit: merge in a fixed order.
MF_HD inline Moments merged(const Moments& a, const Moments& b) {
  const float count = a.count + b.count;
  // Counts are whole numbers: two empty sets divide by one, without a branch.
#if defined(__CUDA_ARCH__)
  const float share = __fdividef(b.count, fmaxf(count, 1.0f));  // to two units of the last digit, in four instructions
#else
  const float share = b.count / fmaxf(count, 1.0f);
#endif
  const float distance = b.mean - a.mean;
  return {count, a.mean + distance * share, a.squares + b.squares + distance * distance * a.count * share};
}

// Rows of a norm's state, float32 [kNormRows, channels].
enum NormRow : int { kMean = 0, kInverseStd = 1, kScale = 2, kShift = 3, kNormRows = 4 };

// A batch norm's parameters and running statistics. weight and bias may be null (1 and 0).
struct NormParams {
  const float* weight;  // [channels]
  const float* bias;    // [channels]
  float* running_mean;  // [channels]; null: none are kept
  float* running_var;   // [channels]
  int64_t* batches;     // a count, + 1 for every training batch; null: not counted
  float momentum;       // share of the new statistics in the running ones
  float eps;
  bool training;  // statistics of the batch; else the running ones, which stay as they are
};

// Writes channel c of the state [kNormRows, channels]; in training from the batch's moments, whose
// mean and (unbiased) variance enter the running statistics. A batch without elements leaves those
// as they are.
MF_HD inline void finish_norm(const NormParams& norm, const Moments& moments, int64_t channels, int64_t c,
                              float* state) {
  float mean;
  float variance;
  if (norm.training) {
    mean = moments.mean;
    variance = moments.count > 0.0f ? moments.squares / moments.count : 0.0f;
    if (norm.running_mean != nullptr && moments.count > 0.0f) {
      const float unbiased = moments.squares / fmaxf(moments.count - 1.0f, 1.0f);
      norm.running_mean[c] += norm.momentum * (mean - norm.running_mean[c]);
      norm.running_var[c] += norm.momentum * (unbiased - norm.running_var[c]);
    }
  } else {
    mean = norm.running_mean[c];
    variance = norm.running_var[c];
  }
  const float inverse = 1.0f / sqrtf(variance + norm.eps);
  state[kMean * channels + c] = mean;
  state[kInverseStd * channels + c] = inverse;
  state[kScale * channels + c] = (norm.weight == nullptr ? 1.0f : norm.weight[c]) * inverse;
  state[kShift * channels + c] = norm.bias == nullptr ? 0.0f : norm.bias[c];
}

// Writes the gradient of channel c of a state from sum g and sum g (x - mean), g that of the normalised value.
MF_HD inline void write_state_gradient(const float* state, int64_t channels, int64_t c, float sum, float product,
                                       float* grad) {
  grad[kMean * channels + c] = -state[kScale * channels + c] * sum;
  grad[kInverseStd * channels + c] = 0.0f;
  grad[kScale * channels + c] = product;
  grad[kShift * channels + c] = sum;
}

// What flows from a norm's state back to its parameters and to the map that its statistics are of.
struct NormBackward {
  float weight;  // gradient of the norm's weight
  float bias;    // of its bias
  float slope;   // dy += slope (y - mean) + offset
  float offset;
};

// `grad`: the state's gradient, [kNormRows, channels]; `count`: elements of the channel that the
// statistics are of. `mean_rest`: by how much their mean exceeds the state's, which is rounded: a
// spread that is small beside the mean loses digits to that rounding.
MF_HD inline NormBackward norm_backward(const NormParams& norm, const float* state, const float* grad, float count,
                                        int64_t channels, int64_t c, float mean_rest = 0.0f) {
  const float weight = norm.weight == nullptr ? 1.0f : norm.weight[c];
  const float inverse = state[kInverseStd * channels + c];
  const float dscale = grad[kScale * channels + c];
  NormBackward back{dscale * inverse, grad[kShift * channels + c], 0.0f, 0.0f};
  if (norm.training && count > 0.0f) {
    const float dinverse = weight * dscale + grad[kInverseStd * channels + c];
    back.slope = -dinverse * inverse * inverse * inverse / count;
    back.offset = grad[kMean * channels + c] / count - back.slope * mean_rest;
  }
  return back;
}

}  // namespace mf
