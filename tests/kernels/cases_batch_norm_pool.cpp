// The kernels against the same in double precision, on numbers that the kernel's type holds exactly.
// There is no twin in csrc/cpu: on the CPU PyTorch's own operations serve.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "api/batch_norm_pool.h"
#include "encoded_floats.h"

#if defined(MF_KERNELS_ON_CPU)
#include "cuda/batch_norm_pool.cuh"
#endif

namespace {

using namespace kernel_case;

constexpr double kEps = 1e-5;

struct Setting {
  size_t images = 3, pixels = 16, channels = 64, valid = 3;
  FloatType type = FloatType::kBFloat16;
  bool training = true;
  bool weight = true;
  bool wants_x = true, wants_residual = true;
  bool for_backward = true;
  double offset = 0.25;  // added to x
};

struct Launches {
  std::function<void(const mf::BatchNormPoolForward&)> forward;
  std::function<void(const mf::BatchNormPoolBackward&)> backward;
};

// What the kernels must find, [valid images, pixels, channels] or [valid images, channels] or [channels].
struct Wanted {
  Doubles x, residual, weight, bias, grad, state;
  Doubles pooled, counts, sums, to_weight, to_bias, to_x, to_residual;
  std::vector<uint8_t> mask;

  explicit Wanted(const Setting& s) {
    std::mt19937 random(static_cast<unsigned>(s.images * 31 + s.channels));
    // Multiples of 2^-6 below 4, which every type holds.
    const auto numbers = [&](size_t count) {
      Doubles values = draw(random, count, FloatType::kBFloat16, 1.0);
      std::transform(values.begin(), values.end(), values.begin(),
                     [](double v) { return std::clamp(std::round(v * 64) / 64, -3.0, 3.0); });
      return values;
    };
    const size_t images = std::min(s.valid, s.images);
    const size_t size = images * s.pixels * s.channels;
    const auto count = static_cast<double>(images * s.pixels);
    x = numbers(size);
    std::transform(x.begin(), x.end(), x.begin(), [&](double v) { return v + s.offset; });
    residual = numbers(size);
    grad = numbers(images * s.channels);
    weight = s.weight ? numbers(s.channels) : Doubles(s.channels, 1.0);
    bias = numbers(s.channels);
    state.resize(mf::kNormRows * s.channels);
    pooled.resize(images * s.channels), counts = sums = pooled;
    to_weight.resize(s.channels), to_bias = to_weight;
    to_x.resize(size), to_residual = to_x;
    mask.resize(size / mf::kGroup);
    for (size_t c = 0; c < s.channels; ++c) {
      double mean = 0, squares = 0;
      for (size_t p = c; p < size; p += s.channels) {
        mean += x[p] / count;
      }
      for (size_t p = c; p < size; p += s.channels) {
        squares += std::pow(x[p] - mean, 2);
      }
      const double inverse = 1 / std::sqrt((count > 0 ? squares / count : 0) + kEps);
      const double row[] = {mean, inverse, weight[c] * inverse, bias[c]};
      for (size_t r = 0; r < mf::kNormRows; ++r) {
        state[r * s.channels + c] = row[r];
      }
      for (size_t p = c; p < size; p += s.channels) {
        double z = row[mf::kScale] * (x[p] - mean) + bias[c] + residual[p];
        if (std::abs(z) < 1e-3) {  // rounding must not decide on which side of zero it is
          residual[p] += residual[p] > 0 ? -1 : 1;
          z = row[mf::kScale] * (x[p] - mean) + bias[c] + residual[p];
        }
        const size_t at = p / (s.pixels * s.channels) * s.channels + c;
        if (z > 0) {
          pooled[at] += z / static_cast<double>(s.pixels);
          counts[at] += 1;
          sums[at] += x[p] - mean;
          to_residual[p] = grad[at] / static_cast<double>(s.pixels);
          mask[p / mf::kGroup] = static_cast<uint8_t>(mask[p / mf::kGroup] | 1u << p % mf::kGroup);
        }
        to_bias[c] += to_residual[p];
        to_weight[c] += to_residual[p] * (x[p] - mean) * inverse;
      }
      for (size_t p = c; p < size; p += s.channels) {
        const double centred = (to_bias[c] + (x[p] - mean) * inverse * to_weight[c]) / count;
        to_x[p] = row[mf::kScale] * (to_residual[p] - (s.training ? centred : 0));
      }
    }
  }
};

void compare(Context& context, const Setting& s, const Launches& launches) {
  const Wanted wanted(s);
  const size_t size = s.images * s.pixels * s.channels;
  const size_t outputs = s.images * s.channels;
  const size_t width = bytes_of(1, s.type);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto uploaded = [&](const Doubles& values, size_t count) {
    return context.upload(encode(padded(values, count, nan), s.type));
  };
  const auto expect = [&](const char* what, const unsigned char* memory, const Doubles& values, size_t count,
                          double tolerance) {
    kernel_case::expect(context, what, memory, padded(values, count, 0), s.type, tolerance);
  };
  const mf::MapShape shape{static_cast<int64_t>(s.images), static_cast<int64_t>(s.pixels),
                           static_cast<int64_t>(s.channels),
                           context.upload(std::vector<int32_t>{static_cast<int32_t>(s.valid)}), -1};
  const auto* x = uploaded(wanted.x, size);
  const auto* state = context.upload(floats(wanted.state));
  auto* pooled = context.poisoned<unsigned char>(outputs * width);
  auto* counts = context.poisoned<float>(outputs);
  auto* sums = context.poisoned<float>(outputs);
  auto* mask = context.poisoned<uint8_t>(size / mf::kGroup);
  const double close = 2e-5 + step_of(s.type) + 1e-6 * s.offset;
  hide(state, wanted.state.size() * sizeof(float));
  if (!s.for_backward) {
    launches.forward({shape, s.type, x, uploaded(wanted.residual, size), state, pooled, nullptr, nullptr, nullptr});
    expect("pooled alone", pooled, wanted.pooled, outputs, close);
    return;
  }
  launches.forward({shape, s.type, x, uploaded(wanted.residual, size), state, pooled, counts, sums, mask});
  expect("pooled", pooled, wanted.pooled, outputs, close);
  context.expect_close("counts", counts, floats(padded(wanted.counts, outputs, 0)), 0.0);
  context.expect_close("sums", sums, floats(padded(wanted.sums, outputs, 0)), 2e-5 + 1e-6 * s.offset);
  std::vector<uint8_t> bits = wanted.mask;
  bits.resize(size / mf::kGroup);
  context.expect_equal("mask", mask, bits);

  mf::NormParams norm{};
  norm.weight = s.weight ? context.upload(floats(wanted.weight)) : nullptr;
  norm.training = s.training;
  auto* norm_grads = context.poisoned<float>(mf::kNormGradRows * s.channels);
  auto* to_x = s.wants_x ? context.poisoned<unsigned char>(size * width) : nullptr;
  auto* to_residual = s.wants_residual ? context.poisoned<unsigned char>(size * width) : nullptr;
  const auto* grad = uploaded(wanted.grad, outputs);
  hide(grad, outputs * width);
  launches.backward({shape, s.type, grad, x, state, counts, sums, mask, norm, norm_grads, to_x, to_residual});
  const Floats rows = context.download(norm_grads, 2 * s.channels);
  const auto row = [&](size_t which) {
    return context.upload(Floats(rows.begin() + static_cast<std::ptrdiff_t>(which * s.channels),
                                 rows.begin() + static_cast<std::ptrdiff_t>((which + 1) * s.channels)));
  };
  context.expect_close("weight's gradient", row(mf::kGradWeight), floats(wanted.to_weight), 2e-5);
  context.expect_close("bias' gradient", row(mf::kGradBias), floats(wanted.to_bias), 2e-5);
  if (s.wants_x) {
    expect("x's gradient", to_x, wanted.to_x, size, close);
  }
  if (s.wants_residual) {
    expect("residual's gradient", to_residual, wanted.to_residual, size, close);
  }
}

void compare(Context& context, const Setting& setting) {
  compare(
      context, setting,
      {[&](const mf::BatchNormPoolForward& params) { mf::cuda::batch_norm_pool(params, context.stream()); },
       [&](const mf::BatchNormPoolBackward& params) { mf::cuda::batch_norm_pool_backward(params, context.stream()); }});
}

}  // namespace

KERNEL_CASE(batch_norm_pool_of_the_last_map) {
  for (const auto type : {FloatType::kBFloat16, FloatType::kFloat32}) {
    Setting setting;
    setting.channels = 512;
    setting.type = type;
    compare(context, setting);
    setting.training = false;
    compare(context, setting);
  }
}

KERNEL_CASE(batch_norm_pool_of_padding) {
  for (const size_t valid : {0, 2, 9}) {  // 9 is cut to the images there are
    Setting setting;
    setting.images = 4;
    setting.valid = valid;
    compare(context, setting);
  }
}

KERNEL_CASE(batch_norm_pool_of_odd_shapes) {
  for (const size_t pixels : {1, 3, 15, 21, 64}) {
    for (const size_t channels : {8, 72, 520}) {
      Setting setting;
      setting.pixels = pixels;
      setting.channels = channels;
      setting.type = pixels % 2 == 0 ? FloatType::kBFloat16 : FloatType::kFloat32;
      setting.weight = channels != 72;
      compare(context, setting);
    }
  }
}

KERNEL_CASE(batch_norm_pool_without_backward) {
  Setting setting;
  setting.valid = 2;
  setting.for_backward = false;
  compare(context, setting);
}

KERNEL_CASE(batch_norm_pool_of_many_images) {
  Setting setting;
  setting.images = setting.valid = 70;
  setting.pixels = 2;
  setting.channels = 16;
  setting.type = FloatType::kFloat32;
  compare(context, setting);
}

// Every type, more pixels and images than a thread takes at a time.
COMPILED_CASE(batch_norm_pool_of_every_type) {
  for (const auto type : {FloatType::kBFloat16, FloatType::kFloat32}) {
    Setting setting;
    setting.type = type;
    setting.images = 4;
    for (const size_t pixels : {33, 35, 37, 39, 5}) {
      setting.pixels = pixels;
      setting.valid = pixels == 39 ? 1 : 3;
      for (const int wants : {0, 1, 2, 3}) {
        setting.wants_x = wants != 1;
        setting.wants_residual = wants != 2;
        setting.for_backward = wants != 3;
        compare(context, setting);
      }
    }
    setting.for_backward = true;
    setting.pixels = 1;
    setting.channels = 16;
    for (const size_t images : {230, 323}) {
      setting.images = setting.valid = images;
      compare(context, setting);
    }
  }
}

KERNEL_CASE(batch_norm_pool_with_a_large_mean) {
  Setting setting;
  setting.type = FloatType::kFloat32;
  setting.offset = 64.0;
  compare(context, setting);
}

KERNEL_CASE(batch_norm_pool_of_one_gradient_alone) {
  for (const int wants : {0, 1, 2}) {
    Setting setting;
    setting.wants_x = wants == 1;
    setting.wants_residual = wants == 2;
    compare(context, setting);
  }
}

#if defined(MF_KERNELS_ON_CPU)

KERNEL_CASE(small_batch_norm_pool) {
  Setting setting;
  setting.images = 9;
  setting.valid = 7;
  setting.pixels = 5;
  setting.channels = 16;
  setting.type = FloatType::kFloat32;
  compare(context, setting,
          {[](const mf::BatchNormPoolForward& params) {
             shim::launch(dim3(9, 1), 32, 0, [&] { mf::cuda::batch_norm_pool_block<float>(params); });
           },
           [](const mf::BatchNormPoolBackward& params) {
             shim::launch(2, 32, 64 * sizeof(float), [&] {
               MF_DYNAMIC_SHARED(shared);
               mf::cuda::batch_norm_pool_sums_block<float>(params, reinterpret_cast<float*>(shared));
             });
             shim::launch(dim3(9, 1), 32, 0, [&] { mf::cuda::batch_norm_pool_backward_block<float>(params); });
           }});
}

#endif
