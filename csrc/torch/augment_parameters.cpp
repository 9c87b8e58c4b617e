// Glue of the view parameters.
#include "api/augment_parameters.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "torch/bind.h"
#include "torch/checks.h"
#include "torch/device.h"

namespace mf {
namespace {

// `recipe` in the order of AugmentRecipe's members.
std::tuple<at::Tensor, at::Tensor> augment_parameters(const std::vector<double>& recipe, int64_t seed, int64_t sequence,
                                                      int64_t count, int64_t height, int64_t width,
                                                      std::string device_name, const MaybeTensor& counter) {
  TORCH_CHECK_VALUE(recipe.size() == 9, "recipe has ", recipe.size(), " numbers; wanted 9");
  TORCH_CHECK(count >= 0 && count <= UINT32_MAX, "count is ", count, "; wanted 0 to ", UINT32_MAX);
  TORCH_CHECK(height >= 1 && height <= INT32_MAX / 2, "height is ", height, "; wanted 1 to ", INT32_MAX / 2);
  TORCH_CHECK(width >= 1 && width <= INT32_MAX / 2, "width is ", width, "; wanted 1 to ", INT32_MAX / 2);
  at::Device device(device_name);
  if (counter) {
    TORCH_CHECK_VALUE(counter->device().type() == device.type() && (!device.has_index() || counter->device() == device),
                      "counter is on ", counter->device(), "; wanted ", device, ", where the parameters are drawn");
    device = counter->device();
  }
  at::Tensor codes = at::empty({count, AugmentParameters::kCodes}, at::TensorOptions().dtype(at::kInt).device(device));
  at::Tensor factors =
      at::empty({count, AugmentParameters::kFactors}, at::TensorOptions().dtype(at::kFloat).device(device));
  const AugmentParametersParams params{
      {recipe[0], recipe[1], recipe[2], recipe[3], recipe[4], recipe[5], recipe[6], recipe[7], recipe[8]},
      static_cast<uint64_t>(seed),
      static_cast<uint64_t>(sequence),
      row_pointer<int64_t>(counter, "counter", 1, device),
      count,
      static_cast<int32_t>(height),
      static_cast<int32_t>(width),
      codes.mutable_data_ptr<int32_t>(),
      factors.mutable_data_ptr<float>()};
  run(
      codes.device(), "device", [&](auto stream) { cuda::augment_parameters(params, stream); },
      [&](int threads) { cpu::augment_parameters(params, threads); });
  return {codes, factors};
}

}  // namespace

// One function for every device: without a counter no tensor goes in that could tell it. The device
// is a text, since opcheck cannot look into a Device beside an argument that is written.
void define_augment_parameters(const Ops& ops) {
  ops.library.def(
      "augment_parameters(float[] recipe, int seed, int sequence, int count, int height, int width, str device, "
      "Tensor(a!)? counter=None) -> (Tensor, Tensor)");
  ops.library.impl("augment_parameters", c10::DispatchKey::CompositeExplicitAutograd, &augment_parameters);
  ops.module.def("augment_parameters", &augment_parameters, py::call_guard<py::gil_scoped_release>());
}

}  // namespace mf
