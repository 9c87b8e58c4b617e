// Numbers that a float or a bfloat16 holds exactly, and the bytes that hold them: what kernels get and
// the twin computes with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "api/float_array.h"
#include "core/bfloat16.h"
#include "kernel_case.h"

namespace kernel_case {

using mf::FloatType;
using Doubles = std::vector<double>;
using Floats = std::vector<float>;

inline Floats floats(const Doubles& values) { return {values.begin(), values.end()}; }

// With `padding` behind, which is NaN where kernels must not read it.
inline Doubles padded(Doubles values, size_t size, double padding) {
  values.resize(size, padding);
  return values;
}

inline FloatType type_of(float) { return FloatType::kFloat32; }
inline FloatType type_of(mf::BFloat16) { return FloatType::kBFloat16; }

template <typename T>
std::vector<T> rounded(const Floats& values) {
  std::vector<T> result(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    mf::round_to(values[i], result[i]);
  }
  return result;
}

template <typename T>
Floats widened(const std::vector<T>& values) {
  Floats result(values.size());
  std::transform(values.begin(), values.end(), result.begin(), [](T x) { return mf::widened(x); });
  return result;
}

inline size_t bytes_of(size_t count, FloatType type) { return count * (type == FloatType::kFloat32 ? 4 : 2); }

template <typename T>
std::vector<unsigned char> encode_as(const Doubles& values) {
  const std::vector<T> numbers = rounded<T>(floats(values));
  const auto* bytes = reinterpret_cast<const unsigned char*>(numbers.data());
  return {bytes, bytes + numbers.size() * sizeof(T)};
}

// As 4 or 2 bytes each.
inline std::vector<unsigned char> encode(const Doubles& values, FloatType type) {
  return type == FloatType::kFloat32 ? encode_as<float>(values) : encode_as<mf::BFloat16>(values);
}

// The `count` numbers that a kernel wrote.
inline Floats decode(Context& context, const void* memory, size_t count, FloatType type) {
  return type == FloatType::kFloat32 ? context.download(static_cast<const float*>(memory), count)
                                     : widened(context.download(static_cast<const mf::BFloat16*>(memory), count));
}

inline void expect(Context& context, const char* what, const void* memory, const Doubles& wanted, FloatType type,
                   double tolerance) {
  context.expect_close(what, context.upload(decode(context, memory, wanted.size(), type)), floats(wanted), tolerance);
}

template <typename T>
void expect(Context& context, const char* what, const T* memory, const std::vector<T>& wanted, double tolerance) {
  context.expect_close(what, context.upload(widened(context.download(memory, wanted.size()))), widened(wanted),
                       tolerance);
}

// Distance of neighbours around 1, halved.
inline double step_of(FloatType type) { return type == FloatType::kBFloat16 ? 1.0 / 256 : 1.0 / (1 << 24); }

// Multiples of `scale` times a power of two, between -2 scale and 2 scale.
inline Doubles draw(std::mt19937& random, size_t count, FloatType type, double scale) {
  const int range = type == FloatType::kFloat32 ? 1 << 23 : 255;
  const int exponent = type == FloatType::kFloat32 ? -22 : -7;
  Doubles values(count);
  for (double& value : values) {
    value = std::ldexp(static_cast<int>(random() % (2u * range + 1)) - range, exponent) * scale;
  }
  return values;
}

}  // namespace kernel_case
