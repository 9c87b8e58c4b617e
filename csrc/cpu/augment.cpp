// One view after the other, each as three planes of floats in a thread's own scratch memory, so
// that the colour loops vectorise. Views are independent and a view's sums have a fixed order, so
// that neither threads nor vector widths change a result.
#include "api/augment.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "core/check.h"

// The loops over pixels are compiled twice; the loader picks what the processor has. clang's
// sanitizers do not take part in that.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MF_VECTOR_CLONES __attribute__((target_clones("default", "avx2")))
#else
#define MF_VECTOR_CLONES
#endif

namespace mf::cpu {
namespace {

struct Scratch {
  Scratch(int64_t height, int64_t width)
      : oriented(static_cast<size_t>(height * width * 3)),
        line(static_cast<size_t>(width * 3)),
        plane(static_cast<size_t>(height * width * 3)),
        columns(static_cast<size_t>(width)) {}

  std::vector<uint8_t> oriented;
  std::vector<float> line;
  std::vector<float> plane;  // [3, height, width]
  std::vector<SamplePosition> columns;
};

MF_VECTOR_CLONES void blend_lines(const uint8_t* low, const uint8_t* high, float share, float* line, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    line[i] = between(static_cast<float>(low[i]), static_cast<float>(high[i]), share);
  }
}

MF_VECTOR_CLONES void divide(float* values, float divisor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] /= divisor;
  }
}

MF_VECTOR_CLONES void normalise(float* values, float mean, float std, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] = (values[i] - mean) / std;
  }
}

MF_VECTOR_CLONES void shift_colours(float* red, float* green, float* blue, float hue, float saturation, float value,
                                    int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    shift_colour(red[i], green[i], blue[i], hue, saturation, value);
  }
}

MF_VECTOR_CLONES void change_contrast(float* values, float factor, int64_t count) {
  constexpr int kLanes = 16;
  float lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) {
      lane[k] += values[i + k];
    }
  }
  for (; i < count; ++i) {
    lane[i % kLanes] += values[i];
  }
  double sum = 0.0;
  for (const float part : lane) {
    sum += part;
  }
  const auto mean = static_cast<float>(sum / static_cast<double>(count));
  for (int64_t j = 0; j < count; ++j) {
    values[j] = contrasted(values[j], mean, factor);
  }
}

MF_VECTOR_CLONES void make_gray(float* red, float* green, float* blue, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    red[i] = green[i] = blue[i] = gray_value(red[i], green[i], blue[i]);
  }
}

template <typename T>
void store(const float* plane, T* output, int64_t pixels) {
  for (int64_t i = 0; i < pixels; ++i) {
    for (int c = 0; c < 3; ++c) {
      round_to(plane[c * pixels + i], output[i * 3 + c]);
    }
  }
}

void jitter(float* plane, const float* factors, bool contrast_first, int64_t pixels) {
  const auto contrast = [=] {
    for (int c = 0; c < 3; ++c) {
      change_contrast(plane + c * pixels, factors[3], pixels);
    }
  };
  if (contrast_first) {
    contrast();
  }
  shift_colours(plane, plane + pixels, plane + 2 * pixels, hue_in_turns(factors[0]), factors[1], factors[2], pixels);
  if (!contrast_first) {
    contrast();
  }
}

// Mirror and resized crop, in [0, 1].
void sample(const AugmentParams& params, const uint8_t* image, const int32_t* code, Scratch& scratch) {
  const int32_t height = params.height;
  const int32_t width = params.width;
  const int64_t pixels = static_cast<int64_t>(height) * width;
  for (int32_t x = 0; x < width; ++x) {
    scratch.columns[static_cast<size_t>(x)] = sample_position(x, width, code[1], code[3], code[0] != 0);
  }
  float* plane = scratch.plane.data();
  for (int32_t y = 0; y < height; ++y) {
    const SamplePosition row = sample_position(y, height, code[2], code[4], false);
    float* line = scratch.line.data();
    blend_lines(image + int64_t{3} * row.low * width, image + int64_t{3} * row.high * width, row.share, line,
                int64_t{3} * width);
    for (int32_t x = 0; x < width; ++x) {
      const SamplePosition column = scratch.columns[static_cast<size_t>(x)];
      for (int c = 0; c < 3; ++c) {
        plane[c * pixels + int64_t{y} * width + x] =
            between(line[3 * column.low + c], line[3 * column.high + c], column.share);
      }
    }
  }
  divide(plane, 255.0f, 3 * pixels);
}

template <typename T>
void make_view(const AugmentParams& params, int64_t view, const T (&plain)[3][256], Scratch& scratch) {
  const int64_t pixels = static_cast<int64_t>(params.height) * params.width;
  T* output = static_cast<T*>(params.output) + view * pixels * 3;
  const ViewOrigin origin = find_view(params, view);
  if (origin.image == nullptr) {
    T value;
    round_to(origin.invalid ? std::numeric_limits<float>::quiet_NaN() : 0.0f, value);
    std::fill_n(output, pixels * 3, value);
    return;
  }
  const uint8_t* image = origin.image;
  if (origin.orientation != 0) {
    uint8_t* oriented = scratch.oriented.data();
    for (int32_t y = 0; y < params.height; ++y) {
      for (int32_t x = 0; x < params.width; ++x, oriented += 3) {
        std::copy_n(image + 3 * oriented_pixel(origin.orientation, y, x, params.height, params.width), 3, oriented);
      }
    }
    image = scratch.oriented.data();
  }
  if (origin.draw < 0) {
    for (int64_t i = 0; i < pixels; ++i) {
      for (int c = 0; c < 3; ++c) {
        output[i * 3 + c] = plain[c][image[3 * i + c]];
      }
    }
    return;
  }
  const int32_t* code = params.codes + static_cast<int64_t>(origin.draw) * AugmentParameters::kCodes;
  const float* factors = params.factors + static_cast<int64_t>(origin.draw) * AugmentParameters::kFactors;
  const bool jittered = (code[5] & AugmentParameters::kJitter) != 0;
  const bool contrast_first = (code[5] & AugmentParameters::kContrastFirst) != 0;
  sample(params, image, code, scratch);
  float* plane = scratch.plane.data();
  if (jittered && !params.jitter_normalised) {
    jitter(plane, factors, contrast_first, pixels);
  }
  for (int c = 0; c < 3; ++c) {
    normalise(plane + c * pixels, params.mean[c], params.std[c], pixels);
  }
  if (jittered && params.jitter_normalised) {
    jitter(plane, factors, contrast_first, pixels);
  }
  if ((code[5] & AugmentParameters::kGray) != 0) {
    make_gray(plane, plane + pixels, plane + 2 * pixels, pixels);
  }
  store(plane, output, pixels);
}

template <typename T>
void make_views(const AugmentParams& params, int threads) {
  // Views that are not augmented only look up the 256 values of each channel.
  T plain[3][256];
  for (int c = 0; c < 3; ++c) {
    for (int byte = 0; byte < 256; ++byte) {
      round_to((static_cast<float>(byte) / 255.0f - params.mean[c]) / params.std[c], plain[c][byte]);
    }
  }
#pragma omp parallel num_threads(threads) if (params.views > 1)
  {
    Scratch scratch(params.height, params.width);
#pragma omp for schedule(dynamic, 4)
    for (int64_t view = 0; view < params.views; ++view) {
      make_view<T>(params, view, plain, scratch);
    }
  }
}

}  // namespace

void augment(const AugmentParams& params, int threads) {
  with_type<BFloat16>(params.type, [&](auto type) { make_views<decltype(type)>(params, threads); });
}

}  // namespace mf::cpu
