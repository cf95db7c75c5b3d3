"""`python -m tests.devices.mistakes`: plant mistakes of device in the package, and require that all of them are found.

Each is one line of `src/ebft` written as it could be by someone without a GPU: an index that is made on the CPU, a mask
that stays there, a generator of the other device. A run on the pretend device must fail, and name the line.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

import ebft
from tests.devices.__main__ import CASES, mistakes_without_error, run
from tests.devices.pretend import register

SOURCE = Path(ebft.__file__).parent


@dataclass(frozen=True)
class Mistake:
    """`text` of a file is written as `wrong`, which a case finds at this line, or at that of the text `at`."""

    case: str
    path: str
    text: str
    wrong: str
    at: str | None = None

    def line(self) -> str:
        """What an error must name."""
        source, text = (SOURCE / self.path).read_text(encoding="utf-8"), self.at or self.text
        if source.count(self.text) != 1 or text not in source:
            raise AssertionError(f"{self.path} no longer has once: {self.text}. Plant another mistake.")
        return f"{self.path}:{source[: source.index(text)].count(chr(10)) + 1}"


MISTAKES = {
    "an index": Mistake(
        "strided_lora", "prefix/sampling.py", "torch.arange(_RUN, device=probabilities.device)", "torch.arange(_RUN)"
    ),
    "a generator": Mistake(
        "strided_attention_dropout",
        "prefix/attention/tiles.py",
        "torch.Generator(weights.device)",
        "torch.Generator()",
        at="torch.rand(weights.shape, generator=generator, device=weights.device)",
    ),
    "numbers of rollouts in flex_attention's mask": Mistake(
        "strided_flex", "prefix/attention/flex.py", "torch.full((s,), -1, device=device)", "torch.full((s,), -1)"
    ),
    "tokens on the policy's device": Mistake(
        "strided_full",
        "strided/embed.py",
        "documents, layout = documents.to(device), layout.to(device)",
        "documents, layout = documents, layout.to(device)",
        at="tokens = torch.cat([documents.tokens, nodes.tokens])",
    ),
    "a sum": Mistake(
        "strided_lora",
        "rewards.py",
        "settings.alignment_coef * alignment - settings.diversity_coef * diversity",
        "settings.alignment_coef * alignment.cpu() - settings.diversity_coef * diversity",
    ),
    "advantages": Mistake(
        "strided_full",
        "strided/loss.py",
        "(advantages.detach().unsqueeze(-1) * logps)",
        "(advantages.detach().cpu().unsqueeze(-1) * logps)",
    ),
    "a matrix": Mistake(
        "structured_single_turn",
        "rewards.py",
        "(u_NN * inverse_s_N.unsqueeze(-2))",
        "(u_NN * inverse_s_N.unsqueeze(-2).cpu())",
    ),
    "an index of references": Mistake(
        "strided_full",
        "strided/layout.py",
        "torch.arange(self.generate_max_len, device=self.device)",
        "torch.arange(self.generate_max_len)",
    ),
    "a mask of references": Mistake(
        "structured_cross_entropy",
        "structured/trainer.py",
        "return (-(logps * counted).sum(-1)",
        "return (-(logps * counted.cpu()).sum(-1)",
    ),
    "tokens of the feature network": Mistake(
        "structured_single_turn",
        "structured/reward.py",
        "(ids,) = copy_to(network.device, tokens)",
        "ids = tokens",
        at="return backbone(ids, use_cache=cache is not None",
    ),
    "targets of preferences": Mistake(
        "dpo",
        "preferences/trl.py",
        "labels[:, 1:].to(states.device)",
        "labels[:, 1:].cpu()",
        at="most_likely().eq(tokens)",
    ),
    "columns of a tree of rollouts": Mistake(
        "strided_single_pass",
        "strided/passes.py",
        "torch.arange(len(row), device=row.device) - first",
        "torch.arange(len(row)) - first",
    ),
}


@contextlib.contextmanager
def planted(mistake: Mistake) -> Iterator[None]:
    """Run the function that contains the line with the mistake in it; nothing is written."""
    path = SOURCE / mistake.path
    wrong = path.read_text(encoding="utf-8").replace(mistake.text, mistake.wrong)
    module = importlib.import_module(f"ebft.{mistake.path.removesuffix('.py').replace('/', '.')}")
    codes = {code.co_qualname: code for code in _codes(compile(wrong, str(path), "exec"))}
    changed = [
        (function, codes[name])
        for name, function in _functions(module)
        if name in codes and codes[name].replace(co_filename=function.__code__.co_filename) != function.__code__
    ]
    assert changed, f"no function of {mistake.path} contains {mistake.text}"
    before = [(function, function.__code__) for function, _ in changed]
    try:
        for function, code in changed:
            function.__code__ = code
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The functions and methods of a module, without those inside of functions."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_flags & inspect.CO_NEWLOCALS:
                yield each
            else:  # a class
                yield from _codes(each)


def _functions(owner: Any) -> Iterator[tuple[str, FunctionType]]:
    """The functions and methods that are defined in a module or class, by qualified name."""
    for each in vars(owner).values():
        if isinstance(each, type) and inspect.ismodule(owner) and each.__module__ == owner.__name__:
            yield from _functions(each)
        function = getattr(each, "func", getattr(each, "fget", getattr(each, "__func__", each)))
        function = inspect.unwrap(function) if callable(function) else function
        if isinstance(function, FunctionType):
            yield function.__qualname__, function


def report(mistake: Mistake) -> str:
    """What a run on the device says of a mistake."""
    with tempfile.TemporaryDirectory() as folder, planted(mistake):
        try:
            found = run(CASES[mistake.case], Path(folder, "run"), on_device=True)
        except Exception:  # of any kind
            return traceback.format_exc()
    return "\n".join(mistakes_without_error(found.counts))


def main() -> int:
    register()
    torch.set_num_threads(1)
    gc.freeze()
    missed = 0
    for name, mistake in MISTAKES.items():
        line, said = mistake.line(), report(mistake)
        path, _, number = line.partition(":")
        is_found = f'{SOURCE / path}", line {number},' in said or f"{line} " in said
        missed += not is_found
        last = (said.strip().splitlines() or ["nothing"])[-1]
        print(f"{'found' if is_found else 'MISSED':6} {name} ({line}): {last}", flush=True)
    print(f"{len(MISTAKES) - missed} of {len(MISTAKES)} found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
