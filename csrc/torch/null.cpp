// csrc/torch/<stem>.cpp: the glue. It checks, allocates, takes the device guard and the current
// stream, and calls csrc/api. Slim headers only: torch/extension.h costs a minute a file, and
// ATen/cuda/CUDAContext.h needs toolkit parts that a bare nvcc lacks.
#include "api/null.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include "torch/bind.h"
#include "torch/checks.h"
#include "torch/device.h"

namespace mf {
namespace {

at::Tensor null(const at::Tensor& input) {
  // Named, so that the copy outlives the launch: `input.contiguous().data_ptr()` alone would
  // dangle.
  const at::Tensor source = input.contiguous();
  at::Tensor output = at::empty_like(source);
  const NullParams params{source.const_data_ptr(), output.mutable_data_ptr(), static_cast<int64_t>(source.nbytes())};
  run(
      source.device(), "x", [&](auto stream) { cuda::null(params, stream); },
      [&](int threads) { cpu::null(params, threads); });
  return output;
}

}  // namespace

void define_null(const Ops& ops) { ops.define("null(Tensor x) -> Tensor", &null); }

}  // namespace mf
