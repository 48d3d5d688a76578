// Products of bfloat16 by AMX tiles (Intel SDM volume 1, chapter 18): 32 rows times a panel of 32
// outputs at a time, in float32.
//
// A panel is packed as for the other paths (linear.hpp): 16 pairs of inputs are a tile's rows, and
// the panel's halves two tiles side by side. Each output is summed up 32 inputs at a time from the
// first to the last, whatever the number of rows: results do not depend on what else is in the
// batch. The instruction takes numbers below the normal ones for 0.
#pragma once

#include <immintrin.h>

#include "kernels.hpp"
#include "linear.hpp"
#include "scratch.hpp"

namespace {

// Rows and bytes of a row of a tile, and what they come to: rows of x, inputs, outputs.
constexpr int kTile = 16;
constexpr int kTileBytes = 64;
constexpr int kTileIns = 32;
static_assert(kPanel == 2 * kTile && kInsTogether<Bf16> == kTileIns, "a panel is two tiles wide");

// Which tile is which: sums of the upper and lower rows by half panels, rows, half panels. GCC's
// intrinsics make register names of the very digits.
#define TILE_UPPER_LEFT 0
#define TILE_UPPER_RIGHT 1
#define TILE_LOWER_LEFT 2
#define TILE_LOWER_RIGHT 3
#define TILE_UPPER 4
#define TILE_LOWER 5
#define TILE_LEFT 6
#define TILE_RIGHT 7

// The order of bytes is the instruction's.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Sets the tiles up for so many rows of x, of 32; they hold nothing then.
HEADRACE_INLINE void configure_tiles(int64_t rows) {
  const uint8_t upper = uint8_t(smaller(rows, kTile)), lower = uint8_t(rows - upper);
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = kTileBytes;
  config.rows[TILE_UPPER_LEFT] = config.rows[TILE_UPPER_RIGHT] = config.rows[TILE_UPPER] = upper;
  // A tile without rows cannot be set up; it is not used then.
  const uint8_t any = lower ? lower : upper;
  config.rows[TILE_LOWER_LEFT] = config.rows[TILE_LOWER_RIGHT] = config.rows[TILE_LOWER] = any;
  config.rows[TILE_LEFT] = config.rows[TILE_RIGHT] = kTile;
  _tile_loadconfig(&config);
}

// sums [up to 32, kPanel] = x [rows, ins] times a panel, with rows of x `stride` apart.
template <bool Lower>
HEADRACE_INLINE void multiply_tiles(float* sums, const Bf16* x, int64_t stride, const Bf16* panel,
                                    int64_t ins) {
  constexpr int64_t panel_bytes = 2 * kTileBytes, sum_bytes = kPanel * 4;
  const int64_t row_bytes = stride * 2;
  _tile_zero(TILE_UPPER_LEFT);
  _tile_zero(TILE_UPPER_RIGHT);
  if (Lower) {
    _tile_zero(TILE_LOWER_LEFT);
    _tile_zero(TILE_LOWER_RIGHT);
  }
  for (int64_t k = 0; k < ins; k += kTileIns) {
    _tile_loadd(TILE_LEFT, panel, panel_bytes);
    _tile_loadd(TILE_RIGHT, panel + kTileIns, panel_bytes);
    _tile_loadd(TILE_UPPER, x + k, row_bytes);
    _tile_dpbf16ps(TILE_UPPER_LEFT, TILE_UPPER, TILE_LEFT);
    _tile_dpbf16ps(TILE_UPPER_RIGHT, TILE_UPPER, TILE_RIGHT);
    if (Lower) {
      _tile_loadd(TILE_LOWER, x + kTile * stride + k, row_bytes);
      _tile_dpbf16ps(TILE_LOWER_LEFT, TILE_LOWER, TILE_LEFT);
      _tile_dpbf16ps(TILE_LOWER_RIGHT, TILE_LOWER, TILE_RIGHT);
    }
    panel += kTileIns * kPanel;
  }
  _tile_stored(TILE_UPPER_LEFT, sums, sum_bytes);
  _tile_stored(TILE_UPPER_RIGHT, sums + kTile, sum_bytes);
  if (Lower) {
    _tile_stored(TILE_LOWER_LEFT, sums + kTile * kPanel, sum_bytes);
    _tile_stored(TILE_LOWER_RIGHT, sums + kTile * kPanel + kTile, sum_bytes);
  }
}

// One panel's outputs of up to 32 rows.
HEADRACE_INLINE void multiply_block(const LinearArgs& args, const Bf16* x, int64_t stride,
                                    int64_t first_row, int64_t rows, int64_t panel) {
  alignas(64) float sums[2 * kTile * kPanel];
  const int64_t wide = padded_ins<Bf16>(args.ins), out = panel * kPanel;
  const Bf16* packed = static_cast<const Bf16*>(args.packed) + panel * wide * kPanel;
  if (rows > kTile)
    multiply_tiles<true>(sums, x, stride, packed, wide);
  else
    multiply_tiles<false>(sums, x, stride, packed, wide);
  const int64_t count = smaller(kPanel, args.outs - out);
  const Bf16* bias = args.bias ? static_cast<const Bf16*>(args.bias) + out : nullptr;
  Bf16* y = static_cast<Bf16*>(args.y) + first_row * args.outs + out;
  for (int64_t row = 0; row < rows; row++) {
    const float* own = sums + row * kPanel;
    const F32 acc[2] = {load(own), load(own + kLanes)};
    put_row(y + row * args.outs, acc, bias, count);
  }
}

// As linear<Bf16>(), with more rows a second than the other paths have.
void linear_by_tiles(const LinearArgs& args) {
  constexpr int64_t block = 2 * kTile;
  const int64_t ins = args.ins, wide = padded_ins<Bf16>(ins);
  const Bf16* x = static_cast<const Bf16*>(args.x);
  // Tiles are of whole 64 bytes: what is beyond a row must be 0.
  Bf16* padded = wide == ins ? nullptr : scratch<Bf16>(args.rows * wide);
  const int64_t blocks = (args.rows + block - 1) / block;
  const int64_t panels = (args.outs + kPanel - 1) / kPanel;
  // Panels that stay in the L2 cache while all rows pass by; of a few rows, enough shares of them
  // to keep threads even.
  const int64_t share_bytes = (blocks > 1 ? 256 : 64) * 1024;
  int64_t share = share_bytes / (wide * kPanel * 2);
  share = share < 1 ? 1 : share;
  const int64_t shares = (panels + share - 1) / share;
#pragma omp parallel if (args.rows * args.outs * ins > 100000)
  {
    if (padded) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < args.rows; row++) {
        Bf16* to = padded + row * wide;
        __builtin_memcpy(to, x + row * ins, ins * 2);
        __builtin_memset(to + ins, 0, (wide - ins) * 2);
      }
    }
    const Bf16* from = padded ? padded : x;
    int64_t configured = 0;
#pragma omp for schedule(dynamic)
    for (int64_t s = 0; s < shares; s++)
      for (int64_t b = 0; b < blocks; b++) {
        const int64_t first = b * block, rows = smaller(block, args.rows - first);
        if (rows != configured) configure_tiles(configured = rows);
        const int64_t end = smaller(panels, (s + 1) * share);
        for (int64_t panel = s * share; panel < end; panel++)
          multiply_block(args, from + first * wide, wide, first, rows, panel);
      }
    if (configured) _tile_release();
  }
}

}  // namespace
