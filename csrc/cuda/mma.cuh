// Warp-wide matrix instructions, asynchronous copies and approximate functions of sm_80 and later, one
// function each.
//
// In tests without a GPU csrc/emulated/cuda_on_cpu_mma.h, included before, defines MF_MMA_ON_CPU
// and the same functions.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace mf::cuda {

#if !defined(MF_MMA_ON_CPU)

// d [16 x 8] += a [16 x 16] b [16 x 8], products of bfloat16 summed in float32. With g =
// lane / 4 and t = lane % 4 a lane's fragments are
//   a[0] = A[g][2t, 2t+1], a[1] = A[g+8][2t, 2t+1], a[2] = A[g][2t+8, 2t+9], a[3] = A[g+8][2t+8, 2t+9],
//   b[0] = B[2t, 2t+1][g], b[1] = B[2t+8, 2t+9][g],
//   d[0], d[1] = D[g][2t, 2t+1], d[2], d[3] = D[g+8][2t, 2t+1].
__device__ inline void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d [16 x 8] += a [16 x 8] b [8 x 8], whose fragments are the first two words of `a` and the first of
// `b` above.
__device__ inline void mma_16x8x8(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Four 8 x 8 matrices of 16-bit elements from shared memory: lane l gives the address of row l % 8
// of matrix l / 8 and receives of each matrix the elements [g][2t, 2t+1]: the operand a from rows
// of A, the operand b from rows of B transposed. Addresses: multiples of 16.
__device__ inline void load_rows(uint32_t (&r)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Four 8 x 8 matrices of 16-bit elements from shared memory, transposed: lane l gives the address
// of row l % 8 of matrix l / 8 and receives of each matrix the elements [2t, 2t+1][g], one below
// the other: the operand b of mma_16x8x16. Addresses: multiples of 16.
__device__ inline void load_transposed(uint32_t (&r)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Stores 16 aligned bytes to shared memory at once. nvcc cuts up a plain store of a vector that was
// computed word by word, and lanes that are 16 bytes apart then wait for the same banks.
__device__ inline void store_16_bytes(void* shared, const uint32_t* words) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

// Starts a copy of 16 aligned bytes from global to shared memory; it has arrived after
// wait_for_copies() of the same thread.
__device__ inline void copy_16_bytes(void* shared, const void* global) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(address), "l"(global) : "memory");
}

// The same, but 16 bytes of zeros where not `reads`.
__device__ inline void copy_16_bytes_or_zeros(void* shared, const void* global, bool reads) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(global), "r"(reads ? 16 : 0)
               : "memory");
}

__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

// The same pointer to global memory, whose origin the compiler cannot see. Otherwise it keeps the sum of
// the indices instead of the pointer, and computes each address in five instructions instead of one.
template <typename T>
__device__ T* opaque_global(T* pointer) {
  asm("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// The same for shared memory.
template <typename T>
__device__ T* opaque_shared(T* pointer) {
  auto address = static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
  asm("" : "+r"(address));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// A pointer to global memory, advanced by index times stride bytes in one instruction.
template <typename T>
__device__ T* advance_global(T* from, int index, int stride_bytes) {
  T* to;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(to) : "r"(index), "r"(stride_bytes), "l"(from));
  __builtin_assume(__isGlobal(to));
  return to;
}

// 1 / (1 + 2^x) to a relative error of 2^-21. Results below 2^-126 are zero: CUDA's __expf and
// __fdividef treat them with care, in three times the instructions.
__device__ inline float inverse_of_one_plus_power(float x) {
  float power;
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
}

// condition != 0 ? word : 0, by a predicate; the compiler would compute a mask.
__device__ inline uint32_t select_or_zero(unsigned condition, uint32_t word) {
  uint32_t result;
  asm("{.reg .pred p; setp.ne.u32 p, %1, 0; selp.b32 %0, %2, 0, p;}" : "=r"(result) : "r"(condition), "r"(word));
  return result;
}

// threadIdx.x, read here again: what is computed from it is not kept in registers over a loop.
__device__ inline int reload_thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// relu of two numbers, rounded to one word of bfloat16, the first in its low half. NaN stays NaN.
__device__ inline uint32_t rectified_word(float2 x) {
  uint32_t word;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(x.y), "f"(x.x));
  return word;
}

#endif

// Whether this is code for sm_100 or later, whose compiler takes more registers: there more is reloaded.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kIsBlackwell = true;
#else
constexpr bool kIsBlackwell = false;
#endif

constexpr float kMinusLog2E = -1.44269504f;  // exp(-x) = 2^(kMinusLog2E x)

__device__ inline float fast_sigmoid(float x) { return inverse_of_one_plus_power(kMinusLog2E * x); }

// Two numbers as kParts pairs of bfloat16 (the first number in the low half) whose sums give them
// back: each part rounds what the parts before it left. One part keeps 8 significant bits, three all 24
// of a float32.
template <int kParts>
struct Split {
  uint32_t part[kParts];

  __device__ static Split of(float low, float high) {
    Split split;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const __nv_bfloat16 l = __float2bfloat16_rn(low);
      const __nv_bfloat16 h = __float2bfloat16_rn(high);
      low -= __bfloat162float(l);
      high -= __bfloat162float(h);
      split.part[i] = static_cast<uint32_t>(__bfloat16_as_ushort(h)) << 16 | __bfloat16_as_ushort(l);
    }
    return split;
  }
};

}  // namespace mf::cuda
