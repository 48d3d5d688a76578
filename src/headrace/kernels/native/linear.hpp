// Linear layers with weights packed once.
#pragma once

#include "kernels.hpp"
#include "scratch.hpp"
#include "tile.hpp"

namespace {

// Rows of x that are worked on together: in float32 they take half of a usual L2 cache.
HEADRACE_INLINE int64_t block_of_rows(int64_t ins) {
  const int64_t rows = 192 * 1024 / (ins * 4) / kMostRows * kMostRows;
  return rows < 2 * kMostRows ? 2 * kMostRows : rows;
}

// Inputs of a panel that are never parted: a word's, or a tile's.
#ifdef HEADRACE_AMX
template <typename T>
constexpr int kInsTogether = sizeof(T) == 2 ? 32 : kPair<T>;
#else
template <typename T>
constexpr int kInsTogether = kPair<T>;
#endif

template <typename T>
HEADRACE_INLINE int64_t padded_ins(int64_t ins) {
  return (ins + kInsTogether<T> - 1) / kInsTogether<T> * kInsTogether<T>;
}

template <typename T>
int64_t packed_size(int64_t outs, int64_t ins) {
  return (outs + kPanel - 1) / kPanel * kPanel * padded_ins<T>(ins);
}

// weight [outs, ins] to panels of [ins / pair][kPanel][pair]; what is beyond outs and ins is 0.
template <typename T>
void pack(const void* from, void* to, int64_t outs, int64_t ins) {
  const T* weight = static_cast<const T*>(from);
  const int64_t panels = (outs + kPanel - 1) / kPanel, wide = padded_ins<T>(ins);
#pragma omp parallel for
  for (int64_t panel = 0; panel < panels; panel++) {
    T* packed = static_cast<T*>(to) + panel * wide * kPanel;
    for (int64_t k = 0; k < wide; k += kPair<T>)
      for (int64_t i = 0; i < kPanel; i++)
        for (int half = 0; half < kPair<T>; half++) {
          const int64_t out = panel * kPanel + i;
          *packed++ = out < outs && k + half < ins ? weight[out * ins + k + half] : T{};
        }
  }
}

template <typename T>
HEADRACE_INLINE void put_row(T* y, const F32* acc, const T* bias, int64_t count) {
  if (count == kPanel) {
    for (int v = 0; v < 2; v++) {
      F32 total = acc[v];
      if (bias) total += load(bias + v * kLanes);
      store(y + v * kLanes, total);
    }
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    float total = acc[i / kLanes][i % kLanes];
    if (bias) total += widen(bias[i]);
    y[i] = narrow<T>(total);
  }
}

template <int Rows, int Panels, typename T>
void multiply_panels(const LinearArgs& args, const float* x, int64_t stride, int64_t first_row,
                     int64_t panel) {
  const int64_t wide = padded_ins<T>(args.ins);
  const T* packed = static_cast<const T*>(args.packed) + panel * wide * kPanel;
  F32 acc[Rows][Panels][2] = {};
  multiply_add<Rows, Panels, T>(acc, x, stride, packed, kPanel * kPair<T>, wide * kPanel, wide);
  for (int p = 0; p < Panels; p++) {
    const int64_t out = (panel + p) * kPanel;
    const int64_t count = smaller(kPanel, args.outs - out);
    const T* bias = args.bias ? static_cast<const T*>(args.bias) + out : nullptr;
    for (int row = 0; row < Rows; row++)
      put_row(static_cast<T*>(args.y) + (first_row + row) * args.outs + out, acc[row][p], bias,
              count);
  }
}

// A few rows leave registers free: they take several panels at a time, or the multiply-adds would
// wait for one another.
template <int Rows>
constexpr int kPanelsAtOnce = Rows >= 3 ? 1 : Rows == 2 ? 2 : 4;

template <int Rows, typename T>
void multiply_rows(const LinearArgs& args, const float* x, int64_t stride, int64_t first_row,
                   int64_t panel, int64_t end_panel) {
  constexpr int together = kPanelsAtOnce<Rows>;
  for (; panel + together <= end_panel; panel += together)
    multiply_panels<Rows, together, T>(args, x, stride, first_row, panel);
  if constexpr (together > 1)
    for (; panel < end_panel; panel++)
      multiply_panels<Rows, 1, T>(args, x, stride, first_row, panel);
}

template <int Rows, typename T>
void multiply_up_to(int rows, const LinearArgs& args, const float* x, int64_t stride,
                    int64_t first_row, int64_t panel, int64_t end_panel) {
  if constexpr (Rows > 1)
    if (rows < Rows)
      return multiply_up_to<Rows - 1, T>(rows, args, x, stride, first_row, panel, end_panel);
  multiply_rows<Rows, T>(args, x, stride, first_row, panel, end_panel);
}

// x in float32 with rows of padded length; the very x if it is that already.
template <typename T>
HEADRACE_INLINE void widen_rows(const T* x, float* wide, int64_t ins, int64_t stride) {
  int64_t k = 0;
  for (; k + kLanes <= ins; k += kLanes) store(wide + k, load(x + k));
  for (; k < ins; k++) wide[k] = widen(x[k]);
  for (; k < stride; k++) wide[k] = 0;
}

template <typename T>
void linear(const LinearArgs& args) {
  const int64_t ins = args.ins, stride = padded_ins<T>(ins);
  const T* x = static_cast<const T*>(args.x);
  float* wide = nullptr;
  if constexpr (sizeof(T) != 4) wide = scratch<float>(args.rows * stride);
  const int64_t block = block_of_rows(ins);
  const int64_t blocks = (args.rows + block - 1) / block;
  const int64_t panels = (args.outs + kPanel - 1) / kPanel;
  // Shares of some 64 KB of weights: enough of them to keep threads even, few enough to be cheap.
  int64_t share = 64 * 1024 / (stride * kPanel * int64_t(sizeof(T)));
  share = share < kPanelsAtOnce<1> ? kPanelsAtOnce<1> : share;
  const int64_t shares = (panels + share - 1) / share;
#pragma omp parallel if (args.rows * args.outs * ins > 100000)
  {
    if constexpr (sizeof(T) != 4) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < args.rows; row++)
        widen_rows(x + row * ins, wide + row * stride, ins, stride);
    }
    const float* left = wide ? wide : reinterpret_cast<const float*>(x);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t s = 0; s < shares; s++) {
        const int64_t begin = b * block, rows = smaller(block, args.rows - begin);
        const int64_t tiles = (rows + kMostRows - 1) / kMostRows;
        const int64_t end_panel = smaller(panels, (s + 1) * share);
        // Panel by panel over all tiles of rows, so that a panel stays in the L1 cache.
        const int64_t step = rows > 3 ? 1 : end_panel - s * share;
        for (int64_t panel = s * share; panel < end_panel; panel += step)
          for (int64_t tile = 0; tile < tiles; tile++) {
            // Tiles of even height: a low one would run as long as a high one.
            const int64_t first = begin + rows * tile / tiles;
            const int64_t end = begin + rows * (tile + 1) / tiles;
            multiply_up_to<kMostRows, T>(int(end - first), args, left + first * stride, stride,
                                         first, panel, panel + step);
          }
      }
  }
}

}  // namespace
