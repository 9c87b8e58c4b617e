// Kernel bodies of align_conv's backward through depthwise convolution, gate and prologue.
//
// A tile of input pixels is copied into shared memory, with the outputs that its pixels entered. Then
// each warp goes through the tile's quads of 2 x 2 pixels in its own eight channels: what entered is
// written over x, both products are gathered (align_conv_gather.cuh), and x's gradient is written
// over what entered, from where all warps copy it out. The gradients of the nine weights stay in
// registers over all tiles of a block, as do the sums for the prologue; each block leaves one partial
// sum, and a second launch adds them. With a gate a quad also leaves what it adds to the four elements
// of the gate that it shares; a border of quads is computed twice where tiles meet, so that nothing is
// scattered.
#pragma once

#include "cuda/align_conv_gather.cuh"
#include "cuda/align_conv_sums.cuh"
#include "cuda/align_conv_tile.cuh"

namespace mf::cuda {

// A block takes eight channels a warp of one tile at a time. What moves them between shared and
// global memory takes two vectors of eight channels a thread, half a pixel apart.
template <int kThreads>
struct BackwardBlock {
  static constexpr int kChannels = kThreads / kLanes * kWarpChannels;
  static constexpr int kPitch = kChannels + kPadding;  // elements from a pixel to the next
  static constexpr int kMovers = kChannels / 16;       // threads that move a pixel
  static constexpr int kPixels = kThreads / kMovers;   // that all threads move at a time
  // The first of a warp's channels.
  __device__ static int channel_of_warp() {
    return static_cast<int>(static_cast<unsigned>(thread_read_anew()) / kLanes * kWarpChannels);
  }
  MF_HD static int slices(int64_t channels) { return static_cast<int>((channels + kChannels - 1) / kChannels); }
};

// What a thread moves: every kPixels-th pixel from the first on, in two vectors of channels.
template <int kThreads>
struct Mover {
  int pixel, channel[2];

  __device__ static Mover of_thread() {
    using Block = BackwardBlock<kThreads>;
    const auto thread = static_cast<unsigned>(thread_read_anew());  // divided by shifts alone
    const auto channel = static_cast<int>(thread % Block::kMovers * 8);
    return {static_cast<int>(thread / Block::kMovers), {channel, channel + Block::kChannels / 2}};
  }
};

struct alignas(16) NumberedTile : TileAt {
  int number;
};

// What a block computes: its current and its next tile, its channels, and the number of valid images.
// It is in shared memory, so that it takes no registers while a tile is computed.
struct BlockAt : NumberedTile {
  NumberedTile step;
  int end_row, end_column;  // of the tiles of an image
  int first_channel, valid;

  __device__ static BlockAt of(const Tiles& tiles, int first, int step, int first_channel, int valid) {
    return {{TileAt::of(tiles, first), first},
            {TileAt::of(tiles, step), step},
            tiles.down * tiles.height,
            tiles.across * tiles.width,
            first_channel,
            valid};
  }
  // By sums alone.
  __device__ void advance(const Tiles& tiles) {
    NumberedTile next = {{image + step.image, row + step.row, column + step.column}, number + step.number};
    const bool is_over = next.column >= end_column;
    next.column -= is_over ? end_column : 0;
    next.row += is_over ? tiles.height : 0;
    const bool is_below = next.row >= end_row;
    next.row -= is_below ? end_row : 0;
    next.image += is_below ? tiles.images : 0;
    static_cast<NumberedTile&>(*this) = next;
  }
};

// The part of shared memory in front of a tile's data, in pixels: the block's current and next tile,
// the prologue's state of its channels and, without a gate, what each thread keeps of its eight pixels.
template <typename T, bool kGate, int kThreads>
constexpr int kPixelsBeforeTile = (sizeof(BlockAt) + kNormRows * BackwardBlock<kThreads>::kChannels * sizeof(float) +
                                   (kGate ? 0 : 8 * kThreads * sizeof(float2)) - 1) /
                                      (BackwardBlock<kThreads>::kPitch * sizeof(T)) +
                                  1;

__device__ inline int half(int x) { return static_cast<int>(static_cast<unsigned>(x) / 2); }  // x: not negative

// Divides with a rest.
struct RestDivisor : SmallDivisor {
  int minus;  // the divisor, negated once for all

  MF_HD static RestDivisor of(int divisor) { return {SmallDivisor::of(divisor), -divisor}; }
  // What is left of x after so many divisors.
  __device__ int rest(int x, int quotient) const { return x + quotient * minus; }
};

// A region of shared memory with the map that it is of, in 32 bits.
struct MapRegion {
  int images, rows, columns;
  RestDivisor by_rows, by_columns;
  int region_image, pixels;  // pixels of an image of the region, and of all
  int first, behind;         // where they begin in shared memory and what is next, in pixels
  int height, width;         // of the map
  int map_image;             // pixels of an image of the map

  MF_HD static MapRegion of(int images, int rows, int columns, int first, int64_t height, int64_t width) {
    return {images,
            rows,
            columns,
            RestDivisor::of(rows),
            RestDivisor::of(columns),
            rows * columns,
            images * rows * columns,
            first,
            first + images * rows * columns,
            static_cast<int>(height),
            static_cast<int>(width),
            static_cast<int>(height * width)};
  }
};

// The regions of the maps that a tile of input pixels needs in shared memory. With a gate it has
// a border of one pixel and its quads begin at odd rows and columns, where the four elements of the
// gate that they share begin.
template <int kStride, bool kGate>
struct BackwardRegions {
  static constexpr int kBorder = kGate ? 1 : 0;
  MapRegion x, grad, gate;
  MapRegion own, own_gate;            // the tile itself: pixels, and elements of the gate
  RestDivisor down, across;           // by the quads of an image's column and row
  int images, channels, pixel_bytes;  // of the maps
  int quads_of_image, listed;         // quads of an image's region, and of the list, filled up
  int shares, list;                   // where the quads' shares begin, and the list, in pixels

  // The regions of a tile of `of_tile` images, `rows` rows and `columns` columns. They begin `before` pixels
  // after the beginning of shared memory. `before` is an argument, since adding a constant would cost some
  // addresses one more instruction.
  MF_HD static BackwardRegions of(const AlignConvInput& in, int before, int of_tile, int rows, int columns) {
    const int down = even(rows) / 2 + kBorder;
    const int across = even(columns) / 2 + kBorder;
    BackwardRegions regions{};
    regions.images = static_cast<int>(in.images);
    regions.channels = static_cast<int>(in.channels);
    regions.pixel_bytes = static_cast<int>(in.channels * (in.type == FloatType::kFloat32 ? 4 : 2));
    regions.quads_of_image = down * across;
    regions.listed = static_cast<int>(up_to(of_tile * down * across, kQuads));
    regions.down = RestDivisor::of(down);
    regions.across = RestDivisor::of(across);
    regions.x = MapRegion::of(of_tile, 2 * down, 2 * across, before, in.height, in.width);
    regions.own = MapRegion::of(of_tile, rows, columns, before + kBorder * (2 * across + 1), in.height, in.width);
    // The quads that fill up the list have pixels of their own behind x: zeros.
    constexpr int kEach = 2 / kStride;  // outputs that a quad's rows lead to, but for a border
    regions.grad =
        MapRegion::of(of_tile, kEach * down + kEach, kEach * across + kEach, regions.x.behind + regions.filling(),
                      (in.height - 1) / kStride + 1, (in.width - 1) / kStride + 1);
    if (kGate) {
      regions.gate = MapRegion::of(of_tile, down + 1, across + 1, regions.grad.behind, in.height / 2, in.width / 2);
      regions.own_gate = MapRegion::of(of_tile, rows / 2, columns / 2, 0, in.height / 2, in.width / 2);
    }
    regions.shares = kGate ? regions.gate.behind : regions.grad.behind;
    regions.list = regions.shares + (kGate ? 4 * regions.listed : 0);
    return regions;
  }
  // The output row at which the region of `grad` begins for a tile whose first input row, without
  // the border, is `first` (even).
  __device__ static int first_output(int first) { return (kStride == 1 ? first - 1 : half(first)) - kBorder; }
  MF_HD int filling() const { return x.columns + 2; }
  template <typename T, int kThreads>
  MF_HD size_t bytes() const {
    constexpr size_t kPixel = BackwardBlock<kThreads>::kPitch * sizeof(T);
    const size_t tile = list * kPixel + listed * sizeof(uint2);
    const size_t taps = x.first * kPixel + size_t{kSlice} * kTapCount * sizeof(T);
    return tile > taps ? tile : taps;
  }
};

// Starts to load a region of a map as it is; outside of the map, for padding and beyond the map's
// channels it is zero, or with kClamp the nearest row and column.
template <typename T, int kThreads, bool kClamp>
__device__ void load_region(const void* map, const MapRegion& region, int channels, int pixel_bytes, int valid,
                            int first_image, int first_row, int first_column, int first_channel,
                            const Mover<kThreads>& mover, T* memory) {
  using Block = BackwardBlock<kThreads>;
  const T* from = beyond(static_cast<const T*>(map) + (first_channel + mover.channel[0]),
                         first_image * region.map_image, pixel_bytes);
  T* to = whole_shared(memory + (region.first + mover.pixel) * Block::kPitch + mover.channel[0]);
  const int images = valid - first_image;
  // In channels that the map lacks it has no columns.
  const int width[2] = {first_channel + mover.channel[0] < channels ? region.width : 0,
                        first_channel + mover.channel[1] < channels ? region.width : 0};
#pragma unroll 1
  for (int pixel = mover.pixel; pixel < region.pixels; pixel += Block::kPixels) {
    const int line = region.by_columns.quotient(pixel);
    const int image = region.by_rows.quotient(line);
    int h = region.by_rows.rest(first_row + line, image);
    int w = region.by_columns.rest(first_column + pixel, line);
    h = kClamp ? nearest(h, region.height) : h;
    w = kClamp ? nearest(w, region.width) : w;
    const bool counts = image < images && (kClamp || is_index(h, region.height));
    const T* own = beyond(from, (image * region.height + h) * region.width + w, pixel_bytes);
#pragma unroll
    for (int vector = 0; vector < 2; ++vector) {
#pragma unroll
      for (int i = 0; i < 8; i += 16 / sizeof(T)) {
        const int at = vector * Block::kChannels / 2 + i;
        copy_16_bytes_or_zeros(to + at, own + at, counts && is_index(w, width[vector]));
      }
    }
    to += Block::kPixels * Block::kPitch;
  }
}

// Shares of the gate's gradient are whole numbers of sixteenths; float16 has no room for 16 times as much.
template <typename T>
constexpr float kSixteenth = std::is_same_v<T, __half> ? 1.0f : 0.0625f;

// A block's channels of one tile, in shared memory.
template <typename T, int kStride, bool kGate, int kThreads>
struct BackwardTile {
  using Regions = BackwardRegions<kStride, kGate>;
  using Block = BackwardBlock<kThreads>;
  const AlignConvBackward& params;
  const Tiles& tiles;
  const Regions& regions;
  T* memory;  // all of it, of which the regions say where they begin; x's then holds what entered, then x's gradient
  T* shares;  // [quads][4]: what each quad adds to the gradients of its four elements of the gate, over kSixteenth
  uint2* list;
  BlockAt* at;
  float2* kept;  // [8][kThreads], at the thread's: x less the prologue's mean, for which registers are scarce
  float* state;  // [kNormRows][kChannels], of the prologue: so that it takes registers only when it is used

  __device__ BackwardTile(const AlignConvBackward& params, const Tiles& tiles, const Regions& regions,
                          unsigned char* memory)
      : params(params), tiles(tiles), regions(regions), memory(reinterpret_cast<T*>(memory)) {
    at = reinterpret_cast<BlockAt*>(memory);
    state = reinterpret_cast<float*>(at + 1);
    kept = reinterpret_cast<float2*>(state + kNormRows * Block::kChannels) + threadIdx.x;
    shares = this->memory + regions.shares * Block::kPitch;
    list = reinterpret_cast<uint2*>(this->memory + regions.list * Block::kPitch);
  }

  __device__ void fill_up() const {
    const auto mover = Mover<kThreads>::of_thread();
#pragma unroll 1
    for (int i = mover.pixel; i < regions.filling(); i += Block::kPixels) {
      Vec<T, 8>{}.store(memory + (regions.x.behind + i) * Block::kPitch + mover.channel[0]);
      Vec<T, 8>{}.store(memory + (regions.x.behind + i) * Block::kPitch + mover.channel[1]);
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
  template <bool kPrologue>
  __device__ StatePair state_of(int channel) const {
    if constexpr (kPrologue) {
      return StatePair::load(state, Block::kChannels, channel);
    } else {
      return {};
    }
  }

  // Starts to load the tile, and lists its quads.
  __device__ void load() const {
    const BlockAt at = *this->at;
    const auto mover = Mover<kThreads>::of_thread();
    constexpr int kBorder = Regions::kBorder;
    const auto load = [&](auto clamps, const void* map, const MapRegion& region, int first_row, int first_column) {
      load_region<T, kThreads, clamps.value>(map, region, regions.channels, regions.pixel_bytes, at.valid, at.image,
                                             first_row, first_column, at.first_channel, mover, memory);
    };
    load(std::false_type(), params.input.x, regions.x, at.row - kBorder, at.column - kBorder);
    load(std::false_type(), params.grad, regions.grad, Regions::first_output(at.row), Regions::first_output(at.column));
    if constexpr (kGate) {
      load(std::true_type(), params.input.gate, regions.gate, half(at.row) - 1, half(at.column) - 1);
    }
    list_quads(at, at.valid, regions.x.height, regions.x.width);
  }

  // Of the tile, those within the map.
  __device__ int images(const TileAt& at) const { return smaller(tiles.images, regions.images - at.image); }

  // Quads lie in lines, whatever the image, of which each region adds some of its own.
  __device__ void list_quads(const TileAt& at, int valid, int height, int width) const {
    const int quads = regions.x.images * regions.quads_of_image;
#pragma unroll 1
    for (int i = thread_read_anew(); i < regions.listed; i += kThreads) {
      const int line = regions.across.quotient(i);
      const int column = regions.across.rest(i, line);
      const int image = regions.down.quotient(line);
      const int row = 2 * regions.down.rest(line, image) - Regions::kBorder;  // within the tile
      const int left = 2 * column - Regions::kBorder;
      unsigned flags = 1u << QuadAt::kExists;
      bool in_row[2];
      bool in_column[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        in_row[b] = is_index(at.row + row + b, height);
        in_column[b] = is_index(at.column + left + b, width);
      }
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const bool is_inside = at.image + image < valid && in_row[p / 2] && in_column[p % 2];
        const bool is_own = is_inside && is_index(row + p / 2, tiles.height) && is_index(left + p % 2, tiles.width);
        flags |= (is_own ? 1u << QuadAt::kOwn : 0u) << p | (is_inside ? 1u << QuadAt::kInside : 0u) << p;
      }
      flags |= in_row[0] && in_row[1] ? 0u : 1u << QuadAt::kRowEdge;
      flags |= in_column[0] && in_column[1] ? 0u : 2u << QuadAt::kRowEdge;
      constexpr int kUnits = Block::kPitch * sizeof(T) / 16;  // of a pixel
      const int pixel = regions.x.first + 2 * line * regions.x.columns + 2 * column;
      const int output = regions.grad.first + ((line + image) * regions.grad.columns + column) * (2 / kStride);
      const int element = kGate ? regions.gate.first + (line + image) * regions.gate.columns + column : 0;
      const bool exists = i < quads;
      list[i] = QuadAt{(exists ? pixel : regions.x.behind) * kUnits, (exists ? output : regions.grad.first) * kUnits,
                       (exists ? element : regions.gate.first) * kUnits, exists ? flags : 0}
                    .packed();
    }
  }

  // Copies x's gradient out, with zeros for padding whatever the prologue's scale is.
  __device__ void write_x() const {
    const BlockAt at = *this->at;
    const int valid = at.valid - at.image;
    write(params.x, regions.own, at, at.row, at.column, [&](int image, int row, int column, int channel) {
      const int slot = regions.own.first + (image * regions.x.rows + row) * regions.x.columns + column;
      return Vec<T, 8>::load(memory + (image < valid ? slot : regions.x.behind) * Block::kPitch + channel);
    });
  }

  // The gate's gradient from the shares of the four quads around each of its elements.
  __device__ void write_gate() const {
    const BlockAt at = *this->at;
    const int across = regions.x.columns / 2;
    const int down = regions.own_gate.rows + 1;
    write(params.gate, regions.own_gate, at, half(at.row), half(at.column),
          [&](int image, int row, int column, int channel) {
            // Element [1][1] of the quad to the upper left, [1][0], [0][1] and [0][0] of the others.
            const T* upper = shares + (((image * down + row) * across + column) * 4 + 3) * Block::kPitch + channel;
            return sum_of_shares(upper, upper + (across * 4 - 2) * Block::kPitch);
          });
  }

  // Writes the tile's own part of a map: f(image, row, column, channel) are eight channels of a pixel.
  template <typename Function>
  __device__ void write(void* map, const MapRegion& own, const BlockAt& at, int first_row, int first_column,
                        const Function& f) const {
    if (map == nullptr) {
      return;
    }
    const auto mover = Mover<kThreads>::of_thread();
    T* to = beyond(static_cast<T*>(map) + (at.first_channel + mover.channel[0]), at.image * own.map_image,
                   regions.pixel_bytes);
    const int width[2] = {at.first_channel + mover.channel[0] < regions.channels ? own.width : 0,
                          at.first_channel + mover.channel[1] < regions.channels ? own.width : 0};
    const int pixels = images(at) * own.region_image;
#pragma unroll 1
    for (int pixel = mover.pixel; pixel < pixels; pixel += Block::kPixels) {
      const int line = own.by_columns.quotient(pixel);
      const int image = own.by_rows.quotient(line);
      const int row = own.by_rows.rest(line, image);
      const int column = own.by_columns.rest(pixel, line);
      const int h = first_row + row;
      const int w = first_column + column;
      T* own_to = beyond(to, (image * own.height + h) * own.width + w, regions.pixel_bytes);
#pragma unroll
      for (int vector = 0; vector < 2; ++vector) {
        if (h < own.height && w < width[vector]) {
          f(image, row, column, mover.channel[vector]).store(own_to + vector * Block::kChannels / 2);
        }
      }
    }
  }

  __device__ static Vec<T, 8> sum_of_shares(const T* upper, const T* lower) {
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
      sum.set_pair(k, {kSixteenth<T> * ((a.x + b.x) + (c.x + d.x)), kSixteenth<T> * ((a.y + b.y) + (c.y + d.y))});
    }
    return sum;
  }
};

// The gate, opened, at the four pixels of a quad from the 2 x 2 elements that they share.
template <typename T>
__device__ void open_gate(const T* top, const T* bottom, int pitch, float2 (&open)[4]) {
  // Weights are multiples of 1/16. In 16 bits the sigmoid is made of powers of two.
  constexpr float kScale = (sizeof(T) == 2 ? kMinusLog2E : 1.0f) / 16.0f;
  const auto scaled = [&](const T* at) {
    const float2 element = pair_at(at);
    return float2{kScale * element.x, kScale * element.y};
  };
  const auto both = [](float2 near, float2 far) { return float2{3.0f * near.x + far.x, 3.0f * near.y + far.y}; };
  const float2 above[2] = {scaled(top), scaled(top + pitch)};
  const float2 below[2] = {scaled(bottom), scaled(bottom + pitch)};
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float2 left = row == 0 ? both(above[0], below[0]) : both(below[0], above[0]);
    const float2 right = row == 0 ? both(above[1], below[1]) : both(below[1], above[1]);
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const float2 at = column == 0 ? both(left, right) : both(right, left);
      if constexpr (sizeof(T) == 2) {
        open[2 * row + column] = {inverse_of_one_plus_power(at.x), inverse_of_one_plus_power(at.y)};
      } else {
        open[2 * row + column] = sigmoid<T>(at);
      }
    }
  }
}

// relu of two numbers, rounded to T.
template <typename T>
__device__ Vec<T, 2> rectified_pair(float2 x) {
  Vec<T, 2> pair;
  if constexpr (sizeof(T) == 2) {
    pair.word[0] = rectified_word(x, T());
  } else {
    pair.set_pair(0, {rectified(x.x), rectified(x.y)});
  }
  return pair;
}

// Whether the gradient passes the ReLU of the first or second number of a pair: it is positive or NaN.
template <typename T>
__device__ bool is_positive(const Vec<T, 2>& rectified, int i) {
  if constexpr (sizeof(T) == 2) {
    return (rectified.word[0] & (i == 0 ? 0x7fffu : 0x7fff0000u)) != 0;
  } else {
    return (rectified.word[i] & 0x7fffffffu) != 0;
  }
}

// What the gradient of the prologue's state is made of, for two channels.
struct PrologueSums {
  float2 shift, scale;
};

// A quad in the two channels of a lane.
template <typename T, int kStride, bool kGate, bool kPrologue, int kThreads>
struct LaneQuad {
  static constexpr int kPitch = BackwardBlock<kThreads>::kPitch;
  // Whether two blocks on a multiprocessor leave so few registers that the list is read again after the
  // products, and the quads are added one after the other.
  static constexpr bool kIsScarce = kGate && (kPrologue || kStride == 1);
  QuadAt at;
  T* x;              // of its first pixel
  int columns;       // pixels from row to row
  Vec<T, 2> raw[4];  // x, with a gate: what is made of it is made twice, and not kept
  float2* kept;      // of a pixel and the next, kThreads further on
  float2 open[4];    // the gate

  __device__ T* slot(int p) const { return x + (p / 2 * columns + p % 2) * kPitch; }
  __device__ static float2 distance(const Vec<T, 2>& x, const StatePair& state) {
    return {x.pair(0).x - state.mean.x, x.pair(0).y - state.mean.y};
  }
  // What the prologue has let through.
  __device__ Vec<T, 2> value(int p, float2 distance, const StatePair& state) const {
    const auto through =
        rectified_pair<T>({state.scale.x * distance.x + state.shift.x, state.scale.y * distance.y + state.shift.y});
    return at.only_if(QuadAt::kInside + p, through);
  }

  // Writes what entered over x, zero where it does not count for the weights' gradients.
  __device__ void enter(const BackwardTile<T, kStride, kGate, kThreads>& tile, const LaneAt<T>& own, int i,
                        int channel) {
    at = QuadAt::of(own.list, i);
    columns = tile.regions.x.columns;
    x = own.tile + at.x * QuadAt::kUnit<T>;
    if constexpr (kGate) {
      const T* gate = own.tile + at.gate * QuadAt::kUnit<T>;
      open_gate(gate, gate + tile.regions.gate.columns * kPitch, kPitch, open);
    }
    const StatePair state = tile.template state_of<kPrologue>(channel);
    if constexpr (kGate || kPrologue) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        Vec<T, 2> entered = Vec<T, 2>::load(slot(p));
        if constexpr (kGate) {
          raw[p] = entered;
        }
        if constexpr (kPrologue) {
          const float2 from_mean = distance(entered, state);
          if constexpr (!kGate) {
            kept[p * kThreads] = from_mean;
          }
          entered = value(p, from_mean, state);
        }
        if constexpr (kGate) {
          const float2 of = entered.pair(0);
          entered.set_pair(0, {of.x * open[p].x, of.y * open[p].y});
          entered = at.only_if(QuadAt::kOwn + p, entered);
        }
        if (at.is(QuadAt::kExists)) {
          entered.store(slot(p));
        }
      }
    }
  }

  // Writes x's gradient over what entered, and the shares of the gate's. back: the gradient of what
  // entered
  __device__ void leave(const BackwardTile<T, kStride, kGate, kThreads>& tile, const LaneAt<T>& own, int i, int channel,
                        T* shares, const float2 (&back)[4], PrologueSums& prologue) {
    if constexpr (kIsScarce) {
      at = QuadAt::of(own.list, i);
      x = own.tile + at.x * QuadAt::kUnit<T>;
    }
    const StatePair state = tile.template state_of<kPrologue>(channel);
    float2 of_doubled[4];  // the gradient of the doubled gate
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      float2 grad = back[p];
      // Without a gate what the ReLU has let through is what entered, and zero where it does not count.
      Vec<T, 2> let_through;
      float2 from_mean;
      if constexpr (kGate) {
        let_through = raw[p];
        if constexpr (kPrologue) {
          from_mean = distance(raw[p], state);
          let_through = value(p, from_mean, state);
        }
        grad = {grad.x * open[p].x, grad.y * open[p].y};
        const float2 of = let_through.pair(0);
        constexpr float kScale = 0.0625f / kSixteenth<T>;
        const float2 product = {grad.x * of.x * kScale, grad.y * of.y * kScale};
        of_doubled[p] = {product.x - product.x * open[p].x, product.y - product.y * open[p].y};
      } else if constexpr (kPrologue) {
        let_through = Vec<T, 2>::load(slot(p));
        from_mean = kept[p * kThreads];
      }
      if constexpr (kPrologue) {
        const bool is_own = !kGate || at.is(QuadAt::kOwn + p);
        grad = {is_own && is_positive(let_through, 0) ? grad.x : 0.0f,
                is_own && is_positive(let_through, 1) ? grad.y : 0.0f};
        prologue.shift = {prologue.shift.x + grad.x, prologue.shift.y + grad.y};
        add_product(prologue.scale, grad, from_mean);
        grad = {grad.x * state.scale.x, grad.y * state.scale.y};
      }
      if (at.is(QuadAt::kExists)) {
        store_pair(slot(p), grad);
      }
    }
    if constexpr (kGate) {
      leave_shares(of_doubled, shares + i * 4 * kPitch);
    }
  }

  // A row of the doubled gate takes 3/4 of the nearer and 1/4 of the other of its two rows of the
  // gate; at the map's edge, where the quad's other row is not of the map, all of the nearer one.
  __device__ void leave_shares(const float2 (&of_doubled)[4], T* to) const {
    const float down = at.is(QuadAt::kRowEdge) ? 4.0f : 3.0f;
    const float across = at.is(QuadAt::kRowEdge + 1) ? 4.0f : 3.0f;
    const auto both = [](float near, float2 a, float2 b) { return float2{near * a.x + b.x, near * a.y + b.y}; };
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float2 left = both(down, of_doubled[2 * row], of_doubled[2 - 2 * row]);
      const float2 right = both(down, of_doubled[2 * row + 1], of_doubled[3 - 2 * row]);
      store_pair(to + 2 * row * kPitch, both(across, left, right));
      store_pair(to + (2 * row + 1) * kPitch, both(across, right, left));
    }
  }
};

template <typename T, int kStride, bool kGate, bool kPrologue, int kThreads>
__device__ void align_conv_backward_block(const AlignConvBackward& params, const Tiles& tiles,
                                          const BackwardRegions<kStride, kGate>& regions, unsigned char* memory) {
  wait_for_previous();
  let_next_begin();
  using Block = BackwardBlock<kThreads>;
  const AlignConvInput& in = params.input;
  BackwardTile<T, kStride, kGate, kThreads> tile(params, tiles, regions, memory);
  const int slices = Block::slices(in.channels);
  const int first_channel = static_cast<int>(blockIdx.x) % slices * Block::kChannels;

  Gather<T, kStride, kGate, Block::kPitch> products = {};
  PrologueSums prologue = {};
  T* taps = tile.memory + regions.x.first * Block::kPitch;
  load_taps<T, kThreads>(in, first_channel, taps);
  __syncthreads();
  if (first_channel + Block::channel_of_warp() < regions.channels) {
    products.load(taps + Block::channel_of_warp(), tile.list, tile.memory + Block::channel_of_warp());
  }
  const auto lane = LaneAt<T>::own(tile.list, tile.memory + Block::channel_of_warp());
  T* shares =
      whole_shared(tile.shares + quad_of_lane() * 4 * Block::kPitch + Block::channel_of_warp() + channel_of_lane());
  __syncthreads();
  tile.fill_up();
  if constexpr (kPrologue) {
    tile.load_state(first_channel);
  }
  if (threadIdx.x == 0) {
    *tile.at = BlockAt::of(tiles, static_cast<int>(blockIdx.x) / slices, static_cast<int>(gridDim.x) / slices,
                           first_channel, static_cast<int>(in.valid_images()));
  }
  __syncthreads();
  while (tile.at->number < tiles.total) {
    tile.load();
    wait_for_copies();
    __syncthreads();
    const int first = Block::channel_of_warp();
    const int channel = first + channel_of_lane(thread_read_anew());
    const int quads =
        tile.at->first_channel + first < regions.channels ? tile.images(*tile.at) * regions.quads_of_image : 0;
#pragma unroll 1
    for (int unit = 0; unit < quads; unit += kQuads) {
      LaneQuad<T, kStride, kGate, kPrologue, kThreads> quad[2];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        quad[q].kept = tile.kept + 4 * q * kThreads;
        quad[q].enter(tile, lane, unit + q * (kQuads / 2), channel);
        if (quad[q].kIsScarce) {
          __syncwarp();  // orders nothing in memory: both quads at once would take registers that are not left
        }
      }
      __syncwarp();
      float2 back[2][4];
      products.gather(unit, regions.x.columns, regions.grad.columns, back);
      __syncwarp();
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        quad[q].leave(tile, lane, unit + q * (kQuads / 2), channel, shares, back[q], prologue);
      }
    }
    __syncthreads();
    tile.write_x();
    if constexpr (kGate) {
      tile.write_gate();
    }
    __syncthreads();
    if (thread_read_anew() == 0) {
      tile.at->advance(tiles);
    }
    __syncthreads();
  }
  const int channel = tile.at->first_channel + Block::channel_of_warp();
  if (params.sums != nullptr && channel < in.channels) {
    const int64_t part = tile.at->number % tile.at->step.number;  // the block's first tile: no register has kept it
    float* to = params.sums + part * kAlignConvSums * in.channels + channel;
    products.leave(to, in.channels);
    leave_prologue(prologue.shift, prologue.scale, to, in.channels);
  }
}

}  // namespace mf::cuda
