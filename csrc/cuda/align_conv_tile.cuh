// What the kernels of align_conv share: how maps are cut into tiles, what enters the depthwise
// convolution, and products on the tensor cores. tests/cpp runs all of them on the CPU too.
//
// What enters the depthwise convolution is loaded into shared memory with a border, 64 channels at
// a time; prologue and gate are applied once to each element on the way. From there a lane takes
// two channels and a warp quads of 2 x 2 output pixels, whose inputs overlap.
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

// How a map is cut: tiles of some rows and columns of one image, or of several small images.
struct Tiles {
  int images, height, width;  // of a tile
  int down, across;           // tiles of an image
  int total;

  // Most images that fit into `room`, and no more pixels than side x side; less where one image's
  // tile does not fit.
  static Tiles of(int64_t images, int64_t height, int64_t width, int side, size_t bytes_of_image(int height, int width),
                  size_t room) {
    MF_CHECK(height >= 1 && width >= 1 && images * height * width < INT32_MAX / 2, "a map has ", images, " images of ",
             height, " x ", width, " pixels; wanted at least one pixel an image and fewer than 2^30 in all");
    Tiles tiles{};
    tiles.height = static_cast<int>(height < side ? height : side);
    tiles.width = static_cast<int>(width < side ? width : side);
    if (side > 2 && bytes_of_image(tiles.height, tiles.width) > room) {
      return of(images, height, width, side / 2, bytes_of_image, room);
    }
    tiles.images = side * side / (tiles.height * tiles.width);
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
    return tiles;
  }
};

// The first image and pixel of a tile.
struct TileAt {
  int image, row, column;

  __device__ static TileAt of(const Tiles& tiles, int tile) {
    return {tile / (tiles.down * tiles.across) * tiles.images, tile / tiles.across % tiles.down * tiles.height,
            tile % tiles.across * tiles.width};
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

// What enters a forward tile: whole quads of outputs, and the border.
template <int kStride>
MF_HD Region entering(int images, int height, int width) {
  return Region::of(images, (even(height) - 1) * kStride + 3, (even(width) - 1) * kStride + 3);
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

// Opens 2 x 2 pixels by the gate's 2 x 2 elements that they share, in channels 2 i and 2 i + 1.
template <typename T>
__device__ void apply_gate(const Vec<T, 8> (&gate)[4], int i, Vec<T, 8> (&x)[4]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float2 left = blend(gate[0].pair(i), gate[2].pair(i), share_of_first(row));
    const float2 right = blend(gate[1].pair(i), gate[3].pair(i), share_of_first(row));
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const float2 open = sigmoid<T>(blend(left, right, share_of_first(column)));
      Vec<T, 8>& pixel = x[2 * row + column];
      const float2 value = pixel.pair(i);
      pixel.set_pair(i, {value.x * open.x, value.y * open.y});
    }
  }
}

// Loads x' of a region into shared memory; its first pixel is (row, column), which may lie outside
// of the image and is odd for maps with a gate. Zero outside and for padding. A thread takes quads
// of 2 x 2 pixels, which share four elements of the gate.
template <typename T, int kThreads>
__device__ void load_input_tile(const AlignConvInput& in, int valid, const Region& region, int first_image,
                                int first_row, int first_column, int first_channel, T* staged) {
  const int height = static_cast<int>(in.height);
  const int width = static_cast<int>(in.width);
  const auto step = static_cast<int>(in.channels);
  const int vector = threadIdx.x % kVectors;
  const int64_t channel = first_channel + vector * 8;
  if (channel >= in.channels) {
    return;
  }
  const T* map =
      static_cast<const T*>(in.x) + static_cast<int64_t>(first_image) * height * width * in.channels + channel;
  const T* gates = in.gate == nullptr
                       ? nullptr
                       : static_cast<const T*>(in.gate) +
                             static_cast<int64_t>(first_image) * (height / 2) * (width / 2) * in.channels + channel;
  const int rows = (region.rows + 1) / 2;
  const int columns = (region.columns + 1) / 2;
  const auto down = SmallDivisor::of(rows);
  const auto across = SmallDivisor::of(columns);
#pragma unroll 1
  for (int quad = threadIdx.x / kVectors; quad < region.images * rows * columns; quad += kThreads / kVectors) {
    const int line = across.quotient(quad);
    const int image = down.quotient(line);
    const int row = 2 * (line - image * rows);
    const int column = 2 * (quad - line * columns);
    const int h = first_row + row;
    const int w = first_column + column;
    const bool is_valid = first_image + image < valid;
    const bool in_row[2] = {is_valid && is_index(h, height), is_valid && is_index(h + 1, height)};
    const bool in_column[2] = {is_index(w, width), is_index(w + 1, width)};
    const T* from = map + ((image * height + h) * width + w) * step;
    Vec<T, 8> x[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      x[p] = in_row[p / 2] && in_column[p % 2] ? Vec<T, 8>::load(from + (p / 2 * width + p % 2) * step) : Vec<T, 8>{};
    }
    if (in.prologue != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const StatePair state = StatePair::load(in.prologue, in.channels, channel + 2 * i);
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          x[p].set_pair(i, state.applied(x[p].pair(i)));
        }
      }
    }
    if (gates != nullptr && is_valid) {
      Vec<T, 8> gate[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int r = nearest((h + 1) / 2 - 1 + p / 2, height / 2);
        const int c = nearest((w + 1) / 2 - 1 + p % 2, width / 2);
        gate[p] = Vec<T, 8>::load(gates + ((image * (height / 2) + r) * (width / 2) + c) * step);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        apply_gate(gate, i, x);
      }
    }
    T* to = staged + ((image * region.rows + row) * region.columns + column) * kSlice + vector * 8;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      if (!in_row[p / 2] || !in_column[p % 2]) {
        x[p] = {};
      }
      if (row + p / 2 < region.rows && column + p % 2 < region.columns) {
#pragma unroll
        for (int word = 0; word < Vec<T, 8>::kWords; word += 4) {
          store_16_bytes(to + (p / 2 * region.columns + p % 2) * kSlice + word * 4 / sizeof(T), x[p].word + word);
        }
      }
    }
  }
}

// The nine weights of a slice of channels [kTapCount][kSlice], rounded to the maps' type.
template <typename T, int kThreads>
__device__ void load_taps(const AlignConvInput& in, int first_channel, T* taps) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kSlice * kTapCount; i += kThreads) {
    const int channel = i / kTapCount;
    if (first_channel + channel < in.channels) {
      taps[i % kTapCount * kSlice + channel] =
          static_cast<T>(load(in.depthwise, static_cast<int64_t>(first_channel) * kTapCount + i));
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

// Four neighbouring outputs, of two channels, from the region's pixel that enters the first of them
// at its first tap.
template <typename T, int kStride>
__device__ void convolve_quad(const T* entering, int columns, const Taps<T>& taps, float2 (&sum)[4]) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    sum[p] = {0.0f, 0.0f};
  }
#pragma unroll
  for (int row = 0; row < kStride + 3; ++row) {
#pragma unroll
    for (int column = 0; column < kStride + 3; ++column) {
      const float2 x = pair_at(entering + (row * columns + column) * kSlice);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int i = row - kStride * (p / 2);
        const int j = column - kStride * (p % 2);
        if (i >= 0 && i < 3 && j >= 0 && j < 3) {
          add_product(sum[p], x, taps.tap[i * 3 + j].pair(0));
        }
      }
    }
  }
}

// Calls sink(image, row, column, sum) for each output pixel of a tile, these counted within the
// tile, and the two channels of this lane.
template <typename T, int kStride, int kThreads, typename Sink>
__device__ void convolve_tile(const Tiles& tiles, const Region& region, const T* staged, const T* taps,
                              const Sink& sink) {
  const auto of_lane = Taps<T>::load(taps);
  const int down = (tiles.height + 1) / 2;
  const int across = (tiles.width + 1) / 2;
  const auto by_down = SmallDivisor::of(down);
  const auto by_across = SmallDivisor::of(across);
  const int lane = threadIdx.x % kLanes;
#pragma unroll 1
  for (int quad = threadIdx.x / kLanes; quad < tiles.images * down * across; quad += kThreads / kLanes) {
    const int line = by_across.quotient(quad);
    const int image = by_down.quotient(line);
    const int row = 2 * (line - image * down);
    const int column = 2 * (quad - line * across);
    float2 sum[4];
    convolve_quad<T, kStride>(
        staged + ((image * region.rows + row * kStride) * region.columns + column * kStride) * kSlice + 2 * lane,
        region.columns, of_lane, sum);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      if (row + p / 2 < tiles.height && column + p % 2 < tiles.width) {
        sink(image, row + p / 2, column + p % 2, sum[p]);
      }
    }
  }
}

__device__ inline void multiply_tile(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16) {
  mma_16x8x16(d, a, b);
}
__device__ inline void multiply_tile(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half) {
  mma_16x8x16_half(d, a, b);
}

MF_HD inline constexpr int64_t up_to(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

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
