// Finding a threshold among values without sorting them.
#pragma once

#include <stdint.h>

#include "simd.hpp"

namespace {

// The largest of the values for which the weights of all values not below it add up to at least
// `enough`; the least value if even all do not. count > 0, no NaNs. Overwrites values and spare,
// [count] each.
template <typename Weigh>
float value_at(float* values, float* spare, int64_t count, double enough, Weigh weigh) {
  double above = 0;
  uint32_t random = 1;
  for (;;) {
    // Any sequence does: the pivot must only not depend on how the values are arranged.
    random = random * 1664525 + 1013904223;
    const float pivot = values[uint64_t(count) * random >> 32];
    int64_t greater = 0, less = 0;
    double weight = 0;
    for (int64_t i = 0; i < count; i++) {
      const float value = values[i];
      values[greater] = spare[less] = value;
      greater += value > pivot;
      less += value < pivot;
      weight += value > pivot ? weigh(value) : 0.0;
    }
    if (greater > 0 && above + weight >= enough) {
      count = greater;
      continue;
    }
    above += weight + double(count - greater - less) * weigh(pivot);
    if (above >= enough || less == 0) return pivot;
    count = less;
    float* const others = values;
    values = spare;
    spare = others;
  }
}

// The k-th largest.
inline float kth_largest(float* values, float* spare, int64_t count, int64_t k) {
  return value_at(values, spare, count, double(k), [](float) { return 1.0; });
}

}  // namespace
