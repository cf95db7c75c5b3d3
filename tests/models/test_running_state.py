"""SFT and DPO of models whose layers keep a running state: padded rows against one forward pass for each sequence."""

import warnings

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from ebft.models.load import load_model, load_model_config
from ebft.models.tokenizer import load_tokenizer
from ebft.run.trainer import build_trainer, training_arguments
from ebft.run.training import load_data
from tests.golden.runs import sentence
from tests.preferences.runs import config_of, write_inputs
from tests.strided.families import RUNNING_STATE, tiny_model
from tests.strided.test_exactness import compare_gradients
from tests.structured.conftest import make_chat_tokenizer

FAST = ("qwen3_5_text", "nemotron_h")
FAMILIES = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in RUNNING_STATE]
PADS_RIGHT_ONLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("recurrent_gemma", "minimax")]


def trainer_of(family, method, folder):
    """A trainer without an adapter, and its rows, of unequal lengths."""
    texts = [(number, (2 + number % 3, 0), (2 + number % 4, 3), (1 + number % 3, 7)) for number in range(4)]
    names = ("question", "chosen", "rejected")
    write_inputs(folder, [
        {name: sentence(number + offset, words) for name, (words, offset) in zip(names, fields)}
        for number, *fields in texts
    ])  # fmt: skip
    model = tiny_model(family, vocab_size=len(make_chat_tokenizer()), max_position_embeddings=256, eos_token_id=1)
    model.save_pretrained(folder / "model")
    fields = {"field_instruction": "question", "field_output": "chosen", "format": "{instruction} "}
    datasets = [{"path": str(folder / "rows.jsonl"), "type": "chatml.intel" if method == "dpo" else fields}]
    config = config_of(method, folder, adapter=False, datasets=datasets, micro_batch_size=4)
    with warnings.catch_warnings(action="ignore"):
        tokenizer = load_tokenizer(config)
        data, held_out = load_data(config, tokenizer, load_model_config(config))
        args = training_arguments(config, rows=len(data), has_eval=False)
        trainer = build_trainer(config, args, load_model(config, tokenizer), tokenizer, data, held_out)
    return trainer, [trainer.train_dataset[index] for index in range(4)]


def check(trainer, rows, expected_loss):
    """Compare the loss of one batch and its gradient with `expected_loss(model)`."""
    plain = AutoModelForCausalLM.from_config(trainer.model.config)  # TRL has changed the methods of the trainer's
    plain.load_state_dict(trainer.model.state_dict())
    plain.eval()
    trainer.model.train()
    inputs = trainer._prepare_inputs(trainer.data_collator(rows))
    loss = trainer.compute_loss(trainer.model, inputs)
    wanted = expected_loss(plain)
    torch.testing.assert_close(loss.detach(), wanted.detach(), atol=1e-4, rtol=1e-4)
    loss.backward()
    wanted.backward()
    compare_gradients(trainer.model, plain)


@pytest.mark.parametrize("family", FAMILIES + PADS_RIGHT_ONLY)
def test_sft(family, tmp_path):
    trainer, rows = trainer_of(family, None, tmp_path)
    assert len({len(row["input_ids"]) for row in rows}) > 1

    def loss(model):
        total, count = 0.0, 0
        for row in rows:
            logits = model(torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits, torch.tensor(row["labels"][1:]), reduction="sum")
            count += sum(label != -100 for label in row["labels"][1:])
        return total / count

    check(trainer, rows, loss)


@pytest.mark.parametrize("family", FAMILIES + PADS_RIGHT_ONLY)
def test_dpo(family, tmp_path):
    trainer, rows = trainer_of(family, "dpo", tmp_path)
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight.mul_(1.05)  # no longer the reference model
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()

    def logp(model, prompt, completion):
        logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).sum()

    def loss(model):
        losses = []
        for row in rows:
            chosen, rejected = (
                logp(model, row["prompt_ids"], ids) - logp(base, row["prompt_ids"], ids).detach()
                for ids in (row["chosen_ids"], row["rejected_ids"])
            )
            losses.append(-F.logsigmoid(trainer.beta * (chosen - rejected)))
        return torch.stack(losses).mean()

    check(trainer, rows, loss)
