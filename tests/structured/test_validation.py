"""What structured mode's trainers refuse before they train, and what they say to do instead."""

import pytest
from datasets import Dataset
from peft import LoraConfig

from ebft.errors import ConfigError, DataError, ModelError
from tests.structured import conftest, trainers


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_generations_eval": 1}, "num_generations_eval: 1 is not supported .* Set at least 2"),
    ({"num_generations": 2, "scale_rewards": "group"}, "scale_rewards is not supported .* 3 or more"),
    ({"alignment_coef": 0.0, "diversity_coef": 0.0}, "the loss is always 0"),
    ({"temperature": 0.0}, "temperature: 0.0 is invalid"), ({"neftune_noise_alpha": 5}, "neftune_noise_alpha is not"),
    ({"generation_kwargs": {"temperature": 0.1}}, "temperature cannot be set here. Use the option of the same name"),
    ({"generation_kwargs": {"stop": ["a"]}}, "'stop' is not supported"),
    ({"multi_objective_aggregation": "normalize_then_sum"}, "excludes advantage_estimator: rloo. Set adv"),
])  # fmt: skip
def test_refused_arguments(chat_tokenizer, build, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(conftest.chat_model(chat_tokenizer), **changes)


def test_tokens_that_are_scored_under_another_distribution_are_named(build, tmp_path):
    for changes in ({"top_p": 0.5, "shared_prefix": False}, {"generation_kwargs": {"typical_p": 0.5}}):
        with pytest.warns(UserWarning, match="(top_k/top_p/min_p|typical_p): completions are sampled with this"):
            build(**changes)
    args = trainers.arguments(tmp_path, vllm_server_base_url="http://127.0.0.1:34565", advantage_estimator="grpo")
    assert (args.vllm_server_host, args.vllm_server_port) == ("127.0.0.1", 34565)
    assert (args.advantage_estimator, args.scale_rewards) == ("group_norm", "group")


def of(*truths, **more):
    return Dataset.from_list([{"prompt": "a", "ground_truth": truth, **more} for truth in truths])


def test_the_completion_of_rows_for_sft_is_the_reference(chat_tokenizer, build):
    reply = lambda text: [{"role": "assistant", "content": text}]
    for rows in (of(*"abc"), of(*map(reply, "abc"))):
        trainer = build(conftest.chat_model(chat_tokenizer), rows.rename_column("ground_truth", "completion"))
        assert trainer.train_dataset["ground_truth"][:] == ["a", "b", "c"]


@pytest.mark.parametrize(("dataset", "error", "message"), [
    (of(*"ab c"), DataError, "1 rows whose ground_truth is empty .* row 2"),
    (of(*["b " * 300] * 3), DataError, r"max_position_embeddings \(512\)"),
    (of(*"abc").rename_column("ground_truth", "answer"), DataError, "no column ground_truth or .* but prompt, answer"),
    ({"bias": "all"}, ModelError, "parameters of the base model are trainable"),
    ({"init_lora_weights": "pissa"}, ModelError, "modifies the base"),
])  # fmt: skip
def test_refused_rows_and_adapters_that_change_the_base_model(chat_tokenizer, build, dataset, error, message):
    with pytest.raises(error, match=message):
        if isinstance(dataset, Dataset):
            build(conftest.chat_model(chat_tokenizer), dataset).train()
        adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **dataset)
        build(conftest.chat_model(chat_tokenizer, attention_bias=True), peft_config=adapter)
