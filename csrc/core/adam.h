// Adam's formulas, for csrc/cpu and the kernels alike; mose_fast/reference/adam.py says what they
// are.
#pragma once

#include <cmath>

#include "core/host_device.h"

namespace mf {

// Settings of a step, as the formulas use them.
struct AdamSettings {
  float share1;  // 1 - beta1
  float share2;  // 1 - beta2
  float beta2;
  float eps;
  float weight_decay;
  float average_rate;
};

// What the step that follows `steps` steps makes of the learning rate and of the root of the second
// moment. In double: 1 - beta^t cancels at first.
struct AdamScale {
  float step_size;     // lr / (1 - beta1^t)
  float inverse_root;  // 1 / sqrt(1 - beta2^t)
};

MF_HD inline AdamScale adam_scale(double beta1, double beta2, float steps, float lr) {
  const double t = static_cast<double>(steps) + 1.0;
  return {static_cast<float>(static_cast<double>(lr) / (1.0 - pow(beta1, t))),
          static_cast<float>(1.0 / sqrt(1.0 - pow(beta2, t)))};
}

// One weight and its moments, in place.
MF_HD inline void adam_update(const AdamSettings& settings, const AdamScale& scale, float gradient, float& weight,
                              float& exp_avg, float& exp_avg_sq) {
  const float g = gradient + settings.weight_decay * weight;
  exp_avg += settings.share1 * (g - exp_avg);
  exp_avg_sq = settings.beta2 * exp_avg_sq + settings.share2 * g * g;
  weight -= scale.step_size * exp_avg / (sqrtf(exp_avg_sq) * scale.inverse_root + settings.eps);
}

// A weight's moving average, after the weight was updated.
MF_HD inline void adam_follow(const AdamSettings& settings, float weight, float& average) {
  average += settings.average_rate * (weight - average);
}

}  // namespace mf
