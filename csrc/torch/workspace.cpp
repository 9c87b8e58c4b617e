#include "torch/workspace.h"

#if defined(MOSE_FAST_WITH_CUDA)

#include <array>
#include <map>
#include <mutex>

#include "core/check.h"
#include "torch/device.h"

namespace mf {
namespace {

constexpr int64_t kTickets = 4096;  // of a queue; one for 32 channels of a map

}  // namespace

uint32_t* tickets(int64_t count) {
  MF_CHECK(count >= 0 && count <= kTickets, "tickets wanted: ", count, "; there are ", kTickets);
  static std::mutex mutex;
  static std::map<std::array<int64_t, 3>, void*> of_queue;
  const std::lock_guard<std::mutex> lock(mutex);
  void*& memory = of_queue[current_queue()];
  if (memory == nullptr) {
    memory = allocate_zeroed(kTickets * sizeof(uint32_t));
  }
  return static_cast<uint32_t*>(memory);
}

}  // namespace mf

#endif
