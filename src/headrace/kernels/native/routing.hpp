// Which experts a row goes to, and what becomes of their outputs.
#pragma once

#include "kernels.hpp"
#include "scratch.hpp"
#include "simd.hpp"

namespace {

// wide: room for the row's scores, their powers and whether they are chosen, in whole vectors each.
template <typename T>
void route_row(T* scores, float* wide, const RouteArgs& args) {
  const int64_t count = args.experts, padded = (count + kLanes - 1) / kLanes * kLanes;
  float* powers = wide + padded;
  float* is_chosen = wide + 2 * padded;
  for (int64_t i = 0; i < padded; i++) {
    wide[i] = i < count ? widen(scores[i]) : -__builtin_inff();
    is_chosen[i] = 0;
  }
  float highest = wide[0];
  for (int64_t i = 1; i < count; i++) highest = larger(wide[i], highest);
  for (int64_t i = 0; i < padded; i += kLanes)
    store(powers + i, exponential(load(wide + i) - highest));
  float total = 0;
  for (int64_t n = 0; n < args.chosen; n++) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
      if (is_chosen[i] == 0 && (best < 0 || wide[i] > wide[best])) best = i;
    is_chosen[best] = 1;
    total += powers[best];
  }
  if (!args.normalized) {
    total = 0;
    for (int64_t i = 0; i < count; i++) total += powers[i];
  }
  for (int64_t i = 0; i < count; i++)
    scores[i] = narrow<T>(is_chosen[i] != 0 ? powers[i] / total : 0);
}

template <typename T>
void route(const RouteArgs& args) {
  const int64_t padded = (args.experts + kLanes - 1) / kLanes * kLanes;
#pragma omp parallel for if (args.rows * args.experts * args.chosen > 100000)
  for (int64_t row = 0; row < args.rows; row++)
    route_row(static_cast<T*>(args.scores) + row * args.experts, scratch<float, 1>(3 * padded),
              args);
}

template <typename T>
void combine(const CombineArgs& args) {
  const T* x = static_cast<const T*>(args.x);
  const int64_t width = args.width, parts = args.starts[args.rows];
#pragma omp parallel for if (parts * width > 16 * 1024)
  for (int64_t row = 0; row < args.rows; row++) {
    T* out = static_cast<T*>(args.out) + row * width;
    const int64_t begin = args.starts[row], end = args.starts[row + 1];
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      F32 sum = {};
      for (int64_t n = begin; n < end; n++)
        sum += args.factors[n] * load(x + args.places[n] * width + i);
      store(out + i, sum);
    }
    for (; i < width; i++) {
      float sum = 0;
      for (int64_t n = begin; n < end; n++)
        sum += args.factors[n] * widen(x[args.places[n] * width + i]);
      out[i] = narrow<T>(sum);
    }
  }
}

}  // namespace
