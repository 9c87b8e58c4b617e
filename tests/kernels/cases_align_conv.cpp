// The kernels against the convolutions, norms and gates that their headers describe, as plain loops
// in double precision on numbers that the kernels' type holds exactly. There is no twin in
// csrc/cpu: on the CPU PyTorch's own convolutions serve.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "api/align_conv.h"
#include "encoded_floats.h"

#if defined(MF_KERNELS_ON_CPU)
#include "cuda/align_conv_backward.cuh"
#include "cuda/align_conv_forward.cuh"
#include "cuda/align_conv_grad_y.cuh"
#endif

namespace {

using namespace kernel_case;

constexpr double kEps = 1e-5;
constexpr double kMomentum = 0.125;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Setting {
  int64_t images = 3, height = 6, width = 4, channels = 16, out_channels = 24, stride = 1, valid = 2;
  FloatType type = FloatType::kBFloat16;
  bool prologue = false, gate = false, training = true, parameters = true;
  bool keep_map = true;
  double leeway = 1;  // times the tolerance of sums over all pixels
  // Where one NaN lies: behind an inner pixel of x, in the scale of a channel of the prologue, in
  // an element of the gate.
  enum Nan { kNowhere, kInX, kInPrologue, kInGate } nan = kNowhere;
};

struct Launches {
  std::function<void(const mf::AlignConvDepthwise&)> depthwise;
  std::function<int64_t(const mf::AlignConvForward&)> moments;
  std::function<void(const mf::AlignConvForward&)> forward;
  std::function<int64_t(const mf::AlignConvGradY&)> weight_sums;
  std::function<void(const mf::AlignConvGradY&)> total;
  std::function<int64_t(const mf::AlignConvInput&)> sums;
  std::function<void(const mf::AlignConvBackward&)> backward;
};

// To the nearest number of the type, ties to even.
double round_to(double x, FloatType type) {
  if (type == FloatType::kFloat32) {
    return static_cast<float>(x);
  }
  int exponent;
  const double fraction = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, 8)), exponent - 8);
}

Doubles rounded(Doubles values, FloatType type) {
  for (double& value : values) {
    value = round_to(value, type);
  }
  return values;
}

// Weights with which element `out` of a doubled side takes the elements of the side of `size`.
Doubles doubling(int64_t out, int64_t size) {
  Doubles weights(static_cast<size_t>(size));
  const double at = std::max(0.0, (static_cast<double>(out) + 0.5) / 2 - 0.5);
  const auto low = static_cast<int64_t>(at);
  weights[static_cast<size_t>(low)] += 1 - (at - static_cast<double>(low));
  weights[static_cast<size_t>(std::min(low + 1, size - 1))] += at - static_cast<double>(low);
  return weights;
}

// What a convolution reads, and what it makes of gradients; images that are padding hold NaN.
struct Twin {
  Setting s;
  Doubles x, gate, prologue, depthwise;
  Doubles before, open, entered, map;

  int64_t out_height() const { return (s.height - 1) / s.stride + 1; }
  int64_t out_width() const { return (s.width - 1) / s.stride + 1; }
  size_t at(int64_t n, int64_t h, int64_t w, int64_t c) const {
    return static_cast<size_t>(((n * s.height + h) * s.width + w) * s.channels + c);
  }
  size_t out_at(int64_t n, int64_t h, int64_t w, int64_t c) const {
    return static_cast<size_t>(((n * out_height() + h) * out_width() + w) * s.channels + c);
  }
  size_t gate_at(int64_t n, int64_t h, int64_t w, int64_t c) const {
    return static_cast<size_t>(((n * (s.height / 2) + h) * (s.width / 2) + w) * s.channels + c);
  }

  // Calls f(index of x, h, w, c) for what counts.
  template <typename F>
  void each(const F& f) const {
    for (int64_t n = 0; n < s.valid; ++n) {
      for (int64_t h = 0; h < s.height; ++h) {
        for (int64_t w = 0; w < s.width; ++w) {
          for (int64_t c = 0; c < s.channels; ++c) {
            f(n, h, w, c);
          }
        }
      }
    }
  }
  // Calls f(n, oh, ow, c, tap, h, w) for every product of the convolution.
  template <typename F>
  void each_product(const F& f) const {
    for (int64_t n = 0; n < s.valid; ++n) {
      for (int64_t oh = 0; oh < out_height(); ++oh) {
        for (int64_t ow = 0; ow < out_width(); ++ow) {
          for (int64_t tap = 0; tap < 9; ++tap) {
            const int64_t h = oh * s.stride + tap / 3 - 1;
            const int64_t w = ow * s.stride + tap % 3 - 1;
            if (h >= 0 && h < s.height && w >= 0 && w < s.width) {
              for (int64_t c = 0; c < s.channels; ++c) {
                f(n, oh, ow, c, static_cast<size_t>(tap), h, w);
              }
            }
          }
        }
      }
    }
  }

  void run() {
    before.assign(x.size(), 0);
    open.assign(x.size(), 1);
    entered.assign(x.size(), 0);
    map.assign(static_cast<size_t>(s.images * out_height() * out_width() * s.channels), 0);
    const auto C = static_cast<size_t>(s.channels);
    each([&](int64_t n, int64_t h, int64_t w, int64_t c) {
      const size_t i = at(n, h, w, c);
      const auto k = static_cast<size_t>(c);
      const double z = prologue[2 * C + k] * (x[i] - prologue[k]) + prologue[3 * C + k];
      before[i] = !s.prologue ? x[i] : z <= 0 ? 0 : round_to(z, s.type);  // NaN stays NaN
      if (s.gate) {
        const Doubles down = doubling(h, s.height / 2);
        const Doubles across = doubling(w, s.width / 2);
        double u = 0;
        for (int64_t a = 0; a < s.height / 2; ++a) {
          for (int64_t b = 0; b < s.width / 2; ++b) {
            const double share = down[static_cast<size_t>(a)] * across[static_cast<size_t>(b)];
            u += share == 0 ? 0 : share * gate[gate_at(n, a, b, c)];
          }
        }
        open[i] = 1 / (1 + std::exp(-u));
      }
      entered[i] = round_to(before[i] * open[i], s.type);
    });
    each_product([&](int64_t n, int64_t oh, int64_t ow, int64_t c, size_t tap, int64_t h, int64_t w) {
      map[out_at(n, oh, ow, c)] += entered[at(n, h, w, c)] * depthwise[static_cast<size_t>(c) * 9 + tap];
    });
  }

  void run_back(const Doubles& grad, Doubles& to_x, Doubles& to_gate, Doubles& to_depthwise,
                Doubles& to_prologue) const {
    const auto C = static_cast<size_t>(s.channels);
    Doubles back(x.size());
    to_x.assign(x.size(), 0);
    to_gate.assign(gate.size(), 0);
    to_depthwise.assign(depthwise.size(), 0);
    to_prologue.assign(4 * C, 0);
    each_product([&](int64_t n, int64_t oh, int64_t ow, int64_t c, size_t tap, int64_t h, int64_t w) {
      const double g = grad[out_at(n, oh, ow, c)];
      back[at(n, h, w, c)] += g * depthwise[static_cast<size_t>(c) * 9 + tap];
      to_depthwise[static_cast<size_t>(c) * 9 + tap] += g * entered[at(n, h, w, c)];
    });
    each([&](int64_t n, int64_t h, int64_t w, int64_t c) {
      const size_t i = at(n, h, w, c);
      const auto k = static_cast<size_t>(c);
      const double g = back[i] * open[i];
      if (s.gate) {
        const Doubles down = doubling(h, s.height / 2);
        const Doubles across = doubling(w, s.width / 2);
        for (int64_t a = 0; a < s.height / 2; ++a) {
          for (int64_t b = 0; b < s.width / 2; ++b) {
            const double share = down[static_cast<size_t>(a)] * across[static_cast<size_t>(b)];
            to_gate[gate_at(n, a, b, c)] += share == 0 ? 0 : g * before[i] * (1 - open[i]) * share;
          }
        }
      }
      to_x[i] = g;
      if (s.prologue) {
        const double z = before[i] <= 0 ? 0 : g;
        to_x[i] = z * prologue[2 * C + k];
        to_prologue[k] -= z * prologue[2 * C + k];
        to_prologue[2 * C + k] += z * (x[i] - prologue[k]);
        to_prologue[3 * C + k] += z;
      }
    });
  }
};

void hide_input(const mf::AlignConvInput& in) {
  const auto map = static_cast<size_t>(in.images * in.height * in.width * in.channels);
  const auto channels = static_cast<size_t>(in.channels);
  hide(in.x, bytes_of(map, in.type));
  hide(in.depthwise.data, bytes_of(channels * 9, in.type));
  hide(in.prologue, 4 * channels * sizeof(float));
  hide(in.gate, bytes_of(map / 4, in.type));
  hide(in.valid_pointer, sizeof(int32_t));
}

void hide_gradient(const mf::AlignConvGradY& total) {
  const size_t map = bytes_of(static_cast<size_t>(total.images * total.pixels * total.channels), total.type);
  hide(total.y, map);
  hide(total.grad, map);
  hide(total.state, 4 * static_cast<size_t>(total.channels) * sizeof(float));
  hide(total.grad_state, 4 * static_cast<size_t>(total.channels) * sizeof(float));
  hide(total.pointwise, bytes_of(static_cast<size_t>(total.channels * total.in_channels), total.type));
  hide(total.kept, bytes_of(static_cast<size_t>(total.images * total.pixels * total.in_channels), total.type));
  hide(total.valid_pointer, sizeof(int32_t));
}

void pad(Doubles& values, const Setting& s) {
  const size_t image = s.images == 0 ? 0 : values.size() / static_cast<size_t>(s.images);
  std::fill(values.begin() + static_cast<int64_t>(image) * s.valid, values.end(), kNan);
}

void compare(Context& context, const Setting& s, const Launches& launches, bool fused) {
  std::mt19937 random(static_cast<unsigned>(s.height * 31 + s.channels * 7 + s.stride + s.images));
  Twin twin{s, {}, {}, {}, {}, {}, {}, {}, {}};
  const auto C = static_cast<size_t>(s.channels);
  const auto O = static_cast<size_t>(s.out_channels);
  const size_t elements = static_cast<size_t>(s.images * s.height * s.width) * C;
  twin.x = draw(random, elements, s.type, 1);
  twin.gate = draw(random, s.gate ? elements / 4 : 0, s.type, 1);
  twin.depthwise = draw(random, C * 9, s.type, 0.5);
  twin.prologue = draw(random, 4 * C, FloatType::kBFloat16, 0.5);
  if (s.nan == Setting::kInX) {
    twin.x[twin.at(0, 2, 2, 3)] = kNan;
  } else if (s.nan == Setting::kInPrologue) {
    twin.prologue[2 * C + 5] = kNan;
  } else if (s.nan == Setting::kInGate) {
    twin.gate[twin.gate_at(0, 1, 1, 7)] = kNan;
  }
  pad(twin.x, s);
  pad(twin.gate, s);
  twin.run();
  const int64_t out_pixels = s.images * twin.out_height() * twin.out_width();
  const double step = s.type == FloatType::kFloat32 ? 2e-6 : step_of(s.type);

  mf::AlignConvInput in{};
  in.type = s.type;
  in.x = context.upload(encode(twin.x, s.type));
  in.depthwise = {context.upload(encode(twin.depthwise, s.type)), s.type};
  in.prologue = s.prologue ? context.upload(floats(twin.prologue)) : nullptr;
  in.gate = s.gate ? context.upload(encode(twin.gate, s.type)) : nullptr;
  in.images = s.images;
  in.height = s.height;
  in.width = s.width;
  in.channels = s.channels;
  in.stride = s.stride;
  in.valid_pointer = context.upload(std::vector<int32_t>{static_cast<int32_t>(s.valid)});
  in.valid = -1;
  const auto poisoned = [&](size_t count) { return context.poisoned<unsigned char>(bytes_of(count, s.type)); };

  if (!fused) {
    auto* map = poisoned(twin.map.size());
    hide_input(in);
    launches.depthwise({in, map});
    expect(context, "map", map, twin.map, s.type, 2 * step);
  } else {
    Doubles pointwise = draw(random, O * C, s.type, 0.5);
    const Doubles map = rounded(twin.map, s.type);
    Doubles y(static_cast<size_t>(out_pixels) * O);
    for (int64_t pixel = 0; pixel < out_pixels; ++pixel) {
      for (size_t o = 0; o < O; ++o) {
        double sum = 0;
        for (size_t c = 0; c < C; ++c) {
          sum += map[static_cast<size_t>(pixel) * C + c] * pointwise[o * C + c];
        }
        y[static_cast<size_t>(pixel) * O + o] = sum;
      }
    }
    const Doubles weight = draw(random, O, FloatType::kBFloat16, 1);
    const Doubles bias = draw(random, O, FloatType::kBFloat16, 1);
    const Doubles running(O, 0.5);
    mf::AlignConvForward params{};
    params.input = in;
    params.pointwise = context.upload(encode(pointwise, s.type));
    params.out_channels = s.out_channels;
    params.norm.weight = s.parameters ? context.upload(floats(weight)) : nullptr;
    params.norm.bias = s.parameters ? context.upload(floats(bias)) : nullptr;
    params.norm.running_mean = context.upload(Floats(O, 0.5f));
    params.norm.running_var = context.upload(Floats(O, 0.5f));
    params.norm.batches = context.upload(std::vector<int64_t>{41});
    params.norm.momentum = static_cast<float>(kMomentum);
    params.norm.eps = static_cast<float>(kEps);
    params.norm.training = s.training;
    params.moments = context.poisoned<float>(static_cast<size_t>(launches.moments(params)) * 3 * O);
    auto* kept = poisoned(twin.map.size());
    params.map = s.keep_map ? kept : nullptr;
    auto* gpu_y = poisoned(y.size());
    params.y = gpu_y;
    params.state = context.poisoned<float>(4 * O);
    hide_input(in);
    hide(params.pointwise, bytes_of(O * C, s.type));
    launches.forward(params);
    if (s.keep_map) {
      expect(context, "map", kept, twin.map, s.type, 2 * step);
    }
    // A map's rounding may fall to the other side.
    expect(context, "y", gpu_y, y, s.type, 6 * step);
    // Statistics are those of y as it is stored.
    const Floats stored = decode(context, gpu_y, y.size(), s.type);
    Floats state(4 * O), running_mean(O), running_var(O);
    for (size_t o = 0; o < O; ++o) {
      const auto counted = static_cast<size_t>(s.valid * twin.out_height() * twin.out_width());
      double mean = 0;
      double squares = 0;
      for (size_t pixel = 0; pixel < counted; ++pixel) {
        mean += static_cast<double>(stored[pixel * O + o]) / static_cast<double>(counted);
      }
      for (size_t pixel = 0; pixel < counted; ++pixel) {
        squares += std::pow(static_cast<double>(stored[pixel * O + o]) - mean, 2);
      }
      double variance = counted == 0 ? 0 : squares / static_cast<double>(counted);
      const bool moves = s.training && counted > 0;
      running_mean[o] = static_cast<float>(moves ? 0.5 + kMomentum * (mean - 0.5) : 0.5);
      running_var[o] = static_cast<float>(
          moves ? 0.5 + kMomentum * (squares / std::max(1.0, static_cast<double>(counted) - 1) - 0.5) : 0.5);
      if (!s.training) {
        mean = variance = 0.5;
      }
      const double inverse = 1 / std::sqrt(variance + kEps);
      state[o] = static_cast<float>(mean);
      state[O + o] = static_cast<float>(inverse);
      state[2 * O + o] = static_cast<float>((s.parameters ? weight[o] : 1) * inverse);
      state[3 * O + o] = static_cast<float>(s.parameters ? bias[o] : 0);
    }
    context.expect_close("state", params.state, state, 1e-5 * s.leeway);
    context.expect_close("running mean", params.norm.running_mean, running_mean, 1e-5 * s.leeway);
    context.expect_close("running variance", params.norm.running_var, running_var, 1e-5 * s.leeway);
    context.expect_equal("batches", params.norm.batches, std::vector<int64_t>{s.training ? 42 : 41});
  }

  // The gradient of y in all, here with y in the place of the depthwise map.
  Doubles grad = draw(random, twin.map.size(), s.type, 1);
  Doubles y = draw(random, twin.map.size(), s.type, 1);
  pad(grad, s);
  pad(y, s);
  const Doubles state = draw(random, 4 * C, FloatType::kBFloat16, 0.5);
  const Doubles grad_state = draw(random, 4 * C, FloatType::kBFloat16, 1);
  const Doubles mean_rest = fused ? Doubles(C) : draw(random, C, FloatType::kBFloat16, 0.5);
  const Doubles weight = draw(random, C, FloatType::kBFloat16, 1);
  mf::AlignConvGradY total{};
  total.type = s.type;
  total.y = context.upload(encode(y, s.type));
  total.grad = context.upload(encode(grad, s.type));
  total.state = context.upload(floats(state));
  total.grad_state = context.upload(floats(grad_state));
  total.norm.weight = context.upload(floats(weight));
  total.mean_rest = fused ? nullptr : context.upload(floats(mean_rest));
  total.norm.training = s.training;
  total.images = s.images;
  total.pixels = twin.out_height() * twin.out_width();
  total.channels = s.channels;
  total.valid_pointer = in.valid_pointer;
  auto* gpu_total = poisoned(grad.size());
  total.total = gpu_total;
  total.weight = context.poisoned<float>(C);
  total.bias = context.poisoned<float>(C);
  hide_gradient(total);
  launches.total(total);
  const double count = static_cast<double>(s.valid * total.pixels);
  Doubles wanted(grad.size());
  Floats to_weight(C), to_bias(C);
  for (size_t c = 0; c < C; ++c) {
    to_weight[c] = static_cast<float>(grad_state[2 * C + c] * state[C + c]);
    to_bias[c] = static_cast<float>(grad_state[3 * C + c]);
  }
  for (size_t i = 0; i < static_cast<size_t>(count) * C; ++i) {
    const size_t c = i % C;
    const double to_inverse = weight[c] * grad_state[2 * C + c] + grad_state[C + c];
    const double slope = s.training ? -to_inverse * std::pow(state[C + c], 3) / count : 0;
    wanted[i] = grad[i] + slope * (y[i] - (state[c] + mean_rest[c])) + (s.training ? grad_state[c] / count : 0);
  }
  expect(context, "gradient in all", gpu_total, wanted, s.type, 2 * step);
  context.expect_close("norm's weight's gradient", total.weight, to_weight, 1e-6);
  context.expect_close("norm's bias's gradient", total.bias, to_bias, 1e-6);
  for (const bool has_grad : {true, false}) {  // one of its two parts alone
    auto* gpu_part = poisoned(grad.size());
    mf::AlignConvGradY part = total;
    part.total = gpu_part;
    part.weight = part.bias = nullptr;
    part.grad = has_grad ? total.grad : nullptr;
    part.grad_state = has_grad ? nullptr : total.grad_state;
    launches.total(part);
    Doubles of_part = grad;
    for (size_t i = 0; i < of_part.size(); ++i) {
      of_part[i] = i >= static_cast<size_t>(count) * C ? 0 : has_grad ? grad[i] : wanted[i] - grad[i];
    }
    expect(context, "a part of the gradient", gpu_part, of_part, s.type, 4 * step);
  }
  if (s.type != FloatType::kFloat32 && s.channels % 16 == 0) {
    // The first also with the gradient of the weights.
    for (const size_t kIn : {size_t{40}, size_t{72}}) {
      const Doubles pointwise = draw(random, C * kIn, s.type, 0.5);
      const Floats stored = decode(context, gpu_total, grad.size(), s.type);
      Doubles product(static_cast<size_t>(out_pixels) * kIn);
      for (size_t pixel = 0; pixel < static_cast<size_t>(out_pixels); ++pixel) {
        for (size_t c = 0; c < C; ++c) {
          for (size_t i = 0; i < kIn; ++i) {
            product[pixel * kIn + i] += static_cast<double>(stored[pixel * C + c]) * pointwise[c * kIn + i];
          }
        }
      }
      auto* gpu_again = poisoned(grad.size());
      auto* gpu_product = poisoned(product.size());
      total.total = gpu_again;
      total.pointwise = context.upload(encode(pointwise, s.type));
      total.in_channels = kIn;
      total.map = gpu_product;
      hide_gradient(total);
      launches.total(total);
      expect(context, "gradient in all, with a product", gpu_again, wanted, s.type, 2 * step);
      expect(context, "product", gpu_product, product, s.type, 2 * step);
      context.expect_close("norm's weight's gradient, with a product", total.weight, to_weight, 1e-6);
      if (kIn <= 64) {
        Doubles kept = draw(random, product.size(), s.type, 1);
        pad(kept, s);
        Doubles of_weights(C * kIn);
        for (size_t pixel = 0; pixel < static_cast<size_t>(count); ++pixel) {
          for (size_t c = 0; c < C; ++c) {
            for (size_t i = 0; i < kIn; ++i) {
              of_weights[c * kIn + i] += static_cast<double>(stored[pixel * C + c]) * kept[pixel * kIn + i];
            }
          }
        }
        auto* gpu_beside = poisoned(product.size());
        auto* gpu_weights = poisoned(C * kIn);
        mf::AlignConvGradY with_weights = total;
        with_weights.total = nullptr;
        with_weights.map = gpu_beside;
        with_weights.kept = context.upload(encode(kept, s.type));
        with_weights.into = {gpu_weights, s.type};
        with_weights.sums = context.poisoned<float>(static_cast<size_t>(launches.weight_sums(with_weights)) * C * kIn);
        hide_gradient(with_weights);
        launches.total(with_weights);
        expect(context, "product, beside the weights' gradient", gpu_beside, product, s.type, 2 * step);
        expect(context, "weights' gradient", gpu_weights, of_weights, s.type, step + 1e-5 * s.leeway);
      }
    }
  }

  mf::AlignConvBackward back{};
  back.input = in;
  back.grad = total.grad;
  back.sums = context.poisoned<float>(static_cast<size_t>(launches.sums(in)) * mf::kAlignConvSums * C);
  auto* gpu_x = poisoned(twin.x.size());
  auto* gpu_gate = poisoned(twin.gate.size());
  back.x = gpu_x;
  back.gate = s.gate ? gpu_gate : nullptr;
  back.depthwise.type = fused ? s.type : FloatType::kFloat32;
  auto* gpu_depthwise = context.poisoned<unsigned char>(bytes_of(C * 9, back.depthwise.type));
  back.depthwise.data = gpu_depthwise;
  back.prologue = s.prologue ? context.poisoned<float>(4 * C) : nullptr;
  hide_input(in);
  hide(back.grad, bytes_of(grad.size(), s.type));
  launches.backward(back);
  Doubles to_x, to_gate, to_depthwise, to_prologue;
  twin.run_back(grad, to_x, to_gate, to_depthwise, to_prologue);
  expect(context, "x's gradient", gpu_x, to_x, s.type, 2 * step);
  // Entered values may round to the other side.
  const double sums = s.leeway * (1e-5 + (s.type == FloatType::kFloat32 ? 0 : step));
  expect(context, "depthwise weights' gradient", gpu_depthwise, to_depthwise, back.depthwise.type,
         sums + (fused ? step : 0));
  if (s.gate) {
    expect(context, "gate's gradient", gpu_gate, to_gate, s.type, 4 * step);
  }
  if (s.prologue) {
    context.expect_close("prologue's gradient", back.prologue, floats(to_prologue), 1e-5 * s.leeway);
  }
}

void compare(Context& context, const Setting& setting, bool fused) {
  const mf::Stream stream = context.stream();
  compare(context, setting,
          {[=](const mf::AlignConvDepthwise& params) { mf::cuda::align_conv_depthwise(params, stream); },
           [](const mf::AlignConvForward& params) { return mf::cuda::align_conv_moments(params); },
           [=](const mf::AlignConvForward& params) { mf::cuda::align_conv_forward(params, stream); },
           [](const mf::AlignConvGradY& params) { return mf::cuda::align_conv_weight_sums(params); },
           [=](const mf::AlignConvGradY& params) { mf::cuda::align_conv_grad_y(params, stream); },
           [](const mf::AlignConvInput& in) { return mf::cuda::align_conv_sums(in); },
           [=](const mf::AlignConvBackward& params) { mf::cuda::align_conv_backward(params, stream); }},
          fused);
}

}  // namespace

KERNEL_CASE(align_conv_fused_in_bfloat16) {
  Setting setting;
  setting.prologue = true;
  compare(context, setting, true);
  setting.stride = 2;
  setting.prologue = false;
  compare(context, setting, true);
}

KERNEL_CASE(align_conv_fused_without_parameters) {
  Setting setting;
  setting.prologue = true;
  setting.out_channels = 72;
  setting.parameters = false;
  compare(context, setting, true);
}

KERNEL_CASE(align_conv_fused_with_gate) {
  Setting setting;
  setting.stride = 2;
  setting.gate = true;
  setting.height = 8;
  setting.training = false;
  compare(context, setting, true);
}

KERNEL_CASE(align_conv_fused_of_many_channels) {
  Setting setting;
  setting.channels = 96;
  setting.out_channels = 200;
  setting.prologue = true;
  setting.images = 1;
  setting.valid = 1;
  setting.keep_map = false;
  compare(context, setting, true);
}

// What takes most shared memory.
KERNEL_CASE(align_conv_fused_of_the_most_channels) {
  Setting setting;
  setting.channels = 128;
  setting.out_channels = 256;
  setting.prologue = true;
  setting.height = 9;
  setting.width = 10;
  setting.images = setting.valid = 1;
  compare(context, setting, true);
}

KERNEL_CASE(align_conv_of_several_tiles) {
  Setting setting;
  setting.height = 12;
  setting.width = 20;
  setting.prologue = true;
  setting.images = setting.valid = 1;
  compare(context, setting, false);
  setting.stride = 2;
  setting.prologue = false;
  setting.gate = true;
  setting.height = 36;
  setting.width = 20;
  setting.channels = 8;
  compare(context, setting, false);
}

KERNEL_CASE(align_conv_in_float32) {
  for (const int64_t stride : {1, 2}) {
    Setting setting;
    setting.type = FloatType::kFloat32;
    setting.stride = stride;
    setting.channels = 72;
    setting.height = stride == 1 ? 5 : 4;
    setting.width = stride == 1 ? 3 : 2;
    setting.prologue = stride == 1;
    setting.gate = stride == 2;
    compare(context, setting, false);
  }
}

KERNEL_CASE(align_conv_of_the_least_maps) {
  for (const int64_t images : {0, 1, 5}) {
    Setting setting;
    setting.images = images;
    setting.valid = images == 5 ? 4 : images;
    setting.height = setting.width = images == 1 ? 1 : 2;
    setting.stride = images == 1 ? 1 : 2;
    setting.gate = images == 5;
    setting.prologue = images == 1;
    setting.channels = 16;
    compare(context, setting, true);
    compare(context, setting, false);
  }
}

// Every type and form; fused with one, two and four chunks of output channels, and the depthwise
// convolution alone. Sizes take turns.
COMPILED_CASE(align_conv_of_every_instance) {
  unsigned turn = 0;
  const auto next = [&](std::initializer_list<int64_t> choices) { return choices.begin()[turn % choices.size()]; };
  for (const FloatType type : {FloatType::kBFloat16, FloatType::kFloat32}) {
    for (unsigned form = 0; form < 4; ++form) {  // stride 1 with a prologue; stride 2, with a prologue, with a gate
      for (const int64_t out_channels : {0, 40, 104, 168, 256}) {
        if ((type == FloatType::kFloat32 && out_channels > 0) || (form > 0 && out_channels > 128)) {
          continue;
        }
        ++turn;
        Setting setting;
        setting.type = type;
        setting.stride = form == 0 ? 1 : 2;
        setting.gate = form == 3;
        setting.prologue = form % 2 == 0;
        setting.training = turn % 4 != 0;
        setting.parameters = turn % 5 != 0;
        setting.keep_map = turn % 3 != 0;
        setting.images = next({2, 3, 1});
        setting.valid = setting.images - next({0, 1});
        const int64_t unit = setting.stride;
        setting.height = unit * next({5, 9, 2, 7, 1});
        setting.width = unit * next({3, 1, 9, 8});
        setting.channels = out_channels > 0 ? next({16, 48, 80}) : next({8, 40, 72, 16});
        setting.out_channels = out_channels > 0 ? out_channels : 8;
        setting.leeway = 3;
        compare(context, setting, out_channels > 0);
      }
    }
  }
}

// More tiles than blocks run at once, so that blocks take several, and the last ones fewer.
COMPILED_CASE(align_conv_of_many_tiles) {
  Setting setting;
  setting.images = 275;
  setting.valid = 273;
  setting.height = setting.width = 8;
  setting.out_channels = 16;
  setting.prologue = true;
  setting.leeway = 10;
  compare(context, setting, true);
  setting.images = 205;
  setting.valid = 204;
  setting.channels = 72;
  compare(context, setting, false);
  setting.prologue = false;
  setting.type = FloatType::kFloat32;
  setting.images = 275;
  setting.valid = 274;
  setting.channels = 8;
  setting.stride = 2;
  setting.height = setting.width = 16;
  setting.gate = true;
  compare(context, setting, false);
}

KERNEL_CASE(align_conv_keeps_what_is_no_number) {
  for (const Setting::Nan nan : {Setting::kInX, Setting::kInPrologue, Setting::kInGate}) {
    Setting setting;
    setting.nan = nan;
    setting.gate = nan == Setting::kInGate;
    setting.prologue = !setting.gate;
    setting.stride = setting.gate ? 2 : 1;
    compare(context, setting, true);
    setting.type = FloatType::kFloat32;
    setting.stride = 2;
    compare(context, setting, false);
  }
}

#if defined(MF_KERNELS_ON_CPU)

// Two warps a block, but for the fused forward, and one block for all tiles, so that every barrier
// counts.
template <typename T, int kStride, mf::cuda::Prologue kPrologue>
static void compare_bodies(Context& context, const Setting& setting, bool fused) {
  constexpr int kThreads = 64;
  constexpr int kForwardThreads = 256;
  namespace cuda = mf::cuda;
  constexpr size_t kRoom = 64 * 1024;
  constexpr auto forward_bytes = [](int height, int width) -> size_t {
    return cuda::InputRegion::of<kStride>(1, height, width).pixels() * cuda::kSlice * sizeof(T);
  };
  constexpr auto backward_bytes = [](int height, int width) -> size_t {
    return cuda::BackwardRegions<kStride, kPrologue>::of({}, 0, 1, height, width).template bytes<T, kThreads>();
  };
  const auto forward_tiles = [&](const mf::AlignConvInput& in) {
    return cuda::ForwardTiles::of<kStride>(in, forward_bytes, kRoom);
  };
  const auto staged = [&](const cuda::Tiles& tiles) { return tiles.images * forward_bytes(tiles.height, tiles.width); };
  const auto parts = [](const mf::AlignConvInput&) -> int64_t { return 1; };
  compare(context, setting,
          {[&](const mf::AlignConvDepthwise& params) {
             const cuda::ForwardTiles tiles = forward_tiles(params.input);
             const size_t taps = cuda::kSlice * cuda::kTapCount * sizeof(T);
             shim::launch(cuda::slices_of(params.input.channels), kThreads, staged(tiles) + taps, [&] {
               MF_DYNAMIC_SHARED(memory);
               cuda::align_conv_depthwise_block<T, kStride, kThreads>(params, tiles, memory);
             });
           },
           [&](const mf::AlignConvForward&) -> int64_t { return 1; },
           [&](const mf::AlignConvForward& params) {
             if constexpr (sizeof(T) == 2) {
               const cuda::ForwardTiles tiles = forward_tiles(params.input);
               const auto map = cuda::FusedMemory::of(params.input.channels, params.out_channels, staged(tiles),
                                                      sizeof(T), kForwardThreads);
               shim::launch(1, kForwardThreads, map.bytes, [&] {
                 MF_DYNAMIC_SHARED(memory);
                 cuda::align_conv_forward_block<T, kStride, 2, kForwardThreads>(params, tiles, map, memory);
               });
               hide(params.moments, sizeof(float) * 3 * static_cast<size_t>(params.out_channels));
               shim::launch(static_cast<unsigned>((params.out_channels + 31) / 32), kThreads,
                            kThreads * sizeof(cuda::SumsAboutOrigin), [&] {
                              MF_DYNAMIC_SHARED(memory);
                              cuda::align_conv_finish_block<kThreads>(params, 1, memory);
                            });
             }
           },
           [](const mf::AlignConvGradY&) -> int64_t { return 1; },
           [&](const mf::AlignConvGradY& params) {
             if (params.pointwise == nullptr) {
               shim::launch(2, kThreads, 0, [&] { cuda::align_conv_grad_y_block<T, kThreads>(params); });
             } else if constexpr (sizeof(T) == 2) {
               const auto launch = [&](auto weights) {
                 constexpr bool kWeights = decltype(weights)::value;
                 const auto map = cuda::ProductMemory::of(params.channels, params.in_channels, sizeof(T), kWeights);
                 shim::launch(1, kThreads, map.bytes, [&] {
                   MF_DYNAMIC_SHARED(memory);
                   cuda::align_conv_product_block<T, kThreads, kWeights>(params, map, memory);
                 });
               };
               if (params.into.data == nullptr) {
                 launch(std::false_type());
               } else {
                 launch(std::true_type());
                 hide(params.sums, sizeof(float) * static_cast<size_t>(params.channels * params.in_channels));
                 shim::launch(static_cast<unsigned>((params.channels * params.in_channels + 31) / 32), kThreads,
                              kThreads * sizeof(float), [&] {
                                MF_DYNAMIC_SHARED(memory);
                                cuda::align_conv_weights_block<kThreads>(params, 1, memory);
                              });
               }
             }
           },
           parts,
           [&](const mf::AlignConvBackward& params) {
             const cuda::Tiles tiles = cuda::Tiles::of(params.input.images, params.input.height, params.input.width, 4,
                                                       4, backward_bytes, kRoom);
             const auto regions = cuda::BackwardRegions<kStride, kPrologue>::of(
                 params.input, cuda::kHeaderPixels<T, kPrologue, kThreads>, tiles.images, tiles.height, tiles.width);
             shim::launch(cuda::BackwardBlock<kThreads>::slices(params.input.channels), kThreads,
                          regions.template bytes<T, kThreads>(), [&] {
                            MF_DYNAMIC_SHARED(memory);
                            cuda::align_conv_backward_block<T, kStride, kPrologue, kThreads>(params, tiles, regions,
                                                                                             memory);
                          });
             hide(params.sums, sizeof(float) * mf::kAlignConvSums * static_cast<size_t>(params.input.channels));
             shim::launch(static_cast<unsigned>((params.input.channels + 31) / 32 * mf::kAlignConvSums), kThreads,
                          kThreads * sizeof(float), [&] {
                            MF_DYNAMIC_SHARED(memory);
                            cuda::align_conv_sums_block<kThreads>(params, 1, memory);
                          });
           }},
          fused);
}

KERNEL_CASE(small_align_conv_bodies_fused) {
  Setting setting;
  setting.channels = 80;
  setting.out_channels = 72;
  setting.height = 10;
  setting.width = 8;
  setting.images = 2;
  setting.valid = 1;
  setting.stride = 2;
  setting.gate = true;
  compare_bodies<__nv_bfloat16, 2, mf::cuda::Prologue::kGate>(context, setting, true);
}

KERNEL_CASE(small_align_conv_bodies_alone) {
  Setting setting;
  setting.stride = 2;
  setting.height = 20;
  setting.prologue = true;
  compare_bodies<__nv_bfloat16, 2, mf::cuda::Prologue::kNorm>(context, setting, false);
}

#endif
