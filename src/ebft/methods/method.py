"""The interface between a training method and the rest of the package, and which method the keys of a config select."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from ebft.config.section import Section
from ebft.data.transforms import RequiredRows, Rows
from ebft.methods import FLAGS, METHODS
from ebft.methods.base_config import BaseConfig

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    from ebft.data.load import LoadedRows
    from ebft.machine import Machine
    from ebft.methods.views import RowView
    from ebft.models.causal_lm import HeadType
    from ebft.serving.server import VLLMServer

CROSS_ENTROPY = ("ce_loss", "perplexity", "ce_loss_all", "perplexity_all")
# Metrics of `ebft.scores.feature_scores`; by default the first selects the best checkpoint.
FEATURES = ("cfm_loss", "cfm_loss_plugin", "cfm_loss_whitened", "alignment", "diversity")

HEALTHY_ROLLOUTS = {"kl": (0.0, 0.5), "truncated completions": (None, 0.3)}

# Kind of rows -> the function that loads them.
_LOADERS = {
    "tokens": "ebft.data.load:load_token_rows",
    "prompts": "ebft.data.prompts:load_prompt_rows",
    "preferences": "ebft.data.preferences:load_preference_rows",
    "labelled": "ebft.data.preferences:load_preference_rows",
    "comparisons": "ebft.data.preferences:load_comparisons",
}


@dataclass(frozen=True)
class EvaluationSampling:
    """How `ebft evaluate` samples completions, unless the section `evaluation:` sets it."""

    samples: int
    temperature: float = 1.0
    options: dict[str, Any] | None = None  # such as top_p
    extra: dict[str, Any] | None = None  # additional keyword arguments of generate(), and stop_token_ids
    regex: str | None = None  # of guided decoding
    by_reference: tuple[float, int] | None = None  # length limit: multiple of the reference length, minimum tokens


class MethodConfig(BaseConfig):
    """A run config as methods and checks read it: with the method that its keys select."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The keys of the method, `Method.keys`."""

    @property
    @abstractmethod
    def method(self) -> Method:
        """The training method of this run, a class in `ebft.methods`."""

    @property
    def required_rows(self) -> RequiredRows:
        """The rows that the method trains on, with the options that loading them depends on."""
        return RequiredRows(
            kind=self.method.rows,
            method=self.method.name,
            needs_reference=self.method.needs_reference,
            block=self.ebft if self.method.samples_blocks else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    @property
    def uses_server(self) -> bool:
        """Whether completions come from a vLLM server in a separate process."""
        return self.method.rows == "prompts" and self.trl.use_vllm and self.trl.vllm_mode != "colocate"

    @property
    def manages_server(self) -> bool:
        """Whether training starts and stops that server."""
        return self.uses_server and self.trl.vllm_mode == "managed"


class Method(ABC):
    """A training method. Methods are stateless: all settings are in the config that is passed to them."""

    name: ClassVar[str]  # as used in messages
    tag: ClassVar[str]  # of the model card
    title: ClassVar[str]  # of the model card, following "trained by"
    metrics: ClassVar[tuple[str, ...]]  # of evaluations, without `eval_`; the first selects the best checkpoint
    rows: ClassVar[Rows]  # what a row of data is converted to
    view: ClassVar[str]  # the class of ebft.methods.views that shows a row
    arguments: ClassVar[str]  # the class of its training arguments, module:class, imported when it is used
    trainer: ClassVar[str]  # the class of its trainer, if `build_trainer` builds it
    keys: ClassVar[type[Section]] = Section  # top-level config keys that it adds; other methods warn about them
    citation: ClassVar[str | None] = None  # BibTeX
    needs_reference: ClassVar[bool] = True  # whether every row of prompts must have one
    phases: ClassVar[dict[str, str]] = {}  # methods of its trainer whose memory `ebft doctor` reports, by phase
    samples_blocks: ClassVar[bool] = False  # whether rollouts start within a document, so that a row must fit a block
    class_ending: ClassVar[str] = "ForCausalLM"  # of the names of transformers' classes that it trains
    pipeline_tag: ClassVar[str] = "text-generation"  # of the model card
    can_be_compared: ClassVar[bool] = True  # whether `ebft evaluate` compares models on its rows
    generates_text: ClassVar[bool] = True  # whether the trained model can be sampled from
    offloads_activations: ClassVar[bool] = False  # whether its trainer reads activation_offloading
    runs_plain_model: ClassVar[bool] = False  # whether all that a step runs is the model's own forward
    copy_name: ClassVar[str] = "feature network"  # of `copies_model`, as `ebft doctor` calls it
    reads_streams: ClassVar[bool] = False  # whether rows can be read while training runs (streaming)
    unsupported: ClassVar[dict[str, str]] = {}  # keys that contradict the method, with the reason
    idle: ClassVar[tuple[str, ...]] = ()  # sections of the config that it does not read
    # Usual ranges of curves by their titles, of metrics of whitened features with "whitened" before it; None: no bound.
    healthy: ClassVar[dict[str, tuple[float | None, float | None]]] = {"grad_norm": (None, 10.0)}

    # Config. It is checked in three stages: alone (`conflicts`, then `resolve`), on the machine (`problems`,
    # `problems_here`), and with the rows (`check_rows`).

    def summary(self, config: MethodConfig) -> str:
        """Description of the method in the model card, following "trained by"."""
        return self.title

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        """Contradictions between keys, one message each, checked when the config is loaded."""
        for key, reason in self.unsupported.items():
            if getattr(config, key):
                yield f"{key} is not supported with {self.name}: {reason}. Remove it."
        if config.budget.flops is not None and config.torch_compile:
            yield "budget.flops is not supported with torch_compile, whose FLOPs cannot be counted. Remove one."

    def resolve(self, config: MethodConfig) -> None:
        """Warn once about each key without effect, and replace settings that other settings override."""
        self.warn_of_idle(config)

    def warn_of_idle(self, config: MethodConfig, *more: str, advice: str = "") -> None:
        """One warning for the sections `idle` and `more` keys that the method does not read."""
        idle = [*(name for name in self.idle if name in config.model_fields_set), *more]
        if config.budget.generated_tokens is not None and self.samples_per_group(config) is None:
            idle.append("budget.generated_tokens")
        if idle:
            warnings.warn(f"{', '.join(idle)}: no effect with {self.name}.{advice}", stacklevel=3)

    def problems(self, config: MethodConfig) -> Iterator[str]:
        """Reasons why a config cannot be trained, one message each, checked before anything is loaded."""
        yield from ()

    def missing_packages(self, config: MethodConfig) -> Iterator[str]:
        """Packages that a run needs but that are not installed, one message each."""
        yield from ()

    def missing_on_gpus(self, config: MethodConfig) -> Iterator[str]:
        """The same, of packages that a run needs on GPUs only."""
        yield from ()

    def problems_here(self, config: MethodConfig, machine: Machine) -> Iterator[str]:
        """Requirements that this machine does not meet, one message each."""
        yield from ()

    # Evaluation

    def held_out_metrics(self, config: MethodConfig) -> tuple[str, ...]:
        """Names of its evaluation metrics, without the prefix `eval_`; the first selects the best checkpoint."""
        return self.metrics

    def sampling(self, config: MethodConfig) -> EvaluationSampling:
        """How `ebft evaluate` samples."""
        return EvaluationSampling(config.ebft.n_samples_per_prompt)

    # Rows

    def load_rows(self, config: MethodConfig, tokenizer: Any) -> LoadedRows:
        """Rows for training and for evaluation, which can be stored and read again."""
        return class_at(_LOADERS[self.rows])(config, tokenizer)

    def arrange(self, config: MethodConfig, train: Dataset) -> Any:
        """The training rows as the trainer receives them, such as packed. A deterministic function of `train`."""
        if self.rows != "tokens" or config.streaming or not config.sample_packing:
            return train
        from ebft.data.documents import pack_and_report

        return pack_and_report(train, config.sequence_len, in_order=config.curriculum_sampling)

    def check_rows(self, config: MethodConfig, rows: LoadedRows) -> None:  # noqa: B027 (there may be nothing to check)
        """Check, before training, what the rows refer to, such as servers."""

    def samples_per_group(self, config: MethodConfig) -> int | None:
        """Number of rollouts per prompt or anchor; None if the method samples none."""
        return None

    def compares_features(self, config: MethodConfig) -> bool:
        """Whether rewards are computed with a feature network, which is a copy of the model without an adapter."""
        return False

    def copies_model(self, config: MethodConfig) -> bool:
        """Whether a run without adapter has a frozen copy of the model in memory."""
        return self.compares_features(config)

    def keeps_logits(self, config: MethodConfig) -> bool:
        """Whether a step has the logits of all tokens in memory."""
        return False

    def row_view(self, config: MethodConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        """Return a function that shows a row of `arrange`, or of the evaluation rows, as the trainer reads it."""
        return class_at(f"ebft.methods.views:{self.view}")(tokenizer)

    # Training

    def head(self, config: MethodConfig) -> HeadType:
        """The output layer of the model that it trains."""
        from ebft.models.causal_lm import LANGUAGE

        return LANGUAGE

    def services(self, config: MethodConfig) -> AbstractContextManager[None]:
        """Other programs that run together with training: started and stopped with the block."""
        return nullcontext()

    def steps_per_epoch(self, config: MethodConfig, machine: Machine, rows: int) -> int:
        """Number of optimizer steps per epoch of `rows` rows."""
        batches = math.ceil(rows / (config.micro_batch_size * machine.processes))
        return max(1, math.ceil(batches / config.gradient_accumulation_steps))

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        """Training arguments in addition to those that all methods have."""
        return {}

    def arguments_class(self) -> type[TrainingArguments]:
        return class_at(self.arguments)

    def build_trainer(
        self, config: MethodConfig, model: Any, tokenizer: Any, server: VLLMServer | None, **common: Any
    ) -> Trainer:
        """Its trainer; `common` are the arguments common to all trainers of transformers."""
        return class_at(self.trainer)(model=model, **common)


def pass_at(samples: int) -> tuple[str, ...]:
    """The held-out metrics computed from several samples."""
    return tuple(f"{name}_pass@{k}" for k in (1, samples) for name in ("alignment", "reward"))


def selected_method(config: BaseConfig) -> Method:
    """The method that the keys of `config` select. Does not import torch."""
    flag = next(iter(_flags(config)), None)
    return find_method(config.rl, config.ebft.mode) if flag is None else _method_at(FLAGS[flag])


def find_method(rl: str | None, mode: str | None) -> Method:
    """The method for a config's `rl` and `ebft.mode`. Does not import torch."""
    return _method_at(METHODS.get((rl, mode)) or METHODS[rl, None])


def selecting_keys(config: BaseConfig) -> dict[str, str | bool | None]:
    """The keys that select the method of `config`, with their values; `ebft.mode` only if the method depends on it."""
    keys = {"rl": config.rl, "ebft.mode": config.ebft.mode}
    keys = keys if tuple(keys.values()) in METHODS else {"rl": config.rl}
    return keys | {key: getattr(config, key) for key in FLAGS}


def contradictory_selection(config: BaseConfig) -> Iterator[str]:
    """Keys that select different methods, as a message."""
    given = [f"rl: {config.rl}"] if config.rl else []
    given += [f"{key}: true" for key in _flags(config)]
    if len(given) > 1:
        yield f"{' and '.join(given)} select different methods. Keep one."


def own_keys() -> tuple[type[Section], ...]:
    """The sections of top-level keys that individual methods add to a config."""
    found = (class_at(path).keys for path in (*METHODS.values(), *FLAGS.values()))
    return tuple(dict.fromkeys(keys for keys in found if keys.model_fields))


def foreign_keys(config: MethodConfig) -> set[str]:
    """The top-level keys of methods that the method of `config` does not read."""
    return {name for keys in own_keys() for name in keys.model_fields} - set(config.method.keys.model_fields)


def _flags(config: BaseConfig) -> list[str]:
    return [key for key in FLAGS if getattr(config, key)]


@cache
def _method_at(path: str) -> Method:
    return class_at(path)()


def class_at(path: str) -> Any:
    """What `module:name` names."""
    module, name = path.split(":")
    return attrgetter(name)(import_module(module))


# Keys that have no effect without another: the key, what it needs, and whether that is so.
Needs = tuple[tuple[str, str, Callable[[MethodConfig], object]], ...]


def warn_of_unmet(config: MethodConfig, needs: Needs) -> None:
    """One warning for each given key that has no effect."""
    for key, needed, is_met in needs:
        section, _, name = key.partition(".")
        given = getattr(config, section)
        if name in given.model_fields_set and getattr(given, name) is not None and not is_met(config):
            warnings.warn(f"{key} has no effect without {needed}.", stacklevel=3)
