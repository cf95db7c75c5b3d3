"""Which checkpoint a run resumes from, and which it refuses."""

import json
import pickle
import shlex
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as parts
from torch.distributed.checkpoint.metadata import Metadata

from ebft.config.load import apply_overrides
from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.files import write_checksums
from ebft.run.checkpoints import Found, checkpoint_folders, find_checkpoints, how_to_resume, newest_checkpoint
from ebft.run.same_run import optimizer_keys, write_run_keys

LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"]}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided"}}


@pytest.fixture
def make(tmp_path):
    """`make(**keys)`: a config whose output_dir is `tmp_path`."""
    required = {"base_model": "some/model", "datasets": [{"path": "some/data", "type": "completion"}]}
    return lambda **keys: RunConfig.from_dict({**required, "output_dir": tmp_path, **keys})


@pytest.fixture
def checkpoint(tmp_path):
    """`checkpoint(step, *files)`: the folder of a complete checkpoint in `tmp_path`, with these small files.

    It has weights in any case, and the other parts of a training state if one of the files is an optimizer's.
    """

    def save(step, *files):
        folder = tmp_path / f"checkpoint-{step}"
        names = {"trainer_state.json", *files}
        if not any("model" in name for name in files):
            names.add("model.safetensors")
        if any(name.startswith(("optimizer", "global_step")) for name in files):
            names |= {"scheduler.pt", "rng_state.pth", "running_state.pth"}
        for name in names:
            write(folder / name, step)
        if "adapter_model.safetensors" in names and not (folder / "adapter_config.json").exists():
            (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        return folder

    return save


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


AUTO = {"auto_resume_from_checkpoints": True}


def resumed(config):
    found = find_checkpoints(config).checkpoint()
    return None if found is None else str(found)


@pytest.mark.parametrize("auto", [True, False])
def test_a_checkpoint_without_optimizer_state_is_refused(make, checkpoint, auto):
    folder = checkpoint(3, "model.safetensors")
    keys = AUTO if auto else {"resume_from_checkpoint": folder}
    with pytest.raises(ConfigError, match="checkpoint-3: it has no optimizer state.*save_only_model.*lora_model_dir"):
        resumed(make(**keys))


@pytest.mark.parametrize(
    "file", ["optimizer.pt", "optimizer.bin", "optimizer_0/.metadata", "optimizer/.metadata", "global_step3/states.pt"]
)
def test_optimizer_state_may_be_sharded(make, checkpoint, file):
    folder = checkpoint(3, file)
    assert resumed(make(resume_from_checkpoint=folder)) == str(folder)


def test_a_checkpoint_without_optimizer_state_is_skipped_for_one_with_it(make, checkpoint):
    folder = checkpoint(3, "optimizer.pt")
    newest = checkpoint(6)
    assert find_checkpoints(make(**AUTO)) == Found(newest, folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("pytorch_model_fsdp_0/__0_0.distcp", lambda path: path.unlink(), "__0_0.distcp is missing"),
        ("optimizer_0/__0_0.distcp", lambda path: cut(path), "optimizer_0 is damaged .*bytes instead of at least"),
        ("pytorch_model_fsdp_0/.metadata", lambda path: path.unlink(), "it has no pytorch_model_fsdp_0/.metadata"),
        ("optimizer_0/.metadata", lambda path: path.write_bytes(b"?"), "optimizer_0 is damaged .the index cannot"),
        ("optimizer_0/.metadata", lambda path: path.write_bytes(pickle.dumps(print)), "does not belong into an index"),
    ],
)
def test_damaged_parts_are_recognised(make, checkpoint, name, change, message):
    """Also in a checkpoint of another program, which has no checksums."""
    older = checkpoint(3, "optimizer.pt")
    folder = checkpoint(6, "optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata")
    for place in ("optimizer_0", "pytorch_model_fsdp_0"):
        with warnings.catch_warnings(action="ignore"):  # that there is one process only
            parts.save({"weight": torch.ones(300)}, checkpoint_id=folder / place, no_dist=True)
    assert resumed(make(**AUTO)) == str(folder)
    change(folder / name)
    with pytest.warns(UserWarning, match=message):
        assert resumed(make(**AUTO)) == str(older)
    with pytest.raises(ConfigError, match=message):
        resumed(make(resume_from_checkpoint=folder))


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def empty(path):
    path.write_bytes(b"")


def delete(path):
    path.unlink()


def overwrite(path):
    """Change bytes of the content; the length is the same."""
    content = bytearray(path.read_bytes())
    at = content.index(b"PK", 4) - 8
    content[at : at + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(content)


def forget(path):
    path.write_text("{}")


PARTS = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "trainer_state.json")
DAMAGES = [(damage, name) for damage in (cut, empty, delete) for name in PARTS]
DAMAGES += [(overwrite, name) for name in PARTS[:3]] + [(forget, "trainer_state.json"), (cut, "config.json")]
DAMAGES += [(cut, "adapter_model.safetensors"), (delete, "adapter_model.safetensors"), (delete, "adapter_config.json")]
DAMAGES += [(cut, "running_state.pth"), (delete, "model-00002-of-00002.safetensors")]


@pytest.mark.parametrize(("damage", "name"), DAMAGES)
def test_a_damaged_checkpoint_is_skipped_or_named(make, checkpoint, damage, name):
    good = checkpoint(3, "optimizer.pt")
    files = ["optimizer.pt", "running_state.pth", "config.json"]
    if name.startswith("adapter"):
        files.append("adapter_model.safetensors")
    if name.startswith("model-"):
        files += ["model-00001-of-00002.safetensors", name, "model.safetensors.index.json"]
    torn = checkpoint(6, *files)
    if name.startswith("model-"):
        weights = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": name}}
        (torn / "model.safetensors.index.json").write_text(json.dumps(weights))
    damage(torn / name)
    word = {"rng_state.pth": "rng_state", "optimizer.pt": "optimizer", "model.safetensors": "model.safetensors"}
    word = word.get(name, name).partition("_model.")[0]
    with pytest.warns(UserWarning, match=f"checkpoint-6 is not used: .*{word}.* older checkpoint is used") as caught:
        assert resumed(make(**AUTO)) == str(good)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    with pytest.raises(ConfigError, match=f"checkpoint-6 is not a complete checkpoint: .*{word}.*is .*checkpoint-3"):
        resumed(make(resume_from_checkpoint=torn))


@pytest.mark.parametrize("name", ["checkpoint-40", "checkpoint-04"])
def test_a_renamed_checkpoint_is_named_with_its_step(make, checkpoint, name):
    """Neither its name nor its contents decide alone: it is not used, moved, replaced or taken for the newest one."""
    good, renamed = checkpoint(3, "optimizer.pt"), checkpoint(6, "optimizer.pt").rename(make().output_dir + f"/{name}")
    message = "it contains step 6, unlike its name; to use it, rename it to checkpoint-6"
    with pytest.warns(UserWarning, match=f"{name} is not used: {message}"):
        assert resumed(make(**AUTO)) == str(good)
    assert newest_checkpoint(good.parent) == good
    with pytest.raises(ConfigError, match=f"{name} is not a complete checkpoint: {message}"):
        resumed(make(resume_from_checkpoint=renamed))
    copied = renamed.rename(good.parent / "copy-of-6")  # a name without a step
    assert resumed(make(resume_from_checkpoint=copied)) == str(copied)


def test_folders_with_other_names_are_no_checkpoints(make, checkpoint):
    good, other = checkpoint(3, "optimizer.pt"), checkpoint(6, "optimizer.pt")
    for name in ("checkpoint-old", "checkpoint-old-6", "checkpoint-²", "checkpoint-6 (copy)"):
        other = other.rename(other.with_name(name))
        assert resumed(make(**AUTO)) == str(good) and checkpoint_folders(good.parent) == [good]


@pytest.mark.parametrize("name", ["", "trainer_state.json", "model.safetensors", "optimizer.pt", "ref", "global_step6"])
def test_a_checkpoint_without_permission_is_an_error(make, checkpoint, as_user, name):
    older = checkpoint(3, "optimizer.pt")
    folder = checkpoint(6, "optimizer.pt", "model.safetensors", "ref/adapter_model.safetensors", "global_step6/x.pt")
    mode = (folder / name).stat().st_mode
    (folder / name).chmod(0)
    with as_user:
        with pytest.raises(
            ConfigError, match="auto_resume_from_checkpoints: .*cannot be read .Permission denied.*move"
        ):
            resumed(make(**AUTO))
        with pytest.raises(ConfigError, match="checkpoint-6 has other permissions: .* cannot be read .Permission"):
            resumed(make(resume_from_checkpoint=folder))
        assert resumed(make(resume_from_checkpoint=older)) == str(older) and newest_checkpoint(older.parent) == older
    (folder / name).chmod(mode & 0o555)  # may be read, but not written
    with as_user, warnings.catch_warnings(action="ignore"):
        assert resumed(make(**AUTO)) == str(folder)


def flip(path):
    """Change one bit of the contents of the last tensor."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "name", "problem"),
    [
        (flip, "model.safetensors", "model.safetensors is damaged .wrong checksum"),
        (flip, "ref/adapter_model.safetensors", "ref/adapter_model.safetensors is damaged .wrong checksum"),
        (overwrite, "optimizer.pt", "optimizer.pt is damaged .wrong checksum"),
        (delete, "ref/adapter_model.safetensors", "it has no ref/adapter_model.safetensors"),
        (cut, "ebft_checksums.json", "ebft_checksums.json is damaged"),
        (lambda path: path.write_text("{}"), "config.json", None),  # text may be edited
    ],
)
def test_a_file_that_differs_from_its_checksum(make, checkpoint, damage, name, problem):
    good = checkpoint(3, "optimizer.pt")
    torn = checkpoint(6, "optimizer.pt", "model.safetensors", "ref/adapter_model.safetensors", "config.json")
    (torn / "adapter_config.json").unlink(missing_ok=True)
    write_checksums(torn)
    assert resumed(make(**AUTO)) == str(torn)
    damage(torn / name)
    if problem is None:
        assert resumed(make(**AUTO)) == str(torn)
        return
    with pytest.warns(UserWarning, match=f"checkpoint-6 is not used: {problem}"):
        assert resumed(make(**AUTO)) == str(good)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_checkpoint_of_this_package_has_the_running_state_of_every_process(make, checkpoint, processes):
    good, torn = checkpoint(3, "optimizer.pt"), checkpoint(6, "optimizer.pt")
    for name in ("rng_state", "running_state") if processes == 2 else ():
        (torn / f"{name}.pth").unlink()
        for rank in range(2):
            write(torn / f"{name}_{rank}.pth", 6)
    write_run_keys(make(), torn)
    assert resumed(make(**AUTO)) == str(torn)
    missing = "running_state.pth" if processes == 1 else "running_state_1.pth"
    (torn / missing).unlink()
    with pytest.warns(UserWarning, match=f"checkpoint-6 is not used: it has no {missing}"):
        assert resumed(make(**AUTO)) == str(good)


def test_an_adapter_config_without_its_weights(make, checkpoint):
    folder = checkpoint(3, "optimizer.pt", "ref/adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.warns(UserWarning, match="checkpoint-3 is not used: it has no adapter_model.safetensors"):
        assert resumed(make(**AUTO)) is None


def test_only_damaged_checkpoints(make, checkpoint):
    empty(checkpoint(3, "optimizer.pt") / "optimizer.pt")
    with pytest.warns(UserWarning, match="checkpoint-3 is not used: optimizer.pt is damaged .it is empty"):
        assert resumed(make(**AUTO)) is None


def test_a_new_run_beside_checkpoints_of_another_gives_a_warning(make, checkpoint, recwarn):
    checkpoint(7, "optimizer.pt")
    checkpoint(300, "optimizer.pt")
    assert resumed(make()) is None
    assert [str(warning.message) for warning in recwarn] == [
        f"output_dir: {make().output_dir} has checkpoints of an earlier run, up to checkpoint-300. This run does not "
        "resume from them (auto_resume_from_checkpoints: false): when its training begins, they are moved to a new "
        f"folder in {Path(make().output_dir) / 'previous'}."
    ]


@pytest.mark.parametrize("auto", [True, False])
def test_a_resumed_run_or_an_empty_folder_gives_no_warning(make, checkpoint, recwarn, tmp_path, auto):
    assert resumed(make(auto_resume_from_checkpoints=auto)) is None
    folder = checkpoint(300, "optimizer.pt")
    keys = {"auto_resume_from_checkpoints": True} if auto else {"resume_from_checkpoint": folder}
    assert resumed(make(**keys)) == str(folder)
    assert not list(recwarn)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_r": 16}, "lora_r: 16 differs from lora_r: 4 of .*checkpoint-3. Set it to 4, or start a new run in"),
        ({"lora_alpha": 16}, "lora_alpha: 16.0 differs from lora_alpha: 8.0"),
        (
            {"lora_target_modules": ["q_proj"]},
            r'lora_target_modules: \["q_proj"\] differs from .* \["q_proj", "v_proj"',
        ),
        ({"lora_target_modules": None, "lora_target_linear": True}, "lora_target_linear: true differs .*: false"),
        ({"lora_modules_to_save": ["lm_head"]}, r'lora_modules_to_save: \["lm_head"\] differs from .*: null'),
        (dict.fromkeys(LORA), "adapter: null differs from adapter: lora"),
        ({"optimizer": "adafactor"}, "optimizer: adafactor differs from optimizer: adamw_torch_fused"),
        ({"rl": None, "ebft": {}}, "rl: null differs from rl: ebft"),
        ({"ebft": {"mode": "structured"}}, "ebft.mode: structured differs from ebft.mode: strided"),
        ({"lora_r": 16, "optimizer": "adafactor"}, "(?s)optimizer: adafactor.*\n.*lora_r: 16"),
    ],
)
def test_a_changed_setting_is_refused(make, checkpoint, changes, message):
    folder = checkpoint(3, "optimizer.pt")
    write_run_keys(make(**STRIDED, **LORA), folder)
    with pytest.raises(ConfigError, match=message):
        resumed(make(**{**STRIDED, **LORA, **changes, "resume_from_checkpoint": folder}))


def test_an_added_adapter_is_refused(make, checkpoint):
    folder = checkpoint(3, "optimizer.pt")
    write_run_keys(make(), folder)
    with pytest.raises(ConfigError, match="adapter: lora differs from adapter: null") as caught:
        resumed(make(**LORA, auto_resume_from_checkpoints=True))
    assert "lora_r" not in str(caught.value)


def test_the_length_and_the_order_of_target_modules_may_change(make, checkpoint, recwarn):
    folder = checkpoint(3, "optimizer.pt")
    write_run_keys(make(**LORA, max_steps=5), folder)
    changes = {
        "lora_target_modules": ["v_proj", "q_proj"],
        "learning_rate": 1e-4,
        "max_steps": 9,
        "micro_batch_size": 2,
        "budget": {"documents": 7},
        "seed": 1,
    }
    assert resumed(make(**{**LORA, **changes, "resume_from_checkpoint": folder})) == str(folder)
    assert not list(recwarn)


def test_another_base_model_gives_a_warning(make, checkpoint):
    folder = checkpoint(3, "optimizer.pt")
    write_run_keys(make(), folder)
    with pytest.warns(UserWarning, match="base_model: other/model differs from base_model: some/model of "):
        assert resumed(make(base_model="other/model", resume_from_checkpoint=folder)) == str(folder)


@pytest.mark.parametrize(
    ("saved", "now", "words"),
    [
        ({"gguf_file": "a.gguf"}, {"gguf_file": "b.gguf"}, "gguf_file: b.gguf differs from gguf_file: a.gguf of "),
        ({}, {"gguf_file": "b.gguf"}, "gguf_file: b.gguf differs from gguf_file: null of "),
        (
            {"gguf_file": "a.gguf"},
            {"base_model": "other/model"},
            "base_model: other/model differs from base_model: some/model and gguf_file: null differs from gguf_file: "
            "a.gguf of ",
        ),
    ],
)
def test_another_file_of_the_base_model_gives_a_warning(make, checkpoint, saved, now, words):
    folder = checkpoint(3, "optimizer.pt")
    write_run_keys(make(**saved), folder)
    with pytest.warns(UserWarning, match=words):
        assert resumed(make(**now, resume_from_checkpoint=folder)) == str(folder)


@pytest.mark.parametrize(
    ("file", "keys", "message"),
    [
        ("adapter_model.safetensors", LORA | {"lora_r": 16}, "lora_r: 16 differs from lora_r: 4"),
        ("adapter_model.safetensors", LORA | {"lora_alpha": 16}, "lora_alpha: 16.0 differs from lora_alpha: 8"),
        ("adapter_model.safetensors", {}, "adapter: null differs from adapter: lora"),
        ("model.safetensors", LORA, "adapter: lora differs from adapter: null"),
        ("adapter_model.safetensors", LORA, None),
        ("adapter_model.safetensors", {"adapter": "lora", "lora_model_dir": "checkpoint-3"}, None),
        ("model.safetensors", {}, None),
        ("adapter_model.safetensors", {"lora_model_dir": "checkpoint-3"}, "adapter: null differs from adapter: lora"),
        ("pytorch_model_fsdp_0/.metadata", LORA, None),  # whether these weights are an adapter is unknown
    ],
)
def test_an_older_checkpoint_is_checked_by_its_files(make, checkpoint, monkeypatch, tmp_path, file, keys, message):
    monkeypatch.chdir(tmp_path)
    folder = checkpoint(3, "optimizer.pt", file)
    if file == "adapter_model.safetensors":
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    config = make(**keys, resume_from_checkpoint=folder)
    if message is None:
        assert resumed(config) == str(folder)
    else:
        with pytest.raises(ConfigError, match=message):
            resumed(config)


def test_a_file_of_settings_that_cannot_be_read(make, checkpoint):
    folder = checkpoint(3, "optimizer.pt")
    (folder / "ebft_run.json").write_text("[1]")
    with pytest.raises(ConfigError, match="ebft_run.json cannot be read .* Resume from another checkpoint"):
        resumed(make(resume_from_checkpoint=folder))


TYPED = ["ebft", "train", "my runs/a.yaml", "wandb_name=the first", "resume_from_checkpoint=old"]


def test_the_command_that_resumes_is_the_one_that_was_typed(make, checkpoint, tmp_path):
    folder = checkpoint(3, "optimizer.pt")
    said = how_to_resume(make(resume_from_checkpoint="old"), 3, "old", TYPED)
    assert said == (
        "Stopped at step 3. Resume with: ebft train 'my runs/a.yaml' 'wandb_name=the first' "
        f"resume_from_checkpoint={folder}"
    )
    automatic = how_to_resume(make(**AUTO), 3, None, TYPED[:-1])
    assert automatic == "Stopped at step 3. Resume with: ebft train 'my runs/a.yaml' 'wandb_name=the first'"
    checkpoint(9)  # of another run: the highest step is not that of this run
    assert f"resume_from_checkpoint={folder}" in how_to_resume(make(**AUTO), 3, None, TYPED[:-1])


def test_a_folder_that_is_not_plain_yaml_is_quoted(make, checkpoint, tmp_path):
    checkpoint(3, "optimizer.pt").parent.joinpath("a #1").mkdir()
    (tmp_path / "checkpoint-3").rename(tmp_path / "a #1" / "checkpoint-3")
    said = how_to_resume(make(output_dir=tmp_path / "a #1"), 3, None, ["ebft", "train", "a.yaml"])
    words = shlex.split(said.partition("with: ")[2])
    values = {}
    apply_overrides(values, words[3:])
    assert values == {"resume_from_checkpoint": str(tmp_path / "a #1" / "checkpoint-3")}


def test_a_run_from_python_is_started_again(make, checkpoint):
    folder = checkpoint(3, "optimizer.pt")
    said = how_to_resume(make(), 3, None)
    assert said.endswith(f"starting the run again, with the same config and resume_from_checkpoint={folder}")
    assert how_to_resume(make(**AUTO), 3, None).endswith("starting the run again, with the same config")


def test_a_checkpoint_of_another_folder_than_the_one_in_use_is_a_warning(make, checkpoint, tmp_path, recwarn):
    folder, out = checkpoint(3, "optimizer.pt"), tmp_path / "other"
    out.mkdir()
    assert resumed(make(output_dir=out, resume_from_checkpoint=folder)) == str(folder) and not list(recwarn)
    (out / "metrics.jsonl").write_text('{"step": 1}\n')
    assert resumed(make(output_dir=out, resume_from_checkpoint=folder)) == str(folder)
    (said,) = [str(warning.message) for warning in recwarn]
    assert f"{folder} is not in output_dir: {out}, which contains another run" in said and str(tmp_path) in said


@pytest.mark.parametrize("adapter", [{}, LORA])
def test_changed_settings_of_the_optimizer_are_one_warning(make, checkpoint, recwarn, adapter):
    folder = checkpoint(3, "optimizer.pt")
    assert optimizer_keys(make(), None)["learning_rate"] == 1e-5
    write_run_keys(make(**adapter), folder, optimizer_keys(make(**adapter), None))
    assert optimizer_keys(make(**adapter, max_steps=9), folder)["learning_rate"] == 1e-5 and not list(recwarn)
    config = make(**adapter, learning_rate=1e-4, weight_decay=0.1, lr_scheduler="linear", max_grad_norm=0.5)
    in_effect = optimizer_keys(config, folder)
    (said,) = [str(warning.message) for warning in recwarn]
    for text in (
        f"differ from those of {folder}, whose",
        "learning_rate: 0.0001 has no effect, the run continues with 1e-05",
        "weight_decay: 0.1 has no effect, the run continues with 0.0",
        "lr_scheduler: linear replaces cosine from here on",
        "max_grad_norm: 0.5 replaces 1.0 from here on",
        f"{'lora_model_dir' if adapter else 'base_model'}={folder}, with another output_dir",
    ):
        assert text in said
    assert (in_effect["learning_rate"], in_effect["weight_decay"]) == (1e-5, 0.0)
    assert (in_effect["lr_scheduler"], in_effect["max_grad_norm"]) == ("linear", 0.5)


@pytest.mark.parametrize("schedules", [("cosine", "reduce_lr_on_plateau"), ("greedy", "linear")])
def test_a_schedule_with_state_fits_no_other_one(make, checkpoint, schedules):
    folder, (before, after) = checkpoint(3, "optimizer.pt"), schedules
    write_run_keys(make(), folder, optimizer_keys(make(lr_scheduler=before), None))
    with pytest.raises(ConfigError, match=f"lr_scheduler: {after} differs from lr_scheduler: {before}"):
        resumed(make(lr_scheduler=after, resume_from_checkpoint=folder))


def test_arguments_of_a_schedule_with_state_are_restored(make, checkpoint):
    folder = checkpoint(3, "optimizer.pt")
    keys = {"lr_scheduler": "reduce_lr_on_plateau"}
    write_run_keys(make(**keys), folder, optimizer_keys(make(**keys), None))
    with pytest.warns(UserWarning, match='lr_scheduler_kwargs: {"patience": 3} has no effect'):
        found = optimizer_keys(make(**keys, lr_scheduler_kwargs={"patience": 3}), folder)
    assert found["lr_scheduler_kwargs"] is None
