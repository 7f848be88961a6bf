// What the operators share: how the CPU multiplies bfloat16, by tiles (AMX) or by vectors (AVX512-BF16, or AVX2 in float32), and float32,
// by vectors. A tile has up to 16 rows of 64 bytes; where there are none, vectors go over the same layouts and add the same products in
// the same order. Layouts of float32 are those of bfloat16 with both numbers of a pair in rows of their own.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#include "wide.h"

#ifdef MOASERVE_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef MOASERVE_SIMD

namespace tiles {

constexpr int64_t kTile = 16;      // rows of a tile
constexpr int64_t kRowBytes = 64;  // of one row of a tile
constexpr int64_t kPairs = 32;     // numbers of a row in bfloat16, which products take by pairs
constexpr int64_t kTileBytes = kTile * kRowBytes;
constexpr int64_t kTileFloats = kTile * kTile;  // sums in a tile

using c10::BFloat16;

// Bytes of what stands on the right of products: of a pair of numbers of each of 16 columns, and of 16 such pairs.
template <class Number>
constexpr int64_t kPairBytes = 2 * kTile * static_cast<int64_t>(sizeof(Number));
template <class Number>
constexpr int64_t kOperandBytes = kTile * kPairBytes<Number>;

#ifdef MOASERVE_TILES

// Whether the CPU has what this is compiled for.
inline bool available() {
  static const bool has = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
  }();
  return has;
}

// Whether it does so by tiles; oneDNN's variable that says how much of a CPU to use holds here too.
inline bool by_tiles() {
  static const bool has = [] {
    __builtin_cpu_init();
    const char* most = std::getenv("ONEDNN_MAX_CPU_ISA");
    const bool wanted = most == nullptr || std::strstr(most, "AMX") != nullptr || std::strcmp(most, "DEFAULT") == 0;
    if (!wanted || !available() || !__builtin_cpu_supports("amx-bf16")) {
      return false;
    }
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM: Linux grants tiles on request
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
}

// Tiles 0 to 5, sums and left factors, get `rows` rows; 6 and 7, right factors, all 16.
SIMD inline void configure(uint8_t rows = kTile) {
  if (!by_tiles()) return;
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes[tile] = kRowBytes;
    config.rows[tile] = tile < 6 ? rows : static_cast<uint8_t>(kTile);
  }
  asm volatile("" : : "r"(&config) : "memory");  // GCC 12 takes it that only the first eight bytes are read
  _tile_loadconfig(&config);
}

SIMD inline void release() {
  if (by_tiles()) _tile_release();
}

#else

inline bool available() {
  static const bool has = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }();
  return has;
}

constexpr bool by_tiles() { return false; }

#endif

// What stands on the left of products by vectors: numbers as they are stored, or the same in float32. And weights in bfloat16 that are
// widened as they are read, so that their products are float32's.
#ifdef MOASERVE_TILES
struct Halves {
  uint16_t upper;
};
template <class Number>
using Left = std::conditional_t<std::is_same_v<Number, Halves>, float, Number>;
constexpr bool kPacks = false;
#else
using Halves = BFloat16;
template <class Number>
using Left = float;
constexpr bool kPacks = true;  // whether what weights are multiplied with is packed, as registers are few: packed_rows.h
#endif

// Whether that is not what is stored.
template <class Number>
constexpr bool kWidens = !std::is_same_v<Left<Number>, Number>;

// Bytes from number to number of R rows on the left. Those that are packed have their first numbers next to each other, then their
// second ones, so that no register need hold where each row is.
template <int R, bool packed>
constexpr int64_t kNumberBytes = (packed ? R : 1) * static_cast<int64_t>(sizeof(float));

// `size` numbers of each of `count` rows in bfloat16, one every `bytes`, dense and in float32.
SIMD inline void widen_rows(const void* rows, int64_t bytes, int64_t count, int64_t size, float* to) {
  const auto* from = static_cast<const char*>(rows);
  for (int64_t row = 0; row < count; ++row, from += bytes) {
    for (int64_t i = 0; i < size; i += kTile, to += kTile) wide::store(to, wide::load_widened(from + i * 2));
  }
}

// A tile-sized operand: where it begins, bytes from row to row, from tile to tile and from step to step.
struct Operand {
  const char* data;
  int64_t row, tile, step;
};

// Where sums go: numbers from row to row and from tile to tile.
struct Sums {
  float* data;
  int64_t row, tile;
};

// Lines that products fetch at a time: as many as two tiles have in what they go over meanwhile, a pair, or two in float32.
template <class Number>
constexpr int64_t kLinesAtOnce = std::is_same_v<Number, float> ? 8 : 2;

// What products fetch of what is read after them: so many lines a step, a few a pair, from an address on. No nearer than to the
// second-level cache: the first can wait for too few lines at once to keep up with memory, and has no room for them.
struct Ahead {
  const char* data = nullptr;
  int64_t lines = 0;

  // Some of a step's lines, in each of its places until there are no more.
  template <int64_t each>
  SIMD inline void fetch(int64_t place) const {
    if (each * place >= lines) return;
#pragma GCC unroll 8
    for (int64_t line = 0; line < each; ++line) __builtin_prefetch(data + (each * place + line) * kRowBytes, 0, 2);
  }

  Ahead after(int64_t steps) const { return {data + steps * lines * kRowBytes, lines}; }
};

// Sums of R rows and C tiles in registers: from 0 on, or from what is there.
template <int R, int C>
SIMD __attribute__((always_inline)) inline void begin_sums(wide::Floats (&sums)[R][C], Sums at, bool add) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[r][c] = add ? wide::load(at.data + r * at.row + c * at.tile) : wide::zero();
  }
}

template <int R, int C>
SIMD __attribute__((always_inline)) inline void store_sums(const wide::Floats (&sums)[R][C], Sums at) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) wide::store(at.data + r * at.row + c * at.tile, sums[r][c]);
  }
}

// By vectors: sums over `steps` of P pairs of the products of R rows with C tiles, added to what is there on request. Of float32 first.
template <int R, int C, int P, bool packed>
SIMD inline void multiply_floats(Operand a, Operand b, int64_t steps, Sums out, bool add, Ahead ahead) {
  constexpr int64_t kNumber = kNumberBytes<R, packed>, kRight = kTile * sizeof(float);
  const int64_t row = packed ? static_cast<int64_t>(sizeof(float)) : a.row;
  wide::Floats sums[R][C];
  begin_sums(sums, out, add);
  for (int64_t step = 0; step < steps; ++step, a.data += a.step, b.data += b.step, ahead = ahead.after(1)) {
    const char* left = a.data;
    const char* right = b.data;
    for (int64_t four = 0; four < P / 2; ++four, left += 4 * kNumber, right += 4 * kRight) {
      ahead.fetch<kLinesAtOnce<float>>(four);
#pragma GCC unroll 4
      for (int64_t number = 0; number < 4; ++number) {
        wide::Floats column[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) column[c] = wide::load(reinterpret_cast<const float*>(right + c * b.tile + number * kRight));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const wide::Floats one = wide::all(*reinterpret_cast<const float*>(left + number * kNumber + r * row));
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) sums[r][c] = wide::plus_product(sums[r][c], one, column[c]);
        }
      }
    }
  }
  store_sums(sums, out);
}

#ifdef MOASERVE_TILES

template <int R, int C, int P, bool packed>
SIMD inline void multiply_narrow(Operand a, Operand b, int64_t steps, Sums out, bool add, Ahead ahead) {
  wide::Floats sums[R][C];
  begin_sums(sums, out, add);
  for (int64_t step = 0; step < steps; ++step, a.data += a.step, b.data += b.step, ahead = ahead.after(1)) {
    for (int64_t pair = 0; pair < P; ++pair) {
      ahead.fetch<kLinesAtOnce<BFloat16>>(pair);
      __m512bh right[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) right[c] = (__m512bh)_mm512_loadu_si512(b.data + c * b.tile + pair * b.row);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        int32_t two;
        std::memcpy(&two, a.data + r * a.row + pair * 4, sizeof two);
        const auto left = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], left, right[c]);
      }
    }
  }
  store_sums(sums, out);
}

// Of a pair in bfloat16, each half is the upper bits of a number in float32: `multiply_floats` of these numbers, in its order.
template <int R, int C, int P, bool packed>
SIMD inline void multiply_halves(Operand a, Operand b, int64_t steps, Sums out, bool add, Ahead ahead) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  wide::Floats sums[R][C];
  begin_sums(sums, out, add);
  for (int64_t step = 0; step < steps; ++step, a.data += a.step, b.data += b.step, ahead = ahead.after(1)) {
    const char* left = a.data;
    for (int64_t pair = 0; pair < P; ++pair, left += 2 * sizeof(float)) {
      ahead.fetch<kLinesAtOnce<Halves>>(pair);
      __m512i both[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) both[c] = _mm512_loadu_si512(b.data + c * b.tile + pair * b.row);
#pragma GCC unroll 2
      for (int64_t odd = 0; odd < 2; ++odd) {
        wide::Floats column[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) column[c] = _mm512_castsi512_ps(odd ? _mm512_and_si512(both[c], upper) : _mm512_slli_epi32(both[c], 16));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const wide::Floats one = wide::all(*reinterpret_cast<const float*>(left + odd * sizeof(float) + r * a.row));
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) sums[r][c] = wide::plus_product(sums[r][c], one, column[c]);
        }
      }
    }
  }
  store_sums(sums, out);
}

constexpr int64_t kSums = 24;        // registers of 32 that hold sums
constexpr int64_t kRowsAtOnce = 12;  // whose products with two tiles they are

#else

// What stands on the right is widened as it is read: of a pair in bfloat16, each half is the upper bits of a number in float32.
// That is where it is used, and rows are gone over by one address, as few registers are left beside sums: GCC puts one of them into memory
// as soon as more is to be kept, and a sum that goes there and back for each product takes as long as ten that do not.
template <int R, int C, int P, bool packed>
SIMD inline void multiply_narrow(Operand a, Operand b, int64_t steps, Sums out, bool add, Ahead ahead) {
  constexpr int64_t kNumber = kNumberBytes<R, packed>;
  const int64_t row = packed ? static_cast<int64_t>(sizeof(float)) : a.row;
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
  __m256 sums[R][C][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const wide::Floats before = add ? wide::load(out.data + r * out.row + c * out.tile) : wide::zero();
      sums[r][c][0] = before.low, sums[r][c][1] = before.high;
    }
  }
  for (int64_t step = 0; step < steps; ++step, b.data += b.step, a.data += a.step, ahead = ahead.after(1)) {
    const char* left = a.data;
    const char* right = b.data;
    for (int64_t pair = 0; pair < P; ++pair, left += 2 * kNumber, right += kRowBytes) {
      ahead.fetch<kLinesAtOnce<BFloat16>>(pair);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
#pragma GCC unroll 2
        for (int64_t odd = 0; odd < 2; ++odd) {
          const auto half = [&](int64_t at) SIMD {
            const __m256i both = wide::load_narrow(right + c * b.tile + at);
            return _mm256_castsi256_ps(odd ? _mm256_and_si256(both, upper) : _mm256_slli_epi32(both, 16));
          };
          const __m256 of_low = half(0), of_high = half(kRowBytes / 2);
          const char* from = left + odd * kNumber;
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r, from += row) {
            const __m256 one = _mm256_broadcast_ss(reinterpret_cast<const float*>(from));
            sums[r][c][0] = wide::plus_product(sums[r][c][0], one, of_low);
            sums[r][c][1] = wide::plus_product(sums[r][c][1], one, of_high);
          }
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) wide::store(out.data + r * out.row + c * out.tile, {sums[r][c][0], sums[r][c][1]});
  }
}

constexpr int64_t kSums = 6;        // pairs of registers, of which there are eight, that hold sums
constexpr int64_t kRowsAtOnce = 6;  // whose products with one tile they are

#endif

template <class Number, int R, int C, int P, bool packed>
SIMD __attribute__((always_inline)) inline void multiply_rows(Operand a, Operand b, int64_t steps, Sums out, bool add, Ahead ahead) {
  if constexpr (std::is_same_v<Number, float>) multiply_floats<R, C, P, packed>(a, b, steps, out, add, ahead);
#ifdef MOASERVE_TILES
  else if constexpr (std::is_same_v<Number, Halves>) multiply_halves<R, C, P, packed>(a, b, steps, out, add, ahead);
#endif
  else multiply_narrow<R, C, P, packed>(a, b, steps, out, add, ahead);
}

// The same as a function of its own: one is compiled for all that multiply so, and amid other code GCC would keep some sums in memory.
template <class Number, int R, int C, int P, bool packed>
SIMD __attribute__((noinline)) void multiply_rows_apart(Operand a, Operand b, int64_t steps, Sums out, bool add, Ahead ahead) {
  multiply_rows<Number, R, C, P, packed>(a, b, steps, out, add, ahead);
}

// The same of as many rows as there are registers for their sums, at most. A call for every panel of a single row would tell.
template <class Number, int C, int P = kTile, bool packed = false, int R = std::min(kSums / C, kRowsAtOnce)>
SIMD __attribute__((always_inline)) inline void multiply_few(Operand a, int64_t rows, Operand b, int64_t steps, Sums out, bool add, Ahead ahead) {
  if constexpr (R > 0) {
    if (rows != R) return multiply_few<Number, C, P, packed, R - 1>(a, rows, b, steps, out, add, ahead);
    if constexpr (R * C > 2) multiply_rows_apart<Number, R, C, P, packed>(a, b, steps, out, add, ahead);
    else multiply_rows<Number, R, C, P, packed>(a, b, steps, out, add, ahead);
  }
}

// The same of `kRowsAtOnce` rows, at most, if need be with some of the tiles after the others.
template <class Number, int C, int P = kTile, bool packed = false>
SIMD __attribute__((always_inline)) inline void multiply_some(Operand a, int64_t rows, Operand b, int64_t steps, Sums out, bool add, Ahead ahead = {}) {
  if constexpr (C > 1) {
    if (rows > kSums / C) {
      multiply_some<Number, C / 2, P, packed>(a, rows, b, steps, out, add, ahead);
      b.data += C / 2 * b.tile, out.data += C / 2 * out.tile;
      return multiply_some<Number, C - C / 2, P, packed>(a, rows, b, steps, out, add, ahead.after(steps));
    }
  }
  multiply_few<Number, C, P, packed>(a, rows, b, steps, out, add, ahead);
}

// How many times `multiply_some` goes over two tiles for so many rows.
inline int64_t tiles_apart(int64_t rows) { return rows > kSums / 2 ? 2 : 1; }

// Rows that are multiplied at once, so that all have about as many.
inline int64_t rows_at_once(int64_t rows) {
  const int64_t times = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  return (rows + times - 1) / times;
}

// How many times two tiles are gone over for all rows.
inline int64_t times_over(int64_t rows) {
  const int64_t most = rows_at_once(rows), full = (rows - 1) / most;
  return full * tiles_apart(most) + tiles_apart(rows - full * most);
}

// The same of any number of rows.
template <class Number, int C, int P = kTile>
SIMD inline void multiply_all(Operand a, int64_t rows, Operand b, int64_t steps, Sums out, bool add) {
  const int64_t most = rows_at_once(rows);
  for (int64_t row = 0; row < rows; row += most, a.data += most * a.row, out.data += most * out.row) {
    multiply_some<Number, C, P>(a, std::min(most, rows - row), b, steps, out, add);
  }
}

#ifdef MOASERVE_TILES

// Sums over `steps` of the products of M tiles, of which the first `rows` rows count, by N tiles; `out` has one tile after the other,
// M-major, and is added to on request.
template <int M, int N>
SIMD inline void multiply(Operand a, int64_t rows, Operand b, int64_t steps, float* out, bool add) {
  if (!by_tiles()) {
    for (int64_t tile = 0; tile * kTile < rows; ++tile) {
      const Operand some{a.data + tile * a.tile, a.row, a.tile, a.step};
      multiply_all<BFloat16, N>(some, std::min(kTile, rows - tile * kTile), b, steps, Sums{out + tile * N * kTileFloats, kTile, kTileFloats}, add);
    }
    return;
  }
  constexpr int64_t kOutRow = 64;
  if (add) {
    _tile_loadd(0, out, kOutRow);
    if constexpr (N > 1) _tile_loadd(1, out + kTileFloats, kOutRow);
    if constexpr (M > 1) _tile_loadd(2, out + N * kTileFloats, kOutRow);
    if constexpr (M > 1 && N > 1) _tile_loadd(3, out + 3 * kTileFloats, kOutRow);
  } else {
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (M > 1) _tile_zero(2);
    if constexpr (M > 1 && N > 1) _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; ++step, a.data += a.step, b.data += b.step) {
    _tile_loadd(4, a.data, a.row);
    _tile_loadd(6, b.data, b.row);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N > 1) {
      _tile_loadd(7, b.data + b.tile, b.row);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (M > 1) {
      _tile_loadd(5, a.data + a.tile, a.row);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (M > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, kOutRow);
  if constexpr (N > 1) _tile_stored(1, out + kTileFloats, kOutRow);
  if constexpr (M > 1) _tile_stored(2, out + N * kTileFloats, kOutRow);
  if constexpr (M > 1 && N > 1) _tile_stored(3, out + 3 * kTileFloats, kOutRow);
}

// 16 by 16 numbers of four bytes, rows for columns.
SIMD inline void transpose(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// A vector's first `count` numbers of two bytes.
SIMD inline __mmask32 first_words(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
}

#endif

// Up to 32 rows of values, one every `row` numbers, interleaved by pairs, 16 columns after the other: as products read what stands on their
// right. Rows behind the last are 0.
SIMD inline void interleave(const BFloat16* from, int64_t row, int64_t count, int64_t columns, char* to) {
  for (int64_t column = 0; column < columns; ++column, from += kTile) {
    for (int64_t i = 0; i < kPairs; i += 2, to += kRowBytes) {
      const wide::Narrow one = i < count ? wide::load_narrow(from + i * row) : wide::low_of(wide::no_words());
      const wide::Narrow below = i + 1 < count ? wide::load_narrow(from + (i + 1) * row) : wide::low_of(wide::no_words());
      wide::store(to, wide::paired(wide::joined(one, below)));
    }
  }
}

SIMD inline void interleave(const float* from, int64_t row, int64_t count, int64_t columns, char* to) {
  auto* into = reinterpret_cast<float*>(to);
  for (int64_t column = 0; column < columns; ++column, from += kTile) {
    for (int64_t i = 0; i < kPairs; ++i, into += kTile) wide::store(into, i < count ? wide::load(from + i * row) : wide::zero());
  }
}

// What turns a score into an exponent of 2.
inline float to_exponent(int64_t head_dim) { return 1.4426950408889634f / std::sqrt(static_cast<float>(head_dim)); }

// An allocator of memory that begins where cache lines do.
template <class Number>
struct Aligned {
  using value_type = Number;
  Number* allocate(size_t count) { return static_cast<Number*>(::operator new(count * sizeof(Number), std::align_val_t{kRowBytes})); }
  void deallocate(Number* from, size_t) { ::operator delete(from, std::align_val_t{kRowBytes}); }
  bool operator==(const Aligned&) const { return true; }
};

}  // namespace tiles

#endif
