"""Whole runs on a stream: resuming, held-out data, workers, and what is refused."""

import os
import signal
from itertools import islice

import pytest
import torch
from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM

from ebft import train
from ebft.errors import ConfigError, DataError, ModelError
from ebft.run.stopping import TrainingInterrupted
from ebft.sft.stream import StreamTrainer


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(model, expected):
    for name, value in weights(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def logged(trainer):
    timing = ("runtime", "per_second", "tokens_per", "seconds", "memory")
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in timing)}
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize("keys", [{}, {"dataloader_num_workers": 1}, {"shuffle_merged_datasets": False}])
def test_a_resumed_run_ends_where_an_unbroken_one_does(make, tmp_path, keys):
    keys = {**keys, "save_steps": 2}
    unbroken = train(make(**keys, output_dir=tmp_path / "a"))
    checkpoint = tmp_path / "a" / "checkpoint-4"
    resumed = train(make(**keys, output_dir=tmp_path / "b", resume_from_checkpoint=checkpoint))
    assert resumed.trainer.state.global_step == 6
    assert_same(resumed.model, weights(unbroken.model))
    assert logged(resumed.trainer)[:6] == logged(unbroken.trainer)[:6]


def test_a_resumed_mixture_ends_where_an_unbroken_one_does(make, corpus, tmp_path):
    mixture = [{"path": corpus[0]}, {"path": corpus[1], "weight": 3}]
    keys = {"pretraining_dataset": mixture, "save_steps": 2}
    unbroken = train(make(**keys, output_dir=tmp_path / "a"))
    checkpoint = tmp_path / "a" / "checkpoint-4"
    resumed = train(make(**keys, output_dir=tmp_path / "b", resume_from_checkpoint=checkpoint))
    assert_same(resumed.model, weights(unbroken.model))
    assert logged(resumed.trainer)[:6] == logged(unbroken.trainer)[:6]
    mixture[1]["weight"] = 2
    with pytest.raises(ConfigError, match="differs from that of the checkpoint: .*datasets"):
        train(make(**keys, resume_from_checkpoint=checkpoint, output_dir=tmp_path / "c"))


def test_a_worker_gives_the_same_rows(make, tmp_path):
    without = train(make(output_dir=tmp_path / "a"))
    assert_same(train(make(output_dir=tmp_path / "b", dataloader_num_workers=1)).model, weights(without.model))


def test_a_run_stopped_in_a_step_continues_with_its_first_row(make, tmp_path, monkeypatch):
    unbroken = train(make(output_dir=tmp_path / "a"))
    calls, step = [], StreamTrainer.training_step

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 6:  # the second micro-batch of the third step
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(StreamTrainer, "training_step", interrupted)
        with pytest.raises(TrainingInterrupted, match="Stopped at step 2"):
            train(make(output_dir=tmp_path / "b"))
    resumed = train(make(output_dir=tmp_path / "b", auto_resume_from_checkpoints=True))
    assert_same(resumed.model, weights(unbroken.model))


def test_resuming_with_other_batches_continues_at_the_same_row(make, tmp_path):
    unbroken = train(make(output_dir=tmp_path / "a", save_steps=3))
    keys = {"micro_batch_size": 1, "gradient_accumulation_steps": 4, "output_dir": tmp_path / "b"}
    resumed = train(make(**keys, resume_from_checkpoint=tmp_path / "a" / "checkpoint-3"))
    saved, expected = (run.trainer.state.stateful_callbacks["Stream"] for run in (resumed, unbroken))
    assert saved == expected and saved["rows"] == 24
    for name, value in weights(resumed.model).items():
        torch.testing.assert_close(value, weights(unbroken.model)[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"streaming_multipack_buffer_size": 9}, "streaming_multipack_buffer_size: 9 instead of 8"),
        ({"data_seed": 7}, "data_seed: 7 instead of 42"),
        ({"shuffle_merged_datasets": False}, "shuffle_merged_datasets: False instead of True"),
    ],
)
def test_another_stream_is_not_continued(make, tmp_path, change, message):
    train(make(output_dir=tmp_path / "a", max_steps=1))
    with pytest.raises(ConfigError, match=f"differs from that of the checkpoint: .*{message}"):
        train(make(**change, resume_from_checkpoint=tmp_path / "a" / "checkpoint-1", output_dir=tmp_path / "b"))


def test_a_run_on_prepared_rows_is_not_continued_with_a_stream(make, corpus, tmp_path):
    prepared = {"pretraining_dataset": None, "datasets": [{"path": corpus[0], "type": "completion"}]}
    with pytest.warns(UserWarning, match="streaming_multipack_buffer_size"):
        train(make(**prepared, output_dir=tmp_path / "a", max_steps=1))
    with pytest.raises(ConfigError, match="has no position in a stream"):
        train(make(resume_from_checkpoint=tmp_path / "a" / "checkpoint-1", output_dir=tmp_path / "b"))


def test_held_out_documents_are_those_of_test_datasets(make, corpus):
    data = [{"path": corpus[1], "type": "completion"}]
    result = train(make(test_datasets=data, eval_steps=3))
    history = [entry["eval_ce_loss"] for entry in result.trainer.state.log_history if "eval_ce_loss" in entry]
    assert len(history) == 2 and history[1] < history[0]


def test_rows_as_one_text_give_other_losses(make, tmp_path):
    apart = train(make(output_dir=tmp_path / "a"))
    joined = train(make(output_dir=tmp_path / "b", pretrain_multipack_attn=False))
    assert logged(apart.trainer)[0]["loss"] != logged(joined.trainer)[0]["loss"]


def test_every_document_of_a_row_counts(make, corpus):
    result = train(make(shuffle_merged_datasets=False))
    position = result.trainer.state.stateful_callbacks["Stream"]["position"]
    assert position["row"] == 24
    pieces = [row["pieces"] for row in islice(result.trainer.train_dataset.rows(), 24)]
    assert result.trainer.budget.totals["documents"] == sum(pieces) > 24


def test_a_wrong_column_is_reported_before_the_model_is_loaded(make, corpus):
    with pytest.raises(DataError, match="row 0: .*body"):
        train(make(pretraining_dataset=[{"path": corpus[0], "text_column": "body"}], base_model=make().base_model))


def test_the_summary_names_the_tokens_of_a_step(make, capsys):
    train(make(max_steps=1))
    printed = capsys.readouterr().err
    assert "Data: a stream, none held out" in printed and "Steps: 1 (128 tokens each)" in printed


def test_a_recurrent_model_needs_rows_as_one_text(make, tiny_llama_dir, tmp_path):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(tmp_path / "mamba")
    tokenizer.save_pretrained(tmp_path / "mamba")
    keys = {"base_model": tmp_path / "mamba", "max_steps": 1}
    with pytest.raises(ModelError, match="MambaForCausalLM .* pretrain_multipack_attn: false"):
        train(make(**keys))
    assert train(make(**keys, pretrain_multipack_attn=False)).trainer.state.global_step == 1
