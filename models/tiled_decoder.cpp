// A Llama decoder in bfloat16, from token ids to the final norm, on CPUs that multiply it: what PyTorch's compiler makes of it spends more
// than half of its time beside the products.
//
// The stream of residuals stays in float32; what enters products, keys and values are bfloat16. Every row is computed in the same
// way whatever rows are computed with it.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <cmath>

#include "cached_attention.h"
#include "tiled_product.h"

namespace {

#ifdef MOASERVE_AMX

using at::BFloat16;
using tiles::kPanel;
using tiles::kTile;

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
AMX void norm(const float* x, const BFloat16* weight, double eps, int64_t size, BFloat16* out) {
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
AMX void rotate(const BFloat16* head, const BFloat16* cos, const BFloat16* sin, int64_t half, BFloat16* out) {
  for (int64_t i = 0; i < half; i += kTile) {
    const __mmask16 within = first(half - i);
    const __m512 a = widen(within, head + i), b = widen(within, head + half + i);
    const __m512 c = widen(within, cos + i), s = widen(within, sin + i);
    narrow(within, out + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
    narrow(within, out + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
  }
}

AMX void embed(const BFloat16* embedding, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += kTile) _mm512_storeu_ps(out + i, widen(first(size - i), embedding + i));
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

// silu(gate) * up, of panels whose first tile are gates and whose second what they let through.
struct Gate {
  BFloat16* out;
  int64_t width;

  AMX inline void operator()(int64_t panel, int64_t row, const float* sums) const {
    const __m512 gate = _mm512_load_ps(sums), up = _mm512_load_ps(sums + kTile), one = _mm512_set1_ps(1.0f);
    const __m512 negative = tiles::power_of_two(_mm512_mul_ps(gate, _mm512_set1_ps(-1.4426950408889634f)));
    const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, negative));
    narrow(first(kTile), out + row * width + panel * kTile, _mm512_mul_ps(silu, up));
  }
};

struct Layer {
  at::Tensor input_norm, qkv, output, mlp_norm, gate_up, down;
};

template <class Work>
void for_rows(int64_t rows, const Work& work) {
  at::parallel_for(0, rows, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

const BFloat16* numbers(const at::Tensor& tensor) {
  return tensor.const_data_ptr<BFloat16>();
}

tiles::Rows rows_of(const at::Tensor& x) {
  return {static_cast<const char*>(x.const_data_ptr()), x.size(1) * 2, x.size(0)};
}

struct Decoder : torch::CustomClassHolder {
  // `tensors`: embedding, cosines and sines [positions, d/2], final norm, and six of each layer; products' weights are tiled, gates
  // and what they let through in turns of 16.
  Decoder(const std::vector<at::Tensor>& tensors, int64_t kv_heads, int64_t head_dim, double eps)
      : embedding_(tensors.at(0)), cos_(tensors.at(1)), sin_(tensors.at(2)), norm_(tensors.at(3)), kv_heads_(kv_heads),
        head_dim_(head_dim), eps_(eps) {
    TORCH_CHECK(tiles::available(), "this CPU has no AVX512-BF16");
    TORCH_CHECK(tensors.size() > 4 && (tensors.size() - 4) % 6 == 0, "a decoder has layers, and a layer six tensors");
    for (size_t i = 4; i < tensors.size(); i += 6) {
      layers_.push_back({tensors[i], tensors[i + 1], tensors[i + 2], tensors[i + 3], tensors[i + 4], tensors[i + 5]});
    }
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK(tensor.scalar_type() == at::kBFloat16 && tensor.is_contiguous(), "weights are dense and bfloat16");
    }
  }

  // Inputs as those of the compiled decoder (compiled.py): ids, positions and cache rows [B, rows], the mask, each layer's cache.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) {
    TORCH_CHECK(inputs.size() == 4 + layers_.size(), "a decoder of ", layers_.size(), " layers got ", inputs.size(), " inputs");
    const auto *ids = inputs[0].const_data_ptr<int64_t>(), *positions = inputs[1].const_data_ptr<int64_t>();
    const auto* write = inputs[2].const_data_ptr<int64_t>();
    const at::Tensor& mask = inputs[3];
    const int64_t rows = inputs[0].numel(), size = embedding_.size(1), half = head_dim_ / 2, kv_size = 2 * kv_heads_ * head_dim_;
    check(inputs, rows, kv_size);
    const int64_t q_size = layers_[0].output.size(1) * tiles::kPairs, hidden = layers_[0].down.size(1) * tiles::kPairs;
    const auto options = embedding_.options();
    const at::Tensor x = at::empty({rows, size}, options.dtype(at::kFloat)), queries = at::empty({rows, q_size}, options);
    const at::Tensor normed = at::empty({rows, size}, options), qkv = at::empty({rows, q_size + kv_size}, options);
    const at::Tensor gated = at::empty({rows, hidden}, options), out = at::empty({rows, size}, options);
    auto* stream = x.data_ptr<float>();
    auto *into = normed.data_ptr<BFloat16>(), *projected = qkv.data_ptr<BFloat16>(), *asked = queries.data_ptr<BFloat16>();
    const auto normalize = [&](const at::Tensor& weight, BFloat16* to) {
      for_rows(rows, [&](int64_t row) { norm(stream + row * size, numbers(weight), eps_, size, to + row * size); });
    };
    for_rows(rows, [&](int64_t row) { embed(numbers(embedding_) + ids[row] * size, size, stream + row * size); });
    for (size_t index = 0; index < layers_.size(); ++index) {
      const Layer& layer = layers_[index];
      const at::Tensor& cache = inputs[4 + index];
      auto* kept = cache.data_ptr<BFloat16>();
      normalize(layer.input_norm, into);
      tiles::product(rows_of(normed), tiles::Panels(layer.qkv), tiles::ToRows{projected, q_size + kv_size});
      for_rows(rows, [&](int64_t row) {
        const BFloat16 *cos = numbers(cos_) + positions[row] * half, *sin = numbers(sin_) + positions[row] * half;
        const BFloat16* from = projected + row * (q_size + kv_size);
        BFloat16 *to = asked + row * q_size, *keys = kept + write[row] * kv_size;
        for (int64_t i = 0; i < q_size; i += head_dim_) rotate(from + i, cos, sin, half, to + i);
        for (int64_t i = 0; i < kv_size / 2; i += head_dim_) rotate(from + q_size + i, cos, sin, half, keys + i);
        std::copy_n(from + q_size + kv_size / 2, kv_size / 2, keys + kv_size / 2);
      });
      const at::Tensor attended = cached_attention(queries, cache, mask, kv_heads_);
      tiles::product(rows_of(attended), tiles::Panels(layer.output), AddToStream{stream, size});
      normalize(layer.mlp_norm, into);
      tiles::product(rows_of(normed), tiles::Panels(layer.gate_up), Gate{gated.data_ptr<BFloat16>(), hidden});
      tiles::product(rows_of(gated), tiles::Panels(layer.down), AddToStream{stream, size});
    }
    normalize(norm_, out.data_ptr<BFloat16>());
    return {out};
  }

 private:
  void check(const std::vector<at::Tensor>& inputs, int64_t rows, int64_t kv_size) const {
    const auto* ids = inputs[0].const_data_ptr<int64_t>();
    const auto *positions = inputs[1].const_data_ptr<int64_t>(), *write = inputs[2].const_data_ptr<int64_t>();
    TORCH_CHECK(
        rows > 0 && inputs[1].numel() == rows && inputs[2].numel() == rows && inputs[0].is_contiguous() &&
            inputs[1].is_contiguous() && inputs[2].is_contiguous(),
        "ids, positions and cache rows do not belong together");
    for (size_t index = 4; index < inputs.size(); ++index) {
      const at::Tensor& cache = inputs[index];
      TORCH_CHECK(cache.is_contiguous() && cache.dim() == 3 && cache.size(2) == kv_size, "a layer's cache has other sizes");
    }
    const int64_t cache_rows = inputs[4].size(0) * inputs[4].size(1);
    for (int64_t row = 0; row < rows; ++row) {
      TORCH_CHECK(ids[row] >= 0 && ids[row] < embedding_.size(0), "no token ", ids[row]);
      TORCH_CHECK(positions[row] >= 0 && positions[row] < cos_.size(0), "no position ", positions[row]);
      TORCH_CHECK(write[row] >= 0 && write[row] < cache_rows, "no cache row ", write[row]);
    }
  }

  at::Tensor embedding_, cos_, sin_, norm_;
  std::vector<Layer> layers_;
  int64_t kv_heads_, head_dim_;
  double eps_;
};

#else

struct Decoder : torch::CustomClassHolder {
  Decoder(const std::vector<at::Tensor>&, int64_t, int64_t, double) {
    TORCH_CHECK(false, "compiled by a compiler that does not know AVX512-BF16");
  }
  std::vector<at::Tensor> run(const std::vector<at::Tensor>&) {
    return {};
  }
};

#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(moaserve, library) {
  library.class_<Decoder>("Decoder")
      .def(torch::init<std::vector<at::Tensor>, int64_t, int64_t, double>())
      .def("run", &Decoder::run);
}
