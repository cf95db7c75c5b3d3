"""Plugins: callbacks and receivers of rollouts, by their import path."""

import json

import pytest
import torch

from ebft import train
from ebft.config.schema import RunConfig
from ebft.errors import ConfigError, NonFiniteLossError
from ebft.run.checks import check_runnable
from ebft.run.plugins import check_plugins
from tests.run import following
from tests.run.test_training import STRIDED, make, text  # noqa: F401 - fixtures

PATH = "tests.run.following."


@pytest.fixture(autouse=True)
def seen():
    following.seen.clear()
    return following.seen


def test_callbacks_and_rollouts_of_a_strided_run(make, seen, tmp_path):  # noqa: F811
    options = {**STRIDED, "ebft": {**STRIDED["ebft"], "log_completions": True}}
    train(make("ebft_pretrain.transform", plugins=[PATH + "Both"], **options))
    assert [entry for entry in seen if isinstance(entry, int)] == [1, 2]
    calls = [entry for entry in seen if not isinstance(entry, int)]
    assert len(calls) == 2
    logged = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert [entry for entries, _ in calls for entry in entries] == logged
    for entries, rewards in calls:
        first = entries[0]["blocks"][0]["samples"]
        assert rewards[0, :, 0].tolist() == pytest.approx([sample["rewards"] for sample in first])
        assert isinstance(entries[0]["document"], str)


def test_what_plugins_change(make, seen, tmp_path):  # noqa: F811
    options = {**STRIDED, "ebft": {**STRIDED["ebft"], "log_completions": True}}
    with pytest.warns(UserWarning, match="Changes.on_rollouts_scored changed the rewards, which has no effect"):
        train(make("ebft_pretrain.transform", plugins=[PATH + "Changes", PATH + "Rollouts"], **options))
    assert all(entries and rewards.any() for entries, rewards in (each for each in seen if isinstance(each, tuple)))
    seen.clear()
    before = torch.get_float32_matmul_precision()
    with pytest.warns(UserWarning, match="SetsUp.on_step_end changed torch.set_float32_matmul_precision: high became"):
        train(make(plugins=[PATH + "SetsUp"], output_dir=str(tmp_path / "set")))
    torch.set_float32_matmul_precision(before)
    assert seen == ["high"] * 3


def test_weights_that_are_not_finite_are_not_saved(make, tmp_path):  # noqa: F811
    with pytest.raises(
        NonFiniteLossError, match="Weights are NaN or infinite after the last step .first.*they were so in base_model"
    ):
        train(make(plugins=[PATH + "Ruins"]))
    assert json.loads((tmp_path / "out" / "ebft_final.json").read_text())["step"] is None


def test_a_callback_of_plain_fine_tuning(make, seen, tmp_path):  # noqa: F811
    train(make(plugins=[PATH + "Steps"]))
    assert seen == [1, 2]
    with pytest.raises(ConfigError, match="has on_rollouts_scored, but this method samples no rollouts"):
        train(make(plugins=[PATH + "Rollouts"], output_dir=str(tmp_path / "elsewhere")))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (PATH + "Neither", "must be a class: a transformers.TrainerCallback, or one with a method on_rollouts_scored"),
        (PATH + "function", "must be a class"),
        (PATH + "Absent", "has no function 'Absent'"),
        ("no_such_module.Class", "the module was not found"),
        (
            PATH + "OtherArguments",
            r"OtherArguments.on_rollouts_scored cannot be called as on_rollouts_scored.self, roll",
        ),
        (PATH + "NeedsArguments", "cannot be called as NeedsArguments..: missing a required argument: 'folder'"),
        (
            PATH + "Positional",
            r"Positional.on_step_end cannot be called as .*'model'. Define it as on_step_end.self, a",
        ),
        (PATH + "LogsOnly", "LogsOnly.on_log cannot be called as on_log.*unexpected keyword argument"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(name, message):
    config = RunConfig.from_dict(
        {"base_model": "some/model", "datasets": [{"path": "x", "type": "completion"}], "plugins": [name]}
    )
    with pytest.raises(ConfigError, match=message):
        check_runnable(config)


def test_methods_of_every_kind_are_accepted():
    check_plugins([PATH + name for name in ("Accepted", "Both", "Steps", "Rollouts")])
