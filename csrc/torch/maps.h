// What the glue of the ops over feature maps shares.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <string>

#include "core/batch_norm.h"
#include "torch/checks.h"
#include "torch/device.h"

namespace mf {

// A float32 tensor beside x, not initialised.
inline at::Tensor floats(at::IntArrayRef sizes, const at::Tensor& x) {
  return at::empty(sizes, x.options().dtype(at::kFloat));
}

// A map of these sizes, with x's type, on the GPU where x is, in channels_last memory from a
// multiple of 16 bytes.
inline const void* map_pointer(const at::Tensor& map, const char* name, at::IntArrayRef sizes, const at::Tensor& x) {
  TORCH_CHECK(on_gpu(map) && map.device() == x.device(), name, " is on ", map.device(), "; wanted the GPU where x is");
  TORCH_CHECK(map.dim() == 4 && map.sizes() == sizes && map.scalar_type() == x.scalar_type() &&
                  map.is_contiguous(at::MemoryFormat::ChannelsLast) &&
                  reinterpret_cast<uintptr_t>(map.const_data_ptr()) % 16 == 0,
              name, " is ", map.scalar_type(), " ", map.sizes(), " with strides ", map.strides(), " from ",
              map.const_data_ptr(), "; wanted ", x.scalar_type(), " ", sizes,
              " in channels_last memory from a multiple of 16 bytes");
  return map.const_data_ptr();
}

// A norm's parameters and running statistics, as mose_fast.reference.batch_norm.Norm holds them.
inline NormParams norm_params(const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& running_mean,
                              const MaybeTensor& running_var, const MaybeTensor& batches, double momentum, double eps,
                              bool training, int64_t channels, const at::Device& device) {
  TORCH_CHECK(running_mean.has_value() == running_var.has_value() && (running_mean || training),
              "running_mean and running_var are not both there; wanted both, or none in training");
  return {row_pointer<const float>(weight, "weight", channels, device),
          row_pointer<const float>(bias, "bias", channels, device),
          row_pointer<float>(running_mean, "running_mean", channels, device),
          row_pointer<float>(running_var, "running_var", channels, device),
          row_pointer<int64_t>(batches, "batches_tracked", 1, device),
          static_cast<float>(momentum),
          static_cast<float>(eps),
          training};
}

// The arguments of norm_params in a schema, their names after a prefix; the running statistics are
// written, by three alias sets from `first` on.
inline std::string norm_schema(const std::string& prefix, char first) {
  const auto written = [&](int number, const char* name) {
    return std::string("Tensor(") + static_cast<char>(first + number) + "!)? " + prefix + name + ", ";
  };
  return "Tensor? " + prefix + "weight, Tensor? " + prefix + "bias, " + written(0, "running_mean") +
         written(1, "running_var") + written(2, "batches_tracked") + "float " + prefix + "momentum, float " + prefix +
         "eps, bool " + prefix + "training, ";
}

// How the ops over maps take the number of valid images, the rest being padding: an int32 scalar on
// the device, or an int; None: all.
inline constexpr const char* kValidSchema = "Tensor? valid_rows_tensor, int? valid_rows";

}  // namespace mf
