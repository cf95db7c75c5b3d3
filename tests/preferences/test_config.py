"""Keys of the preference methods: what they become, and what is refused before a model is loaded."""

import json
import warnings

import pytest

from ebft.errors import ConfigError, DataError
from ebft.run.checks import Machine, check_machine, check_runnable
from ebft.run.trainer import training_arguments
from ebft.run.training import train
from tests.preferences.runs import METHODS, WITH_REFERENCE, config_of


def arguments(method, tmp_path, **changes):
    return training_arguments(config_of(method, tmp_path, **changes), rows=12, has_eval=False)


@pytest.mark.parametrize("method", METHODS)
def test_the_strength_and_the_length(method, tmp_path):
    args = arguments(method, tmp_path, rl_beta=0.3)
    assert (args.beta, args.max_length) == (0.3, 256)
    assert arguments(method, tmp_path).beta == 0.1


def test_keys_of_each_method(tmp_path):
    weights = {"dpo_loss_type": ["robust", "sft"], "dpo_loss_weights": [1.0, 0.5], "dpo_label_smoothing": 0.1}
    args = arguments("dpo", tmp_path, **weights, dpo_use_weighting=True)
    assert (args.loss_type, args.loss_weights, args.label_smoothing) == (["robust", "sft"], [1.0, 0.5], 0.1)
    assert args.use_weighting and arguments("dpo", tmp_path).loss_type == ["sigmoid"]
    assert arguments("ipo", tmp_path).loss_type == ["ipo"]
    args = arguments("kto", tmp_path, kto_desirable_weight=2.0, kto_undesirable_weight=0.5)
    assert (args.desirable_weight, args.undesirable_weight) == (2.0, 0.5)
    assert arguments("orpo", tmp_path, orpo_alpha=0.4).beta == 0.4
    args = arguments("simpo", tmp_path, simpo_gamma=1.5)
    assert (args.loss_type, args.simpo_gamma, args.cpo_alpha) == ("simpo", 1.5, 0.0)
    assert arguments("simpo", tmp_path, cpo_alpha=0.2).cpo_alpha == 0.2
    for method in WITH_REFERENCE:
        assert arguments(method, tmp_path, precompute_ref_log_probs=True).precompute_ref_log_probs


NOT_READ = "datasets.type.{} is not read by rl: dpo, which trains on pairs"
OF_COMPLETIONS = (("field_completion", "a"), ("field_label", "a"), ("completion_format", "{completion}"))


def of_rows(**entry):
    return {"datasets": [{"path": "x", **entry}]}


OF_NO_METHOD = [
    ({"sample_packing": True}, "sample_packing is not supported with rl: {method}"),
    ({"train_on_inputs": True}, "train_on_inputs is not supported with rl: {method}"),
    ({"metric_for_best_model": "ce_loss"}, "'ce_loss' is not computed in this run. Choose from loss, rewards/"),
]


@pytest.mark.parametrize(("method", "changes", "message"), [
    *((method, changes, message.format(method=method)) for method in METHODS for changes, message in OF_NO_METHOD),
    ("dpo", {"dpo_label_smoothing": 0.1}, "dpo_label_smoothing has no effect with dpo_loss_type: sigmoid"),
    ("ipo", {"dpo_label_smoothing": 0.1}, "dpo_label_smoothing is incompatible with rl: ipo"),
    ("ipo", {"dpo_loss_type": "hinge"}, "dpo_loss_type is incompatible with rl: ipo"),
    ("kto", {"micro_batch_size": 1}, "micro_batch_size: 1 is not supported by rl: kto"),
    ("kto", {"eval_batch_size": 1, "val_set_size": 2}, "eval_batch_size: 1 is not supported by rl: kto"),
    ("orpo", {"orpo_alpha": 0.1, "rl_beta": 0.2}, "two names of the same weight"),
    ("kto", {"lora_target_modules": ["lm_head"], "lora_target_linear": False}, "selects lm_head, which is not supp"),
    ("dpo", {"lora_target_modules": ".*(proj|head)", "lora_target_linear": False}, "selects lm_head, which is not"),
    ("dpo", {"rpo_alpha": 0.1}, r"rpo_alpha.*dpo_loss_type: \[sigmoid, sft\]"),
    ("dpo", {"rl_adapter_ref_model": True}, "rl_adapter_ref_model is not supported: .*the adapter of lora_model_dir"),
    *(("dpo", of_rows(type={name: value}), NOT_READ.format(name)) for name, value in OF_COMPLETIONS),
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
    for use in (check_runnable, train):  # no model is loaded
        with pytest.raises(DataError, match=message):
            use(config)


def test_what_is_accepted(tmp_path):
    with warnings.catch_warnings(action="error"):
        for method in METHODS:
            config_of(method, tmp_path, rl_beta=0.2)
        for name, value in OF_COMPLETIONS:
            config_of("kto", tmp_path, **of_rows(type={name: value}))
    expression = r"^(?!lm_head).*_proj"  # leaves out the output layer
    config = config_of("dpo", tmp_path, lora_target_linear=False, lora_target_modules=expression)
    assert config.lora_target_modules == expression


def test_reference_values_are_computed_by_one_process(tmp_path):
    config = config_of("dpo", tmp_path, precompute_ref_log_probs=True)
    with pytest.raises(ConfigError, match="precompute_ref_log_probs: true is not supported with several processes"):
        check_machine(config, Machine(False, False, processes=2))
    check_machine(config, Machine(False, False))


@pytest.mark.parametrize("method", WITH_REFERENCE)
@pytest.mark.parametrize("settings", [{"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ".*(proj|head)"}])
def test_adapters_of_the_output_layer_are_refused_before_a_model_is_loaded(method, settings, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"task_type": "CAUSAL_LM", **settings}))
    config = config_of(method, tmp_path, base_model="does/not-exist", lora_model_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=f"lora_model_dir: the adapter in .* adapts lm_head, which .* rl: {method}"):
        train(config)


def test_gdpo_is_grpo_with_another_aggregation(tmp_path):
    trl = {"reward_funcs": ["feature_matching"], "num_generations": 2}
    config = config_of("gdpo", tmp_path, **of_rows(type="ebft_opencode.transform"), trl=trl)
    assert config.method.own_arguments(config)["multi_objective_aggregation"] == "normalize_then_sum"
