"""What the quickstart prints at its end."""

import shlex
from pathlib import Path

from ebft.config.schema import load_config
from ebft.tools.quickstart.main import train_line, what_next
from ebft.tools.quickstart.run import CONFIGS, Run, own_copy


def test_files_that_were_not_written_are_not_listed(tmp_path, capsys):
    run = Run(CONFIGS / "smollm2.yaml", [], groups=2)
    (tmp_path / "summary.json").write_text("{}")
    what_next(tmp_path, run, "def f():")
    assert "Training curves" not in capsys.readouterr().out  # without matplotlib
    (tmp_path / "curves.png").write_text("")
    what_next(tmp_path, run, "def f():")
    printed = capsys.readouterr().out
    assert "Training curves" in printed and "summary.json" in printed and "samples.txt" not in printed
    assert 'dtype="bfloat16")' in printed  # greedy completions depend on it
    what_next(tmp_path, Run(CONFIGS / "smollm2.yaml", ["torch_dtype=float32"], groups=2), "def f():")
    assert 'dtype="float32")' in capsys.readouterr().out


def test_commands_name_a_config_next_to_the_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run(own_copy(CONFIGS / "smollm2.yaml", Path("out")), [], groups=2)
    words = shlex.split(train_line(run, "my_texts/", "ebft_pretrain.transform"))
    assert words[:3] == ["ebft", "train", "out/smollm2.yaml"]
    config = load_config(words[2], words[3:])
    assert config.datasets[0].path == "my_texts/" and config.val_set_size == 0.1 and not config.test_datasets
