"""Turn by turn: what each reply is conditioned on, which tokens were sampled, and how long replies may be."""

import pytest

from ebft.data.conversation import Conversation, Turn
from ebft.errors import DataError
from ebft.structured.rollouts.turns import Completion, Limits, ReferenceLimit, roll_out

END = 9


class Scripted:
    """Answers every context with the next of the given replies, and notes what it was asked."""

    def __init__(self, *replies):
        self.replies, self.asked = list(replies), []

    def generate(self, prompts, max_tokens):
        self.asked.append((prompts, max_tokens))
        replies = [self.replies.pop(0) for _ in prompts]
        return [Completion(ids, [-float(token) for token in ids]) for ids in replies]


def talk(*turns):
    ended = lambda lead: next((place + 1 for place, token in enumerate(lead) if token == END), 0)
    return Conversation([Turn(lead, [0] * length, ended(lead)) for lead, length in turns], turns[0][0])


def test_each_reply_follows_all_that_was_said():
    conversations = [talk(([1, 2], 4)), talk(([3], 2), ([END, 4], 3), ([END, 5], 1))]
    backend = Scripted([6, END], [7, 7], [8, END], [6])
    limits = Limits(max_completion_length=6, max_length=None)
    first, second = roll_out(backend, conversations, limits, {END})
    assert backend.asked == [
        ([[1, 2], [3]], [6, 6]),
        ([[3, 7, 7, END, 4]], [6]),  # a cut reply is ended for it
        ([[3, 7, 7, END, 4, 8, END, 5]], [6]),  # one that ended is not ended twice
    ]
    assert (first.ids, first.generated, first.logps) == ([6, END], [1, 1], [-6.0, -9.0])
    assert second.ids == [7, 7, END, 4, 8, END, 5, 6]
    assert second.generated == [1, 1, 0, 0, 1, 1, 0, 1]
    assert second.logps == [-7.0, -7.0, 0.0, 0.0, -8.0, -9.0, 0.0, -6.0]
    assert second.replies == [[7, 7], [8, END], [6]]


@pytest.mark.parametrize(("factor", "floor", "longest", "wanted"), [
    (1.5, 1, 3, 5), (0.1, 1, 3, 1), (2, 1, 50, 10), (1.5, 1, None, 10), (1.5, 7, 3, 7), (1.5, 64, 3, 10)])  # fmt: skip
def test_limits_of_a_reply(factor, floor, longest, wanted):
    assert ReferenceLimit(factor, floor).of(longest, 10) == wanted


def test_the_room_limits_replies_and_conversations():
    backend = Scripted([7, 7])
    limits = Limits(max_completion_length=4, max_length=6)
    [rollout] = roll_out(backend, [talk(([1, 2], 2), ([END, 3], 2))], limits, {END})
    assert backend.asked == [([[1, 2]], [4])] and rollout.ids == [7, 7]  # 2 + 2 + 2 leave nothing to say
    backend = Scripted([7])
    roll_out(backend, [talk(([1, 2], 2))], Limits(8, 5), {END})
    assert backend.asked[0][1] == [3]
    with pytest.raises(DataError, match="a prompt of 6 tokens leaves no space for a completion within .* 6 tokens"):
        roll_out(Scripted(), [talk(([1] * 6, 2))], Limits(4, 6), {END})


def test_a_reply_that_ended_itself_is_not_ended_again():
    """Templates may put a space before the end of turn, or end turns with another token than the policy did."""
    lead = [3, END, 4]
    for last, wanted in ((END, [1, 7, END, 4]), (8, [1, 7, 8, 4]), (5, [1, 7, 5, 3, END, 4])):
        backend = Scripted([7, last], [6])
        roll_out(backend, [talk(([1], 9), (lead, 9))], Limits(9, None), {END, 8})
        assert backend.asked[1][0] == [wanted]
