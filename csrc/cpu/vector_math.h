// Exponentials, sums and maxima that a compiler turns into vector instructions, in a fixed order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace mf::cpu {

// exp(x) for x <= 0, within 2 units in the last place, 0 below -87. std::exp is a call an element;
// this one vectorises: n ln 2 is taken off in two parts (Cody and Waite), exp of the rest is its
// Taylor polynomial of degree 7 (|r| <= 0.35: below 2^-26 left out).
inline float exponential(float x) {
  const float clamped = x > -87.0f ? x : -87.0f;
  const float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return x < -87.0f ? 0.0f : p * scale + (x - clamped);  // 0 more, or NaN for NaN
}

inline double exponential(double x) { return std::exp(x); }

// Sums by eight running sums, which the compiler keeps in vector registers; the order is fixed.
template <typename Real, typename Term>
inline Real sum(int64_t count, Term term) {
  constexpr int64_t kLanes = 8;
  Real lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      lane[l] += term(i + l);
    }
  }
  for (int64_t l = 0; i < count; ++i, ++l) {
    lane[l] += term(i);
  }
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

template <typename Real>
inline Real largest(int64_t count, const Real* x) {
  constexpr int64_t kLanes = 8;
  Real lane[kLanes];
  std::fill(lane, lane + kLanes, -std::numeric_limits<Real>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      lane[l] = lane[l] < x[i + l] ? x[i + l] : lane[l];
    }
  }
  for (; i < count; ++i) {
    lane[0] = lane[0] < x[i] ? x[i] : lane[0];
  }
  return *std::max_element(lane, lane + kLanes);
}

}  // namespace mf::cpu
