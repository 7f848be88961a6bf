// What the operators share: how the CPU multiplies bfloat16, by tiles (AMX) or by vectors (AVX512-BF16), and how. A tile has up to 16
// rows of 64 bytes; where there are none, vectors go over the same layouts and add the same products in the same order.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__) && __has_include(<amxbf16intrin.h>)
#define MOASERVE_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define AMX __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")))

namespace tiles {

constexpr int64_t kTile = 16;      // rows of a tile
constexpr int64_t kRowBytes = 64;  // of one row of a tile
constexpr int64_t kPairs = 32;     // numbers of a row in bfloat16, which products take by pairs
constexpr int64_t kTileBytes = kTile * kRowBytes;

// Whether the CPU multiplies bfloat16 at all.
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
AMX inline void configure(uint8_t rows = kTile) {
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
  _tile_loadconfig(&config);
}

AMX inline void release() {
  if (by_tiles()) _tile_release();
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

// By vectors: sums over `steps` of the products of R rows with C tiles, added to what is there on request. What `b` has `ahead` bytes
// further on is fetched (0: nothing is).
template <int R, int C>
AMX inline void multiply_rows(Operand a, Operand b, int64_t steps, Sums out, bool add, int64_t ahead) {
  __m512 sums[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) sums[r][c] = add ? _mm512_loadu_ps(out.data + r * out.row + c * out.tile) : _mm512_setzero_ps();
  }
  for (int64_t step = 0; step < steps; ++step, a.data += a.step, b.data += b.step) {
    for (int64_t pair = 0; pair < kTile; ++pair) {
      __m512bh right[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        const char* from = b.data + c * b.tile + pair * b.row;
        right[c] = (__m512bh)_mm512_loadu_si512(from);
        if (ahead) __builtin_prefetch(from + ahead);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        int32_t two;
        std::memcpy(&two, a.data + r * a.row + pair * 4, sizeof two);
        const auto left = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], left, right[c]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) _mm512_storeu_ps(out.data + r * out.row + c * out.tile, sums[r][c]);
  }
}

constexpr int64_t kRowsAtOnce = 12;  // with two tiles: sums in 24 of the 32 registers

// The same of up to `kRowsAtOnce` rows.
template <int C, int R = kRowsAtOnce>
AMX inline void multiply_few(Operand a, int64_t rows, Operand b, int64_t steps, Sums out, bool add, int64_t ahead = 0) {
  if constexpr (R > 0) {
    if (rows == R) return multiply_rows<R, C>(a, b, steps, out, add, ahead);
    multiply_few<C, R - 1>(a, rows, b, steps, out, add, ahead);
  }
}

// Rows that are multiplied at once, so that all have about as many.
inline int64_t rows_at_once(int64_t rows) {
  const int64_t times = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  return (rows + times - 1) / times;
}

// 2^x: within 1e-7 of it, 0 for -inf, and inf where that is too much.
AMX inline __m512 power_of_two(__m512 x) {
  const __m512 fraction = _mm512_reduce_ps(x, 0x01);  // x - floor(x)
  __m512 p = _mm512_set1_ps(0.00186713005f);
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.00901703071f));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.0557999127f));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.240164444f));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.693151295f));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}

}  // namespace tiles

#endif
