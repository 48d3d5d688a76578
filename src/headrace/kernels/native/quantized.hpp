// Linear layers with weights as files quantize them: products of whole numbers.
//
// A row of x is rounded to whole numbers of -127 to 127, each block of 32 inputs with a scale of its
// own. Their products with a weight's numbers are summed up exactly within a block (or half of one,
// where it has two scales), and the blocks' sums in float32, from the first to the last, whatever the
// number of rows: results do not depend on what else is in the batch.
#pragma once

#include "kernels.hpp"
#include "quantized_form.hpp"
#include "scratch.hpp"
#include "simd.hpp"

namespace {

// A row's block in whole numbers. weighted: their sum times the scale. starts: minus their sum times
// the weight's zero, of the two halves where there are two scales, else of all.
struct RoundedBlock {
  int8_t numbers[kBlockIns];
  float scale, weighted;
  int32_t starts[2];
};

// Each number over scale, rounded to a whole one, ties to even.
HEADRACE_INLINE I32 to_whole(F32 v) {
#if HEADRACE_LANES == 16
  return (I32)_mm512_cvtps_epi32((__m512)v);
#elif HEADRACE_LANES == 8
  return (I32)_mm256_cvtps_epi32((__m256)v);
#else
  // Added to 1.5 * 2^23 a number has no places left for a fraction.
  return (I32)(v + 12582912.0f) - 0x4b400000;
#endif
}

// What is no number makes a scale that is none. Numbers of less than 2^-100 are as good as zeros,
// and their scale's inverse might be infinite.
template <typename T>
void round_block(const T* x, const WeightForm& form, RoundedBlock& to) {
  constexpr int vectors = int(kBlockIns) / kLanes;
  F32 values[vectors];
  // As whole numbers sizes have the same order, and what is no number is the largest.
  I32 tops = {};
  for (int v = 0; v < vectors; v++) {
    values[v] = load(x + v * kLanes);
    const I32 size = (I32)values[v] & 0x7fffffff;
    tops = size > tops ? size : tops;
  }
  int32_t bits = 0;
  for (int i = 0; i < kLanes; i++) bits = tops[i] > bits ? tops[i] : bits;
  float top;
  __builtin_memcpy(&top, &bits, 4);
  const bool counts = top >= 0x1p-100f && top < __builtin_inff();
  const float inverse = counts ? 127.0f / top : 0.0f;
  int32_t halves[2] = {};
  for (int v = 0; v < vectors; v++) {
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    typedef Bytes Bytesu __attribute__((aligned(1), may_alias));
    const I32 whole = counts ? to_whole(values[v] * inverse) : I32{};
    *reinterpret_cast<Bytesu*>(to.numbers + v * kLanes) = __builtin_convertvector(whole, Bytes);
    int32_t total = 0;
    for (int i = 0; i < kLanes; i++) total += whole[i];
    halves[v * kLanes / 16] += total;
  }
  const int32_t both = halves[0] + halves[1];
  to.scale = top / 127.0f;
  to.weighted = to.scale * float(both);
  to.starts[0] = -form.zero * (form.scales == 1 ? both : halves[0]);
  to.starts[1] = -form.zero * halves[1];
}

// acc + the products of four numbers of each word, of so many bits, with the four from x on.
template <int Bits>
HEADRACE_INLINE I32 add_dots(I32 acc, U32 words, const int8_t* x) {
  int four;
  __builtin_memcpy(&four, x, 4);
#if defined(__AVX512VNNI__)
  return (I32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)words, _mm512_set1_epi32(four));
#elif HEADRACE_LANES == 16
  const __m512i left = (__m512i)words, right = _mm512_set1_epi32(four);
  // Two products of 7 bits each fit into 16 bits, those of 8 bits do not.
  if (Bits < 8) {
    const __m512i pairs = _mm512_maddubs_epi16(left, right);
    return acc + (I32)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  }
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(left, _mm512_set1_epi16(0xff)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(right, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(left, 8), _mm512_srai_epi16(right, 8));
  return acc + (I32)even + (I32)odd;
#elif HEADRACE_LANES == 8
  const __m256i left = (__m256i)words, right = _mm256_set1_epi32(four);
  if (Bits < 8) {
    const __m256i pairs = _mm256_maddubs_epi16(left, right);
    return acc + (I32)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(left, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(right, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(left, 8), _mm256_srai_epi16(right, 8));
  return acc + (I32)even + (I32)odd;
#else
  for (int i = 0; i < 4; i++) acc += (I32)(words >> (8 * i) & 0xff) * int32_t(x[i]);
  return acc;
#endif
}

// Rows that are worked on at once: with a sum in whole numbers and one in float32 of each, the
// registers are just used up.
constexpr int kMostQuantizedRows = kLanes == 16 ? 12 : 4;
template <int Rows>
constexpr int kQuantizedPanels = kLanes < 16 ? (Rows > 2 ? 1 : 2) : (Rows > 6 ? 1 : Rows > 3 ? 2 : 4);

template <typename T>
HEADRACE_INLINE void put_quantized(const QuantizedArgs& args, F32 sums, int64_t row, int64_t out) {
  T* y = static_cast<T*>(args.y) + row * args.y_stride + out;
  const T* bias = args.bias ? static_cast<const T*>(args.bias) + out : nullptr;
  const int64_t count = smaller(kLanes, args.outs - out);
  if (count == kLanes) {
    store(y, bias ? sums + load(bias) : sums);
    return;
  }
  for (int64_t i = 0; i < count; i++) y[i] = narrow<T>(sums[i] + (bias ? widen(bias[i]) : 0.0f));
}

// x: of each block the rows' blocks.
template <int Rows, int Panels, int Bits, int Scales, bool Minimums>
void multiply_quantized(const QuantizedArgs& args, const RoundedBlock* x, int64_t row,
                        int64_t panel) {
  constexpr WeightForm form{Bits, Scales, Minimums, 0};
  const int64_t bytes = bytes_of_block(form), panel_bytes = bytes_of_panel(form, args.ins);
  const char* packed = static_cast<const char*>(args.packed) + panel * panel_bytes;
  F32 acc[Rows][Panels] = {};
  for (int64_t block = args.ins / kBlockIns; block > 0; block--, packed += bytes, x += Rows) {
#pragma GCC unroll 2
    for (int s = 0; s < Scales; s++) {
      I32 dots[Rows][Panels];
#pragma GCC unroll 12
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < Panels; p++) dots[r][p] = Minimums ? I32{} : I32{} + x[r].starts[s];
#pragma GCC unroll 8
      for (int i = 0; i < 8 / Scales; i++) {
        const int word = Scales == 1 ? i / 2 + i % 2 * 4 : s * 4 + i;
#pragma GCC unroll 4
        for (int p = 0; p < Panels; p++) {
          const U32 words = four_numbers<Bits>(packed + p * panel_bytes, word);
#pragma GCC unroll 12
          for (int r = 0; r < Rows; r++)
            dots[r][p] = add_dots<Bits>(dots[r][p], words, x[r].numbers + word * 4);
        }
      }
#pragma GCC unroll 4
      for (int p = 0; p < Panels; p++) {
        const char* halves = packed + p * panel_bytes + kLanes * 4 * Bits;
        const F32 scale = load_halves(halves + s * kLanes * 2);
        F32 minimum = {};
        if constexpr (Minimums) minimum = load_halves(halves + kLanes * 2);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; r++) {
          acc[r][p] += __builtin_convertvector(dots[r][p], F32) * (scale * x[r].scale);
          if constexpr (Minimums) acc[r][p] += minimum * x[r].weighted;
        }
      }
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int p = 0; p < Panels; p++) {
      const int64_t out = (panel + p) * kLanes;
      args.type == Type::kBfloat16 ? put_quantized<Bf16>(args, acc[r][p], row + r, out)
                                   : put_quantized<float>(args, acc[r][p], row + r, out);
    }
}

template <int Rows, int Bits, int Scales, bool Minimums>
void multiply_quantized_rows(int64_t rows, const QuantizedArgs& args, const RoundedBlock* x,
                             int64_t row, int64_t panel, int64_t end_panel) {
  if constexpr (Rows > 1)
    if (rows < Rows)
      return multiply_quantized_rows<Rows - 1, Bits, Scales, Minimums>(rows, args, x, row, panel,
                                                                       end_panel);
  constexpr int together = kQuantizedPanels<Rows>;
  for (; panel + together <= end_panel; panel += together)
    multiply_quantized<Rows, together, Bits, Scales, Minimums>(args, x, row, panel);
  if constexpr (together > 1)
    for (; panel < end_panel; panel++)
      multiply_quantized<Rows, 1, Bits, Scales, Minimums>(args, x, row, panel);
}

// Rows dealt to tiles of even height: a low one would run as long as a high one.
struct Tiles {
  int64_t rows, count;

  explicit Tiles(int64_t rows)
      : rows(rows), count((rows + kMostQuantizedRows - 1) / kMostQuantizedRows) {}
  int64_t first(int64_t tile) const { return rows * tile / count; }
  int64_t of(int64_t row) const { return ((row + 1) * count - 1) / rows; }
};

template <int Bits, int Scales, bool Minimums>
void quantized_of(const QuantizedArgs& args) {
  const int64_t blocks = args.ins / kBlockIns, panels = (args.outs + kLanes - 1) / kLanes;
  const Tiles tiles(args.rows);
  // By tiles, of each the blocks in order, of each block the rows.
  RoundedBlock* rounded = scratch<RoundedBlock, 2>(args.rows * blocks);
  // Tiles that stay in the L2 cache; panels enough to be worth a turn, few enough to keep threads
  // even, and not fewer than few rows take at once.
  const int64_t tile_bytes = kMostQuantizedRows * blocks * int64_t(sizeof(RoundedBlock));
  const int64_t stay = 384 * 1024 / tile_bytes, group = stay < 1 ? 1 : stay;
  const int64_t groups = (tiles.count + group - 1) / group;
  const int64_t least = 32 * 1024 / bytes_of_panel(args.form, args.ins);
  int64_t share = smaller(8, panels * groups / 64);
  share = share < least ? least : share;
  share = share < 4 ? 4 : share;
  const int64_t shares = (panels + share - 1) / share;
#pragma omp parallel if (args.rows * args.outs * args.ins > 100000)
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < args.rows; row++) {
      const int64_t tile = tiles.of(row), first = tiles.first(tile);
      const int64_t height = tiles.first(tile + 1) - first;
      RoundedBlock* to = rounded + first * blocks + row - first;
      for (int64_t block = 0; block < blocks; block++) {
        const int64_t at = row * args.ins + block * kBlockIns;
        RoundedBlock& own = to[block * height];
        args.type == Type::kBfloat16
            ? round_block(static_cast<const Bf16*>(args.x) + at, args.form, own)
            : round_block(static_cast<const float*>(args.x) + at, args.form, own);
      }
    }
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t g = 0; g < groups; g++)
      for (int64_t s = 0; s < shares; s++) {
        const int64_t end_tile = smaller(tiles.count, (g + 1) * group);
        const int64_t end_panel = smaller(panels, (s + 1) * share);
        // A panel that several tiles take stays in the caches meanwhile.
        const int64_t step = end_tile - g * group > 1 ? 4 : end_panel - s * share;
        for (int64_t panel = s * share; panel < end_panel; panel += step)
          for (int64_t tile = g * group; tile < end_tile; tile++) {
            const int64_t first = tiles.first(tile);
            multiply_quantized_rows<kMostQuantizedRows, Bits, Scales, Minimums>(
                tiles.first(tile + 1) - first, args, rounded + first * blocks, first, panel,
                smaller(end_panel, panel + step));
          }
      }
  }
}

inline void quantized(const QuantizedArgs& args) {
  const WeightForm& form = args.form;
  if (form.bits == 4 && form.minimums) return quantized_of<4, 1, true>(args);
  if (form.bits == 4) return quantized_of<4, 1, false>(args);
  if (form.bits == 5 && form.minimums) return quantized_of<5, 1, true>(args);
  if (form.bits == 5) return quantized_of<5, 1, false>(args);
  if (form.bits == 6) return quantized_of<6, 2, false>(args);
  return quantized_of<8, 1, false>(args);
}

template <typename T>
void embed_quantized_row(const QuantizedEmbedArgs& args, int64_t id, T* to) {
  // As a number of the activations' type, and so is what it multiplies: as embed().
  const float factor = widen(narrow<T>(args.scale));
  const int64_t bytes = bytes_of_block(args.form), lane = id % kLanes, bits = args.form.bits;
  const char* block = static_cast<const char*>(args.packed) +
                      id / kLanes * bytes_of_panel(args.form, args.width);
  const auto byte = [&](int64_t word, int64_t i) {
    return int(static_cast<uint8_t>(block[(word * kLanes + lane) * 4 + i]));
  };
  for (int64_t at = 0; at < args.width; at++) {
    if (at && at % kBlockIns == 0) block += bytes;
    const int64_t k = at % kBlockIns, w = k / 4, i = k % 4;
    int number = byte(bits == 8 ? w : w % 4, i);
    if (bits < 8) number = w < 4 ? number & 15 : number >> 4;
    if (bits == 5) number |= (byte(4, i) >> w & 1) << 4;
    if (bits == 6) number |= (byte(4 + w / 4, i) >> (w % 4 * 2) & 3) << 4;
    const char* halves = block + kLanes * 4 * bits + lane * 2;
    const auto half = [&](int64_t n) {
      uint16_t bits;
      __builtin_memcpy(&bits, halves + n * kLanes * 2, 2);
      return from_half(bits);
    };
    const float scale = half(args.form.scales == 2 ? w / 4 : 0);
    const float value = args.form.minimums ? float(number) * scale + half(1)
                                           : float(number - args.form.zero) * scale;
    to[at] = narrow<T>(widen(narrow<T>(value)) * factor);
  }
}

template <typename T>
void embed_quantized(const QuantizedEmbedArgs& args) {
#pragma omp parallel for if (args.rows * args.width > 16 * 1024)
  for (int64_t row = 0; row < args.rows; row++) {
    T* to = static_cast<T*>(args.out) + row * args.width;
    const int64_t id = args.ids[row] - args.first;
    if (id >= 0 && id < args.held) {
      embed_quantized_row(args, id, to);
      continue;
    }
    for (int64_t i = 0; i < args.width; i++) to[i] = {};
  }
}

}  // namespace
