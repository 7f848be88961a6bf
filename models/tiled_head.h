// The LM head: logits in float32 and each row's best token.

#pragma once

#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include "tiled_layers.h"

namespace moaserve {

#ifdef MOASERVE_SIMD

// The first of a row's largest.
SIMD inline int64_t first_of_largest(const float* row, int64_t size) {
  wide::Floats most = wide::load(row);
  for (int64_t i = tiles::kTile; i < size; i += tiles::kTile) most = wide::max(most, wide::load(row + i));
  const wide::Floats largest = wide::all(wide::largest(most));
  for (int64_t i = 0; i < size; i += tiles::kTile) {
    const wide::Mask found = wide::equal(wide::load(row + i), largest);
    if (found) return i + __builtin_ctz(found);
  }
  return 0;  // where logits are not numbers
}

template <class Number>
struct Head : torch::CustomClassHolder {
  explicit Head(at::Tensor weight) : weight_(std::move(weight)) {
    TORCH_CHECK(tiles::available(), "this CPU lacks what operators are compiled for");
    TORCH_CHECK(weight_.dim() == 6 && tiles::is_read<Number>(weight_), "a head's weight is tiled");
  }

  // Hidden states [n, E] -> logits [n, V], best tokens [n].
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const {
    TORCH_CHECK(inputs.size() == 1, "a head has one input");
    const at::Tensor& hidden = inputs[0];
    const at::Tensor best = at::empty({hidden.size(0)}, hidden.options().dtype(at::kLong));
    return {logits(hidden, best.data_ptr<int64_t>()), best};
  }

  // The logits [n, V] of hidden states [n, E]; their best tokens [n] are written to `best`.
  at::Tensor logits(const at::Tensor& hidden, int64_t* best) const {
    const int64_t outputs = weight_.size(0) * tiles::kPanel;
    TORCH_CHECK(
        hidden.dim() == 2 && tiles::is_stored<Number>(hidden) && hidden.size(1) == weight_.size(1) * tiles::kPairs,
        "hidden states and head do not belong together");
    const at::Tensor all = at::empty({hidden.size(0), outputs}, hidden.options().dtype(at::kFloat));
    auto* rows = all.data_ptr<float>();
    if (hidden.size(0) > 0) tiles::product<Number>(tiles::rows_of(hidden), weight_, tiles::ToFloats{rows, outputs});
    tiles::for_rows(hidden.size(0), [&](int64_t row) { best[row] = first_of_largest(rows + row * outputs, outputs); });
    return all;
  }

 private:
  at::Tensor weight_;
};

#else

template <class Number>
struct Head : torch::CustomClassHolder {
  explicit Head(at::Tensor) {
    TORCH_CHECK(false, "compiled by a compiler that does not know AVX512-BF16");
  }
  std::vector<at::Tensor> run(const std::vector<at::Tensor>&) const {
    return {};
  }
};

#endif

}  // namespace moaserve
