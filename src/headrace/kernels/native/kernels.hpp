// What each path offers: plain functions on pointers, gathered in a table.
#pragma once

#include <stdint.h>

// Element types of activations, weights and caches.
enum class Type : int { kFloat32 = 0, kBfloat16 = 1 };

// y [rows, outs] = x [rows, ins] W^T + bias [outs] or none, W packed by pack().
struct LinearArgs {
  const void* x;
  const void* packed;
  const void* bias;
  void* y;
  int64_t rows, ins, outs;
  Type type;
};

// out = x / rms(x) * weight by rows; if delta is given x += delta first, in place.
struct NormArgs {
  void* x;
  const void* delta;
  const void* weight;
  void* out;
  int64_t rows, width;
  float epsilon;
  Type type;
};

// The shape of a paged cache, all layers the same. Keys of a block and head are
// [head_dim / pair][block_rows][pair], values [block_rows / pair][head_dim][pair]: pair is 2 for
// bfloat16 and 1 for float32, block_rows is block_size rounded up to a multiple of 16.
struct CacheShape {
  int64_t block_size, block_rows, kv_heads, head_dim;
};

// qkv [tokens, heads + 2 kv_heads, head_dim]: queries are rotated in place, rotated keys and values
// go to the cache. cos, sin: float32 [positions, head_dim / 2].
struct RotateArgs {
  void* qkv;
  const float* cos;
  const float* sin;
  const int64_t* positions;
  const int64_t* cache_index;
  void* keys;
  void* values;
  int64_t tokens, heads;
  CacheShape cache;
  Type type;
};

// Causal attention of tokens over their rows' blocks; q [tokens, heads, head_dim] with a stride
// between tokens, out dense. block_tables: [rows, table_width]. window: 0 for none.
// sinks: float32 [heads] or none.
struct AttentionArgs {
  const void* q;
  int64_t q_stride;
  const void* keys;
  const void* values;
  const int64_t* block_tables;
  int64_t table_width;
  const int64_t* query_starts;
  const int64_t* context_lens;
  const float* sinks;
  void* out;
  int64_t rows, heads, window;
  float scale;
  CacheShape cache;
  Type type;
};

// How one row's token is chosen; kernels/sampling.py has the same record.
struct Choice {
  uint64_t seed, index;
  int64_t row, top_k;
  double top_p;
  float temperature, min_p;
};

static_assert(sizeof(Choice) == 48, "the record of kernels/sampling.py");

// tokens [count], each from the logits at its choice's row; rows are `stride` apart.
struct ChooseArgs {
  const void* logits;
  int64_t stride, width;
  const Choice* choices;
  int64_t count;
  int64_t* tokens;
  Type type;
};

struct Kernels {
  const char* name;
  int panel;
  void (*pack)(const void* weight, void* packed, int64_t outs, int64_t ins, Type type);
  void (*linear)(const LinearArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*rotate_and_write)(const RotateArgs&);
  void (*attention)(const AttentionArgs&);
  // x += delta, elementwise.
  void (*add)(void* x, const void* delta, int64_t count, Type type);
  void (*silu_and_multiply)(const void* x, void* out, int64_t rows, int64_t width, Type type);
  void (*gather)(const void* table, const int64_t* ids, void* out, int64_t rows,
                 int64_t row_bytes);
  void (*choose)(const ChooseArgs&);
};

extern const Kernels kPortable;
#ifdef HEADRACE_X86
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif
