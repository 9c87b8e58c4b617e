// Float arrays whose type is known at run time.
#pragma once

#include "core/host_device.h"

namespace mf {

enum class FloatType : int { kFloat32, kFloat64, kBFloat16 };

// Calls f(T()) with the type T of the numbers: float, or how a caller stores bfloat16. Who does not serve
// float64 refuses it before.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <typename BFloat16, typename Function>
MF_HD auto with_type(FloatType type, const Function& f) {
  return type == FloatType::kBFloat16 ? f(BFloat16()) : f(float());
}

// A contiguous float array of any type.
struct FloatArray {
  const void* data;
  FloatType type;
};

struct MutableFloatArray {
  void* data;  // null: this gradient is not wanted
  FloatType type;
};

}  // namespace mf
