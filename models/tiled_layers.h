// What layers are made of besides products: norms, rotations, what becomes of products' sums, and the part of a layer that follows
// attention. The stream of residuals is float32; what enters products, keys and values are of the type that is stored, a `Number`.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "tiled_product.h"

#ifdef MOASERVE_SIMD

namespace tiles {

constexpr int64_t kRowsPerThread = 64;  // of work that takes a microsecond a row
constexpr int64_t kMostHead = 256;      // numbers of a head, as cached_attention.suits says

// x / rms(x) * weight of a row.
template <class Number>
SIMD inline void norm(const float* x, const Number* weight, double eps, int64_t size, Number* out) {
  wide::Floats squares = wide::zero();
  for (int64_t i = 0; i < size; i += kTile) {
    const wide::Floats values = wide::load(x + i);
    squares = wide::fma(values, values, squares);
  }
  const auto mean = static_cast<double>(wide::sum(squares)) / static_cast<double>(size);
  const wide::Floats scale = wide::all(static_cast<float>(1.0 / std::sqrt(mean + eps)));
  for (int64_t i = 0; i < size; i += kTile) {
    const wide::Floats scaled = wide::load(x + i) * scale;
    wide::narrow(wide::first(size - i), out + i, scaled * wide::widen(wide::first(size - i), weight + i));
  }
}

// Halves (a, b) of a head become (a cos - b sin, b cos + a sin).
template <class Number>
SIMD inline void rotate(const Number* head, const Number* cos, const Number* sin, int64_t half, Number* out) {
  for (int64_t i = 0; i < half; i += kTile) {
    const wide::Mask within = wide::first(half - i);
    const wide::Floats a = wide::widen(within, head + i), b = wide::widen(within, head + half + i);
    const wide::Floats c = wide::widen(within, cos + i), s = wide::widen(within, sin + i);
    wide::narrow(within, out + i, wide::fms(a, c, b * s));
    wide::narrow(within, out + half + i, wide::fma(b, c, a * s));
  }
}

template <class Number>
SIMD inline void embed(const Number* embedding, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += kTile) wide::store(out + i, wide::widen(wide::first(size - i), embedding + i));
}

template <class Number>
SIMD inline void narrow_row(const float* from, int64_t size, Number* to) {
  for (int64_t i = 0; i < size; i += kTile) wide::narrow(wide::first(size - i), to + i, wide::load(from + i));
}

// x / rms(x) * weight of a head of at most kMostHead numbers.
template <class Number>
SIMD inline void norm_head(const Number* head, const Number* weight, double eps, int64_t size, Number* out) {
  alignas(64) float widened[kMostHead];
  embed(head, size, widened);
  norm(widened, weight, eps, size, out);
}

// Adds sums to rows of the stream of residuals.
struct AddToStream {
  float* x;
  int64_t width;

  SIMD inline void operator()(int64_t panel, int64_t row, const float* sums) const {
    float* to = x + row * width + panel * kPanel;
    wide::store(to, wide::load(to) + wide::load(sums));
    wide::store(to + kTile, wide::load(to + kTile) + wide::load(sums + kTile));
  }
};

// Writes a panel's sums into rows of `width` numbers.
struct ToFloats {
  float* out;
  int64_t width;

  SIMD inline void operator()(int64_t panel, int64_t row, const float* sums) const {
    float* to = out + row * width + panel * kPanel;
    wide::store(to, wide::load(sums));
    wide::store(to + kTile, wide::load(sums + kTile));
  }
};

// silu(gate) * up, of panels whose first tile are gates and whose second what they let through.
template <class Number>
struct Gate {
  Number* out;
  int64_t width;

  SIMD inline void operator()(int64_t panel, int64_t row, const float* sums) const {
    const wide::Floats gate = wide::load(sums), up = wide::load(sums + kTile), one = wide::all(1.0f);
    const wide::Floats negative = wide::power_of_two(gate * wide::all(-1.4426950408889634f));
    const wide::Floats silu = gate / (one + negative);
    wide::narrow(wide::first(kTile), out + row * width + panel * kTile, silu * up);
  }
};

template <class Work>
void for_rows(int64_t rows, const Work& work) {
  at::parallel_for(0, rows, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

template <class Number>
const Number* numbers(const at::Tensor& tensor) {
  return tensor.const_data_ptr<Number>();
}

// The same of one that may be empty: null then.
template <class Number>
const Number* numbers_if_any(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : numbers<Number>(tensor);
}

template <class Number>
Number* written(const at::Tensor& tensor) {
  return tensor.data_ptr<Number>();
}

// Whether a tensor is dense, and of the type that is stored.
template <class Number>
bool is_stored(const at::Tensor& tensor) {
  return tensor.scalar_type() == c10::CppTypeToScalarType<Number>::value && tensor.is_contiguous();
}

// Whether operators of such rows may read a tensor: one as it is stored, or a weight that lies in panels.
template <class Number>
bool is_read(const at::Tensor& tensor) {
  return tensor.dim() == 6 ? multiplies<Number>(tensor) : is_stored<Number>(tensor);
}

inline Rows rows_of(const at::Tensor& x) {
  return {static_cast<const char*>(x.const_data_ptr()), x.size(1) * x.element_size(), x.size(0)};
}

// Norms' weights, and products' as `tiled` lays them out; gates and what they let through in turns of 16. Some layers have a bias of
// queries, keys and values, or norms of each head of queries and keys; where they are empty, there are none.
struct Layer {
  at::Tensor input_norm, qkv, output, mlp_norm, gate_up, down;
  at::Tensor qkv_bias = {}, q_norm = {}, k_norm = {};
};

// Room for what enters a layer's products [n, size] and leaves its gates [n, hidden].
struct Room {
  at::Tensor normed, gated;

  Room(const Layer& layer, int64_t rows)
      : normed(at::empty({rows, layer.mlp_norm.size(0)}, layer.mlp_norm.options())),
        gated(at::empty({rows, layer.down.size(1) * kPairs}, layer.mlp_norm.options())) {}
};

// RMSNorm of all rows of the `stream` [n, size].
template <class Number>
void normalize(const float* stream, const at::Tensor& weight, double eps, const at::Tensor& out) {
  const int64_t size = weight.size(0);
  auto* to = out.data_ptr<Number>();
  for_rows(out.size(0), [&](int64_t row) { norm(stream + row * size, numbers<Number>(weight), eps, size, to + row * size); });
}

// What follows attention: its output [n, h·d] joins the `stream` [n, size], and then what the MLP makes of that.
template <class Number>
void finish(const Layer& layer, const at::Tensor& attended, double eps, float* stream, const Room& room) {
  const int64_t size = layer.mlp_norm.size(0), hidden = layer.down.size(1) * kPairs;
  product<Number>(rows_of(attended), layer.output, AddToStream{stream, size});
  normalize<Number>(stream, layer.mlp_norm, eps, room.normed);
  product<Number>(rows_of(room.normed), layer.gate_up, Gate<Number>{room.gated.data_ptr<Number>(), hidden});
  product<Number>(rows_of(room.gated), layer.down, AddToStream{stream, size});
}

}  // namespace tiles

#endif
