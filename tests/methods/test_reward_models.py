"""The keys that select reward models, what contradicts them, and what the commands do with such a config."""

import json

import pytest

from ebft import RunConfig
from ebft.errors import ConfigError
from ebft.tools.evaluation.run import evaluate
from tests.cli.conftest import plain
from tests.config.conftest import warned
from tests.reward_models.conftest import config_of, make, model_dir  # noqa: F401 (fixtures)

FLAGS = ("reward_model", "process_reward_model")
TYPES = {"reward_model": "bradley_terry.chat_template", "process_reward_model": "stepwise_supervised"}


def config(flag=None, **keys) -> RunConfig:
    values = {"base_model": "none", "datasets": [{"path": "x", "type": TYPES.get(flag, "completion")}]}
    return RunConfig.from_dict({**values, "output_dir": "out", **({flag: True} if flag else {}), **keys})


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize(("keys", "message"), [
    ({"rl": "grpo"}, "rl: grpo and {flag}: true select different methods"),
    (dict.fromkeys(FLAGS, True), "reward_model: true and process_reward_model: true select different"),
    ({"model_type": "AutoModelForCausalLM"}, "model_type: AutoModelForCausalLM does not match {flag}: true"),
    ({"load_in_8bit": True, "adapter": "lora"}, "load_in_8bit is not supported with {flag}: true: it is not tested"),
    ({"sample_packing": True}, "sample_packing is not supported with {flag}: true"),
    ({"group_by_length": True}, "group_by_length is not supported with {flag}: true"),
    ({"gguf_file": "model.gguf"}, "model.gguf is a GGUF file, which is not supported with {flag}: true"),
    ({"metric_for_best_model": "perplexity", "val_set_size": 2}, "Choose from loss, accuracy"),
])  # fmt: skip
def test_a_contradiction_names_both_keys(flag, keys, message):
    with pytest.raises(ConfigError, match=message.format(flag=flag)):
        config(flag, **keys)


STEPS = {"path": "x", "type": "stepwise_supervised", "step_separator": "!", "max_completion_length": 3}


@pytest.mark.parametrize(("flag", "keys", "message"), [
    ("reward_model", {"num_labels": 2}, "num_labels: 2 is invalid with reward_model: true, .* Set 1"),
    ("process_reward_model", {"num_labels": 1},
     "num_labels: 1 is invalid with process_reward_model: true.* Set 2 or more"),
    ("process_reward_model", {"datasets": [{**STEPS, "step_separator": ""}]}, "step_separator"),
])  # fmt: skip
def test_values_that_do_not_fit_the_method(flag, keys, message):
    with pytest.raises(ConfigError, match=message):
        config(flag, **keys)


def test_keys_without_effect_give_one_warning():
    assert config("process_reward_model", datasets=[STEPS]).datasets[0].step_separator == "!"
    for flag in FLAGS:
        messages = warned(config, flag=flag, trl={"beta": 0.1}, ebft={"stride": 2}, train_on_inputs=True)[1]
        assert messages == [f"ebft, trl, train_on_inputs: no effect with {flag}: true."]
    with pytest.warns(UserWarning, match="num_labels has no effect: SFT"):
        config(num_labels=2)


@pytest.mark.parametrize("kind", ["outcome", "process"])
def test_ebft_evaluate_refuses_and_names_what_to_use(make, kind):  # noqa: F811
    with pytest.raises(ConfigError, match="compares language models. Rows held out in training evaluate"):
        evaluate(make(kind))


@pytest.mark.parametrize(("kind", "flag", "tag", "task"), [
    ("outcome", "reward_model", "reward-model", "text-classification"),
    ("process", "process_reward_model", "process-reward-model", "token-classification")])  # fmt: skip
def test_training_names_the_method_and_no_command_that_refuses_the_model(ebft, make, tmp_path, kind, flag, tag, task):  # noqa: F811
    make(kind)
    found = ebft("train", tmp_path / "run.yaml")
    text = plain(found.output)
    assert found.exit_code == 0 and "Outcome: " in text and "Report: " in text
    assert "ebft evaluate" not in text and "ebft inference" not in text
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"- {tag}\n" in card and f"pipeline_tag: {task}" in card
    assert json.loads((tmp_path / "out" / "ebft_run.json").read_text())[flag] is True


def test_a_checkpoint_of_another_method_is_refused(make, tmp_path):  # noqa: F811
    from ebft import train

    keys = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "eval_steps": None, "val_set_size": 0}
    train(make("process", **keys))
    with pytest.raises(ConfigError, match="process_reward_model: false differs from process_reward_model: true"):
        train(make("outcome", **{**keys, "resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-1")}))
