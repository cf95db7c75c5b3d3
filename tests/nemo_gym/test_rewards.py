"""Rewards of single replies."""

import json

import pytest

from ebft.errors import RolloutError
from ebft.nemo_gym import rewards
from ebft.nemo_gym.client import Servers
from tests.docs.blocks import ROOT, blocks_of
from tests.nemo_gym.servers import row, text_in


def call(client, replies, **more):
    given = {"nemo_gym_row": [json.dumps(row("?"))] * len(replies), "nemo_gym_server": ["math"] * len(replies), **more}
    return rewards.VerifyReward(client, client.servers(5.0))(prompts=replies, completions=replies, **given)


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


def test_a_failed_request_gives_no_reward_and_a_warning(gym, client):
    gym.resources("math", lambda body: (400, {"detail": "bad"}) if text_in(body) == "no" else 1.0)
    metrics = {}
    message = "1 of 2 requests to NeMo Gym failed.*no reward.*math at http.*status 400"
    with pytest.warns(UserWarning, match=message):
        assert call(client, ["yes", "no"], log_metric=metrics.__setitem__) == [1.0, None]
    assert metrics == {rewards.FAILED: 0.5}


def test_a_response_without_a_reward(gym, client):
    gym.resources("math", lambda body: {"reward": None})
    with pytest.raises(RolloutError, match="math at .*/verify has no finite number as `reward`"):
        call(client, ["a"])


def test_a_sample_that_could_not_be_measured_has_no_reward_and_rewards_of_agents_are_passed_on(gym, client):
    gym.resources("math", lambda body: {"reward": None, "mask_sample": True})
    assert call(client, ["a"]) == [None]
    assert rewards.EnvironmentReward()(prompts=[], completions=[], rollout_reward=[0.5, None]) == [0.5, None]
