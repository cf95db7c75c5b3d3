"""The keys `nemo_gym_*`: configs of other trainers load, and contradictions are errors."""

import warnings

import pytest

from ebft.errors import ConfigError
from ebft.run.checks import Machine, check_machine
from ebft.run.config.schema import RunConfig, load_config, parse_yaml
from ebft.serving.command import server_command
from tests.config.conftest import warned

READ_AS = "type: chat_template, field_messages: responses_create_params.input"
READ_AS += ", message_field_content: content, message_field_role: role"
ARITHMETIC = "resources_servers/reasoning_gym/data/train_basic_arithmetic.jsonl"
TOOL_CALLS = "~/Gym/resources_servers/example_single_tool_call/data/weather_tool_calling.jsonl"
BOTH = "rl: grpo, chat_template: tokenizer_default, plugins: [axolotl.integrations.nemo_gym.NemoGymPlugin]"
BOTH += ", nemo_gym_enabled: true, nemo_gym_auto_start: false, nemo_gym_head_port: 11000"
SINGLE = f"""
{{{BOTH}, base_model: Qwen/Qwen2.5-0.5B-Instruct, nemo_gym_dir: ~/Gym,
trl: {{use_vllm: false, num_generations: 4, max_completion_length: 128, temperature: 0.9,
  reward_funcs: [axolotl.integrations.nemo_gym.rewards.reward_nemo_gym_verify]}},
nemo_gym_datasets: [{{path: {ARITHMETIC}, server_name: reasoning_gym}}],
datasets: [{{path: ~/Gym/{ARITHMETIC}, {READ_AS}}}]}}
"""
MULTI = f"""
{{{BOTH}, base_model: Qwen/Qwen3-0.6B, nemo_gym_multi_turn: true, nemo_gym_verify_timeout: 120, sequence_len: 2048,
adapter: lora, lora_r: 16, lora_alpha: 32, lora_target_modules: [q_proj, k_proj, v_proj], max_steps: 30, bf16: true,
trl: {{use_vllm: true, vllm_mode: server, vllm_server_host: localhost, vllm_server_port: 8000, vllm_lora_sync: true,
  vllm_sync_interval: 5, use_data_producer: true, async_prefetch: true, num_generations: 4, max_completion_length: 512,
  temperature: 0.8, reward_funcs: [axolotl.integrations.nemo_gym.rewards.reward_env]}},
nemo_gym_datasets: [{{path: {TOOL_CALLS}, server_name: example_single_tool_call}}],
datasets: [{{path: {TOOL_CALLS}, {READ_AS}}}], gradient_accumulation_steps: 4, gradient_checkpointing: true,
vllm: {{gpu_memory_utilization: 0.85, max_model_len: 2048, tensor_parallel_size: 1}}, micro_batch_size: 1}}
"""
OF_MULTI, CHAT = parse_yaml(MULTI)["trl"], {"path": "x", "type": "chat_template"}


def load(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return warned(load_config, path=path)


def values(text, **changes):
    found = {**parse_yaml(text), **changes}
    return {key: value for key, value in found.items() if value is not None}


def test_configs_of_other_trainers(tmp_path):
    config, messages = load(tmp_path, SINGLE)
    assert messages == [] and config.plugins == []
    assert config.trl.reward_funcs == ["nemo_gym_verify"]
    assert [entry.type for entry in config.datasets] == ["nemo_gym.transform"]
    config, messages = load(tmp_path, MULTI)
    assert [message.split(" has")[0] for message in messages] == ["trl.use_data_producer"]
    assert config.trl.reward_funcs == ["nemo_gym_env"] and config.plugins == [] and config.uses_server


@pytest.mark.parametrize(("text", "changes", "message"), [
    (SINGLE, {"nemo_gym_multi_turn": True}, "uses the reward nemo_gym_env: add it .*in place of nemo_gym_verify"),
    (SINGLE, {"nemo_gym_dir": "/other"}, "list different files: /other/resources.*Keep one"),
    (SINGLE, {"nemo_gym_datasets": [{"path": "a", "max_samples": 3}], "nemo_gym_dir": "/gym",
              "datasets": [{**CHAT, "path": "/gym/a", "split": "train[5:]"}]}, "contradicts its max_samples"),
    (MULTI, {"trl": {**OF_MULTI, "top_k": 20}}, "trl.top_k: NeMo Gym's agents do not send it"),
])  # fmt: skip
def test_contradictions(text, changes, message):
    with warnings.catch_warnings(action="ignore"), pytest.raises(ConfigError, match=message):
        RunConfig.from_dict(values(text, **changes))


def test_several_processes_are_refused_for_agents(tmp_path):
    config, _ = load(tmp_path, MULTI)
    check_machine(config, Machine(True, True))
    with pytest.raises(ConfigError, match="supported in one training process only"):
        check_machine(config, Machine(True, True, processes=2))


def test_the_vllm_server_of_agents(tmp_path):
    flags = {}
    for text in (SINGLE, MULTI):
        given = values(text, adapter="lora", lora_r=8, lora_alpha=8, lora_target_linear=True, lora_target_modules=None)
        config = RunConfig.from_dict({**given, "vllm": {"tool_call_parser": "hermes"}})
        flags[text] = server_command(config.server_settings, "python", gpus=0).command
    slots = [int(command[command.index("--max-loras") + 1]) for command in flags.values()]
    assert slots[1] == slots[0] + 2
    assert ["--override-generation-config" in command for command in flags.values()] == [False, True]
    assert all("--enable-auto-tool-choice" in command for command in flags.values())
