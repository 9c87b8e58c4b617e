// What the CPU and the CUDA code of the expert losses share: which rows count where, and where each
// statistic lies.
//
// Per expert the terms are a supervised contrastive loss over the projections, a cross-entropy over
// the logits and a distance between the student's and the expert's features
// (mose_fast/reference/expert_losses.py is the definition). Forward leaves a few numbers per row,
// from which backward recomputes the rest:
//
//   contrastive   s_ij = n(z_i) . n(z_j) / temperature, L_i = log sum_{j != i} exp s_ij,
//                 c_i = number of positives of anchor i, A = anchors that have a positive.
//                 With a_i = [c_i > 0] / A the gradient with respect to n(z_i) is
//                 1/temperature sum_{j != i} W_ij n(z_j),
//                 W_ij = a_i exp(s_ij - L_i) + a_j exp(s_ij - L_j) - [y_i = y_j] (a_i / c_i + a_j / c_j).
//   distillation  d_i^2 = |n(u_i) - n(v_i)|^2, with u the student's features and v the expert's.
//   n(v)          passes gradient g as (g - n(v) (n(v) . g)) / |v|; a row with |v| <= kNoDirection gets none.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace mf {

inline constexpr double kNoDirection = 1e-12;
inline constexpr int64_t kTerms = 3;  // contrastive, cross-entropy, distillation

enum class Distillation : int { kOff = 0, kReverse = 1, kForward = 2 };  // off, rsd, sd
enum class DistanceReduction : int { kFrobenius = 0, kMeanOfNorms = 1 };

// Offsets into the statistics of one call, an array of `size()` floats (doubles for fp64 on the
// CPU).
struct ExpertStatistics {
  int64_t experts;
  int64_t rows;

  // Per expert and row.
  MF_HD int64_t log_partition(int64_t e) const { return at(0, e); }  // L_i
  MF_HD int64_t inverse_norm(int64_t e) const { return at(1, e); }   // 1 / max(|z_i|, 1e-12)
  MF_HD int64_t positives(int64_t e) const { return at(2, e); }      // c_i
  MF_HD int64_t anchor_loss(int64_t e) const {
    return at(3, e);
  }  // L_i - mean over the positives of s_ip; 0 without any
  // The log-sum-exp of the row's logits over its classes in two parts, whose sum would round away
  // digits of the smaller one.
  MF_HD int64_t top_logit(int64_t e) const { return at(4, e); }        // the largest logit
  MF_HD int64_t log_classes(int64_t e) const { return at(5, e); }      // log sum exp (logit - the largest)
  MF_HD int64_t row_loss(int64_t e) const { return at(6, e); }         // cross-entropy of the row
  MF_HD int64_t inverse_feature(int64_t e) const { return at(7, e); }  // 1 / max(|features_i|, 1e-12)
  MF_HD int64_t squared_distance(int64_t e) const { return at(8, e); }
  MF_HD int64_t along_student(int64_t e) const { return at(9, e); }   // n(u_i) . (n(u_i) - n(v_i))
  MF_HD int64_t along_feature(int64_t e) const { return at(10, e); }  // n(v_i) . (n(v_i) - n(u_i))
  // Per row.
  MF_HD int64_t inverse_student() const { return at(11, 0); }
  // Per expert.
  MF_HD int64_t anchors() const { return at(11, 0) + rows; }  // A
  MF_HD int64_t distance() const { return anchors() + experts; }
  MF_HD int64_t size() const { return distance() + experts; }

 private:
  MF_HD int64_t at(int64_t which, int64_t e) const { return (which * experts + e) * rows; }
};

// How many rows are in the batch, and how many of them are new; what a caller gave beyond the
// bounds is cut to them.
struct RowCounts {
  int64_t new_rows;  // rows [0, new_rows): the new set
  int64_t valid;     // rows [new_rows, valid): the buffer set; [valid, rows): padding

  MF_HD static RowCounts within(int64_t rows, int64_t new_rows, int64_t valid) {
    const int64_t v = valid < 0 ? 0 : valid > rows ? rows : valid;
    return {new_rows < 0 ? 0 : new_rows > v ? v : new_rows, v};
  }
};

// Weight of one row's cross-entropy in its expert's term: a mean over the new rows plus
// `buffer_weight` means over the others, or one mean over all valid rows where there is no mask of
// classes.
template <typename Real>
MF_HD Real row_weight(int64_t row, RowCounts counts, bool masked, double buffer_weight) {
  if (!masked) {
    return 1 / static_cast<Real>(counts.valid);
  }
  return row < counts.new_rows ? 1 / static_cast<Real>(counts.new_rows)
                               : static_cast<Real>(buffer_weight) / static_cast<Real>(counts.valid - counts.new_rows);
}

}  // namespace mf
