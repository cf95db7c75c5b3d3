"""A run that is killed at any moment resumes from its newest checkpoint and ends with the bits of an unbroken one."""

import copy
import json

import pytest
import torch
from transformers import Trainer

import ebft.run.output
import ebft.trainer
from ebft.run.checkpoints import newest_checkpoint
from ebft.run.output import final_step
from ebft.run_files import METRICS
from ebft.sft.trainer import SFTTrainer
from ebft.trainer import base, checkpoints
from tests.run import crash
from tests.run.crash import METHODS, STEPS, as_resumed, before, config_of, result, run_processes, trained

pytestmark = pytest.mark.slow

KILLED = -9


def before_save(step):
    """An injection: a kill before the checkpoint of this step is saved."""
    return before(ebft.trainer.OverTrainer, "_save_checkpoint", step)


def killed_and_resumed(method, inject, inputs, out, **changes):
    """Kill a run with `inject`, which must happen, and resume it; returns the step it was resumed from."""
    config = config_of(method, inputs, out, **changes)
    trained(config, KILLED, inject)
    newest = newest_checkpoint(out)
    assert "training data differ" not in trained(config)
    assert final_step(out) == STEPS and not (out / "_saving").exists()
    assert not list(out.glob("*.tmp"))
    return 0 if newest is None else int(newest.name.rpartition("-")[2])


# What is about to happen when the process is killed; with a checkpoint at every step unless the name says otherwise.
MOMENTS = {
    "between the update and its save": before_save(5),
    "between the files of a save": before(torch, "save", 5 * 5 - 2),
    "before the rename": before(base, "publish", 5),
    "in the rotation": before(checkpoints, "discard", 3),
    "in an evaluation": before(Trainer, "_determine_best_metric", 2),
    "before the final save": before(ebft.transformers_internals, "save_final_weights", 1),
    "between the files of the final save": before(ebft.run.output, "publish_files", 1),
    "before the mark of the final save": before(ebft.run.output, "write_mark", 2),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_ends_as_an_unbroken_one(method, inputs, unbroken, out):
    assert killed_and_resumed(method, before_save(6), inputs, out) == 5 and result(out) == unbroken(method)


PHASES = [*(("strided", moment) for moment in list(MOMENTS)[1:]), ("structured_reference", "before the final save")]


@pytest.mark.parametrize(("method", "moment"), PHASES)
def test_a_run_killed_in_any_phase_ends_as_an_unbroken_one(method, moment, inputs, unbroken, out):
    step = killed_and_resumed(method, MOMENTS[moment], inputs, out)
    assert step >= 3 and (step == STEPS or "final save" not in moment)
    assert result(out) == as_resumed(step, unbroken(method))


def test_a_synced_reference_that_is_not_in_the_checkpoint_is_an_error(inputs, out):
    trained(config_of("grpo_synced_reference", inputs, out, max_steps=1))
    for name in ("synced_reference.safetensors", "ebft_checksums.json"):  # without checksums, no file is missed before
        (out / "checkpoint-1" / name).unlink()
    ended = crash.run(config_of("grpo_synced_reference", inputs, out, max_steps=2))
    assert ended.code != 0 and "checkpoint-1/synced_reference.safetensors" in ended.output


@pytest.mark.parametrize(
    ("moment", "saved"),
    [(("prediction_step", 2), 3), (("prediction_step", 6), STEPS), (("training_step", 7), 3)],
    ids=["in that of the first epoch", "in that of the run", "after that of the first epoch"],
)
def test_an_evaluation_after_the_save_of_its_step_is_made_again(moment, saved, inputs, unbroken, out):
    keys = {"eval_steps": None}
    step = killed_and_resumed("sft_full", before(SFTTrainer, *moment), inputs, out, **keys)
    assert step == saved and result(out) == as_resumed(step, unbroken("sft_full", **keys))
    evaluated = [line["step"] for line in map(json.loads, (out / METRICS).open()) if "eval_loss" in line]
    assert evaluated == [3, 6, STEPS]


@pytest.mark.parametrize("method", ["sft", "reward_model", "sdft", "strided", "structured"])
def test_evaluations_do_not_change_training(method, unbroken):
    dropout = {"lora_dropout": 0.1} if method == "strided" else {}
    (often, _), (seldom, _) = unbroken(method, **dropout, eval_steps=1), unbroken(method, **dropout)
    assert often == seldom


PROCESSES = [("strided_full", (2, 1)), ("strided", (1, 2)), ("sft_full", (2, 1)), ("sft_packed", (1, 2))]


@pytest.mark.parametrize(("method", "processes"), [*PROCESSES, ("stream", (2, 1)), ("stream", (1, 2))])
def test_a_run_continues_on_another_number_of_processes(method, processes, inputs, unbroken, out):
    """The batches of all processes together are the same, and noise belongs to documents: so do the losses agree."""
    keys = {"learning_rate": 1e-3, "gradient_accumulation_steps": 1}
    _, wanted = crash.without_summary(copy.deepcopy(unbroken(method, micro_batch_size=2, **keys)))
    for count, inject, code in zip(processes, (before_save(6), lambda: None), (KILLED, 0)):
        ended = run_processes(config_of(method, inputs, out, micro_batch_size=2 // count, **keys), count, inject)
        assert {process.code for process in ended} == {code}, ended[0].output
    assert "checkpoint-5 was not saved by" in ended[0].output and "train_loss of the whole run" in ended[0].output
    assert not any("train_loss" in entry for entry in result(out)[1])
    _, logged = crash.without_summary(result(out))
    assert len(logged) == len(wanted)
    for entry, other in zip(logged, wanted):
        for numbers in (entry, other):
            numbers.pop("budget/flops", None)  # of SFT: batches of other sizes have other padding
        assert entry == pytest.approx(other, rel=1e-5, abs=1e-5)


def test_two_processes_resume_as_one_does(inputs, tmp_path):
    """The order of an epoch reaches the samplers that accelerate wraps for several processes."""
    whole, parts = (config_of("grpo", inputs, tmp_path / name, micro_batch_size=2) for name in ("a", "b"))
    for config, inject, code in ((whole, lambda: None, 0), (parts, before_save(6), KILLED), (parts, lambda: None, 0)):
        ended = run_processes(config, 2, inject)
        assert {process.code for process in ended} == {code}, ended[0].output
    assert result(tmp_path / "a") == result(tmp_path / "b")
