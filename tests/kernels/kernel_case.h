// Comparisons of a kernel with its CPU twin, defined once and run twice: on the CPU by
// tests/kernels/test_kernels_on_cpu.py, through csrc/emulated/cuda_on_cpu.h and under sanitizers, and
// on a GPU by the program kernel_check.
//
// To add an op: write tests/kernels/cases_<stem>.cpp with one KERNEL_CASE(name) { ... } a comparison;
// csrc/cpu/<stem>.cpp, where there is one, and csrc/cuda/<stem>.cu are compiled along with it,
// nothing else has to be registered. A case makes its inputs, gives them to mf::cpu::<op>, gives
// copies of them to mf::cuda::<op> and says what must agree:
//
//   KERNEL_CASE(null_of_300_bytes) {
//     const std::vector<char> input = ..., wanted = ...;
//     char* output = context.poisoned<char>(300);
//     mf::cuda::null({context.upload(input), output, 300}, context.stream());
//     context.expect_equal("output", output, wanted);
//   }
//
// Every case runs several times: in each of four schedules on the CPU, twice on a GPU; what it
// compares must agree among the runs bit for bit, whatever the tolerance to the twin is. Memory
// that a kernel has not written is poisoned with another byte in every other run. Cases named
// small_... must reach every __syncthreads: the tests take each away in turn and want the schedules
// and ThreadSanitizer to notice, which needs blocks of few threads. Where MF_KERNELS_ON_CPU is
// defined, a case may also launch a body of a .cuh with another shape: shim::launch. Where it is not,
// there are COMPILED_CASEs as well: they bring every instance and every loop that nvcc has unrolled to
// run (build_tools/run_ptx.py counts), with more threads than the CPU has time for.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/host_device.h"

namespace kernel_case {

class Context {
 public:
  explicit Context(int poison) : poison_(poison) {}
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();

  // The stream to launch on.
  mf::Stream stream() const;

  // A copy of `values` that kernels may read and write, of exactly that size, aligned to 256.
  template <typename T>
  T* upload(const std::vector<T>& values) {
    auto* memory = static_cast<T*>(allocate(values.size() * sizeof(T)));
    copy_in(memory, values.data(), values.size() * sizeof(T));
    return memory;
  }

  // Memory for an output or a workspace.
  template <typename T>
  T* poisoned(size_t count) {
    std::vector<unsigned char> bytes(count * sizeof(T), static_cast<unsigned char>(poison_));
    return reinterpret_cast<T*>(upload(bytes));
  }

  template <typename T>
  std::vector<T> download(const T* memory, size_t count) {
    std::vector<T> values(count);
    copy_out(values.data(), memory, count * sizeof(T));
    return values;
  }

  template <typename T>
  void expect_equal(const char* what, const T* memory, const std::vector<T>& wanted) {
    const std::vector<T> values = download(memory, wanted.size());
    remember(values.data(), values.size() * sizeof(T));
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (std::memcmp(&values[i], &wanted[i], sizeof(T)) != 0) {
        fault(what, i, static_cast<double>(values[i]), static_cast<double>(wanted[i]));
        return;
      }
    }
  }

  // |value - wanted| <= tolerance (1 + |wanted|); NaN equals NaN alone, and an infinity itself.
  void expect_close(const char* what, const float* memory, const std::vector<float>& wanted, double tolerance) {
    const std::vector<float> values = download(memory, wanted.size());
    remember(values.data(), values.size() * sizeof(float));
    for (size_t i = 0; i < wanted.size(); ++i) {
      const double distance = std::abs(static_cast<double>(values[i]) - static_cast<double>(wanted[i]));
      const bool same = values[i] == wanted[i] || (std::isnan(values[i]) && std::isnan(wanted[i]));
      if (!same &&
          !(std::isfinite(wanted[i]) && distance <= tolerance * (1.0 + std::abs(static_cast<double>(wanted[i]))))) {
        fault(what, i, static_cast<double>(values[i]), static_cast<double>(wanted[i]));
        return;
      }
    }
  }

  const std::string& faults() const { return faults_; }
  const std::vector<unsigned char>& compared() const { return compared_; }

 private:
  void* allocate(size_t bytes);
  void copy_in(void* memory, const void* values, size_t bytes);
  void copy_out(void* values, const void* memory, size_t bytes);

  void remember(const void* values, size_t bytes) {
    const auto* first = static_cast<const unsigned char*>(values);
    compared_.insert(compared_.end(), first, first + bytes);
  }
  void fault(const char* what, size_t index, double value, double wanted) {
    char line[256];
    std::snprintf(line, sizeof line, "%s[%zu] is %.9g; wanted %.9g. ", what, index, value, wanted);
    faults_ += line;
  }

  int poison_;
  std::vector<void*> memory_;
  std::vector<unsigned char> compared_;
  std::string faults_;
};

struct Case {
  const char* name;
  void (*run)(Context& context);
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)(Context& context)) { cases().push_back({name, run}); }
};

// Memory that the kernel before wrote: the next one reads poison there unless it waits. Null: none.
inline void hide([[maybe_unused]] const void* memory, [[maybe_unused]] size_t bytes) {
#if defined(MF_KERNELS_ON_CPU)
  if (memory != nullptr) {
    shim::hide(const_cast<void*>(memory), bytes);
  }
#endif
}

}  // namespace kernel_case

#define KERNEL_CASE(name)                                                          \
  static void case_##name(kernel_case::Context& context);                          \
  static const kernel_case::Registration registration_##name(#name, &case_##name); \
  static void case_##name(kernel_case::Context& context)

#if defined(MF_KERNELS_ON_CPU)
#define COMPILED_CASE(name) [[maybe_unused]] static void case_##name(kernel_case::Context& context)
#else
#define COMPILED_CASE(name) KERNEL_CASE(name)
#endif
