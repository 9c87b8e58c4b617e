// bfloat16 as plain bits, for code that has no cuda_bf16.h: rounding to it, and back.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/host_device.h"

namespace mf {

struct BFloat16 {
  uint16_t bits;
};

MF_HD inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

MF_HD inline void round_to(float x, float& result) { result = x; }

// To nearest, ties to even.
MF_HD inline void round_to(float x, BFloat16& result) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  result.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

MF_HD inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

MF_HD inline float widened(float x) { return x; }

MF_HD inline float widened(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

}  // namespace mf
