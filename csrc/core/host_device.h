// What a header needs so that one body compiles with nvcc (host and device) and with a plain C++
// compiler.
#pragma once

#if defined(__CUDACC__)
#define MF_HD __host__ __device__
#else
#define MF_HD
#endif

// The CUDA runtime's own stream type, declared here so that csrc/api compiles where no toolkit is
// installed. Repeating cuda_runtime.h's declaration is legal C++: both name the same type.
struct CUstream_st;

namespace mf {

using Stream = CUstream_st*;

}  // namespace mf
