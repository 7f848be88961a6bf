// Attention of rows over a cache of keys and values, of bfloat16 by tiles or by vectors, of float32 by vectors: what PyTorch's own kernel
// spends on few rows is mostly packing, and it reads every text's rows as far as the longest goes.
//
// Stretches of 32 cache rows that none of 32 query rows may see are passed over; which those are is found once for all heads, and by a
// decoder for all layers. Softmax is online (arXiv 2205.14135), in float32.
//
// What a thread does of it stands in tile_attention.h and vector_attention.h.

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "cached_attention.h"
#include "tile_attention.h"
#include "tiles.h"
#include "vector_attention.h"

namespace {

// There are queries for the first `asked` of the KV heads.
struct Shape {
  int64_t batch, rows, span, kv_heads, head_dim, asked;
};

Shape checked(const at::Tensor& queries, const at::Tensor& kv, const at::Tensor& mask, int64_t kv_heads, int64_t asked) {
  TORCH_CHECK(queries.dim() == 2 && kv.dim() == 3 && mask.dim() == 4 && kv_heads > 0, "cached_attention: wrong dimensions");
  const Shape shape{kv.size(0), mask.size(2), mask.size(3), kv_heads, kv.size(2) / (2 * kv_heads), asked};
  TORCH_CHECK(
      mask.size(0) == shape.batch && mask.size(1) == 1 && shape.span <= kv.size(1) && kv.size(2) == 2 * kv_heads * shape.head_dim &&
          asked <= kv_heads && queries.numel() == shape.batch * shape.rows * asked * shape.head_dim,
      "cached_attention: queries, cache and mask do not belong together");
  return shape;
}

at::Tensor by_pytorch(const at::Tensor& queries, const at::Tensor& kv, const at::Tensor& mask, const Shape& s) {
  const auto lined_up = queries.reshape({s.batch, s.rows, s.asked, s.head_dim}).transpose(1, 2);
  const auto halves = kv.narrow(1, 0, s.span).unflatten(2, {2, s.kv_heads, s.head_dim}).narrow(3, 0, s.asked);
  const auto keys = halves.select(2, 0).transpose(1, 2), values = halves.select(2, 1).transpose(1, 2);
  const auto out = at::scaled_dot_product_attention(lined_up, keys, values, mask);
  return out.transpose(1, 2).reshape_as(queries);
}

#ifdef MOASERVE_SIMD

using tiles::kTile;

constexpr int64_t kSmallest = 1024;  // cache rows times tiles of queries that are worth another thread, some 10 µs

// Tasks of a text and KV head.
int64_t groups_of(int64_t rows) {
  return (rows + 2 * kTile - 1) / (2 * kTile);
}

int64_t blocks_of(int64_t span) {
  return (span + kSightBlock - 1) / kSightBlock;
}

#ifdef MOASERVE_TILES

void by_tiles(
    const at::Tensor& queries, const at::Tensor& kv, const at::Tensor& mask, const Shape& s, const Sight& sight, at::Tensor& out) {
  const auto* queries_data = queries.const_data_ptr<at::BFloat16>();
  const auto* kv_data = kv.const_data_ptr<at::BFloat16>();
  const auto* mask_data = mask.const_data_ptr<at::BFloat16>();
  auto* out_data = out.data_ptr<at::BFloat16>();
  const int64_t query_row = s.asked * s.head_dim, kv_text = kv.stride(0), kv_row = kv.stride(1);
  const int64_t mask_text = mask.stride(0), mask_row = mask.stride(2);
  const int64_t groups = groups_of(s.rows), blocks = blocks_of(s.span);
  const int64_t cost = s.span * (s.rows > kTile ? 2 : 1);
  at::parallel_for(0, s.batch * s.asked * groups, std::max<int64_t>(1, kSmallest / cost), [&](int64_t begin, int64_t end) {
    tiles::configure();
    tile_attention::Values values(blocks, s.head_dim / kTile, groups > 1);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t group = index % groups, head = index / groups % s.asked, text = index / groups / s.asked;
      const int64_t first = group * 2 * kTile, offset = (text * s.rows + first) * query_row + head * s.head_dim;
      if (group == 0) values.forget();
      tile_attention::Task task(
          queries_data + offset, query_row, kv_data + text * kv_text + head * s.head_dim, kv_row, head * s.head_dim,
          mask_data + text * mask_text + first * mask_row, mask_row, std::min(2 * kTile, s.rows - first), s.span,
          s.kv_heads, s.head_dim, sight.data() + (text * groups + group) * blocks, values);
      task.run(out_data + offset);
    }
    tiles::release();
  });
}

#endif

Seen seen_of(bool differs_from_hidden, bool differs_from_visible) {
  if (!differs_from_hidden) return Seen::kNothing;
  return differs_from_visible ? Seen::kSome : Seen::kAll;
}

// What `rows` of a mask, one every `mask_row` numbers, see of a block of cache rows, of which `count` are within the span.
SIMD Seen what_is_seen(const at::BFloat16* row, int64_t mask_row, int64_t rows, int64_t count) {
  const wide::Words hidden = wide::all_words(kHidden);
  wide::Words any = wide::no_words(), differs = wide::no_words();
  for (int64_t i = 0; i < rows; ++i, row += mask_row) {
    const wide::Words values = wide::load_words(count, row, kHidden);
    any = wide::either(any, values);
    differs = wide::either(differs, wide::differing(values, hidden));
  }
  return seen_of(!wide::is_zero(differs), !wide::is_zero(any));
}

SIMD Seen what_is_seen(const float* row, int64_t mask_row, int64_t rows, int64_t count) {
  const wide::Floats hidden = wide::all(-std::numeric_limits<float>::infinity());
  wide::Mask all_hidden = wide::first(kTile), all_visible = wide::first(kTile);
  for (int64_t i = 0; i < rows; ++i, row += mask_row) {
    for (int64_t half = 0; half < kSightBlock; half += kTile) {
      const wide::Floats values = wide::load_mask(count - half, row + half);
      all_hidden &= wide::equal(values, hidden);
      all_visible &= wide::equal(values, wide::zero());
    }
  }
  return seen_of(all_hidden != wide::first(kTile), all_visible != wide::first(kTile));
}

template <class Number>
void add_sight(const at::Tensor& mask, Sight& sight) {
  const int64_t rows = mask.size(2), span = mask.size(3);
  for (int64_t text = 0; text < mask.size(0); ++text) {
    for (int64_t first = 0; first < rows; first += kSightRows) {
      const auto* row = mask.const_data_ptr<Number>() + text * mask.stride(0) + first * mask.stride(2);
      for (int64_t start = 0; start < span; start += kSightBlock) {
        sight.push_back(what_is_seen(row + start, mask.stride(2), std::min(kSightRows, rows - first), span - start));
      }
    }
  }
}

constexpr int64_t kUnit = 128;  // rows of queries that one thread takes at a time

template <class Number>
void by_vectors(
    const at::Tensor& queries, const at::Tensor& kv, const at::Tensor& mask, const Shape& s, const Sight& sight, at::Tensor& out) {
  const auto* queries_data = queries.const_data_ptr<Number>();
  const auto* kv_data = kv.const_data_ptr<Number>();
  const auto* mask_data = mask.const_data_ptr<Number>();
  auto* out_data = out.data_ptr<Number>();
  const vectors::Layout layout{s.asked * s.head_dim, kv.stride(1), s.kv_heads * s.head_dim, mask.stride(2), s.span, s.head_dim};
  const int64_t groups = groups_of(s.rows), blocks = blocks_of(s.span), units = (s.rows + kUnit - 1) / kUnit;
  // Heads stay together, for what is fetched for one is there for the others, unless there are too few units for all threads.
  const int64_t heads = s.batch * units < at::get_num_threads() ? 1 : s.asked, parts = s.asked / heads;
  const int64_t cost = s.span * heads * std::max<int64_t>(1, std::min(kUnit, s.rows) / kTile);
  at::parallel_for(0, s.batch * units * parts, std::max<int64_t>(1, kSmallest / cost), [&](int64_t begin, int64_t end) {
    vectors::Attention<Number> attention(layout, std::min(kUnit, s.rows), heads);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t part = index % parts, unit = index / parts % units, text = index / parts / units, first = unit * kUnit;
      const int64_t offset = (text * s.rows + first) * layout.query_row;
      const vectors::Text<Number> one{
          queries_data + offset, kv_data + text * kv.stride(0), mask_data + text * mask.stride(0) + first * layout.mask_row,
          sight.data() + (text * groups + first / vectors::kGroup) * blocks, std::min(kUnit, s.rows - first), blocks};
      attention.run(one, part * heads, heads, out_data + offset);
    }
  });
}

// Whether a tensor's rows are dense, and of a type that operators know.
bool is_dense(const at::Tensor& tensor) {
  return (tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kFloat) && tensor.stride(-1) == 1;
}

bool suits(const at::Tensor& queries, const at::Tensor& kv, const at::Tensor& mask, const Shape& s) {
  const bool sizes = s.span > 0 && s.head_dim % kTile == 0 && s.head_dim <= kMaxHeadDim;
  const bool same = queries.scalar_type() == kv.scalar_type() && kv.scalar_type() == mask.scalar_type();
  return sizes && same && tiles::available() && is_dense(queries) && is_dense(kv) && is_dense(mask) && queries.is_contiguous();
}

#endif

}  // namespace

Sight sight_of(const at::Tensor& mask) {
  Sight sight;
#ifdef MOASERVE_SIMD
  if (!tiles::available() || !is_dense(mask)) return sight;
  sight.reserve(mask.size(0) * groups_of(mask.size(2)) * blocks_of(mask.size(3)));
  mask.scalar_type() == at::kFloat ? add_sight<float>(mask, sight) : add_sight<at::BFloat16>(mask, sight);
#endif
  return sight;
}

at::Tensor cached_attention(
    const at::Tensor& queries, const at::Tensor& kv, const at::Tensor& mask, int64_t kv_heads, const Sight& sight,
    int64_t asked) {
  const Shape shape = checked(queries, kv, mask, kv_heads, asked > 0 ? asked : kv_heads);
#ifdef MOASERVE_SIMD
  if (suits(queries, kv, mask, shape)) {
    at::Tensor out = at::empty_like(queries);
    const bool narrow = queries.scalar_type() == at::kBFloat16;
#ifdef MOASERVE_TILES
    if (narrow && tiles::by_tiles()) {
      by_tiles(queries, kv, mask, shape, sight, out);
      return out;
    }
#endif
    narrow ? by_vectors<at::BFloat16>(queries, kv, mask, shape, sight, out) : by_vectors<float>(queries, kv, mask, shape, sight, out);
    return out;
  }
#endif
  return by_pytorch(queries, kv, mask, shape);
}

at::Tensor cached_attention(const at::Tensor& queries, const at::Tensor& kv, const at::Tensor& mask, int64_t kv_heads) {
  checked(queries, kv, mask, kv_heads, kv_heads);
  return cached_attention(queries, kv, mask, kv_heads, sight_of(mask));
}

// Compiled graphs call this by its name, without a dispatcher in between.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_cached_attention(
    AtenTensorHandle queries, AtenTensorHandle kv, AtenTensorHandle mask, int64_t kv_heads, AtenTensorHandle* out) {
  using torch::aot_inductor::new_tensor_handle;
  using torch::aot_inductor::tensor_handle_to_tensor_pointer;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    const auto& [q, c, m] = std::tie(
        *tensor_handle_to_tensor_pointer(queries), *tensor_handle_to_tensor_pointer(kv), *tensor_handle_to_tensor_pointer(mask));
    *out = new_tensor_handle(cached_attention(q, c, m, kv_heads));
  });
}

TORCH_LIBRARY_IMPL(moaserve, CPU, library) {
  using Operator = at::Tensor (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t);
  library.impl("cached_attention", static_cast<Operator>(&cached_attention));
}
