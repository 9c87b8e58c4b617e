// Glue of align_conv; kernels for cards alone: on the CPU mose_fast/ops/align_conv.py takes
// PyTorch's own convolutions. Arguments are explained and checked there; what memory safety needs
// is checked here again.
#include "api/align_conv.h"

#include <torch/csrc/utils/pybind.h>

#include "torch/bind.h"
#include "torch/device.h"

#if defined(MOSE_FAST_WITH_CUDA)

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "torch/maps.h"

namespace mf {
namespace {

// A map of these sizes, with x's type and device, in channels_last memory.
const void* map_pointer(const at::Tensor& map, const char* name, at::IntArrayRef sizes, const at::Tensor& x) {
  TORCH_CHECK(on_card(map) && map.device() == x.device(), name, " is on ", map.device(),
              "; wanted the card where x is");
  TORCH_CHECK(map.sizes() == sizes && map.scalar_type() == x.scalar_type(), name, " is ", map.scalar_type(), " ",
              map.sizes(), "; wanted ", x.scalar_type(), " ", sizes);
  TORCH_CHECK(
      map.is_contiguous(at::MemoryFormat::ChannelsLast) && reinterpret_cast<uintptr_t>(map.const_data_ptr()) % 16 == 0,
      name, " has shape ", map.sizes(), " and strides ", map.strides(), " from ", map.const_data_ptr(),
      "; wanted channels_last memory from a multiple of 16 bytes");
  return map.const_data_ptr();
}

// The pointwise weights [out_channels, channels], of the maps' type.
const void* matrix_pointer(const at::Tensor& pointwise, int64_t out_channels, const at::Tensor& x) {
  TORCH_CHECK(pointwise.dim() == 2 && pointwise.size(0) == out_channels && pointwise.is_contiguous() &&
                  pointwise.device() == x.device() && pointwise.scalar_type() == x.scalar_type() &&
                  reinterpret_cast<uintptr_t>(pointwise.const_data_ptr()) % 16 == 0,
              "pointwise is ", pointwise.scalar_type(), " ", pointwise.sizes(), " on ", pointwise.device(), "; wanted ",
              x.scalar_type(), " [", out_channels, ", channels] in a row on ", x.device(),
              ", from a multiple of 16 bytes");
  return pointwise.const_data_ptr();
}

// What all calls read: x, depthwise, stride, prologue, gate, valid_tensor, valid.
AlignConvInput input_of(const at::Tensor& x, const at::Tensor& depthwise, int64_t stride, const MaybeTensor& prologue,
                        const MaybeTensor& gate, const MaybeTensor& valid_tensor, std::optional<int64_t> valid) {
  TORCH_CHECK(x.dim() == 4, "x has shape ", x.sizes(), "; wanted [images, channels, height, width]");
  const int64_t channels = x.size(1);
  TORCH_CHECK(depthwise.device() == x.device() && depthwise.is_contiguous() && depthwise.numel() == channels * 9,
              "depthwise is ", depthwise.sizes(), " on ", depthwise.device(), "; wanted ", channels,
              " x 9 weights in a row on ", x.device());
  AlignConvInput in{};
  in.type = float_type(x, "x");
  in.x = map_pointer(x, "x", x.sizes(), x);
  in.depthwise = {depthwise.const_data_ptr(), float_type(depthwise, "depthwise")};
  in.prologue = prologue ? floats_pointer(*prologue, "prologue", kNormRows * channels, x, alignof(float2)) : nullptr;
  in.gate = gate ? map_pointer(*gate, "gate", {x.size(0), channels, x.size(2) / 2, x.size(3) / 2}, x) : nullptr;
  in.images = x.size(0);
  in.height = x.size(2);
  in.width = x.size(3);
  in.channels = channels;
  in.stride = stride;
  in.valid_pointer = valid_pointer(valid_tensor, x);
  in.valid = valid.value_or(x.size(0));
  return in;
}

at::Tensor map_of(const at::Tensor& x, const AlignConvInput& in, int64_t channels) {
  return at::empty({in.images, channels, in.out_height(), in.out_width()},
                   x.options().memory_format(at::MemoryFormat::ChannelsLast));
}

// y, the norm's state, and the depthwise convolution's result if it is wanted.
std::tuple<at::Tensor, at::Tensor, MaybeTensor> align_conv(const at::Tensor& pointwise, const Norm& norm,
                                                           bool keeps_map, const at::Tensor& x,
                                                           const at::Tensor& depthwise, int64_t stride,
                                                           const MaybeTensor& prologue, const MaybeTensor& gate,
                                                           const MaybeTensor& valid_tensor,
                                                           std::optional<int64_t> valid) {
  AlignConvForward params{};
  params.input = input_of(x, depthwise, stride, prologue, gate, valid_tensor, valid);
  const DeviceGuard guard(x.device());
  params.pointwise = matrix_pointer(pointwise, pointwise.size(0), x);
  TORCH_CHECK(pointwise.size(1) == x.size(1), "pointwise is ", pointwise.sizes(), "; wanted ", x.size(1), " columns");
  params.out_channels = pointwise.size(0);
  params.norm = params_of(norm, params.out_channels, x);
  const at::Tensor moments = floats({cuda::align_conv_moments(params), 3, params.out_channels}, x);
  const at::Tensor y = map_of(x, params.input, params.out_channels);
  const at::Tensor state = floats({kNormRows, params.out_channels}, x);
  MaybeTensor map;
  if (keeps_map) {
    map = map_of(x, params.input, params.input.channels);
    params.map = map->mutable_data_ptr();
  }
  params.moments = moments.mutable_data_ptr<float>();
  params.y = y.mutable_data_ptr();
  params.state = state.mutable_data_ptr<float>();
  cuda::align_conv_forward(params, current_stream());
  return {y, state, map};
}

at::Tensor align_conv_depthwise(const at::Tensor& x, const at::Tensor& depthwise, int64_t stride,
                                const MaybeTensor& prologue, const MaybeTensor& gate, const MaybeTensor& valid_tensor,
                                std::optional<int64_t> valid) {
  const AlignConvInput in = input_of(x, depthwise, stride, prologue, gate, valid_tensor, valid);
  const DeviceGuard guard(x.device());
  const at::Tensor map = map_of(x, in, in.channels);
  cuda::align_conv_depthwise({in, map.mutable_data_ptr()}, current_stream());
  return map;
}

// The gradient of y in all; with `pointwise` also that of the depthwise convolution's result; the
// gradients of the norm's weight and bias (None without grad_state, or where the norm has none).
std::tuple<at::Tensor, MaybeTensor, MaybeTensor, MaybeTensor> align_conv_grad_y(
    const MaybeTensor& grad, const MaybeTensor& grad_state, const at::Tensor& y, const at::Tensor& state,
    const MaybeTensor& mean_rest, const Norm& norm, const MaybeTensor& pointwise, const MaybeTensor& valid_tensor,
    std::optional<int64_t> valid) {
  TORCH_CHECK(y.dim() == 4, "y has shape ", y.sizes(), "; wanted [images, channels, height, width]");
  AlignConvGradY params{};
  params.type = float_type(y, "y");
  params.channels = y.size(1);
  params.images = y.size(0);
  params.pixels = y.size(2) * y.size(3);
  params.y = map_pointer(y, "y", y.sizes(), y);
  params.grad = grad ? map_pointer(*grad, "grad", y.sizes(), y) : nullptr;
  params.state = floats_pointer(state, "state", kNormRows * params.channels, y, alignof(float2));
  params.grad_state =
      grad_state ? floats_pointer(*grad_state, "grad_state", kNormRows * params.channels, y, alignof(float2)) : nullptr;
  params.mean_rest = mean_rest ? floats_pointer(*mean_rest, "mean_rest", params.channels, y, alignof(float)) : nullptr;
  params.norm = params_of(norm, params.channels, y);
  params.valid_pointer = valid_pointer(valid_tensor, y);
  params.valid = valid.value_or(params.images);
  const DeviceGuard guard(y.device());
  const at::Tensor total = at::empty_like(y);
  params.total = total.mutable_data_ptr();
  MaybeTensor weight, bias;
  if (grad_state && params.norm.weight != nullptr) {
    weight = floats({params.channels}, y);
    params.weight = weight->mutable_data_ptr<float>();
  }
  if (grad_state && params.norm.bias != nullptr) {
    bias = floats({params.channels}, y);
    params.bias = bias->mutable_data_ptr<float>();
  }
  MaybeTensor map;
  if (pointwise) {
    params.pointwise = matrix_pointer(*pointwise, params.channels, y);
    params.in_channels = pointwise->size(1);
    map = at::empty({y.size(0), params.in_channels, y.size(2), y.size(3)},
                    y.options().memory_format(at::MemoryFormat::ChannelsLast));
    params.map = map->mutable_data_ptr();
  }
  cuda::align_conv_grad_y(params, current_stream());
  return {total, map, weight, bias};
}

// The gradients of x, depthwise, prologue and gate from that of the depthwise convolution's result;
// None where not wanted.
std::tuple<MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor> align_conv_backward(
    const at::Tensor& grad, std::tuple<bool, bool, bool, bool> wants, const at::Tensor& x, const at::Tensor& depthwise,
    int64_t stride, const MaybeTensor& prologue, const MaybeTensor& gate, const MaybeTensor& valid_tensor,
    std::optional<int64_t> valid) {
  const auto [wants_x, wants_depthwise, wants_prologue, wants_gate] = wants;
  AlignConvBackward params{};
  params.input = input_of(x, depthwise, stride, prologue, gate, valid_tensor, valid);
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

}  // namespace

void bind_align_conv(py::module_& module) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("align_conv", &align_conv, Unlocked());
  module.def("align_conv_depthwise", &align_conv_depthwise, Unlocked());
  module.def("align_conv_grad_y", &align_conv_grad_y, Unlocked());
  module.def("align_conv_backward", &align_conv_backward, Unlocked());
}

}  // namespace mf

#else

namespace mf {

void bind_align_conv(py::module_& /*module*/) {}

}  // namespace mf

#endif
