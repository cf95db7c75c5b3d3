"""The samples in the log of rollouts, in one form for all methods."""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from rich.text import Text

from ebft.printed import printable
from ebft.run_files import ROLLOUTS, JsonTail, read_all, rollout_files

LENGTH, REWARD = "length", "reward"
_NEWEST_BYTES = 4 * 2**20
TERMS = (REWARD, "alignment", "diversity", "advantage", LENGTH)  # the order in which they are shown; others follow
_LOWER_IS_BETTER = ("diversity",)
_RENAMED = {"rewards": REWARD, "advantages": "advantage", "tokens": LENGTH}


@dataclass
class Sample:
    """A completion of a prompt with the terms of its reward.

    `step` is the optimizer step that it was used for, counted from 1 as in the logs, `place` where it comes from,
    `length` a term: the number of sampled tokens. `reference` is None if there is none, `prompt` if the log has no text
    of it. `copies` is the number of equal samples that it stands for, see `without_repetitions`.
    """

    step: int
    place: str
    prompt: str | None
    completion: str
    reference: str | None
    terms: dict[str, float] = field(default_factory=dict)
    copies: int = 1

    @property
    def origin(self) -> tuple[Any, ...]:
        """What the samples of an anchor or of a prompt share."""
        return self.step, self.place, self.prompt, self.reference


def all_samples(folder: Path, step: int | None = None) -> Iterator[Sample]:
    """The samples of a run, or of one step, in the order of the log."""
    entries = (entry for path in rollout_files(folder) for entry in read_all(path))
    return (sample for entry in entries if step in (None, entry.get("step")) for sample in samples_of(entry))


def without_repetitions(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield each completion of an anchor or a prompt once, with the number of its `copies`.

    Equal completions have equal rewards, except with reward functions that depend on more than the completion; those
    whose reward differs are kept apart.
    """
    for _, group in groupby(samples, key=lambda sample: sample.origin):
        found: dict[tuple[str, float | None], Sample] = {}
        for sample in group:
            reward = sample.terms.get(REWARD)
            key = sample.completion, None if reward is None else round(reward, 3)
            first = found.setdefault(key, sample)
            if first is not sample:
                first.copies += 1
        yield from found.values()


def take(samples: Iterable[Sample], order: str, sort: str, count: int) -> list[Sample]:
    """Up to `count` samples: with the best or worst value of the term `sort`, or the newest, the last one first."""
    if order == "newest":
        return list(reversed(deque(samples, maxlen=count)))
    found = (sample for sample in samples if sort in sample.terms)
    highest = (order == "best") != (sort in _LOWER_IS_BETTER)
    choose = heapq.nlargest if highest else heapq.nsmallest
    return choose(count, found, key=lambda sample: sample.terms[sort])


def first_and_last(folder: Path, count: int) -> tuple[list[Sample], list[Sample]]:
    """A sample of each of `count` entries at the start of the log, and at its end, of the main process."""
    files = [path for path in rollout_files(folder) if path.name.startswith(ROLLOUTS)]
    if not files:
        return [], []
    first = list(islice(read_all(files[0]), count))
    last = JsonTail(files[-1], newest_bytes=_NEWEST_BYTES).read()[0][-count:]
    return one_of_each(first), one_of_each(entry for entry in last if entry not in first)


def one_of_each(entries: Iterable[dict[str, Any]]) -> list[Sample]:
    """The first sample of each entry that has one."""
    found = (next(samples_of(entry), None) for entry in entries)
    return [sample for sample in found if sample is not None]


def samples_of(entry: dict[str, Any]) -> Iterator[Sample]:
    """The samples of an entry of the log: of the blocks of a document, or of a prompt."""
    return _of_blocks(entry) if "blocks" in entry else _of_prompt(entry)


def _of_blocks(entry: dict[str, Any]) -> Iterator[Sample]:
    document = entry["document"]
    for block in entry["blocks"]:
        prompt = document[: block["offset"]] if "offset" in block else None
        for sample in block["samples"]:
            yield Sample(
                step=entry["step"],
                place=f"token {block['anchor']}",
                prompt=None if prompt is None else _text(prompt),
                completion=_text(sample["completion"]),
                reference=_text(block["reference"]),
                terms=_terms(sample),
            )


def _of_prompt(entry: dict[str, Any]) -> Iterator[Sample]:
    staleness = entry.get("staleness") or 0
    place = f"weights of step {entry['weights_step']}" if staleness else ""
    reference = entry.get("ground_truth")
    later = [turn for turn in entry.get("remaining_turns") or [] if turn.get("role") == "assistant"]
    references = [reference, *(turn["content"] for turn in later)] if reference is not None else []
    for sample in entry["samples"]:
        yield Sample(
            step=entry["step"],
            place=place,
            prompt=_text(entry.get("prompt", "")),
            completion="\n[next turn]\n".join(map(_text, sample["replies"])),
            reference="\n[next turn]\n".join(map(_text, references)) if references else None,
            terms=_terms(sample),
        )


def _terms(sample: dict[str, Any]) -> dict[str, float]:
    values = {_RENAMED.get(name, name): value for name, value in sample.items()}
    parts = values.pop(REWARD) if isinstance(values.get(REWARD), dict) else {}  # full completions: by reward function
    if isinstance(sample.get("reward"), int | float):
        values[REWARD] = sample["reward"]
    elif parts:
        values[REWARD] = sum(value for value in parts.values() if value is not None)
    if list(parts) != ["feature_matching"]:
        values |= {f"rewards/{name}": value for name, value in parts.items()}
    numbers = {name: value for name, value in values.items() if is_number(value)}
    return {name: numbers[name] for name in (*TERMS, *numbers) if name in numbers}


def _text(value: Any) -> str:
    """A text as it is, messages as lines `role: content`, and token ids in brackets."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        lines = []
        for message in value:
            content = message.get("content")
            if isinstance(content, list):  # parts of a message
                texts = [part.get("text", part) if isinstance(part, dict) else part for part in content]
                content = " ".join(map(str, texts))
            lines.append(f"{message.get('role', '')}: {message.get('tool_calls', '') if content is None else content}")
        return "\n".join(lines)
    return str(value)


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


PROMPT_CHARACTERS = 400  # at most, of the end of a prompt
_LABELS = {"prompt": "dim", "reference": "green", "completion": "cyan"}


def value_text(name: str, value: float | None) -> str:
    """The value of a term; empty for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if name == LENGTH else f"{round(value, 3) + 0.0:+.3f}"


def heading(sample: Sample) -> str:
    """One line: the step, the place, the number of copies if there are several, and the terms of a sample."""
    where = f"step {sample.step}" + (f", {sample.place}" if sample.place else "")
    where += f" (×{sample.copies})" if sample.copies > 1 else ""
    return "  ".join([where, *(f"{name} {value_text(name, value)}" for name, value in sample.terms.items())])


def sample_text(sample: Sample, full: bool = False) -> Text:
    """A sample as several lines; without `full`, only the end of a long prompt."""
    prompt = sample.prompt
    if prompt is not None and len(prompt) > PROMPT_CHARACTERS and not full:
        prompt = "..." + prompt[-PROMPT_CHARACTERS:]
    parts = {"prompt": prompt, "reference": sample.reference, "completion": sample.completion}
    text = Text(heading(sample), style="bold")
    for label, value in parts.items():
        if value is not None:
            text.append(f"\n{label:<12}", style="bold not dim")
            text.append(printable(value).replace("\n", "\n" + " " * 12), style=f"not bold {_LABELS[label]}")
    return text
