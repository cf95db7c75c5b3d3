"""Config keys of a dataset that describe the shape of its rows: messages, roles, labels of turns, prompt formats."""

from collections.abc import Iterator
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ebft.config.section import NotBlank, Section

THINKING = "reasoning_content"
EOS = Literal["turn", "all", "last", "none"]


def without_empty_names(data: Any) -> Any:
    """Treat columns and system prompts that are empty, as `system_prompt: ""`, as if the keys were absent."""
    if not isinstance(data, dict):
        return data
    return {
        key: value
        for key, value in data.items()
        if value != "" or not (key == "system_prompt" or str(key).startswith("field_"))
    }


class PromptFormat(Section):
    """A prompt written out as text, and the columns that it is made of (`type: user_defined`)."""

    field_instruction: NotBlank = Field("instruction", description="Column of the instruction.")
    field_input: NotBlank = Field("input", description="Column of the input; rows may lack it.")
    field_output: NotBlank = Field("output", description="Column of the completion.")
    field_system: NotBlank = Field("system", description="Column of the system prompt; rows may lack it.")
    system_prompt: NotBlank | None = Field(None, description="System prompt of rows without one.")
    system_format: str = Field(
        "{system}", description="How the system prompt is written before the rest; rows without one start with format."
    )
    format: str = Field(
        "{instruction}\n\n{input}", description="The prompt of rows with an input, with {instruction} and {input}."
    )
    no_input_format: str | None = Field(
        None,
        description="The prompt of rows without an input, with {instruction}. If unset: {instruction} if format is not "
        "set either, else format with an empty input.",
    )

    _empty_names_are_unset = model_validator(mode="before")(without_empty_names)

    @model_validator(mode="after")
    def _known_placeholders(self) -> "PromptFormat":
        for key, allowed in (
            ("system_format", ("system",)),
            ("format", ("instruction", "input")),
            ("no_input_format", ("instruction",)),
        ):
            text = getattr(self, key)
            problem = None if text is None else next(_problems(text, allowed), None)
            if problem is not None:
                names = " and ".join(f"{{{name}}}" for name in allowed)
                raise ValueError(
                    f"datasets.type.{key}: {text!r:.100} {problem}; expected {names}. Other braces are written twice."
                )
        return self


def _problems(text: str, allowed: tuple[str, ...]) -> Iterator[str]:
    try:
        fields = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(text) if name is not None]
    except ValueError as error:
        yield f"is not a format string ({error})"
        return
    for name, spec, conversion in fields:
        if name not in allowed or spec or conversion:
            yield f"contains the placeholder {{{name}}}"


class ShapeKeys(Section):
    """Keys of chats and of prompts written out as text."""

    field_messages: str | None = Field(
        None,
        description="The same as field, for chats; if unset, messages or conversations. "
        "responses_create_params.input with type: chat_template selects nemo_gym.transform, in which all messages are "
        "the prompt.",
    )
    message_property_mappings: dict[NotBlank, NotBlank] | None = Field(
        None,
        description="Keys of a message for the chat template, and their names in the data, for example {role: from, "
        "content: value}. Keys that are not named keep their names.",
    )
    message_field_role: NotBlank | None = Field(None, description="The same as message_property_mappings.role.")
    message_field_content: NotBlank | None = Field(None, description="The same as message_property_mappings.content.")
    roles: dict[NotBlank, Annotated[list[NotBlank], Field(min_length=1)]] | None = Field(
        None,
        description="Roles for the chat template, and their names in the data, for example {user: [human, customer], "
        "assistant: [gpt]}. Unless they are named, human means user, gpt and model mean assistant, observation means "
        "tool, and function_call is an assistant turn with the tool calls in its content.",
    )
    roles_to_train: list[NotBlank] | None = Field(
        None,
        description="SFT and strided mode: roles whose turns are trained on. If unset, the key roles_to_train of the "
        "config. Can be empty with message_field_training, if only marked turns are trained on.",
    )
    train_on_eos: EOS | None = Field(
        None,
        description="SFT and strided mode: ends of turns that are trained on, which is all that the chat template "
        "writes after the content. turn (default): of the turns that are trained on; all: of all turns (SFT only); "
        "last: of the last turn that is trained on; none.",
    )
    train_on_eot: EOS | None = Field(None, description="The same as train_on_eos.")
    message_field_training: NotBlank | None = Field(
        None,
        description="SFT and strided mode: key of messages with true or false (or 1 or 0), whether the turn is trained "
        "on. For turns without it, their role decides.",
    )
    field_thinking: NotBlank = Field(THINKING, description="Key of messages with the thinking before the content.")
    template_thinking_key: NotBlank = Field(
        THINKING,
        description="Key with which thinking is passed to the template; content writes it into the content, as a "
        "<think> block.",
    )
    split_thinking: bool = Field(
        False,
        description="Pass thinking in tags at the start of an assistant's content to the chat template separately, as "
        "template_thinking_key.",
    )
    drop_system_message: bool = Field(False, description="Leave out the system messages of chats.")
    field_system: NotBlank | None = Field(
        None,
        description="Column with the system message of a chat. If unset: for chats without one, the column system if "
        "rows have it.",
    )
    system_prompt: NotBlank | None = Field(None, description="System message of chats without one.")
    field_tools: NotBlank = Field(
        "tools",
        description="Column with the descriptions of tools for the chat template, a list or JSON text; rows may lack "
        "it. For chats.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="Arguments of the chat template for the rows of this dataset, such as {enable_thinking: false}.",
    )
    user_defined: PromptFormat | None = Field(
        None, description="Columns and format of prompts written out as text; `type` can be this mapping itself."
    )

    _empty_names_are_unset = model_validator(mode="before")(without_empty_names)
