// Batch norm with residual add and ReLU over maps in NHWC: statistics, application, and the two
// passes of the backward; what a norm's state is stands in core/batch_norm.h.
//
//   y = relu(norm(x')), relu(norm(x) + r), relu(norm(x) + norm2(r))
//   x' = x or, with a prologue, relu(scale1 (x - mean1) + shift1)
//
// Backward, with g = [y > 0] sum of y's gradients: dweight, dbias and what flows through the
// statistics come from sum g and sum g (x' - mean) (first pass); dx' = scale g + slope (x' - mean)
// + offset, dr alike or g itself (second pass). With a prologue dx = scale1 [x' > 0] dx', and the
// prologue's own gradient from the sums of [x' > 0] dx' and of that times x - mean1.
//
// Channels are a multiple of kGroup; maps and states are aligned to 16 bytes. Padded images are
// never read, written as zero and not counted.
#pragma once

#include <cstdint>

#include "api/channel_grid.h"
#include "api/float_array.h"
#include "core/batch_norm.h"
#include "core/host_device.h"

namespace mf {

// Launches that end in sums run one block of this many threads on each of the GPU's processors
// (fewer for a small map), and their workspace is that of this grid. The order of the sums depends
// on `processors`: bits agree among runs, not among kinds of GPUs.
constexpr int kNormThreads = 512;

inline ChannelGrid norm_grid(const MapShape& shape, int processors) {
  return ChannelGrid::of(shape, kNormThreads, processors);
}

// The state of one norm, or of two in one launch, from one read of each map; running statistics are
// updated. A norm that is not in training reads no map.
struct NormStatistics {
  static constexpr int kFields = 3;  // of the workspace

  MapShape shape;
  FloatType type;
  int processors;
  int norms;  // 1 or 2
  const void* map[2];
  NormParams norm[2];
  const float* prologue;  // [kNormRows, channels], for map 0 alone; null: none
  float* state;           // [norms, kNormRows, channels] out
  float* mean_rest;       // [channels] out: the first norm's mean minus the state's, which is rounded; null: not wanted
  float* partials;        // [norms, norm_grid().partials(kFields)]
  uint32_t* tickets;      // [norms, norm_grid().tickets()]
};

struct BatchNormActForward {
  MapShape shape;
  FloatType type;
  int processors;
  const void* x;
  const float* state;     // [1 or 2, kNormRows, channels]
  const float* prologue;  // [kNormRows, channels]; null: none; not together with a residual
  const void* residual;   // null: none
  bool normed_residual;   // by the second state
  bool relu;
  void* y;        // out
  uint8_t* mask;  // out, one bit an element: [y > 0], [pixels, channels / 8]; null: not wanted
};

// Rows of what the sums of the backward make: gradients of weight and bias, and dx += slope (x -
// mean) + offset.
enum NormGradRow : int { kGradWeight = 0, kGradBias = 1, kSlope = 2, kOffset = 3, kNormGradRows = 4 };

struct BatchNormActBackward {
  static constexpr int kMostGrads = 8;
  static constexpr int kSumFields = 3;       // of the first pass's workspace
  static constexpr int kPrologueFields = 2;  // of the second's, with a prologue

  MapShape shape;
  FloatType type;
  int processors;
  const void* grads[kMostGrads];  // each like the map
  int grad_count;                 // 0: none, as zeros
  const uint8_t* mask;            // null: every element counts
  const void* x;
  const void* residual;   // null: none that has a norm
  const float* state;     // [1 or 2, kNormRows, channels]
  const float* prologue;  // [kNormRows, channels]; null: none
  NormParams norm[2];     // weight and training are read
  float* norm_grads;      // [1 or 2, kNormGradRows, channels]: out of the first pass, in of the second
  float* partials;
  uint32_t* tickets;
  // The first pass.
  void* g;  // out, like the map: the masked sum of the gradients, which the sums are then of; null: not wanted
  // The second pass.
  void* x_grad;          // out
  void* residual_grad;   // out, with a second norm; null: not wanted
  float* prologue_grad;  // out, [kNormRows, channels], with a prologue
};

// The rows of NormGradRow from the gradient of a state.
struct NormStateBackward {
  MapShape shape;
  const float* state;      // [kNormRows, channels]
  const float* mean_rest;  // [channels], as the statistics left it
  const float* grad;       // as state: its gradient
  NormParams norm;
  float* norm_grads;  // [kNormGradRows, channels] out
};

namespace cuda {
// One launch each; float32 and bfloat16.
void norm_statistics(const NormStatistics& params, Stream stream);
void batch_norm_act_forward(const BatchNormActForward& params, Stream stream);
void batch_norm_act_sums(const BatchNormActBackward& params, Stream stream);
void batch_norm_act_backward(const BatchNormActBackward& params, Stream stream);
void norm_state_backward(const NormStateBackward& params, Stream stream);
}  // namespace cuda

}  // namespace mf
