// What each path offers: plain functions on pointers, gathered in a table.
#pragma once

#include <stdint.h>

// Element types of activations and of what has the same type as they, and of caches.
enum class Type : int { kFloat32 = 0, kBfloat16 = 1 };

// How a packed weight holds its numbers.
enum class WeightKind : int { kFloat32 = 0, kBfloat16 = 1 };

// out [rows, width] = rows of the table [vocab, width] at the ids, times scale.
struct EmbedArgs {
  const void* table;
  const int64_t* ids;
  void* out;
  int64_t rows, width;
  float scale;
  Type type;
  // The id of the table's first row, and how many rows it has: others' are zeros.
  int64_t first, held;
};

// y [rows, outs] = x [rows, ins] W^T + bias [outs] or none, W packed by pack(). type: of x, y and
// bias. There are kernels for kinds that hold the numbers as x does.
struct LinearArgs {
  const void* x;
  const void* packed;
  const void* bias;
  void* y;
  int64_t rows, ins, outs;
  Type type;
  WeightKind weights;
};

// How the numbers of a quantized weight lie in memory: see quantized_form.hpp. bits: 4, 5, 6 or 8 of
// each number q; scales: of a block of 32 inputs, 1 or 2. A weight is q * scale + minimum where there
// are minimums, else (q - zero) * scale.
struct WeightForm {
  int bits, scales;
  bool minimums;
  int zero;
};

// As LinearArgs, with W packed by pack_quantized(); ins is a multiple of 32. type: of x, y and bias.
// y_stride: elements from a row of y to the next, which has room for other products' outputs.
struct QuantizedArgs {
  const void* x;
  const void* packed;
  const void* bias;
  void* y;
  int64_t rows, ins, outs, y_stride;
  WeightForm form;
  Type type;
};

// As EmbedArgs, with the table packed by pack_quantized().
struct QuantizedEmbedArgs {
  const void* packed;
  const int64_t* ids;
  void* out;
  int64_t rows, width;
  float scale;
  Type type;
  int64_t first, held;
  WeightForm form;
};

// How GGUF files hold quantized numbers.
enum class StoredKind : int { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4K, kQ5K, kQ6K };

// Rows of a file, each `row_bytes` long, to a packed weight of `ins` inputs: of row i the blocks of
// 32 inputs from first_block on, `blocks` of them, to output outs[i], from its block to_block on.
struct PackArgs {
  StoredKind kind;
  const void* from;
  int64_t rows, row_bytes;
  const int64_t* outs;
  int64_t first_block, blocks, to_block;
  void* packed;
  int64_t ins;
};

// out = x / rms(x) * weight by rows; if delta is given x += delta first, in place. rounds_once: the
// quotient is not rounded to the type before the weight multiplies it.
struct NormArgs {
  void* x;
  const void* delta;
  const void* weight;
  void* out;
  int64_t rows, width;
  float epsilon;
  bool rounds_once;
  Type type;
};

// The norm of each head of x [rows, heads, width], rows `stride` apart, in place.
struct HeadNormArgs {
  void* x;
  const void* weight;
  int64_t rows, stride, heads, width;
  float epsilon;
  Type type;
};

// kClampedSwiglu: see gate() in elementwise.hpp.
enum class Activation : int { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2 };

// out [rows, width] = activation(gate) * up of x [rows, 2 width], gate first.
struct GateArgs {
  const void* x;
  void* out;
  int64_t rows, width;
  Activation activation;
  Type type;
};

// x += delta, elementwise.
struct AddArgs {
  void* x;
  const void* delta;
  int64_t count;
  Type type;
};

// x += sigmoid(gate) * delta; x, delta [rows, width], gate [rows].
struct GatedAddArgs {
  void* x;
  const void* delta;
  const void* gate;
  int64_t rows, width;
  Type type;
};

// x *= factor, elementwise.
struct ScaleArgs {
  void* x;
  int64_t count;
  float factor;
  Type type;
};

// Scores [rows, experts] become weights: of a row's `chosen` highest, of equal ones the first, their
// part of a softmax over these (normalized) or over all, of the others 0.
struct RouteArgs {
  void* scores;
  int64_t rows, experts, chosen;
  bool normalized;
  Type type;
};

// Row r of out [rows, width] = the sum of factors[i] times row places[i] of x, for i from starts[r]
// up to starts[r + 1], in float32.
struct CombineArgs {
  const void* x;
  const int64_t* starts;
  const int64_t* places;
  const float* factors;
  void* out;
  int64_t rows, width;
  Type type;
};

// x = cap * tanh(x / cap), elementwise.
struct SoftCapArgs {
  void* x;
  int64_t count;
  float cap;
  Type type;
};

// A paged cache of one layer. Keys of a block and head are
// [head_dim / pair][block_rows][pair], values [block_rows / pair][head_dim][pair]: pair is 2 for
// bfloat16 and 1 for float32, block_rows is block_size rounded up to a multiple of 16.
// There are kernels for caches of the activations' type.
struct CacheShape {
  int64_t block_size, block_rows, kv_heads, head_dim;
  Type type;
};

// qkv [tokens, heads + 2 kv_heads, head_dim]: queries are rotated in place, rotated keys and values
// go to the cache. cos, sin: float32 [positions, head_dim / 2], or none: then as they are.
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
// sinks: float32 [heads] or none. soft_cap: of scores, 0 for none.
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
  float scale, soft_cap;
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

// out [count] = the sum of parts [count], in their order, each so many bytes behind the one before.
struct SumArgs {
  const void* parts;
  int64_t stride, shards;
  void* out;
  int64_t count;
  Type type;
};

// multiplies_bfloat16: whether linear() has arithmetic for it, and need not convert it first.
struct Kernels {
  const char* name;
  bool multiplies_bfloat16;
  int64_t (*packed_size)(int64_t outs, int64_t ins, WeightKind weights);
  void (*pack)(const void* weight, void* packed, int64_t outs, int64_t ins, WeightKind weights);
  void (*embed)(const EmbedArgs&);
  void (*linear)(const LinearArgs&);
  int64_t (*quantized_size)(const WeightForm&, int64_t outs, int64_t ins);
  void (*pack_quantized)(const PackArgs&);
  void (*quantized)(const QuantizedArgs&);
  void (*embed_quantized)(const QuantizedEmbedArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*head_norm)(const HeadNormArgs&);
  void (*rotate_and_write)(const RotateArgs&);
  void (*attention)(const AttentionArgs&);
  void (*gate)(const GateArgs&);
  void (*add)(const AddArgs&);
  void (*sum)(const SumArgs&);
  void (*gated_add)(const GatedAddArgs&);
  void (*scale)(const ScaleArgs&);
  void (*route)(const RouteArgs&);
  void (*combine)(const CombineArgs&);
  void (*soft_cap)(const SoftCapArgs&);
  void (*choose)(const ChooseArgs&);
};

extern const Kernels kPortable;
#ifdef HEADRACE_X86
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif
#ifdef HEADRACE_HAS_DOT
extern const Kernels kAvx512Bf16;
#endif
#ifdef HEADRACE_HAS_AMX
extern const Kernels kAmx;
#endif
