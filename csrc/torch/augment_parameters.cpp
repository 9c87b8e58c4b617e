// Glue of the view parameters.
#include "api/augment_parameters.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <tuple>

#include "torch/bind.h"

#if defined(MOSE_FAST_WITH_CUDA)
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace mf {
namespace {

// `recipe` in the order of AugmentRecipe's members.
std::tuple<at::Tensor, at::Tensor> augment_parameters(const std::array<double, 9>& recipe, int64_t seed, int64_t sequence, int64_t count,
                                                      int64_t height, int64_t width, const at::Device& device) {
  TORCH_CHECK(count >= 0 && count <= UINT32_MAX, "count is ", count, "; wanted 0 to ", UINT32_MAX);
  TORCH_CHECK(height >= 1 && height <= INT32_MAX / 2, "height is ", height, "; wanted 1 to ", INT32_MAX / 2);
  TORCH_CHECK(width >= 1 && width <= INT32_MAX / 2, "width is ", width, "; wanted 1 to ", INT32_MAX / 2);
  at::Tensor codes = at::empty({count, AugmentParameters::kCodes}, at::TensorOptions().dtype(at::kInt).device(device));
  at::Tensor factors = at::empty({count, AugmentParameters::kFactors}, at::TensorOptions().dtype(at::kFloat).device(device));
  const AugmentParametersParams params{{recipe[0], recipe[1], recipe[2], recipe[3], recipe[4], recipe[5], recipe[6], recipe[7], recipe[8]},
                                       static_cast<uint64_t>(seed),
                                       static_cast<uint64_t>(sequence),
                                       count,
                                       static_cast<int32_t>(height),
                                       static_cast<int32_t>(width),
                                       codes.mutable_data_ptr<int32_t>(),
                                       factors.mutable_data_ptr<float>()};
#if defined(MOSE_FAST_WITH_CUDA)
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(codes.device());
    cuda::augment_parameters(params, c10::cuda::getCurrentCUDAStream());
    return {codes, factors};
  }
#endif
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu(), "device is ", device, "; this build of mose_fast serves ", kDevices);
  cpu::augment_parameters(params, at::get_num_threads());
  return {codes, factors};
}

}  // namespace

void bind_augment_parameters(py::module_& module) {
  module.def("augment_parameters", &augment_parameters, py::arg("recipe"), py::arg("seed"), py::arg("sequence"), py::arg("count"),
             py::arg("height"), py::arg("width"), py::arg("device"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace mf
