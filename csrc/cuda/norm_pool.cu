#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "cuda/norm_pool.cuh"

namespace mf::cuda {
namespace {

template <typename T, int kVector>
__global__ void __launch_bounds__(kPoolThreads, 8) norm_pool_kernel(const NormPoolForward params) {
  norm_pool_block<T, kVector>(params);
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kPoolGradThreads)
    norm_pool_gradient_kernel(const NormPoolBackward params, int64_t state_blocks) {
  MF_DYNAMIC_SHARED(shared);
  const auto block = static_cast<int64_t>(blockIdx.x);
  if (block < state_blocks) {
    norm_pool_state_block<T>(params, block, reinterpret_cast<float*>(shared));
  } else {
    norm_pool_map_block<T, kVector>(params, block - state_blocks);
  }
}

void check(const NormPoolInput& in) {
  MF_CHECK(in.images >= 0 && in.images <= INT32_MAX, "there are ", in.images, " images; wanted 0 to ", INT32_MAX);
  MF_CHECK(in.pixels >= 1 && in.channels >= 0, "there are ", in.pixels, " pixels and ", in.channels,
           " channels; wanted at least 1 and at least 0");
}

// Whether vectors of 16 bytes may be read and written: pointers that are null are not used.
template <typename... Pointers>
bool is_aligned(Pointers... pointers) {
  return (reinterpret_cast<uintptr_t>(pointers) | ...) % 16 == 0;
}

template <typename T, int kVector>
void launch_forward(const NormPoolForward& params, Stream stream) {
  const int64_t parts = (params.input.channels / kVector + kPoolThreads - 1) / kPoolThreads;
  MF_CHECK(parts <= 65535, "there are ", params.input.channels, " channels; wanted at most ",
           65535 * kPoolThreads * kVector);
  const dim3 blocks(static_cast<unsigned>(params.input.images), static_cast<unsigned>(parts));
  MF_LAUNCH((norm_pool_kernel<T, kVector>), blocks, kPoolThreads, 0, stream, params);
}

template <typename T>
void forward(const NormPoolForward& params, Stream stream) {
  constexpr int kVector = 16 / sizeof(T);
  const NormPoolInput& in = params.input;
  if (in.channels % kVector == 0 && is_aligned(in.x.data, in.state, params.pooled.data, params.counts, params.sums)) {
    launch_forward<T, kVector>(params, stream);
  } else {
    launch_forward<T, 1>(params, stream);
  }
}

template <typename T, int kVector>
void launch_backward(const NormPoolBackward& params, Stream stream) {
  const NormPoolInput& in = params.input;
  const int64_t state_blocks =
      params.dstate == nullptr ? 0 : (in.channels + kPoolStateChannels - 1) / kPoolStateChannels;
  const int64_t parts =
      params.dx.data == nullptr ? 0 : (in.channels / kVector + kPoolGradVectors - 1) / kPoolGradVectors;
  const int64_t blocks = state_blocks + in.images * parts;
  MF_CHECK(blocks <= INT32_MAX, "a map of ", in.images, " images and ", in.channels, " channels needs ", blocks,
           " blocks; wanted at most ", INT32_MAX);
  if (blocks > 0) {
    constexpr size_t kSharedBytes = 2 * kPoolGradThreads * sizeof(float);
    MF_LAUNCH((norm_pool_gradient_kernel<T, kVector>), static_cast<unsigned>(blocks), kPoolGradThreads, kSharedBytes,
              stream, params, state_blocks);
  }
}

template <typename T>
void backward(const NormPoolBackward& params, Stream stream) {
  constexpr int kVector = 16 / sizeof(T);
  const NormPoolInput& in = params.input;
  if (in.channels % kVector == 0 && is_aligned(in.x.data, in.state, params.grad, params.dx.data)) {
    launch_backward<T, kVector>(params, stream);
  } else {
    launch_backward<T, 1>(params, stream);
  }
}

}  // namespace

void norm_pool(const NormPoolForward& params, Stream stream) {
  check(params.input);
  if (params.input.images == 0 || params.input.channels == 0) {
    return;
  }
  with_type(params.input.x.type, [&](auto type) { forward<decltype(type)>(params, stream); });
}

// Without images there is still a gradient of the state to write.
void norm_pool_backward(const NormPoolBackward& params, Stream stream) {
  check(params.input);
  with_type(params.input.x.type, [&](auto type) { backward<decltype(type)>(params, stream); });
}

}  // namespace mf::cuda
