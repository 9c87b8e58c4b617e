#include <algorithm>
#include <random>
#include <utility>

#include "api/adam.h"
#include "encoded_floats.h"

#if defined(MF_KERNELS_ON_CPU)
#include "cuda/adam.cuh"
#endif

namespace {

using namespace kernel_case;

constexpr double kTolerance = 2e-6;  // a kernel may fuse a product and a sum

// Parameters of these sizes in flat buffers, each followed by `gap` elements; the gradient of every
// fifth parameter is missing, types take turns, and gradients start `shift` elements into their
// memory. Weights have no moving average if its rate is 0.
struct Problem {
  std::vector<int64_t> sizes, starts;
  Floats master, exp_avg, exp_avg_sq, average, steps;
  std::vector<Floats> gradients;
  std::vector<mf::BFloat16> shadow, average_shadow;
  float lr = 0.01f;
  float loss = 1.0f;
  double beta1 = 0.9, beta2 = 0.999;
  double average_rate = 0.0;
  int64_t shift = 0;
};

Problem make_problem(const std::vector<int64_t>& sizes, int64_t gap, int64_t shift = 0) {
  std::mt19937 random(static_cast<unsigned>(sizes.size() + static_cast<size_t>(gap)));
  std::normal_distribution<float> normal;
  Problem problem;
  problem.sizes = sizes;
  problem.shift = shift;
  int64_t end = 0;
  for (const int64_t size : sizes) {
    problem.starts.push_back(end);
    end += size + gap;
    problem.gradients.emplace_back(static_cast<size_t>(shift + size));
    std::generate(problem.gradients.back().begin(), problem.gradients.back().end(), [&] { return normal(random); });
    problem.steps.push_back(static_cast<float>(problem.steps.size() % 7 * 100));
  }
  for (Floats* buffer : {&problem.master, &problem.exp_avg, &problem.exp_avg_sq, &problem.average}) {
    buffer->resize(static_cast<size_t>(end));
    std::generate(buffer->begin(), buffer->end(), [&] { return normal(random); });
  }
  std::transform(problem.exp_avg_sq.begin(), problem.exp_avg_sq.end(), problem.exp_avg_sq.begin(),
                 [](float x) { return x * x; });
  problem.shadow = rounded<mf::BFloat16>(problem.master);
  problem.average_shadow = rounded<mf::BFloat16>(problem.average);
  return problem;
}

// `shadow`: there are copies of the weights and of their averages; `latched`: the latch is set before;
// `step` runs the kernels.
template <typename Step>
void compare(Context& context, Problem wanted, bool shadow, bool latched, Step step) {
  Problem problem = wanted;
  const size_t parameters = problem.sizes.size();
  const bool averages = problem.average_rate > 0.0;
  std::vector<std::vector<mf::BFloat16>> as_bfloat16(parameters);
  std::vector<mf::AdamTensor> on_host, on_device;
  for (size_t i = 0; i < parameters; ++i) {
    if (i % 5 == 4) {
      continue;
    }
    mf::AdamTensor tensor{nullptr, problem.starts[i], problem.sizes[i], static_cast<int32_t>(i),
                          mf::FloatType::kFloat32};
    on_host.push_back(tensor);
    on_device.push_back(tensor);
    const auto place = [&](const auto& values, mf::FloatType type) {
      on_host.back().type = on_device.back().type = type;
      on_host.back().gradient = values.data() + problem.shift;
      on_device.back().gradient = context.upload(values) + problem.shift;
    };
    if (i % 2 == 1) {
      as_bfloat16[i] = rounded<mf::BFloat16>(problem.gradients[i]);
      place(as_bfloat16[i], mf::FloatType::kBFloat16);
    } else {
      place(problem.gradients[i], mf::FloatType::kFloat32);
    }
  }
  mf::AdamParams params{};
  params.tensor_count = static_cast<int64_t>(on_host.size());
  params.parameters = static_cast<int64_t>(parameters);
  params.beta1 = problem.beta1;
  params.beta2 = problem.beta2;
  params.eps = 1e-8;
  params.weight_decay = 1e-4;
  params.average_rate = problem.average_rate;

  bool wanted_latch = latched;
  params.master = wanted.master.data();
  params.exp_avg = wanted.exp_avg.data();
  params.exp_avg_sq = wanted.exp_avg_sq.data();
  params.shadow = shadow ? wanted.shadow.data() : nullptr;
  params.average = averages ? wanted.average.data() : nullptr;
  params.average_shadow = averages && shadow ? wanted.average_shadow.data() : nullptr;
  params.steps = wanted.steps.data();
  params.lr = &wanted.lr;
  params.loss = &wanted.loss;
  params.latch = &wanted_latch;
  params.tensors = on_host.data();
  mf::cpu::adam_step(params, 1);

  params.master = context.upload(problem.master);
  params.exp_avg = context.upload(problem.exp_avg);
  params.exp_avg_sq = context.upload(problem.exp_avg_sq);
  auto* on_gpu = context.upload(problem.shadow);
  params.shadow = shadow ? on_gpu : nullptr;
  auto* average = context.upload(problem.average);
  params.average = averages ? average : nullptr;
  auto* average_shadow = context.upload(problem.average_shadow);
  params.average_shadow = averages && shadow ? average_shadow : nullptr;
  params.steps = context.upload(problem.steps);
  params.lr = context.upload(Floats{problem.lr});
  params.loss = context.upload(Floats{problem.loss});
  auto* latch = context.upload(std::vector<unsigned char>{latched ? uint8_t{1} : uint8_t{0}});
  params.latch = reinterpret_cast<bool*>(latch);
  params.tensors = on_device.data();
  params.scales = context.poisoned<mf::AdamScale>(parameters);
  params.frozen = context.poisoned<int32_t>(1);
  step(params);

  context.expect_equal("latch", latch, std::vector<unsigned char>{wanted_latch ? uint8_t{1} : uint8_t{0}});
  context.expect_equal("steps", params.steps, wanted.steps);
  context.expect_close("master", params.master, wanted.master, kTolerance);
  context.expect_close("exp_avg", params.exp_avg, wanted.exp_avg, kTolerance);
  context.expect_close("exp_avg_sq", params.exp_avg_sq, wanted.exp_avg_sq, kTolerance);
  context.expect_close("average", average, wanted.average, kTolerance);
  const size_t size = wanted.master.size();
  expect(context, "shadow", on_gpu, wanted.shadow, 1.0 / 128);
  expect(context, "average's shadow", average_shadow, wanted.average_shadow, 1.0 / 128);
  if (shadow) {  // of the kernel's own numbers, rounded as they should be, also where none was written
    expect(context, "rounding", on_gpu, rounded<mf::BFloat16>(context.download(params.master, size)), 0.0);
    expect(context, "average's rounding", average_shadow, rounded<mf::BFloat16>(context.download(average, size)), 0.0);
  }
}

// With moving averages and without.
template <typename Step>
void compare_both(Context& context, Problem problem, bool shadow, bool latched, Step step) {
  for (const double rate : {0.0, 0.3}) {
    problem.average_rate = rate;
    compare(context, problem, shadow, latched, step);
  }
}

void compare(Context& context, const Problem& problem, bool shadow, bool latched = false) {
  compare_both(context, problem, shadow, latched,
               [&](const mf::AdamParams& params) { mf::cuda::adam_step(params, context.stream()); });
}

}  // namespace

KERNEL_CASE(adam_of_every_type) {
  for (const bool shadow : {false, true}) {
    compare(context, make_problem({300, 2048, 64, 5000, 9, 1, 0, 2049}, 64), shadow);
  }
}

KERNEL_CASE(adam_of_unaligned_tensors) {
  compare(context, make_problem({300, 2051, 64, 4097, 9, 3}, 1), true);
  compare(context, make_problem({300, 2052, 64, 4096, 8, 4}, 0, 1), true);  // only the gradients' memory is
}

KERNEL_CASE(adam_of_more_tensors_than_a_launch_takes) {
  compare(context, make_problem(std::vector<int64_t>(300, 5), 3), true);
}

// Powers of the decays at their limits, where the device's must be the host's: of none, of a denormal, a negative and
// an infinite one; after no step, after so many that the power is denormal, and after more than a float counts.
KERNEL_CASE(adam_of_decays_and_steps_at_their_limits) {
  for (const auto& [beta1, beta2] :
       {std::pair{0.0, 0.5}, {0.5, 0.0}, {-0.5, -0.25}, {1e-310, 0.999}, {0.9, 1e-310}, {-INFINITY, INFINITY}}) {
    Problem problem = make_problem({5, 6, 7, 8, 9}, 0);
    problem.beta1 = beta1;
    problem.beta2 = beta2;
    problem.steps = {0.0f, 3.0f, 1049.0f, 1e30f, INFINITY};
    compare(context, problem, false);
  }
}

KERNEL_CASE(adam_of_nothing) {
  compare(context, make_problem({}, 0), false);
  compare(context, make_problem({0, 0, 0}, 4), true);
}

KERNEL_CASE(small_adam_frozen_by_its_loss_or_latch) {
  for (const float loss : {NAN, INFINITY, -INFINITY, 1.0f}) {
    for (const bool latched : {false, true}) {
      Problem problem = make_problem({40, 7, 3}, 1);
      problem.loss = loss;
      compare(context, problem, true, latched);
    }
  }
}

#if defined(MF_KERNELS_ON_CPU)

// Few threads, so that every loop takes several turns.
KERNEL_CASE(small_adam) {
  for (const bool latched : {false, true}) {
    compare_both(context, make_problem({40, 21, 3, 70, 9, 33}, 4), true, latched, [](const mf::AdamParams& params) {
      mf::cuda::AdamBegin begin{params.steps,
                                params.lr,
                                params.loss,
                                params.latch,
                                params.scales,
                                params.frozen,
                                params.beta1,
                                params.beta2,
                                static_cast<int32_t>(params.parameters),
                                {}};
      mf::cuda::AdamPieces pieces{params.master,
                                  params.exp_avg,
                                  params.exp_avg_sq,
                                  reinterpret_cast<__nv_bfloat16*>(params.shadow),
                                  params.average,
                                  reinterpret_cast<__nv_bfloat16*>(params.average_shadow),
                                  params.scales,
                                  params.frozen,
                                  params.settings(),
                                  static_cast<int32_t>(params.tensor_count),
                                  {}};
      for (int32_t i = 0; i < pieces.tensor_count; ++i) {
        const mf::AdamTensor& tensor = params.tensors[i];
        begin.has_gradient[0] |= 1u << tensor.parameter;
        pieces.tensors[i] = {tensor.gradient,
                             static_cast<int32_t>(tensor.start),
                             static_cast<int32_t>(tensor.count),
                             i,
                             static_cast<int16_t>(tensor.parameter),
                             static_cast<uint8_t>(tensor.type)};
      }
      hide(begin.loss, sizeof(float));
      shim::launch(1, 4, sizeof(int32_t), [&] {
        MF_DYNAMIC_SHARED(shared);
        mf::cuda::adam_begin_block(begin, *reinterpret_cast<int32_t*>(shared));
      });
      hide(begin.frozen, sizeof(int32_t));
      hide(begin.scales, static_cast<size_t>(begin.parameters) * sizeof(mf::AdamScale));
      shim::launch(static_cast<unsigned>(pieces.tensor_count), 4, 0, [&] {
        pieces.average == nullptr ? mf::cuda::adam_pieces_block<false>(pieces)
                                  : mf::cuda::adam_pieces_block<true>(pieces);
      });
    });
  }
}

#endif
