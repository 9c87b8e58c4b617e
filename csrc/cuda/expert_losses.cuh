// Kernel bodies of the expert losses; tests/cpp runs them on the CPU too. Algebra:
// core/expert_losses.h.
//
// Three launches: statistics of every row; the terms from them; the gradients, for which the
// similarities are computed once more. The problem is small (three products of 384 x 128 x 384 an
// expert, 3 MB in all), so what counts is latency: each launch holds all three losses side by side,
// one block for 16 anchors of one expert and all the rows they meet, or one warp for a row of
// logits or features. Every sum has a fixed order and there are no atomics.
//
// The contrastive blocks. A warp takes 16 rows j at a time and computes the 16 x 16 products z_i .
// z_j on the tensor cores from the rows as they are; inverse norms and 1 / temperature are applied
// to the float32 results. bfloat16 values multiply exactly; float16 and float32 are split into two
// and three bfloat16 parts (Split), of whose products those are left out that lie below 2^-16 and
// 2^-24 of |z_i| |z_j|. So |s_ij - exact| is at most 3 x 2^-16 / temperature + float32 rounding:
// 6.6e-4 for float16 at 0.07 and below 1e-5 else.
#pragma once

#include <cmath>
#include <type_traits>

#include "api/expert_losses.h"
#include "core/check.h"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/warp.cuh"

namespace mf::cuda {

constexpr int kAnchorTile = 16;            // rows i of a block
constexpr int kWarpTile = 16;              // rows j of a warp at a time
constexpr int kSizeTile = 128;             // elements of a projection at a time
constexpr int kRowStride = kSizeTile + 8;  // rows of a tile start 4 (16-bit) or 8 (float32) banks apart: no conflicts
constexpr int kSumStride = kSizeTile + 4;

template <typename T>
inline constexpr int kPartsOf = std::is_same_v<T, float>    ? 3
                                : std::is_same_v<T, __half> ? 2
                                                            : 1;

// --- small pieces
// --------------------------------------------------------------------------------------------------------------

__device__ inline float inverse_of_norm(float squared) {
  const float norm = sqrtf(squared);
  return 1.0f / (norm < static_cast<float>(kNoDirection) ? static_cast<float>(kNoDirection) : norm);  // NaN stays NaN
}

// Gradients stop where the norm was cut off.
__device__ inline float slope(float inverse) {
  return inverse >= 1.0f / static_cast<float>(kNoDirection) ? 0.0f : inverse;
}

// --- operands of the tensor cores
// ----------------------------------------------------------------------------------------------

__device__ inline Split<1> pair_of(const __nv_bfloat16* x) { return {{*reinterpret_cast<const uint32_t*>(x)}}; }
__device__ inline Split<2> pair_of(const __half* x) {
  const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(x));
  return Split<2>::of(pair.x, pair.y);
}
__device__ inline Split<3> pair_of(const float* x) {
  const float2 pair = *reinterpret_cast<const float2*>(x);
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
      if constexpr (std::is_same_v<T, __half>) {
        __half2 pair;
        memcpy(&pair, &r[i], sizeof(pair));
        const float2 numbers = __half22float2(pair);
        b[i / 2].set(i % 2, Split<2>::of(numbers.x, numbers.y));
      } else {
        b[i / 2].part[0][i % 2] = r[i];
      }
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

// --- the contrastive blocks
// ----------------------------------------------------------------------------------------------------

template <typename T, int kWarps>
struct ContrastShared {
  static constexpr int kOthers = kWarps * kWarpTile;
  // Two tiles take turns: while one is multiplied, the next arrives.
  alignas(16) T tile[2][kAnchorTile + kOthers][kRowStride];
  alignas(16) float sum[kAnchorTile][kSumStride];
  float of_warp[4][kWarps][kAnchorTile];
};

// Which part of the projections a block holds: the anchors [first, first + kAnchorTile) of
// `expert`.
struct ContrastBlock {
  int64_t expert;
  int64_t first;
};

// Brings elements [column, column + kSizeTile) of the anchors and of the rows from `other` on into
// a tile. What lies beyond the valid rows or the projections is zero: padding is never read.
template <typename T, int kWarps>
__device__ void bring(const ExpertLossesInput& in, const ContrastBlock& block, int64_t valid, int64_t other,
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
      *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
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

// What is taken off the exponents of a sum of exponentials whose largest exponent is `highest`:
// that, or nothing where no element counts (-inf - -inf would be NaN).
__device__ inline float taken_off(float highest) { return highest == -INFINITY ? 0.0f : highest; }

// The four lanes of a group g each hold a part of row g's (and g + 8's) sum.
__device__ inline float group_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The log-partition and the sums over positives of kAnchorTile anchors. Each lane keeps, for its
// two rows, a running maximum, the sum of exponentials below it, the sum of the positives'
// similarities and their number; lanes, then warps, are merged in order at the end. The maxima skip
// what is no number (fmaxf); the sums take in every element that counts, so that NaN and infinity
// stay in them.
template <typename T, int kWarps>
__device__ void contrast_statistics(const ExpertLossesForward& params, const ContrastBlock& block,
                                    ContrastShared<T, kWarps>& shared) {
  const ExpertLossesInput& in = params.input;
  const int64_t valid = in.counts().valid;
  if (!in.contrasts(block.expert) || block.first >= valid) {
    return;
  }
  const int warp = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int g = lane / 4;
  const int t = lane % 4;
  const bool aligned = is_aligned<T>(in);
  const auto scale = 1.0f / static_cast<float>(in.temperature);
  const int chunks = static_cast<int>((in.projection_size + kSizeTile - 1) / kSizeTile);
  const int items = static_cast<int>((valid + shared.kOthers - 1) / shared.kOthers) * chunks;

  int64_t label[2];
  float top[2], sum[2], together[2], positives[2], inverse[2];
  for (int r = 0; r < 2; ++r) {
    const int64_t i = block.first + g + r * 8;
    label[r] = i < valid ? in.labels[i] : 0;
    top[r] = -INFINITY;
    sum[r] = together[r] = positives[r] = inverse[r] = 0.0f;
  }
  float d[2][4], anchor_squares[2], other_squares[2];
  bring<T, kWarps>(in, block, valid, 0, 0, aligned, shared.tile[0]);
  for (int item = 0; item < items; ++item) {
    const int chunk = item % chunks;
    const int64_t other = item / chunks * shared.kOthers + warp * kWarpTile;
    wait_for_copies();
    __syncthreads();  // this tile has arrived, and the one before is free
    if (item + 1 < items) {
      bring<T, kWarps>(in, block, valid, (item + 1) / chunks * shared.kOthers, (item + 1) % chunks * kSizeTile, aligned,
                       shared.tile[(item + 1) % 2]);
    }
    if (chunk == 0) {
      for (int n = 0; n < 2; ++n) {
        d[n][0] = d[n][1] = d[n][2] = d[n][3] = anchor_squares[n] = other_squares[n] = 0.0f;
      }
    }
    const auto& tile = shared.tile[item % 2];
    multiply_tile<T>(tile, tile + kAnchorTile + warp * kWarpTile, in.projection_size - chunk * int64_t{kSizeTile}, lane,
                     d, anchor_squares, other_squares);
    if (chunk + 1 < chunks) {
      continue;
    }
    for (int r = 0; r < 2; ++r) {
      inverse[r] = inverse_of_norm(group_sum(anchor_squares[r]));
    }
    float s[2][4];
    for (int n = 0; n < 2; ++n) {
      const float of_row = inverse_of_norm(group_sum(other_squares[n]));  // of row g; wanted are rows 2t and 2t + 1
      const float left = __shfl_sync(0xffffffffu, of_row, 8 * t);
      const float right = __shfl_sync(0xffffffffu, of_row, 8 * t + 4);
      for (int i = 0; i < 4; ++i) {
        s[n][i] = d[n][i] * inverse[i / 2] * (i % 2 == 0 ? left : right) * scale;
      }
    }
    for (int r = 0; r < 2; ++r) {
      const int64_t anchor = block.first + g + r * 8;
      float highest = top[r];
      for (int c = 0; c < 4; ++c) {
        const int64_t j = other + c / 2 * 8 + 2 * t + c % 2;
        const bool counts = j < valid && j != anchor;
        float& value = s[c / 2][r * 2 + c % 2];
        if (counts && in.labels[j] == label[r]) {
          together[r] += value;
          positives[r] += 1.0f;
        }
        value = counts ? value : -INFINITY;
        highest = fmaxf(highest, value);
      }
      const float base = taken_off(highest);
      float added = 0.0f;
      for (int c = 0; c < 4; ++c) {
        added += expf(s[c / 2][r * 2 + c % 2] - base);
      }
      sum[r] = sum[r] * expf(top[r] - base) + added;
      top[r] = highest;
    }
  }
  for (int r = 0; r < 2; ++r) {
    const float lane_top = top[r];
    float highest = fmaxf(lane_top, __shfl_xor_sync(0xffffffffu, lane_top, 1));
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
    const float total = group_sum(sum[r] * expf(lane_top - taken_off(highest)));
    const float all_together = group_sum(together[r]);
    const float all_positives = group_sum(positives[r]);
    if (t == 0) {
      shared.of_warp[0][warp][g + r * 8] = highest;
      shared.of_warp[1][warp][g + r * 8] = total;
      shared.of_warp[2][warp][g + r * 8] = all_together;
      shared.of_warp[3][warp][g + r * 8] = all_positives;
      shared.sum[g + r * 8][warp] = inverse[r];
    }
  }
  __syncthreads();
  const int64_t i = block.first + threadIdx.x;
  if (threadIdx.x < kAnchorTile && i < valid) {
    float highest = -INFINITY;
    for (int w = 0; w < kWarps; ++w) {
      highest = fmaxf(highest, shared.of_warp[0][w][threadIdx.x]);
    }
    const float base = taken_off(highest);
    float total = 0.0f;
    float all_together = 0.0f;
    float all_positives = 0.0f;
    for (int w = 0; w < kWarps; ++w) {
      total += shared.of_warp[1][w][threadIdx.x] * expf(shared.of_warp[0][w][threadIdx.x] - base);
      all_together += shared.of_warp[2][w][threadIdx.x];
      all_positives += shared.of_warp[3][w][threadIdx.x];
    }
    auto* statistics = static_cast<float*>(params.statistics);
    const ExpertStatistics at = in.statistics();
    const float log_partition = base + logf(total);
    statistics[at.log_partition(block.expert) + i] = log_partition;
    statistics[at.inverse_norm(block.expert) + i] = shared.sum[threadIdx.x][0];
    statistics[at.positives(block.expert) + i] = all_positives;
    statistics[at.anchor_loss(block.expert) + i] =
        all_positives > 0.0f ? log_partition - all_together / all_positives : 0.0f;
  }
}

// The gradient of kAnchorTile anchors' projections, elements [chunk kSizeTile, (chunk + 1)
// kSizeTile): v_i = sum_j W_ij n(z_j) as a second product, of W_ij / |z_j| (split into parts) with
// the rows z_j as they are; then (v_i - n(z_i) (n(z_i) . v_i)) / |z_i|, where n(z_i) . v_i = sum_j
// W_ij n(z_i) . n(z_j) comes from the first product.
template <typename T, int kWarps>
__device__ void contrast_gradient(const ExpertLossesBackward& params, const ContrastBlock& block, unsigned own_chunk,
                                  ContrastShared<T, kWarps>& shared) {
  constexpr int kParts = kPartsOf<T>;
  constexpr int kWeightParts = kParts < 2 ? 2 : kParts;
  const ExpertLossesInput& in = params.input;
  const int64_t valid = in.counts().valid;
  const ExpertStatistics at = in.statistics();
  const auto* statistics = static_cast<const float*>(params.statistics);
  const float anchors = in.contrasts(block.expert) ? statistics[at.anchors() + block.expert] : 0.0f;
  const int64_t first_column = own_chunk * kSizeTile;
  const int64_t left = in.projection_size - first_column;
  const int columns = static_cast<int>(left < kSizeTile ? left : kSizeTile);
  T* out = static_cast<T*>(params.projections.data) + (block.expert * in.rows + block.first) * in.projection_size +
           first_column;
  const int rows = static_cast<int>(in.rows - block.first < kAnchorTile ? in.rows - block.first : kAnchorTile);
  if (block.first >= valid || anchors == 0.0f) {
    for (int i = threadIdx.x; i < rows * columns; i += kWarps * kLanes) {
      out[i / columns * in.projection_size + i % columns] = static_cast<T>(0.0f);
    }
    return;
  }
  const int warp = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int g = lane / 4;
  const int t = lane % 4;
  const bool aligned = is_aligned<T>(in);
  const auto scale = 1.0f / static_cast<float>(in.temperature);
  const float factor = static_cast<const float*>(params.grad)[block.expert * params.grad_strides[0]] * scale / anchors;
  const float* log_partition = statistics + at.log_partition(block.expert);
  const float* inverse_norm = statistics + at.inverse_norm(block.expert);
  const float* positives = statistics + at.positives(block.expert);
  const int chunks = static_cast<int>((in.projection_size + kSizeTile - 1) / kSizeTile);
  // With one chunk the tile of the first product serves the second too; with more the own chunk is
  // brought once more.
  const int steps = chunks == 1 ? 1 : chunks + 1;
  const int items = static_cast<int>((valid + shared.kOthers - 1) / shared.kOthers) * steps;
  const auto column_of = [=](int item) {
    return (item % steps == chunks ? own_chunk : item % steps) * int64_t{kSizeTile};
  };

  int64_t label[2];
  float own_partition[2], own_inverse[2], own_positives[2], along[2];
  for (int r = 0; r < 2; ++r) {
    const int64_t i = block.first + g + r * 8;
    label[r] = i < valid ? in.labels[i] : 0;
    own_partition[r] = i < valid ? log_partition[i] : 0.0f;
    own_inverse[r] = i < valid ? inverse_norm[i] : 0.0f;
    own_positives[r] = i < valid ? positives[i] : 0.0f;
    along[r] = 0.0f;
  }
  float v[kSizeTile / 8][4];
#pragma unroll
  for (int n = 0; n < kSizeTile / 8; ++n) {
    v[n][0] = v[n][1] = v[n][2] = v[n][3] = 0.0f;
  }
  float d[2][4], unused[2][2];
  Operand<4, kWeightParts> weights;
  bring<T, kWarps>(in, block, valid, 0, 0, aligned, shared.tile[0]);
  for (int item = 0; item < items; ++item) {
    const int step = item % steps;
    const int64_t other = item / steps * shared.kOthers + warp * kWarpTile;
    wait_for_copies();
    __syncthreads();  // this tile has arrived, and the one before is free
    if (item + 1 < items) {
      bring<T, kWarps>(in, block, valid, (item + 1) / steps * shared.kOthers, column_of(item + 1), aligned,
                       shared.tile[(item + 1) % 2]);
    }
    const auto& tile = shared.tile[item % 2];
    const auto* others = tile + kAnchorTile + warp * kWarpTile;
    if (step == 0) {
      for (int n = 0; n < 2; ++n) {
        d[n][0] = d[n][1] = d[n][2] = d[n][3] = unused[0][n] = unused[1][n] = 0.0f;
      }
    }
    if (step < chunks) {
      multiply_tile<T>(tile, others, in.projection_size - step * int64_t{kSizeTile}, lane, d, unused[0], unused[1]);
    }
    if (step == chunks - 1) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float weight[4];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int64_t j = other + n * 8 + 2 * t + c;
          const bool is_valid = j < valid;
          const int64_t other_label = is_valid ? in.labels[j] : 0;
          const float other_partition = is_valid ? log_partition[j] : 0.0f;
          const float other_inverse = is_valid ? inverse_norm[j] : 0.0f;
          const float other_positives = is_valid ? positives[j] : 0.0f;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int64_t i = block.first + g + r * 8;
            const float cosine = d[n][r * 2 + c] * own_inverse[r] * other_inverse;
            float w = own_positives[r] > 0.0f ? expf(cosine * scale - own_partition[r]) : 0.0f;
            w += other_positives > 0.0f ? expf(cosine * scale - other_partition) : 0.0f;
            w -= own_positives[r] > 0.0f && label[r] == other_label ? 2.0f / own_positives[r] : 0.0f;
            w = is_valid && i < valid && i != j ? w * factor : 0.0f;
            along[r] += w * cosine;
            weight[r * 2 + c] = w * other_inverse;
          }
        }
        weights.set(n * 2, Split<kWeightParts>::of(weight[0], weight[1]));
        weights.set(n * 2 + 1, Split<kWeightParts>::of(weight[2], weight[3]));
      }
    }
    if (step == steps - 1) {
#pragma unroll
      for (int n = 0; n < kSizeTile / 16; ++n) {
        if (n * 16 < columns) {
          Operand<2, kParts> b[2];
          load_columns<T>(others[0], n * 16, lane, b);
          multiply(v[2 * n], weights, b[0]);
          multiply(v[2 * n + 1], weights, b[1]);
        }
      }
    }
  }
  for (int r = 0; r < 2; ++r) {
    const float row_along = group_sum(along[r]);
    if (t == 0) {
      shared.of_warp[0][warp][g + r * 8] = row_along;
    }
  }
  // One warp after another adds what its rows j gave.
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) {
#pragma unroll
      for (int n = 0; n < kSizeTile / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = shared.sum[g + i / 2 * 8][n * 8 + 2 * t + i % 2];
          sum = w == 0 ? v[n][i] : sum + v[n][i];
        }
      }
    }
    __syncthreads();
  }
  const T* z = static_cast<const T*>(in.projections.data) +
               (block.expert * in.rows + block.first) * in.projection_size + first_column;
  for (int k = threadIdx.x; k < rows * columns; k += kWarps * kLanes) {
    const int row = k / columns;
    const int column = k % columns;
    const int64_t i = block.first + row;
    float gradient = 0.0f;
    if (i < valid) {
      float row_along = 0.0f;
      for (int w = 0; w < kWarps; ++w) {
        row_along += shared.of_warp[0][w][row];
      }
      const float inverse = inverse_norm[i];
      const auto own = static_cast<float>(z[row * in.projection_size + column]);
      gradient = slope(inverse) * (shared.sum[row][column] - own * inverse * row_along);
    }
    out[row * in.projection_size + column] = static_cast<T>(gradient);
  }
}

// --- one warp a row
// ------------------------------------------------------------------------------------------------------------

__device__ inline bool is_masked_row(const ExpertLossesInput& in, RowCounts counts, int64_t i) {
  return in.current_classes != nullptr && i < counts.new_rows;
}

__device__ inline void classify_statistics(const ExpertLossesForward& params, int64_t e, int64_t i, int lane) {
  const ExpertLossesInput& in = params.input;
  const RowCounts counts = in.counts();
  if (!in.classifies(e) || i >= counts.valid) {
    return;
  }
  const bool masked = is_masked_row(in, counts, i);
  const int64_t first = (e * in.rows + i) * in.classes;
  const auto logit = [&](int64_t k) {
    return masked && !in.current_classes[k] ? -INFINITY : load(in.logits, first + k);
  };
  float top = -INFINITY;
  for (int64_t k = lane; k < in.classes; k += kLanes) {
    top = fmaxf(top, logit(k));
  }
  top = warp_largest(top);
  float total = 0.0f;
  for (int64_t k = lane; k < in.classes; k += kLanes) {
    total += expf(logit(k) - top);
  }
  total = warp_sum(total);
  if (lane == 0) {
    const int64_t label = in.labels[i];
    const bool exists = label >= 0 && label < in.classes && (!masked || in.current_classes[label]);
    const float log_classes = exists ? logf(total) : NAN;
    auto* statistics = static_cast<float*>(params.statistics);
    const ExpertStatistics at = in.statistics();
    statistics[at.top_logit(e) + i] = top;
    statistics[at.log_classes(e) + i] = log_classes;
    statistics[at.row_loss(e) + i] = exists ? (top - load(in.logits, first + label)) + log_classes : NAN;
  }
}

__device__ inline void classify_gradient(const ExpertLossesBackward& params, int64_t e, int64_t i, int lane) {
  const ExpertLossesInput& in = params.input;
  const RowCounts counts = in.counts();
  const bool counts_here = in.classifies(e) && i < counts.valid;
  const bool masked = is_masked_row(in, counts, i);
  const int64_t first = (e * in.rows + i) * in.classes;
  float factor = 0.0f;
  float top = 0.0f;
  float log_classes = 0.0f;
  int64_t label = 0;
  if (counts_here) {
    factor = static_cast<const float*>(params.grad)[e * params.grad_strides[0] + params.grad_strides[1]] *
             row_weight<float>(i, counts, in.current_classes != nullptr, in.buffer_weight);
    const auto* statistics = static_cast<const float*>(params.statistics);
    top = statistics[in.statistics().top_logit(e) + i];
    log_classes = statistics[in.statistics().log_classes(e) + i];
    label = in.labels[i];
  }
  for (int64_t k = lane; k < in.classes; k += kLanes) {
    float gradient = 0.0f;
    if (counts_here && (!masked || in.current_classes[k])) {
      gradient = factor * (expf((load(in.logits, first + k) - top) - log_classes) - (k == label ? 1.0f : 0.0f));
    }
    store(params.logits, first + k, gradient);
  }
}

__device__ inline void distance_statistics(const ExpertLossesForward& params, int64_t i, int lane) {
  const ExpertLossesInput& in = params.input;
  if (i >= in.counts().valid) {
    return;
  }
  const int64_t size = in.feature_size;
  auto* statistics = static_cast<float*>(params.statistics);
  const ExpertStatistics at = in.statistics();
  float squared = 0.0f;
  for (int64_t d = lane; d < size; d += kLanes) {
    const float u = load(in.student, i * size + d);
    squared += u * u;
  }
  const float student = inverse_of_norm(warp_sum(squared));
  if (lane == 0) {
    statistics[at.inverse_student() + i] = student;
  }
  for (int64_t e = 0; e < in.experts; ++e) {
    if (!in.distils(e)) {
      continue;
    }
    const int64_t first = (e * in.rows + i) * size;
    squared = 0.0f;
    for (int64_t d = lane; d < size; d += kLanes) {
      const float v = load(in.features, first + d);
      squared += v * v;
    }
    const float feature = inverse_of_norm(warp_sum(squared));
    float distance = 0.0f;
    float along_student = 0.0f;
    float along_feature = 0.0f;
    for (int64_t d = lane; d < size; d += kLanes) {
      const float u = load(in.student, i * size + d) * student;
      const float v = load(in.features, first + d) * feature;
      distance += (u - v) * (u - v);
      along_student += u * (u - v);
      along_feature += v * (v - u);
    }
    distance = warp_sum(distance);
    along_student = warp_sum(along_student);
    along_feature = warp_sum(along_feature);
    if (lane == 0) {
      statistics[at.inverse_feature(e) + i] = feature;
      statistics[at.squared_distance(e) + i] = distance;
      statistics[at.along_student(e) + i] = along_student;
      statistics[at.along_feature(e) + i] = along_feature;
    }
  }
}

__device__ inline void distance_gradient(const ExpertLossesBackward& params, int64_t i, int lane) {
  const ExpertLossesInput& in = params.input;
  const RowCounts counts = in.counts();
  const bool is_valid = i < counts.valid;
  const int64_t size = in.feature_size;
  const auto* statistics = static_cast<const float*>(params.statistics);
  const ExpertStatistics at = in.statistics();
  // The gradient of expert e's distance is this times the difference n(u_i) - n(v_i); 0 at distance
  // 0.
  const auto factor = [&](int64_t e) {
    const bool frobenius = in.reduction == DistanceReduction::kFrobenius;
    const float distance = frobenius ? statistics[at.distance() + e] : sqrtf(statistics[at.squared_distance(e) + i]);
    const float grad = static_cast<const float*>(params.grad)[e * params.grad_strides[0] + 2 * params.grad_strides[1]];
    return distance == 0.0f ? 0.0f : grad / (frobenius ? distance : distance * static_cast<float>(counts.valid));
  };
  const float student = is_valid ? statistics[at.inverse_student() + i] : 0.0f;
  for (int64_t d = lane; d < size; d += kLanes) {
    const float u = is_valid ? load(in.student, i * size + d) * student : 0.0f;
    float to_student = 0.0f;
    for (int64_t e = 0; e < in.experts; ++e) {
      const int64_t at_feature = (e * in.rows + i) * size + d;
      float to_feature = 0.0f;
      if (is_valid && in.distils(e)) {
        const float feature = statistics[at.inverse_feature(e) + i];
        const float v = load(in.features, at_feature) * feature;
        const float scale = factor(e);
        to_student += slope(student) * scale * ((u - v) - u * statistics[at.along_student(e) + i]);
        to_feature = slope(feature) * scale * ((v - u) - v * statistics[at.along_feature(e) + i]);
      }
      if (params.features.data != nullptr) {
        store(params.features, at_feature, to_feature);
      }
    }
    if (params.student.data != nullptr) {
      store(params.student, i * size + d, to_student);
    }
  }
}

// --- what each block of a launch does
// ------------------------------------------------------------------------------------------

// A launch's blocks: contrastive ones first, since they take longest, then those of the logits'
// rows, then those of the features'.
struct ExpertLossesGrid {
  unsigned contrastive, cross_entropy, distillation;

  static ExpertLossesGrid of(const ExpertLossesInput& in, bool contrastive, bool cross_entropy, bool distillation,
                             bool by_chunk, int warps) {
    const int64_t tiles = (in.rows + kAnchorTile - 1) / kAnchorTile;
    const int64_t chunks = by_chunk ? (in.projection_size + kSizeTile - 1) / kSizeTile : 1;
    const int64_t rows = in.experts * in.rows;
    MF_CHECK(in.experts >= 1 && in.rows >= 0, "experts and rows are ", in.experts, " and ", in.rows,
             "; wanted at least 1 and 0");
    MF_CHECK(rows * (chunks + 2) < INT32_MAX && in.projection_size < INT32_MAX / 2, "projections are [", in.experts,
             ", ", in.rows, ", ", in.projection_size, "]; wanted fewer than 2^31 rows times tiles");
    return {contrastive ? static_cast<unsigned>(in.experts * tiles * chunks) : 0,
            cross_entropy ? static_cast<unsigned>((rows + warps - 1) / warps) : 0,
            distillation ? static_cast<unsigned>((in.rows + warps - 1) / warps) : 0};
  }
  unsigned blocks() const { return contrastive + cross_entropy + distillation; }
};

template <typename T, int kWarps>
__device__ void expert_statistics_block(const ExpertLossesForward& params, const ExpertLossesGrid& grid,
                                        ContrastShared<T, kWarps>& shared) {
  const ExpertLossesInput& in = params.input;
  unsigned block = blockIdx.x;
  const unsigned warp = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const auto rows = static_cast<unsigned>(in.rows);
  if (block < grid.contrastive) {
    const unsigned tiles = (rows + kAnchorTile - 1) / kAnchorTile;
    contrast_statistics<T, kWarps>(params, {block / tiles, block % tiles * kAnchorTile}, shared);
    return;
  }
  block -= grid.contrastive;
  if (block < grid.cross_entropy) {
    const unsigned row = block * kWarps + warp;
    if (row < in.experts * rows) {
      classify_statistics(params, row / rows, row % rows, lane);
    }
    return;
  }
  const unsigned row = (block - grid.cross_entropy) * kWarps + warp;
  if (row < rows) {
    distance_statistics(params, row, lane);
  }
}

template <typename T, int kWarps>
__device__ void expert_gradient_block(const ExpertLossesBackward& params, const ExpertLossesGrid& grid,
                                      ContrastShared<T, kWarps>& shared) {
  const ExpertLossesInput& in = params.input;
  unsigned block = blockIdx.x;
  const unsigned warp = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const auto rows = static_cast<unsigned>(in.rows);
  if (block < grid.contrastive) {
    const unsigned tiles = (rows + kAnchorTile - 1) / kAnchorTile;
    const auto chunks = static_cast<unsigned>((in.projection_size + kSizeTile - 1) / kSizeTile);
    const unsigned tile = block / chunks;
    contrast_gradient<T, kWarps>(params, {tile / tiles, tile % tiles * kAnchorTile}, block % chunks, shared);
    return;
  }
  block -= grid.contrastive;
  if (block < grid.cross_entropy) {
    const unsigned row = block * kWarps + warp;
    if (row < in.experts * rows) {
      classify_gradient(params, row / rows, row % rows, lane);
    }
    return;
  }
  const unsigned row = (block - grid.cross_entropy) * kWarps + warp;
  if (row < rows) {
    distance_gradient(params, row, lane);
  }
}

// One block an expert adds up its rows: anchor losses, anchors, cross-entropies of the new and of
// the other rows, distances.
template <int kWarps>
struct TermsShared {
  float sum[5][kWarps];
};

template <int kWarps>
__device__ void expert_terms_block(const ExpertLossesForward& params, TermsShared<kWarps>& shared) {
  const ExpertLossesInput& in = params.input;
  const RowCounts counts = in.counts();
  const ExpertStatistics at = in.statistics();
  auto* statistics = static_cast<float*>(params.statistics);
  const int64_t e = blockIdx.x;
  const bool frobenius = in.reduction == DistanceReduction::kFrobenius;
  const int64_t split = in.current_classes != nullptr ? counts.new_rows : counts.valid;
  float sum[5] = {};
  for (int64_t i = threadIdx.x; i < counts.valid; i += kWarps * kLanes) {
    if (in.contrasts(e)) {
      sum[0] += statistics[at.anchor_loss(e) + i];
      sum[1] += statistics[at.positives(e) + i] > 0.0f ? 1.0f : 0.0f;
    }
    if (in.classifies(e)) {
      sum[i < split ? 2 : 3] += statistics[at.row_loss(e) + i];
    }
    if (in.distils(e)) {
      const float squared = statistics[at.squared_distance(e) + i];
      sum[4] += frobenius ? squared : sqrtf(squared);
    }
  }
  for (int term = 0; term < 5; ++term) {
    const float of_warp = warp_sum(sum[term]);
    if (threadIdx.x % kLanes == 0) {
      shared.sum[term][threadIdx.x / kLanes] = of_warp;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float total[5] = {};
    for (int term = 0; term < 5; ++term) {
      for (int w = 0; w < kWarps; ++w) {
        total[term] += shared.sum[term][w];
      }
    }
    const bool masked = in.current_classes != nullptr;
    float cross_entropy = split > 0 ? total[2] * row_weight<float>(0, counts, masked, in.buffer_weight) : 0.0f;
    cross_entropy +=
        split < counts.valid ? total[3] * row_weight<float>(split, counts, masked, in.buffer_weight) : 0.0f;
    const float distance = frobenius          ? sqrtf(total[4])
                           : counts.valid > 0 ? total[4] / static_cast<float>(counts.valid)
                                              : 0.0f;
    auto* terms = static_cast<float*>(params.terms) + e * kTerms;
    terms[0] = total[0] / fmaxf(total[1], 1.0f);
    terms[1] = cross_entropy;
    terms[2] = distance;
    statistics[at.anchors() + e] = total[1];
    statistics[at.distance() + e] = distance;
  }
}

}  // namespace mf::cuda
