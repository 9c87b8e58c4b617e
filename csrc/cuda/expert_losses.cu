#include <cuda_runtime.h>

#include "core/check.h"
#include "cuda/expert_losses.cuh"
#include "cuda/launch.cuh"

namespace mf::cuda {
namespace {

// float32 tiles are twice as large, and the shared memory of a consumer GPU's block is 99 KiB.
template <typename T>
constexpr int kWarpsFor = sizeof(T) == 4 ? 4 : 8;
constexpr int kTermWarps = 8;

template <typename T, int kWarps>
__global__ void __launch_bounds__(kWarps* kLanes, 1)
    expert_statistics_kernel(const ExpertLossesForward params, const ExpertLossesGrid grid) {
  MF_DYNAMIC_SHARED(memory);
  expert_statistics_block<T, kWarps>(params, grid, *reinterpret_cast<ContrastShared<T, kWarps>*>(memory));
}

__global__ void __launch_bounds__(kTermWarps* kLanes) expert_terms_kernel(const ExpertLossesForward params) {
  MF_DYNAMIC_SHARED(memory);
  expert_terms_block<kTermWarps>(params, *reinterpret_cast<TermsShared<kTermWarps>*>(memory));
}

// Without a limit the compiler for Blackwell takes 225 registers where 168 do: bounds for more threads than
// are launched are one.
template <int kWarps>
constexpr int kGradientBound = kIsBlackwell ? 320 : kWarps * kLanes;

template <typename T, int kWarps>
__global__ void __launch_bounds__(kGradientBound<kWarps>, 1)
    expert_gradient_kernel(const ExpertLossesBackward params, const ExpertLossesGrid grid) {
  MF_DYNAMIC_SHARED(memory);
  expert_gradient_block<T, kWarps>(params, grid, *reinterpret_cast<ContrastShared<T, kWarps>*>(memory));
}

unsigned checked_blocks(const ExpertLossesInput& in, const ExpertLossesGrid& grid) {
  for (const FloatArray* array : {&in.projections, &in.logits, &in.features, &in.student}) {
    MF_CHECK(array->type != FloatType::kFloat64, "an input is float64; on CUDA wanted float32 or bfloat16");
  }
  MF_CHECK(in.features.type == in.student.type, "features and student have two types; wanted one");
  return grid.blocks();
}

template <typename T>
void forward(const ExpertLossesForward& params, Stream stream) {
  constexpr int kWarps = kWarpsFor<T>;
  constexpr size_t kBytes = sizeof(ContrastShared<T, kWarps>);
  static_assert(kBytes <= kMostShared, "shared memory of a block");
  const ExpertLossesInput& in = params.input;
  const int64_t last = in.experts - 1;
  const auto grid = ExpertLossesGrid::of(in, in.contrasts(last), in.classifies(last),
                                         in.distillation != Distillation::kOff, false, kWarps);
  if (const unsigned blocks = checked_blocks(in, grid); blocks > 0) {
    MF_LAUNCH((expert_statistics_kernel<T, kWarps>), blocks, kWarps * kLanes, kBytes, stream, params, grid);
  }
  MF_LAUNCH(expert_terms_kernel, static_cast<unsigned>(in.experts), kTermWarps * kLanes,
            sizeof(TermsShared<kTermWarps>), stream, params);
}

// A gradient is stored in its input's type.
void check_types(const MutableFloatArray& gradient, const FloatArray& input, const char* name) {
  MF_CHECK(gradient.data == nullptr || gradient.type == input.type, "the gradient of ", name,
           " has another type; wanted that of ", name);
}

template <typename T>
void backward(const ExpertLossesBackward& params, Stream stream) {
  check_types(params.logits, params.input.logits, "logits");
  check_types(params.features, params.input.features, "features");
  check_types(params.student, params.input.student, "student");
  constexpr int kWarps = kWarpsFor<T>;
  constexpr size_t kBytes = sizeof(ContrastShared<T, kWarps>);
  const ExpertLossesInput& in = params.input;
  const bool distillation = params.features.data != nullptr || params.student.data != nullptr;
  const auto grid = ExpertLossesGrid::of(in, params.projections.data != nullptr, params.logits.data != nullptr,
                                         distillation, true, kWarps);
  if (const unsigned blocks = checked_blocks(in, grid); blocks > 0) {
    MF_LAUNCH((expert_gradient_kernel<T, kWarps>), blocks, kWarps * kLanes, kBytes, stream, params, grid);
  }
}

}  // namespace

void expert_losses_forward(const ExpertLossesForward& params, Stream stream) {
  with_type(params.input.projections.type, [&](auto type) { forward<decltype(type)>(params, stream); });
}

void expert_losses_backward(const ExpertLossesBackward& params, Stream stream) {
  with_type(params.input.projections.type, [&](auto type) { backward<decltype(type)>(params, stream); });
}

}  // namespace mf::cuda
