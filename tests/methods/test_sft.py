"""Packing of SFT in runs and checks of a config: rows, steps, held-out documents, and keys that exclude each other."""

import json
import math
import warnings

import pytest

from ebft import train
from ebft.data.documents import PackedRows
from ebft.run.config.schema import RunConfig
from ebft.tools.doctor.rows import LongestRows

LENGTHS = [3, 9, 5, 14, 4, 7, 11, 6, 3, 8, 12, 5]  # words of a document


@pytest.fixture(scope="module")
def make(tiny_llama_dir, tmp_path_factory):
    """`make(**keys)`: a config for SFT on the documents above, a word of which is one or two tokens."""
    folder = tmp_path_factory.mktemp("sft")
    rows = [{"text": " ".join(["a b c d", "self", "if"][i % 3] for i in range(length))} for length in LENGTHS]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))

    def config(**keys):
        out = str(tmp_path_factory.mktemp("out"))
        values = {"base_model": str(tiny_llama_dir), "output_dir": out,
                  "datasets": [{"path": str(folder / "rows.jsonl"), "type": "completion"}],
                  "special_tokens": {"pad_token": "<|end|>"}, "sequence_len": 64, "micro_batch_size": 2,
                  "logging_steps": 1, "save_strategy": "no"}  # fmt: skip
        return RunConfig.from_dict({**values, **keys})

    return config


def test_steps_are_counted_in_packed_rows(make, capsys):
    trainer = train(make(sample_packing=True, num_epochs=2, warmup_ratio=0.5)).trainer
    rows = trainer.train_dataset
    assert isinstance(rows, PackedRows) and len(rows) < 8 and max(rows.lengths) <= 64
    assert f"Packed 12 rows into {len(rows)} rows of up to 64 tokens" in capsys.readouterr().err
    assert trainer.state.max_steps == 2 * math.ceil(len(rows) / 2)
    assert trainer.budget.totals["documents"] == 24


@pytest.mark.parametrize(("keys", "expected"), [
    ({"sample_packing": True, "eval_sample_packing": False}, (True, False)),
    ({"eval_sample_packing": True}, (False, True)),
])  # fmt: skip
def test_held_out_documents_are_packed_as_the_others_unless_set(make, keys, expected):
    trainer = train(make(max_steps=1, val_set_size=4, eval_steps=1, **keys)).trainer
    packed = tuple(isinstance(rows, PackedRows) for rows in (trainer.train_dataset, trainer.eval_dataset))
    assert packed == expected and any("eval_ce_loss" in log for log in trainer.state.log_history)


def test_other_methods_do_not_read_the_keys_of_packing(make):
    other = {"rl": "ebft", "ebft": {"mode": "strided"}}
    with warnings.catch_warnings(action="error"):
        make(**other, eval_sample_packing=False, batch_flattening="auto")
    for key in ("eval_sample_packing", "batch_flattening"):
        with pytest.warns(UserWarning, match=f"{key} has no effect: .* does not read it"):
            make(**other, **{key: True})


def test_the_doctor_counts_the_tokens_of_packed_and_of_flattened_batches(make):
    """Two rows of 5 + 3 and of 6 tokens are padded to 2 x 8; rows of 5 and of 3 are joined into 8, or padded to 10."""
    row = lambda *lengths: {"documents": [{"input_ids": [1] * length, "prompt_length": 0} for length in lengths]}
    documents = [{"input_ids": [1] * 5}, {"input_ids": [1] * 3}]
    tokens = lambda data, **keys: LongestRows(data, (), 8).step_tokens(make(**keys)).loss
    assert tokens([row(5, 3), row(6)], sample_packing=True) == 16
    assert tokens(documents, batch_flattening=True) == 8
    assert tokens(documents) == 10
