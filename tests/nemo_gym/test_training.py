"""Training with rewards of a resources server, through the public API."""

import json
import threading

import pytest

from ebft import train
from ebft.config.schema import RunConfig
from ebft.errors import RolloutError
from tests.nemo_gym.servers import row, slow, text_in

KEYS = {
    "rl": "grpo",
    "chat_template": "chatml",
    "trl": {
        "num_generations": 4,
        "max_completion_length": 8,
        "temperature": 1.0,
        "reward_funcs": ["nemo_gym_verify"],
        "log_completions": True,
        "loss_type": "dr_grpo",
        "scale_rewards": False,
    },
    "nemo_gym_enabled": True,
    "nemo_gym_auto_start": False,
    "nemo_gym_server_timeout": 5,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "save_steps": 1,
    "logging_steps": 1,
    "sequence_len": 64,
}


@pytest.fixture
def make(gym, write_rows, tiny_llama_dir, tmp_path):
    """`make(rows, **keys)`: a run on a tiny model whose rows are scored by the server `math`."""

    def config(rows=None, **changes):
        path = write_rows([row(f"say {number}") for number in range(4)] if rows is None else rows)
        own = {
            "base_model": str(tiny_llama_dir),
            "nemo_gym_head_port": gym.head.port,
            "nemo_gym_datasets": [{"path": str(path), "server_name": "math"}],
            "output_dir": str(tmp_path / "out"),
        }
        return RunConfig.from_dict({**KEYS, **own, **changes})

    return config


def samples(tmp_path):
    lines = (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line)["samples"] for line in lines]


def mean(values):
    return sum(values) / len(values)


def test_advantages_follow_the_rewards_of_the_server(gym, make, tmp_path):
    server = gym.resources("math", lambda body: len(text_in(body)) / 10)
    result = train(make())
    groups = samples(tmp_path)
    assert len(groups) == 6 and len(server.requests) == 24
    sent = sorted(len(text_in(body)) / 10 for body in server.requests)
    assert sorted(sample["rewards"]["nemo_gym_verify"] for group in groups for sample in group) == pytest.approx(sent)
    for group in groups:
        rewards = [sample["rewards"]["nemo_gym_verify"] for sample in group]
        advantages = [reward - mean(rewards) for reward in rewards]
        assert [sample["advantage"] for sample in group] == pytest.approx(advantages, abs=1e-5)
    assert result.metrics["reward"] == pytest.approx(
        mean([s["rewards"]["nemo_gym_verify"] for g in groups[-2:] for s in g])
    )
    assert result.metrics["nemo_gym/failed"] == 0


def test_other_rewards_train_another_model(gym, make, tmp_path):
    sign = 1.0
    gym.resources("math", lambda body: sign * len(text_in(body)))
    weights = []
    for sign in (1.0, -1.0, 1.0):  # noqa: B007 (the server reads it)
        model = train(
            make(output_dir=str(tmp_path / f"out{len(weights)}"), max_steps=1, save_strategy="no", save_steps=None)
        ).model
        weights.append(model.lm_head.weight.detach().clone())
    assert weights[0].equal(weights[2]) and not weights[0].equal(weights[1])


def test_a_completion_without_a_reward_is_left_out_of_the_baseline(gym, make, tmp_path):
    lock, count = threading.Lock(), [0]

    def reward(body):
        with lock:
            count[0] += 1
            return (422, {"detail": "no"}) if count[0] % 4 == 0 else float(count[0])

    gym.resources("math", reward)
    with pytest.warns(UserWarning, match="2 of 8 requests to NeMo Gym failed"):
        train(make(max_steps=1))
    left_out = 0
    for group in samples(tmp_path):
        rewards = [sample["rewards"]["nemo_gym_verify"] for sample in group]
        measured = [reward for reward in rewards if reward == reward and reward is not None]
        left_out += len(rewards) - len(measured)
        for sample, reward in zip(group, rewards):
            expected = reward - mean(measured) if reward in measured else 0.0
            assert sample["advantage"] == pytest.approx(expected, abs=1e-5)
    assert left_out == 2


@pytest.mark.slow
def test_a_server_that_dies_ends_the_run_and_the_checkpoint_stays(gym, make, tmp_path):
    server = gym.resources("math", lambda body: len(text_in(body)))
    answer = server.answer

    def dies(path, body):
        if len(server.requests) > 8:  # in the second step
            return None
        return answer(path, body)

    server.answer = dies
    with pytest.raises(
        RolloutError, match="All 8 requests.*math at http.*/verify.*resume training from the last checkpoint"
    ):
        train(make())
    checkpoint = tmp_path / "out" / "checkpoint-1"
    assert (checkpoint / "trainer_state.json").is_file() and not (tmp_path / "out" / "checkpoint-2").exists()
    server.answer = answer
    result = train(make(resume_from_checkpoint=str(checkpoint)))
    assert result.trainer.state.global_step == 3


def test_rows_go_to_their_servers(gym, make):
    math = gym.resources("math", lambda body: 1.0)
    other = gym.resources("other", lambda body: 0.0)
    meta = {"cases": [{"a": None}, {"b": [1]}]}
    rows = [row("one", meta=meta), row("two", agent_ref={"name": "other"}, meta={"x": "y"})] * 2
    train(make(rows, max_steps=1))
    prompts = lambda server: {body["responses_create_params"]["input"][0]["content"] for body in server.requests}
    assert prompts(math) | prompts(other) <= {"one", "two"} and prompts(math) <= {"one"} and prompts(other) <= {"two"}
    assert all(
        body["meta"] == (meta if body in math.requests else {"x": "y"}) for body in math.requests + other.requests
    )


def test_tools_without_an_agent_give_a_warning(gym, make):
    gym.resources("math", lambda body: 1.0)
    rows = [row("one"), row("two")]
    rows[1]["responses_create_params"]["tools"] = [{"type": "function", "name": "f"}]
    with pytest.warns(UserWarning, match="have tools, which are not part of the prompts of single replies"):
        train(make(rows, max_steps=1))


def test_an_unknown_server_is_an_error_before_the_model_is_loaded(gym, make):
    gym.resources("other", lambda body: 1.0)
    from ebft.errors import ConfigError

    with pytest.raises(ConfigError, match="no server 'math'. Servers: other"):
        train(make(base_model=make().base_model))


def test_evaluation_asks_the_server_too(gym, make):
    server = gym.resources("math", lambda body: len(text_in(body)))
    result = train(make(max_steps=1, val_set_size=1, eval_steps=1))
    assert len(server.requests) == 8 + 4 and result.metrics["eval_reward"] >= 0


def test_rewards_are_requested_at_the_same_time(gym, make):
    import time

    gym.resources("math", lambda body: slow(0.5, 1.0))
    began = time.monotonic()
    config = make(max_steps=1, save_strategy="no", save_steps=None)
    train(config)
    assert time.monotonic() - began < 8 * 0.5 + 15
