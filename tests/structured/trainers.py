"""Structured trainers over a tiny chat model, and the numbers of one of their steps."""

import pytest
from datasets import Dataset

from ebft import EBFTConfig, EBFTTrainer, structured
from tests.structured import oracle

USER = lambda text: {"role": "user", "content": text}
ASSISTANT = lambda text: {"role": "assistant", "content": text}
SETTINGS = dict(num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=3, temperature=0.7)
SETTINGS |= dict(max_completion_length=8, learning_rate=1e-2, max_steps=2, logging_steps=1, loss_type="grpo")
SETTINGS |= dict(gradient_checkpointing=False, report_to="none", disable_tqdm=True, save_strategy="no")
OF_TRAINERS = {"reward_funcs", "eval_dataset", "callbacks", "peft_config"}
OF_TRAINERS |= {"tools", "rollout_func", "environment_factory"}


def rows(multi_turn=True):
    """Prompts and references of unequal lengths; some conversations go on for one or two turns."""
    later = [[], [USER("more"), ASSISTANT("some more")], [USER("a"), ASSISTANT("b"), USER("c"), ASSISTANT("dd")]]
    found = []
    for i in range(12):
        found.append({"prompt": [USER("say " + "word " * (i % 4) + str(i))]})
        found[-1]["ground_truth"] = "it is " + "so " * (1 + i % 3) + str(i)
        found[-1] |= {"remaining_turns": later[i % 3]} if multi_turn else {}
    return Dataset.from_list(found)


def arguments(folder, config_class=EBFTConfig, **changes):
    return config_class(output_dir=str(folder), **{**SETTINGS, **changes})


def make(policy, tokenizer, folder, dataset=None, kind=EBFTTrainer, **changes):
    """A trainer of the class `kind`; `changes` are of its arguments, or what the trainer itself takes."""
    given = {name: changes.pop(name) for name in OF_TRAINERS & changes.keys()}
    args = arguments(folder, EBFTConfig if issubclass(kind, EBFTTrainer) else structured.RolloutGRPOConfig, **changes)
    dataset = rows() if dataset is None else dataset
    return kind(policy, args=args, train_dataset=dataset, processing_class=tokenizer, **given)


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


def compare_step(trainer, twin, base, *, atol=1e-4):
    """One step against the naive oracle, with `twin` for the policy; its rollouts, and both gradients."""
    loss, gradients, rollouts, batch = one_step(trainer)
    wanted = oracle.loss(twin.eval(), base, trainer.processing_class, rollouts, batch, trainer.args)
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), abs=atol)
    expected = {name: parameter.grad for name, parameter in twin.named_parameters() if parameter.grad is not None}
    assert expected.keys() == gradients.keys()
    return rollouts, gradients, expected


def logged(trainer, name="loss"):
    """The values that were logged under a name."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
