"""Every method trains on the tokens of one rendering of the whole conversation, and labels the assistant's part."""

import warnings
from fnmatch import fnmatch

import pytest

from ebft.data.load import load_token_rows
from ebft.data.row_counts import LEFT_OUT, UNTHINKING, Dropped
from ebft.errors import DataError
from tests.data.conftest import assistant, config_of, user
from tests.data.rendering.expected import CASES, KINDS, Chat, expectation, expected, tokenizer_of
from tests.data.rendering.rows import SETTINGS, rows_of, worse

# Methods that read a prompt and a completion instead of messages.
OF_PAIRS = ("plain", "unicode", "whitespace", "thinking", "no_thinking")
# Differences that are meant: (methods, templates, kind), the outcome that is right as well, and the reason.
_COMPARED = "strided last_turn reasoning multiturn"
MEANT = (
    ("*", "*gemma*", "text_and_call", "error", "Gemma 4 writes the text of a calling turn after the call's result"),
    ("*", "trl/gptoss", "two_calls", "error", "the template renders only the first call of a turn"),
    ("*", "trl/diffusion_gemma", "*", "labels", "<|tool_response> ends a turn with calls, and <|turn>model is written"),
    ("*", "*/llava*", "*", "labels", "the space that the template writes after a reply ends the turn"),
    ("reasoning", "*", "earlier_thinking", "text", "thinking of earlier turns is left out, and counted in the report"),
    ("*", "*", "empty", "dropped", "counted: a chat with a turn that says nothing"),
    (_COMPARED, "*", "last_calls", "dropped", "counted: a call of a tool is not a text that is compared or scored"),
)


def meant(method, name, kind, outcome):
    found = [case for case in MEANT if case[3] == outcome and (case[0] == "*" or method in case[0].split())]
    return any(fnmatch(name, names) and fnmatch(kind, kinds) for _, names, kinds, *_ in found)


def outcome(method, name, chat):
    """The texts of a row, or the error; and the warnings."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            found = rows_of(method, name, chat)
        except (DataError, Dropped) as error:
            found = error
    return found, " ".join(str(warning.message) for warning in caught)


def faults(method, name, kind):
    """What is wrong with the row of a kind of conversation, one line each."""
    chat, right = KINDS[kind], expectation(name, kind)
    found, warned = outcome(method, name, chat)
    if isinstance(found, DataError):
        if right.lost or meant(method, name, kind, "error"):
            return []
        return [f"refused, although the template renders it: {str(found)[-170:]}"]
    if isinstance(found, Dropped):
        return [] if meant(method, name, kind, "dropped") else [f"dropped: {found}"]
    if not right.renderings and all(part in warned for part in right.lost):
        return []  # a warning names each part
    if not right.renderings:
        return [f"trains without {', '.join(right.lost)}"]
    any_labels = meant(method, name, kind, "labels")
    wrong = compared(name, chat, found[0], right, any_labels)
    if len(found) > 1 and not wrong:  # the rejected reply
        other = Chat([*chat.messages[:-1], worse(chat.messages[-1])], chat.tools, chat.kwargs)
        wrong = [f"rejected: {line}" for line in compared(name, other, found[1], expected(name, other), any_labels)]
    if right.leaves_out_tools and "tool" not in warned and not wrong:
        wrong = ["leaves out the descriptions of tools without a warning"]
    return [] if meant(method, name, kind, "text") else wrong


def compared(name, chat, found, right, any_labels):
    tokenizer = tokenizer_of(name)
    show = lambda ids: repr(tokenizer.decode(ids))[-150:]
    matching = [rendering for rendering in right.renderings if is_text(name, found, rendering)]
    if not matching:
        wanted = right.renderings[0].ids
        at = next((n for n, (a, b) in enumerate(zip(found.ids, wanted)) if a != b), min(len(found.ids), len(wanted)))
        same = tokenizer.decode(found.ids) == tokenizer.decode(wanted)
        what = "same text, other tokens" if same else "another text"
        return [f"{what}: ...{show(found.ids[max(0, at - 3) : at + 30])} for {show(wanted[max(0, at - 3) : at + 30])}"]
    if not found.spans or any_labels:  # texts of reward models are scored as a whole
        return []
    wanted = [spans for rendering in matching for spans in wanted_spans(name, chat, found, rendering)]
    if found.spans in wanted:
        return []
    texts = lambda spans: [tokenizer.decode(found.ids[start:stop]) for start, stop in spans]
    return [f"other labels: {texts(found.spans)!r} for {texts(wanted[0])!r}"[:300]]


def is_text(name, found, rendering):
    """Whether ids are those of a rendering; references lack the end of the last reply."""
    if not found.is_reference:
        return found.ids == (rendering.ids if found.spans else rendering.unended)
    size = len(found.ids)
    return found.ids == rendering.ids[:size] and set(ends(name, rendering.ids[size:])) <= {"end", "space"}


def ends(name, ids):
    """For each token whether it can end a turn, is white space, or is text."""
    tokenizer = tokenizer_of(name)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = map(tokenizer.decode, ids)
    return ["end" if token in special else "text" if text.strip() else "space" for token, text in zip(ids, texts)]


def ends_of_content(name, ids, span):
    """Where a reply without the end of its turn may stop: at the special tokens that directly follow its last word."""
    part = ids[slice(*span)]
    kinds, texts = ends(name, part), [tokenizer_of(name).decode([token]) for token in part]
    words = [kind == "text" and any(map(str.isalnum, text)) for kind, text in zip(kinds, texts)]
    last = len(words) - words[::-1].index(True) if True in words else 0
    if "end" not in kinds[last:]:
        return [span[1]]
    first = kinds.index("end", last)
    run = next((size for size, kind in enumerate(kinds[first:]) if kind != "end"), len(kinds) - first)
    return [span[0] + first + number for number in range(run)]


def wanted_spans(name, chat, found, rendering):
    """The ranges of the replies that a method trains on, and others that are right; references have no end of turn."""
    # Turns that only call tools are trained on, but need not be where replies are sampled and compared.
    replies = [message for message in chat.messages if message["role"] == "assistant"]
    says = [bool(str(reply.get("content") or "").strip()) for reply in replies]  # nothing said is not learned
    calls = [bool(reply.get("tool_calls")) for reply in replies]
    kept = [list(map(any, zip(says, calls)))] * (not found.is_reference) + [says] * found.is_sampled
    choices = [[span for span, use in zip(rendering.replies, learned, strict=True) if use] for learned in kept]
    choices = [spans if found.all_turns else spans[-1:] for spans in choices]
    if not found.is_reference:
        return choices
    stops = [[ends_of_content(name, rendering.ids, span) for span in spans] for spans in choices]
    return [
        [(start, stop[min(which, len(stop) - 1)]) for (start, _), stop in zip(spans, at, strict=True)]
        for spans, at in zip(choices, stops, strict=True)
        for which in range(max(map(len, at), default=1))
    ]


@pytest.mark.first(3)
@pytest.mark.parametrize("name", dict.fromkeys(("trl/gptoss", "trl/llama3_1", "trl/qwen3", *CASES)))
def test_rows(name):
    kinds = [(method, kind) for method in SETTINGS for kind in (OF_PAIRS if method == "opencode" else KINDS)]
    found = [f"{method}, {kind}: {line}" for method, kind in kinds for line in faults(method, name, kind)]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("template", ["trl/llama3_1", "trl/qwen2_5", "trl/qwen3", "trl/glm4moe", "trl/gptoss"])
def test_results_of_tools_are_json_or_text(template):
    """Objects are written as JSON, by the template or before it, and never as Python's text."""
    *asked, result, reply = KINDS["calls"].messages
    for content in ({"sky": "grey"}, [{"type": "text", "text": "Cloudy."}], None, []):
        chat = Chat([*asked, {**result, "content": content}, reply], KINDS["calls"].tools)
        text = tokenizer_of(template).decode(rows_of("sft", template, chat)[0].ids)
        assert ('"sky": "grey"' if isinstance(content, dict) else "Cloudy." if content else "") in text
        assert not any(part in text for part in ("'sky'", "'type'", "[]", "None"))


def test_thinking_of_earlier_turns_is_counted(write_jsonl, capsys):
    talk = [user("w7"), assistant("<think>\nt9\n</think>\n\nw8"), user("u2"), assistant("<think>t3</think>e")]
    path = write_jsonl([{"messages": talk}] * 3)
    types = {"chat_template": (UNTHINKING, 3), "ebft_strided_chat.transform_all_turns": (LEFT_OUT, 6)}
    for type, (what, count) in types.items():
        rows = load_token_rows(config_of(type, path=path, sequence_len=4096), tokenizer_of("trl/qwen3"))
        assert rows.reports[0].counts == {what: 3} and len(rows.train) == count
    assert f"produced 3 rows (3 {UNTHINKING})" in capsys.readouterr().err
