// Batch norm, residual add, ReLU and global average pool of a map in NHWC, which is read but never
// written: pooled = mean over an image's pixels of y = relu(norm(x) + residual). On a GPU alone.
//
// Forward keeps for each image and channel the number of pixels with y > 0 and the sum of their x -
// mean, and one bit an element, so that the norm's sums (api/batch_norm_act.h) need no pass over the
// map: with g = grad / pixels, sum g is the sum over the images of g times that number, and sum g (x -
// mean) of g times that sum. Then dx = scale [y > 0] g + slope (x - mean) + offset, dr = [y > 0] g.
//
// Channels are a multiple of kGroup; maps, states and gradients are aligned to 16 bytes. Padded images
// are never read, written as zero and not counted.
#pragma once

#include <cstdint>

#include "api/batch_norm_act.h"

namespace mf {

struct BatchNormPoolForward {
  MapShape shape;
  FloatType type;
  const void* x;
  const void* residual;
  const float* state;  // [kNormRows, channels]
  void* pooled;        // [images, channels] out
  // For backward, all of them or none (null):
  float* counts;  // [images, channels] out
  float* sums;    // [images, channels] out
  uint8_t* mask;  // [pixels, channels / 8] out
};

struct BatchNormPoolBackward {
  MapShape shape;
  FloatType type;
  const void* grad;  // [images, channels]
  const void* x;
  const float* state;
  const float* counts;  // as forward left them
  const float* sums;
  const uint8_t* mask;
  NormParams norm;      // weight and training are read
  float* norm_grads;    // [kNormGradRows, channels] out
  void* x_grad;         // out, like the map; null: not wanted
  void* residual_grad;  // out, like the map; null: not wanted
};

namespace cuda {
void batch_norm_pool(const BatchNormPoolForward& params, Stream stream);            // one launch
void batch_norm_pool_backward(const BatchNormPoolBackward& params, Stream stream);  // two; one without maps to write
}  // namespace cuda

}  // namespace mf
