// Kernel bodies of the replay memory; tests/kernels compiles them for the CPU too. Results equal
// csrc/cpu/reservoir.cpp bit for bit.
#pragma once

#include "api/reservoir.h"

namespace mf::cuda {

// --- insert, first launch: what slot does each item claim?
// ------------------------------------------------------------------ Algorithm R decides for every
// item by itself (core/reservoir.h), so items need not know of one another. n_seen is only read.
__device__ inline void reservoir_claim_block(const ReservoirInsertParams& params) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (item < params.count) {
    params.claims[item] =
        reservoir_slot(static_cast<uint64_t>(params.state[kSeed]), params.state[kSeen] + item, params.capacity);
  }
}

// --- insert, second launch: one block an item copies the row
// ---------------------------------------------------------------- In sequential order the last
// item that claims a slot stays. So an item copies only if no later item of the batch claims its
// slot: every slot has one writer, and the result does not depend on the order of blocks. n_seen
// advances here, where no block reads it. `Word` is 16 bytes where rows and addresses are aligned
// to 16, else a byte; neighbouring threads copy neighbouring words.
template <typename Word>
__device__ void reservoir_copy_block(const ReservoirInsertParams& params) {
  const int64_t item = blockIdx.x;
  if (item == 0 && threadIdx.x == 0) {
    params.state[kSeen] += params.count;
  }
  const int64_t slot = params.claims[item];
  int claimed_later = slot < 0;
  for (int64_t other = item + 1 + threadIdx.x; slot >= 0 && other < params.count; other += blockDim.x) {
    claimed_later |= params.claims[other] == slot;
  }
  const bool stays = __syncthreads_or(claimed_later) == 0;
  if (threadIdx.x == 0) {
    params.slots[item] = stays ? slot : -1;
    if (stays) {
      params.labels[slot] = params.y[item];
      params.tasks[slot] = params.task;
      params.indices[slot] = params.index[item];
    }
  }
  if (stays) {
    const auto* source = reinterpret_cast<const Word*>(params.x + item * params.row_bytes);
    auto* target = reinterpret_cast<Word*>(params.images + slot * params.row_bytes);
    const int64_t words = params.row_bytes / static_cast<int64_t>(sizeof(Word));
    for (int64_t i = threadIdx.x; i < words; i += blockDim.x) {
      target[i] = source[i];
    }
  }
}

// --- draw: one block selects and sorts
// --------------------------------------------------------------------------------------- Wanted:
// the k eligible slots with the smallest (key, slot), in that order. Keys are 63 random bits.
// 1. Radix selection from the top digit down. A pass counts the eligible keys whose leading digits
//    equal `prefix`, digit by digit; the first digit at which the count, with the `below` keys
//    under the prefix, reaches k extends the prefix. Keys are recomputed in each pass: a Philox
//    call is cheaper than 8 bytes of memory traffic.
// 2. It stops as soon as all keys up to and including the prefix fit into shared memory: after the
//    first pass in practice, since 5,000 random keys put 10, and 100,000 put 200 into each of 512
//    digits.
// 3. These survivors are collected in any order and sorted, which makes the order irrelevant. A
//    prefix of all 63 bits that still does not fit would take kCapacity - k + 1 equal keys: with
//    Philox a probability below 2^-60000; the bound in step 3 keeps memory safe even then.
constexpr int kKeyBits = 63;

template <int kDigitBits, int kCapacity>
struct DrawShared {
  static_assert(kKeyBits % kDigitBits == 0, "digits must tile the key");
  uint64_t key[kCapacity];
  int32_t slot[kCapacity];
  unsigned count[1 << kDigitBits];  // keys by digit, then their running sum
  uint64_t prefix;                  // leading digits of the k-th smallest key
  unsigned below;                   // eligible keys with smaller leading digits than the prefix
  unsigned within;                  // eligible keys with the prefix
  unsigned survivors;
};

// Ascending bitonic sort of n pairs (key, slot), any n: every exchange puts the larger pair at the
// higher index, so that positions from n up to the next power of two act as infinitely large pairs
// that never move.
template <typename Shared>
__device__ void sort_survivors(Shared& shared, unsigned n) {
  const auto order = [&shared, n](unsigned low, unsigned high) {
    if (high >= n) {
      return;
    }
    const uint64_t low_key = shared.key[low];
    const uint64_t high_key = shared.key[high];
    const int32_t low_slot = shared.slot[low];
    const int32_t high_slot = shared.slot[high];
    if (low_key > high_key || (low_key == high_key && low_slot > high_slot)) {
      shared.key[low] = high_key;
      shared.key[high] = low_key;
      shared.slot[low] = high_slot;
      shared.slot[high] = low_slot;
    }
  };
  for (unsigned run = 2; run / 2 < n; run *= 2) {
    // Two sorted halves of a run: pair the first element with the last, then halve the distance.
    for (unsigned i = threadIdx.x; i / (run / 2) * run < n; i += blockDim.x) {
      const unsigned base = i / (run / 2) * run;
      const unsigned offset = i % (run / 2);
      order(base + offset, base + run - 1 - offset);
    }
    __syncthreads();
    for (unsigned distance = run / 4; distance > 0; distance /= 2) {
      for (unsigned i = threadIdx.x; i / distance * 2 * distance < n; i += blockDim.x) {
        const unsigned low = i / distance * 2 * distance + i % distance;
        order(low, low + distance);
      }
      __syncthreads();
    }
  }
}

// Needs at least 2^kDigitBits threads; params.count <= kCapacity.
template <int kDigitBits, int kCapacity>
__device__ void reservoir_draw_block(const ReservoirDrawParams& params, DrawShared<kDigitBits, kCapacity>& shared) {
  constexpr unsigned kDigits = 1u << kDigitBits;
  const auto seed = static_cast<uint64_t>(params.state[kSeed]);
  const auto counter = static_cast<uint64_t>(params.state[kCounter]);
  const auto wanted = static_cast<unsigned>(params.count);
  const int64_t filled = wanted == 0 ? 0 : params.filled;
  const unsigned thread = threadIdx.x;

  if (thread == 0) {
    shared.prefix = 0;
    shared.below = 0;
    shared.survivors = 0;
  }
  int shift = kKeyBits;  // the prefix is key >> shift
  do {
    shift -= kDigitBits;
    if (thread < kDigits) {
      shared.count[thread] = 0;
    }
    __syncthreads();
    const uint64_t prefix = shared.prefix;
    const unsigned below = shared.below;
    for (int64_t slot = thread; slot < filled; slot += blockDim.x) {
      if (is_eligible(params.filter, params.tasks[slot], params.task)) {
        const uint64_t leading = draw_key(seed, counter, slot) >> shift;
        if (leading >> kDigitBits == prefix) {
          atomicAdd(&shared.count[leading % kDigits], 1u);
        }
      }
    }
    __syncthreads();
    for (unsigned distance = 1; distance < kDigits; distance *= 2) {
      const unsigned before = thread < kDigits && thread >= distance ? shared.count[thread - distance] : 0;
      __syncthreads();
      if (thread < kDigits) {
        shared.count[thread] += before;
      }
      __syncthreads();
    }
    // The first digit whose running sum reaches k, else (fewer eligible than wanted) the last
    // digit, which keeps all.
    if (thread < kDigits) {
      const unsigned before = thread == 0 ? 0 : shared.count[thread - 1];
      const bool reaches = below + shared.count[thread] >= wanted || thread == kDigits - 1;
      const bool reached_before = thread > 0 && below + before >= wanted;
      if (reaches && !reached_before) {
        shared.prefix = prefix << kDigitBits | thread;
        shared.below = below + before;
        shared.within = shared.count[thread] - before;
      }
    }
    __syncthreads();
  } while (shared.below + shared.within > kCapacity && shift > 0);

  for (int64_t slot = thread; slot < filled; slot += blockDim.x) {
    if (is_eligible(params.filter, params.tasks[slot], params.task)) {
      const uint64_t key = draw_key(seed, counter, slot);
      if (key >> shift <= shared.prefix) {
        const unsigned position = atomicAdd(&shared.survivors, 1u);
        if (position < kCapacity) {
          shared.key[position] = key;
          shared.slot[position] = static_cast<int32_t>(slot);
        }
      }
    }
  }
  __syncthreads();
  const unsigned survivors = shared.survivors < kCapacity ? shared.survivors : kCapacity;
  sort_survivors(shared, survivors);
  for (unsigned i = thread; i < wanted; i += blockDim.x) {
    params.slots[i] = i < survivors ? shared.slot[i] : -1;
  }
  if (thread == 0) {
    params.state[kCounter] =
        static_cast<int64_t>(counter + 1);  // every thread has read the state before the first barrier
  }
}

}  // namespace mf::cuda
