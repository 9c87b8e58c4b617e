// Cross-entropy and distillation: statistics and gradients. A warp takes a row, of one expert where
// nothing is summed over the experts. Types are fixed outside of the loops, so that the loads of
// several elements leave together: a row takes a few waits for memory, and little else.
#pragma once

#include <cmath>

#include "api/expert_losses.h"
#include "cuda/expert_losses_tile.cuh"
#include "cuda/warp.cuh"

namespace mf::cuda {

__device__ inline bool is_masked_row(const ExpertLossesInput& in, RowCounts counts, int64_t i) {
  return in.current_classes != nullptr && i < counts.new_rows;
}

// T: of the logits.
template <typename T>
__device__ void classify_statistics(const ExpertLossesForward& params, int64_t e, int64_t i, int lane) {
  const ExpertLossesInput& in = params.input;
  const RowCounts counts = in.counts();
  if (!in.classifies(e) || i >= counts.valid) {
    return;
  }
  const bool masked = is_masked_row(in, counts, i);
  const T* logits = static_cast<const T*>(in.logits.data) + (e * in.rows + i) * in.classes;
  const auto logit = [&](int k) { return masked && !in.current_classes[k] ? -INFINITY : to_float(logits[k]); };
  const auto classes = static_cast<int>(in.classes);
  float top = -INFINITY;
#pragma unroll 4
  for (int k = lane; k < classes; k += kLanes) {
    top = fmaxf(top, logit(k));
  }
  top = warp_largest(top);
  float total = 0.0f;
#pragma unroll 4
  for (int k = lane; k < classes; k += kLanes) {
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
    statistics[at.row_loss(e) + i] = exists ? (top - to_float(logits[label])) + log_classes : NAN;
  }
}

template <typename T>
__device__ void classify_gradient(const ExpertLossesBackward& params, int64_t e, int64_t i, int lane) {
  const ExpertLossesInput& in = params.input;
  const RowCounts counts = in.counts();
  const bool counts_here = in.classifies(e) && i < counts.valid;
  const bool masked = is_masked_row(in, counts, i);
  const int64_t first = (e * in.rows + i) * in.classes;
  const T* logits = static_cast<const T*>(in.logits.data) + first;
  T* gradients = static_cast<T*>(params.logits.data) + first;
  const auto classes = static_cast<int>(in.classes);
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
#pragma unroll 4
  for (int k = lane; k < classes; k += kLanes) {
    float gradient = 0.0f;
    if (counts_here && (!masked || in.current_classes[k])) {
      gradient = factor * (expf((to_float(logits[k]) - top) - log_classes) - (k == label ? 1.0f : 0.0f));
    }
    Vec<T, 1>::pack({gradient}).store(gradients + k);
  }
}

// T: of the features, the student's and the experts'.
template <typename T>
__device__ void distance_statistics(const ExpertLossesForward& params, int64_t e, int64_t i, int lane) {
  const ExpertLossesInput& in = params.input;
  const bool distils = in.distils(e);
  if (i >= in.counts().valid || !(distils || e == 0)) {
    return;
  }
  const auto size = static_cast<int>(in.feature_size);
  const T* students = static_cast<const T*>(in.student.data) + i * in.feature_size;
  const T* features = static_cast<const T*>(in.features.data) + (e * in.rows + i) * in.feature_size;
  auto* statistics = static_cast<float*>(params.statistics);
  const ExpertStatistics at = in.statistics();
  float of_student = 0.0f;
  float of_feature = 0.0f;
#pragma unroll 8
  for (int d = lane; d < size; d += kLanes) {
    const float u = to_float(students[d]);
    const float v = to_float(features[d]);
    of_student += u * u;
    of_feature += v * v;
  }
  const float student = inverse_of_norm(warp_sum(of_student));
  if (e == 0 && lane == 0) {
    statistics[at.inverse_student() + i] = student;
  }
  if (!distils) {
    return;
  }
  const float feature = inverse_of_norm(warp_sum(of_feature));
  float distance = 0.0f;
  float along_student = 0.0f;
  float along_feature = 0.0f;
#pragma unroll 8
  for (int d = lane; d < size; d += kLanes) {
    const float u = to_float(students[d]) * student;
    const float v = to_float(features[d]) * feature;
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

template <typename T>
__device__ void distance_gradient(const ExpertLossesBackward& params, int64_t i, int lane) {
  constexpr int kAhead = 8;  // elements of a lane at a time
  const ExpertLossesInput& in = params.input;
  const RowCounts counts = in.counts();
  const bool is_valid = i < counts.valid;
  const auto size = static_cast<int>(in.feature_size);
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
  const T* students = static_cast<const T*>(in.student.data) + i * in.feature_size;
  for (int first = lane; first < size; first += kAhead * kLanes) {
    float u[kAhead];
    float to_student[kAhead] = {};
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int d = first + k * kLanes;
      u[k] = is_valid && d < size ? to_float(students[d]) * student : 0.0f;
    }
    for (int64_t e = 0; e < in.experts; ++e) {
      const int64_t row = (e * in.rows + i) * in.feature_size;
      const bool distils = is_valid && in.distils(e);
      const float feature = distils ? statistics[at.inverse_feature(e) + i] : 0.0f;
      const float along_student = distils ? statistics[at.along_student(e) + i] : 0.0f;
      const float along_feature = distils ? statistics[at.along_feature(e) + i] : 0.0f;
      const float scale = distils ? factor(e) : 0.0f;
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int d = first + k * kLanes;
        float to_feature = 0.0f;
        if (distils && d < size) {
          const float v = to_float(static_cast<const T*>(in.features.data)[row + d]) * feature;
          to_student[k] += slope(student) * scale * ((u[k] - v) - u[k] * along_student);
          to_feature = slope(feature) * scale * ((v - u[k]) - v * along_feature);
        }
        if (params.features.data != nullptr && d < size) {
          Vec<T, 1>::pack({to_feature}).store(static_cast<T*>(params.features.data) + row + d);
        }
      }
    }
    if (params.student.data != nullptr) {
      T* to = static_cast<T*>(params.student.data) + i * in.feature_size;
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (first + k * kLanes < size) {
          Vec<T, 1>::pack({to_student[k]}).store(to + first + k * kLanes);
        }
      }
    }
  }
}

}  // namespace mf::cuda
