"""Keys of the preference methods: what they become, and what is refused before a model is loaded."""

import json

import pytest

from ebft.errors import ConfigError, DataError, ModelError
from ebft.models.pretrained import load_tokenizer
from ebft.run import checks, trainer, training
from ebft.tools.doctor.rows import longest_rows, row_lengths
from ebft.tools.evaluation import run, task
from tests.preferences.runs import METHODS, WITH_REFERENCE, config_of, write_inputs


def arguments(method, tmp_path, **changes):
    return trainer.training_arguments(config_of(method, tmp_path, **changes), rows=12, has_eval=False)


def test_keys_of_each_method(tmp_path):
    weights = {"dpo_loss_type": ["robust", "sft"], "dpo_loss_weights": [1.0, 0.5], "dpo_label_smoothing": 0.1}
    args = arguments("dpo", tmp_path, **weights, dpo_use_weighting=True)
    assert (args.loss_type, args.loss_weights, args.label_smoothing) == (["robust", "sft"], [1.0, 0.5], 0.1)
    assert args.use_weighting and arguments("dpo", tmp_path).loss_type == ["sigmoid"]
    assert arguments("ipo", tmp_path).loss_type == ["ipo"]
    args = arguments("simpo", tmp_path, rl_beta=0.3)
    assert (args.beta, args.max_length, arguments("simpo", tmp_path).beta) == (0.3, 256, 0.1)
    args = arguments("kto", tmp_path, kto_desirable_weight=2.0, kto_undesirable_weight=0.5)
    assert (args.desirable_weight, args.undesirable_weight) == (2.0, 0.5)
    assert arguments("orpo", tmp_path, orpo_alpha=0.4).beta == 0.4
    args = arguments("simpo", tmp_path, simpo_gamma=1.5)
    assert (args.loss_type, args.simpo_gamma, args.cpo_alpha) == ("simpo", 1.5, 0.0)
    assert arguments("simpo", tmp_path, cpo_alpha=0.2).cpo_alpha == 0.2
    for method in WITH_REFERENCE:
        assert arguments(method, tmp_path, precompute_ref_log_probs=True).precompute_ref_log_probs
    config_of("dpo", tmp_path, lora_target_linear=False, lora_target_modules=r"^(?!lm_head).*_proj")  # is accepted


def of_rows(**entry):
    return {"datasets": [{"path": "x", **entry}]}


@pytest.mark.parametrize(("method", "changes", "message"), [
    ("dpo", {"sample_packing": True}, "sample_packing is not supported with rl: dpo"),
    ("kto", {"train_on_inputs": True}, "train_on_inputs is not supported with rl: kto"),
    ("dpo", {"dpo_label_smoothing": 0.1}, "dpo_label_smoothing has no effect with dpo_loss_type: sigmoid"),
    ("ipo", {"dpo_label_smoothing": 0.1}, "dpo_label_smoothing is incompatible with rl: ipo"),
    ("kto", {"micro_batch_size": 1}, "micro_batch_size: 1 is not supported by rl: kto"),
    ("orpo", {"orpo_alpha": 0.1, "rl_beta": 0.2}, "two names of the same weight"),
    ("kto", {"lora_target_modules": ["lm_head"], "lora_target_linear": False}, "selects lm_head, which is not supp"),
    ("dpo", {"lora_target_modules": ".*(proj|head)", "lora_target_linear": False}, "selects lm_head, which is not"),
    ("dpo", {"rl_adapter_ref_model": True}, "rl_adapter_ref_model is not supported: .*the adapter of lora_model_dir"),
    ("dpo", of_rows(type={"field_completion": "a"}), "type.field_completion is not read by rl: dpo, which trains on p"),
    ("kto", of_rows(type={"field_chosen": "a"}), "type.field_chosen is not read by rl: kto, which trains on compl"),
])  # fmt: skip
def test_what_is_refused(method, changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config_of(method, tmp_path, **changes)


@pytest.mark.parametrize(("method", "type", "message"), [
    ("dpo", "chat_template", "'chat_template' returns rows of input_ids and labels, but rl: dpo trains on rows of pr"),
    ("kto", "chatml.icr", "'chatml.icr' returns rows of prompt, chosen and rejected, but rl: kto"),
    (None, {"field_prompt": "a"}, "the mapping of columns returns rows of"),
])  # fmt: skip
def test_formats_of_other_rows(method, type, message, tmp_path):
    changes = {} if method else {"rl": None}
    config = config_of(method or "dpo", tmp_path, **of_rows(type=type), **changes)
    for use in (checks.check_runnable, training.train):  # no model is loaded
        with pytest.raises(DataError, match=message):
            use(config)


def test_reference_values_are_computed_by_one_process(tmp_path):
    config = config_of("dpo", tmp_path, precompute_ref_log_probs=True)
    with pytest.raises(ConfigError, match="precompute_ref_log_probs: true is not supported with several processes"):
        checks.check_machine(config, checks.Machine(False, False, processes=2))
    checks.check_machine(config, checks.Machine(False, False))


@pytest.mark.parametrize("method", WITH_REFERENCE)
def test_adapters_of_the_output_layer_are_refused_before_a_model_is_loaded(method, tmp_path):
    settings = {"task_type": "CAUSAL_LM", "target_modules": ".*(proj|head)"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    config = config_of(method, tmp_path, base_model="./not-there", lora_model_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=f"lora_model_dir: .* adapts lm_head, whose weight rl: {method} uses"):
        training.train(config)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "exclude_modules": ["lm_head"]}))
    with pytest.raises(ModelError, match="base_model: the local path './not-there' does not exist"):
        training.train(config)


def test_gdpo_is_grpo_with_another_aggregation(tmp_path):
    trl = {"reward_funcs": ["feature_matching"], "num_generations": 2}
    config = config_of("gdpo", tmp_path, **of_rows(type="ebft_opencode.transform"), trl=trl)
    assert config.method.own_arguments(config)["multi_objective_aggregation"] == "normalize_then_sum"


def test_models_are_not_compared_on_pairs(tmp_path):
    for method in METHODS:
        config = config_of(method, tmp_path, base_model="does/not-exist", val_set_size=2)
        for use in (run.evaluate, lambda config: task.load_held_out(config, None)):
            with pytest.raises(ConfigError, match=f"read documents or prompts, but rl: {method} trains on preference"):
                use(config)


@pytest.mark.parametrize(("method", "sequences"), [("dpo", 2), ("kto", 1)])
def test_doctor_counts_the_tokens_of_a_batch(method, sequences, tmp_path):
    config = config_of(method, write_inputs(tmp_path))
    rows = config.method.load_rows(config, load_tokenizer(config)).train
    lengths = row_lengths(config, None, rows)
    names = ("chosen_ids", "rejected_ids") if method == "dpo" else ("completion_ids",)
    assert lengths == [len(row["prompt_ids"]) + max(len(row[name]) for name in names) for row in rows]
    longest = longest_rows(config, rows, lengths)
    assert longest.longest == max(lengths)
    assert longest.step_tokens(config).loss == config.micro_batch_size * sequences * max(lengths)
