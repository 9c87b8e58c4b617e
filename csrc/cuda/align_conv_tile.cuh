// How the kernels of align_conv cut maps [images, height, width, channels] into tiles.
//
// A forward tile is 8 x 8 output pixels of one image, or the whole of several smaller images: 64
// pixels. What the 3x3 convolution reads for it lies in shared memory with a halo of one pixel, 64
// channels (a slice) at a time: [images, rows, columns, kSlice]. A lane has two channels of a slice.
// A backward tile is of input pixels (align_conv_backward_tile.cuh).
//
// Every sum has a fixed order and no block waits for another: no atomics, no tickets, any number of
// replays at once.
#pragma once

#include <algorithm>

#include "api/align_conv.h"
#include "core/check.h"
#include "cuda/warp.cuh"

namespace mf::cuda {

constexpr int kSlice = 2 * kLanes;    // channels in shared memory at a time, two a lane
constexpr int kVectors = kSlice / 8;  // of eight channels each: what a thread moves at a time
constexpr int kTilePixels = 64;       // output pixels of a forward tile
constexpr int kTileSide = 8;
constexpr int kStrip = 4;  // columns of outputs that a warp convolves at a time, in two rows
constexpr int kTapCount = 9;
constexpr int kPadding = 8;    // elements: rows of an operand start 4 banks apart
constexpr int kMaxChunks = 4;  // of kSlice output channels

MF_HD inline constexpr int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}
MF_HD inline constexpr int even(int x) { return x + x % 2; }

// Whether i is in [0, size), and the index of [0, size) next to i.
__device__ inline bool in_range(int i, int size) { return static_cast<unsigned>(i) < static_cast<unsigned>(size); }
__device__ inline int clamp_index(int i, int size) { return i < 0 ? 0 : i < size ? i : size - 1; }

// A block keeps to one slice of channels.
MF_HD inline int slices_of(int64_t channels) { return static_cast<int>((channels + kSlice - 1) / kSlice); }

// Divides x by a multiplication, for x * divisor < 2^16: pixels of a block's shared memory.
struct SmallDivisor {
  unsigned factor;

  MF_HD static SmallDivisor of(int divisor) {
    return {divisor == 0 ? 0 : (65535u + static_cast<unsigned>(divisor)) / static_cast<unsigned>(divisor)};
  }
  __device__ int quotient(int x) const { return static_cast<int>(static_cast<unsigned>(x) * factor >> 16); }
};

// Divides x in [0, 2^31) by a multiplication.
struct Divisor {
  unsigned factor;
  int shift;

  MF_HD static Divisor of(int divisor) {
    int bits = 0;
    while (int64_t{1} << bits < divisor) {
      ++bits;
    }
    const uint64_t power = uint64_t{1} << (31 + bits);
    return {static_cast<unsigned>((power + divisor - 1) / divisor), 31 + bits};
  }
  __device__ int quotient(int x) const {
    return static_cast<int>(uint64_t{static_cast<unsigned>(x)} * factor >> shift);
  }
};

// The tiles of a map: some rows and columns of one image, or several small images.
struct Tiles {
  int images, height, width;  // of a tile
  int down, across;           // tiles of an image
  int total;
  Divisor by_image, by_across;  // of a tile's number: an image's tiles, its columns of them

  // As many images as fit into `shared_bytes`, in at most rows x side pixels. A tile of one image fits in
  // every form that is served.
  static Tiles of(int64_t images, int64_t height, int64_t width, int rows, int side,
                  size_t bytes_of_image(int height, int width), size_t shared_bytes) {
    MF_CHECK(height >= 1 && width >= 1 && images * height * width < INT32_MAX / 2, "a map has ", images, " images of ",
             height, " x ", width, " pixels; wanted at least one pixel an image and fewer than 2^30 in all");
    Tiles tiles{};
    tiles.height = static_cast<int>(std::min<int64_t>(height, rows));
    tiles.width = static_cast<int>(std::min<int64_t>(width, side));
    const auto fit = static_cast<int64_t>(shared_bytes / bytes_of_image(tiles.height, tiles.width));
    MF_CHECK(fit >= 1, "a tile takes more than ", shared_bytes, " bytes of shared memory");
    const int64_t most = std::min<int64_t>({rows * side / (tiles.height * tiles.width), fit, images});
    tiles.images = static_cast<int>(std::max<int64_t>(most, 1));
    tiles.down = static_cast<int>((height + tiles.height - 1) / tiles.height);
    tiles.across = static_cast<int>((width + tiles.width - 1) / tiles.width);
    tiles.total = static_cast<int>((images + tiles.images - 1) / tiles.images * tiles.down * tiles.across);
    tiles.by_image = Divisor::of(tiles.down * tiles.across);
    tiles.by_across = Divisor::of(tiles.across);
    return tiles;
  }
};

// The first image and pixel of a tile.
struct TileAt {
  int image, row, column;

  __device__ static TileAt of(const Tiles& tiles, int tile) {
    const int image = tiles.by_image.quotient(tile);
    const int of_image = tile - image * (tiles.down * tiles.across);
    const int row = tiles.by_across.quotient(of_image);
    return {image * tiles.images, row * tiles.height, (of_image - row * tiles.across) * tiles.width};
  }
};

// The input pixels of a forward tile in shared memory, halo included: [images, rows, columns, kSlice].
struct InputRegion {
  int images, rows, columns;

  // For outputs in rows of two and columns of kStrip, as convolve_tile computes them.
  template <int kStride>
  MF_HD static InputRegion of(int images, int height, int width) {
    const auto columns = static_cast<int>(round_up(width, kStrip));
    return {images, (even(height) - 1) * kStride + 3, (columns - 1) * kStride + 3};
  }
  MF_HD int pixels() const { return images * rows * columns; }
};

// The tiles of a forward, the maps' sides and numbers of channels in 32 bits, and what the loops
// divide by.
struct ForwardTiles : Tiles {
  int channels, in_height, in_width, out_height, out_width;
  InputRegion region;
  int quads_down, quads_across;    // 2 x 2 pixels of an image's region, for loading
  int strips_down, strips_across;  // 2 x kStrip of an image's outputs
  SmallDivisor by_height, by_width, by_quads_down, by_quads_across, by_strips_down, by_strips_across;

  template <int kStride>
  static ForwardTiles of(const AlignConvInput& in, size_t bytes_of_image(int height, int width), size_t shared_bytes) {
    ForwardTiles tiles{};
    static_cast<Tiles&>(tiles) =
        Tiles::of(in.images, in.out_height(), in.out_width(), kTileSide, kTileSide, bytes_of_image, shared_bytes);
    tiles.channels = static_cast<int>(in.channels);
    tiles.in_height = static_cast<int>(in.height);
    tiles.in_width = static_cast<int>(in.width);
    tiles.out_height = static_cast<int>(in.out_height());
    tiles.out_width = static_cast<int>(in.out_width());
    tiles.region = InputRegion::of<kStride>(tiles.images, tiles.height, tiles.width);
    tiles.quads_down = (tiles.region.rows + 1) / 2;
    tiles.quads_across = (tiles.region.columns + 1) / 2;
    tiles.strips_down = (tiles.height + 1) / 2;
    tiles.strips_across = (tiles.width + kStrip - 1) / kStrip;
    tiles.by_height = SmallDivisor::of(tiles.height);
    tiles.by_width = SmallDivisor::of(tiles.width);
    tiles.by_quads_down = SmallDivisor::of(tiles.quads_down);
    tiles.by_quads_across = SmallDivisor::of(tiles.quads_across);
    tiles.by_strips_down = SmallDivisor::of(tiles.strips_down);
    tiles.by_strips_across = SmallDivisor::of(tiles.strips_across);
    return tiles;
  }

  // The pixel of output i of a tile, counted from the first of the tile's images; -1: the map has none.
  __device__ int pixel_of_output(const TileAt& at, int map_images, int i) const {
    const int line = by_width.quotient(i);
    const int image = by_height.quotient(line);
    const int h = at.row + line - image * height;
    const int w = at.column + i - line * width;
    const bool exists = image < images && at.image + image < map_images && h < out_height && w < out_width;
    return exists ? (image * out_height + h) * out_width + w : -1;
  }
};

}  // namespace mf::cuda
