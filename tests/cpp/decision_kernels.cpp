// The kernels of csrc/cuda/{reservoir,augment_parameters}.cuh, run on the CPU, against csrc/cpu: equal bit for bit in four schedules.
//
//   decision_kernels                           all comparisons at the launch sizes of the .cu files and at small ones
//   decision_kernels --small                   only the small ones; prints the source line of every barrier that was reached
//   decision_kernels --small --without LINE    alike, but the barrier in that line does nothing
//
// Exit status 0: all equal; 1: a difference or a fault, described on stderr.
// clang-format off
#include "cuda_on_cpu.h"  // before the kernels: it stands in for what nvcc declares by itself
// clang-format on
#include "cuda/augment_parameters.cuh"
#include "cuda/reservoir.cuh"

namespace {

struct NoShared {};

template <typename T>
std::vector<T> poisoned(size_t count) {
  std::vector<T> values(count);
  if (count > 0) {
    std::memset(values.data(), shim::kPoison, count * sizeof(T));
  }
  return values;
}

int comparisons = 0;

void expect(bool equal, const char* what, long long a, long long b, long long c, shim::Schedule schedule) {
  ++comparisons;
  if (!equal) {
    std::fprintf(stderr, "%s differs from the CPU's (case %lld, %lld, %lld; schedule %d)\n", what, a, b, c, static_cast<int>(schedule));
    std::exit(1);
  }
}

struct Memory {
  std::vector<uint4> words;  // images, aligned to 16
  std::vector<int64_t> labels, tasks, indices, state;

  uint8_t* images() {
    return reinterpret_cast<uint8_t*>(words.data());
  }
  bool operator==(const Memory& other) const {
    return std::memcmp(words.data(), other.words.data(), words.size() * sizeof(uint4)) == 0 && labels == other.labels &&
           tasks == other.tasks && indices == other.indices && state == other.state;
  }
};

Memory make_memory(int64_t capacity, int64_t row_bytes, int64_t seed, int64_t seen) {
  const auto slots = static_cast<size_t>(capacity);
  Memory memory{poisoned<uint4>(static_cast<size_t>(capacity * row_bytes + 31) / 16),
                poisoned<int64_t>(slots),
                poisoned<int64_t>(slots),
                poisoned<int64_t>(slots),
                {seed, 5, seen}};
  return memory;
}

template <typename Word>
void check_insert(int64_t capacity, int64_t count, int64_t seen, int64_t row_bytes, int64_t seed, unsigned threads) {
  std::mt19937_64 random(static_cast<uint64_t>(seed));
  std::vector<uint4> x(static_cast<size_t>(count * row_bytes + 31) / 16);
  for (uint4& word : x) {
    word = {unsigned(random()), unsigned(random()), unsigned(random()), unsigned(random())};
  }
  std::vector<int64_t> y(static_cast<size_t>(count)), index(static_cast<size_t>(count));
  std::generate(y.begin(), y.end(), [&] { return static_cast<int64_t>(random() % 100); });
  std::iota(index.begin(), index.end(), seen);
  const auto params = [&](Memory& memory, std::vector<int64_t>& claims, std::vector<int64_t>& slots) {
    return mf::ReservoirInsertParams{memory.images(),
                                     memory.labels.data(),
                                     memory.tasks.data(),
                                     memory.indices.data(),
                                     memory.state.data(),
                                     reinterpret_cast<const uint8_t*>(x.data()),
                                     y.data(),
                                     index.data(),
                                     3,
                                     claims.data(),
                                     slots.data(),
                                     count,
                                     capacity,
                                     row_bytes};
  };
  Memory wanted = make_memory(capacity, row_bytes, seed, seen);
  auto wanted_slots = poisoned<int64_t>(static_cast<size_t>(count));
  auto no_claims = std::vector<int64_t>();
  mf::cpu::reservoir_insert(params(wanted, no_claims, wanted_slots));
  for (const shim::Schedule schedule : shim::kSchedules) {
    Memory memory = make_memory(capacity, row_bytes, seed, seen);
    auto claims = poisoned<int64_t>(static_cast<size_t>(count));
    auto slots = poisoned<int64_t>(static_cast<size_t>(count));
    const auto p = params(memory, claims, slots);
    const auto blocks = static_cast<unsigned>((count + threads - 1) / threads);
    shim::launch<NoShared>(blocks, threads, schedule, [&](NoShared&) { mf::cuda::reservoir_claim_block(p); });
    shim::launch<NoShared>(static_cast<unsigned>(count), threads, schedule, [&](NoShared&) { mf::cuda::reservoir_copy_block<Word>(p); });
    expect(slots == wanted_slots, "insert's slots", capacity, count, seen, schedule);
    expect(memory == wanted, "the memory after insert", capacity, count, seen, schedule);
  }
}

template <int kDigitBits, int kCapacity>
void check_draw(int64_t capacity, int64_t k, int64_t seen, mf::SlotFilter filter, int64_t seed, unsigned threads) {
  std::vector<int64_t> tasks(static_cast<size_t>(capacity));
  for (size_t slot = 0; slot < tasks.size(); ++slot) {
    tasks[slot] = static_cast<int64_t>(slot * 7 % 3);
  }
  const auto count = static_cast<size_t>(std::min(k, capacity));
  std::vector<int64_t> wanted_state{seed, 11, seen};
  auto wanted = poisoned<int64_t>(count);
  mf::cpu::reservoir_draw({tasks.data(), wanted_state.data(), wanted.data(), static_cast<int64_t>(count), capacity, 1, filter});
  for (const shim::Schedule schedule : shim::kSchedules) {
    std::vector<int64_t> state{seed, 11, seen};
    auto slots = poisoned<int64_t>(count);
    const mf::ReservoirDrawParams params{tasks.data(), state.data(), slots.data(), static_cast<int64_t>(count), capacity, 1, filter};
    using Shared = mf::cuda::DrawShared<kDigitBits, kCapacity>;
    shim::launch<Shared>(1, threads, schedule, [&](Shared& shared) { mf::cuda::reservoir_draw_block(params, shared); });
    expect(slots == wanted, "draw's slots", capacity, k, seen, schedule);
    expect(state == wanted_state, "the state after draw", capacity, k, seen, schedule);
  }
}

void check_augment_parameters(int64_t count, int32_t height, int32_t width, uint64_t seed) {
  const mf::AugmentRecipe recipe{0.5, 0.2, 0.2, 1.0, 0.8, 0.4, 0.4, 0.4, 0.1};
  auto wanted_codes = poisoned<int32_t>(static_cast<size_t>(count) * 6);
  auto wanted_factors = poisoned<float>(static_cast<size_t>(count) * 4);
  mf::cpu::augment_parameters({recipe, seed, 9, count, height, width, wanted_codes.data(), wanted_factors.data()}, 1);
  for (const shim::Schedule schedule : shim::kSchedules) {
    auto codes = poisoned<int32_t>(wanted_codes.size());
    auto factors = poisoned<float>(wanted_factors.size());
    const mf::AugmentParametersParams params{recipe, seed, 9, count, height, width, codes.data(), factors.data()};
    const auto blocks = static_cast<unsigned>((count + 31) / 32);
    shim::launch<NoShared>(blocks, 32, schedule, [&](NoShared&) { mf::cuda::augment_parameters_block(params); });
    expect(codes == wanted_codes, "codes", count, height, width, schedule);
    expect(std::memcmp(factors.data(), wanted_factors.data(), factors.size() * sizeof(float)) == 0, "factors", count, height, width,
           schedule);
  }
}

constexpr mf::SlotFilter kFilters[] = {mf::SlotFilter::kAll, mf::SlotFilter::kOnly, mf::SlotFilter::kOthers};

// Few threads, digits of three bits and room for few survivors: every loop takes several turns.
void check_small() {
  for (int64_t seed = 0; seed < 4; ++seed) {
    check_insert<uint4>(40, 10, 35, 48, seed, 16);
    check_insert<uint4>(7, 20, 0, 48, seed, 16);
    check_insert<uint8_t>(7, 20, 3, 27, seed, 16);
    check_insert<uint8_t>(1, 5, 0, 27, seed, 16);
    check_insert<uint8_t>(50, 33, 400, 75, seed, 16);
    for (const mf::SlotFilter filter : kFilters) {
      check_draw<3, 48>(300, 40, 200, filter, seed, 32);
      check_draw<3, 48>(300, 48, 1000, filter, seed, 32);
      check_draw<3, 48>(30, 40, 1000, filter, seed, 32);
      check_draw<9, 64>(1000, 40, 900, filter, seed, 512);
    }
  }
}

void check_all() {
  check_small();
  check_insert<uint4>(500, 10, 100, 3072, 1, 192);
  check_insert<uint4>(50, 64, 20, 3072, 2, 192);
  for (const mf::SlotFilter filter : kFilters) {
    check_draw<9, 3072>(5000, 86, 20000, filter, 3, 1024);
    check_draw<9, 3072>(64, 86, 40, filter, 4, 1024);
  }
  check_draw<9, 3072>(5000, 0, 20000, mf::SlotFilter::kAll, 5, 1024);
  check_draw<9, 3072>(5000, 86, 0, mf::SlotFilter::kAll, 6, 1024);
  check_draw<9, 3072>(1, 1, 1, mf::SlotFilter::kAll, 7, 1024);
  check_draw<9, 3072>(6000, 2048, 20000, mf::SlotFilter::kAll, 8, 1024);
  check_augment_parameters(384, 32, 32, 1);
  check_augment_parameters(33, 5, 64, 2);
}

}  // namespace

int main(int argc, char** argv) {
  bool small = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--small") == 0) {
      small = true;
    } else if (std::strcmp(argv[i], "--without") == 0 && i + 1 < argc) {
      shim::missing_barrier = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "argument is '%s'; wanted --small or --without LINE\n", argv[i]);
      return 2;
    }
  }
  if (small) {
    check_small();
    for (const int line : shim::barriers_seen) {
      std::printf("barrier %d\n", line);
    }
  } else {
    check_all();
  }
  std::printf("%d comparisons equal\n", comparisons);
  return 0;
}
