// Adjacent numbers of one storage type, moved as words and computed with in float32; and the one
// choice of a kernel's instance by a type that is known at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "api/float_array.h"
#include "core/bfloat16.h"

#if defined(__CUDACC__)
#define MF_EXPECT_ALIGNED(address, bytes)  // csrc/emulated/cuda_on_cpu.h looks
#endif

namespace mf::cuda {

template <typename Function>
MF_HD auto with_type(FloatType type, const Function& f) {
  return mf::with_type<__nv_bfloat16>(type, f);
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Two numbers of bfloat16 in one word, the first in its low half. The words are values: converting
// through a pointer to shared memory would read it byte by byte.
__device__ inline float2 floats_of(uint32_t word) { return {float_of(word << 16), float_of(word & 0xffff0000u)}; }

// Rounded.
__device__ inline uint32_t word_of(float2 x) {
  const __nv_bfloat162 pair = __float22bfloat162_rn(x);
  uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

// N numbers. Addresses are aligned to the vector's size, or to 16 bytes where it is larger.
template <typename T, int N>
struct Vec {
  static constexpr int kBytes = N * sizeof(T);
  static constexpr int kWords = (kBytes + 3) / 4;
  using Word = std::conditional_t<kBytes % 16 == 0, uint4, std::conditional_t<kBytes == 8, uint64_t, uint32_t>>;
  alignas(Word) uint32_t word[kWords];  // all zero: zeros

  __device__ static Vec load(const T* from) {
    MF_EXPECT_ALIGNED(from, kBytes == 2 ? 2 : sizeof(Word));
    Vec vec;
    if constexpr (kBytes == 2) {
      vec.word[0] = *reinterpret_cast<const uint16_t*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / static_cast<int>(sizeof(Word)); ++i) {
        reinterpret_cast<Word*>(vec.word)[i] = reinterpret_cast<const Word*>(from)[i];
      }
    }
    return vec;
  }
  // The same for what no kernel reads soon again. In a build with MF_EVICT_LAST_READS the caches give
  // it up first (docs/benchmarks.md); whether that helps is still to be measured.
  __device__ static Vec load_last(const T* from) {
#if defined(MF_EVICT_LAST_READS) && defined(__CUDACC__)
    Vec vec;
#pragma unroll
    for (int i = 0; i < kBytes / static_cast<int>(sizeof(Word)); ++i) {
      reinterpret_cast<Word*>(vec.word)[i] = __ldcs(reinterpret_cast<const Word*>(from) + i);
    }
    return vec;
#else
    return load(from);
#endif
  }
  __device__ void store(T* to) const {
    MF_EXPECT_ALIGNED(to, kBytes == 2 ? 2 : sizeof(Word));
    if constexpr (kBytes == 2) {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / static_cast<int>(sizeof(Word)); ++i) {
        reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(word)[i];
      }
    }
  }

  __device__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return float_of(word[i]);
    } else {
      const float2 two = floats_of(word[i / 2]);
      return i % 2 == 0 ? two.x : two.y;
    }
  }
  // Numbers 2 i and 2 i + 1.
  __device__ float2 pair(int i) const { return {(*this)[2 * i], (*this)[2 * i + 1]}; }
  __device__ void set_pair(int i, float2 x) {
    if constexpr (sizeof(T) == 4) {
      word[2 * i] = bits_of(x.x);
      word[2 * i + 1] = bits_of(x.y);
    } else {
      word[i] = word_of(x);
    }
  }

  __device__ void unpack(float (&x)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = (*this)[i];
    }
  }
  // Rounded to T.
  __device__ static Vec pack(const float (&x)[N]) {
    Vec vec;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        vec.word[i] = bits_of(x[i]);
      } else {
        vec.word[i] = word_of({x[2 * i], N > 1 ? x[(2 * i + 1) % N] : 0.0f});
      }
    }
    return vec;
  }
};

template <typename T>
__device__ float2 pair_at(const T* from) {
  return Vec<T, 2>::load(from).pair(0);
}

template <typename T>
__device__ void store_pair(T* to, float2 x) {
  Vec<T, 2> vec;
  vec.set_pair(0, x);
  vec.store(to);
}

template <int N>
__device__ void load_floats(const float* from, float (&x)[N]) {
  Vec<float, N>::load(from).unpack(x);
}

}  // namespace mf::cuda
