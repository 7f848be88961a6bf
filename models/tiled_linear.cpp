// Products with constant weights as an operator of compiled graphs: for few rows what there is otherwise takes twice as long.

#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include "tiled_product.h"

namespace {

#ifdef MOASERVE_SIMD

template <class Number>
void multiply(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& out) {
  const tiles::Rows rows{static_cast<const char*>(x.const_data_ptr()), x.stride(0) * x.element_size(), x.size(0)};
  tiles::product<Number>(rows, weight, tiles::ToRows<Number>{out.data_ptr<Number>(), out.size(1)});
}

#endif

at::Tensor tiled_linear(const at::Tensor& x, const at::Tensor& weight) {
#ifdef MOASERVE_SIMD
  TORCH_CHECK(tiles::available(), "tiled_linear: this CPU lacks what operators are compiled for");
  TORCH_CHECK(
      x.dim() == 2 && weight.dim() == 6 && x.size(1) == weight.size(1) * tiles::kPairs &&
          (x.scalar_type() == at::kFloat ? tiles::multiplies<float>(weight)
                                         : x.scalar_type() == at::kBFloat16 && tiles::multiplies<at::BFloat16>(weight)),
      "tiled_linear: rows and weights do not belong together");
  const at::Tensor dense = x.stride(1) == 1 ? x : x.contiguous();
  at::Tensor out = at::empty({x.size(0), weight.size(0) * tiles::kPanel}, x.options());
  if (x.size(0) > 0) x.scalar_type() == at::kFloat ? multiply<float>(dense, weight, out) : multiply<at::BFloat16>(dense, weight, out);
  return out;
#else
  TORCH_CHECK(false, "tiled_linear: compiled by a compiler that does not know AVX512-BF16");
#endif
}

}  // namespace

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_tiled_linear(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* out) {
  using torch::aot_inductor::new_tensor_handle;
  using torch::aot_inductor::tensor_handle_to_tensor_pointer;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = new_tensor_handle(tiled_linear(*tensor_handle_to_tensor_pointer(x), *tensor_handle_to_tensor_pointer(weight)));
  });
}

TORCH_LIBRARY_IMPL(moaserve, CPU, library) {
  library.impl("tiled_linear", &tiled_linear);
}
