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
  __device__ static int channel_of_warp() { return thread_read_anew() / kLanes * kWarpChannels; }
  MF_HD static int slices(int64_t channels) { return static_cast<int>((channels + kChannels - 1) / kChannels); }
};

// What a thread moves: every kPixels-th pixel from the first on, in two vectors of channels.
template <int kThreads>
struct Mover {
  int pixel, channel[2];

  __device__ static Mover of_thread() {
    using Block = BackwardBlock<kThreads>;
    const int thread = thread_read_anew();
    const int channel = thread % Block::kMovers * 8;
    return {thread / Block::kMovers, {channel, channel + Block::kChannels / 2}};
  }
};

// What a block computes: a tile, then the one `step` further on; of which channels, and images that
// count. It lies in shared memory: while a tile is computed no register holds it.
struct alignas(16) BlockAt : TileAt {
  int tile, step, first_channel, valid;
};

// Of shared memory, before a tile's: where the block is and will be, the prologue's state of its
// channels, and without a gate what each thread keeps of its eight pixels.
template <bool kGate, int kThreads>
constexpr size_t kBytesBeforeTile =
    2 * sizeof(BlockAt) + kNormRows * BackwardBlock<kThreads>::kChannels * sizeof(float) +
    (kGate ? 0 : 8 * kThreads * sizeof(float2));

// The regions of the maps that a tile of input pixels needs in shared memory. With a gate it has
// a border of one pixel and its quads begin at odd rows and columns, where the four elements of the
// gate that they share begin.
template <int kStride, bool kGate>
struct BackwardRegions {
  static constexpr int kBorder = kGate ? 1 : 0;
  Region x, grad, gate;
  Region own, own_gate;       // the tile itself: pixels, and elements of the gate
  SmallDivisor down, across;  // by the quads of an image's column and row

  MF_HD static BackwardRegions of(int images, int height, int width) {
    BackwardRegions regions{};
    regions.x = Region::of(images, even(height) + 2 * kBorder, even(width) + 2 * kBorder);
    const int rows = regions.x.rows;
    const int columns = regions.x.columns;
    regions.grad =
        kStride == 1 ? Region::of(images, rows + 2, columns + 2) : Region::of(images, rows / 2 + 1, columns / 2 + 1);
    regions.gate = kGate ? Region::of(images, rows / 2 + 1, columns / 2 + 1) : Region{};
    regions.own = Region::of(images, height, width);
    regions.own_gate = kGate ? Region::of(images, height / 2, width / 2) : Region{};
    regions.down = SmallDivisor::of(rows / 2);
    regions.across = SmallDivisor::of(columns / 2);
    return regions;
  }
  // The output row at which the region of `grad` begins for a tile whose first input row, without
  // the border, is `first` (even).
  __device__ static int first_output(int first) { return kStride == 1 ? first - kBorder - 1 : first / 2 - kBorder; }
  MF_HD int quads_of_image() const { return x.rows / 2 * (x.columns / 2); }
  // Of the list of quads, filled up.
  MF_HD int listed() const { return static_cast<int>(up_to(x.images * quads_of_image(), kQuads)); }
  // The quads that fill up have pixels of their own behind x: zeros.
  MF_HD int filling() const { return x.columns + 2; }
  MF_HD int pixels() const {
    return x.pixels() + filling() + grad.pixels() + gate.pixels() + (kGate ? 4 * listed() : 0);
  }
  // Of shared memory: of the tile, and of all.
  template <typename T, int kThreads>
  MF_HD size_t bytes_of_tile() const {
    return static_cast<size_t>(pixels()) * BackwardBlock<kThreads>::kPitch * sizeof(T) + listed() * sizeof(uint2);
  }
  template <typename T, int kThreads>
  MF_HD size_t bytes() const {
    const size_t tile = bytes_of_tile<T, kThreads>();
    const size_t taps = size_t{kSlice} * kTapCount * sizeof(T);
    return kBytesBeforeTile<kGate, kThreads> + (tile > taps ? tile : taps);
  }
};

// Starts to load a region of a map as it is; outside of the map, for padding and beyond the map's
// channels it is zero, or with kClamp the nearest row and column.
template <typename T, int kThreads, bool kClamp>
__device__ void load_region(const void* map, int valid, int height, int width, int channels, const Region& region,
                            int first_image, int first_row, int first_column, int first_channel, T* staged) {
  using Block = BackwardBlock<kThreads>;
  const T* from =
      static_cast<const T*>(map) + static_cast<int64_t>(first_image) * (height * width * channels) + first_channel;
  const int pixels = region.pixels();
  const int images = valid - first_image;
  const auto mover = Mover<kThreads>::of_thread();
  const bool has_channels[2] = {first_channel + mover.channel[0] < channels,
                                first_channel + mover.channel[1] < channels};
#pragma unroll 1
  for (int pixel = mover.pixel; pixel < pixels; pixel += Block::kPixels) {
    const int line = region.by_columns.quotient(pixel);
    const int image = region.by_rows.quotient(line);
    int h = first_row + line - image * region.rows;
    int w = first_column + pixel - line * region.columns;
    h = kClamp ? nearest(h, height) : h;
    w = kClamp ? nearest(w, width) : w;
    const bool counts = image < images && is_index(h, height) && is_index(w, width);
    const T* own = from + ((image * height + h) * width + w) * channels + mover.channel[0];
    T* to = staged + pixel * Block::kPitch + mover.channel[0];
#pragma unroll
    for (int vector = 0; vector < 2; ++vector) {
#pragma unroll
      for (int i = 0; i < 8; i += 16 / sizeof(T)) {
        const int at = vector * Block::kChannels / 2 + i;
        copy_16_bytes_or_zeros(to + at, own + at, counts && has_channels[vector]);
      }
    }
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
  T* x;  // then what entered, then x's gradient
  T* grad;
  T* gate;
  T* shares;  // [quads][4]: what each quad adds to the gradients of its four elements of the gate, over kSixteenth
  uint2* list;
  BlockAt* places;  // of this tile and the next, in turn
  float2* kept;     // [8][kThreads], at the thread's: x less the prologue's mean, for which registers are scarce
  float* state;     // [kNormRows][kChannels], of the prologue: so that it takes registers only when it is used
  int turn;

  __device__ BackwardTile(const AlignConvBackward& params, const Tiles& tiles, const Regions& regions,
                          unsigned char* memory)
      : params(params), tiles(tiles), regions(regions) {
    places = reinterpret_cast<BlockAt*>(memory);
    state = reinterpret_cast<float*>(places + 2);
    kept = reinterpret_cast<float2*>(state + kNormRows * Block::kChannels) + threadIdx.x;
    x = reinterpret_cast<T*>(memory + kBytesBeforeTile<kGate, kThreads>);
    grad = x + (regions.x.pixels() + regions.filling()) * Block::kPitch;
    gate = grad + regions.grad.pixels() * Block::kPitch;
    shares = gate + regions.gate.pixels() * Block::kPitch;
    list = reinterpret_cast<uint2*>(shares + (kGate ? 4 * regions.listed() : 0) * Block::kPitch);
    turn = 0;
  }

  __device__ void fill_up() const {
    const auto mover = Mover<kThreads>::of_thread();
#pragma unroll 1
    for (int i = mover.pixel; i < regions.filling(); i += Block::kPixels) {
      Vec<T, 8>{}.store(x + (regions.x.pixels() + i) * Block::kPitch + mover.channel[0]);
      Vec<T, 8>{}.store(x + (regions.x.pixels() + i) * Block::kPitch + mover.channel[1]);
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

  __device__ const BlockAt& place() const { return places[turn]; }
  __device__ const TileAt& at() const { return place(); }

  // Starts to load the tile, and lists its quads.
  __device__ void load() const {
    const TileAt at = this->at();
    const int first_channel = place().first_channel;
    const int valid = place().valid;
    constexpr int kBorder = Regions::kBorder;
    const AlignConvInput& in = params.input;
    const int height = static_cast<int>(in.height);
    const int width = static_cast<int>(in.width);
    const auto channels = static_cast<int>(in.channels);
    load_region<T, kThreads, false>(in.x, valid, height, width, channels, regions.x, at.image, at.row - kBorder,
                                    at.column - kBorder, first_channel, x);
    load_region<T, kThreads, false>(params.grad, valid, (height - 1) / kStride + 1, (width - 1) / kStride + 1, channels,
                                    regions.grad, at.image, Regions::first_output(at.row),
                                    Regions::first_output(at.column), first_channel, grad);
    if constexpr (kGate) {
      load_region<T, kThreads, true>(in.gate, valid, height / 2, width / 2, channels, regions.gate, at.image,
                                     at.row / 2 - 1, at.column / 2 - 1, first_channel, gate);
    }
    list_quads(at, valid, height, width);
  }

  // Of the tile, those within the map.
  __device__ int images(const TileAt& at) const {
    return at.image + tiles.images < params.input.images ? tiles.images
                                                         : static_cast<int>(params.input.images) - at.image;
  }

  // Quads lie in lines, whatever the image, of which each region adds some of its own.
  __device__ void list_quads(const TileAt& at, int valid, int height, int width) const {
    const int across = regions.x.columns / 2;
    const int quads = regions.x.images * regions.quads_of_image();
#pragma unroll 1
    for (int i = thread_read_anew(); i < regions.listed(); i += kThreads) {
      const int line = regions.across.quotient(i);
      const int column = i - line * across;
      const int image = regions.down.quotient(line);
      const int row = 2 * (line - image * (regions.x.rows / 2)) - Regions::kBorder;  // within the tile
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
      const QuadAt quad{2 * line * regions.x.columns + 2 * column,
                        (line + image) * (2 / kStride) * regions.grad.columns + column * (2 / kStride),
                        kGate ? (line + image) * regions.gate.columns + column : 0, flags};
      list[i] = i < quads ? quad.packed() : QuadAt{regions.x.pixels(), 0, 0, 0}.packed();
    }
  }

  // Copies x's gradient out, with zeros for padding whatever the prologue's scale is.
  __device__ void write_x() const {
    const auto mover = Mover<kThreads>::of_thread();
    const AlignConvInput& in = params.input;
    const TileAt at = this->at();
    const int first_channel = place().first_channel;
    const int valid = place().valid;
    const Region& own = regions.own;
    const int height = static_cast<int>(in.height);
    const int width = static_cast<int>(in.width);
    const auto channels = static_cast<int>(in.channels);
    if (params.x == nullptr) {
      return;
    }
    T* to = static_cast<T*>(params.x) + at.image * static_cast<int64_t>(height * width * channels) + first_channel;
    const int pixels = images(at) * own.rows * own.columns;
#pragma unroll 1
    for (int i = mover.pixel; i < pixels; i += Block::kPixels) {
      const int line = own.by_columns.quotient(i);
      const int image = own.by_rows.quotient(line);
      const int row = line - image * own.rows;
      const int column = i - line * own.columns;
      const int h = at.row + row;
      const int w = at.column + column;
      const int slot =
          (image * regions.x.rows + row + Regions::kBorder) * regions.x.columns + column + Regions::kBorder;
      const T* from = x + (at.image + image < valid ? slot : regions.x.pixels()) * Block::kPitch;
      T* pixel = to + ((image * height + h) * width + w) * channels;
      if (h < height && w < width) {
#pragma unroll
        for (int vector = 0; vector < 2; ++vector) {
          if (first_channel + mover.channel[vector] < channels) {
            Vec<T, 8>::load(from + mover.channel[vector]).store(pixel + mover.channel[vector]);
          }
        }
      }
    }
  }

  // The gate's gradient from the shares of the four quads around each of its elements.
  __device__ void write_gate() const {
    const auto mover = Mover<kThreads>::of_thread();
    const AlignConvInput& in = params.input;
    const TileAt at = this->at();
    const int first_channel = place().first_channel;
    const Region& own = regions.own_gate;
    const int height = static_cast<int>(in.height) / 2;
    const int width = static_cast<int>(in.width) / 2;
    const auto channels = static_cast<int>(in.channels);
    if (params.gate == nullptr) {
      return;
    }
    T* to = static_cast<T*>(params.gate) + at.image * static_cast<int64_t>(height * width * channels) + first_channel;
    const int across = regions.x.columns / 2;
    const int elements = images(at) * own.rows * own.columns;
#pragma unroll 1
    for (int i = mover.pixel; i < elements; i += Block::kPixels) {
      const int line = own.by_columns.quotient(i);
      const int image = own.by_rows.quotient(line);
      const int column = i - line * own.columns;
      const int h = at.row / 2 + line - image * own.rows;
      const int w = at.column / 2 + column;
      // Element [1][1] of the quad to the upper left, [1][0], [0][1] and [0][0] of the others.
      const T* upper = shares + (((line + image) * across + column) * 4 + 3) * Block::kPitch;
      const T* lower = upper + (across * 4 - 2) * Block::kPitch;
      T* element = to + ((image * height + h) * width + w) * channels;
      if (h < height && w < width) {
#pragma unroll
        for (int vector = 0; vector < 2; ++vector) {
          const int channel = mover.channel[vector];
          if (first_channel + channel < channels) {
            sum_of_shares(upper + channel, lower + channel).store(element + channel);
          }
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
  // In 16 bits the sigmoid is made of powers of two: the blends of rows take their exponents there.
  constexpr float kOne = sizeof(T) == 2 ? kMinusLog2E : 1.0f;
  const float2 above[2] = {pair_at(top), pair_at(top + pitch)};
  const float2 below[2] = {pair_at(bottom), pair_at(bottom + pitch)};
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float share = share_of_first(row) * kOne;
    const float rest = kOne - share;
    float2 of_row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      of_row[i] = {share * above[i].x + rest * below[i].x, share * above[i].y + rest * below[i].y};
    }
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const float2 at = blend(of_row[0], of_row[1], share_of_first(column));
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

// Whether the ReLU that made a number, first or second of a pair, has let it through. NaN it has.
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
    return at.is(QuadAt::kInside + p) ? through : Vec<T, 2>{};
  }

  // Writes what entered over x, zero where it does not count for the weights' gradients.
  __device__ void enter(const BackwardTile<T, kStride, kGate, kThreads>& tile, int i, int channel) {
    at = QuadAt::of(tile.list, i);
    columns = tile.regions.x.columns;
    x = tile.x + at.x * kPitch + channel;
    if constexpr (kGate) {
      const T* gate = tile.gate + at.gate * kPitch + channel;
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
          entered = at.is(QuadAt::kOwn + p) ? entered : Vec<T, 2>{};
        }
        if (at.is(QuadAt::kExists)) {
          entered.store(slot(p));
        }
      }
    }
  }

  // Writes x's gradient over what entered, and the shares of the gate's. back: the gradient of what
  // entered
  __device__ void leave(const BackwardTile<T, kStride, kGate, kThreads>& tile, int i, int channel,
                        const float2 (&back)[4], PrologueSums& prologue) {
    if constexpr (kGate && kPrologue) {  // not kept over the products either: registers for two blocks
      at = QuadAt::of(tile.list, i);
      x = tile.x + at.x * kPitch + channel;
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
      leave_shares(of_doubled, tile.shares + i * 4 * kPitch + channel);
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
  load_taps<T, kThreads>(in, first_channel, tile.x);
  __syncthreads();
  if (first_channel + Block::channel_of_warp() < in.channels) {
    products.load(tile.x + Block::channel_of_warp());
  }
  __syncthreads();
  tile.fill_up();
  if constexpr (kPrologue) {
    tile.load_state(first_channel);
  }
  if (threadIdx.x == 0) {
    const int first_tile = static_cast<int>(blockIdx.x) / slices;
    tile.places[0] = {TileAt::of(tiles, first_tile), first_tile, static_cast<int>(gridDim.x) / slices, first_channel,
                      static_cast<int>(in.valid_images())};
  }
  __syncthreads();
  while (tile.place().tile < tiles.total) {
    tile.load();
    wait_for_copies();
    __syncthreads();
    if (thread_read_anew() == 0) {
      const BlockAt& place = tile.place();
      const int next = place.tile + place.step;
      tile.places[1 - tile.turn] = {TileAt::of(tiles, next), next, place.step, place.first_channel, place.valid};
    }
    const int first = Block::channel_of_warp();
    const int channel = first + channel_of_lane();
    const GatherFrom<T> from{tile.x + first, tile.grad + first, regions.x.columns, regions.grad.columns};
    const int quads =
        tile.place().first_channel + first < in.channels ? tile.images(tile.at()) * regions.quads_of_image() : 0;
#pragma unroll 1
    for (int unit = 0; unit < quads; unit += kQuads) {
      const int own = unit + quad_of_lane();
      LaneQuad<T, kStride, kGate, kPrologue, kThreads> quad[2];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        quad[q].kept = tile.kept + 4 * q * kThreads;
        quad[q].enter(tile, own + q * (kQuads / 2), channel);
      }
      __syncwarp();
      float2 back[2][4];
      products.gather(from, tile.list + unit, back);
      __syncwarp();
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        quad[q].leave(tile, own + q * (kQuads / 2), channel, back[q], prologue);
      }
    }
    __syncthreads();
    tile.write_x();
    if constexpr (kGate) {
      tile.write_gate();
    }
    tile.turn = 1 - tile.turn;
    __syncthreads();
  }
  const int channel = tile.place().first_channel + Block::channel_of_warp();
  if (params.sums != nullptr && channel < in.channels) {
    float* to = params.sums + static_cast<int64_t>(blockIdx.x) / slices * kAlignConvSums * in.channels + channel;
    products.leave(to, in.channels);
    leave_prologue(prologue.shift, prologue.scale, to, in.channels);
  }
}

}  // namespace mf::cuda
