// What the kernels of align_conv share: how maps are cut into tiles, what enters the depthwise
// convolution, and products on the tensor cores. tests/cpp runs all of them on the CPU too.
//
// What enters the depthwise convolution is loaded into shared memory with a border, 64 channels at
// a time; prologue and gate are applied once to each element on the way. From there a lane takes
// two channels and a warp 2 x 4 output pixels, whose inputs overlap.
//
// Every sum has a fixed order, and no block waits for another: no atomics, no tickets, any number
// of replays at once.
#pragma once

#include <cmath>

#include "api/align_conv.h"
#include "core/check.h"
#include "core/relu.h"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/vec.cuh"
#include "cuda/warp.cuh"

namespace mf::cuda {

constexpr int kSlice = 2 * kLanes;    // channels that a warp takes at a time, two a lane
constexpr int kVectors = kSlice / 8;  // of eight channels each: what a thread moves at a time
constexpr int kTilePixels = 64;       // output pixels of a forward tile
constexpr int kTileSide = 8;
constexpr int kStrip = 4;  // columns of outputs that a warp convolves at a time, in two rows
constexpr int kTapCount = 9;
constexpr int kPadding = 8;    // elements: rows of an operand start 4 banks apart
constexpr int kMaxChunks = 4;  // of kSlice output channels

template <typename T>
__device__ float2 rounded(float2 x) {
  Vec<T, 2> vec;
  vec.set_pair(0, x);
  return vec.pair(0);
}

__device__ inline void add_product(float2& sum, float2 a, float2 b) {
  sum.x += a.x * b.x;
  sum.y += a.y * b.y;
}

// 16-bit results cannot tell the fast one from the exact one, however small it is; tanh.approx would
// have a large relative error where the gate is nearly closed.
template <typename T>
__device__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 2) {
    return fast_sigmoid(x);
  } else {
    return 1.0f / (1.0f + expf(-x));
  }
}

template <typename T>
__device__ float2 sigmoid(float2 x) {
  return {sigmoid<T>(x.x), sigmoid<T>(x.y)};
}

__device__ inline float2 blend(float2 a, float2 b, float share_of_a) {
  return {share_of_a * a.x + (1.0f - share_of_a) * b.x, share_of_a * a.y + (1.0f - share_of_a) * b.y};
}

// Rows 2k-1 and 2k of the doubled gate lie between its rows k-1 and k (cut to the map): a quarter
// and three quarters of the way.
__device__ inline float share_of_first(int second) { return second == 0 ? 0.75f : 0.25f; }

__device__ inline int smaller(int a, int b) { return a < b ? a : b; }

// Whether i is in [0, size).
__device__ inline bool is_index(int i, int size) { return static_cast<unsigned>(i) < static_cast<unsigned>(size); }

// The index of [0, size) next to i.
__device__ inline int nearest(int i, int size) { return i < 0 ? 0 : i < size ? i : size - 1; }

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

// How a map is cut: tiles of some rows and columns of one image, or of several small images.
struct Tiles {
  int images, height, width;  // of a tile
  int down, across;           // tiles of an image
  int total;
  Divisor by_image, by_across;  // of a tile's number: an image's tiles, its columns of them

  // Most images that fit into `room`, and no more pixels than rows x side; less where one image's
  // tile does not fit.
  static Tiles of(int64_t images, int64_t height, int64_t width, int side, size_t bytes_of_image(int height, int width),
                  size_t room) {
    return of(images, height, width, side, bytes_of_image, room, side);
  }
  static Tiles of(int64_t images, int64_t height, int64_t width, int side, size_t bytes_of_image(int height, int width),
                  size_t room, int rows) {
    MF_CHECK(height >= 1 && width >= 1 && images * height * width < INT32_MAX / 2, "a map has ", images, " images of ",
             height, " x ", width, " pixels; wanted at least one pixel an image and fewer than 2^30 in all");
    Tiles tiles{};
    tiles.height = static_cast<int>(height < rows ? height : rows);
    tiles.width = static_cast<int>(width < side ? width : side);
    if (side > 2 && bytes_of_image(tiles.height, tiles.width) > room) {
      return of(images, height, width, side / 2, bytes_of_image, room, rows < side / 2 ? rows : side / 2);
    }
    tiles.images = rows * side / (tiles.height * tiles.width);
    while (tiles.images > 1 && tiles.images * bytes_of_image(tiles.height, tiles.width) > room) {
      --tiles.images;
    }
    if (tiles.images > images) {
      tiles.images = static_cast<int>(images > 0 ? images : 1);
    }
    tiles.down = static_cast<int>((height + tiles.height - 1) / tiles.height);
    tiles.across = static_cast<int>((width + tiles.width - 1) / tiles.width);
    const int64_t total = (images + tiles.images - 1) / tiles.images * tiles.down * tiles.across;
    tiles.total = static_cast<int>(total);
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

// Pixels of shared memory, [images, rows, columns, kSlice].
struct Region {
  int images, rows, columns;
  SmallDivisor by_rows, by_columns;

  MF_HD static Region of(int images, int rows, int columns) {
    return {images, rows, columns, SmallDivisor::of(rows), SmallDivisor::of(columns)};
  }
  MF_HD int pixels() const { return images * rows * columns; }
};

MF_HD inline constexpr int even(int x) { return x + x % 2; }
MF_HD inline constexpr int64_t up_to(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// What enters a forward tile: whole strips of outputs, and the border.
template <int kStride>
MF_HD Region entering(int images, int height, int width) {
  const auto columns = static_cast<int>(up_to(width, kStrip));
  return Region::of(images, (even(height) - 1) * kStride + 3, (columns - 1) * kStride + 3);
}

// The tiles of a forward, the maps' sides and numbers of channels in 32 bits, and what the loops
// divide by.
struct ForwardTiles : Tiles {
  int channels, in_height, in_width, out_height, out_width;
  Region region;                   // what enters a tile
  int quads_down, quads_across;    // of an image's region, for loading
  int strips_down, strips_across;  // of an image's outputs
  SmallDivisor by_height, by_width, by_quads_down, by_quads_across, by_strips_down, by_strips_across;

  template <int kStride>
  static ForwardTiles of(const AlignConvInput& in, size_t bytes_of_image(int height, int width), size_t room) {
    ForwardTiles tiles{};
    static_cast<Tiles&>(tiles) = Tiles::of(in.images, in.out_height(), in.out_width(), kTileSide, bytes_of_image, room);
    tiles.channels = static_cast<int>(in.channels);
    tiles.in_height = static_cast<int>(in.height);
    tiles.in_width = static_cast<int>(in.width);
    tiles.out_height = static_cast<int>(in.out_height());
    tiles.out_width = static_cast<int>(in.out_width());
    tiles.region = entering<kStride>(tiles.images, tiles.height, tiles.width);
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
};

// The pixel, counted from the first of the tile's images, of row `row` of a tile's outputs; -1: the
// map has none.
__device__ inline int pixel_of_row(const ForwardTiles& tiles, const TileAt& at, int images, int row) {
  const int line = tiles.by_width.quotient(row);
  const int image = tiles.by_height.quotient(line);
  const int h = at.row + line - image * tiles.height;
  const int w = at.column + row - line * tiles.width;
  const bool exists = image < tiles.images && at.image + image < images && h < tiles.out_height && w < tiles.out_width;
  return exists ? (image * tiles.out_height + h) * tiles.out_width + w : -1;
}

// A block keeps to one slice of channels.
MF_HD inline int slices_of(int64_t channels) { return static_cast<int>((channels + kSlice - 1) / kSlice); }

// A norm's state for the two channels of a lane.
struct StatePair {
  float2 mean, scale, shift;

  __device__ static StatePair load(const float* state, int64_t channels, int64_t channel) {
    return {pair_at(state + kMean * channels + channel), pair_at(state + kScale * channels + channel),
            pair_at(state + kShift * channels + channel)};
  }
  // relu(scale (x - mean) + shift)
  __device__ float2 applied(float2 x) const {
    return {rectified(scale.x * (x.x - mean.x) + shift.x), rectified(scale.y * (x.y - mean.y) + shift.y)};
  }
};

// The gate of 16 times `open`: 1 / (1 + exp(-open / 16)).
template <typename T>
__device__ float opened(float open) {
  if constexpr (sizeof(T) == 2) {
    return inverse_of_one_plus_power(open * (-1.44269504f / 16.0f));
  } else {
    return sigmoid<T>(open / 16.0f);
  }
}

// Opens 2 x 2 pixels by the gate's 2 x 2 elements that they share, in channels 2 i and 2 i + 1. All
// weights are multiples of 1/16.
template <typename T>
__device__ void apply_gate(const Vec<T, 8> (&gate)[4], int i, Vec<T, 8> (&x)[4]) {
  const float2 g[4] = {gate[0].pair(i), gate[1].pair(i), gate[2].pair(i), gate[3].pair(i)};
  const auto blend4 = [](float2 near, float2 far) { return float2{3.0f * near.x + far.x, 3.0f * near.y + far.y}; };
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float2 left = blend4(g[2 * row], g[2 - 2 * row]);
    const float2 right = blend4(g[2 * row + 1], g[3 - 2 * row]);
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const float2 open = column == 0 ? blend4(left, right) : blend4(right, left);
      Vec<T, 8>& pixel = x[2 * row + column];
      const float2 value = pixel.pair(i);
      pixel.set_pair(i, {value.x * opened<T>(open.x), value.y * opened<T>(open.y)});
    }
  }
}

// Normalises 2 x 2 pixels in eight channels, by the states from `state` on.
template <typename T>
__device__ void apply_prologue(const float* state, int channels, Vec<T, 8> (&x)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto mean = Vec<float, 4>::load(state + kMean * channels + 4 * half);
    const auto scale = Vec<float, 4>::load(state + kScale * channels + 4 * half);
    const auto shift = Vec<float, 4>::load(state + kShift * channels + 4 * half);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const StatePair pair = {mean.pair(i), scale.pair(i), shift.pair(i)};
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        x[p].set_pair(2 * half + i, pair.applied(x[p].pair(2 * half + i)));
      }
    }
  }
}

// How a region is loaded: copied (to be waited for), with the prologue, with the gate, or opened by
// the gate after it was loaded with the prologue; the two at once would take too many registers.
enum class Load { kCopy, kPrologue, kGate, kGateAfter };

// Loads x' of a tile's region into shared memory; `map` is the first pixel of its first image, in this
// thread's eight channels from `channel` on. Zero outside of the image and for padding. A thread takes
// quads of 2 x 2 pixels, which share four elements of the gate: the region begins at an odd row and
// column.
template <typename T, int kStride, int kThreads, Load kLoad>
__device__ void load_quads(const AlignConvInput& in, int valid, const ForwardTiles& tiles, const TileAt& at,
                           int channel, const T* map, T* staged) {
  const int height = tiles.in_height;
  const int width = tiles.in_width;
  const int step = tiles.channels;
  const T* gates = nullptr;
  if constexpr (kLoad == Load::kGate || kLoad == Load::kGateAfter) {
    gates = whole(static_cast<const T*>(in.gate) + static_cast<int64_t>(at.image) * (height / 2 * (width / 2) * step) +
                  channel);
  }
  const Region& region = tiles.region;
#pragma unroll 1
  for (int quad = threadIdx.x / kVectors; quad < region.images * tiles.quads_down * tiles.quads_across;
       quad += kThreads / kVectors) {
    const int line = tiles.by_quads_across.quotient(quad);
    const int image = tiles.by_quads_down.quotient(line);
    const int row = 2 * (line - image * tiles.quads_down);
    const int column = 2 * (quad - line * tiles.quads_across);
    const int h = at.row * kStride - 1 + row;
    const int w = at.column * kStride - 1 + column;
    const bool is_valid = at.image + image < valid;
    const bool in_row[2] = {is_valid && is_index(h, height), is_valid && is_index(h + 1, height)};
    const bool in_column[2] = {is_index(w, width), is_index(w + 1, width)};
    const bool has_row[2] = {true, row + 1 < region.rows};
    const bool has_column[2] = {true, column + 1 < region.columns};
    const int from = ((image * height + h) * width + w) * step;
    T* to = staged + ((image * region.rows + row) * region.columns + column) * kSlice + threadIdx.x % kVectors * 8;
    Vec<T, 8> x[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const bool exists = in_row[p / 2] && in_column[p % 2];
      const T* pixel = map + (from + (p / 2 * width + p % 2) * step);
      T* place = to + (p / 2 * region.columns + p % 2) * kSlice;
      if constexpr (kLoad == Load::kGateAfter) {
        x[p] = exists && has_row[p / 2] && has_column[p % 2] ? Vec<T, 8>::load(place) : Vec<T, 8>{};
      } else if constexpr (kLoad != Load::kCopy) {
        x[p] = exists ? Vec<T, 8>::load(pixel) : Vec<T, 8>{};
      } else if (has_row[p / 2] && has_column[p % 2]) {
#pragma unroll
        for (int i = 0; i < 8; i += 16 / sizeof(T)) {
          copy_16_bytes_or_zeros(place + i, pixel + i, exists);
        }
      }
    }
    if constexpr (kLoad == Load::kPrologue) {
      apply_prologue(in.prologue + channel, step, x);
    } else if constexpr (kLoad != Load::kCopy) {
      Vec<T, 8> gate[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int r = nearest((h + 1) / 2 - 1 + p / 2, height / 2);
        const int c = nearest((w + 1) / 2 - 1 + p % 2, width / 2);
        gate[p] =
            is_valid ? Vec<T, 8>::load(gates + ((image * (height / 2) + r) * (width / 2) + c) * step) : Vec<T, 8>{};
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        apply_gate(gate, i, x);
      }
    }
    if constexpr (kLoad != Load::kCopy) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        if (has_row[p / 2] && has_column[p % 2]) {
          const bool exists = in_row[p / 2] && in_column[p % 2];
          constexpr uint32_t kZeros[4] = {};
#pragma unroll
          for (int word = 0; word < Vec<T, 8>::kWords; word += 4) {
            T* place = to + (p / 2 * region.columns + p % 2) * kSlice + word * 4 / sizeof(T);
            if (exists) {
              store_16_bytes(place, x[p].word + word);
            } else {
              store_16_bytes(place, kZeros);
            }
          }
        }
      }
    }
  }
}

template <typename T, int kStride, int kThreads>
__device__ void load_input_tile(const AlignConvInput& in, int valid, const ForwardTiles& tiles, const TileAt& at,
                                int first_channel, T* staged) {
  const int channel = first_channel + static_cast<int>(threadIdx.x) % kVectors * 8;
  if (channel < tiles.channels) {
    const int image_size = tiles.in_height * tiles.in_width * tiles.channels;
    const T* map = whole(static_cast<const T*>(in.x) + static_cast<int64_t>(at.image) * image_size + channel);
    if (in.prologue != nullptr) {
      load_quads<T, kStride, kThreads, Load::kPrologue>(in, valid, tiles, at, channel, map, staged);
      if (in.gate != nullptr) {
        load_quads<T, kStride, kThreads, Load::kGateAfter>(in, valid, tiles, at, channel, map, staged);
      }
    } else if (in.gate != nullptr) {
      load_quads<T, kStride, kThreads, Load::kGate>(in, valid, tiles, at, channel, map, staged);
    } else {
      load_quads<T, kStride, kThreads, Load::kCopy>(in, valid, tiles, at, channel, map, staged);
    }
  }
  wait_for_copies();
}

// The nine weights of a slice of channels [kTapCount][kSlice], rounded to the maps' type.
template <typename T, int kThreads>
__device__ void load_taps(const AlignConvInput& in, int first_channel, T* taps) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kSlice * kTapCount; i += kThreads) {
    const int channel = first_channel + i % kSlice;
    if (channel < in.channels) {
      taps[i] = static_cast<T>(load(in.depthwise, static_cast<int64_t>(channel) * kTapCount + i / kSlice));
    }
  }
}

// The weights of this lane's two channels, as they are stored: half the registers.
template <typename T>
struct Taps {
  Vec<T, 2> tap[kTapCount];

  __device__ static Taps load(const T* taps) {
    Taps of_lane;
#pragma unroll
    for (int i = 0; i < kTapCount; ++i) {
      of_lane.tap[i] = Vec<T, 2>::load(taps + i * kSlice + threadIdx.x % kLanes * 2);
    }
    return of_lane;
  }
};

// Two rows of kStrip neighbouring outputs, of two channels, from the region's pixel that enters the
// first of them at its first tap.
template <typename T, int kStride>
__device__ void convolve_strip(const T* entering, int columns, const Taps<T>& taps, float2 (&sum)[2][kStrip]) {
#pragma unroll
  for (int row = 0; row < kStride + 3; ++row) {
#pragma unroll
    for (int column = 0; column < (kStrip - 1) * kStride + 3; ++column) {
      const float2 x = pair_at(entering + (row * columns + column) * kSlice);
#pragma unroll
      for (int p = 0; p < 2 * kStrip; ++p) {
        const int i = row - kStride * (p / kStrip);
        const int j = column - kStride * (p % kStrip);
        if (i >= 0 && i < 3 && j >= 0 && j < 3) {
          add_product(sum[p / kStrip][p % kStrip], x, taps.tap[i * 3 + j].pair(0));
        }
      }
    }
  }
}

// Computes and stores a tile's convolution for the two channels of this lane. With kLeft output i of the
// tile goes to left + i * stride; where map is not null it goes to its pixel of the map, which begins
// with the tile's first image.
template <typename T, int kStride, int kThreads, bool kLeft>
__device__ void convolve_tile(const ForwardTiles& tiles, const TileAt& at, int images, const T* staged, const T* taps,
                              T* left, int stride, T* map) {
  const auto of_lane = Taps<T>::load(taps);
  const int step = tiles.channels;
  const int rows = smaller(tiles.height, tiles.out_height - at.row);
  const int columns = smaller(tiles.width, tiles.out_width - at.column);
  const bool has_map = map != nullptr;
  map = whole(map);
  const Region& region = tiles.region;
#pragma unroll 1
  for (int strip = threadIdx.x / kLanes;
       strip < smaller(tiles.images, images - at.image) * tiles.strips_down * tiles.strips_across;
       strip += kThreads / kLanes) {
    const int line = tiles.by_strips_across.quotient(strip);
    const int image = tiles.by_strips_down.quotient(line);
    const int row = 2 * (line - image * tiles.strips_down);
    const int column = kStrip * (strip - line * tiles.strips_across);
    float2 sum[2][kStrip] = {};
    convolve_strip<T, kStride>(
        staged + ((image * region.rows + row * kStride) * region.columns + column * kStride) * kSlice +
            threadIdx.x % kLanes * 2,
        region.columns, of_lane, sum);
    T* to_left = left + ((image * tiles.height + row) * tiles.width + column) * stride;
    int to_map = ((image * tiles.out_height + at.row + row) * tiles.out_width + at.column + column) * step;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
#pragma unroll
      for (int q = 0; q < kStrip; ++q) {
        const bool exists = row + p < rows && column + q < columns;
        Vec<T, 2> pair;
        pair.set_pair(0, sum[p][q]);
        if (kLeft && exists) {
          pair.store(to_left);
        }
        if (exists && has_map) {
          pair.store(map + to_map);
        }
        to_left += stride;
        to_map += step;
      }
      to_left += (tiles.width - kStrip) * stride;
      to_map += (tiles.out_width - kStrip) * step;
    }
  }
}

__device__ inline void multiply_tile(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16) {
  mma_16x8x16(d, a, b);
}
__device__ inline void multiply_tile(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half) {
  mma_16x8x16_half(d, a, b);
}
__device__ inline void multiply_half_tile(float (&d)[4], const uint32_t (&a)[2], uint32_t b, __nv_bfloat16) {
  mma_16x8x8(d, a, b);
}
__device__ inline void multiply_half_tile(float (&d)[4], const uint32_t (&a)[2], uint32_t b, __half) {
  mma_16x8x8_half(d, a, b);
}

// A product [kTilePixels][kSlice] of `left` [kTilePixels][depth] and kSlice rows of `weights`
// [][depth], or with kByColumns kSlice columns of `weights` [depth][]: a warp takes 16 pixels and
// 32 channels at a time. Rows are the strides apart.
template <typename T, bool kByColumns, int kThreads>
__device__ void multiply_chunk(const T* left, int left_stride, const T* weights, int stride, int depth, T* product) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll 1
  for (int unit = threadIdx.x / kLanes; unit < 8; unit += kThreads / kLanes) {
    const int first_row = unit % 4 * 16;
    const int first_column = unit / 4 * 32;
    float d[4][4] = {};
#pragma unroll 1
    for (int k = 0; k < depth; k += 16) {
      uint32_t a[4];
      load_rows(a, left + (first_row + lane % 16) * left_stride + k + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        uint32_t b[4];
        if constexpr (kByColumns) {
          load_transposed(b, weights + (k + lane % 16) * stride + first_column + n * 8 + lane / 16 * 8);
        } else {
          load_rows(b, weights + (first_column + n * 8 + lane / 16 * 8 + lane % 8) * stride + k + lane / 8 % 2 * 8);
        }
        multiply_tile(d[n], a, {b[0], b[1]}, T());
        multiply_tile(d[n + 1], a, {b[2], b[3]}, T());
      }
    }
    T* to = product + (first_row + lane / 4) * (kSlice + kPadding) + first_column + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      store_pair(to + n * 8, {d[n][0], d[n][1]});
      store_pair(to + n * 8 + 8 * (kSlice + kPadding), {d[n][2], d[n][3]});
    }
  }
}

}  // namespace mf::cuda
