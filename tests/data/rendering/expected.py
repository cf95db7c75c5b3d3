"""What a chat is in tokens: templates, tokenizers, kinds of conversations, the expected ids and labels."""
# Nothing here uses the package: a conversation is rendered at once with `apply_chat_template`, and the assistant's part
# is what TRL's training template marks or, without one, what rendering the first messages says.

import json
import re
import sysconfig
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.data.conftest import assistant as _reply
from tests.data.conftest import user as _user

TRL = Path(sysconfig.get_paths()["purelib"]) / "trl" / "chat_templates"
OWN = Path(__file__).parents[3] / "src" / "ebft" / "models" / "templates"
# The pre-tokeniser of GPT-4 and Qwen: line breaks merge with each other and with spaces before them.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKER = re.compile(r"<[|｜][^<>\s'\"{}]+?>|<[^<>\s'\"{}|]+?[|｜]>|</?[a-z]+(?:_[a-z]+)*>|\[/?[A-Z_]{3,}\]|\[gMASK\]")
# Added tokens of these models that are no special tokens.
_PLAIN = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
_OTHER_TAGS = re.compile(r"</?[a-z]+>")  # XML that these vocabularies have no tokens for, such as <parameters>
# BOS, EOS and what a template writes after a reply (- is nothing), and the beginnings of the names of templates.
_TOKENS = """
<s> </s> </s> alpaca llava metharme mistral
<s> <|im_end|> <|im_end|> nemotron
<s> <|endoftext|> <|end|> phi
- <|im_end|> <|im_end|> chatml qwen
- <|endoftext|> - glm4moe
<BOS_TOKEN> <|END_OF_TURN_TOKEN|> <|END_RESPONSE|> cohere2
<BOS_TOKEN> <|END_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> cohere
<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜end▁of▁sentence｜> deepseek
<bos> <eos> <turn|> diffusion_gemma gemma4
<bos> <eos> <end_of_turn> gemma
<|startoftext|> <|return|> <|return|> gptoss
<|startoftext|> <|im_end|> <|im_end|> lfm2
<|begin_of_text|> <|end_of_text|> <end_of_utterance> idefics3
<|begin_of_text|> <|eot_id|> <|eot_id|> llama3
<|begin_of_text|> <|eot|> <|eot|> llama4 muse_glimmer
<|endoftext|> <|im_end|> <|im_end|> phi_4
<|im_start|> <end_of_utterance> <end_of_utterance> smolvlm
"""
_ADDS_BOS = ("alpaca", "deepseek", "gemma", "llama", "llava", "mistral")  # their tokenizers add BOS to each text

TEMPLATES = {
    f"{owner}/{path.stem}": path
    for owner, folder in (("trl", TRL), ("ebft", OWN))
    for path in sorted(folder.glob("*.jinja"))
    if not path.stem.endswith("_training")
}
# Templates that are also tested with a tokenizer that puts a space before the first word of a text.
SPACED = ("ebft/mistral_v1", "ebft/mistral_v2v3", "ebft/chatml", "ebft/alpaca", "trl/phi3")
CASES = [*TEMPLATES, *(f"{name}+space" for name in SPACED)]


def _family(name: str) -> list[str]:
    """BOS, EOS and the text of the token after a reply; empty where there is none."""
    stem = name.removesuffix("+space").partition("/")[2]
    lines = [line.split() for line in _TOKENS.split("\n") if line]
    found = {start: tokens for *tokens, start in ([*line[:3], start] for line in lines for start in line[3:])}
    longest = max((start for start in found if stem.startswith(start)), key=len)
    return ["" if token == "-" else token for token in found[longest]]


@cache
def _bpe(spaced: bool) -> str:
    """The JSON of a BPE of 3000 tokens trained on modules of the standard library."""
    if spaced:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]+"), "isolated")
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(parts)
        first = ["<unk>", *(f"<0x{number:02X}>" for number in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=3000, special_tokens=first, show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        parts = [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "calendar", "textwrap", "pydoc")
    # As whole texts: files are read line by line, so that two line breaks would never merge.
    tokenizer.train_from_iterator([(stdlib / f"{name}.py").read_text(encoding="utf-8") for name in names], trainer)
    saved = json.loads(tokenizer.to_str())
    if spaced:  # byte tokens are not special
        saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] == "<unk>"]
    return json.dumps(saved)


@cache
def tokenizer_of(name: str):
    """A tokenizer with the chat template `name`, whose vocabulary has the markers that the template writes."""
    path, (bos, eos, end) = TEMPLATES[name.removesuffix("+space")], _family(name)
    template = path.read_text(encoding="utf-8")
    own = [token for token in (bos, eos, end) if token]
    found = dict.fromkeys(own + _MARKER.findall(template))
    markers = [mark for mark in found if mark in own or _PLAIN.fullmatch(mark) or not _OTHER_TAGS.fullmatch(mark)]
    backend = Tokenizer.from_str(_bpe(name.endswith("+space")))
    backend.add_tokens([AddedToken(marker, normalized=False) for marker in markers if _PLAIN.fullmatch(marker)])
    special = [marker for marker in markers if not _PLAIN.fullmatch(marker)]
    backend.add_special_tokens([AddedToken(marker, normalized=False) for marker in special])
    if path.stem.startswith(_ADDS_BOS):
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, backend.token_to_id(bos))])
    tokens = {"bos_token": bos or None, "eos_token": eos, "unk_token": "<unk>" if name.endswith("+space") else None}
    options = {"chat_template": template, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options, **tokens)


# --- Kinds of conversations


class Chat(NamedTuple):
    """A conversation, which ends with the reply that is compared, as it is in the data."""

    messages: list[dict]
    tools: list[dict] | None = None
    kwargs: dict | None = None


def _calls(*arguments, content=""):
    functions = [{"name": "get_weather", "arguments": given} for given in arguments]
    calls = [{"type": "function", "id": "call00001", "function": function} for function in functions]
    return _reply(content, tool_calls=calls)


_RESULT = {"role": "tool", "content": "Cloudy, 9 degrees.", "tool_call_id": "call00001", "name": "get_weather"}
_SUNNY = {**_RESULT, "content": "Sunny, 20 degrees."}
_ARGUMENTS = {"city": "Lisbon", "days": 3, "region": None}
_PROPERTIES = {
    "city": {"type": "string", "description": "Name of the town."},
    "region": {"type": "string", "description": "Its district.", "default": None},
}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["city"]}
_FORECAST = {"name": "get_weather", "description": "The forecast of a town.", "parameters": _PARAMETERS}
_TOOL = {"type": "function", "function": _FORECAST}
_ASKED, _COOL = _user("Is it warm there?"), _reply("No, rather cool.")
_TURNS = [_user("What is four plus five?"), _reply("That is nine."), _user("And times two?"), _reply("Eighteen then.")]
_COLOUR = [_user("Name a colour."), _reply("Turquoise.")]
_THOUGHT, _ANSWER = "Let me count on fingers.", "It makes seven."
_GUESSED = [_user("Count."), _reply(_ANSWER, reasoning_content="First a guess."), _user("Again.")]
_IN_PARTS = [
    [{"type": "text", "text": "Name "}, "a", {"text": " colour.", "image": None}],
    [{"type": "output_text", "text": "Turquoise."}], [{"type": "input_text", "text": "Another?"}],
    [{"type": "text", "text": "Magenta."}],
]  # fmt: skip

KINDS = {
    "plain": Chat(_COLOUR),
    "system": Chat([{"role": "system", "content": "Be brief."}, *_COLOUR]),
    "turns": Chat(_TURNS),
    "thinking": Chat([_user("Count."), _reply(f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}")]),
    "reasoning_content": Chat([_user("Count."), _reply(_ANSWER, reasoning_content=_THOUGHT)]),
    "thinking_key": Chat([_user("Count."), _reply(_ANSWER, thinking=_THOUGHT)]),
    "earlier_thinking": Chat([*_GUESSED, _reply("Still seven.", reasoning_content=_THOUGHT)]),
    "calls": Chat([_ASKED, _calls(_ARGUMENTS), _RESULT, _COOL], [_TOOL]),
    "string_calls": Chat([_ASKED, _calls(json.dumps(_ARGUMENTS)), _RESULT, _COOL], [_TOOL]),
    "text_and_call": Chat([_ASKED, _calls(_ARGUMENTS, content="Let me look."), _RESULT, _COOL], [_TOOL]),
    "last_calls": Chat([_ASKED, _calls(_ARGUMENTS)], [_TOOL]),
    "two_calls": Chat([_ASKED, _calls(_ARGUMENTS, {"city": "Porto"}), _RESULT, _SUNNY, _reply("Only there.")], [_TOOL]),
    "empty": Chat([_user("Say nothing."), _reply(""), *_TURNS[2:]]),
    "parts": Chat([make(parts) for make, parts in zip((_user, _reply) * 2, _IN_PARTS)]),
    "unicode": Chat([_user("Größe? 数を 🦜"), _reply("Ünï — 七, 🦜🏽 e\u0301.")]),
    "whitespace": Chat([_user("  Count:\n\n"), _reply("\n\n  one\n  two \n")]),
    "tags": Chat([_user("How do I mark it?"), _reply("Write <think>like this</think> there.")]),
    "no_thinking": Chat(_COLOUR, None, {"enable_thinking": False}),
}


# --- What a template renders


class Refusal(Exception):
    """The template raises an error for a conversation."""


def render(name, chat, messages=None, template=None, generation=False):
    """The text of the messages of a chat."""
    options = {"tools": chat.tools, "chat_template": template, "add_generation_prompt": generation}
    messages = chat.messages if messages is None else messages
    try:
        return tokenizer_of(name).apply_chat_template(messages, tokenize=False, **options, **(chat.kwargs or {}))
    except Exception as error:  # whatever Jinja and the template raise
        raise Refusal(str(error)) from error


def ids_of(name, text):
    return tokenizer_of(name)(text, add_special_tokens=False)["input_ids"]


def common(first, second):
    """Length of the common beginning."""
    pairs = zip(first, second)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def strings(value):
    """All texts in a value that are the user's, numbers and nulls of arguments as JSON."""
    if isinstance(value, dict):
        return [text for item in value.items() for text in (item[0], *strings(item[1]))]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else [json.dumps(value)]


def written(chat):
    """Texts that must be in the tokens: contents, thinking after the last question, names and arguments of calls."""
    found, asked = [], max(number for number, message in enumerate(chat.messages) if message["role"] == "user")
    for number, message in enumerate(chat.messages):
        content = message.get("content") or ""
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        if number > asked:
            texts += [message.get(key, "") for key in ("reasoning_content", "thinking")]
        for call in message.get("tool_calls") or []:
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            texts += [call["function"]["name"], *strings(arguments)]
        # Templates move the tags of thinking and strip lines.
        found += [line.strip() for text in texts for line in re.split(r"</?think>|\n", text)]
    return [text for text in dict.fromkeys(found) if text]


def described(chat):
    """Texts of the description of the tool, which a template that has no place for tools leaves out."""
    about = [prop["description"] for prop in _PROPERTIES.values()]
    return [_FORECAST["name"], _FORECAST["description"], *_PROPERTIES, *about] if chat.tools else []


def absent(parts, text):
    """The texts that are not in a rendering, neither as they are nor as JSON."""
    forms = lambda part: ("null", "None") if part == "null" else (part, json.dumps(part)[1:-1])
    return [part for part in parts if not any(form in text for form in forms(part))]


def missing(chat, text):
    """What a rendering of the messages lacks, or has in a mangled form."""
    found = absent(written(chat), text)
    if "{'type': 'text'" in text:
        found.append("(a content written as a Python value)")
    if re.search(r'\\"\w+\\":', text):
        found.append("(arguments written as JSON of JSON)")
    if re.search(r"<think>\s*</think>\s*<think>", text):
        found.append("(an empty thinking block before the thinking)")
    return found


def changed(chat, change):
    return chat._replace(messages=list(map(change, chat.messages)))


def variants(chat):
    """A conversation as given, then equivalent ones, for templates that read its thinking or calls from elsewhere."""
    yield chat
    for change in (
        *(partial(_thinking_as, form=form) for form in ("reasoning_content", "thinking", "content")),
        _with_objects,
        _with_strings,
        lambda message: _without_empty_content(_with_objects(message)),
        lambda message: _without_empty_content(_with_strings(message)),
        _in_parts,
        lambda message: _in_parts(_thinking_as(message, "content")),
    ):
        yield changed(chat, change)


def _thinking_as(message, form):
    content, thought = message.get("content"), message.get("reasoning_content") or message.get("thinking")
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    if not thought and content.startswith("<think>"):
        thought, _, content = content.removeprefix("<think>").partition("</think>")
        thought, content = thought.strip(), content.lstrip()
    if not thought:
        return message
    rest = {key: value for key, value in message.items() if key not in ("reasoning_content", "thinking")}
    if form == "content":
        return {**rest, "content": f"<think>\n{thought}\n</think>\n\n{content}"}
    return {**rest, "content": content, form: thought}


def _arguments_as(message, convert):
    if not message.get("tool_calls"):
        return message
    changed = lambda function: {**function, "arguments": convert(function["arguments"])}
    return {**message, "tool_calls": [{**c, "function": changed(c["function"])} for c in message["tool_calls"]]}


def _with_objects(message):
    return _arguments_as(message, lambda given: json.loads(given) if isinstance(given, str) else given)


def _with_strings(message):
    return _arguments_as(message, lambda given: given if isinstance(given, str) else json.dumps(given))


def _without_empty_content(message):
    return {**message, "content": None} if message.get("tool_calls") and not message.get("content") else message


def _joined(message):
    texts = (part if isinstance(part, str) else part["text"] for part in message["content"])
    return {**message, "content": "".join(texts)}  # of a text, its characters


def _in_parts(message):
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


class Rendering(NamedTuple):
    """A conversation that a template renders with nothing missing."""

    text: str
    ids: list[int]
    replies: list[tuple[int, int]]  # of each assistant message, after what the generation prompt has of it
    unended: list[int]  # the ids without the end that only TRL's training template writes (GLM)


class Expectation(NamedTuple):
    """What is right for a conversation."""

    renderings: list[Rendering]  # those that a row may have
    lost: list[str]  # what the template leaves out of the conversation as given: an error is then right as well
    leaves_out_tools: bool  # a warning must say that descriptions of tools are not in the tokens


@cache
def expectation(name: str, kind: str) -> Expectation:
    return expected(name, KINDS[kind])


def expected(name, chat) -> Expectation:
    """Its rendering, or that of an equivalent conversation if the template loses parts. Parts of texts are joined."""
    chat = changed(chat, _joined)
    found, first_lost, without_tools = [], None, []
    for number, variant in enumerate(variants(chat)):
        try:
            text = render(name, variant)
            lost = missing(chat, text)
            if not lost and all(text != other.text for other in found):
                found.append(rendering(name, variant, text))
                without_tools.append(bool(absent(described(chat), text)))
        except Refusal as error:
            lost = [f"(the template refuses it: {error})"]
        if number == 0:
            first_lost = lost
            # Arguments that are JSON text are equivalent to objects; else there is no reason for another conversation.
            if not lost and changed(chat, _with_objects) == chat:
                break
    return Expectation(found, first_lost, any(without_tools))


def rendering(name, chat, text) -> Rendering:
    """The rendering `text` of a chat, with the ranges of ids of the assistant's turns."""
    unended = ids_of(name, text)
    trained = _training_text(name, chat)
    if trained is not None and trained.startswith(text):
        text = trained
    ids = ids_of(name, text)
    turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    spans = _marked_spans(name, chat, text)
    if spans is None or len(spans) != len(turns):
        spans = _prefix_spans(name, chat, text, ids, turns)
    asked = [common(ids_of(name, _asked(name, chat, index)), ids) for index in turns]
    replies = [(max(first, start), last) for (first, last), start in zip(spans, asked)]
    return Rendering(text, ids, replies, unended)


def _asked(name, chat, index):
    """The messages before a turn with the generation prompt."""
    try:
        return render(name, chat, chat.messages[:index], generation=True)
    except Refusal:
        return ""


def _training_template(name):
    """TRL's training template, or a template with the marks of one; None if there is none."""
    path = TEMPLATES[name.removesuffix("+space")]
    training = TRL / f"{path.stem}_training.jinja"
    source = (training if name.startswith("trl/") and training.exists() else path).read_text(encoding="utf-8")
    return source if re.search(r"\{%-?\s*generation", source) else None


def _training_text(name, chat):
    template = _training_template(name)
    with suppress(Refusal):
        return None if template is None else render(name, chat, template=template)


def _marked_spans(name, chat, text):
    """The ranges that TRL's training template marks, None if there is none or it renders another text."""
    source = _training_template(name)
    if source is None or _training_text(name, chat) != text:
        return None
    options = {"tools": chat.tools, "chat_template": source, "return_dict": True, "return_assistant_tokens_mask": True}
    encoded = tokenizer_of(name).apply_chat_template(chat.messages, **options, **(chat.kwargs or {}))
    return ranges(encoded["assistant_masks"])


def ranges(flags):
    """(start, stop) of each run of true values."""
    edges = [number for number, (a, b) in enumerate(zip([0, *flags], [*flags, 0])) if a != b]
    return list(zip(edges[::2], edges[1::2]))


def _prefix_spans(name, chat, text, ids, turns):
    """The ranges from the end of the generation prompt to the end of the turn, by rendering the first messages."""
    spans, end = [], _family(name)[2]
    for index in turns:
        start = common(ids_of(name, _asked(name, chat, index)), ids)
        try:
            up_to = render(name, chat, chat.messages[: index + 1])
        except Refusal:
            up_to = "\0"  # in no text
        if text.startswith(up_to):
            stop = len(up_to)
        else:  # a template that writes the last reply in another way: up to the end token after the content
            begin = len(tokenizer_of(name).decode(ids[:start]))
            # Without an end token, a turn ends where the next one begins.
            next_end = re.compile(f"{re.escape(end)}\\s*" if end else r"(?=<\|(?:user|observation)\|>)")
            stop = found.end() if (found := next_end.search(text, begin)) else len(text)
        spans.append((start, len(ids_of(name, text[:stop]))))
    return spans
