// The views of a step in one pass: rows gathered from uint8 sources, turned, augmented, normalised,
// written in NHWC.
#pragma once

#include <cstdint>

#include "api/float_array.h"
#include "core/augment.h"
#include "core/augment_parameters.h"
#include "core/host_device.h"

namespace mf {

struct AugmentParams {
  static constexpr int kMaxSources = 4;
  static constexpr int32_t kMaxSide = 1024;
  static constexpr int kLayout = 3;  // position in `rows`, orientation, draw (-1: not augmented)

  // Rows are numbered through all sources, those of source 0 first.
  AugmentSource source[kMaxSources];
  int32_t sources;
  const int64_t* rows;    // [row_count] number of a row; -1: padding, its views are zero
  const int32_t* layout;  // [views, kLayout]
  const int32_t* codes;   // [draws, 6] of augment_parameters
  const float* factors;   // [draws, 4]
  void* output;           // [views, height, width, 3] of `type`, not overlapping anything
  int64_t row_count;
  int64_t views;
  int64_t draws;
  int32_t height;  // 1 to kMaxSide
  int32_t width;   // 1 to kMaxSide
  FloatType type;
  float mean[3];  // of images in [0, 1]
  float std[3];
  bool jitter_normalised;  // colour jitter after normalisation, as released
};

// What a view shows. A number out of its range leaves `invalid` set; such a view is all NaN, since
// a kernel cannot report it.
struct ViewOrigin {
  const uint8_t* image;  // null: padding or invalid
  bool invalid;
  int32_t orientation;
  int32_t draw;
};

MF_HD inline ViewOrigin find_view(const AugmentParams& params, int64_t view) {
  const int32_t* entry = params.layout + view * AugmentParams::kLayout;
  ViewOrigin origin{nullptr, true, entry[1], entry[2]};
  const bool turned = (origin.orientation >> 2) % 2 != 0;
  if (entry[0] < 0 || entry[0] >= params.row_count || origin.orientation < 0 || origin.orientation > 15 ||
      (turned && params.height != params.width) || origin.draw < -1 || origin.draw >= params.draws) {
    return origin;
  }
  int64_t row = params.rows[entry[0]];
  origin.invalid = row < -1;
  for (int i = 0; i < AugmentParams::kMaxSources && row >= 0; ++i) {
    if (i >= params.sources) {
      origin.invalid = true;
      break;
    }
    if (row < params.source[i].rows) {
      origin.image = params.source[i].images + row * params.height * params.width * 3;
      break;
    }
    row -= params.source[i].rows;
    origin.invalid = i + 1 == AugmentParams::kMaxSources;
  }
  return origin;
}

namespace cpu {
void augment(const AugmentParams& params, int threads);
}  // namespace cpu

namespace cuda {
void augment(const AugmentParams& params, Stream stream);  // one launch
}  // namespace cuda

}  // namespace mf
