"""Named chat templates, and loading of custom ones."""

import re
import warnings
from pathlib import Path

from jinja2 import Environment, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from ebft.errors import ModelError

# Each template defines how a message is rendered, and how the assistant's next message begins.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}"
        "{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
        "{{ message['content'] | trim + '<|eot_id|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
        "{% endif %}"
    ),
}
KEEP = "tokenizer_default"
# Names of templates in axolotl that the tokenizers of these models have themselves.
_OF_MODELS = re.compile(
    "(aya|cohere|command_a(_rag|_tool_use)?|deepseek_v[23]|exaone4?|falcon_h1|gemma(3|3n|4)?|jamba|llama3_2_vision|llama4|"
    "magistral|mistral_v(1|2v3|3_tekken|7_tekken)|phi_(3|35|4)|pixtral|qwen2_vl|qwen3(_5)?|qwen_25|smollm3)"
)
# The statement that transformers adds to Jinja.
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def apply_chat_template_choice(tokenizer: PreTrainedTokenizerBase, choice: str | None) -> None:
    """Set the tokenizer's chat template to `choice`: a name in `TEMPLATES`, a file, or Jinja text.

    None keeps the tokenizer's template, and so does `tokenizer_default`, which requires that there is one. Raises
    ModelError for any other value.
    """
    if choice is None:
        return
    if _OF_MODELS.fullmatch(choice):
        _use_own_template(tokenizer, choice)
        return
    if choice == KEEP:
        if tokenizer.chat_template is None:
            raise ModelError(
                f"chat_template: {KEEP} is set, but the tokenizer has no chat template. Use one of "
                f"{', '.join(TEMPLATES)} or a file."
            )
        return
    template = _template(choice)
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        raise ModelError(
            f"chat_template: {choice!r:.100} is not a Jinja template: {error.message} (line {error.lineno})."
        ) from error
    tokenizer.chat_template = template


def _use_own_template(tokenizer: PreTrainedTokenizerBase, choice: str) -> None:
    if tokenizer.chat_template is None:
        raise ModelError(
            f"chat_template: {choice} is the template of a chat model's tokenizer, but this tokenizer has none. Use "
            f"the tokenizer of such a model (tokenizer_config), one of {', '.join(TEMPLATES)}, or a file."
        )
    warnings.warn(f"chat_template: {choice}: the template of the tokenizer is used.", stacklevel=3)


def _template(choice: str) -> str:
    if choice in TEMPLATES:
        return TEMPLATES[choice]
    if "{{" in choice or "{%" in choice:
        return choice
    path = Path(choice).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"chat_template: {choice} cannot be read as UTF-8 text ({error}).") from error
    raise ModelError(
        f"chat_template: invalid value {choice!r}; expected a known name ({', '.join([*TEMPLATES, KEEP])}), the path "
        "of a file, or Jinja text."
    )
