"""`ebft doctor`: the installation, configs that can be trained, and one error for each thing that cannot work."""

import re
from importlib.metadata import PackageNotFoundError

import pytest

from ebft.config.load import load_config
from ebft.doctor import installation
from ebft.doctor.check import Attempt
from ebft.doctor.installation import check_installation
from ebft.doctor.step import savings
from ebft.errors import DataError
from tests.cli.conftest import ebft, plain
from tests.golden.runs import write_inputs

__all__ = ["ebft"]
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


@pytest.mark.parametrize(
    "installed, message",
    [(None, "trl: not installed"), ("0.9", r"trl: version 0.9 is installed, but .*>=1.16 is required")],
)
def test_a_required_package_that_is_missing_or_too_old(monkeypatch, installed, message):
    real = installation.version

    def version(name):
        if name != "trl":
            return real(name)
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(installation, "version", version)
    (error,) = [check for check in check_installation() if check.level == "error"]
    assert re.search(message, error.message) and "pip install 'trl" in error.message


def test_an_extra_with_a_wrong_version_is_a_warning(monkeypatch):
    real = installation.version
    monkeypatch.setattr(installation, "version", lambda name: "0.1" if name == "tensorboard" else real(name))
    (warning,) = [check for check in check_installation() if check.level == "warning"]
    assert warning.name == "extra tensorboard" and "0.1" in warning.message


@pytest.mark.parametrize(
    "name, phases",
    [
        ("strided_full", ["rollouts", "features"]),
        ("strided_packed", ["rollouts", "features"]),
        ("structured_cross_entropy", ["rollouts", "rewards and features"]),
        ("sft", []),
    ],
)
def test_one_step_of_every_method(doctor, tmp_path, name, phases):
    path = write_inputs(name, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, found = doctor(path)
    assert code == 0 and levels(found) <= {"ok", "warning"}, found
    for phase in [*MODELS, *phases]:
        assert re.search(r"[1-9]\d* MiB|[\d.]+ GiB", found["ok", f"peak memory, {phase}"]), phase
    assert "micro_batch_size" in found["ok", "peak memory"] and "rows" in found["ok", "data"]
    assert sorted(tmp_path.rglob("*")) == before, "the doctor leaves no files"


def test_without_the_step_no_weights_are_loaded(doctor, tmp_path, monkeypatch):
    path = write_inputs("sft", tmp_path)
    monkeypatch.setattr("ebft.doctor.step.load_model", None)
    code, found = doctor(path, "--no-step")
    assert code == 0 and ("ok", "memory") in found and not any("peak" in name for _, name in found)
    assert "14,848 of 156,736 weights are trained" in found["ok", "memory"]


@pytest.mark.parametrize(
    "overrides, name, message",
    [
        (["learning_rte=1"], "config", "learning_rate"),
        (["base_model=/no/model"], "model", "'/no/model' does not exist"),
        (["datasets.0.path=/no/data.jsonl"], "data", "'/no/data.jsonl' does not exist"),
        (["sequence_len=100000"], "model", "positions"),
        (["deepspeed=zero3.json"], "settings", "pip install deepspeed"),
        (["resume_from_checkpoint=/no/checkpoint"], "checkpoint", "is not a folder"),
        (["optimizer=adamm"], "settings", "not known to transformers"),
        (["adapter=qlora", "load_in_4bit=true"], "packages of this config", "qlora"),
    ],
)
def test_one_error_for_each_thing_that_cannot_work(doctor, tmp_path, overrides, name, message):
    code, found = doctor(write_inputs("sft", tmp_path), "--no-step", *overrides)
    assert code == 1
    errors = {key: text for (level, key), text in found.items() if level == "error"}
    assert name in errors and message in errors[name], errors


def test_a_tracker_that_is_not_installed_is_a_warning(doctor, tmp_path):
    code, found = doctor(write_inputs("sft", tmp_path), "--no-step", "use_trackio=true")
    assert code == 0 and "pip install trackio" in found["warning", "packages of this config"]


def test_publishing_without_a_login(doctor, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    code, found = doctor(write_inputs("sft", tmp_path), "--no-step", "hub_model_id=me/model")
    assert code == 1 and "hf auth login" in found["error", "hub"]


def test_a_server_that_does_not_answer(doctor, tmp_path, monkeypatch):
    monkeypatch.setattr("ebft.doctor.run._SERVER_TIMEOUT", 0.1)
    path = write_inputs("structured_cross_entropy", tmp_path)
    code, found = doctor(path, "trl.use_vllm=true", "trl.vllm_mode=server", "trl.vllm_server_port=9")
    assert code == 1 and "ebft vllm-serve" in found["error", "server"]
    assert "not run" in found["warning", "step"]


def test_a_folder_without_weights(doctor, tmp_path):
    path = write_inputs("sft", tmp_path)
    next((tmp_path / "model").glob("*.safetensors")).unlink()
    code, found = doctor(path, "--no-step")
    assert code == 1 and "has no weights" in found["error", "model"]


def test_memory_and_disk_that_do_not_suffice(doctor, tmp_path, monkeypatch):
    path = write_inputs("strided_full", tmp_path)
    monkeypatch.setattr("ebft.doctor.resources.available_memory", lambda: (2**20, "a small machine"))
    monkeypatch.setattr("ebft.doctor.resources.free_disk", lambda folder: (2**10, tmp_path))
    code, found = doctor(path, "save_strategy=epoch")
    assert code == 1 and "adapter: lora" in found["error", "memory"] and "a small machine" in found["error", "memory"]
    assert "save_total_limit" in found["error", "disk"] and "not run" in found["warning", "step"]


def test_a_step_that_runs_out_of_memory_says_what_lowers_it(doctor, tmp_path, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

    monkeypatch.setattr("ebft.doctor.run.measure_step", fails)
    code, found = doctor(write_inputs("sft", tmp_path))
    assert code == 1 and "gradient_checkpointing: true" in found["error", "step"]


def test_the_estimate_of_a_full_model(tmp_path):
    from transformers import AutoConfig

    from ebft.doctor.estimate import estimate

    path = write_inputs("strided_full", tmp_path)
    config = load_config(path)
    weights = 4 * 156_736
    found = estimate(config, AutoConfig.from_pretrained(config.base_model), tokens=100)
    assert (found.weights, found.features, found.gradients) == (weights, weights, weights)
    assert (found.optimizer, found.checkpoint) == (2 * weights, 3 * weights) and found.activations > 0
    lora = load_config(path, ["adapter=lora", "lora_r=4", "lora_alpha=8", "lora_target_linear=true"])
    found = estimate(lora, AutoConfig.from_pretrained(config.base_model), tokens=100)
    assert found.features == 0 and found.gradients == 4 * found.trained < weights / 4


def test_savings_leave_out_what_is_set_already(tmp_path):
    path = write_inputs("strided_full", tmp_path)
    keys = ["micro_batch_size=1", "gradient_checkpointing=true", "torch_dtype=bfloat16", "adapter=lora", "lora_r=4"]
    config = load_config(path, [*keys, "lora_alpha=8", "lora_target_linear=true", "ebft.rollout_tokens_per_pass=64"])
    assert savings(config) == ["sequence_len below 160"]
    assert "micro_batch_size: 3 with gradient_accumulation_steps: 3 (same step)" in savings(
        load_config(path, ["micro_batch_size=9"])
    )


def test_errors_and_warnings_of_a_check_are_lines():
    import warnings

    def warned():
        warnings.warn("careful", stacklevel=1)
        return 3

    def failed():
        raise DataError("no rows")

    (line,) = Attempt("data").run(warned, ok="fine").checks
    assert (line.level, line.message) == ("warning", "careful")
    (line,) = Attempt("data").run(lambda: 3, ok=lambda found: f"{found} rows").checks
    assert (line.level, line.message) == ("ok", "3 rows")
    attempt = Attempt("data").run(failed)
    assert attempt.failed and attempt.checks[0].level == "error"
    with pytest.raises(KeyError):
        Attempt("data").run(lambda: {}["x"])


def test_the_phases_are_measured_apart():
    import torch

    from ebft.monitor.phases import PhaseMemory

    memory = PhaseMemory()
    with memory.phase("outer"):
        kept = torch.ones(2**20)
        with memory.phase("inner"):
            torch.ones(2**26).sum()  # 256 MiB
    assert list(memory.peaks) == ["outer", "inner"] and kept.numel()
    if memory.is_exact:
        assert memory.peaks["inner"] - memory.peaks["outer"] > 200 * 2**20
