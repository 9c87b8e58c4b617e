#include <cuda_runtime.h>

#include "cuda/augment_parameters.cuh"
#include "cuda/launch.cuh"

namespace mf::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) augment_parameters_kernel(const AugmentParametersParams params) {
  augment_parameters_block(params);
}

// A launch of its own: no block of the draw may read the counter after another has advanced it.
__global__ void advance_counter_kernel(int64_t* counter) { ++*counter; }

}  // namespace

void augment_parameters(const AugmentParametersParams& params, Stream stream) {
  MF_CHECK(params.count >= 0 && params.count <= UINT32_MAX, "count is ", params.count, "; wanted 0 to ", UINT32_MAX);
  if (params.count > 0) {
    const auto blocks = static_cast<unsigned>((params.count + kThreads - 1) / kThreads);
    MF_LAUNCH(augment_parameters_kernel, blocks, kThreads, 0, stream, params);
  }
  if (params.counter != nullptr) {
    MF_LAUNCH(advance_counter_kernel, 1, 1, 0, stream, params.counter);
  }
}

}  // namespace mf::cuda
