// Float arrays whose type is known at run time.
#pragma once

namespace mf {

enum class FloatType : int { kFloat32, kFloat64, kBFloat16, kFloat16 };

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
