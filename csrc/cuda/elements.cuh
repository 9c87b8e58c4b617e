// Vectors of numbers of any storage type, and the numbers as float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mf::cuda {

// Read and written at once where the address is a multiple of its size.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Elements {
  T value[kCount];
};

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ inline float to_float(__half x) {
  return __half2float(x);
}

__device__ inline void from_float(float x, float& result) {
  result = x;
}
__device__ inline void from_float(float x, __nv_bfloat16& result) {
  result = __float2bfloat16_rn(x);
}
__device__ inline void from_float(float x, __half& result) {
  result = __float2half_rn(x);
}

}  // namespace mf::cuda
