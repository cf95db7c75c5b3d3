"""Checks of StridedEBFTTrainer's arguments before training, and the rows of tokens of its datasets."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers import PreTrainedModel

from ebft.anchors import BlockOptions, count_row_blocks
from ebft.config import rules
from ebft.config.keys.data import DataSettings
from ebft.config.keys.models import ModelKeys
from ebft.data.documents import DocumentCollator, PackedRows, arrays_of
from ebft.data.load import load_dataset_of_tokens
from ebft.data.transforms import RequiredRows
from ebft.errors import DataError, ModelError
from ebft.features import FeatureNetwork
from ebft.models.causal_lm import evaluating, positions_of
from ebft.models.pretrained import rates_as_loaded
from ebft.models.sharding import load_whole
from ebft.prefix.forward import ROWS, prepare, run_as_rows, way_of
from ebft.prefix.parity import check_distant_tokens, compare, refusing
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.loss import layout_states, score
from ebft.strided.rollout import sample_rollouts
from ebft.transformers_internals import override_attn_implementation, use_one_gpu


def check_trainer_arguments(args: Any, trainer_kwargs: dict[str, Any]) -> None:
    """Raise ConfigError for arguments of the transformers Trainer that are not supported in strided mode."""
    load_whole()
    names = ("compute_metrics", "compute_loss_func", "model_init", "preprocess_logits_for_metrics")
    given = [name for name in ("neftune_noise_alpha", "label_smoothing_factor") if getattr(args, name)]
    given += [name for name in names if trainer_kwargs.get(name) is not None]
    rules.refuse(f"{name} is not supported by StridedEBFTTrainer. Remove it" for name in given)
    if args.torch_compile:
        args.torch_compile = False
        warnings.warn(rules.compiled(rules.in_python), stacklevel=3)
    has_zero3 = args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3
    is_sharded = bool(args.fsdp) or has_zero3
    rules.refuse(rules.passes(args, args.gradient_checkpointing, is_sharded, rules.in_python))
    use_one_gpu(args)


def check_grad_norms(args: Any, **ruling_out: bool) -> None:
    """Raise ConfigError for `grad_norms_every` if the gradient of a single loss term cannot be computed.

    `ruling_out` maps the names of further incompatible features to whether they are enabled.
    """
    reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant", False)
    ruling_out |= {"fp16": args.fp16, "reentrant gradient checkpointing": args.gradient_checkpointing and reentrant}
    rules.refuse(
        f"grad_norms_every is incompatible with {name}: the gradient of a single loss term is not available from "
        "sharded, scaled or reentrant backward passes. Set grad_norms_every to 0, or disable the other option"
        for name, is_on in ruling_out.items()
        if args.grad_norms_every and is_on
    )


class _Rows(ModelKeys, DataSettings):
    """What reading the rows of a dataset in memory depends on."""

    rows: Any

    @property
    def required_rows(self) -> RequiredRows:
        return self.rows

    @property
    def ebft(self) -> Any:
        return self.rows.block


_TYPES = {"messages": "chat_template", "prompt": "ebft_strided_structured.transform", "text": "completion"}


def tokenised_rows(name: str, dataset: Any, tokenizer: Any, args: Any, positions: int | None) -> Any:
    """Rows of tokens, from a Dataset with `messages`, `prompt` and `completion`, or `text`, as TRL's trainers take.

    Datasets with `input_ids`, or of unknown columns, are returned unchanged. Raises DataError for other columns, and if
    a row cannot be read.
    """
    if isinstance(dataset, dict):
        of_part = lambda key: tokenised_rows(f"{name}[{key!r}]", dataset[key], tokenizer, args, positions)
        return {key: of_part(key) for key in dataset}
    if isinstance(dataset, list) and dataset and isinstance(dataset[0], dict) and "input_ids" not in dataset[0]:
        dataset = Dataset.from_list(dataset)
    columns = getattr(dataset, "column_names", None)
    if columns is None or "input_ids" in columns or (isinstance(dataset, Dataset) and not len(dataset)):
        return dataset
    column = next((column for column in _TYPES if column in columns), None)
    is_read = column is not None and (column != "prompt" or "completion" in columns)
    if not is_read or tokenizer is None or not isinstance(dataset, Dataset):
        raise DataError(
            f"{name} has the columns {', '.join(columns)}. Rows need input_ids or, in a Dataset and with a "
            "processing_class, text, messages, or prompt and completion"
        )
    dataset = dataset.with_format(None)
    if column == "prompt" and any(isinstance(prompt, list) for prompt in dataset["prompt"]):
        as_turns = lambda given: [{"role": "assistant", "content": given}] if isinstance(given, str) else given or []
        turns = lambda given, weight: [{**turn, "weight": weight} for turn in as_turns(given)]  # a prompt is context
        as_chat = lambda row: {"messages": turns(row["prompt"], 0) + turns(row["completion"], 1)}
        dataset, column = dataset.map(as_chat, remove_columns=["prompt", "completion"]), "messages"
    length, entry = args.max_length or positions or 2048, {"path": name, "type": _TYPES[column]}
    block = SimpleNamespace(**vars(args), mask_thinking_ce=False)
    rows = RequiredRows("tokens", "strided EBFT", False, block, chat_template_kwargs=None)
    settings = _Rows(base_model="-", datasets=[entry], sequence_len=length, rows=rows)
    return load_dataset_of_tokens(dataset, settings, tokenizer)


def usable_rows(name: str, dataset: Any, model: nn.Module, options: BlockOptions) -> Any:
    """Return the dataset without rows that are too short for a block, with a warning that reports their number.

    Rows of a datasets.IterableDataset are filtered as they are read; other streams are returned unchanged. Raises
    DataError if a row exceeds the model's `max_position_embeddings`, or if no row is usable.
    """
    if isinstance(dataset, dict):
        if name == "train_dataset":  # several datasets are parts of an evaluation
            raise DataError(f"train_dataset must be one dataset, got {', '.join(map(str, dataset))}. Select one.")
        return {key: usable_rows(f"{name}[{key!r}]", part, model, options) for key, part in dataset.items()}
    has_block = lambda row: any(count_row_blocks(*document, options) for document in row)
    if isinstance(dataset, IterableDataset):
        return dataset.filter(lambda row: has_block(_documents(row)))
    if not hasattr(dataset, "__len__"):
        return dataset
    limit = positions_of(model)
    longest, usable = 0, []
    for index, documents in enumerate(_all_documents(dataset)):
        longest = max([longest, *(len(tokens) for tokens, *_ in documents)])
        if has_block(documents):
            usable.append(index)
    if limit is not None and longest > limit:
        raise DataError(
            f"{name} has a row of {longest} tokens, which exceeds max_position_embeddings ({limit}). Truncate it."
        )
    if not usable:
        raise DataError(
            f"{name} has no row that is long enough for a block: the longest has {longest} tokens, but a block needs "
            f"context_length ({options.context_length}) and generate_max_len ({options.generate_max_len}) tokens"
        )
    if len(usable) == len(dataset):
        return dataset
    dropped = len(dataset) - len(usable)
    warnings.warn(f"{name}: dropped {dropped} of {len(dataset)} rows that are too short for a block", stacklevel=3)
    if hasattr(dataset, "select"):
        return dataset.select(usable)
    return [dataset[i] for i in usable] if isinstance(dataset, list) else Subset(dataset, usable)


_Document = tuple[Any, int, list[list[int]]]  # tokens, the number of prompt tokens, and turns


def _all_documents(dataset: Any) -> Iterator[list[_Document]]:
    """Yield the documents of every row; of a Dataset without padding, whose rows are documents, without a copy."""
    if isinstance(dataset, PackedRows):
        documents = list(_all_documents(dataset.rows))
        yield from ([document for i in pack for document in documents[i]] for pack in dataset.packs)
        return
    plain = {"input_ids", "prompt_length", "turn_spans", "labels"}
    if not isinstance(dataset, Dataset) or not {"prompt_length"} <= set(dataset.column_names) <= plain:
        yield from (_documents(dataset[index]) for index in range(len(dataset)))
        return
    for batch in dataset.with_format("arrow").iter(batch_size=1000):
        spans = batch["turn_spans"].to_pylist() if "turn_spans" in dataset.column_names else [None] * len(batch)
        for tokens, prompt, turns in zip(arrays_of(batch["input_ids"]), batch["prompt_length"].to_pylist(), spans):
            yield [(tokens, prompt or 0, turns or [])]


def _documents(row: dict[str, Any]) -> list[_Document]:
    """Return the documents of a row, parsed as in training."""
    batch = DocumentCollator(0)([row])
    if not batch["attention_mask"].any():
        return []
    documents = Documents.from_inputs(batch)
    tokens = documents.host_tokens.split(documents.lengths.tolist())
    return list(zip(tokens, documents.prompt_length.tolist(), documents.turns.tolist()))


_DOCUMENT_TOKENS = 24


def check_parity(causal_lm: PreTrainedModel, network: FeatureNetwork, as_trained: bool = True) -> None:
    """Raise ModelError if strided EBFT differs from the plain model on a short random document; if only passes with
    shared prefixes differ, they are not used, with a warning.

    Three blocks of two rollouts are sampled with the cache and scored in one pass, in training mode if `as_trained`.
    The plain model runs each sequence separately with eager attention; its log-probabilities must equal the
    samples' and the scores'. The hidden states of the feature network are compared with those from
    `output_hidden_states`.
    """
    shared = [model for model in (causal_lm, network.causal_lm) if way_of(model) != ROWS]
    try:
        _compare_with_plain(causal_lm, network, as_trained)
    except ModelError as error:
        for model in shared:
            model.way = ROWS
        _compare_with_plain(causal_lm, network, as_trained)
        run_as_rows(causal_lm, error)


def _compare_with_plain(causal_lm: PreTrainedModel, network: FeatureNetwork, as_trained: bool) -> None:
    config, device = causal_lm.config.get_text_config(), next(causal_lm.parameters()).device
    generator = torch.Generator().manual_seed(0)
    length = min(_DOCUMENT_TOKENS, getattr(config, "max_position_embeddings", None) or _DOCUMENT_TOKENS)
    reported = ()
    if way_of(causal_lm) == ROWS:
        reported = "plain passes", "An adapter on a router, which returns more than a tensor, can be the cause."
    with refusing(causal_lm, *reported):
        prepare(causal_lm, may_run_rows=True)
        ids = torch.randint(0, config.vocab_size, (1, length), generator=generator).to(device)
        documents = Documents.from_inputs({"input_ids": ids})
        layout = StridedLayout.place(documents, BlockOptions(7, 5, 3, 2))
        noise = torch.rand(layout.num_blocks, 2, 3, generator=generator).to(device)
        with evaluating(causal_lm):
            sampled = sample_rollouts(causal_lm, documents, layout, temperature=1.0, noise=noise)
            rollouts = sampled.tokens
            with rates_as_loaded(causal_lm), override_attn_implementation(causal_lm, "eager"):
                expected = _plain_logps(causal_lm, ids[0], layout, rollouts)
        with evaluating(causal_lm):  # the training forward pass, without gradients
            causal_lm.train(as_trained)
            how = {"temperature": 1.0, "text_gradient": False, "apply_dropout": False}
            logps, _ = score(causal_lm, documents, layout, rollouts, **how)
        compare(causal_lm, "log-probabilities of strided samples", (sampled.logps - expected).abs())
        compare(causal_lm, "strided log-probabilities", (logps - expected).abs())
        if way_of(causal_lm) != ROWS:
            with evaluating(causal_lm):
                check_distant_tokens(causal_lm)
    features = network.causal_lm
    with refusing(features), evaluating(features):
        ours = layout_states(network, documents, layout, rollouts)
        with override_attn_implementation(features, "eager"):
            plain = network.plain_hidden_states(documents.tokens[None].to(network.device))
        unit = lambda states: torch.nn.functional.normalize(states[:length].float(), dim=-1)  # of the document
        differences = [(unit(a) - unit(b[0].to(a.device))).norm(dim=-1) for a, b in zip(ours, plain)]
        compare(features, "strided hidden states", torch.stack(differences))
        if type(features) is not type(causal_lm) and way_of(features) != ROWS:
            check_distant_tokens(prepare(features))


def _plain_logps(causal_lm: PreTrainedModel, ids: Tensor, layout: StridedLayout, rollouts: Tensor) -> Tensor:
    """Return the log-probabilities (M, N, G) of the rollouts, with each sequence in a separate row."""
    expected = torch.zeros(rollouts.shape, device=ids.device)
    g = layout.generate_max_len
    for b, anchor in enumerate(layout.anchors[0]):
        prefix = ids[:anchor].expand(layout.num_samples, -1)
        sequences = torch.cat([prefix, rollouts[b]], dim=1)
        logp = causal_lm(input_ids=sequences, use_cache=False).logits[:, anchor - 1 : -1].float().log_softmax(-1)
        expected[b] = logp.gather(-1, sequences[:, -g:, None]).squeeze(-1)
    return expected
