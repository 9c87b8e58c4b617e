// Runs the bodies of CUDA kernels (csrc/cuda/*.cuh) on the CPU, to find indexing and synchronisation faults without a card.
//
// One fiber stands for one CUDA thread. A fiber runs until it reaches a barrier or its end, and the schedule says in which order
// the fibers (and the blocks) take their turns. Code that is synchronised correctly gives the same result under every schedule;
// a missing barrier lets one schedule see what another does not. Shared memory is a heap block of exact size, filled with a
// poison, so that AddressSanitizer sees its bounds and reading before writing gives nonsense. A barrier that not all threads
// reach ends the program. Include this before a .cuh file; one-dimensional grids only.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __device__

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace shim {

struct Index {
  unsigned x;
};

enum class Schedule { kForward, kReverse, kRandom, kOtherRandom };
inline constexpr Schedule kSchedules[] = {Schedule::kForward, Schedule::kReverse, Schedule::kRandom, Schedule::kOtherRandom};
inline constexpr int kPoison = 0xA5;

struct Fiber {
  static constexpr size_t kStackBytes = 128 << 10;
  ucontext_t context{};
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* sanitizer_stack = nullptr;
  bool done = false;
  int barrier = 0;  // source line of the barrier it waits at
  int vote = 0;
};

// The block that is running; there is only ever one.
inline std::vector<Fiber> fibers;
inline Fiber* current = nullptr;
inline ucontext_t scheduler;
inline void* scheduler_sanitizer_stack = nullptr;
inline const void* scheduler_stack = nullptr;
inline size_t scheduler_stack_bytes = 0;
inline std::function<void()> body;
inline unsigned thread_index = 0, block_index = 0, block_size = 0;
inline int vote_result = 0;

inline std::set<int> barriers_seen;  // source lines
inline int missing_barrier = 0;      // source line of the barrier that a test takes away

inline void leave_fiber() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(current->done ? nullptr : &current->sanitizer_stack, scheduler_stack, scheduler_stack_bytes);
#endif
  Fiber* self = current;
  swapcontext(&self->context, &scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(self->sanitizer_stack, nullptr, nullptr);
#endif
}

inline void fiber_entry() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  body();
  current->done = true;
  leave_fiber();
}

inline void resume(unsigned thread) {
  current = &fibers[thread];
  thread_index = thread;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_sanitizer_stack, current->stack.get(), Fiber::kStackBytes);
#endif
  swapcontext(&scheduler, &current->context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_sanitizer_stack, nullptr, nullptr);
#endif
}

inline int barrier_or(int line, int vote) {
  barriers_seen.insert(line);
  if (line == missing_barrier) {
    return vote;
  }
  current->barrier = line;
  current->vote = vote;
  leave_fiber();
  return vote_result;
}

template <typename T>
void arrange(std::vector<T>& order, Schedule schedule, std::mt19937& random) {
  if (schedule == Schedule::kReverse) {
    std::sort(order.begin(), order.end(), std::greater<>());
  } else if (schedule != Schedule::kForward) {
    std::shuffle(order.begin(), order.end(), random);
  }
}

inline void run_block(unsigned threads, Schedule schedule, std::mt19937& random) {
  fibers.resize(threads);
  for (Fiber& fiber : fibers) {
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = Fiber::kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_entry, 0);
  }
  std::vector<unsigned> order(threads);
  std::iota(order.begin(), order.end(), 0u);
  while (true) {
    arrange(order, schedule, random);
    for (const unsigned thread : order) {
      resume(thread);
    }
    // Every fiber has now ended or waits; all must have done the same.
    const auto finished = std::count_if(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return fiber.done; });
    if (finished == static_cast<std::ptrdiff_t>(threads)) {
      return;
    }
    vote_result = 0;
    for (const Fiber& fiber : fibers) {
      if (fiber.done || fiber.barrier != fibers[0].barrier) {
        std::fprintf(stderr, "block %u: not all %u threads reached the barrier in line %d\n", block_index, threads, fibers[0].barrier);
        std::exit(1);
      }
      vote_result |= fiber.vote;
    }
  }
}

// Runs `kernel(shared)` for every thread; each block gets its own poisoned `Shared`.
template <typename Shared, typename Kernel>
void launch(unsigned blocks, unsigned threads, Schedule schedule, Kernel kernel) {
  std::mt19937 random(static_cast<unsigned>(schedule));
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  arrange(order, schedule, random);
  block_size = threads;
  for (const unsigned block : order) {
    block_index = block;
    void* shared = std::malloc(sizeof(Shared));
    std::memset(shared, kPoison, sizeof(Shared));
    body = [&] { kernel(*static_cast<Shared*>(shared)); };
    run_block(threads, schedule, random);
    std::free(shared);
  }
}

inline unsigned atomic_add(unsigned* target, unsigned value) {
  const unsigned before = *target;  // fibers do not interrupt one another
  *target += value;
  return before;
}

}  // namespace shim

#define threadIdx (shim::Index{shim::thread_index})
#define blockIdx (shim::Index{shim::block_index})
#define blockDim (shim::Index{shim::block_size})
#define __syncthreads() static_cast<void>(shim::barrier_or(__LINE__, 0))
#define __syncthreads_or(vote) shim::barrier_or(__LINE__, vote)
#define atomicAdd(target, value) shim::atomic_add(target, value)
