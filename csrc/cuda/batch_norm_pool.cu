#include <cuda_runtime.h>

#include "core/check.h"
#include "cuda/batch_norm_pool.cuh"
#include "cuda/launch.cuh"

namespace mf::cuda {
namespace {

constexpr int kPooledThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kPooledThreads, 4) batch_norm_pool_kernel(const BatchNormPoolForward params) {
  batch_norm_pool_block<T>(params);
}

template <typename T>
__global__ void __launch_bounds__(kPoolGradThreads) batch_norm_pool_sums_kernel(const BatchNormPoolBackward params) {
  MF_DYNAMIC_SHARED(shared);
  batch_norm_pool_sums_block<T>(params, reinterpret_cast<float*>(shared));
}

template <typename T>
__global__ void __launch_bounds__(kPooledThreads, 4)
    batch_norm_pool_backward_kernel(const BatchNormPoolBackward params) {
  batch_norm_pool_backward_block<T>(params);
}

void check(const MapShape& shape) {
  MF_CHECK(shape.channels % kGroup == 0, "channels is ", shape.channels, "; wanted a multiple of ", kGroup);
  MF_CHECK(shape.pixels_per_image >= 1 && shape.pixels() <= int64_t{1} << 30, "the map has ", shape.images,
           " images of ", shape.pixels_per_image, " pixels; wanted at least one pixel and at most 2^30 in all");
}

// A block's warps lie side by side over the channels.
dim3 blocks_of(const MapShape& shape) {
  constexpr int64_t kWidth = kPooledThreads / kLanes * kPooledGroups * kGroup;
  const int64_t parts = (shape.channels + kWidth - 1) / kWidth;
  MF_CHECK(parts <= 65535, "there are ", shape.channels, " channels; wanted at most ", 65535 * kWidth);
  return {static_cast<unsigned>(shape.images), static_cast<unsigned>(parts)};
}

}  // namespace

void batch_norm_pool(const BatchNormPoolForward& params, Stream stream) {
  check(params.shape);
  if (params.shape.images == 0 || params.shape.channels == 0) {
    return;
  }
  with_type(params.type, [&](auto type) {
    MF_LAUNCH_AFTER((batch_norm_pool_kernel<decltype(type)>), blocks_of(params.shape), kPooledThreads, 0, stream,
                    params);
  });
}

// Without images there are still gradients of the parameters to write.
void batch_norm_pool_backward(const BatchNormPoolBackward& params, Stream stream) {
  check(params.shape);
  if (params.shape.channels == 0) {
    return;
  }
  with_type(params.type, [&](auto type) {
    using T = decltype(type);
    constexpr size_t kBytes = 2 * kPoolGradThreads * sizeof(float);
    const auto blocks = static_cast<unsigned>((params.shape.channels + kPoolStateChannels - 1) / kPoolStateChannels);
    MF_LAUNCH_AFTER((batch_norm_pool_sums_kernel<T>), blocks, kPoolGradThreads, kBytes, stream, params);
    if (params.shape.images > 0 && (params.x_grad != nullptr || params.residual_grad != nullptr)) {
      MF_LAUNCH_AFTER((batch_norm_pool_backward_kernel<T>), blocks_of(params.shape), kPooledThreads, 0, stream, params);
    }
  });
}

}  // namespace mf::cuda
