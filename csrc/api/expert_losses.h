// All losses of one step of MOSE for E experts and N rows, and their gradients;
// core/expert_losses.h has the algebra.
#pragma once

#include <cstdint>

#include "api/float_array.h"
#include "core/expert_losses.h"
#include "core/host_device.h"

namespace mf {

// What both forward and backward read.
struct ExpertLossesInput {
  FloatArray projections;  // [experts, rows, projection_size]
  FloatArray logits;       // [experts, rows, classes]
  FloatArray features;     // [experts, rows, feature_size]
  FloatArray student;      // [rows, feature_size]
  const int64_t* labels;   // [rows]
  const bool*
      current_classes;  // [classes], the classes of the new rows' softmax; null: one softmax over all for all rows
  int64_t experts;
  int64_t rows;
  int64_t projection_size;
  int64_t classes;
  int64_t feature_size;
  // Row counts: read from the device where a pointer is given, else the number beside it. Cut to
  // [0, valid] and [0, rows].
  const int32_t* new_rows_pointer;
  const int32_t* valid_pointer;
  int64_t new_rows;
  int64_t valid;
  double temperature;
  double buffer_weight;
  int64_t first_contrastive;    // experts from this one on have the contrastive loss
  int64_t first_cross_entropy;  // experts from this one on have the cross-entropy
  Distillation distillation;
  DistanceReduction reduction;
  int64_t student_expert;  // has no distillation term

  MF_HD RowCounts counts() const {
    return RowCounts::within(rows, new_rows_pointer ? *new_rows_pointer : new_rows,
                             valid_pointer ? *valid_pointer : valid);
  }
  MF_HD bool contrasts(int64_t e) const { return e >= first_contrastive; }
  MF_HD bool classifies(int64_t e) const { return e >= first_cross_entropy; }
  MF_HD bool distils(int64_t e) const { return distillation != Distillation::kOff && e != student_expert; }
  MF_HD ExpertStatistics statistics() const { return {experts, rows}; }
};

struct ExpertLossesForward {
  ExpertLossesInput input;
  void* terms;       // [experts, kTerms] out
  void* statistics;  // [ExpertStatistics::size()] out
};

struct ExpertLossesBackward {
  ExpertLossesInput input;
  const void* statistics;  // as forward left it
  const void* grad;        // [experts, kTerms], the gradient of the terms, with these strides
  int64_t grad_strides[2];
  // Every element is written: 0 for padding and for terms that are switched off.
  MutableFloatArray projections;
  MutableFloatArray logits;
  MutableFloatArray features;  // wanted only under Distillation::kForward
  MutableFloatArray student;   // wanted only with distillation
};

namespace cpu {
// Real is float or double: the type of every array. The products of matrices lie between these
// calls, in the caller's hands:
//   directions [experts, rows, projection_size] = n(z), zero for padding             <- expert_losses_directions
//   similarity [experts, rows, rows]            = directions directions^T            <- the caller
//   forward turns `similarity` in place into exp(s_ij - L_i), zero on the diagonal and for padding.
//   pulls [experts, rows, rows]                 = W_ij times grad / temperature      <- expert_losses_pulls
//   pulled [experts, rows, projection_size]     = pulls directions                   <- the caller
//   backward reads directions and pulled.
// Throws Error where a label is no class, or the label of a new row is not among the current
// classes.
template <typename Real>
void expert_losses_directions(const ExpertLossesInput& input, Real* directions, int threads);
template <typename Real>
void expert_losses_forward(const ExpertLossesForward& params, Real* similarity, int threads);
template <typename Real>
void expert_losses_pulls(const ExpertLossesBackward& params, const Real* similarity, Real* pulls, int threads);
template <typename Real>
void expert_losses_backward(const ExpertLossesBackward& params, const Real* directions, const Real* pulled,
                            int threads);
}  // namespace cpu

namespace cuda {
// Inputs of float32 or bfloat16: projections and logits each of its own, features and student
// of one; terms, statistics and grad float32.
// At most three launches together. A label that is no class, or that of a new row outside the
// current classes, makes its row's loss NaN, and so the term.
void expert_losses_forward(const ExpertLossesForward& params, Stream stream);    // two launches
void expert_losses_backward(const ExpertLossesBackward& params, Stream stream);  // one launch
}  // namespace cuda

}  // namespace mf
