// Causal attention among rows in bfloat16 and its gradients, by tiles or by vectors, for training on a CPU: PyTorch's kernels for it take
// half of a small target's update.
//
// A task is one text, one KV head and the query heads that read it. Scores are computed as S^T = K Q^T in blocks of 32 keys by 32
// queries, a vector for each key and 16 queries, so that probabilities and their gradients are factors of the next products without being
// turned. Softmax is in float32, by powers of 2; the way back computes it again from the logarithm of its sum (arXiv 2205.14135).

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "tiles.h"

namespace {
namespace causal {

struct Shape {
  int64_t batch, length, heads, kv_heads, head_dim;
};

Shape checked(const at::Tensor& queries, const at::Tensor& kv) {
  TORCH_CHECK(queries.dim() == 4 && kv.dim() == 5 && kv.size(2) == 2, "causal_attention: wrong dimensions");
  const Shape shape{queries.size(0), queries.size(1), queries.size(2), kv.size(3), queries.size(3)};
  TORCH_CHECK(
      kv.size(0) == shape.batch && kv.size(1) == shape.length && kv.size(4) == shape.head_dim && shape.kv_heads > 0 &&
          shape.heads % shape.kv_heads == 0 && shape.head_dim % 16 == 0 && queries.scalar_type() == at::kBFloat16 &&
          kv.scalar_type() == at::kBFloat16 && queries.is_contiguous() && kv.is_contiguous(),
      "causal_attention: queries, keys and values do not belong together, or are not dense in bfloat16");
  return shape;
}

#ifdef MOASERVE_TILES

using tiles::kTile;
using tiles::kTileBytes;
using tiles::kTileFloats;
using tiles::Operand;

constexpr int64_t kBlock = 32;  // keys, or queries, of a step: what one row of a tile holds in bfloat16
constexpr int64_t kChunk = 4;   // blocks of queries whose probabilities are kept for one product

using Bytes = std::vector<char, tiles::Aligned<char>>;
using Floats = std::vector<float, tiles::Aligned<float>>;

// One head's rows: one every `row` numbers.
template <class Number>
struct Rows {
  Number* data;
  int64_t row;
};

// How many blocks rows make, and how many tiles a block is wide: `steps` where a product goes over the head's numbers, of which it takes 32
// at a time, and `columns` where these are its outcome.
struct Layout {
  int64_t length, head_dim, blocks, steps, columns;

  explicit Layout(const Shape& s)
      : length(s.length),
        head_dim(s.head_dim),
        blocks((s.length + kBlock - 1) / kBlock),
        steps((s.head_dim + kBlock - 1) / kBlock),
        columns(s.head_dim / kTile) {}
  int64_t stepped() const { return blocks * 2 * steps * kTileBytes; }
  int64_t paired() const { return blocks * columns * kTileBytes; }
};

// Rows as the left factor of a product over the head's numbers, or as the right one, 16 rows a tile; those behind the last are 0.
template <bool right>
SIMD void pack_steps(Rows<const at::BFloat16> x, const Layout& layout, Bytes& to) {
  to.resize(layout.stepped());
  char* tile = to.data();
  for (int64_t first = 0; first < layout.blocks * kBlock; first += kTile) {
    for (int64_t step = 0; step < layout.steps; ++step, tile += kTileBytes) {
      const __mmask32 within = tiles::first_words(layout.head_dim - step * kBlock);
      __m512i r[16];
      for (int64_t i = 0; i < kTile; ++i) {
        const bool there = first + i < layout.length;
        r[i] = there ? _mm512_maskz_loadu_epi16(within, x.data + (first + i) * x.row + step * kBlock) : _mm512_setzero_si512();
      }
      if constexpr (right) tiles::transpose(r);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + 64 * i, r[i]);
    }
  }
}

// Rows as the right factor of a product over themselves, or, turned, as the left one: 32 rows and 16 of the head's numbers a tile.
template <bool left>
SIMD void pack_pairs(Rows<const at::BFloat16> x, const Layout& layout, Bytes& to) {
  to.resize(layout.paired());
  char* tile = to.data();
  for (int64_t first = 0; first < layout.blocks * kBlock; first += kBlock) {
    for (int64_t column = 0; column < layout.columns; ++column, tile += kTileBytes) {
      __m512i r[16];
      for (int64_t i = 0; i < kTile; ++i) {
        const int64_t row = first + 2 * i;
        const auto* from = reinterpret_cast<const __m256i*>(x.data + row * x.row + column * kTile);
        const auto* below = reinterpret_cast<const __m256i*>(x.data + (row + 1) * x.row + column * kTile);
        __m512i both = row < layout.length ? _mm512_zextsi256_si512(_mm256_loadu_si256(from)) : _mm512_setzero_si512();
        if (row + 1 < layout.length) both = _mm512_inserti64x4(both, _mm256_loadu_si256(below), 1);
        r[i] = wide::paired(both);
      }
      if constexpr (left) tiles::transpose(r);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + 64 * i, r[i]);
    }
  }
}

// A block's scores [32 keys][32 queries], a tile for 16 by 16; keys behind their query get -inf where the block is on the diagonal.
SIMD void score(const Bytes& keys, const Bytes& queries, const Layout& layout, int64_t key_block, int64_t query_block, float* out) {
  const int64_t block = 2 * layout.steps * kTileBytes;
  const Operand a{keys.data() + key_block * block, 64, layout.steps * kTileBytes, kTileBytes};
  const Operand b{queries.data() + query_block * block, 64, layout.steps * kTileBytes, kTileBytes};
  tiles::multiply<2, 2>(a, kBlock, b, layout.steps, out, false);
  if (key_block != query_block) return;
  const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int64_t key = 0; key < kBlock; ++key) {
    for (int64_t tile = 0; tile < 2; ++tile) {
      const int64_t earlier = std::clamp<int64_t>(key - tile * kTile, 0, kTile);
      const auto hidden = static_cast<__mmask16>((1u << earlier) - 1);
      _mm512_mask_store_ps(out + (key / kTile * 2 + tile) * kTileFloats + key % kTile * kTile, hidden, none);
    }
  }
}

// Products of `columns` left tiles of a block, over `steps` blocks, with the pairs of two tiles of queries: out [column][2].
SIMD void multiply_columns(const char* left, const char* pairs, const Layout& layout, int64_t steps, float* out, bool add) {
  const int64_t row_of_left = layout.columns * kTileBytes;
  const Operand b{pairs, 64, kTileBytes, 2 * kTileBytes};
  for (int64_t column = 0; column < layout.columns; column += 2, out += 4 * kTileFloats) {
    const Operand a{left + column * kTileBytes, 64, kTileBytes, row_of_left};
    if (column + 1 < layout.columns) {
      tiles::multiply<2, 2>(a, kBlock, b, steps, out, add);
    } else {
      tiles::multiply<1, 2>(a, kTile, b, steps, out, add);
    }
  }
}

// Writes what `multiply_columns` leaves, times a factor for each query, as the block's rows.
SIMD void write_turned(const float* sums, const __m512* factors, const Layout& layout, int64_t block, Rows<at::BFloat16> to) {
  for (int64_t column = 0; column < layout.columns; ++column) {
    for (int64_t tile = 0; tile < 2; ++tile, sums += kTileFloats) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(sums + 16 * i), factors[tile]));
      tiles::transpose(r);
      const int64_t first = block * kBlock + tile * kTile, count = std::clamp<int64_t>(layout.length - first, 0, kTile);
      for (int64_t i = 0; i < count; ++i) {
        const auto values = (__m256i)_mm512_cvtneps_pbh(_mm512_castsi512_ps(r[i]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.data + (first + i) * to.row + column * kTile), values);
      }
    }
  }
}

// One KV head's part of the attention of one text.
class Forward {
 public:
  Forward(const Shape& shape, Rows<const at::BFloat16> keys, Rows<const at::BFloat16> values)
      : layout_(shape), scale_(tiles::to_exponent(shape.head_dim)) {
    pack_steps<false>(keys, layout_, keys_);
    pack_pairs<true>(values, layout_, values_);
    scores_.resize(layout_.blocks * 4 * kTileFloats);
    probabilities_.resize(layout_.blocks * 2 * kTileBytes);
    out_.resize(layout_.columns * 2 * kTileFloats);
  }

  // `logsum` [length]: the logarithm, to the base of 2, of what each query's exponentials add up to.
  SIMD void run(Rows<const at::BFloat16> queries, Rows<at::BFloat16> out, float* logsum) {
    pack_steps<true>(queries, layout_, queries_);
    for (int64_t block = 0; block < layout_.blocks; ++block) {
      for (int64_t key = 0; key <= block; ++key) score(keys_, queries_, layout_, key, block, scores_.data() + key * 4 * kTileFloats);
      __m512 factors[2];
      for (int64_t tile = 0; tile < 2; ++tile) factors[tile] = softmax(block, tile, logsum);
      multiply_columns(values_.data(), probabilities_.data(), layout_, block + 1, out_.data(), false);
      write_turned(out_.data(), factors, layout_, block, out);
    }
  }

 private:
  // Turns 16 queries' scores into exponentials and returns one over their sums.
  SIMD __m512 softmax(int64_t block, int64_t tile, float* logsum) {
    const __m512 scale = _mm512_set1_ps(scale_);
    const __m512 least = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 most[2] = {least, least};
    const auto of = [&](int64_t half) { return scores_.data() + (half * 2 + tile) * kTileFloats; };
    for (int64_t half = 0; half < 2 * (block + 1); ++half) {
      for (int i = 0; i < 16; ++i) most[i % 2] = _mm512_max_ps(most[i % 2], _mm512_load_ps(of(half) + 16 * i));
    }
    const __m512 shift = _mm512_mul_ps(_mm512_max_ps(most[0], most[1]), scale);
      __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t half = 0; half < 2 * (block + 1); ++half) {
      char* to = probabilities_.data() + (half / 2 * 2 + tile) * kTileBytes + half % 2 * kTileBytes / 2;
      for (int pair = 0; pair < 8; ++pair) {
        const float* from = of(half) + 32 * pair;
        const __m512 even = wide::power_of_two(_mm512_fmsub_ps(_mm512_load_ps(from), scale, shift));
        const __m512 odd = wide::power_of_two(_mm512_fmsub_ps(_mm512_load_ps(from + 16), scale, shift));
        sums[0] = _mm512_add_ps(sums[0], even);
        sums[1] = _mm512_add_ps(sums[1], odd);
        _mm512_store_si512(to + 64 * pair, wide::paired(wide::narrowed(even, odd)));
      }
    }
    const __m512 sum = _mm512_add_ps(sums[0], sums[1]);
    alignas(64) float each[16], shifts[16];
    _mm512_store_ps(each, sum);
    _mm512_store_ps(shifts, shift);
    const int64_t first = block * kBlock + tile * kTile, count = std::clamp<int64_t>(layout_.length - first, 0, kTile);
    for (int64_t i = 0; i < count; ++i) logsum[first + i] = shifts[i] + std::log2(each[i]);
    return _mm512_div_ps(_mm512_set1_ps(1.0f), sum);
  }

  const Layout layout_;
  const float scale_;
  Bytes keys_, values_, queries_, probabilities_;
  Floats scores_, out_;
};

// The gradients of one KV head and its query heads.
class Backward {
 public:
  Backward(const Shape& shape, Rows<const at::BFloat16> keys, Rows<const at::BFloat16> values)
      : layout_(shape), scale_(tiles::to_exponent(shape.head_dim)), factor_(1.0f / std::sqrt(static_cast<float>(shape.head_dim))) {
    pack_steps<false>(keys, layout_, keys_);
    pack_steps<false>(values, layout_, values_);
    pack_pairs<true>(keys, layout_, keys_turned_);
    for (Floats* sums : {&grad_queries_, &grad_keys_, &grad_values_}) sums->resize(layout_.blocks * layout_.columns * 2 * kTileFloats);
    logsum_.resize(layout_.blocks * kBlock);
    pull_.resize(layout_.blocks * kBlock);
  }

  // Adds one query head's part to the gradients of keys and values, and writes that of its queries.
  SIMD void run(
      Rows<const at::BFloat16> queries, Rows<const at::BFloat16> out, Rows<const at::BFloat16> grad, const float* logsum,
      Rows<at::BFloat16> grad_queries) {
    pack_steps<true>(queries, layout_, queries_);
    pack_pairs<false>(queries, layout_, queries_paired_);
    pack_steps<true>(grad, layout_, grad_);
    pack_pairs<false>(grad, layout_, grad_paired_);
    std::fill(std::copy_n(logsum, layout_.length, logsum_.begin()), logsum_.end(), std::numeric_limits<float>::infinity());
    for (int64_t row = 0; row < layout_.length; ++row) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t i = 0; i < layout_.head_dim; i += kTile) {
        sum = _mm512_fmadd_ps(wide::load_widened(out.data + row * out.row + i), wide::load_widened(grad.data + row * grad.row + i), sum);
      }
      pull_[row] = _mm512_reduce_add_ps(sum);
    }
    for (int64_t key = 0; key < layout_.blocks; ++key) {
      for (int64_t first = key; first < layout_.blocks; first += kChunk) {
        const int64_t count = std::min(kChunk, layout_.blocks - first);
        for (int64_t held = 0; held < count; ++held) block(key, first + held, held);
        const bool add = started_ || first > key;
        multiply_rows(probabilities_, grad_paired_, key, first, count, grad_values_, add);
        multiply_rows(grad_scores_, queries_paired_, key, first, count, grad_keys_, add);
      }
    }
    started_ = true;
    const __m512 factors[2] = {_mm512_set1_ps(factor_), _mm512_set1_ps(factor_)};
    for (int64_t each = 0; each < layout_.blocks; ++each) {
      write_turned(grad_queries_.data() + each * layout_.columns * 2 * kTileFloats, factors, layout_, each, grad_queries);
    }
  }

  SIMD void write(Rows<at::BFloat16> keys, Rows<at::BFloat16> values) const {
    write_rows(grad_keys_, factor_, keys);
    write_rows(grad_values_, 1.0f, values);
  }

 private:
  // A block's probabilities and the gradients of its scores, and what these add to the queries' gradients.
  SIMD void block(int64_t key, int64_t query, int64_t held) {
    score(keys_, queries_, layout_, key, query, scores_);
    const int64_t size = 2 * layout_.steps * kTileBytes;
    const Operand a{values_.data() + key * size, 64, layout_.steps * kTileBytes, kTileBytes};
    const Operand b{grad_.data() + query * size, 64, layout_.steps * kTileBytes, kTileBytes};
    tiles::multiply<2, 2>(a, kBlock, b, layout_.steps, grad_probabilities_, false);
    const __m512 scale = _mm512_set1_ps(scale_);
      __m512 logsum[2], pull[2];
    for (int tile = 0; tile < 2; ++tile) {
      logsum[tile] = _mm512_load_ps(logsum_.data() + query * kBlock + tile * kTile);
      pull[tile] = _mm512_load_ps(pull_.data() + query * kBlock + tile * kTile);
    }
    for (int64_t pair = 0; pair < kTile; ++pair) {
      const int64_t in_tile = pair / 8 * 2 * kTileFloats + pair % 8 * 2 * kTile, left = (held * kBlock + 2 * pair) * 64;
      __m512 p[2][2], s[2][2];  // of two keys, 16 queries each
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
#pragma GCC unroll 2
        for (int tile = 0; tile < 2; ++tile) {
          const int64_t at = in_tile + tile * kTileFloats + odd * kTile;
          p[odd][tile] = wide::power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores_ + at), scale, logsum[tile]));
          s[odd][tile] = _mm512_mul_ps(p[odd][tile], _mm512_sub_ps(_mm512_load_ps(grad_probabilities_ + at), pull[tile]));
        }
        _mm512_store_si512(probabilities_ + left + odd * 64, (__m512i)_mm512_cvtne2ps_pbh(p[odd][1], p[odd][0]));
        _mm512_store_si512(grad_scores_ + left + odd * 64, (__m512i)_mm512_cvtne2ps_pbh(s[odd][1], s[odd][0]));
      }
#pragma GCC unroll 2
      for (int tile = 0; tile < 2; ++tile) {
        const auto both = (__m512i)_mm512_cvtne2ps_pbh(s[1][tile], s[0][tile]);
        _mm512_store_si512(grad_paired_scores_ + tile * kTileBytes + pair * 64, wide::paired(both));
      }
    }
    float* out = grad_queries_.data() + query * layout_.columns * 2 * kTileFloats;
    multiply_columns(keys_turned_.data() + key * layout_.columns * kTileBytes, grad_paired_scores_, layout_, 1, out, key > 0);
  }

  // Products of a chunk's blocks, a row of tiles for 16 keys, with the queries' rows.
  SIMD void multiply_rows(const char* left, const Bytes& right, int64_t key, int64_t first, int64_t count, Floats& sums, bool add) const {
    const Operand a{left, 64, kTileBytes, 2 * kTileBytes};
    float* out = sums.data() + key * layout_.columns * 2 * kTileFloats;
    for (int64_t column = 0; column < layout_.columns; column += 2, out += 4 * kTileFloats) {
      const Operand b{right.data() + (first * layout_.columns + column) * kTileBytes, 64, kTileBytes, layout_.columns * kTileBytes};
      if (column + 1 < layout_.columns) {
        tiles::multiply<2, 2>(a, kBlock, b, count, out, add);
      } else {
        tiles::multiply<2, 1>(a, kBlock, b, count, out, add);
      }
    }
  }

  SIMD void write_rows(const Floats& sums, float factor, Rows<at::BFloat16> to) const {
    for (int64_t row = 0; row < layout_.length; ++row) {
      const float* block = sums.data() + row / kBlock * layout_.columns * 2 * kTileFloats;
      for (int64_t column = 0; column < layout_.columns; ++column) {
        const int64_t pair = column / 2 * 2, width = std::min<int64_t>(2, layout_.columns - pair);
        const int64_t tile = pair * 2 + row % kBlock / kTile * width + column % 2;
        const __m512 values = _mm512_mul_ps(_mm512_load_ps(block + tile * kTileFloats + row % kTile * kTile), _mm512_set1_ps(factor));
        _mm256_storeu_si256(
            reinterpret_cast<__m256i*>(to.data + row * to.row + column * kTile), (__m256i)_mm512_cvtneps_pbh(values));
      }
    }
  }

  const Layout layout_;
  const float scale_, factor_;
  bool started_ = false;
  Bytes keys_, values_, keys_turned_, queries_, queries_paired_, grad_, grad_paired_;
  Floats grad_queries_, grad_keys_, grad_values_, logsum_, pull_;  // pull: what all probabilities' gradients have in common
  alignas(64) float scores_[4 * kTileFloats], grad_probabilities_[4 * kTileFloats];
  alignas(64) char probabilities_[kChunk * 2 * kTileBytes], grad_scores_[kChunk * 2 * kTileBytes], grad_paired_scores_[2 * kTileBytes];
};

// Where tensors' heads lie.
template <class Number>
struct Heads {
  Number* data;
  int64_t text, row, head_dim;

  Heads(Number* first, const Shape& s, int64_t heads)
      : data(first), text(s.length * heads * s.head_dim), row(heads * s.head_dim), head_dim(s.head_dim) {}
  Rows<Number> of(int64_t batch, int64_t head) const { return {data + batch * text + head * head_dim, row}; }
};

template <class Work>
void each_kv_head(const Shape& s, const Work& work) {
  at::parallel_for(0, s.batch * s.kv_heads, 1, [&](int64_t begin, int64_t end) {
    tiles::configure();
    for (int64_t index = begin; index < end; ++index) work(index / s.kv_heads, index % s.kv_heads);
    tiles::release();
  });
}

#endif

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& queries, const at::Tensor& kv) {
  const Shape s = checked(queries, kv);
#ifdef MOASERVE_TILES
  TORCH_CHECK(tiles::available(), "causal_attention: this CPU lacks what operators are compiled for");
  at::Tensor out = at::empty(queries.sizes(), queries.options());
  at::Tensor logsum = at::empty({s.batch, s.heads, s.length}, queries.options().dtype(at::kFloat));
  const Heads<const at::BFloat16> rows(queries.const_data_ptr<at::BFloat16>(), s, s.heads);
  const Heads<const at::BFloat16> both(kv.const_data_ptr<at::BFloat16>(), s, 2 * s.kv_heads);
  const Heads<at::BFloat16> to(out.data_ptr<at::BFloat16>(), s, s.heads);
  auto* logsums = logsum.data_ptr<float>();
  each_kv_head(s, [&](int64_t text, int64_t kv_head) {
    Forward task(s, both.of(text, kv_head), both.of(text, s.kv_heads + kv_head));
    for (int64_t head = kv_head; head < s.heads; head += s.kv_heads) {
      task.run(rows.of(text, head), to.of(text, head), logsums + (text * s.heads + head) * s.length);
    }
  });
  return {out, logsum};
#else
  TORCH_CHECK(false, "causal_attention: compiled by a compiler that does not know AVX512-BF16");
#endif
}

std::tuple<at::Tensor, at::Tensor> backward(
    const at::Tensor& grad, const at::Tensor& queries, const at::Tensor& kv, const at::Tensor& out, const at::Tensor& logsum) {
  const Shape s = checked(queries, kv);
  TORCH_CHECK(
      grad.sizes() == queries.sizes() && grad.scalar_type() == at::kBFloat16 && out.sizes() == queries.sizes() && out.is_contiguous() &&
          logsum.is_contiguous(),
      "causal_attention: gradients do not belong to the queries");
#ifdef MOASERVE_TILES
  const at::Tensor dense = grad.contiguous();
  at::Tensor grad_queries = at::empty(queries.sizes(), queries.options()), grad_kv = at::empty(kv.sizes(), kv.options());
  const Heads<const at::BFloat16> rows(queries.const_data_ptr<at::BFloat16>(), s, s.heads);
  const Heads<const at::BFloat16> both(kv.const_data_ptr<at::BFloat16>(), s, 2 * s.kv_heads);
  const Heads<const at::BFloat16> attended(out.const_data_ptr<at::BFloat16>(), s, s.heads);
  const Heads<const at::BFloat16> grads(dense.const_data_ptr<at::BFloat16>(), s, s.heads);
  const Heads<at::BFloat16> to(grad_queries.data_ptr<at::BFloat16>(), s, s.heads);
  const Heads<at::BFloat16> to_both(grad_kv.data_ptr<at::BFloat16>(), s, 2 * s.kv_heads);
  const auto* logsums = logsum.const_data_ptr<float>();
  each_kv_head(s, [&](int64_t text, int64_t kv_head) {
    Backward task(s, both.of(text, kv_head), both.of(text, s.kv_heads + kv_head));
    for (int64_t head = kv_head; head < s.heads; head += s.kv_heads) {
      const float* of_head = logsums + (text * s.heads + head) * s.length;
      task.run(rows.of(text, head), attended.of(text, head), grads.of(text, head), of_head, to.of(text, head));
    }
    task.write(to_both.of(text, kv_head), to_both.of(text, s.kv_heads + kv_head));
  });
  return {grad_queries, grad_kv};
#else
  TORCH_CHECK(false, "causal_attention: compiled by a compiler that does not know AVX512-BF16");
#endif
}

}  // namespace causal
}  // namespace

TORCH_LIBRARY_IMPL(moaserve, CPU, library) {
  library.impl("causal_attention", &causal::forward);
  library.impl("causal_attention_backward", &causal::backward);
}
