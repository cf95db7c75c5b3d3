"""The configs: base model, parts, and the lines of their own, of which those that replace a key of a part win."""

from tests.config.carried.parts import (
    ADAM_8BIT,
    CHAT,
    COMMON,
    COMPLETION,
    CUT,
    FFT,
    FSDP1,
    FSDP2,
    FUSED,
    KERNELS,
    LIGER,
    LORA,
    QLORA,
)

# Name -> (base model, parts, own lines).
CONFIGS: dict[str, tuple[str, list[str], str]] = {
    "llama-2 lora": (
        "NousResearch/Llama-2-7b-hf",
        [CHAT, LORA, ADAM_8BIT],
        "model_type: LlamaForCausalLM\ntokenizer_type: LlamaTokenizer\nis_llama_derived_model: true\n"
        "special_tokens: {pad_token: <unk>}",
    ),
    "llama-3 lora 8b": (
        "NousResearch/Meta-Llama-3-8B-Instruct",
        [CHAT, LORA, ADAM_8BIT],
        "chat_template: llama3\nspecial_tokens: {pad_token: <|end_of_text|>}\nlora_modules_to_save:\n"
        "  - embed_tokens\n  - lm_head",
    ),
    "llama-3 qlora": ("NousResearch/Meta-Llama-3-8B", [CHAT, QLORA, ADAM_8BIT], "optimizer: paged_adamw_32bit"),
    "llama-3 fft 8b": ("NousResearch/Meta-Llama-3.1-8B", [CHAT, FFT, LIGER, FUSED], "warmup_steps: 100"),
    "llama-3 qlora fsdp 70b": (
        "casperhansen/llama-3-70b-fp16",
        [CHAT, QLORA, FUSED, FSDP1],
        "gradient_checkpointing_kwargs: {use_reentrant: true}",
    ),
    "llama-3.2 lora 1b with kernels": (
        "NousResearch/Llama-3.2-1B",
        [CHAT, LORA, KERNELS, FUSED],
        "load_in_8bit: false",
    ),
    "llama-3.2 rslora with dora": (
        "NousResearch/Llama-3.2-1B",
        [CHAT, LORA, FUSED],
        "peft_use_rslora: true\npeft_use_dora: true\nload_in_8bit: false",
    ),
    "llama-3 unfrozen layers": (
        "NousResearch/Llama-3.2-1B",
        [CHAT, FFT, FUSED],
        "unfrozen_parameters:\n  - ^lm_head.weight$\n  - model.layers.1[4-5].mlp",
    ),
    "llama-3 deepspeed": ("NousResearch/Llama-3.2-1B", [CHAT, FFT, FUSED], "deepspeed: deepspeed_configs/zero2.json"),
    "tinyllama pretraining on text": (
        "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        [COMPLETION, FFT, FUSED],
        "max_steps: 200\nmodel_type: LlamaForCausalLM\ntokenizer_type: LlamaTokenizer",
    ),
    "code llama 34b": (
        "codellama/CodeLlama-34b-hf",
        [CHAT, QLORA, ADAM_8BIT],
        "tokenizer_type: CodeLlamaTokenizer\nspecial_tokens:\n  bos_token: <s>\n  eos_token: </s>\n  unk_token: <unk>",
    ),
    "mistral lora": (
        "mistralai/Mistral-7B-v0.1",
        [CHAT, LORA, ADAM_8BIT],
        "lora_target_linear: false\nlora_target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj]\n"
        "model_type: MistralForCausalLM\nis_mistral_derived_model: true",
    ),
    "mistral fft with noise": (
        "mistralai/Mistral-7B-v0.1",
        [CHAT, FFT, FUSED],
        "neftune_noise_alpha: 5\ncosine_min_lr_ratio: 0.1\nwarmup_ratio: 0.05\nwarmup_steps:",
    ),
    "mistral small with template": (
        "mistralai/Mistral-Small-24B",
        [CHAT, QLORA, FUSED],
        "chat_template: mistral_v7_tekken",
    ),
    "mixtral qlora": (
        "mistralai/Mixtral-8x7B-v0.1",
        [CHAT, QLORA, ADAM_8BIT],
        "trust_remote_code: true\nmodel_config:\n  output_router_logits: true\nlora_dropout: 0.0",
    ),
    "mixtral fft with router loss": (
        "mistralai/Mixtral-8x7B-v0.1",
        [CHAT, FFT, FUSED],
        "overrides_of_model_config: {output_router_logits: true, router_aux_loss_coef: 0.02}\n"
        "deepspeed: deepspeed_configs/zero3.json",
    ),
    "qwen2 fsdp": (
        "Qwen/Qwen2-7B",
        [CHAT, QLORA, FUSED, FSDP1],
        "trust_remote_code: true\nfsdp_config: {fsdp_transformer_layer_cls_to_wrap: Qwen2DecoderLayer}",
    ),
    "qwen2.5 fft with liger": (
        "Qwen/Qwen2.5-7B",
        [CHAT, FFT, LIGER, FUSED],
        "chat_template: qwen_25\ntorch_compile: auto",
    ),
    "qwen3 qlora with fsdp 2": (
        "Qwen/Qwen3-8B",
        [CHAT, QLORA, FUSED, FSDP2],
        "chat_template: qwen3\ngradient_checkpointing: true\nevals_per_epoch: 0",
    ),
    "qwen3 lora with cut cross-entropy": (
        "Qwen/Qwen3-4B",
        [CHAT, LORA, CUT, FUSED],
        "chat_template: qwen3\nattn_implementation: flash_attention_2\nflash_attention:",
    ),
    "qwen3 moe with experts": (
        "Qwen/Qwen3-30B-A3B",
        [CHAT, LORA, FUSED],
        "plugins: [axolotl.integrations.kernels.KernelsPlugin]\nuse_kernels: true\nuse_scattermoe: true\n"
        "load_in_8bit: false\nlora_dropout: 0.0\nlora_target_linear: false\nlora_target_modules: [q_proj, v_proj]\n"
        "lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]",
    ),
    "qwen3 moe with grouped products": (
        "Qwen/Qwen3-30B-A3B",
        [CHAT, FFT, FUSED, FSDP2],
        "experts_implementation: grouped_mm\ndp_shard_size: 8\ntensor_parallel_size: 1\ncontext_parallel_size: 1",
    ),
    "gemma qlora": (
        "mhenrichsen/gemma-7b",
        [CHAT, QLORA, ADAM_8BIT],
        "optimizer: adamw_bnb_8bit\nsample_packing: false",
    ),
    "gemma 2 qlora": (
        "google/gemma-2-9b",
        [CHAT, QLORA, ADAM_8BIT],
        "chat_template: gemma\neager_attention: true\nflash_attention:",
    ),
    "gemma 3 text lora": (
        "google/gemma-3-1b-it",
        [CHAT, LORA, CUT, FUSED],
        "chat_template: gemma3\ncut_cross_entropy: true\nload_in_8bit: false\n"
        "gradient_checkpointing_kwargs: {use_reentrant: false}",
    ),
    "phi-3 fft": (
        "microsoft/Phi-3-mini-4k-instruct",
        [CHAT, FFT, FUSED],
        "chat_template: phi_3\nadam_beta2: 0.95\nadam_epsilon: 0.00001\nmax_grad_norm: 1.0\n"
        "resize_token_embeddings_to_32x: true",
    ),
    "phi-2 qlora": (
        "microsoft/phi-2",
        [CHAT, QLORA, FUSED],
        "trust_remote_code: true\nlora_modules_to_save: [embd, lm_head]",
    ),
    "deepseek v2 fft": (
        "deepseek-ai/DeepSeek-V2-Lite",
        [CHAT, FFT, LIGER, FUSED, FSDP1],
        "chat_template: deepseek_v2\ntrust_remote_code: true\n"
        "fsdp_config: {fsdp_transformer_layer_cls_to_wrap: DeepseekV2DecoderLayer}",
    ),
    "gpt-oss lora with experts": (
        "openai/gpt-oss-20b",
        [CHAT, LORA, FUSED],
        "load_in_8bit: false\nlora_dropout: 0.0\nlora_target_linear:\nlora_target_modules: [q_proj, k_proj, v_proj]\n"
        "lora_target_parameters: [mlp.experts.gate_up_proj]\nattn_implementation: kernels-community/vllm-flash-attn3\n"
        "flash_attention:\nchat_template: tokenizer_default\nuse_tensorboard: true",
    ),
    "falcon lora": (
        "tiiuae/falcon-7b",
        [CHAT, LORA, ADAM_8BIT],
        "xformers_attention: true\nflash_attention:\nis_falcon_derived_model: true\ngptq_groupsize:\ngptq_model_v1:",
    ),
    "pythia lora": (
        "EleutherAI/pythia-1.4b-deduped",
        [COMPLETION, LORA, FUSED],
        "lora_target_linear:\nlora_target_modules: [query_key_value]\nlora_fan_in_fan_out: true\ngptq: false",
    ),
    "olmo fft with new tokens": (
        "allenai/OLMo-2-1124-7B",
        [CHAT, FFT, FUSED],
        "tokens: [<think>, </think>]\nspecial_tokens: {additional_special_tokens: [<tool>]}\nshrink_embeddings: true",
    ),
    "granite with mlflow": (
        "ibm-granite/granite-3.3-2b-base",
        [CHAT, LORA, FUSED],
        "use_mlflow: true\nmlflow_tracking_uri: http://host:5000\nmlflow_experiment_name: granite",
    ),
    "smollm3 with early stopping": (
        "HuggingFaceTB/SmolLM3-3B",
        [CHAT, QLORA, FUSED],
        "early_stopping_patience: 3\nload_best_model_at_end: true\nchat_template: smollm3\n"
        "bnb_config_kwargs: {bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: true}",
    ),
    "llama-3 relora": ("NousResearch/Llama-3.2-1B", [CHAT, LORA, FUSED], "relora: true\nrelora_prune_ratio: 0.9"),
    "llama-3 loftq": ("NousResearch/Llama-3.2-1B", [CHAT, LORA, FUSED], "peft: {loftq_config: {loftq_bits: 4}}"),
    "llama-3 context parallel": ("NousResearch/Llama-3.2-1B", [CHAT, FFT, FUSED], "context_parallel_size: 4"),
    "llama-3 vision": (
        "alpindale/Llama-3.2-11B-Vision-Instruct",
        [CHAT, LORA, FUSED],
        "processor_type: AutoProcessor\nskip_prepare_dataset: true\nremove_unused_columns: false",
    ),
}
COMMON_LINES = COMMON
