// Attention over a cache by tiles: see cached_attention.cpp.
//
// A task is one text, one KV head and up to 32 query rows. Keys are multiplied where they lie, as S^T = K Q^T, so that a vector holds one
// key's scores of 16 query rows; values are interleaved by pairs, as the second product wants them, once for all of a thread's tasks of a
// text and KV head.

#pragma once

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "cached_attention.h"
#include "tiles.h"

#ifdef MOASERVE_TILES

namespace tile_attention {

using tiles::kTile;
using tiles::first_words;
using tiles::kTileBytes;
using tiles::kTileFloats;
using tiles::multiply;
using tiles::Operand;
using tiles::transpose;

constexpr int64_t kBlock = kSightBlock;  // cache rows of a step: what one row of a tile holds in bfloat16
constexpr int64_t kChunk = 4;            // blocks whose scores are kept at a time, so that they stay in the first-level cache
constexpr int64_t kAhead = 2;            // blocks that are fetched before they are read
constexpr int64_t kFew = 4;              // rows of which four cache rows' scores fit one vector

// A text's and KV head's values, interleaved by pairs: those of one chunk, or, where several tasks read them, of all blocks.
class Values {
 public:
  Values(int64_t blocks, int64_t columns, bool shared)
      : columns_(columns), shared_(shared), packed_((shared ? blocks : kChunk) * columns * kTileBytes), done_(shared ? blocks : 0) {}

  bool shared() const { return shared_; }

  // Others' from here on.
  void forget() { std::fill(done_.begin(), done_.end(), false); }

  bool has(int64_t block) const { return shared_ && block < static_cast<int64_t>(done_.size()) && done_[block]; }

  const char* at(int64_t place) const { return packed_.data() + place * columns_ * kTileBytes; }

  // Interleaves up to 32 rows, one every `row` numbers, to `place`; rows behind the last are 0.
  SIMD void pack(int64_t place, const at::BFloat16* values, int64_t row, int64_t count) {
    if (shared_ && done_[place]) return;
    if (shared_) done_[place] = true;
    tiles::interleave(values, row, count, columns_, packed_.data() + place * columns_ * kTileBytes);
  }

 private:
  const int64_t columns_;
  const bool shared_;
  std::vector<char, tiles::Aligned<char>> packed_;
  std::vector<char> done_;
};

// One text's KV head and query rows.
class Task {
 public:
  // `kv` are the head's keys, `in_row` elements behind their row's first; `seen` is what the rows see of each block.
  Task(
      const at::BFloat16* queries, int64_t query_row, const at::BFloat16* kv, int64_t kv_row, int64_t in_row,
      const at::BFloat16* mask, int64_t mask_row, int64_t rows, int64_t span, int64_t kv_heads, int64_t head_dim, const uint8_t* seen,
      Values& values)
      : queries_(queries),
        query_row_(query_row),
        keys_(kv),
        kv_row_(kv_row),
        mask_(mask),
        mask_row_(mask_row),
        rows_(rows),
        span_(span),
        values_offset_(kv_heads * head_dim),
        head_dim_(head_dim),
        lead_(lead(kv, kv_row, in_row)),
        tiles_((rows + kTile - 1) / kTile),
        steps_((lead_ + head_dim + kBlock - 1) / kBlock),
        columns_(head_dim / kTile),
        to_exponent_(tiles::to_exponent(head_dim)),
        seen_(seen),
        values_(values) {}

  // Writes the rows' attended values to `out`, in the layout of the queries.
  SIMD void run(at::BFloat16* out) {
    pack_queries();
    maximum_[0] = maximum_[1] = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    sum_[0] = sum_[1] = _mm512_setzero_ps();
    started_ = false;
    held_ = 0;
    for (int64_t start = 0; start < span_; start += kBlock) {
      fetch_ahead(start);
      const uint8_t seen = seen_[start / kBlock];
      if (seen == Seen::kNothing) continue;
      const int64_t place = values_.shared() ? start / kBlock : held_;
      if (held_ > 0 && place != first_ + held_) finish_chunk();  // a chunk's values lie one behind the other
      if (held_ == 0) first_ = values_.shared() ? place : 0;
      score(start, seen);
      if (++held_ == kChunk) finish_chunk();
    }
    if (held_ > 0) finish_chunk();
    write(out);
  }

 private:
  // Elements by which keys are read from further ahead, never before their row: a tile whose rows straddle cache lines takes six
  // times as long to load. What stands before the keys, queries meet with zeros.
  static int64_t lead(const at::BFloat16* keys, int64_t kv_row, int64_t in_row) {
    const auto past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(keys) % 64 / 2);
    return kv_row % kBlock == 0 && past_line % kTile == 0 && past_line <= in_row ? past_line : 0;
  }

  SIMD void pack_queries() {
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      const int64_t count = std::min(kTile, rows_ - tile * kTile);
      for (int64_t step = 0; step < steps_; ++step) {
        const int64_t behind = step * kBlock - lead_;
        const __mmask32 within = first_words(head_dim_ - behind) & ~first_words(std::max<int64_t>(0, -behind));
        __m512i r[16];
        for (int64_t i = 0; i < kTile; ++i) {
          const at::BFloat16* from = queries_ + (tile * kTile + i) * query_row_ + behind;
          r[i] = i < count ? _mm512_maskz_loadu_epi16(within, from) : _mm512_setzero_si512();
        }
        transpose(r);
        char* to = packed_queries_ + (tile * steps_ + step) * kTileBytes;
        for (int i = 0; i < 16; ++i) _mm512_store_si512(to + 64 * i, r[i]);
      }
    }
  }

  // Texts' rows come from the third-level cache, a few lines here and there in each: too little for the processor to foresee.
  void fetch_ahead(int64_t start) const {
    if (values_.has(start / kBlock + kAhead)) return;  // another task has just read them
    const int64_t end = std::min(start + (1 + kAhead) * kBlock, span_);
    for (int64_t row = start == 0 ? kBlock : start + kAhead * kBlock; row < end; ++row) {
      const at::BFloat16* keys = keys_ + row * kv_row_ - lead_;
      const at::BFloat16* values = keys_ + row * kv_row_ + values_offset_;
      for (int64_t i = 0; i < lead_ + head_dim_; i += kBlock) __builtin_prefetch(keys + i);
      for (int64_t i = 0; i < head_dim_; i += kBlock) __builtin_prefetch(values + i);
      __builtin_prefetch(values + head_dim_ - 1);
    }
  }

  // Scores of a block and, interleaved, its values.
  SIMD void score(int64_t start, uint8_t seen) {
    const at::BFloat16* keys = keys_ + start * kv_row_ - lead_;
    const at::BFloat16* values = keys_ + start * kv_row_ + values_offset_;
    int64_t stride = kv_row_;
    const int64_t count = std::min(kBlock, span_ - start);
    float* scores = scores_ + held_ * 2 * tiles_ * kTileFloats;
    if (count < kBlock) {  // rows behind the span may hold anything, or not be there
      std::fill_n(last_keys_, kBlock * steps_ * kBlock, 0);
      for (int64_t i = 0; i < count; ++i) {
        const auto* from = reinterpret_cast<const uint16_t*>(keys + i * stride + lead_);
        std::copy_n(from, head_dim_, last_keys_ + i * steps_ * kBlock + lead_);
      }
      keys = reinterpret_cast<const at::BFloat16*>(last_keys_);
      stride = steps_ * kBlock;
    }
    // The last step may read on into what stands behind the keys, which queries meet with zeros too.
    const Operand a{reinterpret_cast<const char*>(keys), stride * 2, kTile * stride * 2, 64};
    const Operand b{packed_queries_, 64, steps_ * kTileBytes, kTileBytes};
    if (tiles_ == 1) {
      multiply<2, 1>(a, kBlock, b, steps_, scores, false);
    } else {
      multiply<2, 2>(a, kBlock, b, steps_, scores, false);
    }
    values_.pack(first_ + held_, values, kv_row_, count);
    if (seen == Seen::kSome) add_mask(start, scores);
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      __m512 most[2] = {maximum_[tile], maximum_[tile]};
      for (int64_t half = 0; half < 2; ++half) {
        const float* from = scores + (half * tiles_ + tile) * kTileFloats;
        for (int i = 0; i < 16; ++i) most[i % 2] = _mm512_max_ps(most[i % 2], _mm512_load_ps(from + 16 * i));
      }
      next_maximum_[tile] = _mm512_max_ps(held_ == 0 ? maximum_[tile] : next_maximum_[tile], _mm512_max_ps(most[0], most[1]));
    }
  }

  // The mask is in units of the softmax's exponent, scores are not yet.
  SIMD void add_mask(int64_t start, float* scores) const {
    const __mmask32 within = first_words(span_ - start);
    const __m512i hidden = _mm512_set1_epi16(static_cast<int16_t>(kHidden));
    const __m512 scale = _mm512_set1_ps(1.4426950408889634f / to_exponent_);
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      const int64_t count = std::min(kTile, rows_ - tile * kTile);
      __m512i r[16];
      for (int64_t i = 0; i < kTile; ++i) {
        const at::BFloat16* from = mask_ + (tile * kTile + i) * mask_row_ + start;
        r[i] = i < count ? _mm512_mask_loadu_epi16(hidden, within, from) : _mm512_setzero_si512();
      }
      transpose(r);
      for (int64_t pair = 0; pair < 16; ++pair) {
        float* to = scores + ((pair / 8) * tiles_ + tile) * kTileFloats + (pair % 8) * 32;
        const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(r[pair], 16));
        const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(r[pair], _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
        _mm512_store_ps(to, _mm512_fmadd_ps(even, scale, _mm512_load_ps(to)));
        _mm512_store_ps(to + 16, _mm512_fmadd_ps(odd, scale, _mm512_load_ps(to + 16)));
      }
    }
  }

  // Turns the scores that are held into probabilities, and adds their products with the values.
  SIMD void finish_chunk() {
    const __m512 scale = _mm512_set1_ps(to_exponent_);
    const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      const __m512 maximum = next_maximum_[tile];
      // A row that has seen nothing so far has no maximum; 0 in its place makes all its probabilities 0.
      const __mmask16 sees = _mm512_cmp_ps_mask(maximum, none, _CMP_NEQ_OQ);
      const __m512 shift = _mm512_maskz_mul_ps(sees, maximum, scale);
      if (started_) rescale(tile, wide::power_of_two(_mm512_fmsub_ps(maximum_[tile], scale, shift)));
      maximum_[tile] = maximum;
      __m512 sums[2] = {sum_[tile], _mm512_setzero_ps()};
      for (int64_t block = 0; block < held_; ++block) {
        float* scores = scores_ + block * 2 * tiles_ * kTileFloats;
        if (rows_ <= kFew) {
          few_probabilities(scores, scale, shift, sums);
        } else {
          probabilities(scores + tile * kTileFloats, scores + (tiles_ + tile) * kTileFloats, scale, shift, sums);
        }
      }
      sum_[tile] = _mm512_add_ps(sums[0], sums[1]);
    }
    const int64_t block_bytes = 2 * tiles_ * kTileFloats * 4;
    for (int64_t column = 0; column < columns_; column += 2) {
      const Operand a{reinterpret_cast<const char*>(scores_), 64, kTileFloats * 4, block_bytes};
      const Operand b{values_.at(first_) + column * kTileBytes, 64, kTileBytes, columns_ * kTileBytes};
      float* out = out_ + column * tiles_ * kTileFloats;
      const bool two = column + 1 < columns_;
      if (tiles_ == 1) {
        two ? multiply<1, 2>(a, rows_, b, held_, out, started_) : multiply<1, 1>(a, rows_, b, held_, out, started_);
      } else {
        two ? multiply<2, 2>(a, rows_, b, held_, out, started_) : multiply<2, 1>(a, rows_, b, held_, out, started_);
      }
    }
    started_ = true;
    held_ = 0;
  }

  // Two tiles of scores become one of probabilities in bfloat16, a query a row, in the place of the first.
  SIMD static void probabilities(float* first, const float* second, __m512 scale, __m512 shift, __m512* sums) {
    __m512i r[16];
    for (int pair = 0; pair < 16; ++pair) {
      const float* from = (pair < 8 ? first : second) + (pair % 8) * 32;
      const __m512 even = wide::power_of_two(_mm512_fmsub_ps(_mm512_load_ps(from), scale, shift));
      const __m512 odd = wide::power_of_two(_mm512_fmsub_ps(_mm512_load_ps(from + 16), scale, shift));
      sums[0] = _mm512_add_ps(sums[0], even);
      sums[1] = _mm512_add_ps(sums[1], odd);
      r[pair] = wide::paired(wide::narrowed(even, odd));
    }
    transpose(r);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(first + 16 * i, r[i]);
  }

  // The same of one tile's first four queries, by vectors of four cache rows; the other queries' probabilities are left undefined.
  SIMD static void few_probabilities(float* scores, __m512 scale, __m512 shift, __m512* sums) {
    alignas(64) static constexpr auto kOrder = [] {  // from [cache row, query] to [query, cache row], eight rows in two halves
      std::array<uint16_t, 32> order{};
      for (uint16_t i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i % 8 * 4 + i / 8);
      return order;
    }();
    const __m512i order = _mm512_load_si512(kOrder.data());
    const __m512 shifts = _mm512_shuffle_f32x4(shift, shift, 0);
    __m512 total = _mm512_setzero_ps();
    __m512i r[4];
    for (int eight = 0; eight < 4; ++eight) {
      __m512 halves[2];
      for (int half = 0; half < 2; ++half) {
        const float* from = scores + (eight * 8 + half * 4) * 16;
        __m512 four = _mm512_castps128_ps512(_mm_load_ps(from));
        four = _mm512_insertf32x4(four, _mm_load_ps(from + 16), 1);
        four = _mm512_insertf32x4(four, _mm_load_ps(from + 32), 2);
        four = _mm512_insertf32x4(four, _mm_load_ps(from + 48), 3);
        halves[half] = wide::power_of_two(_mm512_fmsub_ps(four, scale, shifts));
        total = _mm512_add_ps(total, halves[half]);
      }
      r[eight] = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(halves[1], halves[0]));
    }
    total = _mm512_add_ps(total, _mm512_shuffle_f32x4(total, total, 0x4E));
    sums[0] = _mm512_add_ps(sums[0], _mm512_add_ps(total, _mm512_shuffle_f32x4(total, total, 0xB1)));
    const __m512i a = _mm512_shuffle_i32x4(r[0], r[1], 0x44), b = _mm512_shuffle_i32x4(r[0], r[1], 0xEE);
    const __m512i c = _mm512_shuffle_i32x4(r[2], r[3], 0x44), d = _mm512_shuffle_i32x4(r[2], r[3], 0xEE);
    _mm512_store_si512(scores, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_store_si512(scores + 16, _mm512_shuffle_i32x4(a, c, 0xDD));
    _mm512_store_si512(scores + 32, _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_store_si512(scores + 48, _mm512_shuffle_i32x4(b, d, 0xDD));
  }

  SIMD void rescale(int64_t tile, __m512 factor) {
    if (_mm512_cmp_ps_mask(factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) return;
    sum_[tile] = _mm512_mul_ps(sum_[tile], factor);
    alignas(64) float factors[16];
    _mm512_store_ps(factors, factor);
    for (int64_t column = 0; column < columns_; ++column) {
      float* out = out_tile(tile, column);
      for (int i = 0; i < 16; ++i) {
        _mm512_store_ps(out + 16 * i, _mm512_mul_ps(_mm512_load_ps(out + 16 * i), _mm512_set1_ps(factors[i])));
      }
    }
  }

  // Sums lie as the products leave them: by pairs of columns, in each pair by tile of queries.
  float* out_tile(int64_t tile, int64_t column) {
    const int64_t pair = column / 2 * 2, width = std::min<int64_t>(2, columns_ - pair);
    return out_ + (pair * tiles_ + tile * width + column % 2) * kTileFloats;
  }

  SIMD void write(at::BFloat16* out) {
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      alignas(64) float factors[16];
      const __mmask16 sees = _mm512_cmp_ps_mask(sum_[tile], _mm512_setzero_ps(), _CMP_NEQ_UQ);
      _mm512_store_ps(factors, _mm512_maskz_div_ps(sees, _mm512_set1_ps(1.0f), sum_[tile]));
      const int64_t count = std::min(kTile, rows_ - tile * kTile);
      for (int64_t column = 0; column < columns_; ++column) {
        const float* from = out_tile(tile, column);
        for (int64_t i = 0; i < count; ++i) {
          const __m512 sums = started_ ? _mm512_load_ps(from + 16 * i) : _mm512_setzero_ps();
          const auto values = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(sums, _mm512_set1_ps(factors[i])));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (tile * kTile + i) * query_row_ + column * kTile), values);
        }
      }
    }
  }

  const at::BFloat16* const queries_;
  const int64_t query_row_;
  const at::BFloat16* const keys_;
  const int64_t kv_row_;
  const at::BFloat16* const mask_;
  const int64_t mask_row_;
  const int64_t rows_, span_, values_offset_, head_dim_, lead_, tiles_, steps_, columns_;
  const float to_exponent_;
  const uint8_t* const seen_;
  Values& values_;
  bool started_ = false;
  int64_t held_ = 0, first_ = 0;  // blocks whose scores are held, and where the values of the first are
  __m512 maximum_[2], next_maximum_[2], sum_[2];
  alignas(64) char packed_queries_[2 * (kMaxHeadDim / kBlock + 1) * kTileBytes];
  alignas(64) float scores_[kChunk * 4 * kTileFloats];
  alignas(64) float out_[2 * kMaxHeadDim / kTile * kTileFloats];
  alignas(64) uint16_t last_keys_[kBlock * (kMaxHeadDim + kBlock)];
};

}  // namespace tile_attention

#endif
