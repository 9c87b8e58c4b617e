#include <algorithm>
#include <array>
#include <random>

#include "api/augment.h"
#include "encoded_floats.h"

#if defined(MF_KERNELS_ON_CPU)
#include "cuda/augment.cuh"
#endif

namespace {

using namespace kernel_case;

constexpr double kTolerance = 1e-5;  // kernels may fuse a product and a sum, and add a channel in another order

struct Step {
  std::vector<uint8_t> stream, memory;
  std::vector<int64_t> rows;
  std::vector<int32_t> layout, codes;
  std::vector<float> factors;
  int32_t height, width;
};

// `views` of 5 stream and 7 memory rows: each orientation and each draw in turn, one padded row,
// and draws that reach beyond borders.
Step make_step(int64_t views, int32_t height, int32_t width, uint64_t seed) {
  std::mt19937_64 random(seed);
  Step step;
  step.height = height;
  step.width = width;
  step.stream.resize(static_cast<size_t>(5 * height * width * 3));
  step.memory.resize(static_cast<size_t>(7 * height * width * 3));
  const auto byte = [&] { return static_cast<uint8_t>(random() % 256); };
  std::generate(step.stream.begin(), step.stream.end(), byte);
  std::generate(step.memory.begin(), step.memory.end(), byte);
  step.rows = {0, 4, 5, 11, -1, 7};
  const int64_t draws = (views + 1) / 2;
  step.codes.resize(static_cast<size_t>(draws) * mf::AugmentParameters::kCodes);
  step.factors.resize(static_cast<size_t>(draws) * mf::AugmentParameters::kFactors);
  const mf::AugmentRecipe recipe{0.5, 0.3, 0.2, 1.0, 0.7, 0.4, 0.4, 0.4, 0.1};
  for (int64_t draw = 0; draw < draws; ++draw) {
    const mf::AugmentParameters view =
        mf::draw_augment_parameters(recipe, seed, 0, static_cast<uint32_t>(draw), height, width);
    std::copy_n(view.code, mf::AugmentParameters::kCodes, step.codes.begin() + draw * mf::AugmentParameters::kCodes);
    std::copy_n(view.factor, mf::AugmentParameters::kFactors,
                step.factors.begin() + draw * mf::AugmentParameters::kFactors);
  }
  for (int64_t view = 0; view < views; ++view) {
    const int32_t orientation =
        height == width ? static_cast<int32_t>(view * 5 % 16) : static_cast<int32_t>(view % 4 + view % 2 * 8);
    const int32_t layout[] = {static_cast<int32_t>(view % 6), orientation,
                              view % 2 == 0 ? -1 : static_cast<int32_t>(view / 2)};
    step.layout.insert(step.layout.end(), layout, layout + 3);
  }
  return step;
}

mf::AugmentParams make_params(const Step& step, const uint8_t* stream, const uint8_t* memory, const int64_t* rows,
                              const int32_t* layout, const int32_t* codes, const float* factors, void* output,
                              mf::FloatType type, bool jitter_normalised) {
  mf::AugmentParams params{};
  params.source[0] = {stream, 5};
  params.source[1] = {memory, 7};
  params.sources = 2;
  params.rows = rows;
  params.layout = layout;
  params.codes = codes;
  params.factors = factors;
  params.output = output;
  params.row_count = static_cast<int64_t>(step.rows.size());
  params.views = static_cast<int64_t>(step.layout.size() / 3);
  params.draws = static_cast<int64_t>(step.codes.size() / 6);
  params.height = step.height;
  params.width = step.width;
  params.type = type;
  std::copy_n(std::array{0.5f, 0.48f, 0.44f}.begin(), 3, params.mean);
  std::copy_n(std::array{0.2f, 0.24f, 0.26f}.begin(), 3, params.std);
  params.jitter_normalised = jitter_normalised;
  return params;
}

template <typename T>
void compare(Context& context, const Step& step, bool jitter_normalised, double tolerance) {
  const size_t count = step.layout.size() / 3 * static_cast<size_t>(step.height * step.width * 3);
  std::vector<T> wanted(count);
  mf::cpu::augment(make_params(step, step.stream.data(), step.memory.data(), step.rows.data(), step.layout.data(),
                               step.codes.data(), step.factors.data(), wanted.data(), type_of(T()), jitter_normalised),
                   1);
  T* output = context.poisoned<T>(count);
  mf::cuda::augment(make_params(step, context.upload(step.stream), context.upload(step.memory),
                                context.upload(step.rows), context.upload(step.layout), context.upload(step.codes),
                                context.upload(step.factors), output, type_of(T()), jitter_normalised),
                    context.stream());
  expect(context, "views", output, wanted, tolerance);
}

}  // namespace

KERNEL_CASE(augment_float32) { compare<float>(context, make_step(24, 32, 32, 1), false, kTolerance); }

KERNEL_CASE(augment_larger_images) {
  compare<float>(context, make_step(4, 64, 64, 2), true, kTolerance);
  compare<float>(context, make_step(2, 80, 80, 3), false,
                 kTolerance);  // beyond the staged size
}

KERNEL_CASE(augment_bfloat16) {
  compare<mf::BFloat16>(context, make_step(8, 32, 32, 4), true, 1.0 / 256);
  compare<mf::BFloat16>(context, make_step(8, 32, 32, 5), false, 1.0 / 256);
}

// Of aligned and unaligned rows, of images that are not staged, and what does not exist.
COMPILED_CASE(augment_of_every_instance) {
  for (const bool jitter_normalised : {false, true}) {
    for (const auto& [views, height, width] : {std::array{24, 20, 20}, {12, 23, 17}, {6, 68, 64}, {2, 80, 80}}) {
      Step step = make_step(views, height, width, static_cast<uint64_t>(views + jitter_normalised));
      step.rows[1] = views == 24 ? 4 : 12;
      compare<float>(context, step, jitter_normalised, kTolerance);
      compare<mf::BFloat16>(context, step, jitter_normalised, 1.0 / 256);
    }
  }
}

KERNEL_CASE(augment_small_images) {
  compare<float>(context, make_step(16, 8, 8, 8), false, kTolerance);
  compare<float>(context, make_step(12, 24, 16, 9), true, kTolerance);
  compare<float>(context, make_step(6, 5, 7, 10), false,
                 kTolerance);  // rows that are not aligned
}

KERNEL_CASE(augment_beyond_the_borders) {
  Step step = make_step(4, 8, 8, 11);
  for (size_t draw = 0; draw < step.codes.size() / 6; ++draw) {
    const int32_t code[] = {1, 20, -3, 1 << 30, -77, 2};
    std::copy_n(code, 6, step.codes.begin() + static_cast<std::ptrdiff_t>(draw * 6));
  }
  compare<float>(context, step, false, kTolerance);
}

KERNEL_CASE(augment_marks_what_does_not_exist) {
  Step step = make_step(7, 8, 8, 12);
  step.rows[1] = 12;  // beyond all sources
  step.rows[2] = -2;
  step.layout[0] = 6;    // beyond rows
  step.layout[10] = 16;  // view 3: no orientation
  step.layout[17] = 4;   // view 5: no draw
  compare<float>(context, step, false, kTolerance);
}

#if defined(MF_KERNELS_ON_CPU)

// Two warps: ThreadSanitizer forgets accesses where more than 255 threads take turns.
KERNEL_CASE(small_augment) {
  const Step step = make_step(12, 8, 8, 13);
  const auto bytes = static_cast<size_t>(mf::cuda::augment_shared_bytes(8, 8));
  auto* output = context.poisoned<float>(12 * 64 * 3);
  std::vector<float> wanted(12 * 64 * 3);
  const auto params = [&](void* out) {
    return make_params(step, step.stream.data(), step.memory.data(), step.rows.data(), step.layout.data(),
                       step.codes.data(), step.factors.data(), out, mf::FloatType::kFloat32, false);
  };
  mf::cpu::augment(params(wanted.data()), 1);
  const mf::AugmentParams on_kernel = params(output);
  shim::launch(12, 64, bytes, [&] {
    MF_DYNAMIC_SHARED(shared);
    mf::cuda::augment_block<float>(on_kernel, shared);
  });
  context.expect_close("views", output, wanted, kTolerance);
}

#endif
