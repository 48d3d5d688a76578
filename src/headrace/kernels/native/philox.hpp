// Philox4x64-10 (Salmon, Moraes, Dror, Shaw 2011): random bits that follow from a seed, a token's
// index and the place in the vocabulary alone.
//
// The stream is that of numpy.random.Philox(key=seed, counter=[0, index, 0, 0]).random_raw(), the
// lower half of each number before the upper. Plain 64-bit code is as fast as vectors here: those
// have no 64-bit multiplication with its whole result.
#pragma once

#include <stdint.h>

#include "simd.hpp"

namespace {

constexpr int64_t kBlockTokens = 8;

class Philox {
 public:
  Philox(uint64_t seed, uint64_t index) : index_(index) {
    for (int round = 0; round < kRounds; round++) {
      keys_[round][0] = seed + round * 0x9E3779B97F4A7C15u;
      keys_[round][1] = round * 0xBB67AE8584CAA73Bu;
    }
  }

  // The bits of kBlockTokens neighbouring tokens, two in a number.
  HEADRACE_INLINE void block(int64_t number, uint64_t* out) const {
    // numpy counts up before it draws.
    uint64_t counter[4] = {uint64_t(number) + 1, index_, 0, 0};
#pragma GCC unroll 10
    for (int round = 0; round < kRounds; round++) {
      const auto first = static_cast<unsigned __int128>(counter[0]) * 0xD2E7470EE14C6C93u;
      const auto second = static_cast<unsigned __int128>(counter[2]) * 0xCA5A826395121157u;
      counter[0] = uint64_t(second >> 64) ^ counter[1] ^ keys_[round][0];
      counter[1] = uint64_t(second);
      counter[2] = uint64_t(first >> 64) ^ counter[3] ^ keys_[round][1];
      counter[3] = uint64_t(first);
    }
    for (int i = 0; i < 4; i++) out[i] = counter[i];
  }

  // The bits of neighbouring blocks.
  __attribute__((noinline)) void blocks(int64_t first, int64_t count, uint64_t* out) const {
    for (int64_t i = 0; i < count; i++) block(first + i, out + 4 * i);
  }

 private:
  static constexpr int kRounds = 10;
  uint64_t index_, keys_[kRounds][2];
};

// One token's bits from its block's, or from those of neighbouring blocks.
HEADRACE_INLINE uint32_t bits_of(const uint64_t* numbers, int64_t token) {
  return uint32_t(numbers[token / 2] >> (token % 2 * 32));
}

// Exponential of mean 1. The bits are rounded to float32 before they are scaled; the largest would
// become 1 and the time infinite.
inline float waiting_time(uint32_t bits) {
  const float uniform = (float(bits) + 0.5f) * 0x1p-32f;
  return -__builtin_log1pf(-(uniform < 1 ? uniform : 1 - 0x1p-24f));
}

}  // namespace
