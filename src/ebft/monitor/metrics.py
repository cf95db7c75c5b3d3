"""Logged metrics: means that are exact over micro-batches and ranks, throughput, and the lines on the console.

Also the batches of an evaluation by several processes: each row is evaluated by one process, or by all together.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback

from ebft.machine import copy_to, peak_resident
from ebft.printed import duration, printable

Number = Tensor | float


def read_numbers(numbers: Iterable[Number]) -> list[float]:
    """Return numbers as floats; all tensors of a device are read together, in one wait for it."""
    found = list(numbers)
    places: dict[torch.device, dict[torch.dtype, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, number in enumerate(found):
        if isinstance(number, Tensor):
            places[number.device][number.dtype].append(place)
    for of_types in places.values():
        together = [torch.stack([found[place] for place in of_type]).detach().double() for of_type in of_types.values()]
        for place, number in zip(chain(*of_types.values()), torch.cat(together).tolist()):
            found[place] = number
    return [float(number) for number in found]


def sums_over_ranks(numbers: Iterable[Number], accelerator: Any) -> list[float]:
    """Return the sums of numbers over all ranks, which must give equally many. A single rank reads them once."""
    found = read_numbers(numbers)
    if accelerator.num_processes == 1:
        return found
    return accelerator.reduce(_on_device(found, accelerator), "sum").tolist()


def maxima_over_ranks(numbers: list[float], accelerator: Any) -> list[float]:
    """Return the maxima of numbers over all ranks, which must give equally many."""
    if accelerator.num_processes == 1:
        return numbers
    return accelerator.gather(_on_device(numbers, accelerator)[None]).amax(0).tolist()


def _on_device(numbers: list[float], accelerator: Any) -> Tensor:
    return copy_to(accelerator.device, torch.tensor(numbers, dtype=torch.float64))[0]


class MeanMetrics:
    """Accumulates (sum, weight) pairs by name; `drain` returns the means over all ranks and resets."""

    def __init__(self):
        self._sums: dict[str, list[tuple[Number, Number]]] = defaultdict(list)

    def add(self, name: str, total: Number, weight: Number) -> None:
        """Add `total`, a sum over `weight` items; tensors have no dimensions, and must not be changed afterwards."""
        total, weight = (number.detach() if isinstance(number, Tensor) else number for number in (total, weight))
        self._sums[name].append((total, weight))

    def drain(self, accelerator: Any) -> dict[str, float]:
        """Return the weighted means since the last call, by name, for names with non-zero weight.

        All ranks must add the same names. All tensors are read in one wait for their device.
        """
        names = sorted(self._sums)
        if not names:
            return {}
        read, sums = iter(read_numbers(number for name in names for pair in self._sums[name] for number in pair)), []
        for name in names:
            pairs = [(next(read), next(read)) for _ in self._sums[name]]
            sums += map(sum, zip(*pairs))
        self._sums.clear()
        reduced = sums_over_ranks(sums, accelerator)  # of all names at once
        return {name: total / weight for name, total, weight in zip(names, reduced[::2], reduced[1::2]) if weight}

    def state(self) -> dict[str, list[tuple[Number, Number]]]:
        """Return what was added since the last `drain`, for `restore`."""
        return {name: list(pairs) for name, pairs in self._sums.items()}

    def restore(self, state: dict[str, list[tuple[Number, Number]]]) -> None:
        """Continue from a result of `state`."""
        self._sums.clear()
        self._sums.update({name: list(pairs) for name, pairs in state.items()})


class HeldOutMeans:
    """Weighted means of values by name over one evaluation of `rows` rows (None: no limit).

    Data loaders repeat the first rows to fill the last batch of every process. In gathered order, these repeated rows
    are the last ones, and they are excluded.
    """

    def __init__(self, accelerator: Any, rows: int | None) -> None:
        self._accelerator, self._left = accelerator, rows
        self._sums: dict[str, list[float]] = {}

    def add(self, values: dict[str, Tensor], weights: Tensor) -> None:
        """Add values (B,) of this process's rows with `weights` (B,); all processes must add the same names."""
        table = torch.stack([*values.values(), weights.to(values[next(iter(values))])], dim=-1)
        table = self._accelerator.gather(table.to(self._accelerator.device)).double()[: self._left]
        if self._left is not None:
            self._left -= len(table)
        for column, name in enumerate(values):
            sums = self._sums.setdefault(name, [0.0, 0.0])
            sums[0] += (table[:, column] * table[:, -1]).sum().item()
            sums[1] += table[:, -1].sum().item()

    def means(self) -> dict[str, float]:
        """Return the means of all names with non-zero weight."""
        return {name: total / weight for name, (total, weight) in self._sums.items() if weight}


class HeldOutRows:
    """The batches of a trainer's evaluation, which do not repeat rows to fill the last batch of every process.

    `order`: returns the indices of the rows of a dataset in the order of their evaluation, which may occur repeatedly;
    if unset, each row is evaluated once.
    `copies`: the number of processes that evaluate the rows of the current batch, by which their weights are divided.
    """

    def __init__(self, trainer: Any, order: Callable[[Any], Sequence[int]] | None = None) -> None:
        self._trainer, self._order = trainer, order
        self.copies: int = 1
        self._copies_of_batches: Sequence[int] = ()

    def loader(self, dataset: Any, of_one_process: Callable[[Any], DataLoader]) -> DataLoader:
        """Return the loader of an evaluation; `dataset` is the name of one if it is text, by default the trainer's."""
        trainer, args = self._trainer, self._trainer.args
        dataset = trainer.eval_dataset if dataset is None else dataset
        if isinstance(dataset, str):
            dataset = trainer.eval_dataset[dataset]
        self._copies_of_batches = ()
        if args.world_size == 1:
            return of_one_process(dataset)
        dataset = dataset if hasattr(dataset, "__len__") else list(dataset)
        order = range(len(dataset)) if self._order is None else self._order(dataset)
        batches, self._copies_of_batches = held_out_batches(
            len(order), args.eval_batch_size, args.process_index, args.world_size
        )
        return DataLoaderShard(
            dataset,
            device=trainer.accelerator.device,
            batch_sampler=[[order[position] for position in batch] for batch in batches],
            collate_fn=trainer.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
        )

    def begin_batch(self) -> None:
        """Make the next batch the current one."""
        self.copies, *self._copies_of_batches = self._copies_of_batches or (1,)


def held_out_batches(rows: int, size: int, rank: int, processes: int) -> tuple[list[list[int]], list[int]]:
    """The batches of a process, and how many processes have the same one: all evaluate the rows left over."""
    whole = rows // (size * processes)
    starts = [(batch * processes + rank) * size for batch in range(whole)]
    rest = range(whole * size * processes, rows, size)
    batches = [list(range(start, start + size)) for start in starts]
    batches += [list(range(start, min(start + size, rows))) for start in rest]
    return batches, [1] * whole + [processes] * len(rest)


class Throughput:
    """The rates at which the totals of a `Budget` grow."""

    def __init__(self, budget: Any) -> None:
        self._budget, self._seconds, self._before = budget, 0.0, {}

    def add(self, seconds: float) -> None:
        """Add the time of a step, before its amounts are added to the totals."""
        if self._seconds == 0:
            self._before = dict(self._budget.totals)
        self._seconds += seconds

    def drain(self, accelerator: Any) -> dict[str, float]:
        """Return `throughput/documents_per_s`, `throughput/generated_tokens_per_s` and `memory/peak_gib`, and reset.

        The memory is the maximum over ranks: allocated on the CUDA device if there is one, or else resident. Empty if
        no time was added since the last call.
        """
        if self._seconds == 0:
            return {}
        seconds = sums_over_ranks([self._seconds], accelerator)[0] / accelerator.num_processes
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_resident()
        (peak,) = maxima_over_ranks([peak / 2**30], accelerator)
        self._seconds = 0.0
        return {
            f"throughput/{name}_per_s": (self._budget.totals[name] - self._before[name]) / seconds
            for name in ("documents", "generated_tokens")
        } | {"memory/peak_gib": peak}


# Label, metric, format, desired direction (^ up, v down).
_TERMS = (
    ("align", "alignment", "+.3f", "^"),
    ("divers", "diversity", "+.3f", "v"),
    ("cfm", "cfm_loss", ".3f", "v"),
    ("reward", "mean_reward", "+.3f", "^"),
)
_OF_PREFERENCES = (("accuracy", "rewards/accuracies", ".3f", "^"), ("margin", "rewards/margins", "+.3f", "^"))
_TOKENS_PER_S = "throughput/generated_tokens_per_s"
_WIDTH = 100  # characters of a line
_CONTINUED = "    | "


class ConsoleMetrics(TrainerCallback):
    """Prints each log of the main process, in lines of at most 100 characters if its terms allow.

    `ebft reward | align +0.412 ^ | divers +0.023 v | cfm 4.231 v | reward +0.389 ^ | step 10/100`, then
    `| loss 0.1234 | grad_norm 1.5000 | 1,234 tok/s | 1m20s, 12m00s left`, and for an evaluation `held out | ...` with
    the metrics `eval_...`, once with a legend. Without a terminal, a line says that held-out rows are being evaluated.
    """

    _began: tuple[float, int] | None = None  # time and step at which training began or was resumed
    _legend = _CONTINUED + "eval_ features are not whitened, and eval_cfm is unbiased: not for comparison with training"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.monotonic(), state.global_step
        self._announce(state, args.eval_on_start and state.global_step == 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._announce(state, control.should_evaluate)

    on_epoch_end = on_step_end

    def _announce(self, state: Any, evaluates: bool) -> None:
        if evaluates and state.is_world_process_zero and not sys.stderr.isatty():
            tqdm.write("evaluating held-out rows ...", file=sys.stderr)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        times = ""
        if self._began is not None:  # the time since training began, and the time left at the same speed
            elapsed, steps = time.monotonic() - self._began[0], state.global_step - self._began[1]
            left = state.max_steps - state.global_step
            remaining = f", {duration(elapsed / steps * left)} left" if steps > 0 and left > 0 else ""
            times = duration(elapsed) + remaining
        line = format_logs(logs, state.global_step, state.max_steps, times)
        if line and "eval_alignment" in logs:
            line, self._legend = "\n".join(filter(None, (line, self._legend))), ""
        if line:
            tqdm.write("\n".join(map(printable, line.split("\n"))))  # does not interfere with a progress bar


class ProgressBar(ProgressCallback):
    """The progress bar of transformers without its output of logs, which `ConsoleMetrics` prints."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        pass


def format_logs(logs: dict[str, float], step: int, max_steps: int, times: str = "") -> str | None:
    """The lines of a log of training, which end with `times`, or of an evaluation; None for other logs."""
    logs = {name: value for name, value in logs.items() if value is not None}  # TRL: no reward in this interval
    for held_out, loss_prefix, term_prefix in ((True, "eval_", "eval_"), (False, "", "ebft/")):
        values = [(logs.get(term_prefix + metric), loss_prefix + label, *term) for label, metric, *term in _TERMS]
        terms = [_term(*term) for term in values if term[0] is not None]
        keys, has_features = ("loss", "ce_loss", "accuracy", "grad_norm"), bool(terms)
        losses = [f"{key} {logs[loss_prefix + key]:.4f}" for key in keys if loss_prefix + key in logs]
        values = [(logs.get(loss_prefix + metric), label, *term) for label, metric, *term in _OF_PREFERENCES]
        terms += (compared := [_term(*term) for term in values if term[0] is not None])
        if held_out and "eval_reward" in logs:
            # The policy loss is always about 0, so it is not informative.
            losses = [loss for loss in losses if not loss.startswith("loss ")]
        names = [key for key in logs if key.startswith(f"{loss_prefix}rewards/") and key.endswith("/mean")]
        parts = {key.removeprefix(f"{loss_prefix}rewards/").removesuffix("/mean"): logs[key] for key in names}
        if parts and list(parts) != ["feature_matching"]:  # which is the reward then
            terms += [f"total reward {logs[key]:+.3f} ^" for key in (loss_prefix + "reward",) if key in logs]
            terms += [f"{name} {value:+.3f}" for name, value in parts.items() if name != "feature_matching"]
        if terms or losses:
            title = "ebft reward" if has_features else "preference" if compared else "reward" if terms else "loss"
            progress = f"step {step}/{max_steps}" if max_steps > 0 else f"step {step}"
            rate = [f"{logs[_TOKENS_PER_S]:,.0f} tok/s"] if _TOKENS_PER_S in logs else []
            rate += [times] if times and not held_out else []
            return _in_lines(["held out" if held_out else title, *terms, progress, *losses, *rate])
    return None


def _in_lines(terms: list[str]) -> str:
    """The terms, separated by bars, in lines of at most 100 characters unless a single term is longer."""
    lines = [terms[0]]
    for term in terms[1:]:
        longer = f"{lines[-1]} | {term}"
        if len(longer) <= _WIDTH:
            lines[-1] = longer
        else:
            lines.append(_CONTINUED + term)
    return "\n".join(lines)


def _term(value: float, label: str, spec: str, wanted: str) -> str:
    return f"{label} {round(value, 3) + 0.0:{spec}} {wanted}"  # + 0.0 avoids -0.000
