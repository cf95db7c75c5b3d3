import json
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from typer.main import get_command

from ebft.config.schema import RunConfig
from ebft.tools.cli import app
from ebft.tools.cli.training import leave_process_group, what_next
from tests.cli.conftest import ENVIRONMENT, plain
from tests.run.test_methods import run_file

__all__ = ["run_file"]


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("base_model: nowhere/model\ndatasets:\n  - {path: some/data, type: completion}\nmax_steps: 7\n")
    return path


def test_help_is_fast_and_imports_no_torch():
    code = (
        "import sys, ebft.tools.cli\nsys.argv = ['ebft', 'train', '--help']\n"
        "try:\n    ebft.tools.cli.main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU seconds, since others may be using the machine; they then count for more, so this is twice what it takes.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_train_help_names_every_top_level_key(ebft):
    text = plain(ebft("train", "--help").output)
    assert [name for name in RunConfig.model_fields if not re.search(rf"\b{name}\b", text)] == []


def test_the_json_schema_has_every_key_with_its_help_and_bounds(ebft):
    schema = json.loads(ebft("config", "--json-schema").output)
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    value = lambda key: key["anyOf"][0]  # the other is null: unset
    assert value(schema["properties"]["learning_rate"])["exclusiveMinimum"] == 0
    section = schema["$defs"][value(schema["properties"]["ebft"])["$ref"].rpartition("/")[2]]
    assert value(section["properties"]["mode"])["enum"] == ["structured", "strided"]
    assert all("description" in option for option in section["properties"].values())
    result = ebft("config", "--json-schema", "stride")
    assert result.exit_code == 2 and "Leave out" in plain(result.output)


def test_config_prints_every_key(ebft):
    text = plain(ebft("config").output)
    for name in ("base_model", "ebft.stride = 8", "trl.num_generations", "datasets.N.path = required"):
        assert name in text


def test_config_can_search(ebft):
    text = plain(ebft("config", "stride").output)
    assert "ebft.stride" in text and "learning_rate" not in text


def test_a_search_without_a_match_says_so(ebft):
    result = ebft("config", "strde")
    assert result.exit_code == 2 and "No key contains 'strde'" in plain(result.stderr)


def test_an_override_with_dashes_is_corrected(ebft, tmp_path):
    (tmp_path / "run.yaml").write_text("base_model: some/model\n")
    result = ebft("config", "--check", tmp_path / "run.yaml", "--learning_rate", "1e-4")
    assert result.exit_code == 2 and "learning_rate=VALUE" in plain(result.stderr)
    result = ebft("config", "--josn-schema")
    assert result.exit_code == 2 and "No such option: --josn-schema" in plain(result.stderr)


@pytest.mark.parametrize("name", [command.name for command in app.registered_commands])
def test_the_help_of_every_command_has_examples(ebft, name):
    text = plain(ebft(name, "--help").output)
    assert f"ebft {name}" in text.partition("Examples:")[2]


def test_options_have_the_same_name_in_all_commands():
    """The convention in ebft.tools.cli.arguments: former and other names are hidden."""
    options = {name: get_command(app).commands[name].params for name in get_command(app).commands}
    shown = {(name, *option.opts) for name in options for option in options[name] if not getattr(option, "hidden", 0)}
    writes = [name for name in ("evaluate", "fetch", "merge-lora", "quantize", "quickstart")]
    assert all((name, "--output") in shown for name in writes)
    assert not [names for names in shown if {"--to", "--dest", "--debug-num"} & set(names)]
    assert {("show", "--count", "-n"), ("preprocess", "--count", "-n")} <= shown
    assert {(name, "--base-model") for name in ("inference", "merge-lora")} <= shown


def test_the_script_of_the_completion_is_printed(ebft, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # the tests may run without a shell
    assert ebft("--show-completion", "bash").exit_code == 0


def test_version(ebft):
    result = ebft("--version")
    assert result.exit_code == 0 and re.fullmatch(r"ebft \d+\.\d+\.\d+\n", result.output)


def test_check_says_what_differs(ebft, good):
    result = ebft("config", "--check", good)
    assert result.exit_code == 0
    assert "max_steps: 7" in result.output and "is valid" in result.output


def test_an_error_is_one_message_and_exit_code_2(ebft, good):
    good.write_text(good.read_text() + "learning_rte: 1\n")
    for arguments in (("config", "--check", good), ("train", good)):
        result = ebft(*arguments)
        assert result.exit_code == 2
        message = plain(result.stderr)
        assert message.startswith("Error: ") and "'learning_rate'" in message and "Traceback" not in message


def test_check_refuses_what_cannot_be_trained(ebft, good):
    good.write_text(good.read_text() + "rl: grpo\n")
    result = ebft("config", "--check", good)
    assert result.exit_code == 2 and "rl: grpo needs trl.reward_funcs" in plain(result.stderr)


def test_an_override_reaches_the_config(ebft, good):
    result = ebft("train", good, "max_steps=many")
    assert result.exit_code == 2 and "max_steps: invalid value 'many'" in plain(result.stderr)


def test_an_option_with_dashes_says_how_it_is_written(ebft, good):
    result = ebft("train", good, "--learning-rate=1e-4")
    assert result.exit_code == 2 and "overrides are written without dashes: learning_rate=1e-4" in plain(result.stderr)


def test_ctrl_c_says_how_to_go_on(ebft, good, monkeypatch):
    from ebft.run import training

    def interrupted(config, command):
        raise training.TrainingInterrupted(f"Stopped at step 4. Resume with: {command}")

    monkeypatch.setattr(training, "train", interrupted)
    result = ebft("train", good, "max_steps=4", "wandb_name=my run")
    assert result.exit_code == 130
    assert f"Resume with: {['ebft', 'train', str(good), 'max_steps=4', 'wandb_name=my run']}" in plain(result.stderr)
    monkeypatch.setenv("WORLD_SIZE", "1")  # of a launcher, whose command is unknown
    assert "Resume with: None" in plain(ebft("train", good).stderr)
    monkeypatch.delenv("WORLD_SIZE")

    def preempted(config, command):
        raise training.TrainingInterrupted("Stopped at step 4.", signal.SIGTERM)

    monkeypatch.setattr(training, "train", preempted)
    assert ebft("train", good).exit_code == 143
    monkeypatch.setattr(training, "train", lambda config, command: (_ for _ in ()).throw(KeyboardInterrupt))
    result = ebft("train", good)
    assert result.exit_code == 130 and "nothing was saved" in plain(result.stderr)


def test_a_stopped_quickstart_has_one_instruction(ebft, tmp_path, monkeypatch):
    from ebft.run import training
    from ebft.tools.quickstart import main

    def stopped(*arguments):
        raise training.TrainingInterrupted("Stopped at step 4. Resume by starting the run again.", signal.SIGTERM)

    monkeypatch.setattr(main, "quickstart", stopped)
    result = ebft("quickstart", "--output", tmp_path / "out")
    said = " ".join(plain(result.stderr).split())
    assert (
        result.exit_code == 143
        and "Run the same command to start again; complete data and base models are kept" in said
        and "Resume by" not in said
    )


def test_warnings_are_one_line(good):
    good.write_text(good.read_text() + "pad_to_sequence_len: true\n")
    command = [sys.executable, "-m", "ebft", "config", "--check", str(good)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0
    assert done.stderr.startswith("Warning: pad_to_sequence_len: True has no effect") and done.stderr.count("\n") == 1


def test_python_runs_the_command_as_a_module():
    done = subprocess.run([sys.executable, "-m", "ebft", "--version"], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0 and plain(done.stdout) == f"ebft {version('ebft')}\n", done.stderr


def test_check_takes_the_overrides_of_train(ebft, good):
    result = ebft("config", "--check", good, "ebft.feature_layers=0.5")
    assert result.exit_code == 2 and "ebft.feature_layers" in plain(result.stderr)
    result = ebft("config", "--check", good, "seed=7")
    assert result.exit_code == 0 and "seed: 7" in plain(result.stdout)


def test_training_leaves_no_process_group_to_the_exit_of_the_interpreter(tmp_path):
    from torch import distributed

    leave_process_group()  # none there: nothing happens
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", world_size=1, rank=0)
    leave_process_group()
    assert not distributed.is_initialized()


def test_train_ends_by_leaving_the_process_group(ebft, good, monkeypatch):
    done, result = [], SimpleNamespace(output_dir="out", describe_outcome=lambda evaluate: "Outcome: it learned.")
    monkeypatch.setattr("ebft.run.training.train", lambda config, command: done.append("train") or result)
    monkeypatch.setattr("ebft.tools.cli.training.leave_process_group", lambda: done.append("leave"))
    ended = ebft("train", str(good))
    assert ended.exit_code == 0 and "Outcome: it learned." in ended.stderr and "Model saved in out" in ended.stdout
    assert done == ["train", "leave"]


def test_the_commands_that_are_printed_at_the_end_of_training_work(ebft, run_file, tmp_path):
    out = tmp_path / "the run"
    lora = ["adapter=lora", "lora_r=2", "lora_alpha=4", "lora_target_linear=true"]
    keys = [*lora, "max_steps=2", "eval_steps=1", "ebft.log_completions=true", f"output_dir={out}"]
    ended = ebft("train", run_file, *keys)
    assert ended.exit_code == 0, ended.stderr
    said = plain(ended.stderr)
    assert "(steps 1 and 2):\n  eval_" in said and f"Report: {out / 'report.html'}" in said
    (line,) = [line for line in said.splitlines() if line.startswith("Next: ")]
    assert line == f"Next: ebft show '{out}'; ebft inference '{out}' --completion; ebft merge-lora '{out}'"
    for command in line.removeprefix("Next: ").split("; "):
        words = shlex.split(command)[1:]
        done = ebft(*words, *(["--prompt", "question", "--max-new-tokens", "2"] if words[0] == "inference" else []))
        assert done.exit_code == 0, (command, done.stderr)
    command = said.partition("confidence intervals:\n  ")[2].splitlines()[0]
    assert command.startswith(f"ebft evaluate {run_file} adapter=lora")
    assert ebft(*shlex.split(command)[1:]).exit_code == 0
    ebft("report", out)
    assert "compared with" in (out / "report.html").read_text()


def test_full_models_and_runs_without_rollouts_have_fewer_commands(tmp_path):
    required = {"base_model": "some/model", "datasets": [{"path": "some/data", "type": "completion"}]}
    plain_text = [f"Next: ebft inference {tmp_path} --completion"]
    assert what_next(RunConfig.from_dict(required), tmp_path) == plain_text
    required["datasets"].append({"path": "other/data", "type": "chat_template"})
    assert what_next(RunConfig.from_dict(required), tmp_path) == [f"Next: ebft inference {tmp_path}"]


@pytest.mark.slow
def test_adapter_of_a_gguf_file_is_merged_by_the_commands_that_training_prints(ebft, write_config, tiny_gguf, tmp_path):
    model, out = shutil.copy(tiny_gguf, tmp_path / "tiny.gguf"), tmp_path / "out"
    lora = ["adapter=lora", "lora_r=4", "lora_alpha=8", "lora_target_linear=true", "max_steps=1"]
    trained = ebft("train", write_config("strided"), f"base_model={tmp_path}", "gguf_file=tiny.gguf", *lora,
                   f"output_dir={out}")  # fmt: skip
    refused = ebft("merge-lora", out)
    assert f"`ebft fetch {model} --output DIR`, and merge with --base-model DIR" in plain(refused.stderr)
    for command in trained.stderr.partition("Next: ")[2].splitlines()[0].split("; "):
        if "inference" not in command:
            done = ebft(*shlex.split(command)[1:])
            assert done.exit_code == 0 and "renamed" not in done.stderr, (command, done.stderr)
    assert (out / "merged" / "model.safetensors").is_file()
