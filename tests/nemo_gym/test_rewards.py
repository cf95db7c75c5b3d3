"""Rewards of single replies."""

import json

import pytest

from ebft.errors import RolloutError
from ebft.nemo_gym import rewards
from ebft.nemo_gym.client import Servers
from tests.docs.blocks import ROOT, blocks_of
from tests.nemo_gym.servers import row, text_in


def call(client, replies, rows, names, **more):
    reward = rewards.VerifyReward(client, client.servers(5.0))
    completions = [[{"role": "assistant", "content": reply}] for reply in replies]
    columns = {"nemo_gym_row": list(map(json.dumps, rows)), "nemo_gym_server": names, "completion_ids": [], **more}
    return reward(prompts=replies, completions=completions, **columns)


def test_each_row_is_scored_by_its_server(gym, client):
    math = gym.resources("math", lambda body: float(text_in(body) == body["answer"]))
    length = gym.resources("length", lambda body: len(text_in(body)) / 10)
    rows = [row("?", answer="4"), row("?"), row("?", answer="4")]
    assert call(client, ["4", "abc", "5"], rows, ["math", "length", "math"]) == [1.0, 0.3, 0.0]
    assert len(math.requests) == 2 and len(length.requests) == 1


def test_the_protocol_of_the_page_is_the_one_that_is_read():
    page = blocks_of(ROOT / "docs" / "nemo-gym.md")
    listed = next(block.code for block in page if block.title == "NeMo Gym: the servers")
    agent = Servers.parse("head", listed).agent("sums")
    assert (agent.name, agent.url) == ("sums_agent", "http://127.0.0.1:12002")
    verified, ran = (json.loads(block.code) for block in page if block.code.startswith('{"re'))
    assert verified.pop("response") == rewards.response_of("4", "BASE_MODEL")
    assert set(verified) == set(row("2 + 2?", answer=4))
    [conversation] = rewards.joined_calls(rewards.model_calls(ran, agent))
    assert (conversation.prompt_ids, conversation.ids) == ([5, 6], [11, 2, 7, 8, 9, 2])
    assert conversation.generated == [1, 1, 0, 0, 1, 1] and rewards.reward_in(ran, agent, "/run") == 1.0


def test_a_failed_request_gives_no_reward_and_one_warning(gym, client):
    gym.resources("math", lambda body: (400, {"detail": "bad"}) if text_in(body) == "no" else 1.0)
    metrics = {}
    reward = rewards.VerifyReward(client, client.servers(5.0))
    given = {"prompts": [1, 2], "completions": ["yes", "no"], "log_metric": metrics.__setitem__}
    given |= {"nemo_gym_row": [json.dumps(row("?"))] * 2, "nemo_gym_server": ["math"] * 2}
    message = "1 of 2 requests to NeMo Gym failed.*no reward.*math at http.*status 400"
    with pytest.warns(UserWarning, match=message) as caught:
        assert reward(**given) == [1.0, None]
        assert reward(**given) == [1.0, None]
    assert len([w for w in caught if w.category is UserWarning]) == 1 and metrics == {rewards.FAILED: 0.5}


def test_a_response_without_a_reward(gym, client):
    gym.resources("math", lambda body: {"reward": None})
    with pytest.raises(RolloutError, match="math at .*/verify has no finite number as `reward`"):
        call(client, ["a"], [row("?")], ["math"])


def test_a_sample_that_could_not_be_measured_has_no_reward_and_rewards_of_agents_are_passed_on(gym, client):
    gym.resources("math", lambda body: {"reward": None, "mask_sample": True})
    assert call(client, ["a"], [row("?")], ["math"]) == [None]
    assert rewards.EnvironmentReward()(prompts=[], completions=[], rollout_reward=[0.5, None]) == [0.5, None]
