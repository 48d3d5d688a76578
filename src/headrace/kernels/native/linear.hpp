// Linear layers with weights packed once.
#pragma once

#include "kernels.hpp"
#include "scratch.hpp"
#include "tile.hpp"

namespace {

// Of a panel that is worked on at a time: it stays in the L1 cache, or near it.
constexpr int64_t kDepthBytes = 40 * 1024;
// Of a block of rows of x meanwhile: a fifth of a usual L2 cache.
constexpr int64_t kBlockBytes = 192 * 1024;
// Panels that a block of rows is multiplied with while it stays there, at most.
constexpr int64_t kMostPanels = 8;

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

// A few rows leave registers free: they take several panels at a time, or the multiply-adds would
// wait for one another.
#ifdef HEADRACE_DOT
template <int Rows>
constexpr int kPanelsAtOnce = Rows >= 6 ? 1 : Rows >= 3 ? 2 : 4;
#else
template <int Rows>
constexpr int kPanelsAtOnce = Rows >= 3 ? 1 : Rows == 2 ? 2 : 4;
#endif

// How a product is worked on: blocks of rows times shares of panels, each some inputs at a time.
template <typename T>
struct Cut {
  // Inputs of a panel, at a time; rows of a block; panels of a share; how many of each.
  int64_t depth, block, share, blocks, shares, panels;

  Cut(const LinearArgs& args, int64_t ins) {
    constexpr int64_t bytes = kPanel * int64_t(sizeof(T));
    const int64_t parts = (ins * bytes + kDepthBytes - 1) / kDepthBytes;
    depth = ((ins + parts - 1) / parts + kInsTogether<T> - 1) / kInsTogether<T> * kInsTogether<T>;
    block = kBlockBytes / (depth * int64_t(sizeof(Left<T>))) / kMostRows * kMostRows;
    block = block < 2 * kMostRows ? 2 * kMostRows : block;
    blocks = (args.rows + block - 1) / block;
    panels = (args.outs + kPanel - 1) / kPanel;
    // As many as leave enough shares to keep threads even; not less than 64 KB of weights, and not
    // less than few rows take at once.
    share = smaller(kMostPanels, panels * blocks / 64);
    const int64_t least = 64 * 1024 / (ins * bytes);
    const int64_t together = args.rows > kMostRows / 2 ? 1 : kPanelsAtOnce<1>;
    share = share < least ? least : share;
    share = share < together ? together : share;
    shares = (panels + share - 1) / share;
  }
};

// Elements from a row of x to the next, as it is multiplied. Rows that lie whole pages apart would
// fight for the same places of a cache.
template <typename T>
HEADRACE_INLINE int64_t stride_of_rows(int64_t rows, int64_t ins) {
  constexpr int64_t line = 64 / int64_t(sizeof(Left<T>));
  return rows > kMostRows && ins % (32 * line) == 0 ? ins + line : ins;
}

// Rows and panels of a product that one thread works on, and from which input to which. sums: of
// the inputs before, [panel][row][kPanel], if there are several parts.
template <typename T>
struct Work {
  const LinearArgs& args;
  const Left<T>* x;
  int64_t stride, ins, first_row, rows, first_panel, end_panel, k, end_k;
  float* sums;
};

template <int Rows, int Panels, typename T>
void multiply_panels(const Work<T>& work, int64_t row, int64_t panel) {
  const LinearArgs& args = work.args;
  const T* packed = static_cast<const T*>(args.packed) + (panel * work.ins + work.k) * kPanel;
  F32 acc[Rows][Panels][2];
  const auto sums = [&](int r, int p) __attribute__((always_inline)) {
    return work.sums + ((panel + p - work.first_panel) * work.rows + row + r) * kPanel;
  };
#pragma GCC unroll 12
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int p = 0; p < Panels; p++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++)
        acc[r][p][v] = work.k ? load(sums(r, p) + v * kLanes) : F32{};
  const Left<T>* x = work.x + (work.first_row + row) * work.stride + work.k;
  multiply_add<Rows, Panels>(acc, x, work.stride, packed, kPanel * kPair<T>, work.ins * kPanel,
                             work.end_k - work.k);
  for (int p = 0; p < Panels; p++) {
    const int64_t out = (panel + p) * kPanel;
    const int64_t count = smaller(kPanel, args.outs - out);
    const T* bias = args.bias ? static_cast<const T*>(args.bias) + out : nullptr;
    T* y = static_cast<T*>(args.y) + (work.first_row + row) * args.outs + out;
    for (int r = 0; r < Rows; r++)
      if (work.end_k == work.ins)
        put_row(y + r * args.outs, acc[r][p], bias, count);
      else
        for (int v = 0; v < 2; v++) store(sums(r, p) + v * kLanes, acc[r][p][v]);
  }
}

template <int Rows, typename T>
void multiply_rows(const Work<T>& work, int64_t row, int64_t panel, int64_t end_panel) {
  constexpr int together = kPanelsAtOnce<Rows>;
  for (; panel + together <= end_panel; panel += together)
    multiply_panels<Rows, together, T>(work, row, panel);
  if constexpr (together > 1)
    for (; panel < end_panel; panel++) multiply_panels<Rows, 1, T>(work, row, panel);
}

template <int Rows, typename T>
void multiply_up_to(int64_t rows, const Work<T>& work, int64_t row, int64_t panel,
                    int64_t end_panel) {
  if constexpr (Rows > 1)
    if (rows < Rows) return multiply_up_to<Rows - 1, T>(rows, work, row, panel, end_panel);
  multiply_rows<Rows, T>(work, row, panel, end_panel);
}

template <typename T>
void multiply(Work<T>& work, int64_t depth) {
  const int64_t tiles = (work.rows + kMostRows - 1) / kMostRows;
  // Panel by panel over all tiles of rows, so that a panel stays in the L1 cache.
  const int64_t step = tiles > 1 ? 1 : work.end_panel - work.first_panel;
  for (work.k = 0; work.k < work.ins; work.k = work.end_k) {
    work.end_k = smaller(work.ins, work.k + depth);
    for (int64_t panel = work.first_panel; panel < work.end_panel; panel += step)
      for (int64_t tile = 0; tile < tiles; tile++) {
        // Tiles of even height: a low one would run as long as a high one.
        const int64_t row = work.rows * tile / tiles, end = work.rows * (tile + 1) / tiles;
        multiply_up_to<kMostRows, T>(end - row, work, row, panel, panel + step);
      }
  }
}

// A row of x as it is multiplied, of padded length.
template <typename T>
HEADRACE_INLINE void prepare_row(const T* x, Left<T>* to, int64_t ins, int64_t padded) {
  int64_t k = 0;
  for (; k + kLanes <= ins; k += kLanes) store(to + k, load(x + k));
  for (; k < ins; k++) to[k] = narrow<Left<T>>(widen(x[k]));
  for (; k < padded; k++) to[k] = {};
}

template <typename T>
void linear(const LinearArgs& args) {
  const int64_t ins = padded_ins<T>(args.ins);
  const T* x = static_cast<const T*>(args.x);
  // The very x if it is as it should be.
  const int64_t stride = stride_of_rows<T>(args.rows, ins);
  const bool as_it_is = sizeof(T) == sizeof(Left<T>) && stride == args.ins;
  Left<T>* prepared = as_it_is ? nullptr : scratch<Left<T>>(args.rows * stride);
  const Cut<T> cut(args, ins);
#pragma omp parallel if (args.rows * args.outs * ins > 100000)
  {
    if (prepared) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < args.rows; row++)
        prepare_row(x + row * args.ins, prepared + row * stride, args.ins, ins);
    }
    const Left<T>* left = prepared ? prepared : reinterpret_cast<const Left<T>*>(x);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t b = 0; b < cut.blocks; b++)
      for (int64_t s = 0; s < cut.shares; s++) {
        const int64_t first_row = b * cut.block, first_panel = s * cut.share;
        const int64_t rows = smaller(cut.block, args.rows - first_row);
        const int64_t end_panel = smaller(cut.panels, first_panel + cut.share);
        Work<T> work{args, left, stride, ins, first_row, rows, first_panel, end_panel, 0, 0, nullptr};
        // Few rows need not part the inputs: they read a panel once.
        const int64_t depth = rows > kMostRows ? cut.depth : ins;
        if (depth < ins)
          work.sums = scratch<float, 1>((end_panel - first_panel) * rows * kPanel);
        multiply(work, depth);
      }
  }
}

}  // namespace
