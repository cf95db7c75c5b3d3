"""The final model is complete or is saved again; what a full disk and a finished run leave behind."""

import errno
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

import ebft.run.output
import ebft.run.rehearsal
import ebft.run.training
import ebft.trainer
from ebft.errors import ConfigError
from ebft.run.checkpoints import newest_checkpoint
from ebft.run.own_files import final_step
from ebft.run.training import make_output_dir
from ebft.trainer import checkpoints
from tests.run.crash import before, config_of, kill, result, run, run_processes, without_summary


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def no_space():
    raise OSError(errno.ENOSPC, "No space left on device")


def limit_files(megabytes):
    """An injection: files cannot grow beyond this size, so that a write fails in the library that makes it."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (int(megabytes * 2**20),) * 2)


def test_a_run_that_was_extended_and_killed_before_its_final_save_saves_the_new_weights(inputs, unbroken, out):
    assert run(config_of("strided", inputs, out, max_steps=4)).code == 0 and final_step(out) == 4
    longer = config_of("strided", inputs, out)
    assert run(longer, before(ebft.run.output, "save_final_weights", 1, kill)).code == -9
    assert newest_checkpoint(out).name == "checkpoint-8" and final_step(out) == 4
    ended = run(longer)
    assert ended.code == 0 and final_step(out) == 8
    last = load_file(out / "checkpoint-8" / "adapter_model.safetensors")
    final = load_file(out / "adapter_model.safetensors")
    assert all(torch.equal(value, last[name]) for name, value in final.items())


@pytest.mark.parametrize("name", ["tokenizer.json", "adapter_config.json", "ebft_final.json"])
def test_a_final_model_without_a_file_is_saved_again(name, inputs, out):
    config = config_of("sft", inputs, out, max_steps=1)
    assert run(config).code == 0
    (out / name).unlink()
    assert run(config).code == 0 and final_step(out) == 1 and (out / name).is_file()


def test_other_users_may_read_weights_as_the_umask_says(inputs, out):
    assert run(config_of("sft", inputs, out, max_steps=1)).code == 0
    modes = [path.stat().st_mode & 0o777 for path in out.rglob("*.safetensors")]
    assert len(modes) == 2 and set(modes) == {out.stat().st_mode & 0o666}


def test_a_finished_run_without_optimizer_state_is_complete(inputs, out):
    config = config_of("sft", inputs, out, max_steps=2, save_only_model=True)
    assert run(config).code == 0
    files = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    ended = run(config)
    assert ended.code == 0 and "Training is already complete" in ended.output
    assert files == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    ended = run(config_of("sft", inputs, out, max_steps=3, save_only_model=True))
    assert ended.code == 2 and "it has no optimizer state, as with save_only_model: true" in ended.output


def test_a_finished_run_without_checkpoints_is_complete(inputs, out):
    config = config_of("sft", inputs, out, max_steps=2, save_steps=None, save_strategy="no")
    assert run(config).code == 0
    ended = run(config)
    assert ended.code == 0 and f"Training is already complete: {out} is at step 2" in ended.output


@pytest.mark.parametrize("inject", [before(torch, "save", 14, no_space), limit_files(0.03)], ids=["error", "limit"])
def test_a_full_disk_leaves_the_checkpoint_before(inject, inputs, unbroken, out):
    """With the limit no checkpoint is saved at all: the weights themselves are too large for it."""
    config = config_of("sft_full", inputs, out)
    ended = run(config, inject)
    saved = [path.name for path in sorted(out.glob("checkpoint-*"))]
    assert ended.code == 2, ended.output
    assert f"checkpoint-{len(saved) + 1} could not be saved: " in ended.output and " MiB are free in" in ended.output
    assert "Earlier checkpoints are unchanged" in ended.output and ". Free disk space or" in ended.output
    assert not (out / "_saving").exists()
    assert [newest_checkpoint(out)] == [out / saved[-1] if saved else None]
    assert run(config).code == 0 and result(out) == unbroken("sft_full")


def test_a_full_disk_in_the_final_save(inputs, unbroken, out):
    config = config_of("sft_full", inputs, out)
    ended = run(config, before(ebft.run.output, "publish_files", 1, no_space))
    assert ended.code == 2 and f"{out} could not be saved: [Errno 28] No space left on device" in ended.output
    assert final_step(out) is None
    assert run(config).code == 0 and result(out) == without_summary(unbroken("sft_full"))


def disk_full_as_tokenizers_says_it():
    raise Exception("No space left on device (os error 28)")


def refuse():
    raise ValueError("GenerationConfig is invalid")


# call of the tokenizer's save -> what is said; the first one is before training
REHEARSED = "so training is not started"
OF_TOKENIZERS = {1: REHEARSED, 2: "checkpoint-1 could not be saved", 4: "the newest is", 5: "out could not be saved"}


@pytest.mark.parametrize(("number", "said"), OF_TOKENIZERS.items())
@pytest.mark.parametrize("act", [disk_full_as_tokenizers_says_it, refuse])
def test_whatever_a_save_raises_is_a_message(number, said, act, inputs, out):
    config = config_of("sft", inputs, out, max_steps=3)
    ended = run(config, before(PreTrainedTokenizerBase, "save_pretrained", number, act))
    assert ended.code == 2 and "Traceback" not in ended.output and said in ended.output, ended.output
    remedy = "Free disk space" if act is disk_full_as_tokenizers_says_it else "Correct the cause"
    assert remedy in ended.output and ("resume with auto" in ended.output) == (number > 1)
    assert not (out / "_saving").exists()
    assert newest_checkpoint(out) == (out / f"checkpoint-{number - 2}" if number > 2 else None)


def test_a_process_that_is_killed_in_a_save_is_not_taken_for_a_full_disk(inputs, out):
    act = lambda: kill() if os.environ["RANK"] == "1" else None
    config = config_of("sft", inputs, out, max_steps=3, micro_batch_size=1)
    ended = run_processes(config, 2, before(ebft.trainer.OverTrainer, "_save_rng_state", 2, act))
    assert ended[1].code == -9 and "could not be saved" not in ended[0].output, ended[0].output


def tie_layers():
    """An injection: the model has two layers with the same weight, as a plugin may make it."""
    load_model = ebft.run.training.load_model

    def load(*args, **keys):
        model = load_model(*args, **keys)
        model.model.layers[0].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight
        return model

    ebft.run.training.load_model = load


def leave(free):
    """An injection: so many bytes are free."""

    def inject():
        usage = shutil.disk_usage
        shutil.disk_usage = lambda path: usage(path)._replace(free=free)

    return inject


@pytest.mark.parametrize(
    ("inject", "code", "said"),
    [
        (tie_layers, 2, "contained shared tensors"),
        (leave(2**10), 2, "training is not started: it needs about"),
        (leave(2**16), 0, "output_dir: the disk may become full"),
        (leave(2**20), 0, None),
    ],
)
def test_a_model_that_cannot_be_saved_is_not_trained(inject, code, said, inputs, out):
    ended = run(config_of("sft_full", inputs, out, max_steps=2), inject)
    assert ended.code == code and "Traceback" not in ended.output, ended.output
    assert said in ended.output if said else "disk may" not in ended.output
    assert not (out / "_saving").exists() and (newest_checkpoint(out) is None) == (code == 2)


def test_an_output_folder_that_is_not_writable_is_refused(out, as_user):
    out.mkdir()
    make_output_dir(str(out))
    assert not list(out.iterdir())
    out.chmod(0o555)
    with as_user, pytest.raises(ConfigError, match="out is not writable .Permission denied.. Correct the permissions"):
        make_output_dir(str(out))


def test_a_tokenizer_that_cannot_be_loaded_again_is_a_warning(inputs, out):
    def inject():
        ebft.run.rehearsal.pretrained_tokenizer = lambda *_, **__: refuse()

    ended = run(config_of("sft", inputs, out, max_steps=1), inject)
    assert ended.code == 0 and "saved with the model cannot be loaded again: Generation" in ended.output


def test_a_damaged_newest_checkpoint_is_skipped(inputs, unbroken, out):
    config = config_of("strided_full", inputs, out)
    assert run(config, before(ebft.trainer.OverTrainer, "_save_checkpoint", 6)).code == -9
    weights = out / "checkpoint-5" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"~")
    ended = run(config)
    assert ended.code == 0 and "checkpoint-5 is not used: model.safetensors is damaged (wrong" in ended.output
    assert result(out) == unbroken("strided_full")


def test_rotation_keeps_the_newest_complete_checkpoint_beside_one_of_a_longer_run(inputs, out):
    """A folder with a higher step, of another run, is neither resumed from nor kept instead of the new one."""
    (out / "checkpoint-300").mkdir(parents=True)
    assert run(config_of("sft", inputs, out, max_steps=3, save_total_limit=1)).code == 0
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-3"]


def test_the_best_checkpoint_is_kept_and_found_by_a_resumed_run(inputs, out):
    keys = {"load_best_model_at_end": True, "eval_steps": 1, "save_total_limit": 1, "learning_rate": 1.0}
    assert run(config_of("sft", inputs, out, **keys)).code == 0
    whole = result(out), json.loads((out / "trainer_state.json").read_text())["best_global_step"]
    shutil.rmtree(out)
    config = config_of("sft", inputs, out, **keys)
    assert run(config, before(checkpoints, "publish", 6)).code == -9
    assert run(config).code == 0
    state = json.loads((out / "trainer_state.json").read_text())
    assert (result(out), state["best_global_step"]) == whole
    assert state["best_model_checkpoint"] == str(out / f"checkpoint-{whole[1]}")


AROUND_THE_FINAL_SAVE = {
    "training ends": before(ebft.trainer.OverTrainer, "_finalize_training", 1, kill),
    "the best model is loaded": before(ebft.trainer.OverTrainer, "_load_best_model", 1, kill),
    "weights are written": before(ebft.run.output, "save_final_weights", 1, kill),
    "files are moved": before(ebft.run.output, "publish_files", 1, kill),
    "the model is marked": before(ebft.run.output, "write_mark", 2, kill),
    "the disk is full": before(ebft.run.output, "publish_files", 1, no_space),
}


@pytest.mark.parametrize(
    ("method", "moment"),
    [
        *(("strided_full", moment) for moment in AROUND_THE_FINAL_SAVE),
        *((method, "weights are written") for method in ("sft", "dpo", "grpo")),
    ],
)
def test_the_newest_and_the_best_checkpoint_survive_the_end_of_training(method, moment, inputs, out):
    """Also with save_total_limit: 1, for which transformers would leave only the best one, before the final save."""
    keys = {"load_best_model_at_end": True, "eval_steps": 1, "save_total_limit": 1, "learning_rate": 1.0}
    config = config_of(method, inputs, out, max_steps=4, **keys)
    ended = run(config, AROUND_THE_FINAL_SAVE[moment])
    assert ended.code == (2 if moment == "the disk is full" else -9), ended.output
    newest = newest_checkpoint(out)
    best = Path(json.loads((newest / "trainer_state.json").read_text())["best_model_checkpoint"])
    assert newest.name == "checkpoint-4" and best.is_dir()
    assert method != "strided_full" or best != newest
    assert {path.name for path in out.glob("checkpoint-*")} == {newest.name, best.name}
    assert run(config).code == 0 and final_step(out) == 4 and newest.is_dir() and best.is_dir()


def checkpoint(folder, step, name=None, **state):
    """A checkpoint as this package writes it, as far as `rotate` reads it."""
    made = folder / (name or f"checkpoint-{step}")
    made.mkdir(parents=True)
    (made / "trainer_state.json").write_text(json.dumps({"global_step": step, **state}))
    (made / "ebft_checksums.json").write_text("{}")
    return made


def test_rotation_deletes_the_lowest_steps_of_the_run_only(out):
    for step in (9, 10, 100, 8, 7):  # the order of their times, as after a copy or with a clock that was set back
        checkpoint(out, step)
    for step, name in ((6, "checkpoint-old"), (6, "checkpoint-old-3"), (3, "checkpoint-5"), (6, "checkpoint-²")):
        checkpoint(out, step, name)
    foreign = checkpoint(out, 4)
    (foreign / "ebft_checksums.json").unlink()
    (out / "checkpoint-2").write_text("a file")
    (out / "checkpoint-1").mkdir()
    others = {path.name for path in out.iterdir()} - {f"checkpoint-{step}" for step in (7, 8, 9, 10)}
    for limit, best, kept in ((4, None, {7, 8, 9, 10}), (3, 7, {7, 9, 10}), (1, 7, {7, 10}), (1, 10, {10})):
        checkpoints.rotate(out / "checkpoint-10", limit, best and f"elsewhere/checkpoint-{best}")
        left = {path.name for path in out.iterdir()} - {"_saving"}
        assert left == others | {f"checkpoint-{step}" for step in kept}


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(out, monkeypatch):
    for step in (1, 2):
        checkpoint(out, step)
    monkeypatch.setattr(checkpoints, "discard", lambda folder: no_space())
    with pytest.warns(UserWarning, match="save_total_limit: .*checkpoint-1 cannot be deleted"):
        checkpoints.rotate(out / "checkpoint-2", 1, None)


WITHOUT_CHECKPOINTS = {
    "auto_resume_from_checkpoints": False,
    "save_steps": None,
    "save_strategy": "no",
    "eval_steps": None,
    "val_set_size": 0,
    "max_steps": 1,
}


@pytest.mark.parametrize(("first", "second"), [("sft", "sft_full"), ("sft_full", "sft")])
@pytest.mark.parametrize("has_mark", [True, False])
def test_a_new_run_replaces_the_whole_model_of_the_one_before(inputs, out, first, second, has_mark):
    assert run(config_of(first, inputs, out, **WITHOUT_CHECKPOINTS)).code == 0
    for name in ("adapter_notes.txt", "model_notes.json"):
        (out / name).write_text("of the user")
    mark = json.loads((out / "ebft_final.json").read_text())
    (out / "of_the_model.txt").write_text("x")
    mark["files"] |= {"of_the_model.txt": 1, "../outside.txt": 1}
    (out.parent / "outside.txt").write_text("x")
    (out / "ebft_final.json").write_text(json.dumps(mark))
    if not has_mark:
        (out / "ebft_final.json").unlink()
    assert run(config_of(second, inputs, out, **WITHOUT_CHECKPOINTS)).code == 0 and final_step(out) == 1
    is_adapter = second == "sft"
    assert (out / "adapter_config.json").is_file() == (out / "adapter_model.safetensors").is_file() == is_adapter
    assert (out / "model.safetensors").is_file() != is_adapter
    assert (out / "of_the_model.txt").is_file() != has_mark
    assert (out / "adapter_notes.txt").is_file() and (out / "model_notes.json").is_file()
    assert (out.parent / "outside.txt").is_file()
