"""The final model is complete or is saved again; what a full disk and a finished run leave behind."""

import errno
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

import ebft.run.output
import ebft.run.training
import ebft.trainer
from ebft.run.checkpoints import newest_checkpoint
from ebft.run.output import final_step
from ebft.trainer import base, checkpoints
from tests.run.crash import before, config_of, kill, result, trained


def no_space():
    raise OSError(errno.ENOSPC, "No space left on device")


def limit_files(megabytes):
    """An injection: files cannot grow beyond this size, so that a write fails in the library that makes it."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (int(megabytes * 2**20),) * 2)


def test_a_final_model_without_a_file_is_saved_again(inputs, out):
    config = config_of("sft", inputs, out, max_steps=1)
    trained(config)
    modes = [path.stat().st_mode & 0o777 for path in out.rglob("*.safetensors")]  # as the umask says
    assert len(modes) == 2 and set(modes) == {out.stat().st_mode & 0o666}
    weights = (out / "adapter_model.safetensors").read_bytes()
    for name in ("tokenizer.json", "adapter_config.json", "adapter_model.safetensors"):
        (out / name).unlink()
        trained(config)
        assert final_step(out) == 1 and (out / name).is_file()
    assert (out / "adapter_model.safetensors").read_bytes() == weights


@pytest.mark.first(1)
@pytest.mark.parametrize("inject", [before(torch, "save", 14, no_space), limit_files(0.03)], ids=["error", "limit"])
def test_a_full_disk_leaves_the_checkpoint_before(inject, inputs, unbroken, out):
    """With the limit no checkpoint is saved at all: the weights themselves are too large for it."""
    config = config_of("sft_full", inputs, out)
    said, saved = trained(config, 2, inject), [path.name for path in sorted(out.glob("checkpoint-*"))]
    assert f"checkpoint-{len(saved) + 1} could not be saved: " in said and " MiB are free in" in said
    assert "Earlier checkpoints are unchanged" in said and ". Free disk space or" in said
    assert not (out / "_saving").exists() and newest_checkpoint(out) == (out / saved[-1] if saved else None)
    trained(config)
    assert result(out) == unbroken("sft_full")


def disk_full_as_tokenizers_says_it():
    raise Exception("No space left on device (os error 28)")


@pytest.mark.parametrize(  # call of the tokenizer's save -> what is said; the first one is before training
    ("number", "said"), [(1, "so training is not started"), (5, "out could not be saved")]
)
def test_whatever_a_save_raises_is_a_message(number, said, inputs, out):
    inject = before(PreTrainedTokenizerBase, "save_pretrained", number, disk_full_as_tokenizers_says_it)
    printed = trained(config_of("sft", inputs, out, max_steps=3), 2, inject)
    assert said in printed and ("resume with auto" in printed) == (number > 1)
    assert not (out / "_saving").exists()
    assert newest_checkpoint(out) == (out / f"checkpoint-{number - 2}" if number > 2 else None)


def leave(free):
    """An injection: so many bytes are free."""
    usage = shutil.disk_usage
    return lambda: setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=free))


@pytest.mark.parametrize(("inject", "code", "said"), [
    (leave(2**10), 2, "training is not started: it needs about"),
    (leave(2**16), 0, "output_dir: the disk may become full"), (leave(2**20), 0, None),
])  # fmt: skip
def test_a_model_that_cannot_be_saved_is_not_trained(inject, code, said, inputs, out):
    printed = trained(config_of("sft_full", inputs, out, max_steps=1), code, inject)
    assert said in printed if said else "disk may" not in printed
    assert not (out / "_saving").exists() and (newest_checkpoint(out) is None) == (code == 2)


BEST = {"load_best_model_at_end": True, "eval_steps": 1, "save_total_limit": 1, "learning_rate": 1.0}


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_found_by_a_resumed_run(inputs, out):
    """Also in a folder that was moved, whose former path is in the state."""
    config = config_of("sft", inputs, out, **BEST)
    trained(config)
    whole = result(out), json.loads((out / "trainer_state.json").read_text())["best_global_step"]
    shutil.rmtree(out)
    trained(config, -9, before(base, "publish", 6))
    moved = out.rename(out.with_name("moved"))
    trained(config_of("sft", inputs, moved, **BEST))
    state = json.loads((moved / "trainer_state.json").read_text())
    assert (result(moved), state["best_global_step"]) == whole
    assert state["best_model_checkpoint"] == str(moved / f"checkpoint-{whole[1]}")


AROUND_THE_FINAL_SAVE = {
    "the best model is loaded": before(ebft.trainer.OverTrainer, "_load_best_model", 1, kill),
    "weights are written": before(ebft.transformers_internals, "save_final_weights", 1, kill),
    "the disk is full": before(ebft.run.output, "publish_files", 1, no_space),
}


@pytest.mark.first(1)
@pytest.mark.parametrize(("method", "moment"), [
    ("strided_full", "the best model is loaded"), ("sft", "weights are written"),
    ("strided_full", "the disk is full"), ("grpo", "weights are written")])  # fmt: skip
def test_the_newest_and_the_best_checkpoint_survive_the_end_of_training(method, moment, inputs, out):
    """Also with save_total_limit: 1, for which transformers would leave only the best one, before the final save."""
    config = config_of(method, inputs, out, max_steps=4, **BEST)
    trained(config, 2 if moment == "the disk is full" else -9, AROUND_THE_FINAL_SAVE[moment])
    newest = newest_checkpoint(out)
    best = Path(json.loads((newest / "trainer_state.json").read_text())["best_model_checkpoint"])
    assert newest.name == "checkpoint-4" and best.is_dir() and (method != "strided_full" or best != newest)
    assert {path.name for path in out.glob("checkpoint-*")} == {newest.name, best.name}
    trained(config)
    assert final_step(out) == 4 and newest.is_dir() and best.is_dir()


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
    for step, name in ((6, "checkpoint-old"), (6, "checkpoint-old-6"), (3, "checkpoint-5"), (6, "checkpoint-²")):
        checkpoint(out, step, name)
    (checkpoint(out, 4) / "ebft_checksums.json").unlink()
    (out / "checkpoint-2").write_text("a file")
    (out / "checkpoint-1").mkdir()
    others = {path.name for path in out.iterdir()} - {f"checkpoint-{step}" for step in (7, 8, 9, 10)}
    for limit, best, kept in ((4, None, {7, 8, 9, 10}), (3, 7, {7, 9, 10}), (1, 7, {7, 10}), (1, 10, {10})):
        checkpoints.rotate(out / "checkpoint-10", limit, best and f"elsewhere/checkpoint-{best}")
        left = {path.name for path in out.iterdir()} - {"_saving"}
        assert left == others | {f"checkpoint-{step}" for step in kept}


@pytest.mark.parametrize(("first", "second"), [("sft", "sft_full"), ("sft_full", "sft")])
def test_a_new_run_replaces_the_whole_model_of_the_one_before(inputs, out, first, second):
    keys = {"auto_resume_from_checkpoints": False, "save_steps": None, "save_strategy": "no"}
    keys |= {"eval_steps": None, "val_set_size": 0, "max_steps": 1}
    trained(config_of(first, inputs, out, **keys))
    mark = json.loads((out / "ebft_final.json").read_text())
    mark["files"] |= {"of_the_model.txt": 1}
    (out / "ebft_final.json").write_text(json.dumps(mark))
    names = ("out/adapter_notes.txt", "out/model_notes.json", "outside.txt")
    kept = [out.parent / name for name in names]  # of the user
    for path in (*kept, out / "of_the_model.txt"):
        path.write_text("x")
    trained(config_of(second, inputs, out, **keys))
    is_adapter = second == "sft"
    assert (out / "adapter_config.json").is_file() == (out / "adapter_model.safetensors").is_file() == is_adapter
    assert final_step(out) == 1 and (out / "model.safetensors").is_file() != is_adapter
    assert not (out / "of_the_model.txt").exists() and all(path.is_file() for path in kept)
