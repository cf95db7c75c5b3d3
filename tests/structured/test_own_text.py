"""A model trained on its own completions stays as it is: the twin of tests/strided/test_own_text.py."""

import copy

import pytest
import torch
from datasets import Dataset

from tests.strided.families import tiny_model
from tests.structured.trainers import make

LETTERS, PROMPTS = "abcd", ("abx", "cx", "dadx")


def small_model(tokenizer):
    """A model that writes letters and then the end token; its bias on the logits says what is learned of each.

    It never ends after a prompt, since rows without a reference are dropped.
    """
    model = tiny_model("gptj", vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, pad_token_id=None)
    ids = tokenizer(LETTERS, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        model.lm_head.bias.fill_(-100.0)
        model.lm_head.bias[[*ids, tokenizer.eos_token_id]] = 0.0
    ended = lambda text: next_token(model, torch.tensor([tokenizer(text)["input_ids"]]))[tokenizer.eos_token_id].log()
    optimizer = torch.optim.Adam([model.lm_head.weight], lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        at_first = torch.stack([ended(prompt) for prompt in PROMPTS]).exp().sum().log()
        later = torch.stack([ended(prompt + text) for prompt in PROMPTS for text in ("a", "bc", "dacb")])
        ((at_first + 12).relu() + (later + 2).square().mean()).backward()
        optimizer.step()
    assert at_first < -10
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def next_token(model, ids):
    return model(input_ids=ids, use_cache=False).logits[0, -1].softmax(-1)


@torch.no_grad()
def own_text(model, tokenizer, prompt, generator, longest):
    """A completion by a plain loop."""
    ids, written = tokenizer(prompt)["input_ids"], []
    while len(written) < longest:
        token = torch.multinomial(next_token(model, torch.tensor([ids + written])), 1, generator=generator).item()
        if token == tokenizer.eos_token_id:
            break
        written.append(token)
    return tokenizer.decode(written)


def deviations(tokenizer, folder, batches, prompts, longest=60, **options):
    """The mean gradient of the bias of letters and end, in standard errors; of the end first."""
    model = small_model(tokenizer)
    frozen, generator = copy.deepcopy(model).eval(), torch.Generator().manual_seed(0)
    asked = [PROMPTS[number % len(PROMPTS)] for number in range(batches * prompts)]
    texts = [own_text(frozen, tokenizer, prompt, generator, longest) for prompt in asked]
    data = Dataset.from_list([{"prompt": prompt, "ground_truth": text} for prompt, text in zip(asked, texts)])
    settings = {"num_generations": 4, "per_device_train_batch_size": 4 * prompts, "temperature": 1.0, "seed": 1}
    settings |= {"embed_method": "last_token", "feature_layers": [0.0, 1.0], "max_completion_length": 40}
    trainer = make(model, tokenizer, folder, data, **{**settings, **options})
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    ids = [tokenizer.eos_token_id, *tokenizer(LETTERS, add_special_tokens=False)["input_ids"]]
    gradients = []
    for batch in trainer.get_train_dataloader():
        model.zero_grad()
        trainer.compute_loss(model, trainer._prepare_inputs(batch)).backward()
        trainer._step += 1
        gradients.append(model.lm_head.bias.grad[ids].double())
    found = torch.stack(gradients)
    return found.mean(0) / (found.std(0) / len(found) ** 0.5)


CUT = {"max_completion_length": 6, "embed_method": "mean_pooling"}
BY_REFERENCES = {"gt_length_floor": 1, "gt_length_multiplier": 1.0, "embed_method": "completion_mean"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [CUT, {**BY_REFERENCES, "max_completion_length": 60}])
def test_the_expected_gradient_is_zero(chat_tokenizer, tmp_path, options):
    """With limits that cut samples: references are cut with them, and each limit is that of all samples."""
    found = deviations(chat_tokenizer, tmp_path, 20, 32, **options)
    assert found.abs().max() < 4, found
