"""What the quickstart prints at its end."""

from ebft.tools.quickstart.main import print_next_steps
from ebft.tools.quickstart.run import CONFIGS, Run, own_copy


def test_files_that_were_not_written_are_not_listed(tmp_path, capsys):
    config_file = own_copy(CONFIGS / "smollm2.yaml", tmp_path)
    run = Run(config_file, [], groups=2)
    (tmp_path / "summary.json").write_text("{}")
    print_next_steps(tmp_path, run, "def f():")
    assert "Training curves" not in capsys.readouterr().out  # without matplotlib
    (tmp_path / "curves.png").write_text("")
    print_next_steps(tmp_path, run, "def f():")
    printed = capsys.readouterr().out
    assert "Training curves" in printed and "summary.json" in printed and "samples.txt" not in printed
    assert 'dtype="bfloat16")' in printed  # greedy completions depend on it
    print_next_steps(tmp_path, Run(config_file, ["torch_dtype=float32", "base_model=my/model"], groups=2), "def f():")
    printed = capsys.readouterr().out
    assert 'dtype="float32")' in printed and "ebft init DATA --model my/model\n" in printed
