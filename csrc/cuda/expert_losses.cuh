// Kernel bodies of the expert losses; tests/kernels runs them on the CPU too. Algebra:
// core/expert_losses.h.
//
// Three launches: statistics of every row; the terms from them; the gradients, for which the
// similarities are computed once more. The problem is small (three products of 384 x 128 x 384 an
// expert, 3 MB in all), so latency decides: each launch holds all three losses side by side, one
// block for 16 anchors of one expert and all the rows they meet, or one warp for a row of logits or
// features. Every sum has a fixed order and there are no atomics.
#pragma once

#include "core/check.h"
#include "cuda/expert_losses_contrastive.cuh"
#include "cuda/expert_losses_rows.cuh"
#include "cuda/launch.cuh"

namespace mf::cuda {

// A launch's blocks: contrastive ones first, since they take longest, then those of the logits'
// rows, then those of the features', each of one expert for the statistics (not `by_chunk`).
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
            distillation ? static_cast<unsigned>(((by_chunk ? in.rows : rows) + warps - 1) / warps) : 0};
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
      with_type(in.logits.type,
                [&](auto type) { classify_statistics<decltype(type)>(params, row / rows, row % rows, lane); });
    }
    return;
  }
  const unsigned row = (block - grid.cross_entropy) * kWarps + warp;
  if (row < in.experts * rows) {
    with_type(in.features.type,
              [&](auto type) { distance_statistics<decltype(type)>(params, row / rows, row % rows, lane); });
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
      with_type(in.logits.type,
                [&](auto type) { classify_gradient<decltype(type)>(params, row / rows, row % rows, lane); });
    }
    return;
  }
  const unsigned row = (block - grid.cross_entropy) * kWarps + warp;
  if (row < rows) {
    with_type(in.features.type, [&](auto type) { distance_gradient<decltype(type)>(params, row, lane); });
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
