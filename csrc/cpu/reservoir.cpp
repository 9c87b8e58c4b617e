// The replay memory in sequential order: the oracle for csrc/cuda/reservoir.cuh.
#include "api/reservoir.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mf::cpu {

void reservoir_insert(const ReservoirInsertParams& params) {
  const auto seed = static_cast<uint64_t>(params.state[kSeed]);
  std::unordered_map<int64_t, int64_t> owner;  // slot -> item of this batch that lies there
  for (int64_t item = 0; item < params.count; ++item) {
    const int64_t slot = reservoir_slot(seed, params.state[kSeen] + item, params.capacity);
    params.slots[item] = slot;
    if (slot < 0) {
      continue;
    }
    const auto [entry, first] = owner.try_emplace(slot, item);
    if (!first) {
      params.slots[entry->second] = -1;
      entry->second = item;
    }
  }
  for (int64_t item = 0; item < params.count; ++item) {
    const int64_t slot = params.slots[item];
    if (slot < 0) {
      continue;
    }
    std::memcpy(params.images + slot * params.row_bytes, params.x + item * params.row_bytes,
                static_cast<size_t>(params.row_bytes));
    params.labels[slot] = params.y[item];
    params.tasks[slot] = params.task;
    params.indices[slot] = params.index[item];
  }
  params.state[kSeen] += params.count;
}

void reservoir_draw(const ReservoirDrawParams& params) {
  const auto seed = static_cast<uint64_t>(params.state[kSeed]);
  const auto counter = static_cast<uint64_t>(params.state[kCounter]);
  std::vector<std::pair<uint64_t, int64_t>> eligible;  // (key, slot)
  eligible.reserve(static_cast<size_t>(params.filled));
  for (int64_t slot = 0; slot < params.filled; ++slot) {
    if (is_eligible(params.filter, params.tasks[slot], params.task)) {
      eligible.emplace_back(draw_key(seed, counter, slot), slot);
    }
  }
  const auto drawn = std::min<size_t>(eligible.size(), static_cast<size_t>(params.count));
  std::partial_sort(eligible.begin(), eligible.begin() + static_cast<std::ptrdiff_t>(drawn), eligible.end());
  for (size_t i = 0; i < drawn; ++i) {
    params.slots[i] = eligible[i].second;
  }
  std::fill(params.slots + drawn, params.slots + params.count, int64_t{-1});
  params.state[kCounter] += 1;
}

}  // namespace mf::cpu
