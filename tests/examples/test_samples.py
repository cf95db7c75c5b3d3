"""The completions that the quickstart shows: each is what the model writes greedily after its own prompt."""

import pytest
import torch

from ebft.tools.quickstart.measure import HeldOutPrompt, greedy_completions
from tests.strided.families import tiny_model
from tests.strided.test_exactness import with_lora

END, PAD, LONGEST = 5, 0, 12


class Numbers:
    """A tokenizer whose text is the ids themselves."""

    eos_token_id, pad_token_id = END, PAD

    def decode(self, ids):
        return " ".join(map(str, ids))


@torch.no_grad()
def written_alone(model, ids, end=END):
    """Greedy continuation up to and including `end`: a forward pass over the whole text for each token."""
    text = list(ids)
    while len(text) < len(ids) + LONGEST and (len(text) == len(ids) or text[-1] != end):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return " ".join(map(str, text[len(ids) :]))


@pytest.mark.parametrize("adapted", [lambda model: model, with_lora])
def test_prompts_of_unequal_lengths_are_completed_as_if_alone(adapted):
    torch.manual_seed(0)
    model = adapted(tiny_model("llama")).eval()
    prompts = [HeldOutPrompt(ids, []) for ids in ([7, 8, 9, 10, 11, 12, 13], [3, 14], [20, 21, 22, 4])]
    expected = [written_alone(model, prompt.ids) for prompt in prompts]
    assert len(set(expected)) == 3
    assert greedy_completions(model, Numbers(), prompts, LONGEST) == expected


def test_a_completion_ends_with_the_first_end_token():
    torch.manual_seed(0)
    model = tiny_model("llama").eval()
    prompts = [HeldOutPrompt([7, 8, 9], []), HeldOutPrompt([20, 21], [])]
    end = int(written_alone(model, prompts[0].ids).split()[3])

    class Ending(Numbers):
        eos_token_id = end

    expected = [written_alone(model, prompt.ids, end) for prompt in prompts]
    assert len(expected[0].split()) <= 4 < len(expected[1].split())  # the first row is padded
    assert greedy_completions(model, Ending(), prompts, LONGEST) == expected
