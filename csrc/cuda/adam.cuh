// Kernel bodies of Adam; tests/kernels compiles them for the CPU too.
//
// A call begins with one block that decides for all others whether this step is frozen, computes
// each parameter's bias corrections and counts its step. Then the weights are cut into pieces of
// equal size, one block each, which reads the gradient where it is: pointers come in the launch's
// arguments. A weight takes about 30 bytes of traffic, 40 with a moving average, and a few dozen
// operations, so memory bandwidth decides.
#pragma once

#include <cmath>

#include "api/adam.h"
#include "cuda/launch.cuh"
#include "cuda/warp.cuh"

namespace mf::cuda {

constexpr int64_t kAdamPiece = 2048;  // weights of a block: two groups of four for each of 256 threads
constexpr int kAdamTensors = 160;     // of a launch; MOSE's network has 156 parameters

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

// An AdamTensor in 24 bytes, so that many fit into the arguments of a launch.
struct AdamPart {
  const void* gradient;
  int32_t start;
  int32_t count;
  int32_t first_block;  // of the tensor, among the launch's
  int16_t parameter;
  uint8_t type;
};
static_assert(sizeof(AdamPart) == 24 && kMaxAdamParameters <= INT16_MAX);

struct AdamPieces {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  __nv_bfloat16* shadow;
  float* average;
  __nv_bfloat16* average_shadow;
  const AdamScale* scales;
  const int32_t* frozen;
  AdamSettings settings;
  int32_t tensor_count;
  AdamPart tensors[kAdamTensors];
};
static_assert(sizeof(AdamPieces) <= 4096, "arguments of a launch");

// One block. Shared memory: one int32.
__device__ inline void adam_begin_block(const AdamBegin& params, int32_t& frozen) {
  wait_for_previous();
  let_next_begin();
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

// Weights [first, last) of a tensor; `aligned`: four of them may be read and written at once, from
// every fourth on. kAverage: there is a moving average.
template <typename Gradient, bool kAverage>
__device__ void adam_piece(const AdamPieces& params, const AdamPart& tensor, int64_t first, int64_t last,
                           bool aligned) {
  const AdamScale scale = params.scales[tensor.parameter];
  const auto* gradients = static_cast<const Gradient*>(tensor.gradient);
  float* weights = params.master + tensor.start;
  float* exp_avg = params.exp_avg + tensor.start;
  float* exp_avg_sq = params.exp_avg_sq + tensor.start;
  const int64_t whole = aligned ? first + (last - first) / 4 * 4 : first;
  for (int64_t i = first + 4 * threadIdx.x; i < whole; i += 4 * static_cast<int64_t>(blockDim.x)) {
    const auto g = Vec<Gradient, 4>::load(gradients + i);
    float w[4], m[4], v[4];
    [[maybe_unused]] float a[4];
    load_floats(weights + i, w);
    load_floats(exp_avg + i, m);
    load_floats(exp_avg_sq + i, v);
    if constexpr (kAverage) {
      load_floats(params.average + tensor.start + i, a);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      adam_update(params.settings, scale, g[k], w[k], m[k], v[k]);
      if constexpr (kAverage) {
        adam_follow(params.settings, w[k], a[k]);
      }
    }
    Vec<float, 4>::pack(w).store(weights + i);
    Vec<float, 4>::pack(m).store(exp_avg + i);
    Vec<float, 4>::pack(v).store(exp_avg_sq + i);
    if (params.shadow != nullptr) {
      Vec<__nv_bfloat16, 4>::pack(w).store(params.shadow + tensor.start + i);
    }
    if constexpr (kAverage) {
      Vec<float, 4>::pack(a).store(params.average + tensor.start + i);
      if (params.average_shadow != nullptr) {
        Vec<__nv_bfloat16, 4>::pack(a).store(params.average_shadow + tensor.start + i);
      }
    }
  }
  for (int64_t i = whole + threadIdx.x; i < last; i += static_cast<int64_t>(blockDim.x)) {
    adam_update(params.settings, scale, to_float(gradients[i]), weights[i], exp_avg[i], exp_avg_sq[i]);
    if (params.shadow != nullptr) {
      params.shadow[tensor.start + i] = __float2bfloat16_rn(weights[i]);
    }
    if constexpr (kAverage) {
      float& average = params.average[tensor.start + i];
      adam_follow(params.settings, weights[i], average);
      if (params.average_shadow != nullptr) {
        params.average_shadow[tensor.start + i] = __float2bfloat16_rn(average);
      }
    }
  }
}

template <bool kAverage>
__device__ void adam_pieces_block(const AdamPieces& params) {
  wait_for_previous();
  if (*params.frozen != 0) {
    return;
  }
  const auto block = static_cast<int32_t>(blockIdx.x);
  int32_t low = 0;  // the last tensor whose first block is at most this one
  for (int32_t high = params.tensor_count; high - low > 1;) {
    const int32_t middle = (low + high) / 2;
    if (params.tensors[middle].first_block <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const AdamPart& tensor = params.tensors[low];
  const int64_t first = (block - tensor.first_block) * kAdamPiece;
  const int64_t last = first + kAdamPiece < tensor.count ? first + kAdamPiece : tensor.count;
  const bool aligned = tensor.start % 4 == 0 && reinterpret_cast<uintptr_t>(tensor.gradient) % 16 == 0;
  with_type(static_cast<FloatType>(tensor.type),
            [&](auto type) { adam_piece<decltype(type), kAverage>(params, tensor, first, last, aligned); });
}

}  // namespace mf::cuda
