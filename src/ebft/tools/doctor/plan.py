"""What a training step of a config needs, from running it on a device without data (fake.py), and what fits on a card.

The model is built from its configuration, the rows are the longest that the config allows or those that are given, and
one optimizer step is run with as many micro-batches as change the memory. Each run is a process of its own.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from ebft.errors import ConfigError, ModelError, cause
from ebft.machine import gib
from ebft.models.adapter import attach_adapter
from ebft.models.load import load_model_config, weights_dtype
from ebft.run.checkpoints import optimizer_bytes
from ebft.run.config.schema import RunConfig
from ebft.run.trainer import build_trainer, training_arguments
from ebft.tools.doctor.environment import Attempt, Check
from ebft.tools.doctor.known import KNOWN, Card, Use, process_for_plans
from ebft.tools.doctor.memory import CHANGES_TRAINING, changed, changes
from ebft.tools.doctor.rows import rows_per_step
from ebft.tools.doctor.run import OptimizerPhase, without_output

STEP = "loss and backward"  # what is in no other phase of a step
BEFORE = ("model", "trainer setup")  # phases before the first step
_GIB = 2**30
_KERNEL = 26e-6  # seconds of Python for a kernel and the views around it: an estimate, not measured on a GPU
_SHORTEST = 128  # tokens of a row that may be halved
_TIGHT = 0.9  # of the room; more than this is a warning
_RESERVE = 1.0  # GiB for the CUDA context, the libraries' workspaces and the allocator's gaps
_BITS = {4: 4.5 / 8, 8: 1.0}  # bytes of a quantised weight, with the scales of its blocks


@dataclass(frozen=True)
class StepPlan:
    """The phases of a step, in their order, and the numbers of weights."""

    phases: dict[str, Use]
    parameters: int
    trained: int

    @property
    def peak(self) -> str:
        """The phase that needs the most."""
        return max(self.phases, key=lambda name: self.phases[name].peak)

    @property
    def total(self) -> int:
        return self.phases[self.peak].peak


@dataclass(frozen=True)
class Request:
    """What to plan: a config with its model's configuration, for a GPU with `memory` bytes, or else a CPU. `rows` and
    `tokenizer` are from a run; without them, rows are as long as the config allows. The memory decides whether adapters
    are added to float32 weights while rollouts are sampled."""

    config: RunConfig
    model_config: Any
    rows: Any = None
    tokenizer: Any = field(default=None, repr=False)
    memory: int = 0
    on_gpu: bool = True


class Planner:
    """Plans requests one after another in a process of its own, which ends with the block. A request that cannot be
    planned returns the message of its error."""

    def __enter__(self) -> Planner:
        self._known: dict[bytes, StepPlan | str] = {}
        self._process = ProcessPoolExecutor(1, get_context("spawn"), process_for_plans)
        return self

    def __call__(self, request: Request) -> StepPlan | str:
        given = pickle.dumps(request)
        if given not in self._known:
            self._known[given] = self._process.submit(_answer, given).result()
        return self._known[given]

    def __exit__(self, *_: Any) -> None:
        self._process.shutdown()


def _answer(given: bytes) -> StepPlan | str:
    from ebft.tools.doctor import fake  # needs a PyTorch whose backends can be written in Python

    fake.register()
    try:
        with warnings.catch_warnings(action="ignore"), tempfile.TemporaryDirectory() as folder:
            return _plan(pickle.loads(given), folder, fake.ledger)
    except Exception as error:  # of any library: the message is reported
        return cause(error)


def _plan(request: Request, folder: str, ledger: Any) -> StepPlan:
    """Build the model and the trainer, and run one optimizer step."""
    from ebft.tools.doctor.fake import Module

    gc.collect()
    ledger.restart()
    Module.memory = request.memory
    given, config = request.config, _for_device(request.config, folder)
    tokenizer = request.tokenizer or _tokenizer(request.model_config)
    with ledger.phase("model"):
        model, parameters = _model(request, config, tokenizer, ledger)
    ledger.phases["model"].peak = ledger.held[0] - ledger.base[0]  # without the drawing
    rows = request.rows
    if rows is None:
        rows = config.method.arrange(config, full_rows(config, tokenizer))
    args = training_arguments(config, rows=len(rows), has_eval=False)
    args.disable_tqdm = True
    with ledger.phase("trainer setup"):
        trainer: Any = build_trainer(config, args, model, tokenizer, rows, None)
    for module in [module for name, module in sys.modules.items() if name.startswith("ebft.")]:
        for sizes in vars(module).values():  # of tiles, for CPUs and others; now that all modules are imported
            if type(sizes) is dict and {"cpu", "other"} <= set(sizes):
                sizes.setdefault("gpu", sizes["other"])
                sizes["other"] = sizes["gpu" if request.on_gpu else "cpu"]
    for name, method in config.method.phases.items():
        setattr(trainer, method, ledger.phase(name)(getattr(trainer, method)))
    if given.method.rows == "prompts" and given.trl.use_vllm:
        trainer.backend = _Server
    trainer.add_callback(_Step(ledger, optimizer_bytes(given.optimizer, 4) / 8 if "bit" in given.optimizer else 1.0))
    with ledger.phase(STEP):
        trainer.train()
    if given.val_set_size or given.test_datasets:
        batch = [rows[index] for index in range(min(len(rows), args.per_device_eval_batch_size))]
        held_out = [document for row in batch for document in row.get("documents", [row])]  # evaluated unpacked
        with ledger.phase("evaluation"):
            trainer.evaluate(Dataset.from_list(held_out))
    return StepPlan(
        phases=_uses(ledger, given.gradient_accumulation_steps / config.gradient_accumulation_steps),
        parameters=parameters,
        trained=sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad),
    )


def _uses(ledger: Any, repeats: float) -> dict[str, Use]:
    """The phases that computed something, as they follow each other; phases of micro-batches are `repeats` as long."""
    last = ["others", STEP, "optimizer", "evaluation"]  # the second has all others within it
    names = [name for name, use in ledger.phases.items() if use.kernels]
    for name in names:
        if name not in (*BEFORE, "optimizer", "evaluation"):
            for count in ("kernels", "flops", "moved", "flops_elsewhere"):
                setattr(ledger.phases[name], count, repeats * getattr(ledger.phases[name], count))
    ordered = sorted(names, key=lambda name: last.index(name if name in last else "others"))
    return {name: ledger.phases[name] for name in ordered}


def _model(request: Request, config: RunConfig, tokenizer: Any, ledger: Any) -> tuple[Any, int]:
    """The model to train, and the number of its weights without the adapter."""
    head, model_config, given = config.method.head(config), copy.deepcopy(request.model_config), request.config
    if head.num_labels is not None:
        model_config.num_labels = head.num_labels
        model_config.classifier_dropout = 0.0
    with torch.device("pretend", 0):
        model = head.auto_class.from_config(
            model_config, dtype=weights_dtype(config), trust_remote_code=config.trust_remote_code
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    if request.tokenizer is None and head.num_labels is None:
        model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    bits = 4 if given.load_in_4bit else 8 if given.load_in_8bit else None
    if bits is not None:
        # The weights of the decoder's linear layers as they are stored, and the largest one once as it is used.
        head = model.get_output_embeddings()
        found = [each.weight for each in model.modules() if isinstance(each, torch.nn.Linear) and each is not head]
        found += [weight for weight in model.parameters() if given.quantize_moe_experts and weight.dim() == 3]
        saved = sum(weight.nbytes - int(weight.numel() * _BITS[bits]) for weight in found)
        ledger.add(max(weight.nbytes for weight in found) - saved, 0)
    parameters = model.num_parameters()
    return attach_adapter(model, config), parameters


class _Step(OptimizerPhase):
    """Also makes the optimizer's states before the step, since later steps have them: `share` of their bytes."""

    def __init__(self, ledger: Any, share: float) -> None:
        super().__init__(ledger)
        self._share = share

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        before = self.phases.held[0]
        for weight in [weight for group in optimizer.param_groups for weight in group["params"]]:
            weight.grad = torch.zeros_like(weight)
        with self.phases.paused():
            (optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer).step()
            optimizer.zero_grad()
        gc.collect()
        states = self.phases.held[0] - before
        self.phases.add(int(states * self._share) - states, 0)


class _Server:
    """Rollouts of a vLLM server, which take no memory of the process that trains."""

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[Any]:
        from ebft.structured.rollouts.turns import Completion

        return [Completion([random.randrange(2, 1000) for _ in range(n)], [0.0] * n) for n in max_tokens]


# Rows as long as the config allows


def _tokenizer(model_config: Any) -> PreTrainedTokenizerFast:
    """A tokenizer in which each word is a token, with as many words as the model has embeddings."""
    size = model_config.get_text_config().vocab_size
    # Tokens that are read from the device together with numbers without values are 0, which must not end a sample.
    words = {word: index for index, word in enumerate(["<pad>", "<end>", *(f"w{n}" for n in range(size - 2))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    found.chat_template = "{% for message in messages %}{{ message['content'] + ' <end> ' }}{% endfor %}"
    return found


def full_rows(config: RunConfig, tokenizer: Any) -> Dataset:
    """Rows for one step, as long as `sequence_len` and the lengths of completions allow."""
    length, half, trl = config.sequence_len, config.sequence_len // 2, config.trl
    rest = length - half

    def ids(count: int) -> list[int]:
        return [random.randrange(2, len(tokenizer)) for _ in range(count)]

    reference = trl.max_completion_length
    if config.method.needs_reference and config.ebft.adaptive_max_tokens:
        reference = math.ceil(reference / config.ebft.gt_length_multiplier)
    reference = max(1, min(reference, length - 2))
    text = lambda count: tokenizer.decode(ids(count))
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "tokens": lambda: {"input_ids": (tokens := ids(length)), "labels": tokens, "prompt_length": 0},
        "steps": lambda: {"input_ids": ids(length), "labels": [-100] * (length - 1) + [1]},
        "comparisons": lambda: {"chosen_ids": ids(length), "rejected_ids": ids(length)},
        "preferences": lambda: {"prompt_ids": ids(half), "chosen_ids": ids(rest), "rejected_ids": ids(rest)},
        "labelled": lambda: {"prompt_ids": ids(half), "completion_ids": ids(rest), "label": random.random() < 0.5},
        "prompts": lambda: {"prompt": text(max(1, length - 1 - reference)), "ground_truth": text(reference)},
    }
    return Dataset.from_list([rows[config.method.rows]() for _ in range(rows_per_step(config))])


def _for_device(config: RunConfig, folder: str) -> RunConfig:
    """The config with what the device decides in its place, and without what needs values or other processes."""
    changes: dict[str, Any] = {
        **dict.fromkeys(("device_map", "max_memory", "attn_implementation", "fsdp", "fsdp_config", "deepspeed")),
        **dict.fromkeys(("load_in_4bit", "load_in_8bit", "torch_compile"), False),
        "logging_steps": 10**6,
        "dataloader_num_workers": 0,
        "val_set_size": 0.0,
        "adapter": "lora" if config.adapter == "qlora" else config.adapter,
        "optimizer": "adamw_torch_fused" if "bit" in config.optimizer else config.optimizer,
    }
    device = config.ebft.feature_device
    if device is not None:
        changes["ebft.feature_device"] = f"pretend:{int(device not in ('cuda', 'cuda:0'))}"
    server = {"use_vllm": False, "async_prefetch": False, "vllm_mode": "server"}
    changes |= {f"trl.{key}": value for key, value in server.items() if hasattr(config.trl, key)}
    return changed(without_output(config, folder), changes)


# Whether a step fits on a card, where its memory and its time are, and what to change


def model_config_of(config: RunConfig) -> tuple[Any, str]:
    """The configuration of the base model, from its config.json or `KNOWN`, and which one. Raises ModelError."""
    try:
        return load_model_config(config), "config.json"
    except (ModelError, ConfigError, OSError) as error:
        name = re.sub("-(Instruct|Base)$", "", config.base_model)
        if (Path(config.base_model).expanduser() / "config.json").is_file():
            raise
        if name not in KNOWN:
            raise ModelError(
                f"{error} To plan without it, set base_model to a folder with its config.json (weights are not needed) "
                f"or to a model whose shape is known: {', '.join(KNOWN)}."
            ) from error
    values = dict(KNOWN[name])
    return AutoConfig.for_model(values.pop("model_type"), **values), f"the known shape of {name}"


def floor(plan: StepPlan, card: Card, config: RunConfig) -> dict[str, float]:
    """The least seconds of an optimizer step by its FLOPs at the card's rate, its bytes at its bandwidth, and the
    launches of its kernels; empty if the rates of the card are not known."""
    rate = card.bfloat16 if _is_rounded(config) else card.float32
    if rate is None or card.bandwidth is None:
        return {}
    step = [use for name, use in plan.phases.items() if name not in (*BEFORE, "evaluation")]
    flops, moved, kernels = (sum(getattr(use, name) for use in step) for name in ("flops", "moved", "kernels"))
    return {"arithmetic": flops / rate, "memory traffic": moved / card.bandwidth, "kernels": kernels * _KERNEL}


def _is_rounded(config: RunConfig) -> bool:
    """Whether products are computed with 16 bits."""
    return bool(config.torch_dtype == "bfloat16" or config.bf16 or config.fp16)


def _on_gpu(config: RunConfig) -> RunConfig:
    """The config with the precision of `bf16: auto` on a GPU, whatever this machine has."""
    return config.model_copy(update={"bf16": not config.fp16}) if config.bf16 == "auto" else config


def _request(config: RunConfig, model_config: Any, card: Card) -> Request:
    """The request for a card; plans that do not depend on its memory are the same for all cards."""
    folds = config.adapter == "lora" and not (_is_rounded(config) or config.load_in_8bit)
    return Request(config, model_config, memory=int(card.memory * _GIB) if folds else 0)


def room(card: Card, config: RunConfig) -> float:
    """Bytes that a step may have on the card: less its reserve, and what a colocated vLLM takes."""
    served = config.vllm.gpu_memory_utilization or 0.9
    shares = config.method.rows == "prompts" and config.trl.use_vllm and config.trl.vllm_mode == "colocate"
    return (card.memory * (1 - served if shares else 1) - _RESERVE) * _GIB


def with_changes(
    config: RunConfig, model_config: Any, card: Card, planner: Planner, now: StepPlan
) -> tuple[list[str] | None, StepPlan]:
    """The changes, as text, with which a step fits whose plan is `now`, and its plan after them. One change after
    another, the cheapest first, is made if it lowers the peak by 1%. None if all known changes are not enough."""
    config = _on_gpu(config)
    limit, made, useless = room(card, config), [], set()
    while now.total > limit:
        for text, values in _candidates(config):
            if text in useless:
                continue
            plan = planner(_request(changed(config, values), model_config, card))
            if not isinstance(plan, str) and plan.total < 0.99 * now.total:
                now, config = plan, changed(config, values)
                made.append(text)
                break
            useless.add(text)
        else:
            return None, now
    return made, now


def _candidates(config: RunConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    tokens = config.micro_batch_size * config.sequence_len
    if config.method.samples_blocks:
        rollouts = config.ebft.n_samples_per_prompt * config.ebft.generate_max_len / config.ebft.stride
        tokens = int(tokens * (1 + rollouts))
    yield from changes(config, tokens, on_gpu=True)
    if config.sequence_len >= _SHORTEST:
        half = config.sequence_len // 2
        yield f"sequence_len: {half} {CHANGES_TRAINING}", {"sequence_len": half}


def planned(config: RunConfig, name: str, card: Card) -> Iterator[Check]:
    """Yield the plan of a config on a card as lines of the report; an error if the step does not fit."""
    found = Attempt("model", model_config_of, config, ok=lambda model: f"{config.base_model} by {model[1]}")
    yield from found
    if found.failed:
        return
    model_config, limit = found.result[0], room(card, config)
    if config.method.rows == "prompts" and config.trl.use_vllm and config.trl.vllm_mode != "colocate":
        text = "trl.use_vllm: the vLLM server is not in this plan; it needs another GPU. With one GPU, set "
        yield Check("warning", "vLLM", f"{text}trl.vllm_mode=colocate vllm.gpu_memory_utilization=0.3")
    if config.attn_implementation not in (None, "sdpa"):
        text = f"attn_implementation: {config.attn_implementation} is planned as sdpa, without its fused kernels"
        yield Check("warning", "attention", f"{text}, which may need less memory and time")
    rows = f"{config.micro_batch_size:,} rows of up to {config.sequence_len:,} tokens"
    yield Check("ok", "plan", f"a step with micro-batches of {rows}; this takes a minute or more")
    with Planner() as planner:
        plan = planner(_request(_on_gpu(config), model_config, card))
        if isinstance(plan, str):
            raise ModelError(f"The step cannot be planned: {plan}")
        yield from _described(plan, config, card)
        text = f"{_size(plan.total)} at the peak, in {plan.peak}; {name} has room for {_size(limit)}"
        if plan.total <= _TIGHT * limit:
            yield Check("ok", "memory", f"{text}. The step fits.")
            return
        if plan.total <= limit:
            tight = "The step fits, but it is tight: fragments of memory and rows of other lengths may need the rest."
            yield Check("warning", "memory", f"{text}. {tight}")
            return
        yield Check("error", "memory", f"{text}. It does not fit. Looking for changes with which it does ...")
        made, last = with_changes(config, model_config, card, planner, plan)
    if made is None:
        yield Check("warning", "changes", "it does not fit with any of the changes that are known")
    else:
        lines = "".join(f"\n  - {change}" for change in made)
        yield Check("ok", "changes", f"with all of these it needs {_size(last.total)}:{lines}")


def _size(size: float) -> str:
    """Bytes with a digit more than `gib`, since they are compared with the room of a card."""
    return f"{size / _GIB:.1f} GiB" if abs(size) >= _GIB else gib(size)


def _described(plan: StepPlan, config: RunConfig, card: Card) -> Iterator[Check]:
    """The lines of a plan: weights, phases, and the least time."""
    trained = f"{plan.trained:,} trained" if config.adapter is None else f"{plan.trained:,} in the adapter"
    yield Check("ok", "weights", f"{plan.parameters:,} in the model, {trained}")
    others = 0.0
    for phase, use in plan.phases.items():
        elsewhere = f", and {gib(use.elsewhere)} on other devices" if use.elsewhere else ""
        work = f"{use.flops / 1e12:,.2f} TFLOP, {use.moved / 1e9:,.0f} GB read and written, {use.kernels:,.0f} kernels"
        work += f"; {use.flops_elsewhere / 1e12:,.2f} TFLOP on other devices" if use.flops_elsewhere else ""
        others += use.flops_elsewhere if phase not in (*BEFORE, "evaluation") else 0
        yield Check("ok", f"peak memory, {phase}", f"{gib(use.peak)}{elsewhere}; {work}")
    least = floor(plan, card, config)
    if least:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in least.items())
        text = f"a step takes at least {max(least.values()):.2f} s ({parts}), by data sheet and 26 µs a kernel"
        if max(least, key=least.__getitem__) == "kernels" and config.gradient_accumulation_steps > 1:
            text += "; a larger micro_batch_size with fewer gradient_accumulation_steps needs fewer kernels"
        text += f", and the time of {others / 1e12:,.2f} TFLOP on other devices, which is not known" if others else ""
        yield Check("ok", "time", text)
