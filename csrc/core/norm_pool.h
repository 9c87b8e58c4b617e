// One element of a norm's output before its pooling; mose_fast/reference/norm_pool.py says what the
// whole means.
//
// With z = scale (x - mean) + shift, pooled = sum over the kept pixels of z / HW. Forward keeps for
// each image and channel the number of kept pixels and the sum of their x - mean, so that with g =
// grad / HW the state's gradient needs no pass over the map:
//   dscale = sum over images of g times that sum,   dshift = sum of g times that number,   dmean = -scale dshift.
#pragma once

#include "core/host_device.h"
#include "core/relu.h"

namespace mf {

struct PooledElement {
  float value;      // z, or 0 where it is not kept
  float deviation;  // x - mean, or 0
  float kept;       // 1 or 0
};

MF_HD inline PooledElement pooled_element(float x, float mean, float scale, float shift) {
  const float deviation = x - mean;
  const float z = scale * deviation + shift;
  return passes(z) ? PooledElement{z, deviation, 1.0f} : PooledElement{0.0f, 0.0f, 0.0f};
}

}  // namespace mf
