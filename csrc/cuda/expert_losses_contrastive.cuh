// The contrastive loss of 16 anchors of one expert: statistics and gradient.
#pragma once

#include "cuda/expert_losses_tile.cuh"

namespace mf::cuda {

__device__ inline float inverse_temperature(const ExpertLossesInput& in) {
  return 1.0f / static_cast<float>(in.temperature);
}

// What a lane keeps of its two anchors, rows g and g + 8: a running maximum, the sum of
// exponentials below it, the sum of the positives' similarities and their number. The maxima skip
// what is no number (fmaxf); the sums take in every element that counts, so that NaN and infinity
// stay in them.
struct AnchorRows {
  int64_t first;
  int lane;
  int64_t label[2];
  float top[2], sum[2], together[2], positives[2];

  __device__ AnchorRows(const ExpertLossesInput& in, const ContrastBlock& block, int64_t valid, int lane)
      : first(block.first + lane / 4), lane(lane) {
    for (int r = 0; r < 2; ++r) {
      label[r] = first + r * 8 < valid ? in.labels[first + r * 8] : 0;
      top[r] = -INFINITY;
      sum[r] = together[r] = positives[r] = 0.0f;
    }
  }

  // s[n][r * 2 + c]: the similarity of anchor r and row other + 8 n + 2 t + c.
  __device__ void add(const ExpertLossesInput& in, int64_t other, int64_t valid, float (&s)[2][4]) {
    for (int r = 0; r < 2; ++r) {
      const int64_t anchor = first + r * 8;
      float highest = top[r];
      for (int c = 0; c < 4; ++c) {
        const int64_t j = other + c / 2 * 8 + 2 * (lane % 4) + c % 2;
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

  // Merges the group's lanes in order and leaves the warp's part, and the anchors' inverse norms.
  template <typename T, int kWarps>
  __device__ void leave(ContrastShared<T, kWarps>& shared, int warp, const float (&inverse)[2]) const {
    const int g = lane / 4;
    for (int r = 0; r < 2; ++r) {
      const float lane_top = top[r];
      float highest = fmaxf(lane_top, __shfl_xor_sync(0xffffffffu, lane_top, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
      const float total = group_sum(sum[r] * expf(lane_top - taken_off(highest)));
      const float all_together = group_sum(together[r]);
      const float all_positives = group_sum(positives[r]);
      if (lane % 4 == 0) {
        shared.of_warp[0][warp][g + r * 8] = highest;
        shared.of_warp[1][warp][g + r * 8] = total;
        shared.of_warp[2][warp][g + r * 8] = all_together;
        shared.of_warp[3][warp][g + r * 8] = all_positives;
        shared.sum[g + r * 8][warp] = inverse[r];
      }
    }
  }
};

// Merges the warps' parts and writes each anchor's statistics.
template <typename T, int kWarps>
__device__ void finish_anchors(const ExpertLossesForward& params, const ContrastBlock& block,
                               const ContrastShared<T, kWarps>& shared) {
  const ExpertLossesInput& in = params.input;
  const int64_t i = block.first + threadIdx.x;
  if (threadIdx.x < kAnchorTile && i < in.counts().valid) {
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

// The log-partition and the sums over positives of kAnchorTile anchors: of every lane, then of the
// warps, merged in order.
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
  const int t = lane % 4;
  const bool aligned = is_aligned<T>(in);
  const float scale = inverse_temperature(in);
  const int chunks = static_cast<int>((in.projection_size + kSizeTile - 1) / kSizeTile);
  const int items = static_cast<int>((valid + shared.kOthers - 1) / shared.kOthers) * chunks;

  AnchorRows anchors(in, block, valid, lane);
  float inverse[2] = {};
  float d[2][4], anchor_squares[2], other_squares[2];
  load_tile<T, kWarps>(in, block, valid, 0, 0, aligned, shared.tile[0]);
  for (int item = 0; item < items; ++item) {
    const int chunk = item % chunks;
    const int64_t other = item / chunks * shared.kOthers + warp * kWarpTile;
    wait_for_copies();
    __syncthreads();  // this tile has arrived, and the one before is free
    if (item + 1 < items) {
      load_tile<T, kWarps>(in, block, valid, (item + 1) / chunks * shared.kOthers, (item + 1) % chunks * kSizeTile,
                           aligned, shared.tile[(item + 1) % 2]);
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
    anchors.add(in, other, valid, s);
  }
  anchors.leave(shared, warp, inverse);
  __syncthreads();
  finish_anchors(params, block, shared);
}

// What a lane needs of its two anchors, rows g and g + 8, in the backward.
struct OwnRows {
  const float* log_partition;  // of all rows of the expert
  const float* inverse_norm;
  const float* positives;
  int64_t first;
  int lane;
  int64_t label[2];
  float own_partition[2], own_inverse[2], own_positives[2];
  float along[2];  // n(z_i) . v_i

  __device__ OwnRows(const ExpertLossesInput& in, const ContrastBlock& block, const float* statistics, int64_t valid,
                     int lane)
      : log_partition(statistics + in.statistics().log_partition(block.expert)),
        inverse_norm(statistics + in.statistics().inverse_norm(block.expert)),
        positives(statistics + in.statistics().positives(block.expert)),
        first(block.first + lane / 4),
        lane(lane) {
    for (int r = 0; r < 2; ++r) {
      const int64_t i = first + r * 8;
      label[r] = i < valid ? in.labels[i] : 0;
      own_partition[r] = i < valid ? log_partition[i] : 0.0f;
      own_inverse[r] = i < valid ? inverse_norm[i] : 0.0f;
      own_positives[r] = i < valid ? positives[i] : 0.0f;
      along[r] = 0.0f;
    }
  }

  // From the products d of the anchors with the rows from `other` on: the weights W_ij / |z_j| as
  // the left operand of the second product.
  template <int kParts>
  __device__ void weigh(const ExpertLossesInput& in, int64_t other, int64_t valid, float factor, const float (&d)[2][4],
                        Operand<4, kParts>& weights) {
    const float scale = inverse_temperature(in);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float weight[4];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int64_t j = other + n * 8 + 2 * (lane % 4) + c;
        const bool is_valid = j < valid;
        const int64_t other_label = is_valid ? in.labels[j] : 0;
        const float other_partition = is_valid ? log_partition[j] : 0.0f;
        const float other_inverse = is_valid ? inverse_norm[j] : 0.0f;
        const float other_positives = is_valid ? positives[j] : 0.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int64_t i = first + r * 8;
          const float cosine = d[n][r * 2 + c] * own_inverse[r] * other_inverse;
          float w = own_positives[r] > 0.0f ? expf(cosine * scale - own_partition[r]) : 0.0f;
          w += other_positives > 0.0f ? expf(cosine * scale - other_partition) : 0.0f;
          w -= own_positives[r] > 0.0f && label[r] == other_label ? 2.0f / own_positives[r] : 0.0f;
          w = is_valid && i < valid && i != j ? w * factor : 0.0f;
          along[r] += w * cosine;
          weight[r * 2 + c] = w * other_inverse;
        }
      }
      weights.set(n * 2, Split<kParts>::of(weight[0], weight[1]));
      weights.set(n * 2 + 1, Split<kParts>::of(weight[2], weight[3]));
    }
  }
};

// Adds up what the block's warps found, one warp after another, and writes the gradient of elements
// [first_column, first_column + kSizeTile): (v_i - n(z_i) (n(z_i) . v_i)) / |z_i|.
template <typename T, int kWarps>
__device__ void leave_gradient(const ExpertLossesBackward& params, const ContrastBlock& block, const OwnRows& own,
                               const float (&v)[kSizeTile / 8][4], int64_t first_column, int rows, int columns, T* out,
                               ContrastShared<T, kWarps>& shared) {
  const ExpertLossesInput& in = params.input;
  const int64_t valid = in.counts().valid;
  const int warp = threadIdx.x / kLanes;
  const int g = own.lane / 4;
  const int t = own.lane % 4;
  for (int r = 0; r < 2; ++r) {
    const float row_along = group_sum(own.along[r]);
    if (t == 0) {
      shared.of_warp[0][warp][g + r * 8] = row_along;
    }
  }
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
      const float inverse = own.inverse_norm[i];
      const auto element = static_cast<float>(z[row * in.projection_size + column]);
      gradient = slope(inverse) * (shared.sum[row][column] - element * inverse * row_along);
    }
    out[row * in.projection_size + column] = static_cast<T>(gradient);
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
  const bool aligned = is_aligned<T>(in);
  const float factor =
      static_cast<const float*>(params.grad)[block.expert * params.grad_strides[0]] * inverse_temperature(in) / anchors;
  const int chunks = static_cast<int>((in.projection_size + kSizeTile - 1) / kSizeTile);
  // With one chunk the tile of the first product serves the second too; with more the own chunk is
  // brought once more.
  const int steps = chunks == 1 ? 1 : chunks + 1;
  const int items = static_cast<int>((valid + shared.kOthers - 1) / shared.kOthers) * steps;
  const auto column_of = [=](int item) {
    return (item % steps == chunks ? own_chunk : item % steps) * int64_t{kSizeTile};
  };

  OwnRows own(in, block, statistics, valid, lane);
  float v[kSizeTile / 8][4];
#pragma unroll
  for (int n = 0; n < kSizeTile / 8; ++n) {
    v[n][0] = v[n][1] = v[n][2] = v[n][3] = 0.0f;
  }
  float d[2][4], unused[2][2];
  Operand<4, kWeightParts> weights;
  load_tile<T, kWarps>(in, block, valid, 0, 0, aligned, shared.tile[0]);
  for (int item = 0; item < items; ++item) {
    const int step = item % steps;
    const int64_t other = item / steps * shared.kOthers + warp * kWarpTile;
    wait_for_copies();
    __syncthreads();  // this tile has arrived, and the one before is free
    if (item + 1 < items) {
      load_tile<T, kWarps>(in, block, valid, (item + 1) / steps * shared.kOthers, column_of(item + 1), aligned,
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
      own.weigh(in, other, valid, factor, d, weights);
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
  leave_gradient(params, block, own, v, first_column, rows, columns, out, shared);
}

}  // namespace mf::cuda
