// The Python module: kernels on addresses, and which path they take.
//
// Arguments are addresses and sizes, because taking a tensor apart costs more than many of these
// kernels; kernels/*.py check shapes and types and are what others call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "kernels.hpp"
#include "layers.hpp"

namespace nb = nanobind;

namespace {

using Address = uintptr_t;

template <typename T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Best last.
std::vector<const Kernels*> usable_paths() {
  std::vector<const Kernels*> paths{&kPortable};
#ifdef HEADRACE_X86
  __builtin_cpu_init();
  // All that CMakeLists.txt lets the compiler use: a virtual machine may hide any of it.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2");
  if (avx2) paths.push_back(&kAvx2);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    paths.push_back(&kAvx512);
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

const char* const kPartNames[kParts] = {"qkv",     "rotate", "attention", "attention_out",
                                        "gate_up", "silu",   "down",      "norm"};

// Seconds by part since this was called last.
nb::dict take_profile() {
  nb::dict parts;
  for (int part = 0; part < kParts; part++) parts[kPartNames[part]] = profile.seconds[part];
  profile = Profile();
  return parts;
}

using ProductTuple = std::tuple<Address, Address, int64_t, int64_t>;

Product product_of(const ProductTuple& parts) {
  const auto& [packed, bias, outs, ins] = parts;
  return {at(packed), at(bias), outs, ins};
}

Type type_of(bool bfloat16) { return bfloat16 ? Type::kBfloat16 : Type::kFloat32; }

}  // namespace

NB_MODULE(_native, m) {
  m.def("path_names", path_names, "The paths that this CPU can take, best last.");
  m.def("use_path", use_path, "Take this path from now on; what was packed before is void.");
  m.def("path_name", [] { return path->name; });

  m.def("packed_size", [](int64_t outs, int64_t ins, bool bfloat16) {
    const int64_t panels = (outs + path->panel - 1) / path->panel;
    return panels * path->panel * (bfloat16 ? (ins + 1) / 2 * 2 : ins);
  }, "Elements that pack() writes for a weight [outs, ins].");
  m.def("pack", [](Address weight, Address packed, int64_t outs, int64_t ins, bool bfloat16) {
    path->pack(at(weight), at(packed), outs, ins, type_of(bfloat16));
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("linear", [](Address x, Address packed, Address bias, Address y, int64_t rows, int64_t outs,
                     int64_t ins, bool bfloat16) {
    path->linear({at(x), at(packed), at(bias), at(y), rows, ins, outs, type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("rms_norm", [](Address x, Address delta, Address weight, Address out, int64_t rows,
                       int64_t width, float epsilon, bool bfloat16) {
    path->rms_norm({at(x), at(delta), at(weight), at(out), rows, width, epsilon,
                    type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("silu_and_multiply", [](Address x, Address out, int64_t rows, int64_t width,
                                bool bfloat16) {
    path->silu_and_multiply(at(x), at(out), rows, width, type_of(bfloat16));
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("gather", [](Address table, Address ids, Address out, int64_t rows, int64_t row_bytes) {
    path->gather(at(table), at<int64_t>(ids), at(out), rows, row_bytes);
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
                            {block_size, block_rows, kv_heads, head_dim}, type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("attention", [](Address q, int64_t q_stride, Address keys, Address values,
                        Address block_tables, int64_t table_width, Address query_starts,
                        Address context_lens, Address sinks, Address out, int64_t rows,
                        int64_t heads, int64_t window, float scale, int64_t block_size,
                        int64_t block_rows, int64_t kv_heads, int64_t head_dim, bool bfloat16) {
    path->attention({at(q), q_stride, at(keys), at(values), at<int64_t>(block_tables), table_width,
                     at<int64_t>(query_starts), at<int64_t>(context_lens), at<float>(sinks),
                     at(out), rows, heads, window, scale,
                     {block_size, block_rows, kv_heads, head_dim}, type_of(bfloat16)});
  }, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<LayerStack>(m, "LayerStack")
      .def("__init__", [](LayerStack* stack, int64_t heads, int64_t window, float scale,
                          float epsilon, int64_t block_size, int64_t block_rows,
                          int64_t kv_heads, int64_t head_dim, bool bfloat16) {
        new (stack) LayerStack{heads, window, scale, epsilon,
                               {block_size, block_rows, kv_heads, head_dim},
                               type_of(bfloat16), {}};
      })
      .def("add", [](LayerStack& stack, Address attention_norm, const ProductTuple& qkv,
                     const ProductTuple& attention_out, Address mlp_norm,
                     const ProductTuple& gate_up, const ProductTuple& down, Address keys,
                     Address values) {
        stack.layers.push_back({at(attention_norm), product_of(qkv), product_of(attention_out),
                                at(mlp_norm), product_of(gate_up), product_of(down), at(keys),
                                at(values)});
      });
  m.def("run_layers", [](const LayerStack& stack, Address x, Address normed, Address qkv,
                         Address attended, Address gate_up, Address inner, Address delta,
                         Address cos, Address sin, Address positions, Address cache_index,
                         Address block_tables, int64_t table_width, Address query_starts,
                         Address context_lens, int64_t tokens, int64_t rows) {
    RotateArgs rotate{};
    rotate.cos = at<float>(cos);
    rotate.sin = at<float>(sin);
    rotate.positions = at<int64_t>(positions);
    rotate.cache_index = at<int64_t>(cache_index);
    rotate.tokens = tokens;
    rotate.heads = stack.heads;
    rotate.cache = stack.cache;
    rotate.type = stack.type;
    AttentionArgs attention{};
    attention.q_stride = (stack.heads + 2 * stack.cache.kv_heads) * stack.cache.head_dim;
    attention.block_tables = at<int64_t>(block_tables);
    attention.table_width = table_width;
    attention.query_starts = at<int64_t>(query_starts);
    attention.context_lens = at<int64_t>(context_lens);
    attention.rows = rows;
    attention.heads = stack.heads;
    attention.window = stack.window;
    attention.scale = stack.scale;
    attention.cache = stack.cache;
    attention.type = stack.type;
    run_layers(*path, stack,
               {at(x), at(normed), at(qkv), at(attended), at(gate_up), at(inner), at(delta)},
               rotate, attention, tokens, profile);
  }, nb::call_guard<nb::gil_scoped_release>());
#ifdef _OPENMP
  m.attr("threaded") = true;
#else
  m.attr("threaded") = false;
#endif
  m.def("take_profile", take_profile, "Seconds that run_layers spent by part, since the last call.");
}
