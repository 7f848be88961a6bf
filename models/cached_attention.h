#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

constexpr int64_t kSightRows = 32;   // rows of queries, and
constexpr int64_t kSightBlock = 32;  // of the cache, whose sight is told together

constexpr int64_t kMaxHeadDim = 256;

constexpr uint16_t kHidden = 0xFF80;  // -inf in bfloat16: what a mask has where a row does not see another

enum Seen : uint8_t { kNothing, kAll, kSome };

// What rows see of the cache, text by text, in each by groups of rows, in each by blocks: worked out once for all layers that have the
// same mask.
using Sight = std::vector<uint8_t>;
Sight sight_of(const at::Tensor& mask);

// Attention of rows over a cache: see cached_attention.py. Queries may be there for the first `asked` KV heads alone (0: all).
at::Tensor cached_attention(
    const at::Tensor& queries, const at::Tensor& kv, const at::Tensor& mask, int64_t kv_heads, const Sight& sight, int64_t asked = 0);
at::Tensor cached_attention(const at::Tensor& queries, const at::Tensor& kv, const at::Tensor& mask, int64_t kv_heads);
