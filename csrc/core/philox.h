// Counter-based randomness: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
// 2, 3", SC 2011).
//
// A random word is a pure function of (seed, sequence, item, purpose, lane): no state is advanced,
// so that any thread of any device computes any draw in any order and all agree bit for bit.
// mose_fast/reference/philox.py mirrors this file.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace mf {

// Four random words. Words of one call are independent, as are the words of calls that differ in
// any argument.
struct PhiloxWords {
  uint32_t word[4];
};

// What a draw is for: no two purposes ever share a counter. Saved runs depend on these numbers.
enum class Purpose : uint32_t {
  kReservoir = 1,  // does an item of the stream enter the replay memory, and where
  kDraw = 2,       // which slots are replayed
  kView = 3,       // parameters of an augmented view
  kShift = 4,      // offsets and mirroring of a padded crop
  kReview = 5,     // order in which the memory is gone through at the end of a task
  kRetrieval = 6,  // which slots are candidates for replay by value
  kPolicy = 7,     // what a memory policy other than the reservoir decides
  kPair = 10,      // a positive and a negative for each anchor
  kBalance = 11,   // which samples leave a class-balanced memory
  kMix = 12,       // box, share and partners of CutMix
  kFit = 13,       // order in which the memory is gone through before an evaluation
  kPiece = 14,     // the piece of the features that similarities are mixed with
};

// High 64 bits of the 128-bit product.
MF_HD inline uint64_t multiply_high(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// The bijection itself: ten rounds on a counter of four words under a key of two.
MF_HD inline PhiloxWords philox4x32_10(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u;
  constexpr uint32_t kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u;  // golden ratio
  constexpr uint32_t kWeyl1 = 0xBB67AE85u;  // sqrt(3) - 1
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kMultiplier0) * counter.word[0];
    const uint64_t product1 = static_cast<uint64_t>(kMultiplier1) * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

// The package's layout of key and counter. `lane` is below 2^24; more than four words a purpose
// come from further lanes.
MF_HD inline PhiloxWords philox(uint64_t seed, uint64_t sequence, uint32_t item, Purpose purpose, uint32_t lane) {
  const PhiloxWords counter{{static_cast<uint32_t>(sequence), static_cast<uint32_t>(sequence >> 32), item,
                             static_cast<uint32_t>(purpose) | lane << 8}};
  return philox4x32_10(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

// Uniform integer in [0, n) from 64 random bits. Multiply-high instead of a modulo: no division, a
// bias below n / 2^64.
MF_HD inline uint64_t uniform_below(uint32_t high, uint32_t low, uint64_t n) {
  return multiply_high(static_cast<uint64_t>(high) << 32 | low, n);
}

// Uniform integer in [0, n) from 32 random bits, for small n: a bias below n / 2^32.
MF_HD inline uint32_t uniform_below32(uint32_t word, uint32_t n) {
  return static_cast<uint32_t>(static_cast<uint64_t>(word) * n >> 32);
}

}  // namespace mf
