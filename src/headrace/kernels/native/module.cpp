// The Python module: kernels on addresses, and which path they take.
//
// Arguments are addresses and sizes, because taking a tensor apart costs more than many of these
// kernels; kernels/*.py check shapes and types and are what others call.
#ifdef HEADRACE_HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels.hpp"
#include "program.hpp"

namespace nb = nanobind;

namespace {

using Address = uintptr_t;

template <typename T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

#ifdef HEADRACE_HAS_AMX
// Whether the CPU has tiles of bfloat16 (CPUID leaf 7, EDX bits 22 and 24), and Linux lets this
// process use them, which it must be asked for (Documentation/arch/x86/xstate.rst).
bool may_use_tiles() {
  constexpr int request_permission = 0x1023, tile_data = 18;
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) &&
         syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

// Best last.
std::vector<const Kernels*> usable_paths() {
  std::vector<const Kernels*> paths{&kPortable};
#ifdef HEADRACE_X86
  __builtin_cpu_init();
  // All that CMakeLists.txt lets the compiler use: a virtual machine may hide any of it.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2");
  if (avx2) paths.push_back(&kAvx2);
  const bool avx512 =
      avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) paths.push_back(&kAvx512);
#endif
#ifdef HEADRACE_HAS_DOT
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
    paths.push_back(&kAvx512Bf16);
#endif
#ifdef HEADRACE_HAS_AMX
  if (avx512 && __builtin_cpu_supports("avx512vnni") && may_use_tiles()) paths.push_back(&kAmx);
#endif
  return paths;
}

const Kernels* path = usable_paths().back();

std::vector<std::string> path_names() {
  std::vector<std::string> names;
  for (const Kernels* usable : usable_paths()) names.emplace_back(usable->name);
  return names;
}

void use_path(const std::string& name) {
  for (const Kernels* usable : usable_paths())
    if (name == usable->name) {
      path = usable;
      return;
    }
  throw nb::value_error(("this CPU has no path " + name).c_str());
}

// A process has one stage, and a stage one thread that computes.
Profile profile;

// Seconds by label since this was called last.
nb::dict take_profile() {
  nb::dict parts;
  for (size_t i = 0; i < profile.labels.size(); i++) {
    parts[profile.labels[i].c_str()] = profile.seconds[i];
    profile.seconds[i] = 0;
  }
  return parts;
}

Type type_of(bool bfloat16) { return bfloat16 ? Type::kBfloat16 : Type::kFloat32; }

WeightKind kind_of(bool bfloat16) {
  return bfloat16 ? WeightKind::kBfloat16 : WeightKind::kFloat32;
}

// bits, scales, minimums, zero.
using Form = std::tuple<int, int, bool, int>;
WeightForm form_of(const Form& form) {
  const auto& [bits, scales, minimums, zero] = form;
  return {bits, scales, minimums, zero};
}

// How kernels/quantized_linear.py names them, GGUF's names.
StoredKind stored_kind(const std::string& name) {
  const char* names[] = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"};
  for (int i = 0; i < 8; i++)
    if (name == names[i]) return StoredKind(i);
  throw nb::value_error(("no kernel takes " + name).c_str());
}

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "clamped_swiglu") return Activation::kClampedSwiglu;
  throw nb::value_error(("there is no activation " + name).c_str());
}

// Operations are given all but what steps bring. The program's type is the activations'.
struct ProgramBuilder {
  Program program;
  Type type;

  void add(const std::string& label, Places places, Args args, int64_t offset = 0,
           int64_t vocab = 0) {
    program.operations.push_back({args, places, profile.index(label), offset, vocab});
  }
  void require(bool same, const char* what) const {
    if (!same) throw nb::value_error((std::string("no kernel takes such ") + what).c_str());
  }
};

// check: called with the shard that is waited for, and for how many seconds it has been.
void define_exchange(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Exchange>(m, "Exchange")
      .def(nb::init<>())
      .def_static("memory_size", &Exchange::memory_size, "shards"_a)
      .def("join", [](Exchange& exchange, Address memory, int shard, int shards, double spin_s,
                      nb::callable check) {
        exchange.join(at(memory), shard, shards, spin_s, [check](int awaited, double waited_s) {
          nb::gil_scoped_acquire held;
          check(awaited, waited_s);
        });
      }, "memory"_a, "shard"_a, "shards"_a, "spin_s"_a, "check"_a)
      .def("leave", &Exchange::leave, "Whatever comes next needs a join() before.")
      .def("room", [](const Exchange& exchange, int shard, uint32_t round) {
        return Address(exchange.room(shard, round));
      }, "shard"_a, "round"_a)
      .def("own_part", [](Exchange& exchange, uint32_t round, double within_s) {
        const Part* part;
        {
          nb::gil_scoped_release released;
          part = exchange.own_part(round, long(within_s * 1e9));
        }
        return part ? std::optional(std::pair(part->bytes, part->for_first != 0)) : std::nullopt;
      }, "round"_a, "within_s"_a)
      .def("has_come", &Exchange::has_come, "shard"_a, "round"_a)
      .def("all_reduce", [](Exchange& exchange, Address x, int64_t count, bool bfloat16) {
        exchange.all_reduce(*path, at(x), count, type_of(bfloat16));
      }, "x"_a, "count"_a, "bfloat16"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("gather", [](Exchange& exchange, Address part, Address out, int64_t rows,
                        const std::vector<int64_t>& widths, int64_t size, bool on_all) {
        exchange.gather(at(part), at(out), rows, widths.data(), size, on_all);
      }, "part"_a, "out"_a, "rows"_a, "widths"_a, "size"_a, "on_all"_a,
         nb::call_guard<nb::gil_scoped_release>());
}

void define_program(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Step>(m, "Step")
      .def("__init__",
           [](Step* step, const std::vector<Address>& buffers, int64_t tokens, Address ids,
              Address positions, Address cache_index, Address block_tables,
              int64_t table_width, Address query_starts, Address context_lens, int64_t rows) {
             new (step) Step{{}, at<int64_t>(ids), at<int64_t>(positions),
                             at<int64_t>(cache_index), at<int64_t>(block_tables), table_width,
                             at<int64_t>(query_starts), at<int64_t>(context_lens), tokens, rows};
             for (Address buffer : buffers) step->buffers.push_back(at(buffer));
           },
           "buffers"_a, "tokens"_a, "ids"_a = 0, "positions"_a = 0, "cache_index"_a = 0,
           "block_tables"_a = 0, "table_width"_a = 0, "query_starts"_a = 0,
           "context_lens"_a = 0, "rows"_a = 0)
      .def("put", [](Step& step, int place, Address buffer) {
        step.buffers.at(place) = at(buffer);
      }, "A buffer is elsewhere from now on.");

  nb::class_<ProgramBuilder>(m, "Program")
      .def("__init__", [](ProgramBuilder* to, bool bfloat16) {
        new (to) ProgramBuilder{{}, type_of(bfloat16)};
      }, "bfloat16"_a)
      .def("embed", [](ProgramBuilder& to, const std::string& label, int out, Address table,
                       int64_t vocab, int64_t width, float scale, int64_t first, int64_t held) {
        to.add(label, {-1, -1, out},
               EmbedArgs{at(table), {}, {}, 0, width, scale, to.type, first, held}, 0, vocab);
      }, "label"_a, "out"_a, "table"_a, "vocab"_a, "width"_a, "scale"_a, "first"_a, "held"_a)
      .def("norm", [](ProgramBuilder& to, const std::string& label, int source, int delta,
                      int out, Address weight, int64_t width, float epsilon, bool rounds_once) {
        to.add(label, {source, delta, out},
               NormArgs{{}, {}, at(weight), {}, 0, width, epsilon, rounds_once, to.type});
      }, "label"_a, "source"_a, "delta"_a, "out"_a, "weight"_a, "width"_a, "epsilon"_a,
         "rounds_once"_a)
      .def("head_norm", [](ProgramBuilder& to, const std::string& label, int buffer,
                           Address weight, int64_t stride, int64_t first, int64_t heads,
                           int64_t head_dim, float epsilon) {
        to.add(label, {buffer, -1, -1},
               HeadNormArgs{{}, at(weight), 0, stride, heads, head_dim, epsilon, to.type},
               first * head_dim);
      }, "label"_a, "buffer"_a, "weight"_a, "stride"_a, "first"_a, "heads"_a, "head_dim"_a,
         "epsilon"_a)
      .def("linear", [](ProgramBuilder& to, const std::string& label, int source, int out,
                        Address packed, Address bias, int64_t outs, int64_t ins,
                        bool bfloat16_weights) {
        to.require(type_of(bfloat16_weights) == to.type, "weights");
        to.add(label, {source, -1, out},
               LinearArgs{{}, at(packed), at(bias), {}, 0, ins, outs, to.type,
                          kind_of(bfloat16_weights)});
      }, "label"_a, "source"_a, "out"_a, "packed"_a, "bias"_a, "outs"_a, "ins"_a,
         "bfloat16_weights"_a)
      .def("quantized", [](ProgramBuilder& to, const std::string& label, int source, int out,
                           Address packed, Address bias, int64_t outs, int64_t ins,
                           int64_t first, int64_t stride, const Form& form) {
        to.add(label, {source, -1, out},
               QuantizedArgs{{}, at(packed), at(bias), {}, 0, ins, outs, stride, form_of(form),
                             to.type}, first);
      }, "label"_a, "source"_a, "out"_a, "packed"_a, "bias"_a, "outs"_a, "ins"_a, "first"_a,
         "stride"_a, "form"_a)
      .def("embed_quantized", [](ProgramBuilder& to, const std::string& label, int out,
                                 Address packed, int64_t vocab, int64_t width, float scale,
                                 int64_t first, int64_t held, const Form& form) {
        to.add(label, {-1, -1, out},
               QuantizedEmbedArgs{at(packed), {}, {}, 0, width, scale, to.type, first, held,
                                  form_of(form)}, 0, vocab);
      }, "label"_a, "out"_a, "packed"_a, "vocab"_a, "width"_a, "scale"_a, "first"_a, "held"_a,
         "form"_a)
      .def("rotate", [](ProgramBuilder& to, const std::string& label, int qkv, int64_t heads,
                        Address cos, Address sin, Address keys, Address values,
                        int64_t block_size, int64_t block_rows, int64_t kv_heads,
                        int64_t head_dim, bool bfloat16_cache) {
        to.require(type_of(bfloat16_cache) == to.type, "caches");
        to.add(label, {qkv, -1, -1},
               RotateArgs{{}, at<float>(cos), at<float>(sin), {}, {}, at(keys), at(values), 0,
                          heads, {block_size, block_rows, kv_heads, head_dim,
                                  type_of(bfloat16_cache)}, to.type});
      }, "label"_a, "qkv"_a, "heads"_a, "cos"_a, "sin"_a, "keys"_a, "values"_a, "block_size"_a,
         "block_rows"_a, "kv_heads"_a, "head_dim"_a, "bfloat16_cache"_a)
      .def("attention", [](ProgramBuilder& to, const std::string& label, int qkv, int out,
                           int64_t heads, Address keys, Address values, Address sinks,
                           int64_t window, float scale, float soft_cap, int64_t block_size,
                           int64_t block_rows, int64_t kv_heads, int64_t head_dim,
                           bool bfloat16_cache) {
        to.require(type_of(bfloat16_cache) == to.type, "caches");
        to.add(label, {qkv, -1, out},
               AttentionArgs{{}, (heads + 2 * kv_heads) * head_dim, at(keys), at(values), {}, 0,
                             {}, {}, at<float>(sinks), {}, 0, heads, window, scale, soft_cap,
                             {block_size, block_rows, kv_heads, head_dim,
                              type_of(bfloat16_cache)}, to.type});
      }, "label"_a, "qkv"_a, "out"_a, "heads"_a, "keys"_a, "values"_a, "sinks"_a, "window"_a,
         "scale"_a, "soft_cap"_a, "block_size"_a, "block_rows"_a, "kv_heads"_a, "head_dim"_a,
         "bfloat16_cache"_a)
      .def("gate", [](ProgramBuilder& to, const std::string& label, int source, int out,
                      int64_t width, const std::string& activation) {
        to.add(label, {source, -1, out},
               GateArgs{{}, {}, 0, width, activation_of(activation), to.type});
      }, "label"_a, "source"_a, "out"_a, "width"_a, "activation"_a)
      .def("add", [](ProgramBuilder& to, const std::string& label, int out, int delta,
                     int64_t width) {
        to.add(label, {-1, delta, out}, AddArgs{{}, {}, width, to.type});
      }, "label"_a, "out"_a, "delta"_a, "width"_a)
      .def("gated_add", [](ProgramBuilder& to, const std::string& label, int out, int delta,
                           int gate, int64_t width) {
        to.add(label, {-1, delta, out, gate}, GatedAddArgs{{}, {}, {}, 0, width, to.type});
      }, "label"_a, "out"_a, "delta"_a, "gate"_a, "width"_a)
      .def("scale", [](ProgramBuilder& to, const std::string& label, int buffer, int64_t width,
                       float factor) {
        to.add(label, {-1, -1, buffer}, ScaleArgs{{}, width, factor, to.type});
      }, "label"_a, "buffer"_a, "width"_a, "factor"_a)
      .def("route", [](ProgramBuilder& to, const std::string& label, int buffer, int64_t experts,
                       int64_t chosen, bool normalized) {
        to.add(label, {-1, -1, buffer}, RouteArgs{{}, 0, experts, chosen, normalized, to.type});
      }, "label"_a, "buffer"_a, "experts"_a, "chosen"_a, "normalized"_a)
      .def("experts", [](ProgramBuilder& to, const std::string& label, int source, int weights,
                         int out, Address gate_up, Address gate_up_bias, Address down,
                         Address down_bias, int64_t experts, int64_t hidden, int64_t inner,
                         const std::string& activation) {
        to.add(label, {source, -1, out, weights},
               ExpertsArgs{{}, {}, {}, at(gate_up), at(gate_up_bias), at(down), at(down_bias), 0,
                           experts, hidden, inner, activation_of(activation), to.type});
      }, "label"_a, "source"_a, "weights"_a, "out"_a, "gate_up"_a, "gate_up_bias"_a, "down"_a,
         "down_bias"_a, "experts"_a, "hidden"_a, "inner"_a, "activation"_a)
      .def("all_reduce", [](ProgramBuilder& to, const std::string& label, int buffer,
                            int64_t width, Exchange& exchange) {
        to.add(label, {-1, -1, buffer}, AllReduceArgs{&exchange, width, to.type});
      }, "label"_a, "buffer"_a, "width"_a, "exchange"_a, nb::keep_alive<1, 5>())
      .def("gather", [](ProgramBuilder& to, const std::string& label, int source, int out,
                        const std::vector<int64_t>& widths, Exchange& exchange) {
        to.add(label, {source, -1, out}, GatherArgs{&exchange, widths, to.type});
      }, "label"_a, "source"_a, "out"_a, "widths"_a, "exchange"_a, nb::keep_alive<1, 6>())
      .def("soft_cap", [](ProgramBuilder& to, const std::string& label, int buffer,
                          int64_t width, float cap) {
        to.add(label, {-1, -1, buffer}, SoftCapArgs{{}, width, cap, to.type});
      }, "label"_a, "buffer"_a, "width"_a, "cap"_a)
      .def("run", [](const ProgramBuilder& built, const Step& step) {
        run(*path, built.program, step, profile);
      }, nb::call_guard<nb::gil_scoped_release>());
  m.def("take_profile", take_profile,
        "Seconds that programs spent by label, since the last call.");
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("path_names", path_names, "The paths that this CPU can take, best last.");
  m.def("use_path", use_path, "Take this path from now on; what was packed before is void.");
  m.def("path_name", [] { return path->name; });

  m.def("multiplies_bfloat16", [] { return path->multiplies_bfloat16; },
        "Whether the path taken multiplies bfloat16 without converting it.");
  m.def("packed_size", [](int64_t outs, int64_t ins, bool bfloat16) {
    return path->packed_size(outs, ins, kind_of(bfloat16));
  }, "Elements that pack() writes for a weight [outs, ins].");
  m.def("pack", [](Address weight, Address packed, int64_t outs, int64_t ins, bool bfloat16) {
    path->pack(at(weight), at(packed), outs, ins, kind_of(bfloat16));
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("linear", [](Address x, Address packed, Address bias, Address y, int64_t rows, int64_t outs,
                     int64_t ins, bool bfloat16) {
    path->linear({at(x), at(packed), at(bias), at(y), rows, ins, outs, type_of(bfloat16),
                  kind_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("quantized_size", [](const Form& form, int64_t outs, int64_t ins) {
    return path->quantized_size(form_of(form), outs, ins);
  }, "Bytes of a packed weight [outs, ins].");
  m.def("pack_quantized", [](const std::string& kind, Address from, int64_t rows,
                             int64_t row_bytes, Address outs, int64_t first_block, int64_t blocks,
                             int64_t to_block, Address packed, int64_t ins) {
    path->pack_quantized({stored_kind(kind), at(from), rows, row_bytes, at<int64_t>(outs),
                          first_block, blocks, to_block, at(packed), ins});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("quantized", [](Address x, Address packed, Address bias, Address y, int64_t rows,
                        int64_t outs, int64_t ins, int64_t y_stride, const Form& form,
                        bool bfloat16) {
    path->quantized({at(x), at(packed), at(bias), at(y), rows, ins, outs, y_stride, form_of(form),
                     type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("embed_quantized", [](Address packed, Address ids, Address out, int64_t rows,
                              int64_t width, float scale, int64_t first, int64_t held,
                              const Form& form, bool bfloat16) {
    path->embed_quantized({at(packed), at<int64_t>(ids), at(out), rows, width, scale,
                           type_of(bfloat16), first, held, form_of(form)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("rms_norm", [](Address x, Address delta, Address weight, Address out, int64_t rows,
                       int64_t width, float epsilon, bool rounds_once, bool bfloat16) {
    path->rms_norm({at(x), at(delta), at(weight), at(out), rows, width, epsilon, rounds_once,
                    type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("head_norm", [](Address x, Address weight, int64_t rows, int64_t stride, int64_t heads,
                        int64_t width, float epsilon, bool bfloat16) {
    path->head_norm({at(x), at(weight), rows, stride, heads, width, epsilon, type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("gate", [](Address x, Address out, int64_t rows, int64_t width,
                   const std::string& activation, bool bfloat16) {
    path->gate({at(x), at(out), rows, width, activation_of(activation), type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("gated_add", [](Address x, Address delta, Address gate, int64_t rows, int64_t width,
                        bool bfloat16) {
    path->gated_add({at(x), at(delta), at(gate), rows, width, type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("scale", [](Address x, int64_t count, float factor, bool bfloat16) {
    path->scale({at(x), count, factor, type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("route", [](Address scores, int64_t rows, int64_t experts, int64_t chosen,
                    bool normalized, bool bfloat16) {
    path->route({at(scores), rows, experts, chosen, normalized, type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("experts", [](Address x, Address weights, Address out, Address gate_up,
                      Address gate_up_bias, Address down, Address down_bias, int64_t rows,
                      int64_t count, int64_t hidden, int64_t inner, const std::string& activation,
                      bool bfloat16) {
    experts(*path, {at(x), at(weights), at(out), at(gate_up), at(gate_up_bias), at(down),
                    at(down_bias), rows, count, hidden, inner, activation_of(activation),
                    type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("soft_cap", [](Address x, int64_t count, float cap, bool bfloat16) {
    path->soft_cap({at(x), count, cap, type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("embed", [](Address table, Address ids, Address out, int64_t rows, int64_t width,
                    float scale, int64_t first, int64_t held, bool bfloat16) {
    path->embed({at(table), at<int64_t>(ids), at(out), rows, width, scale, type_of(bfloat16),
                 first, held});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("choose", [](Address logits, int64_t stride, int64_t width, Address choices,
                     int64_t count, Address tokens, bool bfloat16) {
    path->choose({at(logits), stride, width, at<const Choice>(choices), count,
                  at<int64_t>(tokens), type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("rotate_and_write", [](Address qkv, Address cos, Address sin, Address positions,
                               Address cache_index, Address keys, Address values, int64_t tokens,
                               int64_t heads, int64_t block_size, int64_t block_rows,
                               int64_t kv_heads, int64_t head_dim, bool bfloat16) {
    path->rotate_and_write({at(qkv), at<float>(cos), at<float>(sin), at<int64_t>(positions),
                            at<int64_t>(cache_index), at(keys), at(values), tokens, heads,
                            {block_size, block_rows, kv_heads, head_dim, type_of(bfloat16)},
                            type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("attention", [](Address q, int64_t q_stride, Address keys, Address values,
                        Address block_tables, int64_t table_width, Address query_starts,
                        Address context_lens, Address sinks, Address out, int64_t rows,
                        int64_t heads, int64_t window, float scale, float soft_cap,
                        int64_t block_size,
                        int64_t block_rows, int64_t kv_heads, int64_t head_dim, bool bfloat16) {
    path->attention({at(q), q_stride, at(keys), at(values), at<int64_t>(block_tables), table_width,
                     at<int64_t>(query_starts), at<int64_t>(context_lens), at<float>(sinks),
                     at(out), rows, heads, window, scale, soft_cap,
                     {block_size, block_rows, kv_heads, head_dim, type_of(bfloat16)},
                     type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());

  define_exchange(m);
  define_program(m);
#ifdef _OPENMP
  m.attr("threaded") = true;
#else
  m.attr("threaded") = false;
#endif
}
