// GGUF's quantized rows packed as quantized_form.hpp says.
//
// Sources: ggml-quants.c and ggml-common.h of llama.cpp for what a block's bytes mean, and the
// Python package gguf, which the tests hold them against.
#pragma once

#include "kernels.hpp"
#include "quantized_form.hpp"

namespace {

// Rounded to nearest, ties to even; infinite from 65520 on.
HEADRACE_INLINE uint16_t to_half(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (size < 0x38800000) {
    // Below 2^-14 steps are of 2^-24, which one at 0.5 has as its last bit's.
    float small;
    __builtin_memcpy(&small, &size, 4);
    small += 0.5f;
    uint32_t rounded;
    __builtin_memcpy(&rounded, &small, 4);
    return uint16_t(sign | (rounded - 0x3f000000));
  }
  return uint16_t(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

HEADRACE_INLINE uint16_t half_at(const uint8_t* from) {
  uint16_t half;
  __builtin_memcpy(&half, from, 2);
  return half;
}

HEADRACE_INLINE uint32_t word_at(const uint8_t* from) {
  uint32_t word;
  __builtin_memcpy(&word, from, 4);
  return word;
}

// A block of 32 of one output, as it is packed.
struct OwnBlock {
  uint32_t words[8];
  uint16_t scales[2], minimum;
};

// The bytes of a file's block, and how many inputs it has. read: the part of it that is `number`,
// counted in 32 inputs.
struct Q4_0 {
  static constexpr int kBits = 4, kScales = 1, kZero = 8, kBytes = 18, kParts = 1;
  static constexpr bool kMinimums = false;
  static HEADRACE_INLINE void read(const uint8_t* from, int, OwnBlock& to) {
    to.scales[0] = half_at(from);
    __builtin_memcpy(to.words, from + 2, 16);
  }
};

struct Q4_1 {
  static constexpr int kBits = 4, kScales = 1, kZero = 0, kBytes = 20, kParts = 1;
  static constexpr bool kMinimums = true;
  static HEADRACE_INLINE void read(const uint8_t* from, int, OwnBlock& to) {
    to.scales[0] = half_at(from);
    to.minimum = half_at(from + 2);
    __builtin_memcpy(to.words, from + 4, 16);
  }
};

// Bit 4w + i to 8i + w.
HEADRACE_INLINE uint32_t spread_bits(uint32_t bits) {
  uint32_t found = 0;
  for (int w = 0; w < 8; w++) {
    // Four neighbouring bits to a byte each.
    const uint32_t four = bits >> (4 * w) & 15;
    found |= (four * 0x00204081u & 0x01010101u) << w;
  }
  return found;
}

struct Q5_0 {
  static constexpr int kBits = 5, kScales = 1, kZero = 16, kBytes = 22, kParts = 1;
  static constexpr bool kMinimums = false;
  static HEADRACE_INLINE void read(const uint8_t* from, int, OwnBlock& to) {
    to.scales[0] = half_at(from);
    to.words[4] = spread_bits(word_at(from + 2));
    __builtin_memcpy(to.words, from + 6, 16);
  }
};

struct Q5_1 {
  static constexpr int kBits = 5, kScales = 1, kZero = 0, kBytes = 24, kParts = 1;
  static constexpr bool kMinimums = true;
  static HEADRACE_INLINE void read(const uint8_t* from, int, OwnBlock& to) {
    to.scales[0] = half_at(from);
    to.minimum = half_at(from + 2);
    to.words[4] = spread_bits(word_at(from + 4));
    __builtin_memcpy(to.words, from + 8, 16);
  }
};

// From -128 to 127, here from 0 on.
struct Q8_0 {
  static constexpr int kBits = 8, kScales = 1, kZero = 128, kBytes = 34, kParts = 1;
  static constexpr bool kMinimums = false;
  static HEADRACE_INLINE void read(const uint8_t* from, int, OwnBlock& to) {
    to.scales[0] = half_at(from);
    for (int w = 0; w < 8; w++) to.words[w] = word_at(from + 2 + 4 * w) ^ 0x80808080u;
  }
};

// The scale and the minimum of a part, in 6 bits each, of 12 bytes that Q4_K and Q5_K have for 8
// parts: the last four's have their highest two bits with the first four's.
HEADRACE_INLINE void read_scale(const uint8_t* block, int part, OwnBlock& to) {
  const uint8_t* bytes = block + 4;
  int scale, minimum;
  if (part < 4) {
    scale = bytes[part] & 63;
    minimum = bytes[part + 4] & 63;
  } else {
    scale = (bytes[part + 4] & 15) | (bytes[part - 4] >> 6) << 4;
    minimum = bytes[part + 4] >> 4 | (bytes[part] >> 6) << 4;
  }
  to.scales[0] = to_half(from_half(half_at(block)) * float(scale));
  to.minimum = to_half(-from_half(half_at(block + 2)) * float(minimum));
}

// The four bits of a part's 32 inputs, which lie below or above in 32 bytes.
HEADRACE_INLINE void read_nibbles(const uint8_t* bytes, bool above, OwnBlock& to) {
  const int shift = above ? 4 : 0;
  for (int w = 0; w < 4; w++)
    to.words[w] = (word_at(bytes + 4 * w) >> shift & 0x0f0f0f0fu) |
                  (word_at(bytes + 16 + 4 * w) >> shift & 0x0f0f0f0fu) << 4;
}

struct Q4K {
  static constexpr int kBits = 4, kScales = 1, kZero = 0, kBytes = 144, kParts = 8;
  static constexpr bool kMinimums = true;
  static HEADRACE_INLINE void read(const uint8_t* from, int part, OwnBlock& to) {
    read_scale(from, part, to);
    read_nibbles(from + 16 + part / 2 * 32, part % 2, to);
  }
};

struct Q5K {
  static constexpr int kBits = 5, kScales = 1, kZero = 0, kBytes = 176, kParts = 8;
  static constexpr bool kMinimums = true;
  static HEADRACE_INLINE void read(const uint8_t* from, int part, OwnBlock& to) {
    read_scale(from, part, to);
    read_nibbles(from + 48 + part / 2 * 32, part % 2, to);
    // A byte has an input's bit of each part.
    uint32_t high = 0;
    for (int w = 0; w < 8; w++)
      high |= (word_at(from + 16 + 4 * w) >> part & 0x01010101u) << w;
    to.words[4] = high;
  }
};

struct Q6K {
  static constexpr int kBits = 6, kScales = 2, kZero = 32, kBytes = 210, kParts = 8;
  static constexpr bool kMinimums = false;
  static HEADRACE_INLINE void read(const uint8_t* from, int part, OwnBlock& to) {
    const int half = part / 4, own = part % 4;
    read_nibbles(from + half * 64 + own % 2 * 32, own / 2, to);
    for (int h = 0; h < 2; h++) {
      uint32_t high = 0;
      for (int w = 0; w < 4; w++) {
        const uint32_t bits = word_at(from + 128 + half * 32 + h * 16 + 4 * w);
        high |= (bits >> (2 * own) & 0x03030303u) << (2 * w);
      }
      to.words[4 + h] = high;
      const int scale = static_cast<int8_t>(from[192 + 2 * part + h]);
      to.scales[h] = to_half(from_half(half_at(from + 208)) * float(scale));
    }
  }
};

template <typename Kind>
void pack_kind(const PackArgs& args) {
  constexpr WeightForm form{Kind::kBits, Kind::kScales, Kind::kMinimums, Kind::kZero};
  const int64_t bytes = bytes_of_block(form), panel = bytes_of_panel(form, args.ins);
  // Neighbours write to the same lines of memory: a thread takes many of them.
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < args.rows; row++) {
    const uint8_t* from = static_cast<const uint8_t*>(args.from) + row * args.row_bytes;
    const int64_t out = args.outs[row], lane = out % kLanes;
    char* to = static_cast<char*>(args.packed) + out / kLanes * panel + args.to_block * bytes;
    for (int64_t b = 0; b < args.blocks; b++, to += bytes) {
      const int64_t at = args.first_block + b;
      OwnBlock block;
      Kind::read(from + at / Kind::kParts * Kind::kBytes, int(at % Kind::kParts), block);
      for (int w = 0; w < Kind::kBits; w++)
        __builtin_memcpy(to + (w * kLanes + lane) * 4, block.words + w, 4);
      char* halves = to + kLanes * 4 * Kind::kBits + lane * 2;
      for (int s = 0; s < Kind::kScales; s++)
        __builtin_memcpy(halves + s * kLanes * 2, block.scales + s, 2);
      if (Kind::kMinimums)
        __builtin_memcpy(halves + Kind::kScales * kLanes * 2, &block.minimum, 2);
    }
  }
}

inline void pack_quantized(const PackArgs& args) {
  switch (args.kind) {
    case StoredKind::kQ4_0: return pack_kind<Q4_0>(args);
    case StoredKind::kQ4_1: return pack_kind<Q4_1>(args);
    case StoredKind::kQ5_0: return pack_kind<Q5_0>(args);
    case StoredKind::kQ5_1: return pack_kind<Q5_1>(args);
    case StoredKind::kQ8_0: return pack_kind<Q8_0>(args);
    case StoredKind::kQ4K: return pack_kind<Q4K>(args);
    case StoredKind::kQ5K: return pack_kind<Q5K>(args);
    case StoredKind::kQ6K: return pack_kind<Q6K>(args);
  }
}

}  // namespace
