// csrc/cuda/<stem>.cu: kernel and launcher. No torch header, no allocation, no synchronisation, no
// static device state: a launcher must be capturable in a CUDA graph. MF_LAUNCH starts a kernel and
// checks the launch; with it this file also compiles for the CPU, where tests/kernels runs it. Longer
// kernels keep their bodies in <stem>.cuh.
#include <cuda_runtime.h>

#include <algorithm>

#include "api/null.h"
#include "cuda/launch.cuh"

namespace mf::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1024;  // the grid-stride loop covers the rest

__global__ void __launch_bounds__(kThreads) null_kernel(const NullParams params) {
  const auto* input = static_cast<const char*>(params.input);
  auto* output = static_cast<char*>(params.output);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < params.bytes; i += stride) {
    output[i] = input[i];
  }
}

}  // namespace

void null(const NullParams& params, Stream stream) {
  MF_CHECK(params.bytes >= 0, "bytes is ", params.bytes, "; wanted at least 0");
  if (params.bytes == 0) {
    return;  // a grid of no blocks is a launch error
  }
  const int64_t blocks = std::min((params.bytes + kThreads - 1) / kThreads, kMaxBlocks);
  MF_LAUNCH(null_kernel, static_cast<unsigned>(blocks), kThreads, 0, stream, params);
}

}  // namespace mf::cuda
