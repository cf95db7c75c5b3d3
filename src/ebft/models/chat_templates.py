"""Chat templates by name (templates/*.jinja), and loading of custom ones."""

import re
import warnings
from pathlib import Path

from jinja2 import Environment, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from ebft.data.chat_markers import rendered_examples, split_by_template, warn_of_split_markers
from ebft.errors import ModelError

_FOLDER = Path(__file__).parent / "templates"
_SAME_FORMAT = {"gemma3n": "gemma3", "phi_35": "phi_3"}
NAMES = tuple(sorted([*(path.stem for path in _FOLDER.glob("*.jinja")), *_SAME_FORMAT]))
KEEP, FALLBACK = "tokenizer_default", "tokenizer_default_fallback_"
# Names of templates in axolotl that the tokenizers of these models have themselves, and that are not in templates/.
_OF_MODELS = re.compile(
    "(aya|command_a(_rag|_tool_use)?|exaone4?|falcon_h1|gemma4|jamba|llama3_2_vision|magistral|pixtral|qwen2_vl|qwen3_5|"
    "smollm3)"
)
# The statement that transformers adds to Jinja.
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def named_template(name: str) -> str:
    """Return the template in templates/ with one of `NAMES`."""
    return (_FOLDER / f"{_SAME_FORMAT.get(name, name)}.jinja").read_text(encoding="utf-8")


def apply_chat_template_choice(tokenizer: PreTrainedTokenizerBase, choice: str | None) -> None:
    """Set the tokenizer's chat template to `choice`: one of `NAMES`, a file, or Jinja text.

    None keeps the tokenizer's template, and so does `tokenizer_default`, which requires that there is one;
    `tokenizer_default_fallback_NAME` uses the template NAME if there is none. Raises ModelError for any other value.
    """
    if choice is None:
        return
    if choice.startswith(FALLBACK):
        choice = _fallback(tokenizer, choice)
    if choice in NAMES:
        _use_named(tokenizer, choice)
    elif choice == KEEP:
        if tokenizer.chat_template is None:
            raise ModelError(
                f"chat_template: {KEEP} is set, but the tokenizer has no chat template. Use one of "
                f"{', '.join(NAMES)}, {FALLBACK}NAME, or a file."
            )
    elif _OF_MODELS.fullmatch(choice):
        _use_own_template(tokenizer, choice)
    else:
        _use_custom(tokenizer, choice)


def _fallback(tokenizer: PreTrainedTokenizerBase, choice: str) -> str:
    name = choice.removeprefix(FALLBACK)
    if name not in NAMES:
        raise ModelError(f"chat_template: {FALLBACK}NAME needs one of the names {', '.join(NAMES)}, got {name!r}.")
    return name if tokenizer.chat_template is None else KEEP


def _use_named(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Set the template `name`, unless the tokenizer's own is the same for chats; it may also support tools."""
    template, own = named_template(name), tokenizer.chat_template
    if own is not None:
        if rendered_examples(tokenizer, own) == rendered_examples(tokenizer, template):
            return
        warnings.warn(
            f"chat_template: {name} replaces the template of the tokenizer, which has another format. Set "
            f"chat_template: {KEEP} to keep it.",
            stacklevel=3,
        )
    _replace(tokenizer, name, template)


def _replace(tokenizer: PreTrainedTokenizerBase, choice: str, template: str) -> None:
    """Set a template, with a warning if the vocabulary lacks its markers; the tokenizer's own may be meant to."""
    if template == tokenizer.chat_template:
        return
    tokenizer.chat_template = template
    what = choice if choice in NAMES else f"{choice!r:.60}"
    warn_of_split_markers(f"chat_template: {what}", split_by_template(tokenizer))


def _use_own_template(tokenizer: PreTrainedTokenizerBase, choice: str) -> None:
    if tokenizer.chat_template is None:
        raise ModelError(
            f"chat_template: {choice} is the template of a chat model's tokenizer, but this tokenizer has none. Use "
            f"the tokenizer of such a model (tokenizer_config), one of {', '.join(NAMES)}, or a file."
        )
    warnings.warn(f"chat_template: {choice}: the template of the tokenizer is used.", stacklevel=3)


def _use_custom(tokenizer: PreTrainedTokenizerBase, choice: str) -> None:
    template = _custom(choice)
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        raise ModelError(
            f"chat_template: {choice!r:.100} is not a Jinja template: {error.message} (line {error.lineno})."
        ) from error
    _replace(tokenizer, choice, template)


def _custom(choice: str) -> str:
    if "{{" in choice or "{%" in choice:
        return choice
    path = Path(choice).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"chat_template: {choice} cannot be read as UTF-8 text ({error}).") from error
    raise ModelError(
        f"chat_template: invalid value {choice!r}; expected a known name ({', '.join([*NAMES, KEEP])}, or "
        f"{FALLBACK}NAME), the path of a file, or Jinja text (chat_template_jinja)."
    )
