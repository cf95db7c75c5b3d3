"""Loading prompts with their references from the `datasets:` section, for structured mode and `rl: grpo`."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase

from ebft.config.keys.data import DataSettings
from ebft.data import apply, json_files, load, omissions, row_counts, tables
from ebft.data import messages as chats
from ebft.data.conversation import Renderer, is_reply
from ebft.data.transforms import wanted_rows
from ebft.errors import DataError

_BATCH = 1000  # rows unpacked at once
_ABSENT: dict[str, list] = {"remaining_turns": []}  # values of rows without a field, where they are not None


def load_prompt_rows(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> load.LoadedRows:
    """The training rows and the evaluation rows (None if the config holds no data out).

    Columns: `prompt` (text in all rows, or messages in all rows), `ground_truth` (text; None if `rl: grpo` has none),
    `remaining_turns` if a transform returns it (messages; an empty list in other rows), `tools`, `reply` and
    `chat_template_kwargs` if a row has them (JSON text), and all other columns that the transforms keep, for reward
    functions. References are not truncated: rows that are too long are dropped, with a
    count for each reason. `val_set_size` holds out whole documents, so the turns of one chat stay together. Raises
    DataError if a source cannot be read, sources are incompatible, or no usable rows are left.
    """
    packed = load.load_sections(config, prompt_rows(config, tokenizer))
    return packed.map(partial(_unpacked, columns=_columns(packed.train, packed.evaluation)))


def prompt_rows(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> load.LoadEntry:
    """Return a function that loads packed rows of prompts from a source."""
    return lambda source, counts: apply.apply_transform(
        source, config, tokenizer, PromptRow(config, tokenizer, source.entry.chat_template_kwargs), FEATURES, counts
    )


def unpack_rows(rows: Dataset) -> Dataset:
    """Unpack rows to one column for each field that any row has."""
    return _unpacked(rows, _columns(rows))


def _columns(*datasets: Dataset | None) -> list[str]:
    """All columns of the rows, those with a special meaning first."""
    packed = [names for rows in datasets if rows is not None for names in rows.unique("columns")]
    found = dict.fromkeys(name for names in packed for name in json.loads(names))
    own = ["prompt", "ground_truth", *(["remaining_turns"] if "remaining_turns" in found else [])]
    return [*own, *(name for name in found if name not in own)]


def _unpacked(rows: Dataset, columns: list[str]) -> Dataset:
    """The rows with one column per field, of a type that can represent all of its values; nested ones are JSON."""
    types = json_files.Types(columns)
    for batch in rows.iter(batch_size=_BATCH):
        for row in map(json.loads, batch["row"]):
            types.add(row)
    for name, kinds in types.mixed():
        raise DataError(
            f"column {name!r} contains values of different types ({', '.join(kinds)}). Convert it to one type in all "
            "rows (for example text), or remove it with the transform's remove_columns."
        )
    features = Features(types.features())

    def unpack(batch: dict[str, list]) -> dict[str, list]:
        found = [json.loads(row) for row in batch["row"]]
        values = {name: [row.get(name, _ABSENT.get(name)) for row in found] for name in features}
        return {name: json_files.stored(values[name], kind) for name, kind in features.items()}

    return tables.map_rows(
        rows,
        unpack,
        batched=True,
        batch_size=_BATCH,
        remove_columns=rows.column_names,
        features=features,
        desc="Reading prompts",
    )


# A row as JSON, since its columns and their types are only known after all rows are loaded; the names of its columns;
# the reason for dropping it (empty if kept).
FEATURES = Features({"row": Value("string"), "columns": Value("string"), **apply.WITH_REASON})
# Names of arguments that the trainer passes to reward functions; a column with such a name would replace them.
RESERVED = (
    *("completion", "completion_ids", "completions", "input_ids", "prompts", "trainer_state"),
    *("log_extra", "log_metric", "image", "images"),  # TRL would treat the last two as images, which are not supported
)


class RowWithPrompt:
    """What converts the result of a transform to columns: called with one, it raises DataError for an invalid field."""

    def __init__(
        self, config: DataSettings, tokenizer: PreTrainedTokenizerBase, of_entry: dict[str, Any] | None = None
    ) -> None:
        self.required, self.sequence_len, self.of_entry = config.required_rows, config.sequence_len, of_entry
        kwargs = {**(self.required.chat_template_kwargs or {}), **(of_entry or {})}
        self.renderer = Renderer(tokenizer, kwargs, template=config.chat_template)
        self.omissions = omissions.Omissions(self.renderer.template.name)
        self.hint = wanted_rows(self.required)


class PromptRow(RowWithPrompt):
    """Converts the result of a transform to the columns of `FEATURES`."""

    def __call__(self, row: Mapping[str, Any]) -> dict[str, str]:
        apply.check_fields(row, ("prompt", "ground_truth") if self.required.needs_reference else ("prompt",), self.hint)
        if taken := [name for name in RESERVED if name in row]:
            raise DataError(
                f"{', '.join(taken)}: reserved column name, under which the trainer passes its own values to reward "
                "functions. Rename the column, or add it to the transform's remove_columns."
            )
        fields = {
            **row,
            "prompt": chats.text_or_messages(row["prompt"], "prompt"),
            "ground_truth": row.get("ground_truth"),
        }
        if "remaining_turns" in row:
            fields["remaining_turns"] = chats.messages_of(row["remaining_turns"], "remaining_turns")
        # What the chat template reads is JSON text: Arrow would add the keys of other rows.
        given = {name: fields.get(name) for name in (chats.TOOLS, chats.REPLY)}
        given[chats.ROW_KWARGS] = chats.row_kwargs(fields, self.of_entry)
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items() if value}
        fields |= {name: texts.get(name, "") for name in given if name in fields or name in texts}
        if isinstance(fields["prompt"], list):
            reply = {"role": "assistant", "content": "?"}  # one without a text has a reason of its own
            chats.check_turns([*fields["prompt"], reply, *fields.get("remaining_turns", [])])
            self._check_rendering(fields)
        reason = self._reason(fields)
        listed = lambda value: value.tolist() if hasattr(value, "tolist") else json.JSONEncoder().default(value)
        # Only rows that are kept determine the columns.
        return {
            "row": "" if reason else json.dumps(fields, default=listed),
            "columns": json.dumps([] if reason else list(fields)),
            "reason": reason,
        }

    def _check_rendering(self, fields: dict[str, Any]) -> None:
        """Check that the template renders all messages; messages of a role that it does not know get another one."""
        template = self.renderer.template_of(fields)
        for name in ("prompt", "remaining_turns"):
            if name in fields:
                fields[name] = self.omissions.with_known_roles(fields[name], template)
        if not fields["prompt"] or template.tokenizer.chat_template is None:
            return
        chat, reference = list(fields["prompt"]), fields["ground_truth"]
        if self.required.needs_reference and reference and reference.strip():
            reply = json.loads(fields.get(chats.REPLY) or "null") or {"role": "assistant", "content": reference}
            chat += [reply, *fields.get("remaining_turns", [])]
        compared = [index for index in range(len(fields["prompt"]), len(chat)) if is_reply(chat[index])]
        self.omissions.check(chat[: max(compared, default=len(chat) - 1) + 1], template, compared)

    def _reason(self, fields: dict[str, Any]) -> str:
        prompt, reference = fields["prompt"], fields["ground_truth"]
        if not (prompt.strip() if isinstance(prompt, str) else any(map(chats.says_something, prompt))):
            return row_counts.NO_PROMPT
        if not self.required.needs_reference:
            talk = self.renderer.of_row(fields, compares=False)
            return "" if len(talk.prompt_ids) < self.sequence_len else row_counts.PROMPT_TOO_LONG
        if reference is None or not reference.strip():
            return row_counts.NO_REFERENCE
        talk = self.renderer.of_row(fields)
        if not talk.turns[0].reference_ids:
            return row_counts.NO_REFERENCE  # it consisted of an end-of-turn token only
        # The token that ends the reference is trained on too.
        fits = len(talk.prompt_ids) + len(talk.reference_ids) < self.sequence_len
        return "" if fits else row_counts.REFERENCE_TOO_LONG
