#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "cuda/norm_pool.cuh"

namespace mf::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kPoolThreads, 8) norm_pool_kernel(const NormPoolForward params) {
  norm_pool_block<T>(params);
}

template <typename T>
__global__ void __launch_bounds__(kPoolGradThreads)
    norm_pool_gradient_kernel(const NormPoolBackward params, int64_t state_blocks) {
  MF_DYNAMIC_SHARED(shared);
  const auto block = static_cast<int64_t>(blockIdx.x);
  if (block < state_blocks) {
    norm_pool_state_block<T>(params, block, reinterpret_cast<float*>(shared));
  } else {
    norm_pool_map_block<T>(params, block - state_blocks);
  }
}

void check(const NormPoolInput& in) {
  MF_CHECK(in.images >= 0 && in.images <= INT32_MAX, "there are ", in.images, " images; wanted 0 to ", INT32_MAX);
  MF_CHECK(in.pixels >= 1 && in.channels >= 0 && in.channels % (in.x.type == FloatType::kFloat32 ? 4 : 8) == 0,
           "there are ", in.pixels, " pixels and ", in.channels,
           " channels; wanted at least 1, and a multiple of 8 (4 in float32)");
}

}  // namespace

void norm_pool(const NormPoolForward& params, Stream stream) {
  const NormPoolInput& in = params.input;
  check(in);
  if (in.images == 0 || in.channels == 0) {
    return;
  }
  with_type(in.x.type, [&](auto type) {
    using T = decltype(type);
    constexpr int64_t kWidth = int64_t{kPoolThreads} * kPoolVector<T>;
    const int64_t parts = (in.channels + kWidth - 1) / kWidth;
    MF_CHECK(parts <= 65535, "there are ", in.channels, " channels; wanted at most ", 65535 * kWidth);
    const dim3 blocks(static_cast<unsigned>(in.images), static_cast<unsigned>(parts));
    MF_LAUNCH((norm_pool_kernel<T>), blocks, kPoolThreads, 0, stream, params);
  });
}

// Without images there is still a gradient of the state to write.
void norm_pool_backward(const NormPoolBackward& params, Stream stream) {
  const NormPoolInput& in = params.input;
  check(in);
  with_type(in.x.type, [&](auto type) {
    using T = decltype(type);
    constexpr int64_t kWidth = int64_t{kPoolGradVectors} * kPoolVector<T>;
    const int64_t state_blocks =
        params.dstate == nullptr ? 0 : (in.channels + kPoolStateChannels - 1) / kPoolStateChannels;
    const int64_t parts = params.dx.data == nullptr ? 0 : (in.channels + kWidth - 1) / kWidth;
    const int64_t blocks = state_blocks + in.images * parts;
    MF_CHECK(blocks <= INT32_MAX, "a map of ", in.images, " images and ", in.channels, " channels needs ", blocks,
             " blocks; wanted at most ", INT32_MAX);
    if (blocks > 0) {
      constexpr size_t kSharedBytes = 2 * kPoolGradThreads * sizeof(float);
      MF_LAUNCH((norm_pool_gradient_kernel<T>), static_cast<unsigned>(blocks), kPoolGradThreads, kSharedBytes, stream,
                params, state_blocks);
    }
  });
}

}  // namespace mf::cuda
