// Products of rows with constant weights, of bfloat16 by tiles or by vectors, of float32 by vectors: with weights in bfloat16 too, which are
// half as much to fetch, and sums of the same numbers in the same order as if these stood there in float32.
//
// Weights lie in panels of 32 outputs, as products read them (tiled_linear.py): a panel is fetched once and stays in the
// first-level cache for all rows. Every output is the sum of the same products in the same order, whatever the number of rows.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "packed_rows.h"
#include "tiles.h"

#ifdef MOASERVE_SIMD

namespace tiles {

constexpr int64_t kPanel = 2 * kTile;           // outputs of a panel
constexpr int64_t kAhead = 20;                  // steps that tiles fetch weights ahead of their use
constexpr int64_t kSmallest = 1 << 16;          // weights that are worth another thread, some 10 µs

// Steps that vectors go over for all rows: half of them, and of the next, stay in small caches.
template <class Number>
constexpr int64_t kStretch = 128 / static_cast<int64_t>(sizeof(Number));

// Rows of numbers, one every `bytes`.
struct Rows {
  const char* data;
  int64_t bytes, count;
};

// A weight as `tiled` in tiled_linear.py lays it out. One that is `near`, in the second-level cache since its last use, need not be
// fetched ahead, which would cost more than it gains.
template <class Number>
struct Panels {
  static constexpr int64_t kStepBytes = 2 * kOperandBytes<Number>;  // of a panel and 32 inputs: two tiles

  const char* data;
  int64_t count, steps;
  bool near;

  explicit Panels(const at::Tensor& tiled, bool is_near = false)
      : data(static_cast<const char*>(tiled.const_data_ptr())), count(tiled.size(0)), steps(tiled.size(1)), near(is_near) {}
};

// Rows of sums that are still to be written: those from `row` to `end` of a panel, the first at `sums`.
struct Unwritten {
  int64_t panel = 0, row = 0, end = 0;
  const float* sums = nullptr;

  template <class Write>
  SIMD inline void write(const Write& write, int64_t most) {
    for (const int64_t until = std::min(row + most, end); row < until; ++row, sums += kPanel) write(panel, row, sums);
  }
};

#ifdef MOASERVE_TILES

constexpr int64_t kStepBytes = Panels<BFloat16>::kStepBytes;

// Products of one or two tiles of rows with a panel, in float32: 32 numbers of each row, the second tile's `apart` rows behind the
// first's. Meanwhile `lines` of weights are fetched each step, from `ahead` on, and other rows of sums are written: fetching, writing,
// which takes vectors, and products, which take tiles, go on at once.
template <bool two, class Write>
SIMD inline void multiply(
    const char* first, const char* second, int64_t row, const char* panel, int64_t steps, const char* ahead, int64_t lines, float* out,
    int64_t apart, Unwritten unwritten, Write write) {
  constexpr int64_t kOutRow = kPanel * sizeof(float);
  const int64_t written_a_step = 2 * kTile / steps + 1;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; ++step, panel += kStepBytes) {
    for (int64_t line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    _tile_loadd(4, first + step * kRowBytes, row);
    _tile_loadd(6, panel, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + kTileBytes, kRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (two) {
      _tile_loadd(5, second + step * kRowBytes, row);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    unwritten.write(write, written_a_step);
  }
  unwritten.write(write, 2 * kTile);
  _tile_stored(0, out, kOutRow);
  _tile_stored(1, out + kTile, kOutRow);
  if constexpr (two) {
    _tile_stored(2, out + apart * kPanel, kOutRow);
    _tile_stored(3, out + apart * kPanel + kTile, kOutRow);
  }
}

// Products of all rows with some panels; `write` as that of `product`.
template <class Write>
SIMD void multiply_panels(Rows x, Panels<BFloat16> weight, int64_t begin, int64_t end, int64_t tiles, int64_t height, const Write& write) {
  alignas(64) float sums[2][2 * kTile * kPanel];
  // Of the weights ahead, each pair of tiles fetches its share, so that they come as evenly as they can.
  const int64_t pairs = (tiles + 1) / 2, lines = weight.near ? 0 : (kStepBytes / 64 + pairs - 1) / pairs;
  int turn = 0;
  Unwritten unwritten;
  configure(static_cast<uint8_t>(height));
  for (int64_t panel = begin; panel < end; ++panel) {
    const char* data = weight.data + panel * weight.steps * kStepBytes;
    const char* ahead = data + kAhead * kStepBytes;
    int64_t done = 0;
    for (int64_t tile = 0; tile < tiles; tile += 2, turn ^= 1, ahead += weight.steps * lines * 64) {
      // The last tile begins so that it ends with the last row; what it repeats is not written again.
      const int64_t start = std::min(tile * height, x.count - height), apart = std::min(height, x.count - height - start);
      const char *first = x.data + start * x.bytes, *second = first + apart * x.bytes;
      const bool two = tile + 1 < tiles;
      two ? multiply<true>(first, second, x.bytes, data, weight.steps, ahead, lines, sums[turn], apart, unwritten, write)
          : multiply<false>(first, second, x.bytes, data, weight.steps, ahead, lines, sums[turn], apart, unwritten, write);
      const int64_t up_to = start + height + (two ? apart : 0);
      unwritten = {panel, done, up_to, sums[turn] + (done - start) * kPanel};
      done = up_to;
    }
  }
  unwritten.write(write, 2 * kTile);
  release();
}

#endif

// Rows for which weights in bfloat16 are widened once for all, a tile after the other. Of fewer each pass does so in registers: measured.
constexpr int64_t kWidenedFor = 32;

// Products of all rows, which are those of `left_of`, with some panels, by vectors.
//
// Weights are gone over by stretches that stay near for all rows. Each time that one is, a share of what follows it in memory is fetched, so
// that memory never waits while what is at hand is multiplied. What follows the last panel is, as a rule, the next product's first.
template <class Number, class Write>
SIMD void multiply_panels_by_vectors(Rows x, Panels<Number> weight, int64_t begin, int64_t end, const Write& write) {
  constexpr int64_t kMost = kStretch<Number>, kBytes = Panels<Number>::kStepBytes, kLeft = kPairs * sizeof(Left<Number>);
  static thread_local std::vector<float, Aligned<float>> room, wide_tile;
  constexpr bool kWidened = kPacks && std::is_same_v<Number, BFloat16>;
  const bool widened = kWidened && x.count >= kWidenedFor, in_one = !widened && weight.steps <= kMost;
  const int64_t most = rows_at_once(x.count), lead = std::min(weight.steps, kMost) * kBytes, tiles = widened ? 1 : 2;
  const int64_t times = widened ? 2 * ((x.count + most - 1) / most) : times_over(x.count), least = widened ? kLinesAtOnce<float> : kLinesAtOnce<Number>;
  const int64_t lines = weight.near ? 0 : least * ((kBytes / kRowBytes + least * times - 1) / (least * times));
  const auto kept = static_cast<size_t>((in_one ? most : x.count) * kPanel);
  if (room.size() < kept) room.resize(kept);
  if (widened) wide_tile.resize(kMost * kPairs * kTile);
  for (int64_t panel = begin; panel < end; ++panel) {
    for (int64_t step = 0; step < weight.steps; step += kMost) {
      const int64_t steps = std::min(kMost, weight.steps - step);
      const char* data = weight.data + (panel * weight.steps + step) * kBytes;
      Ahead ahead{data + lead, lines};
      for (int64_t tile = 0; tile < 2; tile += tiles) {
        if constexpr (kWidened) {
          if (widened) widen_tile(data + tile * kOperandBytes<Number>, kBytes, steps, wide_tile.data());
        }
        for (int64_t row = 0; row < x.count; row += most) {
          const int64_t count = std::min(most, x.count - row), bytes = (kPacks ? count : 1) * kLeft;
          const Operand left{x.data + row * x.bytes + step * bytes, x.bytes, 0, bytes};
          const Sums sums{room.data() + (in_one ? 0 : row * kPanel) + tile * kTile, kPanel, kTile};
          if (widened) {
            const Operand right{reinterpret_cast<const char*>(wide_tile.data()), kPairBytes<float>, 0, kOperandBytes<float>};
            multiply_some<float, 1, kTile, kPacks>(left, count, right, steps, sums, step > 0, ahead);
          } else {
            const Operand right{data, kPairBytes<Number>, kOperandBytes<Number>, kBytes};
            multiply_some<Number, 2, kTile, kPacks>(left, count, right, steps, sums, step > 0, ahead);
          }
          ahead = ahead.after(steps * (widened ? 1 : tiles_apart(count)));
          if (ahead.data >= data + lead + steps * kBytes) ahead.lines = 0;
          if (step + steps < weight.steps || tile + tiles < 2) continue;
          for (int64_t each = 0; each < count; ++each) write(panel, row + each, sums.data - tile * kTile + each * kPanel);
        }
      }
    }
  }
}

// `size` numbers of each row, as they stand on the left: those that are packed last until the thread's next product.
template <class Number>
SIMD inline Rows left_of(Rows x, int64_t size) {
  if constexpr (kPacks) {
    if (x.count == 1 && std::is_same_v<Number, float>) return x;
    static thread_local std::vector<float, Aligned<float>> packed;
    const int64_t count = x.count * size + 7;
    if (static_cast<int64_t>(packed.size()) < count) packed.resize(count);
    pack_rows<Number>(x.data, x.bytes, x.count, size, packed.data());
    return {reinterpret_cast<const char*>(packed.data()), size * static_cast<int64_t>(sizeof(float)), x.count};
  } else {
    return x;
  }
}

// Whether a weight is one that rows of this type are multiplied with: one of their own, and for float32 one in bfloat16 too.
template <class Number>
bool multiplies(const at::Tensor& weight) {
  const auto type = weight.scalar_type();
  return weight.is_contiguous() && (type == c10::CppTypeToScalarType<Number>::value || type == at::kBFloat16);
}

// Multiplies all rows, which are of type Number, with all panels, which are `near` or not (Panels); write(panel, row, sums) is told each
// row's 32 sums once.
template <class Number, class Write>
void product(Rows x, const at::Tensor& weight, const Write& write, bool near = false) {
  const int64_t tiles = (x.count + kTile - 1) / kTile;
  const int64_t grain = std::max<int64_t>(1, kSmallest / (weight.size(1) * kPairs * kPanel * (1 + tiles / 4)));
  const auto by_vectors = [&](Rows left, auto panels) {
    at::parallel_for(0, panels.count, grain, [&](int64_t begin, int64_t end) { multiply_panels_by_vectors(left, panels, begin, end, write); });
  };
  if constexpr (std::is_same_v<Number, float>) {
    if (weight.scalar_type() == at::kBFloat16) return by_vectors(left_of<Number>(x, weight.size(1) * kPairs), Panels<Halves>(weight, near));
  }
  const Panels<Number> panels(weight, near);
#ifdef MOASERVE_TILES
  if constexpr (std::is_same_v<Number, BFloat16>) {
    if (by_tiles()) {
      const int64_t height = (x.count + tiles - 1) / tiles;
      at::parallel_for(0, panels.count, grain, [&](int64_t begin, int64_t end) { multiply_panels(x, panels, begin, end, tiles, height, write); });
      return;
    }
  }
#endif
  by_vectors(left_of<Number>(x, panels.steps * kPairs), panels);
}

// Writes a panel's sums into rows of `width` numbers, with a bias where there is one.
template <class Number>
struct ToRows {
  Number* out;
  int64_t width;
  const Number* bias = nullptr;

  SIMD inline void operator()(int64_t panel, int64_t row, const float* sums) const {
    wide::Floats low = wide::load(sums), high = wide::load(sums + kTile);
    if (bias != nullptr) {
      const Number* added = bias + panel * kPanel;
      low = low + wide::widen(wide::first(kTile), added);
      high = high + wide::widen(wide::first(kTile), added + kTile);
    }
    wide::narrow(out + row * width + panel * kPanel, low, high);
  }
};

}  // namespace tiles

#endif
