"""A short run for test_distributed.py: `python -m tests.structured.short_run OUT.pt KEY=VALUE...`, also in torchrun."""

import sys

import torch

from ebft import EBFTTrainer
from ebft.cli.train import leave_process_group
from ebft.structured.rollouts.backend import Completion
from tests.structured.conftest import chat_model, lora, make_chat_tokenizer
from tests.structured.trainers import arguments, rows


class FromThePrompt:
    """Completions that depend on the prompt and the sample's number alone, however they are spread over processes."""

    def generate(self, prompts, max_tokens):
        completions, number = [], 0
        for index, (prompt, limit) in enumerate(zip(prompts, max_tokens)):
            number = number + 1 if index and prompt == prompts[index - 1] else 0
            generator = torch.Generator().manual_seed(sum(prompt) * 31 + len(prompt) * 7 + number)
            length = int(torch.randint(1, limit + 1, (), generator=generator))
            completions.append(Completion(torch.randint(4, 260, (length,), generator=generator).tolist(), None))
        return completions


class Trainer(EBFTTrainer):
    def _backend(self):
        return FromThePrompt()


def main(path, *options):
    given = {name: int(value) for name, value in (option.split("=") for option in options)}
    tokenizer = make_chat_tokenizer()
    args = arguments(path + ".dir", max_steps=3, ce_coef=0.3, learning_rate=1e-3, use_whitening=True, **given)
    # One turn: a later turn's prompts differ within a group, and so would the numbers of its samples.
    trainer = Trainer(
        lora(chat_model(tokenizer)), args, train_dataset=rows(multi_turn=False), processing_class=tokenizer
    )
    trainer.train()
    if trainer.is_world_process_zero():
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        torch.save({"logs": logs, "parameters": dict(trainer.model.named_parameters())}, path)
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
