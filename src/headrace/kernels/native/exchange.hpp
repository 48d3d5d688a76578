// Sums over the shards of a stage, through memory that those of a host share. What shards on other
// hosts have comes into it as if they were here (pipeline/shard_lines.py).
//
// A round: each shard copies its part into the memory, says so, waits until all have said so, and
// reads what it needs of all. There are two rooms that rounds take in turn: nobody can be two rounds
// ahead of another, who says that a round's part is there only when done with the round before. So a
// room is free again when its turn comes, and there is one wait a round.
//
// The sum is taken in the shards' order, in float32, by each of them: its bits are the same for all.
#pragma once

#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>

#include "kernels.hpp"

// Of a shard's part of a round, in its room: bytes, and whether the first shard alone reads it.
struct Part {
  uint32_t bytes, for_first;
};

// How far a shard is: rounds whose part is in the memory, and whether somebody sleeps until the next.
struct alignas(64) ShardState {
  std::atomic<uint32_t> rounds;
  std::atomic<uint32_t> sleepers;
  Part parts[2];
};

class Exchange {
 public:
  // Bytes of a shard's part of a round, at most.
  static constexpr int64_t kRoom = 512 * 1024;

  static int64_t memory_size(int shards) { return shards * (sizeof(ShardState) + 2 * kRoom); }

  // memory: of memory_size() bytes, zeros when the first shard joins. spin_s: for how long to look
  // at the memory before sleeping. check(shard, seconds): called now and then while one is waited
  // for; may throw.
  void join(void* memory, int shard, int shards, double spin_s,
            std::function<void(int, double)> check) {
    states_ = static_cast<ShardState*>(memory);
    rooms_ = static_cast<char*>(memory) + shards * sizeof(ShardState);
    shard_ = shard, shards_ = shards, spin_s_ = spin_s, check_ = std::move(check);
    round_ = 0;
  }

  void leave() {
    states_ = nullptr;
    check_ = nullptr;
  }

  // x = the sum of all shards' x.
  void all_reduce(const Kernels& kernels, void* x, int64_t count, Type type) {
    const int64_t size = type == Type::kBfloat16 ? 2 : 4, most = kRoom / size;
    for (int64_t first = 0; first < count; first += most) {
      const int64_t some = std::min(most, count - first);
      char* own = static_cast<char*>(x) + first * size;
      memcpy(room(shard_, round_), own, some * size);
      meet({uint32_t(some * size), false});
      kernels.sum({room(0, round_), 2 * kRoom, shards_, own, some, type});
      round_++;
    }
  }

  // On the first shard, or on all: out [rows, of the widths' sum] = all shards' parts [rows, width],
  // side by side.
  void gather(const void* part, void* out, int64_t rows, const int64_t* widths, int64_t size,
              bool on_all) {
    int64_t widest = 0, all = 0;
    for (int shard = 0; shard < shards_; shard++) {
      widest = std::max(widest, widths[shard]);
      all += widths[shard];
    }
    // Of a row, so many columns at a time; of narrow ones, several rows.
    const int64_t columns = std::min(widest, kRoom / size), own_width = widths[shard_];
    const int64_t most = std::max<int64_t>(1, kRoom / (columns * size));
    for (int64_t row = 0; row < rows; row += most)
      for (int64_t column = 0; column < widest; column += columns) {
        const int64_t some = std::min(most, rows - row);
        copy(room(shard_, round_), columns * size,
             static_cast<const char*>(part) + (row * own_width + column) * size, own_width * size,
             some, std::min(columns, own_width - column) * size);
        meet({uint32_t(some * columns * size), !on_all});
        if (on_all || shard_ == 0) {
          int64_t before = 0;
          for (int shard = 0; shard < shards_; shard++) {
            copy(static_cast<char*>(out) + (row * all + before + column) * size, all * size,
                 room(shard, round_), columns * size, some,
                 std::min(columns, widths[shard] - column) * size);
            before += widths[shard];
          }
        }
        round_++;
      }
  }

  char* room(int shard, uint32_t round) const {
    return rooms_ + (shard * 2 + (round & 1)) * kRoom;
  }

  // The own part of a round, if it is there or comes within so many nanoseconds of less than a
  // second; until the round after the next, which waits for those that this is meant for.
  const Part* own_part(uint32_t round, long nanoseconds) {
    ShardState& own = states_[shard_];
    if (!is_there(shard_, round)) {
      const timespec nap{0, nanoseconds};
      own.sleepers.store(1, std::memory_order_seq_cst);
      const uint32_t seen = own.rounds.load(std::memory_order_seq_cst);
      if (!is_there(shard_, round)) futex(own.rounds, FUTEX_WAIT, seen, &nap);
    }
    return is_there(shard_, round) ? &own.parts[round & 1] : nullptr;
  }

  // Another's part of a round is in its room now.
  void has_come(int shard, uint32_t round) { say(states_[shard], round); }

 private:
  static void copy(char* to, int64_t to_stride, const char* from, int64_t from_stride,
                   int64_t rows, int64_t bytes) {
    if (bytes <= 0) return;
    for (int64_t row = 0; row < rows; row++)
      memcpy(to + row * to_stride, from + row * from_stride, bytes);
  }

  // Say that the own part is there, and wait for the others'.
  void meet(Part part) {
    states_[shard_].parts[round_ & 1] = part;
    say(states_[shard_], round_);
    for (int shard = 0; shard < shards_; shard++)
      if (!is_there(shard, round_)) wait(shard);
  }

  static void say(ShardState& state, uint32_t round) {
    // In one order with what a sleeper does: it either sees this, or is seen here.
    state.rounds.store(round + 1, std::memory_order_seq_cst);
    if (state.sleepers.load(std::memory_order_seq_cst)) {
      state.sleepers.store(0, std::memory_order_relaxed);
      futex(state.rounds, FUTEX_WAKE, INT32_MAX, nullptr);
    }
  }

  bool is_there(int shard, uint32_t round) const {
    return int32_t(states_[shard].rounds.load(std::memory_order_acquire) - (round + 1)) >= 0;
  }

  void wait(int shard) {
    using Clock = std::chrono::steady_clock;
    const auto began = Clock::now();
    const auto waited = [&] {
      return std::chrono::duration<double>(Clock::now() - began).count();
    };
    do
      for (int look = 0; look < 64; look++) {
        if (is_there(shard, round_)) return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
    while (waited() < spin_s_);
    const timespec nap{0, 50'000'000};
    ShardState& state = states_[shard];
    while (!is_there(shard, round_)) {
      state.sleepers.store(1, std::memory_order_seq_cst);
      const uint32_t seen = state.rounds.load(std::memory_order_seq_cst);
      if (is_there(shard, round_)) return;
      futex(state.rounds, FUTEX_WAIT, seen, &nap);
      if (!is_there(shard, round_) && check_) check_(shard, waited());
    }
  }

  // Between processes, so not the private kind.
  static void futex(std::atomic<uint32_t>& at, int what, uint32_t value, const timespec* nap) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&at), what, value, nap, nullptr, 0);
  }

  ShardState* states_ = nullptr;
  char* rooms_ = nullptr;
  int shard_ = 0, shards_ = 0;
  uint32_t round_ = 0;
  double spin_s_ = 0;
  std::function<void(int, double)> check_;
};
