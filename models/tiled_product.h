// Products of rows with constant weights in bfloat16, by tiles or by vectors.
//
// Weights lie in panels of 32 outputs, as products read them (tiled_linear.py): a panel is fetched once and stays in the
// first-level cache for all rows. Every output is the sum of the same products in the same order, whatever the number of rows.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "tiles.h"

#ifdef MOASERVE_AMX

namespace tiles {

constexpr int64_t kPanel = 2 * kTile;           // outputs of a panel
constexpr int64_t kStepBytes = 2 * kTileBytes;  // of a panel and 32 inputs: two tiles
constexpr int64_t kAhead = 20;                  // steps that weights are fetched ahead of their use
constexpr int64_t kVectorsAhead = 9;            // the same without tiles: twice as fast for ten rows as without fetching
constexpr int64_t kSmallest = 1 << 16;          // weights that are worth another thread, some 10 µs

// Rows of bfloat16, one every `bytes`.
struct Rows {
  const char* data;
  int64_t bytes, count;
};

// A weight as `tiled` in tiled_linear.py lays it out.
struct Panels {
  const char* data;
  int64_t count, steps;

  explicit Panels(const at::Tensor& tiled)
      : data(static_cast<const char*>(tiled.const_data_ptr())), count(tiled.size(0)), steps(tiled.size(1)) {}
};

// Products of one or two tiles of rows with a panel: `out` [rows][32] of each in float32.
template <bool two, bool fetch>
AMX inline void multiply(const char* first, const char* second, int64_t row, const char* panel, int64_t steps, float (*out)[kTile * kPanel]) {
  constexpr int64_t kOutRow = kPanel * sizeof(float);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; ++step, panel += kStepBytes) {
    if constexpr (fetch) {
      for (int64_t line = 0; line < kStepBytes; line += 64) __builtin_prefetch(panel + kAhead * kStepBytes + line, 0, 2);
    }
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
  }
  _tile_stored(0, out[0], kOutRow);
  _tile_stored(1, out[0] + kTile, kOutRow);
  if constexpr (two) {
    _tile_stored(2, out[1], kOutRow);
    _tile_stored(3, out[1] + kTile, kOutRow);
  }
}

// Products of all rows with some panels; `write` as that of `product`.
template <class Write>
AMX void multiply_panels(Rows x, Panels weight, int64_t begin, int64_t end, int64_t tiles, int64_t height, const Write& write) {
  alignas(64) float sums[2][kTile * kPanel];
  configure(static_cast<uint8_t>(height));
  for (int64_t panel = begin; panel < end; ++panel) {
    const char* data = weight.data + panel * weight.steps * kStepBytes;
    int64_t written = 0;
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      // The last tile begins so that it ends with the last row; what it repeats is not written again.
      const int64_t starts[2] = {std::min(tile * height, x.count - height), std::min((tile + 1) * height, x.count - height)};
      const char *first = x.data + starts[0] * x.bytes, *second = x.data + starts[1] * x.bytes;
      const bool two = tile + 1 < tiles;
      if (tile == 0) {
        two ? multiply<true, true>(first, second, x.bytes, data, weight.steps, sums)
            : multiply<false, true>(first, second, x.bytes, data, weight.steps, sums);
      } else {
        two ? multiply<true, false>(first, second, x.bytes, data, weight.steps, sums)
            : multiply<false, false>(first, second, x.bytes, data, weight.steps, sums);
      }
      for (int each = 0; each < (two ? 2 : 1); ++each) {
        for (; written < starts[each] + height; ++written) write(panel, written, sums[each] + (written - starts[each]) * kPanel);
      }
    }
  }
  release();
}

// The same without tiles.
template <class Write>
AMX void multiply_panels_by_vectors(Rows x, Panels weight, int64_t begin, int64_t end, const Write& write) {
  alignas(64) float sums[kRowsAtOnce * kPanel];
  const int64_t most = rows_at_once(x.count);
  for (int64_t panel = begin; panel < end; ++panel) {
    const Operand right{weight.data + panel * weight.steps * kStepBytes, kRowBytes, kTileBytes, kStepBytes};
    for (int64_t row = 0; row < x.count; row += most) {
      const int64_t count = std::min(most, x.count - row);
      const Operand left{x.data + row * x.bytes, x.bytes, 0, kRowBytes};
      multiply_few<2>(left, count, right, weight.steps, Sums{sums, kPanel, kTile}, false, row == 0 ? kVectorsAhead * kStepBytes : 0);
      for (int64_t each = 0; each < count; ++each) write(panel, row + each, sums + each * kPanel);
    }
  }
}

// Multiplies all rows with all panels; write(panel, row, sums) is told each row's 32 sums once.
template <class Write>
void product(Rows x, Panels weight, const Write& write) {
  const int64_t tiles = (x.count + kTile - 1) / kTile, height = (x.count + tiles - 1) / tiles;
  const int64_t weights = weight.steps * kPairs * kPanel;
  at::parallel_for(0, weight.count, std::max<int64_t>(1, kSmallest / (weights * (1 + tiles / 4))), [&](int64_t begin, int64_t end) {
    if (by_tiles()) {
      multiply_panels(x, weight, begin, end, tiles, height, write);
    } else {
      multiply_panels_by_vectors(x, weight, begin, end, write);
    }
  });
}

// Writes a panel's sums as bfloat16 into rows of `width` numbers.
struct ToRows {
  at::BFloat16* out;
  int64_t width;

  AMX inline void operator()(int64_t panel, int64_t row, const float* sums) const {
    const auto both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(sums + kTile), _mm512_load_ps(sums));
    _mm512_storeu_si512(out + row * width + panel * kPanel, both);
  }
};

}  // namespace tiles

#endif
