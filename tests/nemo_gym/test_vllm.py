"""Agents that sample from the real vLLM, whose interpreter EBFT_VLLM_PYTHON names (make test-vllm)."""

import json
from pathlib import Path

import httpx2
import pytest
from transformers import AutoTokenizer

from ebft import load_config, train
from tests.nemo_gym import agents, servers
from tests.structured.test_vllm import AGREE, PYTHON, base, port, write_config  # noqa: F401 - fixtures

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(PYTHON is None, reason="EBFT_VLLM_PYTHON names no interpreter")]


class VLLM:
    """The server, as `TwoReplies` uses it."""

    def __init__(self, base, port):  # noqa: F811
        self.tokenizer, self.url = AutoTokenizer.from_pretrained(base), f"http://127.0.0.1:{port}"

    def answer(self, path, body):
        response = httpx2.post(self.url + path, json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    @property
    def adapters(self):
        models = httpx2.get(self.url + "/v1/models").json()["data"]
        return {entry["id"]: entry["root"] for entry in models if entry.get("parent")}


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "prefetched"])
def test_agents_sample_from_their_version_of_the_policy(base, port, tmp_path, gym, ahead):  # noqa: F811
    vllm = VLLM(base, port)
    agent = agents.TwoReplies(vllm)
    gym.resources("tools", lambda body: 1.0)
    gym.model()
    gym.agent("tools_simple_agent", agent)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(servers.row(f"def f{number}(x):")) + "\n" for number in range(24)))
    datasets = json.dumps([{"path": str(rows), "server_name": "tools"}])
    overrides = ["rl=grpo", "ebft=", "trl.reward_funcs=[nemo_gym_env]", "chat_template=chatml", "datasets="]
    overrides += [f"trl.async_prefetch={ahead}".lower(), "nemo_gym_enabled=true", "nemo_gym_auto_start=false"]
    overrides += ["nemo_gym_multi_turn=true", f"nemo_gym_head_port={gym.head.port}", f"nemo_gym_datasets={datasets}"]
    overrides += ["val_set_size=", "eval_steps=", "max_steps=5", "learning_rate=0.02"]
    config = load_config(write_config(tmp_path, base, port), overrides)
    history = train(config).trainer.state.log_history
    steps = [entry for entry in history if "loss" in entry]
    assert [entry["rollouts/staleness"] for entry in steps] == ([0, 1, 1, 1, 1] if ahead else [0] * 5)
    assert max(entry["sampling/logp_diff"] for entry in steps) < AGREE
    if ahead:  # the versions differ by more than that
        assert max(entry["sampling/sampling_logp_difference/max"] for entry in steps) > AGREE
    assert len(agent.seen) >= 5 * 16 and all(Path(folder).name == version for folder, version in agent.seen)
    assert vllm.adapters == {}
