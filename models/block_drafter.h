// A block drafter's trees in one call: SA and CA over the roots and their stand-ins, then level by level the recurrent head, the
// LM head and the choice of nodes. Without it each level is a call of its own, and most of a call is not arithmetic.
//
// What is computed stands in moa_network.py and growth.py; weights are of the type that is stored, and the streams of residuals and states float32.

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/custom_class.h>

#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "cached_attention.h"
#include "tiled_layers.h"
#include "tree_growth.h"

namespace moaserve {

#ifdef MOASERVE_SIMD

using tiles::numbers;
using tiles::written;

// silu(gate) * up of what parents' states, nodes' tokens and their positions contribute together.
template <class Number>
struct StepGate {
  tiles::Gate<Number> gate;
  const Number* const* tokens;
  const float* const* positions;

  SIMD inline void operator()(int64_t panel, int64_t row, const float* sums) const {
    alignas(64) float all[tiles::kPanel];
    for (int64_t half = 0; half < tiles::kPanel; half += tiles::kTile) {
      const int64_t at = panel * tiles::kPanel + half;
      const wide::Floats token = wide::widen(wide::first(tiles::kTile), tokens[row] + at);
      const wide::Floats both = token + wide::load(positions[row] + at);
      wide::store(all + half, wide::load(sums + half) + both);
    }
    gate(panel, row, all);
  }
};

// Where texts end and what is known of them, each [B], and their rare tokens [B, M], of which `most` is the largest number.
struct Texts {
  int64_t count;
  const int64_t *roots, *starts, *lengths, *memory_ends, *previous;
  const std::vector<std::vector<int64_t>>& rare;
  int64_t most = 0;

  Texts(const std::vector<int64_t>& texts, const std::vector<std::vector<int64_t>>& rare_tokens)
      : count(static_cast<int64_t>(rare_tokens.size())), roots(texts.data()), starts(roots + count), lengths(starts + count),
        memory_ends(lengths + count), previous(memory_ends + count), rare(rare_tokens) {
    TORCH_CHECK(count > 0 && texts.size() == 5 * rare.size(), "texts are [5, B], and each has rare tokens");
    for (const auto& tokens : rare) most = std::max(most, static_cast<int64_t>(tokens.size()));
  }
};

// What a token contributes wherever it stands: to a step [2I], and where levels copy to the queries of itself and of the token
// behind it, each filled up to whole panels.
template <class Number>
struct Contribution {
  std::vector<Number> step, own, before;
};

template <class Number>
using Known = std::shared_ptr<const Contribution<Number>>;

template <class Number>
struct BlockDrafter : torch::CustomClassHolder {
  // `tensors`: embedding, cosines and sines [positions, d/2], the head, the ids [K] that its outputs stand for, the rows of all
  // tokens' outputs [V, E], the stand-ins; the block's norm of states and their weight, its norm of features and their weight, and
  // what leads down; SA's six (as a decoder's layer), CA's six (only the queries of its first weight); the block's norm of tokens
  // and their weight; if there is an entry, its norm and weight; and where memory is paired, the entry's weight for the tokens
  // before, and of what copies: its norm, its queries' weights [q] for tokens and those before, and what leads from its q outputs to
  // states. Gates and what they let through stand in turns of 16; q is filled up with zeros to whole panels.
  BlockDrafter(std::vector<at::Tensor> tensors, int64_t kv_heads, int64_t head_dim, double eps)
      : tensors_(std::move(tensors)), kv_heads_(kv_heads), head_dim_(head_dim), eps_(eps) {
    TORCH_CHECK(tiles::available(), "this CPU lacks what operators are compiled for");
    TORCH_CHECK(
        tensors_.size() == 26 || tensors_.size() == 28 || tensors_.size() == 33,
        "a block drafter has 26 tensors, with an entry 28, where memory is paired 33");
    for (const at::Tensor& tensor : tensors_) {
      TORCH_CHECK(tensor.scalar_type() == at::kLong ? tensor.is_contiguous() : tiles::is_read<Number>(tensor), "weights are dense and of one type");
    }
    const auto layer = [&](size_t i) {
      return tiles::Layer{tensors_[i], tensors_[i + 1], tensors_[i + 2], tensors_[i + 3], tensors_[i + 4], tensors_[i + 5]};
    };
    sa_ = layer(12), ca_ = layer(18);
    size_ = embedding().size(1), block_ = stand_ins().size(0) + 1, outputs_ = ids().size(0), step_ = 2 * down().size(1) * tiles::kPairs;
    stays_near_ = head().nbytes() + from_state().nbytes() + down().nbytes() + (paired() ? from_copied().nbytes() : 0) <= kSecondLevel;
    queries_ = sa_.output.size(1) * tiles::kPairs, groups_ = queries_ / (kv_heads * head_dim);
    asked_ = groups_ * head_dim;
    if (paired()) TORCH_CHECK((asked_ + tiles::kPanel - 1) / tiles::kPanel * tiles::kPanel == padded(), "what copies asks the first KV head");
    if (outputs_ == embedding().size(0)) return;  // of all tokens it would take seconds and much memory
    constexpr int64_t kAtOnce = 256;
    for (int64_t first = 0; first < outputs_; first += kAtOnce) {
      const int64_t* tokens = numbers<int64_t>(ids()) + first;
      const auto made = contributions(tokens, std::min(kAtOnce, outputs_ - first));
      for (size_t i = 0; i < made.size(); ++i) frequent_.emplace(tokens[i], made[i]);
    }
  }

  // Each node's token, its parent and its probability, as in DraftTree: [B·N].
  using Nodes = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<double>>;

  // Trees of at most `nodes` nodes for each text of `texts` [5·B]: roots, and as in growth.Text starts, lengths, memory's ends and
  // the tokens before the roots; `rare` are each one's rare tokens. Lists, as making tensors of them takes longer.
  // `caches` are the dense windows of SA's keys and values, of CA's and, for an entry, of memory itself; `sampling` is as in
  // growth.Sampling, or empty.
  Nodes draft(
      const std::vector<at::Tensor>& caches, const std::vector<int64_t>& numbers_of_texts, const std::vector<std::vector<int64_t>>& rare,
      const std::vector<at::Tensor>& sampling, int64_t depth, int64_t breadth, int64_t nodes, double min_reach, double temperature) {
    const Texts texts(numbers_of_texts, rare);
    check(caches, texts, sampling, depth, breadth, nodes);
    const int64_t positions = std::min(depth, block_);
    const auto floats = embedding().options().dtype(at::kFloat);
    const at::Tensor features = run_block(caches, texts, positions);
    const at::Tensor of_positions = at::empty({texts.count * positions, step_}, floats);
    const at::Tensor normed = at::empty({texts.count * positions, size_}, embedding().options());
    const auto* known_features = numbers<float>(features);
    tiles::normalize<Number>(known_features, feature_norm(), eps_, normed);
    tiles::product<Number>(tiles::rows_of(normed), from_feature(), tiles::ToFloats{written<float>(of_positions), step_});

    std::vector<growth::Sampling> settings = settings_of(sampling, texts.count);
    std::vector<growth::Tree> trees(texts.count);
    Levels levels(*this, texts.count * breadth, (texts.most + tiles::kPanel - 1) / tiles::kPanel * tiles::kPanel);
    std::optional<Copying> copying;
    if (paired()) copying.emplace(*this, texts, caches[1], breadth);
    for (int64_t level = 0; level < positions; ++level) {
      next_states(level, positions, texts, trees, features, of_positions, levels);
      if (copying) copying->add(level, trees, levels);
      const float* row = logits_of(texts, levels, stays_near_ && level > 0);
      double reach = 0.0;
      for (int64_t text = 0; text < texts.count; ++text) {
        std::vector<std::vector<growth::Likely>> likely;
        for (size_t node = 0; node < trees[text].open().size(); ++node, row += levels.outputs) {
          likely.push_back(growth::candidates(
              row, levels.outputs, outputs_of(texts, text), settings[text], texts.lengths[text] + level + 1,
              static_cast<float>(temperature), breadth));
        }
        reach += trees[text].grow(likely, breadth);
      }
      if (reach < min_reach * static_cast<double>(texts.count)) break;
    }
    return best_of(texts, trees, nodes);
  }

 private:
  const at::Tensor& embedding() const { return tensors_[0]; }
  const at::Tensor& head() const { return tensors_[3]; }
  const at::Tensor& ids() const { return tensors_[4]; }
  const at::Tensor& whole_head() const { return tensors_[5]; }
  const at::Tensor& stand_ins() const { return tensors_[6]; }
  const at::Tensor& state_norm() const { return tensors_[7]; }
  const at::Tensor& from_state() const { return tensors_[8]; }
  const at::Tensor& feature_norm() const { return tensors_[9]; }
  const at::Tensor& from_feature() const { return tensors_[10]; }
  const at::Tensor& down() const { return tensors_[11]; }
  bool has_entry() const { return tensors_.size() > 26; }
  bool paired() const { return tensors_.size() > 28; }
  const at::Tensor& entry_norm() const { return tensors_[26]; }
  const at::Tensor& from_copied() const { return tensors_[32]; }
  int64_t padded() const { return from_copied().size(1) * tiles::kPairs; }

  growth::Outputs outputs_of(const Texts& texts, int64_t text) const {
    return {numbers<int64_t>(ids()), outputs_, texts.rare[text].data(), static_cast<int64_t>(texts.rare[text].size())};
  }

  // What a token contributes: of those outside the draft vocabulary it is worked out when it is first asked for, which texts that
  // draft at the same time do too, and the latest are kept.
  Known<Number> contribution(int64_t token) {
    const auto frequent = frequent_.find(token);
    if (frequent != frequent_.end()) return frequent->second;
    const std::lock_guard<std::mutex> guard(others_mutex_);
    const auto other = others_.find(token);
    if (other != others_.end()) return other->second;
    if (others_.size() >= kMostOthers) others_.clear();
    return others_.emplace(token, contributions(&token, 1)[0]).first->second;
  }

  std::vector<Known<Number>> contributions(const int64_t* tokens, int64_t count) const {
    std::vector<Contribution<Number>> made(count);
    const at::Tensor normed = at::empty({count, size_}, embedding().options());
    const auto norm = [&](const at::Tensor& weight) {
      for (int64_t row = 0; row < count; ++row) norm_of_token(tokens[row], weight, written<Number>(normed) + row * size_);
    };
    const auto make = [&](std::vector<Number> Contribution<Number>::*part, const at::Tensor& weight, int64_t size) {
      std::vector<Number> rows(count * size);
      tiles::product<Number>(tiles::rows_of(normed), weight, tiles::ToRows<Number>{rows.data(), size});
      for (int64_t row = 0; row < count; ++row) {
        (made[row].*part).assign(rows.begin() + row * size, rows.begin() + (row + 1) * size);
      }
    };
    norm(tensors_[24]);
    make(&Contribution<Number>::step, tensors_[25], step_);
    if (paired()) {
      norm(tensors_[29]);
      make(&Contribution<Number>::own, tensors_[30], padded());
      make(&Contribution<Number>::before, tensors_[31], padded());
    }
    std::vector<Known<Number>> known;
    for (Contribution<Number>& each : made) known.push_back(std::make_shared<const Contribution<Number>>(std::move(each)));
    return known;
  }

  // Features [B·positions, E] of the roots and the stand-ins behind them.
  at::Tensor run_block(const std::vector<at::Tensor>& caches, const Texts& texts, int64_t positions) const {
    const int64_t rows = texts.count * positions, kv_size = 2 * kv_heads_ * head_dim_;
    const auto options = embedding().options();
    const at::Tensor out = at::empty({rows, size_}, options.dtype(at::kFloat)), queries = at::empty({rows, queries_}, options);
    const at::Tensor qkv = at::empty({rows, queries_ + kv_size}, options);
    const tiles::Room room(sa_, rows);
    auto* stream = written<float>(out);
    auto *projected = written<Number>(qkv), *asked = written<Number>(queries), *kept = written<Number>(caches[0]);
    tiles::for_rows(rows, [&](int64_t row) {
      const int64_t place = row % positions;
      const Number* from = place == 0 ? numbers<Number>(embedding()) + texts.roots[row / positions] * size_
                                        : numbers<Number>(stand_ins()) + (place - 1) * size_;
      tiles::embed(from, size_, stream + row * size_);
    });
    tiles::normalize<Number>(stream, sa_.input_norm, eps_, room.normed);
    tiles::product<Number>(tiles::rows_of(room.normed), sa_.qkv, tiles::ToRows<Number>{projected, queries_ + kv_size});
    tiles::for_rows(rows, [&](int64_t row) {
      const int64_t text = row / positions, place = row % positions;
      const Number* from = projected + row * (queries_ + kv_size);
      Number* keys = kept + (text * caches[0].size(1) + place) * kv_size;
      rotate(from, queries_, texts.lengths[text] + place, asked + row * queries_);
      rotate(from + queries_, kv_size / 2, texts.lengths[text] + place, keys);
      std::copy_n(from + queries_ + kv_size / 2, kv_size / 2, keys + kv_size / 2);
    });
    if (has_entry()) enter(caches[2], texts, positions, stream, room.normed);
    tiles::finish<Number>(sa_, cached_attention(queries, caches[0], seen(caches[0], texts, positions), kv_heads_), eps_, stream, room);

    tiles::normalize<Number>(stream, ca_.input_norm, eps_, room.normed);
    tiles::product<Number>(tiles::rows_of(room.normed), ca_.qkv, tiles::ToRows<Number>{asked, queries_});
    tiles::for_rows(rows, [&](int64_t row) {
      rotate(asked + row * queries_, queries_, texts.lengths[row / positions] + row % positions, asked + row * queries_);
    });
    const at::Tensor remembered = text_mask(caches[1], texts, texts.memory_ends).expand({-1, -1, positions * groups_, -1});
    tiles::finish<Number>(ca_, cached_attention(queries, caches[1], remembered, kv_heads_), eps_, stream, tiles::Room(ca_, rows));
    return out;
  }

  // The heads of a row at a position of the text.
  void rotate(const Number* from, int64_t size, int64_t position, Number* to) const {
    const int64_t half = head_dim_ / 2;
    const Number *cos = numbers<Number>(tensors_[1]) + position * half, *sin = numbers<Number>(tensors_[2]) + position * half;
    for (int64_t i = 0; i < size; i += head_dim_) tiles::rotate(from + i, cos, sin, half, to + i);
  }

  // What the stream starts from with an entry: the tokens' projection and the text's newest memory, in the place of embeddings, and
  // where memory is paired the projection of what stands before them.
  void enter(const at::Tensor& memories, const Texts& texts, int64_t positions, float* stream, const at::Tensor& normed) const {
    tiles::normalize<Number>(stream, entry_norm(), eps_, normed);
    const auto* memory = numbers<Number>(memories);
    for (int64_t row = 0; row < texts.count * positions; ++row) {
      const int64_t text = row / positions, end = texts.memory_ends[text];
      float* to = stream + row * size_;
      if (end <= texts.starts[text]) {
        std::fill_n(to, size_, 0.0f);
        continue;
      }
      // Paired, it stands in the root's row, as that of its own token lacks the root; an edge keeps the newest alone.
      const int64_t newest = std::min(paired() ? end : end - 1, memories.size(1) - 1);
      tiles::embed(memory + (text * memories.size(1) + newest) * size_, size_, to);
    }
    tiles::product<Number>(tiles::rows_of(normed), tensors_[27], tiles::AddToStream{stream, size_});
    if (!paired()) return;
    const at::Tensor before = at::empty_like(normed);
    auto* to = written<Number>(before);
    for (int64_t row = 0; row < texts.count * positions; ++row, to += size_) {
      if (row % positions == 0) {
        norm_of_token(texts.previous[row / positions], entry_norm(), to);
      } else {
        std::copy_n(numbers<Number>(normed) + (row - 1) * size_, size_, to);
      }
    }
    tiles::product<Number>(tiles::rows_of(before), tensors_[28], tiles::AddToStream{stream, size_});
  }

  // A token's embedding, normalised.
  SIMD void norm_of_token(int64_t token, const at::Tensor& weight, Number* to) const {
    std::vector<float> wide(size_);
    tiles::embed(numbers<Number>(embedding()) + token * size_, size_, wide.data());
    tiles::norm(wide.data(), numbers<Number>(weight), eps_, size_, to);
  }

  // Additive masks [B, 1, 1, S] of a cache's tokens from the texts' starts to their `ends`; SA's scratch rows stay hidden.
  at::Tensor text_mask(const at::Tensor& cache, const Texts& texts, const int64_t* ends, int64_t scratch = 0) const {
    const int64_t span = std::min(scratch + std::max<int64_t>(1, *std::max_element(ends, ends + texts.count)), cache.size(1));
    const at::Tensor mask = at::empty({texts.count, 1, 1, span}, embedding().options());
    auto* to = written<Number>(mask);
    for (int64_t text = 0; text < texts.count; ++text, to += span) {
      std::fill_n(to, span, static_cast<Number>(-std::numeric_limits<float>::infinity()));
      const int64_t first = std::min(texts.starts[text], ends[text]);
      std::fill(to + scratch + first, to + scratch + ends[text], Number(0));
    }
    return mask;
  }

  // What SA's queries see: the text, and of the scratch rows those up to their own.
  at::Tensor seen(const at::Tensor& cache, const Texts& texts, int64_t positions) const {
    const at::Tensor text = text_mask(cache, texts, texts.lengths, block_);
    const int64_t span = text.size(3), rows = positions * groups_;
    const at::Tensor mask = at::empty({texts.count, 1, rows, span}, embedding().options());
    const auto* from = numbers<Number>(text);
    auto* to = written<Number>(mask);
    for (int64_t row = 0; row < texts.count * rows; ++row, to += span) {
      std::copy_n(from + row / rows * span, span, to);
      std::fill_n(to, row % rows / groups_ + 1, Number(0));
    }
    return mask;
  }

  // What levels are computed in, one after the other: `rows` at most, of as many `outputs` as the head has and `rare` ones.
  struct Levels {
    int64_t outputs, rows = 0;
    at::Tensor states, before, normed, gated, logits;

    Levels(const BlockDrafter& drafter, int64_t most, int64_t rare)
        : outputs(drafter.outputs_ + rare),
          states(at::empty({most, drafter.size_}, drafter.embedding().options().dtype(at::kFloat))),
          before(at::empty(states.sizes(), states.options())),
          normed(at::empty({most, drafter.size_}, drafter.embedding().options())),
          gated(at::empty({most, drafter.step_ / 2}, normed.options())), logits(at::empty({most, outputs}, states.options())) {}

    tiles::Rows first_of(const at::Tensor& x) const {
      return {static_cast<const char*>(x.const_data_ptr()), x.size(1) * x.element_size(), rows};
    }
  };

  // States [B·w, E] of the trees' open nodes, from those of the level before.
  void next_states(
      int64_t level, int64_t positions, const Texts& texts, const std::vector<growth::Tree>& trees, const at::Tensor& features,
      const at::Tensor& of_positions, Levels& levels) {
    const auto width = static_cast<int64_t>(trees[0].open().size());
    const int64_t parents = levels.rows / texts.count;
    std::swap(levels.states, levels.before);
    levels.rows = texts.count * width;
    auto* stream = written<float>(levels.states);
    const auto* feature = numbers<float>(features);
    for (int64_t row = 0; row < levels.rows; ++row) {
      std::copy_n(feature + (row / width * positions + level) * size_, size_, stream + row * size_);
    }
    if (level == 0) return;  // a root may be any token, and has no parent
    const auto* from = numbers<float>(levels.before);
    auto* into = written<Number>(levels.normed);
    std::vector<Known<Number>> known(levels.rows);
    std::vector<const Number*> tokens(levels.rows);
    std::vector<const float*> places(levels.rows);
    for (int64_t row = 0; row < levels.rows; ++row) {
      const growth::Open& node = trees[row / width].open()[row % width];
      known[row] = contribution(outputs_of(texts, row / width)[node.output]);
      tokens[row] = known[row]->step.data();
      places[row] = numbers<float>(of_positions) + (row / width * positions + level) * step_;
      tiles::norm(from + (row / width * parents + node.parent) * size_, numbers<Number>(state_norm()), eps_, size_, into + row * size_);
    }
    const StepGate<Number> gate{{written<Number>(levels.gated), step_ / 2}, tokens.data(), places.data()};
    const bool near = stays_near_ && level > 1;
    tiles::product<Number>(levels.first_of(levels.normed), from_state(), gate, near);
    tiles::product<Number>(levels.first_of(levels.gated), down(), tiles::AddToStream{stream, size_}, near);
  }

  // What levels copy: nodes ask CA's first KV head for their token and the one before it, and what they find joins their states.
  class Copying {
   public:
    Copying(BlockDrafter& drafter, const Texts& texts, const at::Tensor& cache, int64_t breadth)
        : drafter_(drafter), texts_(texts), cache_(cache), mask_(drafter.text_mask(cache, texts, texts.memory_ends)),
          found_(at::zeros({texts.count * breadth, drafter.padded()}, drafter.embedding().options())),
          tokens_(texts.previous, texts.previous + texts.count) {}

    // Adds what a level's open nodes find to its states.
    void add(int64_t level, const std::vector<growth::Tree>& trees, Levels& levels) {
      const int64_t width = levels.rows / texts_.count, parents = static_cast<int64_t>(tokens_.size()) / texts_.count;
      const int64_t asked = drafter_.asked_;
      const at::Tensor queries = at::empty({levels.rows, asked}, found_.options());
      std::vector<int64_t> tokens(levels.rows);
      for (int64_t row = 0; row < levels.rows; ++row) {
        const int64_t text = row / width;
        const growth::Open& node = trees[text].open()[row % width];
        tokens[row] = level == 0 ? texts_.roots[text] : drafter_.outputs_of(texts_, text)[node.output];
        Number* to = written<Number>(queries) + row * asked;
        ask(drafter_.contribution(tokens[row])->own, drafter_.contribution(tokens_[text * parents + node.parent])->before, to);
        drafter_.rotate(to, asked, texts_.lengths[text] + level, to);
      }
      tokens_ = std::move(tokens);
      const at::Tensor mask = mask_.expand({-1, -1, width * drafter_.groups_, -1});
      const at::Tensor attended = cached_attention(queries, cache_, mask, drafter_.kv_heads_, sight_of(mask), 1);
      for (int64_t row = 0; row < levels.rows; ++row) {
        std::copy_n(numbers<Number>(attended) + row * asked, asked, written<Number>(found_) + row * found_.size(1));
      }
      const tiles::AddToStream write{written<float>(levels.states), drafter_.size_};
      tiles::product<Number>(levels.first_of(found_), drafter_.from_copied(), write, drafter_.stays_near_ && level > 1);
    }

   private:
    // The query of a token and the one before it.
    SIMD void ask(const std::vector<Number>& own, const std::vector<Number>& before, Number* to) const {
      const wide::Mask all = wide::first(tiles::kTile);
      for (int64_t i = 0; i < drafter_.asked_; i += tiles::kTile) {
        wide::narrow(wide::first(drafter_.asked_ - i), to + i, wide::widen(all, own.data() + i) + wide::widen(all, before.data() + i));
      }
    }

    BlockDrafter& drafter_;
    const Texts& texts_;
    const at::Tensor& cache_;
    const at::Tensor mask_;
    const at::Tensor found_;       // filled up with zeros to whole panels
    std::vector<int64_t> tokens_;  // of the level before, at first those before the roots
  };

  // The head's outputs for the level's states, and behind them those of rare tokens: [B·w, K + M].
  const float* logits_of(const Texts& texts, const Levels& levels, bool near) const {
    const auto* states = numbers<float>(levels.states);
    auto *entering = written<Number>(levels.normed);
    for (int64_t row = 0; row < levels.rows; ++row) tiles::narrow_row(states + row * size_, size_, entering + row * size_);
    auto* logits = written<float>(levels.logits);
    tiles::product<Number>(levels.first_of(levels.normed), head(), tiles::ToFloats{logits, levels.outputs}, near);
    if (levels.outputs == outputs_) return logits;
    const int64_t width = levels.rows / texts.count;
    for (int64_t text = 0; text < texts.count; ++text) {
      for (int64_t row = text * width; row < (text + 1) * width; ++row) {
        float* to = logits + row * levels.outputs + outputs_;
        std::fill_n(to, levels.outputs - outputs_, kNever);
        const std::vector<int64_t>& rare = texts.rare[text];
        for (size_t i = 0; i < rare.size(); ++i) {
          to[i] = dot(entering + row * size_, numbers<Number>(whole_head()) + rare[i] * size_);
        }
      }
    }
    return logits;
  }

  // Of a row that enters the head and a row of its weight.
  SIMD float dot(const Number* a, const Number* b) const {
    wide::Floats sum = wide::zero();
    for (int64_t i = 0; i < size_; i += tiles::kTile) {
      const wide::Mask within = wide::first(size_ - i);
      sum = wide::fma(wide::widen(within, a + i), wide::widen(within, b + i), sum);
    }
    return wide::sum(sum);
  }

  Nodes best_of(const Texts& texts, const std::vector<growth::Tree>& trees, int64_t nodes) const {
    const int64_t count = std::min(nodes, trees[0].size());
    std::vector<int64_t> tokens(texts.count * count), parents(texts.count * count);
    std::vector<double> probabilities(texts.count * count);
    for (int64_t text = 0; text < texts.count; ++text) {
      const int64_t at = text * count;
      trees[text].best(count, outputs_of(texts, text), tokens.data() + at, parents.data() + at, probabilities.data() + at);
    }
    return {std::move(tokens), std::move(parents), std::move(probabilities)};
  }

  static std::vector<growth::Sampling> settings_of(const std::vector<at::Tensor>& sampling, int64_t texts) {
    std::vector<growth::Sampling> settings(texts);
    if (sampling.empty()) return settings;
    for (int64_t text = 0; text < texts; ++text) {
      settings[text] = {
          numbers<int64_t>(sampling[0])[text], numbers<bool>(sampling[1])[text],
          numbers<float>(sampling[2])[text],   numbers<int64_t>(sampling[3])[text],
          numbers<float>(sampling[4])[text],   numbers<float>(sampling[5])[text]};
    }
    return settings;
  }

  void check(
      const std::vector<at::Tensor>& caches, const Texts& texts, const std::vector<at::Tensor>& sampling, int64_t depth,
      int64_t breadth, int64_t nodes) const {
    TORCH_CHECK(caches.size() == (has_entry() ? 3 : 2), "a drafter of ", has_entry() ? 3 : 2, " caches got ", caches.size());
    TORCH_CHECK(depth > 0 && depth <= block_ && nodes > 0, "trees of 1 to ", block_, " levels");
    TORCH_CHECK(breadth > 0 && std::max(breadth, growth::kCandidates) <= outputs_, "no more candidates than the head has outputs");
    TORCH_CHECK(sampling.empty() || sampling.size() == 6, "sampling has six settings");
    for (const at::Tensor& setting : sampling) TORCH_CHECK(setting.numel() == texts.count && setting.is_contiguous(), "one a text");
    const int64_t kv_size = 2 * kv_heads_ * head_dim_;
    for (size_t i = 0; i < caches.size(); ++i) {
      const at::Tensor& cache = caches[i];
      TORCH_CHECK(
          tiles::is_stored<Number>(cache) && cache.dim() == 3 && cache.size(0) == texts.count &&
              cache.size(1) > 0 && cache.size(2) == (i < 2 ? kv_size : size_),
          "a cache has other sizes");
    }
    for (int64_t text = 0; text < texts.count; ++text) {
      for (const int64_t token : {texts.roots[text], paired() ? texts.previous[text] : 0}) {
        TORCH_CHECK(token >= 0 && token < embedding().size(0), "no token ", token);
      }
      for (const int64_t token : texts.rare[text]) {
        TORCH_CHECK(token >= 0 && token < embedding().size(0), "no token ", token);
      }
      TORCH_CHECK(
          texts.starts[text] >= 0 && texts.lengths[text] >= 0 && texts.lengths[text] + block_ <= tensors_[1].size(0) &&
              texts.lengths[text] + block_ <= caches[0].size(1) && texts.memory_ends[text] >= 0 &&
              texts.memory_ends[text] <= texts.lengths[text] && texts.memory_ends[text] <= caches[1].size(1),
          "a text's ends lie outside");
    }
  }

  static constexpr size_t kSecondLevel = 2 << 20;  // bytes of a cache in which what each level reads may stay
  static constexpr size_t kMostOthers = 8192;      // tokens outside the draft vocabulary of which it is kept what they contribute
  static constexpr float kNever = -1e30f;          // the logit of what stands for no token: sums of -inf would be no numbers

  std::vector<at::Tensor> tensors_;
  tiles::Layer sa_, ca_;
  int64_t size_, block_, outputs_, step_, queries_, groups_, asked_, kv_heads_, head_dim_;
  double eps_;
  bool stays_near_;
  std::unordered_map<int64_t, Known<Number>> frequent_, others_;
  std::mutex others_mutex_;
};

#else

template <class Number>
struct BlockDrafter : torch::CustomClassHolder {
  BlockDrafter(std::vector<at::Tensor>, int64_t, int64_t, double) {
    TORCH_CHECK(false, "compiled by a compiler that does not know AVX512-BF16");
  }
  std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<double>> draft(
      const std::vector<at::Tensor>&, const std::vector<int64_t>&, const std::vector<std::vector<int64_t>>&, const std::vector<at::Tensor>&,
      int64_t, int64_t, int64_t, double, double) {
    return {};
  }
};

#endif

}  // namespace moaserve
