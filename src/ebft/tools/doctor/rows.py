"""The longest rows of the training data, which need the most memory, and the tokens of a step on them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ebft.anchors import BlockOptions, turn_anchors
from ebft.data.conversation import Renderer
from ebft.data.documents import PackedRows, token_counts
from ebft.data.row_counts import TRUNCATED
from ebft.run.config.schema import RunConfig
from ebft.structured.rollouts.turns import ReferenceLimit
from ebft.tools.doctor.environment import Check


@dataclass(frozen=True)
class PromptLength:
    """Tokens of a row of prompts: before and in the reference of each reply. The first is the prompt."""

    turns: tuple[tuple[int, int], ...]

    @property
    def prompt(self) -> int:
        return self.turns[0][0]

    @property
    def given(self) -> int:
        """Tokens between the replies."""
        return sum(before for before, _ in self.turns[1:])

    @property
    def reference(self) -> int:
        """Tokens of the reference conversation after the prompt."""
        return self.given + sum(reference for _, reference in self.turns)

    def completion(self, reply: int) -> int:
        """Return the most tokens of a sampled conversation after the prompt, with replies of up to `reply` tokens."""
        return self.given + reply * len(self.turns)

    def total(self, reply: int) -> int:
        return self.prompt + max(self.completion(reply), self.reference)


class StepTokens(NamedTuple):
    """Tokens of one forward pass of the loss, whose keys are cached while sampling, and of one feature pass."""

    loss: int
    sampling: int = 0
    features: int = 0


@dataclass(frozen=True)
class LongestRows:
    """The rows of the largest batch of one optimizer step on this process, longest first. `data` is a Dataset,
    PackedRows, or a list of rows of a stream; `prompts` are the lengths of rows of prompts."""

    data: Any
    prompts: tuple[PromptLength, ...]
    longest: int  # tokens, for prompts with the completion
    longest_reference: int = 0  # of all rows of prompts

    @property
    def described(self) -> str:
        """The length of the longest row in words."""
        if not self.prompts:
            return f"{self.longest:,} tokens"
        prompt = self.prompts[0].prompt
        return f"{self.longest:,} tokens (prompt {prompt:,}, completion up to {self.longest - prompt:,})"

    def step_tokens(self, config: RunConfig) -> StepTokens:
        """Return the tokens of a step with the settings of `config`, approximately."""
        if not self.prompts:
            return self._of_documents(config)
        size, samples = config.micro_batch_size, config.trl.num_generations
        reply = _longest_reply(config, self.longest_reference)
        row = max(self.prompts, key=lambda row: row.total(reply))
        prompt, completion = min(row.prompt, config.sequence_len), row.completion(reply)
        sampled = config.trl.generation_batch_size or size * config.gradient_accumulation_steps
        groups = math.ceil(size / samples)
        scored = groups * row.reference if config.ebft.ce_coef else 0
        return StepTokens(
            loss=(groups if config.ebft.shared_prefix else size) * prompt + size * completion + scored,
            sampling=0 if config.trl.use_vllm else math.ceil(sampled / samples) * prompt + sampled * completion,
            features=prompt + samples * completion + row.reference if config.method.compares_features(config) else 0,
        )

    def _of_documents(self, config: RunConfig) -> StepTokens:
        batch = [self.data[index] for index in range(min(config.micro_batch_size, len(self.data)))]
        documents = [document for row in batch for document in row.get("documents", [row])]
        if "prompt_ids" in documents[0]:  # of preference methods, which run all completions in one batch
            return StepTokens(
                loss=len(documents) * len(completions_of(documents[0])) * max(map(_pair_length, documents))
            )
        lengths = [min(_tokens(document), config.sequence_len) for document in documents]
        if config.method.rows == "comparisons":
            return StepTokens(loss=2 * len(lengths) * max(lengths))
        if not config.method.samples_blocks:
            packed = [sum(map(_tokens, row["documents"])) for row in batch if "documents" in row] or lengths
            return StepTokens(loss=sum(lengths) if config.batch_flattening is True else len(packed) * max(packed))
        ebft, blocks = config.ebft, sum(most_blocks(config, each, config.sequence_len) for each in documents)
        rollouts = blocks * ebft.n_samples_per_prompt * ebft.generate_max_len
        total = sum(lengths) + min(rollouts, ebft.rollout_tokens_per_pass or rollouts)
        return StepTokens(loss=total, sampling=total, features=total)


def row_lengths(config: RunConfig, tokenizer: Any, data: Any) -> list[int] | list[PromptLength]:
    """Return the tokens of each row of a Dataset or PackedRows; of prompts, the tokens of each turn."""
    if isinstance(data, PackedRows):
        return data.lengths
    if "input_ids" in data.column_names:
        return token_counts(data)
    if config.method.rows == "comparisons":
        return [_tokens(row) for row in data]
    if "prompt_ids" in data.column_names:
        return list(map(_pair_length, data))
    renderer = Renderer(tokenizer, config.chat_template_kwargs)
    talks = (renderer.of_row(row) for row in data)
    return [PromptLength(tuple((len(turn.lead_ids), len(turn.reference_ids)) for turn in talk.turns)) for talk in talks]


def _tokens(row: dict[str, Any]) -> int:
    """The tokens of a document, or of the longer text of a comparison."""
    return len(row["input_ids"]) if "input_ids" in row else max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def longest_rows(config: RunConfig, data: Any, lengths: list[int] | list[PromptLength]) -> LongestRows:
    """Return the longest rows of `data`, whose `row_lengths` are `lengths`."""
    of_prompts, reference = isinstance(lengths[0], PromptLength), 0
    tokens = lengths
    if of_prompts:
        reference = max(reference for row in lengths for _, reference in row.turns)
        tokens = [row.total(_longest_reply(config, reference)) for row in lengths]
    order = sorted(range(len(tokens)), key=lambda index: -tokens[index])[: rows_per_step(config)]
    prompts = tuple(lengths[index] for index in order) if of_prompts else ()
    return LongestRows(data.select(order), prompts, tokens[order[0]], reference)


def sequence_len_checks(config: RunConfig, rows: LongestRows, counts: dict[str, int]) -> Iterator[Check]:
    """Advice if `sequence_len` truncates rows, or is more than twice the longest; `counts`: rows by reason."""
    limit, cut = config.sequence_len, counts.get(TRUNCATED, 0)
    longest = max((r.prompt + max(r.reference, rows.longest_reference) for r in rows.prompts), default=rows.longest)
    if cut:
        text = f"{cut:,} row{'s are' if cut > 1 else ' is'} truncated at sequence_len: {limit}. Increase it"
        yield Check("warning", "sequence_len", text)
    elif 2 * longest < limit:
        enough = f"sequence_len: {2 ** math.ceil(math.log2(longest + 1))} is enough"
        yield Check("ok", "sequence_len", f"{limit} is over twice the longest row ({longest:,} tokens): {enough}")


def completions_of(row: dict[str, Any]) -> list[str]:
    """Return the columns of the completions of a row of preference data."""
    return [name for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in row]


def _pair_length(row: dict[str, Any]) -> int:
    """Return the tokens of a prompt with its longest completion."""
    return len(row["prompt_ids"]) + max(len(row[name]) for name in completions_of(row))


def _longest_reply(config: RunConfig, reference: int) -> int:
    limit, ebft = config.trl.max_completion_length, config.ebft
    if not (config.method.needs_reference and ebft.adaptive_max_tokens):
        return limit
    return ReferenceLimit(ebft.gt_length_multiplier, ebft.gt_length_floor).of(reference or None, limit)


def rows_per_step(config: RunConfig) -> int:
    """Return the number of training rows that this process reads for one optimizer step."""
    per_step = config.micro_batch_size * config.gradient_accumulation_steps
    if config.method.rows == "prompts":
        return math.ceil((config.trl.generation_batch_size or per_step) / config.trl.num_generations)
    return per_step


def most_blocks(config: RunConfig, document: dict[str, Any], sequence_len: int) -> int:
    """Return the blocks of a document that is cut at `sequence_len` tokens, if each of its turns has an end token."""
    length, options = min(len(document["input_ids"]), sequence_len), BlockOptions.of(config.ebft, (), sequence_len)
    turns = document.get("turn_spans") or [(document["prompt_length"], length)]
    ends = [(start, min(end, length)) for start, end in turns]
    return sum(len(turn_anchors(start, end, end * config.ebft.stop_at_end, options)) for start, end in ends)
