"""The controlled study: sources against enumeration and counts, measures of known models, and a run."""

import collections
import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ebft.examples.quickstart import brackets
from ebft.examples.quickstart.brackets import END, along, draw, first_error

FOLDER = Path(__file__).parents[2] / "studies" / "controlled"


@pytest.fixture(autouse=True)
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in (names := [path.stem for path in FOLDER.glob("*.py")]):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


class Coin:
    """One or two words of two kinds; the second is the first one or `x`."""

    words = ["h", "t", "x"]
    start = ""

    def moves(self, state):
        if not state:
            return {"h": (0.75, "h"), "t": (0.25, "t")}
        if len(state) == 1:
            return {state: (0.5, state * 2), "x": (0.2, state + "x"), "</s>": (0.3, None)}
        return {"</s>": (1.0, None)}

    def mode(self, text):
        return text[0]


@pytest.mark.parametrize("name", ["brackets", "traces", "sentences"])
def test_sources(name):
    from sources import SOURCES, log_probability

    source = SOURCES[name]()
    texts = draw(source, 0, 300)
    assert draw(SOURCES[name](), 0, 300) == texts != draw(source, 1, 300)
    for text in texts:
        for moves in along(source, text):
            assert sum(chance for chance, _ in moves.values()) == pytest.approx(1)
            assert moves.keys() - {END} <= set(source.words)
        assert first_error(source, text) is None and log_probability(source, text) < 0
        source.mode(text)
    longest = max(texts, key=len)
    assert first_error(source, longest[:-1]) == len(longest) - 1  # ended too early
    assert log_probability(source, longest[:-1]) == -math.inf


def test_what_is_an_error():
    from sources import Brackets, Traces

    error = lambda source, text: first_error(source, text.split())
    assert error(Brackets(), "(a (b w1 )b )a (c )c") is None
    assert error(Brackets(), "(a (b w1 )a )b") == 3
    assert error(Traces(), "set 3 add 4 show 2 mul 3 sub 2 show 4") is None  # modulo 5
    assert error(Traces(), "set 3 add 4 show 2 mul 3 sub 2 show 3") == 11


def test_probabilities_are_those_of_samples():
    from sources import log_probability

    counts = collections.Counter(map(tuple, draw(Coin(), 0, 20_000)))
    every = [text for length in (1, 2) for text in itertools.product(Coin.words, repeat=length)]
    assert sum(math.exp(log_probability(Coin(), text)) for text in every) == pytest.approx(1)
    for text in every:
        assert counts[text] / 20_000 == pytest.approx(math.exp(log_probability(Coin(), text)), abs=0.012)


IDS = {word: number for number, word in enumerate(("<pad>", "</s>", "go", "h", "t", "x"))}
CHANCES = {"go": (0.0, 0.01, 0.01, 0.6, 0.3, 0.08), "h": (0.0, 0.4, 0.02, 0.3, 0.1, 0.18)}
CHANCES |= {"t": (0.0, 0.1, 0.0, 0.2, 0.5, 0.2), "x": (0.0, 0.9, 0.0, 0.0, 0.1, 0.0), "</s>": (1 / 6,) * 6}


def bigrams(input_ids):
    """A model whose next word depends on the last one only."""
    table = torch.tensor([CHANCES.get(word, (1 / 6,) * 6) for word in IDS])
    return SimpleNamespace(logits=(table[input_ids] + 1e-12).log())


def test_kl_by_enumeration(monkeypatch):
    from sources import log_probability

    monkeypatch.setattr(brackets, "BATCH", 700)
    bigrams.config = SimpleNamespace(vocab_size=len(IDS))
    found = brackets.kl(bigrams, IDS, Coin(), draw(Coin(), 999, 10_000), (1.0, 0.6))
    expected = {1.0: 0.0, 0.6: 0.0}
    for text in (text for length in (1, 2) for text in itertools.product(Coin.words, repeat=length)):
        truth, words = log_probability(Coin(), text), ("go", *text, "</s>")
        if truth > -math.inf:
            for temperature in expected:
                powers = {last: [chance ** (1 / temperature) for chance in CHANCES[last]] for last in words[:-1]}
                ours = [powers[last][IDS[word]] / sum(powers[last]) for last, word in zip(words, words[1:])]
                expected[temperature] += math.exp(truth) * (truth - sum(map(math.log, ours)))
    for temperature, divergence in expected.items():
        assert statistics.fmean(found[temperature]) == pytest.approx(divergence, abs=0.05)


def test_samples_are_judged():
    from measure import judged, true_modes

    modes = true_modes(Coin())
    assert modes == pytest.approx({"h": 0.75, "t": 0.25}, abs=0.01)
    good = judged(Coin(), draw(Coin(), 5, 4000), modes)
    assert good["valid"] == 1 and good["coverage"] < 0.001 and good["until_error"] == pytest.approx(1.7, abs=0.05)
    one_sided = judged(Coin(), [["h"], ["h", "t"]] * 500, modes)
    assert one_sided["valid"] == 0.5 and one_sided["until_error"] == 1
    assert one_sided["coverage"] == pytest.approx(0.75 * math.log(0.75) + 0.25 * math.log(501), abs=0.02)


@pytest.mark.slow
def test_cells_of_every_method_run(monkeypatch, tmp_path, capsys):
    import cells
    import measure
    import report
    import run
    import sources

    monkeypatch.setattr(cells, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(cells, "BUDGET", {"small": 7e9})
    monkeypatch.setattr(cells, "WARM", {"small": (20, 3e-3), "large": (4, 3e-3)})
    monkeypatch.setattr(run, "WARM", cells.WARM)
    monkeypatch.setitem(sources.SOURCES, "coin", Coin)
    monkeypatch.setattr(run, "TEXTS", 2000)
    monkeypatch.setattr(run, "HELD_OUT", 20)
    for name, value in {"TEXTS": 40, "SAMPLES": 20}.items():
        monkeypatch.setattr(measure, name, value)
    for module in (run, report):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    chosen = [
        "start",
        "sft",
        "sft decay",
        "ebft",
        "ebft lora",
        "ebft whitened",
        "ebft large_features",
        "structured",
        "rlvr",
    ]
    made = [cells.Cell("coin", "small", *name.split(" ", 1)) for name in chosen]
    monkeypatch.setattr(run, "CELLS", made)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    run.main()
    results = [json.loads((tmp_path / "results" / f"{cell.name}.json").read_text()) for cell in made]
    assert len({result["kl"] for result in results}) == len(made)  # each changed the model, in its own way
    for cell, result in zip(made[1:], results[1:]):
        assert result["cost"]["flops"] > 2.9e9 and result["cost"]["steps"] > 1, cell.name
        low, high = result["cfm_loss_interval"]
        assert low <= result["cfm_loss_change"] <= high
        assert result["cfm_loss_change"] == pytest.approx(result["cfm_loss"] - results[0]["cfm_loss"], abs=1e-4)
    assert any(result["cfm_loss_change"] for result in results)
    report.main()
    assert "| ebft-lora | 1 |" in capsys.readouterr().out and (tmp_path / "results" / "figure.png").stat().st_size
