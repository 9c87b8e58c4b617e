// Glue of Adam. Arguments are explained and checked in mose_fast/ops/adam.py; what memory safety
// needs is checked here again.
#include "api/adam.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "torch/bind.h"
#include "torch/device.h"
#include "torch/maps.h"

namespace mf {
namespace {

void adam_step(const at::Tensor& master, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
               const std::vector<std::optional<at::Tensor>>& gradients, const std::vector<int64_t>& offsets,
               const at::Tensor& steps, const at::Tensor& lr, double beta1, double beta2, double eps,
               double weight_decay, const std::optional<at::Tensor>& shadow, const std::optional<at::Tensor>& loss,
               const std::optional<at::Tensor>& latch) {
  const int64_t size = master.numel();
  const auto parameters = static_cast<int64_t>(gradients.size());
  const auto check = [&](const char* name, const at::Tensor& tensor, at::ScalarType type, int64_t count) {
    TORCH_CHECK(tensor.scalar_type() == type && tensor.numel() == count && tensor.is_contiguous() &&
                    tensor.device() == master.device(),
                name, " is ", tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device(),
                "; wanted contiguous ", type, " of ", count, " elements on ", master.device());
  };
  check("master", master, at::kFloat, size);
  check("exp_avg", exp_avg, at::kFloat, size);
  check("exp_avg_sq", exp_avg_sq, at::kFloat, size);
  check("steps", steps, at::kFloat, parameters);
  check("lr", lr, at::kFloat, 1);
  MutableFloatArray shadows{nullptr, FloatType::kBFloat16};
  if (shadow) {
    check("shadow", *shadow, shadow->scalar_type() == at::kHalf ? at::kHalf : at::kBFloat16, size);
    shadows = {shadow->mutable_data_ptr(), float_type(*shadow, "shadow")};
  }
  if (loss) {
    check("loss", *loss, at::kFloat, 1);
  }
  if (latch) {
    check("latch", *latch, at::kBool, 1);
  }
  TORCH_CHECK(offsets.size() == gradients.size(), "there are ", parameters, " gradients and ", offsets.size(),
              " offsets; wanted as many");
  std::vector<AdamTensor> tensors;
  tensors.reserve(gradients.size());
  int64_t end = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    TORCH_CHECK_VALUE(offsets[i] >= end, "offsets[", i, "] is ", offsets[i], "; wanted at least ", end);
    end = offsets[i];
    if (!gradients[i]) {
      continue;
    }
    const at::Tensor& gradient = *gradients[i];
    TORCH_CHECK(gradient.device() == master.device() && gradient.is_non_overlapping_and_dense(), "gradients[", i,
                "] is on ", gradient.device(), " with strides ", gradient.strides(), "; wanted dense memory on ",
                master.device());
    end += gradient.numel();
    TORCH_CHECK_VALUE(end <= size, "parameter ", i, " ends at ", end, "; wanted at most ", size,
                      ", the size of master");
    tensors.push_back({gradient.const_data_ptr(), offsets[i], gradient.numel(), static_cast<int32_t>(i),
                       float_type(gradient, "a gradient")});
  }
  AdamParams params{master.mutable_data_ptr<float>(),
                    exp_avg.mutable_data_ptr<float>(),
                    exp_avg_sq.mutable_data_ptr<float>(),
                    shadows,
                    steps.mutable_data_ptr<float>(),
                    lr.const_data_ptr<float>(),
                    loss ? loss->const_data_ptr<float>() : nullptr,
                    latch ? latch->mutable_data_ptr<bool>() : nullptr,
                    tensors.data(),
                    static_cast<int64_t>(tensors.size()),
                    parameters,
                    nullptr,
                    nullptr,
                    beta1,
                    beta2,
                    eps,
                    weight_decay};
#if defined(MOSE_FAST_WITH_CUDA)
  if (on_card(master)) {
    const DeviceGuard guard(master.device());
    static_assert(sizeof(AdamScale) == 2 * sizeof(float) && sizeof(int32_t) == sizeof(float),
                  "one workspace holds both");
    const at::Tensor workspace = at::empty({2 * parameters + 1}, master.options());
    params.scales = static_cast<AdamScale*>(workspace.mutable_data_ptr());
    params.frozen = reinterpret_cast<int32_t*>(params.scales + parameters);
    cuda::adam_step(params, current_stream());
    return;
  }
#endif
  TORCH_CHECK_NOT_IMPLEMENTED(on_cpu(master), "master is on ", master.device(), "; this build of mose_fast serves ",
                              kDevices);
  cpu::adam_step(params, at::get_num_threads());
}

}  // namespace

void bind_adam(py::module_& module) {
  module.def("adam_step", &adam_step, py::arg("master"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
             py::arg("gradients"), py::arg("offsets"), py::arg("steps"), py::arg("lr"), py::arg("beta1"),
             py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("shadow"), py::arg("loss"),
             py::arg("latch"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace mf
