"""Transforms convert raw rows to rows for training; the `type` of a dataset entry names one.

A transform is a function `transform(cfg, **kwargs)` that returns `(transform_fn, map_kwargs)`:
`transform_fn(example, tokenizer=None)` returns the fields `input_ids`, `labels` and optionally `prompt_length`,
`turn_spans` and `attention_mask`, or, for structured mode and `rl: grpo`, `prompt` and `ground_truth`; `map_kwargs` are
passed to `datasets.Dataset.map`, where `{"remove_columns": "__all__"}` removes all original columns.

A built-in transform is a line of `TRANSFORMS`: a format (`formats.py`) says which columns of a row are which part of an
example, and `rows.py` makes rows of examples. A bare `name` is short for `name.transform`. Looking a name up imports
neither, so that configs are checked quickly.
"""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from ebft.config.options import EBFTSection
from ebft.config.section import STRICT, NotBlank, Section, without_empty_names
from ebft.config.user_functions import find_function, no_function
from ebft.errors import DataError

# The fields of each kind of rows, for messages.
Rows = Literal["tokens", "prompts", "comparisons", "steps", "preferences", "labelled"]
_FIELDS: dict[Rows, str] = {
    "tokens": "input_ids and labels",
    "prompts": "prompt and ground_truth",
    "comparisons": "chosen_ids and rejected_ids",
    "steps": "input_ids and labels of steps",
    "preferences": "prompt, chosen and rejected",
    "labelled": "prompt, completion and label",
}

# Keys of a turn that SFT and strided mode train on; an empty one of the first three can be meant as in axolotl.
LABELS = ("roles_to_train", "train_on_eos", "train_on_eot", "message_field_training")
# Keys of a dataset that only some of the built-in transforms read. A custom transform may read any key.
_CHAT = (
    *("message_property_mappings", "roles", "field_thinking", "template_thinking_key", "split_thinking"),
    *("drop_system_message", "field_messages"),
)
_SYSTEM = ("field_system", "system_prompt")
_OF_PAIRS = (*_SYSTEM, "drop_system_message", "field_tools")
_LAST_TURN = (*_CHAT, *_SYSTEM)
_TURNS = (*_LAST_TURN, *LABELS, "field_tools")
_STEPS = ("step_separator", "max_completion_length", "train_on_last_step_only")
_REPLIES = ("field_chosen", "field_rejected")
READ_BY_SOME = (*_CHAT, *_SYSTEM, *LABELS, "field_tools", "user_defined", *_STEPS, *_REPLIES)


class BuiltIn(NamedTuple):
    """A built-in transform: its format, the rows that it can return, and the keys of a dataset that it reads.

    `replies` says which replies of a chat are trained on, or in what form. `twin` returns the other one of rows of
    tokens and of prompts from the same columns, with the same turns trained on. It is used if a run needs that kind, so
    that one dataset works with every method.
    """

    format: str
    rows: tuple[Rows, ...]
    replies: str = ""
    twin: str | None = None
    reads: tuple[str, ...] = ("drop_system_message",)  # of `READ_BY_SOME`


_TOKENS, _PROMPTS, _PAIRS, _LABELLED = ("tokens",), ("prompts",), ("preferences",), ("labelled",)
_BOTH = (*_PAIRS, *_LABELLED)
USER_DEFINED = "preference_columns"  # the name of `type: {field_prompt: ...}`
_STYLED = {  # functions of `chatml` and `llama3`
    "default": _PAIRS,
    "intel": _BOTH,
    "icr": _PAIRS,
    "argilla": _LABELLED,
    "argilla_chat": _BOTH,
    "prompt_pairs": _BOTH,
    "ultra": _BOTH,
}


def _twins(format: str, tokens: str, prompts: str, replies: str, reads: tuple[str, ...]) -> dict[str, BuiltIn]:
    """The transforms `tokens` and `prompts` to rows of tokens and of prompts from the same columns."""
    return {
        tokens: BuiltIn(format, _TOKENS, replies, prompts, reads),
        prompts: BuiltIn(format, _PROMPTS, replies, tokens, reads),
    }


_NO_SYSTEM, _WRITTEN = ("drop_system_message",), ("drop_system_message", "user_defined")
_STRIDED, _TURN, _REASONING = "ebft_strided_chat.transform", "ebft_chat_multiturn.transform", "ebft_reasoning.transform"
_TEXTS, _CODE, _EACH = "ebft_strided_structured.transform", "ebft_opencode.transform", f"{_TURN}_all_turns"
TRANSFORMS: dict[str, BuiltIn] = {
    "ebft_pretrain.transform": BuiltIn("text", _TOKENS, reads=()),
    **_twins("texts", _TEXTS, f"{_TEXTS}_prompts", "", _NO_SYSTEM),
    _STRIDED: BuiltIn("chat", _TOKENS, "all", _EACH, _TURNS),
    **_twins("chat", f"{_STRIDED}_last_turn", f"{_TURN}_last_turn", "last", _TURNS),
    **_twins("chat", f"{_STRIDED}_all_turns", _EACH, "each", _TURNS),
    **_twins("pairs", f"{_CODE}_strided", _CODE, "last", _OF_PAIRS),
    _TURN: BuiltIn("chat", _PROMPTS, "first", "chat_template.transform", _TURNS),
    **_twins("chat", f"{_REASONING}_strided", _REASONING, "rendered", _LAST_TURN),
    f"{_REASONING}_answer_only": BuiltIn("chat", _PROMPTS, "answer", reads=_LAST_TURN),
    f"{_REASONING}_split_thinking": BuiltIn("chat", _PROMPTS, "split", reads=_LAST_TURN),
    "completion.transform": BuiltIn("text", _TOKENS, "ended", reads=()),
    "chat_template.transform": BuiltIn("chat", _TOKENS, "all", _EACH, _TURNS),
    **_twins("alpaca", "alpaca.transform", "alpaca.transform_prompts", "", _NO_SYSTEM),
    **_twins("instructions", "alpaca_chat.transform", "alpaca_chat.transform_prompts", "last", _OF_PAIRS),
    **_twins("user_defined", "user_defined.transform", "user_defined.transform_prompts", "", _WRITTEN),
    "input_output.transform": BuiltIn("segments", _TOKENS),
    "tokens.transform": BuiltIn("tokens", _TOKENS, reads=()),
    "nemo_gym.transform": BuiltIn("nemo_gym", _PROMPTS, reads=_CHAT),
    "bradley_terry.chat_template": BuiltIn("any", ("comparisons",), reads=(*_LAST_TURN, "field_tools", *_REPLIES)),
    "stepwise_supervised.transform": BuiltIn("steps", ("steps",), reads=(*_NO_SYSTEM, *_STEPS)),
    "chat_template.default": BuiltIn("replies", _PAIRS, reads=(*_TURNS, *_REPLIES)),
    "chat_template.argilla_chat": BuiltIn("chats", _PAIRS, reads=(*_TURNS, *_REPLIES)),
    "chat_template.argilla": BuiltIn("chats", _PAIRS, reads=(*_TURNS, *_REPLIES)),
    **{
        f"{style}.{name}": BuiltIn(f"{style}.{name}", rows, reads=_NO_SYSTEM)
        for style in ("chatml", "llama3")
        for name, rows in _STYLED.items()
    },
    "passthrough": BuiltIn("as_is", (*_BOTH, *_PROMPTS), reads=("drop_system_message", "field_tools")),
    USER_DEFINED: BuiltIn("mapping", _BOTH),
}


def _alpaca(system: str, prompt: str, no_input: str) -> dict[str, str]:
    """A style of alpaca: `system` is written around the sentence that introduces the task."""
    says = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
    given = says.format(", paired with an input that provides further context")
    texts = {"format": system.format(given) + prompt, "no_input_format": system.format(says.format("")) + no_input}
    return {**texts, "system_format": ""}


_INSTRUCT = "### Instruction:\n{instruction}\n\n"
_ALPACA = _alpaca("{}\n\n", _INSTRUCT + "### Input:\n{input}\n\n### Response:\n", _INSTRUCT + "### Response:\n")
_CHAT = ("SYSTEM: {}\n", "USER: {instruction}\n{input}\nASSISTANT:")
_PHI = ("<|system|>\n{}<|end|>\n", "<|user|>\n{instruction}<|end|>{input}<|assistant|>")
PROMPTS: dict[Any, dict[str, str]] = {
    "alpaca": _ALPACA,
    "alpaca:chat": _alpaca(*_CHAT, "USER: {instruction}\nASSISTANT:"),
    "alpaca:phi": _alpaca(*_PHI, "<|user|>\n{instruction}<|end|>\n<|assistant|>\n"),
    "oasst": _ALPACA | {"field_instruction": "INSTRUCTION", "field_output": "RESPONSE"},
}

# The first parts of the names, without the formats of preference data.
_UNPAIRED = [name for name, found in TRANSFORMS.items() if not {*found.rows} & {*_BOTH}]
MODULES = list(dict.fromkeys(name.partition(".")[0] for name in _UNPAIRED))

# Names of transforms in axolotl that are different here.
OTHER_TYPES = {
    "sharegpt": "chat_template",
    "alpaca_chat.load_qa": "alpaca_chat.transform",
    "passthrough.default": "passthrough",
    "chatml": "chatml.default",
    "orpo.chat_template.argilla": "chat_template.argilla",
}

_KEY = "datasets.type"
_REFUSED = {
    "zephyr.nectar": "it samples pairs from a ranking, with other pairs in each run. Convert the rows to prompt, "
    "chosen and rejected once, and use passthrough",
    "user_defined.default": "write the columns as a mapping, type: {field_prompt: ..., field_chosen: ..., "
    "field_rejected: ...}",
    "orpo.chat_template": "use chat_template.argilla, for chats in the columns chosen and rejected that differ in "
    "their last message",
    "pretrain": "use completion, with field for the column of the text",
}


class PreferenceColumns(Section):
    """The columns and texts of preference data, as the `type` of a dataset; `{prompt}` is replaced with the column."""

    model_config = {**STRICT, "frozen": True}  # hashable, as names of transforms are

    field_prompt: NotBlank = Field("prompt", description="Column of the prompt.")
    field_system: NotBlank = Field("system", description="Column of the system message, for {system} in prompt_format.")
    field_chosen: NotBlank | None = Field(None, description="Column of the preferred completion; if unset, chosen.")
    field_rejected: NotBlank | None = Field(None, description="Column of the other completion; if unset, rejected.")
    field_completion: NotBlank | None = Field(None, description="rl: kto: column of the text; if unset, completion.")
    field_label: NotBlank | None = Field(None, description="rl: kto: column of true or false; if unset, label.")
    prompt_format: str = Field("{prompt}", description="Text of the prompt, with {prompt} and optionally {system}.")
    chosen_format: str | None = Field(None, description="Text with {chosen}; if unset, the column as it is.")
    rejected_format: str | None = Field(None, description="Text with {rejected}; if unset, the column as it is.")
    completion_format: str | None = Field(None, description="rl: kto: text with {completion}.")

    def __repr__(self) -> str:
        given = ", ".join(f"{name}: {getattr(self, name)!r}" for name in sorted(self.model_fields_set))
        return f"{{{given}}}"

    __str__ = __repr__

    _empty_names_are_unset = model_validator(mode="before")(without_empty_names)

    @model_validator(mode="after")
    def _formats_name_their_column(self) -> "PreferenceColumns":
        for name in ("prompt", "chosen", "rejected", "completion"):
            text = getattr(self, f"{name}_format")
            if text is not None and f"{{{name}}}" not in text:
                raise ValueError(f"{name}_format: {text!r} does not contain {{{name}}}. Add it where the text belongs.")
        return self


@dataclass(frozen=True)
class RequiredRows:
    """The rows that a method trains on."""

    kind: Rows
    method: str  # its name, for messages
    needs_reference: bool  # whether every row of prompts must have one
    block: EBFTSection | None  # options of the blocks, if every row must have room for one
    chat_template_kwargs: dict[str, Any] | None  # for rendering prompts


Type = str | PreferenceColumns  # the `type` of a dataset


def find_transform(name: Type) -> Callable:
    """The function for a dataset `type`: a built-in transform, or a custom `module.function`.

    Raises DataError for an unknown name.
    """
    found = built_in(name)
    if found is None:
        return own_transform(name)
    return partial(importlib.import_module(f"{__name__}.rows").built_in_transform, found)


def built_in(name: Type) -> str | None:
    """The key of `TRANSFORMS` for a `type`, None for a custom function. Raises DataError for an unknown function."""
    if isinstance(name, PreferenceColumns):
        return USER_DEFINED
    if name in TRANSFORMS:
        return name
    if name in _REFUSED:
        raise DataError(f"{_KEY}: {name!r} is not supported: {_REFUSED[name]}.")
    module, function = name.rpartition(".")[::2] if "." in name else (name, "transform")
    full = f"{module}.{function}"
    functions = [each.removeprefix(f"{module}.") for each in TRANSFORMS if each.startswith(f"{module}.")]
    if functions and full not in TRANSFORMS:
        raise no_function(_KEY, name, module, function, functions, DataError)
    return full if functions else None


def own_transform(name: str) -> Callable:
    """The custom function `module.function`; modules are looked up on Python's path and in the working directory.

    Raises DataError if it does not exist.
    """
    near = difflib.get_close_matches(name.rpartition(".")[0] or name, MODULES, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return find_function(_KEY, name, DataError, f"{guess} Built-in transforms: {', '.join(MODULES)}.")


def check_transform(name: Type, rows: RequiredRows) -> None:
    """Raise DataError if `type` is not a transform, or a built-in one that returns other rows."""
    found = built_in(name)
    if found is None:
        own_transform(name)
    elif rows.kind not in TRANSFORMS[found].rows:
        fields = " or ".join(_FIELDS[kind] for kind in TRANSFORMS[found].rows)
        name = "the mapping of columns" if isinstance(name, PreferenceColumns) else repr(name)
        raise DataError(f"datasets.type: {name} returns rows of {fields}, but {wanted_rows(rows)}")


def equivalent_transform(name: Type, kind: Rows) -> str | None:
    """The built-in transform that replaces `name` to get rows of `kind`; None if none is needed or available."""
    if kind not in ("tokens", "prompts") or not isinstance(name, str):
        return None
    found = TRANSFORMS.get(name if "." in name else f"{name}.transform")
    return None if found is None or kind in found.rows else found.twin


def wanted_rows(rows: RequiredRows) -> str:
    """The rows that a run trains on and the transforms that return them, worded to follow "but "."""
    fitting = [name for name, found in TRANSFORMS.items() if rows.kind in found.rows and name != USER_DEFINED]
    if rows.kind in TRANSFORMS[USER_DEFINED].rows:
        fitting.append("a mapping of columns ({field_prompt: ...})")
    return (
        f"{trains_on(rows)}. Use {', '.join(fitting)}, or a custom transform "
        "that returns them, or change the method (rl, ebft.mode, reward_model)."
    )


def trains_on(rows: RequiredRows) -> str:
    """The rows that a run trains on, for messages."""
    return f"{rows.method} trains on rows of {_FIELDS[rows.kind]}"
