// A mixture of experts: rows grouped by expert, two products for each expert that has some, and the
// weighted sums. Weights of an expert without rows are not read.
//
// Made of a path's kernels, so that each row's values depend on no other row, as theirs do not.
#pragma once

#include <string.h>

#include <vector>

#include "kernels.hpp"
#include "scratch.hpp"

// out [rows, hidden] of x [rows, hidden] and weights [rows, experts]. gate_up, down: packed weights,
// of expert after expert; their biases, or none.
struct ExpertsArgs {
  const void* x;
  const void* weights;
  void* out;
  const void* gate_up;
  const void* gate_up_bias;
  const void* down;
  const void* down_bias;
  int64_t rows, experts, hidden, inner;
  Activation activation;
  Type type;
};

// Pairs of a row and an expert, the pairs of an expert next to each other.
struct Groups {
  // Of each expert and of each row, where its pairs begin; one more than there are.
  std::vector<int64_t> of_expert, of_row;
  // Of each pair, by experts: its row. By rows: its place among those by experts, and its weight.
  std::vector<int64_t> rows, places;
  std::vector<float> factors;
};

inline float number_at(const void* from, int64_t at, Type type) {
  if (type == Type::kFloat32) return static_cast<const float*>(from)[at];
  const uint32_t bits = uint32_t(static_cast<const uint16_t*>(from)[at]) << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void group(const ExpertsArgs& args, Groups& groups) {
  const int64_t experts = args.experts;
  groups.of_expert.assign(experts + 1, 0);
  groups.of_row.assign(1, 0);
  groups.places.clear();
  groups.factors.clear();
  for (int64_t row = 0; row < args.rows; row++) {
    for (int64_t expert = 0; expert < experts; expert++) {
      const float weight = number_at(args.weights, row * experts + expert, args.type);
      if (weight == 0) continue;
      groups.places.push_back(expert);
      groups.factors.push_back(weight);
      groups.of_expert[expert + 1]++;
    }
    groups.of_row.push_back(int64_t(groups.places.size()));
  }
  for (int64_t expert = 0; expert < experts; expert++)
    groups.of_expert[expert + 1] += groups.of_expert[expert];
  std::vector<int64_t> next(groups.of_expert.begin(), groups.of_expert.end() - 1);
  groups.rows.resize(groups.places.size());
  for (int64_t row = 0; row < args.rows; row++)
    for (int64_t pair = groups.of_row[row]; pair < groups.of_row[row + 1]; pair++) {
      const int64_t place = next[groups.places[pair]]++;
      groups.places[pair] = place;
      groups.rows[place] = row;
    }
}

// y of each pair from x of each pair, by its expert's product.
inline void multiply_groups(const Kernels& kernels, const Groups& groups, const ExpertsArgs& args,
                            const char* x, const void* packed, const void* bias, char* y,
                            int64_t outs, int64_t ins) {
  const int64_t size = args.type == Type::kBfloat16 ? 2 : 4;
  const WeightKind kind =
      args.type == Type::kBfloat16 ? WeightKind::kBfloat16 : WeightKind::kFloat32;
  const int64_t weight_bytes = kernels.packed_size(outs, ins, kind) * size;
  for (int64_t expert = 0; expert < args.experts; expert++) {
    const int64_t begin = groups.of_expert[expert], rows = groups.of_expert[expert + 1] - begin;
    if (rows == 0) continue;
    const char* own_bias = static_cast<const char*>(bias);
    kernels.linear({x + begin * ins * size,
                    static_cast<const char*>(packed) + expert * weight_bytes,
                    own_bias ? own_bias + expert * outs * size : nullptr,
                    y + begin * outs * size, rows, ins, outs, args.type, kind});
  }
}

inline void experts(const Kernels& kernels, const ExpertsArgs& args) {
  static thread_local Groups groups;
  group(args, groups);
  const int64_t pairs = int64_t(groups.rows.size()), hidden = args.hidden, inner = args.inner;
  const int64_t size = args.type == Type::kBfloat16 ? 2 : 4;
  char* gathered = scratch<char, 0>(pairs * hidden * size);
  char* both = scratch<char, 1>(pairs * 2 * inner * size);
  char* activated = scratch<char, 2>(pairs * inner * size);
  for (int64_t pair = 0; pair < pairs; pair++)
    memcpy(gathered + pair * hidden * size,
           static_cast<const char*>(args.x) + groups.rows[pair] * hidden * size, hidden * size);
  multiply_groups(kernels, groups, args, gathered, args.gate_up, args.gate_up_bias, both,
                  2 * inner, hidden);
  kernels.gate({both, activated, pairs, inner, args.activation, args.type});
  multiply_groups(kernels, groups, args, activated, args.down, args.down_bias, gathered, hidden,
                  inner);
  kernels.combine({gathered, groups.of_row.data(), groups.places.data(), groups.factors.data(),
                   args.out, args.rows, hidden, args.type});
}
