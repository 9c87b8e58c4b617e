// Cross-entropy and distillation, one warp a row: statistics and gradients.
#pragma once

#include <cmath>

#include "api/expert_losses.h"
#include "cuda/expert_losses_tile.cuh"
#include "cuda/warp.cuh"

namespace mf::cuda {

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

}  // namespace mf::cuda
