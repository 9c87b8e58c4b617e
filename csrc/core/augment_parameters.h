// The random parameters of one augmented view, in one place for CPU and CUDA.
//
// The order of the fp64 operations below is part of the law: every one rounds by itself
// (core/exact_math.h), and mose_fast/reference/augment_parameters.py repeats them in this order.
// Lanes of Philox words for one view:
//   lane 0       r0: mirror, r1: gray, r2: jitter, r3: top bit, contrast first
//   lane 1       r0: hue, r1: saturation, r2: value, r3: contrast
//   lanes 2..11  one trial of a crop each: r0: area, r1: aspect ratio, r2: horizontal offset, r3: vertical offset
#pragma once

#include <cstdint>

#include "core/exact_math.h"
#include "core/host_device.h"
#include "core/philox.h"

namespace mf {

// What views are drawn from. Probabilities in [0, 1]; area_low ... area_high is the crop's share of
// the image, area_low >= 1 means no crop; brightness, contrast and saturation are half widths
// around the factor 1, hue around 0.
struct AugmentRecipe {
  double mirror_p;
  double gray_p;
  double area_low;
  double area_high;
  double jitter_p;
  double brightness;
  double contrast;
  double saturation;
  double hue;
};

struct AugmentParameters {
  static constexpr int kCodes = 6;
  static constexpr int kFactors = 4;
  static constexpr int32_t kGray = 1;  // bits of the flags
  static constexpr int32_t kJitter = 2;
  static constexpr int32_t kContrastFirst = 4;  // contrast before hue, saturation and value; meaningful with kJitter

  int32_t code[kCodes];    // mirror, crop_w, crop_h, offset_x, offset_y, flags
  float factor[kFactors];  // hue, saturation, value, contrast
};

struct CropBox {
  int32_t width, height;  // pixels
  int32_t offset_x,
      offset_y;  // in [width - W, W - width] and alike: twice the distance of the crop's centre from the image's
};

// Up to ten trials: area uniform in the recipe's range, log aspect ratio uniform in (log 3/4, log
// 4/3), sides rounded to pixels; the first trial that fits counts, else the whole image.
MF_HD inline CropBox draw_crop(const AugmentRecipe& recipe, uint64_t seed, uint64_t sequence, uint32_t item,
                               int32_t height, int32_t width) {
  using namespace exact;
  constexpr double kLogRatio = -0.2876820724517809;  // log(3/4) = -log(4/3)
  constexpr uint32_t kFirstLane = 2;
  constexpr uint32_t kTrials = 10;
  if (recipe.area_low >= 1.0) {
    return {width, height, 0, 0};
  }
  const double pixels = multiply(height, width);
  for (uint32_t trial = 0; trial < kTrials; ++trial) {
    const PhiloxWords r = philox(seed, sequence, item, Purpose::kView, kFirstLane + trial);
    const double share = add(recipe.area_low, multiply(subtract(recipe.area_high, recipe.area_low), unit(r.word[0])));
    const double area = multiply(share, pixels);
    const double ratio = exponential(add(kLogRatio, multiply(subtract(-kLogRatio, kLogRatio), unit(r.word[1]))));
    const double crop_width = round_half_up(square_root(multiply(area, ratio)));
    const double crop_height = round_half_up(square_root(divide(area, ratio)));
    if (crop_width > 0.0 && crop_width <= width && crop_height > 0.0 && crop_height <= height) {
      const auto w = static_cast<int32_t>(crop_width);
      const auto h = static_cast<int32_t>(crop_height);
      const auto free_x = static_cast<uint32_t>(width - w);
      const auto free_y = static_cast<uint32_t>(height - h);
      return {w, h, static_cast<int32_t>(uniform_below32(r.word[2], 2 * free_x + 1)) - (width - w),
              static_cast<int32_t>(uniform_below32(r.word[3], 2 * free_y + 1)) - (height - h)};
    }
  }
  return {width, height, 0, 0};
}

MF_HD inline AugmentParameters draw_augment_parameters(const AugmentRecipe& recipe, uint64_t seed, uint64_t sequence,
                                                       uint32_t item, int32_t height, int32_t width) {
  using namespace exact;
  AugmentParameters view{};
  const PhiloxWords r = philox(seed, sequence, item, Purpose::kView, 0);
  const bool mirror = unit(r.word[0]) < recipe.mirror_p;
  const bool gray = unit(r.word[1]) < recipe.gray_p;
  const bool jitter = unit(r.word[2]) < recipe.jitter_p;
  const bool contrast_first = r.word[3] >> 31 != 0;

  view.factor[0] = 0.0f;
  view.factor[1] = view.factor[2] = view.factor[3] = 1.0f;
  if (jitter) {
    const PhiloxWords f = philox(seed, sequence, item, Purpose::kView, 1);
    const double symmetric[4] = {
        subtract(multiply(2.0, unit(f.word[0])), 1.0), subtract(multiply(2.0, unit(f.word[1])), 1.0),
        subtract(multiply(2.0, unit(f.word[2])), 1.0), subtract(multiply(2.0, unit(f.word[3])), 1.0)};
    view.factor[0] = static_cast<float>(multiply(symmetric[0], recipe.hue));
    view.factor[1] = static_cast<float>(add(1.0, multiply(symmetric[1], recipe.saturation)));
    view.factor[2] = static_cast<float>(add(1.0, multiply(symmetric[2], recipe.brightness)));
    view.factor[3] = static_cast<float>(add(1.0, multiply(symmetric[3], recipe.contrast)));
  }

  const CropBox crop = draw_crop(recipe, seed, sequence, item, height, width);
  view.code[0] = mirror ? 1 : 0;
  view.code[1] = crop.width;
  view.code[2] = crop.height;
  view.code[3] = crop.offset_x;
  view.code[4] = crop.offset_y;
  view.code[5] = (gray ? AugmentParameters::kGray : 0) | (jitter ? AugmentParameters::kJitter : 0) |
                 (contrast_first ? AugmentParameters::kContrastFirst : 0);
  return view;
}

}  // namespace mf
