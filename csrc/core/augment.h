// Geometry and colour of views, as pure functions that the CPU loops and the kernels share.
// mose_fast/reference/augment.py says what they mean.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/bfloat16.h"
#include "core/host_device.h"

namespace mf {

// An uint8 array [rows, height, width, 3] that views take their rows from.
struct AugmentSource {
  const uint8_t* images;
  int64_t rows;
};

// --- Geometry
// ----------------------------------------------------------------------------------------------------------------

// Pixel of the stored image that lies at (y, x) of the image in this orientation. Bit 0 of the code
// mirrors the upper half left-right, bit 1 the lower half; bits 2 and 3 count quarter turns,
// counter-clockwise, applied afterwards (square images only).
MF_HD inline int32_t oriented_pixel(int32_t orientation, int32_t y, int32_t x, int32_t height, int32_t width) {
  const int32_t turns = orientation >> 2;
  const int32_t row = turns == 0 ? y : turns == 1 ? x : turns == 2 ? height - 1 - y : height - 1 - x;
  const int32_t column = turns == 0 ? x : turns == 1 ? width - 1 - y : turns == 2 ? width - 1 - x : y;
  const bool mirrored = (orientation & (row < height / 2 ? 1 : 2)) != 0;
  return row * width + (mirrored ? width - 1 - column : column);
}

// Where a pixel of a resized crop lies along one axis: between two pixels, `share` of the way from
// the first to the second.
struct SamplePosition {
  int32_t low, high;
  float share;
};

// Continues an axis of `size` pixels by reflection at its borders: -1 is pixel 0, size is pixel
// size - 1.
MF_HD inline int32_t reflected(int64_t pixel, int32_t size) {
  const int64_t period = 2 * static_cast<int64_t>(size);
  const int64_t within = (pixel % period + period) % period;
  return static_cast<int32_t>(within < size ? within : period - 1 - within);
}

// Pixel `index` of a crop that is `window` pixels wide, stretched to `size`; `offset` is twice the
// distance of the crop's centre from the image's (core/augment_parameters.h). The position (window
// (2 index + 1 - size) + (offset + size - 1) size) / (2 size) is split into whole pixels and a
// share by integers, so that the only rounding is the share's.
MF_HD inline SamplePosition sample_position(int32_t index, int32_t size, int32_t window, int32_t offset,
                                            bool mirrored) {
  const int64_t wide = size;
  const int64_t numerator = window * (2 * static_cast<int64_t>(index) + 1 - wide) + (offset + wide - 1) * wide;
  const int64_t denominator = 2 * wide;
  int64_t pixel = numerator / denominator;
  int64_t rest = numerator % denominator;
  if (rest < 0) {
    rest += denominator;
    pixel -= 1;
  }
  const int32_t low = reflected(pixel, size);
  const int32_t high = reflected(pixel + 1, size);
  return {mirrored ? size - 1 - low : low, mirrored ? size - 1 - high : high,
          static_cast<float>(rest) / static_cast<float>(denominator)};
}

MF_HD inline float between(float low, float high, float share) { return low * (1.0f - share) + high * share; }

// --- Colour
// ------------------------------------------------------------------------------------------------------------------

// x in [-1, 2) as a number of [0, 1), modulo 1.
MF_HD inline float wrapped(float x) {
  const float positive = x < 0.0f ? x + 1.0f : x;
  return positive >= 1.0f ? positive - 1.0f : positive;
}

// To [0, 1]; what is no number stays none.
MF_HD inline float clamped(float x) {
  const float positive = x < 0.0f ? 0.0f : x;
  return positive > 1.0f ? 1.0f : positive;
}

// atan2(y, x) in turns, in [0, 1], within 3e-8: a minimax polynomial on the octant, then
// reflections. Without branches, so that compilers vectorise it. The same formula on every device, but
// not the same last bits: nvcc fuses multiply and add, so that a GPU's views agree with the CPU's to
// 1e-5. Random decisions are equal bit for bit.
MF_HD inline float turns(float y, float x) {
  const float length_x = x < 0.0f ? -x : x;
  const float length_y = y < 0.0f ? -y : y;
  const bool steep = length_y > length_x;
  const float longer = steep ? length_y : length_x;
  const float shorter = steep ? length_x : length_y;
  const float ratio = shorter / (longer == 0.0f ? 1.0f : longer);
  const float z = ratio * ratio;
  float p = -0.000645228138f;
  p = p * z + 0.00347927329f;
  p = p * z - 0.00889816601f;
  p = p * z + 0.015345539f;
  p = p * z - 0.0221360307f;
  p = p * z + 0.0317458846f;
  p = p * z - 0.0530461147f;
  p = p * z + 0.159154832f;
  const float octant = p * ratio;
  const float quadrant = steep ? 0.25f - octant : octant;
  const float half = x < 0.0f ? 0.5f - quadrant : quadrant;
  return y < 0.0f ? 1.0f - half : half;
}

// How much of its saturation a channel loses at this hue: `sextant` is the hue in sixths of a turn
// plus 5 (red), 3 (green), 1 (blue).
MF_HD inline float hue_share(float sextant) {
  const float distance = sextant >= 6.0f ? sextant - 6.0f : sextant;
  return clamped(distance < 4.0f - distance ? distance : 4.0f - distance);
}

// Hue (angle in the chromaticity plane) moved by `hue` turns in (-1, 1), saturation and value
// multiplied and clamped to [0, 1].
MF_HD inline void shift_colour(float& red, float& green, float& blue, float hue, float saturation, float value) {
  const float upper = red > green ? red : green;
  const float lower = red < green ? red : green;
  const float high = upper > blue ? upper : blue;
  const float low = lower < blue ? lower : blue;
  const float angle = wrapped(turns(1.7320508f * (green - blue), 2.0f * red - green - blue));
  const float sextant = 6.0f * wrapped(angle + hue);
  const float full = (high == 0.0f ? 0.0f : high - low) / (high == 0.0f ? 1.0f : high) * saturation;
  const float v = clamped(high * value);
  const float lost = v * clamped(full);
  red = v - lost * hue_share(sextant + 5.0f);
  green = v - lost * hue_share(sextant + 3.0f);
  blue = v - lost * hue_share(sextant + 1.0f);
}

// The factor of hue is in units of 255/360 turns, as released; whole turns change nothing.
MF_HD inline float hue_in_turns(float factor) {
  const float moved = factor * (255.0f / 360.0f);
  return moved - truncf(moved);
}

// Contrast around the view's mean of the channel.
MF_HD inline float contrasted(float x, float mean, float factor) { return clamped((x - mean) * factor + mean); }

// Grey value of ITU-R BT.601.
MF_HD inline float gray_value(float red, float green, float blue) {
  return red * 0.299f + green * 0.587f + blue * 0.114f;
}

}  // namespace mf
