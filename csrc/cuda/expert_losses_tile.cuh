// Products of rows of projections on the tensor cores.
//
// A warp takes 16 rows j at a time and computes the 16 x 16 products z_i . z_j from the rows as
// they are; inverse norms and 1 / temperature are applied to the float32 results. bfloat16 values
// multiply exactly; float32 is split into three bfloat16 parts (Split).
//
// |s_ij - exact| is at most the sum of three errors, here in units of 2^-24 / temperature, which is
// 8.5e-7 at 0.07, for projections of 128 elements. In units of |z_i| |z_j| no partial sum is above 1.
// - Products of parts that are left out: three below 2^-24 (float32: 3).
// - Sums that the tensor cores cut towards zero. An A100 adds the 16 products of an instruction in two
//   chained sums of eight (Fasi et al. 2021, PeerJ CS 7:e330). Each cuts its products one bit below
//   the last one of its largest term, by less than 1/2 each, and its result to 24 bits, by less than 1:
//   10 an instruction; later GPUs keep more bits. Sixteen elements take 1 instruction for bfloat16 and 6
//   for float32: 80 and 480 in all.
// - float32 rounding: 10 of each norm's squares, 1 of its root and 1 of its inverse, 6 of the factors
//   and their products: 30.
// So 9.4e-5 for bfloat16 and 4.4e-4 for float32. Cuts reach this only if all are whole and of one sign.
// A model of the A100's sums finds, for rows of normal numbers, at most 2e-6 and 8e-6, and for pairs of
// equal rows, where all cuts are of one sign, 1e-5 and 5e-5.
#pragma once

#include <cmath>
#include <type_traits>

#include "api/expert_losses.h"
#include "cuda/mma.cuh"
#include "cuda/vec.cuh"
#include "cuda/warp.cuh"

namespace mf::cuda {

constexpr int kAnchorTile = 16;            // rows i of a block
constexpr int kWarpTile = 16;              // rows j of a warp at a time
constexpr int kSizeTile = 128;             // elements of a projection at a time
constexpr int kRowStride = kSizeTile + 8;  // rows of a tile start 4 (16-bit) or 8 (float32) banks apart: no conflicts
constexpr int kSumStride = kSizeTile + 4;

template <typename T>
inline constexpr int kPartsOf = sizeof(T) == 2 ? 1 : 3;

__device__ inline float inverse_of_norm(float squared) {
  const float norm = sqrtf(squared);
  return 1.0f / (norm < static_cast<float>(kNoDirection) ? static_cast<float>(kNoDirection) : norm);  // NaN stays NaN
}

// Gradients stop where the norm was cut off.
__device__ inline float slope(float inverse) {
  return inverse >= 1.0f / static_cast<float>(kNoDirection) ? 0.0f : inverse;
}

__device__ inline Split<1> pair_of(const __nv_bfloat16* x) { return {{Vec<__nv_bfloat16, 2>::load(x).word[0]}}; }
__device__ inline Split<3> pair_of(const float* x) {
  const float2 pair = pair_at(x);
  return Split<3>::of(pair.x, pair.y);
}

template <int kRegisters, int kParts>
struct Operand {
  uint32_t part[kParts][kRegisters];

  __device__ void set(int i, const Split<kParts>& split) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      part[p][i] = split.part[p];
    }
  }
};

// d += a b with every product of two parts that together are less than max(kA, kB) parts down.
template <int kA, int kB>
__device__ void multiply(float (&d)[4], const Operand<4, kA>& a, const Operand<2, kB>& b) {
  constexpr int kDepth = kA > kB ? kA : kB;
#pragma unroll
  for (int i = kA - 1; i >= 0; --i) {
#pragma unroll
    for (int j = kB - 1; j >= 0; --j) {
      if (i + j < kDepth) {
        mma_16x8x16(d, a.part[i], b.part[j]);
      }
    }
  }
}

// Sum of the squares of a pair of numbers.
template <int kParts>
__device__ float squares(const Split<kParts>& pair) {
  float low = 0.0f;
  float high = 0.0f;
#pragma unroll
  for (int p = kParts - 1; p >= 0; --p) {
    low += __bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(pair.part[p] & 0xffffu)));
    high += __bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(pair.part[p] >> 16)));
  }
  return low * low + high * high;
}

// Elements [16 rows j][16 columns from `column`] of a tile as two operands b whose sums run over j:
// columns 0-7 and 8-15.
template <typename T>
__device__ void load_columns(const T* rows, int column, int lane, Operand<2, kPartsOf<T>> (&b)[2]) {
  if constexpr (sizeof(T) == 2) {
    uint32_t r[4];
    load_transposed(r, rows + (lane % 16) * kRowStride + column + lane / 16 * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b[i / 2].part[0][i % 2] = r[i];
    }
  } else {
    const T* from = rows + 2 * (lane % 4) * kRowStride + column + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* at = from + i % 2 * 8 * kRowStride + i / 2 * 8;
      b[i / 2].set(i % 2, Split<3>::of(at[0], at[kRowStride]));
    }
  }
}

template <typename T, int kWarps>
struct ContrastShared {
  static constexpr int kOthers = kWarps * kWarpTile;
  // Two tiles take turns: while one is multiplied, the next arrives.
  alignas(16) T tile[2][kAnchorTile + kOthers][kRowStride];
  alignas(16) float sum[kAnchorTile][kSumStride];
  float of_warp[4][kWarps][kAnchorTile];
};

// The projections of a block: the anchors [first, first + kAnchorTile) of `expert`.
struct ContrastBlock {
  int64_t expert;
  int64_t first;
};

// Loads elements [column, column + kSizeTile) of the anchors and of the rows from `other` on into a
// tile. What lies beyond the valid rows or the projections is zero: padding is never read.
template <typename T, int kWarps>
__device__ void load_tile(const ExpertLossesInput& in, const ContrastBlock& block, int64_t valid, int64_t other,
                          int64_t column, bool aligned, T (&tile)[kAnchorTile + kWarps * kWarpTile][kRowStride]) {
  constexpr int kRows = kAnchorTile + kWarps * kWarpTile;
  constexpr int kWord = 16 / sizeof(T);
  constexpr int kWords = kSizeTile / kWord;
  const T* projections = static_cast<const T*>(in.projections.data) + block.expert * in.rows * in.projection_size;
  for (int i = threadIdx.x; i < kRows * kWords; i += kWarps * kLanes) {
    const int row = i / kWords;
    const int word = i % kWords * kWord;
    const int64_t from = row < kAnchorTile ? block.first + row : other + row - kAnchorTile;
    T* to = &tile[row][word];
    const T* source = projections + from * in.projection_size + column + word;
    if (from >= valid || column + word >= in.projection_size) {
      Vec<T, kWord>{}.store(to);
    } else if (aligned) {
      copy_16_bytes(to, source);
    } else {
      for (int k = 0; k < kWord; ++k) {
        to[k] = column + word + k < in.projection_size ? source[k] : static_cast<T>(0.0f);
      }
    }
  }
}

template <typename T>
__device__ bool is_aligned(const ExpertLossesInput& in) {
  return (reinterpret_cast<uintptr_t>(in.projections.data) | static_cast<uintptr_t>(in.projection_size * sizeof(T))) %
             16 ==
         0;
}

// Adds to d[n] the products of the anchors with the warp's rows 8 n to 8 n + 7 over `width`
// elements of a tile, and to the squares of both.
template <typename T>
__device__ void multiply_tile(const T (*anchors)[kRowStride], const T (*others)[kRowStride], int64_t width, int lane,
                              float (&d)[2][4], float (&anchor_squares)[2], float (&other_squares)[2]) {
  constexpr int kParts = kPartsOf<T>;
  const int g = lane / 4;
  const int t = lane % 4;
#pragma unroll 2
  for (int k = 0; k < kSizeTile && k < width; k += 16) {
    Operand<4, kParts> a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto pair = pair_of(&anchors[g + i % 2 * 8][k + 2 * t + i / 2 * 8]);
      a.set(i, pair);
      anchor_squares[i % 2] += squares(pair);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      Operand<2, kParts> b;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto pair = pair_of(&others[n * 8 + g][k + 2 * t + i * 8]);
        b.set(i, pair);
        other_squares[n] += squares(pair);
      }
      multiply(d[n], a, b);
    }
  }
}

// The number subtracted from the exponents of a sum of exponentials whose largest exponent is
// `highest`: that one, or 0 where no element counts (-inf - -inf would be NaN).
__device__ inline float taken_off(float highest) { return highest == -INFINITY ? 0.0f : highest; }

// The four lanes of a group g each hold a part of row g's (and g + 8's) sum.
__device__ inline float group_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace mf::cuda
