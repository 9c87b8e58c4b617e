#include <cuda_runtime.h>

#include "cuda/augment.cuh"
#include "cuda/launch.cuh"

namespace mf::cuda {
namespace {

// Four blocks a multiprocessor leave 64 registers a thread; left to itself, ptxas takes 48 on sm_80
// and spills.
template <typename T>
__global__ void __launch_bounds__(kAugmentThreads, 4) augment_kernel(const AugmentParams params) {
  MF_DYNAMIC_SHARED(shared);
  augment_block<T>(params, shared);
}

}  // namespace

void augment(const AugmentParams& params, Stream stream) {
  MF_CHECK(params.views >= 0 && params.views <= INT32_MAX, "views is ", params.views, "; wanted 0 to ", INT32_MAX);
  MF_CHECK(params.height <= AugmentParams::kMaxSide && params.width <= AugmentParams::kMaxSide, "images are of ",
           params.height, "x", params.width, " pixels; wanted sides up to ", AugmentParams::kMaxSide);
  static_assert(sizeof(AugmentShared) + 2 * AugmentParams::kMaxSide * sizeof(SamplePosition) + 16 + kStagedImageBytes <=
                    48 * 1024,
                "shared memory that a launch may ask for by itself");
  if (params.views == 0) {
    return;
  }
  const auto bytes = static_cast<size_t>(augment_shared_bytes(params.height, params.width));
  with_type<BFloat16>(params.type, [&](auto type) {
    MF_LAUNCH((augment_kernel<decltype(type)>), static_cast<unsigned>(params.views), kAugmentThreads, bytes, stream,
              params);
  });
}

}  // namespace mf::cuda
