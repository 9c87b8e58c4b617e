// Random parameters of augmented views, one per image. The law is in core/augment_parameters.h.
#pragma once

#include <cstdint>

#include "core/augment_parameters.h"
#include "core/host_device.h"

namespace mf {

struct AugmentParametersParams {
  AugmentRecipe recipe;
  uint64_t seed;
  uint64_t sequence;
  int64_t* counter;  // null, or one number where the outputs are: added to sequence, then advanced by 1
  int64_t count;     // views; below 2^32
  int32_t height;    // pixels
  int32_t width;     // pixels
  int32_t* codes;    // [count, 6] out
  float* factors;    // [count, 4] out
};

namespace cpu {
void augment_parameters(const AugmentParametersParams& params, int threads);
}  // namespace cpu

namespace cuda {
void augment_parameters(const AugmentParametersParams& params, Stream stream);
}  // namespace cuda

}  // namespace mf
