// Glue of the pooled norm. Arguments are explained and checked in mose_fast/ops/norm_pool.py; what
// memory safety needs is checked here again.
#include "api/norm_pool.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "torch/bind.h"
#include "torch/device.h"
#include "torch/maps.h"

namespace mf {
namespace {

// The inputs as the kernels want them, owned while these run, and their description.
struct PoolInputs {
  at::Tensor x, state;
  NormPoolInput params;

  PoolInputs(const at::Tensor& x_in, const MaybeTensor& state_in, const MaybeTensor& valid_rows_tensor,
             std::optional<int64_t> valid_rows) {
    TORCH_CHECK(x_in.dim() == 4 && x_in.size(2) * x_in.size(3) >= 1, "x has shape ", x_in.sizes(),
                "; wanted [N, C, H, W] with a pixel");
    x = x_in.contiguous(at::MemoryFormat::ChannelsLast);
    const uintptr_t alignment = on_gpu(x) ? 16 : 0;  // kernels move vectors
    params = {{on_gpu(x) ? map_pointer(x, "x", x.sizes(), x) : x.const_data_ptr(), float_type(x, "x")},
              nullptr,
              x.size(0),
              x.size(2) * x.size(3),
              x.size(1),
              row_pointer<const int32_t>(valid_rows_tensor, "valid_rows", 1, x.device()),
              valid_rows.value_or(x.size(0))};
    if (state_in) {
      state = state_in->contiguous();
      params.state = row_pointer<const float>(state, "state", kNormRows * x.size(1), x.device(), alignment);
    }
  }
};

// pooled [N, C], and the counts and sums [N, C] that backward needs: empty unless `for_backward`
// and a state are given.
std::tuple<at::Tensor, at::Tensor, at::Tensor> norm_pool(const at::Tensor& x, const MaybeTensor& state,
                                                         const MaybeTensor& valid_rows_tensor,
                                                         std::optional<int64_t> valid_rows, bool for_backward) {
  const PoolInputs in(x, state, valid_rows_tensor, valid_rows);
  const bool keeps = for_backward && in.state.defined();
  const int64_t images = in.params.images;
  const int64_t channels = in.params.channels;
  const at::Tensor pooled = at::empty({images, channels}, in.x.options().memory_format(at::MemoryFormat::Contiguous));
  const at::Tensor counts = floats({keeps ? images : 0, channels}, in.x);
  const at::Tensor sums = floats({keeps ? images : 0, channels}, in.x);
  const NormPoolForward params{in.params,
                               {pooled.mutable_data_ptr(), in.params.x.type},
                               keeps ? counts.mutable_data_ptr<float>() : nullptr,
                               keeps ? sums.mutable_data_ptr<float>() : nullptr};
  run(
      x.device(), "x", [&](auto stream) { cuda::norm_pool(params, stream); },
      [&](int threads) { cpu::norm_pool(params, threads); });
  return {pooled, counts, sums};
}

// The gradients of x (of its type, in channels_last memory) and of the state; None where not wanted.
// Without a state x gives its shape alone and there are no counts and sums.
std::tuple<MaybeTensor, MaybeTensor> norm_pool_backward(const at::Tensor& grad_in, const at::Tensor& x,
                                                        const MaybeTensor& state, const MaybeTensor& counts,
                                                        const MaybeTensor& sums, const MaybeTensor& valid_rows_tensor,
                                                        std::optional<int64_t> valid_rows, std::array<bool, 2> wants) {
  const PoolInputs in(x, state, valid_rows_tensor, valid_rows);
  const auto [wants_x, wants_state] = wants;
  const at::Tensor grad = grad_in.contiguous();
  const int64_t kept = in.params.images * in.params.channels;
  TORCH_CHECK(!wants_state || (state && counts && sums), "state, counts or sums is None; wanted what forward returned");
  MaybeTensor dx, dstate;
  if (wants_x) {
    dx = at::empty_like(in.x, {}, at::MemoryFormat::ChannelsLast);
  }
  if (wants_state) {
    dstate = floats({kNormRows, in.params.channels}, in.x);
  }
  const NormPoolBackward params{in.params,
                                row_pointer(grad, "grad", x.scalar_type(), kept, x.device(), on_gpu(x) ? 16 : 0),
                                wants_state ? row_pointer<const float>(counts, "counts", kept, x.device()) : nullptr,
                                wants_state ? row_pointer<const float>(sums, "sums", kept, x.device()) : nullptr,
                                {dx ? dx->mutable_data_ptr() : nullptr, in.params.x.type},
                                dstate ? dstate->mutable_data_ptr<float>() : nullptr};
  run(
      x.device(), "x", [&](auto stream) { cuda::norm_pool_backward(params, stream); },
      [&](int threads) { cpu::norm_pool_backward(params, threads); });
  return {dx, dstate};
}

}  // namespace

void define_norm_pool(const Ops& ops) {
  const std::string valid = kValidSchema;
  ops.define("norm_pool(Tensor x, Tensor? state, " + valid + ", bool for_backward) -> (Tensor, Tensor, Tensor)",
             &norm_pool);
  ops.define("norm_pool_backward(Tensor grad, Tensor x, Tensor? state, Tensor? counts, Tensor? sums, " + valid +
                 ", bool[2] wants) -> (Tensor?, Tensor?)",
             &norm_pool_backward);
}

}  // namespace mf
