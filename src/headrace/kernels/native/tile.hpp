// The inner loop of products: a few rows of A times a narrow panel of B. Attention has one of the same
// kind for what lies in a cache (attention.hpp).
//
// B is packed: row k of a panel holds kPanel neighbouring outputs; bfloat16 rows are interleaved in
// pairs, word i being (B[k][i], B[k + 1][i]), which unpack with one shift or mask, A then being in
// float32; or which the CPU multiplies as they are, by pairs of A. Each output is one chain of
// multiply-adds from k = 0 up, whatever the number of rows: results do not depend on what else is in
// the batch.
#pragma once

#include "simd.hpp"

namespace {

// Outputs of a panel: two vectors, so that with kMostRows rows the registers are just used up.
constexpr int kPanel = 2 * kLanes;
constexpr int kMostRows = kLanes == 16 ? 12 : 6;

// acc += A[Rows, k] B[k, Panels * kPanel].
//
// a: element [row][k] at a[row * a_stride + k]. b: row pair k / kPair<T> of panel p at
// b + p * panel_stride + (k / kPair<T>) * row_stride. k must be a multiple of kPair<T>.
template <int Rows, int Panels, typename T>
HEADRACE_INLINE void multiply_add(F32 (&acc)[Rows][Panels][2], const float* a, int64_t a_stride,
                                  const T* b, int64_t row_stride, int64_t panel_stride,
                                  int64_t k) {
  for (int64_t at = 0; at < k; at += kPair<T>) {
#pragma GCC unroll 2
    for (int half = 0; half < kPair<T>; half++) {
#pragma GCC unroll 4
      for (int p = 0; p < Panels; p++) {
        const T* words = b + p * panel_stride;
        const F32 right[2] = {part(words, half), part(words + kLanes * kPair<T>, half)};
#pragma GCC unroll 12
        for (int row = 0; row < Rows; row++) {
          const float left = a[row * a_stride + at + half];
          acc[row][p][0] += left * right[0];
          acc[row][p][1] += left * right[1];
        }
      }
    }
    b += row_stride;
  }
}

#ifdef HEADRACE_DOT
template <int Rows, int Panels>
HEADRACE_INLINE void multiply_add(F32 (&acc)[Rows][Panels][2], const Bf16* a, int64_t a_stride,
                                  const Bf16* b, int64_t row_stride, int64_t panel_stride,
                                  int64_t k) {
  for (int64_t at = 0; at < k; at += 2) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; p++) {
      const Bf16* words = b + p * panel_stride;
      const __m512bh right[2] = {pairs(words), pairs(words + kLanes * 2)};
#pragma GCC unroll 12
      for (int row = 0; row < Rows; row++) {
        const __m512bh left = broadcast_pair(a + row * a_stride + at);
        acc[row][p][0] = add_products(acc[row][p][0], left, right[0]);
        acc[row][p][1] = add_products(acc[row][p][1], left, right[1]);
      }
    }
    b += row_stride;
  }
}
#endif

}  // namespace
