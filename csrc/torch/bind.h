// What each csrc/torch/<stem>.cpp offers to module.cpp. A new op adds its two lines here and its
// two lines there.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace mf {

void bind_device(py::module_& module);

void register_null(torch::Library& library);
void bind_null(py::module_& module);

void register_expert_losses(torch::Library& library);
void bind_expert_losses(py::module_& module);

void register_reservoir(torch::Library& library);
void bind_reservoir(py::module_& module);

void register_augment_parameters(torch::Library& library);
void bind_augment_parameters(py::module_& module);

void register_augment(torch::Library& library);
void bind_augment(py::module_& module);

void bind_adam(py::module_& module);

void register_norm_pool(torch::Library& library);
void bind_norm_pool(py::module_& module);

void register_align_conv(torch::Library& library);
void bind_align_conv(py::module_& module);

void register_batch_norm_act(torch::Library& library);
void bind_batch_norm_act(py::module_& module);

}  // namespace mf
