// All layers of a stage in one call: what model/layers.py does kernel by kernel.
//
// Between two kernels Python would take some 15 us, its own data having left the caches meanwhile.
#pragma once

#include <chrono>
#include <vector>

#include "kernels.hpp"

// What layers spend their time on; kPartNames in module.cpp has the same order.
enum Part { kQkv, kRotate, kAttention, kAttentionOut, kGateUp, kSilu, kDown, kNorm, kParts };

struct Profile {
  double seconds[kParts] = {};
};

// A product's packed weight, its bias or none, and how many outputs and inputs it has.
struct Product {
  const void* packed;
  const void* bias;
  int64_t outs, ins;
};

struct Layer {
  const void* attention_norm;
  Product qkv, attention_out;
  const void* mlp_norm;
  Product gate_up, down;
  void* keys;
  void* values;
};

// Layers of a kind of model; everything is the same in all of them but their weights and caches.
struct LayerStack {
  int64_t heads, window;
  float scale, epsilon;
  CacheShape cache;
  Type type;
  std::vector<Layer> layers;
};

// What layers work on. x [tokens, hidden]: activations, replaced by what the last layer gives. The
// others are room for what layers pass on, by tokens.
struct Rooms {
  void *x, *normed, *qkv, *attended, *gate_up, *inner, *delta;
};

inline void run_layers(const Kernels& kernels, const LayerStack& stack, const Rooms& rooms,
                       RotateArgs rotate, AttentionArgs attention, int64_t tokens,
                       Profile& profile) {
  using Clock = std::chrono::steady_clock;
  auto since = Clock::now();
  const auto done = [&](Part part) {
    const auto now = Clock::now();
    profile.seconds[part] += std::chrono::duration<double>(now - since).count();
    since = now;
  };
  const auto multiply = [&](const Product& product, const void* x, void* y, Part part) {
    kernels.linear({x, product.packed, product.bias, y, tokens, product.ins, product.outs,
                    stack.type});
    done(part);
  };
  const int64_t hidden = stack.layers.front().qkv.ins;
  const auto norm = [&](const void* delta, const void* weight) {
    kernels.rms_norm({rooms.x, delta, weight, rooms.normed, tokens, hidden, stack.epsilon,
                      stack.type});
    done(kNorm);
  };
  const void* delta = nullptr;
  for (const Layer& layer : stack.layers) {
    norm(delta, layer.attention_norm);
    multiply(layer.qkv, rooms.normed, rooms.qkv, kQkv);
    rotate.qkv = rooms.qkv;
    attention.q = rooms.qkv;
    rotate.keys = layer.keys;
    attention.keys = layer.keys;
    rotate.values = layer.values;
    attention.values = layer.values;
    kernels.rotate_and_write(rotate);
    done(kRotate);
    attention.out = rooms.attended;
    kernels.attention(attention);
    done(kAttention);
    multiply(layer.attention_out, rooms.attended, rooms.delta, kAttentionOut);
    norm(rooms.delta, layer.mlp_norm);
    multiply(layer.gate_up, rooms.normed, rooms.gate_up, kGateUp);
    kernels.silu_and_multiply(rooms.gate_up, rooms.inner, tokens, layer.down.ins, stack.type);
    done(kSilu);
    multiply(layer.down, rooms.inner, rooms.delta, kDown);
    delta = rooms.delta;
  }
  kernels.add(rooms.x, delta, tokens * hidden, stack.type);
  done(kNorm);
}
