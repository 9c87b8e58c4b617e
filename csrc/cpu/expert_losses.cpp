// The expert losses in plain C++: serves users without a GPU, and is the oracle for
// csrc/cuda/expert_losses.cuh.
//
// Each row is summed by one thread in a fixed order and rows are added up in order, so the number
// of threads changes nothing.
#include "api/expert_losses.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/check.h"
#include "cpu/vector_math.h"

namespace mf::cpu {
namespace {

template <typename Real>
inline Real inverse_norm(const Real* x, int64_t count) {
  const Real norm = std::sqrt(sum<Real>(count, [x](int64_t i) { return x[i] * x[i]; }));
  return 1 / std::max(norm, static_cast<Real>(kNoDirection));
}

// Gradients stop where the norm was cut off.
template <typename Real>
inline Real slope(Real inverse) {
  return inverse >= 1 / static_cast<Real>(kNoDirection) ? Real(0) : inverse;
}

template <typename Real>
const Real* row_of(const FloatArray& array, int64_t row, int64_t size) {
  return static_cast<const Real*>(array.data) + row * size;
}

template <typename Real>
Real* row_of(const MutableFloatArray& array, int64_t row, int64_t size) {
  return static_cast<Real*>(array.data) + row * size;
}

void check_labels(const ExpertLossesInput& in, RowCounts counts) {
  if (!in.classifies(in.experts - 1)) {
    return;
  }
  MF_CHECK(!in.current_classes ||
               std::any_of(in.current_classes, in.current_classes + in.classes, [](bool is) { return is; }),
           "current_classes names no class; wanted at least one");
  for (int64_t i = 0; i < counts.valid; ++i) {
    const int64_t label = in.labels[i];
    MF_CHECK(label >= 0 && label < in.classes, "labels[", i, "] is ", label, "; wanted 0 to ", in.classes - 1);
    MF_CHECK(!in.current_classes || i >= counts.new_rows || in.current_classes[label], "labels[", i, "] is ", label,
             ", a new row's; wanted one of current_classes");
  }
}

// The valid rows' labels as small numbers, equal where the labels are: 32 bits compare four or
// eight at a time.
struct Groups {
  std::vector<int32_t> of_row;
  std::vector<int64_t> size;

  Groups(const int64_t* labels, int64_t valid) : of_row(static_cast<size_t>(valid)) {
    std::vector<int64_t> distinct(labels, labels + valid);
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    size.resize(distinct.size());
    for (int64_t i = 0; i < valid; ++i) {
      of_row[i] =
          static_cast<int32_t>(std::lower_bound(distinct.begin(), distinct.end(), labels[i]) - distinct.begin());
      ++size[of_row[i]];
    }
  }
};

template <typename Real>
void contrast_row(const ExpertLossesInput& in, const ExpertStatistics& at, Real* statistics, Real* similarity,
                  const Groups& groups, int64_t valid, int64_t e, int64_t i) {
  Real* s = similarity + (e * in.rows + i) * in.rows;
  const auto scale = static_cast<Real>(1 / in.temperature);
  const int32_t* group = groups.of_row.data();
  const int32_t own = group[i];
  const int64_t positives = groups.size[own] - 1;
  for (int64_t j = 0; j < valid; ++j) {
    s[j] *= scale;
  }
  s[i] = 0;
  const Real together = sum<Real>(valid, [=](int64_t j) { return group[j] == own ? s[j] : Real(0); });
  s[i] = -std::numeric_limits<Real>::infinity();
  const Real top = valid > 1 ? largest(valid, s) : Real(0);
  for (int64_t j = 0; j < valid; ++j) {
    s[j] = exponential(s[j] - top);
  }
  const Real partition = sum<Real>(valid, [s](int64_t j) { return s[j]; });
  const Real inverse = partition == 0 ? Real(0) : 1 / partition;
  for (int64_t j = 0; j < valid; ++j) {
    s[j] *= inverse;
  }
  std::fill(s + valid, s + in.rows, Real(0));
  const Real log_partition = top + std::log(partition);
  statistics[at.log_partition(e) + i] = log_partition;
  statistics[at.positives(e) + i] = static_cast<Real>(positives);
  statistics[at.anchor_loss(e) + i] = positives > 0 ? log_partition - together / static_cast<Real>(positives) : Real(0);
}

template <typename Real>
void classify_row(const ExpertLossesInput& in, const ExpertStatistics& at, Real* statistics, RowCounts counts,
                  Real* scratch, int64_t e, int64_t i) {
  const Real* logits = row_of<Real>(in.logits, e * in.rows + i, in.classes);
  const bool masked = in.current_classes && i < counts.new_rows;
  std::copy(logits, logits + in.classes, scratch);
  for (int64_t k = 0; masked && k < in.classes; ++k) {
    scratch[k] = in.current_classes[k] ? scratch[k] : -std::numeric_limits<Real>::infinity();
  }
  const Real top = largest(in.classes, scratch);
  const Real total = sum<Real>(in.classes, [&](int64_t k) { return exponential(scratch[k] - top); });
  const Real log_classes = std::log(total);
  statistics[at.top_logit(e) + i] = top;
  statistics[at.log_classes(e) + i] = log_classes;
  statistics[at.row_loss(e) + i] = (top - logits[in.labels[i]]) + log_classes;
}

template <typename Real>
void distance_row(const ExpertLossesInput& in, const ExpertStatistics& at, Real* statistics, int64_t e, int64_t i) {
  const Real* u = row_of<Real>(in.student, i, in.feature_size);
  const Real* v = row_of<Real>(in.features, e * in.rows + i, in.feature_size);
  const Real ru = statistics[at.inverse_student() + i];
  const Real rv = inverse_norm(v, in.feature_size);
  statistics[at.inverse_feature(e) + i] = rv;
  const int64_t size = in.feature_size;
  const auto difference = [=](int64_t d) { return u[d] * ru - v[d] * rv; };
  statistics[at.squared_distance(e) + i] = sum<Real>(size, [=](int64_t d) { return difference(d) * difference(d); });
  statistics[at.along_student(e) + i] = sum<Real>(size, [=](int64_t d) { return u[d] * ru * difference(d); });
  statistics[at.along_feature(e) + i] = -sum<Real>(size, [=](int64_t d) { return v[d] * rv * difference(d); });
}

template <typename Real>
void reduce(const ExpertLossesInput& in, const ExpertStatistics& at, Real* statistics, RowCounts counts, Real* terms,
            int64_t e) {
  Real* term = terms + e * kTerms;
  term[0] = term[1] = term[2] = 0;
  if (in.contrasts(e)) {
    const Real anchors =
        sum<Real>(counts.valid, [&](int64_t i) { return statistics[at.positives(e) + i] > 0 ? Real(1) : Real(0); });
    statistics[at.anchors() + e] = anchors;
    term[0] = sum<Real>(counts.valid, [&](int64_t i) { return statistics[at.anchor_loss(e) + i]; }) /
              std::max(anchors, Real(1));
  }
  if (in.classifies(e) && counts.valid > 0) {
    const Real* loss = statistics + at.row_loss(e);
    const int64_t split = in.current_classes ? counts.new_rows : counts.valid;
    const Real new_rows = sum<Real>(split, [&](int64_t i) { return loss[i]; });
    const Real buffer = sum<Real>(counts.valid - split, [&](int64_t i) { return loss[split + i]; });
    const bool masked = in.current_classes != nullptr;
    term[1] = split > 0 ? new_rows * row_weight<Real>(0, counts, masked, in.buffer_weight) : Real(0);
    term[1] += split < counts.valid ? buffer * row_weight<Real>(split, counts, masked, in.buffer_weight) : Real(0);
  }
  if (in.distils(e)) {
    const Real* squared = statistics + at.squared_distance(e);
    if (in.reduction == DistanceReduction::kFrobenius) {
      term[2] = std::sqrt(sum<Real>(counts.valid, [&](int64_t i) { return squared[i]; }));
    } else if (counts.valid > 0) {
      term[2] =
          sum<Real>(counts.valid, [&](int64_t i) { return std::sqrt(squared[i]); }) / static_cast<Real>(counts.valid);
    }
    statistics[at.distance() + e] = term[2];
  }
}

// The gradient of expert e's distance with respect to the difference n(u_i) - n(v_i), as a factor
// of that difference.
template <typename Real>
Real distance_factor(const ExpertLossesInput& in, const ExpertStatistics& at, const Real* statistics, RowCounts counts,
                     Real grad, int64_t e, int64_t i) {
  const bool frobenius = in.reduction == DistanceReduction::kFrobenius;
  const Real distance = frobenius ? statistics[at.distance() + e] : std::sqrt(statistics[at.squared_distance(e) + i]);
  return distance == 0 ? Real(0) : grad / (frobenius ? distance : distance * static_cast<Real>(counts.valid));
}

// out += factor * slope * (difference - unit * along), for unit = x * rx, difference = unit - y *
// ry, along = unit . difference.
template <typename Real>
void through_norm(const Real* x, Real rx, const Real* y, Real ry, int64_t size, Real factor, Real along, Real* out) {
  const Real scale = factor * slope(rx);
  for (int64_t d = 0; d < size; ++d) {
    out[d] += scale * ((x[d] * rx - y[d] * ry) - x[d] * rx * along);
  }
}

}  // namespace

template <typename Real>
void expert_losses_directions(const ExpertLossesInput& in, Real* directions, int threads) {
  const int64_t valid = in.counts().valid;
#pragma omp parallel for collapse(2) num_threads(threads)
  for (int64_t e = 0; e < in.experts; ++e) {
    for (int64_t i = 0; i < in.rows; ++i) {
      const Real* z = row_of<Real>(in.projections, e * in.rows + i, in.projection_size);
      Real* out = directions + (e * in.rows + i) * in.projection_size;
      const bool counts = i < valid && in.contrasts(e);
      const Real r = counts ? inverse_norm(z, in.projection_size) : Real(0);
      for (int64_t p = 0; p < in.projection_size; ++p) {
        out[p] = counts ? z[p] * r : Real(0);
      }
    }
  }
}

template <typename Real>
void expert_losses_forward(const ExpertLossesForward& params, Real* similarity, int threads) {
  const ExpertLossesInput& in = params.input;
  const ExpertStatistics at = in.statistics();
  const RowCounts counts = in.counts();
  check_labels(in, counts);
  auto* statistics = static_cast<Real*>(params.statistics);
  std::fill(statistics, statistics + at.size(), Real(0));
  const Groups groups(in.labels, counts.valid);
#pragma omp parallel num_threads(threads)
  {
    std::vector<Real> scratch(static_cast<size_t>(in.classes));
#pragma omp for
    for (int64_t i = 0; i < counts.valid; ++i) {
      if (in.distillation != Distillation::kOff) {
        statistics[at.inverse_student() + i] =
            inverse_norm(row_of<Real>(in.student, i, in.feature_size), in.feature_size);
      }
    }
#pragma omp for collapse(2)
    for (int64_t e = 0; e < in.experts; ++e) {
      for (int64_t i = 0; i < in.rows; ++i) {
        if (i >= counts.valid) {
          if (in.contrasts(e)) {
            std::fill_n(similarity + (e * in.rows + i) * in.rows, in.rows, Real(0));
          }
          continue;
        }
        if (in.contrasts(e)) {
          statistics[at.inverse_norm(e) + i] =
              inverse_norm(row_of<Real>(in.projections, e * in.rows + i, in.projection_size), in.projection_size);
          contrast_row(in, at, statistics, similarity, groups, counts.valid, e, i);
        }
        if (in.classifies(e)) {
          classify_row(in, at, statistics, counts, scratch.data(), e, i);
        }
        if (in.distils(e)) {
          distance_row(in, at, statistics, e, i);
        }
      }
    }
#pragma omp for
    for (int64_t e = 0; e < in.experts; ++e) {
      reduce(in, at, statistics, counts, static_cast<Real*>(params.terms), e);
    }
  }
}

template <typename Real>
void expert_losses_pulls(const ExpertLossesBackward& params, const Real* similarity, Real* pulls, int threads) {
  const ExpertLossesInput& in = params.input;
  const ExpertStatistics at = in.statistics();
  const int64_t valid = in.counts().valid;
  const auto* statistics = static_cast<const Real*>(params.statistics);
  const auto* grad = static_cast<const Real*>(params.grad);
  constexpr int64_t kTile = 32;  // the transposed tile stays in the first-level cache
  const int64_t tiles = (in.rows + kTile - 1) / kTile;
#pragma omp parallel for collapse(2) num_threads(threads)
  for (int64_t e = 0; e < in.experts; ++e) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const Real* p = similarity + e * in.rows * in.rows;
      Real* out = pulls + e * in.rows * in.rows;
      const int64_t first = tile * kTile;
      const int64_t last = std::min(first + kTile, in.rows);
      const Real anchors = statistics[at.anchors() + e];
      if (!in.contrasts(e) || anchors == 0) {
        std::fill(out + first * in.rows, out + last * in.rows, Real(0));
        continue;
      }
      const Real* positives = statistics + at.positives(e);
      const Real factor = grad[e * params.grad_strides[0]] / (anchors * static_cast<Real>(in.temperature));
      for (int64_t column = 0; column < in.rows; column += kTile) {
        const int64_t end = std::min(column + kTile, in.rows);
        Real transposed[kTile][kTile];
        for (int64_t j = column; j < end; ++j) {
          for (int64_t i = first; i < last; ++i) {
            transposed[i - first][j - column] = p[j * in.rows + i];
          }
        }
        for (int64_t i = first; i < last; ++i) {
          const bool anchor = i < valid && positives[i] > 0;
          const Real own = anchor ? factor : Real(0);
          // Rows of one label have the same number of positives, so one factor serves both
          // directions of a pair.
          const Real pair = anchor ? 2 * factor / positives[i] : Real(0);
          for (int64_t j = column; j < end; ++j) {
            const Real other = positives[j] > 0 ? factor : Real(0);
            const bool positive = in.labels[i] == in.labels[j] && j < valid && j != i;
            out[i * in.rows + j] =
                own * p[i * in.rows + j] + other * transposed[i - first][j - column] - (positive ? pair : Real(0));
          }
        }
      }
    }
  }
}

template <typename Real>
void expert_losses_backward(const ExpertLossesBackward& params, const Real* directions, const Real* pulled,
                            int threads) {
  const ExpertLossesInput& in = params.input;
  const ExpertStatistics at = in.statistics();
  const RowCounts counts = in.counts();
  const auto* statistics = static_cast<const Real*>(params.statistics);
  const auto grad = [&](int64_t e, int64_t term) {
    return static_cast<const Real*>(params.grad)[e * params.grad_strides[0] + term * params.grad_strides[1]];
  };
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < in.rows; ++i) {
    const bool is_valid = i < counts.valid;
    Real* to_student = params.student.data ? row_of<Real>(params.student, i, in.feature_size) : nullptr;
    if (to_student) {
      std::fill_n(to_student, in.feature_size, Real(0));
    }
    for (int64_t e = 0; e < in.experts; ++e) {
      const int64_t row = e * in.rows + i;
      if (params.projections.data) {
        Real* out = row_of<Real>(params.projections, row, in.projection_size);
        if (is_valid && in.contrasts(e)) {
          const Real* unit = directions + row * in.projection_size;
          const Real* pull = pulled + row * in.projection_size;
          const Real along = sum<Real>(in.projection_size, [&](int64_t p) { return unit[p] * pull[p]; });
          const Real scale = slope(statistics[at.inverse_norm(e) + i]);
          for (int64_t p = 0; p < in.projection_size; ++p) {
            out[p] = scale * (pull[p] - unit[p] * along);
          }
        } else {
          std::fill_n(out, in.projection_size, Real(0));
        }
      }
      if (params.logits.data) {
        Real* out = row_of<Real>(params.logits, row, in.classes);
        if (is_valid && in.classifies(e)) {
          const Real* logits = row_of<Real>(in.logits, row, in.classes);
          const bool masked = in.current_classes != nullptr;
          const Real factor = grad(e, 1) * row_weight<Real>(i, counts, masked, in.buffer_weight);
          const Real top = statistics[at.top_logit(e) + i];
          const Real log_classes = statistics[at.log_classes(e) + i];
          for (int64_t k = 0; k < in.classes; ++k) {
            out[k] = factor * exponential(std::min((logits[k] - top) - log_classes, Real(0)));
          }
          for (int64_t k = 0; masked && i < counts.new_rows && k < in.classes; ++k) {
            out[k] = in.current_classes[k] ? out[k] : Real(0);
          }
          out[in.labels[i]] -= factor;
        } else {
          std::fill_n(out, in.classes, Real(0));
        }
      }
      const bool distils = is_valid && in.distils(e);
      if (params.features.data) {
        Real* out = row_of<Real>(params.features, row, in.feature_size);
        std::fill_n(out, in.feature_size, Real(0));
        if (distils) {
          through_norm(row_of<Real>(in.features, row, in.feature_size), statistics[at.inverse_feature(e) + i],
                       row_of<Real>(in.student, i, in.feature_size), statistics[at.inverse_student() + i],
                       in.feature_size, distance_factor(in, at, statistics, counts, grad(e, 2), e, i),
                       statistics[at.along_feature(e) + i], out);
        }
      }
      if (to_student && distils) {
        through_norm(row_of<Real>(in.student, i, in.feature_size), statistics[at.inverse_student() + i],
                     row_of<Real>(in.features, row, in.feature_size), statistics[at.inverse_feature(e) + i],
                     in.feature_size, distance_factor(in, at, statistics, counts, grad(e, 2), e, i),
                     statistics[at.along_student(e) + i], to_student);
      }
    }
  }
}

template void expert_losses_directions<float>(const ExpertLossesInput&, float*, int);
template void expert_losses_directions<double>(const ExpertLossesInput&, double*, int);
template void expert_losses_forward<float>(const ExpertLossesForward&, float*, int);
template void expert_losses_forward<double>(const ExpertLossesForward&, double*, int);
template void expert_losses_pulls<float>(const ExpertLossesBackward&, const float*, float*, int);
template void expert_losses_pulls<double>(const ExpertLossesBackward&, const double*, double*, int);
template void expert_losses_backward<float>(const ExpertLossesBackward&, const float*, const float*, int);
template void expert_losses_backward<double>(const ExpertLossesBackward&, const double*, const double*, int);

}  // namespace mf::cpu
