// The Python module mose_fast._C and the op library `mose_fast`, each a list with one line an op.
#include "torch/bind.h"

TORCH_LIBRARY(mose_fast, library) {
  mf::register_null(library);
  mf::register_reservoir(library);
  mf::register_augment_parameters(library);
  mf::register_augment(library);
  mf::register_expert_losses(library);
  mf::register_norm_pool(library);
  mf::register_align_conv(library);
  mf::register_batch_norm_act(library);
}

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native ops of mose_fast; the public functions are in mose_fast.ops.";
  mf::bind_device(module);
  mf::bind_null(module);
  mf::bind_expert_losses(module);
  mf::bind_reservoir(module);
  mf::bind_augment_parameters(module);
  mf::bind_augment(module);
  mf::bind_adam(module);
  mf::bind_norm_pool(module);
  mf::bind_align_conv(module);
  mf::bind_batch_norm_act(module);
}
