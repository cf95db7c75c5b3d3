"""Plugins for tests, which a config names by their path."""

import torch
from transformers import TrainerCallback

seen = []


class Steps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        seen.append(state.global_step)


class Rollouts:
    def on_rollouts_scored(self, rollouts, rewards):
        seen.append((rollouts, rewards))


class Both(Steps, Rollouts): ...


class Changes(Steps):
    def on_rollouts_scored(self, rollouts, rewards):
        rewards.zero_()
        rollouts.clear()


class SetsUp(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        torch.set_float32_matmul_precision("high")
        seen.append(torch.get_float32_matmul_precision())

    def on_step_end(self, args, state, control, **kwargs):
        seen.append(torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("medium")


class Ruins(TrainerCallback):
    def on_train_end(self, args, state, control, model=None, **kwargs):
        next(each for each in model.parameters() if each.requires_grad).data.view(-1)[0] = float("nan")


class Neither: ...


def function(): ...


class OtherArguments:
    def on_rollouts_scored(self, rollouts): ...


class NeedsArguments(Rollouts):
    def __init__(self, folder): ...


class Positional(TrainerCallback):
    def on_step_end(self, args, state, control): ...


class LogsOnly(TrainerCallback):
    def on_log(self, args, state, control, model, processing_class, optimizer, lr_scheduler, train_dataloader): ...


class Accepted(TrainerCallback):
    @staticmethod
    def on_rollouts_scored(rollouts, rewards): ...

    def on_log(self, args, state, control, logs=None, **kwargs): ...

    @classmethod
    def on_step_end(cls, *args, **kwargs): ...
