#include <cuda_runtime.h>

#include "core/check.h"
#include "cuda/batch_norm_act_backward.cuh"
#include "cuda/batch_norm_act_forward.cuh"
#include "cuda/batch_norm_act_statistics.cuh"
#include "cuda/launch.cuh"

namespace mf::cuda {
namespace {

constexpr int kMapThreads = 256;          // of a block without sums
constexpr unsigned kVectorThreads = 128;  // of a block over the channels alone

template <typename T, bool kPrologue>
__global__ void __launch_bounds__(kNormThreads) norm_statistics_kernel(const NormStatistics params, int shift) {
  MF_DYNAMIC_SHARED(shared);
  norm_statistics_block<T, kPrologue>(params, shift, shared);
}

// Blocks that a processor holds at once, which limits the registers to 80 or 128. A launch is one
// such wave: a second one would walk the whole map again and find nothing of it in the L2 cache.
template <typename T, NormForm kForm>
constexpr int kForwardBlocks = sizeof(T) == 2 && (kForm == NormForm::kPlain || kForm == NormForm::kResidual) ? 3 : 2;

template <typename T, NormForm kForm>
__global__ void __launch_bounds__(kMapThreads, kForwardBlocks<T, kForm>)
    batch_norm_act_forward_kernel(const BatchNormActForward params, int shift) {
  batch_norm_act_forward_block<T, kForm>(params, shift);
}

template <typename T, NormForm kForm>
__global__ void __launch_bounds__(kNormThreads)
    batch_norm_act_sums_kernel(const BatchNormActBackward params, int shift) {
  MF_DYNAMIC_SHARED(shared);
  batch_norm_act_sums_block<T, kForm>(params, shift, shared);
}

// Only a prologue's gradient needs sums, and a large block for them.
template <NormForm kForm>
constexpr int kBackwardThreads = kForm == NormForm::kPrologue ? kNormThreads : kMapThreads;
template <NormForm kForm>
constexpr int kBackwardBlocks = kForm == NormForm::kPrologue ? 1 : 2;

template <typename T, NormForm kForm>
__global__ void __launch_bounds__(kBackwardThreads<kForm>, kBackwardBlocks<kForm>)
    batch_norm_act_backward_kernel(const BatchNormActBackward params, int shift) {
  MF_DYNAMIC_SHARED(shared);
  batch_norm_act_backward_block<T, kForm>(params, shift, shared);
}

__global__ void __launch_bounds__(kVectorThreads) norm_state_backward_kernel(const NormStateBackward params) {
  const int64_t channels = params.shape.channels;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kVectorThreads + threadIdx.x;
  if (c < channels) {
    const auto count = static_cast<float>(params.shape.valid_pixels());
    const NormBackward back =
        norm_backward(params.norm, params.state, params.grad, count, channels, c, params.mean_rest[c]);
    params.norm_grads[kGradWeight * channels + c] = back.weight;
    params.norm_grads[kGradBias * channels + c] = back.bias;
    params.norm_grads[kSlope * channels + c] = back.slope;
    params.norm_grads[kOffset * channels + c] = back.offset;
  }
}

void check(const MapShape& shape, FloatType type) {
  MF_CHECK(shape.channels % kGroup == 0, "channels is ", shape.channels, "; wanted a multiple of ", kGroup);
  MF_CHECK(shape.pixels() <= int64_t{1} << 30, "the map has ", shape.pixels(), " pixels; wanted at most 2^30");
  MF_CHECK(type != FloatType::kFloat64, "a map is float64; on CUDA wanted float32 or bfloat16");
}

template <typename T, NormForm kForm>
void forward(const BatchNormActForward& params, Stream stream) {
  const ChannelGrid grid = ChannelGrid::of(params.shape, kMapThreads, kForwardBlocks<T, kForm> * params.processors);
  MF_LAUNCH_AFTER((batch_norm_act_forward_kernel<T, kForm>), dim3(grid.blocks, grid.tiles), kMapThreads, 0, stream,
                  params, grid.shift);
}

template <typename T, NormForm kForm>
void sums(const BatchNormActBackward& params, Stream stream) {
  constexpr size_t kBytes = channel_sums_shared<BatchNormActBackward::kSumFields>(kNormThreads);
  const ChannelGrid grid = norm_grid(params.shape, params.processors);
  MF_LAUNCH_AFTER((batch_norm_act_sums_kernel<T, kForm>), dim3(grid.blocks, grid.tiles), kNormThreads, kBytes, stream,
                  params, grid.shift);
}

template <typename T, NormForm kForm>
void backward(const BatchNormActBackward& params, Stream stream) {
  constexpr bool kSums = kForm == NormForm::kPrologue;
  constexpr int kThreads = kBackwardThreads<kForm>;
  constexpr size_t kBytes = kSums ? channel_sums_shared<BatchNormActBackward::kPrologueFields>(kThreads) : 0;
  const ChannelGrid grid = ChannelGrid::of(params.shape, kThreads, kBackwardBlocks<kForm> * params.processors);
  MF_LAUNCH_AFTER((batch_norm_act_backward_kernel<T, kForm>), dim3(grid.blocks, grid.tiles), kThreads, kBytes, stream,
                  params, grid.shift);
}

}  // namespace

// A map without a pixel has a state and its parameters have gradients: only one without channels
// leaves nothing to write.
void norm_statistics(const NormStatistics& params, Stream stream) {
  check(params.shape, params.type);
  if (params.shape.channels == 0) {
    return;
  }
  const bool training = params.norm[0].training || (params.norms == 2 && params.norm[1].training);
  ChannelGrid grid = norm_grid(params.shape, params.processors);
  grid.blocks = training ? grid.blocks : 1;
  const dim3 blocks(grid.blocks, grid.tiles, static_cast<unsigned>(params.norms));
  constexpr size_t kBytes = channel_sums_shared<NormStatistics::kFields>(kNormThreads);
  with_type(params.type, [&](auto type) {
    using T = decltype(type);
    if (params.prologue != nullptr) {
      MF_LAUNCH_AFTER((norm_statistics_kernel<T, true>), blocks, kNormThreads, kBytes, stream, params, grid.shift);
    } else {
      MF_LAUNCH_AFTER((norm_statistics_kernel<T, false>), blocks, kNormThreads, kBytes, stream, params, grid.shift);
    }
  });
}

void batch_norm_act_forward(const BatchNormActForward& params, Stream stream) {
  check(params.shape, params.type);
  MF_CHECK(params.prologue == nullptr || params.residual == nullptr,
           "prologue and residual are both given; wanted one of them");
  if (params.shape.channels == 0 || params.shape.pixels() == 0) {
    return;
  }
  with_type(params.type, [&](auto type) {
    using T = decltype(type);
    if (params.prologue != nullptr) {
      forward<T, NormForm::kPrologue>(params, stream);
    } else if (params.residual == nullptr) {
      forward<T, NormForm::kPlain>(params, stream);
    } else if (params.normed_residual) {
      forward<T, NormForm::kTwoNorms>(params, stream);
    } else {
      forward<T, NormForm::kResidual>(params, stream);
    }
  });
}

void batch_norm_act_sums(const BatchNormActBackward& params, Stream stream) {
  check(params.shape, params.type);
  if (params.shape.channels == 0) {
    return;
  }
  with_type(params.type, [&](auto type) {
    using T = decltype(type);
    if (params.prologue != nullptr) {
      sums<T, NormForm::kPrologue>(params, stream);
    } else if (params.residual != nullptr) {
      sums<T, NormForm::kTwoNorms>(params, stream);
    } else {
      sums<T, NormForm::kPlain>(params, stream);
    }
  });
}

void batch_norm_act_backward(const BatchNormActBackward& params, Stream stream) {
  check(params.shape, params.type);
  if (params.shape.channels == 0) {
    return;
  }
  with_type(params.type, [&](auto type) {
    using T = decltype(type);
    if (params.prologue != nullptr) {
      backward<T, NormForm::kPrologue>(params, stream);
    } else if (params.residual != nullptr) {
      backward<T, NormForm::kTwoNorms>(params, stream);
    } else {
      backward<T, NormForm::kPlain>(params, stream);
    }
  });
}

void norm_state_backward(const NormStateBackward& params, Stream stream) {
  if (params.shape.channels == 0) {
    return;
  }
  const int64_t blocks = (params.shape.channels + kVectorThreads - 1) / kVectorThreads;
  MF_LAUNCH(norm_state_backward_kernel, static_cast<unsigned>(blocks), kVectorThreads, 0, stream, params);
}

}  // namespace mf::cuda
