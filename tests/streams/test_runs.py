"""Whole runs on a stream: resuming, held-out data, workers, and what is refused."""

import pytest
import torch

from ebft import train


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
