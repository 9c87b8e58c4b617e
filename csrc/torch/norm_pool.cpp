// Glue of the pooled norm. Arguments are explained and checked in mose_fast/ops/norm_pool.py; what
// memory safety needs is checked here again.
#include "api/norm_pool.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "torch/bind.h"
#include "torch/device.h"
#include "torch/maps.h"

namespace mf {
namespace {

// The inputs as the kernels want them, owned while these run, and their description.
struct Inputs {
  at::Tensor x, state, valid;
  NormPoolInput params;

  Inputs(const at::Tensor& x_in, const std::optional<at::Tensor>& state_in, int64_t valid_rows,
         const std::optional<at::Tensor>& valid_rows_tensor) {
    TORCH_CHECK(x_in.dim() == 4 && x_in.size(2) * x_in.size(3) >= 1, "x has shape ", x_in.sizes(),
                "; wanted [N, C, H, W] with a pixel");
    x = x_in.contiguous(at::MemoryFormat::ChannelsLast);
    if (state_in) {
      state = state_in->contiguous();
      TORCH_CHECK(state.scalar_type() == at::kFloat && state.dim() == 2 && state.size(0) == kNormRows &&
                      state.size(1) == x.size(1) && state.device() == x.device(),
                  "state is ", state.scalar_type(), " ", state.sizes(), " on ", state.device(), "; wanted float32 [4, ",
                  x.size(1), "] on ", x.device());
    }
    if (valid_rows_tensor) {
      valid = *valid_rows_tensor;
      TORCH_CHECK(valid.scalar_type() == at::kInt && valid.numel() == 1 && valid.device() == x.device(),
                  "valid_rows does not fit; wanted an int or an int32 scalar on ", x.device());
    }
    params = {{x.const_data_ptr(), float_type(x, "x")},
              state.defined() ? state.const_data_ptr<float>() : nullptr,
              x.size(0),
              x.size(2) * x.size(3),
              x.size(1),
              valid.defined() ? valid.const_data_ptr<int32_t>() : nullptr,
              valid_rows < 0 ? x.size(0) : valid_rows};
  }
};

// pooled [N, C], and the counts and sums [N, C] that backward needs: empty unless `for_backward`
// and a state are given.
std::tuple<at::Tensor, at::Tensor, at::Tensor> norm_pool(const at::Tensor& x, const std::optional<at::Tensor>& state,
                                                         int64_t valid_rows,
                                                         const std::optional<at::Tensor>& valid_rows_tensor,
                                                         bool for_backward) {
  const Inputs in(x, state, valid_rows, valid_rows_tensor);
  const bool keeps = for_backward && in.state.defined();
  const int64_t images = in.params.images;
  const int64_t channels = in.params.channels;
  const at::Tensor pooled = at::empty({images, channels}, in.x.options().memory_format(at::MemoryFormat::Contiguous));
  const at::Tensor counts = floats({keeps ? images : 0, channels}, in.x);
  const at::Tensor sums = floats({keeps ? images : 0, channels}, in.x);
  const NormPoolForward params{in.params,
                               {pooled.mutable_data_ptr(), in.params.x.type},
                               keeps ? counts.mutable_data_ptr<float>() : nullptr,
                               keeps ? sums.mutable_data_ptr<float>() : nullptr};
#if defined(MOSE_FAST_WITH_CUDA)
  if (on_card(x)) {
    const DeviceGuard guard(x.device());
    cuda::norm_pool(params, current_stream());
    return {pooled, counts, sums};
  }
#endif
  TORCH_CHECK_NOT_IMPLEMENTED(on_cpu(x), "x is on ", x.device(), "; this build of mose_fast serves ", kDevices);
  cpu::norm_pool(params, at::get_num_threads());
  return {pooled, counts, sums};
}

// The gradients of x (of its type, in channels_last memory) and of the state; an undefined tensor
// where not wanted. Without a state x gives its shape alone and there are no counts and sums.
std::tuple<at::Tensor, at::Tensor> norm_pool_backward(const at::Tensor& grad_in, const at::Tensor& x,
                                                      const std::optional<at::Tensor>& state,
                                                      const std::optional<at::Tensor>& counts,
                                                      const std::optional<at::Tensor>& sums, int64_t valid_rows,
                                                      const std::optional<at::Tensor>& valid_rows_tensor, bool wants_x,
                                                      bool wants_state) {
  const Inputs in(x, state, valid_rows, valid_rows_tensor);
  const at::Tensor grad = grad_in.contiguous();
  const int64_t kept = in.params.images * in.params.channels;
  TORCH_CHECK(grad.numel() == kept && grad.scalar_type() == x.scalar_type() && grad.device() == x.device(), "grad is ",
              grad.scalar_type(), " ", grad.sizes(), " on ", grad.device(), "; wanted ", x.scalar_type(), " [",
              in.params.images, ", ", in.params.channels, "] on ", x.device());
  for (const auto* tensor : {&counts, &sums}) {
    TORCH_CHECK(
        !wants_state || (in.state.defined() && *tensor && (*tensor)->numel() == kept && (*tensor)->is_contiguous() &&
                         (*tensor)->scalar_type() == at::kFloat && (*tensor)->device() == x.device()),
        "counts or sums do not fit; wanted what the forward call returned");
  }
  const at::Tensor dx = wants_x ? at::empty_like(in.x) : at::Tensor();
  const at::Tensor dstate = wants_state ? floats({kNormRows, in.params.channels}, in.x) : at::Tensor();
  const NormPoolBackward params{in.params,
                                grad.const_data_ptr(),
                                wants_state ? counts->const_data_ptr<float>() : nullptr,
                                wants_state ? sums->const_data_ptr<float>() : nullptr,
                                {wants_x ? dx.mutable_data_ptr() : nullptr, in.params.x.type},
                                wants_state ? dstate.mutable_data_ptr<float>() : nullptr};
#if defined(MOSE_FAST_WITH_CUDA)
  if (on_card(x)) {
    const DeviceGuard guard(x.device());
    cuda::norm_pool_backward(params, current_stream());
    return {dx, dstate};
  }
#endif
  TORCH_CHECK_NOT_IMPLEMENTED(on_cpu(x), "x is on ", x.device(), "; this build of mose_fast serves ", kDevices);
  cpu::norm_pool_backward(params, at::get_num_threads());
  return {dx, dstate};
}

}  // namespace

void bind_norm_pool(py::module_& module) {
  module.def("norm_pool", &norm_pool, py::arg("x"), py::arg("state"), py::arg("valid_rows"),
             py::arg("valid_rows_tensor"), py::arg("for_backward"), py::call_guard<py::gil_scoped_release>());
  module.def("norm_pool_backward", &norm_pool_backward, py::arg("grad"), py::arg("x"), py::arg("state"),
             py::arg("counts"), py::arg("sums"), py::arg("valid_rows"), py::arg("valid_rows_tensor"),
             py::arg("wants_x"), py::arg("wants_state"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace mf
