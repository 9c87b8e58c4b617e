#include <numeric>

#include "api/null.h"
#include "kernel_case.h"

KERNEL_CASE(null_copies) {
  for (const size_t bytes : {0, 1, 255, 256, 1000}) {
    std::vector<signed char> input(bytes);
    std::iota(input.begin(), input.end(), static_cast<signed char>(3));
    auto* output = context.poisoned<signed char>(bytes);
    mf::cuda::null({context.upload(input), output, static_cast<int64_t>(bytes)}, context.stream());
    context.expect_equal("output", output, input);
  }
}

COMPILED_CASE(null_copies_in_several_turns) {
  std::vector<signed char> input(6 * 256 * 1024 + 100);
  std::iota(input.begin(), input.end(), static_cast<signed char>(3));
  auto* output = context.poisoned<signed char>(input.size());
  mf::cuda::null({context.upload(input), output, static_cast<int64_t>(input.size())}, context.stream());
  context.expect_equal("output", output, input);
}
