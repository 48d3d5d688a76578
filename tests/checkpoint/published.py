"""What is peculiar to configurations as published."""

from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.31.0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
LLAMA3_SCALING = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
# By their names, and with their context.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7b-chat-hf": (
        LLAMA | {"_name_or_path": "meta-llama/Llama-2-7b-chat-hf", "pretraining_tp": 1,
                 "rope_scaling": None},
        4096,
    ),
    "llama-7b of the first days": (
        LLAMA | {"max_sequence_length": 2048, "pad_token_id": 0, "bos_token_id": 0}, 4096,
    ),
    "Llama-3.1-8B-Instruct": (
        LLAMA | {"eos_token_id": [128001, 128008, 128009], "max_position_embeddings": 131072,
                 "mlp_bias": False, "attention_bias": False, "attention_dropout": 0.0,
                 "rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0, "vocab_size": 128256},
        131072,
    ),
    "unsloth/Llama-3.2-1B-Instruct": (
        LLAMA | {"head_dim": 64, "hidden_size": 2048, "unsloth_fixed": True,
                 "rope_scaling": LLAMA3_SCALING | {"factor": 32.0},
                 "max_position_embeddings": 131072, "pad_token_id": 128004},
        131072,
    ),
    "SmolLM2-135M-Instruct": (
        LLAMA | {"is_llama_config": True, "rope_interleaved": False, "rope_theta": 100000,
                 "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
                 "max_position_embeddings": 8192, "transformers.js_config": {
                     "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
        8192,
    ),
    "vicuna-7b-v1.5-16k": (
        LLAMA | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "max_sequence_length": 16384},
        16384,
    ),
    "deepseek-coder-1.3b-instruct": (
        LLAMA | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000,
                 "max_position_embeddings": 16384, "attention_bias": False},
        65536,
    ),
    "Yarn-Llama-2-7b-64k": (
        LLAMA | {"rope_scaling": {"factor": 16.0, "finetuned": True, "type": "yarn",
                                  "original_max_position_embeddings": 4096},
                 "max_position_embeddings": 65536, "auto_map": {
                     "AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"}},
        65536,
    ),
    "Falcon3-1B-Instruct": (
        LLAMA | {"activation": "swiglu", "head_dim": 256, "hidden_size": 2048,
                 "num_attention_heads": 8, "num_key_value_heads": 4, "rope_theta": 1000042},
        4096,
    ),
    "Mistral-7B-v0.1": (
        MISTRAL | {"num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096,
                   "max_position_embeddings": 32768},
        32768,
    ),
    "Mistral-Nemo-Instruct-2407": (
        MISTRAL | {"head_dim": 128, "hidden_size": 5120, "num_key_value_heads": 8,
                   "sliding_window": None, "max_position_embeddings": 131072},
        131072,
    ),
    "saved by transformers 4 of a subclass": (
        LLAMA | {"output_attentions": False, "output_hidden_states": False, "top_k": 50,
                 "temperature": 1.0, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
                 "chunk_size_feed_forward": 0, "_attn_implementation_autoset": True,
                 "resid_pdrop": 0.1, "is_decoder": False, "quantization_config": None},
        4096,
    ),
    "Phi-3-mini-4k-instruct": (
        PHI3 | {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0,
                "resid_pdrop": 0.0, "attention_dropout": 0.0, "attention_bias": False,
                "original_max_position_embeddings": 4096, "rope_scaling": None,
                "sliding_window": 2047, "eos_token_id": 32000, "pad_token_id": 32000,
                "hidden_size": 3072, "vocab_size": 32064},
        4096,
    ),
    "Phi-3.5-mini-instruct": (
        PHI3 | {"attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
                "original_max_position_embeddings": 4096, "max_position_embeddings": 131072,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48,
                                 "long_factor": [1.08] * 48},
                "sliding_window": 262144, "hidden_size": 3072, "vocab_size": 32064},
        131072,
    ),
    "Mixtral-8x7B-Instruct-v0.1": (
        LLAMA | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
                 "attention_dropout": 0.0, "intermediate_size": 14336, "num_key_value_heads": 8,
                 "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False,
                 "router_aux_loss_coef": 0.02, "rope_theta": 1e6, "sliding_window": None,
                 "max_position_embeddings": 32768},
        32768,
    ),
    "Qwen1.5-MoE-A2.7B-Chat": (
        LLAMA | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
                 "attention_dropout": 0.0, "decoder_sparse_step": 1, "hidden_size": 2048,
                 "intermediate_size": 5632, "max_window_layers": 21, "moe_intermediate_size": 1408,
                 "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60,
                 "num_experts_per_tok": 4, "num_key_value_heads": 16, "rope_theta": 1e6,
                 "output_router_logits": False, "router_aux_loss_coef": 0.001,
                 "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
                 "use_sliding_window": False, "max_position_embeddings": 8192},
        8192,
    ),
    "Qwen3-30B-A3B": (
        LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                 "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1,
                 "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
                 "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
                 "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
                 "num_key_value_heads": 4, "output_router_logits": False, "rope_scaling": None,
                 "router_aux_loss_coef": 0.001, "rope_theta": 1000000.0, "sliding_window": None,
                 "use_sliding_window": False, "max_position_embeddings": 40960},
        40960,
    ),
    "OLMoE-1B-7B-0924-Instruct": (
        LLAMA | {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "clip_qkv": None,
                 "attention_bias": False, "attention_dropout": 0.0, "hidden_size": 2048,
                 "intermediate_size": 1024, "norm_topk_prob": False, "num_attention_heads": 16,
                 "num_experts": 64, "num_experts_per_tok": 8, "num_key_value_heads": 16,
                 "output_router_logits": False, "router_aux_loss_coef": 0.01,
                 "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 50304},
        4096,
    ),
    "gpt-oss-20b": (
        LLAMA | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
                 "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 4,
                 "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880,
                 "initial_context_length": 4096, "max_position_embeddings": 131072,
                 "layer_types": ["sliding_attention", "full_attention"] * 12,
                 "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
                 "num_key_value_heads": 8, "num_local_experts": 32, "pad_token_id": 199999,
                 "output_router_logits": False, "router_aux_loss_coef": 0.9,
                 "quantization_config": {
                     "quant_method": "mxfp4",
                     "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
                 "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                                  "original_max_position_embeddings": 4096,
                                  "rope_type": "yarn", "truncate": False},
                 "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
                 "vocab_size": 201088},
        131072,
    ),
    "granite-3.3-2b-instruct": (
        LLAMA | {"architectures": ["GraniteForCausalLM"], "model_type": "granite",
                 "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
                 "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
                 "logits_scaling": 8.0, "residual_multiplier": 0.22, "hidden_size": 2048,
                 "intermediate_size": 8192, "num_key_value_heads": 8, "rope_scaling": None,
                 "rope_theta": 10000000.0, "tie_word_embeddings": True, "vocab_size": 49159,
                 "max_position_embeddings": 131072},
        131072,
    ),
    "SmolLM3-3B": (
        LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3",
                 "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
                 "hidden_size": 2048, "layer_types": ["full_attention"] * 36,
                 "max_window_layers": 28, "no_rope_layer_interval": 4,
                 "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
                 "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2,
                 "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
                 "use_sliding_window": False, "max_position_embeddings": 65536},
        65536,
    ),
}  # fmt: skip
