// The Python module and the glue of the ops over rows, images and losses, as one translation unit:
// torch's headers take most of the time of compiling one.
#include "torch/augment.cpp"
#include "torch/augment_parameters.cpp"
#include "torch/expert_losses.cpp"
#include "torch/module.cpp"
#include "torch/null.cpp"
#include "torch/reservoir.cpp"
