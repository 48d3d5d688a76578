// Runs of operations in one call, whatever the architecture: what model/interpreter.py does one by
// one.
//
// Between two kernels Python would take some 15 us, its own data having left the caches meanwhile.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "exchange.hpp"
#include "experts.hpp"
#include "kernels.hpp"

// What a step's operations work on, by the places of buffers that model/interpreter.py gave out.
struct Step {
  std::vector<void*> buffers;
  const int64_t* ids;
  const int64_t* positions;
  const int64_t* cache_index;
  const int64_t* block_tables;
  int64_t table_width;
  const int64_t* query_starts;
  const int64_t* context_lens;
  int64_t tokens, rows;
};

// Places of an operation's buffers; what it has none of is -1.
struct Places {
  int source = -1, delta = -1, out = -1, gate = -1;
};

// Of the stage's shards' parts, by an exchange that they have joined.
struct AllReduceArgs {
  Exchange* exchange;
  int64_t width;
  Type type;
};
struct GatherArgs {
  Exchange* exchange;
  std::vector<int64_t> widths;
  Type type;
};

using Args =
    std::variant<EmbedArgs, QuantizedEmbedArgs, NormArgs, HeadNormArgs, LinearArgs, QuantizedArgs,
                 RotateArgs, AttentionArgs, GateArgs, RouteArgs, ExpertsArgs, AddArgs, GatedAddArgs,
                 ScaleArgs, SoftCapArgs, AllReduceArgs, GatherArgs>;

// args: all but what a step brings. vocab: the table's rows, of an embedding. label: an index of
// Profile's.
struct Operation {
  Args args;
  Places places;
  int label;
  // Elements from a row's start to where the operation begins in it, of a head norm in the source, of
  // a quantized product in out; rows of the table.
  int64_t offset = 0, vocab = 0;
};

struct Program {
  std::vector<Operation> operations;
};

// Seconds by label.
struct Profile {
  std::vector<std::string> labels;
  std::vector<double> seconds;

  int index(const std::string& label) {
    for (size_t i = 0; i < labels.size(); i++)
      if (labels[i] == label) return int(i);
    labels.push_back(label);
    seconds.push_back(0);
    return int(labels.size()) - 1;
  }
};

// Completes an operation's args with what the step brings, and calls the kernel.
struct Runner {
  const Kernels& kernels;
  const Step& step;
  const Operation& operation;

  void* buffer(int place) const { return place < 0 ? nullptr : step.buffers[place]; }
  void* source() const { return buffer(operation.places.source); }
  void* delta() const { return buffer(operation.places.delta); }
  void* out() const { return buffer(operation.places.out); }

  void check_ids() const {
    for (int64_t i = 0; i < step.tokens; i++)
      if (step.ids[i] < 0 || step.ids[i] >= operation.vocab)
        throw std::out_of_range("token id " + std::to_string(step.ids[i]) + ", there are " +
                                std::to_string(operation.vocab));
  }

  void operator()(QuantizedEmbedArgs args) const {
    check_ids();
    args.ids = step.ids;
    args.out = out();
    args.rows = step.tokens;
    kernels.embed_quantized(args);
  }
  void operator()(EmbedArgs args) const {
    check_ids();
    args.ids = step.ids;
    args.out = out();
    args.rows = step.tokens;
    kernels.embed(args);
  }
  void operator()(NormArgs args) const {
    args.x = source();
    args.delta = delta();
    args.out = out();
    args.rows = step.tokens;
    kernels.rms_norm(args);
  }
  void operator()(HeadNormArgs args) const {
    const int64_t size = args.type == Type::kBfloat16 ? 2 : 4;
    args.x = static_cast<char*>(source()) + operation.offset * size;
    args.rows = step.tokens;
    kernels.head_norm(args);
  }
  void operator()(LinearArgs args) const {
    args.x = source();
    args.y = out();
    args.rows = step.tokens;
    kernels.linear(args);
  }
  void operator()(QuantizedArgs args) const {
    const int64_t size = args.type == Type::kBfloat16 ? 2 : 4;
    args.x = source();
    args.y = static_cast<char*>(out()) + operation.offset * size;
    args.rows = step.tokens;
    kernels.quantized(args);
  }
  void operator()(RotateArgs args) const {
    args.qkv = source();
    args.positions = step.positions;
    args.cache_index = step.cache_index;
    args.tokens = step.tokens;
    kernels.rotate_and_write(args);
  }
  void operator()(AttentionArgs args) const {
    args.q = source();
    args.out = out();
    args.block_tables = step.block_tables;
    args.table_width = step.table_width;
    args.query_starts = step.query_starts;
    args.context_lens = step.context_lens;
    args.rows = step.rows;
    kernels.attention(args);
  }
  void operator()(GateArgs args) const {
    args.x = source();
    args.out = out();
    args.rows = step.tokens;
    kernels.gate(args);
  }
  void operator()(RouteArgs args) const {
    args.scores = out();
    args.rows = step.tokens;
    kernels.route(args);
  }
  void operator()(ExpertsArgs args) const {
    args.x = source();
    args.weights = buffer(operation.places.gate);
    args.out = out();
    args.rows = step.tokens;
    experts(kernels, args);
  }
  void operator()(GatedAddArgs args) const {
    args.x = out();
    args.delta = delta();
    args.gate = buffer(operation.places.gate);
    args.rows = step.tokens;
    kernels.gated_add(args);
  }
  void operator()(const AllReduceArgs& args) const {
    args.exchange->all_reduce(kernels, out(), step.tokens * args.width, args.type);
  }
  void operator()(const GatherArgs& args) const {
    args.exchange->gather(source(), out(), step.tokens, args.widths.data(),
                          args.type == Type::kBfloat16 ? 2 : 4, false);
  }
  // count is a row's until the step says how many there are.
  void operator()(AddArgs args) const {
    args.x = out();
    args.delta = delta();
    args.count *= step.tokens;
    kernels.add(args);
  }
  void operator()(ScaleArgs args) const {
    args.x = out();
    args.count *= step.tokens;
    kernels.scale(args);
  }
  void operator()(SoftCapArgs args) const {
    args.x = out();
    args.count *= step.tokens;
    kernels.soft_cap(args);
  }
};

inline void run(const Kernels& kernels, const Program& program, const Step& step,
                Profile& profile) {
  using Clock = std::chrono::steady_clock;
  auto since = Clock::now();
  for (const Operation& operation : program.operations) {
    std::visit(Runner{kernels, step, operation}, operation.args);
    const auto now = Clock::now();
    profile.seconds[operation.label] += std::chrono::duration<double>(now - since).count();
    since = now;
  }
}
