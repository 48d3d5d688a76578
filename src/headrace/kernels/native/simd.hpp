// Vectors of HEADRACE_LANES floats by the compiler's vector extensions: one source for every path.
//
// Everything here and in the headers that use it has internal linkage, and none of them includes a
// C++ standard header: a function compiled for one path must never be merged with, and so called
// by, another path's code on a CPU that lacks the instructions.
#pragma once

#include <stdint.h>

#ifdef HEADRACE_DOT
#include <immintrin.h>
#endif

#ifndef HEADRACE_LANES
#error "compile through path.cpp with HEADRACE_LANES set"
#endif

namespace {

constexpr int kLanes = HEADRACE_LANES;

typedef float F32 __attribute__((vector_size(kLanes * 4)));
typedef int32_t I32 __attribute__((vector_size(kLanes * 4)));
typedef uint32_t U32 __attribute__((vector_size(kLanes * 4)));
typedef uint16_t U16 __attribute__((vector_size(kLanes * 2)));
typedef F32 F32u __attribute__((aligned(4), may_alias));
typedef U32 U32u __attribute__((aligned(4), may_alias));
typedef U16 U16u __attribute__((aligned(2), may_alias));

// A bfloat16 as stored: the upper half of a float32.
struct Bf16 {
  uint16_t bits;
};

// Elements of T that lie together in packed operands (tile.hpp), so that one 32-bit word holds them.
template <typename T>
constexpr int kPair = 4 / sizeof(T);

#define HEADRACE_INLINE inline __attribute__((always_inline))

// As what a number of x is multiplied with one of a T: as it is where the path has arithmetic for it.
template <typename T>
struct Multiplied {
  using Type = float;
};
#ifdef HEADRACE_DOT
template <>
struct Multiplied<Bf16> {
  using Type = Bf16;
};
#endif
template <typename T>
using Left = typename Multiplied<T>::Type;

HEADRACE_INLINE F32 broadcast(float x) {
  return x - F32{};
}

HEADRACE_INLINE F32 load(const float* from) { return *reinterpret_cast<const F32u*>(from); }
HEADRACE_INLINE F32 load(const Bf16* from) {
  const U16 halves = *reinterpret_cast<const U16u*>(from);
  return (F32)(__builtin_convertvector(halves, U32) << 16);
}

// Rounded to nearest, ties to even; a NaN stays one.
HEADRACE_INLINE U16 to_bf16(F32 v) {
  const U32 bits = (U32)v;
  const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U32 is_nan = (U32)(v != v);
  return __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), U16);
}

HEADRACE_INLINE void store(float* to, F32 v) { *reinterpret_cast<F32u*>(to) = v; }
HEADRACE_INLINE void store(Bf16* to, F32 v) { *reinterpret_cast<U16u*>(to) = to_bf16(v); }

HEADRACE_INLINE float widen(float x) { return x; }
HEADRACE_INLINE float widen(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, 4);
  return wide;
}

template <typename T>
T narrow(float x);
template <>
HEADRACE_INLINE float narrow<float>(float x) {
  return x;
}
template <>
HEADRACE_INLINE Bf16 narrow<Bf16>(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (x != x) return Bf16{0x7fc0};
  return Bf16{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// What x becomes when it is stored as a T and read again.
template <typename T>
HEADRACE_INLINE F32 round_to(F32 v);
template <>
HEADRACE_INLINE F32 round_to<float>(F32 v) {
  return v;
}
template <>
HEADRACE_INLINE F32 round_to<Bf16>(F32 v) {
  return (F32)(__builtin_convertvector(to_bf16(v), U32) << 16);
}

// Part k of packed words: the elements k, k + 2, ... of bfloat16 pairs, or all of float32.
HEADRACE_INLINE F32 part(const float* words, int) { return load(words); }
HEADRACE_INLINE F32 part(const Bf16* words, int k) {
  const U32 pairs = *reinterpret_cast<const U32u*>(words);
  return (F32)(k == 0 ? pairs << 16 : pairs & 0xffff0000u);
}

#ifdef HEADRACE_DOT
// Two numbers side by side in all lanes; packed words as they are, and with the second numbers 0.
HEADRACE_INLINE __m512bh broadcast_pair(const Bf16* from) {
  int pair;
  __builtin_memcpy(&pair, from, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}
HEADRACE_INLINE __m512bh pairs(const Bf16* words) { return (__m512bh)_mm512_loadu_si512(words); }
HEADRACE_INLINE __m512bh first_of_pairs(const Bf16* words) {
  return (__m512bh)_mm512_and_si512(_mm512_loadu_si512(words), _mm512_set1_epi32(0xffff));
}

// acc + left[0] right[0] + left[1] right[1], rounded after each. Numbers below the normal ones count
// as 0 (Intel SDM, VDPBF16PS).
HEADRACE_INLINE F32 add_products(F32 acc, __m512bh left, __m512bh right) {
  return (F32)_mm512_dpbf16_ps((__m512)acc, left, right);
}
#endif

HEADRACE_INLINE F32 larger(F32 a, F32 b) { return a > b ? a : b; }
HEADRACE_INLINE float larger(float a, float b) { return a > b ? a : b; }
HEADRACE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Lane by lane from the first to the last: always the same order.
HEADRACE_INLINE float sum(F32 v) {
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
}

HEADRACE_INLINE float largest(F32 v) {
  float top = v[0];
  for (int i = 1; i < kLanes; i++) top = larger(top, v[i]);
  return top;
}

// e^x to about one unit in the last place; 0 below -87.3, where float32 has no normal numbers, and
// infinite above 88.3, near its largest.
//
// x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 is subtracted in two parts so that r is exact enough
// (Cody and Waite 1980); e^r by its Taylor polynomial of degree 7, whose rest is below 1e-8.
HEADRACE_INLINE F32 exponential(F32 x) {
  const F32 highest = broadcast(88.3f), lowest = broadcast(-87.3f);
  F32 bounded = x > highest ? highest : x;
  bounded = bounded < lowest ? lowest : bounded;
  // Adding and subtracting 1.5 * 2^23 rounds to a whole number.
  const float rounder = 12582912.0f;
  const F32 n = (bounded * 1.44269504088896341f + rounder) - rounder;
  F32 r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  F32 p = broadcast(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const I32 exponent = __builtin_convertvector(n, I32);
  const F32 power = (F32)((exponent + 127) << 23);
  const F32 result = p * power;
  const F32 grown = x > highest ? broadcast(__builtin_inff()) : result;
  return x < lowest ? F32{} : grown;
}

// tanh(x) to about one unit in the last place: by a polynomial near 0, else by e^2x (Cephes, tanhf.c).
HEADRACE_INLINE F32 hyperbolic_tangent(F32 x) {
  const F32 size = x < 0.0f ? -x : x;
  const F32 by_power = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
  const F32 far = x < 0.0f ? -by_power : by_power;
  const F32 square = x * x;
  F32 p = broadcast(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const F32 near = p * square * x + x;
  return size < 0.625f ? near : far;
}

}  // namespace
