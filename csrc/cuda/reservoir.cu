#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "cuda/reservoir.cuh"

namespace mf::cuda {
namespace {

constexpr int kClaimThreads = 128;
constexpr int kCopyThreads = 192;  // a 32x32 image is 192 words of 16 bytes
constexpr int kDrawThreads = 1024;
constexpr int kDigitBits = 9;
constexpr int kSurvivors = 3072;
static_assert(kSurvivors >= kMaxCudaDraw + 1024,
              "a draw stops at its first pass only if the k-th key's digit fits beside k keys");
static_assert(kDrawThreads >= 1 << kDigitBits, "each digit is one thread's");
using Shared = DrawShared<kDigitBits, kSurvivors>;
static_assert(sizeof(Shared) <= 48 * 1024, "shared memory that a launch may ask for by itself");

__global__ void __launch_bounds__(kClaimThreads) reservoir_claim_kernel(const ReservoirInsertParams params) {
  reservoir_claim_block(params);
}

template <typename Word>
__global__ void __launch_bounds__(kCopyThreads) reservoir_copy_kernel(const ReservoirInsertParams params) {
  reservoir_copy_block<Word>(params);
}

__global__ void __launch_bounds__(kDrawThreads) reservoir_draw_kernel(const ReservoirDrawParams params) {
  MF_DYNAMIC_SHARED(shared);
  reservoir_draw_block(params, *reinterpret_cast<Shared*>(shared));
}

bool rows_are_aligned(const ReservoirInsertParams& params) {
  const auto bits = reinterpret_cast<uintptr_t>(params.images) | reinterpret_cast<uintptr_t>(params.x) |
                    static_cast<uintptr_t>(params.row_bytes);
  return bits % sizeof(uint4) == 0;
}

}  // namespace

void reservoir_insert(const ReservoirInsertParams& params, Stream stream) {
  MF_CHECK(params.count >= 0 && params.count <= INT32_MAX, "count is ", params.count, "; wanted 0 to ", INT32_MAX);
  if (params.count == 0) {
    return;
  }
  const auto items = static_cast<unsigned>(params.count);
  MF_LAUNCH(reservoir_claim_kernel, (items + kClaimThreads - 1) / kClaimThreads, kClaimThreads, 0, stream, params);
  if (rows_are_aligned(params)) {
    MF_LAUNCH(reservoir_copy_kernel<uint4>, items, kCopyThreads, 0, stream, params);
  } else {
    MF_LAUNCH(reservoir_copy_kernel<uint8_t>, items, kCopyThreads, 0, stream, params);
  }
}

// A draw of nothing is launched too: it still advances the counter.
void reservoir_draw(const ReservoirDrawParams& params, Stream stream) {
  MF_CHECK(params.count >= 0 && params.count <= kMaxCudaDraw, "a draw on CUDA wants ", params.count,
           " slots; wanted 0 to ", kMaxCudaDraw);
  MF_CHECK(params.filled <= INT32_MAX, "a draw on CUDA is from ", params.filled, " slots; wanted at most ", INT32_MAX);
  MF_LAUNCH(reservoir_draw_kernel, 1, kDrawThreads, sizeof(Shared), stream, params);
}

}  // namespace mf::cuda
