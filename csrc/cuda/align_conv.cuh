// Kernel bodies of align_conv; tests/cpp runs them on the CPU too.
//
// Forward. A tile of up to 64 output pixels at a time: what enters the depthwise convolution is
// brought to shared memory with a border, 64 channels at a time, prologue and gate applied once to
// each element on the way. There a lane owns two channels and a warp takes quads of 2 x 2 output
// pixels, whose inputs overlap. The fused kernel rounds the result to the maps' type as the left
// operand of the pointwise product on the tensor cores and takes the statistics of the rounded y
// from shared memory, where they are exact: mean, then squared deviations, of eight pixels, merged
// (Moments) over the block's tiles, then over blocks by a second launch.
//
// Backward. A tile of input pixels: quads of them gather from the 2 x 2 (stride 2) or 4 x 4 outputs
// that they entered, both for the gradient of x' and for those of the nine weights, which stay in
// registers over all tiles of a block, as do the sums for the prologue; each block leaves one
// partial sum, and a second launch adds them. The gate's gradient is gathered from the tile with a
// border of one pixel, computed twice where tiles meet, so that nothing is scattered.
//
// Every sum has a fixed order, and no block waits for another: no atomics, no tickets, any number
// of replays at once.
#pragma once

#include <cmath>
#include <cstring>

#include "api/align_conv.h"
#include "core/check.h"
#include "core/relu.h"
#include "cuda/eight.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/warp.cuh"

namespace mf::cuda {

constexpr int kSlice = 2 * kLanes;    // channels that a warp takes at a time, two a lane
constexpr int kVectors = kSlice / 8;  // of eight channels each: what a thread moves at a time
constexpr int kTilePixels = 64;       // output pixels of a forward tile
constexpr int kTileSide = 8;
constexpr int kTapCount = 9;
constexpr int kPadding = 8;    // elements: rows of an operand start 4 banks apart
constexpr int kMaxChunks = 4;  // of kSlice output channels

// --- numbers as they are stored
// ------------------------------------------------------------------------------------------------

// Two neighbouring channels.
template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  uint32_t bits;

  __device__ float2 floats() const {
    __nv_bfloat162 pair;
    memcpy(&pair, &bits, sizeof pair);
    return __bfloat1622float2(pair);
  }
  __device__ static Pair of(float2 x) {
    const __nv_bfloat162 pair = __float22bfloat162_rn(x);
    Pair result;
    memcpy(&result.bits, &pair, sizeof pair);
    return result;
  }
};

template <>
struct Pair<__half> {
  uint32_t bits;

  __device__ float2 floats() const {
    __half2 pair;
    memcpy(&pair, &bits, sizeof pair);
    return __half22float2(pair);
  }
  __device__ static Pair of(float2 x) {
    const __half2 pair = __float22half2_rn(x);
    Pair result;
    memcpy(&result.bits, &pair, sizeof pair);
    return result;
  }
};

template <>
struct Pair<float> {
  float2 numbers;

  __device__ float2 floats() const { return numbers; }
  __device__ static Pair of(float2 x) { return {x}; }
};

template <typename T>
__device__ float2 pair_at(const T* from) {
  return reinterpret_cast<const Pair<T>*>(from)->floats();
}

template <typename T>
__device__ void store_pair(T* to, float2 x) {
  *reinterpret_cast<Pair<T>*>(to) = Pair<T>::of(x);
}

template <typename T>
__device__ float2 rounded(float2 x) {
  return Pair<T>::of(x).floats();
}

__device__ inline void add_product(float2& sum, float2 a, float2 b) {
  sum.x += a.x * b.x;
  sum.y += a.y * b.y;
}

// Eight neighbouring channels, aligned to 16 bytes.
template <typename T>
struct Pairs {
  Pair<T> pair[4];

  __device__ static Pairs load(const T* from) {
    const Eight<T> eight = load_eight(from);
    Pairs result;
    memcpy(&result, &eight, sizeof result);
    return result;
  }
  __device__ void store(T* to) const {
    Eight<T> eight;
    memcpy(&eight, this, sizeof eight);
    store_eight(to, eight);
  }
  __device__ static Pairs zero() {
    Pairs result;
    memset(&result, 0, sizeof result);
    return result;
  }
};

// 16-bit results cannot tell the fast exponential from the exact one.
template <typename T>
__device__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 2) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
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

// The index of [0, size) next to i.
__device__ inline int nearest(int i, int size) { return i < 0 ? 0 : i < size ? i : size - 1; }

// --- tiles
// ---------------------------------------------------------------------------------------------------------------------

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

  MF_HD int pixels() const { return images * rows * columns; }
};

MF_HD inline constexpr int even(int x) { return x + x % 2; }

// What enters a forward tile: whole quads of outputs, and the border.
template <int kStride>
MF_HD Region entering(int images, int height, int width) {
  return {images, (even(height) - 1) * kStride + 3, (even(width) - 1) * kStride + 3};
}

// --- what enters the depthwise convolution
// -------------------------------------------------------------------------------------

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

// Brings x' of a region to shared memory; its first pixel is (row, column), which may lie outside
// of the image and is odd for maps with a gate. Zero outside and for padding. A thread takes quads
// of 2 x 2 pixels, which share four elements of the gate; it multiplies by the gate what it has
// brought itself, in a second pass, which keeps registers free.
template <typename T, int kThreads>
__device__ void load_input_tile(const AlignConvInput& in, int valid, const Region& region, int first_image,
                                int first_row, int first_column, int first_channel, T* staged) {
  const int height = static_cast<int>(in.height);
  const int width = static_cast<int>(in.width);
  const int vector = threadIdx.x % kVectors;
  const int64_t channel = first_channel + vector * 8;
  if (channel >= in.channels) {
    return;
  }
  const int down = (region.rows + 1) / 2;
  const int across = (region.columns + 1) / 2;
  const int quads = region.images * down * across;
  const auto inside = [&](int n, int h, int w) { return n < valid && h >= 0 && h < height && w >= 0 && w < width; };
  const auto has = [&](int row, int column) { return row < region.rows && column < region.columns; };
  const auto slot = [&](int image, int row, int column) {
    return staged + ((image * region.rows + row) * region.columns + column) * kSlice + vector * 8;
  };
#pragma unroll 1
  for (int quad = threadIdx.x / kVectors; quad < quads; quad += kThreads / kVectors) {
    const int image = quad / (down * across);
    const int row = quad / across % down * 2;
    const int column = quad % across * 2;
    const int n = first_image + image;
    const int h = first_row + row;
    const int w = first_column + column;
    const int64_t first = ((static_cast<int64_t>(n) * height + h) * width + w) * in.channels + channel;
    Pairs<T> x[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      x[p] = inside(n, h + p / 2, w + p % 2)
                 ? Pairs<T>::load(static_cast<const T*>(in.x) +
                                  (first + static_cast<int64_t>(p / 2 * width + p % 2) * in.channels))
                 : Pairs<T>::zero();
    }
    if (in.prologue != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const StatePair state = StatePair::load(in.prologue, in.channels, channel + 2 * i);
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          if (inside(n, h + p / 2, w + p % 2)) {
            x[p].pair[i] = Pair<T>::of(state.applied(x[p].pair[i].floats()));
          }
        }
      }
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      if (has(row + p / 2, column + p % 2)) {
        x[p].store(slot(image, row + p / 2, column + p % 2));
      }
    }
  }
  if (in.gate == nullptr) {
    return;
  }
#pragma unroll 1
  for (int quad = threadIdx.x / kVectors; quad < quads; quad += kThreads / kVectors) {
    const int image = quad / (down * across);
    const int row = quad / across % down * 2;
    const int column = quad % across * 2;
    const int n = first_image + image;
    const int h = first_row + row;
    const int w = first_column + column;
    if (n >= valid) {
      continue;
    }
    const int half_height = height / 2;
    const int half_width = width / 2;
    const T* from =
        static_cast<const T*>(in.gate) + static_cast<int64_t>(n) * half_height * half_width * in.channels + channel;
    Pairs<T> gate[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int r = nearest((h + 1) / 2 - 1 + p / 2, half_height);
      const int c = nearest((w + 1) / 2 - 1 + p % 2, half_width);
      gate[p] = Pairs<T>::load(from + static_cast<int64_t>(r * half_width + c) * in.channels);
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      if (has(row + p / 2, column + p % 2) && inside(n, h + p / 2, w + p % 2)) {
        T* own = slot(image, row + p / 2, column + p % 2);
        Pairs<T> x = Pairs<T>::load(own);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 left = blend(gate[0].pair[i].floats(), gate[2].pair[i].floats(), share_of_first(p / 2));
          const float2 right = blend(gate[1].pair[i].floats(), gate[3].pair[i].floats(), share_of_first(p / 2));
          const float2 open = sigmoid<T>(blend(left, right, share_of_first(p % 2)));
          const float2 value = x.pair[i].floats();
          x.pair[i] = Pair<T>::of({value.x * open.x, value.y * open.y});
        }
        x.store(own);
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

// Those of this lane's two channels, as they are stored: half the registers.
template <typename T>
struct Taps {
  Pair<T> tap[kTapCount];

  __device__ static Taps load(const T* taps) {
    Taps of_lane;
#pragma unroll
    for (int i = 0; i < kTapCount; ++i) {
      of_lane.tap[i] = *reinterpret_cast<const Pair<T>*>(taps + i * kSlice + threadIdx.x % kLanes * 2);
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
          add_product(sum[p], x, taps.tap[i * 3 + j].floats());
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
  const int lane = threadIdx.x % kLanes;
#pragma unroll 1
  for (int quad = threadIdx.x / kLanes; quad < tiles.images * down * across; quad += kThreads / kLanes) {
    const int image = quad / (down * across);
    const int row = quad / across % down * 2;
    const int column = quad % across * 2;
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

// --- depthwise alone
// -----------------------------------------------------------------------------------------------------------

// A block keeps to one slice of channels.
MF_HD inline int slices_of(int64_t channels) { return static_cast<int>((channels + kSlice - 1) / kSlice); }

template <typename T, int kStride, int kThreads>
__device__ void align_conv_depthwise_block(const AlignConvDepthwise& params, const Tiles& tiles,
                                           unsigned char* memory) {
  const AlignConvInput& in = params.input;
  const int height = static_cast<int>(in.out_height());
  const int width = static_cast<int>(in.out_width());
  const auto valid = static_cast<int>(in.valid_images());
  const int slices = slices_of(in.channels);
  const int first_channel = static_cast<int>(blockIdx.x) % slices * kSlice;
  const int64_t channel = first_channel + threadIdx.x % kLanes * 2;
  const bool has_channel = channel < in.channels;
  const Region region = entering<kStride>(tiles.images, tiles.height, tiles.width);
  T* staged = reinterpret_cast<T*>(memory);
  T* taps = staged + region.pixels() * kSlice;
  load_taps<T, kThreads>(in, first_channel, taps);
  for (int tile = static_cast<int>(blockIdx.x) / slices; tile < tiles.total;
       tile += static_cast<int>(gridDim.x) / slices) {
    const TileAt at = TileAt::of(tiles, tile);
    load_input_tile<T, kThreads>(in, valid, region, at.image, at.row * kStride - 1, at.column * kStride - 1,
                                 first_channel, staged);
    __syncthreads();
    if (has_channel) {
      convolve_tile<T, kStride, kThreads>(tiles, region, staged, taps, [&](int image, int row, int column, float2 sum) {
        const int n = at.image + image;
        if (n < in.images && at.row + row < height && at.column + column < width) {
          const int64_t pixel = (static_cast<int64_t>(n) * height + at.row + row) * width + at.column + column;
          store_pair(static_cast<T*>(params.map) + pixel * in.channels + channel, sum);
        }
      });
    }
    __syncthreads();
  }
}

// --- depthwise and pointwise
// ---------------------------------------------------------------------------------------------------

__device__ inline void multiply_tile(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16) {
  mma_16x8x16(d, a, b);
}
__device__ inline void multiply_tile(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half) {
  mma_16x8x16_half(d, a, b);
}

MF_HD inline constexpr int64_t up_to(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Shared memory of a block of the fused kernel, in bytes from its beginning; every part is aligned
// to 16.
struct FusedMemory {
  int stride;     // elements from one row of an operand to the next
  size_t left;    // [kTilePixels][stride]: the depthwise convolution's result
  size_t staged;  // what enters it, then y [kTilePixels][kSlice + kPadding], then moments
  size_t taps;    // [kSlice][kTapCount]: depthwise weights
  size_t pixels;  // int [kTilePixels]: where in the map a row belongs; -1: nowhere
  size_t bytes;   // of all. The pointwise weights [out_channels up to the next 64][stride] come first

  MF_HD static FusedMemory of(int64_t channels, int64_t out_channels, size_t staged_bytes, int element, int warps) {
    FusedMemory memory{};
    memory.stride = static_cast<int>(channels) + kPadding;
    const size_t row = static_cast<size_t>(memory.stride) * element;
    const size_t y = size_t{kTilePixels} * (kSlice + kPadding) * element;
    const size_t moments = size_t{3} * kSlice * warps * sizeof(float);
    size_t shared = staged_bytes > y ? staged_bytes : y;
    shared = shared > moments ? shared : moments;
    memory.left = static_cast<size_t>(up_to(out_channels, kSlice)) * row;
    memory.staged = memory.left + kTilePixels * row;
    memory.taps = memory.staged + shared;
    memory.pixels = memory.taps + size_t{kSlice} * kTapCount * element;
    memory.bytes = memory.pixels + kTilePixels * sizeof(int);
    return memory;
  }
};

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

// Moments of a lane's two channels.
struct MomentsPair {
  float count;
  float2 mean, squares;

  __device__ void merge(float more, float2 its_mean, float2 its_squares) {
    const Moments x = merged({count, mean.x, squares.x}, {more, its_mean.x, its_squares.x});
    const Moments y = merged({count, mean.y, squares.y}, {more, its_mean.y, its_squares.y});
    *this = {x.count, {x.mean, y.mean}, {x.squares, y.squares}};
  }
};

// Of the rows [first, first + 8) of a chunk of y and this lane's two columns: those that count.
template <typename T>
__device__ void take_moments(const T* y, const int* pixels, int counted_pixels, int first, MomentsPair& moments) {
  const T* column = y + first * (kSlice + kPadding) + threadIdx.x % kLanes * 2;
  unsigned counts = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    counts |= pixels[first + i] >= 0 && pixels[first + i] < counted_pixels ? 1u << i : 0u;
  }
  float2 value[8];
  float count = 0.0f;
  float2 mean = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool is_counted = (counts >> i & 1u) != 0;
    value[i] = is_counted ? pair_at(column + i * (kSlice + kPadding)) : float2{0.0f, 0.0f};
    count += is_counted ? 1.0f : 0.0f;
    mean = {mean.x + value[i].x, mean.y + value[i].y};
  }
  const float inverse = count > 0.0f ? 1.0f / count : 0.0f;
  mean = {mean.x * inverse, mean.y * inverse};
  float2 squares = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if ((counts >> i & 1u) != 0) {
      const float2 distance = {value[i].x - mean.x, value[i].y - mean.y};
      add_product(squares, distance, distance);
    }
  }
  moments.merge(count, mean, squares);
}

template <typename T, int kStride, int kChunks, int kThreads>
__device__ void align_conv_forward_block(const AlignConvForward& params, const Tiles& tiles,
                                         const FusedMemory& memory_map, unsigned char* memory) {
  constexpr int kWarps = kThreads / kLanes;
  const AlignConvInput& in = params.input;
  const int height = static_cast<int>(in.out_height());
  const int width = static_cast<int>(in.out_width());
  const auto channels = static_cast<int>(in.channels);
  const auto out_channels = static_cast<int>(params.out_channels);
  const auto valid = static_cast<int>(in.valid_images());
  const int counted_pixels = valid * height * width;
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int stride = memory_map.stride;
  const Region region = entering<kStride>(tiles.images, tiles.height, tiles.width);
  T* weights = reinterpret_cast<T*>(memory);
  T* left = reinterpret_cast<T*>(memory + memory_map.left);
  T* staged = reinterpret_cast<T*>(memory + memory_map.staged);
  T* taps = reinterpret_cast<T*>(memory + memory_map.taps);
  int* pixels = reinterpret_cast<int*>(memory + memory_map.pixels);

  const int vectors = channels / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < static_cast<int>(up_to(out_channels, kSlice)) * vectors; i += kThreads) {
    const int row = i / vectors;
    T* to = weights + row * stride + i % vectors * 8;
    if (row < out_channels) {
      copy_16_bytes(to,
                    static_cast<const T*>(params.pointwise) + static_cast<int64_t>(row) * channels + i % vectors * 8);
    } else {
      Pairs<T>::zero().store(to);
    }
  }
  wait_for_copies();

  MomentsPair moments[kChunks] = {};
  for (int tile = blockIdx.x; tile < tiles.total; tile += static_cast<int>(gridDim.x)) {
    const TileAt at = TileAt::of(tiles, tile);
#pragma unroll 1
    for (int row = threadIdx.x; row < kTilePixels; row += kThreads) {
      const int n = at.image + row / (tiles.height * tiles.width);
      const int h = at.row + row / tiles.width % tiles.height;
      const int w = at.column + row % tiles.width;
      const bool exists = row < tiles.images * tiles.height * tiles.width && n < in.images && h < height && w < width;
      pixels[row] = exists ? (n * height + h) * width + w : -1;
    }
    for (int first_channel = 0; first_channel < channels; first_channel += kSlice) {
      if (channels > kSlice || tile == static_cast<int>(blockIdx.x)) {
        load_taps<T, kThreads>(in, first_channel, taps);
      }
      load_input_tile<T, kThreads>(in, valid, region, at.image, at.row * kStride - 1, at.column * kStride - 1,
                                   first_channel, staged);
      __syncthreads();
      const int channel = first_channel + 2 * lane;
      if (channel < channels) {
        convolve_tile<T, kStride, kThreads>(
            tiles, region, staged, taps, [&](int image, int row, int column, float2 sum) {
              const int r = (image * tiles.height + row) * tiles.width + column;
              store_pair(left + r * stride + channel, sum);
              if (params.map != nullptr && pixels[r] >= 0) {
                store_pair(static_cast<T*>(params.map) + static_cast<int64_t>(pixels[r]) * channels + channel, sum);
              }
            });
      }
      __syncthreads();
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kSlice < out_channels) {
        multiply_chunk<T, false, kThreads>(left, stride, weights + chunk * kSlice * stride, stride, channels, staged);
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < kTilePixels * kVectors; i += kThreads) {
          const int column = chunk * kSlice + i % kVectors * 8;
          const int pixel = pixels[i / kVectors];
          if (pixel >= 0 && column < out_channels) {
            Pairs<T>::load(staged + i / kVectors * (kSlice + kPadding) + i % kVectors * 8)
                .store(static_cast<T*>(params.y) + static_cast<int64_t>(pixel) * out_channels + column);
          }
        }
#pragma unroll 1
        for (int first = warp * 8; first < kTilePixels; first += kWarps * 8) {
          take_moments(staged, pixels, counted_pixels, first, moments[chunk]);
        }
        __syncthreads();
      }
    }
  }

  auto* of_warp = reinterpret_cast<Moments*>(staged);  // [kWarps][kSlice]
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk * kSlice < out_channels) {
      of_warp[warp * kSlice + 2 * lane] = {moments[chunk].count, moments[chunk].mean.x, moments[chunk].squares.x};
      of_warp[warp * kSlice + 2 * lane + 1] = {moments[chunk].count, moments[chunk].mean.y, moments[chunk].squares.y};
      __syncthreads();
      for (int column = threadIdx.x; column < kSlice && chunk * kSlice + column < out_channels; column += kThreads) {
        Moments sum = of_warp[column];
        for (int other = 1; other < kWarps; ++other) {
          sum = merged(sum, of_warp[other * kSlice + column]);
        }
        float* to = params.moments + static_cast<int64_t>(blockIdx.x) * 3 * out_channels + chunk * kSlice + column;
        to[0] = sum.count;
        to[out_channels] = sum.mean;
        to[2 * out_channels] = sum.squares;
      }
      __syncthreads();
    }
  }
}

// --- adding up what the blocks left: a lane a channel, warps share the parts
// ---------------------------------------------------

template <int kThreads>
__device__ void align_conv_finish_block(const AlignConvForward& params, int parts, unsigned char* memory) {
  constexpr int kWarps = kThreads / kLanes;
  auto* of_warp = reinterpret_cast<Moments*>(memory);  // [kWarps][kLanes]
  const int64_t channels = params.out_channels;
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kLanes + lane;
  Moments sum = {};
  for (int part = warp; part < parts && channel < channels; part += kWarps) {
    const float* from = params.moments + part * 3 * channels + channel;
    sum = merged(sum, {from[0], from[channels], from[2 * channels]});
  }
  of_warp[warp * kLanes + lane] = sum;
  __syncthreads();
  if (warp == 0 && channel < channels) {
    for (int other = 1; other < kWarps; ++other) {
      sum = merged(sum, of_warp[other * kLanes + lane]);
    }
    finish_norm(params.norm, sum, channels, channel, params.state);
    if (channel == 0 && params.norm.training && params.norm.batches != nullptr) {
      ++*params.norm.batches;
    }
  }
}

template <int kThreads>
__device__ void align_conv_sums_block(const AlignConvBackward& params, int parts, unsigned char* memory) {
  constexpr int kWarps = kThreads / kLanes;
  auto* of_warp = reinterpret_cast<float*>(memory);  // [kWarps][kLanes]
  const int64_t channels = params.input.channels;
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int which = static_cast<int>(blockIdx.x) % kAlignConvSums;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) / kAlignConvSums * kLanes + lane;
  float sum = 0.0f;
  for (int part = warp; part < parts && channel < channels; part += kWarps) {
    sum += params.sums[(static_cast<int64_t>(part) * kAlignConvSums + which) * channels + channel];
  }
  of_warp[warp * kLanes + lane] = sum;
  __syncthreads();
  if (warp != 0 || channel >= channels) {
    return;
  }
  for (int other = 1; other < kWarps; ++other) {
    sum += of_warp[other * kLanes + lane];
  }
  if (which < kTapCount) {
    if (params.depthwise.data != nullptr) {
      store(params.depthwise, channel * kTapCount + which, sum);
    }
  } else if (params.prologue != nullptr) {
    if (which == kTapCount) {
      params.prologue[kShift * channels + channel] = sum;
      params.prologue[kMean * channels + channel] = -params.input.prologue[kScale * channels + channel] * sum;
    } else {
      params.prologue[kScale * channels + channel] = sum;
      params.prologue[kInverseStd * channels + channel] = 0.0f;
    }
  }
}

// --- backward: the gradient of y
// -----------------------------------------------------------------------------------------------

// What a thread adds to the gradient of eight channels.
struct StateGradient {
  float2 mean[4], slope[4], offset[4];

  // Of the vector of channels from `channel` on; the first block also writes the gradients of the
  // norm's weight and bias.
  __device__ static StateGradient of(const AlignConvGradY& params, int64_t channel, int64_t valid_pixels, bool writes) {
    StateGradient result = {};
    if (params.grad_state == nullptr) {
      return result;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t c = channel + i;
      const NormBackward back =
          norm_backward(params.norm, params.state, params.grad_state, static_cast<float>(valid_pixels), params.channels,
                        c, params.mean_rest != nullptr ? params.mean_rest[c] : 0.0f);
      (i % 2 == 0 ? result.mean[i / 2].x : result.mean[i / 2].y) = params.state[kMean * params.channels + c];
      (i % 2 == 0 ? result.slope[i / 2].x : result.slope[i / 2].y) = back.slope;
      (i % 2 == 0 ? result.offset[i / 2].x : result.offset[i / 2].y) = back.offset;
      if (writes && params.weight != nullptr) {
        params.weight[c] = back.weight;
      }
      if (writes && params.bias != nullptr) {
        params.bias[c] = back.bias;
      }
    }
    return result;
  }

  // The gradient in all of eight channels from element `at` on, which are no padding.
  template <typename T>
  __device__ Pairs<T> total(const AlignConvGradY& params, int64_t at) const {
    Pairs<T> sum = params.grad != nullptr ? Pairs<T>::load(static_cast<const T*>(params.grad) + at) : Pairs<T>::zero();
    if (params.grad_state != nullptr) {
      const Pairs<T> y = Pairs<T>::load(static_cast<const T*>(params.y) + at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 grad = sum.pair[i].floats();
        const float2 value = y.pair[i].floats();
        sum.pair[i] = Pair<T>::of({grad.x + (slope[i].x * (value.x - mean[i].x) + offset[i].x),
                                   grad.y + (slope[i].y * (value.y - mean[i].y) + offset[i].y)});
      }
    }
    return sum;
  }
};

__device__ inline int64_t valid_pixels_of(const AlignConvGradY& params) {
  const int64_t count = params.valid_pointer != nullptr ? *params.valid_pointer : params.valid;
  return (count < 0 ? 0 : count < params.images ? count : params.images) * params.pixels;
}

// A thread keeps to eight channels.
template <typename T, int kThreads>
__device__ void align_conv_grad_y_block(const AlignConvGradY& params) {
  const auto vectors = static_cast<int>(params.channels / 8);
  const int rows = kThreads / vectors;  // pixels of a block at a time
  const int64_t channel = threadIdx.x % vectors * 8;
  const int64_t valid = valid_pixels_of(params);
  if (static_cast<int>(threadIdx.x) >= rows * vectors) {
    return;
  }
  const auto gradient =
      StateGradient::of(params, channel, valid, blockIdx.x == 0 && static_cast<int>(threadIdx.x) < vectors);
  const int64_t step = static_cast<int64_t>(gridDim.x) * rows;
  for (int64_t pixel = static_cast<int64_t>(blockIdx.x) * rows + threadIdx.x / vectors;
       pixel < params.images * params.pixels; pixel += step) {
    const int64_t at = pixel * params.channels + channel;
    const Pairs<T> total = pixel < valid ? gradient.template total<T>(params, at) : Pairs<T>::zero();
    total.store(static_cast<T*>(params.total) + at);
  }
}

// Shared memory of the next, in bytes from its beginning, which the pointwise weights
// [channels][right_stride] take.
struct ProductMemory {
  int left_stride, right_stride;  // elements from row to row
  size_t left;                    // [kTilePixels][left_stride]: the gradient in all
  size_t product;                 // [kTilePixels][kSlice + kPadding]
  size_t bytes;

  MF_HD static ProductMemory of(int64_t channels, int64_t in_channels, int element) {
    ProductMemory memory{};
    memory.left_stride = static_cast<int>(channels) + kPadding;
    memory.right_stride = static_cast<int>(up_to(in_channels, kSlice)) + kPadding;
    memory.left = static_cast<size_t>(channels) * memory.right_stride * element;
    memory.product = memory.left + size_t{kTilePixels} * memory.left_stride * element;
    memory.bytes = memory.product + size_t{kTilePixels} * (kSlice + kPadding) * element;
    return memory;
  }
};

// The same, and the product with the pointwise weights, 64 pixels at a time.
template <typename T, int kThreads>
__device__ void align_conv_product_block(const AlignConvGradY& params, const ProductMemory& memory_map,
                                         unsigned char* memory) {
  const auto channels = static_cast<int>(params.channels);
  const auto in_channels = static_cast<int>(params.in_channels);
  const int vectors = channels / 8;
  const int rows = kThreads / vectors;
  const int row_of_thread = static_cast<int>(threadIdx.x) / vectors;
  const int channel = static_cast<int>(threadIdx.x) % vectors * 8;
  const int64_t valid = valid_pixels_of(params);
  const int64_t pixels = params.images * params.pixels;
  T* weights = reinterpret_cast<T*>(memory);
  T* left = reinterpret_cast<T*>(memory + memory_map.left);
  T* product = reinterpret_cast<T*>(memory + memory_map.product);
  const int in_vectors = in_channels / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < channels * in_vectors; i += kThreads) {
    copy_16_bytes(weights + i / in_vectors * memory_map.right_stride + i % in_vectors * 8,
                  static_cast<const T*>(params.pointwise) + i * 8);
  }
  wait_for_copies();
  const bool has_rows = row_of_thread < rows;  // of the threads that are left over none takes a channel
  StateGradient gradient = {};
  if (has_rows) {
    gradient = StateGradient::of(params, channel, valid, blockIdx.x == 0 && row_of_thread == 0);
  }
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kTilePixels; first < pixels;
       first += static_cast<int64_t>(gridDim.x) * kTilePixels) {
#pragma unroll 2
    for (int row = has_rows ? row_of_thread : kTilePixels; row < kTilePixels; row += rows) {
      const int64_t at = (first + row) * channels + channel;
      const Pairs<T> total = first + row < valid ? gradient.template total<T>(params, at) : Pairs<T>::zero();
      total.store(left + row * memory_map.left_stride + channel);
      if (first + row < pixels) {
        total.store(static_cast<T*>(params.total) + at);
      }
    }
    for (int column = 0; column < in_channels; column += kSlice) {
      __syncthreads();
      multiply_chunk<T, true, kThreads>(left, memory_map.left_stride, weights + column, memory_map.right_stride,
                                        channels, product);
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < kTilePixels * kVectors; i += kThreads) {
        const int64_t pixel = first + i / kVectors;
        const int to = column + i % kVectors * 8;
        if (pixel < pixels && to < in_channels) {
          Pairs<T>::load(product + i / kVectors * (kSlice + kPadding) + i % kVectors * 8)
              .store(static_cast<T*>(params.map) + pixel * in_channels + to);
        }
      }
    }
  }
}

// --- backward: through depthwise convolution, gate and prologue
// ----------------------------------------------------------------

// What a tile of input pixels needs in shared memory. With a gate the tile has a border of one
// pixel and its quads begin at odd rows and columns, where the four elements of the gate that they
// share begin.
template <int kStride, bool kGate>
struct BackwardRegions {
  static constexpr int kBorder = kGate ? 1 : 0;
  // Tap i = kFirstTap + b - kStride a leads from input row b of a quad to row a of the outputs that
  // it gathers from.
  static constexpr int kFirstTap = kStride == 1 || kGate ? 2 : 1;
  static constexpr int kOutputs = kStride == 1 ? 4 : 2;
  Region x, grad, gate;

  MF_HD static BackwardRegions of(int images, int height, int width) {
    BackwardRegions regions{};
    regions.x = {images, even(height) + 2 * kBorder, even(width) + 2 * kBorder};
    const int rows = regions.x.rows;
    const int columns = regions.x.columns;
    regions.grad = kStride == 1 ? Region{images, rows + 2, columns + 2} : Region{images, rows / 2 + 1, columns / 2 + 1};
    regions.gate = kGate ? Region{images, rows / 2 + 1, columns / 2 + 1} : Region{0, 0, 0};
    return regions;
  }
  // Of the outputs' region: the row that belongs to input row `first` of a tile without its border
  // (even).
  __device__ static int first_output(int first) { return kStride == 1 ? first - kBorder - 1 : first / 2 - kBorder; }
  MF_HD int pixels() const { return x.pixels() + grad.pixels() + gate.pixels(); }
};

// Brings a region of a map as it is; outside of the map and for padding it is zero, or with kClamp
// the nearest row and column.
template <typename T, int kThreads, bool kClamp>
__device__ void load_region(const void* map, int valid, int height, int width, int64_t channels, const Region& region,
                            int first_image, int first_row, int first_column, int first_channel, T* staged) {
  const int lane = threadIdx.x % kLanes;
  const int64_t channel = first_channel + lane % kVectors * 8;
  if (channel >= channels) {
    return;
  }
  for (int row = threadIdx.x / kLanes; row < region.images * region.rows; row += kThreads / kLanes) {
    const int n = first_image + row / region.rows;
    int h = first_row + row % region.rows;
    h = kClamp ? nearest(h, height) : h;
    const bool has_row = n < valid && h >= 0 && h < height;
    const T* from = static_cast<const T*>(map) + (static_cast<int64_t>(n) * height + h) * width * channels + channel;
    for (int column = lane / kVectors; column < region.columns; column += kLanes / kVectors) {
      int w = first_column + column;
      w = kClamp ? nearest(w, width) : w;
      T* to = staged + (row * region.columns + column) * kSlice + lane % kVectors * 8;
      if (has_row && w >= 0 && w < width) {
#pragma unroll
        for (int i = 0; i < 8; i += 16 / sizeof(T)) {
          copy_16_bytes(to + i, from + w * channels + i);
        }
      } else {
        Pairs<T>::zero().store(to);
      }
    }
  }
}

template <typename T, int kStride, bool kGate, int kThreads>
__device__ void align_conv_backward_block(const AlignConvBackward& params, const Tiles& tiles, unsigned char* memory) {
  using Regions = BackwardRegions<kStride, kGate>;
  constexpr int kBorder = Regions::kBorder;
  constexpr int kWarps = kThreads / kLanes;
  const AlignConvInput& in = params.input;
  const int height = static_cast<int>(in.height);
  const int width = static_cast<int>(in.width);
  const auto valid = static_cast<int>(in.valid_images());
  const int slices = slices_of(in.channels);
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int first_channel = static_cast<int>(blockIdx.x) % slices * kSlice;
  const int64_t channel = first_channel + 2 * lane;
  const bool has_channel = channel < in.channels;
  const bool has_prologue = in.prologue != nullptr;
  const Regions regions = Regions::of(tiles.images, tiles.height, tiles.width);
  T* x = reinterpret_cast<T*>(memory);
  T* grad = x + regions.x.pixels() * kSlice;
  T* gate = grad + regions.grad.pixels() * kSlice;

  Taps<T> taps = {};
  load_taps<T, kThreads>(in, first_channel, x);
  __syncthreads();
  if (has_channel) {
    taps = Taps<T>::load(x);
  }
  __syncthreads();
  float2 sums[kAlignConvSums] = {};
  for (int tile = static_cast<int>(blockIdx.x) / slices; tile < tiles.total;
       tile += static_cast<int>(gridDim.x) / slices) {
    const TileAt at = TileAt::of(tiles, tile);
    load_region<T, kThreads, false>(in.x, valid, height, width, in.channels, regions.x, at.image, at.row - kBorder,
                                    at.column - kBorder, first_channel, x);
    load_region<T, kThreads, false>(
        params.grad, valid, static_cast<int>(in.out_height()), static_cast<int>(in.out_width()), in.channels,
        regions.grad, at.image, Regions::first_output(at.row), Regions::first_output(at.column), first_channel, grad);
    if constexpr (kGate) {
      load_region<T, kThreads, true>(in.gate, valid, height / 2, width / 2, in.channels, regions.gate, at.image,
                                     at.row / 2 - 1, at.column / 2 - 1, first_channel, gate);
    }
    wait_for_copies();
    __syncthreads();
    const int down = regions.x.rows / 2;
    const int across = regions.x.columns / 2;
#pragma unroll 1
    for (int quad = warp; has_channel && quad < tiles.images * down * across; quad += kWarps) {
      const int image = quad / (down * across);
      const int quad_row = quad / across % down;
      const int quad_column = quad % across;
      const int n = at.image + image;
      const int h = at.row - kBorder + 2 * quad_row;
      const int w = at.column - kBorder + 2 * quad_column;
      T* own = x + ((image * regions.x.rows + 2 * quad_row) * regions.x.columns + 2 * quad_column) * kSlice + 2 * lane;
      const auto inside = [&](int p) {
        return h + p / 2 >= 0 && h + p / 2 < height && w + p % 2 >= 0 && w + p % 2 < width;
      };
      // The border belongs to other tiles.
      const auto is_ours = [&](int p) {
        return n < in.images && inside(p) && h + p / 2 >= at.row && h + p / 2 < at.row + tiles.height &&
               w + p % 2 >= at.column && w + p % 2 < at.column + tiles.width;
      };
      float2 left[2];
      float2 right[2];
      if constexpr (kGate) {
        const T* around =
            gate + ((image * regions.gate.rows + quad_row) * regions.gate.columns + quad_column) * kSlice + 2 * lane;
        const float2 top_left = pair_at(around);
        const float2 top_right = pair_at(around + kSlice);
        const float2 bottom_left = pair_at(around + regions.gate.columns * kSlice);
        const float2 bottom_right = pair_at(around + (regions.gate.columns + 1) * kSlice);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          left[b] = blend(top_left, bottom_left, share_of_first(b));
          right[b] = blend(top_right, bottom_right, share_of_first(b));
        }
      }
      float2 before[4];  // the gate; what the prologue's ReLU has let through
      float2 open[4];
      float2 entered[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        before[p] = pair_at(own + (p / 2 * regions.x.columns + p % 2) * kSlice);
        if (has_prologue) {
          before[p] = rounded<T>(StatePair::load(in.prologue, in.channels, channel).applied(before[p]));
        }
        entered[p] = before[p];
        if constexpr (kGate) {
          open[p] = sigmoid<T>(blend(left[p / 2], right[p / 2], share_of_first(p % 2)));
          entered[p] = rounded<T>({before[p].x * open[p].x, before[p].y * open[p].y});
        }
        entered[p] = is_ours(p) ? entered[p] : float2{0.0f, 0.0f};
      }
      float2 back[4] = {};
      const T* from = grad +
                      ((image * regions.grad.rows + quad_row * (2 / kStride)) * regions.grad.columns +
                       quad_column * (2 / kStride)) *
                          kSlice +
                      2 * lane;
#pragma unroll
      for (int row = 0; row < Regions::kOutputs; ++row) {
#pragma unroll
        for (int column = 0; column < Regions::kOutputs; ++column) {
          const float2 g = pair_at(from + (row * regions.grad.columns + column) * kSlice);
#pragma unroll
          for (int p = 0; p < 4; ++p) {
            const int i = Regions::kFirstTap + p / 2 - kStride * row;
            const int j = Regions::kFirstTap + p % 2 - kStride * column;
            if (i >= 0 && i < 3 && j >= 0 && j < 3) {
              add_product(back[p], g, taps.tap[i * 3 + j].floats());
              add_product(sums[i * 3 + j], g, entered[p]);
            }
          }
        }
      }
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        T* slot = own + (p / 2 * regions.x.columns + p % 2) * kSlice;
        if constexpr (kGate) {
          back[p] = {back[p].x * open[p].x, back[p].y * open[p].y};
        }
        if (is_ours(p)) {
          float2 to_x = back[p];
          if (has_prologue) {
            const float2 mean = pair_at(in.prologue + kMean * in.channels + channel);
            const float2 scale = pair_at(in.prologue + kScale * in.channels + channel);
            to_x = {passes(before[p].x) ? to_x.x : 0.0f, passes(before[p].y) ? to_x.y : 0.0f};
            sums[kTapCount] = {sums[kTapCount].x + to_x.x, sums[kTapCount].y + to_x.y};
            const float2 raw = pair_at(slot);
            add_product(sums[kTapCount + 1], to_x, {raw.x - mean.x, raw.y - mean.y});
            to_x =
                n < valid ? float2{to_x.x * scale.x, to_x.y * scale.y} : float2{0.0f, 0.0f};  // whatever the scale is
          }
          if (params.x != nullptr) {
            const int64_t pixel = (static_cast<int64_t>(n) * height + h + p / 2) * width + w + p % 2;
            store_pair(static_cast<T*>(params.x) + pixel * in.channels + channel, to_x);
          }
        }
        if constexpr (kGate) {
          // Over x, which no other lane reads: the gradient of the doubled gate.
          const float2 to_gate = {back[p].x * before[p].x * (1.0f - open[p].x),
                                  back[p].y * before[p].y * (1.0f - open[p].y)};
          store_pair(slot, n < valid && inside(p) ? to_gate : float2{0.0f, 0.0f});
        }
      }
    }
    __syncthreads();
    if constexpr (kGate) {
      const int half_height = tiles.height / 2;
      const int half_width = tiles.width / 2;
      const int count = params.gate != nullptr && has_channel ? tiles.images * half_height * half_width : 0;
#pragma unroll 1
      for (int i = warp; i < count; i += kWarps) {
        const int image = i / (half_height * half_width);
        const int row = i / half_width % half_height;
        const int column = i % half_width;
        const int n = at.image + image;
        const int h = at.row / 2 + row;
        const int w = at.column / 2 + column;
        if (n >= in.images || h >= height / 2 || w >= width / 2) {
          continue;
        }
        // Element k takes 1/4, 3/4, 3/4, 1/4 of rows 2k-1 to 2k+2; at the edges of the map all of
        // row 2k, or 2k+1.
        const T* from = x + ((image * regions.x.rows + 2 * row) * regions.x.columns + 2 * column) * kSlice + 2 * lane;
        float2 sum = {0.0f, 0.0f};
#pragma unroll
        for (int a = 0; a < 4; ++a) {
          const bool whole_row = (a == 1 && h == 0) || (a == 2 && h == height / 2 - 1);
          float2 of_row = {0.0f, 0.0f};
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            const bool whole = (b == 1 && w == 0) || (b == 2 && w == width / 2 - 1);
            const float share = whole ? 1.0f : b == 0 || b == 3 ? 0.25f : 0.75f;
            add_product(of_row, pair_at(from + (a * regions.x.columns + b) * kSlice), {share, share});
          }
          const float share = whole_row ? 1.0f : a == 0 || a == 3 ? 0.25f : 0.75f;
          add_product(sum, of_row, {share, share});
        }
        const int64_t pixel = (static_cast<int64_t>(n) * (height / 2) + h) * (width / 2) + w;
        store_pair(static_cast<T*>(params.gate) + pixel * in.channels + channel, sum);
      }
      __syncthreads();
    }
  }
  if (params.sums == nullptr) {
    return;
  }
  auto* of_warp = reinterpret_cast<float2*>(memory);  // [kWarps][kAlignConvSums][kLanes]
#pragma unroll
  for (int which = 0; which < kAlignConvSums; ++which) {
    of_warp[(warp * kAlignConvSums + which) * kLanes + lane] = sums[which];
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < kAlignConvSums * kLanes; i += kThreads) {
    float2 sum = of_warp[i];
    for (int other = 1; other < kWarps; ++other) {
      const float2 more = of_warp[other * kAlignConvSums * kLanes + i];
      sum = {sum.x + more.x, sum.y + more.y};
    }
    const int64_t to = first_channel + i % kLanes * 2;
    if (to < in.channels) {
      const int64_t part = static_cast<int64_t>(blockIdx.x) / slices;
      store_pair(params.sums + (part * kAlignConvSums + i / kLanes) * in.channels + to, sum);
    }
  }
}

}  // namespace mf::cuda
