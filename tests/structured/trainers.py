"""Structured trainers over a tiny chat model, and the numbers of one of their steps."""

from datasets import Dataset

from ebft import EBFTConfig, EBFTTrainer

USER = lambda text: {"role": "user", "content": text}
ASSISTANT = lambda text: {"role": "assistant", "content": text}


def rows(multi_turn=True):
    """Prompts and references of unequal lengths; some conversations go on for one or two turns."""
    later = [[], [USER("more"), ASSISTANT("some more")], [USER("a"), ASSISTANT("b"), USER("c"), ASSISTANT("dd")]]
    return Dataset.from_list(
        [
            {
                "prompt": [USER("say " + "word " * (i % 4) + str(i))],
                "ground_truth": "it is " + "so " * (1 + i % 3) + str(i),
                **({"remaining_turns": later[i % 3]} if multi_turn else {}),
            }
            for i in range(12)
        ]
    )


def arguments(folder, config_class=EBFTConfig, **changes):
    settings = {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "max_completion_length": 12,
        "temperature": 0.7,
        "learning_rate": 1e-2,
        "max_steps": 2,
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "loss_type": "grpo",
    }
    return config_class(output_dir=str(folder), **{**settings, **changes})


def make(policy, tokenizer, folder, dataset=None, **changes):
    dataset = rows() if dataset is None else dataset
    return EBFTTrainer(policy, arguments(folder, **changes), train_dataset=dataset, processing_class=tokenizer)


def one_step(trainer):
    """Loss and gradients of one optimizer step's micro-batches, and the rollouts and rows they were made of."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    batch = next(iter(trainer.get_train_dataloader()))
    trainer._prepare_inputs(batch)
    loss = sum(trainer.compute_loss(trainer.model, inputs) for inputs in trainer._buffered_inputs)
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, trainer.rollouts, batch
