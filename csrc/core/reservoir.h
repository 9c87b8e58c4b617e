// Every decision of the replay memory, as pure functions that the CPU loop and the kernels share.
//
// The memory's state is int64[3] = {seed, counter, n_seen}.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/philox.h"

namespace mf {

enum ReservoirState : int { kSeed = 0, kCounter = 1, kSeen = 2, kStateSize = 3 };

// Which filled slots a draw may return.
enum class SlotFilter : int { kAll = 0, kOnly = 1, kOthers = 2 };

// Algorithm R (Vitter 1985, "Random sampling with a reservoir") for the item at position t of the
// stream, from 0: the slot it is written to, or -1 if it is rejected. It holds for every item by
// itself, whatever the batch: position t uses t + 1.
MF_HD inline int64_t reservoir_slot(uint64_t seed, int64_t t, int64_t capacity) {
  if (t < capacity) {
    return t;
  }
  const PhiloxWords r = philox(seed, static_cast<uint64_t>(t), 0, Purpose::kReservoir, 0);
  const auto slot = static_cast<int64_t>(uniform_below(r.word[0], r.word[1], static_cast<uint64_t>(t) + 1));
  return slot < capacity ? slot : -1;
}

MF_HD inline bool is_eligible(SlotFilter filter, int64_t slot_task, int64_t task) {
  return filter == SlotFilter::kAll || (slot_task == task) == (filter == SlotFilter::kOnly);
}

// Random 63-bit sort key of a slot. A draw returns the eligible slots with the smallest (key,
// slot): uniform without replacement, in a random order that does not depend on the sort.
MF_HD inline uint64_t draw_key(uint64_t seed, uint64_t counter, int64_t slot) {
  const PhiloxWords r = philox(seed, counter, static_cast<uint32_t>(slot), Purpose::kDraw, 0);
  return (static_cast<uint64_t>(r.word[0]) << 32 | r.word[1]) >> 1;
}

}  // namespace mf
