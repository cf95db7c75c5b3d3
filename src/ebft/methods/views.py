"""What is shown of a row: parts of tokens with their labels, and the blocks of a document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from os.path import commonprefix
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ebft.anchors import BlockOptions
from ebft.config.options import EBFTSection
from ebft.data.conversation import Conversation, Renderer
from ebft.data.documents import DocumentCollator, JoiningCollator
from ebft.data.rendering import ChatTemplate
from ebft.data.stream import StreamRows
from ebft.data.transforms.rows import IGNORE
from ebft.strided.layout import Documents, StridedLayout
from ebft.structured.trainer import labelled_reference

LONGEST_RUN = 200  # characters of a run that are shown; the part has all of its tokens


@dataclass(frozen=True)
class Token:
    """A token: `label` is its id if it is in the cross-entropy, else -100; `anchor` is its position if it is one."""

    id: int
    text: str  # printable
    label: int
    special: bool
    anchor: int | None = None


@dataclass(frozen=True)
class Block:
    """A block of a document: its anchor, the text before it, and its reference."""

    anchor: int
    context: str
    reference: str


class TokenSpan(NamedTuple):
    """Consecutive tokens of a part, from position `start` to before `stop`, with the same role."""

    role: str
    start: int
    stop: int


@dataclass(frozen=True)
class RowPart:
    """A sequence of tokens with its title, facts about it as (name, value), and the roles of its tokens."""

    title: str
    tokens: list[Token]
    facts: list[tuple[str, str]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    roles: list[TokenSpan] = field(default_factory=list)

    def text(self, run: TokenSpan) -> str:
        """The text of a run, shortened in its middle."""
        text = "".join(token.text for token in self.tokens[run.start : run.stop])
        return text if len(text) <= LONGEST_RUN else f"{text[: LONGEST_RUN // 2]} ... {text[-LONGEST_RUN // 2 :]}"


@dataclass(frozen=True)
class RowView:
    """A row: its parts in order, and its other columns as (name, value)."""

    parts: list[RowPart]
    columns: list[tuple[str, str]] = field(default_factory=list)


class TokenTexts:
    """Converts token ids to tokens with printable texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.special = {*tokenizer.all_special_ids, *added}

    def tokens(self, ids: Sequence[int], learned: Iterable[bool], anchors: Iterable[int] = ()) -> list[Token]:
        """The tokens `ids`; the ones that are `learned` have a label, and `anchors` are positions."""
        labels = [token if is_learned else IGNORE for token, is_learned in zip(ids, learned, strict=True)]
        places = {position: position for position in anchors}
        return [
            Token(token, text, label, token in self.special, places.get(position))
            for position, (token, text, label) in enumerate(zip(ids, self.texts(ids), labels))
        ]

    def joined(self, ids: Sequence[int]) -> str:
        return one_line(self._decode(list(ids)))

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token with its leading space; the tokenizer's own spelling if it is part of a character."""
        alone = [self._decode([token]) for token in ids]
        texts = alone[:1]
        for index in range(1, len(ids)):
            # Some tokenizers drop the space before the first token that they decode.
            pair = self._decode([ids[index - 1], ids[index]])
            texts.append(pair.removeprefix(alone[index - 1]) if pair.startswith(alone[index - 1]) else alone[index])
        spelled = self.tokenizer.convert_ids_to_tokens(list(ids))
        return [one_line(name if "\ufffd" in text else text) for text, name in zip(texts, spelled)]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def one_line(value: Any) -> str:
    """A value as text on one line, with escapes for control characters."""
    text = value if isinstance(value, str) else repr(value)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def counted(tokens: list[Token], ce_coef: float = 1.0) -> list[tuple[str, str]]:
    """The number of tokens that have a label, as facts; `ce_coef` is the weight of their cross-entropy."""
    number = sum(token.label != IGNORE for token in tokens)
    idle = [] if ce_coef else [("ebft.ce_coef", "0: the cross-entropy is not trained on")]
    return [("in the cross-entropy", f"{number:,} of {len(tokens):,} tokens"), *idle]


def first_rows(
    number: int, show: Callable[[Any], RowView], train: Any, evaluation: Any
) -> Iterator[tuple[str, RowView]]:
    """The first `number` rows for training and for evaluation (None if there are none), each with a title."""
    for purpose, rows in (("training", train), ("evaluation", evaluation)):
        if isinstance(rows, StreamRows):
            for index, row in enumerate(islice(rows.rows(), number)):
                yield f"row {index + 1:,} of the stream for {purpose}", show(row)
            continue
        for index in range(0 if rows is None else min(number, len(rows))):
            yield f"row {index + 1:,} of {len(rows):,} for {purpose}", show(rows[index])


class View:
    """Shows rows: called with one, it returns what is shown of it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts, self.roles = TokenTexts(tokenizer), Roles(tokenizer)


CONTEXT = 8  # tokens shown before an anchor


class StridedView(View):
    """Shows a row, or each document of a packed row, with the collator and the layout of the trainer."""

    def __init__(self, options: EBFTSection, blocks: BlockOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self.options, self.blocks = options, blocks
        self.collator = DocumentCollator(tokenizer.pad_token_id, with_prompt_length=True)

    def __call__(self, row: dict[str, Any]) -> RowView:
        documents = Documents.from_inputs(self.collator([row]))
        layout = StridedLayout.place(documents, self.blocks)
        tokens = documents.tokens[layout.reference_index()]
        of_blocks = [ids[:length] for ids, length in zip(tokens.tolist(), layout.lengths(tokens).tolist())]
        references = [[of_blocks.pop(0) for _ in anchors] for anchors in layout.anchors]
        shown = zip(row.get("documents", [row]), layout.spans, layout.anchors, references, strict=True)
        parts = []
        for number, (document, (start, stop), anchors, blocks) in enumerate(shown):
            ids, learned = documents.tokens[start:stop].tolist(), documents.ce_mask[start:stop].tolist()
            tokens = self.texts.tokens(ids, learned, anchors)
            turns = [turn for turn in documents.turns[number].tolist() if turn[1]]
            parts.append(
                RowPart(
                    "document" if len(layout.spans) == 1 else f"document {number + 1} of {len(layout.spans)}",
                    tokens,
                    [*self._facts(turns, anchors), *counted(tokens, self.options.ce_coef)],
                    [
                        Block(start, self.texts.joined(ids[max(0, start - CONTEXT) : start]), self.texts.joined(block))
                        for start, block in zip(anchors, blocks)
                    ],
                    self.roles.of_document(document),
                )
            )
        return RowView(parts)

    def _facts(self, turns: list[list[int]], anchors: list[int]) -> list[tuple[str, str]]:
        options, prompt = self.options, turns[0][0]
        sampled = len(anchors) * options.n_samples_per_prompt * options.generate_max_len
        counts = [sum(start <= anchor < end for anchor in anchors) for start, end in turns]
        blocks = [f"{s}-{e - 1} ({count} block{'s' * (count != 1)})" for (s, e), count in zip(turns, counts)]
        return [
            ("prompt", f"{prompt:,} tokens" if prompt else "none"),
            *([("turns", ", ".join(blocks))] if len(turns) > 1 else []),
            ("first anchor", f"{anchors[0]}" if anchors else "none: too short for a block"),
            ("blocks", f"{len(anchors):,}, stride {options.stride}, up to {options.generate_max_len} tokens each"),
            ("sampled", f"up to {sampled:,} tokens: {options.n_samples_per_prompt} rollouts per anchor"),
        ]


class SFTView(View):
    """Shows a row with `input_ids` and `labels`, or each document of a packed row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self.collator = JoiningCollator(tokenizer.pad_token_id)

    def __call__(self, row: dict[str, Any]) -> RowView:
        batch = self.collator([row])
        learned = batch["labels"][0].ne(IGNORE)
        learned[0] = False  # the loss compares labels with the predictions of the token before
        tokens = self.texts.tokens(batch["input_ids"][0].tolist(), learned.tolist())
        if "pieces" in row:  # of a stream
            return RowView([RowPart("row", tokens, [("documents", f"{row['pieces']:,}"), *counted(tokens)])])
        documents = row.get("documents", [row])
        parts, start = [], 0
        for number, document in enumerate(documents, 1):
            title = f"document {number} of {len(documents)}" if "documents" in row else "row"
            part = tokens[start : start + len(document["input_ids"])]
            length = document["prompt_length"]
            # The tokens before the last turn are a prompt if none is trained on.
            is_trained = any(token.label != IGNORE for token in part[:length])
            facts = [("before the last turn" if is_trained else "prompt", f"{length:,} tokens"), *counted(part)]
            parts.append(RowPart(title, part, facts, roles=self.roles.of_document(document)))
            start += len(part)
        return RowView(parts)


LONGEST = 400  # characters of a column that are shown


class PromptView(View):
    """Shows a row with `prompt` and, if completions are compared with it, the reference in `ground_truth`.

    `ce_coef` is the weight of the cross-entropy on references, None for methods without it; `note` is shown with every
    prompt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: dict[str, Any] | None,
        compares: bool,
        ce_coef: float | None = None,
        mask_thinking: bool = False,
        note: str | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.renderer = Renderer(tokenizer, chat_template_kwargs)
        self.compares, self.ce_coef, self.mask_thinking = compares, ce_coef, mask_thinking
        self.notes = [] if note is None else [("note", note)]

    def __call__(self, row: dict[str, Any]) -> RowView:
        reference = row.get("ground_truth")
        compares = self.compares and isinstance(reference, str)
        conversation = self.renderer.of_row(row, compares)
        prompt = conversation.prompt_ids
        kind = "text" if isinstance(row["prompt"], str) else f"{len(row['prompt'])} messages"
        facts = [("kind", kind), ("tokens", f"{len(prompt):,}"), *self.notes]
        roles = runs(["prompt"] * len(prompt))
        parts = [RowPart("prompt", self.texts.tokens(prompt, [False] * len(prompt)), facts, roles=roles)]
        if compares or len(conversation.turns) > 1:
            parts += self._turns(conversation)
        shown = ("prompt", "remaining_turns", *(["ground_truth"] if compares else []))
        columns = [(name, one_line(value)) for name, value in row.items() if name not in shown]
        short = lambda text: text if len(text) <= LONGEST else text[:LONGEST] + "..."
        return RowView(parts, [(name, short(text)) for name, text in columns])

    def _turns(self, conversation: Conversation) -> list[RowPart]:
        """A part for the reference of each turn, and for what is given before it."""
        ids, counts = labelled_reference(conversation, mask_thinking=self.mask_thinking)
        learned = [bool(count) and self.ce_coef is not None for count in counts]
        tokens = self.texts.tokens(ids, learned)
        parts, start = [], 0
        last = len(conversation.turns)
        for number, turn in enumerate(conversation.turns, start=1):
            if number > 1:
                given = tokens[start : start + len(turn.lead_ids)]
                roles = self.roles.of_gap(turn.lead_ids)
                parts.append(RowPart(f"before turn {number}", given, [("tokens", f"{len(given):,}")], roles=roles))
                start += len(given)
            stop = len(tokens) if number == last else start + len(turn.reference_ids)
            title = "reference" if last == 1 else f"reference of turn {number}"
            roles = self.roles.of_completion([], ids[start:stop], "reference")
            parts.append(RowPart(title, tokens[start:stop], self._facts(tokens[start:stop]), roles=roles))
            start = stop
        return parts

    def _facts(self, tokens: list[Any]) -> list[tuple[str, str]]:
        if self.ce_coef is None:
            return [("tokens", f"{len(tokens):,}"), ("cross-entropy", "none with this method")]
        return counted(tokens, self.ce_coef)


class PreferenceView(View):
    """Shows a row with `prompt_ids`, and `chosen_ids` and `rejected_ids`, or `completion_ids` and `label`."""

    def __call__(self, row: dict[str, Any]) -> RowView:
        names = [name for name in ("chosen", "rejected", "completion") if f"{name}_ids" in row]
        columns = [("label", str(row["label"]).lower())] if "label" in row else []
        return RowView([self._part(name, row["prompt_ids"], row[f"{name}_ids"]) for name in names], columns)

    def _part(self, title: str, prompt: list[int], completion: list[int]) -> RowPart:
        scored = [False] * len(prompt) + [True] * len(completion)
        if not prompt:
            scored[0] = False  # nothing predicts the first token
        tokens = self.texts.tokens(prompt + completion, scored)
        roles = self.roles.of_completion(prompt, completion, "completion")
        facts = [("prompt", f"{len(prompt):,} tokens"), ("scored", f"{sum(scored):,} of {len(scored):,} tokens")]
        return RowPart(title, tokens, facts, roles=roles)


class ComparisonView(View):
    """Shows the chosen and the rejected text of a pair, which have no labels, and its margin."""

    def __call__(self, row: dict[str, Any]) -> RowView:
        sides = {name: row[f"{name}_ids"] for name in ("chosen", "rejected")}
        parts = [self._part(name, ids, other) for (name, ids), other in zip(sides.items(), [*sides.values()][::-1])]
        if "margin" in row:
            parts[0].facts.append(("margin", f"{row['margin']:g}"))
        return RowView(parts)

    def _part(self, name: str, ids: list[int], other: list[int]) -> RowPart:
        padding = self.texts.tokenizer.pad_token_id
        scored = max((index for index, token in enumerate(ids) if token != padding), default=0)
        text = self.texts.texts(ids)[scored]
        facts = [("length", f"{len(ids):,} tokens"), ("scored at", f"token {scored}, {text!r}")]
        roles = self.roles.of_pair(ids, other, f"{name} reply")
        return RowPart(name, self.texts.tokens(ids, [False] * len(ids)), facts, roles=roles)


class StepView(View):
    """Shows a row in which the last token of each step has its class as its label."""

    def __call__(self, row: dict[str, Any]) -> RowView:
        ids, labels = row["input_ids"], row["labels"]
        plain = self.texts.tokens(ids, [False] * len(ids))
        tokens = [replace(token, label=label) for token, label in zip(plain, labels, strict=True)]
        steps = [label for label in labels if label != IGNORE]
        facts = [("length", f"{len(ids):,} tokens"), ("classes of steps", ", ".join(map(str, steps)))]
        return RowView([RowPart("row", tokens, facts, roles=role_steps(labels))])


PROMPT, REFERENCE, END, BETWEEN, AFTER = "prompt", "reference", "end of turn", "between turns", "after the reference"


def generation_prompt(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None) -> str | None:
    """A line with what the chat template puts before a reply, None if there is no template or it is unknown."""
    if tokenizer.chat_template is None:
        return None
    asked = [{"role": "user", "content": "?"}]
    with suppress(Exception):  # the template may not accept such a chat
        plain, whole = (
            tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=added, **(kwargs or {}))
            for added in (False, True)
        )
        if whole.startswith(plain):
            return f'Generation prompt of the chat template: "{one_line(whole[len(plain) :])}"'
    return None


class Roles:
    """Finds the roles of tokens, as runs, with the tokens that end a turn of a tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._ends = tokenizer, ChatTemplate(tokenizer).end_ids

    def of_document(self, document: Mapping[str, Any]) -> list[TokenSpan]:
        """Roles of a row of `input_ids`, `labels` and `prompt_length`; raw text has the role text.

        Turns that are trained on are references. Other tokens after the first of these turns are between turns, but
        not in the last one, such as a thinking block.
        """
        ids, start = document["input_ids"], document["prompt_length"]
        trained = [label != IGNORE for label in document.get("labels", ids)]
        if not start and all(trained):
            return runs(["text"] * len(ids))
        if start and all(trained[:start]):  # train_on_inputs
            trained[:start] = [False] * start
        return runs(self._names(ids, trained, start, REFERENCE))

    def of_completion(
        self, prompt: Sequence[int], completion: Sequence[int], name: str, before: str = PROMPT
    ) -> list[TokenSpan]:
        """Roles of the ids of a prompt, which are named `before`, and of a completion, which is named `name`."""
        names = self._names(completion, [True] * len(completion), 0, name)
        return runs([before] * len(prompt) + names)

    def of_pair(self, ids: Sequence[int], other: Sequence[int], name: str) -> list[TokenSpan]:
        """Roles of one of two conversations that differ in their last reply, which is named `name`."""
        shared = len(commonprefix([list(ids), list(other)]))
        return self.of_completion(ids[:shared], ids[shared:], name, "in both texts")

    def of_gap(self, ids: Sequence[int]) -> list[TokenSpan]:
        """Roles of what is given between two replies: the end of the first one, and what follows."""
        ended = next((index + 1 for index, token in enumerate(ids) if token in self._ends), 0)
        return runs([END] * ended + [BETWEEN] * (len(ids) - ended))

    def _names(self, ids: Sequence[int], trained: Sequence[bool], last_turn: int, reference: str) -> list[str]:
        """The role of each token; the last turn starts at `last_turn`."""
        learned = [index for index, is_trained in enumerate(trained) if is_trained]
        first, last = min([last_turn, *learned[:1]]), max(learned, default=-1)
        names, ended = [PROMPT] * first, False
        for index in range(first, len(ids)):
            # White space after the token that ends a turn still belongs to the end.
            goes_on = trained[index] and index > first and trained[index - 1] and self._is_space(ids[index])
            if index == last_turn or (trained[index] and not goes_on):
                ended = False
            if ids[index] in self._ends and (trained[index] or names[-1:] == [reference]):
                names.append(END)
                ended = True
            elif not trained[index] and index > last:
                names.append(END if ended and self._is_space(ids[index]) else AFTER)
            elif ended:
                names.append(END if trained[index] else BETWEEN)
            else:
                names.append(reference if trained[index] or index >= last_turn else BETWEEN)
        return names

    def _is_space(self, token: int) -> bool:
        return not self._tokenizer.decode([token]).strip()


def role_steps(labels: Sequence[int]) -> list[TokenSpan]:
    """Roles of a row whose labels are the classes of steps: each run ends with a label."""
    names, number, last = [], 1, max((index for index, label in enumerate(labels) if label != IGNORE), default=-1)
    for index, label in enumerate(labels):
        step = f"{PROMPT} and step 1" if number == 1 else f"step {number}"
        names.append(step if index <= last else "after the last label")
        number += label != IGNORE
    return runs(names)


def runs(names: Sequence[str]) -> list[TokenSpan]:
    """Runs of tokens with the same name."""
    found, start = [], 0
    for name, group in groupby(names):
        stop = start + len(list(group))
        found.append(TokenSpan(name, start, stop))
        start = stop
    return found
