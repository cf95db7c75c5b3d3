"""Training with rewards of resources servers, and on the runs of agents, which sample from a stand-in for vLLM."""

import json
import signal
import threading
from pathlib import Path

import pytest
import torch

from ebft import train
from ebft.errors import ConfigError, RolloutError
from ebft.run.checkpoints import newest_checkpoint
from ebft.structured.generation import Prefetcher
from tests.nemo_gym import agents, servers, stand_in_vllm
from tests.run.crash import before, run
from tests.structured.trainers import logged

TRL = {"num_generations": 4, "max_completion_length": 6, "temperature": 0.9, "log_completions": True}
KEYS = {"chat_template": "chatml", "nemo_gym_server_timeout": 5, "logging_steps": 1, "sequence_len": 64}
KEYS |= {"micro_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 2e-2}
KEYS |= {"save_steps": 1}
AGENTS = {"adapter": "lora", "lora_r": 4, "lora_alpha": 64, "lora_target_linear": True, "lr_scheduler": "constant"}
AGENTS |= {"nemo_gym_multi_turn": True}
SAMPLED = {"reward_funcs": ["nemo_gym_env"], "use_vllm": True, "vllm_server_timeout": 20}


@pytest.fixture
def vllm(tiny_llama_dir):
    made = stand_in_vllm.StandInVLLM(tiny_llama_dir)
    yield made
    made.stop()


@pytest.fixture
def agent(gym, vllm):
    gym.resources("tools", lambda body: 1.0)
    gym.model()
    made = agents.TwoReplies(vllm)
    made.endpoint = gym.agent("tools_simple_agent", made)
    return made


@pytest.fixture
def make_plain(gym, write_rows, tiny_llama_dir, tmp_path):
    """`make_plain(trl, rows, server, **keys)`: a run on a tiny model whose rows are scored by that server."""

    def config(trl, rows, server, **changes):
        own = {"base_model": str(tiny_llama_dir), "output_dir": str(tmp_path / "out"), "trl": {**TRL, **trl}}
        own |= {"nemo_gym_head_port": gym.head.port}
        return servers.config_of({"path": str(write_rows(rows)), "server_name": server}, **{**KEYS, **own, **changes})

    return config


@pytest.fixture
def make(make_plain, vllm):
    """`make(trl, **keys)`: a run on the conversations of agents."""
    rows = [servers.row(f"say {number}", meta={"x": [None, number]}) for number in range(8)]
    own = {**SAMPLED, "vllm_server_port": vllm.port}
    return lambda trl=None, **changes: make_plain({**own, **(trl or {})}, rows, "tools", **{**AGENTS, **changes})


def test_advantages_follow_the_rewards_of_the_server_of_each_row(gym, make_plain, tmp_path):
    sent = []

    def reward(body, more=0):
        sent.append(more + len(servers.text_in(body)) / 10)
        return sent[-1]

    math, other = gym.resources("math", reward), gym.resources("other", lambda body: reward(body, more=5))
    meta = {"cases": [{"a": None}, {"b": [1]}]}
    rows = [servers.row("one", meta=meta), servers.row("two", agent_ref={"name": "other"}, meta={"x": "y"})] * 3
    rows[1]["responses_create_params"]["tools"] = [{"type": "function", "name": "f"}]
    with pytest.warns(UserWarning, match="have tools, which are not part of the prompts of single replies"):
        trl = {"reward_funcs": ["nemo_gym_verify"], "loss_type": "dr_grpo", "scale_rewards": False}
        result = train(make_plain(trl, rows, "math", max_steps=2, val_set_size=1, eval_steps=2))
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


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False], ids=["prefetched", "in step"])
def test_every_batch_is_sampled_from_its_version_of_the_policy(agent, make, vllm, ahead, tmp_path):
    steps = {"max_steps": 4} if ahead else {"val_set_size": 1, "eval_steps": 3}
    trainer = train(make({"async_prefetch": ahead, "scale_rewards": False}, **steps)).trainer
    # The trainer's log-probabilities under the version of each batch are those that the server reported.
    assert logged(trainer, "rollouts/staleness") == ([0, 1, 1, 1] if ahead else [0] * 3)
    assert max(logged(trainer, "sampling/logp_diff")) < 1e-4
    assert all(Path(folder).name == version for folder, version in agent.seen)
    assert len({version for _, version in agent.seen}) == (3 if ahead else 4)
    assert vllm.adapters == {}  # also without the fixed name
    assert all(body["meta"]["x"][0] is None for body in agent.endpoint.requests)
    if not ahead:
        assert logged(trainer, "eval_reward")[0] > 0 and len(agent.seen) == 3 * 8 + 4
        return
    assert logged(trainer, "sampling/sampling_logp_difference/max")[-1] > 1e-3, "outdated weights were in use"
    for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines():
        samples = json.loads(line)["samples"]
        rewards = [sample["rewards"]["nemo_gym_env"] for sample in samples]
        assert {round(reward, 5) for reward in rewards} <= {number / 10 for number in range(11)}
        expected = [reward - sum(rewards) / len(rewards) for reward in rewards]
        assert [sample["advantage"] for sample in samples] == pytest.approx(expected, abs=1e-5)
    assert logged(trainer, "rewards/nemo_gym_env/mean")[-1] > 0
    check_masks(trainer)


def check_masks(trainer):
    """Tokens of tools are not trained on."""
    expected, seen = {}, 0
    for rollout in trainer.rollouts:
        first, second = (len(reply) for reply in rollout.replies)
        assert rollout.ids[first : first + len(agents.TOOL)] == agents.TOOL
        expected[tuple(rollout.ids)] = [1] * first + [0] * len(agents.TOOL) + [1] * second
    for batch in trainer.generation_batch:
        mask = batch["completion_mask"] * batch["tool_mask"]
        for ids, real, trained in zip(batch["completion_ids"], batch["completion_mask"].bool(), mask):
            assert trained[real].tolist() == expected[tuple(ids[real].tolist())]
            assert not trained[~real].any()
            seen += 1
    assert seen == 8
    # The loss does not depend on the log-probabilities of given tokens.
    batch = dict(trainer.generation_batch[0])
    batch["advantages"] = torch.ones_like(batch["advantages"])
    changed = batch | {"old_per_token_logps": batch["old_per_token_logps"] + 3 * (1 - batch["tool_mask"])}
    losses = [trainer.compute_loss(trainer.model, given).item() for given in (batch, changed)]
    assert losses[0] == losses[1] != 0


def test_failed_runs_are_left_out(agent, make):
    lock, count = threading.Lock(), [0]

    def fails(body):
        with lock:
            count[0] += 1
            return (422, {"detail": "no"}) if count[0] % 4 == 0 else None

    agent.before = fails
    with pytest.warns(UserWarning, match="2 of 8 requests to NeMo Gym failed, and their completions are left out"):
        result = train(make(max_steps=1))
    failed = [rollout for rollout in result.trainer.rollouts if rollout.reward is None]
    assert len(failed) == 2 and all(sum(rollout.generated) == 0 for rollout in failed)
    masks = [(batch["completion_mask"] * batch["tool_mask"]).sum(1) for batch in result.trainer.generation_batch]
    empty = torch.cat(masks) == 0
    assert result.metrics["nemo_gym/failed"] == 0.25 and empty.sum() == 2
    assert not torch.cat([batch["advantages"] for batch in result.trainer.generation_batch])[empty].any()


@pytest.mark.slow
def test_agents_that_die_end_the_run_and_the_checkpoint_stays(agent, make, tmp_path, vllm):
    agent.before = lambda body: (500, {"detail": "died"}) if len(agent.seen) >= 16 else None
    with pytest.raises(RolloutError, match="All 8 requests.*tools_simple_agent at http://.*/run: status 500"):
        train(make({"async_prefetch": True}, max_steps=6))
    checkpoint = tmp_path / "out" / "checkpoint-1"
    assert (checkpoint / "trainer_state.json").is_file() and vllm.adapters == {}
    agent.before = lambda body: None
    result = train(make({"async_prefetch": True}, resume_from_checkpoint=str(checkpoint)))
    assert result.trainer.state.global_step == 3


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_prefetches_is_resumed(agent, make, tmp_path, vllm):
    config = make({"async_prefetch": True}, auto_resume_from_checkpoints=True)
    assert run(config, before(Prefetcher, "result", 3)).code == -signal.SIGKILL
    assert newest_checkpoint(tmp_path / "out").name == "checkpoint-2"
    trainer = train(config).trainer
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3]
    assert logged(trainer, "rollouts/staleness") == [0, 1, 0]


def test_a_model_server_that_requests_the_base_model_is_an_error_before_training(gym, agent, make):
    gym.model(model="tiny")
    with pytest.raises(ConfigError, match="requests the model 'tiny', which is not trained. Set model: ebft-policy"):
        train(make())
    assert agent.seen == []


def test_an_agent_that_samples_from_other_weights_is_noticed(agent, make, vllm):
    """With the name of the base model in place of the policy's, log-probabilities are those of other weights."""
    sample = vllm.sample
    vllm.sample = lambda name, *rest: sample(vllm.folder, *rest)
    with pytest.raises(RolloutError, match="should have sampled this batch from the adapter"):
        train(make({"vllm_logp_diff_stop": 0.02}, learning_rate=0.1, max_steps=6))


@pytest.mark.slow
def test_a_restarted_vllm_server_gets_both_names_again(agent, make, vllm):
    publish = vllm.v1_load_lora_adapter

    def load(body):
        found = publish(body)
        if len(vllm.loaded) == 3:  # the second version has just been loaded: all adapters are lost
            vllm.adapters = {body["lora_name"]: body["lora_path"]}
        return found

    vllm.v1_load_lora_adapter = load
    assert max(logged(train(make(max_steps=2)).trainer, "sampling/logp_diff")) < 1e-4
