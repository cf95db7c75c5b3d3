"""`evaluate` against plain forward passes, in every mode, and several models side by side."""

import json
import math
import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft import evaluate, load_config
from ebft.errors import ConfigError, DataError, ModelError, NonFiniteLossError
from ebft.tools.evaluation.models import load_subject
from tests.evaluation.independent import cfm, cross_entropy, nll, read


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


def text_sequences(models, rows):
    tokenizer = AutoTokenizer.from_pretrained(models / "base")
    return [(tokenizer(row["text"])["input_ids"], 0) for row in read(rows / "texts.jsonl")]


def measured(path, names, models, *overrides):
    return evaluate(load_config(path, list(overrides)), [str(models / name) for name in names]).to_dict()["models"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["strided", "structured", "plain"])
def test_cross_entropy_in_every_mode(kind, write_config, models, rows):
    names = ["base", "adapter", "other"]
    found = measured(write_config(kind), names, models, "eval_batch_size=2")
    sequences = pair_sequences(models, rows)
    for name, result in zip(names, found):
        model, metrics = load(models, name), result["metrics"]
        assert metrics["ce_loss"] == pytest.approx(cross_entropy(model, sequences), abs=1e-4)
        everything = cross_entropy(model, [(ids, 0) for ids, _ in sequences])
        assert metrics["ce_loss_all"] == pytest.approx(everything, abs=1e-4)
        assert metrics["perplexity"] == pytest.approx(math.exp(metrics["ce_loss"]))
        assert metrics["perplexity_all"] == pytest.approx(math.exp(everything), rel=1e-3)
    values = [result["metrics"]["ce_loss"] for result in found]
    assert len({round(value, 3) for value in values}) == 3


@pytest.mark.parametrize("kind", ["strided", "plain"])
def test_several_turns_of_a_row(kind, write_config, models, rows, tmp_path):
    """Labels of every turn are scored, and every turn has its blocks, in SFT as in strided mode."""
    chats = [
        [(row["input"], False), (row["output"], True), ("\nand then:", False), (other["output"], True), (" x y", False)]
        for row, other in zip(read(rows / "pairs.jsonl"), read(rows / "pairs.jsonl")[1:])
    ]
    lines = [{"segments": [{"text": text, "label": on} for text, on in chat]} for chat in chats]
    (tmp_path / "turns.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = [{"path": str(tmp_path / "turns.jsonl"), "type": "input_output"}]
    options = {"stride": 3, "context_length": 3, "generate_max_len": 4, "n_samples_per_prompt": 3}
    ebft = {**options, "mode": "strided"} if kind == "strided" else options
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


@pytest.mark.slow
def test_feature_matching_within_its_interval(write_config, models, rows):
    """Another sampler, other noise, plain forwards: the loss lies within the printed interval, and models in order."""
    found = measured(write_config("texts"), ["base", "adapter"], models)
    base, sequences = load(models, "base"), text_sequences(models, rows)
    expected = [
        cfm(load(models, name), base, sequences, stride=4, context_length=4, length=4, samples=6)
        for name in ("base", "adapter")
    ]
    for result, value in zip(found, expected):
        low, high = result["intervals"]["cfm_loss"]
        assert low < value < high
        assert low < result["metrics"]["cfm_loss"] < high


def test_the_feature_space_is_the_configs_base_model(write_config, models):
    """The same samples give the same scores, whether base and policy share weights or not."""
    path = write_config("texts")
    (shared,) = measured(path, ["base"], models)
    (foreign,) = measured(path, ["base"], models, f"base_model={models / 'other'}")
    assert foreign["metrics"]["ce_loss"] == pytest.approx(shared["metrics"]["ce_loss"], abs=1e-6)
    assert foreign["metrics"]["cfm_loss"] != pytest.approx(shared["metrics"]["cfm_loss"], abs=1e-4)
    own = [[point["value"] for point in result["curves"]["rollout_nll"]] for result in (shared, foreign)]
    assert own[0] == pytest.approx(own[1])


def test_differences_are_from_the_first_model_and_paired(write_config, models):
    first, second = measured(write_config("strided"), ["base", "other"], models)
    assert first["differences"] == {} and first["difference_intervals"] == {}
    assert set(second["metrics"]) - set(second["differences"]) == {"cfm_loss_whitened"}
    assert "cfm_loss_whitened" not in second["difference_intervals"]
    for name, value in second["differences"].items():
        assert value == pytest.approx(second["metrics"][name] - first["metrics"][name])
    low, high = second["difference_intervals"]["ce_loss"]
    low_own, high_own = second["intervals"]["ce_loss"]
    assert low < second["differences"]["ce_loss"] < high
    assert high - low < high_own - low_own  # what documents share cancels


def test_the_same_command_gives_the_same_numbers_in_any_batch_size(write_config, models):
    path = write_config("strided")
    once, again = (measured(path, ["adapter"], models, f"eval_batch_size={size}")[0] for size in (1, 4))
    assert once["metrics"] == pytest.approx(again["metrics"], abs=1e-5, rel=1e-6)
    (other_seed,) = measured(path, ["adapter"], models, "seed=7")
    assert other_seed["metrics"]["cfm_loss"] != again["metrics"]["cfm_loss"]
    assert other_seed["metrics"]["ce_loss"] == pytest.approx(again["metrics"]["ce_loss"])


@pytest.mark.parametrize("kind", ["strided", "structured"])
def test_curves_and_histograms(kind, write_config, models):
    (result,) = measured(write_config(kind), ["adapter"], models)
    cfm_curve = result["curves"]["cfm_loss"]
    assert [point["x"] for point in cfm_curve] == ([1, 2, 4] if kind == "strided" else [1, 2, 4, 8, 16])
    if kind == "strided":
        assert cfm_curve[-1]["value"] == pytest.approx(result["metrics"]["cfm_loss"], abs=1e-6)
    for name in ("reference_nll", "rollout_nll", "rollout_nll_base"):
        assert result["curves"][name][0]["x"] == 0
        assert all(point["value"] > 0 for point in result["curves"][name])
    # The adapter samples what it finds likely itself, which the base does not.
    own, by_base = (sum(p["value"] for p in result["curves"][n]) for n in ("rollout_nll", "rollout_nll_base"))
    assert own < by_base
    histogram = result["histograms"]["alignment"]
    assert sum(histogram["shares"]) == pytest.approx(1) and len(histogram["edges"]) == len(histogram["shares"]) + 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["strided", "structured", "plain"])
def test_what_each_document_adds_makes_the_mean(kind, write_config, models):
    path = write_config(kind)
    (plain,) = measured(path, ["adapter"], models)
    (result,) = measured(path, ["adapter"], models, "evaluation.per_document=true")
    assert plain["per_document"] == {}
    names = set(result["metrics"]) - {"perplexity", "perplexity_all"}
    assert set(result["per_document"]) == names
    assert result["per_document"]["ce_loss"]["document"] == list(range(9))
    for name, parts in result["per_document"].items():
        assert set(parts["document"]) <= set(range(9)) and all(weight > 0 for weight in parts["weight"])
        assert sum(parts["sum"]) / sum(parts["weight"]) == pytest.approx(result["metrics"][name])


def test_cross_entropy_of_each_document(write_config, models, rows):
    (result,) = measured(write_config("strided"), ["other"], models, "evaluation.per_document=true")
    parts, model = result["per_document"]["ce_loss"], load(models, "other")
    for sequence, total, weight in zip(pair_sequences(models, rows), parts["sum"], parts["weight"]):
        assert total / weight == pytest.approx(cross_entropy(model, [sequence]), abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "mode"), [("strided", "strided"), ("structured", "structured"), ("plain", "SFT (rl is not set)")]
)
def test_the_result_names_the_method(kind, mode, write_config, models):
    config = load_config(write_config(kind), ["evaluation.documents=2", "evaluation.bootstrap=0"])
    assert evaluate(config, [str(models / "base")]).settings["mode"] == mode


def test_a_limit_on_documents_and_other_samples(write_config, models):
    path = write_config("strided")
    evaluation = evaluate(
        load_config(path, ["evaluation.documents=4", "evaluation.samples=5", "evaluation.pass_at=[2]"]),
        [str(models / "base")],
    )
    metrics = evaluation.models[0].metrics
    assert evaluation.settings["documents"] == 4 and "alignment_pass@2" in metrics and "alignment_pass@3" not in metrics
    assert metrics["alignment"] < metrics["alignment_pass@2"]


def test_temperature_and_seed_of_whole_completions(write_config, models):
    path = write_config("structured", evaluation={"metrics": ["tests.evaluation.metrics.length"]})
    (warm,) = measured(path, ["base"], models)
    (again,) = measured(path, ["base"], models)
    (cold,) = measured(path, ["base"], models, "evaluation.temperature=0.001")
    assert warm["metrics"] == again["metrics"]
    assert cold["metrics"]["length_greedy"] == warm["metrics"]["length_greedy"]
    assert cold["metrics"]["length_pass@1"] == pytest.approx(cold["metrics"]["length_greedy"])
    assert cold["metrics"]["diversity"] == pytest.approx(2.0, abs=1e-3)


def test_rows_without_room_for_a_block_count_for_the_cross_entropy(write_config, models, rows):
    path = write_config("plain", ebft={"generate_max_len": 9, "context_length": 30})
    (result,) = measured(path, ["base"], models)
    assert result["metrics"]["ce_loss"] == pytest.approx(
        cross_entropy(load(models, "base"), pair_sequences(models, rows)), abs=1e-4
    )
    assert "cfm_loss" not in result["metrics"]


def test_one_document_has_no_interval(write_config, models):
    (result,) = measured(write_config("strided"), ["base"], models, "evaluation.documents=1")
    assert result["intervals"] == {} and result["metrics"]["cfm_loss"]
    (result,) = measured(write_config("strided"), ["base"], models, "evaluation.bootstrap=0")
    assert result["intervals"] == {}


def test_what_cannot_be_evaluated(write_config, models, tmp_path):
    path = write_config("strided")
    with pytest.raises(DataError, match="test_datasets or val_set_size"):
        measured(path, ["base"], models, "test_datasets=[]")
    with pytest.raises(ModelError, match="--model: the local path '.*nothing.*does not exist"):
        measured(path, ["nothing"], models)
    with pytest.raises(ConfigError, match="pass@9 requires at least as many samples, got 3"):
        measured(path, ["base"], models, "evaluation.pass_at=[9]")


def test_a_sequence_len_beyond_the_models_positions_is_refused_unless_all_documents_are_shorter(write_config, models):
    assert measured(write_config("strided"), ["base"], models, "sequence_len=100000")
    with pytest.raises(ConfigError, match="100000 exceeds the .* as many tokens may be in one document"):
        measured(write_config("structured"), ["base"], models, "sequence_len=100000")


def test_another_tokenizer_is_refused(write_config, models, tmp_path):
    from tests.structured.conftest import make_chat_tokenizer

    shutil.copytree(models / "base", tmp_path / "foreign")
    make_chat_tokenizer().save_pretrained(tmp_path / "foreign")
    with pytest.raises(ModelError, match="its tokenizer differs"):
        evaluate(load_config(write_config("strided")), [str(tmp_path / "foreign")])


def save_changed(models, folder, change):
    """The base model, changed, without its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(models / "base")
    change(model)
    model.save_pretrained(folder)
    return str(folder)


def test_a_larger_vocabulary_may_not_be_sampled_from(write_config, models, tmp_path):
    """Padded embeddings, as some sizes of a family have: fine as long as no id of the padding is sampled."""

    def grow(model):
        model.resize_token_embeddings(600, mean_resizing=False)

    config = load_config(write_config("strided"))
    with pytest.raises(ModelError, match="(?s)--model .*sampled token 5.*has only 512 token embeddings"):
        evaluate(config, [save_changed(models, tmp_path / "padded", grow)])


def test_a_smaller_vocabulary_is_refused_before_anything_is_measured(write_config, models, tmp_path, monkeypatch):
    small = save_changed(models, tmp_path / "small", lambda model: model.resize_token_embeddings(300))
    monkeypatch.setattr("ebft.tools.evaluation.run.load_subject", None)
    with pytest.raises(ModelError, match="its vocab_size is 300, but the tokenizer .* has 512"):
        evaluate(load_config(write_config("strided")), [str(models / "base"), small])


def adapter_on(base, folder):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])).save_pretrained(folder)
    return str(folder)


def test_the_base_of_an_adapter_is_checked_as_a_model_is(write_config, models, tmp_path, monkeypatch):
    monkeypatch.setattr("ebft.tools.evaluation.run.load_subject", None)
    config = load_config(write_config("strided"))
    small = save_changed(models, tmp_path / "small", lambda model: model.resize_token_embeddings(300))
    with pytest.raises(ModelError, match="adapter: its vocab_size is 300, but the tokenizer .* has 512"):
        evaluate(config, [adapter_on(small, tmp_path / "adapter")])

    def shorten(model):
        model.config.max_position_embeddings = 16

    short = save_changed(models, tmp_path / "short", shorten)
    with pytest.raises(ConfigError, match="exceeds the 16 positions of .*short"):
        evaluate(config, [adapter_on(short, tmp_path / "other")])


def test_a_diverged_model_is_named(write_config, models, tmp_path):
    def spoil(model):
        with torch.no_grad():
            model.model.norm.weight[:] = model.lm_head.weight[7] = 9e18  # finite, unlike the logits

    broken = save_changed(models, tmp_path / "broken", spoil)
    for kind in ("strided", "structured", "plain"):
        with pytest.raises(NonFiniteLossError, match="--model .*broken: .*ce_loss.* not finite"):
            evaluate(load_config(write_config(kind)), [broken])


@pytest.mark.parametrize("settings", [{"init_lora_weights": "pissa"}, {"bias": "all"}])
def test_adapters_that_change_the_base_get_a_network_of_its_own(settings, write_config, models, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(models / "base")
    adapted = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], **settings)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    config = load_config(write_config("strided"))
    tokenizer = AutoTokenizer.from_pretrained(models / "base")
    subject = load_subject(config, str(tmp_path / "adapter"), tokenizer)
    plain, ids = AutoModelForCausalLM.from_pretrained(models / "base").eval(), torch.tensor([[5, 9, 11, 40]])
    with subject.network.frozen() as network, torch.no_grad():
        assert torch.allclose(network(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5)
    assert not subject.network.shares_weights


def test_virtual_tokens_are_refused(write_config, models, tmp_path):
    from peft import PromptTuningConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(models / "base")
    get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="virtual tokens"):
        evaluate(load_config(write_config("strided")), [str(tmp_path)])


def test_own_samples_are_judged_at_temperature_one(write_config, models):
    """The base model and the base model agree on the base model's samples, whatever temperature those have."""
    (result,) = measured(write_config("texts"), ["base"], models, "evaluation.temperature=0.5")
    own, by_base = ([point["value"] for point in result["curves"][n]] for n in ("rollout_nll", "rollout_nll_base"))
    assert own == pytest.approx(by_base, abs=1e-4)


def test_generation_kwargs_cannot_change_what_is_measured(write_config, models):
    path = write_config("structured")
    with pytest.raises(ConfigError, match="do_sample cannot be set here"):
        measured(path, ["base"], models, "trl.generation_kwargs={do_sample: true}")
    with pytest.warns(UserWarning, match="trl.generation_kwargs.min_tokens, trl.vllm_guided_decoding_regex"):
        measured(
            path,
            ["base"],
            models,
            "trl.generation_kwargs={min_tokens: 3}",
            "trl.vllm_guided_decoding_regex=a+",
            "evaluation.documents=2",
        )


def test_labels_of_earlier_turns_count_in_plain_fine_tuning(write_config, models, tmp_path):
    config = load_config(write_config("plain"), ["train_on_inputs=true"])
    (result,) = evaluate(config, [str(models / "base")]).models
    assert result.metrics["ce_loss"] == pytest.approx(result.metrics["ce_loss_all"], abs=1e-6)


def test_nothing_to_measure(write_config, models):
    path = write_config("structured", rl="grpo", trl={"reward_funcs": ["tests.evaluation.metrics.length"]})
    config = load_config(path, ["test_datasets.0.type=tests.evaluation.metrics.only_prompts"])
    with pytest.raises(DataError, match="nothing to evaluate"):
        evaluate(config, [str(models / "base")])


def test_a_ground_truth_beyond_the_models_positions_is_judged_by_metrics_alone(write_config, models, tmp_path):
    rows = [{"input": f"say {number}", "output": "so " * length} for number, length in enumerate((4, 4000))]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = write_config(
        "structured",
        rl="grpo",
        trl={"reward_funcs": ["tests.evaluation.metrics.length"], "num_generations": 2, "max_completion_length": 4},
        test_datasets=[{"path": str(tmp_path / "long.jsonl"), "type": "tests.evaluation.metrics.prompt_rows"}],
        evaluation={"metrics": ["tests.evaluation.metrics.length"], "per_document": True},
    )
    found = evaluate(load_config(path), [str(models / "base")]).to_dict()["models"][0]["per_document"]
    assert found["ce_loss"]["document"] == found["cfm_loss"]["document"] == [0]
    assert found["length_pass@1"]["document"] == [0, 1]


def test_a_path_is_no_config(write_config):
    with pytest.raises(ConfigError, match="load_config"):
        evaluate(str(write_config("strided")))


@pytest.mark.parametrize("count", ["2", "many"])
def test_several_processes_are_refused(write_config, monkeypatch, count):
    monkeypatch.setenv("WORLD_SIZE", count)
    with pytest.raises(ConfigError, match="single process"):
        evaluate(load_config(write_config("strided")))


def test_without_models_it_is_the_base_and_what_the_run_left(write_config, models):
    path = write_config("strided")
    config = load_config(path)
    assert [result.model for result in evaluate(config).models] == [str(models / "base")]
    shutil.copytree(models / "adapter", config.output_dir)
    assert [result.model for result in evaluate(config).models] == [str(models / "base"), config.output_dir]
