"""Completions by temperature: means over documents of what the judges say of samples."""

import measure
import pytest
import temperatures
from scale import SCALES
from settings import Place


class Echo:
    """A sampler whose samples repeat the last word of the prompt, each less often the higher the temperature is."""

    def __init__(self, *_, **__):
        pass

    def complete(self, prompts, count, temperature):
        cold = round(10 * (1.1 - temperature))
        return [[" ".join([prompt.split()[-1]] * (1 + n % cold)) for n in range(count)] for prompt in prompts]


def test_means_are_over_documents_and_samples(monkeypatch):
    monkeypatch.setitem(measure.JUDGES, "translation", {"words": lambda prompt, texts, row: len(texts[0].split())})
    rows = [{"input": "a b", "output": "b"}, {"input": "c d", "output": "d"}]
    found = temperatures.means("translation", rows, [["b", "b b b"], ["d", "d"]])
    assert found["words_pass@1"] == pytest.approx((2 + 1) / 2)
    assert found["words_pass@N"] == pytest.approx((3 + 1) / 2)
    assert found["distinct"] == pytest.approx((1 + 0) / 2)
    assert not any(name.endswith("_greedy") for name in found)


def test_every_temperature_is_measured_on_the_documents_of_the_study(monkeypatch, tmp_path):
    rows = [{"input": f"prompt w{number}", "output": f"w{number}"} for number in range(3)]
    monkeypatch.setattr(temperatures, "read_rows", lambda file: rows)
    monkeypatch.setattr(measure, "loaded", lambda model, place: ("model", "tokenizer"))
    monkeypatch.setattr(temperatures.sampling, "Sampler", Echo)
    found = temperatures.by_temperature("model", Place(tmp_path, "base"), SCALES["tiny"], "translation", [1.0, 0.8])
    assert list(found) == [1.0, 0.8]
    assert found[1.0]["distinct"] < found[0.8]["distinct"]  # the stand-in's samples differ at low temperatures alone
    assert found[1.0]["chrf_pass@1"] > found[0.8]["chrf_pass@1"]
