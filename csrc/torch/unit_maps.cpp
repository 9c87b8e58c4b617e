// The glue of the ops over feature maps and of the optimiser, and what it needs of a GPU, as one
// translation unit: see unit_rows.cpp.
#include "torch/adam.cpp"
#include "torch/align_conv.cpp"
#include "torch/batch_norm_act.cpp"
#include "torch/device.cpp"
#include "torch/norm_pool.cpp"
#include "torch/workspace.cpp"
