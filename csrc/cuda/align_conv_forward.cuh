// The fused forward of align_conv: y = pointwise(m), m = depthwise(x'), and the moments of y, for up to
// 128 channels in and 256 out, in 16 bits.
//
// A block of eight warps walks over tiles of 64 output pixels. In shared memory it keeps the pointwise
// weights [out_channels][channels], in the order in which lanes take columns. For each tile:
//   1. for every slice of 64 channels: x' with its halo is loaded (align_conv_load.cuh), and its
//      convolution, rounded to the maps' type, becomes a part of the operand [64 pixels][channels]
//      (align_conv_depthwise.cuh); it is also written to `map` if the backward will want it;
//   2. the operand times the transposed weights, on the tensor cores (multiply_part);
//   3. epilogue: each lane rounds its fragment, stores it to y and adds it to its moments.
// In the end a block writes its moments, which a second launch merges (align_conv_moments.cuh).
#pragma once

#include "cuda/align_conv_depthwise.cuh"
#include "cuda/align_conv_moments.cuh"

namespace mf::cuda {

// Shared memory of a block of the fused kernel, in bytes from its beginning; every part is aligned
// to 16.
struct FusedMemory {
  int stride;      // elements from one row of an operand to the next
  size_t operand;  // [kTilePixels][stride]: the depthwise convolution's result
  size_t staged;   // x'; in the end a Moments of each thread
  size_t taps;     // [kSlice][kTapCount]: depthwise weights
  size_t offsets;  // int [kTilePixels]: of a row in y, from the tile's first image on; -1: nowhere
  size_t bytes;    // of all. The pointwise weights [out_channels up to the next 64][stride] come first

  MF_HD static FusedMemory of(int64_t channels, int64_t out_channels, size_t staged_bytes, int element, int threads) {
    FusedMemory memory{};
    memory.stride = static_cast<int>(channels) + kPadding;
    const size_t row = static_cast<size_t>(memory.stride) * element;
    const size_t moments = threads * sizeof(Moments);
    memory.operand = static_cast<size_t>(round_up(out_channels, kSlice)) * row;
    memory.staged = memory.operand + kTilePixels * row;
    memory.taps = memory.staged + (staged_bytes > moments ? staged_bytes : moments);
    memory.offsets = memory.taps + size_t{kSlice} * kTapCount * element;
    memory.bytes = memory.offsets + kTilePixels * sizeof(int);
    return memory;
  }
};

// Which part of a product [kTilePixels][64 kChunks] a warp takes, so that eight warps take all of it.
// A lane gets, of each 16 rows, its two, in kLaneColumns neighbouring columns: load_pointwise has put
// the weights in the order for it.
template <int kChunks>
struct WarpPart {
  static constexpr int kColumnTiles = kChunks == 1 ? 2 : 4;  // of 8 columns
  static constexpr int kRowTiles = kChunks == 4 ? 4 : 2;     // of 16 rows
  static constexpr int kLaneColumns = 2 * kColumnTiles;
  static constexpr int kColumnWarps = 8 * kChunks / kColumnTiles;  // beside each other
  static_assert(kColumnTiles * kRowTiles * 8 == 8 * kChunks * 4, "eight warps take all");
  int first_row, first_column;

  __device__ static WarpPart of_warp() {
    const auto warp = static_cast<int>((kIsBlackwell ? reload_thread_index() : threadIdx.x) / kLanes);
    return {warp / kColumnWarps * 16 * kRowTiles, warp % kColumnWarps * 8 * kColumnTiles};
  }
  __device__ int row(int tile, int half) const {
    return first_row + tile * 16 + half * 8 + static_cast<int>(threadIdx.x) % kLanes / 4;
  }
  __device__ int column() const { return first_column + static_cast<int>(threadIdx.x) % 4 * kLaneColumns; }
  // The row of shared memory that holds row `row` of the weights.
  __device__ static int permuted(int row) {
    const int of_lane = row % kLaneColumns;
    return row / (4 * kLaneColumns) * (4 * kLaneColumns) + of_lane / 2 * 8 + row / kLaneColumns % 4 * 2 + of_lane % 2;
  }
};

// Starts to copy the pointwise weights, with zeros up to the next 64 rows: wait_for_copies before
// the barrier before their use.
template <typename T, int kChunks, int kThreads>
__device__ void load_pointwise(const AlignConvForward& params, T* weights, int stride) {
  const auto channels = static_cast<int>(params.input.channels);
  const auto out_channels = static_cast<int>(params.out_channels);
  const int vectors = channels / 8;
  const auto by_vectors = SmallDivisor::of(vectors);
#pragma unroll 1
  for (int i = threadIdx.x; i < static_cast<int>(round_up(out_channels, kSlice)) * vectors; i += kThreads) {
    const int row = by_vectors.quotient(i);
    copy_16_bytes_or_zeros(weights + WarpPart<kChunks>::permuted(row) * stride + (i - row * vectors) * 8,
                           static_cast<const T*>(params.pointwise) + (row < out_channels ? i * 8 : 0),
                           row < out_channels);
  }
}

// A warp's part of operand [kTilePixels][depth] times the transposed weights.
template <typename T, typename Part>
__device__ void multiply_part(const Part& part, const T* operand, const T* weights, int stride, int depth,
                              float (&d)[Part::kRowTiles][Part::kColumnTiles][4]) {
  const int lane = threadIdx.x % kLanes;
  const T* rows = operand + (part.first_row + lane % 16) * stride + lane / 16 * 8;
  const T* columns = weights + (part.first_column + lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8;
#pragma unroll 1
  for (int k = 0; k < depth; k += 16) {
    uint32_t b[Part::kColumnTiles / 2][4];
#pragma unroll
    for (int n = 0; n < Part::kColumnTiles / 2; ++n) {
      load_rows(b[n], columns + n * 16 * stride + k);
    }
#pragma unroll
    for (int tile = 0; tile < Part::kRowTiles; ++tile) {
      uint32_t a[4];
      load_rows(a, rows + tile * 16 * stride + k);
#pragma unroll
      for (int n = 0; n < Part::kColumnTiles; ++n) {
        mma_16x8x16(d[tile][n], a, {b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]});
      }
    }
  }
}

// Stores a warp's part of y, rounded, at the rows' offsets from `y` on, and adds those that lie before
// `counted` to the moments.
template <typename T, typename Part>
__device__ void store_part(const Part& part, const float (&d)[Part::kRowTiles][Part::kColumnTiles][4],
                           const int* offsets, T* y, int counted, LaneMoments<T, Part::kLaneColumns>& moments) {
  constexpr int kRows = 2 * Part::kRowTiles;
  Vec<T, Part::kLaneColumns> value[kRows];
  int offset[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    offset[i] = offsets[part.row(i / 2, i % 2)];
#pragma unroll
    for (int n = 0; n < Part::kColumnTiles; ++n) {
      value[i].set_pair(n, {d[i / 2][n][i % 2 * 2], d[i / 2][n][i % 2 * 2 + 1]});
    }
    if (offset[i] >= 0) {
      value[i].store(y + offset[i]);
    }
  }
  if (moments.count == 0.0f) {
#pragma unroll
    for (int i = kRows - 1; i >= 0; --i) {
      if (in_range(offset[i], counted)) {
        moments.origin = value[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (in_range(offset[i], counted)) {
      moments.add(value[i]);
    }
  }
}

template <typename T, int kStride, int kChunks, int kThreads>
__device__ void align_conv_forward_block(const AlignConvForward& params, const ForwardTiles& tiles,
                                         const FusedMemory& memory_map, unsigned char* memory) {
  static_assert(kThreads == 8 * kLanes, "WarpPart is for eight warps");
  wait_for_previous();
  let_next_begin();
  using Part = WarpPart<kChunks>;
  const AlignConvInput& in = params.input;
  const auto images = static_cast<int>(in.images);
  const int image_pixels = tiles.out_height * tiles.out_width;
  const int channels = tiles.channels;
  const auto out_channels = static_cast<int>(params.out_channels);
  const auto valid = static_cast<int>(in.valid_images());
  const int stride = memory_map.stride;
  T* weights = reinterpret_cast<T*>(memory);
  T* operand = reinterpret_cast<T*>(memory + memory_map.operand);
  T* staged = reinterpret_cast<T*>(memory + memory_map.staged);
  T* taps = reinterpret_cast<T*>(memory + memory_map.taps);
  int* offsets = reinterpret_cast<int*>(memory + memory_map.offsets);

  load_pointwise<T, kChunks, kThreads>(params, weights, stride);

  LaneMoments<T, Part::kLaneColumns> moments = {};
  for (int tile = blockIdx.x; tile < tiles.total; tile += static_cast<int>(gridDim.x)) {
    const TileAt at = TileAt::of(tiles, tile);
    for (int first_channel = 0; first_channel < channels; first_channel += kSlice) {
      if (channels > kSlice || tile == static_cast<int>(blockIdx.x)) {
        load_taps<T, kThreads>(in, first_channel, taps);
      }
      load_input_tile<T, kStride, kThreads>(in, valid, tiles, at, first_channel, staged);
      __syncthreads();
      if (first_channel == 0) {  // no thread is at the previous tile any more
#pragma unroll 1
        for (int row = threadIdx.x; row < kTilePixels; row += kThreads) {
          const int pixel = tiles.pixel_of_output(at, images, row);
          offsets[row] = pixel < 0 ? -1 : pixel * out_channels;
        }
      }
      const int channel = first_channel + static_cast<int>(threadIdx.x) % kLanes * 2;
      if (channel < channels) {
        T* map = static_cast<T*>(params.map);
        if (map != nullptr) {
          map += static_cast<int64_t>(at.image) * (image_pixels * channels) + channel;
        }
        convolve_tile<T, kStride, kThreads, true>(tiles, at, images, staged, taps, operand + channel, stride, map);
      }
      __syncthreads();
    }
    const Part part = Part::of_warp();
    if (part.first_column < out_channels) {
      float d[Part::kRowTiles][Part::kColumnTiles][4] = {};
      multiply_part(part, operand, weights, stride, channels, d);
      if (part.column() < out_channels) {
        const int y_size = image_pixels * out_channels;
        T* y = opaque_global(static_cast<T*>(params.y) + static_cast<int64_t>(at.image) * y_size + part.column());
        const int counted = valid > at.image ? std::min(valid - at.image, tiles.images) * y_size : 0;
        store_part(part, d, offsets, y, counted, moments);
      }
    }
  }
  // Orders no access to memory: tells the compiler that the lanes have converged, else it compiles each
  // shuffle a second time, for lanes that have not.
  __syncwarp();
  write_block_moments<T, Part, kThreads>(params, Part::of_warp(), moments, reinterpret_cast<Moments*>(staged));
}

}  // namespace mf::cuda
