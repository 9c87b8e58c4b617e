// Glue of align_conv; kernels for GPUs alone: on the CPU mose_fast/ops/align_conv.py takes
// PyTorch's own convolutions. Arguments are explained and checked there; what memory safety needs
// is checked here again.
#include "api/align_conv.h"

#include "torch/bind.h"
#include "torch/device.h"

#if defined(MOSE_FAST_WITH_CUDA)

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "torch/maps.h"

namespace mf {
namespace {

// The pointwise weights [out_channels, channels], of the maps' type.
const void* matrix_pointer(const at::Tensor& pointwise, int64_t out_channels, const at::Tensor& x) {
  TORCH_CHECK(pointwise.dim() == 2 && pointwise.size(0) == out_channels, "pointwise is ", pointwise.sizes(),
              "; wanted ", out_channels, " rows");
  return row_pointer(pointwise, "pointwise", x.scalar_type(), pointwise.numel(), x.device(), 16);
}

// What all calls read of their last arguments, those of `input` in the schemas.
AlignConvInput input_of(const at::Tensor& x, const at::Tensor& depthwise, int64_t stride, const MaybeTensor& prologue,
                        const MaybeTensor& gate, const MaybeTensor& valid_rows_tensor,
                        std::optional<int64_t> valid_rows) {
  TORCH_CHECK(x.dim() == 4, "x has shape ", x.sizes(), "; wanted [images, channels, height, width]");
  const int64_t channels = x.size(1);
  AlignConvInput in{};
  in.type = float_type(x, "x");
  in.x = map_pointer(x, "x", x.sizes(), x);
  in.depthwise = {row_pointer(depthwise, "depthwise", depthwise.scalar_type(), channels * 9, x.device()),
                  float_type(depthwise, "depthwise")};
  in.prologue = row_pointer<const float>(prologue, "prologue", kNormRows * channels, x.device(), 16);
  in.gate = gate ? map_pointer(*gate, "gate", {x.size(0), channels, x.size(2) / 2, x.size(3) / 2}, x) : nullptr;
  in.images = x.size(0);
  in.height = x.size(2);
  in.width = x.size(3);
  in.channels = channels;
  in.stride = stride;
  in.valid_pointer = row_pointer<const int32_t>(valid_rows_tensor, "valid_rows", 1, x.device());
  in.valid = valid_rows.value_or(x.size(0));
  return in;
}

at::Tensor map_of(const at::Tensor& x, const AlignConvInput& in, int64_t channels) {
  return at::empty({in.images, channels, in.out_height(), in.out_width()},
                   x.options().memory_format(at::MemoryFormat::ChannelsLast));
}

// y, the norm's state, and the depthwise convolution's result, an empty tensor if it is not wanted:
// an op that writes into arguments cannot return None under torch.compile.
std::tuple<at::Tensor, at::Tensor, at::Tensor> align_conv(
    const at::Tensor& pointwise, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& running_mean,
    const MaybeTensor& running_var, const MaybeTensor& batches, double momentum, double eps, bool training,
    bool keeps_map, const at::Tensor& x, const at::Tensor& depthwise, int64_t stride, const MaybeTensor& prologue,
    const MaybeTensor& gate, const MaybeTensor& valid_rows_tensor, std::optional<int64_t> valid_rows) {
  AlignConvForward params{};
  params.input = input_of(x, depthwise, stride, prologue, gate, valid_rows_tensor, valid_rows);
  const DeviceGuard guard(x.device());
  params.pointwise = matrix_pointer(pointwise, pointwise.size(0), x);
  TORCH_CHECK(pointwise.size(1) == x.size(1), "pointwise is ", pointwise.sizes(), "; wanted ", x.size(1), " columns");
  params.out_channels = pointwise.size(0);
  params.norm = norm_params(weight, bias, running_mean, running_var, batches, momentum, eps, training,
                            params.out_channels, x.device());
  const at::Tensor moments = floats({cuda::align_conv_moments(params), 3, params.out_channels}, x);
  const at::Tensor y = map_of(x, params.input, params.out_channels);
  const at::Tensor state = floats({kNormRows, params.out_channels}, x);
  const at::Tensor map = keeps_map ? map_of(x, params.input, params.input.channels) : at::empty({0}, x.options());
  params.map = keeps_map ? map.mutable_data_ptr() : nullptr;
  params.moments = moments.mutable_data_ptr<float>();
  params.y = y.mutable_data_ptr();
  params.state = state.mutable_data_ptr<float>();
  cuda::align_conv_forward(params, current_stream());
  return {y, state, map};
}

at::Tensor align_conv_depthwise(const at::Tensor& x, const at::Tensor& depthwise, int64_t stride,
                                const MaybeTensor& prologue, const MaybeTensor& gate,
                                const MaybeTensor& valid_rows_tensor, std::optional<int64_t> valid_rows) {
  const AlignConvInput in = input_of(x, depthwise, stride, prologue, gate, valid_rows_tensor, valid_rows);
  const DeviceGuard guard(x.device());
  const at::Tensor map = map_of(x, in, in.channels);
  cuda::align_conv_depthwise({in, map.mutable_data_ptr()}, current_stream());
  return map;
}

// The gradient of y in all; with `pointwise` also that of the depthwise convolution's result; with
// this result (`kept`) that of the pointwise weights in place of the first; the gradients of the
// norm's weight and bias (None without grad_state, or where the norm has none).
std::tuple<MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor> align_conv_grad_y(
    const MaybeTensor& grad, const MaybeTensor& grad_state, const at::Tensor& y, const at::Tensor& state,
    const MaybeTensor& mean_rest, const MaybeTensor& weight, bool has_bias, bool training, const MaybeTensor& pointwise,
    const MaybeTensor& kept, const MaybeTensor& valid_rows_tensor, std::optional<int64_t> valid_rows) {
  TORCH_CHECK(y.dim() == 4, "y has shape ", y.sizes(), "; wanted [images, channels, height, width]");
  AlignConvGradY params{};
  params.type = float_type(y, "y");
  params.channels = y.size(1);
  params.images = y.size(0);
  params.pixels = y.size(2) * y.size(3);
  params.y = map_pointer(y, "y", y.sizes(), y);
  params.grad = grad ? map_pointer(*grad, "grad", y.sizes(), y) : nullptr;
  const int64_t states = kNormRows * params.channels;
  params.state = row_pointer<const float>(state, "state", states, y.device());
  params.grad_state = row_pointer<const float>(grad_state, "grad_state", states, y.device());
  params.mean_rest = row_pointer<const float>(mean_rest, "mean_rest", params.channels, y.device());
  params.norm.weight = row_pointer<const float>(weight, "weight", params.channels, y.device());
  params.norm.training = training;
  params.valid_pointer = row_pointer<const int32_t>(valid_rows_tensor, "valid_rows", 1, y.device());
  params.valid = valid_rows.value_or(params.images);
  const DeviceGuard guard(y.device());
  MaybeTensor total, to_weight, to_bias;
  if (!kept) {
    total = at::empty_like(y);
    params.total = total->mutable_data_ptr();
  }
  if (grad_state && weight) {
    to_weight = floats({params.channels}, y);
    params.weight = to_weight->mutable_data_ptr<float>();
  }
  if (grad_state && has_bias) {
    to_bias = floats({params.channels}, y);
    params.bias = to_bias->mutable_data_ptr<float>();
  }
  MaybeTensor map, to_pointwise;
  at::Tensor sums;
  TORCH_CHECK(pointwise || !kept, "kept is given without pointwise; wanted both");
  if (pointwise) {
    params.pointwise = matrix_pointer(*pointwise, params.channels, y);
    params.in_channels = pointwise->size(1);
    map = at::empty({y.size(0), params.in_channels, y.size(2), y.size(3)},
                    y.options().memory_format(at::MemoryFormat::ChannelsLast));
    params.map = map->mutable_data_ptr();
  }
  if (kept) {
    params.kept = map_pointer(*kept, "kept", map->sizes(), y);
    sums = floats({cuda::align_conv_weight_sums(params), params.channels, params.in_channels}, y);
    params.sums = sums.mutable_data_ptr<float>();
    to_pointwise = at::empty_like(*pointwise);
    params.into = {to_pointwise->mutable_data_ptr(), params.type};
  }
  cuda::align_conv_grad_y(params, current_stream());
  return {total, map, to_pointwise, to_weight, to_bias};
}

// The gradients of x, depthwise, prologue and gate from that of the depthwise convolution's result;
// None where not wanted.
std::tuple<MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor> align_conv_backward(
    const at::Tensor& grad, std::array<bool, 4> wants, const at::Tensor& x, const at::Tensor& depthwise, int64_t stride,
    const MaybeTensor& prologue, const MaybeTensor& gate, const MaybeTensor& valid_rows_tensor,
    std::optional<int64_t> valid_rows) {
  const auto [wants_x, wants_depthwise, wants_prologue, wants_gate] = wants;
  AlignConvBackward params{};
  params.input = input_of(x, depthwise, stride, prologue, gate, valid_rows_tensor, valid_rows);
  const AlignConvInput& in = params.input;
  TORCH_CHECK((prologue || !wants_prologue) && (gate || !wants_gate),
              "prologue or gate is None; wanted one whose gradient is wanted");
  params.grad = map_pointer(grad, "grad", {in.images, in.channels, in.out_height(), in.out_width()}, x);
  const DeviceGuard guard(x.device());
  MaybeTensor to_x, to_depthwise, to_prologue, to_gate;
  at::Tensor sums;
  if (wants_x) {
    to_x = at::empty_like(x);
    params.x = to_x->mutable_data_ptr();
  }
  if (wants_gate) {
    to_gate = at::empty_like(*gate);
    params.gate = to_gate->mutable_data_ptr();
  }
  if (wants_depthwise || wants_prologue) {
    sums = floats({cuda::align_conv_sums(in), kAlignConvSums, in.channels}, x);
    params.sums = sums.mutable_data_ptr<float>();
  }
  if (wants_depthwise) {
    to_depthwise = at::empty_like(depthwise);
    params.depthwise = {to_depthwise->mutable_data_ptr(), in.depthwise.type};
  }
  if (wants_prologue) {
    to_prologue = at::empty_like(*prologue);
    params.prologue = to_prologue->mutable_data_ptr<float>();
  }
  cuda::align_conv_backward(params, current_stream());
  return {to_x, to_depthwise, to_prologue, to_gate};
}

std::tuple<bool, bool, bool, bool> serves(at::ScalarType type, int64_t channels, int64_t out_channels, int64_t stride) {
  const AlignConvServes served = align_conv_serves(float_type(type, "x", true), channels, out_channels, stride);
  return {served.any, served.fused_forward, served.fused_backward, served.fused_weights};
}

}  // namespace

void define_align_conv(const Ops& ops) {
  const std::string valid = kValidSchema;
  const std::string input =
      "Tensor x, Tensor depthwise, int stride, Tensor? prologue, Tensor? gate, " + valid + ") -> ";
  ops.define(
      "align_conv(Tensor pointwise, " + norm_schema("", 'a') + "bool keeps_map, " + input + "(Tensor, Tensor, Tensor)",
      &align_conv);
  ops.define("align_conv_depthwise(" + input + "Tensor", &align_conv_depthwise);
  ops.define(
      "align_conv_grad_y(Tensor? grad, Tensor? grad_state, Tensor y, Tensor state, Tensor? mean_rest, "
      "Tensor? weight, bool has_bias, bool training, Tensor? pointwise, Tensor? kept, " +
          valid + ") -> (Tensor?, Tensor?, Tensor?, Tensor?, Tensor?)",
      &align_conv_grad_y);
  ops.define("align_conv_backward(Tensor grad, bool[4] wants, " + input + "(Tensor?, Tensor?, Tensor?, Tensor?)",
             &align_conv_backward);
  ops.module.def("align_conv_serves", &serves);
  ops.module.def("align_conv_serves_form", &align_conv_serves_form);
}

}  // namespace mf

#endif
