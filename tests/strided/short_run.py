"""A short training run for test_distributed.py: `python short_run.py OUT.pt KEY=VALUE...`, alone or under torchrun."""

import sys

import torch

from ebft.strided import StridedEBFTConfig, StridedEBFTTrainer
from ebft.tools.cli.training import leave_process_group
from tests.strided.families import VOCAB, tiny_model
from tests.strided.test_exactness import with_lora


def documents(count=24):
    """Rows of very different lengths, every third one with a prompt."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for i in range(count):
        length = int(torch.randint(9, 40, (1,), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "prompt_length": 3 if i % 3 == 0 else 0})
    return rows


def main(path, *options):
    given = dict(option.split("=") for option in options)
    model = tiny_model("llama").double()  # in float32, Adam turns other roundings into other steps
    if given.pop("lora", "0") == "1":
        model = with_lora(model)
    args = StridedEBFTConfig(
        output_dir=path + ".dir",
        use_cpu=True,
        report_to=[],
        seed=11,
        max_steps=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        lr_scheduler_type="constant",
        disable_tqdm=True,
        stride=4,
        context_length=4,
        generate_max_len=4,
        n_samples_per_prompt=3,
        ce_coef=0.2,
        grad_norms_every=1,
        **{name: int(value) for name, value in given.items()},
    )
    trainer = StridedEBFTTrainer(model=model, args=args, train_dataset=documents(), eval_dataset=documents(11)[4:])
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    held_out = trainer.evaluate()
    if trainer.is_world_process_zero():
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        torch.save(
            {
                "logs": logs,
                "parameters": dict(trainer.model.named_parameters()),
                "before": before,
                "held_out": held_out,
            },
            path,
        )
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
