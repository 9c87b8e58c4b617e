#include "torch/workspace.h"

#if defined(MOSE_FAST_WITH_CUDA)

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

#include "core/check.h"

namespace mf {
namespace {

constexpr int64_t kTickets = 4096;  // for a stream; one for 32 channels of a map

// Not from torch's allocator: while a graph is captured that would give memory of the graph's, zeroed at its replay alone.
uint32_t* allocate() {
  const c10::cuda::CUDAStreamCaptureModeGuard guard(cudaStreamCaptureModeRelaxed);
  uint32_t* memory = nullptr;
  cudaStream_t side = nullptr;
  C10_CUDA_CHECK(cudaMalloc(&memory, kTickets * sizeof(uint32_t)));
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  C10_CUDA_CHECK(cudaMemsetAsync(memory, 0, kTickets * sizeof(uint32_t), side));
  C10_CUDA_CHECK(cudaStreamSynchronize(side));
  C10_CUDA_CHECK(cudaStreamDestroy(side));
  return memory;
}

}  // namespace

uint32_t* tickets(int64_t count) {
  MF_CHECK(count >= 0 && count <= kTickets, "tickets wanted: ", count, "; there are ", kTickets);
  static std::mutex mutex;
  static std::map<std::pair<int, int64_t>, uint32_t*> of_stream;
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const std::lock_guard<std::mutex> lock(mutex);
  uint32_t*& memory = of_stream[{static_cast<int>(stream.device_index()), static_cast<int64_t>(stream.id())}];
  if (memory == nullptr) {
    memory = allocate();
  }
  return memory;
}

}  // namespace mf

#endif
