// The backward of align_conv through the depthwise convolution and its prologue. From the gradient of
// m = depthwise(x') it computes, with g the gradient of x':
//   norm  x' = relu(z), z = scale (x - mean) + shift:   dx = scale g [z > 0],
//         dshift = sum g [z > 0], dscale = sum g [z > 0] (x - mean), dmean = -scale dshift,
//   gate  x' = x s, s = sigmoid(up(gate)):   dx = g s,   dgate = up^T(g x s (1 - s)),
//   dw[c, tap] = sum over pixels of dm x'.
// There are four forms: stride 1 with a norm; stride 2 as it is, with a norm, with a gate.
//
// A block walks over tiles of input pixels in 64 channels (align_conv_backward_tile.cuh), a warp in
// eight of them. For each tile:
//   1. all threads copy x, dm and the gate into shared memory, and list the quads of 2 x 2 pixels;
//   2. each warp takes 16 quads at a time: prologue (x' over x), both products with dm
//      (align_conv_gather.cuh), epilogue (x's gradient over x', the quad's part of the gate's);
//   3. all threads copy x's gradient out and sum the gate's.
// The sums over pixels stay in registers over all tiles of a block. Each block writes one partial sum,
// and a second launch adds them (align_conv_sums.cuh).
#pragma once

#include "cuda/align_conv_backward_tile.cuh"
#include "cuda/align_conv_sums.cuh"

namespace mf::cuda {

// relu of two numbers, rounded to T.
template <typename T>
__device__ Vec<T, 2> rectified_pair(float2 x) {
  Vec<T, 2> pair;
  if constexpr (sizeof(T) == 2) {
    pair.word[0] = rectified_word(x);
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

// A quad in the two channels of a lane.
template <typename T, int kStride, Prologue kPrologue, int kThreads>
struct LaneQuad {
  static constexpr int kPitch = BackwardBlock<kThreads>::kPitch;
  using Tile = BackwardTile<T, kStride, kPrologue, kThreads>;
  QuadEntry at;
  T* x;              // of its first pixel
  int columns;       // pixels from row to row
  float2* centred;   // x - mean: of a pixel and the next, kThreads further on
  Vec<T, 2> raw[4];  // x, where there is a gate
  float2 open[4];    // the gate

  __device__ T* slot(int p) const { return x + (p / 2 * columns + p % 2) * kPitch; }

  // Writes x' over x, zero where it does not count for the weights' gradients.
  __device__ void prologue(const Tile& tile, const LaneView<T>& own, int i, int channel) {
    at = QuadEntry::of(own.list, i);
    columns = tile.regions.x.columns;
    x = own.tile + at.x * QuadEntry::kUnit<T>;
    StatePair state = {};
    if constexpr (kPrologue == Prologue::kNorm) {
      state = StatePair::load(tile.state, BackwardBlock<kThreads>::kChannels, channel);
    } else if constexpr (kPrologue == Prologue::kGate) {
      const T* gate = own.tile + at.gate * QuadEntry::kUnit<T>;
      const T* below = gate + tile.regions.gate.columns * kPitch;
      open_gate<T>({pair_at(gate), pair_at(gate + kPitch), pair_at(below), pair_at(below + kPitch)}, open);
    }
    if constexpr (kPrologue != Prologue::kNone) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        Vec<T, 2> value = Vec<T, 2>::load(slot(p));
        if constexpr (kPrologue == Prologue::kNorm) {
          const float2 from_mean = {value.pair(0).x - state.mean.x, value.pair(0).y - state.mean.y};
          centred[p * kThreads] = from_mean;
          value = rectified_pair<T>(
              {state.scale.x * from_mean.x + state.shift.x, state.scale.y * from_mean.y + state.shift.y});
        } else if constexpr (kPrologue == Prologue::kGate) {
          raw[p] = value;
          value.set_pair(0, {value.pair(0).x * open[p].x, value.pair(0).y * open[p].y});
        }
        value = at.select_or_zero(QuadEntry::kCounts + p, value);
        if (at.is(QuadEntry::kExists)) {
          value.store(slot(p));
        }
      }
    }
  }

  // Writes x's gradient over x', and the quad's part of the gate's. back: the gradient of x'
  __device__ void epilogue(const Tile& tile, int channel, T* gate_parts, const float2 (&back)[4], PrologueSums& sums) {
    StatePair state = {};
    if constexpr (kPrologue == Prologue::kNorm) {
      state = StatePair::load(tile.state, BackwardBlock<kThreads>::kChannels, channel);
    }
    float2 of_doubled[4];  // the gradient of the doubled gate
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      float2 grad = back[p];
      if constexpr (kPrologue == Prologue::kNorm) {
        const auto value = Vec<T, 2>::load(slot(p));
        grad = {is_positive(value, 0) ? grad.x : 0.0f, is_positive(value, 1) ? grad.y : 0.0f};
        sums.shift = {sums.shift.x + grad.x, sums.shift.y + grad.y};
        add_product(sums.scale, grad, centred[p * kThreads]);
        grad = {grad.x * state.scale.x, grad.y * state.scale.y};
      } else if constexpr (kPrologue == Prologue::kGate) {
        grad = {grad.x * open[p].x, grad.y * open[p].y};
        const float2 value = raw[p].pair(0);
        const float2 product = {grad.x * value.x, grad.y * value.y};
        of_doubled[p] = {product.x - product.x * open[p].x, product.y - product.y * open[p].y};
      }
      if (at.is(QuadEntry::kExists)) {
        store_pair(slot(p), grad);
      }
    }
    if constexpr (kPrologue == Prologue::kGate) {
      // Up-sampling, transposed: at the map's edge, where the quad's other row (column) is not of the map,
      // a row of the doubled gate takes all of the nearer row of the gate.
      float2 parts[4];
      mix_quad(of_doubled, at.is(QuadEntry::kRowEdge) ? 4.0f : 3.0f, at.is(QuadEntry::kColumnEdge) ? 4.0f : 3.0f,
               parts);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        store_pair(gate_parts + p * kPitch, parts[p]);
      }
    }
  }
};

template <typename T, int kStride, Prologue kPrologue, int kThreads>
__device__ void align_conv_backward_block(const AlignConvBackward& params, const Tiles& tiles,
                                          const BackwardRegions<kStride, kPrologue>& regions, unsigned char* memory) {
  wait_for_previous();
  let_next_begin();
  using Block = BackwardBlock<kThreads>;
  const AlignConvInput& in = params.input;
  BackwardTile<T, kStride, kPrologue, kThreads> tile(params, tiles, regions, memory);
  const int slices = Block::slices(in.channels);
  const int first_channel = static_cast<int>(blockIdx.x) % slices * Block::kChannels;

  Gather<T, kStride, kPrologue, Block::kPitch> products = {};
  PrologueSums sums = {};
  T* taps = tile.memory + regions.x.begin * Block::kPitch;  // until the first tile is loaded
  load_taps<T, kThreads>(in, first_channel, taps);
  __syncthreads();
  if (first_channel + Block::channel_of_warp() < regions.channels) {
    products.load(taps + Block::channel_of_warp(), tile.list, tile.memory + Block::channel_of_warp());
  }
  const auto lane = LaneView<T>::own(tile.list, tile.memory + Block::channel_of_warp());
  T* gate_parts = opaque_shared(tile.gate_parts + quad_of_lane() * 4 * Block::kPitch + Block::channel_of_warp() +
                                channel_of_lane());
  __syncthreads();
  tile.zero_filler();
  if constexpr (kPrologue == Prologue::kNorm) {
    tile.load_state(first_channel);
  }
  if (threadIdx.x == 0) {
    *tile.at = TileCursor::of(tiles, static_cast<int>(blockIdx.x) / slices, static_cast<int>(gridDim.x) / slices,
                              first_channel, static_cast<int>(in.valid_images()));
  }
  __syncthreads();
  while (tile.at->number < tiles.total) {
    tile.load();
    wait_for_copies();
    __syncthreads();
    const int first = Block::channel_of_warp();
    const int channel = first + channel_of_lane(reload_thread_index());
    const int quads =
        tile.at->first_channel + first < regions.channels ? tile.images(*tile.at) * regions.quads_of_image : 0;
#pragma unroll 1
    for (int unit = 0; unit < quads; unit += kQuads) {
      LaneQuad<T, kStride, kPrologue, kThreads> quad[2];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        quad[q].centred = tile.centred + 4 * q * kThreads;
        quad[q].prologue(tile, lane, unit + q * (kQuads / 2), channel);
      }
      __syncwarp();
      float2 back[2][4];
      products.gather(unit, regions.x.columns, regions.grad.columns, back);
      __syncwarp();
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        quad[q].epilogue(tile, channel, gate_parts + (unit + q * (kQuads / 2)) * 4 * Block::kPitch, back[q], sums);
      }
    }
    __syncthreads();
    tile.write_gradients();
    __syncthreads();
    if (reload_thread_index() == 0) {
      tile.at->advance(tiles);
    }
    __syncthreads();
  }
  const int channel = tile.at->first_channel + Block::channel_of_warp();
  if (params.sums != nullptr && channel < in.channels) {
    const int64_t part = tile.at->number % tile.at->step.number;  // the block's first tile: no register has kept it
    float* to = params.sums + part * kAlignConvSums * in.channels + channel;
    products.write_partial(to, in.channels);
    write_partial_prologue(sums, to, in.channels);
  }
}

}  // namespace mf::cuda
