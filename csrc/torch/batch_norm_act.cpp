// Glue of batch norm with add and ReLU, and of the same with a pool; kernels for GPUs alone: on the
// CPU mose_fast/ops/batch_norm_act.py and batch_norm_pool.py take other operations. Arguments are
// explained and checked there; what memory safety needs is checked here again.
#include "api/batch_norm_act.h"

#include "api/batch_norm_pool.h"
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
#include <vector>

#include "torch/maps.h"
#include "torch/workspace.h"

namespace mf {
namespace {

// The kernels read states as words of 16 bytes.
const float* state_pointer(const at::Tensor& state, const char* name, int64_t count, const at::Tensor& x) {
  return row_pointer<const float>(state, name, count, x.device(), 16);
}

MapShape shape_of(const at::Tensor& x, const MaybeTensor& valid_rows_tensor, std::optional<int64_t> valid_rows) {
  map_pointer(x, "x", x.sizes(), x);
  TORCH_CHECK(x.size(1) % kGroup == 0, "x has ", x.size(1), " channels; wanted a multiple of ", kGroup);
  return {x.size(0), x.size(2) * x.size(3), x.size(1),
          row_pointer<const int32_t>(valid_rows_tensor, "valid_rows", 1, x.device()), valid_rows.value_or(x.size(0))};
}

// [norms, 4, channels]; `mean_rest`: where the first norm's is written, or null.
at::Tensor states_of(const at::Tensor& x, const NormParams& norm, const MaybeTensor& other,
                     const std::optional<NormParams>& other_norm, const MaybeTensor& prologue, const MapShape& shape,
                     float* mean_rest) {
  const int count = processors(x.device());
  const ChannelGrid grid = norm_grid(shape, count);
  const int norms = other_norm ? 2 : 1;
  const at::Tensor states = floats({norms, kNormRows, shape.channels}, x);
  const at::Tensor partials = floats({norms * grid.partials(NormStatistics::kFields)}, x);
  const NormStatistics params{shape,
                              float_type(x, "x"),
                              count,
                              norms,
                              {x.const_data_ptr(), other ? other->const_data_ptr() : nullptr},
                              {norm, other_norm.value_or(NormParams{})},
                              prologue ? state_pointer(*prologue, "prologue", kNormRows * shape.channels, x) : nullptr,
                              states.mutable_data_ptr<float>(),
                              mean_rest,
                              partials.mutable_data_ptr<float>(),
                              tickets(norms * grid.tickets())};
  cuda::norm_statistics(params, current_stream());
  return states;
}

// y, the mask [pixels, channels / 8] (empty if not wanted) and the states [1 or 2, 4, channels].
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_act(
    const at::Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& running_mean,
    const MaybeTensor& running_var, const MaybeTensor& batches, double momentum, double eps, bool training, bool relu,
    const MaybeTensor& residual, bool normed_residual, const MaybeTensor& residual_weight,
    const MaybeTensor& residual_bias, const MaybeTensor& residual_mean, const MaybeTensor& residual_var,
    const MaybeTensor& residual_batches, double residual_momentum, double residual_eps, bool residual_training,
    const MaybeTensor& prologue, const MaybeTensor& valid_rows_tensor, std::optional<int64_t> valid_rows,
    bool wants_mask) {
  const MapShape shape = shape_of(x, valid_rows_tensor, valid_rows);
  const void* added = residual ? map_pointer(*residual, "residual", x.sizes(), x) : nullptr;
  TORCH_CHECK(residual || !normed_residual, "residual is None with a residual_norm; wanted the map that it normalises");
  const NormParams norm = norm_params(weight, bias, running_mean, running_var, batches, momentum, eps, training,
                                      shape.channels, x.device());
  std::optional<NormParams> residual_norm;
  if (normed_residual) {
    residual_norm = norm_params(residual_weight, residual_bias, residual_mean, residual_var, residual_batches,
                                residual_momentum, residual_eps, residual_training, shape.channels, x.device());
  }
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
                                   added,
                                   normed_residual,
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
    const std::vector<at::Tensor>& grads, const MaybeTensor& mask, const at::Tensor& x, const MaybeTensor& weight,
    bool training, const MaybeTensor& residual, const MaybeTensor& residual_weight, bool residual_training,
    const at::Tensor& states, const MaybeTensor& prologue, const MaybeTensor& valid_rows_tensor,
    std::optional<int64_t> valid_rows, std::array<bool, 3> wants) {
  const auto [wants_x, wants_residual, wants_prologue] = wants;
  const MapShape shape = shape_of(x, valid_rows_tensor, valid_rows);
  const int norms = residual ? 2 : 1;
  TORCH_CHECK(!grads.empty() && grads.size() <= BatchNormActBackward::kMostGrads, "there are ", grads.size(),
              " gradients; wanted 1 to ", BatchNormActBackward::kMostGrads);
  TORCH_CHECK(!prologue || !residual, "prologue and residual are both given; wanted at most one of them");
  BatchNormActBackward params{};
  params.shape = shape;
  params.type = float_type(x, "x");
  const DeviceGuard guard(x.device());
  params.processors = processors(x.device());
  for (const at::Tensor& grad : grads) {
    params.grads[params.grad_count++] = map_pointer(grad, "a gradient", x.sizes(), x);
  }
  params.mask = row_pointer<const uint8_t>(mask, "mask", shape.pixels() * shape.channels / kGroup, x.device());
  params.x = x.const_data_ptr();
  params.residual = residual ? map_pointer(*residual, "residual", x.sizes(), x) : nullptr;
  params.state = state_pointer(states, "states", norms * kNormRows * shape.channels, x);
  params.prologue = prologue ? state_pointer(*prologue, "prologue", kNormRows * shape.channels, x) : nullptr;
  params.norm[0].weight = row_pointer<const float>(weight, "weight", shape.channels, x.device());
  params.norm[0].training = training;
  params.norm[1].weight = row_pointer<const float>(residual_weight, "residual_weight", shape.channels, x.device());
  params.norm[1].training = residual_training;
  const ChannelGrid grid = norm_grid(shape, params.processors);
  const at::Tensor norm_grads = floats({norms, kNormGradRows, shape.channels}, x);
  const at::Tensor partials = floats({grid.partials(BatchNormActBackward::kSumFields)}, x);
  params.norm_grads = norm_grads.mutable_data_ptr<float>();
  params.partials = partials.mutable_data_ptr<float>();
  params.tickets = tickets(grid.tickets());
  // Written once where it is a result itself, or where the second pass would have to add it up
  // again.
  const bool plain_residual = wants_residual && !residual;
  MaybeTensor sum;
  if (plain_residual || grads.size() > 1) {
    sum = at::empty_like(x);
    params.g = sum->mutable_data_ptr();
  }
  cuda::batch_norm_act_sums(params, current_stream());

  MaybeTensor x_grad, residual_grad, prologue_grad;
  const bool second_residual = wants_residual && residual;
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
std::tuple<at::Tensor, at::Tensor> norm_state(const at::Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                                              const MaybeTensor& running_mean, const MaybeTensor& running_var,
                                              const MaybeTensor& batches, double momentum, double eps, bool training,
                                              const MaybeTensor& valid_rows_tensor, std::optional<int64_t> valid_rows) {
  const MapShape shape = shape_of(x, valid_rows_tensor, valid_rows);
  const NormParams norm = norm_params(weight, bias, running_mean, running_var, batches, momentum, eps, training,
                                      shape.channels, x.device());
  const DeviceGuard guard(x.device());
  const at::Tensor mean_rest = floats({shape.channels}, x);
  return {states_of(x, norm, {}, {}, {}, shape, mean_rest.mutable_data_ptr<float>()).squeeze(0), mean_rest};
}

// The gradient of x (None if not wanted) and the rows of NormGradRow, from the state's gradient.
std::tuple<MaybeTensor, at::Tensor> norm_state_backward(const at::Tensor& grad, const at::Tensor& x,
                                                        const MaybeTensor& weight, bool training,
                                                        const at::Tensor& state, const at::Tensor& mean_rest,
                                                        const MaybeTensor& valid_rows_tensor,
                                                        std::optional<int64_t> valid_rows, bool wants_x) {
  const MapShape shape = shape_of(x, valid_rows_tensor, valid_rows);
  NormParams norm{};
  norm.weight = row_pointer<const float>(weight, "weight", shape.channels, x.device());
  norm.training = training;
  const int64_t count = kNormRows * shape.channels;
  const DeviceGuard guard(x.device());
  const at::Tensor norm_grads = floats({kNormGradRows, shape.channels}, x);
  const NormStateBackward first{shape,
                                state_pointer(state, "state", count, x),
                                row_pointer<const float>(mean_rest, "mean_rest", shape.channels, x.device()),
                                row_pointer<const float>(grad, "grad", count, x.device()),
                                norm,
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

// pooled [N, C], the state [4, channels], and what backward needs, empty unless `for_backward`: the mask
// [pixels, channels / 8], and counts and sums [2, N, C].
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm_pool(
    const at::Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& running_mean,
    const MaybeTensor& running_var, const MaybeTensor& batches, double momentum, double eps, bool training,
    const at::Tensor& residual, const MaybeTensor& valid_rows_tensor, std::optional<int64_t> valid_rows,
    bool for_backward) {
  const MapShape shape = shape_of(x, valid_rows_tensor, valid_rows);
  const void* added = map_pointer(residual, "residual", x.sizes(), x);
  const NormParams norm = norm_params(weight, bias, running_mean, running_var, batches, momentum, eps, training,
                                      shape.channels, x.device());
  const DeviceGuard guard(x.device());
  const at::Tensor state = states_of(x, norm, {}, {}, {}, shape, nullptr).squeeze(0);
  const at::Tensor pooled =
      at::empty({shape.images, shape.channels}, x.options().memory_format(at::MemoryFormat::Contiguous));
  const at::Tensor mask =
      at::empty({for_backward ? shape.pixels() * shape.channels / kGroup : 0}, x.options().dtype(at::kByte));
  const at::Tensor kept = floats({2, for_backward ? shape.images : 0, shape.channels}, x);
  float* counts = for_backward ? kept.mutable_data_ptr<float>() : nullptr;
  const BatchNormPoolForward params{shape,
                                    float_type(x, "x"),
                                    x.const_data_ptr(),
                                    added,
                                    state.const_data_ptr<float>(),
                                    pooled.mutable_data_ptr(),
                                    counts,
                                    for_backward ? counts + shape.images * shape.channels : nullptr,
                                    for_backward ? mask.mutable_data_ptr<uint8_t>() : nullptr};
  cuda::batch_norm_pool(params, current_stream());
  return {pooled, state, mask, kept};
}

// The gradients of x and of the residual (None where not wanted), and the rows of NormGradRow.
std::tuple<MaybeTensor, MaybeTensor, at::Tensor> batch_norm_pool_backward(
    const at::Tensor& grad, const at::Tensor& mask, const at::Tensor& kept, const at::Tensor& x,
    const MaybeTensor& weight, bool training, const at::Tensor& state, const MaybeTensor& valid_rows_tensor,
    std::optional<int64_t> valid_rows, std::array<bool, 2> wants) {
  const MapShape shape = shape_of(x, valid_rows_tensor, valid_rows);
  const int64_t pooled = shape.images * shape.channels;
  const float* counts = row_pointer<const float>(kept, "kept", 2 * pooled, x.device());
  NormParams norm{};
  norm.weight = row_pointer<const float>(weight, "weight", shape.channels, x.device());
  norm.training = training;
  const DeviceGuard guard(x.device());
  const at::Tensor norm_grads = floats({kNormGradRows, shape.channels}, x);
  const auto like_x = [&](bool wanted) { return wanted ? MaybeTensor(at::empty_like(x)) : MaybeTensor(); };
  const MaybeTensor x_grad = like_x(wants[0]);
  const MaybeTensor residual_grad = like_x(wants[1]);
  const BatchNormPoolBackward params{
      shape,
      float_type(x, "x"),
      row_pointer(grad, "grad", x.scalar_type(), pooled, x.device(), 16),
      x.const_data_ptr(),
      state_pointer(state, "state", kNormRows * shape.channels, x),
      counts,
      counts + pooled,
      row_pointer<const uint8_t>(mask, "mask", shape.pixels() * shape.channels / kGroup, x.device()),
      norm,
      norm_grads.mutable_data_ptr<float>(),
      x_grad ? x_grad->mutable_data_ptr() : nullptr,
      residual_grad ? residual_grad->mutable_data_ptr() : nullptr};
  cuda::batch_norm_pool_backward(params, current_stream());
  return {x_grad, residual_grad, norm_grads};
}

}  // namespace

void define_batch_norm_act(const Ops& ops) {
  const std::string valid = kValidSchema;
  ops.define("batch_norm_act(Tensor x, " + norm_schema("", 'a') +
                 "bool relu, Tensor? residual, bool normed_residual, " + norm_schema("residual_", 'd') +
                 "Tensor? prologue, " + valid + ", bool wants_mask) -> (Tensor, Tensor, Tensor)",
             &batch_norm_act);
  ops.define(
      "batch_norm_act_backward(Tensor[] grads, Tensor? mask, Tensor x, Tensor? weight, bool training, "
      "Tensor? residual, Tensor? residual_weight, bool residual_training, Tensor states, Tensor? prologue, " +
          valid + ", bool[3] wants) -> (Tensor?, Tensor?, Tensor?, Tensor)",
      &batch_norm_act_backward);
  ops.define("norm_state(Tensor x, " + norm_schema("", 'a') + valid + ") -> (Tensor, Tensor)", &norm_state);
  ops.define(
      "norm_state_backward(Tensor grad, Tensor x, Tensor? weight, bool training, Tensor state, Tensor mean_rest, " +
          valid + ", bool wants_x) -> (Tensor?, Tensor)",
      &norm_state_backward);
  ops.define("batch_norm_pool(Tensor x, " + norm_schema("", 'a') + "Tensor residual, " + valid +
                 ", bool for_backward) -> (Tensor, Tensor, Tensor, Tensor)",
             &batch_norm_pool);
  ops.define(
      "batch_norm_pool_backward(Tensor grad, Tensor mask, Tensor kept, Tensor x, Tensor? weight, bool training, "
      "Tensor state, " +
          valid + ", bool[2] wants) -> (Tensor?, Tensor?, Tensor)",
      &batch_norm_pool_backward);
}

}  // namespace mf

#endif
