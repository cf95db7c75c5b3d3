"""What a training step of a config needs, from running it on a device without data (fake.py).

The model is built from its configuration, the rows are the longest that the config allows or those that are given, and
one optimizer step is run with as many micro-batches as change the memory. Each run is a process of its own.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ebft.errors import ModelError, cause
from ebft.models.adapter import attach_adapter
from ebft.models.load import weights_dtype
from ebft.run.config.schema import RunConfig
from ebft.run.rehearsal import optimizer_bytes
from ebft.run.trainer import build_trainer, training_arguments
from ebft.tools.doctor.known import Use, process_for_plans
from ebft.tools.doctor.memory import changed
from ebft.tools.doctor.rows import rows_per_step
from ebft.tools.doctor.run import OptimizerPhase, without_output

STEP = "loss and backward"  # what is in no other phase of a step
BEFORE = ("model", "trainer setup")  # phases before the first step
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
    """Rows for one step, as long as `sequence_len` and the lengths of completions allow. Raises ModelError."""
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
        "comparisons": lambda: {"chosen_ids": ids(length), "rejected_ids": ids(length)},
        "preferences": lambda: {"prompt_ids": ids(half), "chosen_ids": ids(rest), "rejected_ids": ids(rest)},
        "labelled": lambda: {"prompt_ids": ids(half), "completion_ids": ids(rest), "label": random.random() < 0.5},
        "prompts": lambda: {"prompt": text(max(1, length - 1 - reference)), "ground_truth": text(reference)},
    }
    kind = config.method.rows
    if kind not in rows:
        raise ModelError(f"{config.method.name}: rows of {kind} cannot be made up. Plan it with its data: ebft doctor")
    return Dataset.from_list([rows[kind]() for _ in range(rows_per_step(config))])


def _for_device(config: RunConfig, folder: str) -> RunConfig:
    """The config with what the device decides in its place, and without what needs values or other processes."""
    changes: dict[str, Any] = {
        **dict.fromkeys(("device_map", "attn_implementation", "fsdp", "fsdp_config", "deepspeed")),
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
