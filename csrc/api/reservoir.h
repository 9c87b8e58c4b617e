// Replay memory: offer a batch, draw replay rows. The decisions are in core/reservoir.h; images are
// opaque rows of bytes.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/reservoir.h"

namespace mf {

// A draw on CUDA sorts its winners in one block's shared memory; this many fit.
inline constexpr int64_t kMaxCudaDraw = 2048;

struct ReservoirInsertParams {
  // The memory, changed in place.
  uint8_t* images;   // [capacity, row_bytes]
  int64_t* labels;   // [capacity]
  int64_t* tasks;    // [capacity]
  int64_t* indices;  // [capacity]
  int64_t* state;    // [kStateSize]; n_seen advances by count
  // The batch.
  const uint8_t* x;      // [count, row_bytes]
  const int64_t* y;      // [count]
  const int64_t* index;  // [count]
  int64_t task;
  int64_t* claims;  // [count] workspace, used by CUDA only: the slot each item claims, whatever later items do
  int64_t* slots;   // [count] out: where the item lies after the call; -1: rejected, or overwritten by a later item
  int64_t count;
  int64_t capacity;
  int64_t row_bytes;
};

struct ReservoirDrawParams {
  const int64_t* tasks;  // [filled]
  int64_t* state;        // [kStateSize]; counter advances by 1
  int64_t* slots;        // [count] out, ascending by (key, slot), -1 beyond the eligible
  int64_t count;         // at most filled
  int64_t filled;        // slots that hold samples: the first ones
  int64_t task;
  SlotFilter filter;
};

namespace cpu {
void reservoir_insert(const ReservoirInsertParams& params);
void reservoir_draw(const ReservoirDrawParams& params);
}  // namespace cpu

namespace cuda {
void reservoir_insert(const ReservoirInsertParams& params, Stream stream);  // two launches
void reservoir_draw(const ReservoirDrawParams& params, Stream stream);      // one launch; count <= kMaxCudaDraw
}  // namespace cuda

}  // namespace mf
