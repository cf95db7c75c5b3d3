"""Evaluation and comparison of models on the held-out data of a config, by prompts or by rows of tokens.

On prompts, full completions are compared with their references; on tokens, blocks as in strided mode.

N  samples of a prompt   D  feature dimension   L  tokens of a sequence
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ebft.data.conversation import Conversation, Renderer, Turn, longest_reference, without_end
from ebft.data.documents import DocumentCollator, block_options, has_block, longest_document
from ebft.data.transforms.rows import IGNORE
from ebft.errors import ConfigError, DataError, ModelError, NonFiniteLossError, prefixed, warn
from ebft.features import pool_sequence
from ebft.models.causal_lm import end_token_ids, evaluating, positions_of, unknown_ids, unwrap_adapter
from ebft.models.load import as_trained
from ebft.models.pretrained import load_tokenizer
from ebft.prefix.forward import check_supported, take_programs
from ebft.rewards import unbiased_cfm_loss
from ebft.run.config.schema import RunConfig
from ebft.scores import CURVE, Scores, curve_lengths, feature_scores
from ebft.sft.cross_entropy import token_cross_entropies
from ebft.strided.held_out import HeldOutMeasure
from ebft.structured.config import check_generation_kwargs, generate_kwargs
from ebft.structured.reward import continuation_features
from ebft.structured.rollouts.local import ModelBackend
from ebft.structured.rollouts.turns import Limits, Rollout, Sampling, reply_messages, roll_out
from ebft.structured.trainer import labelled_reference
from ebft.tools.evaluation import task as tasks
from ebft.tools.evaluation.models import Subject, check_model, check_positions, load_subject, own_models
from ebft.tools.evaluation.notes import notes_on
from ebft.tools.evaluation.result import Evaluation, summarise
from ebft.tools.evaluation.task import KEY, Settings, Task


def evaluate(
    config: RunConfig, models: list[str] | None = None, after_each: Callable[[Evaluation], None] | None = None
) -> Evaluation:
    """Evaluate `models` (folders or hub ids of full models or adapters) on the config's held-out data.

    None evaluates the config's base model and the trained model in `output_dir`, if any. All models are evaluated on
    the same documents, with the same noise, in the feature space of the config's `base_model`. The metrics are
    cross-entropy, feature matching, and the config's `evaluation.metrics`, with bootstrap intervals over documents.
    Evaluated documents that a model was trained on, as far as this is known, and fewer than 8 documents give a warning,
    which is also in `notes` of the result.
    `after_each` is called with the evaluation of the models so far, since a later model may fail. Raises ConfigError,
    DataError or ModelError for errors that the user can correct.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("ebft evaluate supports a single process only. Start it without a launcher.")
    config = as_trained(config, Path(config.output_dir))
    tasks.check_comparable(config)
    settings = Settings.of(config)
    metrics = tasks.load_metrics(config.evaluation.metrics)
    started = time.perf_counter()
    tokenizer = load_tokenizer(config)
    if isinstance(models, str):
        models = [models]
    names = list(dict.fromkeys(models)) if models else own_models(config)
    for name in names:
        check_model(config, name, tokenizer)
    task = Task(config, settings, tasks.load_held_out(config, tokenizer), tokenizer, metrics)
    check_positions(config, names, longest_document(task.held_out.rows))
    check_measurable(task)
    notes = notes_on(names, task.held_out)
    for note in notes:
        warn(note)
    found: list[Scores] = []
    documents = sorted(set(task.held_out.documents))
    for name in names:
        with prefixed(f"--model {name}", (ModelError, NonFiniteLossError)):
            subject = load_subject(config, name, tokenizer)
            by_prompts = config.method.rows == "prompts"
            found.append(PromptMeasure(task, subject).run() if by_prompts else measure_tokens(task, subject))
        del subject
        gc.collect()  # frees memory for the next model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        evaluation = summarise(names[: len(found)], found, settings, config, documents, time.perf_counter() - started)
        evaluation.notes = notes
        if after_each is not None:
            after_each(evaluation)
    return evaluation


def check_measurable(task: Task) -> None:
    """Raise DataError, before sampling, for prompts without references or metrics, and for metrics without prompts."""
    rows: Any = task.held_out.rows
    if task.config.method.rows == "tokens":
        if task.metrics and not any(rows["prompt_length"]):
            raise DataError(f"{KEY} requires prompts to complete, but the held-out rows are text without prompts.")
    elif not task.metrics and not any(has_reference(row) for row in rows):
        raise DataError("nothing to evaluate: the held-out prompts have no references, and there are no metrics.")


EXACT_POSITIONS = 16  # curves have a point for each of these positions, and then one for each power of two


class PromptMeasure:
    """Computes the scores of a model on rows of `prompt` and `ground_truth`."""

    def __init__(self, task: Task, subject: Subject) -> None:
        self.task, self.subject = task, subject
        self.renderer = Renderer(task.tokenizer, task.config.chat_template_kwargs)
        self.completions = Completions(subject.policy, self.renderer, task)
        # Without comparisons in training, replies follow the generation prompt of the chat template, as there.
        self._compares = task.config.method.compares_features(task.config)
        self.scores = Scores()

    def run(self) -> Scores:
        """Return the scores of all rows; rows without a reference (`rl: grpo`) are used for downstream metrics only."""
        metrics, settings, held_out = self.task.metrics, self.task.settings, self.task.held_out
        for number, (rows, documents) in enumerate(self.task.batches()):
            conversations = [self.renderer.of_row(row) for row in rows]
            asked = [self.renderer.of_row(row, self._compares) for row in rows]
            # The token that ends the reference is scored too. `rl: grpo` keeps ground_truth that is no such reference.
            limit = self.completions.positions or math.inf
            compared = [
                has_reference(row) and len(talk.prompt_ids) + len(talk.reference_ids) < limit
                for row, talk in zip(rows, conversations)
            ]
            for document, talk in compress(zip(documents, conversations), compared):
                ids, counts = labelled_reference(talk, mask_thinking=self.task.config.ebft.mask_thinking_ce)
                (nll,) = token_nll(self.subject.policy, [talk.prompt_ids + ids])
                of_reference, counted = nll[len(nll) - len(ids) :], torch.tensor(counts)
                self.scores.add("ce_loss", [document], [(of_reference * counted).sum()], [counted.sum()])
                self.scores.add("ce_loss_all", [document], [nll.sum()], [len(nll)])
                self._add_positions("reference_nll", document, of_reference)
            sampled = self.completions.sample(asked, f"batch {number}")
            greedy = self.completions.greedy(asked) if metrics else [None] * len(rows)
            found = zip(rows, documents, conversations, compared, sampled, greedy)
            for row, document, conversation, has_room, rollouts, best in found:
                if has_room:
                    self._add_rollouts(document, conversation, rollouts)
                if metrics:
                    replies = [self.completions.reply(each, row.get("remaining_turns")) for each in (*rollouts, best)]
                    given = row["prompt"], replies, {**held_out.raw[document], **row}
                    self.scores.add_all(tasks.downstream_scores(metrics, settings.pass_at, *given), [document])
        return self.scores

    def _add_rollouts(self, document: int, conversation: Conversation, rollouts: list[Rollout]) -> None:
        """Add the features of the samples, and their cross-entropies by policy and base model, at temperature 1."""
        network, ebft = self.subject.network, self.task.config.ebft
        ids = [without_end(rollout.ids, self.completions.end_ids) for rollout in rollouts]
        prompt, own = continuation_features(
            network, *conversation.compared(rollouts[0].prompt_ids, ids, self.completions.longest)
        )
        coefficients = {"alignment_coef": ebft.alignment_coef, "diversity_coef": ebft.diversity_coef}

        def embedded(length: int | None) -> tuple[Tensor, Tensor]:
            """Return the embeddings of samples (1, N, D) and reference (1, D), from their first `length` tokens."""
            phi = torch.stack([pool_sequence(prompt, features[:length], network.embed_method) for features in own])
            return phi[None, :-1], phi[None, -1]

        whole = embedded(None)
        options = {"pass_at": self.task.settings.pass_at, "computed_in": network.computed_in}
        self.scores.add_all(feature_scores(*whole, **coefficients, **options), [document])
        self.scores.keep_samples(*whole, **coefficients)
        # Powers of two only: other lengths would each be covered by a single reference.
        for length in curve_lengths(len(conversation.reference_ids) + 1)[:-1]:
            self.scores.add(f"{CURVE}/cfm_loss/{length}", [document], unbiased_cfm_loss(*embedded(length)))
        sequences = [rollout.prompt_ids + rollout.ids for rollout in rollouts]
        with network.frozen() as base:
            by_base = token_nll(base, sequences)
        for name, found in (("rollout_nll", token_nll(self.subject.policy, sequences)), ("rollout_nll_base", by_base)):
            for rollout, nll in zip(rollouts, found):
                self._add_positions(name, document, nll[len(nll) - len(rollout.ids) :])

    def _add_positions(self, name: str, document: int, nll: Tensor) -> None:
        for position, value in enumerate(nll.tolist()):
            place = position if position < EXACT_POSITIONS else 1 << (position.bit_length() - 1)
            self.scores.add(f"{CURVE}/{name}/{place}", [document], [value])


def has_reference(row: dict[str, Any]) -> bool:
    """Whether a row has a reference text, which is optional with `rl: grpo`."""
    return isinstance(row["ground_truth"], str) and bool(row["ground_truth"].strip())


def measure_tokens(task: Task, subject: Subject) -> Scores:
    """Return the scores of a model on rows of `input_ids`, `labels`, `prompt_length` and `turn_spans`. Rows that are
    too short for a block, which SFT keeps, are used for the cross-entropy only."""
    ebft, settings = task.config.ebft, task.settings
    blocks = block_options(task.config, ebft, task.tokenizer)
    measure = None
    if _takes_blocks(task.config, subject):
        sampled = {"n_samples_per_prompt": settings.samples, "merge_rollouts": None}
        measure = HeldOutMeasure(
            unwrap_adapter(subject.policy),
            subject.network,
            replace(blocks, vocabulary=unknown_ids(subject.policy, task.tokenizer).start, **sampled),
            temperature=settings.temperature,
            seed=settings.seed,
            tokens_per_pass=ebft.rollout_tokens_per_pass,
            alignment_coef=ebft.alignment_coef,
            diversity_coef=ebft.diversity_coef,
            pass_at=settings.pass_at,
            curves=True,
            counts_all_labels=not task.config.method.samples_blocks,
        )
    collate = DocumentCollator(task.tokenizer.pad_token_id)
    scores = Scores() if measure is None else measure.scores
    for rows, documents in task.batches():
        others, long = [], []
        for row, document in zip(rows, documents):
            (others if measure is None or not has_block(row, blocks) else long).append((row, document))
        if long:
            rows, documents = zip(*long)
            measure.add(collate(rows), documents)
        for (row, document), nll in zip(others, token_nll(subject.policy, [row["input_ids"] for row, _ in others])):
            counted = torch.tensor(row["labels"])[1:] != IGNORE
            scores.add("ce_loss", [document], [nll[counted].sum()], [counted.sum()])
            scores.add("ce_loss_all", [document], [nll.sum()], [len(nll)])
    if task.metrics:
        _add_completions(scores, task, subject)
    return scores


def _takes_blocks(config: RunConfig, subject: Subject) -> bool:
    """Whether blocks are sampled from the models; with SFT, not if that takes a row for each, which is a warning."""
    if config.method.samples_blocks:
        return True
    try:
        for model in (unwrap_adapter(subject.policy), subject.network.causal_lm):
            check_supported(model)
    except ModelError as error:
        warn(f"Only the cross-entropy is evaluated, without feature metrics: {error}.")
        return False
    return True


def _add_completions(scores: Scores, task: Task, subject: Subject) -> None:
    """Add the downstream metrics of full completions of every row's prompt."""
    completions = Completions(subject.policy, Renderer(task.tokenizer, task.config.chat_template_kwargs), task)
    for number, (rows, documents) in enumerate(task.batches()):
        documents = [document for row, document in zip(rows, documents) if row["prompt_length"]]
        cut = [(row["input_ids"], row["prompt_length"]) for row in rows if row["prompt_length"]]
        if not cut:
            continue
        # The completion is the reference, whose text is not used.
        conversations = [Conversation([Turn(ids[:length], ids[length:])], ids[:length]) for ids, length in cut]
        sampled = completions.sample(conversations, f"batch {number}")
        greedy = completions.greedy(conversations)
        for conversation, document, rollouts, best in zip(conversations, documents, sampled, greedy):
            prompt = task.tokenizer.decode(conversation.prompt_ids, skip_special_tokens=True)
            replies = [completions.reply(rollout) for rollout in (*rollouts, best)]
            given = task.metrics, task.settings.pass_at, prompt, replies, task.held_out.raw[document]
            scores.add_all(tasks.downstream_scores(*given), [document])


class Completions:
    """Generates `settings.samples` sampled completions and one greedy completion per prompt with `generate()`."""

    def __init__(self, policy: nn.Module, renderer: Renderer, task: Task) -> None:
        settings, of_run = task.settings, task.config.method.sampling(task.config)
        self._settings, self.tokenizer = settings, renderer.tokenizer
        extra = dict(of_run.extra or {})
        self.end_ids = frozenset(end_token_ids(policy, {*renderer.template.end_ids, *extra.pop("stop_token_ids", ())}))
        extra = _for_generate(extra, of_run.regex)
        fixed = {"end_ids": self.end_ids, "extra": extra, "unknown": unknown_ids(policy, self.tokenizer)}
        sampling = Sampling(settings.temperature, **fixed, **(of_run.options or {}))
        pad = self.tokenizer.pad_token_id
        self._sampled = ModelBackend(policy, sampling, pad)
        self._greedy = ModelBackend(policy, replace(sampling, temperature=0.0), pad)
        self.positions = positions_of(policy)
        longest = settings.max_new_tokens
        if settings.by_reference is not None:
            rows: Any = task.held_out.rows
            if "input_ids" in rows.column_names:
                of_rows = max(len(row["input_ids"]) - row["prompt_length"] for row in rows if row["prompt_length"])
            else:
                of_rows = longest_reference(rows, renderer)
            longest = settings.by_reference.of(of_rows, longest)
        self.longest: int = longest  # tokens of a reply
        self._limits = Limits(longest, self.positions)

    def sample(self, conversations: list[Conversation], name: str) -> list[list[Rollout]]:
        """Return the samples of each conversation; the random numbers depend on the seed and `name`."""
        n = self._settings.samples
        repeated = [conversation for conversation in conversations for _ in range(n)]
        key = hashlib.blake2b(f"{self._settings.seed}:{name}".encode(), digest_size=8).digest()
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):  # which `generate` uses
            torch.manual_seed(int.from_bytes(key, "little") >> 1)
            rollouts = roll_out(self._sampled, repeated, self._limits, self.end_ids)
        return [rollouts[start : start + n] for start in range(0, len(rollouts), n)]

    def greedy(self, conversations: list[Conversation]) -> list[Rollout]:
        """Return the greedy completion of each conversation."""
        return roll_out(self._greedy, conversations, self._limits, self.end_ids)

    def reply(self, rollout: Rollout, turns: list[Any] | None = None) -> str | list[dict[str, Any]]:
        """A completion as text, or, if `turns` follow, as messages that start with the first reply."""
        if turns:
            return reply_messages(self.tokenizer, rollout, turns)
        return self.tokenizer.decode(without_end(rollout.ids, self.end_ids), skip_special_tokens=True)


def _for_generate(kwargs: dict[str, Any], regex: str | None) -> dict[str, Any]:
    """Return the `trl.generation_kwargs` that `generate` supports, with a warning for keys of vLLM only."""
    known = generate_kwargs()
    read = {key: value for key, value in kwargs.items() if key in known}
    check_generation_kwargs(read, use_vllm=False)
    left = [f"generation_kwargs.{key}" for key in kwargs if key not in known]
    left += ["vllm_guided_decoding_regex"] if regex is not None else []
    if left:
        warn(f"trl.{', trl.'.join(left)}: no effect, as `ebft evaluate` samples with generate().")
    return read


TOKENS_PER_PASS = 4096


def token_nll(model: nn.Module, sequences: list[list[int]]) -> list[Tensor]:
    """Return the negative log-likelihood of every token of each sequence except the first: (L - 1,) each. In nats, at
    temperature 1. Padding is on the right, which causal models do not attend to."""
    take_programs(model)
    device = unwrap_adapter(model).device
    batches: list[list[int]] = []  # with padding, of at most TOKENS_PER_PASS tokens unless one row has more
    for i in sorted(range(len(sequences)), key=lambda i: len(sequences[i])):
        if batches and (len(batches[-1]) + 1) * len(sequences[i]) <= TOKENS_PER_PASS:
            batches[-1].append(i)
        else:
            batches.append([i])
    found: dict[int, Tensor] = {}
    for batch in batches:
        rows = [torch.tensor(sequences[i], device=device) for i in batch]
        input_ids = pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        attention_mask = (torch.arange(input_ids.shape[1], device=device) < lengths[:, None]).long()
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        with evaluating(model):
            losses = token_cross_entropies(model, inputs, input_ids[:, 1:, None], attention_mask[:, 1:].bool())
        found |= {i: row[: len(sequences[i]) - 1] for i, row in zip(batch, losses.squeeze(-1).cpu())}
    return [found[i] for i in range(len(sequences))]
