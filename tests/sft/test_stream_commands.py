"""Commands on a config with a stream: its first rows are shown, and a step on them is measured."""

import pytest

from tests.cli.conftest import ebft

__all__ = ["ebft"]


@pytest.fixture
def run_file(tiny_llama_dir, corpus, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"base_model: {tiny_llama_dir}\npretraining_dataset: {corpus[0]}\nmax_steps: 1\nsequence_len: 32\n"
        f"learning_rate: 1.0e-3\noutput_dir: {tmp_path / 'out'}\nspecial_tokens: {{pad_token: <|end|>}}\n"
    )
    return path


def test_preprocess_shows_the_first_rows_and_stores_none(ebft, run_file):
    shown = ebft("preprocess", run_file, "--count", "2")
    assert shown.exit_code == 0, shown.stderr
    assert "row 1 of the stream for training" in shown.stdout and "row 2 of the stream" in shown.stdout
    assert "in the cross-entropy" in shown.stdout and "Stored prepared rows" not in shown.stdout
    refused = ebft("preprocess", run_file)
    assert refused.exit_code == 2 and "the rows of a stream are not prepared" in " ".join(refused.stderr.split())
