// The two half-precision formats as plain bits, for code that has no cuda_fp16.h: rounding to them,
// and back.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/host_device.h"

namespace mf {

struct Float16 {
  uint16_t bits;
};

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

// To nearest, ties to even; from 65520 on infinity; denormals kept.
MF_HD inline void round_to(float x, Float16& result) {
  const uint32_t bits = bits_of(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    result.bits = static_cast<uint16_t>(sign | 0x7e00u);
  } else if (magnitude >= 0x477ff000u) {
    result.bits = static_cast<uint16_t>(sign | 0x7c00u);
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 2^-1 leaves the number in units of 2^-24 in the low bits, rounded by the
    // sum itself.
    float positive;
    memcpy(&positive, &magnitude, sizeof positive);
    result.bits = static_cast<uint16_t>(sign | (bits_of(positive + 0.5f) - 0x3f000000u));
  } else {
    result.bits = static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
  }
}

MF_HD inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

MF_HD inline float widened(float x) { return x; }

MF_HD inline float widened(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

MF_HD inline float widened(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude < 0x400u) {  // below 2^-14: whole units of 2^-24
    return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
  }
  return float_of(sign | ((magnitude << 13) + (magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u)));
}

}  // namespace mf
