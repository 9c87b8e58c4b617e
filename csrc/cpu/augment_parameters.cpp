// One view after the other; views are independent, so threads cannot change a result.
#include "api/augment_parameters.h"

#include <algorithm>

namespace mf::cpu {

void augment_parameters(const AugmentParametersParams& params, int threads) {
  constexpr int64_t kViewsWorthThreads = 4096;  // about a millisecond of draws; a training step needs a few hundred
  const uint64_t sequence = params.sequence + (params.counter == nullptr ? 0 : static_cast<uint64_t>(*params.counter));
#pragma omp parallel for num_threads(threads) if (params.count >= kViewsWorthThreads)
  for (int64_t i = 0; i < params.count; ++i) {
    const AugmentParameters view = draw_augment_parameters(params.recipe, params.seed, sequence,
                                                           static_cast<uint32_t>(i), params.height, params.width);
    std::copy(view.code, view.code + AugmentParameters::kCodes, params.codes + i * AugmentParameters::kCodes);
    std::copy(view.factor, view.factor + AugmentParameters::kFactors, params.factors + i * AugmentParameters::kFactors);
  }
  if (params.counter != nullptr) {
    ++*params.counter;
  }
}

}  // namespace mf::cpu
