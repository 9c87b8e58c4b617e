// What the glue of ops over feature maps shares: types, norms as Python hands them over, checked
// pointers.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <tuple>

#include "api/float_array.h"
#include "core/batch_norm.h"

namespace mf {

using MaybeTensor = std::optional<at::Tensor>;

// The fields of mose_fast.reference.batch_norm.Norm: weight, bias, running_mean, running_var,
// batches_tracked, momentum, eps, training.
using Norm = std::tuple<MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, double, double, bool>;

inline FloatType float_type(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return FloatType::kFloat32;
    case at::kBFloat16:
      return FloatType::kBFloat16;
    case at::kHalf:
      return FloatType::kFloat16;
    default:
      TORCH_CHECK_TYPE(false, name, " has dtype ", tensor.scalar_type(), "; wanted float32, bfloat16 or float16");
  }
}

// A float32 tensor beside x, not initialised.
inline at::Tensor floats(at::IntArrayRef sizes, const at::Tensor& x) {
  return at::empty(sizes, x.options().dtype(at::kFloat));
}

// `count` float32 numbers in a row beside x, from a multiple of `alignment` bytes.
inline float* floats_pointer(const at::Tensor& values, const char* name, int64_t count, const at::Tensor& x,
                             uintptr_t alignment) {
  TORCH_CHECK(values.device() == x.device() && values.scalar_type() == at::kFloat && values.is_contiguous() &&
                  values.numel() == count && reinterpret_cast<uintptr_t>(values.const_data_ptr()) % alignment == 0,
              name, " is ", values.scalar_type(), " ", values.sizes(), " on ", values.device(), " from ",
              values.const_data_ptr(), "; wanted ", count, " float32 in a row on ", x.device(), " from a multiple of ",
              alignment, " bytes");
  return values.mutable_data_ptr<float>();
}

inline NormParams params_of(const Norm& norm, int64_t channels, const at::Tensor& x) {
  const auto& [weight, bias, running_mean, running_var, batches, momentum, eps, training] = norm;
  const auto vector = [&](const MaybeTensor& values, const char* name) {
    return values ? floats_pointer(*values, name, channels, x, alignof(float)) : nullptr;
  };
  NormParams params{vector(weight, "weight"),
                    vector(bias, "bias"),
                    vector(running_mean, "running_mean"),
                    vector(running_var, "running_var"),
                    nullptr,
                    static_cast<float>(momentum),
                    static_cast<float>(eps),
                    training};
  if (batches) {
    TORCH_CHECK(batches->device() == x.device() && batches->scalar_type() == at::kLong && batches->numel() == 1,
                "batches_tracked is ", batches->scalar_type(), " on ", batches->device(),
                "; wanted an int64 scalar on ", x.device());
    params.batches = batches->mutable_data_ptr<int64_t>();
  }
  return params;
}

// The count of valid images on the device; null where it is not there.
inline const int32_t* valid_pointer(const MaybeTensor& valid, const at::Tensor& x) {
  if (!valid) {
    return nullptr;
  }
  TORCH_CHECK(valid->device() == x.device() && valid->scalar_type() == at::kInt && valid->numel() == 1,
              "valid_rows is ", valid->scalar_type(), " on ", valid->device(), "; wanted an int32 scalar on ",
              x.device());
  return valid->const_data_ptr<int32_t>();
}

}  // namespace mf
