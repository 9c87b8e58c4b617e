// The kernels against batch norm as textbooks write it, in double precision, on numbers that the
// kernel's type holds exactly. There is no twin in csrc/cpu: on the CPU PyTorch's own operations
// serve.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "api/batch_norm_act.h"
#include "encoded_floats.h"

#if defined(MF_KERNELS_ON_CPU)
#include "cuda/batch_norm_act_backward.cuh"
#include "cuda/batch_norm_act_forward.cuh"
#include "cuda/batch_norm_act_statistics.cuh"
#endif

namespace {

using namespace kernel_case;

constexpr double kEps = 1e-5;
constexpr double kMomentum = 0.125;

struct Setting {
  int64_t images = 5, pixels = 6, channels = 32, valid = 5;
  FloatType type = FloatType::kFloat32;
  bool residual = false, second_norm = false, prologue = false;
  bool relu = true, wants_mask = true;
  bool training = true, second_training = true;
  bool parameters = true;  // weight and bias
  int consumers = 1;
  bool keep_sum = false;  // the first pass writes the sum of the gradients
  int processors = 4;
  double offset = 0.25;  // added to the maps
};

struct Launches {
  std::function<void(const mf::NormStatistics&)> statistics;
  std::function<void(const mf::BatchNormActForward&)> forward;
  std::function<void(const mf::BatchNormActBackward&)> sums, backward;
};

// One norm over a map [pixels, channels] that holds valid pixels alone.
struct TextbookNorm {
  Doubles weight, bias, running_mean, running_var;  // [channels]; the running ones as they were
  bool training;
  Doubles mean, inverse;

  void prepare(const Doubles& x, int64_t channels) {
    const auto pixels = static_cast<int64_t>(x.size()) / channels;
    mean = running_mean;
    Doubles variance = running_var;
    for (int64_t c = 0; training && c < channels; ++c) {
      double sum = 0, squares = 0;
      for (int64_t p = 0; p < pixels; ++p) {
        sum += x[p * channels + c];
      }
      mean[c] = pixels == 0 ? 0 : sum / static_cast<double>(pixels);
      for (int64_t p = 0; p < pixels; ++p) {
        squares += std::pow(x[p * channels + c] - mean[c], 2);
      }
      variance[c] = pixels == 0 ? 0 : squares / static_cast<double>(pixels);
      if (pixels > 0) {
        running_mean[c] += kMomentum * (mean[c] - running_mean[c]);
        running_var[c] += kMomentum * (squares / std::max<double>(static_cast<double>(pixels - 1), 1) - running_var[c]);
      }
    }
    inverse.resize(variance.size());
    std::transform(variance.begin(), variance.end(), inverse.begin(), [](double v) { return 1 / std::sqrt(v + kEps); });
  }
  double value(double x, int64_t c) const { return weight[c] * (x - mean[c]) * inverse[c] + bias[c]; }

  // The gradients of x, weight and bias.
  Doubles back(const Doubles& x, const Doubles& g, int64_t channels, Doubles& to_weight, Doubles& to_bias) const {
    const auto pixels = static_cast<int64_t>(x.size()) / channels;
    Doubles to_x(x.size());
    to_weight.assign(static_cast<size_t>(channels), 0);
    to_bias.assign(static_cast<size_t>(channels), 0);
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t p = 0; p < pixels; ++p) {
        to_bias[c] += g[p * channels + c];
        to_weight[c] += g[p * channels + c] * (x[p * channels + c] - mean[c]) * inverse[c];
      }
      for (int64_t p = 0; p < pixels; ++p) {
        const int64_t at = p * channels + c;
        const double centred =
            training ? (to_bias[c] + (x[at] - mean[c]) * inverse[c] * to_weight[c]) / static_cast<double>(pixels) : 0;
        to_x[at] = weight[c] * inverse[c] * (g[at] - centred);
      }
    }
    return to_x;
  }
};

// To the nearest number of the type, ties to even.
double rounded(double value, FloatType type) {
  const int bits = type == FloatType::kBFloat16 ? 8 : 24;
  int exponent = 0;
  const double mantissa = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, bits)), exponent - bits);
}

void compare(Context& context, const Setting& s, const Launches& launches) {
  std::mt19937 random(static_cast<unsigned>(s.images * 31 + s.channels));
  const int64_t channels = s.channels;
  const auto size = static_cast<size_t>(s.images * s.pixels * channels);
  const auto valid = static_cast<size_t>(s.valid * s.pixels * channels);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto vector = [&](double low, double scale) {
    Doubles values = draw(random, static_cast<size_t>(channels), FloatType::kBFloat16, scale);
    std::transform(values.begin(), values.end(), values.begin(), [&](double v) { return low + std::abs(v); });
    return values;
  };
  const auto map = [&](double scale) {
    Doubles values = draw(random, valid, FloatType::kBFloat16, scale);
    for (size_t i = 0; i < values.size();
         ++i) {  // every type holds these: multiples of 2^-6 below 4, or of 2^-17 for a small scale
      values[i] = std::round(values[i] * 64 / scale) / 64 * scale + s.offset;
    }
    return values;
  };
  const double scale = s.offset > 100 ? 1.0 / 128 : 1.0;
  const Doubles x = map(scale);
  const Doubles residual = s.residual ? map(scale) : Doubles{};
  std::vector<TextbookNorm> norms;
  for (int i = 0; i < (s.second_norm ? 2 : 1); ++i) {
    const Doubles ones(static_cast<size_t>(channels), 1), zeros(static_cast<size_t>(channels), 0);
    norms.push_back({s.parameters ? vector(0.25, 0.5) : ones,
                     s.parameters ? vector(-0.5, 0.5) : zeros,
                     vector(s.offset - 0.5, 0.5),
                     vector(0.5, 0.5),
                     i == 0 ? s.training : s.second_training,
                     {},
                     {}});
  }
  const Doubles before = [&] {  // mean, inverse deviation (unused), scale, shift
    Doubles state;
    for (const double low : {s.offset - 0.5, 3.0, 0.5, -0.25}) {
      const Doubles row = vector(low, 0.5);
      state.insert(state.end(), row.begin(), row.end());
    }
    return state;
  }();

  // The textbook's forward and backward.
  Doubles inner = x, inner_before = x;
  for (size_t i = 0; s.prologue && i < valid; ++i) {
    const size_t c = i % static_cast<size_t>(channels);
    inner_before[i] = before[2 * channels + c] * (x[i] - before[c]) + before[3 * channels + c];
    inner[i] = std::max(inner_before[i], 0.0);
  }
  norms[0].prepare(inner, channels);
  if (s.second_norm) {
    norms[1].prepare(residual, channels);
  }
  Doubles z(valid), y(valid), g(valid);
  std::vector<Doubles> grads;
  for (int k = 0; k < s.consumers; ++k) {
    grads.push_back(map(0.5));
    std::transform(grads[k].begin(), grads[k].end(), grads[k].begin(), [&](double v) { return v - s.offset; });
  }
  std::vector<unsigned char> mask(size / mf::kGroup);
  for (size_t i = 0; i < valid; ++i) {
    const int64_t c = static_cast<int64_t>(i) % channels;
    z[i] = norms[0].value(inner[i], c) + (!s.residual     ? 0
                                          : s.second_norm ? norms[1].value(residual[i], c)
                                                          : residual[i]);
    y[i] = s.relu ? std::max(z[i], 0.0) : z[i];
    mask[i / mf::kGroup] = static_cast<unsigned char>(mask[i / mf::kGroup] | (z[i] > 0 ? 1u << i % mf::kGroup : 0u));
    for (int k = 0; k < s.consumers; ++k) {
      g[i] += s.relu && z[i] <= 0 ? 0 : grads[k][i];
    }
  }
  if (s.keep_sum) {  // what is written is what counts
    std::transform(g.begin(), g.end(), g.begin(), [&](double v) { return rounded(v, s.type); });
  }
  std::vector<Doubles> to_weight(norms.size()), to_bias(norms.size());
  Doubles to_inner = norms[0].back(inner, g, channels, to_weight[0], to_bias[0]);
  const Doubles to_residual = s.second_norm ? norms[1].back(residual, g, channels, to_weight[1], to_bias[1]) : g;
  Doubles to_x = to_inner, to_before(static_cast<size_t>(mf::kNormRows * channels));
  for (size_t i = 0; s.prologue && i < valid; ++i) {
    const size_t c = i % static_cast<size_t>(channels);
    const double grad = inner_before[i] > 0 ? to_inner[i] : 0;
    to_x[i] = before[2 * channels + c] * grad;
    to_before[c] -= to_x[i];
    to_before[2 * channels + c] += grad * (x[i] - before[c]);
    to_before[3 * channels + c] += grad;
  }

  // The kernels.
  const mf::MapShape shape{s.images, s.pixels, channels,
                           context.upload(std::vector<int32_t>{static_cast<int32_t>(s.valid)}), -1};
  const mf::ChannelGrid grid = mf::norm_grid(shape, s.processors);
  const auto uploaded = [&](const Doubles& values) {
    return context.upload(encode(padded(values, size, nan), s.type));
  };
  const size_t map_bytes = bytes_of(size, s.type);
  const auto* gpu_x = uploaded(x);
  const auto* gpu_residual = s.residual ? uploaded(residual) : nullptr;
  const auto* gpu_before = s.prologue ? context.upload(floats(before)) : nullptr;
  mf::NormParams params[2] = {};
  std::vector<float*> running_mean, running_var;
  auto* batches = context.upload(std::vector<int64_t>{41});
  for (size_t i = 0; i < norms.size(); ++i) {
    // What the norms held before prepare() moved them.
    const auto undo = [&](const Doubles& now, const Doubles& added) {
      Doubles then = now;
      for (size_t c = 0; norms[i].training && s.valid > 0 && c < then.size(); ++c) {
        then[c] = (now[c] - kMomentum * added[c]) / (1 - kMomentum);
      }
      return floats(then);
    };
    const auto pixels = static_cast<double>(s.valid * s.pixels);
    Doubles unbiased(norms[i].inverse);
    for (double& v : unbiased) {
      v = (1 / (v * v) - kEps) * (pixels > 1 ? pixels / (pixels - 1) : 1);
    }
    running_mean.push_back(context.upload(undo(norms[i].running_mean, norms[i].mean)));
    running_var.push_back(context.upload(undo(norms[i].running_var, unbiased)));
    params[i] = {s.parameters ? context.upload(floats(norms[i].weight)) : nullptr,
                 s.parameters ? context.upload(floats(norms[i].bias)) : nullptr,
                 running_mean[i],
                 running_var[i],
                 i == 0 ? batches : nullptr,
                 static_cast<float>(kMomentum),
                 static_cast<float>(kEps),
                 norms[i].training};
  }
  const auto count = static_cast<int64_t>(norms.size());
  const auto states = static_cast<size_t>(count * mf::kNormRows * channels);
  auto* state = context.poisoned<float>(states);
  auto* mean_rest = context.poisoned<float>(static_cast<size_t>(channels));
  auto* tickets = context.upload(std::vector<uint32_t>(static_cast<size_t>(count * grid.tickets()), 0));
  auto* partials = context.poisoned<float>(static_cast<size_t>(count * grid.partials(mf::NormStatistics::kFields)));
  hide(gpu_x, map_bytes);
  launches.statistics({shape,
                       s.type,
                       s.processors,
                       static_cast<int>(count),
                       {gpu_x, gpu_residual},
                       {params[0], params[1]},
                       gpu_before,
                       state,
                       mean_rest,
                       partials,
                       tickets});
  const double close = s.type == FloatType::kFloat32 || s.prologue ? 2e-5 : 1e-5;
  Floats wanted_state;
  for (const TextbookNorm& norm : norms) {
    for (size_t row = 0; row < mf::kNormRows; ++row) {
      for (size_t c = 0; c < static_cast<size_t>(channels); ++c) {
        const double values[] = {norm.mean[c], norm.inverse[c], norm.weight[c] * norm.inverse[c], norm.bias[c]};
        wanted_state.push_back(static_cast<float>(values[row]));
      }
    }
  }
  context.expect_close("state", state, wanted_state, close);
  Floats wanted_rest = context.download(state, static_cast<size_t>(channels));
  for (size_t c = 0; c < wanted_rest.size(); ++c) {
    wanted_rest[c] = s.training ? static_cast<float>(norms[0].mean[c] - double{wanted_rest[c]}) : 0.0f;
  }
  context.expect_close("rest of the mean", mean_rest, wanted_rest, s.offset > 100 ? 1e-7 : 1e-6);
  for (size_t i = 0; i < norms.size(); ++i) {
    context.expect_close("running mean", running_mean[i], floats(norms[i].running_mean), close);
    context.expect_close("running variance", running_var[i], floats(norms[i].running_var), close);
  }
  context.expect_equal("batches", batches, std::vector<int64_t>{41 + (s.training ? 1 : 0)});
  context.expect_equal("tickets", tickets, std::vector<uint32_t>(static_cast<size_t>(count * grid.tickets()), 0));

  // Rounding of the mean, times the scale, is what a large mean costs.
  double amplified = 0;
  for (const TextbookNorm& norm : norms) {
    for (size_t c = 0; c < norm.mean.size(); ++c) {
      amplified = std::max(amplified, std::abs(norm.mean[c] * norm.weight[c] * norm.inverse[c]) / (1 << 24));
    }
  }
  const double tolerance = 4 * amplified + step_of(s.type) + 2e-5;
  auto* gpu_y = context.poisoned<unsigned char>(map_bytes);
  auto* gpu_mask = s.relu && s.wants_mask ? context.poisoned<uint8_t>(mask.size()) : nullptr;
  hide(state, states * sizeof(float));
  launches.forward(
      {shape, s.type, s.processors, gpu_x, state, gpu_before, gpu_residual, s.second_norm, s.relu, gpu_y, gpu_mask});
  expect(context, "y", gpu_y, padded(y, size, 0), s.type, tolerance);
  if (gpu_mask != nullptr) {
    std::vector<uint8_t> bits = context.download(gpu_mask, mask.size());
    for (size_t i = 0; i < valid; ++i) {  // next to zero either answer will do
      if (std::abs(z[i]) < tolerance) {
        const auto bit = static_cast<uint8_t>(1u << i % mf::kGroup);
        bits[i / mf::kGroup] = static_cast<uint8_t>((bits[i / mf::kGroup] & ~bit) | (mask[i / mf::kGroup] & bit));
      }
    }
    context.expect_equal("mask", context.upload(bits), mask);
  }

  mf::BatchNormActBackward back{};
  back.shape = shape;
  back.type = s.type;
  back.processors = s.processors;
  for (int k = 0; k < s.consumers; ++k) {
    back.grads[k] = uploaded(grads[k]);
  }
  back.grad_count = s.consumers;
  back.mask = s.relu ? context.upload(mask) : nullptr;
  back.x = gpu_x;
  back.residual = s.second_norm ? gpu_residual : nullptr;
  back.state = context.upload(wanted_state);
  back.prologue = gpu_before;
  std::copy_n(params, 2, back.norm);
  const auto grad_rows = static_cast<size_t>(mf::kNormGradRows * channels);
  back.norm_grads = context.poisoned<float>(static_cast<size_t>(count) * grad_rows);
  back.partials = context.poisoned<float>(static_cast<size_t>(grid.partials(mf::BatchNormActBackward::kSumFields)));
  back.tickets = tickets;
  auto* gpu_g = s.keep_sum ? context.poisoned<unsigned char>(map_bytes) : nullptr;
  back.g = gpu_g;
  hide(back.grads[0], map_bytes);
  launches.sums(back);
  for (size_t i = 0; i < norms.size(); ++i) {
    context.expect_close("gradient of weight", back.norm_grads + i * grad_rows, floats(to_weight[i]),
                         1e-4 + 4 * amplified);
    context.expect_close("gradient of bias", back.norm_grads + i * grad_rows + channels, floats(to_bias[i]), 1e-4);
  }
  if (s.keep_sum) {
    expect(context, "sum of gradients", gpu_g, padded(g, size, 0), s.type, 1e-6);
    std::fill_n(back.grads, s.consumers, nullptr);
    back.grads[0] = gpu_g;
    back.grad_count = 1;
    back.mask = nullptr;
  }
  auto* gpu_to_x = context.poisoned<unsigned char>(map_bytes);
  auto* gpu_to_residual = s.second_norm ? context.poisoned<unsigned char>(map_bytes) : nullptr;
  back.x_grad = gpu_to_x;
  back.residual_grad = gpu_to_residual;
  back.prologue_grad = s.prologue ? context.poisoned<float>(to_before.size()) : nullptr;
  back.partials =
      context.poisoned<float>(static_cast<size_t>(grid.partials(mf::BatchNormActBackward::kPrologueFields)));
  hide(back.norm_grads, static_cast<size_t>(count) * grad_rows * sizeof(float));
  hide(gpu_g, map_bytes);
  launches.backward(back);
  double largest = 1;  // of scale: dx is scale times what a gradient of 1 gives
  for (const double v : wanted_state) {
    largest = std::max(largest, std::abs(v) < 1e3 ? std::abs(v) : 0.0);
  }
  const double loose = step_of(s.type) + 1e-4 + 8 * largest * amplified;
  expect(context, "gradient of x", gpu_to_x, padded(to_x, size, 0), s.type, loose);
  if (s.second_norm) {
    expect(context, "gradient of the residual", gpu_to_residual, padded(to_residual, size, 0), s.type, loose);
  }
  if (s.prologue) {
    context.expect_close("gradient of the prologue", back.prologue_grad, floats(to_before), 2e-4);
  }
  if (!s.prologue && !s.second_norm) {  // what flows through the statistics alone, as for norm_state
    Doubles through = to_x;
    for (size_t i = 0; i < valid; ++i) {
      const size_t c = i % static_cast<size_t>(channels);
      through[i] -= norms[0].weight[c] * norms[0].inverse[c] * g[i];
    }
    back.grad_count = 0;
    back.mask = nullptr;
    auto* gpu_through = context.poisoned<unsigned char>(map_bytes);
    back.x_grad = gpu_through;
    launches.backward(back);
    expect(context, "gradient of x through the statistics", gpu_through, padded(through, size, 0), s.type, loose);
  }
  context.expect_equal("tickets after all", tickets,
                       std::vector<uint32_t>(static_cast<size_t>(count * grid.tickets()), 0));
}

void compare_launchers(Context& context, const Setting& setting) {
  const mf::Stream stream = context.stream();
  compare(context, setting,
          {[&](const mf::NormStatistics& p) { mf::cuda::norm_statistics(p, stream); },
           [&](const mf::BatchNormActForward& p) { mf::cuda::batch_norm_act_forward(p, stream); },
           [&](const mf::BatchNormActBackward& p) { mf::cuda::batch_norm_act_sums(p, stream); },
           [&](const mf::BatchNormActBackward& p) { mf::cuda::batch_norm_act_backward(p, stream); }});
}

#if defined(MF_KERNELS_ON_CPU)

// The bodies in blocks of few threads: faster, several share a small map, and ThreadSanitizer sees
// them all.
template <typename T>
void compare_bodies(Context& context, const Setting& setting) {
  constexpr unsigned kThreads = 64;
  using namespace mf::cuda;
  const auto launch = [&](const mf::MapShape& shape, unsigned norms, size_t shared_bytes, const auto& body) {
    const mf::ChannelGrid grid = mf::norm_grid(shape, setting.processors);  // as the workspace is made for
    shim::launch(dim3(grid.blocks, grid.tiles, norms), kThreads, shared_bytes, [&] {
      MF_DYNAMIC_SHARED(shared);
      body(grid.shift, shared);
    });
  };
  compare(context, setting,
          {[&](const mf::NormStatistics& p) {
             launch(p.shape, static_cast<unsigned>(p.norms), channel_sums_shared<mf::NormStatistics::kFields>(kThreads),
                    [&](int shift, unsigned char* shared) {
                      p.prologue != nullptr ? norm_statistics_block<T, true>(p, shift, shared)
                                            : norm_statistics_block<T, false>(p, shift, shared);
                    });
           },
           [&](const mf::BatchNormActForward& p) {
             launch(p.shape, 1, 0, [&](int shift, unsigned char*) {
               p.prologue != nullptr   ? batch_norm_act_forward_block<T, NormForm::kPrologue>(p, shift)
               : p.residual == nullptr ? batch_norm_act_forward_block<T, NormForm::kPlain>(p, shift)
               : p.normed_residual     ? batch_norm_act_forward_block<T, NormForm::kTwoNorms>(p, shift)
                                       : batch_norm_act_forward_block<T, NormForm::kResidual>(p, shift);
             });
           },
           [&](const mf::BatchNormActBackward& p) {
             launch(p.shape, 1, channel_sums_shared<mf::BatchNormActBackward::kSumFields>(kThreads),
                    [&](int shift, unsigned char* shared) {
                      p.prologue != nullptr   ? batch_norm_act_sums_block<T, NormForm::kPrologue>(p, shift, shared)
                      : p.residual != nullptr ? batch_norm_act_sums_block<T, NormForm::kTwoNorms>(p, shift, shared)
                                              : batch_norm_act_sums_block<T, NormForm::kPlain>(p, shift, shared);
                    });
           },
           [&](const mf::BatchNormActBackward& p) {
             launch(p.shape, 1, channel_sums_shared<mf::BatchNormActBackward::kPrologueFields>(kThreads),
                    [&](int shift, unsigned char* shared) {
                      p.prologue != nullptr   ? batch_norm_act_backward_block<T, NormForm::kPrologue>(p, shift, shared)
                      : p.residual != nullptr ? batch_norm_act_backward_block<T, NormForm::kTwoNorms>(p, shift, shared)
                                              : batch_norm_act_backward_block<T, NormForm::kPlain>(p, shift, shared);
                    });
           }});
}

void compare(Context& context, const Setting& setting) {
  setting.type == FloatType::kFloat32 ? compare_bodies<float>(context, setting)
                                      : compare_bodies<__nv_bfloat16>(context, setting);
}

#else

void compare(Context& context, const Setting& setting) { compare_launchers(context, setting); }

#endif

// Nothing around the norm, a residual, a residual with a norm, a prologue.
Setting setting_of(FloatType type, int form) {
  Setting setting;
  setting.type = type;
  setting.residual = form == 1 || form == 2;
  setting.second_norm = form == 2;
  setting.prologue = form == 3;
  return setting;
}

// Each form in one type; `change` makes it special.
void compare_forms(Context& context, FloatType type, const std::function<void(Setting&)>& change) {
  for (const int form : {0, 1, 2, 3}) {
    Setting setting = setting_of(type, form);
    change(setting);
    compare(context, setting);
  }
}

}  // namespace

// Large blocks take the shim long: few forms in all types, all forms in one.
KERNEL_CASE(batch_norm_act_by_the_launchers) {
  for (const FloatType type : {FloatType::kFloat32, FloatType::kBFloat16}) {
    for (const int form : {0, 1, 2, 3}) {
      if (form == 3 || type == FloatType::kBFloat16) {
        Setting setting = setting_of(type, form);
        setting.channels = 64;
        setting.processors = 1;
        compare_launchers(context, setting);
      }
    }
  }
}

// Every type and form; more pixels, and more padding, than a thread takes at a time and more blocks than one
// waits for; last batches of every size; with several gradients, and without what may be left out.
COMPILED_CASE(batch_norm_act_of_every_instance) {
  for (const FloatType type : {FloatType::kFloat32, FloatType::kBFloat16}) {
    for (const int form : {0, 1, 2, 3}) {
      for (const int turn : {0, 1, 2, 3, 4, 5}) {
        Setting setting = setting_of(type, form);
        setting.channels = turn % 2 == 0 ? 64 : 8;
        setting.images = turn == 0 ? 16 : 8;
        setting.pixels = std::array{1009, 450, 97, 801, 61, 700}[static_cast<size_t>(turn)];
        setting.valid = std::array{3, 5, 5, 5, 8, 5}[static_cast<size_t>(turn)];
        setting.processors = turn == 0 ? 64 : 1;
        setting.consumers = std::array{1, 8, 3, 1, 2, 7}[static_cast<size_t>(turn)];
        setting.relu = turn % 4 != 1;
        setting.wants_mask = turn != 3;
        setting.keep_sum = turn > 2;
        setting.training = setting.second_training = turn != 2;
        setting.parameters = turn != 3;
        compare(context, setting);
      }
    }
  }
}

KERNEL_CASE(small_batch_norm_act) {
  for (const FloatType type : {FloatType::kFloat32, FloatType::kBFloat16}) {
    compare_forms(context, type, [](Setting& s) {
      s.images = s.valid = 11;
      s.pixels = 81;  // 891 pixels: two blocks
    });
  }
}

KERNEL_CASE(batch_norm_act_with_padding) {
  compare_forms(context, FloatType::kBFloat16, [](Setting& s) { s.valid = 3; });
}

KERNEL_CASE(batch_norm_act_of_many_channels) {
  compare_forms(context, FloatType::kBFloat16, [](Setting& s) {
    s.channels = 136;  // the third tile has one group
    s.pixels = 90;
    s.processors = 6;
  });
}

KERNEL_CASE(batch_norm_act_of_eight_channels) {
  compare_forms(context, FloatType::kBFloat16, [](Setting& s) {
    s.channels = 8;
    s.pixels = 300;
  });
}

KERNEL_CASE(batch_norm_act_sums_many_gradients) {
  for (const FloatType type : {FloatType::kFloat32, FloatType::kBFloat16}) {
    compare_forms(context, type, [](Setting& s) {
      s.consumers = s.prologue ? 2 : 8;
      s.keep_sum = true;
      s.valid = 4;
    });
  }
}

KERNEL_CASE(batch_norm_act_without_relu_and_parameters) {
  compare_forms(context, FloatType::kFloat32, [](Setting& s) {
    s.relu = false;
    s.parameters = false;
  });
}

KERNEL_CASE(batch_norm_act_frozen) {
  compare_forms(context, FloatType::kBFloat16, [](Setting& s) { s.training = s.second_training = false; });
  compare_forms(context, FloatType::kFloat32, [](Setting& s) { s.training = false; });
}

KERNEL_CASE(batch_norm_act_of_a_large_mean) {
  compare_forms(context, FloatType::kFloat32, [](Setting& s) {
    s.offset = 1000;
    s.pixels = 64;
    s.prologue = false;
  });
}

KERNEL_CASE(batch_norm_act_of_padding_alone) {
  compare_forms(context, FloatType::kFloat32, [](Setting& s) { s.valid = 0; });
}

KERNEL_CASE(batch_norm_act_of_no_image) {
  for (const int form : {0, 2, 3}) {
    Setting setting = setting_of(FloatType::kBFloat16, form);
    setting.images = setting.valid = 0;
    compare_launchers(context, setting);
  }
}

KERNEL_CASE(norm_state_backward) {
  constexpr int64_t kChannels = 200;
  std::mt19937 random(3);
  const auto floats_of = [&](size_t count) { return floats(draw(random, count, FloatType::kBFloat16, 1)); };
  const Floats state = floats_of(4 * kChannels), grad = floats_of(4 * kChannels), weight = floats_of(kChannels),
               rest = floats_of(kChannels);
  for (const bool training : {true, false}) {
    mf::NormParams norm{context.upload(weight), nullptr, nullptr, nullptr, nullptr, 0.1f, 1e-5f, training};
    auto* out = context.poisoned<float>(4 * kChannels);
    const mf::MapShape shape{7, 3, kChannels, nullptr, 5};
    mf::cuda::norm_state_backward({shape, context.upload(state), context.upload(rest), context.upload(grad), norm, out},
                                  context.stream());
    // By hand: weight and bias from scale and shift; the mean's share is even, the deviation's goes
    // with -inverse^3 / n, for x minus the mean that is the state's and the rest.
    Floats wanted(4 * kChannels);
    for (int64_t c = 0; c < kChannels; ++c) {
      const double inverse = state[kChannels + c];
      wanted[c] = static_cast<float>(grad[2 * kChannels + c] * inverse);
      wanted[kChannels + c] = grad[3 * kChannels + c];
      const double to_inverse = double{weight[c]} * grad[2 * kChannels + c] + grad[kChannels + c];
      const double slope = training ? -to_inverse * inverse * inverse * inverse / 15 : 0;
      wanted[2 * kChannels + c] = static_cast<float>(slope);
      wanted[3 * kChannels + c] = training ? static_cast<float>(double{grad[c]} / 15 - slope * rest[c]) : 0.0f;
    }
    context.expect_close("gradients", out, wanted, 1e-6);
  }
}
