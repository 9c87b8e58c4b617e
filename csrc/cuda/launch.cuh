// How a launcher starts a kernel and a kernel gets its shared memory, so that one .cu file serves
// nvcc and, in tests without a card, a plain C++ compiler: there csrc/emulated/cuda_on_cpu.h has
// defined both macros before this file is read.
//
//   MF_LAUNCH(kernel, blocks, threads, shared_bytes, stream, arguments...)   launches and checks; (kernel<A, B>) in parentheses
//   MF_DYNAMIC_SHARED(name);                                                 unsigned char* name, aligned to 16
//
// All shared memory is dynamic: the CPU gives each block exactly the bytes asked for, so that a
// step beyond them is noticed.
#pragma once

#include <cstddef>

#include "core/check.h"

#if defined(__CUDACC__)

#define MF_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
  do {                                                                \
    kernel<<<blocks, threads, shared_bytes, stream>>>(__VA_ARGS__);   \
    MF_CHECK_LAUNCH(#kernel);                                         \
  } while (false)
#define MF_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

#elif !defined(MF_LAUNCH)
#error "a .cu file was compiled by a plain C++ compiler; wanted nvcc, or csrc/emulated/cuda_on_cpu.h included first"
#endif

namespace mf::cuda {

// Above 48 KiB a kernel has to ask. The driver remembers it for each kernel and device; asking
// again costs less than a microsecond and is allowed while a graph is captured.
template <typename Kernel>
void allow_shared(Kernel* kernel, size_t bytes) {
#if defined(__CUDACC__)
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  MF_CHECK(error == cudaSuccess, "a kernel wants ", bytes, " bytes of shared memory: ", cudaGetErrorString(error));
#endif
}

}  // namespace mf::cuda
