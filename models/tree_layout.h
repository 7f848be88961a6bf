// Where draft trees stand in a cache and what their rows see, for masks of a cache's type: what TreeLayout in batch.py computes, and for roots
// alone decode_plan in plans.py.

#pragma once

#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <limits>

namespace moaserve {

template <class Number>
struct TreeLayout : torch::CustomClassHolder {
  TreeLayout(int64_t scratch, int64_t rows_per_slot, int64_t groups) : scratch_(scratch), rows_per_slot_(rows_per_slot), groups_(groups) {}

  // Parents [B, N] as in DraftTree, lengths of the texts before the trees [B], and columns [S], of which only their number counts ->
  // positions [B, N+1], cache rows [B, N+1], additive mask [B, 1, (N+1)·groups, scratch + S]. Roots alone (N = 0) go straight to
  // their place in the text, trees to scratch rows.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const {
    TORCH_CHECK(inputs.size() == 3 && inputs[0].dim() == 2 && inputs[1].numel() == inputs[0].size(0), "trees and texts do not belong together");
    const at::Tensor &parents = inputs[0], &lengths = inputs[1];
    for (const at::Tensor& input : inputs) TORCH_CHECK(input.is_contiguous() && input.scalar_type() == at::kLong, "dense integers");
    const int64_t texts = parents.size(0), rows = parents.size(1) + 1;
    const at::Tensor positions = at::empty({texts, rows}, parents.options()), write = at::empty({texts, rows}, parents.options());
    const at::Tensor mask = lay(
        {texts, rows, inputs[2].numel(), parents.const_data_ptr<int64_t>(), lengths.const_data_ptr<int64_t>()},
        positions.data_ptr<int64_t>(), write.data_ptr<int64_t>());
    return {positions, write, mask};
  }

  // Trees of so many rows for each of so many texts, which reach up to a column; parents and lengths as above.
  struct Trees {
    int64_t texts, rows, columns;
    const int64_t *parents, *lengths;
  };

  // Writes positions and cache rows, and gives the mask.
  at::Tensor lay(const Trees& trees, int64_t* position, int64_t* place) const {
    const int64_t texts = trees.texts, rows = trees.rows, columns = trees.columns, span = scratch_ + columns;
    const int64_t *parent = trees.parents, *length = trees.lengths;
    TORCH_CHECK(rows <= scratch_, "trees of ", rows, " rows do not fit ", scratch_, " scratch rows");
    const at::Tensor mask = at::empty({texts, 1, rows * groups_, span}, at::dtype(c10::CppTypeToScalarType<Number>::value));
    auto* seen = mask.data_ptr<Number>();
    const auto hidden = static_cast<Number>(-std::numeric_limits<float>::infinity()), visible = static_cast<Number>(0.0f);
    const bool straight = rows == 1;
    for (int64_t text = 0; text < texts; ++text, parent += rows - 1) {
      const int64_t known = std::clamp<int64_t>(length[text] + straight, 0, columns);
      for (int64_t row = 0; row < rows; ++row, seen += groups_ * span) {
        std::fill_n(seen, scratch_, hidden);
        std::fill_n(seen + scratch_, known, visible);
        std::fill_n(seen + scratch_ + known, columns - known, hidden);
        int64_t depth = 0;
        for (int64_t above = row; above != 0; ++depth) {
          seen[above] = visible;
          TORCH_CHECK(parent[above - 1] >= 0 && parent[above - 1] < above, "a parent stands behind its child");
          above = parent[above - 1];
        }
        if (!straight) seen[0] = visible;
        for (int64_t group = 1; group < groups_; ++group) std::copy_n(seen, span, seen + group * span);
        *position++ = length[text] + depth;
        *place++ = text * rows_per_slot_ + (straight ? scratch_ + length[text] : row);
      }
    }
    return mask;
  }

  int64_t scratch() const { return scratch_; }

 private:
  int64_t scratch_, rows_per_slot_, groups_;
};

}  // namespace moaserve
