"""Plugins for tests, which a config names by their path."""

from transformers import TrainerCallback

seen = []


class Steps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        seen.append(state.global_step)


class Rollouts:
    def on_rollouts_scored(self, rollouts, rewards):
        seen.append((rollouts, rewards))


class Both(Steps, Rollouts): ...


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
