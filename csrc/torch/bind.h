// How each csrc/torch/<stem>.cpp offers its ops to module.cpp. A new op adds its line here and there.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <string>

namespace mf {

// Declares each op once, in two places: torch's dispatcher, for torch.compile and opcheck, and the Python
// module, whose call in eager mode costs a fifth of the dispatcher's.
struct Ops {
  torch::Library& library;
  py::module_& module;

  // `function` takes tensors of every device that this build serves, and asks on_gpu() itself.
  template <typename Function>
  void define(const std::string& schema, Function* function) const {
    const std::string name = schema.substr(0, schema.find('('));
    library.def(schema.c_str());
    library.impl(name.c_str(), c10::DispatchKey::CPU, function);
#if defined(MOSE_FAST_WITH_CUDA) && !defined(MOSE_FAST_EMULATED)
    library.impl(name.c_str(), c10::DispatchKey::CUDA, function);
#endif
    module.def(name.c_str(), function, py::call_guard<py::gil_scoped_release>());
  }
};

void bind_device(py::module_& module);
void bind_adam(py::module_& module);
void define_null(const Ops& ops);
void define_reservoir(const Ops& ops);
void define_augment_parameters(const Ops& ops);
void define_augment(const Ops& ops);
void define_expert_losses(const Ops& ops);
void define_norm_pool(const Ops& ops);
void define_align_conv(const Ops& ops);  // in builds with kernels alone, as the next
void define_batch_norm_act(const Ops& ops);

}  // namespace mf
