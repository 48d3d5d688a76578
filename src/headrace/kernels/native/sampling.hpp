// Choosing tokens from logits. What is chosen is said in torch by sampling/sampler.py, filters.py.
//
// A row is read in groups of tokens whose largest logits are taken first. They tell which groups
// can hold what is looked for: the likeliest token, the tokens above a threshold, or one that may
// still win the race. All that a row needs follows from its own logits and settings, in one order.
#pragma once

#include "kernels.hpp"
#include "philox.hpp"
#include "scratch.hpp"
#include "select.hpp"
#include "simd.hpp"

namespace {

constexpr int64_t kGroup = 64;
constexpr float kNothing = -__builtin_inff();

HEADRACE_INLINE int64_t whole_vectors(int64_t count) {
  return (count + kLanes - 1) / kLanes * kLanes;
}

// As load, of the first `count` elements; the rest are -inf.
template <typename T>
HEADRACE_INLINE F32 load_some(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  F32 v = broadcast(kNothing);
  for (int64_t i = 0; i < count; i++) v[i] = widen(from[i]);
  return v;
}

// Who arrives first. A token's speed is its weight over its waiting time; the fastest wins.
struct Race {
  Philox stream;
  int64_t winner = 0;
  float best = 0;  // the winner's speed

  // Whether a token may win whose bits are at least these. False only if it cannot: a waiting time
  // is never shorter than the uniform number that it is made of. So few tokens need a logarithm.
  bool open_to(float weight, float bits) const {
    const float a_little_less = 1 - 1e-5f;
    return weight > best * (bits * (0x1p-32f * a_little_less));
  }

  void enter(int64_t token, float weight, uint32_t bits) {
    const float speed = weight / waiting_time(bits);
    if (speed > best || (speed == best && token < winner)) {
      best = speed;
      winner = token;
    }
  }

  void enter(int64_t token, float weight) {
    uint64_t numbers[kBlockTokens / 2];
    stream.block(token / kBlockTokens, numbers);
    enter(token, weight, bits_of(numbers, token % kBlockTokens));
  }
};

// The tokens that filters have not left out so far. All arrays have room for the whole vocabulary.
struct Candidates {
  int32_t* tokens;
  float* scores;   // logits, later divided by the temperature
  float* weights;  // 1 for the likeliest
  float* spare[2];
  int64_t count = 0;
};

template <typename T>
struct Row {
  const T* logits;
  int64_t width, groups;
  const Choice& choice;
  float* tops;  // the largest of each group; NaNs are passed over
  float peak = kNothing, peak_score = 0;

  Row(const T* row, int64_t vocab, const Choice& settings, float* memory)
      : logits(row), width(vocab), groups(groups_of(vocab)), choice(settings), tops(memory) {
    for (int64_t group = 0; group < groups; group++) {
      const T* from = logits + group * kGroup;
      const int64_t count = size_of(group);
      F32 top = broadcast(kNothing);
      for (int64_t i = 0; i < count; i += kLanes) top = larger(load_some(from + i, count - i), top);
      tops[group] = largest(top);
      peak = larger(tops[group], peak);
    }
    peak_score = peak / choice.temperature;
  }

  static int64_t groups_of(int64_t vocab) { return (vocab + kGroup - 1) / kGroup; }
  int64_t size_of(int64_t group) const { return smaller(kGroup, width - group * kGroup); }

  // The first among equals; 0 if there are only NaNs.
  int64_t likeliest() const {
    for (int64_t group = 0; group < groups; group++)
      if (tops[group] == peak)
        for (int64_t token = group * kGroup; token < width; token++)
          if (widen(logits[token]) == peak) return token;
    return 0;
  }

  F32 weigh(F32 values) const { return exponential(values / choice.temperature - peak_score); }

  // Draws from the whole vocabulary. rates: room for each group's.
  void race_of_all(Race& race, float* rates) const {
    for (int64_t group = 0; group < groups; group += kLanes)
      store(rates + group, weigh(load(tops + group)));
    for (int64_t group = 0; group < groups; group++) {
      if (!race.open_to(rates[group], 0.5f)) continue;
      uint64_t numbers[kGroup / 2];
      race.stream.blocks(group * (kGroup / kBlockTokens), kGroup / kBlockTokens, numbers);
      if (!race.open_to(rates[group], float(least_bits(numbers)))) continue;
      for (int64_t i = 0; i < size_of(group); i++) {
        const uint32_t bits = bits_of(numbers, i);
        if (!race.open_to(rates[group], float(bits))) continue;
        const int64_t token = group * kGroup + i;
        const float score = widen(logits[token]) / choice.temperature;
        race.enter(token, __builtin_expf(score - peak_score), bits);
      }
    }
  }

  static uint32_t least_bits(const uint64_t* numbers) {
    const U32u* vectors = reinterpret_cast<const U32u*>(numbers);
    U32 least = vectors[0];
    for (int64_t i = 1; i < kGroup / kLanes; i++) least = vectors[i] < least ? vectors[i] : least;
    uint32_t result = least[0];
    for (int i = 1; i < kLanes; i++) result = least[i] < result ? least[i] : result;
    return result;
  }

  void race_of(const Candidates& some, Race& race) const {
    uint64_t numbers[kBlockTokens / 2];
    int64_t drawn = -1;
    for (int64_t i = 0; i < some.count; i++) {
      if (!race.open_to(some.weights[i], 0.5f)) continue;
      const int64_t token = some.tokens[i], block = token / kBlockTokens;
      if (block != drawn) race.stream.block(block, numbers);
      drawn = block;
      const uint32_t bits = bits_of(numbers, token % kBlockTokens);
      if (race.open_to(some.weights[i], float(bits))) race.enter(token, some.weights[i], bits);
    }
  }

  // A logit a little below, so that rounding leaves out none that belongs to those above it.
  float below(double logit) const {
    const double large = __builtin_fabs(logit) + __builtin_fabs(peak);
    return float(logit - 1e-6 * large - 1e-4 * choice.temperature);
  }

  // The logit of a weight.
  double logit_of(double weight) const {
    return peak + double(choice.temperature) * __builtin_log(weight);
  }

  // Tokens whose logit is at least floor, with their logits as scores.
  void collect(Candidates& some, float floor) const {
    some.count = 0;
    for (int64_t group = 0; group < groups; group++) {
      if (!(tops[group] >= floor)) continue;
      const int64_t first = group * kGroup, end = first + size_of(group);
      for (int64_t token = first; token < end; token++) {
        const float logit = widen(logits[token]);
        some.tokens[some.count] = int32_t(token);
        some.scores[some.count] = logit;
        some.count += logit >= floor;
      }
    }
  }

  void collect_weighed(Candidates& some, float floor) const {
    collect(some, floor);
    for (int64_t i = 0; i < some.count; i += kLanes) {
      const F32 values = load(some.scores + i);
      store(some.weights + i, weigh(values));
      store(some.scores + i, values / choice.temperature);
    }
  }

  // Keep what is neither lighter than the weight nor below the score.
  static void keep(Candidates& some, float score, float weight) {
    int64_t kept = 0;
    for (int64_t i = 0; i < some.count; i++) {
      some.tokens[kept] = some.tokens[i];
      some.scores[kept] = some.scores[i];
      some.weights[kept] = some.weights[i];
      kept += some.scores[i] >= score && some.weights[i] >= weight;
    }
    some.count = kept;
  }

  // The logit of the last of top_k.
  float last_of_top_k(Candidates& some) const {
    const int64_t k = choice.top_k;
    float floor = kNothing;
    if (k <= groups) {
      // That many groups have a logit that large, so the one looked for is not below it.
      for (int64_t group = 0; group < groups; group++) some.spare[0][group] = tops[group];
      floor = value_at<false>(some.spare[0], some.spare[1], groups, double(k));
    }
    collect(some, floor);
    return value_at<false>(some.scores, some.spare[0], some.count, double(k));
  }

  double sum_of_all() const {
    double total = 0;
    for (int64_t group = 0; group < groups; group++) {
      const int64_t count = size_of(group);
      F32 sums = {};
      for (int64_t i = 0; i < count; i += kLanes)
        sums += weigh(load_some(logits + group * kGroup + i, count - i));
      total += double(sum(sums));
    }
    return total;
  }

  static void leave_out_beyond(Candidates& some, double enough) {
    for (int64_t i = 0; i < some.count; i++) some.spare[0][i] = some.weights[i];
    keep(some, kNothing, value_at<true>(some.spare[0], some.spare[1], some.count, enough));
  }

  void filter(Candidates& some) const {
    if (choice.top_k > 0 || choice.min_p > 0) {
      // Below it weights are 0.
      float floor = below(logit_of(1e-38)), last = kNothing;
      if (choice.min_p > 0) floor = larger(below(logit_of(choice.min_p)), floor);
      if (choice.top_k > 0) {
        last = last_of_top_k(some);
        floor = larger(below(last), floor);
      }
      collect_weighed(some, floor);
      keep(some, last / choice.temperature, choice.min_p);
      if (choice.top_p < 1) leave_out_beyond(some, choice.top_p * sum_of(some.weights, some.count));
      return;
    }
    const double enough = choice.top_p * sum_of_all();
    // The heaviest are few, and enough if the cut lies among them. Those lighter than the last
    // bound sum up to less than 1 - top_p, and the total is at least the likeliest's 1.
    const double shares[] = {16, 512, double(width)};
    for (const double share : shares) {
      collect_weighed(some, below(logit_of((1 - choice.top_p) / share)));
      if (sum_of(some.weights, some.count) >= enough) break;
    }
    leave_out_beyond(some, enough);
  }
};

template <typename T>
int64_t choose_row(const T* logits, int64_t width, const Choice& choice) {
  const bool greedy = choice.temperature == 0;
  const bool filters = !greedy && (choice.top_k > 0 || choice.min_p > 0 || choice.top_p < 1);
  const int64_t few = whole_vectors(Row<T>::groups_of(width));
  const int64_t many = filters ? whole_vectors(width) : 0;
  float* tops = scratch<float>(2 * few + 5 * many);
  float* rates = tops + few;
  float* more = rates + few;
  for (int64_t i = 0; i < few; i++) tops[i] = kNothing;
  const Row<T> row(logits, width, choice, tops);
  const int64_t likeliest = row.likeliest();
  // Infinite or too large for float32: no weights can be told, and the likeliest is the answer.
  if (greedy || row.peak_score - row.peak_score != 0) return likeliest;
  Race race{Philox(choice.seed, choice.index)};
  race.enter(likeliest, 1);
  if (filters) {
    Candidates some{reinterpret_cast<int32_t*>(more), more + many, more + 2 * many,
                    {more + 3 * many, more + 4 * many}};
    row.filter(some);
    row.race_of(some, race);
  } else {
    row.race_of_all(race, rates);
  }
  return race.winner;
}

template <typename T>
void choose(const ChooseArgs& args) {
  const T* logits = static_cast<const T*>(args.logits);
#pragma omp parallel for schedule(dynamic) if (args.count > 1)
  for (int64_t i = 0; i < args.count; i++) {
    const Choice& choice = args.choices[i];
    args.tokens[i] = choose_row(logits + choice.row * args.stride, args.width, choice);
  }
}

}  // namespace
