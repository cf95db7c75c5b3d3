"""A short training run for test_distributed.py: `python short_run.py OUT.pt KEY=VALUE...`, alone or under torchrun."""

import sys

import torch

from ebft.strided import StridedEBFTConfig, StridedEBFTTrainer
from ebft.tools.cli.training import leave_process_group
from tests.strided.families import VOCAB, tiny_model
from tests.strided.test_exactness import ENDS
from tests.structured.conftest import lora


def documents(count=24):
    """Rows of very different lengths, every third one with a prompt, every second one with an end."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for i in range(count):
        length = int(torch.randint(9, 40, (1,), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        ids[-1] = ENDS[0] if i % 2 else 4
        rows.append({"input_ids": ids, "prompt_length": 3 if i % 3 == 0 else 0})
    return rows


def main(path, *options):
    given = dict(option.split("=") for option in options)
    model = tiny_model("llama").double()  # in float32, Adam turns other roundings into other steps
    model.generation_config.eos_token_id = ENDS
    if given.pop("lora", "0") == "1":
        model = lora(model)
    settings = {"stride": 4, "context_length": 4, "generate_max_len": 4, "n_samples_per_prompt": 3, "ce_coef": 0.2}
    settings |= {"max_steps": 4, "learning_rate": 1e-3, "logging_steps": 1, "lr_scheduler_type": "constant"}
    settings |= {"seed": 11, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "report_to": []}
    settings |= {"grad_norms_every": 1, **{name: int(value) for name, value in given.items()}}
    args = StridedEBFTConfig(output_dir=path + ".dir", **settings)
    trainer = StridedEBFTTrainer(model=model, args=args, train_dataset=documents(), eval_dataset=documents(11)[4:])
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    found = {"held_out": trainer.evaluate(), "before": before, "parameters": dict(trainer.model.named_parameters())}
    found["logs"] = [entry for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        torch.save(found, path)
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
