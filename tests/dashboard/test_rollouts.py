"""The samples of both forms of the log, and the choice among them."""

import json

import pytest
from transformers import AutoTokenizer

from ebft import train
from ebft.strided.output import _characters_before
from ebft.tools.dashboard.report import report
from ebft.tools.dashboard.rollouts import all_samples, first_and_last, sample_text, samples_of, without_repetitions
from tests.dashboard.runs import append, prompt_entry, strided_entry
from tests.run.test_methods import OVERRIDES, quietly


def test_samples_of_a_block_and_copies_of_its_completions():
    first, second = samples_of(strided_entry(3))
    assert first.step == 3 and first.place == "token 5"
    assert (first.prompt, first.reference) == ("def add(a, b):\n", "    return a + b")
    assert first.completion == "completion 0 of step 3"
    assert list(first.terms) == ["reward", "alignment", "diversity", "advantage", "length"]
    assert first.terms["reward"] == 0.1 and second.terms["diversity"] == 1.2
    entries = [strided_entry(step, rewards=(0.1, 0.4, 0.1)) for step in (1, 2)]
    for sample in (sample for entry in entries for sample in entry["blocks"][0]["samples"]):
        sample["completion"] = "the same"
    once = list(without_repetitions([sample for entry in entries for sample in samples_of(entry)]))
    found = [(sample.step, sample.terms["reward"], sample.copies) for sample in once]
    assert found == [(1, 0.1, 2), (1, 0.4, 1), (2, 0.1, 2), (2, 0.4, 1)]
    assert "token 5 (×2)" in sample_text(once[0]).plain and "×" not in sample_text(once[1]).plain


def test_samples_of_a_conversation():
    (sample,) = samples_of(prompt_entry(4))
    assert sample.prompt == "user: What is 2 + 2?" and sample.place == "weights of step 3"
    assert sample.completion == "It is 5.\n[next turn]\nNo." and sample.reference == "It is 4.\n[next turn]\nYes."
    assert sample.terms == {
        "reward": 0.75, "alignment": 0.6, "diversity": 0.1, "advantage": 0.2, "length": 7,
        "rewards/feature_matching": 0.5, "rewards/short": 0.5,
    }  # fmt: skip
    entry = prompt_entry(4)
    del entry["samples"][0]["reward"]  # as a log of another version
    assert next(samples_of(entry)).terms["reward"] == 1.0


def test_first_and_last(tmp_path):
    (tmp_path / "short").mkdir()
    ends = lambda name, count: [[found.step for found in part] for part in first_and_last(tmp_path / name, count)]
    assert ends("", 2) == [[], []]
    append(tmp_path / "rollouts.jsonl.1", strided_entry(0), strided_entry(1))
    append(tmp_path / "rollouts.jsonl", *(strided_entry(step) for step in range(2, 6)))
    assert ends("", 2) == [[0, 1], [4, 5]]
    append(tmp_path / "short" / "rollouts.jsonl", *(strided_entry(step) for step in range(5)))
    assert ends("short", 4) == [[0, 1, 2, 3], [4]] and ends("short", 5)[1] == [], "no overlap"


@pytest.mark.parametrize("method", ["strided", "structured"])
def test_the_log_of_a_run_is_read(run_file, capsys, tmp_path, method):
    """Few rollouts are stored by default, and not printed."""
    train(quietly(run_file, [*OVERRIDES[method], "max_steps=1"]))
    assert "question" not in capsys.readouterr().out and not (tmp_path / "out" / "completions").exists()
    entries = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    found = list(all_samples(tmp_path / "out"))
    assert len(found) >= 2 and all({"reward", "length"} <= sample.terms.keys() for sample in found)
    for sample in found:
        assert sample.prompt.strip().startswith(("question", "<|begin|>question")) and sample.reference
        if method == "strided":
            document = next(entry["document"] for entry in entries if entry["document"].startswith(sample.prompt))
            assert document[len(sample.prompt) :].startswith(sample.reference)
    assert "<h3>Rollouts</h3>" in report(tmp_path / "out")


def test_characters_before_anchors(tiny_llama_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    for text, tolerance in (("# naïve 𝄞 text ", 3), ("# plain text ", 0)):
        ids = tokenizer(f"def quantity(x):\n    return x  {text}" * 3).input_ids
        anchors = list(range(2, len(ids), 3))
        expected = [len(tokenizer.decode(ids[:anchor])) for anchor in anchors]
        assert all(abs(a - b) <= tolerance for a, b in zip(_characters_before(anchors, ids, tokenizer), expected))
