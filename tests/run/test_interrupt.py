"""Ctrl-C and SIGTERM in every phase of a run: it stops soon, and resumed, it ends with the bits of an unbroken one."""

import json
import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch

import ebft.run.output
import ebft.run.training
import ebft.tools.dashboard.report
from ebft.monitor.budget import Budget
from ebft.run import callbacks, checkpoints, output
from ebft.sft.trainer import SFTTrainer
from ebft.strided.held_out import HeldOutMeasure
from ebft.structured import EBFTTrainer, RolloutGRPOTrainer
from ebft.structured.generation import RolloutJob
from ebft.trainer import OverTrainer
from tests.run.crash import STEPS, as_resumed, before, config_of, kill, press_ctrl_c, result, run, terminate, trained

NO_SAVES = {"save_strategy": "no", "save_steps": None}
LAST_EVALUATION = NO_SAVES | {"eval_steps": 4}
# phase -> (method, moment of the signal, changed keys, step of the checkpoint)
PHASES = {
    "evaluation": ("strided", before(HeldOutMeasure, "add", 2, terminate), NO_SAVES, 6),
    "generation": ("structured", before(RolloutJob, "run", 6, press_ctrl_c), NO_SAVES, 4),
    "an update on completions": ("structured", before(EBFTTrainer, "_compute_loss", 6, press_ctrl_c), NO_SAVES, 4),
    "an update of GRPO": ("grpo", before(RolloutGRPOTrainer, "after_rewards", 6, terminate), NO_SAVES, 4),
    "a micro-batch": ("sft_full", before(SFTTrainer, "training_step", 10, terminate), NO_SAVES, 4),
    "the end of a step": ("sft_full", before(Budget, "gather", 5, press_ctrl_c), NO_SAVES, 5),
    "the last update": ("structured", before(torch.optim.AdamW, "step", STEPS, terminate), LAST_EVALUATION, STEPS),
    "a save": ("sft_full", before(torch, "save", 8, terminate), {}, 2),
}


@pytest.mark.parametrize("phase", [pytest.param(p, marks=[] if "end" in p else pytest.mark.slow) for p in PHASES])
def test_a_signal_stops_a_run_that_then_ends_as_an_unbroken_one(phase, inputs, unbroken, out):
    method, inject, keys, step = PHASES[phase]
    config = config_of(method, inputs, out, **keys)
    ended = run(config, inject)
    assert ended.code in (128 + 2, 128 + 15), ended.output
    assert f"Stopped at step {step}. Resume by" in ended.output
    assert checkpoints.newest_checkpoint(out) == out / f"checkpoint-{step}" and output.final_step(out) is None
    trained(config)
    wanted = unbroken(method, **{key: value for key, value in keys.items() if key == "eval_steps"})
    assert output.final_step(out) == STEPS and result(out) == as_resumed(step, wanted)


def test_a_signal_while_the_model_or_a_checkpoint_is_loaded(inputs, out):
    config = config_of("sft", inputs, out, max_steps=2)
    said = trained(config, 128 + 15, before(ebft.run.training, "load_model", 1, terminate))
    assert "Interrupted before training started; nothing was saved." in said
    assert not any(out.glob("checkpoint-*")) and output.final_step(out) is None
    assert json.loads((out / "run.json").read_text())["state"] == "stopped"

    trained(config, -9, before(ebft.transformers_internals, "save_final_weights", 1, kill))
    config = config_of("sft", inputs, out, max_steps=4)
    said = trained(config, 128 + 15, before(OverTrainer, "restore_running_state", 1, terminate))
    assert "Stopped at step 2. Resume by" in said
    trained(config)
    assert output.final_step(out) == 4


def test_a_signal_in_the_final_save_does_not_keep_the_model_from_being_saved(inputs, unbroken, out):
    said = trained(config_of("sft_full", inputs, out), 0, before(ebft.run.output, "publish_files", 1, press_ctrl_c))
    assert "Stopping after saving the final model" in said
    assert output.final_step(out) == STEPS and result(out) == unbroken("sft_full")


def test_a_request_of_another_thread_stops_a_single_process_where_it_can():
    stop, added = callbacks.StopOnSignal(), []
    trainer = SimpleNamespace(accelerator=SimpleNamespace(num_processes=1), may_stop=False, add_callback=added.append)
    stop.follow(trainer)
    thread = threading.Thread(target=stop.request, args=(15,))
    thread.start()
    thread.join()
    trainer.when_stoppable()  # in the middle of an update
    trainer.may_stop = True
    with pytest.raises(callbacks.StopRequested):
        trainer.when_stoppable()
    assert (stop.requested, stop.signal_number, added) == (True, 15, [stop])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_process_that_user_code_forks_has_the_default_handlers(number):
    stop = callbacks.StopOnSignal()
    stop.requested = True  # ignores a second SIGTERM
    with stop.listening():
        if (child := os.fork()) == 0:
            try:
                signal.raise_signal(number)
            except BaseException as error:
                os._exit(3 if type(error) is KeyboardInterrupt else 1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == {signal.SIGINT: 3, signal.SIGTERM: -signal.SIGTERM, signal.SIGHUP: 0}[number]
