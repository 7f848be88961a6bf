// Sixteen numbers at a time, in the words of what operators do with them: one register of AVX512, or two of AVX2.
//
// `graph_runner.build_runner` says which of them a library is compiled for: MOASERVE_AVX2, or else AVX512-BF16 and what there is of AMX.
// Both do the same by the same operations in the same order, but for sums within a vector and products of bfloat16: see tiles.h.

#pragma once

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__linux__) && (defined(MOASERVE_AVX2) || __has_include(<amxbf16intrin.h>))
#define MOASERVE_SIMD 1
#include <immintrin.h>

#ifdef MOASERVE_AVX2
#define SIMD __attribute__((target("avx2,fma")))
#else
#define MOASERVE_TILES 1
#define SIMD __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")))
#endif

namespace wide {

constexpr int64_t kWidth = 16;

using Mask = uint32_t;   // a bit for each number, the first one's is the lowest
using Narrow = __m256i;  // sixteen numbers in bfloat16

// The first `count` of sixteen.
SIMD inline Mask first(int64_t count) { return count >= kWidth ? 0xFFFFu : (1u << count) - 1; }

SIMD inline Narrow load_narrow(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
SIMD inline void store_narrow(void* to, Narrow values) { _mm256_storeu_si256(static_cast<__m256i*>(to), values); }

#ifdef MOASERVE_TILES

using Floats = __m512;
using Words = __m512i;  // 32 numbers of two bytes

SIMD inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
SIMD inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
SIMD inline Floats all(float x) { return _mm512_set1_ps(x); }
SIMD inline Floats zero() { return _mm512_setzero_ps(); }
SIMD inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b where one is no number
SIMD inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
SIMD inline Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
SIMD inline Floats plus_product(Floats sum, Floats a, Floats b) { return fma(a, b, sum); }
SIMD inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
SIMD inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }
SIMD inline Mask at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
SIMD inline Mask at_most(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
SIMD inline Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
SIMD inline Floats select(Mask which, Floats chosen, Floats other) { return _mm512_mask_mov_ps(other, static_cast<__mmask16>(which), chosen); }

// x - floor(x), and y 2^floor(x).
SIMD inline Floats fraction(Floats x) { return _mm512_reduce_ps(x, 0x01); }
SIMD inline Floats scaled(Floats y, Floats x) { return _mm512_scalef_ps(y, x); }

SIMD inline Floats widened(Narrow x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
SIMD inline Narrow narrowed(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }

// Numbers as they are stored, in either type: those of a mask, the others are 0, or stay as they are.
SIMD inline Floats widen(Mask within, const c10::BFloat16* from) {
  return widened(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(within), from));
}
SIMD inline Floats widen(Mask within, const float* from) { return _mm512_maskz_loadu_ps(static_cast<__mmask16>(within), from); }
SIMD inline void narrow(Mask within, c10::BFloat16* to, Floats values) {
  _mm256_mask_storeu_epi16(to, static_cast<__mmask16>(within), narrowed(values));
}
SIMD inline void narrow(Mask within, float* to, Floats values) { _mm512_mask_storeu_ps(to, static_cast<__mmask16>(within), values); }

SIMD inline void store(void* to, Words x) { _mm512_storeu_si512(to, x); }
SIMD inline Words no_words() { return _mm512_setzero_si512(); }
SIMD inline Words all_words(uint16_t x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); }
SIMD inline Words joined(Narrow low, Narrow high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
SIMD inline Narrow low_of(Words x) { return _mm512_castsi512_si256(x); }
SIMD inline Narrow high_of(Words x) { return _mm512_extracti64x4_epi64(x, 1); }
SIMD inline Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
SIMD inline Words differing(Words a, Words b) { return _mm512_xor_si512(a, b); }
SIMD inline bool is_zero(Words x) { return _mm512_test_epi32_mask(x, x) == 0; }

// The first `count` words from an address on, and `other` in the place of those behind them.
SIMD inline Words load_words(int64_t count, const void* from, uint16_t other) {
  const __mmask32 within = count >= 2 * kWidth ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
  return _mm512_mask_loadu_epi16(all_words(other), within, from);
}

// Of four words of 32 bits in each of four lanes: the first or last two of both vectors in turns, alone or two by two.
SIMD inline Words low_singles(Words a, Words b) { return _mm512_unpacklo_epi32(a, b); }
SIMD inline Words high_singles(Words a, Words b) { return _mm512_unpackhi_epi32(a, b); }
SIMD inline Words low_doubles(Words a, Words b) { return _mm512_unpacklo_epi64(a, b); }
SIMD inline Words high_doubles(Words a, Words b) { return _mm512_unpackhi_epi64(a, b); }
// The first and third lane of both vectors, or the second and fourth.
SIMD inline Words even_lanes(Words a, Words b) { return _mm512_shuffle_i32x4(a, b, 0x88); }
SIMD inline Words odd_lanes(Words a, Words b) { return _mm512_shuffle_i32x4(a, b, 0xdd); }

// The order that puts the numbers of two rows of 16, one behind the other, into pairs.
struct PairsOrder {
  alignas(64) uint16_t order[2 * kWidth];
  constexpr PairsOrder() : order{} {
    for (uint16_t i = 0; i < 2 * kWidth; ++i) order[i] = static_cast<uint16_t>(i / 2 + kWidth * (i % 2));
  }
};
SIMD inline Words paired(Words x) {
  static constexpr PairsOrder kOrder;
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder.order), x);
}

#else

struct Floats {
  __m256 low, high;
};

struct Words {
  __m256i low, high;
};

SIMD inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
SIMD inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
SIMD inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
SIMD inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }

SIMD inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
SIMD inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}
SIMD inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SIMD inline Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
SIMD inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
SIMD inline Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
SIMD inline Floats fms(Floats a, Floats b, Floats c) { return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)}; }

// fma(a, b, sum), in the register of the sum: where twelve of sixteen hold sums, GCC would move some of them to memory and back.
SIMD inline __m256 plus_product(__m256 sum, __m256 a, __m256 b) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
}
SIMD inline Floats plus_product(Floats sum, Floats a, Floats b) { return {plus_product(sum.low, a.low, b.low), plus_product(sum.high, a.high, b.high)}; }

SIMD inline float sum(Floats x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
SIMD inline float largest(Floats x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

template <int kind>
SIMD inline Mask compared(Floats a, Floats b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, kind)), high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, kind));
  return static_cast<Mask>(low | high << 8);
}
SIMD inline Mask at_least(Floats a, Floats b) { return compared<_CMP_GE_OQ>(a, b); }
SIMD inline Mask at_most(Floats a, Floats b) { return compared<_CMP_LE_OQ>(a, b); }
SIMD inline Mask equal(Floats a, Floats b) { return compared<_CMP_EQ_OQ>(a, b); }

SIMD inline __m256 select(Mask which, __m256 chosen, __m256 other) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(which)), bits), bits);
  return _mm256_blendv_ps(other, chosen, _mm256_castsi256_ps(set));
}
SIMD inline Floats select(Mask which, Floats chosen, Floats other) {
  return {select(which & 0xFF, chosen.low, other.low), select(which >> 8, chosen.high, other.high)};
}

// Exponents of 2 beyond which there is nothing but 0 and inf.
SIMD inline __m256 bounded(__m256 x) { return _mm256_min_ps(_mm256_set1_ps(254.0f), _mm256_max_ps(_mm256_set1_ps(-252.0f), x)); }
SIMD inline __m256 fraction(__m256 x) { return _mm256_sub_ps(bounded(x), _mm256_floor_ps(bounded(x))); }
SIMD inline Floats fraction(Floats x) { return {fraction(x.low), fraction(x.high)}; }

// By two factors, so that the exponents of both fit whatever numbers come of them.
SIMD inline __m256 scaled(__m256 y, __m256 x) {
  const __m256i exponent = _mm256_cvtps_epi32(_mm256_floor_ps(bounded(x))), half = _mm256_srai_epi32(exponent, 1), bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(exponent, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(y, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}
SIMD inline Floats scaled(Floats y, Floats x) { return {scaled(y.low, x.low), scaled(y.high, x.high)}; }

SIMD inline __m256 widened(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
SIMD inline Floats widened(Narrow x) { return {widened(_mm256_castsi256_si128(x)), widened(_mm256_extracti128_si256(x, 1))}; }

// To the nearest number in bfloat16, of two as near to the even one; what is no number stays none.
SIMD inline __m256i rounded(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i none = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(nearest, _mm256_set1_epi32(0x7FC0), none);
}
SIMD inline Narrow narrowed(Floats x) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(x.low), rounded(x.high)), 0xD8); }

SIMD inline Floats widen_all(const c10::BFloat16* from) { return widened(load_narrow(from)); }
SIMD inline Floats widen_all(const float* from) { return load(from); }
SIMD inline void narrow_all(c10::BFloat16* to, Floats values) { store_narrow(to, narrowed(values)); }
SIMD inline void narrow_all(float* to, Floats values) { store(to, values); }

template <class Number>
SIMD inline Floats widen(Mask within, const Number* from) {
  if (within == first(kWidth)) return widen_all(from);
  alignas(64) Number some[kWidth] = {};
  std::memcpy(some, from, sizeof(Number) * static_cast<size_t>(__builtin_popcount(within)));
  return widen_all(some);
}
template <class Number>
SIMD inline void narrow(Mask within, Number* to, Floats values) {
  if (within == first(kWidth)) return narrow_all(to, values);
  alignas(64) Number some[kWidth];
  narrow_all(some, values);
  std::memcpy(to, some, sizeof(Number) * static_cast<size_t>(__builtin_popcount(within)));
}

SIMD inline void store(void* to, Words x) {
  store_narrow(to, x.low);
  store_narrow(static_cast<char*>(to) + 32, x.high);
}
SIMD inline Words no_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
SIMD inline Words all_words(uint16_t x) { return {_mm256_set1_epi16(static_cast<int16_t>(x)), _mm256_set1_epi16(static_cast<int16_t>(x))}; }
SIMD inline Words joined(Narrow low, Narrow high) { return {low, high}; }
SIMD inline Narrow low_of(Words x) { return x.low; }
SIMD inline Narrow high_of(Words x) { return x.high; }
SIMD inline Words either(Words a, Words b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
SIMD inline Words differing(Words a, Words b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
SIMD inline bool is_zero(Words x) {
  const __m256i both = _mm256_or_si256(x.low, x.high);
  return _mm256_testz_si256(both, both) != 0;
}

SIMD inline Words load_words(int64_t count, const void* from, uint16_t other) {
  if (count >= 2 * kWidth) return {load_narrow(from), load_narrow(static_cast<const char*>(from) + 32)};
  alignas(32) uint16_t some[2 * kWidth];
  store(some, all_words(other));
  std::memcpy(some, from, 2 * static_cast<size_t>(count));
  return {load_narrow(some), load_narrow(some + kWidth)};
}

SIMD inline Words low_singles(Words a, Words b) { return {_mm256_unpacklo_epi32(a.low, b.low), _mm256_unpacklo_epi32(a.high, b.high)}; }
SIMD inline Words high_singles(Words a, Words b) { return {_mm256_unpackhi_epi32(a.low, b.low), _mm256_unpackhi_epi32(a.high, b.high)}; }
SIMD inline Words low_doubles(Words a, Words b) { return {_mm256_unpacklo_epi64(a.low, b.low), _mm256_unpacklo_epi64(a.high, b.high)}; }
SIMD inline Words high_doubles(Words a, Words b) { return {_mm256_unpackhi_epi64(a.low, b.low), _mm256_unpackhi_epi64(a.high, b.high)}; }
SIMD inline Words even_lanes(Words a, Words b) { return {_mm256_permute2x128_si256(a.low, a.high, 0x20), _mm256_permute2x128_si256(b.low, b.high, 0x20)}; }
SIMD inline Words odd_lanes(Words a, Words b) { return {_mm256_permute2x128_si256(a.low, a.high, 0x31), _mm256_permute2x128_si256(b.low, b.high, 0x31)}; }

SIMD inline Words paired(Words x) {
  const __m256i low = _mm256_unpacklo_epi16(x.low, x.high), high = _mm256_unpackhi_epi16(x.low, x.high);
  return {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
}

#endif

SIMD inline Floats load_widened(const void* from) { return widened(load_narrow(from)); }

// 2^x: within 1e-7 of it, 0 for -inf, and inf where that is too much.
SIMD inline Floats power_of_two(Floats x) {
  const Floats part = fraction(x);
  Floats p = all(0.00186713005f);
  p = fma(p, part, all(0.00901703071f));
  p = fma(p, part, all(0.0557999127f));
  p = fma(p, part, all(0.240164444f));
  p = fma(p, part, all(0.693151295f));
  p = fma(p, part, all(1.0f));
  return scaled(p, x);
}

// The words of two vectors of numbers, rounded.
SIMD inline Words narrowed(Floats low, Floats high) { return joined(narrowed(low), narrowed(high)); }

// Two vectors one behind the other, as they are stored.
SIMD inline void narrow(c10::BFloat16* to, Floats low, Floats high) { store(static_cast<void*>(to), narrowed(low, high)); }
SIMD inline void narrow(float* to, Floats low, Floats high) {
  store(to, low);
  store(to + kWidth, high);
}

// Sixteen numbers of an additive mask that ends after `count`: nothing is seen behind its end.
template <class Number>
SIMD inline Floats load_mask(int64_t count, const Number* from) {
  if (count >= kWidth) return widen(first(kWidth), from);
  const Mask within = first(std::max<int64_t>(count, 0));
  return select(within, widen(within, from), all(-std::numeric_limits<float>::infinity()));
}

}  // namespace wide

#endif
