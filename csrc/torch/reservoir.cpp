// Glue of the replay memory. Shapes and types are checked in mose_fast/ops/reservoir.py and, as far
// as memory safety needs it, here.
#include "api/reservoir.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "torch/bind.h"
#include "torch/checks.h"
#include "torch/device.h"

namespace mf {
namespace {

at::Tensor reservoir_insert(at::Tensor images, at::Tensor labels, at::Tensor tasks, at::Tensor indices,
                            at::Tensor state, const at::Tensor& x_in, const at::Tensor& y_in, int64_t task,
                            const at::Tensor& index_in) {
  // Named, so that the copies outlive the launches.
  const at::Tensor x = x_in.contiguous();
  const at::Tensor y = y_in.contiguous();
  const at::Tensor index = index_in.contiguous();
  TORCH_CHECK(images.dim() == 4 && x.dim() == 4 && images.sizes().slice(1) == x.sizes().slice(1), "x has shape ",
              x.sizes(), "; wanted images like the memory's, of shape ", images.sizes());
  const int64_t capacity = images.size(0);
  const int64_t count = x.size(0);
  TORCH_CHECK(capacity >= 1, "images has shape ", images.sizes(), "; wanted at least one slot");
  const at::Device device = state.device();
  const at::Tensor slots = at::empty({count}, state.options());
  const at::Tensor claims = at::empty({on_gpu(state) ? count : 0}, state.options());
  const ReservoirInsertParams params{row_pointer<uint8_t>(images, "images", images.numel(), device),
                                     row_pointer<int64_t>(labels, "labels", capacity, device),
                                     row_pointer<int64_t>(tasks, "tasks", capacity, device),
                                     row_pointer<int64_t>(indices, "indices", capacity, device),
                                     row_pointer<int64_t>(state, "state", kStateSize, device),
                                     row_pointer<const uint8_t>(x, "x", x.numel(), device),
                                     row_pointer<const int64_t>(y, "y", count, device),
                                     row_pointer<const int64_t>(index, "index", count, device),
                                     task,
                                     claims.mutable_data_ptr<int64_t>(),
                                     slots.mutable_data_ptr<int64_t>(),
                                     count,
                                     capacity,
                                     images.numel() / capacity};
  run(
      device, "state", [&](auto stream) { cuda::reservoir_insert(params, stream); },
      [&](int) { cpu::reservoir_insert(params); });
  return slots;
}

at::Tensor reservoir_draw(const at::Tensor& tasks, at::Tensor state, int64_t k, int64_t filter, int64_t task) {
  TORCH_CHECK(k >= 0, "k is ", k, "; wanted at least 0");
  TORCH_CHECK(filter >= 0 && filter <= 2, "filter is ", filter,
              "; wanted 0 (all), 1 (only the task) or 2 (the other tasks)");
  TORCH_CHECK(tasks.dim() == 1, "tasks has shape ", tasks.sizes(), "; wanted [filled slots]");
  const int64_t filled = tasks.size(0);
  const at::Tensor slots = at::empty({std::min(k, filled)}, state.options());
  const ReservoirDrawParams params{row_pointer<const int64_t>(tasks, "tasks", filled, state.device()),
                                   row_pointer<int64_t>(state, "state", kStateSize, state.device()),
                                   slots.mutable_data_ptr<int64_t>(),
                                   slots.size(0),
                                   filled,
                                   task,
                                   static_cast<SlotFilter>(filter)};
  run(
      state.device(), "state", [&](auto stream) { cuda::reservoir_draw(params, stream); },
      [&](int) { cpu::reservoir_draw(params); });
  return slots;
}

}  // namespace

void define_reservoir(const Ops& ops) {
  ops.define(
      "reservoir_insert(Tensor(a!) images, Tensor(b!) labels, Tensor(c!) tasks, Tensor(d!) indices, "
      "Tensor(e!) state, Tensor x, Tensor y, int task, Tensor index) -> Tensor",
      &reservoir_insert);
  ops.define("reservoir_draw(Tensor tasks, Tensor(a!) state, int k, int filter, int task) -> Tensor", &reservoir_draw);
}

}  // namespace mf
