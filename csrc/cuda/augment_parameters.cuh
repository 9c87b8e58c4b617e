// Kernel body; tests/kernels compiles it for the CPU too. One thread draws one view.
#pragma once

#include "api/augment_parameters.h"

namespace mf::cuda {

__device__ inline void augment_parameters_block(const AugmentParametersParams& params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= params.count) {
    return;
  }
  const uint64_t sequence = params.sequence + (params.counter == nullptr ? 0 : static_cast<uint64_t>(*params.counter));
  const AugmentParameters view = draw_augment_parameters(params.recipe, params.seed, sequence, static_cast<uint32_t>(i),
                                                         params.height, params.width);
  for (int k = 0; k < AugmentParameters::kCodes; ++k) {
    params.codes[i * AugmentParameters::kCodes + k] = view.code[k];
  }
  for (int k = 0; k < AugmentParameters::kFactors; ++k) {
    params.factors[i * AugmentParameters::kFactors + k] = view.factor[k];
  }
}

}  // namespace mf::cuda
