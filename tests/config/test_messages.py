"""What configs are refused for, and what they are warned of, in the words of the messages: one table per stage."""

import warnings

import pytest

from ebft.config.axolotl import UNSUPPORTED_KEYS
from ebft.errors import ConfigError, EBFTError
from ebft.run.checks import Machine, check_machine, check_runnable
from ebft.run.config.schema import RunConfig
from tests.config.conftest import ENTRY, MINIMAL, STRIDED, dataset, strided, warned

FSDP = {"offload_params": True}
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
EXPERTS = {**LORA, "lora_target_parameters": ["mlp.experts.down_proj"]}
PROMPTS = {"datasets": [{"path": "some/rows", "type": "ebft_opencode.transform"}], "rl": "ebft", "micro_batch_size": 8}
VLLM = {**PROMPTS, "trl": {"use_vllm": True, "vllm_mode": "managed"}}
IGNORED_RATIO = {"vllm_importance_sampling_correction": False, "vllm_importance_sampling_clip_min": 0.5}
GRPO = {"rl": "grpo", "trl": {"reward_funcs": ["own.func"]}}
PREFERENCES = {"datasets": [{"path": "a", "type": "chatml.intel"}], "micro_batch_size": 2}
AXOLOTL = "axolotl.integrations."
FOLDED = "datasets.type"  # begins a warning about transforms that stand in for others


def config(**keys):
    """A config; keys that are None are left out, also those that the smallest config has."""
    return RunConfig.from_dict({key: value for key, value in {**MINIMAL, **keys}.items() if value is not None})


def stream(entry=None, **keys):
    return {"datasets": None, "pretraining_dataset": {**ENTRY, **(entry or {})}, "max_steps": 10, **keys}


def structured(**trl):
    return {**PROMPTS, "trl": trl}


@pytest.mark.parametrize(("keys", "message"), [
    # Adapters and weights
    ({"adapter": "lora"}, "adapter: lora needs lora_r. Set it, for example lora_r: 16."),
    ({**LORA, "adapter": "qlora"}, "Add load_in_4bit: true"),
    ({**LORA, **strided(feature_device="cpu")}, "no effect with an adapter"),
    ({"load_in_4bit": True}, "Set adapter: qlora"),
    ({**LORA, "load_in_8bit": True, "gguf_file": "a.gguf"}, "`ebft fetch some/model/a.gguf --output DIR`, and set"),
    ({"bnb_config_kwargs": {"llm_int8_threshold": 5.0}}, "llm_int8_threshold: 5.0 has no effect without load_in_8bit"),
    ({**EXPERTS, **VLLM}, "with trl.use_vllm: vLLM does not load"),
    ({**LORA, "adapter": "qlora", "load_in_4bit": True, "quantize_moe_experts": True, "deepspeed": "zero2"},
     "quantize_moe_experts is not supported with deepspeed"),
    ({"unfrozen_parameters": ["lm_head.weight$[:128]"]}, "selects rows, but parameters are"),
    ({"model_type": "AutoModelForSequenceClassification"}, "set reward_model: true, or"),
    # Optimizer, batches, precision
    ({"batch_size": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 2},
     "batch_size: 8 is not micro_batch_size: 2 times gradient_accumulation_steps: 2. Remove batch_size"),
    ({**PROMPTS, "group_by_length": True}, "group_by_length is not supported with structured mode"),
    ({"neftune_noise_alpha": 5, **STRIDED}, "neftune_noise_alpha is not supported with strided mode: embedding"),
    ({"overrides_of_model_config": {"router_aux_loss_coef": 0.1}, **STRIDED},
     "overrides_of_model_config is not supported with strided mode, which has no term for the router"),
    # Processes
    ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2 is not supported: "),
    ({"dp_shard_size": 2}, "dp_shard_size: 2 needs fsdp"), ({"deepspeed": "a", "fsdp_config": FSDP}, "deepspeed and"),
    # Checkpoints, evaluation, logs
    ({"val_set_size": 0.1, "test_datasets": [{"path": "a", "type": "b"}]}, "test_datasets and val_set_size are both"),
    ({**STRIDED, "val_set_size": 2, "metric_for_best_model": "loss"}, "Choose from cfm_loss, "),
    ({"resume_from_checkpoint": True},
     "invalid value true; expected the folder of a checkpoint. .* set auto_resume_from_checkpoints: true"),
    # Templates and rows
    ({**PROMPTS, "ebft": {"rl_coef": 0.0}}, "ebft.rl_coef: 0 has no effect in structured mode"),
    (dataset(train_on_split="test", split="dev"), "split and train_on_split are two names of the same key"),
    (dataset(roles={"user": ["a"], "assistant": ["b", "a"]}), "datasets.0.roles: a is listed for more than one role"),
    (dataset(type={"format": "{instruction.__class__} x"}), "placeholder {instruction.__class__}; expected"),
    (dataset(roles_to_train=[]), "roles_to_train: \\[\\] trains on no turn. List roles .*message_field_training"),
    (dataset(type="completion", skip=2), "datasets.0.skip is only read in datasets with streaming: true. Set split: "),
    ({**dataset(train_on_eos="none"), "train_on_inputs": True}, "train_on_inputs: true .*, but datasets.0.train_on_e"),
    ({"rl": "dpo", "min_sample_len": 4}, "min_sample_len is not supported with "),
    ({"use_eaft": True, "use_dynamic_finetuning": True}, "use_dynamic_finetuning has a loss of its own"),
    ({"use_eaft": True, "overrides_of_model_config": {"output_router_logits": True}}, "use_eaft excludes"),
    ({**LORA, "lisa_n_layers": 1}, "lisa_n_layers is not supported with adapter"),
    ({**LORA, "fp8": True}, "fp8 is for training of all weights"),
    ({**LORA, "qat": {}}, "qat is for SFT of all weights"),
    ({"qat": {"weight_dtype": "int8", "activation_dtype": "int8"}}, "weight_dtype: int8 is not possible with"),
    ({**LORA, "reinit_weights": True}, "reinit_weights: true would train an adapter of random weights"),
    ({"rl": "dpo", "excess_length_strategy": "truncate"}, "truncate is not supported with .*always drop. Remove it"),
    # Streams
    (stream(max_steps=None), "max_steps is missing: a stream has no length"),
    (stream({"split": "train[:9]"}), "split: train\\[:9\\] is not supported .*Set skip"),
    (stream(val_set_size=2), "val_set_size is not supported with streaming: a stream"),
    (stream(**STRIDED), "streaming is not supported with strided mode.*train\\[:100000\\]"),
    (stream(dataset_exact_deduplication=True), "deduplication is not supported with streaming, which does not keep"),
    ({**strided(log_completions=True), "log_rollouts": "none"}, "none contradicts ebft.log_completions: true"),
    # Keys of other trainers; those of UNSUPPORTED_KEYS are all tested below
    ({"rl": "reward_trainer"}, "rl: reward_trainer is reward_model: true here. Set that in place"),
    ({"plugins": [AXOLOTL + "new.NewPlugin"]}, "new.NewPlugin is a plugin for axolotl .* it does not run here"),
])  # fmt: skip
def test_refused_when_the_config_is_loaded(keys, message):
    with pytest.raises(ConfigError, match=message):
        config(**keys)


def test_a_key_of_other_trainers_says_what_to_do():
    for key, reason in UNSUPPORTED_KEYS.items():
        with pytest.raises(ConfigError) as caught:
            section, _, name = key.rpartition(".")
            config(**({section: {name: 1}} if section else {key: 1}))
        assert f"{key} is not supported: {reason}." in str(caught.value)


NO_REWARD = {"alignment_coef": 0.0, "diversity_coef": 0.0}
STRUCTURED_ZERO = "ebft.alignment_coef: 0 with ebft.diversity_coef: 0 and ebft.ce_coef: 0: the loss is always 0"


@pytest.mark.parametrize(("keys", "message"), [
    ({"optimizer": "galore_adamw"}, "optimizer: galore_adamw is not supported: its projections cannot be read"),
    ({"optimizer": "adamw_torch_8bit", "optim_args": {"block_size": 128}}, "optim_args.block_size: transformers does"),
    ({"evaluation": {"pass_at": [1, 100]}, **STRIDED}, "evaluation.pass_at: 100 is more than the samples, 4"),
    (strided(temperature=0.0), "temperature: 0 is greedy decoding: .* Set temperature above 0"),
    ({**strided(single_pass=True), "gradient_checkpointing": True}, "ebft.single_pass is incompatible with gradient_c"),
    (strided(**NO_REWARD), "alignment_coef: 0 with diversity_coef: 0 and ce_coef: 0: the loss is always 0"),
    ({**PROMPTS, "ebft": NO_REWARD}, STRUCTURED_ZERO),
    # Full completions
    ({**PROMPTS, "rl": "grpo"}, "rl: grpo needs trl.reward_funcs"),
    ({**PROMPTS, "micro_batch_size": 2, "gradient_accumulation_steps": 3},
     "num_generations: 8 does not divide 6, .*micro_batch_size \\* gradient_accumulation_steps.* Set "
     "trl.num_generations to 2 or 3 or 6, or gradient_accumulation_steps to 4 or a multiple of it."),
    (structured(multi_objective_aggregation="normalize_then_sum"),
     "trl.multi_objective_aggregation: normalize_then_sum .* Set ebft.advantage_estimator: group_norm"),
    (structured(async_prefetch=True), "trl.async_prefetch requires a vLLM server"),
    (structured(use_vllm=True, vllm_mode="colocate"), "vllm_mode: colocate needs vLLM in this environment"),
    (structured(reward_funcs=["feature_matching"]), "feature_matching, feature_matching contains a duplicate"),
    (structured(vllm_importance_sampling_clip_min=3.0), "clip_min: 3 must be less than .*_cap: 3, for example 0.33"),
])  # fmt: skip
def test_refused_before_anything_is_loaded(tmp_path, keys, message):
    made, _ = warned(config, output_dir=str(tmp_path), **keys)
    with pytest.raises(EBFTError, match=message):
        check_runnable(made)
    if "always 0" in message:
        made.ebft.ce_coef = 0.1
        check_runnable(made)


CPU = Machine(has_accelerator=False, supports_bf16=False)
GPU = Machine(has_accelerator=True, supports_bf16=True, devices=("cpu", "cuda", "cuda:0"))


@pytest.mark.parametrize(("machine", "keys", "message"), [
    (CPU, {"deepspeed": "zero2"}, "deepspeed requires GPUs. Remove it to use DDP"),
    (GPU, {"fsdp": ["full_shard"]}, "but only one runs"),
    (CPU, strided(feature_device="cuda:7"), "'cuda:7' is unavailable. Choose from cpu, or remove it"),
    (CPU, structured(use_vllm=True), "Full fine-tuning with a vLLM server requires CUDA.* Train an adapter"),
])  # fmt: skip
def test_what_the_machine_lacks_is_refused(machine, keys, message):
    with pytest.raises(ConfigError, match=message):
        check_machine(config(**keys), machine)


NO_DATA = "no effect because there is no held-out data. Set val_set_size or "
SFT = "no effect with SFT (rl is not set)"
ALWAYS_ZERO = "...the feature-matching reward is always 0"
OF_TURNS = ", which determines the turns"


@pytest.mark.parametrize(("keys", "message"), [  # the only warning, its start (with ... at the end), or a part of it
    *(({key: 4, "val_set_size": 0.0}, f"{key}: {NO_DATA}test_datasets.") for key in ("eval_steps", "evals_per_epoch")),
    ({"eval_steps": 5, "eval_on_start": True, "eval_strategy": "steps", "val_set_size": 2}, None),
    (structured(use_liger_loss=True), "trl.use_liger_loss has no effect: the log-probabilities are computed in..."),
    ({**VLLM, "trl": {**VLLM["trl"], **IGNORED_RATIO}}, "trl.vllm_importance_sampling_clip_min: no effect with..."),
    ({"ebft": {"mask_thinking_ce": True}, "trl": {"beta": 0.1}}, f"trl: {SFT}. Set rl: ebft..."),
    ({"lora_r": 8, "lora_alpha": 16},
     "lora_r, lora_alpha: no effect because adapter is not set (all weights are trained)."),
    ({**LORA, "lora_target_modules": ["q_proj", "embed_tokens"]},
     "lora_target_modules: q_proj, embed_tokens: adapted, like all linear layers, which ..."),
    ({**strided(gt_length_multiplier=2.0), "trl": {"epsilon": 0.1}, "vllm": {"port": 8001}},
     "ebft.gt_length_multiplier, trl, vllm: no effect on training in strided mode, only in structured mode."),
    ({**PROMPTS, "ebft": {"stride": 4, "rl_coef": 0.5}},
     "ebft.rl_coef, ebft.stride: no effect on training in structured mode, only in strided mode."),
    ({**STRIDED, "train_on_inputs": True}, "train_on_inputs: true has no effect in strided mode..."),
    (strided(n_samples_per_prompt=1), "...n_samples_per_prompt: 1"), (strided(**NO_REWARD), ALWAYS_ZERO),
    ({**PROMPTS, "ebft": NO_REWARD}, ALWAYS_ZERO), (strided(whitening_space="sample"), "...whitening_space: no effect"),
    (strided(rloo_baseline="mean", advantage_estimator="reinforce"),
     "ebft.rloo_baseline has no effect without advantage_estimator: rloo."),
    *(({key: value}, text) for key, value, text in (
        ("attn_implementation", "xformers", "attn_implementation: xformers is ignored: the model's default..."),
        ("activation_offloading", "legacy", "...: legacy is replaced with true"),
        ("gradient_checkpointing", "offload", "...: offload is replaced with true, and activation_offloading: true"),
        ("optimizer", "adamw_hf", "optimizer: adamw_hf is replaced with adamw_torch..."),
        ("lr", 1e-3, "lr is read as learning_rate, its name here."),
        ("float16", True, "float16: true is replaced with fp16: true..."),
        ("model_type", "GPT2LMHeadModel", "model_type: GPT2LMHeadModel has no effect..."),
        ("tokens", {"pad_token": "a"}, "tokens is a mapping, which is read as special_tokens."),
        ("use_cut_cross_entropy", True, "cut_cross_entropy: True has no effect..."), ("adam_eps", 1e-6, None),
        ("max_packed_sequence_len", 2048, "max_packed_sequence_len: 2048 has no effect: sample_packing: true..."))),
    ({"cosine_min_lr_ratio": 0.1, "lr_scheduler": "linear"}, "cosine_min_lr_ratio has no effect with lr_scheduler:..."),
    ({"loraplus_lr_embedding": 1e-6}, "loraplus_lr_embedding has no effect without loraplus_lr_ratio."),
    ({"fsdp_config": {"fsdp_version": 1}}, "fsdp_config.fsdp_version: 1 has no effect: fsdp uses FSDP2 only."),
    ({"float16": True, "bfloat16": True, "bf16": True}, "float16: True has no effect: bfloat16 is set."),
    ({"adam_eps": 1e-6, "adam_epsilon": 1e-7}, "adam_eps: 1e-06 has no effect: adam_epsilon: 1e-07 is the same key."),
    ({**STRIDED, "activation_offloading": True}, "...activation_offloading: true has no effect with "),
    # Full completions
    ({**PROMPTS, "torch_compile": True}, "torch_compile: true is set to false in structured mode and GRPO..."),
    (structured(streaming_partial_batch=True, reward_num_workers=2), "...no effect with reward_num_workers above"),
    *((structured(**{key: value}), f"trl.{key} has no effect without {needed}") for key, value, needed in (
        ("num_completions_to_print", 2, "log_completions: true."), ("use_bias_correction_kl", True, "beta above 0."))),
    *((structured(**keys), None) for keys in (
        {"num_completions_to_print": 2, "log_completions": True},
        {"ref_model_sync_steps": 8, "ref_model_mixup_alpha": 0.5, "sync_ref_model": True, "beta": 0.1})),
    (structured(use_vllm=True, vllm_mode="colocate", vllm_sync_interval=2, vllm_server_port=77),
     "trl.vllm_server_port, trl.vllm_sync_interval: no effect with vllm_mode: colocate."),
    ({**structured(skip_zero_advantage_batches=True), "fp16": True}, "trl.skip_zero_advantage_batches: true has no..."),
    ({**structured(use_vllm=True, vllm_lora_sync=False), **LORA}, "...vllm_lora_sync: false has no effect"),
    ({"lr_scheduler": "constant", "warmup_ratio": 0.1},
     "warmup_ratio: no effect with lr_scheduler: constant. Set constant_with_warmup."),
    # Rows and streams
    (dataset(type="completion", roles={"user": ["a"]}), "...roles has no effect with type: completion, which does"),
    (dataset(trust_remote_code=True), "datasets.0.trust_remote_code has no effect..."),
    ({**dataset(train_on_eos="all"), **STRIDED}, "datasets.0.train_on_eos: all has the effect of turn in strided ..."),
    *(case for key, value in (("roles_to_train", ["user"]), ("train_on_eos", "none"), ("message_field_training", "t"))
      for case in (
          ({**dataset(type="chat_template.transform_prompts", **{key: value}), **GRPO},
           f"datasets.0.{key}: no effect with rl: grpo{OF_TURNS}..."),
          ({**dataset(type="ebft_strided_chat.transform_last_turn", **{key: value}), **STRIDED},
           f"datasets.0.{key}: no effect with type: ebft_strided_chat.transform_last_turn{OF_TURNS}..."),
          ({**dataset(**{key: value}), **STRIDED}, None))),
    ({**dataset(type="ebft_reasoning.transform_strided"), "roles_to_train": ["user"]},
     f"roles_to_train: no effect with type: ebft_reasoning.transform_strided{OF_TURNS}..."),
    (stream(sample_packing=False), "sample_packing: false has no effect with streaming..."),
    *((stream(**keys), None) for keys in ({"sample_packing": True}, {"dataset_num_proc": 1})),
])  # fmt: skip
def test_what_has_no_effect_is_one_warning(keys, message):
    made, messages = warned(config, **keys)
    messages = [text for text in messages if not text.startswith(FOLDED)]
    assert len(messages) == (message is not None), messages
    if message and message.startswith("..."):
        assert message[3:] in messages[0]
    elif message and message.endswith("..."):
        assert messages[0].startswith(message[:-3])
    elif message:
        assert messages == [message]
    assert made.torch_compile is (keys.get("torch_compile", False) and keys.get("rl") is None)
    replaced = keys.get("activation_offloading") == "legacy" or keys.get("gradient_checkpointing") == "offload"
    assert made.activation_offloading is replaced


def test_what_the_machine_does_not_have():
    with pytest.raises(ConfigError, match="fp8 needs a GPU of compute capability 8.9"):
        check_machine(config(fp8=True), Machine(has_accelerator=True, supports_bf16=True, supports_float8=False))
    for machine, key in ((GPU, "tf32"), (CPU, "activation_offloading")):
        with pytest.warns(UserWarning, match=f"{key}: true has no effect"):
            check_machine(config(**{key: True}), machine)
    with warnings.catch_warnings(action="error"):
        check_machine(config(tf32=True), Machine(has_accelerator=True, supports_bf16=True, supports_tf32=True))
        check_machine(config(fp16=True, bf16=False, **strided(feature_device="cuda:0")), GPU)
        check_machine(config(activation_offloading=True), GPU)
        check_machine(config(**structured(use_vllm=True), **LORA), CPU)
