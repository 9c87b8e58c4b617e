// Kernel bodies of Adam; tests/cpp compiles them for the CPU too.
//
// A call begins with one block that settles what all others must see alike: whether this call is
// frozen, each parameter's bias corrections, the advanced counts of steps. Then pieces of equal
// size over the tensors of a launch are one block each, which reads the gradient where it lies:
// pointers come in the launch's arguments. About 30 bytes move for a weight and a few dozen
// operations, so that only the loads matter.
#pragma once

#include <cmath>

#include "api/adam.h"
#include "cuda/elements.cuh"
#include "cuda/warp.cuh"

namespace mf::cuda {

constexpr int64_t kAdamPiece = 2048;  // weights of a block: two groups of four for each of 256 threads
constexpr int kAdamTensors = 108;     // of a launch

struct AdamBegin {
  float* steps;
  const float* lr;
  const float* loss;
  bool* latch;
  AdamScale* scales;
  int32_t* frozen;
  double beta1;
  double beta2;
  int32_t parameters;
  uint32_t has_gradient[kMaxAdamParameters / 32];  // bit i % 32 of word i / 32
};
static_assert(sizeof(AdamBegin) <= 4096, "arguments of a launch");

struct AdamPieces {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  MutableFloatArray shadow;
  const AdamScale* scales;
  const int32_t* frozen;
  AdamSettings settings;
  int32_t tensor_count;
  int32_t first_block[kAdamTensors];
  AdamTensor tensors[kAdamTensors];
};
static_assert(sizeof(AdamPieces) <= 4096, "arguments of a launch");

// One block. Shared memory: one int32.
__device__ inline void adam_begin_block(const AdamBegin& params, int32_t& frozen) {
  if (threadIdx.x == 0) {
    const bool diverged = params.loss != nullptr && !(fabsf(*params.loss) < INFINITY);
    frozen = diverged || (params.latch != nullptr && *params.latch) ? 1 : 0;
    if (diverged && params.latch != nullptr) {
      *params.latch = true;
    }
    *params.frozen = frozen;
  }
  __syncthreads();
  if (frozen != 0) {
    return;
  }
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < params.parameters; i += static_cast<int32_t>(blockDim.x)) {
    if ((params.has_gradient[i / 32] >> i % 32 & 1u) != 0) {
      params.scales[i] = adam_scale(params.beta1, params.beta2, params.steps[i], *params.lr);
      params.steps[i] += 1.0f;
    }
  }
}

template <typename T>
using FourOf = Elements<T, 4>;

template <typename T>
__device__ void store_four(T* result, const FourOf<float>& x) {
  FourOf<T> rounded;
  for (int k = 0; k < 4; ++k) {
    from_float(x.value[k], rounded.value[k]);
  }
  *reinterpret_cast<FourOf<T>*>(result) = rounded;
}

__device__ inline void store_four(const MutableFloatArray& array, int64_t first, const FourOf<float>& x) {
  if (array.type == FloatType::kBFloat16) {
    store_four(static_cast<__nv_bfloat16*>(array.data) + first, x);
  } else {
    store_four(static_cast<__half*>(array.data) + first, x);
  }
}

// Weights [first, last) of a tensor; `aligned`: four of them may be read and written at once, from
// every fourth on.
template <typename Gradient>
__device__ void adam_piece(const AdamPieces& params, const AdamTensor& tensor, int64_t first, int64_t last,
                           bool aligned) {
  const AdamScale scale = params.scales[tensor.parameter];
  const auto* gradients = static_cast<const Gradient*>(tensor.gradient);
  float* weights = params.master + tensor.start;
  float* exp_avg = params.exp_avg + tensor.start;
  float* exp_avg_sq = params.exp_avg_sq + tensor.start;
  const int64_t whole = aligned ? first + (last - first) / 4 * 4 : first;
  for (int64_t i = first + 4 * threadIdx.x; i < whole; i += 4 * static_cast<int64_t>(blockDim.x)) {
    const auto g = *reinterpret_cast<const FourOf<Gradient>*>(gradients + i);
    auto w = *reinterpret_cast<const FourOf<float>*>(weights + i);
    auto m = *reinterpret_cast<const FourOf<float>*>(exp_avg + i);
    auto v = *reinterpret_cast<const FourOf<float>*>(exp_avg_sq + i);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      adam_update(params.settings, scale, to_float(g.value[k]), w.value[k], m.value[k], v.value[k]);
    }
    *reinterpret_cast<FourOf<float>*>(weights + i) = w;
    *reinterpret_cast<FourOf<float>*>(exp_avg + i) = m;
    *reinterpret_cast<FourOf<float>*>(exp_avg_sq + i) = v;
    if (params.shadow.data != nullptr) {
      store_four(params.shadow, tensor.start + i, w);
    }
  }
  for (int64_t i = whole + threadIdx.x; i < last; i += static_cast<int64_t>(blockDim.x)) {
    adam_update(params.settings, scale, to_float(gradients[i]), weights[i], exp_avg[i], exp_avg_sq[i]);
    if (params.shadow.data != nullptr) {
      store(params.shadow, tensor.start + i, weights[i]);
    }
  }
}

__device__ inline void adam_pieces_block(const AdamPieces& params) {
  if (*params.frozen != 0) {
    return;
  }
  const auto block = static_cast<int32_t>(blockIdx.x);
  int32_t low = 0;  // the last tensor whose first block is at most this one
  for (int32_t high = params.tensor_count; high - low > 1;) {
    const int32_t middle = (low + high) / 2;
    if (params.first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const AdamTensor& tensor = params.tensors[low];
  const int64_t first = (block - params.first_block[low]) * kAdamPiece;
  const int64_t last = first + kAdamPiece < tensor.count ? first + kAdamPiece : tensor.count;
  const bool aligned = tensor.start % 4 == 0 && reinterpret_cast<uintptr_t>(tensor.gradient) % 16 == 0;
  switch (tensor.type) {
    case FloatType::kBFloat16:
      return adam_piece<__nv_bfloat16>(params, tensor, first, last, aligned);
    case FloatType::kFloat16:
      return adam_piece<__half>(params, tensor, first, last, aligned);
    default:
      return adam_piece<float>(params, tensor, first, last, aligned);
  }
}

}  // namespace mf::cuda
