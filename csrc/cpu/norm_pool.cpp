// The pool of a normalised map on the CPU: images side by side, channels in vectors, pixels in
// order.
#include "api/norm_pool.h"

#include <algorithm>

#include "core/bfloat16.h"

namespace mf::cpu {
namespace {

constexpr int64_t kChannels = 64;          // handled at a time, their sums on the stack
constexpr int64_t kFewElements = 1 << 15;  // below this, starting threads costs more than the work

int64_t elements(const NormPoolInput& in) { return in.images * in.pixels * in.channels; }

template <typename T>
void pool_image(const NormPoolForward& params, int64_t image) {
  const NormPoolInput& in = params.input;
  const bool is_padding = image >= in.valid_images();
  const float share = 1.0f / static_cast<float>(in.pixels);
  for (int64_t first = 0; first < in.channels; first += kChannels) {
    const int64_t channels = std::min(kChannels, in.channels - first);
    float total[kChannels] = {}, sum[kChannels] = {}, count[kChannels] = {};
    for (int64_t pixel = 0; pixel < in.pixels && !is_padding; ++pixel) {
      const T* x = static_cast<const T*>(in.x.data) + (image * in.pixels + pixel) * in.channels + first;
      if (in.state == nullptr) {
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) {
          total[c] += widened(x[c]);
        }
        continue;
      }
      const float* mean = in.state + kMean * in.channels + first;
      const float* scale = in.state + kScale * in.channels + first;
      const float* shift = in.state + kShift * in.channels + first;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) {
        const PooledElement element = pooled_element(widened(x[c]), mean[c], scale[c], shift[c]);
        total[c] += element.value;
        sum[c] += element.deviation;
        count[c] += element.kept;
      }
    }
    const int64_t at = image * in.channels + first;
    T* pooled = static_cast<T*>(params.pooled.data) + at;
    for (int64_t c = 0; c < channels; ++c) {
      round_to(total[c] * share, pooled[c]);
    }
    if (in.state != nullptr && params.counts != nullptr) {
      std::copy_n(count, channels, params.counts + at);
      std::copy_n(sum, channels, params.sums + at);
    }
  }
}

template <typename T>
void map_gradient(const NormPoolBackward& params, int64_t image) {
  const NormPoolInput& in = params.input;
  const bool is_padding = image >= in.valid_images();
  const float share = 1.0f / static_cast<float>(in.pixels);
  for (int64_t first = 0; first < in.channels; first += kChannels) {
    const int64_t channels = std::min(kChannels, in.channels - first);
    T of_kept[kChannels];
    T zero;
    round_to(0.0f, zero);
    for (int64_t c = 0; c < channels; ++c) {
      const float scale = in.state == nullptr ? 1.0f : in.state[kScale * in.channels + first + c];
      const T* grad = static_cast<const T*>(params.grad) + image * in.channels + first;
      round_to(is_padding ? 0.0f : widened(grad[c]) * share * scale, of_kept[c]);
    }
    for (int64_t pixel = 0; pixel < in.pixels; ++pixel) {
      const int64_t at = (image * in.pixels + pixel) * in.channels + first;
      T* dx = static_cast<T*>(params.dx.data) + at;
      if (in.state == nullptr || is_padding) {
        std::copy_n(of_kept, channels, dx);
        continue;
      }
      const T* x = static_cast<const T*>(in.x.data) + at;
      const float* mean = in.state + kMean * in.channels + first;
      const float* scale = in.state + kScale * in.channels + first;
      const float* shift = in.state + kShift * in.channels + first;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) {
        dx[c] = pooled_element(widened(x[c]), mean[c], scale[c], shift[c]).kept != 0.0f ? of_kept[c] : zero;
      }
    }
  }
}

template <typename T>
void state_gradient(const NormPoolBackward& params) {
  const NormPoolInput& in = params.input;
  const float share = 1.0f / static_cast<float>(in.pixels);
  const int64_t valid = in.valid_images();
  for (int64_t first = 0; first < in.channels; first += kChannels) {
    const int64_t channels = std::min(kChannels, in.channels - first);
    float dscale[kChannels] = {}, dshift[kChannels] = {};
    for (int64_t image = 0; image < valid; ++image) {
      const int64_t at = image * in.channels + first;
      for (int64_t c = 0; c < channels; ++c) {
        const float g = widened(static_cast<const T*>(params.grad)[at + c]) * share;
        dscale[c] += g * params.sums[at + c];
        dshift[c] += g * params.counts[at + c];
      }
    }
    for (int64_t c = 0; c < channels; ++c) {
      write_state_gradient(in.state, in.channels, first + c, dshift[c], dscale[c], params.dstate);
    }
  }
}

template <typename T>
void pool(const NormPoolForward& params, int threads) {
  const bool is_large = elements(params.input) > kFewElements;
#pragma omp parallel for num_threads(threads) if (is_large)
  for (int64_t image = 0; image < params.input.images; ++image) {
    pool_image<T>(params, image);
  }
}

template <typename T>
void backward(const NormPoolBackward& params, int threads) {
  if (params.dstate != nullptr) {
    state_gradient<T>(params);
  }
  if (params.dx.data == nullptr) {
    return;
  }
  const bool is_large = elements(params.input) > kFewElements;
#pragma omp parallel for num_threads(threads) if (is_large)
  for (int64_t image = 0; image < params.input.images; ++image) {
    map_gradient<T>(params, image);
  }
}

}  // namespace

void norm_pool(const NormPoolForward& params, int threads) {
  with_type<BFloat16>(params.input.x.type, [&](auto type) { pool<decltype(type)>(params, threads); });
}

void norm_pool_backward(const NormPoolBackward& params, int threads) {
  with_type<BFloat16>(params.input.x.type, [&](auto type) { backward<decltype(type)>(params, threads); });
}

}  // namespace mf::cpu
