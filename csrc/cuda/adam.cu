#include <cuda_runtime.h>

#include "cuda/adam.cuh"
#include "cuda/launch.cuh"

namespace mf::cuda {
namespace {

constexpr int kBeginThreads = 192;  // MOSE's network has 156 parameters
constexpr int kPieceThreads = 256;

__global__ void __launch_bounds__(kBeginThreads) adam_begin_kernel(const AdamBegin params) {
  MF_DYNAMIC_SHARED(shared);
  adam_begin_block(params, *reinterpret_cast<int32_t*>(shared));
}

template <bool kAverage>
__global__ void __launch_bounds__(kPieceThreads) adam_pieces_kernel(const AdamPieces params) {
  adam_pieces_block<kAverage>(params);
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

void adam_step(const AdamParams& params, Stream stream) {
  MF_CHECK(params.parameters >= 0 && params.parameters <= kMaxAdamParameters, "there are ", params.parameters,
           " parameters; wanted 0 to ", kMaxAdamParameters);
  MF_CHECK(is_aligned(params.master) && is_aligned(params.exp_avg) && is_aligned(params.exp_avg_sq) &&
               is_aligned(params.shadow) && is_aligned(params.average) && is_aligned(params.average_shadow),
           "a flat buffer does not start at a multiple of 16 bytes");
  AdamBegin begin{};
  begin.steps = params.steps;
  begin.lr = params.lr;
  begin.loss = params.loss;
  begin.latch = params.latch;
  begin.scales = params.scales;
  begin.frozen = params.frozen;
  begin.beta1 = params.beta1;
  begin.beta2 = params.beta2;
  begin.parameters = static_cast<int32_t>(params.parameters);
  for (int64_t i = 0; i < params.tensor_count; ++i) {
    const int32_t parameter = params.tensors[i].parameter;
    begin.has_gradient[parameter / 32] |= 1u << parameter % 32;
  }
  MF_LAUNCH_AFTER(adam_begin_kernel, 1, kBeginThreads, sizeof(int32_t), stream, begin);

  AdamPieces pieces{};
  pieces.master = params.master;
  pieces.exp_avg = params.exp_avg;
  pieces.exp_avg_sq = params.exp_avg_sq;
  pieces.shadow = reinterpret_cast<__nv_bfloat16*>(params.shadow);
  pieces.average = params.average;
  pieces.average_shadow = reinterpret_cast<__nv_bfloat16*>(params.average_shadow);
  pieces.scales = params.scales;
  pieces.frozen = params.frozen;
  pieces.settings = params.settings();
  const auto adam_pieces = params.average == nullptr ? adam_pieces_kernel<false> : adam_pieces_kernel<true>;
  int64_t blocks = 0;
  for (int64_t i = 0; i < params.tensor_count; ++i) {
    const AdamTensor& tensor = params.tensors[i];
    if (tensor.count > 0) {
      MF_CHECK(tensor.start + tensor.count <= INT32_MAX, "the flat buffers have ", tensor.start + tensor.count,
               " weights; wanted at most ", INT32_MAX);
      pieces.tensors[pieces.tensor_count++] = {tensor.gradient,
                                               static_cast<int32_t>(tensor.start),
                                               static_cast<int32_t>(tensor.count),
                                               static_cast<int32_t>(blocks),
                                               static_cast<int16_t>(tensor.parameter),
                                               static_cast<uint8_t>(tensor.type)};
      blocks += (tensor.count + kAdamPiece - 1) / kAdamPiece;
      MF_CHECK(blocks <= INT32_MAX, "tensors of one launch have ", blocks, " pieces; wanted at most ", INT32_MAX);
    }
    if (blocks > 0 && (pieces.tensor_count == kAdamTensors || i + 1 == params.tensor_count)) {
      if (i < kAdamTensors) {  // the first
        MF_LAUNCH_AFTER(adam_pieces, static_cast<unsigned>(blocks), kPieceThreads, 0, stream, pieces);
      } else {
        MF_LAUNCH(adam_pieces, static_cast<unsigned>(blocks), kPieceThreads, 0, stream, pieces);
      }
      pieces.tensor_count = 0;
      blocks = 0;
    }
  }
}

}  // namespace mf::cuda
