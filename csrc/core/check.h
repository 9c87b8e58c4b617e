// Checks for the torch-free rooms: a failure throws mf::Error, which Python sees as a RuntimeError.
#pragma once

#include <sstream>
#include <stdexcept>

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

namespace mf {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void fail(const char* file, int line, const char* expression, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  text << " [" << expression << " failed at " << file << ":" << line << "]";
  throw Error(text.str());
}

}  // namespace mf

// MF_CHECK(count >= 0, "count is ", count, "; wanted at least 0"): name the argument, its value and
// what was wanted.
#define MF_CHECK(condition, ...)                               \
  do {                                                         \
    if (!(condition)) {                                        \
      ::mf::fail(__FILE__, __LINE__, #condition, __VA_ARGS__); \
    }                                                          \
  } while (false)

#if defined(__CUDACC__)
// MF_CHECK_LAUNCH("null"): directly after every launch. It reads the launch's own error and never
// waits for the kernel.
#define MF_CHECK_LAUNCH(kernel)                                                                       \
  do {                                                                                                \
    const cudaError_t launch_error = cudaGetLastError();                                              \
    MF_CHECK(launch_error == cudaSuccess, "kernel ", kernel, ": ", cudaGetErrorString(launch_error)); \
  } while (false)
#endif
