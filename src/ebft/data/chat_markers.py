"""Markers of chat formats, such as <|im_start|>, that a tokenizer splits since its vocabulary lacks them."""

import re
import warnings

from transformers import PreTrainedTokenizerBase

from ebft.data.rendering import TooSlow, limited
from ebft.errors import ModelError

# <|im_start|>, <｜User｜>, <start_of_turn>, <s>, [INST]. Words in angle brackets, such as <think>, are plain text.
_MARKER = re.compile(r"<[|｜][^<>\s]+?[|｜]>|</?[A-Za-z]+(?:_[A-Za-z]+)+>|</?s>|\[/?(?:INST|[A-Z]+(?:_[A-Z]+)+)\]")
# Llama 2 and Mistral v1 write [INST] as text, with a space before the closing one; others have tokens for it.
_AS_TEXT = " [/INST]"
_SECONDS = 20  # of computing that rendering a small chat may take
_USER, _REPLY = ({"role": role, "content": f"A {role}"} for role in ("user", "assistant"))
_SYSTEM = {"role": "system", "content": "A system"}
_ASKED = ([_USER], [_USER, _REPLY, _USER], [_SYSTEM, _USER], [_SYSTEM, _USER, _REPLY, _USER])
_CHATS = (*_ASKED, *([*chat, _REPLY] for chat in _ASKED))  # some templates end a finished chat with another token


def rendered_examples(tokenizer: PreTrainedTokenizerBase, template: str | dict) -> list[str | None]:
    """Small chats, with the start of a reply if they end with a question; None for those that the template refuses.

    Raises ModelError for a template that does not end.
    """
    return [_rendered(tokenizer, template, chat) for chat in _CHATS]


def split_markers(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The markers in `text` that the tokenizer splits into several tokens, or does not know."""
    found = dict.fromkeys(_MARKER.findall(text))
    return [
        marker for marker in found if not (marker.startswith("[") and _AS_TEXT in text) and _is_split(tokenizer, marker)
    ]


def split_by_template(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The markers that the tokenizer's chat template writes, and that the tokenizer splits."""
    if tokenizer.chat_template is None:
        return []
    texts = rendered_examples(tokenizer, tokenizer.chat_template)
    return split_markers(tokenizer, "\n".join(filter(None, texts)))


def warn_of_split_markers(what: str, markers: list[str]) -> None:
    """One warning that `what` writes `markers`, with the keys that add them to the vocabulary."""
    if not markers:
        return
    quoted = ", ".join(f'"{marker}"' for marker in markers)
    warnings.warn(
        f"{what} writes {', '.join(markers)}, which the vocabulary lacks, so each is split into several tokens. Add "
        f"them: tokens: [{quoted}], or special_tokens.additional_special_tokens; with an adapter also "
        "lora_modules_to_save: [embed_tokens, lm_head], so that they are trained.",
        stacklevel=3,
    )


def _rendered(tokenizer: PreTrainedTokenizerBase, template: str | dict, chat: list[dict[str, str]]) -> str | None:
    asked = chat[-1] is not _REPLY
    try:
        with limited(str(template), _SECONDS):
            return tokenizer.apply_chat_template(
                chat, chat_template=template, tokenize=False, add_generation_prompt=asked
            )
    except TooSlow as error:
        raise ModelError(f"chat_template: a small chat cannot be rendered: {error}, or set another one.") from error
    except Exception:  # a template is a program, which may fail in any way
        return None


def _is_split(tokenizer: PreTrainedTokenizerBase, marker: str) -> bool:
    ids = tokenizer(marker, add_special_tokens=False, verbose=False)["input_ids"]
    unknown = tokenizer.unk_token_id
    own = tokenizer.convert_tokens_to_ids(marker)  # may follow a space that the tokenizer adds
    is_token = own in ids and (own != unknown or marker == tokenizer.unk_token)
    return not is_token and (len(ids) != 1 or ids[0] == unknown)
