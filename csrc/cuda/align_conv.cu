// The kernels and launchers of align_conv: how many blocks, of which tiles, with how much shared memory.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/check.h"
#include "cuda/align_conv_backward.cuh"
#include "cuda/align_conv_forward.cuh"
#include "cuda/align_conv_grad_y.cuh"
#include "cuda/launch.cuh"

namespace mf::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kFinishThreads = 1024;  // few blocks, which wait for memory
// Blocks that loop over tiles: as many as run at once on 132 multiprocessors of 227 KiB, the same
// on every GPU, so that sums are too.
constexpr int64_t kMultiprocessors = 132;
constexpr size_t kSharedOfMultiprocessor = 227 * 1024;
constexpr size_t kSharedOfSystem = 1024;  // for each block

// Blocks on a multiprocessor: __launch_bounds__ limits registers so that as many fit.
template <typename T>
constexpr int kDepthwiseBlocks = sizeof(T) == 2 ? 3 : 2;
constexpr int kForwardBlocks = 2;
// With the weights' gradient fewer: each block writes partial sums of it, in all about as many bytes as
// the operands have.
template <bool kWeights>
constexpr int kProductBlocks = kWeights ? 2 : 3;
constexpr int kBackwardBlocks = 2;

template <typename T, int kStride>
__global__ void __launch_bounds__(kThreads, kDepthwiseBlocks<T>)
    align_conv_depthwise_kernel(const AlignConvDepthwise params, const ForwardTiles tiles) {
  MF_DYNAMIC_SHARED(memory);
  align_conv_depthwise_block<T, kStride, kThreads>(params, tiles, memory);
}

template <typename T, int kStride, int kChunks>
__global__ void __launch_bounds__(kThreads, kForwardBlocks)
    align_conv_forward_kernel(const AlignConvForward params, const ForwardTiles tiles, const FusedMemory memory_map) {
  MF_DYNAMIC_SHARED(memory);
  align_conv_forward_block<T, kStride, kChunks, kThreads>(params, tiles, memory_map, memory);
}

__global__ void __launch_bounds__(kFinishThreads)
    align_conv_finish_kernel(const AlignConvForward params, const int parts) {
  MF_DYNAMIC_SHARED(memory);
  align_conv_finish_block<kFinishThreads>(params, parts, memory);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) align_conv_grad_y_kernel(const AlignConvGradY params) {
  align_conv_grad_y_block<T, kThreads>(params);
}

template <typename T, bool kWeights>
__global__ void __launch_bounds__(kThreads, kProductBlocks<kWeights>)
    align_conv_product_kernel(const AlignConvGradY params, const ProductMemory memory_map) {
  MF_DYNAMIC_SHARED(memory);
  align_conv_product_block<T, kThreads, kWeights>(params, memory_map, memory);
}

__global__ void __launch_bounds__(kThreads) align_conv_weights_kernel(const AlignConvGradY params, const int parts) {
  MF_DYNAMIC_SHARED(memory);
  align_conv_weights_block<kThreads>(params, parts, memory);
}

template <typename T, int kStride, Prologue kPrologue>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks)
    align_conv_backward_kernel(const AlignConvBackward params, const Tiles tiles,
                               const BackwardRegions<kStride, kPrologue> regions) {
  MF_DYNAMIC_SHARED(memory);
  align_conv_backward_block<T, kStride, kPrologue, kThreads>(params, tiles, regions, memory);
}

__global__ void __launch_bounds__(kThreads) align_conv_sums_kernel(const AlignConvBackward params, const int parts) {
  MF_DYNAMIC_SHARED(memory);
  align_conv_sums_block<kThreads>(params, parts, memory);
}

void check(const AlignConvInput& in) {
  MF_CHECK(align_conv_serves(in.type, in.channels, 8).any, "channels is ", in.channels,
           "; wanted a multiple of 8, in float32 or bfloat16");
  // Kernels count from a tile's first image in 32 bits.
  MF_CHECK(std::max<int64_t>(in.height * in.width, 4 * kTileSide * kTileSide) <= INT32_MAX / in.channels,
           "an image has ", in.height, " x ", in.width, " pixels of ", in.channels,
           " channels; wanted fewer than 2^31 numbers, and fewer than 2^23 channels");
  MF_CHECK(in.images >= 0, "images is ", in.images, "; wanted at least 0");
  MF_CHECK(align_conv_serves_form(in.stride, in.prologue != nullptr, in.gate != nullptr), "stride is ", in.stride,
           in.prologue != nullptr ? ", with" : ", without", " a prologue and ", in.gate != nullptr ? "with" : "without",
           " a gate; wanted stride 1 with a prologue alone, or stride 2 with at most one of them");
  MF_CHECK(in.stride == 1 || (in.height % 2 == 0 && in.width % 2 == 0), "sides are ", in.height, " x ", in.width,
           "; wanted even ones for stride 2");
}

int64_t blocks_at_once(size_t shared_bytes, int64_t most) {
  return kMultiprocessors *
         std::max<int64_t>(1, std::min<int64_t>(most, kSharedOfMultiprocessor / (shared_bytes + kSharedOfSystem)));
}

// Calls f(type, stride) with both as constants.
template <typename Function>
auto with_type_and_stride(FloatType type, int64_t stride, const Function& f) {
  return with_type(type, [&](auto t) {
    return stride == 1 ? f(t, std::integral_constant<int, 1>()) : f(t, std::integral_constant<int, 2>());
  });
}

// Calls f(type, stride, prologue) with all three as constants.
template <typename Function>
auto with_form(const AlignConvInput& in, const Function& f) {
  return with_type(in.type, [&](auto t) {
    using One = std::integral_constant<int, 1>;
    using Two = std::integral_constant<int, 2>;
    if (in.prologue != nullptr) {
      const auto norm = std::integral_constant<Prologue, Prologue::kNorm>();
      return in.stride == 1 ? f(t, One(), norm) : f(t, Two(), norm);
    }
    return in.gate != nullptr ? f(t, Two(), std::integral_constant<Prologue, Prologue::kGate>())
                              : f(t, Two(), std::integral_constant<Prologue, Prologue::kNone>());
  });
}

template <typename SomeTiles>
struct Plan {
  SomeTiles tiles;
  size_t shared_bytes;
  int64_t blocks;
};

template <typename T, int kStride>
size_t input_bytes(int height, int width) {
  return static_cast<size_t>(InputRegion::of<kStride>(1, height, width).pixels()) * kSlice * sizeof(T);
}

template <typename T>
constexpr size_t kTapBytes = size_t{kSlice} * kTapCount * sizeof(T);

// Of kernels whose blocks keep to a slice of channels: as many of each slice.
int64_t blocks_of_slices(int64_t channels, int64_t tiles, size_t shared_bytes, int64_t most) {
  const int64_t slices = slices_of(channels);
  return slices * std::max<int64_t>(1, std::min(tiles, blocks_at_once(shared_bytes, most) / slices));
}

template <typename T, int kStride>
Plan<ForwardTiles> depthwise_plan(const AlignConvInput& in) {
  Plan<ForwardTiles> plan{};
  plan.tiles = ForwardTiles::of<kStride>(in, &input_bytes<T, kStride>, kMostShared - kTapBytes<T>);
  plan.shared_bytes = plan.tiles.images * input_bytes<T, kStride>(plan.tiles.height, plan.tiles.width) + kTapBytes<T>;
  plan.blocks = blocks_of_slices(in.channels, plan.tiles.total, plan.shared_bytes, kDepthwiseBlocks<T>);
  return plan;
}

struct FusedPlan : Plan<ForwardTiles> {
  FusedMemory memory;
};

template <typename T, int kStride>
FusedPlan fused_plan(const AlignConvForward& params) {
  const AlignConvInput& in = params.input;
  check(in);
  static_assert(!align_conv_serves(FloatType::kBFloat16, 128, kMaxChunks * kSlice + 8).fused_forward);
  static_assert(!align_conv_serves(FloatType::kBFloat16, 128, 2 * kSlice + 8, 2).fused_forward);
  MF_CHECK(align_conv_serves(in.type, in.channels, params.out_channels, in.stride).fused_forward,
           "channels and out_channels are ", in.channels, " and ", params.out_channels,
           "; wanted a multiple of 16 up to 128 and a multiple of 8 up to ", in.stride == 1 ? 256 : 128,
           ", in bfloat16");
  MF_CHECK(in.out_height() * in.out_width() <= INT32_MAX / params.out_channels, "an image has ", in.out_height(), " x ",
           in.out_width(), " pixels of ", params.out_channels, " channels put out; wanted fewer than 2^31 numbers");
  const FusedMemory without_input = FusedMemory::of(in.channels, params.out_channels, 0, sizeof(T), kThreads);
  FusedPlan plan{};
  plan.tiles = ForwardTiles::of<kStride>(
      in, &input_bytes<T, kStride>, kMostShared - (without_input.bytes - (without_input.taps - without_input.staged)));
  plan.memory = FusedMemory::of(in.channels, params.out_channels,
                                plan.tiles.images * input_bytes<T, kStride>(plan.tiles.height, plan.tiles.width),
                                sizeof(T), kThreads);
  plan.shared_bytes = plan.memory.bytes;
  plan.blocks = std::min<int64_t>(plan.tiles.total, blocks_at_once(plan.shared_bytes, kForwardBlocks));
  return plan;
}

template <typename T, int kStride, int kChunks>
void forward(const AlignConvForward& params, Stream stream) {
  const FusedPlan plan = fused_plan<T, kStride>(params);
  MF_LAUNCH_AFTER((align_conv_forward_kernel<T, kStride, kChunks>), static_cast<unsigned>(plan.blocks), kThreads,
                  plan.shared_bytes, stream, params, plan.tiles, plan.memory);
}

template <typename T, int kStride, Prologue kPrologue>
size_t backward_bytes(int height, int width) {
  return BackwardRegions<kStride, kPrologue>::of({}, 0, 1, height, width).template bytes<T, kThreads>();
}

template <int kStride, Prologue kPrologue>
struct BackwardPlan : Plan<Tiles> {
  BackwardRegions<kStride, kPrologue> regions;
};

template <typename T, int kStride, Prologue kPrologue>
BackwardPlan<kStride, kPrologue> backward_plan(const AlignConvInput& in) {
  constexpr int kSide = sizeof(T) == 2 ? 2 * kTileSide : kTileSide;
  // So that two blocks fit into a multiprocessor, on every GPU.
  constexpr int kRows = kPrologue == Prologue::kGate || kStride == 1 ? kTileSide : kSide;
  constexpr int kHeader = kHeaderPixels<T, kPrologue, kThreads>;
  constexpr size_t kHeaderBytes = kHeader * BackwardBlock<kThreads>::kPitch * sizeof(T);
  BackwardPlan<kStride, kPrologue> plan{};
  plan.tiles = Tiles::of(in.images, in.height, in.width, kRows, kSide, &backward_bytes<T, kStride, kPrologue>,
                         kMostShared - kHeaderBytes);
  plan.regions =
      BackwardRegions<kStride, kPrologue>::of(in, kHeader, plan.tiles.images, plan.tiles.height, plan.tiles.width);
  plan.shared_bytes = plan.regions.template bytes<T, kThreads>();
  plan.blocks = blocks_of_slices(in.channels, plan.tiles.total, plan.shared_bytes, kBackwardBlocks);
  return plan;
}

template <bool kWeights>
int64_t product_blocks(const AlignConvGradY& params, const ProductMemory& memory_map) {
  const int64_t tiles = (params.images * params.pixels + kTilePixels - 1) / kTilePixels;
  return std::max<int64_t>(1, std::min(tiles, blocks_at_once(memory_map.bytes, kProductBlocks<kWeights>)));
}

template <bool kWeights>
ProductMemory product_memory(const AlignConvGradY& params) {
  return ProductMemory::of(params.channels, params.in_channels, 2, kWeights);
}

template <typename T, bool kWeights>
void product(const AlignConvGradY& params, Stream stream) {
  const auto memory_map = product_memory<kWeights>(params);
  const int64_t blocks = product_blocks<kWeights>(params, memory_map);
  MF_LAUNCH_AFTER((align_conv_product_kernel<T, kWeights>), static_cast<unsigned>(blocks), kThreads, memory_map.bytes,
                  stream, params, memory_map);
  if constexpr (kWeights) {
    const auto sums = static_cast<unsigned>((params.channels * params.in_channels + kLanes - 1) / kLanes);
    MF_LAUNCH_AFTER(align_conv_weights_kernel, sums, kThreads, sizeof(float) * kThreads, stream, params,
                    static_cast<int>(blocks));
  }
}

template <typename T>
void product(const AlignConvGradY& params, Stream stream) {
  params.into.data != nullptr ? product<T, true>(params, stream) : product<T, false>(params, stream);
}

}  // namespace

int64_t align_conv_moments(const AlignConvForward& params) {
  return with_type_and_stride(params.input.type, params.input.stride, [&](auto type, auto stride) -> int64_t {
    using T = decltype(type);
    return params.input.images == 0 ? 0 : fused_plan<T, stride.value>(params).blocks;
  });
}

int64_t align_conv_sums(const AlignConvInput& in) {
  check(in);
  return with_form(in, [&](auto type, auto stride, auto prologue) -> int64_t {
    const int64_t blocks = backward_plan<decltype(type), stride.value, prologue.value>(in).blocks;
    return in.images == 0 ? 0 : blocks / slices_of(in.channels);
  });
}

int64_t align_conv_weight_sums(const AlignConvGradY& params) {
  return product_blocks<true>(params, product_memory<true>(params));
}

void align_conv_depthwise(const AlignConvDepthwise& params, Stream stream) {
  const AlignConvInput& in = params.input;
  check(in);
  if (in.images == 0) {
    return;
  }
  with_type_and_stride(in.type, in.stride, [&](auto type, auto stride) {
    using T = decltype(type);
    constexpr int kStride = stride.value;
    const auto plan = depthwise_plan<T, kStride>(in);
    MF_LAUNCH_AFTER((align_conv_depthwise_kernel<T, kStride>), static_cast<unsigned>(plan.blocks), kThreads,
                    plan.shared_bytes, stream, params, plan.tiles);
  });
}

void align_conv_forward(const AlignConvForward& params, Stream run_on) {
  const AlignConvInput& in = params.input;
  check(in);
  const int64_t parts = align_conv_moments(params);
  if (in.images > 0) {
    with_type_and_stride(in.type, in.stride, [&](auto type, auto stride) {
      using T = decltype(type);
      constexpr int kStride = stride.value;
      if constexpr (sizeof(T) == 2) {
        if (params.out_channels <= kSlice) {
          forward<T, kStride, 1>(params, run_on);
        } else if (kStride == 2 || params.out_channels <= 2 * kSlice) {
          forward<T, kStride, 2>(params, run_on);
        } else if constexpr (kStride == 1) {
          forward<T, kStride, kMaxChunks>(params, run_on);
        }
      }
    });
  }
  const auto blocks = static_cast<unsigned>((params.out_channels + kLanes - 1) / kLanes);
  constexpr size_t kBytes = sizeof(SumsAboutOrigin) * kFinishThreads;
  MF_LAUNCH_AFTER(align_conv_finish_kernel, blocks, kFinishThreads, kBytes, run_on, params, static_cast<int>(parts));
}

void align_conv_grad_y(const AlignConvGradY& params, Stream stream) {
  static_assert(!align_conv_serves(FloatType::kFloat32, 8, 8 * kThreads + 8).any);
  MF_CHECK(align_conv_serves(params.type, 8, params.channels).any, "channels is ", params.channels,
           "; wanted a multiple of 8 up to ", 8 * kThreads, ", in float32 or bfloat16");
  MF_CHECK(params.images >= 0 && params.pixels >= 0, "images and pixels are ", params.images, " and ", params.pixels,
           "; wanted at least 0");
  if (params.pointwise != nullptr) {
    MF_CHECK(align_conv_serves(params.type, params.in_channels, params.channels).fused_backward,
             "channels and in_channels are ", params.channels, " and ", params.in_channels,
             "; wanted a multiple of 16 and one of 8, both up to 128, in bfloat16");
    static_assert(!align_conv_serves(FloatType::kBFloat16, kSlice + 8, 16).fused_weights);
    MF_CHECK(params.into.data == nullptr ||
                 align_conv_serves(params.type, params.in_channels, params.channels).fused_weights,
             "in_channels is ", params.in_channels, "; wanted at most ", kSlice, " for the gradient of the weights");
    return product<__nv_bfloat16>(params, stream);
  }
  const int64_t rows = kThreads / (params.channels / 8);
  const int64_t tiles = (params.images * params.pixels + rows - 1) / rows;
  const auto blocks = static_cast<unsigned>(std::max<int64_t>(1, std::min(tiles, 8 * kMultiprocessors)));
  with_type(params.type, [&](auto type) {
    MF_LAUNCH_AFTER((align_conv_grad_y_kernel<decltype(type)>), blocks, kThreads, 0, stream, params);
  });
}

void align_conv_backward(const AlignConvBackward& params, Stream run_on) {
  const AlignConvInput& in = params.input;
  check(in);
  MF_CHECK((params.depthwise.data == nullptr && params.prologue == nullptr) || params.sums != nullptr || in.images == 0,
           "sums is null; wanted a workspace for the gradients of depthwise and prologue");
  if (in.images > 0) {
    static_assert(BackwardBlock<kThreads>::kChannels == kSlice);
    with_form(in, [&](auto type, auto stride, auto prologue) {
      using T = decltype(type);
      const auto plan = backward_plan<T, stride.value, prologue.value>(in);
      MF_LAUNCH_AFTER((align_conv_backward_kernel<T, stride.value, prologue.value>), static_cast<unsigned>(plan.blocks),
                      kThreads, plan.shared_bytes, run_on, params, plan.tiles, plan.regions);
    });
  }
  if (params.depthwise.data != nullptr || params.prologue != nullptr) {
    const auto blocks = static_cast<unsigned>((in.channels + kLanes - 1) / kLanes * kAlignConvSums);
    MF_LAUNCH_AFTER(align_conv_sums_kernel, blocks, kThreads, sizeof(float) * kThreads, run_on, params,
                    static_cast<int>(align_conv_sums(in)));
  }
}

}  // namespace mf::cuda
