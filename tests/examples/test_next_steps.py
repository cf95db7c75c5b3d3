"""What the quickstart prints at its end."""

import shlex
from pathlib import Path

from ebft.config.schema import load_config
from ebft.tools.quickstart.main import train_line, what_next
from ebft.tools.quickstart.run import CONFIGS, Run, own_copy


def test_files_that_were_not_written_are_not_listed(tmp_path, capsys):
    config_file = own_copy(CONFIGS / "smollm2.yaml", tmp_path)
    run = Run(config_file, [], groups=2)
    (tmp_path / "summary.json").write_text("{}")
    what_next(tmp_path, run, "def f():")
    assert "Training curves" not in capsys.readouterr().out  # without matplotlib
    (tmp_path / "curves.png").write_text("")
    what_next(tmp_path, run, "def f():")
    printed = capsys.readouterr().out
    assert "Training curves" in printed and "summary.json" in printed and "samples.txt" not in printed
    assert 'dtype="bfloat16")' in printed  # greedy completions depend on it
    what_next(tmp_path, Run(config_file, ["torch_dtype=float32"], groups=2), "def f():")
    assert 'dtype="float32")' in capsys.readouterr().out


def test_own_rows_are_trained_with_settings_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["base_model=my/model", "torch_dtype=float32", "max_steps=2"]
    run = Run(own_copy(CONFIGS / "smollm2.yaml", Path("out")), overrides, groups=2)
    words = shlex.split(train_line(run, "my_texts/", "ebft_pretrain.transform"))
    assert words[:3] == ["ebft", "train", "out/own.yaml"]
    config = load_config(words[2], words[3:])
    assert config.datasets[0].path == "my_texts/" and config.val_set_size == 0.1 and not config.test_datasets
    assert config.base_model == "my/model" and config.torch_dtype == "float32"
    assert config.num_epochs == 3 and config.max_steps is None  # and not the steps of the quickstart
    assert config.eval_strategy == config.save_strategy == "steps"
