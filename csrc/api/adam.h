// One step of Adam over flat buffers; core/adam.h has the formulas.
#pragma once

#include <cstdint>

#include "api/float_array.h"
#include "core/adam.h"
#include "core/bfloat16.h"
#include "core/host_device.h"

namespace mf {

// A parameter that has a gradient.
struct AdamTensor {
  const void* gradient;  // [count], float32 or bfloat16
  int64_t start;         // of the parameter in the flat buffers
  int64_t count;
  int32_t parameter;  // its position in `steps`
  FloatType type;     // of the gradient
};

// Parameters of one call: as many bits as fit beside the rest in the 4 KiB of a launch's arguments.
inline constexpr int64_t kMaxAdamParameters = 24576;

struct AdamParams {
  float* master;  // flat: as far as the last parameter reaches
  float* exp_avg;
  float* exp_avg_sq;
  BFloat16* shadow;           // as master; null: there is none
  float* average;             // as master, the moving average of each weight; null: there is none
  BFloat16* average_shadow;   // as master, of the averages; null: there is none
  float* steps;               // [parameters], + 1 for each parameter that has a gradient
  const float* lr;            // a scalar where the buffers are
  const float* loss;          // null, or a scalar: not finite, it freezes this call and sets the latch
  bool* latch;                // null, or a scalar: freezes all that this call would write
  const AdamTensor* tensors;  // [tensor_count], on the host, ascending by parameter
  int64_t tensor_count;
  int64_t parameters;  // at most kMaxAdamParameters
  AdamScale* scales;   // [parameters] workspace, used by CUDA only
  int32_t* frozen;     // a scalar, workspace, used by CUDA only
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double average_rate;

  AdamSettings settings() const {
    return {static_cast<float>(1.0 - beta1), static_cast<float>(1.0 - beta2),  static_cast<float>(beta2),
            static_cast<float>(eps),         static_cast<float>(weight_decay), static_cast<float>(average_rate)};
  }
};

namespace cpu {
void adam_step(const AdamParams& params, int threads);
}  // namespace cpu

namespace cuda {
// One small launch, then one for each kAdamTensors (csrc/cuda/adam.cuh) tensors.
void adam_step(const AdamParams& params, Stream stream);
}  // namespace cuda

}  // namespace mf
