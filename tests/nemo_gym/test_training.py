"""Training with rewards of a resources server, through the public API."""

import json

import pytest

from ebft import train
from tests.nemo_gym.servers import config_of, row, text_in

TRL = {"num_generations": 4, "max_completion_length": 8, "temperature": 1.0, "reward_funcs": ["nemo_gym_verify"]}
TRL |= {"log_completions": True, "loss_type": "dr_grpo", "scale_rewards": False}
KEYS = {"chat_template": "chatml", "trl": TRL, "nemo_gym_server_timeout": 5, "sequence_len": 64, "logging_steps": 1}
KEYS |= {"micro_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1, "learning_rate": 1e-2}


@pytest.fixture
def make(gym, write_rows, tiny_llama_dir, tmp_path):
    """`make(rows, **keys)`: a run on a tiny model whose rows are scored by the server `math`."""

    def config(rows=None, **changes):
        path = write_rows([row(f"say {number}") for number in range(4)] if rows is None else rows)
        own = {"base_model": str(tiny_llama_dir), "nemo_gym_head_port": gym.head.port}
        own |= {"output_dir": str(tmp_path / "out"), "save_steps": 1}
        return config_of({"path": str(path), "server_name": "math"}, **{**KEYS, **own, **changes})

    return config


def test_advantages_follow_the_rewards_of_the_server_of_each_row(gym, make, tmp_path):
    sent = []

    def reward(body, more=0):
        sent.append(more + len(text_in(body)) / 10)
        return sent[-1]

    math, other = gym.resources("math", reward), gym.resources("other", lambda body: reward(body, more=5))
    meta = {"cases": [{"a": None}, {"b": [1]}]}
    rows = [row("one", meta=meta), row("two", agent_ref={"name": "other"}, meta={"x": "y"})] * 3
    rows[1]["responses_create_params"]["tools"] = [{"type": "function", "name": "f"}]
    with pytest.warns(UserWarning, match="have tools, which are not part of the prompts of single replies"):
        result = train(make(rows, max_steps=2, val_set_size=1, eval_steps=2))
    for server, prompt, of_rows in ((math, "one", meta), (other, "two", {"x": "y"})):
        assert {body["responses_create_params"]["input"][0]["content"] for body in server.requests} == {prompt}
        assert all(body["meta"] == of_rows for body in server.requests)
    rewards = []
    for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines():
        samples = json.loads(line)["samples"]
        given = [sample["rewards"]["nemo_gym_verify"] for sample in samples]
        expected = [reward - sum(given) / len(given) for reward in given]
        assert [sample["advantage"] for sample in samples] == pytest.approx(expected, abs=1e-5)
        rewards += given
    assert len(rewards) == 16 and len(math.requests + other.requests) == 16 + 4  # four are of the evaluation
    assert sorted(rewards) == pytest.approx(sorted(sent[:16]))
    steps = [entry for entry in result.trainer.state.log_history if "reward" in entry]
    assert [entry["reward"] for entry in steps] == pytest.approx([sum(rewards[:8]) / 8, sum(rewards[8:]) / 8])
    assert result.metrics["nemo_gym/failed"] == 0 and result.metrics["eval_reward"] > 0
