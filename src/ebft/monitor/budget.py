"""The compute budget of a run: totals that are comparable between methods, how FLOPs are counted, and the limits.

`budget/documents` is the number of rows trained on, including repetitions; every document of a packed row counts, and
for full completions, prompts are counted. `budget/generated_tokens` is the number of sampled tokens. `budget/flops`
count matrix products in training steps, without evaluation. All are summed over ranks and continue after resuming
from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import TrainerCallback

from ebft.config.keys.run import BudgetSection
from ebft.files import STATE, json_object
from ebft.models.causal_lm import is_reused, observers, unwrap_adapter, without_hooks
from ebft.models.weights import unpacked_size
from ebft.monitor.metrics import sums_over_ranks
from ebft.transformers_internals import Conv1D

COUNTED = ("documents", "generated_tokens", "flops")
_SAVED_AS = "Budget"  # among the `stateful_callbacks` of trainer_state.json


class Budget:
    """Totals of a run; the amounts added on each rank are included at the end of every optimizer step."""

    def __init__(self) -> None:
        self.meter: FlopMeter = FlopMeter()
        self.restart({})

    def restart(self, spent: dict[str, float]) -> None:
        """Continue from totals of all ranks, as saved in a checkpoint; missing ones start at 0."""
        self.totals: dict[str, float] = dict.fromkeys(COUNTED, 0) | spent
        self._documents, self._generated_tokens, self.meter.flops = 0.0, 0, 0

    def add(self, documents: float = 0, generated_tokens: int = 0, flops: int = 0) -> None:
        """Add to the amounts of this rank: documents may be fractional; `flops` that the meter does not count."""
        self._documents += documents
        self._generated_tokens += generated_tokens
        self.meter.flops += flops

    def gather(self, accelerator: Any) -> None:
        """Add the amounts of all ranks since the last call to the totals."""
        added = sums_over_ranks((self._documents, self._generated_tokens, self.meter.flops), accelerator)
        totals = {name: self.totals[name] + value for name, value in zip(COUNTED, added)}
        self.restart({name: round(value) for name, value in totals.items()})


class KeepBudget(TrainerCallback):
    """Updates the `budget` of a trainer after every step, saves it in the trainer state, and restores it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.budget.restart(state.stateful_callbacks.get(_SAVED_AS, {}))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.budget.gather(self.trainer.accelerator)
        state.stateful_callbacks[_SAVED_AS] = self.trainer.budget.totals


class StopAtBudget(TrainerCallback):
    """Stops training after the step that reaches a limit, which is logged, evaluated and saved like a last step."""

    def __init__(self, budget: Budget, limits: BudgetSection) -> None:
        self.budget, self.limits = budget, limits

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        name = limit_reached(self.limits, self.budget.totals)
        if name is None:
            return
        control.should_log = True
        control.should_evaluate |= args.eval_strategy == "steps"
        limit, spent = self.limits.model_dump()[name], self.budget.totals[name]
        stop_training(args, state, control, f"budget.{name} {limit:,} is reached ({spent:,})")


def stop_training(args: Any, state: Any, control: Any, reason: str) -> None:
    """Stop after this step, which is saved like a last one, and print the reason."""
    control.should_training_stop = True
    control.should_save |= args.save_strategy == "steps"
    if state.is_world_process_zero:
        tqdm.write(f"Stopping at step {state.global_step}: {reason}")


def limit_reached(limits: BudgetSection, totals: dict[str, float]) -> str | None:
    """Return the first key of `budget:` whose limit the totals have reached, or None."""
    given = limits.model_dump(exclude_none=True)
    return next((name for name, limit in given.items() if totals.get(name, 0) >= limit), None)


def spent_at(checkpoint: str | Path) -> dict[str, float]:
    """Return the totals saved in a checkpoint; empty if it has none."""
    return json_object(Path(checkpoint) / STATE).get("stateful_callbacks", {}).get(_SAVED_AS, {})


class FlopMeter:
    """Counts the FLOPs of the watched models while counting is enabled."""

    def __init__(self) -> None:
        self.flops: int | Tensor = 0
        self._counting = False

    @contextmanager
    def watching(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Register hooks on every matrix product of `models` inside the block; shared modules are hooked once."""
        models = list(models)
        modules = {id(module): module for model in models for module in model.modules() if weight_size(module)}
        causal_lms = {id(causal_lm): causal_lm for causal_lm in map(unwrap_adapter, models)}.values()
        heads = [modules[key] for key in {id(each.get_output_embeddings()) for each in causal_lms} if key in modules]
        counted = [(module, self._count_of(module)) for module in modules.values()]
        counted += [(without_hooks(head), self._count_of(head)) for head in heads]  # as which a sharded model's runs
        hooks = [module.register_forward_hook(count, with_kwargs=True) for module, count in counted]
        hooks += [model.register_forward_hook(self._count_fused_head, with_kwargs=True) for model in causal_lms]
        self._weights = {id(weight) for module in modules.values() for weight in module.parameters(recurse=False)}
        observers.append(self)
        try:
            yield
        finally:
            observers.remove(self)
            for hook in hooks:
                hook.remove()

    def count_product(self, weight: Tensor, rows: int) -> None:
        """Count a product that no watched module computes with its weight (O, I)."""
        self._add(2 * weight.numel() * rows if id(weight) in self._weights else 0)

    @contextmanager
    def recording(self) -> Iterator[Callable[[], None]]:
        """Context manager in which nothing is counted; the function that it gives counts it, once for each call."""
        before, self.flops, recorded = self.flops, 0, []
        yield lambda: self._add(sum(recorded))
        recorded.append(self.flops)
        self.flops = before

    @contextmanager
    def counting(self, enabled: bool = True) -> Iterator[None]:
        """Enable counting inside the block, or disable it, also in its backward passes."""
        before, self._counting = self._counting, enabled
        try:
            yield
        finally:
            self._counting = before

    def _count_of(self, module: nn.Module) -> Callable[..., None]:
        """Return a forward hook; backward FLOPs are counted when the gradient arrives, so once even if forward is
        recomputed."""
        of_row, has_experts = 2 * weight_size(module), bool(_experts(module))

        def count(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if not self._counting:
                return
            inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            rows = inputs[0].numel() // max(1, inputs[0].shape[-1])
            if has_experts:  # each row is multiplied by the weights of each expert that is chosen for it
                chosen = [value for value in inputs[1:] if not value.is_floating_point()]
                rows *= chosen[0].shape[-1] if chosen else 1
            flops = of_row * rows
            self.flops += 0 if isinstance(output, Tensor) and is_reused(output) else flops
            found = output if isinstance(output, tuple) else (output,)
            with_gradient = [value for value in found if isinstance(value, Tensor) and value.requires_grad]
            if with_gradient:
                weights = module.parameters(recurse=False)
                trained = any(weight.requires_grad and weight.dim() > 1 for weight in weights)
                products = inputs[0].requires_grad + trained
                with_gradient[0].register_hook(lambda _: self._add(flops * products))  # keeps no input alive

        count.only_observes = True  # see ebft/prefix/forward.py
        return count

    def _count_fused_head(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook for TRL's fused log-probabilities, which use the head's weight without calling its module."""
        # Scored positions are multiplied with it once in forward, once more in backward, and once for each gradient.
        if not (self._counting and kwargs.get("fused_lm_head")) or "scores_in_chunks" in model.__dict__:
            return
        head = model.get_output_embeddings()
        flops = 2 * weight_size(head) * kwargs["labels"][:, 1:].ne(-100).sum()  # a tensor, to avoid a device sync
        self._add(flops)
        if output.log_probs.requires_grad:
            trained = head.weight.requires_grad
            output.log_probs.register_hook(lambda _: self._add(flops * (2 + trained)))

    def _add(self, flops: int | Tensor) -> None:
        if self._counting:
            self.flops += flops


# Names of the number of experts that each token uses, in transformers' configurations.
_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")


def forward_flops(model: nn.Module, tokens: int, scored: int) -> int:
    """Return the forward FLOPs of `tokens` tokens through the decoder and `scored` tokens through the head.

    For forward passes in another engine. In mixture-of-experts layers, each token uses `num_experts_per_tok` experts.
    """
    causal_lm = unwrap_adapter(model)
    config = causal_lm.config.get_text_config()
    chosen = next((getattr(config, name) for name in _CHOSEN_EXPERTS if hasattr(config, name)), 1)
    of_head = {id(module) for module in causal_lm.get_output_embeddings().modules()}
    per_token, per_score = 0, 0
    for module in causal_lm.modules():
        if id(module) in of_head:
            per_score += weight_size(module)
        else:
            per_token += weight_size(module) * (chosen if _experts(module) else 1)
    return 2 * (per_token * tokens + per_score * scored)


def weight_size(module: nn.Module) -> int:
    """The number of weights that a row is multiplied with, as declared: quantised ones have fewer elements."""
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features
    if isinstance(module, Conv1D):
        return module.nx * module.nf
    return sum(unpacked_size(weight) // len(weight) for weight in _experts(module))


def _experts(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights (experts, ., .) of a module that stores all of its experts in one tensor."""
    stacked = [weight for weight in module.parameters(recurse=False) if weight.dim() == 3]
    return stacked if type(module).__name__.endswith("Experts") else []
