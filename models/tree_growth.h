// How draft trees grow, a text at a time: what growth.py does with tensors of many.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tiles.h"

#ifdef MOASERVE_SIMD

namespace growth {

constexpr int64_t kCandidates = 32;  // tokens per node that get noise when sampling; the rest are too unlikely to win
constexpr float kPerLevel = 1e-3f;   // what a level costs besides, so that a node never ties with its parent
constexpr float kLeast = -64.0f;     // where log-probabilities end: sums of -inf would tie
constexpr float kLog2E = 1.4426950408889634f;

// The tokens that a text's outputs stand for: those of the draft vocabulary, and behind them its rare ones.
struct Outputs {
  const int64_t* ids;
  int64_t count;
  const int64_t* rare;
  int64_t rare_count;

  // Where logits are not numbers, what is chosen may stand for no token: any will do.
  int64_t operator[](int64_t output) const {
    return output < count ? ids[output] : output - count < rare_count ? rare[output - count] : ids[0];
  }
};

// A token's logit or log-probability; tokens are numbered as a text's outputs are.
struct Likely {
  float score;
  int64_t output;
};

inline bool before(const Likely& a, const Likely& b) {
  return a.score != b.score ? a.score > b.score : a.output < b.output;
}

// How a text's tokens are chosen.
struct Sampling {
  int64_t stream = 0;
  bool greedy = true;
  float temperature = 1.0f;
  int64_t top_k = 0;
  float top_p = 1.0f, min_p = 0.0f;
};

// The noise of sampling.py, which says what it is: a token's at a position of a stream.
class Noise {
 public:
  Noise(int64_t stream, int64_t position) : key_(mixed(static_cast<uint64_t>(stream) + static_cast<uint64_t>(position) * kStep)) {}

  static constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;  // from one token's state to the next one's
  static constexpr uint64_t kFirst = 0xBF58476D1CE4E5B9u, kSecond = 0x94D049BB133111EBu;  // by which bits are mixed

  uint64_t state(int64_t token) const { return key_ + static_cast<uint64_t>(token + 1) * kStep; }

  float of(int64_t token) const {
    const uint64_t bits = mixed(state(token)) >> 11;
    return static_cast<float>(-std::log(-std::log((static_cast<double>(bits) + 0.5) * 0x1p-53)));
  }

  static uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * kFirst;
    z = (z ^ (z >> 27)) * kSecond;
    return z ^ (z >> 31);
  }

 private:
  uint64_t key_;
};

// The `count` largest of a row of logits, best first. They stand in the groups with the largest maxima.
SIMD inline std::vector<Likely> largest(const float* logits, int64_t size, int64_t count) {
  constexpr int64_t kGroup = 2 * tiles::kTile;
  std::vector<float> maxima(size / kGroup);
  for (int64_t group = 0; group < size / kGroup; ++group) {
    const float* from = logits + group * kGroup;
    maxima[group] = wide::largest(wide::max(wide::load(from), wide::load(from + tiles::kTile)));
  }
  float least = -std::numeric_limits<float>::infinity();
  if (static_cast<int64_t>(maxima.size()) > count) {
    std::vector<float> sorted = maxima;
    std::nth_element(sorted.begin(), sorted.begin() + count - 1, sorted.end(), std::greater<float>());
    least = sorted[count - 1];
  }
  std::vector<Likely> found;
  for (int64_t group = 0; group < size / kGroup; ++group) {
    if (!(maxima[group] >= least)) continue;
    for (int64_t first = group * kGroup; first < (group + 1) * kGroup; first += tiles::kTile) {
      wide::Mask which = wide::at_least(wide::load(logits + first), wide::all(least));
      for (; which; which &= which - 1) {
        const int64_t output = first + __builtin_ctz(which);
        found.push_back({logits[output], output});
      }
    }
  }
  found.resize(std::max<size_t>(found.size(), count), Likely{kLeast, 0});  // where logits are not numbers
  std::partial_sort(found.begin(), found.begin() + count, found.end(), before);
  found.resize(count);
  return found;
}

// The logarithm of the sum of exp(logits / temperature).
SIMD inline float log_sum(const float* logits, int64_t size, float most, float temperature) {
  const wide::Floats scale = wide::all(kLog2E / temperature), top = wide::all(most);
  wide::Floats sum = wide::zero();
  for (int64_t i = 0; i < size; i += tiles::kTile) {
    sum = sum + wide::power_of_two((wide::load(logits + i) - top) * scale);
  }
  return most / temperature + std::log(wide::sum(sum));
}

// A node's logits -> log-probabilities of its `count` likeliest tokens. Where tokens are sampled, the noise that the target's will
// get at `position` is added, and the settings are applied as if the target agreed; `tokens` are what outputs stand for.
inline std::vector<Likely> candidates(
    const float* logits, int64_t size, const Outputs& tokens, const Sampling& sampling, int64_t position, float draft_temperature,
    int64_t count) {
  std::vector<Likely> best = largest(logits, size, sampling.greedy ? count : std::max(count, kCandidates));
  if (sampling.greedy) {
    const float total = log_sum(logits, size, best[0].score, draft_temperature);
    for (Likely& each : best) each.score = each.score / draft_temperature - total;
    return best;
  }
  int64_t within = static_cast<int64_t>(best.size());
  if (sampling.top_k > 0) within = std::min(within, sampling.top_k);
  best.resize(within);
  const float most = best[0].score / sampling.temperature;
  float total = 0.0f;
  for (Likely& each : best) total += std::exp((each.score /= sampling.temperature) - most);
  const Noise noise(sampling.stream, position);
  float before_it = 0.0f, highest = -std::numeric_limits<float>::infinity();
  size_t allowed = 0;
  const float first = 1.0f / total;
  for (Likely& each : best) {
    const float probability = std::exp(each.score - most) / total;
    if (before_it >= sampling.top_p || probability < sampling.min_p * first) break;  // so are all that follow
    before_it += probability;
    each.score = (each.score + noise.of(tokens[each.output])) / draft_temperature;
    highest = std::max(highest, each.score);
    ++allowed;
  }
  best.resize(std::max<size_t>(allowed, 1));
  total = 0.0f;
  for (const Likely& each : best) total += std::exp(each.score - highest);
  for (Likely& each : best) each.score -= highest + std::log(total);
  std::sort(best.begin(), best.end(), before);
  best.resize(count, Likely{kLeast, best[0].output});
  return best;
}

// A node that the next level expands: what it is, and which of the level's nodes is its parent.
struct Open {
  float score;
  int64_t output, number, parent;
};

// One text's tree in the making. Candidates are numbered in the order in which they were proposed; the root is number 0.
class Tree {
 public:
  Tree() : open_{{0.0f, -1, 0, 0}}, proposed_{{0.0f, -1, 0}} {}

  const std::vector<Open>& open() const { return open_; }
  int64_t size() const { return static_cast<int64_t>(proposed_.size()) - 1; }

  // As many candidates of each open node join the tree; the best `breadth` of them are open from now on. Returns the probability,
  // by the drafter's lights, of getting to those.
  float grow(const std::vector<std::vector<Likely>>& likely, int64_t breadth) {
    std::vector<Open> all;
    for (size_t node = 0; node < open_.size(); ++node) {
      for (const Likely& each : likely[node]) {
        const float score = open_[node].score + std::max(each.score, kLeast) - kPerLevel;
        all.push_back({score, each.output, static_cast<int64_t>(proposed_.size()), static_cast<int64_t>(node)});
        proposed_.push_back({score, each.output, open_[node].number});
      }
    }
    breadth = std::min(breadth, static_cast<int64_t>(all.size()));
    std::partial_sort(all.begin(), all.begin() + breadth, all.end(), [](const Open& a, const Open& b) {
      return a.score != b.score ? a.score > b.score : a.number < b.number;
    });
    all.resize(breadth);
    open_ = std::move(all);
    float reach = 0.0f;
    for (const Open& node : open_) reach += std::exp(node.score);
    return reach;
  }

  // The best `count` candidates as a tree: outputs, parents' rows (the root's is 0) and probabilities, best first. A node scores
  // less than its parent, so parents come before children.
  void best(int64_t count, const Outputs& outputs, int64_t* tokens, int64_t* parents, double* probabilities) const {
    std::vector<int64_t> order(proposed_.size() - 1), rows(proposed_.size(), 0);
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i) + 1;
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
      return proposed_[a].score != proposed_[b].score ? proposed_[a].score > proposed_[b].score : a < b;
    });
    for (int64_t row = 0; row < count; ++row) {
      const Proposed& node = proposed_[order[row]];
      rows[order[row]] = row + 1;
      tokens[row] = outputs[node.output];
      parents[row] = rows[node.parent];
      probabilities[row] = std::exp(node.score);
    }
  }

 private:
  struct Proposed {
    float score;
    int64_t output, parent;
  };

  std::vector<Open> open_;
  std::vector<Proposed> proposed_;
};

}  // namespace growth

#endif
