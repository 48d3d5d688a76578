// One path's kernels: compiled once for each, with HEADRACE_TABLE, HEADRACE_NAME, HEADRACE_LANES
// and the compiler's flags for the instructions set by CMakeLists.txt.
#ifdef HEADRACE_AMX
#include "amx.hpp"
#include "attention_amx.hpp"
#endif
#include "attention.hpp"
#include "elementwise.hpp"
#include "kernels.hpp"
#include "linear.hpp"
#include "quantized.hpp"
#include "quantized_pack.hpp"
#include "routing.hpp"
#include "sampling.hpp"

namespace {

// Calls the kernel for args' element type.
#define HEADRACE_BY_TYPE(type, kernel, ...) \
  (type) == Type::kBfloat16 ? kernel<Bf16>(__VA_ARGS__) : kernel<float>(__VA_ARGS__)

int64_t packed_size_any(int64_t outs, int64_t ins, WeightKind weights) {
  return weights == WeightKind::kBfloat16 ? packed_size<Bf16>(outs, ins)
                                          : packed_size<float>(outs, ins);
}
void pack_any(const void* weight, void* packed, int64_t outs, int64_t ins, WeightKind weights) {
  weights == WeightKind::kBfloat16 ? pack<Bf16>(weight, packed, outs, ins)
                                   : pack<float>(weight, packed, outs, ins);
}
void embed_any(const EmbedArgs& args) { HEADRACE_BY_TYPE(args.type, embed, args); }
void embed_quantized_any(const QuantizedEmbedArgs& args) {
  HEADRACE_BY_TYPE(args.type, embed_quantized, args);
}
#ifdef HEADRACE_AMX
constexpr bool kMultipliesBfloat16 = true;
void linear_any(const LinearArgs& args) {
  args.type == Type::kBfloat16 ? linear_by_tiles(args) : linear<float>(args);
}
void attention_any(const AttentionArgs& args) {
  args.type == Type::kBfloat16 ? attention_by_tiles(args) : attention<float>(args);
}
#else
constexpr bool kMultipliesBfloat16 = sizeof(Left<Bf16>) == sizeof(Bf16);
void linear_any(const LinearArgs& args) { HEADRACE_BY_TYPE(args.type, linear, args); }
void attention_any(const AttentionArgs& args) { HEADRACE_BY_TYPE(args.type, attention, args); }
#endif
void rms_norm_any(const NormArgs& args) { HEADRACE_BY_TYPE(args.type, rms_norm, args); }
void head_norm_any(const HeadNormArgs& args) { HEADRACE_BY_TYPE(args.type, head_norm, args); }
void rotate_any(const RotateArgs& args) { HEADRACE_BY_TYPE(args.type, rotate_and_write, args); }

void gate_any(const GateArgs& args) { HEADRACE_BY_TYPE(args.type, gate, args); }
void add_any(const AddArgs& args) { HEADRACE_BY_TYPE(args.type, add, args); }
void sum_any(const SumArgs& args) { HEADRACE_BY_TYPE(args.type, sum, args); }
void gated_add_any(const GatedAddArgs& args) { HEADRACE_BY_TYPE(args.type, gated_add, args); }
void scale_any(const ScaleArgs& args) { HEADRACE_BY_TYPE(args.type, scale, args); }
void route_any(const RouteArgs& args) { HEADRACE_BY_TYPE(args.type, route, args); }
void combine_any(const CombineArgs& args) { HEADRACE_BY_TYPE(args.type, combine, args); }
void soft_cap_any(const SoftCapArgs& args) { HEADRACE_BY_TYPE(args.type, soft_cap, args); }
void choose_any(const ChooseArgs& args) { HEADRACE_BY_TYPE(args.type, choose, args); }

}  // namespace

extern const Kernels HEADRACE_TABLE = {
    HEADRACE_NAME,  kMultipliesBfloat16, packed_size_any, pack_any,
    embed_any,      linear_any,          quantized_size,  pack_quantized,
    quantized,      embed_quantized_any, rms_norm_any,    head_norm_any,
    rotate_any,     attention_any,       gate_any,        add_any,
    sum_any,        gated_add_any,       scale_any,       route_any,
    combine_any,    soft_cap_any,        choose_any,
};
