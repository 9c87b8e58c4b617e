// The kernels against csrc/cpu in double precision, on the same inputs: these are drawn as numbers
// that the kernel's type holds exactly.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "api/expert_losses.h"
#include "encoded_floats.h"

#if defined(MF_KERNELS_ON_CPU)
#include "cuda/expert_losses.cuh"
#endif

namespace {

using namespace kernel_case;

struct Setting {
  int64_t experts = 2, rows = 20, projection = 20, classes = 11, features = 33;
  FloatType projections = FloatType::kFloat32, others = FloatType::kFloat32;
  int64_t new_rows = 7, valid = 20;
  bool masked = true;
  int64_t labels = 4;  // distinct ones
  mf::Distillation distillation = mf::Distillation::kReverse;
  mf::DistanceReduction reduction = mf::DistanceReduction::kFrobenius;
  int64_t first_contrastive = 0, first_cross_entropy = 0;
  bool zero_rows = false, equal_features = false, wrong_label = false, one_gradient = false;
  double scale = 1;   // of the logits
  double offset = 0;  // added to them
  int64_t spoiled =
      -1;  // a row of the first expert's projections that holds `spoil` in one element: terms alone are compared
  double spoil = std::numeric_limits<double>::quiet_NaN();
  std::vector<int64_t> given_labels = {};  // else random ones
};

Doubles product(const Doubles& a, const Doubles& b, int64_t batches, int64_t n, int64_t k, int64_t m, bool transposed) {
  Doubles c(static_cast<size_t>(batches * n * m));
  for (int64_t e = 0; e < batches; ++e) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < m; ++j) {
        double sum = 0;
        for (int64_t p = 0; p < k; ++p) {
          sum += a[(e * n + i) * k + p] * (transposed ? b[(e * m + j) * k + p] : b[(e * k + p) * m + j]);
        }
        c[(e * n + i) * m + j] = sum;
      }
    }
  }
  return c;
}

using Forward = std::function<void(const mf::ExpertLossesForward&)>;
using Backward = std::function<void(const mf::ExpertLossesBackward&)>;

void compare(Context& context, const Setting& s, const Forward& forward, const Backward& backward) {
  std::mt19937 random(static_cast<unsigned>(s.rows * 31 + s.projection));
  const auto size = [](int64_t a, int64_t b, int64_t c) { return static_cast<size_t>(a * b * c); };
  Doubles z = draw(random, size(s.experts, s.rows, s.projection), s.projections, 1);
  Doubles logits = draw(random, size(s.experts, s.rows, s.classes), s.others, s.scale);
  for (double& logit : logits) {
    logit = s.offset == 0 ? logit : s.offset + std::round(logit * 64) / 64;  // float32 holds it
  }
  Doubles features = draw(random, size(s.experts, s.rows, s.features), s.others, 1);
  Doubles student = draw(random, size(1, s.rows, s.features), s.others, 1);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (s.equal_features) {
    for (int64_t e = 0; e < s.experts; ++e) {
      std::copy(student.begin(), student.end(), features.begin() + e * s.rows * s.features);
    }
  }
  for (int64_t i = 0; s.zero_rows && i < s.rows; i += 3) {
    std::fill_n(z.begin() + i * s.projection, s.projection, 0.0);
    std::fill_n(features.begin() + i * s.features, s.features, 0.0);
    std::fill_n(student.begin() + (i + 1) % s.rows * s.features, s.features, 0.0);
  }
  std::vector<int64_t> labels(static_cast<size_t>(s.rows));
  for (size_t i = 0; i < labels.size(); ++i) {
    labels[i] = static_cast<int64_t>(random() % static_cast<unsigned>(s.labels));
  }
  labels = s.given_labels.empty() ? labels : s.given_labels;
  if (s.spoiled >= 0) {
    z[static_cast<size_t>(s.spoiled * s.projection + 3)] = s.spoil;
  }
  std::vector<unsigned char> mask(static_cast<size_t>(s.classes));
  std::fill_n(mask.begin(), std::min(s.labels, s.classes), static_cast<unsigned char>(1));
  for (int64_t i = s.valid; i < s.rows; ++i) {  // padding: whatever it holds
    labels[i] = -12345;
    for (int64_t e = 0; e < s.experts; ++e) {
      std::fill_n(z.begin() + (e * s.rows + i) * s.projection, s.projection, nan);
      std::fill_n(logits.begin() + (e * s.rows + i) * s.classes, s.classes, nan);
      std::fill_n(features.begin() + (e * s.rows + i) * s.features, s.features, nan);
    }
    std::fill_n(student.begin() + i * s.features, s.features, nan);
  }
  Doubles grad(static_cast<size_t>(s.experts * mf::kTerms));
  for (double& value : grad) {
    value = s.one_gradient ? 0.75 : std::ldexp(static_cast<int>(random() % 200) - 100, -6);
  }

  // The twin, with the products of matrices that its caller does.
  mf::ExpertLossesInput in{{z.data(), FloatType::kFloat64},
                           {logits.data(), FloatType::kFloat64},
                           {features.data(), FloatType::kFloat64},
                           {student.data(), FloatType::kFloat64},
                           labels.data(),
                           s.masked ? reinterpret_cast<const bool*>(mask.data()) : nullptr,
                           s.experts,
                           s.rows,
                           s.projection,
                           s.classes,
                           s.features,
                           nullptr,
                           nullptr,
                           s.new_rows,
                           s.valid,
                           0.07,
                           2.0,
                           s.first_contrastive,
                           s.first_cross_entropy,
                           s.distillation,
                           s.reduction,
                           s.experts - 1};
  Doubles directions(z.size()), terms(grad.size()), statistics(static_cast<size_t>(in.statistics().size()));
  mf::cpu::expert_losses_directions(in, directions.data(), 1);
  Doubles similarity = product(directions, directions, s.experts, s.rows, s.projection, s.rows, true);
  mf::cpu::expert_losses_forward({in, terms.data(), statistics.data()}, similarity.data(), 1);
  Doubles to_z(z.size()), to_logits(logits.size()), to_features(features.size()), to_student(student.size());
  const bool to_teachers = s.distillation == mf::Distillation::kForward;
  mf::ExpertLossesBackward back{in,
                                statistics.data(),
                                grad.data(),
                                {mf::kTerms, 1},
                                {to_z.data(), FloatType::kFloat64},
                                {to_logits.data(), FloatType::kFloat64},
                                {to_teachers ? to_features.data() : nullptr, FloatType::kFloat64},
                                {to_student.data(), FloatType::kFloat64}};
  Doubles pulls(similarity.size());
  mf::cpu::expert_losses_pulls(back, similarity.data(), pulls.data(), 1);
  const Doubles pulled = product(pulls, directions, s.experts, s.rows, s.rows, s.projection, false);
  mf::cpu::expert_losses_backward(back, directions.data(), pulled.data(), 1);

  // The kernels; the row counts lie in their memory.
  if (s.wrong_label) {
    std::replace(labels.begin(), labels.end(), int64_t{labels[0]}, s.classes);
  }
  in.projections = {context.upload(encode(z, s.projections)), s.projections};
  in.logits = {context.upload(encode(logits, s.others)), s.others};
  in.features = {context.upload(encode(features, s.others)), s.others};
  in.student = {context.upload(encode(student, s.others)), s.others};
  in.labels = context.upload(labels);
  in.current_classes = s.masked ? reinterpret_cast<const bool*>(context.upload(mask)) : nullptr;
  in.new_rows_pointer = context.upload(std::vector<int32_t>{static_cast<int32_t>(s.new_rows)});
  in.valid_pointer = context.upload(std::vector<int32_t>{static_cast<int32_t>(s.valid)});
  in.new_rows = in.valid = -1;
  auto* gpu_terms = context.poisoned<float>(terms.size());
  auto* gpu_statistics = context.poisoned<float>(statistics.size());
  forward({in, gpu_terms, gpu_statistics});
  std::vector<float> wanted_terms(terms.begin(), terms.end());
  for (int64_t e = 0; s.wrong_label && e < s.experts; ++e) {
    wanted_terms[static_cast<size_t>(e * mf::kTerms + 1)] = nan;
  }
  context.expect_close("terms", gpu_terms, wanted_terms, 2e-5);

  auto* gpu_z = context.poisoned<unsigned char>(bytes_of(z.size(), s.projections));
  auto* gpu_logits = context.poisoned<unsigned char>(bytes_of(logits.size(), s.others));
  auto* gpu_features = context.poisoned<unsigned char>(bytes_of(features.size(), s.others));
  auto* gpu_student = context.poisoned<unsigned char>(bytes_of(student.size(), s.others));
  const std::vector<float> gpu_grad(grad.begin(), s.one_gradient ? grad.begin() + 1 : grad.end());
  backward({in,
            gpu_statistics,
            context.upload(gpu_grad),
            {s.one_gradient ? 0 : mf::kTerms, s.one_gradient ? 0 : 1},
            {gpu_z, s.projections},
            {gpu_logits, s.others},
            {to_teachers ? gpu_features : nullptr, s.others},
            {gpu_student, s.others}});
  if (s.wrong_label || s.spoiled >= 0) {
    return;
  }
  const auto expect = [&](const char* what, unsigned char* memory, const Doubles& wanted, FloatType type) {
    kernel_case::expect(context, what, memory, wanted, type, 1.5 * step_of(type) + 1e-5);
  };
  expect("projections' gradient", gpu_z, to_z, s.projections);
  expect("logits' gradient", gpu_logits, to_logits, s.others);
  expect("student's gradient", gpu_student, to_student, s.others);
  if (to_teachers) {
    expect("features' gradient", gpu_features, to_features, s.others);
  }
}

void compare(Context& context, const Setting& setting) {
  compare(
      context, setting,
      [&](const mf::ExpertLossesForward& params) { mf::cuda::expert_losses_forward(params, context.stream()); },
      [&](const mf::ExpertLossesBackward& params) { mf::cuda::expert_losses_backward(params, context.stream()); });
}

Setting setting_of(FloatType projections, FloatType others) {
  Setting setting;
  setting.projections = projections;
  setting.others = others;
  return setting;
}

}  // namespace

KERNEL_CASE(expert_losses_in_bfloat16) {
  Setting setting = setting_of(FloatType::kBFloat16, FloatType::kBFloat16);
  setting.projection = 128;
  compare(context, setting);
}

KERNEL_CASE(expert_losses_in_float32) {
  Setting setting;
  setting.projection = 128;
  compare(context, setting);
}

KERNEL_CASE(expert_losses_with_padding) {
  Setting setting = setting_of(FloatType::kBFloat16, FloatType::kFloat32);
  setting.valid = 17;
  setting.distillation = mf::Distillation::kForward;
  setting.reduction = mf::DistanceReduction::kMeanOfNorms;
  compare(context, setting);
}

KERNEL_CASE(expert_losses_of_few_rows) {
  for (const int64_t rows : {0, 1, 2}) {
    Setting setting = setting_of(FloatType::kBFloat16, FloatType::kFloat32);
    setting.experts = 1 + rows % 2;
    setting.rows = setting.valid = rows;
    setting.new_rows = rows / 2;
    setting.labels = 1;
    compare(context, setting);
  }
}

KERNEL_CASE(expert_losses_without_directions) {
  Setting setting = setting_of(FloatType::kBFloat16, FloatType::kBFloat16);
  setting.rows = setting.valid = 18;
  setting.zero_rows = true;
  setting.masked = false;
  setting.scale = 64;  // logits of more than +-80
  setting.distillation = mf::Distillation::kForward;
  setting.one_gradient = true;
  compare(context, setting);
  setting.zero_rows = false;
  setting.equal_features = true;
  setting.labels = 1;
  compare(context, setting);
}

KERNEL_CASE(expert_losses_of_the_last_expert) {
  Setting setting = setting_of(FloatType::kBFloat16, FloatType::kBFloat16);
  setting.rows = setting.valid = 17;
  setting.first_contrastive = setting.first_cross_entropy = 1;
  compare(context, setting);
}

KERNEL_CASE(expert_losses_of_large_logits_keep_their_digits) {
  Setting setting;
  setting.offset = 3e4;
  compare(context, setting);
}

// Rows without a positive too, in a last tile that is filled in part; twice as many rows as a block
// takes at a time.
KERNEL_CASE(expert_losses_keep_what_is_no_number) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  for (const FloatType type : {FloatType::kFloat32, FloatType::kBFloat16}) {
    for (int64_t row = 0; row < 7; ++row) {
      Setting setting = setting_of(type, FloatType::kFloat32);
      setting.experts = 1;
      setting.rows = setting.valid = 7;
      setting.new_rows = 0;
      setting.projection = 8;
      setting.given_labels = {4, 4, 3, 0, 3, 4, 2};
      setting.spoiled = row;
      setting.spoil = row % 2 == 0 ? nan : infinity;
      compare(context, setting);
    }
  }
  for (const int64_t row : {0, 15, 130, 149}) {
    Setting setting = setting_of(FloatType::kBFloat16, FloatType::kFloat32);
    setting.experts = 1;
    setting.rows = setting.valid = 150;
    setting.labels = 11;
    setting.spoiled = row;
    compare(context, setting);
  }
}

// Long rows, of every type, so that unrolled loops are entered, and blocks of padding alone.
COMPILED_CASE(expert_losses_of_long_rows) {
  for (const FloatType type : {FloatType::kFloat32, FloatType::kBFloat16}) {
    for (const int64_t projection : {72, 128, 131}) {
      Setting setting = setting_of(type, projection == 72 ? FloatType::kFloat32 : FloatType::kBFloat16);
      setting.rows = 40;
      setting.valid = 21;
      setting.classes = 200;
      setting.features = 545;
      setting.projection = projection;
      setting.masked = type != FloatType::kBFloat16;
      compare(context, setting);
    }
  }
}

// More rows than the terms' block has threads, four times.
COMPILED_CASE(expert_losses_of_many_rows) {
  for (const bool contrasts : {true, false}) {
    Setting setting = setting_of(FloatType::kBFloat16, FloatType::kBFloat16);
    setting.experts = contrasts ? 1 : 2;
    setting.first_contrastive = contrasts ? 0 : 2;
    setting.rows = 800;
    setting.valid = 790;
    setting.new_rows = 500;
    setting.projection = 8;
    setting.classes = setting.features = 5;
    setting.distillation = mf::Distillation::kForward;
    setting.reduction = contrasts ? mf::DistanceReduction::kMeanOfNorms : mf::DistanceReduction::kFrobenius;
    compare(context, setting);
  }
}

KERNEL_CASE(expert_losses_of_a_wrong_label_are_nan) {
  Setting setting = setting_of(FloatType::kBFloat16, FloatType::kBFloat16);
  setting.rows = setting.valid = 15;
  setting.wrong_label = true;
  compare(context, setting);
}

#if defined(MF_KERNELS_ON_CPU)

// Blocks of two warps, so that a block takes several tiles.
template <typename T, int kWarps>
static void compare_bodies(Context& context, const Setting& setting) {
  using Shared = mf::cuda::ContrastShared<T, kWarps>;
  using TermsShared = mf::cuda::TermsShared<kWarps>;
  compare(
      context, setting,
      [](const mf::ExpertLossesForward& params) {
        const auto grid = mf::cuda::ExpertLossesGrid::of(params.input, true, true, true, false, kWarps);
        shim::launch(grid.blocks(), kWarps * 32, sizeof(Shared), [&] {
          MF_DYNAMIC_SHARED(memory);
          mf::cuda::expert_statistics_block<T, kWarps>(params, grid, *reinterpret_cast<Shared*>(memory));
        });
        shim::launch(static_cast<unsigned>(params.input.experts), kWarps * 32, sizeof(TermsShared), [&] {
          MF_DYNAMIC_SHARED(memory);
          mf::cuda::expert_terms_block<kWarps>(params, *reinterpret_cast<TermsShared*>(memory));
        });
      },
      [](const mf::ExpertLossesBackward& params) {
        const auto grid = mf::cuda::ExpertLossesGrid::of(params.input, true, true, true, true, kWarps);
        shim::launch(grid.blocks(), kWarps * 32, sizeof(Shared), [&] {
          MF_DYNAMIC_SHARED(memory);
          mf::cuda::expert_gradient_block<T, kWarps>(params, grid, *reinterpret_cast<Shared*>(memory));
        });
      });
}

KERNEL_CASE(small_expert_losses_bodies_in_bfloat16) {
  Setting setting = setting_of(FloatType::kBFloat16, FloatType::kBFloat16);
  setting.rows = 70;
  setting.valid = 67;
  setting.experts = 1;
  compare_bodies<__nv_bfloat16, 2>(context, setting);
}

KERNEL_CASE(small_expert_losses_bodies_of_long_projections) {
  Setting setting = setting_of(FloatType::kFloat32, FloatType::kFloat32);
  setting.rows = setting.valid = 35;
  setting.projection = 136;
  setting.experts = 1;
  compare_bodies<float, 2>(context, setting);
}

#endif
