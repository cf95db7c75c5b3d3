"""What is pushed to the Hub: the files of the model, and nothing else of the output folder, by every method."""

import json
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi

import ebft.trainer
from ebft import train
from ebft.errors import ConfigError, SaveError
from ebft.files import CHECKSUMS
from ebft.run.integrity import check_complete
from ebft.run.own_files import final_step
from ebft.trainer import pushing
from tests.run.crash import config_of

TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
ADAPTER = {*TOKENIZER, "adapter_config.json", "adapter_model.safetensors", "README.md"}
WEIGHTS = {*TOKENIZER, "config.json", "generation_config.json", "model.safetensors", "README.md"}
STATE = {"optimizer.pt", "rng_state.pth", "running_state.pth", "scheduler.pt", "trainer_state.json"}


class Hub:
    """A Hub that records commits: of each, its message and the contents of its files by name."""

    def __init__(self):
        self.repositories, self.commits, self.failures = {}, [], []

    def create_repo(self, api, repo_id, *, private=None, exist_ok=False, **_):
        assert exist_ok
        self.repositories.setdefault(repo_id, bool(private))
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, api, repo_id, operations, *, commit_message, **_):
        if self.failures and self.failures.pop(0):
            raise ConnectionError("no route")
        found = {}
        for operation in operations:
            with operation.as_file() as file:
                found[operation.path_in_repo] = file.read()
        self.commits.append((commit_message, found))


@pytest.fixture
def hub(monkeypatch):
    found = Hub()
    for name in ("create_repo", "create_commit"):  # through which all uploads of huggingface_hub go
        method = getattr(found, name)
        monkeypatch.setattr(HfApi, name, lambda api, *args, _to=method, **kwargs: _to(api, *args, **kwargs))
    monkeypatch.setattr(HfApi, "repo_info", lambda api, name: SimpleNamespace(private=found.repositories[name]))

    def refuse(*args, **kwargs):
        raise AssertionError("a push that bypasses create_commit")

    for name in ("upload_file", "upload_folder", "preupload_lfs_files"):
        monkeypatch.setattr(HfApi, name, refuse)
    return found


def pushing_config(method, inputs, out, **changes):
    keys = {"hub_model_id": "me/model", "max_steps": 2, "save_total_limit": None, "eval_steps": None, "val_set_size": 0}
    return config_of(method, inputs, out, **keys | {"auto_resume_from_checkpoints": False} | changes)


def local_paths(content):
    return re.findall(r"/(?:tmp|home|root|var|work)/[\w./-]*", content.decode(errors="ignore"))


METHODS = {
    "strided": ADAPTER,
    "strided_full": WEIGHTS,
    "structured_reference": {*ADAPTER, "generation_config.json"},
    "grpo": {*ADAPTER, "generation_config.json"},
    "dpo": ADAPTER,
    "simpo": WEIGHTS,
    "reward_model": ADAPTER,
    "sft_full": WEIGHTS,
}


@pytest.mark.parametrize("method", METHODS)
def test_only_the_files_of_the_model_are_pushed(method, inputs, tmp_path, hub, capfd):
    out, config = tmp_path / "out", pushing_config(method, inputs, tmp_path / "out")
    config.trl.log_completions = method == "grpo"
    train(config.model_copy(update={"hub_model_id": None}))  # an earlier run in the same folder
    (out / "my_rewards.py").write_text("a file of the user")
    train(config)
    assert (out / "rollouts.jsonl").is_file() == (method == "grpo") and (out / "previous" / "1").is_dir()
    assert [message for message, _ in hub.commits] == [
        "Training in progress, step 1",
        "Training in progress, step 2",
        "End of training",
    ]
    for _, files in hub.commits:
        assert files.keys() == METHODS[method]
        assert not [
            path for name, content in files.items() if name != "tokenizer.json" for path in local_paths(content)
        ]
    assert hub.repositories == {"me/model": True}
    assert "Hub: me/model (private), model, tokenizer and model card at every save" in capfd.readouterr().err
    last = hub.commits[-1][1]
    assert all(last[name] == (out / name).read_bytes() for name in METHODS[method] - {"adapter_config.json"})
    assert not (out / "_saving").exists()


@pytest.mark.parametrize("strategy", ["end", "checkpoint", "all_checkpoints"])
def test_checkpoints_are_pushed_if_asked_for(strategy, inputs, tmp_path, hub):
    train(pushing_config("strided", inputs, tmp_path / "out", hub_strategy=strategy))
    assert len(hub.commits) == (1 if strategy == "end" else 3) and hub.commits[-1][1].keys() == ADAPTER
    for step, (_, files) in enumerate(hub.commits[:-1], start=1):
        folder = "last-checkpoint" if strategy == "checkpoint" else f"checkpoint-{step}"
        of_checkpoint = {name.partition("/")[2]: files[name] for name in files if "/" in name}
        assert {name.partition("/")[0] for name in files if "/" in name} == {folder}
        state = {*STATE, "ebft_run.json", CHECKSUMS}
        assert of_checkpoint.keys() == ADAPTER - {"README.md"} | state
        assert not [path for name in state for path in local_paths(of_checkpoint[name])]
        copy = tmp_path / f"copy-{step}"
        copy.mkdir()
        for name, content in of_checkpoint.items():
            (copy / name).write_bytes(content)
        check_complete(copy)


def test_a_push_that_fails_in_training_is_repeated_at_the_next_save(inputs, tmp_path, hub):
    hub.failures = [True]
    with pytest.warns(UserWarning, match=r"not pushed to me/model \(no route\). It is saved here; the next save"):
        train(pushing_config("sft", inputs, tmp_path / "out"))
    assert [message for message, _ in hub.commits] == ["Training in progress, step 2", "End of training"]


def test_a_final_push_that_fails_says_how_to_repeat_it(inputs, tmp_path, hub):
    out = tmp_path / "out"
    hub.failures = [True]
    config = pushing_config("sft", inputs, out, hub_strategy="end")
    with pytest.raises(
        SaveError, match="was not pushed to me/model .no route.*hf upload me/model .* --include adapter"
    ):
        train(config)
    assert final_step(out) == 2 and not hub.commits
    with pytest.warns(UserWarning, match="already complete"):
        train(config.model_copy(update={"auto_resume_from_checkpoints": True}))
    assert len(hub.commits) == 1 and hub.commits[0][1].keys() == ADAPTER


def test_a_checkpoint_is_not_deleted_while_it_is_pushed(inputs, tmp_path, hub, monkeypatch):
    out, kept = tmp_path / "out", []
    monkeypatch.setattr(pushing.Pushing, "needs_files", property(lambda part: part.trainer.state.global_step == 2))
    monkeypatch.setattr(ebft.trainer.checkpoints, "rotate", lambda folder, *_: kept.append(folder.name))
    train(pushing_config("sft", inputs, out, max_steps=3, save_total_limit=1))
    assert kept[:2] == ["checkpoint-1", "checkpoint-3"] and "checkpoint-2" not in kept


@pytest.mark.parametrize("failures", [[], [False, True]])
def test_checkpoints_that_were_not_pushed_at_their_save_are_pushed_at_the_end(
    failures, inputs, tmp_path, hub, monkeypatch
):
    out, hub.failures = tmp_path / "out", failures
    busy = property(lambda part: 1 < part.trainer.state.global_step < 4)
    monkeypatch.setattr(pushing.Pushing, "is_busy", busy)
    with pytest.warns(UserWarning, match="not pushed") if failures else nullcontext():
        train(pushing_config("sft", inputs, out, max_steps=4, save_total_limit=1, hub_strategy="all_checkpoints"))
    pushed = {name.partition("/")[0] for _, files in hub.commits for name in files if "/" in name}
    assert pushed == {f"checkpoint-{step}" for step in range(1, 5)}
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-4"}


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_repository_that_is_public_already_is_reported(is_asked, inputs, tmp_path, hub, capfd):
    hub.repositories["me/model"] = False
    keys = {"hub_private_repo": False} if is_asked else {}
    with warnings.catch_warnings(record=True, action="always") as caught:
        train(pushing_config("sft", inputs, tmp_path / "out", hub_strategy="end", **keys))
    told = [str(each.message) for each in caught if "exists already and is public" in str(each.message)]
    assert len(told) == (not is_asked) and "Hub: me/model (public)" in capfd.readouterr().err


def test_a_repository_is_public_if_asked_for(inputs, tmp_path, hub):
    train(pushing_config("sft", inputs, tmp_path / "out", hub_strategy="end", hub_private_repo=False))
    assert hub.repositories == {"me/model": False}


def test_a_card_of_the_user_is_neither_replaced_nor_pushed(inputs, tmp_path, hub):
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine")
    with pytest.warns(UserWarning, match="README.md was not written by a run, or was edited, so it is kept"):
        train(pushing_config("dpo", inputs, out))
    assert (out / "README.md").read_text() == "mine" and b"# out" in hub.commits[-1][1]["README.md"]


def test_trainers_push_the_same_files_from_python(inputs, tmp_path, hub):
    result = train(pushing_config("grpo", inputs, tmp_path / "out", hub_model_id=None))
    result.trainer.args.hub_model_id, result.trainer.card = "me/other", None
    result.trainer.push_to_hub()
    assert hub.repositories == {"me/other": True}
    assert hub.commits[0][1].keys() == ADAPTER - {"README.md"}
    assert not (tmp_path / "out" / "_saving").exists()


def test_a_hub_that_cannot_be_reached_is_told_first(inputs, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no route")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    with pytest.raises(ConfigError, match="hub_model_id: 'me/model' cannot be created or reached .*no route"):
        train(pushing_config("sft", inputs, tmp_path / "out", base_model="does/not-exist"))


def test_paths_of_the_machine_are_left_out_of_settings(tmp_path):
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"base_model_name_or_path": "/home/me/models/tiny", "r": 2}))
    assert json.loads(pushing._public(file)) == {"base_model_name_or_path": "tiny", "r": 2}
    file.write_text(json.dumps({"base_model_name_or_path": "some/model"}))
    assert Path(pushing._public(file)) == file
