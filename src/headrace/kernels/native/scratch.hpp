// Memory for what a kernel needs in between; it stays with the thread and grows when needed.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

namespace {

struct Scratch {
  void* memory = nullptr;
  int64_t bytes = 0;
  ~Scratch() { free(memory); }
};

// Room for count elements, until this thread asks again for the same slot. Contents are undefined.
template <typename T, int Slot = 0>
inline T* scratch(int64_t count) {
  static thread_local Scratch own;
  const int64_t bytes = (count * int64_t(sizeof(T)) + 63) / 64 * 64;
  if (bytes > own.bytes) {
    free(own.memory);
    own.memory = aligned_alloc(64, bytes);
    own.bytes = own.memory ? bytes : 0;
    if (!own.memory) {
      fputs("not enough memory for what a kernel needs in between\n", stderr);
      abort();
    }
  }
  return static_cast<T*>(own.memory);
}

}  // namespace
