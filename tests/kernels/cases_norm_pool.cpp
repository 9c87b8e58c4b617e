#include <algorithm>
#include <random>

#include "api/norm_pool.h"
#include "encoded_floats.h"

#if defined(MF_KERNELS_ON_CPU)
#include "cuda/norm_pool.cuh"
#endif

namespace {

using namespace kernel_case;

constexpr double kTolerance = 3e-6;  // sums in another order, a product and a sum fused
constexpr double kLongSums = 1e-5;   // the same of many images
constexpr double kBFloat16 = 1.0 / 128;

template <typename T>
std::vector<T> random_values(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(count);
  std::generate(values.begin(), values.end(), [&] { return normal(random); });
  return rounded<T>(values);
}

struct Shape {
  int64_t images, pixels, channels;
  int64_t valid;
  bool has_state = true;
  bool on_device = false;  // whether the kernel reads `valid` from memory
};

template <typename T, typename Forward, typename Backward>
void compare(Context& context, const Shape& shape, double tolerance, Forward forward, Backward backward) {
  const auto elements = static_cast<size_t>(shape.images * shape.pixels * shape.channels);
  const auto outputs = static_cast<size_t>(shape.images * shape.channels);
  auto x = random_values<T>(elements, 1);
  auto grad = random_values<T>(outputs, 2);
  const auto state = random_values<float>(static_cast<size_t>(mf::kNormRows * shape.channels), 3);
  const auto valid = static_cast<size_t>(std::clamp<int64_t>(shape.valid, 0, shape.images));
  for (size_t i = valid * static_cast<size_t>(shape.pixels * shape.channels); i < elements; ++i) {
    mf::round_to(NAN, x[i]);
  }
  for (size_t i = valid * static_cast<size_t>(shape.channels); i < outputs; ++i) {
    mf::round_to(NAN, grad[i]);
  }
  std::vector<T> pooled(outputs), dx(elements);
  Floats counts(outputs), sums(outputs), dstate(state.size());
  mf::NormPoolInput in{{x.data(), type_of(T{})},
                       shape.has_state ? state.data() : nullptr,
                       shape.images,
                       shape.pixels,
                       shape.channels,
                       nullptr,
                       shape.valid};
  mf::cpu::norm_pool({in, {pooled.data(), type_of(T{})}, counts.data(), sums.data()}, 1);
  mf::cpu::norm_pool_backward({in,
                               grad.data(),
                               counts.data(),
                               sums.data(),
                               {dx.data(), type_of(T{})},
                               shape.has_state ? dstate.data() : nullptr},
                              1);

  in.x.data = context.upload(x);
  in.state = shape.has_state ? context.upload(state) : nullptr;
  if (shape.on_device) {
    in.valid_pointer = context.upload(std::vector<int32_t>{static_cast<int32_t>(shape.valid)});
    in.valid = -7;
  }
  auto* device_pooled = context.poisoned<T>(outputs);
  auto* device_counts = context.poisoned<float>(outputs);
  auto* device_sums = context.poisoned<float>(outputs);
  forward(mf::NormPoolForward{in, {device_pooled, type_of(T{})}, device_counts, device_sums});
  auto* device_dx = context.poisoned<T>(elements);
  auto* device_dstate = context.poisoned<float>(state.size());
  backward(mf::NormPoolBackward{in,
                                context.upload(grad),
                                device_counts,
                                device_sums,
                                {device_dx, type_of(T{})},
                                shape.has_state ? device_dstate : nullptr});
  expect(context, "pooled", device_pooled, pooled, tolerance);
  expect(context, "dx", device_dx, dx, tolerance);
  if (shape.has_state) {
    context.expect_close("counts", device_counts, counts, 0.0);
    context.expect_close("sums", device_sums, sums, kTolerance);
    context.expect_close("dstate", device_dstate, dstate, shape.images > 100 ? kLongSums : kTolerance);
  }
}

template <typename T>
void compare(Context& context, const Shape& shape, double tolerance) {
  compare<T>(
      context, shape, tolerance,
      [&](const mf::NormPoolForward& params) { mf::cuda::norm_pool(params, context.stream()); },
      [&](const mf::NormPoolBackward& params) { mf::cuda::norm_pool_backward(params, context.stream()); });
}

}  // namespace

KERNEL_CASE(norm_pool_of_the_last_map) {
  compare<mf::BFloat16>(context, {3, 16, 512, 3}, kBFloat16);
  compare<mf::BFloat16>(context, {2, 16, 520, 2}, kBFloat16);
  compare<float>(context, {2, 16, 512, 2}, kTolerance);
}

KERNEL_CASE(norm_pool_of_padding) {
  compare<float>(context, {4, 4, 40, 2}, kTolerance);
  compare<mf::BFloat16>(context, {4, 4, 40, 3, true, true}, kBFloat16);
  compare<mf::BFloat16>(context, {4, 4, 40, 0, true, true}, kBFloat16);
  compare<float>(context, {4, 4, 40, 9, true, true}, kTolerance);  // cut to the images there are
  compare<float>(context, {4, 4, 40, -1, true, true}, kTolerance);
  compare<mf::BFloat16>(context, {4, 4, 40, 3, false, true}, kBFloat16);
}

KERNEL_CASE(norm_pool_of_odd_shapes) {
  compare<float>(context, {3, 1, 4, 3}, kTolerance);
  compare<mf::BFloat16>(context, {2, 21, 72, 2}, kBFloat16);
  compare<mf::BFloat16>(context, {1, 9, 8, 1}, kBFloat16);
  compare<float>(context, {70, 1, 12, 70}, kTolerance);
  compare<float>(context, {0, 4, 12, 0}, kTolerance);
  compare<float>(context, {3, 4, 0, 3}, kTolerance);
}

// Every type, more pixels and images than a thread takes at a time.
template <typename T>
static void compare_every_instance(Context& context, double tolerance) {
  for (const bool has_state : {true, false}) {
    compare<T>(context, {5, 37, 72, 4, has_state, true}, tolerance);
    for (const int64_t images : {230, 323}) {
      compare<T>(context, {images, 2, 72, images - 1, has_state}, tolerance);
    }
  }
}

COMPILED_CASE(norm_pool_of_every_instance) {
  compare_every_instance<float>(context, kTolerance);
  compare_every_instance<mf::BFloat16>(context, kBFloat16);
}

KERNEL_CASE(mean_without_a_norm) {
  compare<float>(context, {3, 16, 72, 3, false}, kTolerance);
  compare<mf::BFloat16>(context, {3, 16, 512, 2, false}, kBFloat16);
  compare<mf::BFloat16>(context, {2, 7, 24, 2, false}, kBFloat16);
}

KERNEL_CASE(norm_pool_of_one_gradient_alone) {
  const auto grad = context.upload(random_values<float>(24, 4));
  const auto x = random_values<float>(72, 5);
  const auto state = random_values<float>(48, 6);
  Floats counts(24), sums(24), pooled(24), dx(72), dstate(48);
  mf::NormPoolInput in{{x.data(), mf::FloatType::kFloat32}, state.data(), 2, 3, 12, nullptr, 2};
  const auto grad_on_host = context.download(grad, 24);
  mf::cpu::norm_pool({in, {pooled.data(), mf::FloatType::kFloat32}, counts.data(), sums.data()}, 1);
  mf::cpu::norm_pool_backward(
      {in, grad_on_host.data(), counts.data(), sums.data(), {dx.data(), mf::FloatType::kFloat32}, dstate.data()}, 1);
  in.x.data = context.upload(x);
  in.state = context.upload(state);
  auto* device_dx = context.poisoned<float>(72);
  auto* device_dstate = context.poisoned<float>(48);
  mf::cuda::norm_pool_backward({in, grad, nullptr, nullptr, {device_dx, mf::FloatType::kFloat32}, nullptr},
                               context.stream());
  mf::cuda::norm_pool_backward(
      {in, grad, context.upload(counts), context.upload(sums), {nullptr, mf::FloatType::kFloat32}, device_dstate},
      context.stream());
  context.expect_close("dx", device_dx, dx, kTolerance);
  context.expect_close("dstate", device_dstate, dstate, kTolerance);
}

#if defined(MF_KERNELS_ON_CPU)

// Four images a step in the sum of the state's gradient, so that its loop takes several turns with
// one warp.
KERNEL_CASE(small_norm_pool) {
  for (const int64_t valid : {9, 5}) {
    compare<float>(
        context, {9, 5, 12, valid}, kTolerance,
        [](const mf::NormPoolForward& params) {
          shim::launch(dim3(9, 2), 2, 0, [&] { mf::cuda::norm_pool_block<float>(params); });
        },
        [](const mf::NormPoolBackward& params) {
          shim::launch(2 + 9, 32, 64 * sizeof(float), [&] {
            MF_DYNAMIC_SHARED(shared);
            if (blockIdx.x < 2) {
              mf::cuda::norm_pool_state_block<float>(params, blockIdx.x, reinterpret_cast<float*>(shared));
            } else {
              mf::cuda::norm_pool_map_block<float>(params, static_cast<int64_t>(blockIdx.x) - 2);
            }
          });
        });
  }
}

#endif
