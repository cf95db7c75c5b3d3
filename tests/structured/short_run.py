"""Short runs whose completions do not depend on batches and processes.

For test_distributed.py: `python -m tests.structured.short_run OUT.pt KEY=VALUE...`, also in torchrun.
"""

import sys

import numpy as np
import torch

from ebft import EBFTTrainer
from ebft.structured import RolloutGRPOConfig, RolloutGRPOTrainer
from ebft.structured.rollouts.turns import Completion
from ebft.tools.cli.training import leave_process_group
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


class GRPOTrainer(RolloutGRPOTrainer):
    def _backend(self):
        return FromThePrompt()


def remainder(completion_ids, **columns):
    """A reward that not every completion has."""
    return [float(sum(ids) % 7) if sum(ids) % 5 else None for ids in completion_ids]


def held_out(folder, method, batch_size):
    """The metrics of an evaluation of five rows with four completions each, and what NumPy gives for some of them."""
    tokenizer, dataset = make_chat_tokenizer(), rows(multi_turn=False)

    def length(completion_ids, **columns):
        return [float(len(ids)) for ids in completion_ids]

    options = {"per_device_eval_batch_size": batch_size}
    if method == "ebft":
        trainer_class, args = Trainer, arguments(folder, **options)
    else:
        options["multi_objective_aggregation"] = "normalize_then_sum" if method == "gdpo" else "sum_then_normalize"
        trainer_class, args = GRPOTrainer, arguments(folder, RolloutGRPOConfig, **options)
    trainer = trainer_class(
        chat_model(tokenizer),
        args=args,
        reward_funcs=[remainder, length],
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    metrics = trainer.evaluate(dataset.select(range(5)))
    backend, sampled = FromThePrompt(), []
    for row in dataset.select(range(5)):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        limit = -(-3 * len(row["ground_truth"]) // 2) if method == "ebft" else 12
        sampled += [completion.ids for completion in backend.generate([ids] * 4, [min(12, limit)] * 4)]
    lengths, given = np.array([len(ids) for ids in sampled]), [x for x in remainder(sampled) if x is not None]
    assert len(given) < len(sampled)
    expected = {"rewards/remainder/mean": np.mean(given), "rewards/remainder/std": np.std(given, ddof=1)}
    for name, of in (("mean", np.mean), ("min", np.min), ("max", np.max)):
        expected[f"completions/{name}_length"] = of(lengths)
    if method != "ebft":
        totals = [(x or 0.0) + len(ids) for x, ids in zip(remainder(sampled), sampled)]
        expected |= {"reward": np.mean(totals), "reward_std": np.std(totals, ddof=1)}
    varying = ("epoch", "_s", "_time", "_runtime", "_per_second")
    return {name: value for name, value in metrics.items() if not name.endswith(varying)}, expected


def check_held_out(metrics, expected):
    for name, value in expected.items():
        assert abs(metrics[f"eval_{name}"] - value) < 1e-5, (name, metrics[f"eval_{name}"], value)


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
