// The small operations between matrix products; each row is worked on alone.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace {

// Elements below which a second thread costs more than it takes over.
constexpr int64_t kWorthThreads = 16 * 1024;

template <typename T>
void rms_norm_row(T* x, const T* delta, const T* weight, T* out, int64_t width, float epsilon) {
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
                 out + row * width, width, args.epsilon);
}

template <typename T>
void add(T* x, const T* delta, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(x + i, load(x + i) + load(delta + i));
  for (; i < count; i++) x[i] = narrow<T>(widen(x[i]) + widen(delta[i]));
}

template <typename T>
void silu_and_multiply_rows(const T* x, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > kWorthThreads)
  for (int64_t row = 0; row < rows; row++) {
    const T* gate = x + 2 * row * width;
    const T* up = gate + width;
    T* to = out + row * width;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      const F32 g = load(gate + i);
      store(to + i, round_to<T>(g / (1.0f + exponential(-g))) * load(up + i));
    }
    if (i < width) {
      F32 g = {}, u = {};
      for (int64_t k = i; k < width; k++) g[k - i] = widen(gate[k]), u[k - i] = widen(up[k]);
      const F32 y = round_to<T>(g / (1.0f + exponential(-g))) * u;
      for (int64_t k = i; k < width; k++) to[k] = narrow<T>(y[k - i]);
    }
  }
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
    const float* cos = args.cos + args.positions[token] * half;
    const float* sin = args.sin + args.positions[token] * half;
    for (int64_t h = 0; h < args.heads + shape.kv_heads; h++)
      rotate_head(row + h * dim, half, cos, sin);
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

inline void gather(const void* table, const int64_t* ids, void* out, int64_t rows,
                   int64_t row_bytes) {
  const char* from = static_cast<const char*>(table);
  char* to = static_cast<char*>(out);
  for (int64_t row = 0; row < rows; row++)
    __builtin_memcpy(to + row * row_bytes, from + ids[row] * row_bytes, row_bytes);
}

}  // namespace
