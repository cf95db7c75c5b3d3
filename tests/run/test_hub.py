"""What is pushed to the Hub: the files of the model, and nothing else of the output folder, by every method."""

import re
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi

from ebft import errors, train
from ebft.files import CHECKSUMS
from ebft.run import checkpoints, output
from ebft.trainer import pushing
from tests.run.crash import config_of

TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
ADAPTER = {*TOKENIZER, "adapter_config.json", "adapter_model.safetensors", "README.md"}
WEIGHTS = {*TOKENIZER, "config.json", "generation_config.json", "model.safetensors", "README.md"}
STATE = {"optimizer.pt", "rng_state.pth", "running_state.pth", "scheduler.pt", "trainer_state.json"}
STEPS = ["Training in progress, step 1", "Training in progress, step 2", "End of training"]


class Hub:
    """A Hub that records commits: of each, its message and the contents of its files by name."""

    def __init__(self):
        self.repositories, self.commits, self.failures, self.is_free = {}, [], [], threading.Event()
        self.is_free.set()

    def create_repo(self, api, repo_id, *, private=None, exist_ok=False, **_):
        assert exist_ok
        self.repositories.setdefault(repo_id, bool(private))
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, api, repo_id, operations, *, commit_message, **_):
        assert self.is_free.wait(60)
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


@pytest.fixture
def pushed(inputs, out):
    """`pushed(method, **changes)`: the config of two steps that are pushed."""
    keys = {"hub_model_id": "me/model", "max_steps": 2, "save_total_limit": None, "eval_steps": None, "val_set_size": 0}
    keys |= {"auto_resume_from_checkpoints": False}
    return lambda method="sft", **changes: config_of(method, inputs, out, **keys | changes)


def local_paths(files):
    """The paths of this machine in the contents of files; those in tokenizer.json are tokens."""
    named = re.compile(r"/(?:tmp|home|root|var|work)/[\w./-]*")
    contents = [content for name, content in files.items() if name != "tokenizer.json"]
    return [path for content in contents for path in named.findall(content.decode(errors="ignore"))]


METHODS = {
    "structured_reference": {*ADAPTER, "generation_config.json"}, "grpo": {*ADAPTER, "generation_config.json"},
    "dpo": ADAPTER, "sft_full": WEIGHTS,
}  # fmt: skip
FAST = ("sft_full", "grpo")


@pytest.mark.parametrize("method", [pytest.param(m, marks=[] if m in FAST else pytest.mark.slow) for m in METHODS])
def test_only_the_files_of_the_model_are_pushed(method, pushed, out, hub, capfd):
    config = pushed(method)
    config.trl.log_completions = method == "grpo"
    if method == "grpo":
        train(config.model_copy(update={"hub_model_id": None}))  # an earlier run in the same folder
        (out / "my_rewards.py").write_text("a file of the user")
    result = train(config)
    assert (out / "previous" / "1").is_dir() == (method == "grpo")
    assert (out / "rollouts.jsonl").is_file() == method.startswith(("strided", "structured", "grpo"))
    assert [message for message, _ in hub.commits] == STEPS and hub.repositories == {"me/model": True}
    assert all(files.keys() == METHODS[method] and not local_paths(files) for _, files in hub.commits)
    assert "Hub: me/model (private), model, tokenizer and model card at every save" in capfd.readouterr().err
    last = hub.commits[-1][1]
    assert all(last[name] == (out / name).read_bytes() for name in METHODS[method] - {"adapter_config.json"})
    if method == "grpo":  # the trainer pushes the same files from Python
        result.trainer.args.hub_model_id, result.trainer.card = "me/other", None
        result.trainer.hub_model_id = None
        result.trainer.push_to_hub()
        assert hub.repositories["me/other"]
        assert hub.commits[-1][1].keys() == ADAPTER - {"README.md"}
    assert not (out / "_saving").exists()


@pytest.mark.parametrize("strategy", ["end", "checkpoint", "all_checkpoints"])
def test_checkpoints_are_pushed_if_asked_for(strategy, pushed, tmp_path, hub):
    hub.repositories["me/model"] = False
    is_warned = pytest.warns(UserWarning, match="exists already and is public")
    with is_warned if strategy == "end" else nullcontext():
        train(pushed("strided", hub_strategy=strategy, **({} if strategy == "end" else {"hub_private_repo": False})))
    assert len(hub.commits) == (1 if strategy == "end" else 3) and hub.commits[-1][1].keys() == ADAPTER
    for step, (_, files) in enumerate(hub.commits[:-1], start=1):
        folder = "last-checkpoint" if strategy == "checkpoint" else f"checkpoint-{step}"
        of_checkpoint = {name.partition("/")[2]: files[name] for name in files if "/" in name}
        assert {name.partition("/")[0] for name in files if "/" in name} == {folder}
        state = {*STATE, "ebft_run.json", CHECKSUMS}
        assert of_checkpoint.keys() == ADAPTER - {"README.md"} | state
        assert not local_paths({name: of_checkpoint[name] for name in state})
        (tmp_path / f"copy-{step}").mkdir()
        for name, content in of_checkpoint.items():
            (tmp_path / f"copy-{step}" / name).write_bytes(content)
        assert checkpoints.damage(tmp_path / f"copy-{step}") is None


def test_a_final_push_that_fails_says_how_to_repeat_it(pushed, out, hub):
    hub.failures, config = [True], pushed(hub_strategy="end")
    said = "was not pushed to me/model .no route.*hf upload me/model .* --include adapter"
    with pytest.raises(errors.SaveError, match=said):
        train(config)
    assert output.final_step(out) == 2 and not hub.commits
    with pytest.warns(UserWarning, match="already complete"):
        train(config.model_copy(update={"auto_resume_from_checkpoints": True}))
    assert len(hub.commits) == 1 and hub.commits[0][1].keys() == ADAPTER


@pytest.mark.parametrize("failures", [[], [False, True]])
@pytest.mark.parametrize("strategy", ["checkpoint", pytest.param("all_checkpoints", marks=pytest.mark.slow)])
def test_checkpoints_that_wait_for_a_push(strategy, failures, pushed, out, hub, monkeypatch):
    """The first push ends when training does."""
    hub.failures, finish = [*failures], pushing.Pushing.finish
    hub.is_free.clear()
    monkeypatch.setattr(pushing.Pushing, "finish", lambda part: (hub.is_free.set(), finish(part)))
    with pytest.warns(UserWarning, match="not pushed") if failures else nullcontext():
        train(pushed(max_steps=4, save_total_limit=1, hub_strategy=strategy))
    found = {name.partition("/")[0] for _, files in hub.commits for name in files if "/" in name}
    each = strategy == "all_checkpoints"
    assert found == ({f"checkpoint-{step}" for step in range(1, 5)} if each else {"last-checkpoint"})
    assert len(hub.commits) == (5 if each else 3)
    assert hub.commits[-2][0].endswith("step 2" if each and failures else "4")
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-4"}
