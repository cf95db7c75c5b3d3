import inspect
import json
import shlex
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.main import get_command

from ebft.run.config.schema import RunConfig
from ebft.tools.cli import app
from tests.cli.conftest import ENVIRONMENT, plain

RUN = "base_model: nowhere/model\ndatasets:\n  - {path: some/data, type: completion}\nmax_steps: 7\n"
LORA = ["adapter=lora", "lora_r=2", "lora_alpha=4", "lora_target_linear=true"]


@pytest.fixture
def good(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


@pytest.mark.parametrize("name", sorted(get_command(app).commands))
def test_help_has_the_brackets_of_its_texts_and_examples(ebft, name):
    """rich takes brackets in the text of a command for a style, and some versions of typer escape them."""
    command = get_command(app).commands[name]
    texts = [inspect.getdoc(command.callback), command.epilog or "", *(each.help or "" for each in command.params)]
    words = {word for text in texts for word in text.split() if "[" in word}
    shown = ebft(name, "--help").output
    assert {word for word in words if word.strip(".,:`") not in shown} == set()
    assert len(shown.splitlines()) < 130 and f"ebft {name}" in plain(shown).partition("Examples:")[2]


def test_the_json_schema_has_every_key_with_its_help_and_bounds(ebft):
    schema = json.loads(ebft("config", "--json-schema").output)
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert schema["properties"]["learning_rate"]["anyOf"][0]["exclusiveMinimum"] == 0  # the other is null: unset
    assert all("description" in option for option in schema["$defs"]["EBFTSection"]["properties"].values())


@pytest.mark.parametrize(("arguments", "code", "texts"), [
    ("config", 0, ["base_model", "ebft.stride = 8", "trl.num_generations", "datasets.N.path = required"]),
    ("config stride", 0, ["ebft.stride", "-learning_rate"]), ("config strde", 2, ["No key contains 'strde'"]),
    ("config seed=7 run.yaml --check", 0, ["seed: 7"]), ("config --check", 2, ["requires a FILE"]),
    ("config --check run.yaml --learning_rate 1e-4 --seed=7", 0, ["learning_rate: 0.0001", "seed: 7"]),
    ("config --check run.yaml --datasets.0.split test --bf16 --no-tf32", 0, ["'test'", "bf16: True", "tf32: False"]),
    ("config --check run.yaml --no-bf16 true", 2, ["has no value. Write --no-bf16 alone, or --bf16 VALUE."]),
    ("config --check run.yaml --stride 4", 2, ["'--stride'. Did you mean --ebft.stride?"]),
    ("train run.yaml learning_rte=1", 2, ["'learning_rate'", "^Error: "]), ("--show-completion bash", 0, ["complete"]),
])  # fmt: skip
def test_what_commands_say(ebft, good, monkeypatch, arguments, code, texts):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # the tests may run without a shell
    result = ebft(*arguments.split())
    said = plain(result.stderr if code else result.output)
    assert result.exit_code == code and "Traceback" not in said
    for text in texts:
        found = said.startswith(text[1:]) if text[0] == "^" else text.lstrip("-") in said
        assert found == (text[0] != "-"), (text, said)


def test_ctrl_c_says_how_to_go_on(ebft, good, monkeypatch):
    from ebft.run import training

    def ends_with(error):
        def train(config, command):
            raise error(command)

        monkeypatch.setattr(training, "train", train)

    ends_with(lambda command: training.TrainingInterrupted(f"Stopped at step 4. Resume with: {command}"))
    result = ebft("train", good, "max_steps=4", "wandb_name=my run")
    assert result.exit_code == 130
    assert f"Resume with: {['ebft', 'train', str(good), 'max_steps=4', 'wandb_name=my run']}" in plain(result.stderr)
    monkeypatch.setenv("WORLD_SIZE", "1")  # of a launcher, whose command is unknown
    assert "Resume with: None" in plain(ebft("train", good).stderr)
    monkeypatch.delenv("WORLD_SIZE")
    ends_with(lambda command: training.TrainingInterrupted("Stopped at step 4.", signal.SIGTERM))
    assert ebft("train", good).exit_code == 143
    ends_with(lambda command: KeyboardInterrupt())
    assert ebft("train", good).exit_code == 130


def test_python_runs_the_command_as_a_module_whose_warnings_are_one_line(good):
    good.write_text(RUN + "pad_to_sequence_len: true\n")
    run = lambda *words: subprocess.run([sys.executable, *words], capture_output=True, text=True, env=ENVIRONMENT)
    done = run("-m", "ebft", "config", "--check", str(good))
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("Warning: pad_to_sequence_len: True has no effect")


def test_train_ends_by_leaving_the_process_group(ebft, good, monkeypatch):
    done, result = [], SimpleNamespace(output_dir="out", describe_outcome=lambda evaluate: "Outcome: it learned.")
    monkeypatch.setattr("ebft.run.training.train", lambda config, command: done.append("train") or result)
    monkeypatch.setattr("ebft.tools.cli.training.leave_process_group", lambda: done.append("leave"))
    ended = ebft("train", str(good))
    assert ended.exit_code == 0 and "Outcome: it learned." in ended.stderr and "Model saved in out" in ended.stdout
    assert done == ["train", "leave"]


def test_the_commands_that_are_printed_at_the_end_of_training_work(ebft, run_file, tmp_path):
    out = tmp_path / "the run"
    keys = [*LORA, "max_steps=2", "eval_steps=1", "ebft.log_completions=true", f"output_dir={out}"]
    ended = ebft("train", run_file, *keys)
    assert ended.exit_code == 0, ended.stderr
    said = plain(ended.stderr)
    assert "(steps 1 and 2):\n  eval_" in said and f"Report: {out / 'report.html'}" in said
    (line,) = [line for line in said.splitlines() if line.startswith("Next: ")]
    assert line == f"Next: ebft show '{out}'; ebft inference '{out}'; ebft merge-lora '{out}'"
    for command in line.removeprefix("Next: ").split("; "):
        words = shlex.split(command)[1:]
        done = ebft(*words, *(["--prompt", "question", "--max-new-tokens", "2"] if words[0] == "inference" else []))
        assert done.exit_code == 0, (command, done.stderr)
    merged = ebft("merge-lora", run_file, *keys, "--output", tmp_path / "merged")
    assert merged.exit_code == 0 and "1 shard," in merged.stdout and "Peak memory" in merged.stdout
    again = ebft("merge-lora", run_file, *keys)
    assert again.exit_code == 2 and "is not empty" in again.stderr
    command = said.partition("confidence intervals:\n  ")[2].splitlines()[0]
    assert command.startswith(f"ebft evaluate {run_file} adapter=lora")
    assert ebft(*shlex.split(command)[1:]).exit_code == 0
    ebft("report", out)
    assert "compared with" in (out / "report.html").read_text()


@pytest.mark.slow
def test_adapter_on_a_gguf_file_is_measured_and_merged(ebft, write_config, tiny_gguf, tmp_path):
    """Its adapter_config names the file: with the config of its run and with another, and merged as training prints."""
    model, out, config = shutil.copy(tiny_gguf, tmp_path / "tiny.gguf"), tmp_path / "out", write_config("strided")
    gguf, result = [f"base_model={tmp_path}", "gguf_file=tiny.gguf"], tmp_path / "result.json"
    trained = ebft("train", config, *gguf, *LORA, "max_steps=1", f"output_dir={out}")
    assert trained.exit_code == 0 and "config file" not in trained.stderr, trained.output + trained.stderr
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    found = []
    for base in (gguf, [f"base_model={model}"], []):
        models = ["--model", model, "--model", out, "--output", result]
        ended = ebft("evaluate", config, *base, "evaluation.max_new_tokens=4", *models)
        assert ended.exit_code == 0, ended.output + ended.stderr
        written = json.loads(result.read_text())
        found.append([entry["metrics"]["ce_loss"] for entry in written["models"]])
        assert written["settings"]["base_model"].endswith(".gguf") == bool(base), "the file is the feature space"
    assert found[0] == pytest.approx(found[1], abs=1e-6) and found[0] == pytest.approx(found[2], abs=1e-6)
    for command in trained.stderr.partition("Next: ")[2].splitlines()[0].split("; "):
        if "inference" not in command:
            done = ebft(*shlex.split(command)[1:])
            assert done.exit_code == 0 and "renamed" not in done.stderr, (command, done.stderr)
    assert (out / "merged" / "model.safetensors").is_file()
