// What products by vectors have on their left and on their right where registers are few, those of AVX2: rows packed, and weights widened.

#pragma once

#include "tiles.h"

#if defined(MOASERVE_SIMD) && !defined(MOASERVE_TILES)

namespace tiles {

// 8 by 8 numbers, rows for columns.
SIMD inline void transpose(__m256 (&r)[8]) {
  __m256 t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256 low = r[i], high = r[i + 4];
    r[i] = _mm256_permute2f128_ps(low, high, 0x20);
    r[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
  }
}

SIMD inline __m256 load_eight(const float* from) { return _mm256_loadu_ps(from); }
SIMD inline __m256 load_eight(const BFloat16* from) { return wide::widened(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }

// `size` numbers of each of at most eight rows, one every `bytes`: the first of each, the second of each, and so on. What is written
// behind the last number, of as many as eight rows have, is for what comes next to write over.
template <class Number>
SIMD inline void pack_few(const char* rows, int64_t bytes, int64_t count, int64_t size, float* to) {
  const char* from[8];
  for (int64_t i = 0; i < 8; ++i) from[i] = rows + std::min(i, count - 1) * bytes;
  for (int64_t column = 0; column < size; column += 8) {
    __m256 numbers[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) numbers[i] = load_eight(reinterpret_cast<const Number*>(from[i]) + column);
    transpose(numbers);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i, to += count) _mm256_storeu_ps(to, numbers[i]);
  }
}

// The same of any number of rows, as many at a time as products take; `to` has room for seven numbers more.
template <class Number>
SIMD inline void pack_rows(const char* rows, int64_t bytes, int64_t count, int64_t size, float* to) {
  const int64_t most = rows_at_once(count);
  for (int64_t row = 0; row < count; row += most) pack_few<Number>(rows + row * bytes, bytes, std::min(most, count - row), size, to + row * size);
}

// A tile's weights of so many steps, one every `bytes`, as if they had been kept in float32.
SIMD inline void widen_tile(const char* tile, int64_t bytes, int64_t steps, float* to) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
  for (int64_t step = 0; step < steps; ++step, tile += bytes) {
    for (int64_t pair = 0; pair < kTile; ++pair, to += 2 * kTile) {
      const __m256i low = wide::load_narrow(tile + pair * kRowBytes), high = wide::load_narrow(tile + pair * kRowBytes + kRowBytes / 2);
      wide::store(to, {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))});
      wide::store(to + kTile, {_mm256_castsi256_ps(_mm256_and_si256(low, upper)), _mm256_castsi256_ps(_mm256_and_si256(high, upper))});
    }
  }
}

}  // namespace tiles

#endif
