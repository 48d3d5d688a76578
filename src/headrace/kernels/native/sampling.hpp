// Choosing tokens from logits.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace {

// The first of the largest; NaNs are passed over, and a row of nothing else gives 0.
template <typename T>
int64_t argmax_row(const T* logits, int64_t width) {
  F32 tops = broadcast(-__builtin_inff());
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) tops = larger(load(logits + i), tops);
  float top = largest(tops);
  for (; i < width; i++) top = larger(widen(logits[i]), top);
  for (i = 0; i < width; i++)
    if (widen(logits[i]) == top) return i;
  return 0;
}

template <typename T>
void argmax(const T* logits, int64_t* out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows > 1)
  for (int64_t row = 0; row < rows; row++) out[row] = argmax_row(logits + row * width, width);
}

}  // namespace
