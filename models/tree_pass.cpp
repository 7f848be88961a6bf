// The target's pass over a step's trees in one call: where they stand and what they see, the layers, the head and each row's best token.
// It is given lists and gives the tokens as one: making a tensor of a few numbers takes longer than all that is done with them here, and
// so does each further call.

#include "tiled_decoder.h"
#include "tiled_head.h"
#include "tree_layout.h"

namespace {

#ifdef MOASERVE_SIMD

template <class Number>
struct TreePass : torch::CustomClassHolder {
  using Decoder = moaserve::Decoder<Number>;
  using Head = moaserve::Head<Number>;
  using Layout = moaserve::TreeLayout<Number>;

  TreePass(c10::intrusive_ptr<Layout> layout, c10::intrusive_ptr<Decoder> decoder, c10::intrusive_ptr<Head> head)
      : layout_(std::move(layout)), decoder_(std::move(decoder)), head_(std::move(head)) {}

  // Roots and nodes [B·(N+1)], parents [B·N] as in DraftTree, the texts' lengths [B], up to which column the mask is to reach, and the
  // windows of the layers' caches -> logits [B, N+1, V], final hidden states [B·(N+1), E], and each row's best token.
  std::tuple<at::Tensor, at::Tensor, std::vector<int64_t>> run(
      const std::vector<int64_t>& ids, const std::vector<int64_t>& parents, const std::vector<int64_t>& lengths, int64_t columns,
      const std::vector<at::Tensor>& caches) {
    const auto count = static_cast<int64_t>(ids.size()), texts = static_cast<int64_t>(lengths.size());
    TORCH_CHECK(
        texts > 0 && count > 0 && count % texts == 0 && parents.size() + lengths.size() == ids.size(),
        "roots, nodes and their parents do not belong together");
    std::vector<int64_t> positions(count), write(count), best(count);
    const at::Tensor mask = layout_->lay({texts, count / texts, columns, parents.data(), lengths.data()}, positions.data(), write.data());
    const at::Tensor hidden = decoder_->run_rows({count, ids.data(), positions.data(), write.data()}, mask, caches)[0];
    const at::Tensor logits = head_->logits(hidden, best.data());
    return {logits.view({texts, count / texts, -1}), hidden, std::move(best)};
  }

 private:
  c10::intrusive_ptr<Layout> layout_;
  c10::intrusive_ptr<Decoder> decoder_;
  c10::intrusive_ptr<Head> head_;
};

#else

template <class Number>
struct TreePass : torch::CustomClassHolder {
  TreePass(c10::intrusive_ptr<moaserve::TreeLayout<Number>>, c10::intrusive_ptr<moaserve::Decoder<Number>>, c10::intrusive_ptr<moaserve::Head<Number>>) {
    TORCH_CHECK(false, "compiled by a compiler that does not know AVX512-BF16");
  }
  std::tuple<at::Tensor, at::Tensor, std::vector<int64_t>> run(
      const std::vector<int64_t>&, const std::vector<int64_t>&, const std::vector<int64_t>&, int64_t, const std::vector<at::Tensor>&) {
    return {};
  }
};

#endif

}  // namespace

// After the classes that it is made of, whose sources stand before this one.
template <class Number>
void add_tree_pass(torch::Library& library, const char* name) {
  library.class_<TreePass<Number>>(name)
      .def(torch::init<
           c10::intrusive_ptr<moaserve::TreeLayout<Number>>, c10::intrusive_ptr<moaserve::Decoder<Number>>,
           c10::intrusive_ptr<moaserve::Head<Number>>>())
      .def("run", &TreePass<Number>::run);
}

TORCH_LIBRARY_FRAGMENT(moaserve, library) {
  add_tree_pass<at::BFloat16>(library, "TreePass_bfloat16");
  add_tree_pass<float>(library, "TreePass_float32");
}
