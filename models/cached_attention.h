#pragma once

#include <ATen/core/Tensor.h>

// Attention of rows over a cache: see cached_attention.py.
at::Tensor cached_attention(const at::Tensor& queries, const at::Tensor& kv, const at::Tensor& mask, int64_t kv_heads);
