"""`ebft doctor`: the environment, configs that can be trained, and one error for each thing that cannot work."""

import importlib.util
import re

import pytest
from datasets import Dataset

from ebft.models import load, pretrained
from ebft.run.config.schema import load_config
from ebft.tools.doctor.memory import advice, memory_checks, needs
from ebft.tools.doctor.rows import LongestRows, PromptLength, longest_rows, row_lengths
from tests.cli.conftest import plain
from tests.golden.runs import write_inputs

# A level, the name of a check, and its message, which may have several lines.
_LINE = r"^(ok|warning|error) +(.*?): ((?:.|\n(?!ok|warning|error|\d+ errors))*)"
MODELS = ["model", "optimizer", "loss and backward"]


@pytest.fixture
def doctor(ebft):
    """`doctor(path, ...)` -> (exit code, {(level, name): message})."""

    def run(*arguments):
        result = ebft("doctor", *arguments)
        lines = re.findall(_LINE, plain(result.stdout), re.MULTILINE)
        found = {(level, name): message for level, name, message in lines}
        return result.exit_code, found

    return run


def levels(found):
    return {level for level, _ in found}


def test_the_installation_is_consistent(doctor):
    code, found = doctor()
    assert code == 0 and levels(found) == {"ok"}
    assert "required packages" in found["ok", "packages"] and ("ok", "extra tensorboard") in found


def test_no_weights_and_a_server_that_does_not_answer(doctor, tmp_path, monkeypatch):
    path = write_inputs("sft", tmp_path)
    next((tmp_path / "model").glob("*.safetensors")).unlink()
    code, found = doctor(path)
    assert code == 1 and "step" in {name for level, name in found if level == "error"}
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    code, found = doctor(path, "--no-step")
    assert code == 1 and "not estimated, because model, tokenizer or data are" in found["warning", "memory"]
    monkeypatch.setattr("ebft.tools.doctor.run._SERVER_TIMEOUT", 0.1)
    path = write_inputs("structured_cross_entropy", tmp_path / "structured")
    code, found = doctor(path, "trl.use_vllm=true", "trl.vllm_mode=server", "trl.vllm_server_port=9")
    assert code == 1 and "ebft vllm-serve" in found["error", "server"]
    assert "not run" in found["warning", "step"]


@pytest.mark.slow
@pytest.mark.parametrize("name, phases", [
    ("strided_full", ["rollouts", "features"]), ("structured_cross_entropy", ["rollouts", "rewards and features"]),
    ("sft", []), ("reward_model", []), ("process_reward_model", []),
])  # fmt: skip
def test_one_step_of_every_method(doctor, tmp_path, name, phases):
    path = write_inputs(name, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, found = doctor(path)
    assert code == 0 and levels(found) <= {"ok", "warning"}, found
    for phase in [*MODELS, *phases]:
        assert re.search(r"[1-9]\d* MiB|[\d.]+ GiB", found["ok", f"peak memory, {phase}"]), phase
    assert re.search("MiB in [a-z]|GiB in [a-z]", found["ok", "peak memory"]) and "rows" in found["ok", "data"]
    said = r"[\d.e-]+ s per step on the longest rows, .*; \d+\w+ for [\d,]+ steps? at this"
    assert re.match(said, found["ok", "time"]), found
    assert re.search(r"the longest has [\d,]+ tokens", found["ok", "data"])
    assert sorted(tmp_path.rglob("*")) == before, "the doctor leaves no files"


@pytest.mark.parametrize("overrides, level, name, message", [
    ([], "ok", "memory", "14,848 of 171,584 weights are trained"),
    (["sequence_len=100000"], "ok", "data", "rows"),  # only documents must fit into the model's positions
    (["base_model=/no/model"], "error", "model", "'/no/model' does not exist"),
    (["wandb_project=mine"], "warning", "packages of this config", "pip install wandb"),
    (["gradient_accumulation_steps=1000000"], "warning", "step size", "000,000 rows, but there are"),
])  # fmt: skip
def test_what_is_found_without_a_step_and_the_weights(doctor, tmp_path, monkeypatch, overrides, level, name, message):
    monkeypatch.setattr("ebft.tools.doctor.run.load_model", None)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    find, absent = importlib.util.find_spec, ("bitsandbytes", "deepspeed", "trackio", "wandb")
    for module in ("importlib.util", "ebft.methods.base_config", "ebft.run.reporting"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name, *rest: None if name in absent else find(name, *rest))
    code, found = doctor(write_inputs("sft", tmp_path), "--no-step", *overrides)
    assert code == (level == "error") and message in found[level, name], found
    assert not any("peak" in name for _, name in found) and (level != "ok" or levels(found) == {"ok"})


def test_memory_and_disk_that_do_not_suffice(doctor, tmp_path, monkeypatch):
    path = write_inputs("strided_full", tmp_path)
    monkeypatch.setattr("ebft.tools.doctor.memory.available_memory", lambda device: (2**20, "a small machine"))
    monkeypatch.setattr("ebft.run.checkpoints.free_disk", lambda folder: (2**10, tmp_path))
    code, found = doctor(path, "save_strategy=epoch")
    assert code == 1 and "adapter: lora" in found["error", "memory"] and "a small machine" in found["error", "memory"]
    assert "save_total_limit" in found["error", "disk"] and "not run" in found["warning", "step"]


def test_a_step_that_runs_out_of_memory_says_what_lowers_it(doctor, tmp_path, monkeypatch):
    def fails(config, tokenizer, rows, memory):
        with memory.phase("loss and backward"):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

    said = []
    monkeypatch.setattr("ebft.tools.doctor.run.measure_step", fails)
    monkeypatch.setattr("ebft.tools.doctor.run.say", lambda text, err: said.append(text))
    code, found = doctor(write_inputs("sft", tmp_path))
    assert "--no-step" in said[0], "a step on a CPU takes minutes without output"
    assert code == 1 and "in loss and backward" in found["error", "step"]
    assert "gradient_checkpointing: true" in found["error", "step"]


def needs_of(path, overrides=(), longest=100):
    """The estimates of a config whose longest rows all have `longest` tokens."""
    config = load_config(path, overrides)
    row = {"input_ids": [1] * longest, "prompt_length": 0}
    prompts = (PromptLength(((longest // 2, longest // 2),)),) if config.method.rows == "prompts" else ()
    rows = LongestRows([row] * 16, prompts, longest)
    return needs(config, load.load_model_config(config), rows)


def test_the_tokens_of_a_step_on_several_turns(tmp_path):
    """Blocks of turns only: up to 8 tokens every 8, after context_length and in turns of 20, 7 and 30 tokens."""
    config = load_config(write_inputs("strided_full", tmp_path), ["micro_batch_size=1", "ebft.context_length=4"])
    blocks = {"stride": 8, "generate_max_len": 8, "min_completion_prefix": 0, "n_samples_per_prompt": 3}
    for name, value in blocks.items():
        setattr(config.ebft, name, value)
    row = {"input_ids": [1] * 100, "prompt_length": 60, "turn_spans": [[10, 30], [40, 47], [60, 90]]}
    tokens = LongestRows([row], (), 100).step_tokens(config)
    assert tokens.loss == 100 + (3 + 1 + 4) * 3 * 8


def estimate_of(path, *overrides):
    return needs_of(path, overrides).now


def test_the_estimates_of_a_full_model_and_of_an_adapter(tmp_path):
    path = write_inputs("strided_full", tmp_path)
    weights = 4 * 156_736
    found = estimate_of(path)
    assert (found.features, found.gradients, found.checkpoint) == (weights, weights, 3 * weights)
    assert found.parts("optimizer")["optimizer"] == 2 * weights
    assert found.parts("model") == {"weights in float32": weights} and found.during("optimizer") == 5 * weights
    assert found.parts("loss and backward")["activations (rough)"] > 0
    found = estimate_of(path, *LORA)
    assert found.features == 0 and found.gradients == 4 * found.trained < weights / 4


def test_parts_of_the_peak_add_up_and_activations_of_a_single_pass_are_kept(tmp_path):
    path = write_inputs("strided_full", tmp_path)
    single, separate = (estimate_of(path, f"ebft.single_pass={on}") for on in ("true", "false"))
    for found in (single, separate):
        assert sum(found.parts(found.peak).values()) == found.total == found.during(found.peak)
    activations = single.parts("loss and backward")["activations (rough)"]
    assert single.during("features") == separate.during("features") + activations
    assert single.during("rollouts") > separate.during("rollouts") + activations
    accumulated = estimate_of(path, "gradient_accumulation_steps=2")
    assert accumulated.during("rollouts") == single.during("rollouts") + single.gradients
    (check,) = memory_checks(needs_of(path))
    assert f"at the peak, in {single.peak}: weights in float32" in check.message and "--for CARD" in check.message


LORA = ["adapter=lora", "lora_r=4", "lora_alpha=8", "lora_target_linear=true"]


BATCH = ["micro_batch", "tokens_per_pass", "n_samples"]


@pytest.mark.parametrize("name, phase, listed, left_out", [
    ("strided_full", "model", ["torch_dtype"], ["micro_batch", "checkpointing", "lora", "max_len", "sequence"]),
    ("strided_full", "rollouts", [*BATCH, "sequence_len: 50"], ["optimizer:"]),
    ("structured_several_turns", "rollouts", ["max_completion_length: 5"], ["micro_batch", "checkpointing"]),
    ("sft", "loss and backward", ["micro_batch", "checkpointing", "sequence_len: 50"], ["n_samples", "max_compl"]),
])  # fmt: skip
def test_savings_lower_the_phase_of_the_peak(tmp_path, name, phase, listed, left_out):
    first, *found = advice(needs_of(write_inputs(name, tmp_path)), phase).split("\n  - ")
    assert first == " To lower it:"
    assert all(any(part in line for line in found) for part in listed), found
    assert not any(part in line for part in left_out for line in found), found
    assert all("saves about" in line for line in found)


def test_lengths_of_prompts_are_tokens_of_prompt_and_completion(tmp_path, doctor):
    path = write_inputs("structured_single_turn", tmp_path)
    config = load_config(path)
    tokenizer = pretrained.load_tokenizer(config)
    data = Dataset.from_list([{"prompt": "a", "ground_truth": "b" * 4}, {"prompt": "a b c", "ground_truth": "d"}])
    lengths = row_lengths(config, tokenizer, data)
    prompt = len(tokenizer("a b c")["input_ids"])
    assert lengths[1] == PromptLength(((prompt, len(tokenizer("d", add_special_tokens=False)["input_ids"])),))
    longest = len(tokenizer("b" * 4, add_special_tokens=False)["input_ids"])
    assert longest_rows(config, data, lengths).longest == prompt + -(-3 * longest // 2)  # gt_length_multiplier 1.5
    without = load_config(path, ["ebft.adaptive_max_tokens=false"])
    assert longest_rows(without, data, lengths).longest == prompt + 10
    _, found = doctor(path, "--no-step")
    assert re.search(r"the longest has (\d+) tokens \(prompt \d+, completion up to \d+\)", found["ok", "data"])
