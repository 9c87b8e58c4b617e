#include "torch/device.h"

#include "torch/bind.h"

#if defined(MOSE_FAST_EMULATED)
#include <cstdlib>
#include <new>
#elif defined(MOSE_FAST_WITH_CUDA)
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace mf {

#if defined(MOSE_FAST_EMULATED)

// Few, so that every block walks several tiles, and odd, so that the tiles do not divide among
// them.
int processors(const at::Device& /*device*/) { return 5; }

void* allocate_zeroed(size_t bytes) {
  void* memory = std::calloc(bytes, 1);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

std::array<int64_t, 3> current_queue() { return {}; }

void bind_device(py::module_& module) {
  module.def("emulate", [](bool on) { emulates = on; }, py::arg("on"));
}

#else

#if defined(MOSE_FAST_WITH_CUDA)

int processors(const at::Device& device) {
  int count = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.index()));
  return count;
}

// Not from torch's allocator: while a graph is captured that would give memory of the graph's,
// zeroed at its replay alone.
void* allocate_zeroed(size_t bytes) {
  const c10::cuda::CUDAStreamCaptureModeGuard guard(cudaStreamCaptureModeRelaxed);
  void* memory = nullptr;
  cudaStream_t side = nullptr;
  C10_CUDA_CHECK(cudaMalloc(&memory, bytes));
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  C10_CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, side));
  C10_CUDA_CHECK(cudaStreamSynchronize(side));
  C10_CUDA_CHECK(cudaStreamDestroy(side));
  return memory;
}

std::array<int64_t, 3> current_queue() {
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  cudaStreamCaptureStatus status{};
  unsigned long long capture = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture));
  return {stream.device_index(), stream.id(),
          status == cudaStreamCaptureStatusNone ? 0 : static_cast<int64_t>(capture)};
}

#endif

void bind_device(py::module_& /*module*/) {}

#endif

}  // namespace mf
