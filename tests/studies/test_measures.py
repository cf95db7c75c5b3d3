"""What the study computes: intervals, losses up to the end token, shares of signal, samples and their scores."""

import argparse
import itertools
import math
from functools import cache

import after_end
import gradient_signal
import measure
import numpy as np
import pytest
import stored
import temperatures
import torch
from intervals import Measured, difference, estimate, over_seeds, spread_of_files, spread_of_seeds, t_quantile
from peft import LoraConfig, get_peft_model
from sampling import STOPS, Sampler, draw
from scale import SCALES
from settings import Place
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ebft.config.options import StridedOptions
from ebft.data.batches import DocumentCollator
from ebft.features import FeatureNetwork
from ebft.prefix.forward import prepare

END = 7
PROMPTS = ["def f(x):", "a longer prompt than the other one:", "x", "def g(y, z): return"]


@cache
def tokenizer_of() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one token for each byte, an end token and padding."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<end>", "<pad>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def cell(group: str, seed: int, weights: tuple[float, ...] = (1.0, 3.0), **sums: list[float]) -> dict:
    task, start, method = group.split("-", 2)
    place = {"task": task, "start": start, "group": group, "seed": seed, "method": method}
    of_each = lambda values: dict.fromkeys(sums, values)
    files = [f"{number}.py" for number in range(len(weights))]
    return {"cell": place, "sums": sums, "weights": of_each(list(weights)), "files": of_each(files)}


def measured(sums, weights=None, files=None) -> Measured:
    weights = [1.0] * len(sums) if weights is None else weights
    return Measured(list(sums), list(weights), [str(i) for i in range(len(sums))] if files is None else files)


def test_spread_of_seeds_is_students_interval():
    assert spread_of_seeds([1.0, 2.0, 3.0]) == pytest.approx(4.303 * 1 / math.sqrt(3))
    assert math.isnan(spread_of_seeds([1.0])), "one seed says nothing of others"
    assert spread_of_seeds([0.1, 0.1, 0.1]) == 0.0
    for degrees, quantile in ((2, 4.303), (11, 2.201), (15, 2.131), (20, 2.086), (10**6, 1.960)):
        assert t_quantile(degrees) == pytest.approx(quantile, abs=0.001), degrees


def test_spread_of_files_is_that_of_resampling_them():
    """Files of one to four documents that are alike, of unequal weights, some of them 0."""
    generator = np.random.default_rng(0)
    files = np.repeat(np.arange(120), generator.integers(1, 5, size=120))
    weights = generator.integers(0, 30, size=len(files)).astype(float)
    sums = weights * (generator.normal(2.0, 0.7, size=120)[files] + generator.normal(0.0, 0.2, size=len(files)))
    by_file = [np.bincount(files, values, minlength=120) for values in (sums, weights)]
    draws = generator.integers(0, 120, size=(20_000, 120))
    resampled = by_file[0][draws].sum(1) / by_file[1][draws].sum(1)
    found = spread_of_files(measured(sums, weights, [str(file) for file in files]))
    assert found == pytest.approx(1.98 * resampled.std(), rel=0.03)
    assert found > 1.3 * spread_of_files(measured(sums, weights)), "documents of one file are no independent evidence"
    of_a_mean = 3.182 * np.std([1, 2, 3, 6], ddof=1) / 2
    assert spread_of_files(measured([1.0, 2.0, 3.0, 6.0])) == pytest.approx(of_a_mean)
    assert math.isnan(spread_of_files(measured([1.0, 2.0], files=["a", "a"])))


def test_an_interval_covers_other_seeds_and_other_files():
    """Of studies with three seeds and twenty files, some 95% have the true mean in their interval, no fewer."""
    generator, hits = np.random.default_rng(1), 0
    for _ in range(1000):
        documents, seeds = generator.normal(0, 1, size=20), generator.normal(0, 0.3, size=3)
        noise = generator.normal(0, 0.5, size=(3, 20))
        found = estimate([measured(documents + seed + own) for seed, own in zip(seeds, noise)])
        hits += found.low < 0 < found.high
    assert 930 <= hits <= 999


def test_means_weigh_documents_and_leave_missing_metrics_out():
    cells = [cell("raw-base-sft", seed, ce=[2.0, 3.0 + seed]) for seed in range(3)] + [cell("raw-base-sft", 3)]
    found = over_seeds(cells, "raw-base-sft", "ce")
    assert found.mean == pytest.approx((2.0 + 4.0) / 4) and found.count == 3
    assert found.half == pytest.approx(math.hypot(found.seeds, found.files)) and found.seeds > 0
    assert (found.low, found.high) == (found.mean - found.half, found.mean + found.half)
    assert over_seeds(cells, "raw-base-sft", "parses_greedy") is None


def test_differences_are_paired_by_seed_and_document():
    cells = [cell("raw-base-sft", seed, ce=[seed + 1.0, 9.0 * seed]) for seed in range(3)]
    cells += [cell("raw-base-ebft-centre", seed, ce=[seed + 0.5, 9.0 * seed - 1.5]) for seed in range(3)]
    found = difference(cells, "raw-base-ebft-centre", "raw-base-sft", "ce")
    assert (found.mean, found.seeds) == (-0.5, 0.0), "the seeds' own spread is no part of it"
    assert found.files == pytest.approx(0.0), "nor is that of documents"
    assert over_seeds(cells, "raw-base-sft", "ce").half > 1
    found = difference([cells[0], cells[1], cells[4], cells[5]], "raw-base-ebft-centre", "raw-base-sft", "ce")
    assert found.count == 1 and math.isnan(found.half), "only seeds of both sides count"
    with pytest.raises(ValueError, match="zip"):
        difference([cells[0], cell("raw-base-other", 0, (1.0,), ce=[1.0])], "raw-base-other", "raw-base-sft", "ce")


def test_a_start_is_the_other_side_of_every_seed_and_has_an_interval_over_documents_alone():
    cells = [cell("raw-base-none", 0, ce=[4.0, 12.0])]
    cells += [cell("raw-base-sft", seed, ce=[3.0 + seed, 9.0 + 3 * seed]) for seed in (0, 1)]
    found = difference(cells, "raw-base-sft", "raw-base-none", "ce")
    assert (found.mean, found.count) == (-0.5, 2)
    found = over_seeds([cell("raw-base-none", 0, ce=[4.0, 9.0])], "raw-base-none", "ce")
    assert found.seeds == 0.0 and found.half == found.files > 0


def test_losses_up_to_the_first_end_token_are_those_of_plain_loops():
    """Two documents, three rollouts of four tokens, six features; one rollout ends at once, and one never."""
    torch.manual_seed(0)
    tokens = torch.tensor(
        [[[1, END, 2, END], [1, 2, 3, 4], [END, 1, 2, 3]], [[1, 2, END, 4], [1, 1, 1, 1], [2, 2, 2, 2]]]
    )
    features, reference = torch.randn(2, 3, 4, 6), torch.randn(2, 4, 6)
    found = after_end.losses(tokens, features, reference, END, [2, 4])
    assert torch.allclose(found["ended"], torch.tensor([[2 / 3, 2 / 3], [0.0, 1 / 3]]))
    kept = [[2, 4, 1], [3, 4, 4]]
    for (column, length), document in itertools.product(enumerate((2, 4)), range(2)):
        expected = F.normalize(reference[document, :length].mean(0), dim=-1)
        for name, counts in (("cfm_loss", [length] * 3), ("cfm_loss_to_end", kept[document])):
            means = [features[document, n, : min(count, length)].mean(0) for n, count in enumerate(counts)]
            phi = [F.normalize(mean, dim=-1) for mean in means]
            pairs = sum((phi[i] @ phi[j]).item() for i in range(3) for j in range(3) if i != j) / 6
            cross = sum((one @ expected).item() for one in phi) / 3
            assert abs(found[name][document, column].item() - (1 - 2 * cross + pairs)) < 1e-5, (name, length)
    assert not torch.allclose(found["cfm_loss"], found["cfm_loss_to_end"])


def test_share_of_signal_is_the_mean_over_pairs_of_batches_and_that_of_a_known_mixture():
    torch.manual_seed(0)
    a, b = torch.randn(5, 7), torch.randn(5, 7)
    pairs = [(a[i] @ b[j]).item() for i, j in itertools.permutations(range(5), 2)]
    assert gradient_signal.unbiased_product(a, b) == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)
    signal, noise = torch.ones(400), torch.randn(200, 400)
    held_out = signal + torch.randn(200, 400)
    found = gradient_signal.statistics(0.5 * signal + noise, held_out, held_out, documents=16)
    assert found["share_of_signal"] == pytest.approx(0.25 / 1.25, abs=0.02)
    assert found["cosine"] == pytest.approx(1, abs=0.05) and found["step_cosine"] == pytest.approx(0.2**0.5, abs=0.03)
    found = gradient_signal.statistics(0.5 * signal + noise, held_out, held_out, documents=4)
    assert found["share_of_signal"] == pytest.approx(0.25 / 0.5, abs=0.03), "a step has four times as many"
    assert math.isnan(gradient_signal.cosine(1.0, -0.1, 1.0)), "no signal"


def test_errors_of_the_gradient_signal_are_the_spread_of_repeated_measurements():
    torch.manual_seed(0)
    drawn = lambda scale: 1 + scale * torch.randn(12, 100)
    values = [gradient_signal.statistics(drawn(2), drawn(1), drawn(1), documents=4) for _ in range(100)]
    for name in ("cosine", "step_cosine", "share_of_signal"):
        spread = torch.tensor([value[name] for value in values]).std().item()
        errors = [value[f"{name}_error"] for value in values]
        assert 0.8 < sum(errors) / len(errors) / spread < 1.6, "the jackknife errs on the large side"


def test_gradients_of_batches_are_kept(tmp_path, monkeypatch):
    arguments = argparse.Namespace(task="raw", temperature=1.0, documents=2, batches=2)
    place, asked = Place(tmp_path, "none"), []
    place.data("raw", "train").parent.mkdir()

    def computed(place, arguments, length, part, batches):
        asked.append(batches)
        yield from ((batch, {"loss": torch.full((3,), float(batch))}) for batch in batches)

    monkeypatch.setattr(gradient_signal, "computed", computed)
    for batches, data in ((2, "a"), (2, "a"), (4, "a"), (2, "b")):
        place.data("raw", "train").write_text(data)
        arguments.batches = batches
        found = gradient_signal.of_batches(place, arguments, 8, "train")["loss"]
        assert found[:, 0].tolist() == list(range(batches))
    assert asked == [[0, 1], [2, 3], [0, 1]], "of other data, all of them"


def test_every_reward_has_a_gradient_on_the_same_rollouts(tiny_llama_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    settings = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, settings)
    network = FeatureNetwork(model, [0.25, 0.5, 0.75], "mean_pooling")
    prepare(model)
    parameters = gradient_signal.last_third(model)
    assert 0 < len(parameters) < sum("lora_B" in name for name, _ in model.named_parameters())
    row = lambda n: {"input_ids": [*range(10, 10 + n)], "labels": [-100] * 3 + [*range(13, 10 + n)], "prompt_length": 3}
    options = StridedOptions(stride=4, context_length=3, generate_max_len=4, n_samples_per_prompt=32, temperature=1.0)
    inputs = DocumentCollator(0)([row(21), row(30)])
    found = gradient_signal.losses(model, network, inputs, options, False)
    assert len(found) == len(gradient_signal.SPACES) * len(gradient_signal.SAMPLES)
    found |= gradient_signal.losses(model, network, inputs, options, True)
    assert gradient_signal.HELD_OUT in found
    gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in found.values()]
    norms = [torch.cat([part.flatten() for part in parts]).norm().item() for parts in gradients]
    assert all(norm > 0 for norm in norms) and len(set(norms)) == len(norms), "no two rewards are the same"


def test_lengths_that_are_stored_are_not_measured_again(tmp_path, monkeypatch):
    asked = []

    def of_batches(place, arguments, length, part):
        asked.append((length, part))
        return {gradient_signal.HELD_OUT if part == "test" else "unwhitened, n = 4": 1 + torch.randn(4, 50)}

    monkeypatch.setattr(gradient_signal, "of_batches", of_batches)
    monkeypatch.setattr(gradient_signal, "loaded", lambda place, arguments, length, part: (None, None, [part] * length))
    for longest, wanted in ((8, [(8, "test"), (8, "train")]), (8, [])):
        monkeypatch.setattr("sys.argv", ["x", "--results", str(tmp_path), "--longest", str(longest)])
        asked.clear()
        gradient_signal.main()
        assert asked == wanted
    (file,) = tmp_path.iterdir()
    assert stored.read(file)["rows"] == {"8": {"train": 8, "test": 8}}
    assert set(stored.read(file)["lengths"]["8"]["unwhitened, n = 4"]) >= {"cosine", "step_cosine", "share_of_signal"}
    monkeypatch.setattr("sys.argv", ["x", "--batches", "1"])
    with pytest.raises(SystemExit):
        gradient_signal.main()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer_of()), **shape, num_key_value_heads=1, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


def sampler(model, **settings) -> Sampler:
    return Sampler(model, tokenizer_of(), STOPS["functions"], **{"max_new_tokens": 24, **settings})


def test_greedy_completions_are_those_of_generate(model):
    tokenizer = tokenizer_of()
    found = sampler(model, rows=3).complete(PROMPTS, 1, 0.0)
    for prompt, (text,) in zip(PROMPTS, found):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        wanted = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        assert text == sampler(model).text(wanted[0, ids.shape[1] :].tolist())


def test_noise_belongs_to_prompt_and_sample(model):
    """Not to the other rows of the batch, nor to those that have left it."""
    alone, together, other = (
        sampler(model, **settings).complete(PROMPTS, 3, 1.0) for settings in ({"rows": 1}, {"rows": 64}, {"seed": 1})
    )
    assert alone == together != other
    assert len({text for texts in together for text in texts}) > 4


def test_draws_follow_the_distribution():
    logits = torch.tensor([[2.0, 0.0, 1.0]]).expand(20_000, 3)
    drawn = draw(logits, 0.5, torch.rand(20_000, generator=torch.Generator().manual_seed(0)))
    shares = torch.bincount(drawn, minlength=3) / 20_000
    torch.testing.assert_close(shares, (logits[0] / 0.5).softmax(-1), atol=0.015, rtol=0)
    assert draw(logits, 0.0, torch.zeros(20_000)).unique().tolist() == [0]
    assert draw(logits[:1], 1.0, torch.ones(1)).tolist() == [2], "no token beyond the vocabulary"


def test_a_completion_ends_with_its_function_or_line_or_its_end_token(model):
    tokenizer = tokenizer_of()
    for task, completion, expected in (
        ("functions", "\n    return x\n\ndef g():", "\n    return x\n\n"),
        ("functions", "\n    return x\n# end", "\n    return x\n"),
        ("functions", "\n    if x:\n\n        y()\n", "\n    if x:\n\n        y()\n"),
        ("translation", " Le fichier\nEnglish: next", " Le fichier\n"),
    ):
        assert Sampler(model, tokenizer, STOPS[task], 24).text(tokenizer(completion)["input_ids"]) == expected
    ids = [*tokenizer("return x")["input_ids"], tokenizer.eos_token_id]
    assert sampler(model)._has_ended(ids) and sampler(model).text(ids) == "return x"


class Echo:
    """A sampler whose samples repeat the last word of the prompt, each less often the higher the temperature is."""

    def __init__(self, *_, **__):
        pass

    def complete(self, prompts, count, temperature):
        cold = round(10 * (1.1 - temperature))
        return [[" ".join([prompt.split()[-1]] * (1 + n % cold)) for n in range(count)] for prompt in prompts]


def test_means_by_temperature_are_over_documents_and_samples(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setitem(measure.JUDGES, "translation", {"words": lambda prompt, texts, row: len(texts[0].split())})
        rows = [{"input": "a b", "output": "b"}, {"input": "c d", "output": "d"}]
        found = temperatures.means("translation", rows, [["b", "b b b"], ["d", "d"]])
    wanted = {"words_pass@1": (2 + 1) / 2, "words_pass@N": (3 + 1) / 2, "distinct": (1 + 0) / 2}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert not any(name.endswith("_greedy") for name in found)
    rows = [{"input": f"prompt w{number}", "output": f"w{number}"} for number in range(3)]
    monkeypatch.setattr(temperatures, "read_rows", lambda file: rows)
    monkeypatch.setattr(measure, "loaded", lambda model, place: ("model", "tokenizer"))
    monkeypatch.setattr(temperatures.sampling, "Sampler", Echo)
    found = temperatures.by_temperature("model", Place(tmp_path, "base"), SCALES["tiny"], "translation", [1.0, 0.8])
    assert list(found) == [1.0, 0.8]
    assert found[1.0]["distinct"] < found[0.8]["distinct"]  # the stand-in's samples differ at low temperatures alone
    assert found[1.0]["chrf_pass@1"] > found[0.8]["chrf_pass@1"]
