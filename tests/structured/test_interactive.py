"""Tools, environments and rollout functions of the user: what is sampled, what is trained on, and what is refused."""

import json
import math
import os
import sys
from itertools import groupby
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset

from ebft import errors, evaluate, load_config, structured, train
from ebft.run.checks import check_runnable
from ebft.run.config.schema import RunConfig
from ebft.structured.config import checked
from tests.serving.processes import free_port
from tests.structured.conftest import lora
from tests.structured.tool_model import ANSWER, CALL, EXAMPLES, RESULT, make_tool_model, tool_model, tool_tokenizer
from tests.structured.trainers import USER, make, one_step

sys.path.append(str(EXAMPLES))
from calculator import Calculator, answers, prompts  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:You are using:UserWarning")
PYTHON = os.environ.get("EBFT_VLLM_PYTHON")


@pytest.fixture(scope="module")
def tokenizer():
    return tool_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tool_model(tmp_path_factory.mktemp("tools"))


def questions(count=8):
    transform = prompts(None)[0]
    return Dataset.from_list([transform({"question": f"2 + 3, {i}?", "answer": "#### 5"}) for i in range(count)])


@pytest.fixture
def using(tokenizer, tmp_path):
    """`using(tools=[...])`: a trainer with that or the calculator, two prompts of four completions a step."""

    def made(dataset=None, policy=None, folder=tmp_path, **changes):
        if not changes.keys() & {"tools", "rollout_func", "environment_factory"}:
            changes["environment_factory"] = Calculator
        settings = {"max_completion_length": 300, "max_tool_calling_iterations": 2, "temperature": 1.0}
        settings |= {"chat_template_kwargs": {"enable_thinking": False}, "reward_funcs": [answers]}
        settings |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, **changes}
        policy = lora(tool_model(tokenizer), scale=0.01) if policy is None else policy
        dataset = questions() if dataset is None else dataset
        return make(policy, tokenizer, folder, dataset, structured.RolloutGRPOTrainer, **settings)

    return made


def pieces(tokenizer, rollout):
    """The runs of sampled (1) and given (0) tokens of a rollout, as text."""
    runs = groupby(zip(rollout.generated, rollout.ids), key=lambda pair: pair[0])
    return [(mark, tokenizer.decode([token for _, token in run])) for mark, run in runs]


def test_results_of_tools_stand_between_the_turns_and_are_not_trained_on(tokenizer, using):
    trainer = using()
    loss, gradients, rollouts, _ = one_step(trainer)
    [inputs] = trainer.generation_batch
    called = [rollout for rollout in rollouts if len(rollout.replies) > 1]
    assert called and len(called) < len(rollouts), "some rollouts call the tool and some do not"
    assert trainer.reward_func_names == ["answers", "Calculator"]
    for rollout, (answered, environment) in zip(rollouts, trainer.rewards.tolist()):
        text = tokenizer.decode(rollout.ids)
        assert environment == 0.5 * (CALL in text), "the reward of each rollout is that of its own environment"
        assert answered == (text.removesuffix("<|im_end|>").endswith(ANSWER) and not text.endswith(CALL + "<|im_end|>"))
    assert math.isfinite(loss) and any(g.abs().sum() > 0 for g in gradients.values())
    # The oracle: the loss of TRL's formula over the sampled tokens alone, from one forward per rollout.
    trainer.model.zero_grad()
    total = 0.0
    for place, index in enumerate(inputs["row"].tolist()):
        rollout = rollouts[index]
        for number, (mark, text) in enumerate(pieces(tokenizer, rollout)):
            assert mark == 1 - number % 2 and (mark or text == RESULT)
        mask = inputs["tool_mask"][place] * inputs["completion_mask"][place]
        assert mask.tolist()[: len(rollout.ids)] == rollout.generated
        ids = torch.tensor([rollout.prompt_ids + rollout.ids])
        logits = trainer.model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1]
        logps = logits.log_softmax(-1).gather(-1, torch.tensor(rollout.ids)[:, None])[:, 0]
        ratio = (logps - logps.detach()).exp()[torch.tensor(rollout.generated, dtype=torch.bool)]
        total = total - (ratio * inputs["advantages"][place]).mean() / len(rollouts)
    total.backward()
    assert loss == pytest.approx(total.item(), abs=1e-5)
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)


def calculate(expression: str) -> str:
    """
    Fail.

    Args:
        expression: An expression.
    """
    raise ValueError("out of order")


def test_a_failing_tool_tells_the_model_why_and_calls_are_limited(tokenizer, using):
    _, _, rollouts, _ = one_step(using(max_tool_calling_iterations=1, tools=[calculate]))
    assert max(len(rollout.replies) for rollout in rollouts) == 2
    texts = [text for rollout in rollouts for mark, text in pieces(tokenizer, rollout) if not mark]
    assert texts and all("{'error': 'out of order'}" in text for text in texts)


OF_RUN = ["datasets.0.name=null", "datasets.0.split=train", "micro_batch_size=16", "gradient_accumulation_steps=1"]
OF_RUN += ["trl.max_completion_length=300", "trl.max_tool_calling_iterations=2", "trl.log_completions=true"]
OF_RUN += ["warmup_steps=0", "gradient_checkpointing=false"]


def trained(folder, output, *overrides):
    """A run of grpo_tools.yaml on the small model, and its logs."""
    paths = [f"base_model={folder}", f"datasets.0.path={folder / 'rows.jsonl'}", f"output_dir={output}"]
    history = train(load_config(EXAMPLES / "grpo_tools.yaml", [*paths, *OF_RUN, *overrides])).trainer.state.log_history
    return [entry for entry in history if "rewards/Calculator/mean" in entry]


@pytest.mark.slow
def test_a_config_with_an_environment_trains_and_learns_to_call_it(folder, tmp_path):
    full = ("adapter=", "lora_r=", "lora_alpha=", "lora_target_linear=", "learning_rate=0.01", "max_steps=5")
    steps = trained(folder, tmp_path / "out", *full, "trl.reward_weights=[0.0]")
    assert steps[-1]["tools/call_frequency"] > steps[0]["tools/call_frequency"]
    assert steps[-1]["rewards/Calculator/mean"] > 0.4
    first = json.loads((tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()[0])
    assert set(first["samples"][0]["rewards"]) == {"answers", "Calculator"}
    replies = [sample["replies"] for sample in first["samples"]]
    assert any(len(turns) > 1 and CALL in turns[0] for turns in replies)


@pytest.mark.vllm
@pytest.mark.skipif(PYTHON is None, reason="EBFT_VLLM_PYTHON names no interpreter with vLLM")
def test_an_environment_over_vllm(folder, tmp_path):
    port = free_port()
    server = ("trl.use_vllm=true", "trl.vllm_mode=managed", f"vllm.python={PYTHON}", f"vllm.port={port}")
    steps = trained(folder, tmp_path / "out", *server, "vllm.max_model_len=1536", "vllm.dtype=float32", "max_steps=3")
    assert len(steps) == 3 and all(entry["tools/call_frequency"] > 0 for entry in steps)
    assert all(entry["sampling/logp_diff"] < 1e-3 for entry in steps)
    assert all(entry["rollouts/staleness"] == 0 for entry in steps)


def own_rollouts(prompts, trainer):
    """Two turns with a fixed remark between them."""
    tokenizer = trainer.processing_class
    texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts]
    prompt_ids = [tokenizer(text)["input_ids"] for text in texts]
    remark = tokenizer("go on\n")["input_ids"]
    first = trainer.sample(prompt_ids, max_tokens=5)
    second = trainer.sample([p + c.ids + remark for p, c in zip(prompt_ids, first)], max_tokens=3)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [a.ids + remark + b.ids for a, b in zip(first, second)],
        "logprobs": None,
        "env_mask": [[1] * len(a.ids) + [0] * len(remark) + [1] * len(b.ids) for a, b in zip(first, second)],
        "seen": [len(a.ids) for a in first],
    }


def test_a_rollout_function_samples_from_the_policy(using):
    seen_rewards = lambda completions, seen, **columns: [float(count) for count in seen]
    trainer = using(rollout_func=own_rollouts, reward_funcs=[seen_rewards])
    _, _, rollouts, _ = one_step(trainer)
    assert all(1 <= len(rollout.replies[0]) <= 5 and len(rollout.replies) == 2 for rollout in rollouts)
    assert trainer.rewards[:, 0].tolist() == [len(rollout.replies[0]) for rollout in rollouts]
    [inputs] = trainer.generation_batch
    for place, index in enumerate(inputs["row"].tolist()):
        generated = rollouts[index].generated
        assert inputs["tool_mask"][place].tolist()[: len(generated)] == generated and 0 in generated
    with pytest.raises(errors.RolloutError, match="rollout_func '<lambda>' failed: TypeError: list"):
        one_step(using(rollout_func=lambda prompts, trainer: []))


FINE = {"prompt_ids": [[5]] * 8, "completion_ids": [[6, 7]] * 8, "logprobs": None}
LOGPS = [[-1, -0.5]] * 7


@pytest.mark.parametrize(("change", "message"), [
    ({"answer": [1, 2]}, "2 answer for 8 prompts"),
    ({"env_mask": [[1, 1]] * 7 + [[1]]}, r"env_mask that do not have one entry per token .*\(prompt 7\)"),
    ({"env_mask": [[1, 1]] * 7 + [[0, 0]]}, r"without a sampled token \(prompt 7"),
    ({"env_mask": [[1, 0.5]] * 8}, "env_mask with other values than 0 and 1"),
    ({"logprobs": [[0.0]] * 8}, "logprobs that do not have one entry per token"),
    ({"logprobs": [*LOGPS, [0.0, 0.3]]}, r"logprobs that are not finite .* \(prompt 7\)"),
])  # fmt: skip
def test_wrong_results_of_a_rollout_function_are_named(change, message):
    with pytest.raises(errors.RolloutError, match=message):
        checked(lambda prompts, trainer: FINE | change)([[USER("x")]] * 8, Mock(use_vllm=False))


@pytest.mark.parametrize(("row", "message"), [
    ({"prompt": "text"}, "text prompts, but the chat template.* .environment_factory"),
    ({"prompt": [USER("x")], "remaining_turns": [USER("y"), USER("z")]}, "remaining_turns"),
])  # fmt: skip
def test_rows_whose_tools_or_turns_would_be_left_out_are_refused(using, row, message):
    with pytest.raises(errors.DataError, match=message):
        using(Dataset.from_list([row] * 8))


BASE = {"base_model": "x", "rl": "grpo", "micro_batch_size": 8, "max_steps": 1, "output_dir": "out"}
BASE |= {"datasets": [{"path": "x.jsonl", "type": "calculator.prompts"}]}
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 8, "lora_target_linear": True}
CALCULATOR = {"environment_factory": "calculator.Calculator"}


@pytest.mark.parametrize(("trl", "keys", "message"), [
    ({**CALCULATOR, "async_prefetch": True, "use_vllm": True}, LORA, "environment_factory is called between the s"),
    ({**CALCULATOR, "reward_num_workers": 2}, {}, "incompatible with trl.reward_num_workers: 2"),
    ({**CALCULATOR, "reward_funcs": ["feature_matching"]}, {}, "factory is incompatible with the feature-matching rew"),
    (CALCULATOR, {"fsdp": True}, "trl.environment_factory is incompatible with fsdp"),
])  # fmt: skip
def test_keys_that_exclude_tools(trl, keys, message):
    with pytest.raises(errors.ConfigError, match=message):
        check_runnable(RunConfig.from_dict({**BASE, "trl": trl, **keys}))


def test_evaluation_alone_does_not_run_tools(folder):
    held_out = [{"path": str(folder / "rows.jsonl"), "type": "calculator.prompts"}]
    given = {**BASE, "base_model": str(folder), "trl": CALCULATOR, "test_datasets": held_out}
    with pytest.raises(errors.ConfigError, match="samples completions without trl.environment_factory"):
        evaluate(RunConfig.from_dict(given))
