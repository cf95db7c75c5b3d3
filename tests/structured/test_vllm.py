"""Structured training over a real vLLM server, whose interpreter EBFT_VLLM_PYTHON names (make test-vllm).

One server, started as a user would start it, serves a small model trained on the standard library; a proxy in front
of it adds faults where a test needs them.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from ebft import AsyncEBFTConfig, AsyncEBFTTrainer, EBFTConfig, EBFTTrainer, load_config, train
from ebft.errors import RolloutError
from ebft.structured import RolloutGRPOConfig, RolloutGRPOTrainer
from tests.serving.processes import alive, eventually, free_port
from tests.structured import oracle
from tests.structured.proxy import COMPLETIONS, Proxy
from tests.structured.real_text import make_base_model

PYTHON = os.environ.get("EBFT_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(PYTHON is None, reason="EBFT_VLLM_PYTHON names no interpreter with vLLM"),
]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TEMPERATURE = 0.7
AGREE = 1e-3  # nats between the server's log-probabilities and the trainer's

CONFIG = """
{{base_model: {base}, rl: ebft, ebft: {{embed_method: completion_mean, gt_length_multiplier: 1.0, gt_length_floor: 1}},
trl: {{num_generations: 4, max_completion_length: 16, temperature: 0.7, use_vllm: true, vllm_server_timeout: 600}},
vllm: {{port: {port}, max_model_len: 128, python: {python}}}, val_set_size: 16, eval_steps: 3, sequence_len: 96,
datasets: [{{path: {rows}, type: tests.structured.real_text.transform}}],
adapter: lora, lora_r: 8, lora_alpha: 16, lora_target_linear: true, micro_batch_size: 8, gradient_accumulation_steps: 2,
max_steps: 3, learning_rate: 2.0e-3, lr_scheduler: constant, logging_steps: 1, output_dir: {out}}}
"""
SETTINGS = dict(num_generations=4, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=3)
SETTINGS |= dict(max_completion_length=16, temperature=TEMPERATURE, learning_rate=2e-3, lr_scheduler_type="constant")
SETTINGS |= dict(logging_steps=1, gradient_checkpointing=False, report_to="none", disable_tqdm=True, loss_type="grpo")
SETTINGS |= dict(save_strategy="no", use_vllm=True, vllm_mode="server", vllm_server_timeout=600)
SETTINGS |= dict(per_device_eval_batch_size=64)
BY_REFERENCE = {"gt_length_multiplier": 1.0, "gt_length_floor": 1}
COMMAND = [sys.executable, "-m", "ebft"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base_model(tmp_path_factory.mktemp("real-text"))


def write_config(folder, base, port):
    path = folder / "run.yaml"
    rows = base.with_name("rows.jsonl")
    path.write_text(CONFIG.format(base=base, rows=rows, port=port, python=PYTHON, out=folder / "out"))
    return path


@pytest.fixture(scope="module")
def port(base, tmp_path_factory):
    """The port of `ebft vllm-serve`, running."""
    port = free_port()
    config = write_config(tmp_path_factory.mktemp("serve"), base, port)
    command = [*COMMAND, "vllm-serve", str(config)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert f"http://127.0.0.1:{port}" in process.stdout.readline()
    yield port
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def rows_of(base, count, start=0):
    lines = base.with_name("rows.jsonl").read_text().splitlines()[start : start + count]
    rows = [json.loads(line) for line in lines]
    return Dataset.from_list([{"prompt": row["input"], "ground_truth": row["output"]} for row in rows])


def arguments(folder, port, config_class=EBFTConfig, **changes):
    return config_class(output_dir=str(folder), vllm_server_port=port, **{**SETTINGS, **changes})


def make(base, args, trainer_class=EBFTTrainer, model=None, **kwargs):
    tokenizer = AutoTokenizer.from_pretrained(base)
    policy = AutoModelForCausalLM.from_pretrained(base if model is None else model)
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    kwargs = {"train_dataset": rows_of(base, 64), "processing_class": tokenizer, "peft_config": adapter, **kwargs}
    return trainer_class(policy, args=args, **kwargs)


def differences(history):
    key = "sampling/sampling_logp_difference/max"
    return [entry[key] for entry in history if key in entry]


def steps_of(history):
    return [entry for entry in history if "loss" in entry]


# The command


def trained(tmp_path, command, *overrides):
    """What a run in processes of its own prints, whose config is in the folder, and its logs."""
    command = [*command, "train", str(tmp_path / "run.yaml"), *overrides]
    finished = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stderr
    assert not (tmp_path / "out" / "vllm_adapters").exists()
    return finished.stdout, json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_serve_and_train_from_the_command_line(base, port, tmp_path, mode):
    write_config(tmp_path, base, port)
    printed, history = trained(tmp_path, COMMAND, f"trl.async_prefetch={mode == 'async'}".lower())
    assert "Model saved in" in printed
    steps = steps_of(history)
    assert [entry["rollouts/staleness"] for entry in steps] == ([0, 0, 0] if mode == "sync" else [0, 1, 1])
    assert steps[0]["sampling/sampling_logp_difference/max"] < AGREE
    if mode == "sync":
        assert max(differences(history)) < AGREE
    else:
        assert steps[1]["sampling/sampling_logp_difference/max"] > AGREE  # sampled before the first update
    assert any("eval_alignment" in entry for entry in history)


def test_managed_is_one_command(base, tmp_path):
    config = write_config(tmp_path, base, free_port())
    command = [*COMMAND, "train", str(config), "trl.vllm_mode=managed", "max_steps=2"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = set()
    while process.poll() is None:
        children |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        time.sleep(0.5)
    out, error = process.communicate()
    assert process.returncode == 0, error
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert len(differences(history)) == 2 and max(differences(history)) < AGREE
    assert len(children) >= 3 and not alive(children)  # supervisor, API server, engine


def test_two_processes_share_the_server(base, port, tmp_path):
    write_config(tmp_path, base, port)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "ebft",
    ]
    overrides = ["trl.async_prefetch=true", "gradient_accumulation_steps=1", "val_set_size=", "eval_steps="]
    steps = steps_of(trained(tmp_path, launcher, *overrides)[1])
    assert [entry["rollouts/staleness"] for entry in steps] == [0, 1, 1]
    assert steps[0]["sampling/sampling_logp_difference/max"] < AGREE


# The weights


def test_alignment_on_held_out_prompts_rises(base, port, tmp_path):
    features = {"embed_method": "completion_mean", "diversity_coef": 0.5}
    # The noise of vLLM differs from run to run. Over generate(), these steps give +0.055, +0.061 and +0.067 with three
    # seeds.
    options = {"per_device_train_batch_size": 32, "max_steps": 40, "learning_rate": 4e-3, **features}
    args = arguments(tmp_path, port, **BY_REFERENCE, **options)
    trainer = make(base, args, train_dataset=rows_of(base, 300, start=200), eval_dataset=rows_of(base, 200))
    before = trainer.evaluate()
    trainer.train()
    assert max(differences(trainer.state.log_history)) < AGREE
    after = trainer.evaluate()
    assert after["eval_alignment"] > before["eval_alignment"] + 0.02


def test_rollouts_follow_the_policy(base, port, tmp_path):
    # A reward that any policy learns at once.
    spaces = lambda completions, **_: [text.count(" ") / max(1, len(text)) for text in completions]
    rewards = {}
    for interval in (1, 1000):
        options = {"max_steps": 12, "learning_rate": 1e-2, "vllm_sync_interval": interval}
        args = arguments(tmp_path, port, RolloutGRPOConfig, **options)
        trainer = make(base, args, RolloutGRPOTrainer, reward_funcs=spaces)
        trainer.train()
        steps = steps_of(trainer.state.log_history)
        rewards[interval] = [entry["reward"] for entry in steps]
        assert steps[-1]["rollouts/staleness"] == (0 if interval == 1 else 11)
    mean = lambda values: sum(values) / len(values)
    # Of 16 completions a step, the mean reward of one step says little.
    assert mean(rewards[1][-3:]) > mean(rewards[1000]) + 0.2  # the server samples from what was trained
    assert abs(mean(rewards[1000][6:]) - mean(rewards[1000][:6])) < 0.1  # and would not without the updates


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_stale_samples_are_corrected(base, port, tmp_path, mode):
    bounds = {"vllm_importance_sampling_clip_max": 1.05, "vllm_importance_sampling_clip_min": 0.96}
    options = {"vllm_importance_sampling_mode": mode, "max_steps": 2, **bounds}
    trainer = make(base, arguments(tmp_path, port, vllm_sync_interval=1000, **BY_REFERENCE, **options))
    batches = []
    scored = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda rows: batches.append(scored(rows)) or batches[-1]
    policies, weights = [], lambda: {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.add_callback(_OnStepEnd(lambda: policies.append(weights())))
    trainer.train()
    trainer.model.load_state_dict(policies[0])  # what the second batch was trained with
    batch, base_model = batches[1], AutoModelForCausalLM.from_pretrained(base).eval()
    for number, rollout in enumerate(trainer.rollouts):
        count = len(rollout.ids)
        ids = batch["prompt_ids"][number][batch["prompt_mask"][number].bool()].tolist()
        completion = batch["completion_ids"][number][batch["completion_mask"][number].bool()].tolist()
        with torch.no_grad():
            then = oracle.token_logps(base_model, ids, completion, TEMPERATURE)
            now = oracle.token_logps(trainer.model.eval(), ids, completion, TEMPERATURE)
        sampled = batch["sampling_per_token_logps"][number][: len(completion)]
        assert (sampled - then).abs().max() < AGREE  # the server still samples from the base model
        difference = now - then if mode.startswith("token") else (now - then).sum(-1, keepdim=True)
        ratio = difference.exp()
        outside = (ratio > 1.05) | (ratio < 0.96)
        wanted = ratio.clamp(0.96, 1.05) if mode.endswith("truncate") else torch.where(outside, 0.0, ratio)
        found = batch["importance_sampling_ratio"][number][: len(wanted)]
        close = (found - wanted).abs() < 2e-3
        at_bound = torch.minimum((ratio - 1.05).abs(), (ratio - 0.96).abs()) < 1e-2
        assert (close | at_bound).all()  # there, rounding decides
        assert count > 0
    assert (batch["importance_sampling_ratio"] - 1).abs().max() > 0.03
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * batch["completion_mask"]
    torch.testing.assert_close(trainer.importance_ratio(difference), batch["importance_sampling_ratio"])


@pytest.mark.parametrize(
    "truncation", [{"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05, "top_k": 30, "top_p": 0.9}], ids=str
)
def test_truncated_samples_are_scored_under_the_truncated_distribution(base, port, tmp_path, truncation):
    trainer = make(base, arguments(tmp_path, port, **truncation))
    trainer.train()
    steps = steps_of(trainer.state.log_history)
    assert len(steps) == 3 and max(entry["sampling/logp_diff"] for entry in steps) < AGREE
    assert max(entry["sampling/raw_ratio_max"] for entry in steps) < 1 + 10 * AGREE


class _OnStepEnd(TrainerCallback):
    def __init__(self, call):
        self.call = call

    def on_step_end(self, *_, **__):
        self.call()


def test_turns_are_sampled_behind_what_was_said(base, port, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    turns = [{"role": "user", "content": "and then"}, {"role": "assistant", "content": "return self.value"}]
    prompt = lambda i: {"prompt": [{"role": "user", "content": f"def f{i}"}], "ground_truth": "x = " * (1 + i % 3)}
    later = [turns, [], [*turns, *turns], turns] * 4
    rows = [{**prompt(i), "remaining_turns": remaining} for i, remaining in enumerate(later)]
    args = arguments(tmp_path, port, max_steps=2)
    trainer = make(base, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    assert max(differences(trainer.state.log_history)) < AGREE
    assert {2, 3} <= {len(rollout.replies) for rollout in trainer.rollouts}


def test_weights_ahead_do_not_depend_on_timing(base, port, tmp_path):
    def staleness(delay):
        with Proxy(port) as proxy:
            proxy.delay = delay
            args = arguments(tmp_path, proxy.port, AsyncEBFTConfig, prefetch_depth=2, max_steps=5)
            trainer = make(base, args, AsyncEBFTTrainer)
            trainer.train()
        return [entry["rollouts/staleness"] for entry in steps_of(trainer.state.log_history)]

    assert staleness(0.0) == staleness(0.3) == [0, 1, 2, 2, 2]


def test_samples_are_independent_and_long_batches_are_fine(base, port):
    """Equal prompts in several requests at once, more tokens than the server takes in one step."""
    from ebft.structured.rollouts.client import VLLMClient
    from ebft.structured.rollouts.turns import Sampling

    client = VLLMClient("127.0.0.1", port, 120)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 1000, (64, 100), generator=generator).tolist()
    repeated = [prompt for one, other in zip(prompts[::2], prompts[1::2]) for prompt in (one, prompts[0], other)]
    completions = client.complete(str(base), repeated, [12] * len(repeated), Sampling(1.0))
    client.close()
    drawn = [tuple(c.ids) for c, prompt in zip(completions, repeated) if prompt == prompts[0]]
    assert len(drawn) == 33 and len(set(drawn)) > 30


# Faults


def test_a_killed_server_comes_back_and_training_goes_on(base, tmp_path, monkeypatch):
    own_port, killed = free_port(), []
    overrides = ["trl.vllm_mode=managed", "trl.async_prefetch=true", "max_steps=4"]
    config = load_config(write_config(tmp_path, base, own_port), overrides)

    def kill_once(args, state, control, **_):
        if state.global_step == 2 and not killed:
            for child in psutil.Process().children(recursive=True):
                words = " ".join(child.cmdline())
                if "api_server" in words and str(own_port) in words and "supervisor" not in words:
                    child.kill()
                    killed.append(child.pid)

    callback = TrainerCallback()
    callback.on_step_end = kill_once
    monkeypatch.setattr("ebft.run.trainer.ConsoleMetrics", lambda: callback)
    result = train(config)
    assert killed and len(steps_of(result.trainer.state.log_history)) == 4
    assert eventually(lambda: not alive(killed), seconds=10)


def test_errors_of_the_server_are_retried_with_a_bound(base, port, tmp_path, monkeypatch):
    monkeypatch.setattr("ebft.structured.rollouts.client._BACKOFF", 0.05)
    with Proxy(port) as proxy:
        trainer = make(base, arguments(tmp_path, proxy.port, max_steps=1))
        proxy.fail = 4
        trainer.train()
        assert proxy.fail == 0 and trainer.state.global_step == 1
        trainer = make(base, arguments(tmp_path, proxy.port, max_steps=1))
        proxy.fail, before = 10**6, proxy.requests
        with pytest.raises(RolloutError, match="failed 5 times on /v1/completions"):
            trainer.train()
        assert proxy.requests - before <= 5 * 4  # a request for each of four prompts


def test_a_generation_without_tokens_is_an_error(base, port, tmp_path):
    def empty(answer):
        for choice in answer["choices"]:
            choice["token_ids"], choice["logprobs"]["token_logprobs"] = [], []

    with Proxy(port) as proxy:
        trainer = make(base, arguments(tmp_path, proxy.port))
        proxy.change = empty
        with pytest.raises(RolloutError, match="returned no tokens in two attempts for a prompt of"):
            trainer.train()


def test_a_failure_ahead_of_time_surfaces_with_its_cause(base, port, tmp_path):
    with Proxy(port) as proxy:
        args = arguments(tmp_path, proxy.port, AsyncEBFTConfig, max_steps=50)
        trainer = make(base, args, AsyncEBFTTrainer)

        def lose_logps(answer):
            answer["choices"][0]["logprobs"]["token_logprobs"].pop()

        trainer.add_callback(_OnStepEnd(lambda: setattr(proxy, "change", lose_logps)))
        with pytest.raises(RolloutError, match="tokens but .* log-probabilities"):
            trainer.train()
        assert 1 <= trainer.state.global_step <= 3
    assert not any(thread.name.startswith("ebft-rollouts") for thread in threading.enumerate())


def test_another_base_model_or_vocabulary_is_refused(base, port, tmp_path, tiny_tokenizer_dir):
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            for parameter in layer.parameters():
                parameter.mul_(0.7)
    model.save_pretrained(other)
    with pytest.raises(RolloutError, match="serves .*base, and this run trains .*other: they are different models"):
        make(base, arguments(tmp_path, port), model=other)
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    with pytest.raises(RolloutError, match="their tokenizers differ"):
        make(base, arguments(tmp_path, port), processing_class=tokenizer)


def test_log_probabilities_at_another_temperature_are_refused(base, tmp_path):
    from ebft.serving.command import server_command
    from ebft.serving.server import VLLMServer

    port = free_port()
    command = server_command(load_config(write_config(tmp_path, base, port)).server_settings, PYTHON, gpus=0)
    raw = [word.replace("processed_logprobs", "raw_logprobs") for word in command.command]
    with VLLMServer(type(command)(**{**vars(command), "command": tuple(raw)}), tmp_path / "vllm.log") as server:
        server.wait_until_healthy(300)
        with pytest.raises(RolloutError, match="--logprobs-mode processed_logprobs"):
            make(base, arguments(tmp_path, port))


@pytest.mark.parametrize("fault", ["a file in the way", "a full disk"])
def test_adapters_that_cannot_be_written(base, port, tmp_path, fault, monkeypatch):
    trainer = make(base, arguments(tmp_path, port))
    if fault == "a full disk":
        full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        monkeypatch.setattr(trainer.model, "save_pretrained", full)
    else:
        (tmp_path / "vllm_adapters").write_text("in the way")
    with pytest.raises(RolloutError, match="adapter cannot be sent to vLLM: .*vllm_adapters"):
        trainer.train()
    assert Path(trainer.args.output_dir).exists()


def test_what_an_earlier_run_left_does_not_matter(base, port, tmp_path):
    first = make(base, arguments(tmp_path, port, max_steps=1))
    first.generation.server._adapters.close = lambda: None  # as if it had been killed
    first.train()
    leftovers = {entry["id"] for entry in first.generation.server.client.models()}
    second = make(base, arguments(tmp_path, port, max_steps=2))
    second.train()
    assert max(differences(second.state.log_history)) < AGREE
    assert {entry["id"] for entry in second.generation.server.client.models()} == leftovers


# Samples from other weights


def an_old_adapter(base):
    loaded = []

    def change(path, content):
        if path == "/v1/load_lora_adapter":
            loaded.append(content["lora_name"])
        elif path == "/v1/unload_lora_adapter":
            content["lora_name"] = "none"
        elif path == COMPLETIONS and len(loaded) > 1:
            content["model"] = loaded[-2]

    return change


def no_adapter(base):
    return lambda path, content: content.update(model=str(base)) if path == COMPLETIONS else None


def a_corrupted_adapter(base):
    def change(path, content):
        if path == "/v1/load_lora_adapter" and "-step-0-" not in content["lora_name"]:
            file = Path(content["lora_path"]) / "adapter_model.safetensors"
            weights = {name: value + 0.2 * torch.randn(value.shape) for name, value in load_file(file).items()}
            save_file(weights, file)

    return change


def another_temperature(base):
    return lambda path, content: content.update(temperature=1.6) if path == COMPLETIONS else None


# The adapter of step 0 is the base model.
OLD = r"adapter of step 1 .*, but it sampled from the base model .* or the adapter of step 0"
FAR = r"The limit is 0\.2 \(vllm_logp_diff_stop\)"
FAULTS = {an_old_adapter: OLD, no_adapter: OLD, a_corrupted_adapter: FAR, another_temperature: FAR}
FAST = {"learning_rate": 1e-2, "max_completion_length": 24, "gt_length_floor": 24}


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_samples_from_other_weights_are_caught_within_one_batch(base, port, tmp_path, fault, correction):
    with Proxy(port) as proxy:
        args = arguments(tmp_path, proxy.port, vllm_importance_sampling_correction=correction, **FAST)
        trainer = make(base, args)
        proxy.change_request = fault(base)
        with pytest.raises(RolloutError, match=FAULTS[fault]):
            trainer.train()
        assert trainer.state.global_step == (0 if fault is another_temperature else 1)


def test_samples_from_an_outdated_version_are_compared_with_that_version(base, port, tmp_path):
    with Proxy(port) as proxy:
        options = {"max_steps": 6, **FAST}
        trainer = make(base, arguments(tmp_path, proxy.port, AsyncEBFTConfig, **options), AsyncEBFTTrainer)
        trainer.train()
        steps = steps_of(trainer.state.log_history)
        assert steps[-1]["rollouts/staleness"] == 1 and steps[-1]["sampling/sampling_logp_difference/mean"] > AGREE
        assert max(entry["sampling/logp_diff"] for entry in steps) < AGREE
        assert all(abs(entry["sampling/raw_ratio_mean"] - 1) < AGREE for entry in steps)
        trainer = make(base, arguments(tmp_path, proxy.port, AsyncEBFTConfig, **options), AsyncEBFTTrainer)
        proxy.change_request = an_old_adapter(base)
        with pytest.raises(RolloutError, match="but it sampled from the (base model|adapter of step)"):
            trainer.train()
        assert trainer.state.global_step <= 3


def test_an_adapter_with_the_files_of_another_is_refused(base, port, tmp_path):
    copy = tmp_path / "copy"

    def elsewhere(path, content):
        if path == "/v1/load_lora_adapter":
            shutil.copytree(content["lora_path"], copy)
            content["lora_path"] = str(copy)

    with Proxy(port) as proxy:
        trainer = make(base, arguments(tmp_path, proxy.port))
        proxy.change_request = elsewhere
        with pytest.raises(RolloutError, match="reports that it loaded the adapter .*, but lists it with the files in"):
            trainer.train()
