"""Structured training over a real vLLM server, with faults that a proxy adds (make test-vllm)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from ebft import load_config, train
from ebft.errors import RolloutError
from tests import serving
from tests.models.multimodal import save_multimodal
from tests.serving.processes import alive, eventually, free_port
from tests.structured.proxy import COMPLETIONS, Proxy
from tests.structured.real_text import make_base_model
from tests.structured.trainers import make as make_trainer

PYTHON = os.environ.get("EBFT_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(PYTHON is None, reason="EBFT_VLLM_PYTHON names no interpreter with vLLM"),
]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
AGREE = 1e-3  # nats between the server's log-probabilities and the trainer's

CONFIG = """
{{base_model: {base}, rl: ebft, ebft: {{embed_method: completion_mean, gt_length_multiplier: 1.0, gt_length_floor: 1}},
trl: {{num_generations: 4, max_completion_length: 16, temperature: 0.7, use_vllm: true, vllm_server_timeout: 600}},
vllm: {{port: {port}, max_model_len: 128, python: {python}}}, val_set_size: 16, eval_steps: 3, sequence_len: 96,
datasets: [{{path: {rows}, type: tests.evaluation.metrics.prompt_rows}}],
adapter: lora, lora_r: 8, lora_alpha: 16, lora_target_linear: true, micro_batch_size: 8, gradient_accumulation_steps: 2,
max_steps: 3, learning_rate: 2.0e-3, lr_scheduler: constant, logging_steps: 1, output_dir: {out}}}
"""
SETTINGS = dict(per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=3, max_completion_length=16)
SETTINGS |= dict(learning_rate=2e-3, lr_scheduler_type="constant", per_device_eval_batch_size=64)
SETTINGS |= dict(use_vllm=True, vllm_mode="server", vllm_server_timeout=600)
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
    started = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    yield port
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130 and not alive(started)


def make(base, folder, port, model=None, tokenizer=None, **changes):
    tokenizer = AutoTokenizer.from_pretrained(base) if tokenizer is None else tokenizer
    policy = AutoModelForCausalLM.from_pretrained(base if model is None else model)
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    rows = map(json.loads, base.with_name("rows.jsonl").read_text().splitlines()[:64])
    dataset = Dataset.from_list([{"prompt": row["input"], "ground_truth": row["output"]} for row in rows])
    changes = {**SETTINGS, "vllm_server_port": port, "peft_config": adapter, **changes}
    return make_trainer(policy, tokenizer, folder, dataset, **changes)


def differences(history):
    key = "sampling/sampling_logp_difference/max"
    return [entry[key] for entry in history if key in entry]


def steps_of(history):
    return [entry for entry in history if "loss" in entry]


@pytest.mark.parametrize("ahead", [False, True])
def test_serve_and_train_from_the_command_line(base, port, tmp_path, ahead):
    command = [*COMMAND, "train", str(write_config(tmp_path, base, port)), f"trl.async_prefetch={ahead}".lower()]
    finished = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stderr
    assert "Model saved in" in finished.stdout and not (tmp_path / "out" / "vllm_adapters").exists()
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    steps = steps_of(history)
    assert [entry["rollouts/staleness"] for entry in steps] == ([0, 1, 1] if ahead else [0, 0, 0])
    assert steps[0]["sampling/sampling_logp_difference/max"] < AGREE
    # With prefetching, the second batch was sampled before the first update.
    assert (max(differences(history)) > AGREE) == ahead and max(e["sampling/logp_diff"] for e in steps) < AGREE
    assert any("eval_alignment" in entry for entry in history)


@pytest.mark.filterwarnings("ignore:.*the text model of a multimodal model is loaded")
def test_the_text_model_of_a_multimodal_checkpoint(base, tmp_path):
    tokenizer, path = AutoTokenizer.from_pretrained(base), base.with_name("multimodal")
    save_multimodal("gemma3", path, head_dim=32, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(path)
    overrides = ["trl.vllm_mode=managed", "val_set_size=0", "eval_steps=null", f"base_model={path}"]
    overrides.append(f"vllm.env.PYTHONPATH={Path(serving.__file__).with_name('without_cuda')}")
    config = load_config(write_config(tmp_path, base, free_port()), overrides)
    history = train(config).trainer.state.log_history
    assert len(steps_of(history)) == 3 and 0 < max(differences(history)) < AGREE


def test_a_killed_server_comes_back_and_training_goes_on(base, tmp_path, monkeypatch):
    own_port, killed, children = free_port(), [], set()
    overrides = ["trl.vllm_mode=managed", "trl.async_prefetch=true", "max_steps=4"]
    config = load_config(write_config(tmp_path, base, own_port), overrides)

    def kill_once(args, state, control, **_):
        words = {child: " ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)}
        own = [child for child in words if "supervisor" in words[child]]  # not what libraries have started
        children.update(each.pid for child in own for each in (child, *child.children(recursive=True)))
        if state.global_step == 2 and not killed:
            for child, line in words.items():
                if "api_server" in line and str(own_port) in line and "supervisor" not in line:
                    child.kill()
                    killed.append(child.pid)

    callback = TrainerCallback()
    callback.on_step_end = kill_once
    monkeypatch.setattr("ebft.run.trainer.ConsoleMetrics", lambda: callback)
    result = train(config)
    assert killed and len(steps_of(result.trainer.state.log_history)) == 4
    assert len(children) >= 3 and eventually(lambda: not alive(children), seconds=60)  # supervisor, server, engine


def test_another_base_model_vocabulary_or_temperature_is_refused(base, port, tmp_path, tiny_tokenizer_dir):
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            for parameter in layer.parameters():
                parameter.mul_(0.7)
    model.save_pretrained(other)
    with pytest.raises(RolloutError, match="serves .*base, and this run trains .*other: they are different models"):
        make(base, tmp_path, port, model=other)
    with pytest.raises(RolloutError, match="their tokenizers differ"):
        make(base, tmp_path, port, tokenizer=AutoTokenizer.from_pretrained(tiny_tokenizer_dir))
    with Proxy(port) as proxy, pytest.raises(RolloutError, match="--logprobs-mode processed_logprobs"):
        proxy.change_request = replaces(temperature=1.6)
        make(base, tmp_path, proxy.port)


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


def a_corrupted_adapter(base):
    def change(path, content):
        if path == "/v1/load_lora_adapter" and "-step-0-" not in content["lora_name"]:
            file = Path(content["lora_path"]) / "adapter_model.safetensors"
            weights = {name: value + 0.2 * torch.randn(value.shape) for name, value in load_file(file).items()}
            save_file(weights, file)

    return change


def replaces(**values):
    return lambda path, content: content.update(values) if path == COMPLETIONS else None


# The adapter of step 0 is the base model.
OLD = r"sampled from the base model .* or the adapter of step 0.*, not from the adapter of step 1"
FAR = r"The limit is 0\.2 \(vllm_logp_diff_stop\)"
FAULTS = {"an old adapter": (an_old_adapter, OLD), "no adapter": (lambda base: replaces(model=str(base)), OLD)}
FAULTS |= {"a corrupted adapter": (a_corrupted_adapter, FAR)}
FAULTS |= {"another temperature": (lambda base: replaces(temperature=1.6), FAR)}
FAST = {"learning_rate": 1e-2, "max_completion_length": 24, "gt_length_floor": 24}


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_samples_from_other_weights_are_caught_within_one_batch(base, port, tmp_path, fault, correction):
    with Proxy(port) as proxy:
        trainer = make(base, tmp_path, proxy.port, vllm_importance_sampling_correction=correction, **FAST)
        make_fault, message = FAULTS[fault]
        proxy.change_request = make_fault(base)
        with pytest.raises(RolloutError, match=message):
            trainer.train()
        assert trainer.state.global_step == (0 if fault == "another temperature" else 1)


@pytest.mark.parametrize(
    "truncation", [{"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05, "top_k": 30, "top_p": 0.9}], ids=str
)
def test_truncated_samples_are_scored_under_the_truncated_distribution(base, port, tmp_path, truncation):
    trainer = make(base, tmp_path, port, **truncation)
    trainer.train()
    steps = steps_of(trainer.state.log_history)
    assert len(steps) == 3 and max(entry["sampling/logp_diff"] for entry in steps) < AGREE
    assert max(entry["sampling/raw_ratio_max"] for entry in steps) < 1 + 10 * AGREE
