// Records what is launched on the emulated card in place of running it, while the environment
// variable MOSE_FAST_LAUNCHES names a file: build_tools/predict.py computes times from the record.
//
// A line is: the kernel's instance (mangled), the grid's three sides, threads, bytes of shared
// memory, Work, and 1 for a launch that may begin before the kernel before it ends, else 0. The plan is that of the launching code; Work follows from the launch's own
// arguments.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <typeinfo>
#include <vector>

#include "api/align_conv.h"
#include "api/batch_norm_act.h"
#include "api/batch_norm_pool.h"
#include "api/expert_losses.h"
#include "api/norm_pool.h"

namespace shim {

// What a launch has to do.
struct Work {
  double bytes = 0;     // of global memory that must be read or written
  double streamed = 0;  // bytes that pass through the loops that move words of at least 8 bytes; 0: as `bytes`
  int streams = 0;      // how many of these loops run, the first in the code; 0: all
  double computes = 0;  // passes of warps through loops that compute from shared memory
  double products = 0;  // through loops that multiply on the tensor cores
  double parts = 0;     // partial sums that one thread merges
  // Passes of warps through every loop of the machine code, in its order; empty: by the kinds above.
  std::vector<double> passes{};
};

inline double size_of(mf::FloatType type) {
  return mf::with_type<uint16_t, uint16_t>(type, [](auto x) { return static_cast<double>(sizeof(x)); });
}

inline double map_bytes(const mf::MapShape& map, mf::FloatType type) {
  return static_cast<double>(map.pixels() * map.channels) * size_of(type);
}

inline double parts_of(const mf::MapShape& map, dim3 grid, dim3 threads) {
  const double width = static_cast<double>(std::min<int64_t>(mf::kGroup << 3, map.channels));
  return grid.x / std::max(1.0, threads.x / width);
}

template <typename... Rest>
Work work_of(std::string_view, dim3 grid, dim3 threads, const mf::NormStatistics& p, const Rest&...) {
  Work work{p.norms * map_bytes(p.shape, p.type), 0, 1};
  work.parts = parts_of(p.shape, grid, threads);
  return work;
}

template <typename... Rest>
Work work_of(std::string_view, dim3, dim3, const mf::BatchNormActForward& p, const Rest&...) {
  const double map = map_bytes(p.shape, p.type);
  const double mask = p.mask != nullptr ? map / (8.0 * size_of(p.type)) : 0.0;
  return {map * (p.residual != nullptr ? 3 : 2) + mask, 0, 1};
}

template <typename... Rest>
Work work_of(std::string_view kernel, dim3 grid, dim3 threads, const mf::BatchNormActBackward& p, const Rest&...) {
  const double map = map_bytes(p.shape, p.type);
  const double mask = p.mask != nullptr ? map / (8.0 * size_of(p.type)) : 0.0;
  Work work;
  double maps = 1 + p.grad_count + (p.residual != nullptr ? 1 : 0);
  if (kernel.find("sums") != kernel.npos) {
    maps += p.g != nullptr ? 1 : 0;
    work.parts = parts_of(p.shape, grid, threads);
  } else {
    maps += (p.x_grad != nullptr ? 1 : 0) + (p.residual_grad != nullptr ? 1 : 0);
    work.parts = p.prologue != nullptr ? parts_of(p.shape, grid, threads) : 0.0;
  }
  work.bytes = maps * map + mask;
  work.streams = 2;  // the second adds up the gradients, inside the first
  return work;
}

template <typename... Rest>
Work work_of(std::string_view, dim3, dim3, const mf::NormStateBackward& p, const Rest&...) {
  return {40.0 * static_cast<double>(p.shape.channels)};
}

template <typename... Rest>
Work work_of(std::string_view, dim3, dim3, const mf::NormPoolForward& p, const Rest&...) {
  const auto& in = p.input;
  const auto pooled = static_cast<double>(in.images * in.channels);
  const auto size = size_of(in.x.type);
  return {pooled * (static_cast<double>(in.pixels + 1) * size + (p.counts != nullptr ? 8.0 : 0.0)), 0, 1};
}

template <typename... Rest>
Work work_of(std::string_view, dim3, dim3, const mf::NormPoolBackward& p, const Rest&...) {
  const auto& in = p.input;
  const auto pooled = static_cast<double>(in.images * in.channels);
  const double maps = (in.state != nullptr ? 1.0 : 0.0) + (p.dx.data != nullptr ? 1.0 : 0.0);
  const auto size = size_of(in.x.type);
  return {pooled * (maps * static_cast<double>(in.pixels) * size + size + (p.dstate != nullptr ? 8.0 + size : 0.0)), 0,
          1};
}

inline double pooled_elements(const mf::MapShape& map) { return static_cast<double>(map.images * map.channels); }

template <typename... Rest>
Work work_of(std::string_view, dim3, dim3, const mf::BatchNormPoolForward& p, const Rest&...) {
  const double map = map_bytes(p.shape, p.type);
  const double kept = p.mask != nullptr ? 8.0 * pooled_elements(p.shape) + map / (8.0 * size_of(p.type)) : 0.0;
  return {2 * map + kept + size_of(p.type) * pooled_elements(p.shape), 2 * map, 1};
}

template <typename... Rest>
Work work_of(std::string_view kernel, dim3, dim3 threads, const mf::BatchNormPoolBackward& p, const Rest&...) {
  const double pooled = size_of(p.type) * pooled_elements(p.shape);
  if (kernel.find("sums") != kernel.npos) {
    Work work{pooled + 8.0 * pooled_elements(p.shape)};
    work.parts = 3.0 * static_cast<double>(p.shape.images) * mf::kGroup / threads.x;  // a gradient, a sum, a count
    return work;
  }
  const double map = map_bytes(p.shape, p.type);
  const double maps = (p.x_grad != nullptr ? 1.0 : 0.0) + (p.residual_grad != nullptr ? 1.0 : 0.0);
  return {(1.0 + maps) * map + map / (8.0 * size_of(p.type)) + pooled, (1.0 + maps) * map, 1};
}

// Warps' passes over 16 anchors and 16 other rows, 16 numbers of a projection at a time.
inline double contrastive_products(const mf::ExpertLossesInput& in) {
  const auto tiles = static_cast<double>((in.rows + 15) / 16);
  return static_cast<double>(in.experts) * tiles * tiles;
}

inline double expert_bytes(const mf::ExpertLossesInput& in) {
  const auto rows = static_cast<double>(in.rows);
  const auto size = size_of(in.projections.type);
  const auto numbers = static_cast<double>(in.experts * (in.projection_size + in.classes + in.feature_size));
  return rows * size * (numbers + static_cast<double>(in.feature_size));
}

template <typename... Rest>
Work work_of(std::string_view kernel, dim3, dim3, const mf::ExpertLossesForward& p, const Rest&...) {
  Work work;
  const bool terms = kernel.find("terms") != kernel.npos;
  const auto rows = static_cast<double>(p.input.experts * p.input.rows);
  work.bytes = terms ? 16.0 * rows : expert_bytes(p.input);
  work.products = terms ? 0.0 : contrastive_products(p.input);
  return work;
}

template <typename... Rest>
Work work_of(std::string_view, dim3, dim3, const mf::ExpertLossesBackward& p, const Rest&...) {
  Work work;
  work.bytes = 2.0 * expert_bytes(p.input);
  work.products = 2.0 * contrastive_products(p.input);
  return work;
}

inline double slices_of(int64_t channels) { return static_cast<double>((channels + 63) / 64); }

inline double align_bytes(const mf::AlignConvInput& in, int64_t channels, bool out) {
  const int64_t pixels = out ? in.out_height() * in.out_width() : in.height * in.width;
  return static_cast<double>(in.images * pixels * channels) * size_of(in.type);
}

inline double warps_of(dim3 threads) { return threads.x / 32.0; }

// Passes through load_taps' loop, once.
inline double taps_passes() { return 64 * 9 / 32.0; }

// Passes through load_quads' four loops and through convolve_tile's.
template <typename Tiles>
std::vector<double> forward_passes(const mf::AlignConvInput& in, const Tiles& tiles) {
  const double each = tiles.total * slices_of(in.channels);
  const int quads = tiles.images * tiles.quads_down * tiles.quads_across;
  const double loads = each * ((quads * 8 + 31) / 32);
  const bool has_gate = in.gate != nullptr;
  const bool has_prologue = in.prologue != nullptr;
  return {has_prologue ? loads : 0, has_prologue && has_gate ? loads : 0, !has_prologue && has_gate ? loads : 0,
          has_prologue || has_gate ? 0 : loads, each * tiles.images * tiles.strips_down * tiles.strips_across};
}

inline double forward_bytes(const mf::AlignConvInput& in) {
  return align_bytes(in, in.channels, false) * (in.gate != nullptr ? 1.25 : 1.0);
}

template <typename Tiles, typename... Rest>
Work work_of(std::string_view, dim3 grid, dim3 threads, const mf::AlignConvDepthwise& p, const Tiles& tiles,
             const Rest&...) {
  const mf::AlignConvInput& in = p.input;
  Work work{forward_bytes(in) + align_bytes(in, in.channels, true)};
  // load_taps has a loop for each type of weights.
  work.passes = {grid.x * taps_passes(), 0, 0, tiles.total * slices_of(in.channels) * warps_of(threads)};
  for (const double passes : forward_passes(in, tiles)) {
    work.passes.push_back(passes);
  }
  return work;
}

template <typename Tiles, typename... Rest>
Work work_of(std::string_view, dim3 grid, dim3 threads, const mf::AlignConvForward& p, const Tiles& tiles,
             const Rest&...) {
  const mf::AlignConvInput& in = p.input;
  const double slices = slices_of(in.channels);
  const double warps = warps_of(threads);
  Work work{forward_bytes(in) + align_bytes(in, p.out_channels, true)};
  work.bytes += p.map != nullptr ? align_bytes(in, in.channels, true) : 0.0;
  work.products = tiles.total * warps * static_cast<double>(in.channels) / 16.0;
  work.passes = {grid.x * slices_of(p.out_channels) * 64.0 * static_cast<double>(in.channels) / 8.0 / 32.0,
                 tiles.total * warps, tiles.total * slices * warps,
                 (slices > 1 ? tiles.total * slices : grid.x) * taps_passes()};
  const std::vector<double> inner = forward_passes(in, tiles);
  work.passes.insert(work.passes.end(), inner.begin(), inner.end());
  work.passes.insert(work.passes.end() - 1, tiles.total * 64.0 / 32.0);  // the places of a tile's outputs
  work.passes.push_back(work.products);
  return work;
}

inline Work work_of(std::string_view, dim3, dim3 threads, const mf::AlignConvForward& p, int parts) {
  Work work;
  work.bytes = 12.0 * parts * static_cast<double>(p.out_channels);
  work.parts = 32.0 * parts / threads.x;
  return work;
}

template <typename... Rest>
Work work_of(std::string_view, dim3 grid, dim3, const mf::AlignConvGradY& p, const Rest&...) {
  const auto pixels = static_cast<double>(p.images * p.pixels);
  const auto size = size_of(p.type);
  Work work;
  const int maps = 1 + (p.grad != nullptr ? 1 : 0) + (p.total != nullptr ? 1 : 0);  // with the channels of y
  const int in_maps = p.into.data != nullptr ? 2 : 1;
  work.bytes = pixels * size * static_cast<double>(p.channels * maps + p.in_channels * in_maps);
  work.bytes += p.into.data != nullptr ? 4.0 * grid.x * static_cast<double>(p.channels * p.in_channels) : 0.0;
  work.products =
      p.pointwise == nullptr ? 0.0 : pixels / 8.0 * slices_of(p.in_channels) * static_cast<double>(p.channels) / 16.0;
  return work;
}

template <typename Tiles, typename Regions, typename... Rest>
Work work_of(std::string_view, dim3 grid, dim3 threads, const mf::AlignConvBackward& p, const Tiles& tiles,
             const Regions& regions, const Rest&...) {
  const mf::AlignConvInput& in = p.input;
  const double x = align_bytes(in, in.channels, false);
  const double warps = warps_of(threads);
  const double each = tiles.total * slices_of(in.channels);
  // Passes of a warp move 8 pixels of 64 channels; the warps of a channel that a map lacks have nothing to do.
  const auto moves = [&](const auto& region) { return each * ((region.pixels + 7) / 8); };
  Work work;
  work.bytes = x * (p.x != nullptr ? 2 : 1) * (in.gate != nullptr ? 1.25 : 1.0) + align_bytes(in, in.channels, true);
  work.products = double{1} * tiles.total * (regions.listed / 16) * static_cast<double>(in.channels) / 8.0;
  work.passes = {grid.x * taps_passes(), grid.x * warps};  // and zeros behind x
  if (in.prologue != nullptr) {
    work.passes.push_back(grid.x * 4.0 * 64.0 / 32.0);  // the prologue's state
  }
  work.passes.insert(work.passes.end(), {each * warps, moves(regions.x), moves(regions.grad)});
  if (in.gate != nullptr) {
    work.passes.push_back(moves(regions.gate));
  }
  work.passes.insert(work.passes.end(), {each * ((regions.listed + 31) / 32), work.products, moves(regions.own)});
  if (in.gate != nullptr) {
    work.passes.push_back(moves(regions.own_gate));
  }
  return work;
}

inline Work work_of(std::string_view, dim3, dim3 threads, const mf::AlignConvGradY& p, int parts) {
  Work work;
  work.bytes = 4.0 * parts * static_cast<double>(p.channels * p.in_channels);
  work.parts = 32.0 * parts / threads.x;
  return work;
}

inline Work work_of(std::string_view, dim3, dim3 threads, const mf::AlignConvBackward& p, int parts) {
  Work work;
  work.bytes = 44.0 * parts * static_cast<double>(p.input.channels);
  work.parts = 32.0 * parts / threads.x;
  return work;
}

// Adam's weights; no bytes are known of other kernels, whose time is that of a launch.
template <typename Params>
auto adam_bytes(const Params& p, int) -> decltype(static_cast<void>(p.exp_avg), double{}) {
  double bytes = 0.0;
  for (int i = 0; i < p.tensor_count; ++i) {
    const double gradient = size_of(static_cast<mf::FloatType>(p.tensors[i].type));
    const double shadow = p.shadow.data != nullptr ? size_of(p.shadow.type) : 0.0;
    bytes += static_cast<double>(p.tensors[i].count) * (24.0 + gradient + shadow);
  }
  return bytes;
}

template <typename Params>
double adam_bytes(const Params&, long) {
  return 0.0;
}

template <typename Params, typename... Rest>
Work work_of(std::string_view, dim3, dim3, const Params& p, const Rest&...) {
  return {adam_bytes(p, 0), 0, 1};  // a loop for each type of gradient
}

template <auto kernel>
struct Instance;

// Whether the launch was recorded, and must not run.
template <auto kernel, typename... Arguments>
bool recorded(const char* name, bool early, dim3 grid, dim3 threads, size_t shared_bytes,
              const Arguments&... arguments) {
  const char* path = std::getenv("MOSE_FAST_LAUNCHES");
  if (path == nullptr) {
    return false;
  }
  const Work work = work_of(name, grid, threads, arguments...);
  std::FILE* file = std::fopen(path, "a");
  if (file == nullptr) {
    std::perror(path);
    std::exit(1);
  }
  std::fprintf(file, "%s %u %u %u %u %zu %.0f %.0f %d %.0f %.0f %.1f %d", typeid(Instance<kernel>*).name(), grid.x,
               grid.y, grid.z, threads.x, shared_bytes, work.bytes, work.streamed, work.streams, work.computes,
               work.products, work.parts, early ? 1 : 0);
  for (size_t i = 0; i < work.passes.size(); ++i) {
    std::fprintf(file, "%s%.1f", i == 0 ? " @" : ",", work.passes[i]);
  }
  std::fprintf(file, "\n");
  std::fclose(file);
  return true;
}

}  // namespace shim
