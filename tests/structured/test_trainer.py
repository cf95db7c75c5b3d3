"""Runs of the structured trainers: what options change, advantages, what is logged, evaluated, resumed and refused."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from trl.trainer.utils import RepeatSampler

from ebft import EBFTTrainer
from ebft.errors import NonFiniteLossError
from ebft.monitor.metrics import ConsoleMetrics
from ebft.structured import RolloutGRPOTrainer
from ebft.structured.rollouts.turns import Completion
from ebft.structured.trl import EpochSampler
from tests.reward_functions.functions import lengths
from tests.structured import conftest, oracle, short_run
from tests.structured.trainers import arguments, logged, one_step, rows


def is_unchanged_by_training(trainer):
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    return all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())


def test_an_epoch_has_all_prompts_in_the_order_of_trl():
    plain, ours = RepeatSampler(range(7), 2, 3, 2, seed=5), EpochSampler(RepeatSampler(range(7), 2, 3, 2, seed=5))
    for _ in range(3):
        theirs, found = list(plain), list(ours)
        assert found[: len(theirs)] == theirs and {*found} == {*range(7)} and len(found) == len(ours) == 36
    ours.set_epoch(2)
    few = EpochSampler(RepeatSampler(range(2), 1, 5, shuffle=False))
    assert (list(ours), list(few)) == (found, [0, 1, 0, 1, 0])


@pytest.mark.parametrize(("adaptive", "floor"), [(True, 1), (True, 20), (False, 1)])
def test_the_longest_reference_limits_completions(chat_tokenizer, build, adaptive, floor):
    """Samples and references alike: a sample that is cut is compared with what the reference is up to there."""
    data = rows(multi_turn=False)
    longest = max(map(len, data["ground_truth"]))  # one token per byte here
    options = {"adaptive_max_tokens": adaptive, "gt_length_floor": floor, "max_completion_length": 25}
    trainer = build(conftest.chat_model(chat_tokenizer), data, gt_length_multiplier=0.5, **options)
    limit = min(25, max(floor, -(-longest // 2))) if adaptive else 25
    assert trainer.generation.max_completion_length == trainer.feature_reward.max_completion_length == limit
    _, _, rollouts, _ = one_step(trainer)
    assert max(len(rollout.ids) for rollout in rollouts) == limit


def test_what_trl_prints_does_not_control_the_terminal(chat_tokenizer, build, capfd):
    data = [{"prompt": [{"role": "user", "content": f"\x1b[2J{number}"}], "ground_truth": "a"} for number in range(6)]
    build(conftest.chat_model(chat_tokenizer), Dataset.from_list(data), log_completions=True, max_steps=1).train()
    printed = capfd.readouterr().out
    assert "\u241b[2J" in printed and "\x1b[2J" not in printed


def test_a_run_evaluates_in_one_space_and_learns(chat_tokenizer, build):
    options = {"eval_strategy": "steps", "eval_steps": 2, "use_whitening": True, "per_device_eval_batch_size": 4}
    trainer = build(eval_dataset=rows().select(range(3)), **options)
    trainer.train()
    training, evaluation = trainer.state.log_history[0], trainer.state.log_history[2]
    assert training["ebft/alignment"] - training["ebft/diversity"] == pytest.approx(training["reward"], abs=1e-4)
    assert training["rollouts/wait_s"] > 0 and "rollouts/staleness" not in training
    names = ("alignment", "diversity", "cfm_loss", "cfm_loss_plugin", "cfm_loss_whitened", "ce_loss", "perplexity")
    assert all(f"eval_{name}" in evaluation for name in names)
    assert not any("eval_ebft/" in name for name in evaluation)
    assert evaluation["eval_cfm_loss"] < evaluation["eval_cfm_loss_plugin"]
    [row] = trainer.eval_dataset.select(range(1))
    prompt = chat_tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
    ids = chat_tokenizer(row["ground_truth"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        wanted = -oracle.token_logps(trainer.model, prompt["input_ids"], ids, 1.0).mean().item()
    trainer.evaluate({"a": trainer.eval_dataset.select(range(1)), "b": rows().select(range(2, 5))})
    several = {name: value for entry in trainer.state.log_history[3:] for name, value in entry.items()}
    assert several["eval_a_ce_loss"] == pytest.approx(wanted, abs=1e-4)
    assert {"eval_a_cfm_loss", "eval_b_cfm_loss"} <= set(several) and "eval_cfm_loss" not in several
    assert several["eval_a_ce_loss"] != several["eval_b_ce_loss"]
    trainer.scorer.score = lambda *rows: None  # also in TRL's rows
    assert trainer.evaluate(trainer.eval_dataset.select(range(1)))["eval_ce_loss"] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize("skip", [True, False])
def test_groups_without_a_signal_are_skipped(build, skip):
    rewards = lambda completions, **_: [1.0] * len(completions)
    options = {"skip_zero_advantage_batches": skip, "weight_decay": 0.0}
    trainer = build(kind=RolloutGRPOTrainer, reward_funcs=[rewards], **options)
    assert is_unchanged_by_training(trainer)
    assert logged(trainer, "skipped_zero_adv_batches") == ([1.0] * 2 if skip else [])
    cross_entropy = {"alignment_coef": 0.0, "diversity_coef": 0.0, "ce_coef": 1.0}  # a signal of its own
    assert not is_unchanged_by_training(build(**cross_entropy, **options, max_steps=1))


class Made:
    """Rollouts with the completions that `make(number, prompt)` gives."""

    def __init__(self, make):
        self.make = make

    def generate(self, prompts, max_tokens):
        return [Completion(self.make(number, prompt), None) for number, prompt in enumerate(prompts)]


def test_equal_completions_do_not_move_the_policy(build, monkeypatch):
    same = Made(lambda number, prompt: [5 + len(prompt) % 50, 9, 7])
    monkeypatch.setattr(EBFTTrainer, "backend", lambda self: same)
    trainer = build(None, rows(multi_turn=False), weight_decay=0.0, use_whitening=True, adam_epsilon=1e-12)
    assert is_unchanged_by_training(trainer) and logged(trainer, "grad_norm")[0] == 0


@pytest.mark.parametrize(("rewards", "weights", "aggregation", "expected"), [
    ([[1, 0], [0, 1]], [0.3, 0.3], "sum_then_normalize", True),
    ([[1, 0], [0, 1]], [0.3, 0.3], "normalize_then_sum", False),
    ([[0.1, 0.2], [0.3, 0]], [1, 1], "sum_then_normalize", True),
    ([[0.1, 0.2], [0.3, 1e-5]], [1, 1], "sum_then_normalize", False),
    ([[0.7], [None]], [1], "sum_then_normalize", True), ([[0.7], [0.7000001]], [1], "sum_then_normalize", False),
    ([[0.7, 1], [0.7, None]], [1, 1], "sum_then_normalize", False),
    ([[0.7, 1], [0.7, None]], [1, 1], "normalize_then_sum", True),
])  # fmt: skip
def test_groups_with_equal_rewards_have_no_signal(rewards, weights, aggregation, expected):
    values = [[float("nan") if x is None else float(x) for x in row] for row in rewards] * 2
    given = {"rewards": torch.tensor(values), "reward_weights": torch.tensor(weights, dtype=torch.float32)}
    given |= {"multi_objective_aggregation": aggregation, "accelerator": SimpleNamespace(process_index=0)}
    trainer = SimpleNamespace(_group_size=lambda: 4, **given)
    assert RolloutGRPOTrainer._without_signal(trainer, [{}] * 4).tolist() == [expected] * 4


def test_other_rewards_see_the_conversation(build):
    seen = []

    def polite(completions, prompts, ground_truth, topic, **columns):
        seen.extend(zip(prompts, completions, topic))
        return [float(i % 2) for i in range(len(completions))]

    dataset = rows().add_column("topic", [f"t{i}" for i in range(12)])
    trainer = build(None, dataset, max_steps=1, reward_weights=[1.0, 0.25], reward_funcs=polite)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["reward"] == pytest.approx(logs["rewards/feature_matching/mean"] + 0.25 * 0.5, abs=1e-4)
    for prompt, completion, topic in seen:
        turns = (0, 1, 2)[int(topic[1:]) % 3]
        assert [message["role"] for message in completion] == ["assistant", *["user", "assistant"] * turns]
        assert prompt[0]["content"].endswith(topic[1:])


def test_a_name_is_loaded_as_trl_does(chat_tokenizer, tmp_path):
    """In float32 unless `model_init_kwargs` say otherwise; a reward model's tokenizer is given as TRL takes it."""
    conftest.chat_model(chat_tokenizer).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    chat_tokenizer.save_pretrained(tmp_path / "model")
    more = {"reward_funcs": lambda completions, **columns: [0.0] * len(completions)}
    more |= {"train_dataset": rows(), "reward_processing_classes": chat_tokenizer}
    in_bfloat16 = {"dtype": "bfloat16", "attn_implementation": "eager"}
    for given, dtype in ((None, torch.float32), (in_bfloat16, torch.bfloat16)):
        trainer = EBFTTrainer(str(tmp_path / "model"), arguments(tmp_path, model_init_kwargs=given), **more)
        assert trainer.model.dtype == dtype
        assert trainer.model.config._attn_implementation == ("sdpa" if given is None else "eager")
    trainer.args.learning_rate, trainer.args.max_steps = 1e-6, 1
    with pytest.warns(UserWarning, match="too small for 16-bit weights"):
        trainer.train()


def test_the_templates_end_of_turn_ends_a_completion(chat_tokenizer, build, monkeypatch):
    end = chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
    ended = Made(lambda number, prompt: [50 + number % 40, 60, end])
    monkeypatch.setattr(EBFTTrainer, "backend", lambda self: ended)
    trainer = build(None, rows(multi_turn=False), max_steps=1, mask_truncated_completions=True)
    trainer.train()
    assert logged(trainer, "completions/clipped_ratio") == [0] and logged(trainer, "grad_norm")[0] > 0


@pytest.mark.parametrize("method", ["ebft", "grpo", "gdpo"])
def test_held_out_metrics_do_not_depend_on_the_batch_size(method, tmp_path):
    found = {size: short_run.held_out(tmp_path, method, size) for size in (4, 12)}
    for metrics, expected in found.values():
        short_run.check_held_out(metrics, expected)
    for name, value in found[12][0].items():
        assert value == pytest.approx(found[4][0][name], rel=1e-4, abs=1e-4), name


def test_a_loss_that_is_not_finite_says_so(chat_tokenizer, build):
    trainer = build(conftest.chat_model(chat_tokenizer))
    trainer._compute_loss = lambda model, inputs: torch.full((), torch.nan, requires_grad=True)
    with pytest.raises(NonFiniteLossError, match="The loss is nan at step 1, in a batch of prompts that start with"):
        trainer.train()


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_groups_of_equal_rewards_have_no_gradient(chat_tokenizer, build, tmp_path, aggregation):
    """TRL's advantages of eight rewards of 0.1 are rounding errors, which Adam would scale up."""
    some = lambda **columns: [0.1] * 8 + [float(i) for i in range(8)]
    none = lambda **columns: [None] * 16
    some.__name__, none.__name__ = "some", "none"
    rewards, found = [some, none, lambda **columns: [0.0] * 16, lambda **columns: [0.5] * 16], []
    sizes = {"num_generations": 8, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "max_steps": 1}
    options = {"multi_objective_aggregation": aggregation, "log_completions": True, "callbacks": [ConsoleMetrics()]}
    dataset = rows(multi_turn=False).remove_columns("ground_truth")
    options |= {"kind": RolloutGRPOTrainer, "reward_funcs": rewards}
    trainer = build(conftest.chat_model(chat_tokenizer), dataset, **sizes, **options)
    trainer.scored_rollouts.hooks.append(lambda entries, totals: found.append(entries))
    trainer.train()
    silent, other = ([sample["advantage"] for sample in entry["samples"]] for entry in found[-1])
    assert silent == [0.0] * 8 and max(other) > 0.5
    lines = (tmp_path / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    assert '"none": null' in lines[0] and "NaN" not in lines[0]
    assert '"<lambda>": 0.0, "<lambda> 2": 0.5' in lines[0], "both functions of this name"


def short(completion_ids, **columns):
    """Some completions have no reward."""
    return [None if len(ids) % 3 == 0 else -float(len(ids)) for ids in completion_ids]


@pytest.mark.first(2)
@pytest.mark.parametrize("scale_rewards", [None, "batch", True])
@pytest.mark.parametrize("estimator", ["rloo", "reinforce"])
def test_rewards_are_weighted_and_scaled(build, estimator, scale_rewards):
    options = {"advantage_estimator": estimator, "scale_rewards": scale_rewards, "reward_weights": [0.5, 2.0]}
    trainer = build(**options, diversity_coef=0.7, log_completions=True, reward_funcs=[short])
    *_, rollouts, _ = one_step(trainer)
    match = trainer.feature_reward.last
    others = torch.tensor([reward or 0.0 for reward in short([rollout.ids for rollout in rollouts])]).view(-1, 4)
    assert (others == 0).any()
    rewards = 0.5 * (match.alignment - 0.7 * match.diversity) + 2.0 * others
    wanted = []
    for gram, total in zip(match.samples @ match.samples.mT, rewards):
        pairs = [[0.5 * 0.7 * 2 / 3 * gram[j, k] * (j != k) for k in range(4)] for j in range(4)]
        wanted.append(oracle.advantages_of(total + torch.tensor([sum(row) for row in pairs]), pairs, estimator))
    wanted = torch.stack(wanted)
    if scale_rewards is not None:
        wanted = wanted / ((rewards.std() if scale_rewards == "batch" else rewards.std(-1, keepdim=True)) + 1e-4)
    # In the order in which they were sampled.
    order = torch.cat([batch["row"] for batch in trainer.generation_batch]).argsort()
    found = torch.cat([batch["advantages"] for batch in trainer.generation_batch])[order]
    torch.testing.assert_close(found, wanted.flatten(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(list(trainer._logs["advantages"])), found)


GRPO = {"kind": RolloutGRPOTrainer, "max_steps": 1}


def test_training_has_the_same_rewards_with_workers(chat_tokenizer, build, tmp_path):
    found, dataset = {}, rows(multi_turn=False).add_column("answer", list(range(12)))
    for count in (1, 2):
        options = {"reward_num_workers": count, "log_completions": True, "reward_funcs": [lengths], **GRPO}
        build(conftest.chat_model(chat_tokenizer), dataset, folder=tmp_path / str(count), **options).train()
        found[count] = list(map(json.loads, (tmp_path / str(count) / "rollouts.jsonl").read_text().splitlines()))
    assert found[1] == found[2] and len(found[1]) == 3


@pytest.mark.parametrize(("groups", "sizes"), [(1, [4, 4, 4]), (3, [12])])
def test_rewards_of_some_groups_at_a_time(chat_tokenizer, build, groups, sizes):
    seen = []
    note = lambda completions, **columns: seen.append(len(completions)) or [0.0] * len(completions)
    options = {"streaming_partial_batch": True, "streaming_min_groups": groups, "reward_funcs": [note], **GRPO}
    build(conftest.chat_model(chat_tokenizer), rows(multi_turn=False), **options).train()
    assert seen == sizes
