// Batch norm, ReLU and global average pool of a map in one pass; core/norm_pool.h has the algebra.
#pragma once

#include <cstdint>

#include "api/float_array.h"
#include "core/batch_norm.h"
#include "core/host_device.h"
#include "core/norm_pool.h"

namespace mf {

// What both forward and backward read. Kernels want channels in multiples of 8 (4 in float32), and all memory
// but counts and sums from multiples of 16 bytes; csrc/cpu takes any.
struct NormPoolInput {
  FloatArray x;        // [images, pixels, channels], float32 or bfloat16
  const float* state;  // [kNormRows, channels]; null: x is pooled as it is
  int64_t images;
  int64_t pixels;  // at least 1
  int64_t channels;
  // Images from this number on are padding: read from the device where a pointer is given, else the
  // number beside it.
  const int32_t* valid_pointer;
  int64_t valid;

  MF_HD int64_t valid_images() const {
    const int64_t count = valid_pointer != nullptr ? *valid_pointer : valid;
    return count < 0 ? 0 : count < images ? count : images;
  }
};

struct NormPoolForward {
  NormPoolInput input;
  MutableFloatArray pooled;  // [images, channels], of the type of x; 0 for padding
  float* counts;  // [images, channels] out, for backward; null: not wanted. Written only with a state, 0 for padding
  float* sums;    // [images, channels] out, as counts
};

struct NormPoolBackward {
  NormPoolInput input;
  const void* grad;     // [images, channels], of the type of x
  const float* counts;  // as forward left them
  const float* sums;
  MutableFloatArray dx;  // as x, and of its type, 0 for padding; data null: not wanted
  float* dstate;         // [kNormRows, channels] out; null: not wanted
};

namespace cpu {
void norm_pool(const NormPoolForward& params, int threads);
void norm_pool_backward(const NormPoolBackward& params, int threads);
}  // namespace cpu

namespace cuda {
void norm_pool(const NormPoolForward& params, Stream stream);            // one launch
void norm_pool_backward(const NormPoolBackward& params, Stream stream);  // one launch
}  // namespace cuda

}  // namespace mf
