// Kernel bodies of align_conv's backward through depthwise convolution, gate and prologue.
//
// A tile of input pixels: quads of them gather from the 2 x 2 (stride 2) or 4 x 4 outputs that they
// entered, both for the gradient of x' and for those of the nine weights. The latter stay in
// registers over all tiles of a block, as do the sums for the prologue; each block leaves one
// partial sum, and a second launch adds them. The gate's gradient is gathered from the tile with a
// border of one pixel, computed twice where tiles meet, so that nothing is scattered.
#pragma once

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

  MF_HD static BackwardRegions of(int images, int height, int width) {
    BackwardRegions regions{};
    regions.x = {images, even(height) + 2 * kBorder, even(width) + 2 * kBorder};
    const int rows = regions.x.rows;
    const int columns = regions.x.columns;
    regions.grad = kStride == 1 ? Region{images, rows + 2, columns + 2} : Region{images, rows / 2 + 1, columns / 2 + 1};
    regions.gate = kGate ? Region{images, rows / 2 + 1, columns / 2 + 1} : Region{0, 0, 0};
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
        Vec<T, 8>{}.store(to);
      }
    }
  }
}

// A slice of channels of one tile, in shared memory.
template <typename T, int kStride, bool kGate>
struct BackwardTile {
  using Regions = BackwardRegions<kStride, kGate>;
  const AlignConvBackward& params;
  const Tiles& tiles;
  Regions regions;
  TileAt at;
  T* x;  // with a gate overwritten by the gradient of the doubled gate
  T* grad;
  T* gate;
  int first_channel;

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
__device__ void gather_quad(const T* grad, int columns, const Taps<T>& taps, const float2 (&entered)[4],
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
          add_product(sums[i * 3 + j], g, entered[p]);
        }
      }
    }
  }
}

// The gradient of one quad's pixels, and what they add to the sums.
template <typename T, int kStride, bool kGate>
__device__ void backward_quad(const BackwardTile<T, kStride, kGate>& tile, int quad, int valid, const Taps<T>& taps,
                              float2 (&sums)[kAlignConvSums]) {
  using Regions = BackwardRegions<kStride, kGate>;
  const AlignConvBackward& params = tile.params;
  const AlignConvInput& in = params.input;
  const Regions& regions = tile.regions;
  const TileAt& at = tile.at;
  const int height = static_cast<int>(in.height);
  const int width = static_cast<int>(in.width);
  const int lane = threadIdx.x % kLanes;
  const int64_t channel = tile.first_channel + 2 * lane;
  const bool has_prologue = in.prologue != nullptr;
  const int down = regions.x.rows / 2;
  const int across = regions.x.columns / 2;
  const int image = quad / (down * across);
  const int quad_row = quad / across % down;
  const int quad_column = quad % across;
  const int n = at.image + image;
  const int h = at.row - Regions::kBorder + 2 * quad_row;
  const int w = at.column - Regions::kBorder + 2 * quad_column;
  T* own = tile.x + ((image * regions.x.rows + 2 * quad_row) * regions.x.columns + 2 * quad_column) * kSlice + 2 * lane;
  const auto inside = [&](int p) {
    return h + p / 2 >= 0 && h + p / 2 < height && w + p % 2 >= 0 && w + p % 2 < width;
  };
  // The border belongs to other tiles.
  const auto is_ours = [&](int p) {
    return n < in.images && inside(p) && h + p / 2 >= at.row && h + p / 2 < at.row + tile.tiles.height &&
           w + p % 2 >= at.column && w + p % 2 < at.column + tile.tiles.width;
  };
  float2 open[4];  // the gate
  if constexpr (kGate) {
    open_gate(
        tile.gate + ((image * regions.gate.rows + quad_row) * regions.gate.columns + quad_column) * kSlice + 2 * lane,
        regions.gate.columns, open);
  }
  // Before the gate: what the prologue's ReLU has let through.
  const auto let_through = [&](const T* slot) {
    const float2 raw = pair_at(slot);
    return has_prologue ? rounded<T>(StatePair::load(in.prologue, in.channels, channel).applied(raw)) : raw;
  };
  float2 before[4];
  float2 entered[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    before[p] = let_through(own + (p / 2 * regions.x.columns + p % 2) * kSlice);
    entered[p] = before[p];
    if constexpr (kGate) {
      entered[p] = rounded<T>({before[p].x * open[p].x, before[p].y * open[p].y});
    }
    entered[p] = is_ours(p) ? entered[p] : float2{0.0f, 0.0f};
  }
  float2 back[4] = {};
  gather_quad<T, kStride, kGate>(tile.grad +
                                     ((image * regions.grad.rows + quad_row * (2 / kStride)) * regions.grad.columns +
                                      quad_column * (2 / kStride)) *
                                         kSlice +
                                     2 * lane,
                                 regions.grad.columns, taps, entered, back, sums);
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    T* slot = own + (p / 2 * regions.x.columns + p % 2) * kSlice;
    if constexpr (kGate) {
      before[p] = let_through(slot);  // once more: there are no registers to keep it
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
        to_x = n < valid ? float2{to_x.x * scale.x, to_x.y * scale.y} : float2{0.0f, 0.0f};  // whatever the scale is
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
#pragma unroll 1
  for (int i = threadIdx.x / kLanes; i < tile.tiles.images * tile_height * tile_width; i += kThreads / kLanes) {
    const int image = i / (tile_height * tile_width);
    const int row = i / tile_width % tile_height;
    const int column = i % tile_width;
    const int n = tile.at.image + image;
    const int h = tile.at.row / 2 + row;
    const int w = tile.at.column / 2 + column;
    if (n >= in.images || h >= height || w >= width) {
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
    const int64_t pixel = (static_cast<int64_t>(n) * height + h) * width + w;
    store_pair(static_cast<T*>(tile.params.gate) + pixel * in.channels + tile.first_channel + 2 * lane, sum);
  }
}

// Adds up the block's warps. of_warp: [kWarps][kAlignConvSums][kLanes]
template <int kThreads>
__device__ void leave_sums(const AlignConvBackward& params, const float2 (&sums)[kAlignConvSums], int first_channel,
                           float2* of_warp) {
  constexpr int kWarps = kThreads / kLanes;
#pragma unroll
  for (int which = 0; which < kAlignConvSums; ++which) {
    of_warp[(threadIdx.x / kLanes * kAlignConvSums + which) * kLanes + threadIdx.x % kLanes] = sums[which];
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
    if (to < params.input.channels) {
      const int64_t part = static_cast<int64_t>(blockIdx.x) / slices_of(params.input.channels);
      store_pair(params.sums + (part * kAlignConvSums + i / kLanes) * params.input.channels + to, sum);
    }
  }
}

template <typename T, int kStride, bool kGate, int kThreads>
__device__ void align_conv_backward_block(const AlignConvBackward& params, const Tiles& tiles, unsigned char* memory) {
  using Regions = BackwardRegions<kStride, kGate>;
  const AlignConvInput& in = params.input;
  const auto valid = static_cast<int>(in.valid_images());
  const int slices = slices_of(in.channels);
  const int first_channel = static_cast<int>(blockIdx.x) % slices * kSlice;
  const bool has_channel = first_channel + 2 * static_cast<int>(threadIdx.x % kLanes) < in.channels;
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
  const int quads = tiles.images * (regions.x.rows / 2) * (regions.x.columns / 2);
  float2 sums[kAlignConvSums] = {};
  for (int i = static_cast<int>(blockIdx.x) / slices; i < tiles.total; i += static_cast<int>(gridDim.x) / slices) {
    const BackwardTile<T, kStride, kGate> tile{params, tiles, regions, TileAt::of(tiles, i),
                                               x,      grad,  gate,    first_channel};
    tile.template load<kThreads>(valid);
    __syncthreads();
#pragma unroll 1
    for (int quad = threadIdx.x / kLanes; has_channel && quad < quads; quad += kThreads / kLanes) {
      backward_quad(tile, quad, valid, taps, sums);
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

// Adds up what the blocks left: a lane a channel, the warps share the parts.
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

}  // namespace mf::cuda
