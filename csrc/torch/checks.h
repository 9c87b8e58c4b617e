// What memory safety needs of an argument, checked again by the glue; mose_fast/ops checks and
// explains arguments for its users.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <type_traits>

#include "api/float_array.h"
#include "torch/device.h"

namespace mf {

using MaybeTensor = std::optional<at::Tensor>;

inline FloatType float_type(at::ScalarType type, const char* name, bool takes_double = false) {
  switch (type) {
    case at::kFloat:
      return FloatType::kFloat32;
    case at::kBFloat16:
      return FloatType::kBFloat16;
    default:
      TORCH_CHECK_TYPE(takes_double && type == at::kDouble, name, " has dtype ", type, "; wanted float32 or bfloat16");
      return FloatType::kFloat64;
  }
}

inline FloatType float_type(const at::Tensor& tensor, const char* name, bool takes_double = false) {
  return float_type(tensor.scalar_type(), name, takes_double);
}

// The memory of `count` numbers of one type in a row on `device`, from a multiple of `alignment`
// bytes: what a kernel reads at once, or 0 for a number. Pointers to what is only read are const: tests
// tell reads from writes by them.
inline const void* row_pointer(const at::Tensor& tensor, const char* name, at::ScalarType type, int64_t count,
                               const at::Device& device, uintptr_t alignment = 0) {
  alignment = std::max<uintptr_t>(alignment, tensor.element_size());
  TORCH_CHECK(tensor.scalar_type() == type && tensor.numel() == count && tensor.is_contiguous() &&
                  tensor.device() == device && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % alignment == 0,
              name, " is ", tensor.scalar_type(), " ", tensor.sizes(), " with strides ", tensor.strides(), " on ",
              tensor.device(), " from ", tensor.const_data_ptr(), "; wanted ", count, " ", type, " in a row on ",
              device, " from a multiple of ", alignment, " bytes");
  return tensor.const_data_ptr();
}

template <typename T>
T* row_pointer(const at::Tensor& tensor, const char* name, int64_t count, const at::Device& device,
               uintptr_t alignment = 0) {
  constexpr at::ScalarType type = c10::CppTypeToScalarType<std::remove_const_t<T>>::value;
  const void* memory = row_pointer(tensor, name, type, count, device, alignment);
  if constexpr (std::is_const_v<T>) {
    return static_cast<T*>(memory);
  } else {
    return tensor.mutable_data_ptr<T>();
  }
}

// Null where there is no tensor.
template <typename T>
T* row_pointer(const MaybeTensor& tensor, const char* name, int64_t count, const at::Device& device,
               uintptr_t alignment = 0) {
  return tensor ? row_pointer<T>(*tensor, name, count, device, alignment) : nullptr;
}

}  // namespace mf
