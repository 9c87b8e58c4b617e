// Depthwise 3x3 convolution (padding 1) and pointwise 1x1 convolution over maps [images, height,
// width, channels]. The kernel normalises its input while loading, and also computes the statistics
// that the next norm needs of its output. The depthwise convolution can also run alone: then a
// library multiplies by the pointwise weights. CUDA only: on the CPU PyTorch's convolutions serve.
#pragma once

#include <cstdint>

#include "api/float_array.h"
#include "core/batch_norm.h"
#include "core/host_device.h"

namespace mf {

// Which kernels take maps of a type with these numbers of channels, and which forms of the input: the
// rules for the launchers, mose_fast/ops and the benchmarks. They name what alignment modules and
// gates have; PyTorch's operations serve the rest.
struct AlignConvServes {
  bool any;             // all launches below but for the two that follow
  bool fused_forward;   // align_conv_forward: both convolutions and the statistics
  bool fused_backward;  // align_conv_grad_y with the product with the pointwise weights
  bool fused_weights;   // ... and with the gradient of these weights: for more of them partial sums cost too much
};

constexpr AlignConvServes align_conv_serves(FloatType type, int64_t channels, int64_t out_channels,
                                            int64_t stride = 1) {
  const bool any = type != FloatType::kFloat64 && channels >= 8 && channels % 8 == 0 && channels < INT32_MAX &&
                   out_channels >= 8 && out_channels % 8 == 0 && out_channels <= 2048;
  const bool narrow = any && type != FloatType::kFloat32 && channels <= 128;
  const bool fused_backward = narrow && out_channels % 16 == 0 && out_channels <= 128;
  return {any, narrow && channels % 16 == 0 && out_channels <= (stride == 1 ? 256 : 128), fused_backward,
          fused_backward && channels <= 64};
}

constexpr bool align_conv_serves_form(int64_t stride, bool prologue, bool gate) {
  return stride == 1 ? prologue && !gate : stride == 2 && !(prologue && gate);
}

// What the convolution reads: x' = x, with a prologue relu(scale (x - mean) + shift), with a gate
// x sigmoid(up(gate)), up doubling both sides bilinearly. Maps and gate are float32 or
// bfloat16, all of one type; they and the prologue are aligned to 16 bytes.
struct AlignConvInput {
  FloatType type;
  const void* x;          // [images, height, width, channels]
  FloatArray depthwise;   // [channels, 9], rounded to `type` before use
  const float* prologue;  // [kNormRows, channels]; null: none
  const void* gate;       // [images, height / 2, width / 2, channels]; null: none
  int64_t images;
  int64_t height;
  int64_t width;
  int64_t channels;  // a multiple of 8
  int64_t stride;    // 1 or 2; 2 wants even sides
  // Images from this one on are padding: never read, zero in every map and gradient, not counted.
  // Read from the device where a pointer is given. Cut to [0, images].
  const int32_t* valid_pointer;
  int64_t valid;

  MF_HD int64_t out_height() const { return (height - 1) / stride + 1; }
  MF_HD int64_t out_width() const { return (width - 1) / stride + 1; }
  MF_HD int64_t valid_images() const {
    const int64_t count = valid_pointer != nullptr ? *valid_pointer : valid;
    return count < 0 ? 0 : count < images ? count : images;
  }
};

struct AlignConvDepthwise {
  AlignConvInput input;
  void* map;  // [images, out_height, out_width, channels] out
};

// Both convolutions and the norm's state, for what `fused_forward` names.
struct AlignConvForward {
  AlignConvInput input;
  const void* pointwise;  // [out_channels, channels], of the input's type, aligned to 16 bytes
  int64_t out_channels;
  NormParams norm;
  float* moments;  // [align_conv_moments(*this), 3, out_channels] workspace
  void* map;       // as of AlignConvDepthwise; null: not kept
  void* y;         // [images, out_height, out_width, out_channels] out
  float* state;    // [kNormRows, out_channels] out
};

// The gradient that y has in all: total = grad + slope (y - mean) + offset, the latter two from the
// gradient of the state.
struct AlignConvGradY {
  FloatType type;
  const void* y;            // [images, pixels, channels]
  const void* grad;         // as y; null: 0
  const float* state;       // [kNormRows, channels]
  const float* grad_state;  // [kNormRows, channels]; null: 0
  const float* mean_rest;   // [channels]: of NormStatistics; null: 0
  NormParams norm;
  int64_t images;
  int64_t pixels;    // of an image
  int64_t channels;  // a multiple of 8
  const int32_t* valid_pointer;
  int64_t valid;
  void* total;  // as y, out; null where `into` is wanted
  // The product with the pointwise weights in the same pass, for what `fused_backward` names.
  const void* pointwise;  // [channels, in_channels], of y's type, aligned to 16 bytes; null: no product
  int64_t in_channels;
  void* map;  // [images, pixels, in_channels] out: the gradient of the depthwise convolution's result
  // The gradient of the pointwise weights in the same pass, for what `fused_weights` names.
  const void* kept;        // as `map`: the depthwise convolution's result
  float* sums;             // [align_conv_weight_sums(*this), channels, in_channels] workspace
  MutableFloatArray into;  // [channels, in_channels] out; null: not wanted
  float* weight;           // [channels] out: gradient of the norm's weight; null: not wanted
  float* bias;             // [channels] out: of its bias; null: not wanted
};

// Gradients through depthwise convolution, gate and prologue. Each is null where it is not wanted.
struct AlignConvBackward {
  AlignConvInput input;
  const void* grad;  // [images, out_height, out_width, channels]: of the depthwise convolution's result
  float*
      sums;  // [align_conv_sums(input), kAlignConvSums, channels] workspace; null if neither of the last two is wanted
  void* x;   // as the input's x, out
  void* gate;                   // as the input's gate, out
  MutableFloatArray depthwise;  // [channels, 9] out
  float* prologue;              // [kNormRows, channels] out
};

// Of each channel: the gradients of the nine weights, of the prologue's shift and of its scale.
inline constexpr int kAlignConvSums = 11;

namespace cuda {
// How many partial results the workspaces hold; 0 for inputs without elements.
int64_t align_conv_moments(const AlignConvForward& params);
int64_t align_conv_sums(const AlignConvInput& input);
int64_t align_conv_weight_sums(const AlignConvGradY& params);

void align_conv_depthwise(const AlignConvDepthwise& params, Stream stream);  // one launch
void align_conv_forward(const AlignConvForward& params, Stream stream);      // two launches
void align_conv_grad_y(const AlignConvGradY& params, Stream stream);       // one launch; two with the weights' gradient
void align_conv_backward(const AlignConvBackward& params, Stream stream);  // one launch; two with sums
}  // namespace cuda

}  // namespace mf
