// One path's kernels: compiled once for each, with HEADRACE_TABLE, HEADRACE_NAME, HEADRACE_LANES
// and the compiler's flags for the instructions set by CMakeLists.txt.
#include "attention.hpp"
#include "elementwise.hpp"
#include "kernels.hpp"
#include "linear.hpp"
#include "sampling.hpp"

namespace {

// Calls the kernel for args' element type.
#define HEADRACE_BY_TYPE(type, kernel, ...) \
  (type) == Type::kBfloat16 ? kernel<Bf16>(__VA_ARGS__) : kernel<float>(__VA_ARGS__)

void pack_any(const void* weight, void* packed, int64_t outs, int64_t ins, Type type) {
  HEADRACE_BY_TYPE(type, pack, weight, packed, outs, ins);
}
void linear_any(const LinearArgs& args) { HEADRACE_BY_TYPE(args.type, linear, args); }
void rms_norm_any(const NormArgs& args) { HEADRACE_BY_TYPE(args.type, rms_norm, args); }
void rotate_any(const RotateArgs& args) { HEADRACE_BY_TYPE(args.type, rotate_and_write, args); }
void attention_any(const AttentionArgs& args) { HEADRACE_BY_TYPE(args.type, attention, args); }

void add_any(void* x, const void* delta, int64_t count, Type type) {
  if (type == Type::kBfloat16)
    add(static_cast<Bf16*>(x), static_cast<const Bf16*>(delta), count);
  else
    add(static_cast<float*>(x), static_cast<const float*>(delta), count);
}

void silu_any(const void* x, void* out, int64_t rows, int64_t width, Type type) {
  if (type == Type::kBfloat16)
    silu_and_multiply_rows(static_cast<const Bf16*>(x), static_cast<Bf16*>(out), rows, width);
  else
    silu_and_multiply_rows(static_cast<const float*>(x), static_cast<float*>(out), rows, width);
}

void choose_any(const ChooseArgs& args) { HEADRACE_BY_TYPE(args.type, choose, args); }

}  // namespace

extern const Kernels HEADRACE_TABLE = {
    HEADRACE_NAME, kPanel,        pack_any, linear_any, rms_norm_any,
    rotate_any,    attention_any, add_any, silu_any, gather,     choose_any,
};
