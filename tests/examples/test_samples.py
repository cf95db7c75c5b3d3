"""The completions that the quickstart shows: each is what the model writes greedily after its own prompt."""

import torch

from ebft.quickstart.samples import Prompt, complete
from tests.strided.families import tiny_model

END, PAD, LONGEST = 5, 0, 12


class Numbers:
    """A tokenizer whose text is the ids themselves."""

    eos_token_id, pad_token_id = END, PAD

    def decode(self, ids):
        return " ".join(map(str, ids))


@torch.no_grad()
def written_alone(model, ids):
    """Greedy continuation up to and including END: a forward pass over the whole text for each token."""
    text = list(ids)
    while len(text) < len(ids) + LONGEST and (len(text) == len(ids) or text[-1] != END):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return " ".join(map(str, text[len(ids) :]))


def test_prompts_of_unequal_lengths_are_completed_as_if_alone():
    torch.manual_seed(0)
    model = tiny_model("llama").eval()
    prompts = [Prompt(ids, []) for ids in ([7, 8, 9, 10, 11, 12, 13], [3, 14], [20, 21, 22, 4])]
    expected = [written_alone(model, prompt.ids) for prompt in prompts]
    assert complete(model, Numbers(), prompts, LONGEST) == expected


def test_a_completion_ends_with_the_first_end_token():
    torch.manual_seed(0)
    model = tiny_model("llama").eval()
    prompts = [Prompt([7, 8, 9], []), Prompt([20, 21], [])]
    last = [int(text.split()[3]) for text in (written_alone(model, prompt.ids) for prompt in prompts)]

    class Ending(Numbers):
        eos_token_id = last[0]

    texts = complete(model, Ending(), prompts, LONGEST)
    assert texts[0].split().index(str(last[0])) == len(texts[0].split()) - 1 < LONGEST - 1
    assert len(texts) == 2
