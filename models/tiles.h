// What operators for CPUs with AMX share: whether there are tiles, and how they are set up. A tile has up to 16 rows of 64 bytes.

#pragma once

#include <cstdint>

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

inline bool available() {
  static const bool has = [] {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("amx-bf16")) {
      return false;
    }
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM: Linux grants tiles on request
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
}

// Tiles 0 to 5, sums and left factors, get `rows` rows; 6 and 7, right factors, all 16.
AMX inline void configure(uint8_t rows = kTile) {
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
  _tile_release();
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
