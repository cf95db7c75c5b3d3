"""`ebft preprocess`: rows are stored, shown, and used by `ebft train`."""

import json
import re

import pytest

from tests.cli.conftest import plain


@pytest.fixture
def run_file(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"input": f"question {i} is", "output": f" answer <b>{i}</b> and no other"} for i in range(8)]
    rows.append({"input": "nothing", "output": ""})
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = json.loads(run_file.read_text())
    config["datasets"][0]["path"] = "rows.jsonl"
    config |= {"max_steps": 1, "ddp": True, "output_dir": "out"}  # `ddp` is a matter of training
    run_file.write_text(json.dumps(config))
    return run_file


def test_prepared_rows_are_trained_on(ebft, run_file, tmp_path):
    result = ebft("preprocess", run_file)
    assert result.exit_code == 0, result.output
    [folder] = [path for path in (tmp_path / "last_run_prepared").iterdir() if path.is_dir()]
    line = f"prepared rows in last_run_prepared/{folder.name}: 6 for training, 2 for evaluation"
    assert plain(result.stdout).endswith(f"Stored {line}\n")
    assert f"ebft train {run_file} dataset_prepared_path=last_run_prepared" in plain(result.stderr)
    result = ebft("train", run_file, "ddp=", "dataset_prepared_path=last_run_prepared", "learning_rate=1e-4")
    assert result.exit_code == 0, result.output
    assert f"Using {line}" in plain(result.stderr) and "documents produced" not in result.output
    result = ebft("preprocess", run_file, "dataset_prepared_path=last_run_prepared")
    assert plain(result.stdout) == f"Using {line}\n" and "ebft train" not in plain(result.stderr)


@pytest.mark.parametrize("again", [False, True])
def test_debug_shows_rows_and_what_was_dropped(ebft, run_file, again):
    if again:  # the same from stored rows
        ebft("preprocess", run_file)
    result = ebft("preprocess", run_file, "--debug", "--count", "1", "--html", "rows.html")
    text, html = plain(result.stdout), run_file.with_name("rows.html").read_text()
    assert result.exit_code == 0, result.output
    line = "datasets: 9 documents produced 8 rows; dropped 1 without a reference"
    assert plain(result.output).count(line) == 1
    assert "1 without a reference: rows.jsonl, train, row 8" in text
    assert "row 1 of 6 for training" in text and "row 1 of 2 for evaluation" in text and "row 2 of" not in text
    assert "<|begin|>(-100, 0)" in text and "<|end|>(1, 1)" in text and "[anchor " in text
    assert re.search(r'\n  prompt \(tokens 0-\d+\): "<\|begin\|>question \d is"\n  reference \(tokens ', text)
    assert text.count("\n  end of turn (token") == 2 and "Generation prompt" not in text  # there is no chat template
    assert html.count("<td>end of turn</td>") == 2 and "<b>" not in html.partition("<h2>")[2]
    assert "&lt;" in html and "anchor " in html and "Rows written to rows.html" in text


def test_a_number_of_rows_implies_debug_and_html_alone_prints_no_rows(ebft, run_file):
    assert "row 1 of 6" in plain(ebft("preprocess", run_file, "--debug-num", "1").stdout)
    text = plain(ebft("preprocess", run_file, "chat_template=chatml", "--html", "rows.html").stdout)
    html = run_file.with_name("rows.html").read_text()
    assert "row 1 of 6" not in text and "Rows written to rows.html" in text and "row 5 of 6 for training" in html
    assert "Generation prompt of the chat template: " in html


@pytest.mark.parametrize(("overrides", "expected"), [
    (["ebft.mode=structured"], r"\nreference  in the cross-entropy: "),
    (["rl=grpo", "trl.reward_funcs=[my.func]"], r"\nprompt  kind: text; tokens: \d+"),
])  # fmt: skip
def test_every_method_shows_its_rows(ebft, run_file, overrides, expected):
    result = ebft("preprocess", run_file, *overrides, "--debug")
    assert result.exit_code == 0, result.output
    assert re.search(expected, plain(result.stdout))
