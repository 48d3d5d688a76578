// Attention of bfloat16 by AMX tiles: as in attention.hpp, with up to 16 rows of a key head at a time.
//
// Keys and values lie in the cache as tiles want their right operand, 16 positions together. The
// softmax's weights are parted in two bfloat16 numbers, which together are as exact as 16 bits. Groups
// of 16 positions are added up in order, and what a row does not attend to has weight 0: a row's
// result does not depend on the other rows.
#pragma once

#include "amx.hpp"
#include "attention.hpp"

namespace {

// Sums of four groups of columns; queries and keys; weights and values.
#define TILE_SUM_0 0
#define TILE_SUM_1 1
#define TILE_SUM_2 2
#define TILE_SUM_3 3
#define TILE_QUERIES 4
#define TILE_KEYS 5
#define TILE_WEIGHTS 6
#define TILE_VALUES 7

// Groups of 16 columns that are summed up side by side.
constexpr int64_t kSums = 4;
static_assert(kKeysAtOnce == kTile, "a group of positions is a tile wide");

HEADRACE_INLINE void configure_attention(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    config.row_bytes[tile] = kTileBytes;
    config.rows[tile] = uint8_t(rows);
  }
  config.rows[TILE_KEYS] = kTile;
  config.row_bytes[TILE_WEIGHTS] = kKeysAtOnce * 2;
  config.rows[TILE_VALUES] = kKeysAtOnce / 2;
  _tile_loadconfig(&config);
}

struct TileAttention : Attention<Bf16> {
  using Attention<Bf16>::Attention;

  // Where the group'th 16 positions of the tile's row lie, in its keys and its values.
  int64_t groups_of_block() const { return args.cache.block_rows / kKeysAtOnce; }
  const Bf16* keys_of(const Tile& tile, int64_t group) const {
    return keys(tile, group / groups_of_block()) + group % groups_of_block() * kKeysAtOnce * 2;
  }
  const Bf16* values_of(const Tile& tile, int64_t group) const {
    return values(tile, group / groups_of_block()) +
           group % groups_of_block() * kKeysAtOnce * args.cache.head_dim;
  }

  void fetch(const Bf16* from, int64_t rows, int64_t row_bytes, int64_t bytes) const {
    for (int64_t row = 0; row < rows; row++)
      for (int64_t at = 0; at < bytes; at += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(from) + row * row_bytes + at);
  }

  void take_queries(const Tile& tile, int64_t rows, Bf16* queries) const {
    const int64_t dim = args.cache.head_dim;
    for (int64_t row = 0; row < rows; row++) {
      int64_t head;
      const int64_t token = token_and_head(tile, row, head);
      const Bf16* q = static_cast<const Bf16*>(args.q) + token * args.q_stride + head * dim;
      __builtin_memcpy(queries + row * dim, q, dim * 2);
    }
  }

  // Scores of four groups, or of one, into columns of `to`.
  template <bool Four>
  void score_groups(const Tile& tile, const Bf16* queries, float* to, int64_t stride, int64_t group,
                    int64_t end_group) const {
    const int64_t dim = args.cache.head_dim, row_bytes = args.cache.block_rows * 4;
    const Bf16* from[kSums];
    for (int64_t g = 0; g < (Four ? kSums : 1); g++) from[g] = keys_of(tile, group + g);
    // From memory: the keys of the groups to come, and the values, which are read afterwards.
    if (tile.fetches)
      for (int64_t g = 0; g < (Four ? kSums : 1); g++) {
        if (group + g + kSums < end_group)
          fetch(keys_of(tile, group + g + kSums), dim / 2, row_bytes, 64);
        fetch(values_of(tile, group + g), kKeysAtOnce / 2, dim * 4, dim * 4);
      }
    _tile_zero(TILE_SUM_0);
    if (Four) {
      _tile_zero(TILE_SUM_1);
      _tile_zero(TILE_SUM_2);
      _tile_zero(TILE_SUM_3);
    }
    for (int64_t d = 0; d < dim; d += kTileIns) {
      const int64_t offset = d / 2 * args.cache.block_rows * 2;
      _tile_loadd(TILE_QUERIES, queries + d, dim * 2);
      _tile_loadd(TILE_KEYS, from[0] + offset, row_bytes);
      _tile_dpbf16ps(TILE_SUM_0, TILE_QUERIES, TILE_KEYS);
      if (Four) {
        _tile_loadd(TILE_KEYS, from[1] + offset, row_bytes);
        _tile_dpbf16ps(TILE_SUM_1, TILE_QUERIES, TILE_KEYS);
        _tile_loadd(TILE_KEYS, from[2] + offset, row_bytes);
        _tile_dpbf16ps(TILE_SUM_2, TILE_QUERIES, TILE_KEYS);
        _tile_loadd(TILE_KEYS, from[3] + offset, row_bytes);
        _tile_dpbf16ps(TILE_SUM_3, TILE_QUERIES, TILE_KEYS);
      }
    }
    _tile_stored(TILE_SUM_0, to, stride * 4);
    if (Four) {
      _tile_stored(TILE_SUM_1, to + kKeysAtOnce, stride * 4);
      _tile_stored(TILE_SUM_2, to + 2 * kKeysAtOnce, stride * 4);
      _tile_stored(TILE_SUM_3, to + 3 * kKeysAtOnce, stride * 4);
    }
  }

  // Of 64 columns of the values, or of 16, the sums over all positions.
  template <bool Four>
  void weigh_columns(const Tile& tile, const Bf16* upper, const Bf16* lower, int64_t stride,
                     float* sums, int64_t first_group, int64_t end_group, int64_t last,
                     int64_t d) const {
    const int64_t dim = args.cache.head_dim;
    alignas(64) Bf16 tail[kKeysAtOnce * kSums * kKeysAtOnce];
    _tile_zero(TILE_SUM_0);
    if (Four) {
      _tile_zero(TILE_SUM_1);
      _tile_zero(TILE_SUM_2);
      _tile_zero(TILE_SUM_3);
    }
    for (int64_t group = first_group; group < end_group; group++) {
      const Bf16* from = values_of(tile, group) + d * 2;
      int64_t row_bytes = dim * 4;
      const int64_t block = group / groups_of_block();
      const int64_t size = args.cache.block_size;
      const int64_t in_block = smaller(size, last + 1 - block * size);
      const int64_t there = in_block - group % groups_of_block() * kKeysAtOnce;
      if (there < kKeysAtOnce) {
        copy_values(from, tail, there, Four ? kSums * kKeysAtOnce : kKeysAtOnce);
        from = tail;
        row_bytes = (Four ? kSums * kKeysAtOnce : kKeysAtOnce) * 4;
      }
      const int64_t at = (group - first_group) * kKeysAtOnce;
      const Bf16* const parts[2] = {upper + at, lower + at};
      for (const Bf16* part : parts) {
        _tile_loadd(TILE_WEIGHTS, part, stride * 2);
        _tile_loadd(TILE_VALUES, from, row_bytes);
        _tile_dpbf16ps(TILE_SUM_0, TILE_WEIGHTS, TILE_VALUES);
        if (Four) {
          _tile_loadd(TILE_VALUES, from + 2 * kKeysAtOnce, row_bytes);
          _tile_dpbf16ps(TILE_SUM_1, TILE_WEIGHTS, TILE_VALUES);
          _tile_loadd(TILE_VALUES, from + 4 * kKeysAtOnce, row_bytes);
          _tile_dpbf16ps(TILE_SUM_2, TILE_WEIGHTS, TILE_VALUES);
          _tile_loadd(TILE_VALUES, from + 6 * kKeysAtOnce, row_bytes);
          _tile_dpbf16ps(TILE_SUM_3, TILE_WEIGHTS, TILE_VALUES);
        }
      }
    }
    _tile_stored(TILE_SUM_0, sums, dim * 4);
    if (Four) {
      _tile_stored(TILE_SUM_1, sums + kKeysAtOnce, dim * 4);
      _tile_stored(TILE_SUM_2, sums + 2 * kKeysAtOnce, dim * 4);
      _tile_stored(TILE_SUM_3, sums + 3 * kKeysAtOnce, dim * 4);
    }
  }

  // The first `there` positions of a group, if any, and zeros: what lies behind may be another
  // sequence's infinity, and 0 times that is no number.
  void copy_values(const Bf16* from, Bf16* to, int64_t there, int64_t columns) const {
    const int64_t row = args.cache.head_dim * 2;
    __builtin_memset(to, 0, kKeysAtOnce * columns * 2);
    for (int64_t at = 0; at < there; at++)
      for (int64_t d = 0; d < columns; d++)
        to[at / 2 * columns * 2 + d * 2 + at % 2] = from[at / 2 * row + d * 2 + at % 2];
  }

  void run(const Tile& tile, int64_t rows) const {
    const int64_t dim = args.cache.head_dim, size = args.cache.block_size;
    const int64_t last = position(tile, rows - 1);
    const int64_t first_block = horizon(position(tile, 0)) / size, end_block = last / size + 1;
    const int64_t first_group = first_block * groups_of_block();
    const int64_t end_group = end_block * groups_of_block();
    const int64_t stride = (end_group - first_group) * kKeysAtOnce;
    // Scores, and of weights what four bytes are parted in; sums; queries.
    float* scores = scratch<float>(rows * (2 * stride + dim + dim / 2));
    float* sums = scores + rows * stride;
    Bf16* upper = reinterpret_cast<Bf16*>(sums + rows * dim);
    Bf16* lower = upper + rows * stride;
    Bf16* queries = lower + rows * stride;
    take_queries(tile, rows, queries);
    int64_t group = first_group;
    for (; group + kSums <= end_group; group += kSums)
      score_groups<true>(tile, queries, scores + (group - first_group) * kKeysAtOnce, stride, group,
                         end_group);
    for (; group < end_group; group++)
      score_groups<false>(tile, queries, scores + (group - first_group) * kKeysAtOnce, stride, group,
                          end_group);
    float totals[kTile];
    for (int64_t row = 0; row < rows; row++) {
      int64_t head;
      token_and_head(tile, row, head);
      float* own = scores + row * stride;
      const int64_t at = position(tile, row);
      totals[row] = soften(own, first_block, end_block, horizon(at), at, head);
      part_weights(own, upper + row * stride, lower + row * stride, stride);
    }
    int64_t d = 0;
    for (; d + kSums * kKeysAtOnce <= dim; d += kSums * kKeysAtOnce)
      weigh_columns<true>(tile, upper, lower, stride, sums + d, first_group, end_group, last, d);
    for (; d < dim; d += kKeysAtOnce)
      weigh_columns<false>(tile, upper, lower, stride, sums + d, first_group, end_group, last, d);
    for (int64_t row = 0; row < rows; row++) {
      int64_t head;
      const int64_t token = token_and_head(tile, row, head);
      Bf16* out = static_cast<Bf16*>(args.out) + (token * args.heads + head) * dim;
      for (int64_t i = 0; i < dim; i += kLanes)
        store(out + i, load(sums + row * dim + i) / totals[row]);
    }
  }
};

// As attention<Bf16>(); tiles take heads of whole 32 elements.
void attention_by_tiles(const AttentionArgs& args) {
  if (args.cache.head_dim % kTileIns) return attention<Bf16>(args);
  const TileAttention attention(args);
  const int64_t tokens = args.query_starts[args.rows];
  const int64_t kv_heads = args.cache.kv_heads;
#pragma omp parallel if (tokens * args.heads > 8)
  {
    int64_t configured = 0;
    for (int64_t row = 0; row < args.rows; row++) {
      const int64_t count =
          (args.query_starts[row + 1] - args.query_starts[row]) * attention.group;
      const int64_t tiles = (count + kTile - 1) / kTile;
#pragma omp for collapse(2) schedule(dynamic) nowait
      for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++)
        // From the last, which has the most to attend to.
        for (int64_t t = tiles - 1; t >= 0; t--) {
          const int64_t first = count * t / tiles, rows = count * (t + 1) / tiles - first;
          if (rows != configured) configure_attention(configured = rows);
          attention.run({row, kv_head, first, t == tiles - 1}, rows);
        }
    }
    if (configured) _tile_release();
  }
}

}  // namespace
