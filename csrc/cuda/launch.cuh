// How a launcher starts a kernel and a kernel gets its shared memory, so that one .cu file serves
// nvcc and, in tests without a GPU, a plain C++ compiler: there csrc/emulated/cuda_on_cpu.h has
// defined both macros before this file is read.
//
//   MF_LAUNCH(kernel, blocks, threads, shared_bytes, stream, arguments...)  launches and checks; wants (kernel<A, B>)
//   MF_LAUNCH_AFTER(the same)                                               may begin before the earlier kernel ends
//   MF_DYNAMIC_SHARED(name);                                                unsigned char* name, aligned to 16
//
// All shared memory is dynamic: the CPU gives each block exactly the bytes asked for, so that a
// step beyond them is noticed.
//
// MF_LAUNCH_AFTER is programmatic dependent launch (sm_90 and later; before, both calls below do nothing):
// the kernel may begin while its predecessor on the stream, ours or a library's, still runs, once every
// block of that one has called let_next_begin() or ended. Rules for such a kernel:
//   - all threads call wait_for_previous(): it returns when the predecessor has ended and its writes can
//     be read;
//   - before that they read nothing that the predecessor writes, and write nothing at all;
//   - let_next_begin() comes after wait_for_previous(), so that at most two kernels overlap.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "core/check.h"

#if defined(__CUDACC__)

#define MF_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
  do {                                                                \
    mf::cuda::allow_shared(kernel, shared_bytes);                     \
    kernel<<<blocks, threads, shared_bytes, stream>>>(__VA_ARGS__);   \
    MF_CHECK_LAUNCH(#kernel);                                         \
  } while (false)
#define MF_LAUNCH_AFTER(kernel, blocks, threads, shared_bytes, stream, ...)                         \
  do {                                                                                              \
    mf::cuda::allow_shared(kernel, shared_bytes);                                                   \
    mf::cuda::launch_after(kernel, dim3(blocks), dim3(threads), shared_bytes, stream, __VA_ARGS__); \
    MF_CHECK_LAUNCH(#kernel);                                                                       \
  } while (false)
#define MF_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

#elif !defined(MF_LAUNCH)
#error "a .cu file was compiled by a plain C++ compiler; wanted nvcc, or csrc/emulated/cuda_on_cpu.h included first"
#endif

namespace mf::cuda {

// Of a block, on every GPU from sm_80 on.
inline constexpr size_t kMostShared = 99 * 1024;

#if defined(__CUDACC__)

// Above 48 KiB a kernel has to ask. The limit belongs to the kernel and the device, not to a launch: it
// is raised once, to the most that any launch wants, since a limit that fits one launch could be too
// low for that of another thread.
template <typename Kernel>
void allow_shared(Kernel* kernel, size_t bytes) {
  if (bytes <= 48 * 1024) {
    return;
  }
  MF_CHECK(bytes <= kMostShared, "a kernel wants ", bytes, " bytes of shared memory; wanted at most ", kMostShared);
  cudaFuncAttributes now{};
  cudaError_t error = cudaFuncGetAttributes(&now, kernel);
  if (error == cudaSuccess && now.maxDynamicSharedSizeBytes < static_cast<int>(kMostShared)) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kMostShared));
  }
  MF_CHECK(error == cudaSuccess, "a kernel gets no ", kMostShared,
           " bytes of shared memory: ", cudaGetErrorString(error));
}

__device__ inline void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Prefetches a cache line that will be read soon; it may still be written.
__device__ inline void prefetch_to_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

template <typename... Params, typename... Arguments>
void launch_after(void (*kernel)(Params...), dim3 blocks, dim3 threads, size_t shared_bytes, cudaStream_t stream,
                  const Arguments&... arguments) {
  // Code for an older GPU, which a newer one may run too, does not wait.
  cudaFuncAttributes code{};
  const cudaError_t error = cudaFuncGetAttributes(&code, kernel);
  MF_CHECK(error == cudaSuccess, "a kernel has no code for this GPU: ", cudaGetErrorString(error));
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = blocks;
  launch.blockDim = threads;
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &early;
  launch.numAttrs = code.ptxVersion >= 90 ? 1 : 0;
  cudaLaunchKernelEx(&launch, kernel, Params(arguments)...);  // what it returns is asked for by MF_CHECK_LAUNCH
}

#endif

}  // namespace mf::cuda
