// Glue of the views. Shapes and types are checked here; what rows, layout and codes hold is checked
// on the CPU, where reading them costs nothing.
#include "api/augment.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include <vector>

#include "torch/bind.h"
#include "torch/checks.h"
#include "torch/device.h"

namespace mf {
namespace {

void check_contents(const AugmentParams& params, int64_t all_rows) {
  for (int64_t i = 0; i < params.row_count; ++i) {
    TORCH_CHECK_INDEX(params.rows[i] >= -1 && params.rows[i] < all_rows, "rows[", i, "] is ", params.rows[i],
                      "; wanted -1 to ", all_rows - 1, ", the rows of all sources");
  }
  for (int64_t view = 0; view < params.views; ++view) {
    const int32_t* entry = params.layout + view * AugmentParams::kLayout;
    TORCH_CHECK_INDEX(entry[0] >= 0 && entry[0] < params.row_count, "layout[", view, ", 0] is ", entry[0],
                      "; wanted a position in rows, 0 to ", params.row_count - 1);
    TORCH_CHECK_VALUE(entry[1] >= 0 && entry[1] < 16, "layout[", view, ", 1] is ", entry[1],
                      "; wanted an orientation code, 0 to 15");
    TORCH_CHECK_VALUE((entry[1] >> 2) % 2 == 0 || params.height == params.width, "layout[", view, ", 1] is ", entry[1],
                      ", which turns images of ", params.height, "x", params.width, "; wanted square images");
    TORCH_CHECK_INDEX(entry[2] >= -1 && entry[2] < params.draws, "layout[", view, ", 2] is ", entry[2],
                      "; wanted -1 (not augmented) or a row of codes, 0 to ", params.draws - 1);
  }
}

at::Tensor augment(const std::vector<at::Tensor>& sources, const at::Tensor& rows_in, const at::Tensor& layout_in,
                   const at::Tensor& codes_in, const at::Tensor& factors_in, const std::vector<double>& mean,
                   const std::vector<double>& std, bool jitter_normalised, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(!sources.empty() && sources.size() <= AugmentParams::kMaxSources, "sources has ", sources.size(),
                    " tensors; wanted 1 to ", AugmentParams::kMaxSources);
  TORCH_CHECK_VALUE(mean.size() == 3, "mean has ", mean.size(), " numbers; wanted 3");
  TORCH_CHECK_VALUE(std.size() == 3, "std has ", std.size(), " numbers; wanted 3");
  const at::Device device = sources[0].device();
  TORCH_CHECK_VALUE(codes_in.size(0) == factors_in.size(0), "codes has shape ", codes_in.sizes(), " and factors ",
                    factors_in.sizes(), "; wanted as many rows in both");

  AugmentParams params{};
  std::vector<at::Tensor> kept;  // outlive the launch
  int64_t all_rows = 0;
  for (const at::Tensor& source : sources) {
    TORCH_CHECK_VALUE(
        source.dim() == 4 && source.size(3) == 3 && source.sizes().slice(1) == sources[0].sizes().slice(1),
        "a source has shape ", source.sizes(), "; wanted [rows, H, W, 3] with the H and W of the first, ",
        sources[0].sizes());
    kept.push_back(source.contiguous());
    params.source[params.sources++] = {row_pointer<const uint8_t>(kept.back(), "a source", source.numel(), device),
                                       source.size(0)};
    all_rows += source.size(0);
  }
  const int64_t height = sources[0].size(1);
  const int64_t width = sources[0].size(2);
  TORCH_CHECK_VALUE(height >= 1 && width >= 1 && height <= AugmentParams::kMaxSide && width <= AugmentParams::kMaxSide,
                    "images are of ", height, "x", width, " pixels; wanted sides of 1 to ", AugmentParams::kMaxSide);
  const at::Tensor rows = rows_in.contiguous();
  const at::Tensor layout = layout_in.contiguous();
  const at::Tensor codes = codes_in.contiguous();
  const at::Tensor factors = factors_in.contiguous();
  const at::Tensor output = at::empty({layout.size(0), height, width, 3}, sources[0].options().dtype(dtype));

  params.rows = row_pointer<const int64_t>(rows, "rows", rows.size(0), device);
  params.layout = row_pointer<const int32_t>(layout, "layout", layout.size(0) * AugmentParams::kLayout, device);
  params.codes = row_pointer<const int32_t>(codes, "codes", codes.size(0) * AugmentParameters::kCodes, device);
  params.factors = row_pointer<const float>(factors, "factors", factors.size(0) * AugmentParameters::kFactors, device);
  params.output = output.mutable_data_ptr();
  params.row_count = rows.size(0);
  params.views = layout.size(0);
  params.draws = codes.size(0);
  params.height = static_cast<int32_t>(height);
  params.width = static_cast<int32_t>(width);
  params.type = float_type(dtype, "output");
  for (size_t c = 0; c < 3; ++c) {
    params.mean[c] = static_cast<float>(mean[c]);
    params.std[c] = static_cast<float>(std[c]);
  }
  params.jitter_normalised = jitter_normalised;
  const at::Tensor views = output.permute({0, 3, 1, 2});
  run(
      device, "the first source", [&](auto stream) { cuda::augment(params, stream); },
      [&](int threads) {
        check_contents(params, all_rows);
        cpu::augment(params, threads);
      });
  return views;
}

}  // namespace

void define_augment(const Ops& ops) {
  ops.define(
      "augment(Tensor[] sources, Tensor rows, Tensor layout, Tensor codes, Tensor factors, float[] mean, "
      "float[] std, bool jitter_normalised, ScalarType dtype) -> Tensor",
      &augment);
}

}  // namespace mf
