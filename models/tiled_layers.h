// What layers are made of in bfloat16 besides products: norms, rotations, what becomes of products' sums, and the part of a layer that
// follows attention. The stream of residuals is float32; what enters products, keys and values are bfloat16.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "tiled_product.h"

#ifdef MOASERVE_AMX

namespace tiles {

using at::BFloat16;

constexpr int64_t kRowsPerThread = 64;  // of work that takes a microsecond a row

AMX inline __mmask16 first(int64_t count) {
  return count >= kTile ? static_cast<__mmask16>(0xFFFF) : static_cast<__mmask16>((1 << count) - 1);
}

AMX inline __m512 widen(__mmask16 within, const BFloat16* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(within, from)), 16));
}

AMX inline void narrow(__mmask16 within, BFloat16* to, __m512 values) {
  _mm256_mask_storeu_epi16(to, within, (__m256i)_mm512_cvtneps_pbh(values));
}

// x / rms(x) * weight of a row.
AMX inline void norm(const float* x, const BFloat16* weight, double eps, int64_t size, BFloat16* out) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += kTile) {
    const __m512 values = _mm512_loadu_ps(x + i);
    squares = _mm512_fmadd_ps(values, values, squares);
  }
  const auto mean = static_cast<double>(_mm512_reduce_add_ps(squares)) / static_cast<double>(size);
  const __m512 scale = _mm512_set1_ps(static_cast<float>(1.0 / std::sqrt(mean + eps)));
  for (int64_t i = 0; i < size; i += kTile) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x + i), scale);
    narrow(first(size - i), out + i, _mm512_mul_ps(scaled, widen(first(size - i), weight + i)));
  }
}

// Halves (a, b) of a head become (a cos - b sin, b cos + a sin).
AMX inline void rotate(const BFloat16* head, const BFloat16* cos, const BFloat16* sin, int64_t half, BFloat16* out) {
  for (int64_t i = 0; i < half; i += kTile) {
    const __mmask16 within = first(half - i);
    const __m512 a = widen(within, head + i), b = widen(within, head + half + i);
    const __m512 c = widen(within, cos + i), s = widen(within, sin + i);
    narrow(within, out + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
    narrow(within, out + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
  }
}

AMX inline void embed(const BFloat16* embedding, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += kTile) _mm512_storeu_ps(out + i, widen(first(size - i), embedding + i));
}

AMX inline void narrow_row(const float* from, int64_t size, BFloat16* to) {
  for (int64_t i = 0; i < size; i += kTile) narrow(first(size - i), to + i, _mm512_loadu_ps(from + i));
}

// Adds sums to rows of the stream of residuals.
struct AddToStream {
  float* x;
  int64_t width;

  AMX inline void operator()(int64_t panel, int64_t row, const float* sums) const {
    float* to = x + row * width + panel * kPanel;
    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_load_ps(sums)));
    _mm512_storeu_ps(to + kTile, _mm512_add_ps(_mm512_loadu_ps(to + kTile), _mm512_load_ps(sums + kTile)));
  }
};

// Writes a panel's sums into rows of `width` numbers.
struct ToFloats {
  float* out;
  int64_t width;

  AMX inline void operator()(int64_t panel, int64_t row, const float* sums) const {
    float* to = out + row * width + panel * kPanel;
    _mm512_storeu_ps(to, _mm512_load_ps(sums));
    _mm512_storeu_ps(to + kTile, _mm512_load_ps(sums + kTile));
  }
};

// silu(gate) * up, of panels whose first tile are gates and whose second what they let through.
struct Gate {
  BFloat16* out;
  int64_t width;

  AMX inline void operator()(int64_t panel, int64_t row, const float* sums) const {
    const __m512 gate = _mm512_load_ps(sums), up = _mm512_load_ps(sums + kTile), one = _mm512_set1_ps(1.0f);
    const __m512 negative = power_of_two(_mm512_mul_ps(gate, _mm512_set1_ps(-1.4426950408889634f)));
    const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, negative));
    narrow(first(kTile), out + row * width + panel * kTile, _mm512_mul_ps(silu, up));
  }
};

template <class Work>
void for_rows(int64_t rows, const Work& work) {
  at::parallel_for(0, rows, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

inline const BFloat16* numbers(const at::Tensor& tensor) {
  return tensor.const_data_ptr<BFloat16>();
}

inline Rows rows_of(const at::Tensor& x) {
  return {static_cast<const char*>(x.const_data_ptr()), x.size(1) * 2, x.size(0)};
}

// Norms' weights, and products' as `tiled` lays them out; gates and what they let through in turns of 16.
struct Layer {
  at::Tensor input_norm, qkv, output, mlp_norm, gate_up, down;
};

// Room for what enters a layer's products [n, size] and leaves its gates [n, hidden].
struct Room {
  at::Tensor normed, gated;

  Room(const Layer& layer, int64_t rows)
      : normed(at::empty({rows, layer.mlp_norm.size(0)}, layer.mlp_norm.options())),
        gated(at::empty({rows, layer.down.size(1) * kPairs}, layer.mlp_norm.options())) {}
};

// RMSNorm of all rows of the `stream` [n, size].
inline void normalize(const float* stream, const at::Tensor& weight, double eps, const at::Tensor& out) {
  const int64_t size = weight.size(0);
  auto* to = out.data_ptr<BFloat16>();
  for_rows(out.size(0), [&](int64_t row) { norm(stream + row * size, numbers(weight), eps, size, to + row * size); });
}

// What follows attention: its output [n, h·d] joins the `stream` [n, size], and then what the MLP makes of that.
inline void finish(const Layer& layer, const at::Tensor& attended, double eps, float* stream, const Room& room) {
  const int64_t size = layer.mlp_norm.size(0), hidden = layer.down.size(1) * kPairs;
  product(rows_of(attended), Panels(layer.output), AddToStream{stream, size});
  normalize(stream, layer.mlp_norm, eps, room.normed);
  product(rows_of(room.normed), Panels(layer.gate_up), Gate{room.gated.data_ptr<BFloat16>(), hidden});
  product(rows_of(room.gated), Panels(layer.down), AddToStream{stream, size});
}

}  // namespace tiles

#endif
