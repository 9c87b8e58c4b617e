// Runs CUDA kernels on the CPU: for tests/kernels, which looks for indexing and synchronisation faults,
// and for the emulated GPU (MOSE_FAST_BACKEND=emulated, docs/building.md), on which the whole
// package runs the kernels.
//
// One fiber stands for one CUDA thread. A fiber runs until it reaches a barrier or a warp
// collective or its end, and the schedule says in which order the fibers (and the blocks) take
// their turns. Code that is synchronised correctly gives the same result under every schedule; a
// missing barrier lets one schedule see what another does not, and ThreadSanitizer, which knows the
// fibers as threads ordered by barriers and launches alone, reports the two accesses. Shared memory
// is a heap block of exact size, filled with a poison, so that AddressSanitizer sees its bounds and
// reading before writing gives nonsense. A barrier that not all threads reach, or a warp collective
// that not all lanes reach, ends the program.
//
// Included before every .cu file; those compile as they are if they launch by MF_LAUNCH and take
// shared memory by MF_DYNAMIC_SHARED (csrc/cuda/launch.cuh). Bodies of .cuh files can be launched
// with other shapes by shim::launch. Types come from the toolkit's own headers; only full warps and
// the full mask are supported. How all this works together: tests/kernels/README.md.
#pragma once

#include <cuda_runtime.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "core/check.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SHIM_ADDRESS_SANITIZER 1
#endif
#if __has_feature(thread_sanitizer)
#define SHIM_THREAD_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define SHIM_ADDRESS_SANITIZER 1
#endif

#if defined(SHIM_ADDRESS_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SHIM_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif

#if defined(__x86_64__)
// Saves on the stack what a function must keep, leaves the stack's address in *from, and goes on
// where `to` was left. swapcontext also saves the mask of signals, by a system call: some twenty
// times as slow.
extern "C" void mf_shim_switch(void** from, void* to);
asm(R"(
  .pushsection .text
  .weak mf_shim_switch
  .hidden mf_shim_switch
  .type mf_shim_switch, @function
mf_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size mf_shim_switch, .-mf_shim_switch
  .popsection
)");
#endif

namespace shim {

enum class Schedule { kForward, kReverse, kRandom, kOtherRandom };
inline constexpr Schedule kSchedules[] = {Schedule::kForward, Schedule::kReverse, Schedule::kRandom,
                                          Schedule::kOtherRandom};
inline Schedule schedule = Schedule::kForward;  // of the launches to come
inline int poison = 0xff;                       // byte of fresh shared memory: floats are NaN, integers -1

enum class Wait { kNothing, kBlock, kWarp };
inline constexpr unsigned kWarpSize = 32;
inline constexpr unsigned kMaxThreads = 1024;

// Fibers and the scheduler share their state without what ThreadSanitizer calls synchronisation, so
// that every function a fiber enters is kept from its sight.
#if defined(SHIM_THREAD_SANITIZER)
#define SHIM_RUNTIME __attribute__((no_sanitize("thread"), noinline))
#else
#define SHIM_RUNTIME
#endif

// A place where execution can go on.
class Context {
 public:
#if defined(__x86_64__)
  // Puts `entry`, which never returns, on the stack that ends at `top`, a multiple of 16.
  SHIM_RUNTIME void start(char* top, size_t /*bytes*/, void (*entry)()) {
    auto** words = reinterpret_cast<void**>(top);
    *--words = nullptr;  // the address that entry would return to
    *--words = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) {
      *--words = nullptr;
    }
    stack_ = words;
  }
  SHIM_RUNTIME static void jump(Context& from, Context& to) { mf_shim_switch(&from.stack_, to.stack_); }

 private:
  void* stack_ = nullptr;
#else
  SHIM_RUNTIME void start(char* top, size_t bytes, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = top - bytes;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  SHIM_RUNTIME static void jump(Context& from, Context& to) { swapcontext(&from.context_, &to.context_); }

 private:
  ucontext_t context_{};
#endif
};

struct Fiber {
  // No multiple of a page, so that the tops of the stacks, where the work is, do not all lie in the
  // same sets of the caches.
#if defined(SHIM_ADDRESS_SANITIZER) || defined(SHIM_THREAD_SANITIZER)
  static constexpr size_t kStackBytes = (128 << 10) + 320;
#else
  static constexpr size_t kStackBytes = (32 << 10) + 320;
#endif
  Context context;
  void* address_sanitizer = nullptr;
  void* thread_sanitizer = nullptr;
  bool done = false;
  Wait waits = Wait::kNothing;
  const char* site = nullptr;  // file:line of the barrier it waits at
  int vote = 0;
  unsigned barriers = 0, collectives = 0;  // passed so far
  uint64_t offered[2] = {};                // to the other lanes of the warp; two that take turns
};

// The block that is running; there is only ever one.
inline std::mutex launching;
inline Fiber* fibers = nullptr;
inline char* stacks = nullptr;  // kStackBytes for each fiber
inline Fiber* current = nullptr;
inline Context scheduler;
inline void* scheduler_address_sanitizer = nullptr;
inline void* scheduler_thread_sanitizer = nullptr;
inline const void* scheduler_stack = nullptr;
inline size_t scheduler_stack_bytes = 0;
inline std::function<void()> body;
inline uint3 thread_index, block_index;
inline dim3 block_size, grid_size;
inline int vote_result = 0;
inline unsigned char* shared_memory = nullptr;

// What ThreadSanitizer knows of order: everything before a launch comes before its threads; a
// barrier orders what its threads did before it and will do after it; everything in a launch comes
// before what follows the launch. Two tags take turns, because a fast thread may reach the next
// barrier before a slow one has left this one. ThreadSanitizer keeps the history of some 250
// threads: with larger blocks it may forget the first of two accesses.
inline uint64_t launch_tag, done_tag, block_tags[2], warp_tags[kMaxThreads / kWarpSize][2];

// Memory that the kernel before wrote: each block of the next launch finds poison there until its
// threads have waited for that kernel (cuda/launch.cuh).
struct Hidden {
  unsigned char* memory;
  std::vector<unsigned char> content;
};
inline std::vector<Hidden> hidden;
inline bool hiding = false;

inline void hide(void* memory, size_t bytes) {
  auto* first = static_cast<unsigned char*>(memory);
  hidden.push_back({first, {first, first + bytes}});
}

inline const char* sites_seen[256];  // of __syncthreads
inline int sites = 0;
inline const char* missing_site = "";  // of the barrier that a test takes away

SHIM_RUNTIME inline void release([[maybe_unused]] uint64_t* tag) {
#if defined(SHIM_THREAD_SANITIZER)
  __tsan_release(tag);
#endif
}

SHIM_RUNTIME inline void acquire([[maybe_unused]] uint64_t* tag) {
#if defined(SHIM_THREAD_SANITIZER)
  __tsan_acquire(tag);
#endif
}

SHIM_RUNTIME inline void leave_fiber() {
  Fiber* self = current;
#if defined(SHIM_THREAD_SANITIZER)
  __tsan_switch_to_fiber(scheduler_thread_sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(SHIM_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(self->done ? nullptr : &self->address_sanitizer, scheduler_stack,
                                 scheduler_stack_bytes);
#endif
  Context::jump(self->context, scheduler);
#if defined(SHIM_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(self->address_sanitizer, nullptr, nullptr);
#endif
}

SHIM_RUNTIME inline void end_fiber() {
  current->done = true;
  leave_fiber();
}

inline void fiber_entry() {
#if defined(SHIM_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  acquire(&launch_tag);
  body();
  release(&done_tag);
  end_fiber();
}

SHIM_RUNTIME inline void resume(unsigned thread) {
  current = &fibers[thread];
  thread_index = {thread % block_size.x, thread / block_size.x % block_size.y, thread / (block_size.x * block_size.y)};
#if defined(SHIM_THREAD_SANITIZER)
  __tsan_switch_to_fiber(current->thread_sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(SHIM_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(&scheduler_address_sanitizer, stacks + thread * Fiber::kStackBytes,
                                 Fiber::kStackBytes);
#endif
  Context::jump(scheduler, current->context);
#if defined(SHIM_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(scheduler_address_sanitizer, nullptr, nullptr);
#endif
}

SHIM_RUNTIME inline unsigned thread_number() { return static_cast<unsigned>(current - fibers); }

SHIM_RUNTIME inline void remember_site(const char* site) {
  for (int i = 0; i < sites; ++i) {
    if (sites_seen[i] == site) {
      return;
    }
  }
  if (sites < 256) {
    sites_seen[sites++] = site;
  }
}

SHIM_RUNTIME inline int block_barrier(const char* site, int vote) {
  remember_site(site);
  if (std::strcmp(site, missing_site) == 0) {
    return vote;
  }
  Fiber& self = *current;
  uint64_t* tag = &block_tags[self.barriers++ % 2];
  self.waits = Wait::kBlock;
  self.site = site;
  self.vote = vote;
  release(tag);
  leave_fiber();
  acquire(tag);
  return vote_result;
}

// Hides or shows; byte by byte, since ThreadSanitizer would see memcpy.
SHIM_RUNTIME inline void set_hiding(bool on) {
  if (on == hiding) {
    return;
  }
  hiding = on;
  for (const Hidden& one : hidden) {
    volatile unsigned char* to = one.memory;
    for (size_t i = 0; i < one.content.size(); ++i) {
      to[i] = on ? static_cast<unsigned char>(poison) : one.content[i];
    }
  }
}

// Not a barrier: it orders no two threads.
SHIM_RUNTIME inline void wait_for_previous() {
  if (hiding) {
    current->waits = Wait::kBlock;
    current->site = "wait_for_previous";
    current->vote = 0;
    leave_fiber();
    set_hiding(false);
  }
}

SHIM_RUNTIME inline void warp_barrier(const char* site) {
  Fiber& self = *current;
  uint64_t* tag = &warp_tags[thread_number() / kWarpSize][self.collectives++ % 2];
  self.waits = Wait::kWarp;
  self.site = site;
  release(tag);
  leave_fiber();
  acquire(tag);
}

// The value that `lane` of this warp offers; a lane outside of the warp gives the own value, as on
// the device. One barrier is enough: before a lane writes to a place again it has passed the barrier
// of the next exchange, which the other lanes reach only after they have read that place.
template <typename T>
SHIM_RUNTIME inline T exchange(const char* site, T value, unsigned lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves up to 8 bytes");
  const unsigned first = thread_number() / kWarpSize * kWarpSize;
  const unsigned turn = current->collectives % 2;
  __builtin_memcpy(&current->offered[turn], &value, sizeof(T));
  warp_barrier(site);
  T result = value;
  if (lane < kWarpSize) {
    __builtin_memcpy(&result, &fibers[first + lane].offered[turn], sizeof(T));
  }
  return result;
}

SHIM_RUNTIME inline unsigned ballot(const char* site, bool predicate) {
  const unsigned first = thread_number() / kWarpSize * kWarpSize;
  const unsigned turn = current->collectives % 2;
  current->offered[turn] = predicate ? 1 : 0;
  warp_barrier(site);
  unsigned mask = 0;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    mask |= static_cast<unsigned>(fibers[first + lane].offered[turn]) << lane;
  }
  return mask;
}

SHIM_RUNTIME inline unsigned lane_number() { return thread_number() % kWarpSize; }

// The first access of this launch that a GPU would have refused: its address, and of how many bytes it was.
inline const void* misaligned = nullptr;
inline size_t misaligned_bytes = 0;

SHIM_RUNTIME inline void expect_aligned(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0 && misaligned == nullptr) {
    misaligned = address;
    misaligned_bytes = bytes;
  }
}

template <typename T>
void arrange(std::vector<T>& order, std::mt19937& random) {
  if (schedule == Schedule::kReverse) {
    std::sort(order.begin(), order.end(), std::greater<>());
  } else if (schedule != Schedule::kForward) {
    std::shuffle(order.begin(), order.end(), random);
  }
}

// Lets the threads [first, last) go on if all of them wait in the way `wait`, at one site.
inline bool let_go(unsigned first, unsigned last, Wait wait) {
  int votes = 0;
  for (unsigned thread = first; thread < last; ++thread) {
    const Fiber& fiber = fibers[thread];
    if (fiber.done || fiber.waits != wait || fiber.site != fibers[first].site) {
      return false;
    }
    votes |= fiber.vote;
  }
  vote_result = wait == Wait::kBlock ? votes : vote_result;
  for (unsigned thread = first; thread < last; ++thread) {
    fibers[thread].waits = Wait::kNothing;
  }
  return true;
}

inline void map_stacks(unsigned threads, int flags) {
  void* memory = mmap(stacks, threads * Fiber::kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap of the fibers' stacks");
    std::exit(1);
  }
  stacks = static_cast<char*>(memory);
#if !defined(SHIM_THREAD_SANITIZER)  // which has fresh ones for every block, most of them touched in a page or two
  madvise(stacks, kMaxThreads * Fiber::kStackBytes, MADV_HUGEPAGE);
#endif
}

// Ends the program if a thread wrote to the lowest words of its stack, which are zero as long as
// nothing reaches them.
inline void check_stacks(unsigned threads) {
  for (unsigned thread = 0; thread < threads; ++thread) {
    const auto* lowest = reinterpret_cast<const uint64_t*>(stacks + thread * Fiber::kStackBytes);
    if (std::any_of(lowest, lowest + 8, [](uint64_t word) { return word != 0; })) {
      std::fprintf(stderr, "a thread needs more stack than the %zu bytes of Fiber::kStackBytes\n", Fiber::kStackBytes);
      std::exit(1);
    }
  }
}

inline void run_block(unsigned threads, std::mt19937& random) {
#if defined(SHIM_THREAD_SANITIZER)
  map_stacks(threads, MAP_FIXED);  // as fresh memory: these threads are not ordered with those of the block before
#endif
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fiber& fiber = fibers[thread];
    fiber.done = false;
    fiber.waits = Wait::kNothing;
    fiber.vote = 0;
    fiber.barriers = fiber.collectives = 0;
    fiber.context.start(stacks + (thread + 1) * Fiber::kStackBytes, Fiber::kStackBytes, fiber_entry);
#if defined(SHIM_THREAD_SANITIZER)
    fiber.thread_sanitizer = __tsan_create_fiber(0);
#endif
  }
  std::vector<unsigned> order(threads);
  std::iota(order.begin(), order.end(), 0u);
  while (true) {
    arrange(order, random);
    // In these schedules a warp runs on through its collectives before the next one begins, as far
    // as block barriers let it: else no warp could pass one before all others have done what comes
    // before theirs.
    const bool alone = schedule == Schedule::kForward || schedule == Schedule::kReverse;
    for (unsigned i = 0; i < threads; ++i) {
      if (!fibers[order[i]].done && fibers[order[i]].waits == Wait::kNothing) {
        resume(order[i]);
      }
      const unsigned first = order[i] / kWarpSize * kWarpSize;
      if (alone && (i + 1) % kWarpSize == 0 && let_go(first, first + kWarpSize, Wait::kWarp)) {
        i -= kWarpSize;
      }
    }
    // Every fiber has now ended or waits.
    unsigned finished = 0;
    const Fiber* waiting = nullptr;
    for (unsigned thread = 0; thread < threads; ++thread) {
      finished += fibers[thread].done ? 1 : 0;
      waiting = fibers[thread].done ? waiting : &fibers[thread];
    }
    if (finished == threads) {
      break;
    }
    bool goes_on = let_go(0, threads, Wait::kBlock);
    for (unsigned first = 0; first + kWarpSize <= threads; first += kWarpSize) {
      goes_on |= let_go(first, first + kWarpSize, Wait::kWarp);
    }
    if (!goes_on) {
      std::fprintf(stderr, "block %u: not all threads reached the barrier in %s\n", block_index.x, waiting->site);
      std::exit(1);
    }
  }
#if defined(SHIM_THREAD_SANITIZER)
  for (unsigned thread = 0; thread < threads; ++thread) {
    __tsan_destroy_fiber(fibers[thread].thread_sanitizer);
  }
#endif
}

// Runs `kernel()` for every thread; each block gets its own `shared_bytes` of poisoned shared
// memory.
template <typename Kernel>
void launch(dim3 blocks, dim3 threads, size_t shared_bytes, Kernel kernel) {
  const std::lock_guard<std::mutex> lock(launching);  // more than one thread of a program may run ops
  if (fibers == nullptr) {
    static std::vector<Fiber> pool(kMaxThreads);
    fibers = pool.data();
    map_stacks(kMaxThreads, 0);
  }
  const unsigned count = threads.x * threads.y * threads.z;
  const size_t grid = size_t{blocks.x} * blocks.y * blocks.z;
  if (count == 0 || count > kMaxThreads || grid == 0) {
    std::fprintf(stderr, "a launch of %zu blocks of %u threads; wanted at least 1 block and 1 to %u threads\n", grid,
                 count, kMaxThreads);
    std::exit(1);
  }
  std::mt19937 random(static_cast<unsigned>(schedule));
  std::vector<unsigned> order(grid);
  std::iota(order.begin(), order.end(), 0u);
  arrange(order, random);
  block_size = threads;
  grid_size = blocks;
  body = kernel;
#if defined(SHIM_THREAD_SANITIZER)
  scheduler_thread_sanitizer = __tsan_get_current_fiber();
#endif
  release(&launch_tag);
  std::vector<std::unique_ptr<void, decltype(&std::free)>> used;
  for (const unsigned block : order) {
    block_index = {block % blocks.x, block / blocks.x % blocks.y, block / (blocks.x * blocks.y)};
#if defined(SHIM_THREAD_SANITIZER)
    const bool fresh =
        true;  // blocks are not ordered among themselves, nor is the scheduler with them before their end
#else
    const bool fresh = used.empty();
#endif
    if (fresh) {
      void* memory = nullptr;
      if (posix_memalign(&memory, 128, shared_bytes) != 0) {
        std::abort();
      }
      used.emplace_back(memory, &std::free);
    }
    shared_memory = static_cast<unsigned char*>(used.back().get());
    std::memset(shared_memory, poison, shared_bytes);
    release(&launch_tag);
    set_hiding(!hidden.empty());
    run_block(count, random);
    set_hiding(false);
  }
  acquire(&done_tag);
  hidden.clear();
  check_stacks(count);
  const void* address = misaligned;
  misaligned = nullptr;
  MF_CHECK(address == nullptr, "a kernel accesses ", misaligned_bytes, " bytes at ", address, "; wanted a multiple of ",
           misaligned_bytes);
}

// Atomics order memory here, so that a missing __threadfence is not noticed; a missing barrier
// around them is.
template <typename T>
T atomic_add(T* target, T value) {
  return __atomic_fetch_add(target, value, __ATOMIC_ACQ_REL);
}

inline unsigned atomic_inc(unsigned* target, unsigned last) {
  unsigned before = __atomic_load_n(target, __ATOMIC_ACQUIRE);
  while (!__atomic_compare_exchange_n(target, &before, before >= last ? 0 : before + 1, false, __ATOMIC_ACQ_REL,
                                      __ATOMIC_ACQUIRE)) {
  }
  return before;
}

SHIM_RUNTIME inline uint3 get_thread_index() { return thread_index; }

SHIM_RUNTIME inline uint3 get_block_index() { return block_index; }

SHIM_RUNTIME inline dim3 get_block_size() { return block_size; }

SHIM_RUNTIME inline dim3 get_grid_size() { return grid_size; }

SHIM_RUNTIME inline unsigned char* get_shared_memory() { return shared_memory; }

}  // namespace shim

#define SHIM_TEXT_OF(x) #x
#define SHIM_TEXT(x) SHIM_TEXT_OF(x)
#define SHIM_SITE __FILE__ ":" SHIM_TEXT(__LINE__)

#undef __launch_bounds__
#define __launch_bounds__(...)
#define threadIdx (shim::get_thread_index())
#define blockIdx (shim::get_block_index())
#define blockDim (shim::get_block_size())
#define gridDim (shim::get_grid_size())
#define __syncthreads() static_cast<void>(shim::block_barrier(SHIM_SITE, 0))
#define __syncthreads_or(vote) shim::block_barrier(SHIM_SITE, (vote) != 0)
#define __syncwarp() shim::warp_barrier(SHIM_SITE)
#define __shfl_sync(mask, value, lane) shim::exchange(SHIM_SITE, value, static_cast<unsigned>(lane))
#define __shfl_xor_sync(mask, value, bits) \
  shim::exchange(SHIM_SITE, value, shim::lane_number() ^ static_cast<unsigned>(bits))
#define __shfl_down_sync(mask, value, distance) \
  shim::exchange(SHIM_SITE, value, shim::lane_number() + static_cast<unsigned>(distance))
#define __shfl_up_sync(mask, value, distance) \
  shim::exchange(SHIM_SITE, value, shim::lane_number() - static_cast<unsigned>(distance))
#define __ballot_sync(mask, predicate) shim::ballot(SHIM_SITE, (predicate) != 0)
#define atomicAdd(target, value) shim::atomic_add(target, value)
#define atomicInc(target, last) shim::atomic_inc(target, last)
#define __threadfence() static_cast<void>(0)
#define __expf(x) std::exp(static_cast<float>(x))
#define __fdividef(x, y) (static_cast<float>(x) / static_cast<float>(y))

#define MF_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...)                      \
  do {                                                                                     \
    static_cast<void>(stream);                                                             \
    shim::launch(dim3(blocks), dim3(threads), shared_bytes, [&] { kernel(__VA_ARGS__); }); \
  } while (false)
#define MF_LAUNCH_AFTER(...) MF_LAUNCH(__VA_ARGS__)
#define MF_DYNAMIC_SHARED(name) unsigned char* name = shim::get_shared_memory()
#define MF_EXPECT_ALIGNED(address, bytes) shim::expect_aligned(address, bytes)

namespace mf::cuda {

inline void let_next_begin() {}
inline void wait_for_previous() { shim::wait_for_previous(); }
inline void prefetch_to_l2(const void* /*address*/) {}

}  // namespace mf::cuda

#include "emulated/cuda_on_cpu_mma.h"  // after the macros above, which it uses
