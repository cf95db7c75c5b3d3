"""Runs of the structured trainers: what their options change, what is logged, evaluated, resumed and refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from ebft import AsyncEBFTConfig, EBFTTrainer
from ebft.errors import NonFiniteLossError, RewardError
from ebft.monitor.console_metrics import ConsoleMetrics
from ebft.structured import RolloutGRPOConfig, RolloutGRPOTrainer
from ebft.structured.rollouts.turns import Completion
from tests.structured import oracle
from tests.structured.conftest import chat_model, lora
from tests.structured.trainers import arguments, make, one_step, rows


def test_completions_keep_to_their_own_limits(chat_tokenizer, tmp_path):
    policy = chat_model(chat_tokenizer)
    dataset = rows(multi_turn=False)
    lengths = {}
    for adaptive, floor in ((True, 1), (True, 20), (False, 1)):
        options = {"adaptive_max_tokens": adaptive, "gt_length_floor": floor, "max_completion_length": 25}
        trainer = make(policy, chat_tokenizer, tmp_path, dataset, **options)
        _, _, rollouts, batch = one_step(trainer)
        for rollout, row in zip(rollouts, batch):
            limit = max(floor, -(-3 * len(row["ground_truth"]) // 2)) if adaptive else 25  # one token per byte here
            assert len(rollout.ids) <= min(25, limit)
            lengths.setdefault((adaptive, floor), []).append(len(rollout.ids) / min(25, limit))
    assert all(max(found) == 1.0 for found in lengths.values())  # and the limits are what ended some


def test_references_do_not_limit_the_completions_of_grpo(chat_tokenizer, tmp_path):
    args = arguments(tmp_path, RolloutGRPOConfig, max_completion_length=25)
    spaces = lambda completions, **_: [float(completion.count(" ")) for completion in completions]
    dataset = Dataset.from_list([{"prompt": f"say {number}", "ground_truth": "a"} for number in range(6)])
    trainer = RolloutGRPOTrainer(
        chat_model(chat_tokenizer), spaces, args, train_dataset=dataset, processing_class=chat_tokenizer
    )
    _, _, rollouts, _ = one_step(trainer)
    assert max(len(rollout.ids) for rollout in rollouts) == 25


def test_a_run_evaluates_in_one_space_and_learns(chat_tokenizer, tmp_path):
    policy = lora(chat_model(chat_tokenizer))
    trainer = EBFTTrainer(
        policy,
        arguments(tmp_path, eval_strategy="steps", eval_steps=2, use_whitening=True, per_device_eval_batch_size=4),
        train_dataset=rows(),
        eval_dataset=rows().select(range(3)),
        processing_class=chat_tokenizer,
    )
    trainer.train()
    training, evaluation = trainer.state.log_history[0], trainer.state.log_history[2]
    assert training["ebft/alignment"] - training["ebft/diversity"] == pytest.approx(training["reward"], abs=1e-4)
    assert training["rollouts/wait_s"] > 0 and "rollouts/staleness" not in training
    names = ("alignment", "diversity", "cfm_loss", "cfm_loss_plugin", "cfm_loss_whitened", "ce_loss", "perplexity")
    assert all(f"eval_{name}" in evaluation for name in names)
    assert not any("eval_ebft/" in name for name in evaluation)
    assert evaluation["eval_cfm_loss"] < evaluation["eval_cfm_loss_plugin"]
    with torch.no_grad():
        nll, tokens = 0.0, 0
        for row in trainer.eval_dataset.select(range(1)):
            prompt = chat_tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
            ids = chat_tokenizer(row["ground_truth"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
            nll -= oracle.token_logps(policy, prompt["input_ids"], ids, 1.0).sum().item()
            tokens += len(ids)
    only = trainer.evaluate(trainer.eval_dataset.select(range(1)))
    assert only["eval_ce_loss"] == pytest.approx(nll / tokens, abs=1e-4)


def test_groups_without_a_signal_are_skipped(chat_tokenizer, tmp_path):
    def run(skip):
        policy = lora(chat_model(chat_tokenizer))
        before = copy.deepcopy(policy.state_dict())
        args = arguments(tmp_path, RolloutGRPOConfig, skip_zero_advantage_batches=skip, weight_decay=0.0)
        trainer = RolloutGRPOTrainer(
            policy,
            [lambda completions, **_: [1.0] * len(completions)],
            args,
            train_dataset=rows(),
            processing_class=chat_tokenizer,
        )
        trainer.train()
        assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())
        return trainer.state.log_history[0]

    assert run(skip=True)["skipped_zero_adv_batches"] == 1.0
    assert "skipped_zero_adv_batches" not in run(skip=False)


class SameForAll:
    """Equal completions within each group."""

    def generate(self, prompts, max_tokens):
        return [Completion([5 + len(prompt) % 50, 9, 7], None) for prompt in prompts]


@pytest.mark.parametrize("estimator", ["rloo", "group_norm"])
def test_equal_completions_do_not_move_the_policy(estimator, chat_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(EBFTTrainer, "backend", lambda self: SameForAll())
    policy = lora(chat_model(chat_tokenizer))
    before = copy.deepcopy(policy.state_dict())
    options = {"weight_decay": 0.0, "use_whitening": True, "adam_epsilon": 1e-12, "advantage_estimator": estimator}
    trainer = make(policy, chat_tokenizer, tmp_path, rows(multi_turn=False), **options)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] == 0
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())


@pytest.mark.parametrize(
    ("rewards", "weights", "aggregation", "expected"),
    [
        ([[1, 0], [0, 1]], [0.3, 0.3], "sum_then_normalize", True),
        ([[1, 0], [0, 1]], [0.3, 0.3], "normalize_then_sum", False),
        ([[0.1, 0.2], [0.3, 0]], [1, 1], "sum_then_normalize", True),
        ([[0.1, 0.2], [0.3, 1e-5]], [1, 1], "sum_then_normalize", False),
        ([[0.7], [None]], [1], "sum_then_normalize", True),
        ([[0.7], [0.7000001]], [1], "sum_then_normalize", False),
        ([[0.7, 1], [0.7, None]], [1, 1], "sum_then_normalize", False),
        ([[0.7, 1], [0.7, None]], [1, 1], "normalize_then_sum", True),
    ],
)
def test_groups_with_equal_rewards_have_no_signal(rewards, weights, aggregation, expected):
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(process_index=0),
        _group_size=lambda: 4,
        rewards=torch.tensor(
            [[float("nan") if x is None else x for x in row] for row in rewards] * 2, dtype=torch.float32
        ),
        reward_weights=torch.tensor(weights, dtype=torch.float32),
        multi_objective_aggregation=aggregation,
    )
    assert RolloutGRPOTrainer._without_signal(trainer, [{}] * 4).tolist() == [expected] * 4


def test_cross_entropy_is_a_signal_of_its_own(chat_tokenizer, tmp_path):
    policy = lora(chat_model(chat_tokenizer))
    before = copy.deepcopy(policy.state_dict())
    make(policy, chat_tokenizer, tmp_path, alignment_coef=0.0, diversity_coef=0.0, ce_coef=1.0).train()
    assert any(not torch.equal(before[name], value) for name, value in policy.state_dict().items())


def test_other_rewards_see_the_conversation(chat_tokenizer, tmp_path):
    seen = []

    def polite(completions, prompts, ground_truth, topic, **columns):
        seen.extend(zip(prompts, completions, topic))
        return [float(i % 2) for i in range(len(completions))]

    dataset = rows().add_column("topic", [f"t{i}" for i in range(12)])
    trainer = EBFTTrainer(
        lora(chat_model(chat_tokenizer)),
        arguments(tmp_path, max_steps=1, reward_weights=[1.0, 0.25]),
        reward_funcs=polite,
        train_dataset=dataset,
        processing_class=chat_tokenizer,
    )
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["reward"] == pytest.approx(logs["rewards/feature_matching/mean"] + 0.25 * 0.5, abs=1e-4)
    by_topic = {topic: (prompt, completion) for prompt, completion, topic in seen}
    for topic, (prompt, completion) in by_topic.items():
        turns = (0, 1, 2)[int(topic[1:]) % 3]
        assert [message["role"] for message in completion] == ["assistant", *["user", "assistant"] * turns]
        assert prompt[0]["content"].endswith(topic[1:])


def test_dropout_is_off_unless_asked_for(chat_tokenizer, tmp_path):
    with pytest.warns(UserWarning, match="lora_dropout: 0.1 is not applied"):
        make(lora(chat_model(chat_tokenizer), lora_dropout=0.1), chat_tokenizer, tmp_path)


def test_a_gguf_file_is_the_name_of_model_and_tokenizer(tiny_gguf, tmp_path):
    dataset = Dataset.from_list([{"prompt": f"say {i}", "ground_truth": "so " * (1 + i)} for i in range(4)])
    args = arguments(tmp_path, num_generations=2, per_device_train_batch_size=2, max_steps=1)
    trainer = EBFTTrainer(str(tiny_gguf), args, train_dataset=dataset)
    trainer.train()
    trainer.save_model()
    assert trainer.processing_class.eos_token == "<|end|>"
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again.lm_head.weight, trainer.model.lm_head.weight)


def test_a_reward_that_is_not_finite_stops_the_run(chat_tokenizer, tmp_path):
    policy = chat_model(chat_tokenizer)
    trainer = make(policy, chat_tokenizer, tmp_path)
    with torch.no_grad():
        next(trainer.feature_reward.network.causal_lm.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteLossError):
        trainer.train()


def test_the_async_class_prefetches():
    args = AsyncEBFTConfig(output_dir="x", num_generations=4, per_device_train_batch_size=4)
    assert args.async_prefetch and args.uses_server and args.vllm_mode == "server"


def test_the_templates_end_of_turn_ends_a_completion(chat_tokenizer, tmp_path):
    end = chat_tokenizer.convert_tokens_to_ids("<|im_end|>")

    class Ended(EBFTTrainer):
        def backend(self):
            return self

        def generate(self, prompts, max_tokens):
            return [Completion([50 + i % 40, 60, end], None) for i in range(len(prompts))]

    args = arguments(tmp_path, max_steps=1, mask_truncated_completions=True)
    trainer = Ended(
        lora(chat_model(chat_tokenizer)),
        args,
        train_dataset=rows(multi_turn=False),
        processing_class=chat_tokenizer,
    )
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["completions/clipped_ratio"] == 0 and logs["grad_norm"] > 0


@pytest.mark.parametrize("method", ["ebft", "grpo", "gdpo"])
def test_held_out_metrics_do_not_depend_on_the_batch_size(method, tmp_path):
    from tests.structured.short_run import check_held_out, held_out

    found = {size: held_out(tmp_path, method, size) for size in (4, 8, 12, 20)}
    for size, (metrics, expected) in found.items():
        check_held_out(metrics, expected)
        for name, value in metrics.items():
            assert value == pytest.approx(found[4][0][name], rel=1e-4, abs=1e-4), (size, name)


def test_a_loss_or_reward_that_is_not_finite_says_so(chat_tokenizer, tmp_path):
    trainer = make(chat_model(chat_tokenizer), chat_tokenizer, tmp_path)
    trainer._compute_loss = lambda model, inputs: torch.full((), torch.nan, requires_grad=True)
    with pytest.raises(NonFiniteLossError, match="The loss is nan at step 1, in a batch of prompts that start with"):
        trainer.train()
    infinite = lambda completions, **_: [float("inf")] * len(completions)
    trainer = EBFTTrainer(
        chat_model(chat_tokenizer),
        arguments(tmp_path),
        reward_funcs=infinite,
        train_dataset=rows(),
        processing_class=chat_tokenizer,
    )
    with pytest.raises(RewardError, match="returned inf"):
        trainer.train()


def test_resuming_goes_on_with_the_generations_that_were_due(chat_tokenizer, tmp_path):
    def run(steps, **changes):
        seen = []
        sizes = {"gradient_accumulation_steps": 3, "steps_per_generation": 6, "per_device_train_batch_size": 2}
        args = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=3, **sizes)
        trainer = EBFTTrainer(
            lora(chat_model(chat_tokenizer)), args, train_dataset=rows(), processing_class=chat_tokenizer
        )
        scored = trainer._generate_and_score_completions
        note = lambda batch: (trainer.state.global_step, sorted({row["ground_truth"] for row in batch}))
        trainer._generate_and_score_completions = lambda batch: seen.append(note(batch)) or scored(batch)
        trainer.train(**changes)
        return seen

    whole = run(6)
    resumed = run(6, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [step for step, _ in whole] == [0, 2, 4]
    assert resumed == whole[2:]  # the batch of step 2 is part of the checkpoint


def test_a_long_ground_truth_that_no_reward_compares_with(chat_tokenizer, tmp_path):
    long = [{"prompt": f"say {number}", "ground_truth": "a " * 2000} for number in range(6)]
    trainer = RolloutGRPOTrainer(
        chat_model(chat_tokenizer),
        lambda completions, ground_truth, **_: [float(len(truth)) for truth in ground_truth],
        arguments(tmp_path, RolloutGRPOConfig, max_steps=1),
        train_dataset=Dataset.from_list(long),
        processing_class=chat_tokenizer,
    )
    trainer.train()
    assert trainer.state.global_step == 1


def test_several_eval_datasets_are_told_apart(chat_tokenizer, tmp_path):
    trainer = make(lora(chat_model(chat_tokenizer)), chat_tokenizer, tmp_path, per_device_eval_batch_size=4)
    trainer.evaluate({"a": rows().select(range(2)), "b": rows().select(range(2, 5))})
    logged = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    assert {"eval_a_cfm_loss", "eval_b_cfm_loss", "eval_a_ce_loss"} <= set(logged)
    assert "eval_cfm_loss" not in logged and logged["eval_a_ce_loss"] != logged["eval_b_ce_loss"]


@pytest.mark.slow
def test_evaluating_does_not_change_training(chat_tokenizer, tmp_path):
    def losses(**changes):
        torch.manual_seed(0)
        trainer = EBFTTrainer(
            lora(chat_model(chat_tokenizer)),
            arguments(tmp_path, max_steps=3, per_device_eval_batch_size=4, **changes),
            train_dataset=rows(),
            eval_dataset=rows().select(range(2)),
            processing_class=chat_tokenizer,
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert losses(eval_strategy="steps", eval_steps=1) == losses()


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_groups_of_equal_rewards_have_no_gradient(chat_tokenizer, tmp_path, aggregation):
    """TRL's advantages of eight rewards of 0.1 are rounding errors, which Adam would scale up."""
    found = {}

    def some(completions, **columns):
        return [0.1] * 8 + [float(i) for i in range(8)]

    def none(completions, **columns):
        return [None] * 16

    trainer = RolloutGRPOTrainer(
        chat_model(chat_tokenizer),
        [some, none, lambda **columns: [0.0] * 16, lambda **columns: [0.5] * 16],
        arguments(
            tmp_path,
            RolloutGRPOConfig,
            num_generations=8,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=1,
            multi_objective_aggregation=aggregation,
            log_completions=True,
            max_steps=1,
        ),
        train_dataset=rows(multi_turn=False).remove_columns("ground_truth"),
        processing_class=chat_tokenizer,
        callbacks=[ConsoleMetrics()],
    )
    trainer.scored_rollouts.hooks.append(lambda entries, totals: found.update(entries=entries))
    trainer.train()
    silent, other = ([sample["advantage"] for sample in entry["samples"]] for entry in found["entries"])
    assert silent == [0.0] * 8 and max(other) > 0.5
    lines = (tmp_path / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    assert '"none": null' in lines[0] and "NaN" not in lines[0]
    assert '"<lambda>": 0.0, "<lambda> 2": 0.5' in lines[0], "both functions of this name"
