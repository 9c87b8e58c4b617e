#include "api/augment_parameters.h"
#include "kernel_case.h"

namespace {

void compare(kernel_case::Context& context, int64_t count, int32_t height, int32_t width, uint64_t seed) {
  const mf::AugmentRecipe recipe{0.5, 0.2, 0.2, 1.0, 0.8, 0.4, 0.4, 0.4, 0.1};
  std::vector<int32_t> wanted_codes(static_cast<size_t>(count) * mf::AugmentParameters::kCodes);
  std::vector<float> wanted_factors(static_cast<size_t>(count) * mf::AugmentParameters::kFactors);
  std::vector<int64_t> wanted_counter{6};
  mf::cpu::augment_parameters(
      {recipe, seed, 3, wanted_counter.data(), count, height, width, wanted_codes.data(), wanted_factors.data()}, 1);
  auto* codes = context.poisoned<int32_t>(wanted_codes.size());
  auto* factors = context.poisoned<float>(wanted_factors.size());
  mf::cuda::augment_parameters({recipe, seed, 9, nullptr, count, height, width, codes, factors}, context.stream());
  context.expect_equal("codes", codes, wanted_codes);
  auto* counter = context.upload(std::vector<int64_t>{6});
  mf::cuda::augment_parameters({recipe, seed, 3, counter, count, height, width, codes, factors}, context.stream());
  context.expect_equal("counter", counter, wanted_counter);
  context.expect_equal("codes", codes, wanted_codes);
  context.expect_equal("factors", factors, wanted_factors);
}

}  // namespace

KERNEL_CASE(augment_parameters_of_a_step) { compare(context, 384, 32, 32, 1); }

KERNEL_CASE(augment_parameters_of_other_images) {
  compare(context, 33, 5, 64, 2);
  compare(context, 1, 1, 1, uint64_t{1} << 63);
}
