// How quantized weights lie in memory, for products of whole numbers.
//
// Panels of kLanes outputs, of each its inputs in blocks of 32, one block after the other. Of a
// block: words of four bytes, of each word first all outputs', then the next word; then the outputs'
// scales in float16, and their minimums, if the form has them. A form of so many bits has as many
// words of an output's block:
//
//   the first 4   byte i of word w holds inputs 4w + i, below, and 4w + i + 16, above
//   5 bits: 1     of input 4w + i the highest bit, at 8i + w
//   6 bits: 2     of inputs 4w + i the two highest bits, at 8i + 2w, of the first 16 inputs and of
//                 the others
//   8 bits: 8     instead of those, byte i of word w is input 4w + i
//
// Two scales are those of a block's first 16 inputs and of the others.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

#if HEADRACE_LANES >= 8
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlockIns = 32;

HEADRACE_INLINE int64_t bytes_of_block(const WeightForm& form) {
  return kLanes * (4 * form.bits + 2 * form.scales + (form.minimums ? 2 : 0));
}

HEADRACE_INLINE int64_t bytes_of_panel(const WeightForm& form, int64_t ins) {
  return ins / kBlockIns * bytes_of_block(form);
}

// Of a packed weight.
inline int64_t quantized_size(const WeightForm& form, int64_t outs, int64_t ins) {
  return (outs + kLanes - 1) / kLanes * bytes_of_panel(form, ins);
}

// Numbers of four neighbouring inputs of each output, a byte each, by the bits that hold them: the
// inputs from 4 * word on.
template <int Bits>
HEADRACE_INLINE U32 four_numbers(const char* block, int word) {
  const auto words = [&](int w) __attribute__((always_inline)) {
    return *reinterpret_cast<const U32u*>(block + w * kLanes * 4);
  };
  if constexpr (Bits == 8) return words(word);
  const U32 low = (word < 4 ? words(word) : words(word - 4) >> 4) & 0x0f0f0f0fu;
  if constexpr (Bits == 5) {
    const U32 high = words(4);
    return low | ((word < 4 ? high << (4 - word) : high >> (word - 4)) & 0x10101010u);
  }
  if constexpr (Bits == 6) {
    const int place = word % 4 * 2;
    const U32 high = words(4 + word / 4);
    return low | ((place < 4 ? high << (4 - place) : high >> (place - 4)) & 0x30303030u);
  }
  return low;
}

// float16, of which there are no infinities: exponent and fraction at their places in a float32 are
// 2^112 times too small.
HEADRACE_INLINE float from_half(uint16_t half) {
  const uint32_t bits = uint32_t(half & 0x7fff) << 13;
  float size;
  __builtin_memcpy(&size, &bits, 4);
  size *= 0x1p112f;
  return half & 0x8000 ? -size : size;
}

HEADRACE_INLINE F32 load_halves(const char* from) {
#if HEADRACE_LANES == 16
  // GCC 12 warns of what the form without a mask leaves undefined.
  return (F32)_mm512_maskz_cvtph_ps(0xffff, (__m256i)*reinterpret_cast<const U16u*>(from));
#else
  const U32 bits = __builtin_convertvector(*reinterpret_cast<const U16u*>(from), U32);
  const F32 size = (F32)((bits & 0x7fff) << 13) * 0x1p112f;
  return (F32)((U32)size | (bits & 0x8000) << 16);
#endif
}

}  // namespace
