"""Runs of the preference methods: checkpoints, the reference model, prepared rows, and continuing other runs."""

import pytest
import torch
from safetensors.torch import load_file

from tests.preferences.runs import pairs, trained, write_inputs
from tests.preferences.test_losses import completions


def weights(folder):
    (path,) = folder.glob("*model.safetensors")
    return load_file(path)


@pytest.mark.parametrize("method", ["dpo", "orpo", "simpo", "sft"])
def test_means_of_an_incomplete_micro_batch_are_over_rows_or_tokens(method, tmp_path):
    """Three rows as 2 + 1 and as one batch: the loss, its gradient, the metrics."""
    write_inputs(tmp_path, pairs(3))
    runs = []
    for size, count in ((3, 1), (2, 2)):
        keys = {"micro_batch_size": size, "gradient_accumulation_steps": count, "max_steps": 1, "adam_epsilon": 1e-3}
        keys |= {"dpo_loss_type": "sft"} if method == "sft" else {}
        out = tmp_path / f"out{size}"
        result = trained("dpo" if method == "sft" else method, tmp_path, False, output_dir=str(out), **keys)
        runs.append((result.trainer.state.log_history[0], weights(out)))
    (whole, expected), (split, found) = runs
    names = [name for name in whole if name.startswith(("logps/", "rewards/", "log_odds", "logits/", "nll"))]
    assert {"logps/chosen", "rewards/margins"} <= {*names}
    assert {name: split[name] for name in names} == pytest.approx({name: whole[name] for name in names}, rel=1e-4)
    assert (split["loss"], split["grad_norm"]) == pytest.approx((whole["loss"], whole["grad_norm"]), rel=1e-4)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)


@pytest.mark.parametrize("precompute", [False, True])
def test_batches_of_kto_are_shuffled_unless_pairs_are_fixed(precompute, tmp_path):
    """Ten epochs of two batches: each has every row once, and its other completions are those of its batches."""
    write_inputs(tmp_path, pairs(4))
    config = {"max_steps": 1, "precompute_ref_log_probs": precompute, "dataset_prepared_path": str(tmp_path / "p")}
    trainer = trained("kto", tmp_path, **config).trainer
    loader, epochs = trainer.get_train_dataloader(), []
    for epoch in range(10):
        loader.set_epoch(epoch)
        batches = []
        for batch in loader:
            own, others = completions(batch, ""), completions(batch, "KL_")
            assert others == [own[1], own[0]]
            batches.append(tuple(map(tuple, own)))
        epochs.append(batches)
    rows = sorted(row for batch in epochs[0] for row in batch)
    assert len(set(rows)) == 4 and all(sorted(row for batch in found for row in batch) == rows for found in epochs)
    sets = {frozenset(map(frozenset, batches)) for batches in epochs}
    assert len(sets) == 1 if precompute else len(sets) > 1
    assert not list((tmp_path / "p").rglob("cache-*"))
