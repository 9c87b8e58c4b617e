// Adam on the CPU: pieces of equal size over all tensors, each the same work in the same order
// whatever the number of threads.
#include "api/adam.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/check.h"

namespace mf::cpu {
namespace {

constexpr int64_t kPiece = 1 << 14;

struct Piece {
  const AdamTensor* tensor;
  int64_t first;
};

template <typename Gradient>
void update(const AdamParams& params, const AdamSettings& settings, const AdamScale& scale, const AdamTensor& tensor,
            int64_t first) {
  const int64_t count = std::min(kPiece, tensor.count - first);
  const int64_t start = tensor.start + first;
  const auto* gradients = static_cast<const Gradient*>(tensor.gradient) + first;
  float* weights = params.master + start;
  float* exp_avg = params.exp_avg + start;
  float* exp_avg_sq = params.exp_avg_sq + start;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    adam_update(settings, scale, widened(gradients[i]), weights[i], exp_avg[i], exp_avg_sq[i]);
  }
  if (params.shadow != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      round_to(weights[i], params.shadow[start + i]);
    }
  }
  if (params.average != nullptr) {
    float* average = params.average + start;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      adam_follow(settings, weights[i], average[i]);
    }
    if (params.average_shadow != nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        round_to(average[i], params.average_shadow[start + i]);
      }
    }
  }
}

}  // namespace

void adam_step(const AdamParams& params, int threads) {
  MF_CHECK(params.parameters <= kMaxAdamParameters, "there are ", params.parameters, " parameters; wanted at most ",
           kMaxAdamParameters);
  const bool diverged = params.loss != nullptr && !std::isfinite(*params.loss);
  const bool frozen = diverged || (params.latch != nullptr && *params.latch);
  if (diverged && params.latch != nullptr) {
    *params.latch = true;
  }
  if (frozen) {
    return;
  }
  const AdamSettings settings = params.settings();
  std::vector<AdamScale> scales(static_cast<size_t>(params.parameters));
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < params.tensor_count; ++i) {
    const AdamTensor& tensor = params.tensors[i];
    float& steps = params.steps[tensor.parameter];
    scales[static_cast<size_t>(tensor.parameter)] = adam_scale(params.beta1, params.beta2, steps, *params.lr);
    steps += 1.0f;
    for (int64_t first = 0; first < tensor.count; first += kPiece) {
      pieces.push_back({&tensor, first});
    }
  }
  const auto count = static_cast<int64_t>(pieces.size());
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4) if (count > 4)
  for (int64_t i = 0; i < count; ++i) {
    const Piece& piece = pieces[static_cast<size_t>(i)];
    const AdamScale& scale = scales[static_cast<size_t>(piece.tensor->parameter)];
    with_type<BFloat16>(piece.tensor->type, [&](auto type) {
      update<decltype(type)>(params, settings, scale, *piece.tensor, piece.first);
    });
  }
}

}  // namespace mf::cpu
