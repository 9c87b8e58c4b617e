// The tile of align_conv's backward in shared memory: what a block loads, lists and writes.
//
// A tile is 8 x 8 to 16 x 16 input pixels of one image, or several small images, in 64 channels. In
// shared memory are, in this order, all counted in pixels of kPitch elements:
//   the cursor, the prologue's state, and with a norm x - mean of each thread's pixels,
//   x       [images, rows, columns]: then x', then x's gradient, and pixels of filler quads behind,
//   grad    the gradient of the depthwise convolution's outputs that these pixels entered,
//   gate    and behind it gate_parts [quads][4]: what a quad adds to the gradients of its 2 x 2 elements,
//   quads   the list of the tile's quads of 2 x 2 pixels (QuadEntry).
// With a gate x has a halo of one pixel, and quads begin at odd rows and columns, where the 2 x 2 gate
// elements that they share begin. Quads of the halo are computed by both tiles, so nothing is scattered.
#pragma once

#include "cuda/align_conv_gather.cuh"

namespace mf::cuda {

// A block takes eight channels a warp of one tile at a time. What copies them between shared and
// global memory takes two vectors of eight channels a thread, half a pixel apart.
template <int kThreads>
struct BackwardBlock {
  static constexpr int kChannels = kThreads / kLanes * kWarpChannels;
  static constexpr int kPitch = kChannels + kPadding;      // elements from a pixel to the next
  static constexpr int kCopyThreads = kChannels / 16;      // of a pixel
  static constexpr int kPixels = kThreads / kCopyThreads;  // that all threads copy at a time
  // The first of a warp's channels.
  __device__ static int channel_of_warp() {
    return static_cast<int>(static_cast<unsigned>(reload_thread_index()) / kLanes * kWarpChannels);
  }
  MF_HD static int slices(int64_t channels) { return static_cast<int>((channels + kChannels - 1) / kChannels); }
};

// What a thread copies: every kPixels-th pixel from the first on, in two vectors of channels.
template <int kThreads>
struct CopyThread {
  int pixel, channel[2];

  __device__ static CopyThread of_thread() {
    using Block = BackwardBlock<kThreads>;
    const auto thread = static_cast<unsigned>(reload_thread_index());  // unsigned: divided by shifts alone
    const auto channel = static_cast<int>(thread % Block::kCopyThreads * 8);
    return {static_cast<int>(thread / Block::kCopyThreads), {channel, channel + Block::kChannels / 2}};
  }
};

struct alignas(16) NumberedTile : TileAt {
  int number;
};

// A block's current tile and the step to its next one, its channels, and the number of valid images.
// In shared memory, so that it takes no registers while a tile is computed.
struct TileCursor : NumberedTile {
  NumberedTile step;
  int end_row, end_column;  // of the tiles of an image
  int first_channel, valid;

  __device__ static TileCursor of(const Tiles& tiles, int first, int step, int first_channel, int valid) {
    return {{TileAt::of(tiles, first), first},
            {TileAt::of(tiles, step), step},
            tiles.down * tiles.height,
            tiles.across * tiles.width,
            first_channel,
            valid};
  }
  // Adds the step with carries: no division.
  __device__ void advance(const Tiles& tiles) {
    NumberedTile next = {{image + step.image, row + step.row, column + step.column}, number + step.number};
    const bool carry_row = next.column >= end_column;
    next.column -= carry_row ? end_column : 0;
    next.row += carry_row ? tiles.height : 0;
    const bool carry_image = next.row >= end_row;
    next.row -= carry_image ? end_row : 0;
    next.image += carry_image ? tiles.images : 0;
    static_cast<NumberedTile&>(*this) = next;
  }
};

// Pixels of shared memory before x.
template <typename T, Prologue kPrologue, int kThreads>
constexpr int kHeaderPixels = (sizeof(TileCursor) + kNormRows * BackwardBlock<kThreads>::kChannels * sizeof(float) +
                               (kPrologue == Prologue::kNorm ? 8 * kThreads * sizeof(float2) : 0) - 1) /
                                  (BackwardBlock<kThreads>::kPitch * sizeof(T)) +
                              1;

__device__ inline int half(int x) { return static_cast<int>(static_cast<unsigned>(x) / 2); }  // x: not negative

struct RemainderDivisor : SmallDivisor {
  int minus;  // the divisor, negated once for all

  MF_HD static RemainderDivisor of(int divisor) { return {SmallDivisor::of(divisor), -divisor}; }
  // What is left of x after so many divisors.
  __device__ int remainder(int x, int quotient) const { return x + quotient * minus; }
};

// A region of shared memory with the map that it is of, in 32 bits.
struct MapRegion {
  int images, rows, columns;
  RemainderDivisor by_rows, by_columns;
  int image_pixels, pixels;  // of an image of the region, and of all
  int begin, end;            // in shared memory, in pixels
  int height, width;         // of the map
  int map_image;             // pixels of an image of the map

  MF_HD static MapRegion of(int images, int rows, int columns, int begin, int64_t height, int64_t width) {
    return {images,
            rows,
            columns,
            RemainderDivisor::of(rows),
            RemainderDivisor::of(columns),
            rows * columns,
            images * rows * columns,
            begin,
            begin + images * rows * columns,
            static_cast<int>(height),
            static_cast<int>(width),
            static_cast<int>(height * width)};
  }
};

template <int kStride, Prologue kPrologue>
struct BackwardRegions {
  static constexpr bool kGate = kPrologue == Prologue::kGate;
  static constexpr int kHalo = kGate ? 1 : 0;
  MapRegion x, grad, gate;
  MapRegion own, own_gate;            // the tile itself: pixels, and elements of the gate
  RemainderDivisor down, across;      // by the quads of an image's column and row
  int images, channels, pixel_bytes;  // of the maps
  int quads_of_image, listed;         // quads of an image's region, and of the list, fillers included
  int gate_parts, list;               // where these begin, in pixels

  // The regions of a tile of `tile_images` images, `rows` rows and `columns` columns. `header` is an argument,
  // since adding a constant would cost some addresses one more instruction.
  MF_HD static BackwardRegions of(const AlignConvInput& in, int header, int tile_images, int rows, int columns) {
    const int down = even(rows) / 2 + kHalo;
    const int across = even(columns) / 2 + kHalo;
    BackwardRegions regions{};
    regions.images = static_cast<int>(in.images);
    regions.channels = static_cast<int>(in.channels);
    regions.pixel_bytes = static_cast<int>(in.channels * (in.type == FloatType::kFloat32 ? 4 : 2));
    regions.quads_of_image = down * across;
    regions.listed = static_cast<int>(round_up(tile_images * down * across, kQuads));
    regions.down = RemainderDivisor::of(down);
    regions.across = RemainderDivisor::of(across);
    regions.x = MapRegion::of(tile_images, 2 * down, 2 * across, header, in.height, in.width);
    regions.own = MapRegion::of(tile_images, rows, columns, header + kHalo * (2 * across + 1), in.height, in.width);
    constexpr int kEach = 2 / kStride;  // outputs that a quad's rows lead to, but for the halo
    regions.grad =
        MapRegion::of(tile_images, kEach * down + kEach, kEach * across + kEach, regions.x.end + regions.filler(),
                      (in.height - 1) / kStride + 1, (in.width - 1) / kStride + 1);
    if (kGate) {
      regions.gate = MapRegion::of(tile_images, down + 1, across + 1, regions.grad.end, in.height / 2, in.width / 2);
      regions.own_gate = MapRegion::of(tile_images, rows / 2, columns / 2, 0, in.height / 2, in.width / 2);
    }
    regions.gate_parts = kGate ? regions.gate.end : regions.grad.end;
    regions.list = regions.gate_parts + (kGate ? 4 * regions.listed : 0);
    return regions;
  }
  // The output row at which `grad` begins for a tile whose first input row, without the halo, is
  // `first` (even).
  __device__ static int first_output(int first) { return (kStride == 1 ? first - 1 : half(first)) - kHalo; }
  // Pixels behind x, all zero, that the quads which fill up the list take as theirs.
  MF_HD int filler() const { return x.columns + 2; }
  template <typename T, int kThreads>
  MF_HD size_t bytes() const {
    constexpr size_t kPixel = BackwardBlock<kThreads>::kPitch * sizeof(T);
    const size_t tile = list * kPixel + listed * sizeof(uint2);
    const size_t taps = x.begin * kPixel + size_t{kSlice} * kTapCount * sizeof(T);
    return tile > taps ? tile : taps;
  }
};

// Starts to copy a region of a map as it is; outside of the map, for padding and in channels that the
// map lacks it is zero, or with kClamp the nearest row and column.
template <typename T, int kThreads, bool kClamp>
__device__ void load_region(const void* map, const MapRegion& region, int channels, int pixel_bytes, int valid,
                            int first_image, int first_row, int first_column, int first_channel,
                            const CopyThread<kThreads>& copies, T* memory) {
  using Block = BackwardBlock<kThreads>;
  const T* from = advance_global(static_cast<const T*>(map) + (first_channel + copies.channel[0]),
                                 first_image * region.map_image, pixel_bytes);
  T* to = opaque_shared(memory + (region.begin + copies.pixel) * Block::kPitch + copies.channel[0]);
  const int images = valid - first_image;
  // In channels that the map lacks it has no columns.
  const int width[2] = {first_channel + copies.channel[0] < channels ? region.width : 0,
                        first_channel + copies.channel[1] < channels ? region.width : 0};
#pragma unroll 1
  for (int pixel = copies.pixel; pixel < region.pixels; pixel += Block::kPixels) {
    const int line = region.by_columns.quotient(pixel);
    const int image = region.by_rows.quotient(line);
    int h = region.by_rows.remainder(first_row + line, image);
    int w = region.by_columns.remainder(first_column + pixel, line);
    h = kClamp ? clamp_index(h, region.height) : h;
    w = kClamp ? clamp_index(w, region.width) : w;
    const bool in_rows = image < images && (kClamp || in_range(h, region.height));
    const T* own = advance_global(from, (image * region.height + h) * region.width + w, pixel_bytes);
#pragma unroll
    for (int vector = 0; vector < 2; ++vector) {
#pragma unroll
      for (int i = 0; i < 8; i += 16 / sizeof(T)) {
        const int at = vector * Block::kChannels / 2 + i;
        copy_16_bytes_or_zeros(to + at, own + at, in_rows && in_range(w, width[vector]));
      }
    }
    to += Block::kPixels * Block::kPitch;
  }
}

constexpr float kGateUnit = 0.0625f;  // of gate_parts, which are whole numbers of it

template <typename T, int kStride, Prologue kPrologue, int kThreads>
struct BackwardTile {
  using Regions = BackwardRegions<kStride, kPrologue>;
  using Block = BackwardBlock<kThreads>;
  const AlignConvBackward& params;
  const Tiles& tiles;
  const Regions& regions;
  T* memory;      // all of it, of which the regions say where they begin
  T* gate_parts;  // [quads][4], in units of kGateUnit
  uint2* list;
  TileCursor* at;
  float2* centred;  // [8][kThreads], at the thread's: x - mean, for which registers are scarce
  float* state;     // [kNormRows][kChannels], of the prologue: takes registers only while it is used

  __device__ BackwardTile(const AlignConvBackward& params, const Tiles& tiles, const Regions& regions,
                          unsigned char* memory)
      : params(params), tiles(tiles), regions(regions), memory(reinterpret_cast<T*>(memory)) {
    at = reinterpret_cast<TileCursor*>(memory);
    state = reinterpret_cast<float*>(at + 1);
    centred = reinterpret_cast<float2*>(state + kNormRows * Block::kChannels) + threadIdx.x;
    gate_parts = this->memory + regions.gate_parts * Block::kPitch;
    list = reinterpret_cast<uint2*>(this->memory + regions.list * Block::kPitch);
  }

  __device__ void zero_filler() const {
    const auto copies = CopyThread<kThreads>::of_thread();
#pragma unroll 1
    for (int i = copies.pixel; i < regions.filler(); i += Block::kPixels) {
      Vec<T, 8>{}.store(memory + (regions.x.end + i) * Block::kPitch + copies.channel[0]);
      Vec<T, 8>{}.store(memory + (regions.x.end + i) * Block::kPitch + copies.channel[1]);
    }
  }

  __device__ void load_state(int first_channel) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < kNormRows * Block::kChannels; i += kThreads) {
      const int channel = first_channel + i % Block::kChannels;
      if (channel < params.input.channels) {
        state[i] = params.input.prologue[i / Block::kChannels * params.input.channels + channel];
      }
    }
  }

  // Images of the tile that the map has.
  __device__ int images(const TileAt& at) const { return std::min(tiles.images, regions.images - at.image); }

  // Starts to load the tile, and lists its quads.
  __device__ void load() const {
    const TileCursor at = *this->at;
    const auto copies = CopyThread<kThreads>::of_thread();
    const auto load = [&](auto clamps, const void* map, const MapRegion& region, int first_row, int first_column) {
      load_region<T, kThreads, clamps.value>(map, region, regions.channels, regions.pixel_bytes, at.valid, at.image,
                                             first_row, first_column, at.first_channel, copies, memory);
    };
    load(std::false_type(), params.input.x, regions.x, at.row - Regions::kHalo, at.column - Regions::kHalo);
    load(std::false_type(), params.grad, regions.grad, Regions::first_output(at.row), Regions::first_output(at.column));
    if constexpr (Regions::kGate) {
      load(std::true_type(), params.input.gate, regions.gate, half(at.row) - 1, half(at.column) - 1);
    }
    list_quads(at, at.valid, regions.x.height, regions.x.width);
  }

  // Quads lie in lines, whatever the image; an image of `grad` and `gate` has one line more.
  __device__ void list_quads(const TileAt& at, int valid, int height, int width) const {
    const int quads = regions.x.images * regions.quads_of_image;
#pragma unroll 1
    for (int i = reload_thread_index(); i < regions.listed; i += kThreads) {
      const int line = regions.across.quotient(i);
      const int column = regions.across.remainder(i, line);
      const int image = regions.down.quotient(line);
      const int h = 2 * regions.down.remainder(line, image) - Regions::kHalo;  // within the tile
      const int w = 2 * column - Regions::kHalo;
      unsigned flags = 1u << QuadEntry::kExists;
      bool in_row[2];
      bool in_column[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        in_row[b] = in_range(at.row + h + b, height);
        in_column[b] = in_range(at.column + w + b, width);
      }
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        // Without a halo all pixels of the map that a quad has are the tile's.
        const bool in_tile = !Regions::kGate || (in_range(h + p / 2, tiles.height) && in_range(w + p % 2, tiles.width));
        const bool counts = at.image + image < valid && in_row[p / 2] && in_column[p % 2] && in_tile;
        flags |= counts ? 1u << (QuadEntry::kCounts + p) : 0u;
      }
      flags |= in_row[0] && in_row[1] ? 0u : 1u << QuadEntry::kRowEdge;
      flags |= in_column[0] && in_column[1] ? 0u : 1u << QuadEntry::kColumnEdge;
      constexpr int kUnits = Block::kPitch * sizeof(T) / 16;  // of a pixel
      const int pixel = regions.x.begin + 2 * line * regions.x.columns + 2 * column;
      const int output = regions.grad.begin + ((line + image) * regions.grad.columns + column) * (2 / kStride);
      const int element = Regions::kGate ? regions.gate.begin + (line + image) * regions.gate.columns + column : 0;
      const bool exists = i < quads;
      list[i] = QuadEntry{(exists ? pixel : regions.x.end) * kUnits, (exists ? output : regions.grad.begin) * kUnits,
                          (exists ? element : regions.gate.begin) * kUnits, exists ? flags : 0}
                    .packed();
    }
  }

  // Copies x's gradient out, zeros for padding whatever the prologue's scale is, and sums the gate's
  // gradient up from the parts of the four quads around each of its elements.
  __device__ void write_gradients() const {
    const TileCursor at = *this->at;
    const int valid = at.valid - at.image;
    write_map(params.x, regions.own, at, at.row, at.column, [&](int image, int row, int column, int channel) {
      const int pixel = regions.own.begin + (image * regions.x.rows + row) * regions.x.columns + column;
      return Vec<T, 8>::load(memory + (image < valid ? pixel : regions.x.end) * Block::kPitch + channel);
    });
    if constexpr (Regions::kGate) {
      const int across = regions.x.columns / 2;
      const int down = regions.own_gate.rows + 1;
      write_map(params.gate, regions.own_gate, at, half(at.row), half(at.column),
                [&](int image, int row, int column, int channel) {
                  // Element [1][1] of the quad to the upper left, [1][0], [0][1] and [0][0] of the others.
                  const T* upper =
                      gate_parts + (((image * down + row) * across + column) * 4 + 3) * Block::kPitch + channel;
                  return sum_of_parts(upper, upper + (across * 4 - 2) * Block::kPitch);
                });
    }
  }

  // Writes the tile's own part of a map: f(image, row, column, channel) are eight channels of a pixel.
  template <typename Function>
  __device__ void write_map(void* map, const MapRegion& own, const TileCursor& at, int first_row, int first_column,
                            const Function& f) const {
    if (map == nullptr) {
      return;
    }
    const auto copies = CopyThread<kThreads>::of_thread();
    T* to = advance_global(static_cast<T*>(map) + (at.first_channel + copies.channel[0]), at.image * own.map_image,
                           regions.pixel_bytes);
    const int width[2] = {at.first_channel + copies.channel[0] < regions.channels ? own.width : 0,
                          at.first_channel + copies.channel[1] < regions.channels ? own.width : 0};
    const int pixels = images(at) * own.image_pixels;
#pragma unroll 1
    for (int pixel = copies.pixel; pixel < pixels; pixel += Block::kPixels) {
      const int line = own.by_columns.quotient(pixel);
      const int image = own.by_rows.quotient(line);
      const int row = own.by_rows.remainder(line, image);
      const int column = own.by_columns.remainder(pixel, line);
      const int h = first_row + row;
      const int w = first_column + column;
      T* own_to = advance_global(to, (image * own.height + h) * own.width + w, regions.pixel_bytes);
#pragma unroll
      for (int vector = 0; vector < 2; ++vector) {
        if (h < own.height && w < width[vector]) {
          f(image, row, column, copies.channel[vector]).store(own_to + vector * Block::kChannels / 2);
        }
      }
    }
  }

  __device__ static Vec<T, 8> sum_of_parts(const T* upper, const T* lower) {
    const Vec<T, 8> left = Vec<T, 8>::load(upper);
    const Vec<T, 8> right = Vec<T, 8>::load(upper + 3 * Block::kPitch);
    const Vec<T, 8> lower_left = Vec<T, 8>::load(lower);
    const Vec<T, 8> lower_right = Vec<T, 8>::load(lower + 3 * Block::kPitch);
    Vec<T, 8> sum;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 a = left.pair(k);
      const float2 b = right.pair(k);
      const float2 c = lower_left.pair(k);
      const float2 d = lower_right.pair(k);
      sum.set_pair(k, {kGateUnit * ((a.x + b.x) + (c.x + d.x)), kGateUnit * ((a.y + b.y) + (c.y + d.y))});
    }
    return sum;
  }
};

}  // namespace mf::cuda
