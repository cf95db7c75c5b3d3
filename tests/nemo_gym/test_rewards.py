"""Rewards of single replies, and token ids of agents' runs: which tokens were sampled, and in which context."""

import json

import pytest

from ebft.errors import RolloutError
from ebft.nemo_gym import rewards
from ebft.nemo_gym.client import Servers
from ebft.nemo_gym.rewards import Call, GymAgents, joined_calls, request_body
from tests.docs.blocks import ROOT, blocks_of
from tests.nemo_gym.servers import row, text_in


def call(client, replies, **more):
    given = {"nemo_gym_row": [json.dumps(row("?"))] * len(replies), "nemo_gym_server": ["math"] * len(replies), **more}
    return rewards.VerifyReward(client, client.servers(5.0))(prompts=replies, completions=replies, **given)


def test_each_row_is_scored_by_its_server(gym, client):
    gym.resources("math", lambda body: float(text_in(body) == body["answer"]))
    gym.resources("length", lambda body: len(text_in(body)) / 10)
    rows = {"nemo_gym_row": [json.dumps(row("?", answer="4"))] * 3, "nemo_gym_server": ["math", "length", "math"]}
    assert call(client, ["4", "abc", "5"], **rows) == [1.0, 0.3, 0.0]


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


def test_responses_without_a_reward_are_errors_unless_their_sample_could_not_be_measured(gym, client):
    gym.resources("math", lambda body: {"reward": None, "mask_sample": text_in(body) == "masked"})
    assert call(client, ["masked"]) == [None]
    with pytest.raises(RolloutError, match="math at .*/verify returned no finite reward"):
        call(client, ["a"])
    assert rewards.EnvironmentReward()(prompts=[], completions=[], rollout_reward=[0.5, None]) == [0.5, None]


SAMPLING = {"model": "ebft-1-step-3", "temperature": 0.8, "top_p": 1.0, "max_output_tokens": 16}


def item(prompt, ids, logps=None, kind="message", **changes):
    """An item of the output that ends a call of the model."""
    tokens = {"prompt_token_ids": prompt, "generation_token_ids": ids}
    tokens |= {"generation_log_probs": [-0.5] * len(ids) if logps is None else logps}
    text = {"type": "output_text", "text": "reply", "annotations": []}
    shape = {"type": kind, "role": "assistant", "id": "m", "content": [text]}
    if kind == "function_call":
        shape = {"type": kind, "name": "f", "arguments": "{}", "call_id": "1"}
    return {key: value for key, value in {**shape, **tokens, **changes}.items() if value is not None}


def tool():
    return {"type": "function_call_output", "call_id": "1", "output": "7"}


def run(gym, client, answers, rows=None):
    """The rollouts of one run per answer: `(output, reward)`, or the whole answer."""
    rows = [row(str(number)) for number in range(len(answers))] if rows is None else rows
    pending = {str(number): answer for number, answer in enumerate(answers)}

    def answer(body):
        found = pending[body["responses_create_params"]["input"][0]["content"]]
        is_output = isinstance(found, tuple) and isinstance(found[0], list)
        return {**body, "response": {"output": found[0]}, "reward": found[1]} if is_output else found

    gym.resources("tools", lambda body: 1.0)
    server = gym.agent("tools_simple_agent", answer)
    agents = GymAgents(client, client.servers(5.0))
    lines = [{"nemo_gym_row": json.dumps(given), "nemo_gym_server": "tools"} for given in rows]
    return agents.run(lines, SAMPLING), server


def test_tokens_between_replies_are_given(gym, client):
    output = [{"type": "reasoning", "id": "r", "summary": []}]  # ends with the next item
    output += [item([1, 2, 3], [10, 11], [-0.1, -0.2], kind="function_call"), tool()]
    output += [item([1, 2, 3, 10, 11, 4, 5, 6], [12], [-0.3])]
    [rollout], server = run(gym, client, [(output, 0.75)])
    assert (rollout.prompt_ids, rollout.ids) == ([1, 2, 3], [10, 11, 4, 5, 6, 12])
    assert rollout.generated == [1, 1, 0, 0, 0, 1]
    assert rollout.logps == [-0.1, -0.2, 0.0, 0.0, 0.0, -0.3]
    assert rollout.replies == [[10, 11], [12]] and rollout.reward == 0.75


def test_the_request_is_the_row_with_how_to_sample(gym, client):
    given = row("0", verifier_metadata={"a": [None, {"b": 1}]}, agent_ref={"name": "tools_simple_agent"})
    given["responses_create_params"] |= {"tools": [{"type": "function", "name": "f", "strict": True}], "model": "other"}
    _, server = run(gym, client, [([item([1], [2])], 1.0)], rows=[given])
    [body] = server.requests
    params = body["responses_create_params"]
    assert {name: params.pop(name) for name in SAMPLING} == SAMPLING
    del given["responses_create_params"]["model"]
    assert body == given
    short = json.dumps({"responses_create_params": {"input": "x", "max_output_tokens": 4}})
    assert request_body(short, SAMPLING)["responses_create_params"]["max_output_tokens"] == 4


@pytest.mark.parametrize(("calls", "parts"), [
    # An exact continuation, then a history without its first reply, which is itself continued.
    ([([1], [5]), ([1, 5, 2], [6]), ([1, 3], [7]), ([1, 3, 7], [8])], [[5, 2, 6], [7, 8]]),
    ([([1], [5, 6]), ([1, 56, 2], [7])], [[5, 6], [7]]),  # a reply that is tokenised anew
    ([([1], [5, 6]), ([1, 5], [7])], [[5, 6], [7]]),  # a context that ends within the reply
])  # fmt: skip
def test_a_rewritten_history_starts_a_new_part(calls, parts):
    found = joined_calls([Call(prompt, ids, [-0.5] * len(ids)) for prompt, ids in calls])
    assert [rollout.ids for rollout in found] == parts
    sampled = {token: prompt + ids[:index] for prompt, ids in calls for index, token in enumerate(ids)}
    for rollout in found:  # every trained token has the context that it was sampled in
        for index, (token, generated) in enumerate(zip(rollout.ids, rollout.generated)):
            assert not generated or rollout.prompt_ids + rollout.ids[:index] == sampled[token]


def test_the_part_with_the_most_sampled_tokens_is_kept_with_one_warning(gym, client):
    more_first = [item([1], [5, 6, 7]), tool(), item([1, 2], [8])]
    equal = [item([1], [5]), tool(), item([1, 2], [8])]
    with pytest.warns(UserWarning, match="tools_simple_agent does not continue the token ids") as caught:
        (first, last), _ = run(gym, client, [(more_first, 1.0), (equal, 0.0)])
    assert len([warning for warning in caught if warning.category is UserWarning]) == 1
    assert (first.prompt_ids, first.ids) == ([1], [5, 6, 7])
    assert (last.prompt_ids, last.ids) == ([1, 2], [8])  # the last of equal ones


NO_IDS = {"prompt_token_ids": None, "generation_token_ids": None, "generation_log_probs": None}


@pytest.mark.parametrize(("output", "error", "message"), [
    ([item([1], [2], **NO_IDS)], RolloutError, "has no generation_token_ids: set return_token_id_information: true"),
    ([item([1], [2], kind="function_call", **NO_IDS), tool(), item([1], [2])], RolloutError, "reply in .* has no gen"),
    ([item([1], [2, 3], [-1.0])], ValueError, "(?s)longer.*reading the response of the agent tools_simple_agent"),
])  # fmt: skip
def test_malformed_runs(gym, client, output, error, message):
    with pytest.raises(error, match=message):
        run(gym, client, [([*output], 1.0)])


def test_an_empty_reply_is_a_failed_run_and_not_an_error_of_the_setup(gym, client):
    empty = item([1], [2], content=[{"type": "output_text", "text": "", "annotations": []}], **NO_IDS)
    with pytest.warns(UserWarning, match="the conversation may exceed the server's max_model_len"):
        found, _ = run(gym, client, [([empty], 0.0), ([item([1], [2])], 1.0)])
    assert [rollout.reward for rollout in found] == [None, 1.0]
