import json
import re
import resource
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ebft.cli import app
from ebft.cli.train import leave_process_group
from ebft.config.schema import RunConfig
from tests.cli.conftest import ENVIRONMENT, plain


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("base_model: nowhere/model\ndatasets:\n  - {path: some/data, type: completion}\nmax_steps: 7\n")
    return path


def test_help_is_fast_and_imports_no_torch():
    code = (
        "import sys, ebft.cli\nsys.argv = ['ebft', 'train', '--help']\n"
        "try:\n    ebft.cli.main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU seconds: others may be using the machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


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


@pytest.mark.parametrize("name", [command.name for command in app.registered_commands])
def test_the_help_of_every_command_has_examples(ebft, name):
    text = plain(ebft(name, "--help").output)
    assert f"ebft {name}" in text.partition("Examples:")[2]


@pytest.mark.parametrize(
    "words, expected",
    [("ebft tr", {"train"}), ("ebft train run.yaml ebft.str", {"ebft.stride="}), ("ebft config --ch", {"--check"})],
)
def test_commands_options_and_keys_are_completed(ebft, words, expected):
    environment = {**ENVIRONMENT, "_EBFT_COMPLETE": "complete_bash", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split()) - 1)
    code = "import sys, ebft.cli; sys.argv = ['ebft']; ebft.cli.app(prog_name='ebft')"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert set(found.stdout.split()) == expected


def test_the_script_of_the_completion_is_printed(ebft):
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

    def interrupted(config):
        raise training.TrainingInterrupted("Stopped at step 4. Resume with: ebft train CONFIG resume...")

    monkeypatch.setattr(training, "train", interrupted)
    result = ebft("train", good)
    assert result.exit_code == 130 and "Stopped at step 4" in plain(result.stderr)

    def preempted(config):
        raise training.TrainingInterrupted("Stopped at step 4.", signal.SIGTERM)

    monkeypatch.setattr(training, "train", preempted)
    assert ebft("train", good).exit_code == 143
    monkeypatch.setattr(training, "train", lambda config: (_ for _ in ()).throw(KeyboardInterrupt))
    result = ebft("train", good)
    assert result.exit_code == 130 and "nothing was saved" in plain(result.stderr)


def test_warnings_are_one_line(good):
    good.write_text(good.read_text() + "pad_to_sequence_len: true\n")
    command = [sys.executable, "-m", "ebft.cli", "config", "--check", str(good)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0
    assert done.stderr.startswith("Warning: pad_to_sequence_len: True has no effect") and done.stderr.count("\n") == 1


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
    done, result = [], SimpleNamespace(output_dir="out", outcome="Outcome: it learned.")
    monkeypatch.setattr("ebft.run.training.train", lambda config: done.append("train") or result)
    monkeypatch.setattr("ebft.cli.train.leave_process_group", lambda: done.append("leave"))
    ended = ebft("train", str(good))
    assert ended.exit_code == 0 and "Outcome: it learned." in ended.stderr and "Model saved in out" in ended.stdout
    assert done == ["train", "leave"]
