// Kernel body of the views; tests/kernels compiles it for the CPU too. One block makes one view, since
// contrast needs the mean of it all.
//
// A thread makes whole pixels. For a jittered view every pixel is sampled twice, once for the mean
// and once for the result: the image lies in shared memory, so that this costs less than keeping
// any number of pixels in registers would.
#pragma once

#include <cmath>

#include "api/augment.h"

namespace mf::cuda {

constexpr int kAugmentThreads = 256;
constexpr int kAugmentWarps = kAugmentThreads / 32;
constexpr int64_t kStagedImageBytes =
    16384;  // images up to this size are copied to shared memory: 64 x 64 x 3 and a little more

struct AugmentShared {
  float partial[3][kAugmentWarps];
};

// Bytes of shared memory: the struct, positions of columns and rows, the image.
inline int64_t augment_shared_bytes(int32_t height, int32_t width) {
  const int64_t image = int64_t{3} * height * width;
  const int64_t tables = static_cast<int64_t>(sizeof(SamplePosition)) * (height + width);
  return static_cast<int64_t>(sizeof(AugmentShared)) + (tables + 15) / 16 * 16 +
         (image <= kStagedImageBytes ? image : 0);
}

struct Pixel {
  float red, green, blue;
};

template <typename T>
struct StoredPixel {
  T channel[3];
};

template <typename T>
__device__ void store_pixel(StoredPixel<T>* output, int32_t index, const Pixel& pixel) {
  StoredPixel<T> stored;
  round_to(pixel.red, stored.channel[0]);
  round_to(pixel.green, stored.channel[1]);
  round_to(pixel.blue, stored.channel[2]);
  output[index] = stored;
}

__device__ inline Pixel load_pixel(const uint8_t* image, int32_t index) {
  const uint8_t* pixel = image + 3 * index;
  return {static_cast<float>(pixel[0]), static_cast<float>(pixel[1]), static_cast<float>(pixel[2])};
}

__device__ inline Pixel normalised(const Pixel& pixel, const AugmentParams& params) {
  return {(pixel.red - params.mean[0]) / params.std[0], (pixel.green - params.mean[1]) / params.std[1],
          (pixel.blue - params.mean[2]) / params.std[2]};
}

// Neighbouring threads copy neighbouring words; rows start anywhere, so that words are 16 bytes
// only where the address allows it.
__device__ inline void stage_image(const uint8_t* image, uint8_t* staged, int32_t bytes) {
  if (reinterpret_cast<uintptr_t>(image) % 16 == 0 && bytes % 16 == 0) {
    for (int32_t i = threadIdx.x; i < bytes / 16; i += static_cast<int32_t>(blockDim.x)) {
      reinterpret_cast<uint4*>(staged)[i] = reinterpret_cast<const uint4*>(image)[i];
    }
  } else {
    for (int32_t i = threadIdx.x; i < bytes; i += static_cast<int32_t>(blockDim.x)) {
      staged[i] = image[i];
    }
  }
}

// The mean of each channel over the block's pixels; `of(index)` gives a pixel. Sums have a fixed
// order. Holds one barrier.
template <typename Of>
__device__ Pixel block_mean(AugmentShared& shared, int32_t pixels, const Of& of) {
  float sum[3] = {0.0f, 0.0f, 0.0f};
  for (int32_t i = threadIdx.x; i < pixels; i += static_cast<int32_t>(blockDim.x)) {
    const Pixel pixel = of(i);
    sum[0] += pixel.red;
    sum[1] += pixel.green;
    sum[2] += pixel.blue;
  }
  for (int c = 0; c < 3; ++c) {
    for (int distance = 16; distance > 0; distance /= 2) {
      sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], distance);
    }
    if (threadIdx.x % 32 == 0) {
      shared.partial[c][threadIdx.x / 32] = sum[c];
    }
  }
  __syncthreads();
  float mean[3];
  for (int c = 0; c < 3; ++c) {
    float total = 0.0f;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) {
      total += shared.partial[c][warp];
    }
    mean[c] = total / static_cast<float>(pixels);
  }
  return {mean[0], mean[1], mean[2]};
}

template <typename T>
__device__ void fill_view(StoredPixel<T>* output, int32_t pixels, float value) {
  StoredPixel<T> stored;
  for (int c = 0; c < 3; ++c) {
    round_to(value, stored.channel[c]);
  }
  for (int32_t i = threadIdx.x; i < pixels; i += static_cast<int32_t>(blockDim.x)) {
    output[i] = stored;
  }
}

// `memory`: augment_shared_bytes() bytes, aligned to 16. Full warps, up to kAugmentThreads threads.
template <typename T>
__device__ void augment_block(const AugmentParams& params, unsigned char* memory) {
  const int64_t view = blockIdx.x;
  const int32_t height = params.height;
  const int32_t width = params.width;
  const int32_t pixels = height * width;
  auto* output = static_cast<StoredPixel<T>*>(params.output) + view * pixels;
  const ViewOrigin origin = find_view(params, view);
  if (origin.image == nullptr) {
    fill_view(output, pixels, origin.invalid ? NAN : 0.0f);
    return;
  }

  auto& shared = *reinterpret_cast<AugmentShared*>(memory);
  auto* columns = reinterpret_cast<SamplePosition*>(memory + sizeof(AugmentShared));
  SamplePosition* rows = columns + width;
  const uint8_t* image = origin.image;
  if (int64_t{3} * pixels <= kStagedImageBytes) {
    uint8_t* staged = memory + (sizeof(AugmentShared) + sizeof(SamplePosition) * (height + width) + 15) / 16 * 16;
    stage_image(image, staged, 3 * pixels);
    image = staged;
  }
  const bool augmented = origin.draw >= 0;
  const int32_t* code = params.codes + static_cast<int64_t>(augmented ? origin.draw : 0) * AugmentParameters::kCodes;
  if (augmented) {
    for (int32_t i = threadIdx.x; i < width + height; i += static_cast<int32_t>(blockDim.x)) {
      columns[i] = i < width ? sample_position(i, width, code[1], code[3], code[0] != 0)
                             : sample_position(i - width, height, code[2], code[4], false);
    }
  }
  __syncthreads();

  const int32_t orientation = origin.orientation;
  const auto oriented = [&](int32_t y, int32_t x) {
    return load_pixel(image, oriented_pixel(orientation, y, x, height, width));
  };
  if (!augmented) {
    for (int32_t i = threadIdx.x; i < pixels; i += static_cast<int32_t>(blockDim.x)) {
      const Pixel pixel = oriented(i / width, i % width);
      store_pixel(output, i, normalised({pixel.red / 255.0f, pixel.green / 255.0f, pixel.blue / 255.0f}, params));
    }
    return;
  }

  const float* factors = params.factors + static_cast<int64_t>(origin.draw) * AugmentParameters::kFactors;
  const bool gray = (code[5] & AugmentParameters::kGray) != 0;
  const bool jittered = (code[5] & AugmentParameters::kJitter) != 0;
  const bool contrast_first = (code[5] & AugmentParameters::kContrastFirst) != 0;
  const float hue = hue_in_turns(factors[0]);
  const float saturation = factors[1];
  const float value = factors[2];
  const float contrast = factors[3];

  // Cropped, and normalised where the jitter acts on normalised images.
  const auto sampled = [&](int32_t index) {
    const SamplePosition row = rows[index / width];
    const SamplePosition column = columns[index % width];
    const Pixel a = oriented(row.low, column.low);
    const Pixel b = oriented(row.low, column.high);
    const Pixel c = oriented(row.high, column.low);
    const Pixel d = oriented(row.high, column.high);
    const Pixel unit{
        between(between(a.red, c.red, row.share), between(b.red, d.red, row.share), column.share) / 255.0f,
        between(between(a.green, c.green, row.share), between(b.green, d.green, row.share), column.share) / 255.0f,
        between(between(a.blue, c.blue, row.share), between(b.blue, d.blue, row.share), column.share) / 255.0f};
    return params.jitter_normalised ? normalised(unit, params) : unit;
  };
  const auto before_contrast = [&](int32_t index) {
    Pixel pixel = sampled(index);
    if (!contrast_first) {
      shift_colour(pixel.red, pixel.green, pixel.blue, hue, saturation, value);
    }
    return pixel;
  };
  const Pixel mean = jittered ? block_mean(shared, pixels, before_contrast) : Pixel{0.0f, 0.0f, 0.0f};
  for (int32_t i = threadIdx.x; i < pixels; i += static_cast<int32_t>(blockDim.x)) {
    Pixel pixel;
    if (jittered) {
      pixel = before_contrast(i);
      pixel = {contrasted(pixel.red, mean.red, contrast), contrasted(pixel.green, mean.green, contrast),
               contrasted(pixel.blue, mean.blue, contrast)};
      if (contrast_first) {
        shift_colour(pixel.red, pixel.green, pixel.blue, hue, saturation, value);
      }
    } else {
      pixel = sampled(i);
    }
    if (!params.jitter_normalised) {
      pixel = normalised(pixel, params);
    }
    if (gray) {
      pixel.red = pixel.green = pixel.blue = gray_value(pixel.red, pixel.green, pixel.blue);
    }
    store_pixel(output, i, pixel);
  }
}

}  // namespace mf::cuda
