// Kernel bodies of align_conv's backward through depthwise convolution, gate and prologue.
//
// A tile of input pixels: quads of them gather from the 2 x 2 (stride 2) or 4 x 4 outputs that they
// entered, both for the gradient of x' and for those of the nine weights. The latter stay in
// registers over all tiles of a block, as do the sums for the prologue; each block leaves one
// partial sum, and a second launch adds them. The gate's gradient is gathered from the tile with a
// border of one pixel, computed twice where tiles meet, so that nothing is scattered.
#pragma once

#include "cuda/align_conv_sums.cuh"
#include "cuda/align_conv_tile.cuh"

namespace mf::cuda {

// The regions of the maps that a tile of input pixels needs in shared memory. With a gate it has
// a border of one pixel and its quads begin at odd rows and columns, where the four elements of the
// gate that they share begin.
template <int kStride, bool kGate>
struct BackwardRegions {
  static constexpr int kBorder = kGate ? 1 : 0;
  // Tap i = kFirstTap + b - kStride a leads from input row b of a quad to row a of the outputs that
  // it gathers from.
  static constexpr int kFirstTap = kStride == 1 || kGate ? 2 : 1;
  static constexpr int kOutputs = kStride == 1 ? 4 : 2;
  Region x, grad, gate;
  SmallDivisor down, across;  // by the quads of an image's column and row

  MF_HD static BackwardRegions of(int images, int height, int width) {
    BackwardRegions regions{};
    regions.x = Region::of(images, even(height) + 2 * kBorder, even(width) + 2 * kBorder);
    const int rows = regions.x.rows;
    const int columns = regions.x.columns;
    regions.grad =
        kStride == 1 ? Region::of(images, rows + 2, columns + 2) : Region::of(images, rows / 2 + 1, columns / 2 + 1);
    regions.gate = kGate ? Region::of(images, rows / 2 + 1, columns / 2 + 1) : Region{};
    regions.down = SmallDivisor::of(rows / 2);
    regions.across = SmallDivisor::of(columns / 2);
    return regions;
  }
  // The output row at which the region of `grad` begins for a tile whose first input row, without
  // the border, is `first` (even).
  __device__ static int first_output(int first) { return kStride == 1 ? first - kBorder - 1 : first / 2 - kBorder; }
  MF_HD int pixels() const { return x.pixels() + grad.pixels() + gate.pixels(); }
};

// Loads a region of a map as it is; outside of the map and for padding it is zero, or with kClamp
// the nearest row and column.
template <typename T, int kThreads, bool kClamp>
__device__ void load_region(const void* map, int valid, int height, int width, int64_t channels, const Region& region,
                            int first_image, int first_row, int first_column, int first_channel, T* staged) {
  const int vector = threadIdx.x % kVectors;
  const int64_t channel = first_channel + vector * 8;
  if (channel >= channels) {
    return;
  }
  const T* from = static_cast<const T*>(map) + static_cast<int64_t>(first_image) * height * width * channels + channel;
  const int step = static_cast<int>(channels);
  const int pixels = region.pixels();
#pragma unroll 2
  for (int pixel = threadIdx.x / kVectors; pixel < pixels; pixel += kThreads / kVectors) {
    const int line = region.by_columns.quotient(pixel);
    const int image = region.by_rows.quotient(line);
    int h = first_row + line - image * region.rows;
    int w = first_column + pixel - line * region.columns;
    h = kClamp ? nearest(h, height) : h;
    w = kClamp ? nearest(w, width) : w;
    T* to = staged + pixel * kSlice + vector * 8;
    if (first_image + image < valid && is_index(h, height) && is_index(w, width)) {
      const T* own = from + ((image * height + h) * width + w) * step;
#pragma unroll
      for (int i = 0; i < 8; i += 16 / sizeof(T)) {
        copy_16_bytes(to + i, own + i);
      }
    } else {
      Vec<T, 8>{}.store(to);
    }
  }
}

// A slice of channels of one tile, in shared memory.
template <typename T, int kStride, bool kGate>
struct BackwardTile {
  using Regions = BackwardRegions<kStride, kGate>;
  const AlignConvBackward& params;
  const Tiles& tiles;
  const Regions& regions;
  TileAt at;
  int images;  // of the tile within the map
  T* to_x;     // where the gradient of the tile's first image begins, for the lane's channels; null: not wanted
  T* x;        // with a gate overwritten by the gradient of the doubled gate
  T* grad;
  T* gate;
  int first_channel;

  __device__ BackwardTile(const AlignConvBackward& params, const Tiles& tiles, const Regions& regions, int tile,
                          unsigned char* memory, int first_channel)
      : params(params), tiles(tiles), regions(regions), at(TileAt::of(tiles, tile)), first_channel(first_channel) {
    const AlignConvInput& in = params.input;
    images = at.image + tiles.images < in.images ? tiles.images : static_cast<int>(in.images) - at.image;
    x = reinterpret_cast<T*>(memory);
    grad = x + regions.x.pixels() * kSlice;
    gate = grad + regions.grad.pixels() * kSlice;
    to_x = params.x == nullptr ? nullptr
                               : static_cast<T*>(params.x) + at.image * in.height * in.width * in.channels +
                                     first_channel + 2 * (threadIdx.x % kLanes);
  }

  template <int kThreads>
  __device__ void load(int valid) const {
    constexpr int kBorder = Regions::kBorder;
    const AlignConvInput& in = params.input;
    const int height = static_cast<int>(in.height);
    const int width = static_cast<int>(in.width);
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
  }
};

// The opened gate at the four pixels of a quad from the 2 x 2 elements that they share.
template <typename T>
__device__ void open_gate(const T* gate, int columns, float2 (&open)[4]) {
  const float2 top_left = pair_at(gate);
  const float2 top_right = pair_at(gate + kSlice);
  const float2 bottom_left = pair_at(gate + columns * kSlice);
  const float2 bottom_right = pair_at(gate + (columns + 1) * kSlice);
  float2 left[2];
  float2 right[2];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    left[b] = blend(top_left, bottom_left, share_of_first(b));
    right[b] = blend(top_right, bottom_right, share_of_first(b));
  }
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    open[p] = sigmoid<T>(blend(left[p / 2], right[p / 2], share_of_first(p % 2)));
  }
}

// From the outputs that a quad entered: the gradient of the quad, and what it adds to those of the
// nine weights.
template <typename T, int kStride, bool kGate>
__device__ void gather_quad(const T* grad, int columns, const Taps<T>& taps, const Vec<T, 2> (&entered)[4],
                            float2 (&back)[4], float2 (&sums)[kAlignConvSums]) {
  using Regions = BackwardRegions<kStride, kGate>;
#pragma unroll
  for (int row = 0; row < Regions::kOutputs; ++row) {
#pragma unroll
    for (int column = 0; column < Regions::kOutputs; ++column) {
      const float2 g = pair_at(grad + (row * columns + column) * kSlice);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int i = Regions::kFirstTap + p / 2 - kStride * row;
        const int j = Regions::kFirstTap + p % 2 - kStride * column;
        if (i >= 0 && i < 3 && j >= 0 && j < 3) {
          add_product(back[p], g, taps.tap[i * 3 + j].pair(0));
          add_product(sums[i * 3 + j], g, entered[p].pair(0));
        }
      }
    }
  }
}

// The gradient of one quad's pixels, and what they add to the sums.
//   state: the prologue's, for the channels of the lane
template <typename T, int kStride, bool kGate>
__device__ void backward_quad(const BackwardTile<T, kStride, kGate>& tile, int quad, int valid, const Taps<T>& taps,
                              const StatePair& state, float2 (&sums)[kAlignConvSums]) {
  using Regions = BackwardRegions<kStride, kGate>;
  const AlignConvInput& in = tile.params.input;
  const Regions& regions = tile.regions;
  const TileAt& at = tile.at;
  const int height = static_cast<int>(in.height);
  const int width = static_cast<int>(in.width);
  const auto step = static_cast<int>(in.channels);
  const int lane = threadIdx.x % kLanes;
  const bool has_prologue = in.prologue != nullptr;
  // Quads lie in lines of `across`, whatever the image, of which each region adds some of its own.
  const int across = regions.x.columns / 2;
  const int line = regions.across.quotient(quad);
  const int column = quad - line * across;
  const int image = regions.down.quotient(line);
  const bool is_valid = at.image + image < valid;
  const int row = 2 * (line - image * (regions.x.rows / 2)) - Regions::kBorder;  // within the tile
  const int h = at.row + row;
  const int w = at.column + 2 * column - Regions::kBorder;
  T* own = tile.x + (2 * line * regions.x.columns + 2 * column) * kSlice + 2 * lane;
  const auto slot = [&](int p) { return own + (p / 2 * regions.x.columns + p % 2) * kSlice; };
  const bool in_row[2] = {is_index(h, height), is_index(h + 1, height)};
  const bool in_column[2] = {is_index(w, width), is_index(w + 1, width)};
  // The border belongs to other tiles.
  const bool our_row[2] = {in_row[0] && is_index(row, tile.tiles.height),
                           in_row[1] && is_index(row + 1, tile.tiles.height)};
  const bool our_column[2] = {in_column[0] && is_index(w - at.column, tile.tiles.width),
                              in_column[1] && is_index(w + 1 - at.column, tile.tiles.width)};

  float2 open[4];  // the gate
  if constexpr (kGate) {
    open_gate(tile.gate + ((line + image) * regions.gate.columns + column) * kSlice + 2 * lane, regions.gate.columns,
              open);
  }
  Vec<T, 2> before[4];  // the gate: what the prologue's ReLU has let through
  Vec<T, 2> entered[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    before[p] = Vec<T, 2>::load(slot(p));
    if (has_prologue) {
      before[p].set_pair(0, state.applied(before[p].pair(0)));
    }
    entered[p] = before[p];
    if constexpr (kGate) {
      const float2 value = before[p].pair(0);
      entered[p].set_pair(0, {value.x * open[p].x, value.y * open[p].y});
    }
    entered[p] = our_row[p / 2] && our_column[p % 2] ? entered[p] : Vec<T, 2>{};
  }
  float2 back[4] = {};
  gather_quad<T, kStride, kGate>(
      tile.grad + ((line + image) * (2 / kStride) * regions.grad.columns + column * (2 / kStride)) * kSlice + 2 * lane,
      regions.grad.columns, taps, entered, back, sums);

  T* to_x = tile.to_x == nullptr ? nullptr : tile.to_x + ((image * height + h) * width + w) * step;
  const int row_step = width * step;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const bool is_ours = our_row[p / 2] && our_column[p % 2];
    const float2 value = (kGate ? before[p] : entered[p]).pair(0);  // without a gate the same
    float2 grad = back[p];
    if constexpr (kGate) {
      grad = {grad.x * open[p].x, grad.y * open[p].y};
      back[p] = grad;
    }
    if (has_prologue) {
      grad = {is_ours && passes(value.x) ? grad.x : 0.0f, is_ours && passes(value.y) ? grad.y : 0.0f};
      const float2 raw = pair_at(slot(p));
      sums[kTapCount] = {sums[kTapCount].x + grad.x, sums[kTapCount].y + grad.y};
      add_product(sums[kTapCount + 1], grad, {raw.x - state.mean.x, raw.y - state.mean.y});
      grad = {grad.x * state.scale.x, grad.y * state.scale.y};
    }
    if (is_ours && to_x != nullptr) {
      Vec<T, 2> result = {};  // for padding, whatever the scale is
      if (is_valid) {
        result.set_pair(0, grad);
      }
      result.store(to_x + (p / 2 * row_step + p % 2 * step));
    }
    if constexpr (kGate) {
      // Over x, which no other lane reads: the gradient of the doubled gate.
      const bool inside = is_valid && in_row[p / 2] && in_column[p % 2];
      store_pair(slot(p),
                 inside ? float2{back[p].x * value.x * (1.0f - open[p].x), back[p].y * value.y * (1.0f - open[p].y)}
                        : float2{0.0f, 0.0f});
    }
  }
}

// The gate's gradient from that of the doubled gate. Element k takes 1/4, 3/4, 3/4, 1/4 of rows
// 2k-1 to 2k+2; at the edges of the map all of row 2k, or 2k+1.
template <typename T, int kStride, int kThreads>
__device__ void gather_gate(const BackwardTile<T, kStride, true>& tile) {
  const AlignConvInput& in = tile.params.input;
  const Region& region = tile.regions.x;
  const int height = static_cast<int>(in.height) / 2;
  const int width = static_cast<int>(in.width) / 2;
  const int lane = threadIdx.x % kLanes;
  const int tile_height = tile.tiles.height / 2;
  const int tile_width = tile.tiles.width / 2;
  const auto down = SmallDivisor::of(tile_height);
  const auto across = SmallDivisor::of(tile_width);
  const auto step = static_cast<int>(in.channels);
  T* to = static_cast<T*>(tile.params.gate) + static_cast<int64_t>(tile.at.image) * height * width * in.channels +
          tile.first_channel + 2 * lane;
#pragma unroll 1
  for (int i = threadIdx.x / kLanes; i < tile.images * tile_height * tile_width; i += kThreads / kLanes) {
    const int line = across.quotient(i);
    const int image = down.quotient(line);
    const int row = line - image * tile_height;
    const int column = i - line * tile_width;
    const int h = tile.at.row / 2 + row;
    const int w = tile.at.column / 2 + column;
    if (h >= height || w >= width) {
      continue;
    }
    const T* from = tile.x + ((image * region.rows + 2 * row) * region.columns + 2 * column) * kSlice + 2 * lane;
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const bool whole_row = (a == 1 && h == 0) || (a == 2 && h == height - 1);
      float2 of_row = {0.0f, 0.0f};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const bool whole = (b == 1 && w == 0) || (b == 2 && w == width - 1);
        const float share = whole ? 1.0f : b == 0 || b == 3 ? 0.25f : 0.75f;
        add_product(of_row, pair_at(from + (a * region.columns + b) * kSlice), {share, share});
      }
      const float share = whole_row ? 1.0f : a == 0 || a == 3 ? 0.25f : 0.75f;
      add_product(sum, of_row, {share, share});
    }
    store_pair(to + ((image * height + h) * width + w) * step, sum);
  }
}

template <typename T, int kStride, bool kGate, int kThreads>
__device__ void align_conv_backward_block(const AlignConvBackward& params, const Tiles& tiles,
                                          const BackwardRegions<kStride, kGate>& regions, unsigned char* memory) {
  const AlignConvInput& in = params.input;
  const auto valid = static_cast<int>(in.valid_images());
  const int slices = slices_of(in.channels);
  const int first_channel = static_cast<int>(blockIdx.x) % slices * kSlice;
  const bool has_channel = first_channel + 2 * static_cast<int>(threadIdx.x % kLanes) < in.channels;

  Taps<T> taps = {};
  StatePair state = {};
  load_taps<T, kThreads>(in, first_channel, reinterpret_cast<T*>(memory));
  __syncthreads();
  if (has_channel) {
    taps = Taps<T>::load(reinterpret_cast<T*>(memory));
    if (in.prologue != nullptr) {
      state = StatePair::load(in.prologue, in.channels, first_channel + threadIdx.x % kLanes * 2);
    }
  }
  __syncthreads();
  float2 sums[kAlignConvSums] = {};
  for (int i = static_cast<int>(blockIdx.x) / slices; i < tiles.total; i += static_cast<int>(gridDim.x) / slices) {
    const BackwardTile<T, kStride, kGate> tile(params, tiles, regions, i, memory, first_channel);
    tile.template load<kThreads>(valid);
    __syncthreads();
    const int quads = tile.images * (regions.x.rows / 2) * (regions.x.columns / 2);
#pragma unroll 1
    for (int quad = threadIdx.x / kLanes; has_channel && quad < quads; quad += kThreads / kLanes) {
      backward_quad(tile, quad, valid, taps, state, sums);
    }
    __syncthreads();
    if constexpr (kGate) {
      if (params.gate != nullptr && has_channel) {
        gather_gate<T, kStride, kThreads>(tile);
      }
      __syncthreads();
    }
  }
  if (params.sums != nullptr) {
    leave_sums<kThreads>(params, sums, first_channel, reinterpret_cast<float2*>(memory));
  }
}

}  // namespace mf::cuda
