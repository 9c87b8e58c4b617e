// Runs the cases of kernel_case.h: compiled by nvcc, on a GPU; with cuda_on_cpu.h included first,
// on the CPU.
//
//   kernel_check [NAME ...]            the cases whose names begin with one of these, else all; one line a case
//   kernel_check --sites [NAME ...]    on the CPU: also prints each barrier that was reached, as file:line
//   kernel_check --without FILE:LINE   on the CPU: that barrier does nothing, and the first case that fails is the last
//
// Exit status 0: all cases hold; 1: a case fails; 2: wrong arguments; 77: there is no GPU.
#include <algorithm>
#include <cstdlib>
#include <exception>

#include "kernel_case.h"

#if !defined(MF_KERNELS_ON_CPU)
#include <cuda_runtime.h>
#endif

namespace kernel_case {

#if defined(MF_KERNELS_ON_CPU)

#if __has_feature(thread_sanitizer)
constexpr int kRuns = 2;  // a race is found in one order of threads, or in the reverse; each takes long
#else
constexpr int kRuns = 4;
#endif

Context::~Context() { std::for_each(memory_.begin(), memory_.end(), &std::free); }

mf::Stream Context::stream() const { return nullptr; }

void* Context::allocate(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, bytes) != 0) {
    std::abort();
  }
  memory_.push_back(memory);
  return memory;
}

void Context::copy_in(void* memory, const void* values, size_t bytes) {
  std::copy_n(static_cast<const char*>(values), bytes, static_cast<char*>(memory));
}

void Context::copy_out(void* values, const void* memory, size_t bytes) {
  std::copy_n(static_cast<const char*>(memory), bytes, static_cast<char*>(values));
}

bool prepare() { return true; }

void start_run(int run, int poison) {
  shim::schedule = shim::kSchedules[run];
  shim::poison = poison;
}

#else

constexpr int kRuns = 2;

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);  // after an error of a kernel no other case means anything
  }
}

Context::~Context() {
  std::for_each(memory_.begin(), memory_.end(), [](void* memory) { cudaFree(memory); });
}

mf::Stream Context::stream() const { return cudaStreamPerThread; }

void* Context::allocate(size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, std::max<size_t>(bytes, 1)), "cudaMalloc");
  memory_.push_back(memory);
  return memory;
}

void Context::copy_in(void* memory, const void* values, size_t bytes) {
  check(cudaMemcpy(memory, values, bytes, cudaMemcpyHostToDevice), "copy to the GPU");
}

void Context::copy_out(void* values, const void* memory, size_t bytes) {
  check(cudaStreamSynchronize(stream()), "kernel");
  check(cudaMemcpy(values, memory, bytes, cudaMemcpyDeviceToHost), "copy from the GPU");
}

bool prepare() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    std::printf("kernel_check: no kernel was run: there is no CUDA GPU (%s)\n", cudaGetErrorString(error));
    return false;
  }
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  std::printf("kernel_check on %s, compute capability %d.%d\n", device.name, device.major, device.minor);
  return true;
}

void start_run(int /*run*/, int /*poison*/) {}

#endif

bool holds(const Case& tried) {
  std::vector<unsigned char> first;
  for (int run = 0; run < kRuns; ++run) {
    const int poison = run % 2 == 0 ? 0xff : 0xa5;
    start_run(run, poison);
    Context context(poison);
    std::string faults;
    try {
      tried.run(context);
      faults = context.faults();
    } catch (const std::exception& error) {
      faults = error.what();
    }
    if (faults.empty() && run > 0 && context.compared() != first) {
      faults = "differs from run 0 although both are close to the twin. ";
    }
    if (!faults.empty()) {
      std::printf("FAIL %s: run %d: %s\n", tried.name, run, faults.c_str());
      return false;
    }
    if (context.compared().empty()) {
      std::printf("FAIL %s: it compares nothing\n", tried.name);
      return false;
    }
    first = context.compared();
  }
  std::printf("ok   %s\n", tried.name);
  return true;
}

}  // namespace kernel_case

int main(int argc, char** argv) {
  std::vector<std::string> names;
  [[maybe_unused]] bool print_sites = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
#if defined(MF_KERNELS_ON_CPU)
    if (argument == "--sites") {
      print_sites = true;
      continue;
    }
    if (argument == "--without" && i + 1 < argc) {
      shim::missing_site = argv[++i];
      continue;
    }
#endif
    if (argument.rfind("--", 0) == 0) {
      std::fprintf(stderr, "argument is '%s'; wanted names of cases\n", argv[i]);
      return 2;
    }
    names.push_back(argument);
  }
  if (!kernel_case::prepare()) {
    return 77;
  }
  int run = 0;
  int failed = 0;
  bool go_on = true;
  for (const kernel_case::Case& tried : kernel_case::cases()) {
    const bool wanted = names.empty() || std::any_of(names.begin(), names.end(), [&](const std::string& name) {
                          return std::string(tried.name).rfind(name, 0) == 0;
                        });
    if (wanted && go_on) {
      ++run;
      failed += kernel_case::holds(tried) ? 0 : 1;
      std::fflush(stdout);
#if defined(MF_KERNELS_ON_CPU)
      go_on = failed == 0 || *shim::missing_site == '\0';
#endif
    }
  }
#if defined(MF_KERNELS_ON_CPU)
  for (int i = 0; print_sites && i < shim::sites; ++i) {
    std::printf("barrier %s\n", shim::sites_seen[i]);
  }
#endif
  std::printf("%d of %d cases failed\n", failed, run);
  return failed > 0 || run == 0 ? 1 : 0;
}
