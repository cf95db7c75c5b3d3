"""Whole runs on a stream: resuming, held-out data, workers, and what is refused."""

import json
import os
import signal
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ebft import train
from ebft.data.load import load_token_rows
from ebft.data.stream import stream_rows
from ebft.errors import ConfigError
from ebft.models.pretrained import load_tokenizer
from ebft.run.callbacks import TrainingInterrupted
from ebft.sft.trainer import StreamTrainer
from tests.golden.runs import is_of_the_machine


def finished(config):
    """What a run ends with: its weights, the numbers that it logged, and where it was in the stream."""
    result = train(config)
    history = result.trainer.state.log_history
    logs = [{name: value for name, value in entry.items() if not is_of_the_machine(name)} for entry in history]
    weights = {name: parameter.detach().clone() for name, parameter in result.model.named_parameters()}
    stream, folder = result.trainer.state.stateful_callbacks["Stream"], Path(config.output_dir)
    return SimpleNamespace(weights=weights, logs=logs, folder=folder, trainer=result.trainer, stream=stream)


def assert_same(found, expected, rtol=0.0, atol=0.0):
    assert found.trainer.state.global_step == 6
    for name, value in found.weights.items():
        torch.testing.assert_close(value, expected.weights[name], rtol=rtol, atol=atol)


@pytest.fixture(scope="module")
def unbroken(make):
    return finished(make(save_steps=2))


def resumed(make, run, step=4, **keys):
    return finished(make(resume_from_checkpoint=run.folder / f"checkpoint-{step}", **keys))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_ends_where_an_unbroken_one_does(make, unbroken, workers):
    keys = {"dataloader_num_workers": workers}
    run = finished(make(**keys, save_steps=2)) if workers else unbroken
    assert_same(run, unbroken)  # a worker gives the same rows
    found = resumed(make, run, **keys)
    assert_same(found, unbroken)
    assert found.logs[:6] == run.logs[:6]


def test_a_resumed_mixture_in_its_order(make, corpus):
    """It ends where an unbroken run does; every document of a row counts."""
    keys = {"pretraining_dataset": [{"path": corpus[0]}, {"path": corpus[1], "weight": 3}]}
    keys["shuffle_merged_datasets"] = False
    run = finished(make(save_steps=2, **keys))
    found = resumed(make, run, **keys)
    assert_same(found, run)
    assert found.logs[:6] == run.logs[:6] and run.stream["position"]["row"] == 24
    pieces = [row["pieces"] for row in islice(run.trainer.train_dataset.rows(), 24)]
    assert run.trainer.budget.totals["documents"] == sum(pieces) > 24
    keys["pretraining_dataset"][1]["weight"] = 2
    with pytest.raises(ConfigError, match="differs from the checkpoint.s: .*datasets"):
        resumed(make, run, **keys)


def test_a_run_stopped_in_a_step_continues_with_its_first_row(make, unbroken, tmp_path, monkeypatch):
    calls, step = [], StreamTrainer.training_step

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 6:  # the second micro-batch of the third step
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(StreamTrainer, "training_step", interrupted)
        with pytest.raises(TrainingInterrupted, match="Stopped at step 2"):
            train(make(output_dir=tmp_path))
    assert_same(finished(make(output_dir=tmp_path, auto_resume_from_checkpoints=True)), unbroken)


def test_resuming_with_other_batches_continues_at_the_same_row(make, unbroken):
    found = resumed(make, unbroken, 2, micro_batch_size=1, gradient_accumulation_steps=4)
    assert found.stream == unbroken.stream and found.stream["rows"] == 24
    assert_same(found, unbroken, rtol=1e-4, atol=1e-5)


def test_another_stream_is_not_continued(make, unbroken):
    changes = {"shuffle_merged_datasets": False, "streaming_multipack_buffer_size": 9}
    changed = "shuffle_merged_datasets: False instead of True; streaming_multipack_buffer_size: 9 instead of 3; "
    with pytest.raises(ConfigError, match=f"the checkpoint's: {changed}data_seed: None instead of 42. Restore"):
        resumed(make, unbroken, **changes)
    with pytest.raises(ConfigError, match="the checkpoint's: data_seed: 7 instead of 42. Restore"):
        resumed(make, unbroken, data_seed=7)


def test_held_out_documents_are_of_test_datasets_and_rows_as_one_text_give_other_losses(make, corpus, unbroken, capsys):
    test_datasets = [{"path": corpus[1], "type": "completion"}]
    found = finished(make(pretrain_multipack_attn=False, test_datasets=test_datasets, eval_steps=3))
    assert unbroken.logs[0]["loss"] != found.logs[0]["loss"]
    history = [entry["eval_ce_loss"] for entry in found.logs if "eval_ce_loss" in entry]
    assert len(history) == 2 and history[1] < history[0]
    assert "Data: a stream, " in (printed := capsys.readouterr().err) and "none held out" not in printed


def test_rows_with_prompts_are_those_of_a_run_without_a_stream(make, tmp_path):
    """Each is whole, with its labels; the one that is longer than a row is cut, with a warning."""
    rows = [{"instruction": f"Say {n}", "output": "yes " * n} for n in (1, 2, 30, 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"datasets": [{"path": tmp_path / "rows.jsonl", "type": "alpaca"}], "pretraining_dataset": None}
    keys |= {"sequence_len": 128, "shuffle_merged_datasets": False, "streaming_multipack_buffer_size": 10}
    config, whole = make(**keys, streaming=True), make(**keys)
    tokenizer = load_tokenizer(config)
    expected = load_token_rows(whole, tokenizer)[0]
    with pytest.warns(UserWarning, match="row 2, and others, are cut to sequence_len"):
        found = list(islice(stream_rows(config, tokenizer).rows(), 8))
    parts = []
    for row in found:
        places = iter(zip(row["input_ids"], row["labels"], strict=True))
        parts += [list(islice(places, length)) for length in row["seq_lengths"]]
        assert not list(places)
    wanted = [list(zip(row["input_ids"], row["labels"])) for row in expected]
    assert len(wanted) == 4 and parts[:8] == [*wanted, *wanted]
    assert finished(config).trainer.state.global_step == 6
