// Glue of batch norm with add and ReLU; kernels for cards alone: on the CPU
// mose_fast/ops/batch_norm_act.py takes PyTorch's own operations. Arguments are explained and
// checked there; what memory safety needs is checked here again.
#include "api/batch_norm_act.h"

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
#include <vector>

#include "torch/maps.h"
#include "torch/workspace.h"

namespace mf {
namespace {

void check_map(const at::Tensor& map, const char* name, const at::Tensor& x) {
  TORCH_CHECK(map.device() == x.device() && on_card(map), name, " is on ", map.device(),
              "; wanted the card where x is");
  TORCH_CHECK(map.sizes() == x.sizes() && map.scalar_type() == x.scalar_type(), name, " is ", map.scalar_type(), " ",
              map.sizes(), "; wanted ", x.scalar_type(), " ", x.sizes(), ", as x is");
  TORCH_CHECK(map.dim() == 4 && map.is_contiguous(at::MemoryFormat::ChannelsLast), name, " has shape ", map.sizes(),
              " and strides ", map.strides(), "; wanted a map in channels_last memory");
  TORCH_CHECK(map.size(1) % kGroup == 0 && reinterpret_cast<uintptr_t>(map.const_data_ptr()) % 16 == 0, name, " has ",
              map.size(1), " channels from ", map.const_data_ptr(), "; wanted a multiple of ", kGroup,
              " from a multiple of 16 bytes");
}

// The kernels read states as words of 16 bytes.
const float* state_pointer(const at::Tensor& state, const char* name, int64_t count, const at::Tensor& x) {
  return floats_pointer(state, name, count, x, 16);
}

MapShape shape_of(const at::Tensor& x, const MaybeTensor& valid_tensor, std::optional<int64_t> valid) {
  check_map(x, "x", x);
  MapShape shape{x.size(0), x.size(2) * x.size(3), x.size(1), nullptr, valid.value_or(x.size(0))};
  shape.valid_pointer = valid_pointer(valid_tensor, x);
  return shape;
}

// [norms, 4, channels]; `mean_rest`: where the first norm's is written, or null.
at::Tensor states_of(const at::Tensor& x, const Norm& norm, const MaybeTensor& other,
                     const std::optional<Norm>& other_norm, const MaybeTensor& prologue, const MapShape& shape,
                     float* mean_rest) {
  const int count = processors(x.device());
  const ChannelGrid grid = norm_grid(shape, count);
  const int norms = other_norm ? 2 : 1;
  for (const Norm* each : {&norm, other_norm ? &*other_norm : &norm}) {
    const bool mean = std::get<2>(*each).has_value();
    TORCH_CHECK(mean == std::get<3>(*each).has_value() && (mean || std::get<7>(*each)),
                "running_mean and running_var are not both there; wanted both, or none in training");
  }
  const at::Tensor states = floats({norms, kNormRows, shape.channels}, x);
  const at::Tensor partials = floats({norms * grid.partials(NormStatistics::kFields)}, x);
  const NormStatistics params{
      shape,
      float_type(x, "x"),
      count,
      norms,
      {x.const_data_ptr(), other ? other->const_data_ptr() : nullptr},
      {params_of(norm, x.size(1), x), other_norm ? params_of(*other_norm, x.size(1), x) : NormParams{}},
      prologue ? state_pointer(*prologue, "prologue", kNormRows * shape.channels, x) : nullptr,
      states.mutable_data_ptr<float>(),
      mean_rest,
      partials.mutable_data_ptr<float>(),
      tickets(norms * grid.tickets())};
  cuda::norm_statistics(params, current_stream());
  return states;
}

// y, the mask [pixels, channels / 8] (empty if not wanted) and the states [1 or 2, 4, channels].
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_act(const at::Tensor& x, const Norm& norm, bool relu,
                                                              const MaybeTensor& residual,
                                                              const std::optional<Norm>& residual_norm,
                                                              const MaybeTensor& prologue,
                                                              const MaybeTensor& valid_tensor,
                                                              std::optional<int64_t> valid, bool wants_mask) {
  const MapShape shape = shape_of(x, valid_tensor, valid);
  if (residual) {
    check_map(*residual, "residual", x);
  }
  TORCH_CHECK(residual || !residual_norm, "residual is None with a residual_norm; wanted the map that it normalises");
  const DeviceGuard guard(x.device());
  const at::Tensor states = states_of(x, norm, residual, residual_norm, prologue, shape, nullptr);
  const at::Tensor y = at::empty_like(x);
  const at::Tensor mask =
      at::empty({wants_mask ? shape.pixels() * shape.channels / kGroup : 0}, x.options().dtype(at::kByte));
  const BatchNormActForward params{shape,
                                   float_type(x, "x"),
                                   processors(x.device()),
                                   x.const_data_ptr(),
                                   states.const_data_ptr<float>(),
                                   prologue ? prologue->const_data_ptr<float>() : nullptr,
                                   residual ? residual->const_data_ptr() : nullptr,
                                   residual_norm.has_value(),
                                   relu,
                                   y.mutable_data_ptr(),
                                   wants_mask ? mask.mutable_data_ptr<uint8_t>() : nullptr};
  cuda::batch_norm_act_forward(params, current_stream());
  return {y, mask, states};
}

// The second pass, given the rows of the first.
void run_backward(BatchNormActBackward& params, const at::Tensor& x) {
  const ChannelGrid grid = norm_grid(params.shape, params.processors);
  at::Tensor partials;
  if (params.prologue != nullptr) {
    partials = floats({grid.partials(BatchNormActBackward::kPrologueFields)}, x);
    params.partials = partials.mutable_data_ptr<float>();
  }
  cuda::batch_norm_act_backward(params, current_stream());
}

// The gradients of x, of the residual and of the prologue (None where not wanted), and per norm the
// rows of NormGradRow.
//   grads: at least one, like x; residual: given if it has a norm; wants: x, residual, prologue
std::tuple<MaybeTensor, MaybeTensor, MaybeTensor, at::Tensor> batch_norm_act_backward(
    const std::vector<at::Tensor>& grads, const MaybeTensor& mask, const at::Tensor& x, const Norm& norm,
    const MaybeTensor& residual, const std::optional<Norm>& residual_norm, const at::Tensor& states,
    const MaybeTensor& prologue, const MaybeTensor& valid_tensor, std::optional<int64_t> valid,
    std::tuple<bool, bool, bool> wants) {
  const auto [wants_x, wants_residual, wants_prologue] = wants;
  const MapShape shape = shape_of(x, valid_tensor, valid);
  const int norms = residual_norm ? 2 : 1;
  TORCH_CHECK(!grads.empty() && grads.size() <= BatchNormActBackward::kMostGrads, "there are ", grads.size(),
              " gradients; wanted 1 to ", BatchNormActBackward::kMostGrads);
  TORCH_CHECK(residual.has_value() == residual_norm.has_value(),
              "residual or residual_norm is None; wanted both or none");
  TORCH_CHECK(!prologue || !residual_norm, "prologue and residual_norm are both given; wanted at most one of them");
  BatchNormActBackward params{};
  params.shape = shape;
  params.type = float_type(x, "x");
  const DeviceGuard guard(x.device());
  params.processors = processors(x.device());
  for (const at::Tensor& grad : grads) {
    check_map(grad, "a gradient", x);
    params.grads[params.grad_count++] = grad.const_data_ptr();
  }
  if (mask) {
    TORCH_CHECK(mask->scalar_type() == at::kByte && mask->device() == x.device() &&
                    mask->numel() == shape.pixels() * shape.channels / kGroup,
                "mask does not fit; wanted what the forward call returned");
    params.mask = mask->const_data_ptr<uint8_t>();
  }
  params.x = x.const_data_ptr();
  if (residual) {
    check_map(*residual, "residual", x);
    params.residual = residual->const_data_ptr();
  }
  params.state = state_pointer(states, "states", norms * kNormRows * shape.channels, x);
  params.prologue = prologue ? state_pointer(*prologue, "prologue", kNormRows * shape.channels, x) : nullptr;
  params.norm[0] = params_of(norm, x.size(1), x);
  params.norm[1] = residual_norm ? params_of(*residual_norm, x.size(1), x) : NormParams{};
  const ChannelGrid grid = norm_grid(shape, params.processors);
  const at::Tensor norm_grads = floats({norms, kNormGradRows, shape.channels}, x);
  const at::Tensor partials = floats({grid.partials(BatchNormActBackward::kSumFields)}, x);
  params.norm_grads = norm_grads.mutable_data_ptr<float>();
  params.partials = partials.mutable_data_ptr<float>();
  params.tickets = tickets(grid.tickets());
  // Written once where it is a result itself, or where the second pass would have to add it up
  // again.
  const bool plain_residual = wants_residual && !residual_norm;
  MaybeTensor sum;
  if (plain_residual || grads.size() > 1) {
    sum = at::empty_like(x);
    params.g = sum->mutable_data_ptr();
  }
  cuda::batch_norm_act_sums(params, current_stream());

  MaybeTensor x_grad, residual_grad, prologue_grad;
  const bool second_residual = wants_residual && residual_norm;
  if (wants_x || second_residual || wants_prologue) {
    if (sum) {
      params.grads[0] = params.g;
      params.grad_count = 1;
      params.mask = nullptr;
    }
    x_grad = at::empty_like(x);
    params.x_grad = x_grad->mutable_data_ptr();
    if (second_residual) {
      residual_grad = at::empty_like(x);
      params.residual_grad = residual_grad->mutable_data_ptr();
    }
    if (prologue) {
      prologue_grad = floats({kNormRows, shape.channels}, x);
      params.prologue_grad = prologue_grad->mutable_data_ptr<float>();
    }
    run_backward(params, x);
  }
  return {x_grad, plain_residual ? sum : residual_grad, prologue_grad, norm_grads};
}

// The state [4, channels], and what rounding left of its mean [channels], which its gradient takes.
std::tuple<at::Tensor, at::Tensor> norm_state(const at::Tensor& x, const Norm& norm, const MaybeTensor& valid_tensor,
                                              std::optional<int64_t> valid) {
  const MapShape shape = shape_of(x, valid_tensor, valid);
  const DeviceGuard guard(x.device());
  const at::Tensor mean_rest = floats({shape.channels}, x);
  return {states_of(x, norm, {}, {}, {}, shape, mean_rest.mutable_data_ptr<float>()).squeeze(0), mean_rest};
}

// The gradient of x (None if not wanted) and the rows of NormGradRow, from the state's gradient.
std::tuple<MaybeTensor, at::Tensor> norm_state_backward(const at::Tensor& grad, const at::Tensor& x, const Norm& norm,
                                                        const at::Tensor& state, const at::Tensor& mean_rest,
                                                        const MaybeTensor& valid_tensor, std::optional<int64_t> valid,
                                                        bool wants_x) {
  const MapShape shape = shape_of(x, valid_tensor, valid);
  const int64_t count = kNormRows * shape.channels;
  const DeviceGuard guard(x.device());
  const at::Tensor norm_grads = floats({kNormGradRows, shape.channels}, x);
  const NormStateBackward first{shape,
                                state_pointer(state, "state", count, x),
                                floats_pointer(mean_rest, "mean_rest", shape.channels, x, alignof(float)),
                                floats_pointer(grad, "grad", count, x, alignof(float)),
                                params_of(norm, x.size(1), x),
                                norm_grads.mutable_data_ptr<float>()};
  cuda::norm_state_backward(first, current_stream());
  if (!wants_x) {
    return {MaybeTensor{}, norm_grads};
  }
  BatchNormActBackward params{};
  params.shape = shape;
  params.type = float_type(x, "x");
  params.processors = processors(x.device());
  params.x = x.const_data_ptr();
  params.state = first.state;
  params.norm_grads = first.norm_grads;
  const at::Tensor x_grad = at::empty_like(x);
  params.x_grad = x_grad.mutable_data_ptr();
  run_backward(params, x);
  return {x_grad, norm_grads};
}

}  // namespace

void bind_batch_norm_act(py::module_& module) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("batch_norm_act", &batch_norm_act, Unlocked());
  module.def("batch_norm_act_backward", &batch_norm_act_backward, Unlocked());
  module.def("norm_state", &norm_state, Unlocked());
  module.def("norm_state_backward", &norm_state_backward, Unlocked());
}

}  // namespace mf

#else

namespace mf {

void bind_batch_norm_act(py::module_& /*module*/) {}

}  // namespace mf

#endif
