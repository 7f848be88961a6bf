#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

// What rows see of the cache, by stretches: worked out once for all layers that have the same mask.
using Sight = std::vector<uint8_t>;
Sight sight_of(const at::Tensor& mask);

// Attention of rows over a cache: see cached_attention.py. Queries may be there for the first `asked` KV heads alone (0: all).
at::Tensor cached_attention(
    const at::Tensor& queries, const at::Tensor& kv, const at::Tensor& mask, int64_t kv_heads, const Sight& sight, int64_t asked = 0);
at::Tensor cached_attention(const at::Tensor& queries, const at::Tensor& kv, const at::Tensor& mask, int64_t kv_heads);
