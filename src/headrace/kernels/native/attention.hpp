// Attention over the paged cache, for decode rows and prefill chunks alike.
//
// A tile is a few rows (token and query head) that share a key head. It takes its scores against
// all positions first, then the softmax, then the weighted sum of values: each row's result follows
// from its own token's position and context alone, bit for bit, in any batch and any chunking.
#pragma once

#include "kernels.hpp"
#include "scratch.hpp"
#include "simd.hpp"
#include "tile.hpp"

namespace {

constexpr int64_t kKeysAtOnce = 16;
static_assert(kKeysAtOnce % kPanel == 0 || kPanel % kKeysAtOnce == 0, "panels fit key groups");
// Keys or values of one product: a panel, or less where a panel is wider than what lies together.
constexpr int kWide = kPanel <= kKeysAtOnce ? 2 : 1;
constexpr int kColumns = kWide * kLanes;

// A few rows leave registers free: they take several groups of columns at a time, or the
// multiply-adds would wait for one another.
constexpr int kMostSums = kMostRows * 4 / 3;
template <int Rows>
constexpr int kGroups = Rows * 4 * kWide <= kMostSums ? 4 : Rows * 2 * kWide <= kMostSums ? 2 : 1;

// Blocks between the one that is worked on and the one that is fetched from memory meanwhile.
constexpr int64_t kAhead = 4;

template <int Rows, int Groups>
struct Sums {
  F32 of[Rows][Groups][kWide] = {};
};

// As multiply_add of tile.hpp, for groups of kColumns columns that begin at b[group]; k need not be
// whole pairs. ahead: where what is needed a while later lies, `lines` cache lines a row, or none.
template <int Rows, int Groups, typename T>
HEADRACE_INLINE void multiply_add_columns(Sums<Rows, Groups>& sums, const float* a,
                                          int64_t a_stride, const T* const (&b)[Groups],
                                          int64_t row_stride, int64_t k, const T* ahead,
                                          int lines) {
  const auto add = [&](int64_t at, int half) __attribute__((always_inline)) {
    const int64_t row_start = at / kPair<T> * row_stride;
#pragma GCC unroll 4
    for (int g = 0; g < Groups; g++) {
      F32 right[kWide];
#pragma GCC unroll 2
      for (int v = 0; v < kWide; v++)
        right[v] = part(b[g] + row_start + v * kLanes * kPair<T>, half);
#pragma GCC unroll 12
      for (int row = 0; row < Rows; row++) {
        const float left = a[row * a_stride + at];
#pragma GCC unroll 2
        for (int v = 0; v < kWide; v++) sums.of[row][g][v] += left * right[v];
      }
    }
  };
  int64_t at = 0;
  for (; at + kPair<T> <= k; at += kPair<T>) {
    if (ahead) {
      const char* row = reinterpret_cast<const char*>(ahead + at / kPair<T> * row_stride);
      for (int line = 0; line < lines; line++) __builtin_prefetch(row + 64 * line);
    }
    add(at, 0);
    if constexpr (kPair<T> == 2) add(at + 1, 1);
  }
  if (at < k) add(at, 0);
}

#ifdef HEADRACE_DOT
template <int Rows, int Groups>
HEADRACE_INLINE void multiply_add_columns(Sums<Rows, Groups>& sums, const Bf16* a,
                                          int64_t a_stride, const Bf16* const (&b)[Groups],
                                          int64_t row_stride, int64_t k, const Bf16* ahead,
                                          int lines) {
  static_assert(kWide == 1, "a group is a vector wide");
  int64_t at = 0;
  for (; at + 2 <= k; at += 2) {
    const int64_t row_start = at / 2 * row_stride;
    if (ahead) {
      const char* row = reinterpret_cast<const char*>(ahead + row_start);
      for (int line = 0; line < lines; line++) __builtin_prefetch(row + 64 * line);
    }
    __m512bh right[Groups];
#pragma GCC unroll 4
    for (int g = 0; g < Groups; g++) right[g] = pairs(b[g] + row_start);
#pragma GCC unroll 12
    for (int row = 0; row < Rows; row++) {
      const __m512bh left = broadcast_pair(a + row * a_stride + at);
#pragma GCC unroll 4
      for (int g = 0; g < Groups; g++)
        sums.of[row][g][0] = add_products(sums.of[row][g][0], left, right[g]);
    }
  }
  if (at == k) return;
  // Half a pair: what the other half holds, if anything, is not multiplied.
  for (int row = 0; row < Rows; row++) {
    const Bf16 single[2] = {a[row * a_stride + at], {}};
    for (int g = 0; g < Groups; g++)
      sums.of[row][g][0] =
          add_products(sums.of[row][g][0], broadcast_pair(single),
                       first_of_pairs(b[g] + at / 2 * row_stride));
  }
}
#endif

// One tile: rows first to first + Rows of a plan row and key head, counted token by token and
// within a token by query head. fetches: the first to read this key head's keys and values, which
// come from memory then, a block here and a block there, which the CPU does not foresee.
struct Tile {
  int64_t row, kv_head, first;
  bool fetches;
};

template <typename T>
struct Attention {
  const AttentionArgs& args;
  int64_t group, per_head, per_block;

  explicit Attention(const AttentionArgs& a)
      : args(a),
        group(a.heads / a.cache.kv_heads),
        per_head(a.cache.block_rows * a.cache.head_dim),
        per_block(per_head * a.cache.kv_heads) {}

  int64_t position(const Tile& tile, int64_t row) const {
    const int64_t tokens = args.query_starts[tile.row + 1] - args.query_starts[tile.row];
    return args.context_lens[tile.row] - tokens + (tile.first + row) / group;
  }

  // The first position that the token at `position` attends to.
  int64_t horizon(int64_t position) const {
    return args.window && position >= args.window ? position - args.window + 1 : 0;
  }

  const int64_t* table(const Tile& tile) const {
    return args.block_tables + tile.row * args.table_width;
  }

  int64_t token_and_head(const Tile& tile, int64_t row, int64_t& head) const {
    head = tile.kv_head * group + (tile.first + row) % group;
    return args.query_starts[tile.row] + (tile.first + row) / group;
  }

  void take_queries(const Tile& tile, int64_t rows, Left<T>* queries) const {
    const int64_t dim = args.cache.head_dim;
    for (int row = 0; row < rows; row++) {
      int64_t head;
      const int64_t token = token_and_head(tile, row, head);
      const T* q = static_cast<const T*>(args.q) + token * args.q_stride + head * dim;
      for (int64_t d = 0; d < dim; d += kLanes)
        store(queries + row * dim + d, load(q + d));
    }
  }

  const T* keys(const Tile& tile, int64_t block) const {
    return static_cast<const T*>(args.keys) + table(tile)[block] * per_block +
           tile.kv_head * per_head;
  }

  const T* values(const Tile& tile, int64_t block) const {
    return static_cast<const T*>(args.values) + table(tile)[block] * per_block +
           tile.kv_head * per_head;
  }

  // Scores of Blocks blocks from `block` on; `to` is where the first one's go.
  template <int Rows, int Blocks>
  void score_blocks(const Tile& tile, const Left<T>* queries, float* to, int64_t stride,
                    int64_t block, int64_t end_block) const {
    const CacheShape& shape = args.cache;
    for (int64_t at = 0; at < shape.block_rows; at += kColumns) {
      const T* columns[Blocks];
      for (int b = 0; b < Blocks; b++) columns[b] = keys(tile, block + b) + at * kPair<T>;
      const T* ahead = tile.fetches && block + kAhead < end_block
                           ? keys(tile, block + kAhead) + at * kPair<T>
                           : nullptr;
      Sums<Rows, Blocks> sums;
      multiply_add_columns(sums, queries, shape.head_dim, columns, shape.block_rows * kPair<T>,
                           shape.head_dim, ahead, 1);
      for (int row = 0; row < Rows; row++)
        for (int b = 0; b < Blocks; b++)
          for (int v = 0; v < kWide; v++)
            store(to + row * stride + b * shape.block_rows + at + v * kLanes,
                  sums.of[row][b][v]);
    }
  }

  template <int Rows>
  void score(const Tile& tile, const Left<T>* queries, float* scores, int64_t stride,
             int64_t first_block, int64_t end_block) const {
    constexpr int together = kGroups<Rows>;
    int64_t block = first_block;
    for (; block + together <= end_block; block += together) {
      score_blocks<Rows, together>(tile, queries,
                                   scores + (block - first_block) * args.cache.block_rows, stride,
                                   block, end_block);
    }
    for (; block < end_block; block++)
      score_blocks<Rows, 1>(tile, queries, scores + (block - first_block) * args.cache.block_rows,
                            stride, block, end_block);
  }

  // Products of queries and keys to weights that still lack the division by what is returned. What
  // lies outside low to high, and places of a block beyond its size, get weight 0.
  float soften(float* scores, int64_t first_block, int64_t end_block, int64_t low, int64_t high,
               int64_t head) const {
    const int64_t size = args.cache.block_size, rows = args.cache.block_rows;
    F32 tops = broadcast(-__builtin_inff());
    for (int64_t block = first_block; block < end_block; block++) {
      float* part = scores + (block - first_block) * rows;
      const int64_t start = block * size;
      for (int64_t i = 0; i < rows; i += kLanes) store(part + i, load(part + i) * args.scale);
      if (args.soft_cap)
        for (int64_t i = 0; i < rows; i += kLanes)
          store(part + i, args.soft_cap * hyperbolic_tangent(load(part + i) / args.soft_cap));
      if (start < low || start + rows > high + 1 || size != rows)
        for (int64_t i = 0; i < rows; i++)
          if (i >= size || start + i < low || start + i > high) part[i] = -__builtin_inff();
      for (int64_t i = 0; i < rows; i += kLanes) tops = larger(tops, load(part + i));
    }
    float top = largest(tops);
    if (args.sinks) top = larger(top, args.sinks[head]);
    F32 sums = {};
    const int64_t count = (end_block - first_block) * rows;
    for (int64_t i = 0; i < count; i += kLanes) {
      const F32 weight = exponential(load(scores + i) - top);
      store(scores + i, weight);
      sums += weight;
    }
    float total = sum(sums);
    if (args.sinks) total += exponential(broadcast(args.sinks[head] - top))[0];
    return total;
  }

  // weights [count] in two parts of bfloat16, which together are as exact as 16 bits.
  static void part_weights(const float* weights, Bf16* upper, Bf16* lower, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const F32 weight = load(weights + i);
      store(upper + i, weight);
      store(lower + i, weight - load(upper + i));
    }
  }

  // What multiplies values: the weights themselves, or their parts, one behind the other.
  static const Left<T>* as_multiplied(float* weights, int64_t count, Left<T>* parts) {
    if constexpr (sizeof(Left<T>) == 4) {
      return weights;
    } else {
      part_weights(weights, parts, parts + count, count);
      return parts;
    }
  }

  template <int Rows, int Groups>
  void weigh_columns(const Tile& tile, const Left<T>* weights, int64_t stride, const float* totals,
                     int64_t first_block, int64_t end_block, int64_t d) const {
    const CacheShape& shape = args.cache;
    const int64_t last = position(tile, Rows - 1);
    Sums<Rows, Groups> sums;
    for (int64_t block = first_block; block < end_block; block++) {
      const T* columns[Groups];
      for (int g = 0; g < Groups; g++)
        columns[g] = values(tile, block) + (d + g * kColumns) * kPair<T>;
      const T* ahead = d == 0 && tile.fetches && block + kAhead < end_block
                           ? values(tile, block + kAhead)
                           : nullptr;
      // No further than the last position: what lies behind may be another sequence's infinity,
      // and 0 times that is no number.
      const int64_t there = smaller(shape.block_size, last + 1 - block * shape.block_size);
      const Left<T>* own = weights + (block - first_block) * shape.block_rows;
      multiply_add_columns(sums, own, stride, columns, shape.head_dim * kPair<T>, there, ahead,
                           int(shape.head_dim * kPair<T> * sizeof(T) / 64));
      if constexpr (sizeof(Left<T>) == 2)
        multiply_add_columns(sums, own + Rows * stride, stride, columns, shape.head_dim * 2, there,
                             static_cast<const T*>(nullptr), 0);
    }
    for (int row = 0; row < Rows; row++) {
      int64_t head;
      const int64_t token = token_and_head(tile, row, head);
      T* out = static_cast<T*>(args.out) + (token * args.heads + head) * shape.head_dim + d;
      for (int g = 0; g < Groups; g++)
        for (int v = 0; v < kWide; v++)
          store(out + (g * kWide + v) * kLanes, sums.of[row][g][v] / totals[row]);
    }
  }

  template <int Rows>
  void weigh(const Tile& tile, const Left<T>* weights, int64_t stride, const float* totals,
             int64_t first_block, int64_t end_block) const {
    constexpr int together = kGroups<Rows>;
    const int64_t dim = args.cache.head_dim;
    int64_t d = 0;
    for (; d + together * kColumns <= dim; d += together * kColumns)
      weigh_columns<Rows, together>(tile, weights, stride, totals, first_block, end_block, d);
    for (; d < dim; d += kColumns)
      weigh_columns<Rows, 1>(tile, weights, stride, totals, first_block, end_block, d);
  }

  template <int Rows>
  void run(const Tile& tile) const {
    const int64_t size = args.cache.block_size;
    const int64_t last = position(tile, Rows - 1);
    const int64_t first_block = horizon(position(tile, 0)) / size, end_block = last / size + 1;
    const int64_t stride = (end_block - first_block) * args.cache.block_rows;
    float* scores = scratch<float>(Rows * stride);
    Left<T>* queries = scratch<Left<T>, 1>(Rows * (args.cache.head_dim + 2 * stride));
    Left<T>* parts = queries + Rows * args.cache.head_dim;
    float totals[Rows];
    take_queries(tile, Rows, queries);
    score<Rows>(tile, queries, scores, stride, first_block, end_block);
    for (int row = 0; row < Rows; row++) {
      int64_t head;
      token_and_head(tile, row, head);
      const int64_t at = position(tile, row);
      totals[row] =
          soften(scores + row * stride, first_block, end_block, horizon(at), at, head);
    }
    weigh<Rows>(tile, as_multiplied(scores, Rows * stride, parts), stride, totals, first_block,
                end_block);
  }

  template <int Rows>
  void run_up_to(int64_t rows, const Tile& tile) const {
    if constexpr (Rows > 1)
      if (rows < Rows) return run_up_to<Rows - 1>(rows, tile);
    run<Rows>(tile);
  }
};

template <typename T>
void attention(const AttentionArgs& args) {
  const Attention<T> attention(args);
  const int64_t tokens = args.query_starts[args.rows];
  const int64_t kv_heads = args.cache.kv_heads;
#pragma omp parallel if (tokens * args.heads > 8)
  for (int64_t row = 0; row < args.rows; row++) {
    const int64_t count =
        (args.query_starts[row + 1] - args.query_starts[row]) * attention.group;
    const int64_t tiles = (count + kMostRows - 1) / kMostRows;
#pragma omp for collapse(2) schedule(dynamic) nowait
    for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++)
      // From the last, which has the most to attend to.
      for (int64_t t = tiles - 1; t >= 0; t--) {
        const int64_t first = count * t / tiles, end = count * (t + 1) / tiles;
        const Tile tile{row, kv_head, first, t == tiles - 1};
        attention.template run_up_to<kMostRows>(end - first, tile);
      }
  }
}

}  // namespace
