"""The base model's tokenizer, with the config's special tokens and chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from transformers import PreTrainedTokenizerBase

from ebft.data.rendering import rendered_examples, split_by_template, warn_of_split_markers
from ebft.errors import ModelError, doing, shortened, warn
from ebft.models.load import find_base_model
from ebft.models.pretrained import find_model, pretrained_tokenizer

if TYPE_CHECKING:
    from ebft.config.keys.models import ModelSettings


def load_tokenizer(config: ModelSettings) -> PreTrainedTokenizerBase:
    """The tokenizer of `tokenizer_config` or `base_model`, with a padding token. `added_tokens_overrides` replaces
    texts of added tokens. `special_tokens` that are not in the vocabulary are added to it (`load_model` resizes the
    embeddings). Without a padding token, the end-of-sequence token is used, with a warning. Raises ModelError if there
    is no tokenizer."""
    key = "tokenizer_config" if config.tokenizer_config else "base_model"
    name = find_model(config.tokenizer_config, key) if config.tokenizer_config else find_base_model(config)
    with doing(f"loading the tokenizer of {key}: {shortened(name)}"):
        tokenizer = pretrained_tokenizer(
            name, revision=config.revision_of_model, trust_remote_code=config.trust_remote_code
        )
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # as transformers makes it without files
        raise ModelError(f"{key}: {name} has no tokenizer. Copy its files to the folder, or set tokenizer_config.")
    if config.added_tokens_overrides:
        tokenizer = with_overrides(tokenizer, config.added_tokens_overrides)
    special = config.special_tokens.model_dump(exclude_none=True)
    if special:
        tokenizer.add_special_tokens(special)
    if config.tokens:
        tokenizer.add_tokens(config.tokens)
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ModelError("The tokenizer has no eos_token. Set pad_token and eos_token in special_tokens.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        warn(f"The tokenizer has no padding token: {tokenizer.eos_token!r} is used. See special_tokens.pad_token.")
    apply_chat_template_choice(tokenizer, config.chat_template)
    return tokenizer


def with_overrides(tokenizer: PreTrainedTokenizerBase, texts: dict[int, str]) -> PreTrainedTokenizerBase:
    """The tokenizer with other texts for some of its added tokens, by id; the vocabulary keeps its size. Raises
    ModelError for ids and texts that do not belong together afterwards, such as a text that is a token already."""
    with doing("reading added_tokens_overrides"), TemporaryDirectory(prefix="ebft-tokenizer-") as folder:
        old = {str(tokenizer.added_tokens_decoder[token]): text for token, text in texts.items()}
        tokenizer.save_pretrained(folder)
        _rewrite(Path(folder) / "tokenizer.json", lambda content: _in_tokenizer(content, texts, old))
        _rewrite(Path(folder) / "tokenizer_config.json", lambda content: _renamed(content, old))
        found = type(tokenizer).from_pretrained(folder)
    found.name_or_path = tokenizer.name_or_path
    wrong = [token for token, text in texts.items() if found.encode(text, add_special_tokens=False) != [token]]
    if wrong or len(found) != len(tokenizer):
        raise ModelError(
            f"added_tokens_overrides: {type(tokenizer).__name__} does not keep these texts for their ids: {texts}. "
            "Give each an id of an added token and a text that is not a token already."
        )
    return found


def _in_tokenizer(content: dict[str, Any], texts: dict[int, str], old: dict[str, str]) -> dict[str, Any]:
    for token in content["added_tokens"]:
        token["content"] = texts.get(token["id"], token["content"])
    vocabulary = content["model"].get("vocab")
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {old.get(text, text): number for text, number in vocabulary.items()}
    elif vocabulary is not None:  # of pairs of a text and its score
        content["model"]["vocab"] = [[old.get(text, text), score] for text, score in vocabulary]
    return content


def _renamed(value: Any, old: dict[str, str]) -> Any:
    """The value with other texts for the tokens, wherever the config of a tokenizer names them."""
    if isinstance(value, dict):
        return {name: _renamed(part, old) for name, part in value.items()}
    if isinstance(value, list):
        return [_renamed(part, old) for part in value]
    return old.get(value, value) if isinstance(value, str) else value


def _rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8"))), ensure_ascii=False), "utf-8")


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
    """Set the tokenizer's chat template to `choice`: one of `NAMES`, a file, or Jinja text. None and
    `tokenizer_default` keep the tokenizer's template; `tokenizer_default_fallback_NAME` uses the template NAME if there
    is none. Raises ModelError for any other value."""
    if choice is None:
        return
    own = tokenizer.chat_template
    if choice.startswith(FALLBACK):
        choice = choice.removeprefix(FALLBACK) if own is None else KEEP
    if choice in NAMES:
        template = named_template(choice)
        if own is not None and rendered_examples(tokenizer, own) == rendered_examples(tokenizer, template):
            return  # the same for chats; the tokenizer's may also support tools
        if own is not None:
            warn(f"chat_template: {choice} replaces the template of the tokenizer, which has another; {KEEP} keeps it.")
        _replace(tokenizer, choice, template)
    elif choice == KEEP or _OF_MODELS.fullmatch(choice):
        if choice != KEEP and own is not None:  # without one, chats cannot be rendered
            warn(f"chat_template: {choice}: the template of the tokenizer is used.")
    else:
        with doing(f"using chat_template: {choice!r:.100}"):
            template = choice
            if "{{" not in choice and "{%" not in choice:
                path = Path(choice).expanduser()
                if not path.is_file():
                    raise ModelError(
                        f"chat_template: invalid value {choice!r}; expected a known name ({', '.join([*NAMES, KEEP])}, "
                        f"or {FALLBACK}NAME), the path of a file, or Jinja text (chat_template_jinja)."
                    )
                template = path.read_text(encoding="utf-8")
            Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
            _replace(tokenizer, choice, template)


def _replace(tokenizer: PreTrainedTokenizerBase, choice: str, template: str) -> None:
    """Set a template, with a warning if the vocabulary lacks its markers; the tokenizer's own may be meant to."""
    if template == tokenizer.chat_template:
        return
    tokenizer.chat_template = template
    what = choice if choice in NAMES else f"{choice!r:.60}"
    warn_of_split_markers(f"chat_template: {what}", split_by_template(tokenizer))
