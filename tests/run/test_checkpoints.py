"""Which checkpoint a run resumes from, and which it refuses."""

import copy
import json
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

from ebft.errors import ConfigError
from ebft.files import write_checksums
from ebft.run.checkpoints import Found, find_checkpoints, how_to_resume, newest_checkpoint
from ebft.run.config.schema import RunConfig
from ebft.run.resume_compat import optimizer_keys, write_run_keys
from ebft.trainer.checkpoints import compare_rows
from tests.config.conftest import MINIMAL

LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"]}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided"}}
AUTO = {"auto_resume_from_checkpoints": True}
ADAPTER = "adapter_model.safetensors"


@pytest.fixture
def make(tmp_path):
    """`make(**keys)`: a config whose output_dir is `tmp_path`."""
    return lambda **keys: RunConfig.from_dict({**MINIMAL, "output_dir": tmp_path, **keys})


@pytest.fixture
def checkpoint(tmp_path):
    """`checkpoint(step, *files)`: a complete one with these files, weights, and with an optimizer's its whole state."""

    def save(step, *files):
        folder = tmp_path / f"checkpoint-{step}"
        names = {"trainer_state.json", *files}
        if not any("model" in name for name in files):
            names.add("model.safetensors")
        if any(name.startswith(("optimizer", "global_step")) for name in files):
            names |= {"scheduler.pt", "rng_state.pth", "running_state.pth"}
        for name in names:
            write(folder / name, step)
        if ADAPTER in names and not (folder / "adapter_config.json").exists():
            (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        return folder

    return save


@pytest.fixture
def folder(checkpoint):
    return checkpoint(3, "optimizer.pt")


def write(path, step):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({"weight": torch.ones(3)}, path)
    elif path.name == ".metadata":
        path.write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    elif path.suffix in (".pt", ".pth", ".bin"):
        torch.save({"weight": torch.ones(3)}, path)
    else:
        path.write_text(json.dumps({"global_step": step} if path.name == "trainer_state.json" else {}))


def resumed(config):
    found = find_checkpoints(config).checkpoint()
    return None if found is None else str(found)


def assert_skipped(make, torn, older, problem):
    """`torn` is not resumed from, for this reason: automatically `older` is, and if it is named, nothing is."""
    used = ".* older checkpoint is used" if older else ""
    with pytest.warns(UserWarning, match=f"{torn.name} is not used: {problem}{used}") as caught:
        assert resumed(make(**AUTO)) == (older and str(older))
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    said = f"{torn.name} is not a complete checkpoint: {problem}" + (f".* {older}" if older else "")
    with pytest.raises(ConfigError, match=said):
        resumed(make(resume_from_checkpoint=torn))


@pytest.mark.parametrize("file", ["optimizer.pt", "optimizer.bin", "optimizer_0/.metadata", "global_step3/states.pt"])
def test_optimizer_state_may_be_sharded(make, checkpoint, file):
    folder = checkpoint(3, file)
    assert resumed(make(resume_from_checkpoint=folder)) == str(folder)
    assert find_checkpoints(make(**AUTO)) == Found(folder, folder)
    newest = checkpoint(6)  # without optimizer state
    assert find_checkpoints(make(**AUTO)) == Found(newest, folder)
    with pytest.raises(ConfigError, match="checkpoint-6: it has no optimizer state.*save_only_model.*lora_model_dir"):
        resumed(make(resume_from_checkpoint=newest))


cut, forget = lambda content: content[:-5], lambda content: b"{}"
flip = lambda content: content[:-1] + bytes([content[-1] ^ 1])  # a bit of the last tensor


@pytest.mark.parametrize(("damage", "name", "problem"), [
    # also in a checkpoint of another program, which has no checksums
    (None, "optimizer.pt", "it has no optimizer state"), (None, "scheduler.pt", "it has no scheduler.pt"),
    (None, "rng_state.pth", "it has no rng_state.pth"), (None, "model.safetensors", "it has no weights"),
    (None, "trainer_state.json", "it has no trainer_state.json"), (cut, "ebft_run.json", "ebft_run.json is damaged"),
    (cut, "trainer_state.json", "trainer_state.json .*is damaged"),
    (forget, "trainer_state.json", "it contains step None"),
    # with checksums
    (cut, "with/optimizer.pt", "optimizer.pt is damaged .wrong checksum"),
    (flip, "with/model.safetensors", "model.safetensors is damaged .wrong checksum"),
    (flip, "with/ref/adapter_model.safetensors", "ref/adapter_model.safetensors is damaged .wrong checksum"),
    (None, "with/running_state.pth", "it has no running_state.pth"),
    (cut, "with/ebft_checksums.json", ".*ebft_checksums.json is damaged"),
    (forget, "with/config.json", None),  # text may be edited
])  # fmt: skip
def test_a_damaged_checkpoint_is_skipped_or_named(make, checkpoint, folder, damage, name, problem):
    files = ("optimizer.pt", "ebft_run.json", "config.json")
    has_checksums, name = name.startswith("with/"), name.removeprefix("with/")
    torn = checkpoint(6, *files, "model.safetensors", *(["ref/adapter_model.safetensors"] if has_checksums else []))
    if has_checksums:
        write_checksums(torn)
    assert resumed(make(**AUTO)) == str(torn)
    if damage is None:
        (torn / name).unlink()
    else:
        (torn / name).write_bytes(damage((torn / name).read_bytes()))
    if problem is None:
        assert resumed(make(**AUTO)) == str(torn)
    else:
        assert_skipped(make, torn, folder, problem)


@pytest.mark.parametrize("name", ["checkpoint-40", "checkpoint-04"])
def test_a_renamed_checkpoint_is_named_with_its_step(make, checkpoint, folder, name):
    """Neither its name nor its contents decide alone: it is not used, moved, replaced or taken for the newest one."""
    renamed = checkpoint(6, "optimizer.pt").rename(folder.parent / name)
    assert_skipped(make, renamed, folder, "it contains step 6, unlike its name; to use it, rename it to checkpoint-6")
    assert newest_checkpoint(folder.parent) == folder
    copied = renamed.rename(folder.parent / "copy-of-6")  # a name without a step
    assert resumed(make(resume_from_checkpoint=copied)) == str(copied)


def test_a_checkpoint_that_cannot_be_read_is_an_error(make, checkpoint, folder, monkeypatch):
    """It may be the newest one, which the run would replace."""
    torn = checkpoint(6, "optimizer.pt")
    write_checksums(torn)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("ebft.run.checkpoints.checksum", refuse)
    for keys in (AUTO, {"resume_from_checkpoint": torn}):
        with pytest.raises(PermissionError, match="checkpoint-6"):
            resumed(make(**keys))
    assert newest_checkpoint(folder.parent) == torn  # whose checksums are not computed


def test_a_new_run_beside_checkpoints_of_another_gives_a_warning(make, checkpoint, recwarn):
    assert resumed(make()) is None and resumed(make(**AUTO)) is None and not list(recwarn)
    for step in (7, 300):
        checkpoint(step, "optimizer.pt")
    for keys in (AUTO, {"resume_from_checkpoint": make().output_dir + "/checkpoint-300"}):
        assert resumed(make(**keys)) == make().output_dir + "/checkpoint-300" and not list(recwarn)
    assert resumed(make()) is None
    (said,) = [str(warning.message) for warning in recwarn]
    assert "has checkpoints of an earlier run, up to checkpoint-300. This run does not resume from them" in said


OF_LORA, OTHER = {**STRIDED, **LORA}, {"base_model": "other/model"}


@pytest.mark.parametrize(("saved", "changes", "message"), [
    (OF_LORA, {"lora_r": 16}, "lora_r: 16 differs from lora_r: 4 of .*checkpoint-3. Set it to 4, or start a new "),
    (OF_LORA, dict.fromkeys(LORA), "adapter: null differs from adapter: lora"),
    (OF_LORA, {"ebft": {"mode": "structured"}}, "ebft.mode: structured differs from ebft.mode: strided"),
    (OF_LORA, {"lora_r": 16, "optimizer": "adafactor"}, "(?s)optimizer: adafactor.*\n.*lora_r: 16"),
    ({}, LORA, "(?s)^(?!.*lora_r).*adapter: lora differs from adapter: null"),
    # only a warning
    ({}, OTHER, "base_model: other/model differs from base_model: some/model"),
    # other order, length and budget
    (LORA, {"lora_target_modules": ["v_proj", "q_proj"], "max_steps": 9, "budget": {"documents": 7}}, None),
])  # fmt: skip
def test_changed_settings(make, folder, recwarn, saved, changes, message):
    write_run_keys(make(**saved), folder)
    for keys in (AUTO, {"resume_from_checkpoint": folder}):
        config = make(**{**saved, **changes, **keys})
        if message is None or changes == OTHER:
            assert resumed(config) == str(folder)
            said = [str(each.message) for each in recwarn]
            assert re.search(message, said[0]) if message else said == []
        else:
            with pytest.raises(ConfigError, match=message):
                resumed(config)


@pytest.mark.parametrize(("file", "keys", "message"), [
    (ADAPTER, LORA | {"lora_alpha": 16}, "lora_alpha: 16.0 differs from lora_alpha: 8"),
    ("model.safetensors", LORA, "adapter: lora differs from adapter: null"),
    (ADAPTER, {"adapter": "lora", "lora_model_dir": "checkpoint-3"}, None),
    ("pytorch_model_fsdp_0/.metadata", LORA, None),  # whether these weights are an adapter is unknown
])  # fmt: skip
def test_a_checkpoint_of_another_program_is_checked_by_its_files(make, checkpoint, monkeypatch, file, keys, message):
    folder = checkpoint(3, "optimizer.pt", file)
    monkeypatch.chdir(folder.parent)
    if file == ADAPTER:
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    config = make(**keys, resume_from_checkpoint=folder)
    if message is None:
        assert resumed(config) == str(folder)
    else:
        with pytest.raises(ConfigError, match=message):
            resumed(config)


def test_changed_settings_of_the_optimizer_are_one_warning(make, folder, recwarn):
    write_run_keys(make(), folder, optimizer_keys(make(), None))
    assert optimizer_keys(make(max_steps=9), folder)["learning_rate"] == 1e-5 and not list(recwarn)
    changes = {"learning_rate": 1e-4, "weight_decay": 0.1, "lr_scheduler": "linear", "max_grad_norm": 0.5}
    found = optimizer_keys(make(**changes), folder)
    (said,) = [str(warning.message) for warning in recwarn]
    assert "learning_rate: 0.0001 has no effect, the run continues with 1e-05" in said
    assert "lr_scheduler: linear replaces cosine from here on" in said and f"base_model={folder}, with" in said
    in_effect = {"learning_rate": 1e-5, "weight_decay": 0.0, "lr_scheduler": "linear", "max_grad_norm": 0.5}
    assert {key: found[key] for key in changes} == in_effect


TYPED = ["ebft", "train", "my runs/a.yaml", "wandb_name=the first", "resume_from_checkpoint=old"]


def test_the_command_that_resumes_is_the_one_that_was_typed(make, checkpoint, folder):
    said = "Stopped at step 3. Resume with: ebft train 'my runs/a.yaml' 'wandb_name=the first'"
    named = how_to_resume(make(resume_from_checkpoint="old"), 3, "old", TYPED)
    assert named == f"{said} resume_from_checkpoint={folder}"
    assert how_to_resume(make(**AUTO), 3, None, TYPED[:-1]) == said
    checkpoint(9)  # of another run: the highest step is not that of this run
    assert f"resume_from_checkpoint={folder}" in how_to_resume(make(**AUTO), 3, None, TYPED[:-1])


def test_a_schedule_with_state(make, folder):
    """It fits no other one, and its arguments are restored."""
    for before, after in (("greedy", "linear"), ("cosine", "reduce_lr_on_plateau")):
        write_run_keys(make(), folder, optimizer_keys(make(lr_scheduler=before), None))
        with pytest.raises(ConfigError, match=f"lr_scheduler: {after} differs from lr_scheduler: {before}"):
            resumed(make(lr_scheduler=after, resume_from_checkpoint=folder))
    keys = {"lr_scheduler": "reduce_lr_on_plateau"}
    write_run_keys(make(**keys), folder, optimizer_keys(make(**keys), None))
    with pytest.warns(UserWarning, match='lr_scheduler_kwargs: {"patience": 3} has no effect'):
        found = optimizer_keys(make(**keys, lr_scheduler_kwargs={"patience": 3}), folder)
    assert found["lr_scheduler_kwargs"] is None


def test_other_rows_are_a_warning():
    rows, state = [{"input_ids": [n]} for n in range(6)], SimpleNamespace(stateful_callbacks={}, global_step=3)
    compare_rows(state, rows, rows[:2], warns=True)
    for training, held_out, said in (
        (rows[:-1], rows[:2], "The training data differ .* 5 rows instead of 6. Training continues from step 3 at the"),
        ([*rows[1:], rows[0]], rows[:2], "The training data differ .* 6 rows as before, with other contents or in"),
        (rows, rows[:1], "The evaluation data differ"),
    ):
        with pytest.warns(UserWarning, match=said):
            compare_rows(copy.deepcopy(state), training, held_out, warns=True)
