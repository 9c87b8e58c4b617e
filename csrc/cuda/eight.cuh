// Eight adjacent numbers of a map, read and written as words of 16 bytes, computed with in float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace mf::cuda {

// As they lie in memory: 16 bytes, or 32 of float32.
template <typename T>
struct Eight {
  static constexpr int kWords = sizeof(T) / 2;
  uint4 word[kWords];
};

// `memory` is aligned to 16 bytes.
template <typename T>
__device__ inline Eight<T> load_eight(const T* memory) {
  Eight<T> eight;
#pragma unroll
  for (int i = 0; i < Eight<T>::kWords; ++i) {
    eight.word[i] = reinterpret_cast<const uint4*>(memory)[i];
  }
  return eight;
}

template <typename T>
__device__ inline void store_eight(T* memory, const Eight<T>& eight) {
#pragma unroll
  for (int i = 0; i < Eight<T>::kWords; ++i) {
    reinterpret_cast<uint4*>(memory)[i] = eight.word[i];
  }
}

template <typename T>
__device__ inline void unpack(const Eight<T>& eight, float (&x)[8]) {
  uint32_t words[4 * Eight<T>::kWords];
  memcpy(words, eight.word, sizeof(words));
  if constexpr (std::is_same_v<T, float>) {
    memcpy(x, words, sizeof(words));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 pair;
      if constexpr (std::is_same_v<T, __half>) {
        __half2 halves;
        memcpy(&halves, &words[i], sizeof(halves));
        pair = __half22float2(halves);
      } else {
        __nv_bfloat162 halves;
        memcpy(&halves, &words[i], sizeof(halves));
        pair = __bfloat1622float2(halves);
      }
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}

// Rounded to T.
template <typename T>
__device__ inline Eight<T> pack(const float (&x)[8]) {
  Eight<T> eight;
  if constexpr (std::is_same_v<T, float>) {
    memcpy(eight.word, x, sizeof(x));
  } else {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 halves = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&words[i], &halves, sizeof(halves));
      } else {
        const __nv_bfloat162 halves = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&words[i], &halves, sizeof(halves));
      }
    }
    memcpy(eight.word, words, sizeof(words));
  }
  return eight;
}

__device__ inline void load_floats(const float* memory, float (&x)[8]) { unpack(load_eight(memory), x); }

}  // namespace mf::cuda
