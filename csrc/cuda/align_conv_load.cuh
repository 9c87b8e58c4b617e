// The prologue of align_conv's forward: loads the convolution's input into shared memory,
//   x' = x,   relu(scale (x - mean) + shift) with a prologue,   x sigmoid(up(gate)) with a gate,
// computed once an element on the way. up doubles both sides bilinearly: along each side an output
// takes 3/4 of the nearer and 1/4 of the further of two gate elements (at the map's edge all of the
// one). A quad of 2 x 2 pixels that begins at an odd row and column shares 2 x 2 gate elements.
#pragma once

#include "core/relu.h"
#include "cuda/align_conv_tile.cuh"
#include "cuda/mma.cuh"
#include "cuda/vec.cuh"

namespace mf::cuda {

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

// Each of 2 x 2 elements, `near_row` (`near_column`) times, plus its neighbour in the row (column):
// with 3 the doubled gate times 16.
__device__ inline void mix_quad(const float2 (&in)[4], float near_row, float near_column, float2 (&out)[4]) {
  const auto mixed = [](float near, float2 a, float2 b) { return float2{near * a.x + b.x, near * a.y + b.y}; };
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float2 left = mixed(near_row, in[2 * row], in[2 - 2 * row]);
    const float2 right = mixed(near_row, in[2 * row + 1], in[3 - 2 * row]);
    out[2 * row] = mixed(near_column, left, right);
    out[2 * row + 1] = mixed(near_column, right, left);
  }
}

// sigmoid(x / 16). 16-bit results cannot tell the fast one from the exact one, however small it is;
// tanh.approx would have a large relative error where the gate is nearly closed.
template <typename T>
__device__ float sigmoid_of_sixteenth(float x) {
  if constexpr (sizeof(T) == 2) {
    return inverse_of_one_plus_power(x * (kMinusLog2E / 16.0f));
  } else {
    return 1.0f / (1.0f + expf(-x / 16.0f));
  }
}

// The factors sigmoid(up(gate)) of a quad, from its 2 x 2 gate elements.
template <typename T>
__device__ void open_gate(const float2 (&gate)[4], float2 (&open)[4]) {
  mix_quad(gate, 3.0f, 3.0f, open);
#pragma unroll
  for (float2& x : open) {
    x = {sigmoid_of_sixteenth<T>(x.x), sigmoid_of_sixteenth<T>(x.y)};
  }
}

// Multiplies a quad by its gate, in eight channels.
template <typename T>
__device__ void apply_gate(const Vec<T, 8> (&gate)[4], Vec<T, 8> (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 open[4];
    open_gate<T>({gate[0].pair(i), gate[1].pair(i), gate[2].pair(i), gate[3].pair(i)}, open);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 value = x[p].pair(i);
      x[p].set_pair(i, {value.x * open[p].x, value.y * open[p].y});
    }
  }
}

// Normalises and rectifies a quad in eight channels, by the states from `state` on.
template <typename T>
__device__ void apply_norm(const float* state, int channels, Vec<T, 8> (&x)[4]) {
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

enum class Prologue { kNone, kNorm, kGate };

// Loads x' of a tile's region, this thread's eight channels from `channel` on; zero outside of the
// image and for padding. A thread takes quads; `map` is the first pixel of the tile's first image.
// Without a prologue copies are started, which the caller waits for.
template <typename T, int kStride, int kThreads, Prologue kPrologue>
__device__ void load_quads(const AlignConvInput& in, int valid, const ForwardTiles& tiles, const TileAt& at,
                           int channel, const T* map, T* staged) {
  const int height = tiles.in_height;
  const int width = tiles.in_width;
  const int step = tiles.channels;
  const T* gates = nullptr;
  if constexpr (kPrologue == Prologue::kGate) {
    gates = opaque_global(static_cast<const T*>(in.gate) +
                          static_cast<int64_t>(at.image) * (height / 2 * (width / 2) * step) + channel);
  }
  const InputRegion& region = tiles.region;
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
    const bool in_row[2] = {is_valid && in_range(h, height), is_valid && in_range(h + 1, height)};
    const bool in_column[2] = {in_range(w, width), in_range(w + 1, width)};
    const bool has_row[2] = {true, row + 1 < region.rows};
    const bool has_column[2] = {true, column + 1 < region.columns};
    const int from = ((image * height + h) * width + w) * step;
    T* to = staged + ((image * region.rows + row) * region.columns + column) * kSlice + threadIdx.x % kVectors * 8;
    Vec<T, 8> x[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const bool exists = in_row[p / 2] && in_column[p % 2];
      const T* pixel = map + (from + (p / 2 * width + p % 2) * step);
      if constexpr (kPrologue != Prologue::kNone) {
        x[p] = exists ? Vec<T, 8>::load(pixel) : Vec<T, 8>{};
      } else if (has_row[p / 2] && has_column[p % 2]) {
#pragma unroll
        for (int i = 0; i < 8; i += 16 / sizeof(T)) {
          copy_16_bytes_or_zeros(to + (p / 2 * region.columns + p % 2) * kSlice + i, pixel + i, exists);
        }
      }
    }
    if constexpr (kPrologue == Prologue::kNorm) {
      apply_norm(in.prologue + channel, step, x);
    } else if constexpr (kPrologue == Prologue::kGate) {
      Vec<T, 8> gate[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int r = clamp_index((h + 1) / 2 - 1 + p / 2, height / 2);
        const int c = clamp_index((w + 1) / 2 - 1 + p % 2, width / 2);
        gate[p] =
            is_valid ? Vec<T, 8>::load(gates + ((image * (height / 2) + r) * (width / 2) + c) * step) : Vec<T, 8>{};
      }
      apply_gate(gate, x);
    }
    if constexpr (kPrologue != Prologue::kNone) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        if (has_row[p / 2] && has_column[p % 2]) {
          const bool exists = in_row[p / 2] && in_column[p % 2];
          constexpr uint32_t kZeros[4] = {};
#pragma unroll
          for (int word = 0; word < Vec<T, 8>::kWords; word += 4) {
            T* pixel = to + (p / 2 * region.columns + p % 2) * kSlice + word * 4 / sizeof(T);
            if (exists) {
              store_16_bytes(pixel, x[p].word + word);
            } else {
              store_16_bytes(pixel, kZeros);
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
    const T* map = opaque_global(static_cast<const T*>(in.x) + static_cast<int64_t>(at.image) * image_size + channel);
    if (kStride == 1 || in.prologue != nullptr) {  // at stride 1 there always is one
      load_quads<T, kStride, kThreads, Prologue::kNorm>(in, valid, tiles, at, channel, map, staged);
    } else if (in.gate != nullptr) {
      load_quads<T, 2, kThreads, Prologue::kGate>(in, valid, tiles, at, channel, map, staged);
    } else {
      load_quads<T, 2, kThreads, Prologue::kNone>(in, valid, tiles, at, channel, map, staged);
    }
  }
  wait_for_copies();
}

// The nine weights of a slice of channels, [kTapCount][kSlice], rounded to the maps' type.
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

}  // namespace mf::cuda
