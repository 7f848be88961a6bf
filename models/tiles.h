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

// By vectors: sums over `steps` of the products of R rows with C tiles, added to what is there on request.
template <int R, int C>
AMX inline void multiply_rows(Operand a, Operand b, int64_t steps, Sums out, bool add) {
  __m512 sums[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sums[r][c] = add ? _mm512_loadu_ps(out.data + r * out.row + c * out.tile) : _mm512_setzero_ps();
  }
  for (int64_t step = 0; step < steps; ++step, a.data += a.step, b.data += b.step) {
    for (int64_t pair = 0; pair < kTile; ++pair) {
      __m512bh right[C];
      for (int c = 0; c < C; ++c) right[c] = (__m512bh)_mm512_loadu_si512(b.data + c * b.tile + pair * b.row);
      for (int r = 0; r < R; ++r) {
        int32_t two;
        std::memcpy(&two, a.data + r * a.row + pair * 4, sizeof two);
        const auto left = (__m512bh)_mm512_set1_epi32(two);
        for (int c = 0; c < C; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], left, right[c]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) _mm512_storeu_ps(out.data + r * out.row + c * out.tile, sums[r][c]);
  }
}

constexpr int kRowsAtOnce = 8;  // with two tiles: sums in 16 of the 32 registers

// The same of any number of rows.
template <int C>
AMX void multiply_vectors(Operand a, int64_t rows, Operand b, int64_t steps, Sums out, bool add) {
  for (; rows >= kRowsAtOnce; rows -= kRowsAtOnce, a.data += kRowsAtOnce * a.row, out.data += kRowsAtOnce * out.row) {
    multiply_rows<kRowsAtOnce, C>(a, b, steps, out, add);
  }
  switch (rows) {
    case 1: return multiply_rows<1, C>(a, b, steps, out, add);
    case 2: return multiply_rows<2, C>(a, b, steps, out, add);
    case 3: return multiply_rows<3, C>(a, b, steps, out, add);
    case 4: return multiply_rows<4, C>(a, b, steps, out, add);
    case 5: return multiply_rows<5, C>(a, b, steps, out, add);
    case 6: return multiply_rows<6, C>(a, b, steps, out, add);
    case 7: return multiply_rows<7, C>(a, b, steps, out, add);
    default: return;
  }
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
