#include <algorithm>
#include <numeric>
#include <random>

#include "api/reservoir.h"
#include "kernel_case.h"

#if defined(MF_KERNELS_ON_CPU)
#include "cuda/reservoir.cuh"
#endif

namespace {

using kernel_case::Context;
using Rows = std::vector<uint8_t>;
using Numbers = std::vector<int64_t>;

struct Memory {
  Rows images;
  Numbers labels, tasks, indices, state;
};

Memory make_memory(int64_t capacity, int64_t row_bytes, int64_t seed, int64_t seen) {
  const auto slots = static_cast<size_t>(capacity);
  return {Rows(static_cast<size_t>(capacity * row_bytes), 0x5a),
          Numbers(slots, -7),
          Numbers(slots, -7),
          Numbers(slots, -7),
          {seed, 5, seen}};
}

template <typename T>
std::vector<T> random_numbers(size_t count, uint64_t below, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<T> values(count);
  std::generate(values.begin(), values.end(), [&] { return static_cast<T>(random() % below); });
  return values;
}

// `offset` bytes of every row array come before the first row: 1 makes the rows unaligned.
template <typename Insert>
void compare_insert(Context& context, int64_t capacity, int64_t count, int64_t seen, int64_t row_bytes, size_t offset,
                    Insert insert) {
  const auto items = static_cast<size_t>(count);
  const auto x = random_numbers<uint8_t>(offset + items * static_cast<size_t>(row_bytes), 256, 1);
  const auto y = random_numbers<int64_t>(items, 100, 2);
  Numbers index(items);
  std::iota(index.begin(), index.end(), seen);
  const auto params = [&](Rows::value_type* images, int64_t* labels, int64_t* tasks, int64_t* indices, int64_t* state,
                          const uint8_t* rows, const int64_t* y_in, const int64_t* index_in, int64_t* claims,
                          int64_t* slots) {
    return mf::ReservoirInsertParams{images,   labels, tasks,  indices, state, rows + offset, y_in,
                                     index_in, 3,      claims, slots,   count, capacity,      row_bytes};
  };
  Memory wanted = make_memory(capacity, row_bytes, seen + 17, seen);
  Memory memory = wanted;
  Numbers slots(items), claims(items);
  mf::cpu::reservoir_insert(params(wanted.images.data(), wanted.labels.data(), wanted.tasks.data(),
                                   wanted.indices.data(), wanted.state.data(), x.data(), y.data(), index.data(),
                                   claims.data(), slots.data()));
  auto* images = context.upload(memory.images);
  auto* labels = context.upload(memory.labels);
  auto* tasks = context.upload(memory.tasks);
  auto* indices = context.upload(memory.indices);
  auto* state = context.upload(memory.state);
  auto* out = context.poisoned<int64_t>(items);
  insert(params(images, labels, tasks, indices, state, context.upload(x), context.upload(y), context.upload(index),
                context.poisoned<int64_t>(items), out));
  context.expect_equal("slots", out, slots);
  context.expect_equal("images", images, wanted.images);
  context.expect_equal("labels", labels, wanted.labels);
  context.expect_equal("tasks", tasks, wanted.tasks);
  context.expect_equal("indices", indices, wanted.indices);
  context.expect_equal("state", state, wanted.state);
}

void compare_insert(Context& context, int64_t capacity, int64_t count, int64_t seen, int64_t row_bytes,
                    size_t offset = 0) {
  compare_insert(context, capacity, count, seen, row_bytes, offset, [&](const mf::ReservoirInsertParams& params) {
    mf::cuda::reservoir_insert(params, context.stream());
  });
}

template <typename Draw>
void compare_draw(Context& context, int64_t filled, int64_t k, mf::SlotFilter filter, Draw draw) {
  Numbers tasks(static_cast<size_t>(filled));
  for (size_t slot = 0; slot < tasks.size(); ++slot) {
    tasks[slot] = static_cast<int64_t>(slot * 7 % 3);
  }
  const int64_t count = std::min(k, filled);
  const Numbers state{filled + k, 11, 20000};
  Numbers wanted_state = state;
  Numbers wanted(static_cast<size_t>(count));
  mf::cpu::reservoir_draw({tasks.data(), wanted_state.data(), wanted.data(), count, filled, 1, filter});
  auto* device_state = context.upload(state);
  auto* slots = context.poisoned<int64_t>(wanted.size());
  draw(mf::ReservoirDrawParams{context.upload(tasks), device_state, slots, count, filled, 1, filter});
  context.expect_equal("slots", slots, wanted);
  context.expect_equal("state", device_state, wanted_state);
}

void compare_draw(Context& context, int64_t filled, int64_t k, mf::SlotFilter filter) {
  compare_draw(context, filled, k, filter,
               [&](const mf::ReservoirDrawParams& params) { mf::cuda::reservoir_draw(params, context.stream()); });
}

constexpr mf::SlotFilter kFilters[] = {mf::SlotFilter::kAll, mf::SlotFilter::kOnly, mf::SlotFilter::kOthers};

}  // namespace

KERNEL_CASE(reservoir_insert) {
  compare_insert(context, 500, 10, 100, 3072);
  compare_insert(context, 500, 10, 2000, 3072);
  compare_insert(context, 50, 64, 20, 3072);
  compare_insert(context, 7, 70, 3, 48);
  compare_insert(context, 1, 5, 0, 48);
}

KERNEL_CASE(reservoir_insert_of_unaligned_rows) {
  compare_insert(context, 7, 20, 3, 27);
  compare_insert(context, 50, 33, 400, 75);
  compare_insert(context, 9, 6, 4, 48, 1);
}

COMPILED_CASE(reservoir_insert_of_many) {
  compare_insert(context, 400, 1000, 300, 48);
  compare_insert(context, 400, 1000, 300, 27);
}

KERNEL_CASE(reservoir_draw_from_5000) {
  compare_draw(context, 5000, 86, mf::SlotFilter::kAll);
  compare_draw(context, 5000, 86, mf::SlotFilter::kOnly);
  compare_draw(context, 5000, 86, mf::SlotFilter::kOthers);
}

KERNEL_CASE(reservoir_draw_of_few) {
  compare_draw(context, 40, 86, mf::SlotFilter::kOthers);
  compare_draw(context, 100, 0, mf::SlotFilter::kAll);
  compare_draw(context, 0, 86, mf::SlotFilter::kAll);
  compare_draw(context, 1, 1, mf::SlotFilter::kAll);
}

KERNEL_CASE(reservoir_draw_of_many) { compare_draw(context, 6000, mf::kMaxCudaDraw, mf::SlotFilter::kAll); }

#if defined(MF_KERNELS_ON_CPU)

// Few threads, digits of three bits and room for few survivors: every loop of the bodies takes
// several turns.
template <int kDigitBits, int kCapacity>
static void draw_small(Context& context, int64_t filled, int64_t k, mf::SlotFilter filter) {
  constexpr unsigned kThreads = kDigitBits == 3 ? 32 : 512;
  using Shared = mf::cuda::DrawShared<kDigitBits, kCapacity>;
  compare_draw(context, filled, k, filter, [](const mf::ReservoirDrawParams& params) {
    shim::launch(1, kThreads, sizeof(Shared), [&] {
      MF_DYNAMIC_SHARED(shared);
      mf::cuda::reservoir_draw_block(params, *reinterpret_cast<Shared*>(shared));
    });
  });
}

KERNEL_CASE(small_reservoir_draw) {
  for (const mf::SlotFilter filter : kFilters) {
    draw_small<3, 48>(context, 200, 40, filter);
    draw_small<3, 48>(context, 300, 48, filter);
    draw_small<3, 48>(context, 301, 47, filter);
    draw_small<3, 48>(context, 30, 40, filter);
    draw_small<9, 64>(context, 900, 40, filter);
  }
}

KERNEL_CASE(small_reservoir_insert) {
  for (const int64_t seen : {0, 3, 35, 400}) {
    compare_insert(context, 40, 21, seen, 48, 0, [](const mf::ReservoirInsertParams& params) {
      shim::launch(2, 16, 0, [&] { mf::cuda::reservoir_claim_block(params); });
      shim::launch(21, 16, 0, [&] { mf::cuda::reservoir_copy_block<uint4>(params); });
    });
  }
}

#endif
