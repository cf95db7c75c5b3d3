"""`evaluate` against plain forward passes, in every mode, and several models side by side."""

import json
import math
import shutil

import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft import evaluate, load_config, train
from ebft.errors import ConfigError, ModelError, NonFiniteLossError
from ebft.tools.evaluation.models import load_subject
from ebft.tools.evaluation.run import token_nll
from tests.export.models import save_adapter
from tests.strided.families import tiny_model
from tests.structured.conftest import make_chat_tokenizer

MODES = {"strided": "strided", "structured": "structured", "plain": "SFT (rl is not set)"}
LENGTH = "tests.evaluation.metrics.length"


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def nll(model, ids):
    """Negative log-likelihood of tokens 1.. of one sequence: (L - 1,)."""
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return -logp.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)


def cross_entropy(model, sequences):
    """Mean NLL over the tokens from `start` on (never the first) of (ids, start) sequences."""
    parts = [nll(model, ids)[max(start, 1) - 1 :] for ids, start in sequences]
    return torch.cat(parts).mean().item()


def load(models, name):
    base = AutoModelForCausalLM.from_pretrained(models / "base")
    if name == "adapter":
        return PeftModel.from_pretrained(base, models / "adapter").eval()
    return AutoModelForCausalLM.from_pretrained(models / name).eval()


def pair_sequences(models, rows):
    """(ids, prompt_length) of prompt/completion rows: tokenised apart, with EOS after the completion."""
    tokenizer = AutoTokenizer.from_pretrained(models / "base")
    found = []
    for row in read(rows / "pairs.jsonl"):
        prompt = tokenizer(row["input"])["input_ids"]
        completion = tokenizer(row["output"], add_special_tokens=False)["input_ids"]
        found.append((prompt + completion + [tokenizer.eos_token_id], len(prompt)))
    return found


def measured(path, names, models, *overrides):
    return evaluate(load_config(path, list(overrides)), [str(models / name) for name in names]).to_dict()["models"]


@pytest.mark.parametrize("kind", ["strided", "structured", pytest.param("plain", marks=pytest.mark.slow)])
def test_three_models_in_every_mode(kind, write_config, models, rows):
    """Cross-entropies, what each document adds, differences that are paired, curves and histograms."""
    names = ["base", "adapter", "other"]
    config = load_config(write_config(kind), ["eval_batch_size=2", "evaluation.per_document=true"])
    evaluation = evaluate(config, [str(models / name) for name in names])
    found, sequences = evaluation.to_dict()["models"], pair_sequences(models, rows)
    assert evaluation.settings["mode"] == MODES[kind]
    for name, result in zip(names, found):
        model, metrics, documents = load(models, name), result["metrics"], result["per_document"]
        of_each = [cross_entropy(model, [sequence]) for sequence in sequences]
        parts = documents["ce_loss"]
        means = [total / weight for total, weight in zip(parts["sum"], parts["weight"])]
        assert means == pytest.approx(of_each, abs=1e-4)
        everything = cross_entropy(model, [(ids, 0) for ids, _ in sequences])
        assert metrics["ce_loss"] == pytest.approx(cross_entropy(model, sequences), abs=1e-4)
        assert metrics["ce_loss_all"] == pytest.approx(everything, abs=1e-4)
        assert metrics["perplexity"] == pytest.approx(math.exp(metrics["ce_loss"]))
        assert metrics["perplexity_all"] == pytest.approx(math.exp(everything), rel=1e-3)
        assert set(documents) == set(metrics) - {"perplexity", "perplexity_all"}
        assert parts["document"] == list(range(9))
        for key, parts in documents.items():
            assert set(parts["document"]) <= set(range(9)) and all(weight > 0 for weight in parts["weight"])
            assert sum(parts["sum"]) / sum(parts["weight"]) == pytest.approx(metrics[key])
    assert len({round(result["metrics"]["ce_loss"], 3) for result in found}) == 3

    first, adapter, last = found
    assert first["differences"] == {} and first["difference_intervals"] == {}
    for name, value in last["differences"].items():
        assert value == pytest.approx(last["metrics"][name] - first["metrics"][name])
    low, high = last["difference_intervals"]["ce_loss"]
    low_own, high_own = last["intervals"]["ce_loss"]
    assert low < last["differences"]["ce_loss"] < high and high - low < high_own - low_own  # what they share cancels
    if kind == "plain":
        return
    assert set(last["metrics"]) - set(last["differences"]) == {"cfm_loss_whitened"}
    assert "cfm_loss_whitened" not in last["difference_intervals"]
    curves, histogram = adapter["curves"], adapter["histograms"]["alignment"]
    assert [point["x"] for point in curves["cfm_loss"]] == [1, 2, 4, 8, 16][: 3 if kind == "strided" else 5]
    if kind == "strided":
        assert curves["cfm_loss"][-1]["value"] == pytest.approx(adapter["metrics"]["cfm_loss"], abs=1e-6)
    for name in ("reference_nll", "rollout_nll", "rollout_nll_base"):
        assert curves[name][0]["x"] == 0 and all(point["value"] > 0 for point in curves[name])
    # The adapter samples what it finds likely itself, which the base does not.
    own, by_base = (sum(p["value"] for p in curves[n]) for n in ("rollout_nll", "rollout_nll_base"))
    assert own < by_base
    assert sum(histogram["shares"]) == pytest.approx(1) and len(histogram["edges"]) == len(histogram["shares"]) + 1


@pytest.mark.parametrize("kind", ["strided", "plain"])
def test_several_turns_of_a_row(kind, write_config, models, rows, tmp_path):
    """Labels of every turn are scored, and every turn has its blocks, in SFT as in strided mode."""
    turns = lambda row, other: ((row["input"], 0), (row["output"], 1), ("\nand then:", 0), (other["output"], 1))
    pairs = read(rows / "pairs.jsonl")
    chats = [[*turns(row, other), (" x y", 0)] for row, other in zip(pairs, pairs[1:])]
    lines = [{"segments": [{"text": text, "label": bool(on)} for text, on in chat]} for chat in chats]
    (tmp_path / "turns.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ebft = {"stride": 3, "context_length": 3, "generate_max_len": 4, "n_samples_per_prompt": 3}
    ebft |= {"mode": "strided"} if kind == "strided" else {}
    source = [{"path": str(tmp_path / "turns.jsonl"), "type": "input_output"}]
    path = write_config(kind, test_datasets=source, ebft=ebft)
    (found,) = measured(path, ["base"], models, "eval_batch_size=3", "evaluation.per_document=true")
    tokenizer, model, losses, blocks = AutoTokenizer.from_pretrained(models / "base"), load(models, "base"), [], []
    for chat in chats:
        ids, spans = [], []
        for text, on in chat:
            start = len(ids)
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
            spans += [(start, len(ids))] if on else []
        losses += [nll(model, ids)[i - 1] for start, end in spans for i in range(start, end)]
        blocks.append(sum(len(range(max(start, 3), end - 3, 3)) for start, end in spans))
    assert found["metrics"]["ce_loss"] == pytest.approx(torch.stack(losses).mean().item(), abs=1e-4)
    assert found["per_document"]["cfm_loss"]["weight"] == blocks and min(blocks) > 2


def test_the_feature_space_is_the_configs_base_model(write_config, models):
    """The same samples give the same scores, whether base and policy share weights or not, at temperature 1."""
    path = write_config("texts", evaluation={"temperature": 0.5})
    (shared,) = measured(path, ["base"], models)
    (foreign,) = measured(path, ["base"], models, f"base_model={models / 'other'}")
    assert foreign["metrics"]["ce_loss"] == pytest.approx(shared["metrics"]["ce_loss"], abs=1e-6)
    assert foreign["metrics"]["cfm_loss"] != pytest.approx(shared["metrics"]["cfm_loss"], abs=1e-4)
    values = lambda result, name: [point["value"] for point in result["curves"][name]]
    own = values(shared, "rollout_nll")
    assert own == pytest.approx(values(foreign, "rollout_nll"))
    assert own == pytest.approx(values(shared, "rollout_nll_base"), abs=1e-4)


def test_the_same_command_gives_the_same_numbers_in_any_batch_size(write_config, models):
    path = write_config("strided", evaluation={"documents": 4})
    once, again = (measured(path, ["adapter"], models, f"eval_batch_size={size}")[0] for size in (1, 4))
    assert once["metrics"] == pytest.approx(again["metrics"], abs=1e-5, rel=1e-6)
    (other_seed,) = measured(path, ["adapter"], models, "seed=7")
    assert other_seed["metrics"]["cfm_loss"] != again["metrics"]["cfm_loss"]
    assert other_seed["metrics"]["ce_loss"] == pytest.approx(again["metrics"]["ce_loss"])


def test_a_limit_on_documents_and_other_samples(write_config, models):
    path = write_config("strided")
    found = lambda *settings: evaluate(load_config(path, [f"evaluation.{each}" for each in settings]))
    evaluation = found("documents=4", "samples=5", "pass_at=[2]")
    metrics = evaluation.models[0].metrics
    assert evaluation.settings["documents"] == 4 and "alignment_pass@2" in metrics and "alignment_pass@3" not in metrics
    assert metrics["alignment"] < metrics["alignment_pass@2"]
    (one,), (other,) = found("documents=1").models, found("bootstrap=0").models
    assert one.intervals == other.intervals == {} and one.metrics["cfm_loss"] and one.per_document == {}


def test_temperature_and_seed_of_whole_completions(write_config, models):
    path = write_config("structured", evaluation={"metrics": [LENGTH], "documents": 4})
    (warm,) = measured(path, ["base"], models)
    (again,) = measured(path, ["base"], models)
    (cold,) = measured(path, ["base"], models, "evaluation.temperature=0.001")
    assert warm["metrics"] == again["metrics"]
    assert cold["metrics"]["length_greedy"] == warm["metrics"]["length_greedy"]
    assert cold["metrics"]["length_pass@1"] == pytest.approx(cold["metrics"]["length_greedy"])
    assert cold["metrics"]["diversity"] == pytest.approx(2.0, abs=1e-3)


def test_plain_rows_without_room_for_a_block_and_trained_prompts(write_config, models, rows):
    path = write_config("plain", ebft={"generate_max_len": 9, "context_length": 54})
    (result,) = measured(path, ["base"], models)
    expected = cross_entropy(load(models, "base"), pair_sequences(models, rows))
    assert result["metrics"]["ce_loss"] == pytest.approx(expected, abs=1e-4) and "cfm_loss" not in result["metrics"]
    (result,) = measured(path, ["base"], models, "train_on_inputs=true")
    assert result["metrics"]["ce_loss"] == pytest.approx(result["metrics"]["ce_loss_all"], abs=1e-6)


GRPO = {"rl": "grpo", "trl": {"reward_funcs": [LENGTH], "num_generations": 2, "max_completion_length": 4}}


def save_changed(models, folder, change):
    """The base model, changed, without its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(models / "base")
    change(model)
    model.save_pretrained(folder)
    return str(folder)


def test_models_that_do_not_fit_are_refused_before_anything_is_measured(write_config, models, tmp_path, monkeypatch):
    """Also the base models of adapters; another tokenizer, a smaller vocabulary, virtual tokens, too few positions."""
    config, base = load_config(write_config("strided")), AutoModelForCausalLM.from_pretrained(models / "base")
    foreign = shutil.copytree(models / "base", tmp_path / "foreign")
    make_chat_tokenizer().save_pretrained(foreign)
    get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="virtual tokens"):
        evaluate(config, [str(tmp_path)])
    small = save_changed(models, tmp_path / "small", lambda model: model.resize_token_embeddings(300))
    short = save_changed(models, tmp_path / "short", lambda model: setattr(model.config, "max_position_embeddings", 16))
    on_small = save_adapter(tmp_path / "on_small", small, target_modules=["q_proj"])
    on_short = save_adapter(tmp_path / "on_short", short, target_modules=["q_proj"])
    monkeypatch.setattr("ebft.tools.evaluation.run.load_subject", None)
    for model, error, message in (
        (foreign, ModelError, "its tokenizer differs"),
        (on_small, ModelError, "on_small: vocab_size is 300, but the tokenizer .* has 512"),
        (on_short, ConfigError, "exceeds the 16 positions of .*short"),
    ):
        with pytest.raises(error, match=message):
            evaluate(config, [str(models / "base"), str(model)])


def test_models_that_fail_are_named(write_config, models, tmp_path):
    """A larger vocabulary, as some sizes of a family have, is fine: no id of the padding is sampled."""

    def spoil(model):
        with torch.no_grad():
            model.model.norm.weight[:] = model.lm_head.weight[7] = 9e18  # finite, unlike the logits

    padded = save_changed(models, tmp_path / "p", lambda model: model.resize_token_embeddings(600, mean_resizing=False))
    evaluate(load_config(write_config("strided")), [padded])
    broken = save_changed(models, tmp_path / "broken", spoil)
    with pytest.raises(NonFiniteLossError, match="--model .*broken: .*ce_loss.* not finite"):
        evaluate(load_config(write_config("plain")), [broken])


def test_adapters_that_change_the_base_get_a_network_of_its_own(write_config, models, tmp_path):
    adapter = str(save_adapter(tmp_path / "a", models / "base", target_modules=["q_proj"], bias="all"))
    tokenizer = AutoTokenizer.from_pretrained(models / "base")
    subject = load_subject(load_config(write_config("strided")), adapter, tokenizer)
    plain, ids = AutoModelForCausalLM.from_pretrained(models / "base").eval(), torch.tensor([[5, 9, 11, 40]])
    with subject.network.frozen() as network, torch.no_grad():
        assert torch.allclose(network(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5)
    assert not subject.network.shares_weights


def test_a_ground_truth_beyond_the_models_positions_is_judged_by_metrics_alone(write_config, models, tmp_path):
    rows = [{"input": f"say {number}", "output": "so " * length} for number, length in enumerate((4, 4000))]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"path": str(tmp_path / "long.jsonl"), "type": "tests.evaluation.metrics.prompt_rows"}
    settings = {"metrics": [LENGTH], "per_document": True}
    path = write_config("structured", **GRPO, test_datasets=[source], evaluation=settings)
    (result,) = measured(path, ["base"], models)
    found = {name: result["per_document"][name]["document"] for name in ("ce_loss", "cfm_loss", "length_pass@1")}
    assert found == {"ce_loss": [0], "cfm_loss": [0], "length_pass@1": [0, 1]}


def test_without_models_it_is_the_base_and_what_the_run_left(write_config, models, unmeasured):
    """A large sequence_len is fine where documents are short."""
    config = load_config(write_config("strided"), ["sequence_len=100000"])
    assert [result.model for result in evaluate(config).models] == [str(models / "base")]
    shutil.copytree(models / "adapter", config.output_dir)
    assert [result.model for result in evaluate(config).models] == [str(models / "base"), config.output_dir]


def test_losses_of_tokens_are_computed_from_float32_logits(dtype=torch.bfloat16):
    """Twin: the hidden states of each sequence alone, and the head in float64."""
    model = tiny_model("llama").to(dtype).eval()
    model.lm_head.weight.data.mul_(20)
    sequences = [[5, 9, 12, 40, 3], [7, 8], list(range(20, 31))]
    for ids, found in zip(sequences, token_nll(model, sequences), strict=True):
        states = model.model(input_ids=torch.tensor([ids]), use_cache=False)[0][0, :-1].double()
        logps = (states @ model.lm_head.weight.double().T).log_softmax(-1)
        expected = -logps.gather(-1, torch.tensor(ids)[1:, None]).squeeze(-1)
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)
        assert found.dtype == torch.float32


LORA = ["adapter=lora", "lora_target_linear=true", "lora_r=4", "lora_alpha=8"]
SHORT = ["max_steps=1", "eval_steps=1", "logging_steps=1", "learning_rate=0.001", "save_strategy=no", "bf16=false"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["strided", "texts", "plain"])
def test_what_a_run_logs_of_token_rows_is_what_is_found_of_its_model(kind, write_config):
    adapter = LORA if kind == "strided" else []
    config = load_config(write_config(kind), [*SHORT, "eval_batch_size=4", *adapter])
    logged = train(config).metrics
    (result,) = evaluate(config, [config.output_dir]).models
    for name in config.method.held_out_metrics(config):
        assert f"eval_{name}" in logged
        if name != "loss":
            assert logged[f"eval_{name}"] == pytest.approx(result.metrics[name], abs=2e-5, rel=2e-5), name
    if kind == "plain":
        assert logged["eval_ce_loss"] == pytest.approx(logged["eval_loss"], rel=0.05)


def test_what_a_run_logs_of_prompts_is_what_is_found_of_its_model(write_config):
    """Cross-entropies are equal; samples are drawn by other means, so what is made of them is near."""
    config = load_config(write_config("structured"), [*SHORT, "micro_batch_size=3", "trl.temperature=1.0"])
    logged = train(config).metrics
    (result,) = evaluate(config, [config.output_dir]).models
    for name in ("ce_loss", "perplexity", "ce_loss_all", "perplexity_all"):
        assert logged[f"eval_{name}"] == pytest.approx(result.metrics[name], rel=1e-4), name
    for name in config.method.held_out_metrics(config):
        assert f"eval_{name}" in logged
    low, high = result.intervals["cfm_loss"]
    assert low - 0.1 < logged["eval_cfm_loss"] < high + 0.1
    assert logged["eval_alignment"] < logged["eval_alignment_pass@3"]
