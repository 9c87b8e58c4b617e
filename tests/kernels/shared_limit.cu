// Launches by csrc/cuda/launch.cuh. Whenever one has begun, another thread makes a whole launch of the
// same kernel, with less shared memory. Prints what went wrong.
#include <cstdio>
#include <string>

#include "cuda/launch.cuh"
#include "shared_limit.h"

namespace {

template <int kNumber>
__global__ void kernel(int value) {
  MF_DYNAMIC_SHARED(memory);
  memory[threadIdx.x] = static_cast<unsigned char>(kNumber + value);
}

template <int kNumber>
void launch(size_t bytes, bool early) {
  if (early) {
    MF_LAUNCH_AFTER(kernel<kNumber>, 1, 32, bytes, nullptr, 7);
  } else {
    MF_LAUNCH(kernel<kNumber>, 1, 32, bytes, nullptr, 7);
  }
}

template <int kNumber>
void check() {
  for (const bool early : {false, true}) {
    for (const size_t bytes : {1024, 60 * 1024, 99 * 1024, 90 * 1024}) {
      meanwhile = [early] { launch<kNumber>(50 * 1024, early); };
      try {
        launch<kNumber>(bytes, early);
      } catch (const mf::Error& error) {
        std::printf("%zu bytes: %s\n", bytes, error.what());
      }
    }
  }
  try {
    launch<kNumber>(100 * 1024, false);
    std::puts("100 KiB were not refused");
  } catch (const mf::Error& error) {
    if (std::string(error.what()).find("wants 102400 bytes of shared memory; wanted at most 101376") ==
        std::string::npos) {
      std::puts(error.what());
    }
  }
}

}  // namespace

int main() {
  check<1>();
  check<2>();
  std::printf("kernels %zu, requests", requests.size());
  for (const auto& [name, count] : requests) {
    std::printf(" %d", count);
  }
  std::puts("");
}
