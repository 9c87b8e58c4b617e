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

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

__device__ inline void from_float(float x, float& result) { result = x; }
__device__ inline void from_float(float x, __nv_bfloat16& result) { result = __float2bfloat16_rn(x); }
__device__ inline void from_float(float x, __half& result) { result = __float2half_rn(x); }

// kCount floats, four at once where there are so many: then the address is a multiple of 16.
template <int kCount>
__device__ void load_floats(const float* source, float (&result)[kCount]) {
  constexpr int kWide = kCount % 4 == 0 ? 4 : 1;
  using Wide = Elements<float, kWide>;
#pragma unroll
  for (int first = 0; first < kCount; first += kWide) {
    const Wide values = *reinterpret_cast<const Wide*>(source + first);
    for (int k = 0; k < kWide; ++k) {
      result[first + k] = values.value[k];
    }
  }
}

template <int kCount>
__device__ void store_floats(float* target, const float (&source)[kCount]) {
  constexpr int kWide = kCount % 4 == 0 ? 4 : 1;
  using Wide = Elements<float, kWide>;
#pragma unroll
  for (int first = 0; first < kCount; first += kWide) {
    Wide values;
    for (int k = 0; k < kWide; ++k) {
      values.value[k] = source[first + k];
    }
    *reinterpret_cast<Wide*>(target + first) = values;
  }
}

}  // namespace mf::cuda
