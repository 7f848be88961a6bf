// Products with constant weights as an operator of compiled graphs: for few rows what there is otherwise takes twice as long.

#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include "tiled_product.h"

namespace {

at::Tensor tiled_linear(const at::Tensor& x, const at::Tensor& weight) {
#ifdef MOASERVE_SIMD
  TORCH_CHECK(tiles::available(), "tiled_linear: this CPU lacks what operators are compiled for");
  TORCH_CHECK(
      x.dim() == 2 && weight.dim() == 6 && weight.is_contiguous() && x.size(1) == weight.size(1) * tiles::kPairs &&
          x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16,
      "tiled_linear: rows and weights do not belong together");
  const at::Tensor dense = x.stride(1) == 1 ? x : x.contiguous();
  const tiles::Panels panels(weight);
  at::Tensor out = at::empty({x.size(0), panels.count * tiles::kPanel}, x.options());
  if (x.size(0) == 0) return out;
  const tiles::Rows rows{static_cast<const char*>(dense.const_data_ptr()), dense.stride(0) * 2, x.size(0)};
  tiles::product(rows, panels, tiles::ToRows{out.data_ptr<at::BFloat16>(), out.size(1)});
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
