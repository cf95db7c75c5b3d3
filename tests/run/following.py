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
