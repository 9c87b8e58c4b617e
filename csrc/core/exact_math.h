// fp64 arithmetic that gives the same bits on every compiler and device.
//
// +, -, *, / and sqrt are correctly rounded by IEEE 754 everywhere; what differs between machines
// is whether a compiler fuses a product and a sum into one rounding (g++ by default wherever the
// target has FMA, nvcc by default). Flags switch that off, but a flag can get lost in a build file,
// and nothing would fail loudly. So each operation here rounds by itself: on the device by the _rn
// intrinsics, which nvcc never fuses; on the host by an empty asm statement that the optimiser
// cannot look through. The decisions that use it are a few dozen operations an image, so the lost
// vectorisation does not matter.
#pragma once

#include <cstdint>

#if !defined(__CUDA_ARCH__)
#include <cfloat>
#include <cmath>
#endif

#include "core/host_device.h"

#if defined(__FAST_MATH__)
#error "random decisions need IEEE arithmetic; wanted a build without -ffast-math"
#endif
#if !defined(__CUDA_ARCH__)
static_assert(FLT_EVAL_METHOD == 0, "random decisions need fp64 that is evaluated as fp64 (no x87)");
#endif

namespace mf::exact {

#if !defined(__CUDA_ARCH__)
// The value as it is, with its history hidden from the optimiser.
inline double rounded(double value) {
#if defined(__x86_64__)
  asm("" : "+x"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#else
  asm("" : "+m"(value));
#endif
  return value;
}
#endif

MF_HD inline double multiply(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return rounded(a * b);
#endif
}

MF_HD inline double add(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#else
  return rounded(a + b);
#endif
}

MF_HD inline double subtract(double a, double b) { return add(a, -b); }

MF_HD inline double divide(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __ddiv_rn(a, b);
#else
  return rounded(a / b);
#endif
}

MF_HD inline double square_root(double a) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(a);
#else
  return rounded(std::sqrt(a));
#endif
}

// Nearest integer of a non-negative value, halves up.
MF_HD inline double round_half_up(double a) {
#if defined(__CUDA_ARCH__)
  return ::floor(add(a, 0.5));
#else
  return std::floor(add(a, 0.5));
#endif
}

// exp(x) for |x| <= 0.3, within 2 ulp: the Taylor polynomial of degree 13 by Horner's rule, p <- p
// x + 1/k! from k = 13 down. The first term left out is below 0.3^14 / 14! < 1e-18. Each 1/k! is
// one fp64 division of exact integers.
MF_HD inline double exponential(double x) {
  double p = 1.0 / 6227020800.0;
  p = add(multiply(p, x), 1.0 / 479001600.0);
  p = add(multiply(p, x), 1.0 / 39916800.0);
  p = add(multiply(p, x), 1.0 / 3628800.0);
  p = add(multiply(p, x), 1.0 / 362880.0);
  p = add(multiply(p, x), 1.0 / 40320.0);
  p = add(multiply(p, x), 1.0 / 5040.0);
  p = add(multiply(p, x), 1.0 / 720.0);
  p = add(multiply(p, x), 1.0 / 120.0);
  p = add(multiply(p, x), 1.0 / 24.0);
  p = add(multiply(p, x), 1.0 / 6.0);
  p = add(multiply(p, x), 0.5);
  p = add(multiply(p, x), 1.0);
  return add(multiply(p, x), 1.0);
}

// A random word as a number in [0, 1): word * 2^-32, exact.
MF_HD inline double unit(uint32_t word) { return multiply(word, 0x1p-32); }

}  // namespace mf::exact
