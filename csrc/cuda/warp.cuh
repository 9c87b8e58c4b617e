// Small pieces that kernels share: reductions within a warp, and numbers of any storage type as
// float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "api/float_array.h"

namespace mf::cuda {

constexpr int kLanes = 32;

__device__ inline float warp_sum(float x) {
  for (int bits = 16; bits > 0; bits /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, bits);
  }
  return x;
}

__device__ inline float warp_largest(float x) {
  for (int bits = 16; bits > 0; bits /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, bits));
  }
  return x;
}

__device__ inline float load(const FloatArray& array, int64_t i) {
  switch (array.type) {
    case FloatType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(array.data)[i]);
    case FloatType::kFloat16:
      return __half2float(static_cast<const __half*>(array.data)[i]);
    default:
      return static_cast<const float*>(array.data)[i];
  }
}

__device__ inline void store(const MutableFloatArray& array, int64_t i, float x) {
  switch (array.type) {
    case FloatType::kBFloat16:
      static_cast<__nv_bfloat16*>(array.data)[i] = __float2bfloat16_rn(x);
      break;
    case FloatType::kFloat16:
      static_cast<__half*>(array.data)[i] = __float2half_rn(x);
      break;
    default:
      static_cast<float*>(array.data)[i] = x;
  }
}

}  // namespace mf::cuda
