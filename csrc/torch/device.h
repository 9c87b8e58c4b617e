// What a GPU is in this build: the one file of csrc/torch that knows. Every other one asks here.
//
//   neither macro                              a CPU-only build: csrc/cpu serves tensors, and there is no GPU
//   MOSE_FAST_WITH_CUDA                        tensors on a CUDA device are on a GPU
//   MOSE_FAST_WITH_CUDA, MOSE_FAST_EMULATED    tensors on the CPU are on a GPU, which csrc/emulated plays
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include "core/host_device.h"

#if defined(MOSE_FAST_WITH_CUDA)
#include <cuda_runtime.h>
#endif
#if defined(MOSE_FAST_EMULATED)
#include <atomic>
#elif defined(MOSE_FAST_WITH_CUDA)
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace mf {

#if defined(MOSE_FAST_EMULATED)

inline constexpr const char* kDevices = "cpu, as an emulated GPU";

// Tests compare csrc/cuda with csrc/cpu, and switch the emulated GPU off for that.
inline std::atomic<bool> emulates{true};

inline bool on_gpu(const at::Device& device) { return device.is_cpu() && emulates; }

struct DeviceGuard {
  explicit DeviceGuard(const at::Device& /*device*/) {}
};

inline Stream current_stream() { return nullptr; }

#elif defined(MOSE_FAST_WITH_CUDA)

inline constexpr const char* kDevices = "cpu and cuda";

inline bool on_gpu(const at::Device& device) { return device.is_cuda(); }

using DeviceGuard = c10::cuda::CUDAGuard;

inline Stream current_stream() { return c10::cuda::getCurrentCUDAStream(); }

#else

inline constexpr const char* kDevices = "cpu";

inline bool on_gpu(const at::Device& /*device*/) { return false; }

#endif

inline bool on_gpu(const at::Tensor& tensor) { return on_gpu(tensor.device()); }

// Whether csrc/cpu serves the device.
inline bool on_cpu(const at::Device& device) { return device.is_cpu() && !on_gpu(device); }

inline bool on_cpu(const at::Tensor& tensor) { return on_cpu(tensor.device()); }

#if defined(MOSE_FAST_WITH_CUDA)

// The number of the GPU's multiprocessors.
int processors(const at::Device& device);

// Memory of the current device, zeroed and never freed, also while a graph is captured.
void* allocate_zeroed(size_t bytes);

// What runs one kernel after the other, as a key of a map: the current device, its current stream
// and the capture that the stream is in, 0 for none.
std::array<int64_t, 3> current_queue();

#endif

// Runs an op where its tensors are: launch(stream) under a device guard, or compute(threads). The
// former takes its stream as `auto`, so that a build without GPUs does not compile its call.
template <typename OnGpu, typename OnCpu>
void run(const at::Device& device, const char* name, const OnGpu& launch, const OnCpu& compute) {
#if defined(MOSE_FAST_WITH_CUDA)
  if (on_gpu(device)) {
    const DeviceGuard guard(device);
    launch(current_stream());
    return;
  }
#endif
  TORCH_CHECK_NOT_IMPLEMENTED(on_cpu(device), name, " is on ", device, "; this build of mose_fast serves ", kDevices);
  compute(at::get_num_threads());
}

}  // namespace mf
