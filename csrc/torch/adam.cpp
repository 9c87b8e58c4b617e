// Glue of Adam. Arguments are explained and checked in mose_fast/ops/adam.py; what memory safety
// needs is checked here again.
#include "api/adam.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "torch/bind.h"
#include "torch/checks.h"
#include "torch/device.h"

namespace mf {
namespace {

void adam_step(const at::Tensor& master, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
               const std::vector<MaybeTensor>& gradients, const std::vector<int64_t>& offsets, const at::Tensor& steps,
               const at::Tensor& lr, double beta1, double beta2, double eps, double weight_decay,
               const MaybeTensor& shadow, const MaybeTensor& loss, const MaybeTensor& latch, const MaybeTensor& average,
               const MaybeTensor& average_shadow, double average_rate) {
  const int64_t size = master.numel();
  const auto parameters = static_cast<int64_t>(gradients.size());
  const at::Device device = master.device();
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
    TORCH_CHECK(gradient.device() == device && gradient.is_non_overlapping_and_dense(), "gradients[", i, "] is on ",
                gradient.device(), " with strides ", gradient.strides(), "; wanted dense memory on ", device);
    end += gradient.numel();
    TORCH_CHECK_VALUE(end <= size, "parameter ", i, " ends at ", end, "; wanted at most ", size,
                      ", the size of master");
    tensors.push_back({gradient.const_data_ptr(), offsets[i], gradient.numel(), static_cast<int32_t>(i),
                       float_type(gradient, "a gradient")});
  }
  const auto copy_of = [&](const MaybeTensor& copy, const char* name) {
    return reinterpret_cast<BFloat16*>(row_pointer<at::BFloat16>(copy, name, size, device));
  };
  AdamParams params{row_pointer<float>(master, "master", size, device),
                    row_pointer<float>(exp_avg, "exp_avg", size, device),
                    row_pointer<float>(exp_avg_sq, "exp_avg_sq", size, device),
                    copy_of(shadow, "shadow"),
                    row_pointer<float>(average, "average", size, device),
                    copy_of(average_shadow, "average_shadow"),
                    row_pointer<float>(steps, "steps", parameters, device),
                    row_pointer<const float>(lr, "lr", 1, device),
                    row_pointer<const float>(loss, "loss", 1, device),
                    row_pointer<bool>(latch, "latch", 1, device),
                    tensors.data(),
                    static_cast<int64_t>(tensors.size()),
                    parameters,
                    nullptr,
                    nullptr,
                    beta1,
                    beta2,
                    eps,
                    weight_decay,
                    average_rate};
  static_assert(sizeof(AdamScale) == 2 * sizeof(float) && sizeof(int32_t) == sizeof(float), "one workspace holds both");
  run(
      device, "master",
      [&](auto stream) {
        const at::Tensor workspace = at::empty({2 * parameters + 1}, master.options());
        params.scales = static_cast<AdamScale*>(workspace.mutable_data_ptr());
        params.frozen = reinterpret_cast<int32_t*>(params.scales + parameters);
        cuda::adam_step(params, stream);
      },
      [&](int threads) { cpu::adam_step(params, threads); });
}

}  // namespace

void bind_adam(py::module_& module) {
  module.def("adam_step", &adam_step, py::arg("master"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
             py::arg("gradients"), py::arg("offsets"), py::arg("steps"), py::arg("lr"), py::arg("beta1"),
             py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("shadow"), py::arg("loss"),
             py::arg("latch"), py::arg("average"), py::arg("average_shadow"), py::arg("average_rate"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace mf
