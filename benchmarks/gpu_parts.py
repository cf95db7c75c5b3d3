"""The parts of `python -m benchmarks.gpu`, each a function that measures one thing on a device and reports it.

    python -m benchmarks.gpu_parts NAME --into FILE    # one part, in this process; see --help

A part that lacks a package or a second GPU raises NotHere. What it reports before an error is kept.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gc
import json
import os
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer, TrainerCallback

import ebft
from benchmarks import guard, published, sft_packing, strided_step
from benchmarks.measuring import GemmRate, machine, rounded, synchronise, timed
from benchmarks.presets import Preset, build_model, document, find_preset
from benchmarks.sides import PHASES, Side, ours
from ebft.strided import StridedEBFTConfig, StridedEBFTTrainer
from ebft.tools.doctor.environment import environment

ROOT = Path(__file__).parents[1]
SOURCE = str(Path(ebft.__file__).parent)
PRECISIONS = ("float32", "bfloat16", "autocast")
LENGTHS = (1024, 512, 2048, 4096)
STEPS = 5  # of a training run; the first two are not timed


class NotHere(Exception):
    """The part cannot run on this machine; the message says what it needs."""


@dataclass
class Setting:
    """Where a part measures, and at what size. `folder` is empty and temporary."""

    device: torch.device
    shape: str
    folder: Path
    wheel: Path | None = None

    @property
    def is_tiny(self) -> bool:
        return self.shape == "tiny"

    @property
    def preset(self) -> Preset:
        """A Llama of the shape of Llama-3.2-1B with random weights, or a small one."""
        preset = find_preset("1b", on_cuda=self.device.type == "cuda")
        return preset.shrunken() if self.is_tiny else preset

    @property
    def dtype(self) -> str:
        """bfloat16 on a GPU; most CPUs have no instructions for it."""
        return "bfloat16" if self.device.type == "cuda" else "float32"

    @property
    def nothing(self) -> Path:
        """In place of the wheel: without the published trainer."""
        return self.folder / "nothing"

    def tokens(self, count: int) -> int:
        """A number of tokens, smaller for the small shape."""
        return count // 16 if self.is_tiny else count


@dataclass
class Report:
    """What a part has found; stored at every change, so that a part that is stopped keeps it."""

    into: Path | None = None
    content: dict[str, Any] = field(default_factory=dict)

    def fact(self, **facts: Any) -> None:
        self._add("facts", {**self.content.get("facts", {}), **facts})

    def row(self, row: dict[str, Any]) -> None:
        print(row, flush=True)
        self._add("rows", [*self.content.get("rows", []), row])

    def summary(self, line: str) -> None:
        """The line of the part in the table of all parts."""
        self._add("summary", line)

    def wrong(self, line: str) -> None:
        """A result that is not as it must be: the part fails."""
        print("WRONG", line, flush=True)
        self._add("wrong", [*self.content.get("wrong", []), line])
        self._add("state", "failed")
        self._add("error", f"{len(self.content['wrong'])} results are not as they must be")

    def missing(self, module: str) -> None:
        """Some rows need a module that is not installed."""
        self._add("missing", [*self.content.get("missing", []), module])

    def end(self, state: str, **why: str) -> None:
        self.content |= why
        self._add("state", state)

    def _add(self, name: str, value: Any) -> None:
        self.content[name] = value
        if self.into is not None:  # at once, as the process may be ended at any time
            draft = self.into.with_suffix(".draft")
            draft.write_text(json.dumps(rounded(self.content)), encoding="utf-8")
            draft.replace(self.into)


def check_device(setting: Setting, report: Report) -> None:
    """What it is, and the rates of products, copies and launches."""
    device, found = setting.device, environment()
    report.fact(**{name: value for name, value in machine(device).items() if value is not None})
    report.fact(packages=", ".join(f"{name} {number}" for name, number in found["packages"].items()))
    if device.type == "cuda":
        _check_cuda(device, report, found["cuda"]["driver"])
    left, right = torch.randn(64, 96), torch.randn(96, 32)
    difference = (left.to(device) @ right.to(device)).cpu() - left @ right
    if not difference.abs().max() < 1e-3:
        report.wrong(f"a matrix product differs by {difference.abs().max():.1e} from the CPU's")
    for dtype in (torch.float32, torch.bfloat16):
        rate = GemmRate(dtype, device, 256 if device.type == "cpu" else None)  # bfloat16 takes minutes on some CPUs
        for _ in range(3):
            rate.sample()
        report.row({"rate": f"product of matrices of {rate.size}, {dtype}", "per second": f"{rate.fastest():.3g} FLOP"})
    report.summary(f"{rate.fastest() / 1e12:.3g} TFLOP/s in bfloat16")
    source = torch.ones(setting.tokens(2**28), device=device)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), device)[1] for _ in range(5))
    report.row({"rate": "copy, read and written", "per second": f"{2 * 4 * source.numel() / seconds / 1e9:.4g} GB"})
    small = torch.ones(8, device=device)
    launched = min(timed(lambda: [small.add_(1) for _ in range(1000)], device)[1] for _ in range(5))
    report.row({"rate": "kernels of 8 numbers, launched from Python", "per second": f"{1000 / launched:.4g}"})


def _check_cuda(device: torch.device, report: Report, driver: str | None) -> None:
    properties, (free, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    report.fact(gpus=torch.cuda.device_count(), capability=f"{properties.major}.{properties.minor}")
    report.fact(multiprocessors=properties.multi_processor_count, memory_gib=total / 2**30, free_gib=free / 2**30)
    report.fact(driver=driver, cuda_of_torch=torch.version.cuda, bf16=has_bf16)
    if not has_bf16:
        report.wrong("the GPU has no bfloat16, in which most parts compute")
    if free < 0.9 * total:
        report.wrong(f"{(total - free) / 2**30:.1f} GiB of the GPU are in use: end other processes")


def exactness(setting: Setting, report: Report, attention: str | None = None) -> None:
    """Errors of steps in each precision, beside those of plain passes in the same precision, both against float32."""
    _need_pytest()
    ways = {"two passes": {"single_pass": False}, "single pass": {"single_pass": True}}
    ways["recorded"] = {"cuda_graphs": True}
    for precision in PRECISIONS:
        for name, options in ways.items() if attention is None else [(attention, {})]:
            _strided_errors(setting, report, precision, f"strided, {name}", options, attention)
    if attention is None:
        for precision in PRECISIONS:
            _structured_errors(setting, report, precision)


def _need_pytest() -> None:
    if find_spec("pytest") is None:
        raise NotHere("what it takes from tests/ needs pytest: pip install pytest")


def _strided_errors(
    setting: Setting, report: Report, precision: str, step: str, options: dict[str, Any], attention: str | None
) -> None:
    """A step on three documents of unequal lengths, and single sequences through copies of its model."""
    from tests.strided.oracle import options_of, oracle_step
    from tests.strided.test_exactness import BASE, unequal_batch

    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = build_model(setting.preset, dtype, 64, attention)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # an adapter begins as the identity
                weight.normal_(0, 0.05)
    exact = copy.deepcopy(model).float().to(setting.device).eval()
    plain = exact if precision == "float32" else copy.deepcopy(model).to(setting.device).eval()
    model.to(setting.device)
    for each in (plain, exact):
        each.config._attn_implementation = "eager"
    place = {"output_dir": str(setting.folder), "report_to": [], "use_cpu": setting.device.type == "cpu"}
    args = StridedEBFTConfig(**place, bf16=precision == "autocast", seed=3, **BASE, **options)
    trainer = StridedEBFTTrainer(model=model, args=args)
    side = Side(step, dtype, trainer, {}, is_ours=True)
    inputs, rows = unequal_batch()
    inputs = {name: value.to(setting.device) for name, value in inputs.items()}
    rows = [(ids.to(setting.device), prompt, targets) for ids, prompt, targets in rows]
    loss, out = trainer.compute_loss(side.trainer.model, inputs, return_outputs=True)
    loss.backward()
    wanted = oracle_step(exact, rows, out.rollouts, options_of(args, trainer.block_options.end_ids))
    wanted.loss.backward()
    usual = wanted
    if plain is not exact:
        with torch.autocast(setting.device.type, torch.bfloat16) if precision == "autocast" else nullcontext():
            usual = oracle_step(plain, rows, out.rollouts, options_of(args, trainer.block_options.end_ids))
        usual.loss.backward()
    row = {"step": step, "precision": precision}
    for name, values in (("logp", out.logps.transpose(1, 2)), ("advantage", out.advantages.transpose(1, 2))):
        places = list(getattr(wanted, f"{name}s"))  # of logps (row, block, sample), of advantages (row, block)
        single = [
            torch.cat([getattr(each, f"{name}s")[p].detach().float() for p in places]) for each in (wanted, usual)
        ]
        sizes = [len(getattr(wanted, f"{name}s")[p]) for p in places]  # of logps, the tokens up to the end
        ours = torch.cat([values[p][:size] for p, size in zip(places, sizes)]).detach().float()
        for who, found in (("", ours), (", plain", single[1])):
            error = (found - single[0]).abs()
            row |= {f"{name} error{who}": error.mean().item(), f"{name} error, largest{who}": error.max().item()}
    _compare(report, row, *(_gradient(each) for each in (trainer.model, exact, plain)))
    del side, trainer, model, plain, exact, loss, out, wanted, usual
    _free(setting.device)


def _structured_errors(setting: Setting, report: Report, precision: str) -> None:
    """A structured step of a tiny chat model, and single sequences through its copies on CPU."""
    from tests.structured import oracle
    from tests.structured.conftest import chat_model, lora, make_chat_tokenizer
    from tests.structured.trainers import make, one_step

    tokenizer = make_chat_tokenizer()
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    models = [lora(chat_model(tokenizer)).to(dtype) for _ in range(3)]
    policy, exact, plain = models[0], models[1].float(), models[2]
    base, plain_base = (chat_model(tokenizer).to(dtype) for _ in range(2))
    settings = {"use_whitening": False, "bf16": precision == "autocast", "use_cpu": setting.device.type == "cpu"}
    trainer = make(policy, tokenizer, setting.folder, ce_coef=0.3, **settings)
    loss, _, rollouts, batch = one_step(trainer)
    wanted = oracle.loss(exact.eval(), base.float(), tokenizer, rollouts, batch, trainer.args)
    wanted.backward()
    with torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext():
        usual = oracle.loss(plain.eval(), plain_base, tokenizer, rollouts, batch, trainer.args)
    usual.backward()
    errors = {"loss error": abs(loss - wanted.item()), "loss error, plain": abs(usual.item() - wanted.item())}
    row = {"step": "structured, tiny chat model", "precision": precision, **errors}
    _compare(report, row, *(_gradient(each) for each in (trainer.model, exact, plain)))


def _gradient(model: torch.nn.Module) -> Tensor:
    """All gradients of a model in one vector, in float64 on CPU."""
    found = [w.grad.double().cpu().flatten() for _, w in sorted(model.named_parameters()) if w.grad is not None]
    return torch.cat(found)


def _compare(report: Report, row: dict[str, Any], step: Tensor, exact: Tensor, plain: Tensor) -> None:
    """Report a row with its gradients, and what is less exact than rounding explains."""
    for who, found in (("", step), (", plain", plain)):
        row[f"gradient difference{who}"] = ((found - exact).norm() / exact.norm()).item()
    report.row(row)
    row = {"logp error": 0.0, "logp error, largest": 0.0, "logp error, plain": 0.0, **row}
    name = f"{row['step']}, {row['precision']}"
    report.summary(main_errors(report.content["rows"]))
    if row["precision"] == "float32":
        if not row["logp error, largest"] <= 1e-4 or not row["gradient difference"] <= 2e-3:
            report.wrong(f"{name}: not equal to plain passes")
    elif (
        not row["logp error"] <= 1.5 * row["logp error, plain"] + 1e-3
        or not row["gradient difference"] <= 1.5 * row["gradient difference, plain"] + 0.05
    ):
        report.wrong(f"{name}: errors are larger than those of plain passes in the same precision")


def main_errors(rows: list[dict[str, Any]]) -> str:
    """The largest difference of gradients in each precision, beside that of plain passes, in a line."""
    found = []
    for precision in PRECISIONS:
        of_precision = [row for row in rows if row.get("precision") == precision]
        if of_precision:
            row = max(of_precision, key=lambda row: row["gradient difference"])
            plain = "" if precision == "float32" else f" (plain passes {row['gradient difference, plain']:.1e})"
            found.append(f"{precision} {row['gradient difference']:.1e}{plain}")
    return f"gradients differ by: {', '.join(found)}"


def strided_steps(
    setting: Setting,
    report: Report,
    length: int,
    variants: tuple[str, ...],
    wheel: Path | None,
    recompile_steps: int = 0,
) -> None:
    """The benchmark of strided_step.py at one length: a row for each side."""
    output, length = setting.folder / f"step-{length}.json", setting.tokens(length)
    words = ["--preset", "1b", "--dtypes", setting.dtype, "--lengths", length, "--variant-lengths", length]
    words += ["--variants", *variants, "--recompile-steps", recompile_steps, "--overhead-steps", 0, "--output", output]
    words += ["--wheel", wheel] if wheel else []
    words += ["--tiny", "--repeats", 1] if setting.is_tiny else []
    strided_step.main([str(word) for word in words])
    found = json.loads(output.read_text(encoding="utf-8"))
    report.fact(**{name: str(found["card"][name]) for name in ("model", "options", "mfu_of")})
    if recompile_steps:
        report.fact(steps=recompile_steps, compiled_again=str(found["recompilations"]["frames"]))
    [result] = found["lengths"]
    reference = result["sides"]["ours"]
    for name, side in result["sides"].items():
        row = {"tokens": length, "side": name, "failed": side["failed"], "peak GiB": None, "memory / ours": None}
        if side["peak_mib"]:
            row |= {"peak GiB": side["peak_mib"] / 1024, "memory / ours": side["peak_mib"] / reference["peak_mib"]}
        if side["rounds"]:
            row |= {"seconds": side["step"], "time / ours": side["step"] / reference["step"]}
            row |= {phase: side[phase] for phase in PHASES}
            row |= {"tokens/s": side["tokens_per_s"], "MFU": side["mfu"], "/ floor": side.get("step_over_floor")}
        report.row(row)
        if name == "ours":
            report.summary(f"{row['seconds']:.3g} s with {length} tokens")
        elif "seconds" in row:
            memory = f", {row['memory / ours']:.2f} x memory" if row["memory / ours"] else ""
            report.summary(f"{name} / ours with {length} tokens: {row['time / ours']:.2f} x time{memory}")
        else:
            report.summary(f"{name} with {length} tokens: {row['failed']}")
    if wheel != setting.nothing and "axolotl" not in result["sides"]:
        report.wrong(f"axolotl is {found['card']['axolotl']}")


def steps(setting: Setting, report: Report) -> None:
    """Ours alone, by length; full fine-tuning at 1024 tokens."""
    for length in LENGTHS:
        variants = ("ours single pass", "ours recorded", *(["ours full"] if length == 1024 else []))
        strided_steps(setting, report, length, variants, setting.nothing)
        report.summary(main_steps(report.content["rows"], setting.tokens(1024)))


def main_steps(rows: list[dict[str, Any]], length: int) -> str:
    """Seconds and memory of the steps of one length, in a line."""
    found = []
    for row in rows:
        if row["tokens"] == length and "seconds" in row:
            memory = f" {row['peak GiB']:.3g} GiB" if row["peak GiB"] else ""
            found.append(f"{row['side']} {row['seconds']:.3g} s{memory}")
    return f"{length} tokens: {', '.join(found) or 'all failed'}"


def beside(length: int) -> Callable[[Setting, Report], None]:
    """Ours and the published trainer in turn at one length."""

    def measure(setting: Setting, report: Report) -> None:
        try:
            published.load_trainer(setting.wheel)
        except published.NotAvailable as reason:
            raise NotHere(f"axolotl {published.VERSION}: {reason}. --wheel names the file") from reason
        strided_steps(setting, report, length, (), setting.wheel)

    return measure


def flex(setting: Setting, report: Report) -> None:
    """Errors of the compiled kernel, then its speed beside the portable path."""
    exactness(setting, report, "flex_attention")
    for length, recompile_steps in ((1024, 10), (4096, 0)):
        strided_steps(setting, report, length, ("ours flex",), setting.nothing, recompile_steps)


def marked_tests(setting: Setting, report: Report) -> None:
    """pytest on the files that have tests for a GPU; each outcome is reported as it comes."""
    _need_pytest()
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    names = [str(path.relative_to(ROOT)) for path in files if path.parent.name != "benchmarks"]
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-m", "gpu", "--tb", "short", *names]
    if setting.device.type == "cuda" and find_spec("xdist"):
        command += ["--numprocesses", "6"]  # for kernels that are compiled
    outcomes: Counter[str] = Counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            found = re.search(r"(PASSED|FAILED|SKIPPED|ERROR)", line) if "::" in line else None
            if found and " - " not in line:  # once, not in the summary
                outcomes[found[0]] += 1
                report.fact(files=", ".join(names))
                report.summary(", ".join(f"{count} {outcome.lower()}" for outcome, count in outcomes.items()))
                if found[0] in ("FAILED", "ERROR"):
                    report.wrong(line.strip())
    if process.returncode not in (0, 1):
        report.wrong(f"pytest ended with exit code {process.returncode}")


def kernels(setting: Setting, report: Report) -> None:
    """What the device does in one strided step, and the lines of the package that wait for it."""
    length = setting.tokens(1024)
    steps = {"LoRA": {}, "LoRA, single pass": {"single_pass": True}, "LoRA, recorded": {"cuda_graphs": True}}
    steps |= {"full": {"lora_rank": 0}, "full, recorded": {"lora_rank": 0, "cuda_graphs": True}}
    report.fact(tokens=length)
    for name, options in steps.items():
        side = ours(setting.preset, setting.dtype, length, setting.folder, name, **options)
        inputs = document(setting.preset, length, side.device)
        for _ in range(2):
            side.step(inputs)
        seconds = median(timed(partial(side.step, inputs), side.device)[1] for _ in range(3))
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if side.device.type == "cuda" else [])]
        with profile(activities=activities) as profiled:
            side.step(inputs)
            synchronise(side.device)
        events = profiled.profiler.kineto_results.events()
        work = device_work(events, seconds)
        shown = f"{work['kernels']} kernels, {work['waits']} waits, {work['idle']:.0%} idle"
        if side.device.type != "cuda":  # there are no events of a device
            work = {"operations on the host": work["operations on the host"]}
            shown = f"{seconds:.3g} s, {work['operations on the host']} operations on the host"
        report.row({"step": name, "seconds": seconds, **work})
        report.summary("; ".join(filter(None, [report.content.get("summary"), f"{name}: {shown}"])))
        with waits_by_line(side.device) as lines:
            side.step(inputs)
        report.fact(**{f"waits, {name}": ", ".join(f"{line} {count}" for line, count in lines.most_common(12))})
        report.fact(**{f"longest, {name}": longest_kernels(events)})
        side = None  # its memory is free before the next one is built
        _free(setting.device)


_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def device_work(events: list[Any], seconds: float) -> dict[str, Any]:
    """Kernels, waits and idle time of a step, from the events of the profiler and its seconds without it."""
    of_device = [event for event in events if _is_of_device(event)]
    names = Counter(event.name() for event in events)
    copied = [event for event in of_device if event.name().startswith(("Memcpy", "Memset"))]
    busy = sum(event.duration_ns() for event in of_device) / 1e9
    return {
        "kernels": len(of_device) - len(copied),
        "copies and fills": len(copied),
        # The last wait is the measurement's own.
        "waits": max(0, sum(count for name, count in names.items() if name in _WAITS) - 1),
        "operations on the host": sum(count for name, count in names.items() if name.startswith("aten::")),
        "seconds of kernels": busy,
        "idle": 1 - busy / seconds,
    }


def _is_of_device(event: Any) -> bool:
    return event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()


def longest_kernels(events: list[Any], count: int = 8) -> str:
    """The kernels that take most of the time of the device."""
    total: Counter[str] = Counter()
    for event in events:
        if _is_of_device(event):
            name = event.name().replace("(anonymous namespace)::", "")
            total[re.sub(r"[<(].*", "", name)[:60]] += event.duration_ns()
    return ", ".join(f"{name} {nanoseconds / 1e6:.1f} ms" for name, nanoseconds in total.most_common(count))


@contextmanager
def waits_by_line(device: torch.device) -> Iterator[Counter[str]]:
    """Count what waits for a CUDA device inside the block, by the line of the package that called it."""
    lines: Counter[str] = Counter()
    if device.type != "cuda":
        yield lines
        return

    def count(message: Any, *args: Any, **kwargs: Any) -> None:
        if "synchroniz" in str(message):
            frame = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
                frame = frame.f_back
            path = "(elsewhere)" if frame is None else frame.f_code.co_filename[len(SOURCE) + 1 :]
            lines[path if frame is None else f"{path}:{frame.f_lineno}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode("default")


def methods(setting: Setting, report: Report) -> None:
    """The methods of guard.py through `ebft.train`, with a model of the shape in bfloat16 and rows of 512 tokens."""
    for name, (transform, keys) in guard.METHODS.items():
        _train(setting, report, name, transform, keys, 512)


def memory(setting: Setting, report: Report) -> None:
    """SFT of all weights on rows of 2048 tokens with what saves memory or time, by one key each."""
    liger = dict.fromkeys(("liger_rope", "liger_rms_norm", "liger_glu_activation"), True)
    offloading, checkpointing = {"activation_offloading": True}, {"gradient_checkpointing": True}
    ways = {"as it is": {}, "activation_offloading": offloading, "gradient_checkpointing": checkpointing}
    ways |= {"both": offloading | checkpointing, "all logits": {"chunked_cross_entropy": False}}
    # Liger last: it changes modules of transformers for the whole process.
    ways |= {"adamw_8bit": {"optimizer": "adamw_8bit"}, "Liger": liger}
    for name, keys in ways.items():
        needed = {"Liger": "liger_kernel", "adamw_8bit": "bitsandbytes"}.get(name)
        if needed and find_spec(needed) is None:
            report.row({"run": name, "failed": f"{needed} is not installed"})
            report.missing(needed)
            _count_runs(report)
        else:
            _train(setting, report, name, "chat_template", keys, 2048)


def vllm(setting: Setting, report: Report) -> None:
    """The structured method of guard.py with completions of vLLM: in this process, on the same GPU, and as a server."""
    transform, keys = guard.METHODS["structured LoRA"]
    ways: dict[str, dict[str, Any]] = {"generate": keys}
    python, here = os.environ.get("EBFT_VLLM_PYTHON"), find_spec("vllm") is not None
    if here:
        shared = {**keys["trl"], "use_vllm": True, "vllm_mode": "colocate"}
        ways["colocate"] = {**keys, "trl": shared, "vllm": {"gpu_memory_utilization": 0.3}}
    if (here or python) and torch.cuda.device_count() > 1:  # a server needs a GPU of its own
        served = {**keys["trl"], "use_vllm": True, "vllm_mode": "managed"}
        ways["managed"] = {**keys, "trl": served, "vllm": {"python": python} if python else {}}
    if len(ways) == 1:
        raise NotHere(
            "vLLM is not installed: pip install 'ebft[vllm]'. With two GPUs, it may be in another environment, whose "
            "interpreter EBFT_VLLM_PYTHON names"
        )
    for name, options in ways.items():
        _train(setting, report, name, transform, options, 512)


class StepTimes(TrainerCallback):
    """Seconds of each step, and the peak of the memory from the second step on."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.peak_gib = device, [], None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronise(self.device)
        if self.device.type == "cuda" and state.global_step == 1:
            torch.cuda.reset_peak_memory_stats(self.device)
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronise(self.device)
        self.seconds.append(time.perf_counter() - self._start)
        if self.device.type == "cuda":
            self.peak_gib = torch.cuda.max_memory_allocated(self.device) / 2**30


def _train(setting: Setting, report: Report, name: str, transform: str, keys: dict[str, Any], tokens: int) -> None:
    """Train for a few steps, and report a row; an error of one run is reported, and is no end of the others."""
    steps = StepTimes(setting.device)
    row: dict[str, Any] = {"run": name}
    try:
        with patch("ebft.run.trainer.ProgressBar", steps), warnings.catch_warnings(action="ignore"):
            config = {**guard.COMMON, "torch_dtype": setting.dtype, "bf16": setting.dtype == "bfloat16", **keys}
            config |= {**_inputs(setting, transform, tokens), "max_steps": STEPS, "logging_steps": 1}
            history = ebft.train(ebft.RunConfig.from_dict(config)).trainer.state.log_history
        losses = [entry["loss"] for entry in history if "loss" in entry]
        row |= {"seconds": median(steps.seconds[2:]), "peak GiB": steps.peak_gib, "last loss": losses[-1]}
        if not all(torch.tensor(losses).isfinite()):
            report.wrong(f"{name}: losses {losses}")
    except Exception as error:  # of any kind, such as too little memory: the next run is tried
        print(traceback.format_exc(), flush=True)
        row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
        report.wrong(f"{name}: {row['failed']}")
    report.row(row)
    _count_runs(report)
    _free(setting.device)


def _count_runs(report: Report) -> None:
    failed = [row["run"] for row in report.content["rows"] if "failed" in row]
    count = len(report.content["rows"]) - len(failed)
    report.summary(f"{count} runs" + (f", without {', '.join(failed)}" if failed else ""))


def _inputs(setting: Setting, transform: str, tokens: int) -> dict[str, Any]:
    """The inputs of guard.py with the model of the shape, which is saved once, and longer rows."""
    keys = guard.inputs_of(transform, setting.folder)
    if setting.is_tiny:
        return keys
    base = setting.folder / "shape"
    if not base.exists():
        build_model(replace(setting.preset, lora_rank=None), getattr(torch, setting.dtype), 4096).save_pretrained(base)
        AutoTokenizer.from_pretrained(keys["base_model"]).save_pretrained(base)
        _free(setting.device)
    text = guard.sentence
    rows = [guard.pair(text(n, tokens // 4), " " + text(n + 50, tokens * 3 // 4 - 8)) for n in range(16)]
    (setting.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {**keys, "base_model": str(base), "sequence_len": tokens}


def packing(setting: Setting, report: Report) -> None:
    """sft_packing.py with each implementation of attention that is there."""
    attentions = ["sdpa", *(["flash_attention_2"] if find_spec("flash_attn") else [])]
    if "flash_attention_2" not in attentions:
        report.fact(flash_attention_2="not measured: flash-attn is not installed")
        report.missing("flash_attn")
    for attention in attentions:
        output = setting.folder / f"{attention}.json"
        words = ["--preset", "1b", "--dtype", setting.dtype, "--attention", attention, "--output", str(output)]
        words += ["--length", str(setting.tokens(2048)), "--documents", "16" if setting.is_tiny else "64"]
        words += ["--tiny", "--repeats", "1"] if setting.is_tiny else []
        sft_packing.main(words)
        for row in json.loads(output.read_text(encoding="utf-8"))["ways"]:
            report.row({"attention": attention, **row})
            report.summary(f"{attention}, {row['way']}: {row['ratio']:.2f} x the tokens per second of padded rows")
        _free(setting.device)


def processes(setting: Setting, report: Report) -> None:
    """`ebft train` of a strided run in float32 in two processes: DDP, and FSDP2, with the losses of one."""
    if setting.device.type == "cuda" and torch.cuda.device_count() < 2:
        raise NotHere("there is one GPU: two are needed")
    _need_pytest()
    from tests.golden.runs import write_inputs

    config = write_inputs("strided_full", setting.folder)
    common = ["bf16=false", "max_steps=3", "eval_steps=3"]
    one = _launched(setting, config, "one", 1, [*common, "micro_batch_size=4"])
    ways = {"DDP": [], "FSDP2": ["fsdp=true"]}
    for name, words in ways.items():
        two = _launched(setting, config, name, 2, [*common, "micro_batch_size=2", *words])
        difference = max((abs(a - b) for a, b in zip(one, two)), default=float("inf"))
        report.row({"run": name, "losses": str(two), "of one process": str(one), "largest difference": difference})
        report.summary(f"{', '.join(row['run'] for row in report.content['rows'])}: losses of one process")
        if len(one) != len(two) or not difference < 1e-3:
            report.wrong(f"{name}: the losses are not those of one process")


def _launched(setting: Setting, config: Path, name: str, count: int, words: list[str]) -> list[float]:
    """The losses of a run in `count` processes. Raises RuntimeError with the end of its output."""
    out = setting.folder / name
    command = [sys.executable, "-m", "ebft", "train", str(config), f"output_dir={out}", *words]
    command += ["--num-processes", str(count)] if count > 1 else ["--launcher", "python"]
    given = {"CUDA_VISIBLE_DEVICES": "0,1", **os.environ} if count > 1 else {**os.environ}
    done = subprocess.run(command, cwd=setting.folder, env=given, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def _free(device: torch.device) -> None:
    """Return the memory of what is not used any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


PARTS: dict[str, Callable[[Setting, Report], None]] = {
    "device": check_device,
    "exactness": exactness,
    "step": steps,
    **{f"beside {length}": beside(length) for length in LENGTHS},
    "tests": marked_tests,
    "kernels": kernels,
    "methods": methods,
    "flex": flex,
    "packing": packing,
    "memory": memory,
    "vllm": vllm,
    "processes": processes,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_parts", description="Measure one part.")
    add = parser.add_argument
    add("part", choices=list(PARTS))
    add("--into", type=Path, required=True, help="the JSON file of what it finds")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--shape", choices=("1b", "tiny"), default="1b")
    add("--folder", type=Path, required=True, help="an empty folder for what it writes besides")
    add("--wheel", type=Path, help="the wheel of the published trainer")
    add("--seconds", type=float, help="print the stacks of all threads shortly before these have passed")
    given = parser.parse_args(arguments)
    if given.seconds:
        faulthandler.dump_traceback_later(max(1.0, given.seconds - 3))
    report, device = Report(given.into), torch.device(given.device)
    report.content |= {name: machine(torch.device("cpu"))[name] for name in ("commit", "torch", "date")}
    try:
        PARTS[given.part](Setting(device, given.shape, given.folder, given.wheel), report)
    except NotHere as reason:
        report.end("skipped", skipped=str(reason))
    except Exception as error:  # of any kind: what it is goes into the results
        print(traceback.format_exc(), flush=True)
        report.end("failed", error=f"{type(error).__name__}: {error}".splitlines()[0])
    else:
        report.end(report.content.get("state", "done"))
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
