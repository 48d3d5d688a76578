// The small operations between matrix products; each row is worked on alone.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace {

// Elements below which a second thread costs more than it takes over.
constexpr int64_t kWorthThreads = 16 * 1024;

template <typename T>
void rms_norm_row(T* x, const T* delta, const T* weight, T* out, int64_t width, float epsilon,
                  bool rounds_once) {
  F32 squares = {};
  float rest = 0;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    F32 v = load(x + i);
    if (delta) {
      v = round_to<T>(v + load(delta + i));
      store(x + i, v);
    }
    squares += v * v;
  }
  for (; i < width; i++) {
    float v = widen(x[i]);
    if (delta) {
      x[i] = narrow<T>(v + widen(delta[i]));
      v = widen(x[i]);
    }
    rest += v * v;
  }
  const float factor = 1.0f / __builtin_sqrtf((sum(squares) + rest) / width + epsilon);
  if (rounds_once) {
    for (i = 0; i + kLanes <= width; i += kLanes)
      store(out + i, load(weight + i) * (load(x + i) * factor));
    for (; i < width; i++) out[i] = narrow<T>(widen(weight[i]) * (widen(x[i]) * factor));
    return;
  }
  for (i = 0; i + kLanes <= width; i += kLanes)
    store(out + i, load(weight + i) * round_to<T>(load(x + i) * factor));
  for (; i < width; i++)
    out[i] = narrow<T>(widen(weight[i]) * widen(narrow<T>(widen(x[i]) * factor)));
}

template <typename T>
void rms_norm(const NormArgs& args) {
  T* x = static_cast<T*>(args.x);
  T* out = static_cast<T*>(args.out);
  const T* delta = static_cast<const T*>(args.delta);
  const T* weight = static_cast<const T*>(args.weight);
  const int64_t width = args.width;
#pragma omp parallel for if (args.rows * width > kWorthThreads)
  for (int64_t row = 0; row < args.rows; row++)
    rms_norm_row(x + row * width, delta ? delta + row * width : nullptr, weight,
                 out + row * width, width, args.epsilon, args.rounds_once);
}

template <typename T>
void head_norm(const HeadNormArgs& args) {
  const T* weight = static_cast<const T*>(args.weight);
  const int64_t width = args.width;
#pragma omp parallel for if (args.rows * args.heads * width > kWorthThreads)
  for (int64_t row = 0; row < args.rows; row++)
    for (int64_t head = 0; head < args.heads; head++) {
      T* x = static_cast<T*>(args.x) + row * args.stride + head * width;
      rms_norm_row<T>(x, nullptr, weight, x, width, args.epsilon, false);
    }
}

// y[i] = f(x[i]) for count elements.
template <typename T, typename F>
HEADRACE_INLINE void apply(const T* x, T* y, int64_t count, F f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(y + i, f(load(x + i)));
  if (i == count) return;
  F32 rest = {};
  for (int64_t k = i; k < count; k++) rest[k - i] = widen(x[k]);
  rest = f(rest);
  for (int64_t k = i; k < count; k++) y[k] = narrow<T>(rest[k - i]);
}

template <typename T>
void add(const AddArgs& args) {
  T* x = static_cast<T*>(args.x);
  const T* delta = static_cast<const T*>(args.delta);
  int64_t i = 0;
  for (; i + kLanes <= args.count; i += kLanes) store(x + i, load(x + i) + load(delta + i));
  for (; i < args.count; i++) x[i] = narrow<T>(widen(x[i]) + widen(delta[i]));
}

template <typename T>
void sum(const SumArgs& args) {
  const int64_t count = args.count, shards = args.shards, stride = args.stride / sizeof(T);
  const T* parts = static_cast<const T*>(args.parts);
  T* out = static_cast<T*>(args.out);
#pragma omp parallel for if (count > kWorthThreads)
  for (int64_t first = 0; first < count; first += kLanes) {
    const T* part = parts + first;
    if (first + kLanes <= count) {
      F32 all = load(part);
      for (int64_t shard = 1; shard < shards; shard++) all += load(part + shard * stride);
      store(out + first, all);
    } else {
      for (int64_t i = first; i < count; i++) {
        float all = widen(parts[i]);
        for (int64_t shard = 1; shard < shards; shard++) all += widen(parts[i + shard * stride]);
        out[i] = narrow<T>(all);
      }
    }
  }
}

template <typename T>
void scale(const ScaleArgs& args) {
  T* x = static_cast<T*>(args.x);
  const float factor = args.factor;
  apply(x, x, args.count,
        [factor](F32 v) __attribute__((always_inline)) { return v * factor; });
}

template <typename T>
void soft_cap(const SoftCapArgs& args) {
  T* x = static_cast<T*>(args.x);
  const float cap = args.cap;
  constexpr int64_t kPiece = 4096;
#pragma omp parallel for if (args.count > kWorthThreads)
  for (int64_t at = 0; at < args.count; at += kPiece)
    apply(x + at, x + at, smaller(kPiece, args.count - at),
          [cap](F32 v) __attribute__((always_inline)) { return cap * hyperbolic_tangent(v / cap); });
}

HEADRACE_INLINE F32 sigmoid(F32 x) { return 1.0f / (1.0f + exponential(-x)); }

// x / 2 (1 + tanh(u)) is x sigmoid(2 u), with nothing lost where tanh is near -1.
HEADRACE_INLINE F32 gelu_tanh(F32 x) {
  const float two_root = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  return x * sigmoid(two_root * (x + 0.044715f * x * x * x));
}

template <typename T>
void gated_add(const GatedAddArgs& args) {
  const int64_t width = args.width;
#pragma omp parallel for if (args.rows * width > kWorthThreads)
  for (int64_t row = 0; row < args.rows; row++) {
    T* x = static_cast<T*>(args.x) + row * width;
    const T* delta = static_cast<const T*>(args.delta) + row * width;
    const float gate = sigmoid(broadcast(widen(static_cast<const T*>(args.gate)[row])))[0];
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) store(x + i, load(x + i) + gate * load(delta + i));
    for (; i < width; i++) x[i] = narrow<T>(widen(x[i]) + gate * widen(delta[i]));
  }
}

struct Identity {
  HEADRACE_INLINE F32 operator()(F32 x) const { return x; }
};

// of_up: what becomes of up before the gate multiplies it.
template <typename T, typename F, typename G = Identity>
HEADRACE_INLINE void gate_rows(const GateArgs& args, F activate, G of_up = G()) {
  const int64_t width = args.width;
#pragma omp parallel for if (args.rows * width > kWorthThreads)
  for (int64_t row = 0; row < args.rows; row++) {
    const T* gate = static_cast<const T*>(args.x) + 2 * row * width;
    const T* up = gate + width;
    T* to = static_cast<T*>(args.out) + row * width;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes)
      store(to + i, round_to<T>(activate(load(gate + i))) * of_up(load(up + i)));
    if (i < width) {
      F32 g = {}, u = {};
      for (int64_t k = i; k < width; k++) g[k - i] = widen(gate[k]), u[k - i] = widen(up[k]);
      const F32 y = round_to<T>(activate(g)) * of_up(u);
      for (int64_t k = i; k < width; k++) to[k] = narrow<T>(y[k - i]);
    }
  }
}

template <typename T>
void gate(const GateArgs& args) {
  if (args.activation == Activation::kSilu)
    gate_rows<T>(args, [](F32 g) __attribute__((always_inline)) {
      return g / (1.0f + exponential(-g));
    });
  else if (args.activation == Activation::kGeluTanh)
    gate_rows<T>(args, [](F32 g) __attribute__((always_inline)) { return gelu_tanh(g); });
  else
    // GPT-OSS's experts: the gate is at most 7, up within 7 of 0.
    gate_rows<T>(
        args,
        [](F32 g) __attribute__((always_inline)) {
          const F32 low = g > 7.0f ? broadcast(7.0f) : g;
          return low * sigmoid(1.702f * low);
        },
        [](F32 u) __attribute__((always_inline)) {
          const F32 low = u > 7.0f ? broadcast(7.0f) : u;
          return (low < -7.0f ? broadcast(-7.0f) : low) + 1.0f;
        });
}

template <typename T>
HEADRACE_INLINE void rotate_pair(const T* first, const T* second, const float* cos,
                                 const float* sin, int64_t i, float& low, float& high) {
  const float a = widen(first[i]), b = widen(second[i]);
  low = a * cos[i] - b * sin[i];
  high = b * cos[i] + a * sin[i];
}

template <typename T>
void rotate_head(T* head, int64_t half, const float* cos, const float* sin) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F32 a = load(head + i), b = load(head + half + i);
    const F32 c = load(cos + i), s = load(sin + i);
    store(head + i, a * c - b * s);
    store(head + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    float low, high;
    rotate_pair(head, head + half, cos, sin, i, low, high);
    head[i] = narrow<T>(low);
    head[half + i] = narrow<T>(high);
  }
}

// Where element d of the key at `offset` of a block lies, and of the value.
template <typename T>
HEADRACE_INLINE int64_t key_place(const CacheShape& shape, int64_t offset, int64_t d) {
  return (d / kPair<T> * shape.block_rows + offset) * kPair<T> + d % kPair<T>;
}
template <typename T>
HEADRACE_INLINE int64_t value_place(const CacheShape& shape, int64_t offset, int64_t d) {
  return (offset / kPair<T> * shape.head_dim + d) * kPair<T> + offset % kPair<T>;
}

template <typename T>
void rotate_and_write(const RotateArgs& args) {
  const CacheShape& shape = args.cache;
  const int64_t dim = shape.head_dim, half = dim / 2;
  const int64_t per_head = shape.block_rows * dim;
  const int64_t stride = (args.heads + 2 * shape.kv_heads) * dim;
#pragma omp parallel for if (args.tokens * stride > kWorthThreads)
  for (int64_t token = 0; token < args.tokens; token++) {
    T* row = static_cast<T*>(args.qkv) + token * stride;
    if (args.cos) {
      const float* cos = args.cos + args.positions[token] * half;
      const float* sin = args.sin + args.positions[token] * half;
      for (int64_t h = 0; h < args.heads + shape.kv_heads; h++)
        rotate_head(row + h * dim, half, cos, sin);
    }
    const int64_t block = args.cache_index[token] / shape.block_size;
    const int64_t offset = args.cache_index[token] % shape.block_size;
    for (int64_t h = 0; h < shape.kv_heads; h++) {
      const T* key = row + (args.heads + h) * dim;
      const T* value = key + shape.kv_heads * dim;
      T* keys = static_cast<T*>(args.keys) + (block * shape.kv_heads + h) * per_head;
      T* values = static_cast<T*>(args.values) + (block * shape.kv_heads + h) * per_head;
      for (int64_t d = 0; d < dim; d++) {
        keys[key_place<T>(shape, offset, d)] = key[d];
        values[value_place<T>(shape, offset, d)] = value[d];
      }
    }
  }
}

template <typename T>
void embed(const EmbedArgs& args) {
  const int64_t width = args.width;
  // As a number of the table's type.
  const float scale = widen(narrow<T>(args.scale));
  for (int64_t row = 0; row < args.rows; row++) {
    const int64_t held = args.ids[row] - args.first;
    T* to = static_cast<T*>(args.out) + row * width;
    if (held < 0 || held >= args.held) {
      __builtin_memset(to, 0, width * sizeof(T));
      continue;
    }
    const T* from = static_cast<const T*>(args.table) + held * width;
    if (scale == 1.0f)
      __builtin_memcpy(to, from, width * sizeof(T));
    else
      apply(from, to, width, [scale](F32 v) __attribute__((always_inline)) { return v * scale; });
  }
}

}  // namespace
