// Template op `null`: copies its input. It does nothing useful; it shows the way of every other op.
//
// csrc/api/<stem>.h is the only bridge between torch and the kernels: a struct of plain data,
// passed by value, and one launch signature per back end. No torch type crosses it, so that a .cu
// file compiles in a second instead of a minute. Kernels never allocate: outputs and workspaces
// come in as pointers.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace mf {

struct NullParams {
  const void* input;  // `bytes` bytes, contiguous
  void* output;       // `bytes` bytes, contiguous, not overlapping `input`
  int64_t bytes;
};

namespace cpu {
// `threads`: the caller's share of the cores. Two workers that each take all cores are ten times
// slower than one.
void null(const NullParams& params, int threads);
}  // namespace cpu

namespace cuda {
void null(const NullParams& params, Stream stream);
}  // namespace cuda

}  // namespace mf
