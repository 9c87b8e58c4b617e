// The Python module mose_fast._C and the op library `mose_fast`.
#include <optional>

#include "torch/bind.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native ops of mose_fast; the public functions are in mose_fast.ops.";
  static torch::Library library(torch::Library::DEF, "mose_fast", std::nullopt, __FILE__, __LINE__);
  const mf::Ops ops{library, module};
  mf::bind_device(module);
  mf::bind_adam(module);
  mf::define_null(ops);
  mf::define_reservoir(ops);
  mf::define_augment_parameters(ops);
  mf::define_augment(ops);
  mf::define_expert_losses(ops);
  mf::define_norm_pool(ops);
#if defined(MOSE_FAST_WITH_CUDA)
  mf::define_align_conv(ops);
  mf::define_batch_norm_act(ops);
#endif
}
