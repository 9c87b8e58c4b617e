// Glue of the expert losses. Arguments are explained and checked in mose_fast/ops/expert_losses.py;
// what memory safety needs is checked here again.
#include "api/expert_losses.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "core/check.h"
#include "torch/bind.h"
#include "torch/checks.h"
#include "torch/device.h"

namespace mf {
namespace {

// The products between the CPU's steps are in the type of their arguments, whatever autocast says.
struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

// The inputs as the kernels want them (contiguous; on the CPU all of one type, on a GPU features and
// student), owned while the kernels run, and their description.
struct Inputs {
  at::Tensor projections, logits, features, student, labels;
  MaybeTensor current_classes;
  at::ScalarType type;  // of the terms and the statistics
  ExpertLossesInput params;

  Inputs(const at::Tensor& projections_in, const at::Tensor& logits_in, const at::Tensor& features_in,
         const at::Tensor& student_in, const at::Tensor& labels_in, const MaybeTensor& classes_in, int64_t new_rows,
         int64_t valid_rows, const MaybeTensor& new_rows_tensor, const MaybeTensor& valid_rows_tensor,
         double temperature, double buffer_weight, int64_t first_contrastive, int64_t first_cross_entropy,
         int64_t distillation, int64_t reduction, int64_t student_index) {
    const at::Device device = labels_in.device();
    TORCH_CHECK(projections_in.dim() == 3 && logits_in.dim() == 3 && features_in.dim() == 3 && student_in.dim() == 2 &&
                    labels_in.dim() == 1,
                "projections, logits and features have ", projections_in.dim(), ", ", logits_in.dim(), " and ",
                features_in.dim(), " dimensions, student ", student_in.dim(), ", labels ", labels_in.dim(),
                "; wanted 3, 3, 3, 2 and 1");
    const int64_t experts = projections_in.size(0);
    const int64_t rows = projections_in.size(1);
    const int64_t classes = logits_in.size(2);
    TORCH_CHECK(experts >= 1 && logits_in.size(0) == experts && features_in.size(0) == experts &&
                    logits_in.size(1) == rows && features_in.size(1) == rows && student_in.size(0) == rows &&
                    labels_in.size(0) == rows && features_in.size(2) == student_in.size(1),
                "projections ", projections_in.sizes(), ", logits ", logits_in.sizes(), ", features ",
                features_in.sizes(), ", student ", student_in.sizes(), " and labels ", labels_in.sizes(),
                " do not fit one another");
    TORCH_CHECK(temperature > 0, "temperature is ", temperature, "; wanted a number above 0");
    type = at::kFloat;
    for (const at::Tensor* tensor : {&projections_in, &logits_in, &features_in, &student_in}) {
      TORCH_CHECK(tensor->device() == device, "inputs are on ", tensor->device(), " and ", device,
                  "; wanted one device");
      type = tensor->scalar_type() == at::kDouble ? at::kDouble : type;
    }
    const auto prepared = [&](const at::Tensor& tensor, at::ScalarType on_a_gpu) {
      return tensor.to(on_cpu(device) ? type : on_a_gpu).contiguous();
    };
    const auto of_features = features_in.scalar_type() == student_in.scalar_type() ? student_in.scalar_type() : type;
    projections = prepared(projections_in, projections_in.scalar_type());
    logits = prepared(logits_in, logits_in.scalar_type());
    features = prepared(features_in, of_features);
    student = prepared(student_in, of_features);
    labels = labels_in.contiguous();
    if (classes_in) {
      current_classes = classes_in->contiguous();
    }
    params = {{projections.const_data_ptr(), float_type(projections, "projections", true)},
              {logits.const_data_ptr(), float_type(logits, "logits", true)},
              {features.const_data_ptr(), float_type(features, "features", true)},
              {student.const_data_ptr(), float_type(student, "student", true)},
              row_pointer<const int64_t>(labels, "labels", rows, device),
              row_pointer<const bool>(current_classes, "current_classes", classes, device),
              experts,
              rows,
              projections.size(2),
              classes,
              features.size(2),
              row_pointer<const int32_t>(new_rows_tensor, "new_rows", 1, device),
              row_pointer<const int32_t>(valid_rows_tensor, "valid_rows", 1, device),
              new_rows,
              valid_rows < 0 ? rows : valid_rows,
              temperature,
              buffer_weight,
              first_contrastive,
              first_cross_entropy,
              static_cast<Distillation>(distillation),
              static_cast<DistanceReduction>(reduction),
              student_index};
    if (on_cpu(device)) {
      const int64_t v = params.valid_pointer != nullptr ? *params.valid_pointer : params.valid;
      const int64_t f = params.new_rows_pointer != nullptr ? *params.new_rows_pointer : params.new_rows;
      TORCH_CHECK_VALUE(v >= 0 && v <= rows, "valid_rows is ", v, "; wanted an integer from 0 to ", rows,
                        ", the rows of projections");
      TORCH_CHECK_VALUE(f >= 0 && f <= v, "new_rows is ", f, "; wanted an integer from 0 to ", v, ", the valid rows");
    }
  }

  bool contrasts() const { return params.contrasts(params.experts - 1); }
  at::Tensor empty(at::IntArrayRef sizes) const { return at::empty(sizes, labels.options().dtype(type)); }
};

template <typename Real>
void directions_of(const Inputs& in, const at::Tensor& directions) {
  cpu::expert_losses_directions(in.params, directions.mutable_data_ptr<Real>(), at::get_num_threads());
}

template <typename Real>
at::Tensor forward_on_cpu(const Inputs& in, const ExpertLossesForward& params) {
  const WithoutAutocast without_autocast;
  at::Tensor similarity = in.empty({0, 0, 0});
  if (in.contrasts()) {
    const at::Tensor directions = in.empty(in.projections.sizes());
    directions_of<Real>(in, directions);
    similarity = at::bmm(directions, directions.transpose(1, 2));
  }
  try {
    cpu::expert_losses_forward(params, similarity.mutable_data_ptr<Real>(), at::get_num_threads());
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  return similarity;
}

// terms [E, 3], the statistics that backward needs, and on the CPU the softmax [E, N, N] over the
// similarities of each anchor.
std::tuple<at::Tensor, at::Tensor, at::Tensor> expert_losses(
    const at::Tensor& projections, const at::Tensor& logits, const at::Tensor& features, const at::Tensor& student,
    const at::Tensor& labels, const MaybeTensor& current_classes, int64_t new_rows, int64_t valid_rows,
    const MaybeTensor& new_rows_tensor, const MaybeTensor& valid_rows_tensor, double temperature, double buffer_weight,
    int64_t first_contrastive, int64_t first_cross_entropy, int64_t distillation, int64_t reduction,
    int64_t student_index) {
  const Inputs in(projections, logits, features, student, labels, current_classes, new_rows, valid_rows,
                  new_rows_tensor, valid_rows_tensor, temperature, buffer_weight, first_contrastive,
                  first_cross_entropy, distillation, reduction, student_index);
  const at::Tensor terms = in.empty({in.params.experts, kTerms});
  const at::Tensor statistics = in.empty({in.params.statistics().size()});
  const ExpertLossesForward params{in.params, terms.mutable_data_ptr(), statistics.mutable_data_ptr()};
  at::Tensor similarity = in.empty({0, 0, 0});
  run(
      labels.device(), "labels", [&](auto stream) { cuda::expert_losses_forward(params, stream); },
      [&](int) {
        similarity = in.type == at::kDouble ? forward_on_cpu<double>(in, params) : forward_on_cpu<float>(in, params);
      });
  return {terms, statistics, similarity};
}

template <typename Real>
void backward_on_cpu(const Inputs& in, const ExpertLossesBackward& params, const at::Tensor& similarity) {
  const WithoutAutocast without_autocast;
  at::Tensor directions;
  at::Tensor pulled;
  if (params.projections.data) {
    directions = in.empty(in.projections.sizes());
    directions_of<Real>(in, directions);
    const at::Tensor pulls = in.empty(similarity.sizes());
    cpu::expert_losses_pulls(params, similarity.const_data_ptr<Real>(), pulls.mutable_data_ptr<Real>(),
                             at::get_num_threads());
    pulled = at::bmm(pulls, directions);
  }
  cpu::expert_losses_backward(params, directions.defined() ? directions.const_data_ptr<Real>() : nullptr,
                              pulled.defined() ? pulled.const_data_ptr<Real>() : nullptr, at::get_num_threads());
}

// The gradients of projections, logits, features and student, each in its input's type; an empty
// tensor where not wanted.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> expert_losses_backward(
    const at::Tensor& grad, const at::Tensor& statistics, const at::Tensor& similarity, std::array<bool, 4> wanted,
    const at::Tensor& projections, const at::Tensor& logits, const at::Tensor& features, const at::Tensor& student,
    const at::Tensor& labels, const MaybeTensor& current_classes, int64_t new_rows, int64_t valid_rows,
    const MaybeTensor& new_rows_tensor, const MaybeTensor& valid_rows_tensor, double temperature, double buffer_weight,
    int64_t first_contrastive, int64_t first_cross_entropy, int64_t distillation, int64_t reduction,
    int64_t student_index) {
  const Inputs in(projections, logits, features, student, labels, current_classes, new_rows, valid_rows,
                  new_rows_tensor, valid_rows_tensor, temperature, buffer_weight, first_contrastive,
                  first_cross_entropy, distillation, reduction, student_index);
  TORCH_CHECK(grad.dim() == 2 && grad.size(0) == in.params.experts && grad.size(1) == kTerms &&
                  grad.scalar_type() == in.type && grad.device() == labels.device(),
              "grad is ", grad.scalar_type(), " ", grad.sizes(), " on ", grad.device(), "; wanted ", in.type, " [",
              in.params.experts, ", ", kTerms, "] on ", labels.device());
  const int64_t similarities =
      on_cpu(labels) && in.contrasts() ? in.params.experts * in.params.rows * in.params.rows : 0;
  row_pointer(similarity, "similarity", in.type, similarities, labels.device());
  wanted[0] = wanted[0] && in.contrasts();
  std::array<at::Tensor, 4> grads;
  const std::array<const at::Tensor*, 4> inputs{&in.projections, &in.logits, &in.features, &in.student};
  std::array<MutableFloatArray, 4> arrays;
  for (size_t i = 0; i < 4; ++i) {
    grads[i] = at::empty(wanted[i] ? inputs[i]->sizes() : at::IntArrayRef{0}, inputs[i]->options());
    arrays[i] = {wanted[i] ? grads[i].mutable_data_ptr() : nullptr, float_type(grads[i], "grad", true)};
  }
  const ExpertLossesBackward params{
      in.params,
      row_pointer(statistics, "statistics", in.type, in.params.statistics().size(), labels.device()),
      grad.const_data_ptr(),
      {grad.stride(0), grad.stride(1)},
      arrays[0],
      arrays[1],
      arrays[2],
      arrays[3]};
  run(
      labels.device(), "labels", [&](auto stream) { cuda::expert_losses_backward(params, stream); },
      [&](int) {
        if (in.type == at::kDouble) {
          backward_on_cpu<double>(in, params, similarity);
        } else {
          backward_on_cpu<float>(in, params, similarity);
        }
      });
  return {grads[0].to(projections.scalar_type()), grads[1].to(logits.scalar_type()),
          grads[2].to(features.scalar_type()), grads[3].to(student.scalar_type())};
}

constexpr const char* kInputs =
    "Tensor projections, Tensor logits, Tensor features, Tensor student, Tensor labels, Tensor? current_classes, "
    "int new_rows, int valid_rows, Tensor? new_rows_tensor, Tensor? valid_rows_tensor, float temperature, "
    "float buffer_weight, int first_contrastive, int first_cross_entropy, int distillation, int reduction, "
    "int student_index";

}  // namespace

void define_expert_losses(const Ops& ops) {
  const std::string inputs = kInputs;
  ops.define("expert_losses(" + inputs + ") -> (Tensor, Tensor, Tensor)", &expert_losses);
  ops.define("expert_losses_backward(Tensor grad, Tensor statistics, Tensor similarity, bool[4] wanted, " + inputs +
                 ") -> (Tensor, Tensor, Tensor, Tensor)",
             &expert_losses_backward);
}

}  // namespace mf
