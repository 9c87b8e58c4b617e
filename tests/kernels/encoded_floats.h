// Numbers that a float, bfloat16 or float16 holds exactly, and the bytes that hold them: what
// kernels get and the twin computes with.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "api/float_array.h"

namespace kernel_case {

using mf::FloatType;
using Doubles = std::vector<double>;

// As 4 or 2 bytes each.
inline std::vector<unsigned char> encode(const Doubles& values, FloatType type) {
  std::vector<unsigned char> bytes;
  for (const double value : values) {
    const auto number = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    if (type == FloatType::kBFloat16) {
      bits >>= 16;
    } else if (type == FloatType::kFloat16) {
      const uint32_t exponent = bits >> 23 & 0xff;
      const uint32_t small = exponent == 0 ? 0 : exponent == 0xff ? 0x1f : exponent - 112;
      bits = (bits >> 16 & 0x8000u) | small << 10 | (bits >> 13 & 0x3ffu);
    }
    for (int i = 0; i < (type == FloatType::kFloat32 ? 4 : 2); ++i) {
      bytes.push_back(static_cast<unsigned char>(bits >> 8 * i));
    }
  }
  return bytes;
}

inline std::vector<float> decode(const std::vector<unsigned char>& bytes, FloatType type) {
  std::vector<float> values;
  const size_t size = type == FloatType::kFloat32 ? 4 : 2;
  for (size_t at = 0; at < bytes.size(); at += size) {
    uint32_t bits = 0;
    std::memcpy(&bits, &bytes[at], size);
    float value;
    if (type == FloatType::kFloat16) {
      const auto magnitude = static_cast<float>(bits & 0x3ff);
      const int exponent = static_cast<int>(bits >> 10 & 0x1f);
      value = exponent == 31  ? magnitude == 0 ? std::numeric_limits<float>::infinity() : std::nanf("")
              : exponent == 0 ? std::ldexp(magnitude, -24)
                              : std::ldexp(1024 + magnitude, exponent - 25);
      value = bits >> 15 ? -value : value;
    } else {
      bits = type == FloatType::kBFloat16 ? bits << 16 : bits;
      std::memcpy(&value, &bits, sizeof value);
    }
    values.push_back(value);
  }
  return values;
}

// Distance of neighbours around 1, halved.
inline double step_of(FloatType type) {
  return type == FloatType::kBFloat16 ? 1.0 / 256 : type == FloatType::kFloat16 ? 1.0 / 2048 : 1.0 / (1 << 24);
}

// Multiples of `scale` times a power of two, between -2 scale and 2 scale.
inline Doubles draw(std::mt19937& random, size_t count, FloatType type, double scale) {
  const int range = type == FloatType::kFloat32 ? 1 << 23 : type == FloatType::kFloat16 ? 2047 : 255;
  const int exponent = type == FloatType::kFloat32 ? -22 : type == FloatType::kFloat16 ? -10 : -7;
  Doubles values(count);
  for (double& value : values) {
    value = std::ldexp(static_cast<int>(random() % (2u * range + 1)) - range, exponent) * scale;
  }
  return values;
}

}  // namespace kernel_case
