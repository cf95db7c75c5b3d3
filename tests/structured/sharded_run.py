"""Short runs for test_sharded.py: `python -m tests.structured.sharded_run OUT.pt NAME...`; in torchrun, under FSDP2.

One process has 16 completions a step, each of two has half of them; of `replicated` runs, each has all weights."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

import ebft.prefix.logps
from ebft import EBFTTrainer, errors
from ebft.models.sharding import is_sharded, reshard
from ebft.structured.rollouts.local import HFBackend
from tests.structured.conftest import chat_model, lora, make_chat_tokenizer
from tests.structured.short_run import GRPOTrainer, Trainer
from tests.structured.trainers import make, rows

ebft.prefix.logps.LOGITS_PER_CHUNK = {"cpu": 1}  # 16 rows: the head is applied to many chunks, of different numbers


class GreedyTrainer(EBFTTrainer):
    """The most likely completions, whose lengths depend on the references and the numbers of turns."""

    def backend(self):
        sampling = replace(self.generation.sampling, temperature=0.0)
        return HFBackend(self, sampling, self.processing_class.pad_token_id)

    def after_inputs(self, rows, inputs):
        if self.model.training:
            self.sampled = [*getattr(self, "sampled", []), [rollout.ids for rollout in self.rollouts]]
        return super().after_inputs(rows, inputs)


def trainer_of(name, folder, processes):
    tokenizer = make_chat_tokenizer()
    kind, adapter, *more = name.split("-")
    model, base = chat_model(tokenizer), Path(folder).with_name("base")
    if adapter != "lora" and processes == 1:
        model.save_pretrained(base)
    model = lora(model) if adapter == "lora" else model.from_pretrained(base)  # as the reference model is
    common = {"per_device_train_batch_size": 8 // processes, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    common |= {"shared_prefix": "rows" not in more, "bf16": "bf16" in more, "max_completion_length": 12}
    common["adam_epsilon"] = 1e-4  # or Adam's step of a gradient near zero is as large as any, and follows rounding
    if processes > 1 and "replicated" not in more:
        common |= {"fsdp": True, "fsdp_config": {"reshard_after_forward": "gathered" not in more}}
    if kind == "grpo":
        reward = lambda completion_ids, **columns: [float(sum(ids) % 7) for ids in completion_ids]
        common |= {"beta": 0.1 if adapter == "full" else 0.0, "reward_funcs": reward}
        return make(model, tokenizer, folder, rows(multi_turn=False), GRPOTrainer, **common)
    dataset = rows(multi_turn=kind == "greedy")
    common |= {"ce_coef": 0.3, "use_whitening": kind == "ebft", "eval_dataset": dataset.select(range(4))}
    trainer = Trainer if kind == "ebft" else GreedyTrainer
    return make(model, tokenizer, folder, dataset, trainer, **common)


def found_by(trainer):
    if trainer.is_fsdp_enabled:
        with pytest.raises(errors.ConfigError, match="train\\(\\) shards the model. Call it before evaluate"):
            trainer.evaluate()
    trainer.train()
    assert is_sharded(trainer.model) == trainer.is_fsdp_enabled
    held_out = trainer.evaluate() if isinstance(trainer, EBFTTrainer) else {}
    reshard(trainer.model)
    weights = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in trainer.model.named_parameters()}
    sampled = getattr(trainer, "sampled", [])
    if trainer.args.world_size > 1:
        distributed.all_gather_object(parts := [None] * trainer.args.world_size, sampled)
        sampled = [sum(step, []) for step in zip(*parts)]
    return {
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "held_out": held_out,
        "parameters": {name: value.detach().clone() for name, value in weights.items()},
        "sampled": sampled,
    }


def main(path, *names):
    processes = int(os.environ.get("WORLD_SIZE", 1))
    found = {name: found_by(trainer_of(name, f"{path}.{name}", processes)) for name in names}
    if os.environ.get("RANK", "0") == "0":
        torch.save(found, path)
    if processes > 1:
        distributed.barrier()
    os._exit(0)  # threads that FSDP2 leaves over gloo abort the interpreter's exit now and then


if __name__ == "__main__":
    main(*sys.argv[1:])
