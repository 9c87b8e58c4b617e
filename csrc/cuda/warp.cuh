// Reductions within a warp, and access to numbers whose type is known at run time.
#pragma once

#include <cstdint>

#include "api/float_array.h"
#include "cuda/vec.cuh"

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
  return with_type(array.type, [&](auto type) { return to_float(static_cast<const decltype(type)*>(array.data)[i]); });
}

__device__ inline void store(const MutableFloatArray& array, int64_t i, float x) {
  with_type(array.type, [&](auto type) {
    using T = decltype(type);
    Vec<T, 1>::pack({x}).store(static_cast<T*>(array.data) + i);
  });
}

}  // namespace mf::cuda
