// A Llama decoder, from token ids to the final norm, in bfloat16 or float32: what PyTorch's compiler makes of it spends more than half of
// its time beside the products.
//
// The stream of residuals stays in float32; what enters products, keys and values are of the type that is stored. Every row is computed in the same
// way whatever rows are computed with it.

#pragma once

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/slice.h>
#include <torch/custom_class.h>

#include "cached_attention.h"
#include "tiled_layers.h"

namespace moaserve {

#ifdef MOASERVE_SIMD

using tiles::Layer;
using tiles::numbers;

template <class Number>
struct Decoder : torch::CustomClassHolder {
  // `tensors`: embedding, cosines and sines [positions, d/2], final norm, the first six of each layer (tiles::Layer), and of each layer
  // the three that may be empty; products' weights are tiled, gates and what they let through in turns of 16.
  Decoder(const std::vector<at::Tensor>& tensors, int64_t kv_heads, int64_t head_dim, double eps)
      : embedding_(tensors.at(0)), cos_(tensors.at(1)), sin_(tensors.at(2)), norm_(tensors.at(3)), kv_heads_(kv_heads),
        head_dim_(head_dim), eps_(eps) {
    TORCH_CHECK(tiles::available(), "this CPU lacks what operators are compiled for");
    TORCH_CHECK(tensors.size() > 4 && (tensors.size() - 4) % 9 == 0, "a decoder has layers, and a layer nine tensors");
    TORCH_CHECK(head_dim <= tiles::kMostHead, "a head has ", tiles::kMostHead, " numbers at most");
    const size_t count = (tensors.size() - 4) / 9, rest = 4 + 6 * count;
    for (size_t layer = 0; layer < count; ++layer) {
      const auto *of = &tensors[4 + 6 * layer], *may_be = &tensors[rest + 3 * layer];
      layers_.push_back({of[0], of[1], of[2], of[3], of[4], of[5], may_be[0], may_be[1], may_be[2]});
    }
    for (const at::Tensor& tensor : tensors) TORCH_CHECK(tiles::is_read<Number>(tensor), "weights are dense and of one type");
  }

  // Inputs as those of the compiled decoder (compiled.py): ids, positions and cache rows [B, rows], the mask, each layer's cache.
  //
  // The output is that of the rows from `wanted` on, which may be others than 0 for a single text: of what stands before them, the last
  // layer leaves keys and values only, and of those from `later` on, where that is less, also what `finish` makes their output of: what they
  // attended to, and the stream.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, int64_t wanted, int64_t later) {
    TORCH_CHECK(inputs.size() == 4 + layers_.size(), "a decoder of ", layers_.size(), " layers got ", inputs.size(), " inputs");
    const int64_t count = inputs[0].numel();
    TORCH_CHECK(
        inputs[1].numel() == count && inputs[2].numel() == count && inputs[0].is_contiguous() && inputs[1].is_contiguous() &&
            inputs[2].is_contiguous(),
        "ids, positions and cache rows do not belong together");
    const Rows rows{
        count, inputs[0].const_data_ptr<int64_t>(), inputs[1].const_data_ptr<int64_t>(), inputs[2].const_data_ptr<int64_t>()};
    return run_rows(rows, inputs[3], at::ArrayRef<at::Tensor>(inputs).slice(4), wanted, later);
  }

  // Rows of texts, and for each its token, its position in the text and its row of the cache.
  struct Rows {
    int64_t count;
    const int64_t *ids, *positions, *write;
  };

  // The same of these rows.
  std::vector<at::Tensor> run_rows(
      const Rows& given, const at::Tensor& mask, at::ArrayRef<at::Tensor> caches, int64_t wanted = 0, int64_t later = 0) {
    const int64_t rows = given.count, *ids = given.ids, *positions = given.positions, *write = given.write;
    const int64_t size = embedding_.size(1), kv_size = 2 * kv_heads_ * head_dim_;
    check(given, caches, kv_size);
    const int64_t q_size = layers_[0].output.size(1) * tiles::kPairs;
    const auto options = embedding_.options();
    const at::Tensor x = at::empty({rows, size}, options.dtype(at::kFloat)), queries = at::empty({rows, q_size}, options);
    const at::Tensor qkv = at::empty({rows, q_size + kv_size}, options);
    TORCH_CHECK(wanted >= 0 && wanted <= rows && (wanted == 0 || mask.size(0) == 1), "no rows of one text from ", wanted, " on");
    TORCH_CHECK(later >= 0, "no rows from ", later, " on");
    const int64_t first = std::min(wanted, later);
    std::vector<at::Tensor> unfinished;
    const at::Tensor out = at::empty({rows - wanted, size}, options);
    const tiles::Room room(layers_[0], rows);
    const Sight sight = sight_of(mask);
    auto* stream = x.data_ptr<float>();
    auto *projected = qkv.data_ptr<Number>(), *asked = queries.data_ptr<Number>();
    tiles::for_rows(rows, [&](int64_t row) { tiles::embed(numbers<Number>(embedding_) + ids[row] * size, size, stream + row * size); });
    for (size_t index = 0; index < layers_.size(); ++index) {
      const Layer& layer = layers_[index];
      const at::Tensor& cache = caches[index];
      auto* kept = cache.data_ptr<Number>();
      tiles::normalize<Number>(stream, layer.input_norm, eps_, room.normed);
      const tiles::ToRows<Number> to_rows{projected, q_size + kv_size, tiles::numbers_if_any<Number>(layer.qkv_bias)};
      tiles::product<Number>(tiles::rows_of(room.normed), layer.qkv, to_rows);
      const Number *q_norm = tiles::numbers_if_any<Number>(layer.q_norm), *k_norm = tiles::numbers_if_any<Number>(layer.k_norm);
      tiles::for_rows(rows, [&](int64_t row) {
        const Number* from = projected + row * (q_size + kv_size);
        Number *to = asked + row * q_size, *keys = kept + write[row] * kv_size;
        turn_heads(from, q_size, q_norm, positions[row], to);
        turn_heads(from + q_size, kv_size / 2, k_norm, positions[row], keys);
        std::copy_n(from + q_size + kv_size / 2, kv_size / 2, keys + kv_size / 2);
      });
      if (wanted == 0 || index + 1 < layers_.size()) {
        tiles::finish<Number>(layer, cached_attention(queries, cache, mask, kv_heads_, sight), eps_, stream, room);
      } else if (first < rows) {
        const int64_t groups = mask.size(2) / rows;
        const at::Tensor asking = queries.slice(0, first), seen = mask.slice(2, first * groups);
        const at::Tensor attended = cached_attention(asking, cache, seen, kv_heads_, sight_of(seen));
        // Copies, as parts would keep all of what was read.
        if (first < wanted) unfinished = {attended.slice(0, 0, wanted - first).clone(), x.slice(0, first, wanted).clone()};
        if (wanted < rows) {
          tiles::finish<Number>(layer, attended.slice(0, wanted - first), eps_, stream + wanted * size, tiles::Room(layer, rows - wanted));
        }
      }
    }
    if (wanted < rows) tiles::normalize<Number>(stream + wanted * size, norm_, eps_, out);
    unfinished.insert(unfinished.begin(), out);
    return unfinished;
  }

  // The output of rows that `run` has left unfinished, from what it gave of them; their stream is written over.
  at::Tensor finish(const at::Tensor& attended, const at::Tensor& x) {
    const Layer& layer = layers_.back();
    const int64_t rows = x.size(0), size = embedding_.size(1);
    TORCH_CHECK(
        x.scalar_type() == at::kFloat && x.is_contiguous() && x.dim() == 2 && x.size(1) == size && tiles::is_stored<Number>(attended) &&
            attended.dim() == 2 && attended.size(0) == rows && attended.size(1) == layer.output.size(1) * tiles::kPairs,
        "what is to be finished is not what was left");
    const at::Tensor out = at::empty({rows, size}, embedding_.options());
    auto* stream = x.data_ptr<float>();
    tiles::finish<Number>(layer, attended, eps_, stream, tiles::Room(layer, rows));
    tiles::normalize<Number>(stream, norm_, eps_, out);
    return out;
  }

 private:
  // The heads of a row at a position of the text, normed first where there is a weight for that.
  SIMD void turn_heads(const Number* from, int64_t size, const Number* weight, int64_t position, Number* to) const {
    const int64_t half = head_dim_ / 2;
    const Number *cos = numbers<Number>(cos_) + position * half, *sin = numbers<Number>(sin_) + position * half;
    Number normed[tiles::kMostHead];
    for (int64_t i = 0; i < size; i += head_dim_) {
      if (weight != nullptr) tiles::norm_head(from + i, weight, eps_, head_dim_, normed);
      tiles::rotate(weight != nullptr ? normed : from + i, cos, sin, half, to + i);
    }
  }

  void check(const Rows& rows, at::ArrayRef<at::Tensor> caches, int64_t kv_size) const {
    TORCH_CHECK(rows.count > 0 && caches.size() == layers_.size(), "a decoder of ", layers_.size(), " layers got ", caches.size(), " caches");
    for (const at::Tensor& cache : caches) {
      TORCH_CHECK(tiles::is_stored<Number>(cache) && cache.dim() == 3 && cache.size(2) == kv_size, "a layer's cache has other sizes");
    }
    const int64_t cache_rows = caches[0].size(0) * caches[0].size(1);
    for (int64_t row = 0; row < rows.count; ++row) {
      TORCH_CHECK(rows.ids[row] >= 0 && rows.ids[row] < embedding_.size(0), "no token ", rows.ids[row]);
      TORCH_CHECK(rows.positions[row] >= 0 && rows.positions[row] < cos_.size(0), "no position ", rows.positions[row]);
      TORCH_CHECK(rows.write[row] >= 0 && rows.write[row] < cache_rows, "no cache row ", rows.write[row]);
    }
  }

  at::Tensor embedding_, cos_, sin_, norm_;
  std::vector<Layer> layers_;
  int64_t kv_heads_, head_dim_;
  double eps_;
};

#else

template <class Number>
struct Decoder : torch::CustomClassHolder {
  Decoder(const std::vector<at::Tensor>&, int64_t, int64_t, double) {
    TORCH_CHECK(false, "compiled by a compiler that does not know AVX512-BF16");
  }
  std::vector<at::Tensor> run(const std::vector<at::Tensor>&, int64_t, int64_t) {
    return {};
  }
  at::Tensor finish(const at::Tensor&, const at::Tensor&) {
    return {};
  }
};

#endif

}  // namespace moaserve
