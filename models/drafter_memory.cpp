// What a drafter keeps of verified tokens, in one call: layer self-attention over the target's keys and values, CA's keys and values
// of the memory that comes of it, and SA's of the tokens' embeddings. Where memory is paired, CA's are those of the tokens before:
// only now is it known what follows them.
//
// What is computed stands in moa.py and moa_network.py; weights are of the type that is stored, and streams of residuals float32.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/custom_class.h>

#include <array>
#include <numeric>

#include "block_drafter.h"
#include "tiled_layers.h"

namespace {

#ifdef MOASERVE_SIMD

using tiles::kTile;
using tiles::numbers;

constexpr int64_t kMaxLayers = 64, kMaxHead = 256;
constexpr int64_t kRowsAtOnce = 256;  // of layers of tokens, so that what LSA makes of them stays in the second-level cache

// Attention of a token's layers over one another, for one KV head: they are so few that their scores are a vector or four.
template <class Number>
class AmongLayers {
 public:
  AmongLayers(int64_t layers, int64_t size) : layers_(layers), size_(size), vectors_((layers + kTile - 1) / kTile) {
    std::fill_n(keys_.data(), size * vectors_ * kTile, 0.0f);
  }

  SIMD void key(int64_t layer, const Number* key, const Number* value) {
    for (int64_t i = 0; i < size_; ++i) keys_[i * vectors_ * kTile + layer] = static_cast<float>(key[i]);
    tiles::embed(value, size_, values_.data() + layer * kMaxHead);
  }

  // The layers' queries, one every `row` numbers, and where what they attend to goes, one every `out_row`.
  void queries(const Number* from, int64_t row, Number* out, int64_t out_row) const {
    int64_t layer = 0;
    for (; layer + kAtOnce <= layers_; layer += kAtOnce) attend<kAtOnce>(from + layer * row, row, out + layer * out_row, out_row);
    for (; layer < layers_; ++layer) attend<1>(from + layer * row, row, out + layer * out_row, out_row);
  }

 private:
  static constexpr int kAtOnce = 4;  // queries: one's sums would make each addition wait for the one before

  template <int count>
  SIMD void attend(const Number* from, int64_t row, Number* out, int64_t out_row) const {
    constexpr int kMost = kMaxLayers / kTile;
    wide::Floats scores[count][kMost];
    for (int q = 0; q < count; ++q) std::fill_n(scores[q], kMost, wide::zero());
    for (int64_t v = 0; v < vectors_; ++v) {
      wide::Floats sums[count];
      for (int q = 0; q < count; ++q) sums[q] = wide::zero();
      for (int64_t i = 0; i < size_; ++i) {
        const wide::Floats key = wide::load(keys_.data() + (i * vectors_ + v) * kTile);
#pragma GCC unroll 4
        for (int q = 0; q < count; ++q) {
          sums[q] = wide::fma(wide::all(static_cast<float>(from[q * row + i])), key, sums[q]);
        }
      }
      for (int q = 0; q < count; ++q) scores[q][v] = sums[q];
    }
    alignas(64) float weights[count][kMaxLayers];
    wide::Floats shares[count];
    const wide::Floats scale = wide::all(1.4426950408889634f / std::sqrt(static_cast<float>(size_)));
    const wide::Floats hidden = wide::all(-std::numeric_limits<float>::infinity());
    for (int q = 0; q < count; ++q) {
      wide::Floats most = hidden;
      for (int64_t v = 0; v < vectors_; ++v) {
        scores[q][v] = wide::select(wide::first(layers_ - v * kTile), scores[q][v] * scale, hidden);
        most = wide::max(most, scores[q][v]);
      }
      most = wide::all(wide::largest(most));
      wide::Floats sum = wide::zero();
      for (int64_t v = 0; v < vectors_; ++v) {
        const wide::Floats weight = wide::power_of_two(scores[q][v] - most);
        sum = sum + weight;
        wide::store(weights[q] + v * kTile, weight);
      }
      shares[q] = wide::all(1.0f / wide::sum(sum));
    }
    for (int64_t i = 0; i < size_; i += kTile) {
      wide::Floats mixed[count];
      for (int q = 0; q < count; ++q) mixed[q] = wide::zero();
      for (int64_t layer = 0; layer < layers_; ++layer) {
        const wide::Floats value = wide::load(values_.data() + layer * kMaxHead + i);
#pragma GCC unroll 4
        for (int q = 0; q < count; ++q) mixed[q] = wide::fma(wide::all(weights[q][layer]), value, mixed[q]);
      }
      for (int q = 0; q < count; ++q) {
        wide::narrow(wide::first(size_ - i), out + q * out_row + i, mixed[q] * shares[q]);
      }
    }
  }

  int64_t layers_, size_, vectors_;
  std::array<float, kMaxHead * kMaxLayers> keys_;
  std::array<float, kMaxLayers * kMaxHead> values_;
};

// Where the tokens' rows stand in a cache's dense window [slots, rows, width] of which `scratch` rows of each slot come first.
template <class Number>
struct Places {
  const at::Tensor& window;
  int64_t scratch;

  int64_t row(int64_t slot, int64_t position) const { return slot * window.size(1) + scratch + position; }

  Number* at(int64_t slot, int64_t position) const { return window.data_ptr<Number>() + row(slot, position) * window.size(2); }
};

// Tokens [4, n], each [n].
struct Tokens {
  int64_t count;
  const int64_t *ids, *previous, *slots, *positions;

  explicit Tokens(const at::Tensor& tokens)
      : Tokens(tokens.const_data_ptr<int64_t>(), tokens.size(1)) {
    TORCH_CHECK(tokens.dim() == 2 && tokens.size(0) == 4 && tokens.is_contiguous(), "tokens are [4, n]");
  }

  explicit Tokens(const std::vector<int64_t>& tokens) : Tokens(tokens.data(), static_cast<int64_t>(tokens.size()) / 4) {
    TORCH_CHECK(tokens.size() % 4 == 0, "tokens are [4, n]");
  }

 private:
  Tokens(const int64_t* all, int64_t n) : count(n), ids(all), previous(ids + n), slots(previous + n), positions(slots + n) {}
};

template <class Number>
struct DrafterMemory : torch::CustomClassHolder {
  // `tensors`: embedding, cosines and sines [positions, d/2], the weight and bias that lead from LSA to memory, the norm and the
  // weight of SA's keys and values, the same of CA's, cosines and sines of LSA's layers [L, d'/2], LSA's six (as a decoder's
  // layer), with an entry what leads from the target's hidden states to memory, and where memory is paired the norms of those states
  // and of tokens, and what leads to memory from its own token, the one before and the one behind it.
  DrafterMemory(std::vector<at::Tensor> tensors, int64_t kv_heads, int64_t head_dim, int64_t lsa_kv_heads, int64_t lsa_head_dim, double eps)
      : tensors_(std::move(tensors)), kv_heads_(kv_heads), head_dim_(head_dim), lsa_kv_heads_(lsa_kv_heads),
        lsa_head_dim_(lsa_head_dim), eps_(eps) {
    TORCH_CHECK(tiles::available(), "this CPU lacks what operators are compiled for");
    TORCH_CHECK(
        tensors_.size() == 17 || tensors_.size() == 18 || tensors_.size() == 23,
        "a drafter's memory has 17 tensors, with an entry 18, where it is paired 23");
    for (const at::Tensor& tensor : tensors_) TORCH_CHECK(tiles::is_read<Number>(tensor), "weights are dense and of one type");
    lsa_ = {tensors_[11], tensors_[12], tensors_[13], tensors_[14], tensors_[15], tensors_[16]};
    size_ = tensors_[0].size(1), layers_ = tensors_[9].size(0), layer_size_ = lsa_.input_norm.size(0);
    TORCH_CHECK(layers_ <= kMaxLayers && lsa_head_dim <= kMaxHead, "LSA over ", layers_, " layers by heads of ", lsa_head_dim);
  }

  // `tokens` [4, n]: ids, those before them (read where memory is paired), slots and positions; `tapped`: with an entry the target's
  // final hidden states [n, E]; `target`: each layer's window; `caches`: those of SA, of CA, and with an entry of memory itself.
  // `scratches`: scratch rows of the target's and of each.
  void remember(
      const at::Tensor& tokens_tensor, const std::vector<at::Tensor>& tapped, const std::vector<at::Tensor>& target,
      const std::vector<at::Tensor>& caches, const std::vector<int64_t>& scratches) {
    take(Tokens(tokens_tensor), tapped, target, caches, scratches);
  }

  // The same of tokens [4·n] that are of a step, whose hidden states stand in these rows of `tapped`. Lists, as making tensors of them takes
  // longer.
  void remember_rows(
      const std::vector<int64_t>& tokens, const std::vector<at::Tensor>& tapped, const std::vector<int64_t>& rows,
      const std::vector<at::Tensor>& target, const std::vector<at::Tensor>& caches, const std::vector<int64_t>& scratches) {
    std::vector<at::Tensor> of_tokens;
    for (const at::Tensor& all : tapped) {
      TORCH_CHECK(tiles::is_stored<Number>(all) && all.dim() == 2, "hidden states have other sizes");
      const int64_t size = all.size(1), count = static_cast<int64_t>(rows.size());
      of_tokens.push_back(at::empty({count, size}, all.options()));
      for (int64_t row = 0; row < count; ++row) {
        TORCH_CHECK(rows[row] >= 0 && rows[row] < all.size(0), "no row ", rows[row]);
        std::copy_n(numbers<Number>(all) + rows[row] * size, size, of_tokens.back().template data_ptr<Number>() + row * size);
      }
    }
    take(Tokens(tokens), of_tokens, target, caches, scratches);
  }

  // Where memory is paired, lets that of the tokens before these be what is drafted from: it is kept in these tokens' rows.
  void pair(const at::Tensor& tokens, const std::vector<at::Tensor>& caches, const std::vector<int64_t>& scratches) {
    make_pairs(Tokens(tokens), caches, scratches);
  }

  // As BlockDrafter.draft, for texts in the caches' first slots, with `scratches` as above; before that the newest memory of each, where
  // it is paired, is paired with the root.
  typename moaserve::BlockDrafter<Number>::Nodes draft(
      const c10::intrusive_ptr<moaserve::BlockDrafter<Number>>& drafter, const std::vector<int64_t>& scratches,
      const std::vector<at::Tensor>& caches, const std::vector<int64_t>& texts, const std::vector<std::vector<int64_t>>& rare,
      const std::vector<at::Tensor>& sampling, int64_t depth, int64_t breadth, int64_t nodes, double min_reach, double temperature) {
    if (paired()) {
      const size_t count = rare.size();
      TORCH_CHECK(texts.size() == 5 * count, "texts are [5, B], and each has rare tokens");
      std::vector<int64_t> tokens(4 * count, 0);
      std::copy_n(texts.begin(), count, tokens.begin());
      std::iota(tokens.begin() + 2 * count, tokens.begin() + 3 * count, 0);
      std::copy_n(texts.begin() + 2 * count, count, tokens.begin() + 3 * count);
      make_pairs(Tokens(tokens), caches, scratches);
    }
    return drafter->draft(caches, texts, rare, sampling, depth, breadth, nodes, min_reach, temperature);
  }

 private:
  void take(
      const Tokens& tokens, const std::vector<at::Tensor>& tapped, const std::vector<at::Tensor>& target,
      const std::vector<at::Tensor>& caches, const std::vector<int64_t>& scratches) {
    check(tokens, tapped, target, caches, scratches);
    const at::Tensor stream = at::empty({tokens.count, size_}, tensors_[0].options().dtype(at::kFloat));
    auto* rows = stream.data_ptr<float>();
    embed(tokens.ids, tokens.count, rows);
    keep(rows, tokens, 0, 5, Places<Number>{caches[0], scratches[1]});
    const int64_t portion = std::max<int64_t>(1, kRowsAtOnce / layers_);
    for (int64_t first = 0; first < tokens.count; first += portion) {
      const int64_t last = std::min(first + portion, tokens.count);
      memory_of(tokens.slots + first, tokens.positions + first, target, scratches[0], rows + first * size_, last - first);
    }
    if (!tapped.empty()) {
      const at::Tensor hidden = paired() ? normed_states(tapped[0]) : tapped[0];
      tiles::product<Number>(tiles::rows_of(hidden), tensors_[17], tiles::AddToStream{rows, size_});
    }
    if (paired()) {
      add_tokens(tokens.ids, tokens.count, 20, rows);
      add_tokens(tokens.previous, tokens.count, 21, rows);
    }
    if (caches.size() > 2) write(rows, tokens, Places<Number>{caches[2], scratches[3]});
    if (paired()) {
      pair_before(tokens, caches, scratches);
    } else {
      keep(rows, tokens, 0, 7, Places<Number>{caches[1], scratches[2]});
    }
  }

  void make_pairs(const Tokens& tokens, const std::vector<at::Tensor>& caches, const std::vector<int64_t>& scratches) {
    TORCH_CHECK(paired(), "memory is not paired");
    check(tokens, caches, scratches);
    const at::Tensor stream = pair_before(tokens, caches, scratches);
    write(stream.const_data_ptr<float>(), tokens, Places<Number>{caches[2], scratches[3]});
  }

  bool has_entry() const { return tensors_.size() > 17; }
  bool paired() const { return tensors_.size() > 18; }

  void embed(const int64_t* ids, int64_t count, float* rows) const {
    tiles::for_rows(count, [&](int64_t row) { tiles::embed(numbers<Number>(tensors_[0]) + ids[row] * size_, size_, rows + row * size_); });
  }

  // Rows of the stream, as memory.
  void write(const float* rows, const Tokens& tokens, const Places<Number>& places) const {
    tiles::for_rows(tokens.count, [&](int64_t row) {
      tiles::narrow_row(rows + row * size_, size_, places.at(tokens.slots[row], tokens.positions[row]));
    });
  }

  // Keys and values of a layer's normed rows, into its cache, so many rows before the tokens' own; the weight stands behind the norm.
  void keep(const float* rows, const Tokens& tokens, int64_t back, size_t norm, const Places<Number>& places) const {
    const int64_t kv_size = 2 * kv_heads_ * head_dim_, half = head_dim_ / 2;
    const at::Tensor normed = at::empty({tokens.count, size_}, tensors_[0].options());
    const at::Tensor kv = at::empty({tokens.count, kv_size}, normed.options());
    tiles::normalize<Number>(rows, tensors_[norm], eps_, normed);
    tiles::product<Number>(tiles::rows_of(normed), tensors_[norm + 1], tiles::ToRows<Number>{kv.data_ptr<Number>(), kv_size});
    tiles::for_rows(tokens.count, [&](int64_t row) {
      const int64_t position = tokens.positions[row] - back, at = position * half;
      if (position < 0) return;
      const Number* from = numbers<Number>(kv) + row * kv_size;
      Number* to = places.at(tokens.slots[row], position);
      for (int64_t i = 0; i < kv_size / 2; i += head_dim_) {
        tiles::rotate(from + i, numbers<Number>(tensors_[1]) + at, numbers<Number>(tensors_[2]) + at, half, to + i);
      }
      std::copy_n(from + kv_size / 2, kv_size / 2, to + kv_size / 2);
    });
  }

  // CA's keys and values of the tokens before, which these follow; returns their memory [n, E], nothing of use before a first token.
  at::Tensor pair_before(const Tokens& tokens, const std::vector<at::Tensor>& caches, const std::vector<int64_t>& scratches) const {
    const at::Tensor stream = at::empty({tokens.count, size_}, tensors_[0].options().dtype(at::kFloat));
    auto* rows = stream.data_ptr<float>();
    const Places<Number> memories{caches[2], scratches[3]};
    tiles::for_rows(tokens.count, [&](int64_t row) {
      const int64_t position = std::max<int64_t>(0, tokens.positions[row] - 1);
      tiles::embed(memories.at(tokens.slots[row], position), size_, rows + row * size_);
    });
    add_tokens(tokens.ids, tokens.count, 22, rows);
    keep(rows, tokens, 1, 7, Places<Number>{caches[1], scratches[2]});
    return stream;
  }

  // Adds to the stream what tokens lead to by one of the weights.
  void add_tokens(const int64_t* ids, int64_t count, size_t weight, float* rows) const {
    const at::Tensor wide = at::empty({count, size_}, tensors_[0].options().dtype(at::kFloat));
    const at::Tensor normed = at::empty({count, size_}, tensors_[0].options());
    embed(ids, count, wide.data_ptr<float>());
    tiles::normalize<Number>(wide.const_data_ptr<float>(), tensors_[19], eps_, normed);
    tiles::product<Number>(tiles::rows_of(normed), tensors_[weight], tiles::AddToStream{rows, size_});
  }

  at::Tensor normed_states(const at::Tensor& hidden) const {
    const at::Tensor wide = at::empty(hidden.sizes(), hidden.options().dtype(at::kFloat)), normed = at::empty_like(hidden);
    auto* rows = wide.data_ptr<float>();
    tiles::for_rows(hidden.size(0), [&](int64_t row) { tiles::embed(numbers<Number>(hidden) + row * size_, size_, rows + row * size_); });
    tiles::normalize<Number>(rows, tensors_[18], eps_, normed);
    return normed;
  }

  // What memory takes from `count` tokens' layers, into the stream's `rows` [count, E].
  void memory_of(
      const int64_t* slots, const int64_t* positions, const std::vector<at::Tensor>& target, int64_t scratch, float* rows,
      int64_t count) const {
    const int64_t all = count * layers_, q_size = lsa_.output.size(1) * tiles::kPairs;
    const int64_t width = lsa_.qkv.size(0) * tiles::kPanel;
    const auto options = tensors_[0].options();
    const at::Tensor x = at::empty({all, layer_size_}, options.dtype(at::kFloat)), qkv = at::empty({all, width}, options);
    const at::Tensor attended = at::empty({all, q_size}, options), summary = at::empty({count, layer_size_}, options);
    const tiles::Room room(lsa_, all);
    auto* layers = x.data_ptr<float>();
    tiles::for_rows(all, [&](int64_t row) {
      const int64_t token = row / layers_;
      const Places<Number> places{target[row % layers_], scratch};
      tiles::embed(places.at(slots[token], positions[token]), layer_size_, layers + row * layer_size_);
    });
    tiles::normalize<Number>(layers, lsa_.input_norm, eps_, room.normed);
    tiles::product<Number>(tiles::rows_of(room.normed), lsa_.qkv, tiles::ToRows<Number>{qkv.data_ptr<Number>(), width});
    at::parallel_for(0, count, std::max<int64_t>(1, tiles::kRowsPerThread / layers_), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        attend(qkv.data_ptr<Number>() + token * layers_ * width, width, q_size, attended.data_ptr<Number>() + token * layers_ * q_size);
      }
    });
    tiles::finish<Number>(lsa_, attended, eps_, layers, room);
    tiles::for_rows(count, [&](int64_t row) {
      mean(layers + row * layers_ * layer_size_, summary.data_ptr<Number>() + row * layer_size_);
      tiles::embed(numbers<Number>(tensors_[4]), size_, rows + row * size_);
    });
    tiles::product<Number>(tiles::rows_of(summary), tensors_[3], tiles::AddToStream{rows, size_});
  }

  // One token's layers, [L, width] of queries, keys and values; queries and keys are rotated in place.
  void attend(Number* qkv, int64_t width, int64_t q_size, Number* out) const {
    const int64_t half = lsa_head_dim_ / 2, keys = lsa_kv_heads_ * lsa_head_dim_;
    for (int64_t layer = 0; layer < layers_; ++layer) {
      for (Number* head = qkv + layer * width; head < qkv + layer * width + q_size + keys; head += lsa_head_dim_) {
        tiles::rotate(head, numbers<Number>(tensors_[9]) + layer * half, numbers<Number>(tensors_[10]) + layer * half, half, head);
      }
    }
    AmongLayers<Number> among(layers_, lsa_head_dim_);
    for (int64_t kv = 0; kv < keys; kv += lsa_head_dim_) {
      for (int64_t layer = 0; layer < layers_; ++layer) {
        const Number* key = qkv + layer * width + q_size + kv;
        among.key(layer, key, key + keys);
      }
      for (int64_t head = kv; head < q_size; head += keys) among.queries(qkv + head, width, out + head, q_size);
    }
  }

  // A token's mean over its layers [L, E_kv].
  SIMD void mean(const float* layers, Number* out) const {
    const wide::Floats share = wide::all(1.0f / static_cast<float>(layers_));
    for (int64_t i = 0; i < layer_size_; i += kTile) {
      wide::Floats sum = wide::zero();
      for (int64_t layer = 0; layer < layers_; ++layer) sum = sum + wide::load(layers + layer * layer_size_ + i);
      wide::narrow(wide::first(layer_size_ - i), out + i, sum * share);
    }
  }

  void check(
      const Tokens& tokens, const std::vector<at::Tensor>& tapped, const std::vector<at::Tensor>& target,
      const std::vector<at::Tensor>& caches, const std::vector<int64_t>& scratches) const {
    check(tokens, caches, scratches);
    TORCH_CHECK(static_cast<int64_t>(target.size()) == layers_, "LSA over ", layers_, " layers got ", target.size());
    TORCH_CHECK(tapped.size() == (has_entry() ? 1 : 0), "an entry reads hidden states, and nothing else does");
    for (const at::Tensor& hidden : tapped) {
      TORCH_CHECK(
          tiles::is_stored<Number>(hidden) && hidden.dim() == 2 && hidden.size(0) == tokens.count &&
              hidden.size(1) == size_,
          "hidden states have other sizes");
    }
    for (const at::Tensor& layer : target) check(tokens, layer, layer_size_, scratches[0]);
  }

  void check(const Tokens& tokens, const std::vector<at::Tensor>& caches, const std::vector<int64_t>& scratches) const {
    TORCH_CHECK(tokens.count > 0, "no tokens");
    TORCH_CHECK(caches.size() == (has_entry() ? 3 : 2) && scratches.size() == caches.size() + 1, "a cache or its scratch rows are missing");
    for (size_t i = 0; i < caches.size(); ++i) check(tokens, caches[i], i < 2 ? 2 * kv_heads_ * head_dim_ : size_, scratches[i + 1]);
    for (int64_t row = 0; row < tokens.count; ++row) {
      for (const int64_t token : {tokens.ids[row], paired() ? tokens.previous[row] : 0}) {
        TORCH_CHECK(token >= 0 && token < tensors_[0].size(0), "no token ", token);
      }
      TORCH_CHECK(tokens.positions[row] < tensors_[1].size(0), "no position ", tokens.positions[row]);
    }
  }

  void check(const Tokens& tokens, const at::Tensor& window, int64_t width, int64_t scratch) const {
    TORCH_CHECK(
        tiles::is_stored<Number>(window) && window.dim() == 3 && window.size(2) == width,
        "a cache has other sizes");
    for (int64_t row = 0; row < tokens.count; ++row) {
      const int64_t slot = tokens.slots[row], position = tokens.positions[row];
      TORCH_CHECK(slot >= 0 && slot < window.size(0), "no slot ", slot);
      TORCH_CHECK(position >= 0 && scratch + position < window.size(1), "no cache row ", position);
    }
  }

  std::vector<at::Tensor> tensors_;
  tiles::Layer lsa_;
  int64_t kv_heads_, head_dim_, lsa_kv_heads_, lsa_head_dim_, size_, layers_, layer_size_;
  double eps_;
};

#else

template <class Number>
struct DrafterMemory : torch::CustomClassHolder {
  DrafterMemory(std::vector<at::Tensor>, int64_t, int64_t, int64_t, int64_t, double) {
    TORCH_CHECK(false, "compiled by a compiler that does not know AVX512-BF16");
  }
  void remember(
      const at::Tensor&, const std::vector<at::Tensor>&, const std::vector<at::Tensor>&, const std::vector<at::Tensor>&,
      const std::vector<int64_t>&) {}
  void remember_rows(
      const std::vector<int64_t>&, const std::vector<at::Tensor>&, const std::vector<int64_t>&, const std::vector<at::Tensor>&,
      const std::vector<at::Tensor>&, const std::vector<int64_t>&) {}
  std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<double>> draft(
      const c10::intrusive_ptr<moaserve::BlockDrafter<Number>>&, const std::vector<int64_t>&, const std::vector<at::Tensor>&,
      const std::vector<int64_t>&, const std::vector<std::vector<int64_t>>&, const std::vector<at::Tensor>&, int64_t, int64_t, int64_t,
      double, double) {
    return {};
  }
  void pair(const at::Tensor&, const std::vector<at::Tensor>&, const std::vector<int64_t>&) {}
};

#endif

}  // namespace

template <class Number>
void add_drafter_memory(torch::Library& library, const char* name) {
  library.class_<DrafterMemory<Number>>(name)
      .def(torch::init<std::vector<at::Tensor>, int64_t, int64_t, int64_t, int64_t, double>())
      .def("remember", &DrafterMemory<Number>::remember)
      .def("remember_rows", &DrafterMemory<Number>::remember_rows)
      .def("draft", &DrafterMemory<Number>::draft)
      .def("pair", &DrafterMemory<Number>::pair);
}

TORCH_LIBRARY_FRAGMENT(moaserve, library) {
  add_drafter_memory<at::BFloat16>(library, "DrafterMemory_bfloat16");
  add_drafter_memory<float>(library, "DrafterMemory_float32");
}
