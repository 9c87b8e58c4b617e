// The two products of align_conv's backward with the gradient of the depthwise convolution's result:
// the gradient of what entered, and that of the nine weights.
//
// A warp keeps to eight channels. It takes 16 quads of 2 x 2 input pixels at a time; a lane has two
// channels of two of them, lane / 4 and lane / 4 + 8, as the tensor cores hand out a product of
// m16n8k16. In 16 bits both products run there, two taps an instruction, or one by half of it:
//   gradient of what entered: [quads, (tap, channel)] x [(tap, channel), channel], the right one of
//     diagonal matrices that hold the weights,
//   gradient of the weights: [(tap, channel), quads] x [quads, channel], of which the diagonal counts.
// A NaN or infinity in the gradient therefore spreads to eight channels of its pixel. Sums are in float32.
#pragma once

#include <type_traits>
#include <utility>

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
  // Which tap leads from row b to output row `a`; -1: none.
  MF_HD static constexpr int leads(int b, int a) {
    return a >= output(b, 0) && a <= last_output(b) ? a - output(b, 0) : -1;
  }

  // The same of pixel p of a quad, in whose row the columns come first.
  MF_HD static constexpr int taps_of_pixel(int p) { return taps(p / 2) * taps(p % 2); }
  MF_HD static constexpr int tap_of_pixel(int p, int k) {
    return tap(p / 2, k / taps(p % 2)) * 3 + tap(p % 2, k % taps(p % 2));
  }
  MF_HD static constexpr int output_of_pixel(int p, int k) {
    return output(p / 2, k / taps(p % 2)) * kOutputs + output(p % 2, k % taps(p % 2));
  }
};

// Calls work(std::integral_constant<int, i>()) for i in [0, kCount).
template <int... kIs, typename Work>
__device__ void each_of(std::integer_sequence<int, kIs...> /*constants*/, const Work& work) {
  (work(std::integral_constant<int, kIs>()), ...);
}
template <int kCount, typename Work>
__device__ void each_constant(const Work& work) {
  each_of(std::make_integer_sequence<int, kCount>(), work);
}

// Where a quad's first pixels lie, in units of 16 bytes from the beginning of a block's tile in shared
// memory, and what is true of the quad.
struct QuadAt {
  int x, grad, gate;
  unsigned flags;

  static constexpr unsigned kOwn = 0;     // from this bit on, for each pixel: it is the tile's, of an image that counts
  static constexpr unsigned kInside = 4;  // ... it is of the map, of an image that counts
  static constexpr unsigned kRowEdge = 8;  // one of its rows (with the next bit: columns) is not of the map
  static constexpr unsigned kExists = 10;  // else it only fills up

  // Elements in a unit.
  template <typename T>
  static constexpr int kUnit = 16 / sizeof(T);

  __device__ bool is(unsigned bit) const { return (flags >> bit & 1u) != 0; }
  // x, or zeros where it isn't.
  template <typename T>
  __device__ Vec<T, 2> only_if(unsigned bit, Vec<T, 2> x) const {
#pragma unroll
    for (uint32_t& word : x.word) {
      word = word_if(flags & 1u << bit, word);
    }
    return x;
  }
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
__device__ inline int channel_of_lane(unsigned thread = threadIdx.x) {  // of the warp's eight
  return static_cast<int>(thread % 4 * 2);
}

// Adds up what the lanes of two channels hold.
__device__ inline float2 sum_of_quads(float2 x) {
#pragma unroll
  for (int bits = 4; bits < kLanes; bits *= 2) {
    x.x += __shfl_xor_sync(0xffffffffu, x.x, bits);
    x.y += __shfl_xor_sync(0xffffffffu, x.y, bits);
  }
  return x;
}

// What a lane reads of a block's tile: the quads listed from one on, in a place beside them.
template <typename T>
struct LaneAt {
  const uint2* list;
  T* tile;  // from which the list counts

  // tile: at the warp's first channel
  __device__ static LaneAt of(const uint2* list, T* tile, int quad, int beside) {
    return {whole_shared(list + quad), whole_shared(tile + beside)};
  }
  // Of the lane's two quads, and the first of its two channels.
  __device__ static LaneAt own(const uint2* list, T* tile) { return of(list, tile, quad_of_lane(), channel_of_lane()); }
};

template <typename T, int kStride, bool kGate, int kPitch>
struct Gather {
  using R = Reach<kStride, kGate>;
  static constexpr int kSide = R::kOutputs;
  static constexpr int kUnit = QuadAt::kUnit<T>;
  uint32_t weights[kTapCount];  // of each tap a diagonal matrix
  float2 sums[kTapCount + 1];   // of each tap the product's rows, at `place`; one is of no tap
  // Two pixels side by side of 16 quads, read so that they are an operand as they stand: the first pixel of
  // all quads, then the second; or both pixels of quads 0 to 7, then of the others.
  LaneAt<T> by_pixel, by_quad;

  // Register of a tap's sum. An instruction adds to one register and to the next: to those of the first
  // two taps of a row (of both, if the row has two), or of two taps of the remaining column.
  MF_HD static constexpr bool is_single(int column) { return column == (kStride == 1 ? 0 : 1); }
  MF_HD static constexpr int place(int row, int column) {
    if (!is_single(column)) {
      return 2 * row + (column == 2 ? 0 : 1);
    }
    return row == (kStride == 1 ? 0 : 1) ? 8 + kSingle : row == 2 ? 6 : 7;
  }
  // Whether the last tap's output comes second in its pair of outputs.
  static constexpr int kSingle = kStride == 2 && kGate ? 1 : 0;

  // taps: [kTapCount][kSlice]; tile: both at the warp's first channel
  __device__ void load(const T* taps, const uint2* list, T* tile) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    by_pixel = LaneAt<T>::of(list, tile, lane % kQuads, lane / kQuads * kPitch);
    by_quad = LaneAt<T>::of(list, tile, lane / 16 * 8 + lane % 8, lane / 8 % 2 * kPitch);
    const int column = quad_of_lane();  // of the matrix, whose two rows are those of channel_of_lane
#pragma unroll
    for (int i = 0; i < kTapCount; ++i) {
      const float weight = to_float(taps[i * kSlice + column]);
      weights[i] =
          word_of<T>({column == channel_of_lane() ? weight : 0.0f, column == channel_of_lane() + 1 ? weight : 0.0f});
    }
  }

  // Of the quads listed from `unit` on. back: [quad of the lane][pixel]
  __device__ void gather(int unit, int x_columns, int grad_columns, float2 (&back)[2][4]) {
    const QuadAt at = QuadAt::of(by_pixel.list, unit);
    uint32_t entered[4][2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t read[4];
      load_transposed(read, by_pixel.tile + at.x * kUnit + row * x_columns * kPitch);
      entered[2 * row][0] = read[0];
      entered[2 * row][1] = read[1];
      entered[2 * row + 1][0] = read[2];
      entered[2 * row + 1][1] = read[3];
    }
    add_to_sums(by_quad.tile + QuadAt::of(by_quad.list, unit).grad * kUnit, grad_columns, entered);
    __syncwarp();  // so that the compiler does not hold both products' operands in registers at once
    float d[4][4] = {};
    multiply_back(by_pixel.tile + at.grad * kUnit, grad_columns, d);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      back[0][p] = {d[p][0], d[p][1]};
      back[1][p] = {d[p][2], d[p][3]};
    }
  }

  __device__ void add_to_sums(const T* grad, int columns, const uint32_t (&entered)[4][2]) {
    uint32_t singles[kSide][4];  // of each row of outputs the pair in which are those of the column left over
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
      const T* row = grad + r * columns * kPitch;
      load_transposed(singles[r], row + (kSide - 2) * kPitch);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (R::taps(b) > 1) {
          uint32_t pair[4] = {singles[r][0], singles[r][1], singles[r][2], singles[r][3]};
          if (kStride == 1) {
            load_transposed(pair, row + b * kPitch);
          }
#pragma unroll
          for (int a = 0; a < 2; ++a) {
            if (R::leads(a, r) >= 0) {
              add_to_sums(2 * R::tap(a, R::leads(a, r)), pair, entered[2 * a + b]);
            }
          }
        }
      }
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int a = p / 2;
        const int k = R::leads(a, r);
        const int column = R::taps(p % 2) == 2 ? -1 : R::last_output(p % 2) % 2;  // of the pair
        const uint32_t (&now)[4] = singles[r];
        if (column < 0 || k < 0) {
          continue;
        }
        if (k == 1) {
          const uint32_t (&before)[4] = singles[r == 0 ? 0 : r - 1];
          add_to_sums(6, {before[column], now[column], before[column + 2], now[column + 2]}, entered[p]);
        } else if (k + 1 == R::taps(a)) {
          const int first = column ^ kSingle;
          add_to_sums(8, {now[first], now[first ^ 1], now[first + 2], now[(first ^ 1) + 2]}, entered[p]);
        }
      }
    }
  }

  // Two sums from `place` on.
  __device__ void add_to_sums(int place, const uint32_t (&outputs)[4], const uint32_t (&entered)[2]) {
    float d[4] = {sums[place].x, sums[place].y, sums[place + 1].x, sums[place + 1].y};
    multiply_tile(d, outputs, entered, T());
    sums[place] = {d[0], d[1]};
    sums[place + 1] = {d[2], d[3]};
  }

  __device__ void multiply_back(const T* grad, int columns, float (&d)[4][4]) const {
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
      uint32_t outputs[kSide / 2][4];
#pragma unroll
      for (int pair = 0; pair < kSide / 2; ++pair) {
        load_rows(outputs[pair], grad + (r * columns + 2 * pair) * kPitch);
      }
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        if (R::leads(p / 2, r) < 0) {
          continue;
        }
        const uint32_t* row = weights + 3 * R::tap(p / 2, R::leads(p / 2, r));
#pragma unroll
        for (int k = 0; k < R::taps(p % 2); ++k) {
          const int output = R::output(p % 2, k);
          const uint32_t (&pair)[4] = outputs[output / 2];
          // The first two taps together where they lead to a pair; further pairs of the same weights would
          // take registers of their own.
          const bool are_two = R::taps(p % 2) > 1 && R::output(p % 2, 0) % 2 == 0;
          if (k == 0 && are_two) {
            multiply_tile(d[p], pair, {row[R::tap(p % 2, 0)], row[R::tap(p % 2, 1)]}, T());
          } else if (k != 1 || !are_two) {
            multiply_half_tile(d[p], {pair[output % 2 * 2], pair[output % 2 * 2 + 1]}, row[R::tap(p % 2, k)], T());
          }
        }
      }
    }
  }

  // The nine sums of the warp's channels, to [kTapCount][channels].
  __device__ void leave(float* to, int64_t channels) const {
    const int row = quad_of_lane();
#pragma unroll
    for (int i = 0; i < kTapCount; ++i) {
      if (row / 2 * 2 == channel_of_lane()) {
        const float2 sum = sums[place(i / 3, i % 3)];
        to[i * channels + row] = row % 2 == 0 ? sum.x : sum.y;
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
  LaneAt<float> own;

  __device__ void load(const float* taps, const uint2* list, float* tile) {
    own = LaneAt<float>::own(list, tile);
#pragma unroll
    for (int i = 0; i < kTapCount; ++i) {
      weights[i] = pair_at(taps + i * kSlice + channel_of_lane());
    }
  }

  __device__ void gather(int unit, int x_columns, int grad_columns, float2 (&back)[2][4]) {
    // Constants as types: of loops with `#pragma unroll` nvcc for sm_100 keeps the sums in local memory.
    each_constant<2>([&](auto q) {
      const QuadAt at = QuadAt::of(own.list, unit + q * (kQuads / 2));
      const float* x = own.tile + at.x * QuadAt::kUnit<float>;
      const float* grad = own.tile + at.grad * QuadAt::kUnit<float>;
      each_constant<4>([&](auto p) {
        const float2 entered = pair_at(x + (p / 2 * x_columns + p % 2) * kPitch);
        back[q][p] = {0.0f, 0.0f};
        each_constant<R::taps_of_pixel(p)>([&](auto k) {
          constexpr int kOutput = R::output_of_pixel(p, k);
          constexpr int kTap = R::tap_of_pixel(p, k);
          const float2 g = pair_at(grad + (kOutput / R::kOutputs * grad_columns + kOutput % R::kOutputs) * kPitch);
          add_product(back[q][p], g, weights[kTap]);
          add_product(sums[kTap], g, entered);
        });
      });
    });
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
