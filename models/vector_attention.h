// Attention over a cache by vectors, for float32 and for CPUs that multiply bfloat16 without tiles: see cached_attention.cpp.
//
// Keys and values are read once for all rows and heads of a text, in the order in which they lie: a text's rows are more than caches
// hold, and what takes longest is fetching them. Keys are turned round, so that a vector holds 32 bits of 16 keys, a number or a pair of
// them, and values are interleaved by pairs. Scores are S = Q K^T, a query a row, and softmax is online (arXiv 2205.14135), in float32.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

#include "cached_attention.h"
#include "tiles.h"

#ifdef MOASERVE_SIMD

namespace vectors {

using tiles::kOperandBytes;
using tiles::kPairBytes;
using tiles::kRowBytes;
using tiles::kTile;

constexpr int64_t kBlock = kSightBlock, kGroup = kSightRows;
constexpr int64_t kChunk = 4;  // blocks whose scores are worked out at a time
constexpr int64_t kWidth = kChunk * kBlock;
constexpr int64_t kAhead = 2;               // blocks that are fetched before they are read
constexpr int64_t kFew = tiles::kSums / 4;  // rows whose products with four tiles fit registers

// Numbers of a head that are turned round at a time.
template <class Number>
constexpr int64_t kStep = kRowBytes / 2 / static_cast<int64_t>(sizeof(Number));

// A text's rows of queries, and the keys and values that they see: what `seen` says of each group and block.
template <class Number>
struct Text {
  const Number* queries;
  const Number* kv;
  const Number* mask;
  const uint8_t* seen;
  int64_t rows, blocks;
};

// What all texts of a batch have in common. Rows are so many numbers apart.
struct Layout {
  int64_t query_row, kv_row, values_offset, mask_row, span, head_dim;
};

// 16 keys -> vectors that hold 32 bits of each. Meanwhile what keys and values, `values` numbers behind them, have `ahead` numbers
// further on is fetched: a little at a time, as what has been asked for and is not yet there holds up everything else.
template <class Number>
SIMD inline void turn_keys(const Number* keys, int64_t row, int64_t values, int64_t head_dim, char* to, int64_t ahead) {
  for (int64_t column = 0; column < head_dim; column += kStep<Number>, to += 8 * kRowBytes) {
    wide::Words r[8];
    for (int64_t i = 0; i < 8; ++i) {
      const Number* from = keys + (i / 4 * 8 + i % 4) * row + column;
      if (ahead != 0 && column % (2 * kStep<Number>) == 0) {
        for (int64_t each = 0; each < 8; each += 4) {
          __builtin_prefetch(from + each * row + ahead, 0, 2);
          __builtin_prefetch(from + each * row + values + ahead, 0, 2);
        }
      }
      r[i] = wide::joined(wide::load_narrow(from), wide::load_narrow(from + 4 * row));
    }
    for (int64_t half = 0; half < 2; ++half) {
      wide::Words* four = r + 4 * half;
      const wide::Words a = wide::low_singles(four[0], four[1]), b = wide::high_singles(four[0], four[1]);
      const wide::Words c = wide::low_singles(four[2], four[3]), d = wide::high_singles(four[2], four[3]);
      four[0] = wide::low_doubles(a, c), four[1] = wide::high_doubles(a, c);
      four[2] = wide::low_doubles(b, d), four[3] = wide::high_doubles(b, d);
    }
    for (int64_t i = 0; i < 4; ++i) {
      wide::store(to + i * kRowBytes, wide::even_lanes(r[i], r[4 + i]));
      wide::store(to + (4 + i) * kRowBytes, wide::odd_lanes(r[i], r[4 + i]));
    }
  }
}

// Attention of rows of one text: one for each thread, for one text after the other.
template <class Number>
class Attention {
 public:
  Attention(const Layout& layout, int64_t rows, int64_t heads)
      : layout_(layout),
        key_bytes_(layout.head_dim * kTile * static_cast<int64_t>(sizeof(Number))),
        columns_(layout.head_dim / kTile),
        to_exponent_(tiles::to_exponent(layout.head_dim)),
        keys_(kChunk * 2 * key_bytes_),
        values_(kChunk * columns_ * kOperandBytes<Number>),
        last_rows_(2 * kBlock * layout.head_dim),
        scores_(kGroup * kWidth),
        queries_(kGroup * layout.head_dim),
        probabilities_(kGroup * kWidth),
        maxima_(heads * rows),
        sums_(heads * rows * kTile),
        out_(heads * rows * layout.head_dim) {}

  // Of `heads` heads from `first` on; rows of `out` lie as those of the queries.
  SIMD void run(const Text<Number>& text, int64_t first, int64_t heads, Number* out) {
    text_ = &text;
    std::fill_n(maxima_.data(), heads * text.rows, -std::numeric_limits<float>::infinity());
    std::fill_n(sums_.data(), heads * text.rows * kTile, 0.0f);
    std::fill_n(out_.data(), heads * text.rows * layout_.head_dim, 0.0f);
    for (int64_t begin = 0; begin < text.blocks; begin += kChunk) {
      held_ = 0;
      for (int64_t block = begin; block < std::min(begin + kChunk, text.blocks); ++block) {
        if (is_seen(block)) blocks_[held_++] = block;
      }
      for (int64_t head = 0; held_ > 0 && head < heads; ++head) {
        for (int64_t place = 0; place < held_; ++place) pack(place, first + head);
        for (int64_t row = 0; row < text.rows; row += kGroup) attend(row, std::min(kGroup, text.rows - row), first + head, head);
      }
    }
    write(first, heads, out);
  }

 private:
  uint8_t seen(int64_t row, int64_t block) const { return text_->seen[row / kGroup * text_->blocks + block]; }

  bool is_seen(int64_t block) const {
    for (int64_t row = 0; row < text_->rows; row += kGroup) {
      if (seen(row, block) != Seen::kNothing) return true;
    }
    return false;
  }

  // A block's keys and values of a head, as products read them. Rows behind the span may hold anything, or not be there.
  SIMD void pack(int64_t place, int64_t head) {
    const int64_t start = blocks_[place] * kBlock, count = std::min(kBlock, layout_.span - start), size = layout_.head_dim;
    const Number* keys = text_->kv + start * layout_.kv_row + head * size;
    const Number* values = keys + layout_.values_offset;
    int64_t row = layout_.kv_row;
    const int64_t next = blocks_[place] + kAhead, ahead = next < text_->blocks && is_seen(next) ? kAhead * kBlock * row : 0;
    if (count < kBlock) {
      Number* last = last_rows_.data();
      std::fill_n(last, 2 * kBlock * size, Number(0));
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(keys + i * row, size, last + i * size);
        std::copy_n(values + i * row, size, last + (kBlock + i) * size);
      }
      keys = last, values = last + kBlock * size, row = size;
    }
    for (int64_t tile = 0; tile < 2; ++tile) {
      char* to = keys_.data() + (place * 2 + tile) * key_bytes_;
      turn_keys(keys + tile * kTile * row, row, layout_.values_offset, size, to, ahead);
    }
    tiles::interleave(values, row, kBlock, columns_, values_.data() + place * columns_ * kOperandBytes<Number>);
  }

  // A group's rows over the blocks that are held.
  SIMD void attend(int64_t row, int64_t rows, int64_t head, int64_t place) {
    int64_t count = 0;
    for (int64_t each = 0; each < held_; ++each) {
      if (seen(row, blocks_[each]) != Seen::kNothing) places_[count++] = each;
    }
    if (count == 0) return;
    const tiles::Operand asked = left_of(text_->queries + row * layout_.query_row + head * layout_.head_dim, rows);
    for (int64_t begin = 0, end; begin < count; begin = end) {
      end = end_of_stretch(begin, count);
      const tiles::Operand keys{keys_.data() + places_[begin] * 2 * key_bytes_, kPairBytes<Number>, key_bytes_, 8 * kRowBytes};
      const tiles::Sums to{scores_.data() + begin * kBlock, kWidth, kTile};
      multiply<kStep<Number> / 2>(asked, rows, keys, 2 * (end - begin), layout_.head_dim / kStep<Number>, to, false);
    }
    const int64_t state = place * text_->rows + row;
    for (int64_t each = 0; each < rows; ++each) softmax(row + each, each, count, state + each);
    for (int64_t begin = 0, end; begin < count; begin = end) {
      end = end_of_stretch(begin, count);
      const tiles::Operand left{reinterpret_cast<const char*>(probabilities_.data() + begin * kBlock), kWidth * kLeft, 0, kBlock * kLeft};
      constexpr int64_t kBytes = kOperandBytes<Number>;
      const tiles::Operand values{values_.data() + places_[begin] * columns_ * kBytes, kPairBytes<Number>, kBytes, columns_ * kBytes};
      const tiles::Sums to{out_.data() + state * layout_.head_dim, layout_.head_dim, kTile};
      multiply<kTile>(left, rows, values, columns_, end - begin, to, true);
    }
  }

  using Left = tiles::Left<Number>;
  static constexpr int64_t kLeft = sizeof(Left);

  // A group's queries, as what stands on the left of products.
  SIMD tiles::Operand left_of(const Number* queries, int64_t rows) const {
    if constexpr (tiles::kWidens<Number>) {
      tiles::widen_rows(queries, layout_.query_row * static_cast<int64_t>(sizeof(Number)), rows, layout_.head_dim, queries_.data());
      return {reinterpret_cast<const char*>(queries_.data()), layout_.head_dim * kLeft, 0, kStep<Number> * kLeft};
    } else {
      return {reinterpret_cast<const char*>(queries), layout_.query_row * kLeft, 0, kStep<Number> * kLeft};
    }
  }

  // Where blocks that a group sees stop to lie one behind the other.
  int64_t end_of_stretch(int64_t begin, int64_t count) const {
    int64_t end = begin + 1;
    while (end < count && places_[end] == places_[end - 1] + 1) ++end;
    return end;
  }

  // Products of any number of rows with any number of tiles, of which `P` pairs are a step: of few rows with four tiles at a time, as sums
  // that wait for one another take longest.
  template <int P>
  SIMD static void multiply(tiles::Operand a, int64_t rows, tiles::Operand b, int64_t count, int64_t steps, tiles::Sums out, bool add) {
    if (rows > kFew) return multiply_wide<2, P>(a, rows, b, count, steps, out, add);
    multiply_wide<4, P>(a, rows, b, count, steps, out, add);
  }

  template <int C, int P>
  SIMD static void multiply_wide(tiles::Operand a, int64_t rows, tiles::Operand b, int64_t count, int64_t steps, tiles::Sums out, bool add) {
    for (; count >= C; count -= C, b.data += C * b.tile, out.data += C * out.tile) tiles::multiply_all<Number, C, P>(a, rows, b, steps, out, add);
    if constexpr (C > 1) {
      if (count > 0) multiply_wide<C - 1, P>(a, rows, b, count, steps, out, add);
    }
  }

  // Turns a row's scores in `count` blocks into probabilities; what came before is scaled to them.
  SIMD void softmax(int64_t row, int64_t in_group, int64_t count, int64_t state) {
    float* scores = scores_.data() + in_group * kWidth;
    const wide::Floats mask_scale = wide::all(1.4426950408889634f / to_exponent_);
    wide::Floats most = wide::all(maxima_[state]);
    for (int64_t each = 0; each < count; ++each, scores += kBlock) {
      const int64_t block = blocks_[places_[each]], start = block * kBlock;
      wide::Floats first = wide::load(scores), second = wide::load(scores + kTile);
      if (seen(row, block) == Seen::kSome) {  // the mask is in units of the softmax's exponent, scores are not yet
        const Number* mask = text_->mask + row * layout_.mask_row + start;
        first = wide::fma(wide::load_mask(layout_.span - start, mask), mask_scale, first);
        second = wide::fma(wide::load_mask(layout_.span - start - kTile, mask + kTile), mask_scale, second);
        wide::store(scores, first);
        wide::store(scores + kTile, second);
      }
      most = wide::max(most, wide::max(first, second));
    }
    const float before = maxima_[state], maximum = wide::largest(most);
    maxima_[state] = maximum;
    // A row that has seen nothing so far has no maximum; 0 in its place makes all its probabilities 0.
    const float shift = maximum == -std::numeric_limits<float>::infinity() ? 0.0f : maximum * to_exponent_;
    float *sums = sums_.data() + state * kTile, *out = out_.data() + state * layout_.head_dim;
    wide::Floats sum = wide::load(sums);
    if (maximum != before) {
      const wide::Floats factor = wide::power_of_two(wide::all(before * to_exponent_ - shift));
      sum = sum * factor;
      for (int64_t i = 0; i < layout_.head_dim; i += kTile) wide::store(out + i, wide::load(out + i) * factor);
    }
    const wide::Floats scale = wide::all(to_exponent_), shifts = wide::all(shift);
    scores = scores_.data() + in_group * kWidth;
    Left* to = probabilities_.data() + in_group * kWidth;
    for (int64_t each = 0; each < count; ++each, scores += kBlock, to += kBlock) {
      const wide::Floats first = wide::power_of_two(wide::fms(wide::load(scores), scale, shifts));
      const wide::Floats second = wide::power_of_two(wide::fms(wide::load(scores + kTile), scale, shifts));
      sum = sum + (first + second);
      wide::narrow(to, first, second);
    }
    wide::store(sums, sum);
  }

  SIMD void write(int64_t first, int64_t heads, Number* out) const {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t row = 0; row < text_->rows; ++row) {
        const int64_t state = head * text_->rows + row;
        const float sum = wide::sum(wide::load(sums_.data() + state * kTile));
        const wide::Floats factor = wide::all(sum == 0.0f ? 0.0f : 1.0f / sum);
        const float* from = out_.data() + state * layout_.head_dim;
        Number* to = out + row * layout_.query_row + (first + head) * layout_.head_dim;
        for (int64_t i = 0; i < layout_.head_dim; i += kTile) {
          wide::narrow(wide::first(kTile), to + i, wide::load(from + i) * factor);
        }
      }
    }
  }

  // Numbers that are written before they are read.
  template <class Any>
  class Buffer {
   public:
    explicit Buffer(int64_t count) : numbers_(tiles::Aligned<Any>().allocate(count)) {}
    Any* data() const { return numbers_.get(); }
    Any& operator[](int64_t place) const { return numbers_[place]; }

   private:
    struct Free {
      void operator()(Any* numbers) const { tiles::Aligned<Any>().deallocate(numbers, 0); }
    };
    std::unique_ptr<Any[], Free> numbers_;
  };

  const Layout layout_;
  const int64_t key_bytes_, columns_;  // of 16 keys, and columns of values
  const float to_exponent_;
  Buffer<char> keys_, values_;
  Buffer<Number> last_rows_;
  Buffer<float> scores_;
  Buffer<Left> queries_, probabilities_;
  Buffer<float> maxima_, sums_, out_;
  const Text<Number>* text_ = nullptr;
  int64_t held_ = 0, blocks_[kChunk] = {}, places_[kChunk] = {};  // blocks that are held, and which of them a group sees
};

}  // namespace vectors

#endif
