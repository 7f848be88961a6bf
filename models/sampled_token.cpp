// The token that sampling chooses from a row of logits: what sampling.py says, whose operations on a vocabulary take as long as a third of
// a small target's pass.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tree_growth.h"

namespace {

#ifdef MOASERVE_SIMD

constexpr int64_t kHead = 32;  // most probable tokens among which top-p mostly ends
constexpr int64_t kMore = 8;   // times as many are looked at next

struct Settings {
  float temperature;
  int64_t top_k;
  float top_p, min_p;
};

// The token with the largest score and noise so far, the first of these.
struct Winner {
  int64_t token = 0;
  float sum = -std::numeric_limits<float>::infinity();

  void consider(int64_t candidate, float score, const growth::Noise& noise) {
    const float with_noise = score + noise.of(candidate);
    if (with_noise > sum || (with_noise == sum && candidate < token)) *this = {candidate, with_noise};
  }
};

// The largest of a row, not counting what is no number.
SIMD float largest_of(const float* row, int64_t size) {
  wide::Floats most = wide::all(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < size; i += tiles::kTile) most = wide::max(wide::load(row + i), most);
  return wide::largest(most);
}

// 1 - u of the uniform numbers u that tokens' noise is made of, 16 of them in float32, from the first one's state on.
#ifdef MOASERVE_TILES
SIMD wide::Floats complements(uint64_t state) {
  constexpr uint64_t kStep = growth::Noise::kStep;
  alignas(64) static constexpr uint64_t kNext[8] = {0, kStep, 2 * kStep, 3 * kStep, 4 * kStep, 5 * kStep, 6 * kStep, 7 * kStep};
  const __m512i all = _mm512_set1_epi64((int64_t{1} << 53) - 1);
  __m256 halves[2];
  for (int half = 0; half < 2; ++half) {
    __m512i z = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(state + half * 8 * kStep)), _mm512_load_si512(kNext));
    z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 30)), _mm512_set1_epi64(static_cast<int64_t>(growth::Noise::kFirst)));
    z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 27)), _mm512_set1_epi64(static_cast<int64_t>(growth::Noise::kSecond)));
    z = _mm512_xor_si512(z, _mm512_srli_epi64(z, 31));
    halves[half] = _mm512_cvtepu64_ps(_mm512_sub_epi64(all, _mm512_srli_epi64(z, 11)));
  }
  return _mm512_insertf32x8(_mm512_castps256_ps512(halves[0]), halves[1], 1) * wide::all(0x1p-53f);
}
#else
SIMD wide::Floats complements(uint64_t state) {
  alignas(64) float each[tiles::kTile];
  for (int64_t i = 0; i < tiles::kTile; ++i, state += growth::Noise::kStep) {
    each[i] = static_cast<float>(static_cast<int64_t>(((uint64_t{1} << 53) - 1) - (growth::Noise::mixed(state) >> 11)));
  }
  return wide::load(each) * wide::all(0x1p-53f);
}
#endif

// Of all tokens. A token's noise is -log(e) with e = -log(u), so that it wins where exp(-score) e is smallest; as e >= 1 - u, nearly all
// are ruled out without a logarithm.
SIMD int64_t of_all(const float* logits, int64_t size, const Settings& settings, const growth::Noise& noise) {
  const float most = largest_of(logits, size) / settings.temperature;
  if (!(most > -std::numeric_limits<float>::infinity())) return 0;  // nothing is allowed, or nothing is a number
  const float least = settings.min_p > 0.0f ? most + std::log(settings.min_p) : -std::numeric_limits<float>::infinity();
  constexpr float kMargin = 1.001f;  // more than all that is rounded on the way
  Winner winner;
  float bound = std::numeric_limits<float>::infinity();
  const wide::Floats temperature = wide::all(settings.temperature), top = wide::all(most), floor = wide::all(least);
  for (int64_t i = 0; i < size; i += tiles::kTile) {
    const wide::Floats scores = wide::load(logits + i) / temperature;
    const wide::Floats unlikely = wide::power_of_two((top - scores) * wide::all(growth::kLog2E));
    const wide::Floats at_least = complements(noise.state(i)) * unlikely;
    wide::Mask which = wide::at_most(at_least, wide::all(bound)) & wide::at_least(scores, floor);
    for (; which; which &= which - 1) {
      const int64_t token = i + __builtin_ctz(which);
      winner.consider(token, logits[token] / settings.temperature, noise);
      bound = std::exp(most - winner.sum) * kMargin;
    }
  }
  return winner.token;
}

// Of the `size` best, cut to the smallest head whose probability reaches top-p.
SIMD int64_t of_head(const float* logits, int64_t vocabulary, const Settings& settings, const growth::Noise& noise) {
  const bool limited = settings.top_k > 0 && settings.top_k < vocabulary;
  const int64_t size = limited ? settings.top_k : vocabulary;
  int64_t count = limited ? size : kHead;
  std::vector<growth::Likely> head = growth::largest(logits, vocabulary, count);
  const float most = head[0].score / settings.temperature;
  float total = 0.0f;
  if (limited) {
    for (const growth::Likely& each : head) total += std::exp(each.score / settings.temperature - most);
    total = most + std::log(total);
  } else {
    total = growth::log_sum(logits, vocabulary, head[0].score, settings.temperature);
  }
  const float least = settings.min_p > 0.0f ? most + std::log(settings.min_p) : -std::numeric_limits<float>::infinity();
  Winner winner{head[0].output};
  float before = 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    if (i == count) head = growth::largest(logits, vocabulary, count = std::min(size, count * kMore));
    const float score = head[i].score / settings.temperature;
    if ((settings.top_p < 1.0f && before >= settings.top_p) || score < least) break;  // so is all that follows
    winner.consider(head[i].output, score, noise);
    before += std::exp(score - total);
  }
  return winner.token;
}

#endif

// For a row of logits [V] in float32; `stream` and `position` say which noise.
int64_t sampled_token(
    const at::Tensor& logits, double temperature, int64_t top_k, double top_p, double min_p, int64_t stream, int64_t position) {
#ifdef MOASERVE_SIMD
  TORCH_CHECK(tiles::available(), "sampled_token: this CPU lacks what operators are compiled for");
  TORCH_CHECK(
      logits.dim() == 1 && logits.numel() > 0 && logits.numel() % (2 * tiles::kTile) == 0 && logits.is_contiguous() &&
          logits.scalar_type() == at::kFloat && temperature > 0.0,
      "sampled_token: logits are a row in float32");
  const Settings settings{static_cast<float>(temperature), top_k, static_cast<float>(top_p), static_cast<float>(min_p)};
  const auto* row = logits.const_data_ptr<float>();
  const growth::Noise noise(stream, position);
  const bool all = (top_k <= 0 || top_k >= logits.numel()) && top_p >= 1.0;
  return all ? of_all(row, logits.numel(), settings, noise) : of_head(row, logits.numel(), settings, noise);
#else
  TORCH_CHECK(false, "sampled_token: compiled by a compiler that does not know AVX512");
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(moaserve, library) {
  library.def("sampled_token(Tensor logits, float temperature, int top_k, float top_p, float min_p, int stream, int position) -> int");
}

TORCH_LIBRARY_IMPL(moaserve, CPU, library) {
  library.impl("sampled_token", &sampled_token);
}
