// Finding a threshold among values without sorting them.
#pragma once

#include <stdint.h>

#include "simd.hpp"

namespace {

// In double, eight at a time: the same on every path.
inline double sum_of(const float* values, int64_t count) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (int k = 0; k < 8; k++) sums[k] += double(values[i + k]);
  for (; i < count; i++) sums[i % 8] += double(values[i]);
  double total = 0;
  for (const double part : sums) total += part;
  return total;
}

// The largest of the values of which those not below it are, or add up to, at least `enough`; the
// least value if even all do not. count > 0, no NaNs. Overwrites values and spare, [count] each.
template <bool AddUp>
float value_at(float* values, float* spare, int64_t count, double enough) {
  double above = 0;
  uint32_t random = 1;
  for (;;) {
    // Any sequence does: pivots must only not depend on how the values are arranged.
    random = random * 1664525 + 1013904223;
    const float pivot = values[uint64_t(count) * random >> 32];
    int64_t greater = 0, less = 0;
    for (int64_t i = 0; i < count; i++) {
      const float value = values[i];
      values[greater] = spare[less] = value;
      greater += value > pivot;
      less += value < pivot;
    }
    const double more = AddUp ? sum_of(values, greater) : double(greater);
    if (greater > 0 && above + more >= enough) {
      count = greater;
      continue;
    }
    above += more + double(count - greater - less) * (AddUp ? double(pivot) : 1.0);
    if (above >= enough || less == 0) return pivot;
    count = less;
    float* const others = values;
    values = spare;
    spare = others;
  }
}

}  // namespace
