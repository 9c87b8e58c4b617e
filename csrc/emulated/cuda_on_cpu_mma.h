// The functions of csrc/cuda/mma.cuh for cuda_on_cpu.h, after the PTX manual's tables of which lane
// holds which element.
#pragma once

#define MF_MMA_ON_CPU

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulated/cuda_on_cpu.h"

namespace mf::cuda {

// What the lanes of each warp hand to one instruction. Two sets take turns: a lane that writes one
// of them has passed the barrier of the instruction before, which the other lanes reached only
// after reading that set. So one barrier an instruction is enough.
struct Lanes {
  uint32_t operands[shim::kWarpSize][6];
  const uint16_t* addresses[shim::kWarpSize];
};
inline Lanes lanes_of_warp[shim::kMaxThreads / shim::kWarpSize][2];

SHIM_RUNTIME inline Lanes& lanes_of_this_warp() {
  return lanes_of_warp[shim::thread_number() / shim::kWarpSize][shim::current->collectives % 2];
}

SHIM_RUNTIME inline float bfloat16_in(uint32_t pair, unsigned half) {
  const uint32_t bits = half == 0 ? pair << 16 : pair & 0xffff0000u;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

template <unsigned kDepth>
SHIM_RUNTIME inline void multiply_tile(float (&d)[4], const uint32_t (&a)[kDepth / 4],
                                       const uint32_t (&b)[kDepth / 8]) {
  auto& lanes = lanes_of_this_warp().operands;
  const unsigned g = shim::lane_number() / 4;
  const unsigned t = shim::lane_number() % 4;
  uint32_t* own = lanes[shim::lane_number()];
  for (unsigned i = 0; i < kDepth / 4; ++i) {
    own[i] = a[i];
  }
  for (unsigned i = 0; i < kDepth / 8; ++i) {
    own[4 + i] = b[i];
  }
  shim::warp_barrier(SHIM_SITE);
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned column = 2 * t + i % 2;
    float sum = 0;
    for (unsigned k = 0; k < kDepth; ++k) {
      const unsigned holder = k % 8 / 2;
      sum += bfloat16_in(lanes[g * 4 + holder][i / 2 + k / 8 * 2], k % 2) *
             bfloat16_in(lanes[column * 4 + holder][4 + k / 8], k % 2);
    }
    d[i] += sum;
  }
}

SHIM_RUNTIME inline void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_tile<16>(d, a, b);
}
SHIM_RUNTIME inline void mma_16x8x8(float (&d)[4], const uint32_t (&a)[2], uint32_t b) { multiply_tile<8>(d, a, {b}); }

SHIM_RUNTIME inline void collect_address(Lanes& lanes, const void* row) {
  shim::expect_aligned(row, 16);
  lanes.addresses[shim::lane_number()] = static_cast<const uint16_t*>(row);
}

SHIM_RUNTIME inline const uint16_t* address_of(const Lanes& lanes, unsigned lane) { return lanes.addresses[lane]; }

// The elements are read in sight of the sanitizers.
inline void load_transposed(uint32_t (&r)[4], const void* row) {
  const unsigned g = shim::lane_number() / 4;
  const unsigned t = shim::lane_number() % 4;
  Lanes& lanes = lanes_of_this_warp();
  collect_address(lanes, row);
  shim::warp_barrier(SHIM_SITE);
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    const uint32_t low = address_of(lanes, matrix * 8 + 2 * t)[g];
    const uint32_t high = address_of(lanes, matrix * 8 + 2 * t + 1)[g];
    r[matrix] = high << 16 | low;
  }
}

inline void load_rows(uint32_t (&r)[4], const void* row) {
  const unsigned g = shim::lane_number() / 4;
  const unsigned t = shim::lane_number() % 4;
  Lanes& lanes = lanes_of_this_warp();
  collect_address(lanes, row);
  shim::warp_barrier(SHIM_SITE);
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    const uint16_t* from = address_of(lanes, matrix * 8 + g) + 2 * t;
    r[matrix] = static_cast<uint32_t>(from[1]) << 16 | from[0];
  }
}

inline void store_16_bytes(void* shared, const uint32_t* words) {
  shim::expect_aligned(shared, 16);
  std::memcpy(shared, words, 16);
}

inline void copy_16_bytes(void* shared, const void* global) {
  shim::expect_aligned(shared, 16);
  shim::expect_aligned(global, 16);
  std::memcpy(shared, global, 16);
}

inline void copy_16_bytes_or_zeros(void* shared, const void* global, bool reads) {
  if (reads) {
    copy_16_bytes(shared, global);
  } else {
    const uint32_t zeros[4] = {};
    store_16_bytes(shared, zeros);
  }
}

inline void wait_for_copies() {}

template <typename T>
T* opaque_global(T* pointer) {
  return pointer;
}

template <typename T>
T* opaque_shared(T* pointer) {
  return pointer;
}

template <typename T>
T* advance_global(T* from, int index, int stride_bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(from) + int64_t{index} * stride_bytes);
}

inline uint32_t select_or_zero(unsigned condition, uint32_t word) { return condition != 0 ? word : 0; }

inline float inverse_of_one_plus_power(float x) { return 1.0f / (1.0f + std::exp2(x)); }

inline int reload_thread_index() { return static_cast<int>(threadIdx.x); }

inline uint32_t rectified_word(float2 x) {
  const __nv_bfloat16 halves[2] = {__nv_bfloat16(x.x <= 0.0f ? 0.0f : x.x), __nv_bfloat16(x.y <= 0.0f ? 0.0f : x.y)};
  uint32_t word;
  std::memcpy(&word, halves, sizeof word);
  return word;
}

}  // namespace mf::cuda
