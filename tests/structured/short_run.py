"""Completions that do not depend on batches and processes, and the metrics of evaluations with them."""

import numpy as np
import torch

from ebft import EBFTTrainer, structured
from ebft.structured.rollouts.turns import Completion
from tests.structured import conftest, trainers


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
    backend = lambda self: FromThePrompt()


class GRPOTrainer(structured.RolloutGRPOTrainer):
    backend = lambda self: FromThePrompt()


def remainder(completion_ids, **columns):
    """A reward that not every completion has."""
    return [float(sum(ids) % 7) if sum(ids) % 5 else None for ids in completion_ids]


def held_out(folder, method, batch_size):
    """The metrics of an evaluation of five rows with four completions each, and what NumPy gives for some of them."""
    tokenizer, dataset = conftest.make_chat_tokenizer(), trainers.rows(multi_turn=False)
    length = lambda completion_ids, **columns: [float(len(ids)) for ids in completion_ids]
    options = {"per_device_eval_batch_size": batch_size, "reward_funcs": [remainder, length]}
    options |= {"multi_objective_aggregation": "normalize_then_sum"} if method == "gdpo" else {}
    kind = Trainer if method == "ebft" else GRPOTrainer
    trainer = trainers.make(conftest.chat_model(tokenizer), tokenizer, folder, dataset, kind, **options)
    metrics = trainer.evaluate(dataset.select(range(5)))
    backend, sampled = FromThePrompt(), []
    for row in dataset.select(range(5)):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        limit = -(-3 * len(row["ground_truth"]) // 2) if method == "ebft" else 8
        sampled += [completion.ids for completion in backend.generate([ids] * 4, [min(8, limit)] * 4)]
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
