"""Groups of keys that most configs share, in the spelling of axolotl, with the keys that are listed without a value."""

COMMON = """
strict: false
val_set_size: 0.05
output_dir: ./outputs/out
sequence_len: 4096
sample_packing: true
eval_sample_packing: false
pad_to_sequence_len: true
wandb_project:
wandb_entity:
wandb_watch:
wandb_name:
wandb_log_model:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
train_on_inputs: false
group_by_length: false
bf16: auto
fp16:
tf32: false
gradient_checkpointing: true
early_stopping_patience:
resume_from_checkpoint:
local_rank:
logging_steps: 1
xformers_attention:
flash_attention: true
s2_attention:
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3
warmup_steps: 10
evals_per_epoch: 4
eval_table_size:
eval_max_new_tokens: 128
saves_per_epoch: 1
debug:
deepspeed:
weight_decay: 0.0
fsdp:
fsdp_config:
"""
CHAT = """
chat_template: chatml
datasets:
  - path: mlabonne/FineTome-100k
    type: chat_template
    split: train[:20%]
    field_messages: conversations
dataset_prepared_path: last_run_prepared
"""
COMPLETION = """
datasets:
  - path: allenai/c4
    name: en
    type: completion
    field: text
dataset_prepared_path:
"""
LORA = """
load_in_8bit: true
load_in_4bit: false
adapter: lora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_fan_in_fan_out:
"""
QLORA = """
load_in_8bit: false
load_in_4bit: true
adapter: qlora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules:
lora_target_linear: true
lora_fan_in_fan_out:
"""
FFT = """
load_in_8bit: false
load_in_4bit: false
"""
ADAM_8BIT = """
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
"""
FUSED = """
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2.0e-5
"""
LIGER = """
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rope: true
liger_rms_norm: true
liger_glu_activation: true
liger_fused_linear_cross_entropy: true
"""
CUT = """
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
"""
KERNELS = """
lora_mlp_kernel: true
lora_qkv_kernel: true
lora_o_kernel: true
"""
FSDP1 = """
fsdp:
  - full_shard
  - auto_wrap
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_sync_module_states: true
  fsdp_offload_params: false
  fsdp_use_orig_params: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sharding_strategy: FULL_SHARD
"""
FSDP2 = """
fsdp_version: 2
fsdp_config:
  offload_params: false
  cpu_ram_efficient_loading: true
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: Qwen3DecoderLayer
  state_dict_type: FULL_STATE_DICT
  reshard_after_forward: true
"""
