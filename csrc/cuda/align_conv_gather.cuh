// The two products of align_conv's backward with dm, the gradient of the depthwise convolution's result:
//   g[pixel, c] = sum over taps of dm[output, c] w[tap, c]        the gradient of x',
//   dw[tap, c] = sum over pixels of dm[output, c] x'[pixel, c]    that of the nine weights,
// where `output` is what `pixel` entered by `tap`.
//
// A warp keeps to eight channels and takes 16 quads of 2 x 2 pixels at a time. A lane has two channels
// of the quads lane / 4 and lane / 4 + 8: its fragment of a product of m16n8k16. In 16 bits both products
// run on the tensor cores, two taps an instruction, or one by half of it:
//   g:  [quads, (tap, channel)] x [(tap, channel), channel], the right operand diagonal matrices of weights,
//   dw: [(tap, channel), quads] x [quads, channel], of whose result the diagonal counts.
// A NaN or infinity in dm therefore spreads to eight channels of its pixel. Sums are in float32.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/align_conv_depthwise.cuh"

namespace mf::cuda {

constexpr int kQuads = 16;        // that a warp takes at a time
constexpr int kWarpChannels = 8;  // that a warp keeps to

// Which taps lead from the rows (or columns) of a quad to the rows of outputs that they entered: tap i
// leads from input row b of a quad to output row a with i = kFirstTap + b - kStride a.
template <int kStride, Prologue kPrologue>
struct TapMap {
  static constexpr int kFirstTap = kStride == 1 || kPrologue == Prologue::kGate ? 2 : 1;
  static constexpr int kOutputs = kStride == 1 ? 4 : 2;

  // Row b has that many taps, here in the order of the outputs.
  MF_HD static constexpr int taps(int b) { return kStride == 1 ? 3 : 2 - (kFirstTap + b) % 2; }
  MF_HD static constexpr int tap(int b, int k) { return kStride == 1 ? 2 - k : taps(b) == 2 ? 2 - 2 * k : 1; }
  MF_HD static constexpr int output(int b, int k) { return (kFirstTap + b - tap(b, k)) / kStride; }
  MF_HD static constexpr int last_output(int b) { return output(b, taps(b) - 1); }
  // Which of row b's taps leads to output row `a`; -1: none.
  MF_HD static constexpr int index_of_output(int b, int a) {
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

// An entry of a tile's list: where a quad's first pixels lie, in units of 16 bytes from the beginning of
// shared memory, and predicates.
struct QuadEntry {
  int x, grad, gate;
  unsigned flags;

  static constexpr unsigned kCounts = 0;   // from this bit on, for each pixel: it is the tile's, of a valid image
  static constexpr unsigned kRowEdge = 4;  // one of its rows (columns) is not of the map
  static constexpr unsigned kColumnEdge = 5;
  static constexpr unsigned kExists = 6;  // else it only fills up the list

  // Elements in a unit.
  template <typename T>
  static constexpr int kUnit = 16 / sizeof(T);

  __device__ bool is(unsigned bit) const { return (flags >> bit & 1u) != 0; }
  template <typename T>
  __device__ Vec<T, 2> select_or_zero(unsigned bit, Vec<T, 2> x) const {
#pragma unroll
    for (uint32_t& word : x.word) {
      word = mf::cuda::select_or_zero(flags & 1u << bit, word);
    }
    return x;
  }
  __device__ uint2 packed() const {
    return {static_cast<unsigned>(x) | static_cast<unsigned>(grad) << 16, static_cast<unsigned>(gate) | flags << 16};
  }
  __device__ static QuadEntry of(const uint2* list, int i) {
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

// The sum over the lanes that have the same two channels.
__device__ inline float2 sum_of_quads(float2 x) {
#pragma unroll
  for (int bits = 4; bits < kLanes; bits *= 2) {
    x.x += __shfl_xor_sync(0xffffffffu, x.x, bits);
    x.y += __shfl_xor_sync(0xffffffffu, x.y, bits);
  }
  return x;
}

// What a lane reads of a tile: the list from one quad on, and the tile from one element on.
template <typename T>
struct LaneView {
  const uint2* list;
  T* tile;

  // tile: at the warp's first channel
  __device__ static LaneView of(const uint2* list, T* tile, int quad, int offset) {
    return {opaque_shared(list + quad), opaque_shared(tile + offset)};
  }
  // Of the lane's two quads, and the first of its two channels.
  __device__ static LaneView own(const uint2* list, T* tile) {
    return of(list, tile, quad_of_lane(), channel_of_lane());
  }
};

// Both products of a warp, on the tensor cores.
template <typename T, int kStride, Prologue kPrologue, int kPitch>
struct Gather {
  using R = TapMap<kStride, kPrologue>;
  static constexpr int kSide = R::kOutputs;
  static constexpr int kUnit = QuadEntry::kUnit<T>;
  uint32_t weights[kTapCount];  // fragments b of the first product: a diagonal matrix for each tap
  float2 sums[kTapCount + 1];   // accumulators of the second, at index_of_sum(row, column); one is of no tap
  // The rows that this lane names to ldmatrix for two pixels side by side of 16 quads: the first pixel of
  // all quads, then the second; or both pixels of quads 0 to 7, then of the others.
  LaneView<T> by_pixel, by_quad;

  // An instruction adds to two neighbouring accumulators: to those of the first two taps of a row (of both,
  // if the row has two), or of two taps of the column that is left over.
  MF_HD static constexpr bool is_single(int column) { return column == (kStride == 1 ? 0 : 1); }
  MF_HD static constexpr int index_of_sum(int row, int column) {
    if (!is_single(column)) {
      return 2 * row + (column == 2 ? 0 : 1);
    }
    return row == (kStride == 1 ? 0 : 1) ? 8 + kSingle : row == 2 ? 6 : 7;
  }
  // Whether the last tap's output comes second in its pair of outputs.
  static constexpr int kSingle = kPrologue == Prologue::kGate ? 1 : 0;

  // taps: [kTapCount][kSlice]; tile: both at the warp's first channel
  __device__ void load(const T* taps, const uint2* list, T* tile) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    by_pixel = LaneView<T>::of(list, tile, lane % kQuads, lane / kQuads * kPitch);
    by_quad = LaneView<T>::of(list, tile, lane / 16 * 8 + lane % 8, lane / 8 % 2 * kPitch);
    const int column = quad_of_lane();  // of the matrix, whose two rows are those of channel_of_lane
#pragma unroll
    for (int i = 0; i < kTapCount; ++i) {
      const float weight = to_float(taps[i * kSlice + column]);
      weights[i] =
          word_of({column == channel_of_lane() ? weight : 0.0f, column == channel_of_lane() + 1 ? weight : 0.0f});
    }
  }

  // Both products for the quads listed from `unit` on. back: [quad of the lane][pixel], the gradient of x'
  __device__ void gather(int unit, int x_columns, int grad_columns, float2 (&back)[2][4]) {
    const QuadEntry at = QuadEntry::of(by_pixel.list, unit);
    uint32_t input[4][2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t read[4];
      load_transposed(read, by_pixel.tile + at.x * kUnit + row * x_columns * kPitch);
      input[2 * row][0] = read[0];
      input[2 * row][1] = read[1];
      input[2 * row + 1][0] = read[2];
      input[2 * row + 1][1] = read[3];
    }
    add_weight_gradient(by_quad.tile + QuadEntry::of(by_quad.list, unit).grad * kUnit, grad_columns, input);
    __syncwarp();  // so that the compiler does not hold both products' operands in registers at once
    float d[4][4] = {};
    input_gradient(by_pixel.tile + at.grad * kUnit, grad_columns, d);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      back[0][p] = {d[p][0], d[p][1]};
      back[1][p] = {d[p][2], d[p][3]};
    }
  }

  // grad: of the outputs that the quads entered. input: fragments b, of each pixel of the quads.
  __device__ void add_weight_gradient(const T* grad, int columns, const uint32_t (&input)[4][2]) {
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
            if (R::index_of_output(a, r) >= 0) {
              add_to_pair(2 * R::tap(a, R::index_of_output(a, r)), pair, input[2 * a + b]);
            }
          }
        }
      }
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int a = p / 2;
        const int k = R::index_of_output(a, r);
        const int column = R::taps(p % 2) == 2 ? -1 : R::last_output(p % 2) % 2;  // of the pair
        const uint32_t (&now)[4] = singles[r];
        if (column < 0 || k < 0) {
          continue;
        }
        if (k == 1) {
          const uint32_t (&before)[4] = singles[r == 0 ? 0 : r - 1];
          add_to_pair(6, {before[column], now[column], before[column + 2], now[column + 2]}, input[p]);
        } else if (k + 1 == R::taps(a)) {
          const int first = column ^ kSingle;
          add_to_pair(8, {now[first], now[first ^ 1], now[first + 2], now[(first ^ 1) + 2]}, input[p]);
        }
      }
    }
  }

  // Two sums from `index` on.
  __device__ void add_to_pair(int index, const uint32_t (&outputs)[4], const uint32_t (&input)[2]) {
    float d[4] = {sums[index].x, sums[index].y, sums[index + 1].x, sums[index + 1].y};
    mma_16x8x16(d, outputs, input);
    sums[index] = {d[0], d[1]};
    sums[index + 1] = {d[2], d[3]};
  }

  // d: of each pixel of the quads the accumulators of its gradient.
  __device__ void input_gradient(const T* grad, int columns, float (&d)[4][4]) const {
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
      uint32_t outputs[kSide / 2][4];
#pragma unroll
      for (int pair = 0; pair < kSide / 2; ++pair) {
        load_rows(outputs[pair], grad + (r * columns + 2 * pair) * kPitch);
      }
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        if (R::index_of_output(p / 2, r) < 0) {
          continue;
        }
        const uint32_t* row = weights + 3 * R::tap(p / 2, R::index_of_output(p / 2, r));
#pragma unroll
        for (int k = 0; k < R::taps(p % 2); ++k) {
          const int output = R::output(p % 2, k);
          const uint32_t (&pair)[4] = outputs[output / 2];
          // The first two taps together where they lead to a pair; further pairs of the same weights would
          // take registers of their own.
          const bool are_two = R::taps(p % 2) > 1 && R::output(p % 2, 0) % 2 == 0;
          if (k == 0 && are_two) {
            mma_16x8x16(d[p], pair, {row[R::tap(p % 2, 0)], row[R::tap(p % 2, 1)]});
          } else if (k != 1 || !are_two) {
            mma_16x8x8(d[p], {pair[output % 2 * 2], pair[output % 2 * 2 + 1]}, row[R::tap(p % 2, k)]);
          }
        }
      }
    }
  }

  // The nine sums of the warp's channels, to [kTapCount][channels].
  __device__ void write_partial(float* to, int64_t channels) const {
    const int row = quad_of_lane();
#pragma unroll
    for (int i = 0; i < kTapCount; ++i) {
      if (row / 2 * 2 == channel_of_lane()) {
        const float2 sum = sums[index_of_sum(i / 3, i % 3)];
        to[i * channels + row] = row % 2 == 0 ? sum.x : sum.y;
      }
    }
  }
};

// In float32, where the tensor cores would round.
template <int kStride, Prologue kPrologue, int kPitch>
struct Gather<float, kStride, kPrologue, kPitch> {
  using R = TapMap<kStride, kPrologue>;
  float2 weights[kTapCount];
  float2 sums[kTapCount];
  LaneView<float> own;

  __device__ void load(const float* taps, const uint2* list, float* tile) {
    own = LaneView<float>::own(list, tile);
#pragma unroll
    for (int i = 0; i < kTapCount; ++i) {
      weights[i] = pair_at(taps + i * kSlice + channel_of_lane());
    }
  }

  __device__ void gather(int unit, int x_columns, int grad_columns, float2 (&back)[2][4]) {
    // Constants as types: of loops with `#pragma unroll` nvcc for sm_100 keeps the sums in local memory.
    each_constant<2>([&](auto q) {
      const QuadEntry at = QuadEntry::of(own.list, unit + q * (kQuads / 2));
      const float* x = own.tile + at.x * QuadEntry::kUnit<float>;
      const float* grad = own.tile + at.grad * QuadEntry::kUnit<float>;
      each_constant<4>([&](auto p) {
        const float2 input = pair_at(x + (p / 2 * x_columns + p % 2) * kPitch);
        back[q][p] = {0.0f, 0.0f};
        each_constant<R::taps_of_pixel(p)>([&](auto k) {
          constexpr int kOutput = R::output_of_pixel(p, k);
          constexpr int kTap = R::tap_of_pixel(p, k);
          const float2 g = pair_at(grad + (kOutput / R::kOutputs * grad_columns + kOutput % R::kOutputs) * kPitch);
          add_product(back[q][p], g, weights[kTap]);
          add_product(sums[kTap], g, input);
        });
      });
    });
  }

  __device__ void write_partial(float* to, int64_t channels) const {
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
