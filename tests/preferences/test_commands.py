"""Commands on configs of preference methods."""

import pytest
import yaml

from ebft.errors import ConfigError
from ebft.models.tokenizer import load_tokenizer
from ebft.tools.doctor.rows import longest_rows, row_lengths
from ebft.tools.evaluation.run import evaluate
from ebft.tools.evaluation.task import load_held_out
from tests.cli.conftest import ebft, plain
from tests.preferences.runs import METHODS, config_of, write_inputs

__all__ = ["ebft"]


def test_models_are_not_compared_on_pairs(tmp_path):
    for method in METHODS:
        config = config_of(method, tmp_path, base_model="does/not-exist", val_set_size=2)
        for use in (evaluate, lambda config: load_held_out(config, None)):
            with pytest.raises(ConfigError, match=f"read documents or prompts, but rl: {method} trains on preference"):
                use(config)


@pytest.mark.parametrize(("method", "sequences"), [("dpo", 2), ("kto", 1)])
def test_doctor_counts_the_tokens_of_a_batch(method, sequences, tmp_path):
    config = config_of(method, write_inputs(tmp_path))
    rows = config.method.load_rows(config, load_tokenizer(config)).train
    lengths = row_lengths(config, None, rows)
    names = ("chosen_ids", "rejected_ids") if method == "dpo" else ("completion_ids",)
    assert lengths == [len(row["prompt_ids"]) + max(len(row[name]) for name in names) for row in rows]
    longest = longest_rows(config, rows, lengths)
    assert longest.longest == max(lengths)
    assert longest.step_tokens(config).loss == config.micro_batch_size * sequences * max(lengths)


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    keys = {"base_model": "model", "rl": "dpo", "datasets": [{"path": "rows.jsonl", "type": "chatml.intel"}]}
    keys |= {"sequence_len": 64, "val_set_size": 2, "eval_steps": 2, "micro_batch_size": 2, "max_steps": 2}
    keys |= {"logging_steps": 1, "torch_dtype": "float32", "save_strategy": "no", "output_dir": "out"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(keys))
    return tmp_path / "run.yaml"


def test_preprocess_shows_both_completions(ebft, run_file):
    result = ebft("preprocess", run_file, "--debug", "--count", "1", "--html", "rows.html")
    text = plain(result.stdout)
    assert result.exit_code == 0, result.output
    assert "chosen" in text and "rejected" in text and "scored" in text
    assert "rejected" in run_file.with_name("rows.html").read_text()
    result = ebft("preprocess", run_file, "rl=kto", "--debug", "--count", "1")
    assert result.exit_code == 0 and "label" in plain(result.stdout) and "rejected" not in plain(result.stdout)
