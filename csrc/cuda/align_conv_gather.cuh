// The two products of align_conv's backward with the gradient of the depthwise convolution's result:
// the gradient of what entered, and that of the nine weights.
//
// A warp keeps to eight channels. It takes 16 quads of 2 x 2 input pixels at a time; a lane has two
// channels of two of them, lane / 4 and lane / 4 + 8, as the tensor cores hand out a product of
// m16n8k16. In 16 bits both products run there, two taps an instruction:
//   gradient of what entered: [quads, (tap, channel)] x [(tap, channel), channel], the right one of
//     diagonal matrices that hold the weights,
//   gradient of the weights: [(tap, channel), quads] x [quads, channel], of which the diagonal counts.
// So a gradient that is no number spreads to the pixel's eight channels. Sums are in float32.
#pragma once

#include "cuda/align_conv_tile.cuh"

namespace mf::cuda {

constexpr int kQuads = 16;        // that a warp takes at a time
constexpr int kWarpChannels = 8;  // that a warp keeps to

// How the rows (or columns) of a quad reach those of the outputs that they entered: tap i leads from
// input row b of a quad to row a of these outputs with i = kFirstTap + b - kStride a.
template <int kStride, bool kGate>
struct Reach {
  static constexpr int kFirstTap = kStride == 1 || kGate ? 2 : 1;
  static constexpr int kOutputs = kStride == 1 ? 4 : 2;

  // Row b has that many taps, here in the order of the outputs.
  MF_HD static constexpr int taps(int b) { return kStride == 1 ? 3 : 2 - (kFirstTap + b) % 2; }
  MF_HD static constexpr int tap(int b, int k) { return kStride == 1 ? 2 - k : taps(b) == 2 ? 2 - 2 * k : 1; }
  MF_HD static constexpr int output(int b, int k) { return (kFirstTap + b - tap(b, k)) / kStride; }
  MF_HD static constexpr int last_output(int b) { return output(b, taps(b) - 1); }

  // The same of pixel p of a quad, in whose row the columns come first.
  MF_HD static constexpr int taps_of_pixel(int p) { return taps(p / 2) * taps(p % 2); }
  MF_HD static constexpr int tap_of_pixel(int p, int k) {
    return tap(p / 2, k / taps(p % 2)) * 3 + tap(p % 2, k % taps(p % 2));
  }
  MF_HD static constexpr int output_of_pixel(int p, int k) {
    return output(p / 2, k / taps(p % 2)) * kOutputs + output(p % 2, k % taps(p % 2));
  }
};

// Where a quad's first pixels lie, counted in pixels from the beginning of each region of a block's
// shared memory, and what is true of the quad.
struct QuadAt {
  int x, grad, gate;
  unsigned flags;

  static constexpr unsigned kOwn = 0;     // from this bit on, for each pixel: it is the tile's, of an image that counts
  static constexpr unsigned kInside = 4;  // ... it is of the map, of an image that counts
  static constexpr unsigned kRowEdge = 8;  // one of its rows (with the next bit: columns) is not of the map
  static constexpr unsigned kExists = 10;  // else it only fills up

  __device__ bool is(unsigned bit) const { return (flags >> bit & 1u) != 0; }
  __device__ uint2 packed() const {
    return {static_cast<unsigned>(x) | static_cast<unsigned>(grad) << 16, static_cast<unsigned>(gate) | flags << 16};
  }
  __device__ static QuadAt of(const uint2* list, int i) {
    const uint64_t both = *reinterpret_cast<const uint64_t*>(list + i);
    const auto x_grad = static_cast<unsigned>(both);
    const auto gate_flags = static_cast<unsigned>(both >> 32);
    return {static_cast<int>(x_grad & 0xffffu), static_cast<int>(x_grad >> 16), static_cast<int>(gate_flags & 0xffffu),
            gate_flags >> 16};
  }
};

__device__ inline int quad_of_lane() { return static_cast<int>(threadIdx.x) % kLanes / 4; }
__device__ inline int channel_of_lane() { return static_cast<int>(threadIdx.x) % 4 * 2; }  // of the warp's eight

// Adds up what the lanes of two channels hold.
__device__ inline float2 sum_of_quads(float2 x) {
#pragma unroll
  for (int bits = 4; bits < kLanes; bits *= 2) {
    x.x += __shfl_xor_sync(0xffffffffu, x.x, bits);
    x.y += __shfl_xor_sync(0xffffffffu, x.y, bits);
  }
  return x;
}

// The regions of shared memory that a gather reads, at the warp's first channel.
template <typename T>
struct GatherFrom {
  const T* x;     // what entered, zero where it does not count
  const T* grad;  // of the depthwise convolution's result
  int x_columns, grad_columns;
};

template <typename T, int kStride, bool kGate, int kPitch>
struct Gather {
  using R = Reach<kStride, kGate>;
  static constexpr int kPixels = R::kOutputs * R::kOutputs;
  uint32_t weights[kTapCount + 1];  // of each tap a diagonal matrix, in the place of a tenth zero
  float2 sums[kTapCount + 1];       // of each tap the product's rows; the tenth is of no tap

  // taps: [kTapCount][kSlice], from the warp's first channel on
  __device__ void load(const T* taps) {
    const int column = quad_of_lane();  // of the matrix, whose two rows are those of channel_of_lane
#pragma unroll
    for (int i = 0; i < kTapCount; ++i) {
      const float weight = to_float(taps[i * kSlice + column]);
      weights[i] =
          word_of<T>({column == channel_of_lane() ? weight : 0.0f, column == channel_of_lane() + 1 ? weight : 0.0f});
    }
    weights[kTapCount] = 0;
  }

  // A row of pixels of each of 16 quads, as operands of 16 quads by 8 channels; transposed 8 channels
  // by 16 quads. first: of the lane's quad, or the pixel beside it
  template <int kSide, bool kTransposed>
  __device__ static void load_row(const T* first, uint32_t (*pixels)[2]) {
#pragma unroll
    for (int column = 0; column < kSide; column += 2) {
      uint32_t read[4];
      if constexpr (kTransposed) {
        load_transposed(read, first + column * kPitch);
      } else {
        load_rows(read, first + column * kPitch);
      }
      pixels[column][0] = read[0];
      pixels[column][1] = read[1];
      pixels[column + 1][0] = read[2];
      pixels[column + 1][1] = read[3];
    }
  }

  // Calls f(p, first, second, tap, other) for each pixel p of a quad and each two taps of it, with
  // the pixels of `grad` that they lead to; `other` is no tap where one is left over. Rows are loaded
  // when they are needed.
  template <bool kTransposed, typename Function>
  __device__ static void each_two_taps(const T* grad, int columns, const Function& f) {
    uint32_t around[R::kOutputs * R::kOutputs][2];
#pragma unroll
    for (int a = 0; a < 2; ++a) {
#pragma unroll
      for (int row = a == 0 ? 0 : R::last_output(0) + 1; row <= R::last_output(a); ++row) {
        load_row<R::kOutputs, kTransposed>(grad + row * columns * kPitch, around + row * R::kOutputs);
      }
#pragma unroll
      for (int p = 2 * a; p < 2 * a + 2; ++p) {
#pragma unroll
        for (int k = 0; k < R::taps_of_pixel(p); k += 2) {
          const bool is_pair = k + 1 < R::taps_of_pixel(p);
          const int output = R::output_of_pixel(p, k);
          f(p, around[output], around[is_pair ? R::output_of_pixel(p, k + 1) : output ^ 1], R::tap_of_pixel(p, k),
            is_pair ? R::tap_of_pixel(p, k + 1) : kTapCount);
        }
      }
    }
  }

  // Of the quads listed from `list` on. back: [quad of the lane][pixel]
  __device__ void gather(const GatherFrom<T>& from, const uint2* list, float2 (&back)[2][4]) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const QuadAt at = QuadAt::of(list, lane % kQuads);
    uint32_t entered[4][2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      load_row<2, true>(from.x + (at.x + row * from.x_columns + lane / kQuads) * kPitch, entered + 2 * row);
    }
    each_two_taps<true>(from.grad + (at.grad + lane / kQuads) * kPitch, from.grad_columns,
                        [&](int p, const uint32_t (&first)[2], const uint32_t (&second)[2], int tap, int other) {
                          float d[4] = {sums[tap].x, sums[tap].y, sums[other].x, sums[other].y};
                          multiply_tile(d, {first[0], second[0], first[1], second[1]}, entered[p], T());
                          sums[tap] = {d[0], d[1]};
                          sums[other] = {d[2], d[3]};
                        });
    __syncwarp();  // so that the compiler does not hold both products' operands in registers at once
    float d[4][4] = {};
    each_two_taps<false>(from.grad + (at.grad + lane / kQuads) * kPitch, from.grad_columns,
                         [&](int p, const uint32_t (&first)[2], const uint32_t (&second)[2], int tap, int other) {
                           multiply_tile(d[p], {first[0], first[1], second[0], second[1]},
                                         {weights[tap], weights[other]}, T());
                         });
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      back[0][p] = {d[p][0], d[p][1]};
      back[1][p] = {d[p][2], d[p][3]};
    }
  }

  // The nine sums of the warp's channels, to [kTapCount][channels].
  __device__ void leave(float* to, int64_t channels) const {
    const int row = quad_of_lane();
#pragma unroll
    for (int i = 0; i < kTapCount; ++i) {
      if (row / 2 * 2 == channel_of_lane()) {
        to[i * channels + row] = row % 2 == 0 ? sums[i].x : sums[i].y;
      }
    }
  }
};

// In float32, where the tensor cores would round.
template <int kStride, bool kGate, int kPitch>
struct Gather<float, kStride, kGate, kPitch> {
  using R = Reach<kStride, kGate>;
  float2 weights[kTapCount];
  float2 sums[kTapCount];

  __device__ void load(const float* taps) {
#pragma unroll
    for (int i = 0; i < kTapCount; ++i) {
      weights[i] = pair_at(taps + i * kSlice + channel_of_lane());
    }
  }

  __device__ void gather(const GatherFrom<float>& from, const uint2* list, float2 (&back)[2][4]) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const QuadAt at = QuadAt::of(list, q * (kQuads / 2) + quad_of_lane());
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const float2 entered = pair_at(from.x + (at.x + p / 2 * from.x_columns + p % 2) * kPitch + channel_of_lane());
        back[q][p] = {0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < R::taps_of_pixel(p); ++k) {
          const int output = R::output_of_pixel(p, k);
          const float2 g =
              pair_at(from.grad + (at.grad + output / R::kOutputs * from.grad_columns + output % R::kOutputs) * kPitch +
                      channel_of_lane());
          add_product(back[q][p], g, weights[R::tap_of_pixel(p, k)]);
          add_product(sums[R::tap_of_pixel(p, k)], g, entered);
        }
      }
    }
  }

  __device__ void leave(float* to, int64_t channels) const {
#pragma unroll
    for (int i = 0; i < kTapCount; ++i) {
      const float2 sum = sum_of_quads(sums[i]);
      if (quad_of_lane() == 0) {
        store_pair(to + i * channels + channel_of_lane(), sum);
      }
    }
  }
};

}  // namespace mf::cuda
