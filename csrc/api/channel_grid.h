// How kernels over a map [pixels, channels] in NHWC share it among blocks, and how much workspace
// their sums by channel take.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/host_device.h"

namespace mf {

constexpr int kGroup = 8;  // adjacent channels of a thread; channels must be a multiple of it

// A batch of images as [pixels, channels]; images from a valid number on are padding.
struct MapShape {
  int64_t images;
  int64_t pixels_per_image;
  int64_t channels;
  const int32_t* valid_pointer;  // where the number of valid images lies on the device; null: `valid`
  int64_t valid;

  MF_HD int64_t pixels() const { return images * pixels_per_image; }
  MF_HD int64_t valid_pixels() const {
    const int64_t rows = valid_pointer != nullptr ? *valid_pointer : valid;
    return (rows < 0 ? 0 : rows > images ? images : rows) * pixels_per_image;
  }
};

struct ChannelGrid {
  int shift;        // 1 << shift groups of kGroup channels lie side by side in a block: 1, 2, 4 or 8
  unsigned tiles;   // of that many channels: blockIdx.y
  unsigned blocks;  // that share the pixels: blockIdx.x

  // `most`: blocks in all, about. Each thread gets at least `least` pixels if there are as many.
  static ChannelGrid of(const MapShape& shape, int threads, int64_t most, int64_t least = 4) {
    int shift = 0;
    while (shift < 3 && (kGroup << shift) < shape.channels) {
      ++shift;
    }
    const int64_t width = kGroup << shift;
    const int64_t tiles = (shape.channels + width - 1) / width;
    const int64_t pixels = least * (threads >> shift);  // of a block
    const int64_t wanted = (shape.pixels() + pixels - 1) / pixels;
    return {shift, static_cast<unsigned>(tiles),
            static_cast<unsigned>(std::clamp<int64_t>(most / tiles, 1, std::max<int64_t>(wanted, 1)))};
  }

  // Floats of the workspace for sums of `fields` numbers a channel, and tickets.
  MF_HD int64_t partials(int fields) const { return int64_t{tiles} * blocks * fields * (kGroup << shift); }
  MF_HD int64_t tickets() const { return 2 * int64_t{tiles}; }
};

}  // namespace mf
