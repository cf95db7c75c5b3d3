"""The report: complete, escaped, without external resources, also over broken files, and never fatal."""

import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from ebft import train, training_outcome
from ebft.tools.dashboard.live import LiveRun
from ebft.tools.dashboard.panels import health
from ebft.tools.dashboard.report import report, write_report
from tests.dashboard.runs import append, held_out_line, log_line, prompt_entry, strided_entry, write_run
from tests.run.test_methods import quietly

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>&\x1b[31m"


class Tags(HTMLParser):
    """The tags of a page, which must be balanced, and its text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.found, self.text = [], [], ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def run(tmp_path):
    """All files of a run that has ended."""
    folder = tmp_path / "my <run>"
    write_run(folder, "finished", step=100)
    append(folder / "metrics.jsonl", *(log_line(step) for step in range(1, 101)))
    append(folder / "metrics.jsonl", held_out_line(50, 0.3), held_out_line(100, 0.2))
    append(folder / "rollouts.jsonl", *(strided_entry(step) for step in range(100)))
    append(folder / "health.jsonl", {"time": 1e9, "step": 4, "name": "grad_norm", "message": "High.", "remedy": "Do."})
    return folder


def test_a_report_has_all_parts_and_nothing_external(run):
    page = write_report(run).read_text()
    found = Tags(page)
    for text in ("my <run>", "step 100 of 100", "alignment", "held-out cfm_loss", "grad_norm High.", "Do."):
        assert text in found.text
    for text in ("First rollouts", "completion 0 of step 0", "Last rollouts", "completion 0 of step 99"):
        assert text in found.text
    for text in ("learning_rate0.001", "ebft0.1.0", "cfm_loss0.30.2-0.1unknownunknowntoo few values"):
        assert text in found.text
    tags = [tag for tag, _ in found.found]
    assert tags.count("svg") > 8 and tags.count("polyline") >= tags.count("svg") and "usual 0.3-1.9" in found.text
    assert not {"script", "link", "img", "iframe"} & set(tags) and not re.search(r"https?:|url\(|@import", page)
    assert not any({"src", "href", "onerror"} & attributes.keys() for _, attributes in found.found)
    assert [path.name for path in run.iterdir() if path.suffix in (".html", ".part")] == ["report.html"]


def test_the_verdict_is_that_of_the_console(tmp_path):
    write_run(tmp_path, "finished", step=40)
    lines = [{"step": 10 * i, "eval_loss": loss} for i, loss in enumerate([5, 4.7, 3.46, 3.3])]
    training = [{"step": 1, "loss": 10**400}, {"step": 2, "loss": 1.0}]
    append(tmp_path / "metrics.jsonl", *training, *lines)
    printed = training_outcome(lines, None).split("\n")
    page, live = Tags(report(tmp_path)).text, LiveRun(tmp_path)
    live.poll()
    console = Console(width=120)
    with console.capture() as shown:
        console.print(health(live))
    assert printed[0] == "Outcome: too few evaluations to tell." and "-1.7 ± 0.24, significant above 2.3" in printed[2]
    assert printed[0] in page and "eval_loss53.3-1.70.242.3too few values to tell" in page and printed[-1] in page
    assert all(line in shown.get() for line in printed)


def test_everything_is_escaped(tmp_path):
    changes = {"error": EVIL, "model": EVIL, "method": EVIL, "changed": {EVIL: EVIL}, "versions": {EVIL: EVIL}}
    write_run(tmp_path, "failed" + EVIL, host=EVIL, **changes)
    append(tmp_path / "metrics.jsonl", log_line(1) | {f"rewards/{EVIL}/mean": 1.0, f"eval_{EVIL}": 1.0})
    append(tmp_path / "metrics.jsonl", {"step": 2, f"eval_{EVIL}": 2.0})
    append(tmp_path / "health.jsonl", {"time": EVIL, **dict.fromkeys(("step", "name", "message", "remedy"), EVIL)})
    entry = prompt_entry(1)
    entry["prompt"] = entry["ground_truth"] = EVIL
    entry["samples"][0]["replies"] = [EVIL]
    append(tmp_path / "rollouts.jsonl", strided_entry(0, document=EVIL), entry)
    append(tmp_path / "evaluation.json", evaluation(EVIL))
    page = report(tmp_path)
    found = Tags(page)
    assert not {"script", "img"} & {tag for tag, _ in found.found} and "\x1b" not in page
    assert found.text.count("alert(1)") >= 16


def evaluation(name, difference=-0.1):
    first = {"model": "base", "metrics": {name: 0.3}}
    second = {"model": f"tuned {name}", "metrics": {name: 0.2}, "differences": {name: difference}}
    second["difference_intervals"] = {name: [-0.15, -0.05]}
    return {"models": [first, second], "settings": {"confidence": 0.95}}


def test_the_comparison_of_an_evaluation_with_its_intervals(run, tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(evaluation("cfm_loss")))
    text = Tags(report(run, tmp_path / "result.json")).text
    assert "tuned cfm_loss compared with base" in text and "95% interval of the change" in text
    assert "cfm_loss0.30.2-0.1[-0.15, -0.05]" in text
    (tmp_path / "result.json").write_text(json.dumps(evaluation("cfm_loss_whitened")))
    assert "compared with base" not in Tags(report(run, tmp_path / "result.json")).text


def test_every_run_ends_with_a_report_of_the_settings_in_effect(run_file, tmp_path):
    page = tmp_path / "out" / "report.html"
    keys = ["eval_steps=1", "ebft.log_completions=true", "save_strategy=steps", "save_steps=1"]
    keys.append("auto_resume_from_checkpoints=true")
    train(quietly(run_file, [*keys, "max_steps=1", "learning_rate=2e-4"]))
    text = Tags(page.read_text()).text
    assert "finished, step 1 of 1" in text and "ebft: out" in text and "cfm_loss" in text
    with pytest.warns(UserWarning, match="the run continues with 0.0002"):
        train(quietly(run_file, [*keys, "max_steps=2", "learning_rate=1e-4"]))
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["optimizer"]["learning_rate"] == 2e-4 and run["config"]["learning_rate"] == 1e-4
    text = Tags(page.read_text()).text
    assert "finished, step 2 of 2" in text and "learning_rate0.0002 (restored" in text


@pytest.mark.filterwarnings("ignore:output_dir")
def test_a_report_that_fails_is_a_warning(run_file, tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr("ebft.tools.dashboard.report.write_report", fail)
    with pytest.warns(UserWarning, match="The report of the run was not written .a bug"):
        train(quietly(run_file, ["rl=", "max_steps=1"]))
    assert json.loads((tmp_path / "out" / "run.json").read_text())["state"] == "finished"


def test_a_report_of_another_program_is_kept(tmp_path):
    (tmp_path / "report.html").write_text("<html><title>Sales</title>")
    with pytest.raises(OSError, match="report.html is not the report of a run, and is kept"):
        write_report(tmp_path)
    assert "Sales" in (tmp_path / "report.html").read_text()
