"""What the quickstart prints at its end: a table that says which values can be compared, and commands; rewards."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from ebft.tools.fetch import examples_folder
from ebft.tools.quickstart import main as report
from ebft.tools.quickstart.run import CONFIGS, Run, make_once, own_copy
from tests.strided.families import tiny_model


def test_every_metric_has_a_direction_and_a_verdict_in_whole_lines():
    before = [{name: 1.0 for name, _ in report.METRICS}, {name: 1.5 for name, _ in report.METRICS}]
    after = [{name: 1.2 for name, _ in report.METRICS}, {name: 1.2 for name, _ in report.METRICS}]
    for groups, value in ((before, 1.0), (after, 1.3)):
        for number, group in enumerate(groups):
            group |= {"alignment": value + 0.01 * number, "diversity": value + 0.01 * number}
    after[1]["diversity"] += 0.01
    console = Console(width=80, record=True)
    console.print(report.result_table(before, after))
    lines = {line.split()[0]: line for line in console.export_text().splitlines() if line.strip()}
    verdict = ["down", "no", "change", "larger", "than", "its", "error"]
    assert lines["cfm_loss"].split() == ["cfm_loss", "1.25", "1.2", "-0.05", "±", "0.2", *verdict]
    assert lines["alignment"].split()[-2:] == ["up", "better"] and lines["diversity"].split()[-2:] == ["down", "worse"]
    assert "cfm_loss_whitened" not in lines  # each model is whitened by its own samples


def test_completions_are_greedy_and_end_with_the_first_end_token():
    model, prompts = tiny_model("llama").eval(), [[7, 8, 9, 10, 11, 12, 13], [3, 14], [20, 21, 22, 4]]
    options = {"do_sample": False, "max_new_tokens": 48, "pad_token_id": 0}
    written = lambda ids, end: model.generate(torch.tensor([ids]), eos_token_id=end, **options)[0, len(ids) :].tolist()
    end = written(prompts[0], None)[3]
    found = report.greedy_completions(model, SimpleNamespace(eos_token_id=end, pad_token_id=0, decode=list), prompts)
    assert found == [written(ids, end) for ids in prompts] and len(found[0]) <= 4 < len(found[1])


@pytest.mark.parametrize("damage", [
    lambda file, stamp: file.unlink(), lambda file, stamp: file.write_text("ro"),
    lambda file, stamp: stamp.write_text("0123"), lambda file, stamp: stamp.write_text('{"made_from": 0, "files": {}}'),
])  # fmt: skip
def test_what_an_earlier_run_made_is_made_again_unless_it_is_whole(tmp_path, damage):
    def make():
        (tmp_path / "train.jsonl").write_text("rows")
        made.append(1)

    made = []
    made_once = partial(make_once, tmp_path, {"files": 3}, make)
    assert (made_once(), made_once(), len(made)) == (None, None, 1)
    damage(tmp_path / "train.jsonl", tmp_path / "made_from.json")
    assert made_once() is None and len(made) == 2 and (tmp_path / "train.jsonl").read_text() == "rows"


def test_files_that_were_not_written_are_not_listed(tmp_path, capsys):
    config_file = own_copy(CONFIGS / "smollm2.yaml", tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    report.print_next_steps(tmp_path, Run(config_file, [], groups=2), "def f():")
    printed = capsys.readouterr().out
    assert "Training curves" not in printed and "summary.json" in printed  # without matplotlib
    assert 'dtype="bfloat16")' in printed  # greedy completions depend on it
    run = Run(config_file, ["torch_dtype=float32", "base_model=my/model"], groups=2)
    report.print_next_steps(tmp_path, run, "def f():")
    printed = capsys.readouterr().out
    assert 'dtype="float32")' in printed and "ebft init DATA --model my/model\n" in printed


BARE = "def f():\n    return 1\n"
HALF = 'Here it is:\n```python\ndef f():\n    """One."""\n    return 1\n\ndef g():\n    return 2\n```\n'


@pytest.mark.parametrize(
    ("text", "parses", "documented"),
    [(BARE, 1, 0), (HALF, 1, 0.5), ("x = 1", 1, 0), ("def f(:", 0, 0), ("", 0, 0), ("null\0byte", 0, 0)],
)
def test_rewards_of_code(monkeypatch, text, parses, documented):
    monkeypatch.syspath_prepend(examples_folder())
    import verifier

    for completions in ([text], [[{"role": "assistant", "content": text}]]):
        assert verifier.parses(completions) == [parses] and verifier.documented(completions) == [documented]
