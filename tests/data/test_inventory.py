"""Rows of every shape through every method: what must be in the tokens, what is trained on, and what is dropped."""

import re
import warnings

import pytest

from ebft.data.conversation import Renderer
from ebft.errors import DataError
from tests.data.conftest import assistant, config_of, user
from tests.structured.conftest import make_chat_tokenizer

TOKENIZER = make_chat_tokenizer()
S, Q, A, B = {"role": "system", "content": "S"}, user("Q"), assistant("A"), assistant("B")
MORE, SHAREGPT = [user("Q0"), assistant("A0")], [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
REPLIES = {"chosen": "A", "rejected": "B"}
METHODS = {
    "sft": {},
    "strided": {"rl": "ebft", "ebft": {"mode": "strided", "context_length": 2, "generate_max_len": 2}},
    "structured": {"rl": "ebft"},
    "grpo": {"rl": "grpo", "trl": {"reward_funcs": ["own.func"]}},
    **{rl: {"rl": rl} for rl in ("dpo", "ipo", "orpo", "simpo")},
    "kto": {"rl": "kto", "micro_batch_size": 2},
    **{kind: {kind: True} for kind in ("reward_model", "process_reward_model")},
}
PAIRED = ("dpo", "ipo", "orpo", "simpo")  # which load rows with the same functions
CHATS = {  # the type that reads chats
    "sft": "chat_template", "strided": "ebft_strided_chat", "structured": "ebft_chat_multiturn",
    "grpo": "ebft_chat_multiturn.transform_last_turn", **dict.fromkeys(PAIRED, "chat_template.default"),
    "kto": "passthrough", "reward_model": "bradley_terry.chat_template",
}  # fmt: skip


@pytest.fixture
def load(write_jsonl):
    """`load(method, type, row, **entry)`: the first text of a row as `words`; of a row that is dropped, the report."""

    def loaded(method, type, row, tokenizer=TOKENIZER, keys=None, **entry):
        keys = {"output_dir": "out", "sequence_len": 400, **METHODS[method], **(keys or {})}
        with warnings.catch_warnings(action="ignore"):
            config = config_of(type, entry, write_jsonl([row]), **keys)
            try:
                row = config.method.load_rows(config, tokenizer).train[0]
            except DataError as error:
                if "No usable rows are left" not in str(error):
                    raise
                return str(error)
        return words(row, tokenizer, config.chat_template_kwargs)

    return loaded


def of_chat(method, messages, other="B"):
    """The row of a chat that ends with a reply."""
    if method in PAIRED:
        return {"messages": messages[:-1], "chosen": messages[-1], "rejected": assistant(other)}
    if method == "kto":
        return {"prompt": messages[:-1], "completion": messages[-1:], "label": True}
    if method == "reward_model":
        return {"chosen": messages, "rejected": [*messages[:-1], assistant(other)]}
    return {"messages": messages}


def words(row, tokenizer, kwargs):
    """The turns of a text as `role:content`, or its words; what is trained on or compared ends with *."""
    if "prompt" in row:
        talk = Renderer(tokenizer, kwargs).of_row(row, compares=row.get("ground_truth") is not None)
        parts = [(ids, on) for turn in talk.turns for ids, on in ((turn.lead_ids, False), (turn.reference_ids, True))]
    elif "labels" in row:
        parts = [([token], label != -100) for token, label in zip(row["input_ids"], row["labels"])]
    else:
        names = ("prompt_ids", "chosen_ids", "completion_ids")
        parts = [(row[name], name != "prompt_ids" and "prompt_ids" in row) for name in names if name in row]
    text = "".join(TOKENIZER.decode(ids) for ids, _ in parts)
    flags = [on for ids, on in parts for on in [on] * len(TOKENIZER.decode(ids))]
    turn = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", re.DOTALL)
    found = [(f"{m[1]}:{m[2]}", flags[m.start(2) : m.end(2)]) for m in turn.finditer(text)]
    plain = text.replace("<|endoftext|>", " " * 13)
    found = found or [(m[0], flags[m.start() : m.end()]) for m in re.finditer(r"\S+", plain)]
    return " ".join(f"{said}{'*' * all(on)}" if len(set(on)) < 2 else f"{said}?" for said, on in found)


FAST = [pytest.param(name, marks=pytest.mark.slow) if name in PAIRED[1:] else name for name in CHATS]
TRAINS_ALL = ("sft", "strided", "structured")


def right(method, *turns):
    """The expected words; * are the replies, of which methods compare all or the last one."""
    said = [turn.rstrip("*") for turn in turns]
    marked = [turn.endswith("*") and method != "reward_model" for turn in turns]
    if method not in TRAINS_ALL:
        marked = [on and number == len(turns) - 1 for number, on in enumerate(marked)]
    if method == "grpo":
        marked[-1] = True
    return " ".join(f"{turn}{'*' * on}" for turn, on in zip(said, marked))


@pytest.mark.parametrize("method", FAST)
@pytest.mark.parametrize(("chat", "others", "entry", "turns"), [
    ([Q, A], {}, {}, ["user:Q", "assistant:A*"]),
    ([Q, A], {"system": "S"}, {}, ["system:S", "user:Q", "assistant:A*"]),
    ([S, Q, A], {"system": "other"}, {}, ["system:S", "user:Q", "assistant:A*"]),
    ([*MORE, Q, A], {"system": "S"}, {}, ["system:S", "user:Q0", "assistant:A0*", "user:Q", "assistant:A*"]),
    ([assistant("Hi"), Q, A], {}, {}, ["assistant:Hi", "user:Q", "assistant:A*"]),
    ([{"role": "developer", "content": "S"}, Q, A], {}, {}, ["developer:S", "user:Q", "assistant:A*"]),
])  # fmt: skip
def test_chats(load, method, chat, others, entry, turns):
    assert load(method, CHATS[method], {**of_chat(method, chat), **others}, **entry) == right(method, *turns)


@pytest.mark.parametrize("method", FAST)
@pytest.mark.parametrize("key", ["weight", "loss_mask", "loss", "loss_weight", "train", "masked"])
def test_marks_of_context(load, method, key):
    """A turn that is marked as context is read and not trained on, and the last one of a row is no reference."""
    mark, other = {"masked": (True, False), "loss_weight": (0.0, 1.0), "weight": (0, 1)}.get(key, (False, True))
    chat = [user("Q0"), assistant("A0", **{key: mark}), Q, assistant("A", **{key: other})]
    found = load(method, CHATS[method], of_chat(method, chat))
    assert found == right(method, "user:Q0", "assistant:A0", "user:Q", "assistant:A*")


SAME, NOTHING, NO_QUESTION = "two turns of the same role in a row", "an empty turn", "without a prompt"


@pytest.mark.parametrize("method", FAST)
@pytest.mark.parametrize(("chat", "reason"), [
    ([user("Q0"), Q, A], SAME),
    ([user("Q0"), assistant(" "), Q, A], NOTHING),
    ([*MORE, user(""), A], NOTHING),
    ([assistant("Hi"), A], NO_QUESTION),
    ([S, A], NO_QUESTION),
    ([user(" "), A], NO_QUESTION),
])  # fmt: skip
def test_chats_that_are_dropped_and_counted(load, method, chat, reason):
    report = load(method, CHATS[method], of_chat(method, chat))
    assert re.search(r"dropped 1 (with|without a prompt).*", report) and reason in report


QA, MULTI = ["user:Q", "assistant:A"], ["user:Q0", "assistant:A0", "user:Q", "assistant:A"]
SQA, WITHOUT_OR_WITH_SYSTEM = ["system:S", *QA], (({}, QA), ({"system": "S"}, ["system:S", *QA]))


def listed(*messages):
    return {"chosen": [*messages, A], "rejected": [*messages, B]}


@pytest.mark.parametrize(("method", "type", "row", "turns"), [
    # formats of question and answer that a chat template renders
    *((method, type, {**row, **more}, turns) for more, turns in WITHOUT_OR_WITH_SYSTEM for method, type, row in (
        *((method, "alpaca_chat", {"instruction": "Q", "output": "A"}) for method in TRAINS_ALL),
        ("sft", "ebft_opencode.transform_strided", {"input": "Q", "output": "A"}),
        ("structured", "ebft_opencode.transform", {"input": "Q", "output": "A"}),
        # prompt and completion as messages, and a text as completion
        *((method, CHATS[method], {"prompt": [Q], "completion": answer})
          for method in TRAINS_ALL for answer in ("A", [A])),
        *((method, CHATS[method], {"conversations": SHAREGPT}) for method in TRAINS_ALL),
        ("dpo", "chat_template.argilla_chat", listed(Q)),
        ("dpo", "passthrough", {"prompt": [Q], **listed()}),
        ("dpo", "chatml.ultra", {"prompt": "Q", **listed(Q)}),  # texts with the marks of a style
        # reward models: the question in any column, the replies as texts or messages
        *(("reward_model", CHATS["reward_model"], {name: asked, **replies})
          for name, asked in (("input", "Q"), ("input", [Q]), ("messages", [Q]), ("prompt", "Q"), ("prompt", [Q]))
          for replies in (REPLIES, listed(), listed(Q), {"chosen": A, "rejected": B})))),
    ("dpo", "chat_template.argilla", listed(*MORE, Q), MULTI),
    ("dpo", "chatml.ultra", {"prompt": "Q0", **listed(*MORE, Q)}, MULTI),
    ("dpo", "chatml.argilla_chat", listed(*MORE, Q), MULTI),
    ("dpo", "chatml.argilla_chat", listed(S, Q), SQA),
    ("kto", "chatml.argilla_chat", {"completion": [Q, A], "label": True, "system": "S"}, SQA),
    ("reward_model", CHATS["reward_model"], {"messages": [*MORE, Q], **listed()}, MULTI),
    ("reward_model", CHATS["reward_model"], {"input": "Q0", **listed(*MORE, Q)}, MULTI),
    ("reward_model", CHATS["reward_model"], {"input": "Q", **listed(S, Q)}, SQA),
    ("reward_model", CHATS["reward_model"], {"messages": [Q, A], **REPLIES}, QA),
])  # fmt: skip
def test_shapes(load, method, type, row, turns):
    assert load(method, type, row) == right(method, *turns[:-1], f"{turns[-1]}*")


IMAGES = {"image": "x.png", "images": ["x.png"], "audio": {"path": "x"}, "videos": ["x.mp4"]}


@pytest.mark.parametrize("method", FAST)
@pytest.mark.parametrize("column", IMAGES)
def test_images_are_not_lost(load, method, column):
    with pytest.raises(DataError, match=rf"row 0: column '{column}' .* models are trained on text only"):
        load(method, CHATS[method], {**of_chat(method, [Q, A]), column: IMAGES[column]})
    found = load(method, CHATS[method], {**of_chat(method, [Q, A]), column: None, "audios": [], "id": 1})
    assert found == right(method, "user:Q", "assistant:A*")


@pytest.mark.parametrize(("method", "type", "row"), [
    *((each, type, {"instruction": "Q", "output": "A"}) for each in TRAINS_ALL for type in ("alpaca", "alpaca:phi")),
    *((method, "ebft_strided_structured", {"input": "Q", "output": "A"}) for method in TRAINS_ALL),
    *(("dpo", type, {"prompt": "Q", **REPLIES}) for type in ("passthrough", {"field_prompt": "prompt"})),
    ("kto", "passthrough", {"prompt": "Q", "completion": "A", "label": True}),
    ("sft", "input_output", {"segments": [{"text": "Q", "label": False}, {"text": "A", "label": True}]}),
    ("process_reward_model", "stepwise_supervised", {"prompt": "Q", "completions": ["A"], "labels": [True]}),
])  # fmt: skip
def test_a_system_message_without_a_place(load, method, type, row):
    texts = lambda system, **entry: load(method, type, {**row, "system": system}, **entry)
    with pytest.raises(DataError, match=r"row 0: column 'system' .* has no place for a system message"):
        texts("S")
    assert "Q" in texts("") and texts("S", drop_system_message=True) == texts(None)


@pytest.mark.parametrize("method", [*CHATS, "process_reward_model"])
def test_columns_that_are_not_read_are_named_once(load, capsys, method):
    row = of_chat(method, [Q, A]) if method in CHATS else {"prompt": "Q", "completions": ["A"], "labels": [True]}
    load(method, CHATS.get(method, "stepwise_supervised"), {**row, "id": 1, "score": 0.5})
    lines = [line for line in capsys.readouterr().err.splitlines() if "not read" in line]
    assert len(lines) == 1 and re.search(r"columns that are not read: .*\bid, score", lines[0])


@pytest.mark.parametrize("method", FAST)
def test_arguments_of_the_template(load, method):
    """The arguments of a row come before the ones of the dataset, and these before the ones of the run."""
    tokenizer = make_chat_tokenizer()
    tokenizer.chat_template = "<|im_start|>mode\n<{{ mode }}<|im_end|>" + tokenizer.chat_template

    def shown(row=None, entry=None, keys=None):
        found = of_chat(method, [Q, A]) | ({} if row is None else {"chat_template_kwargs": row})
        given = {"chat_template_kwargs": entry} if entry else {}
        return load(method, CHATS[method], found, tokenizer, keys, **given).split()[0].removeprefix("mode:<")

    config = {"chat_template_kwargs": {"mode": "config"}}
    assert [shown(), shown(keys=config), shown(entry={"mode": "entry"}, keys=config)] == ["", "config", "entry"]
    for given, mode in (({"mode": "row"}, "row"), ('{"mode": "row"}', "row"), ({"mode": None}, "entry")):
        assert shown(given, {"mode": "entry"}, config) == mode
    if method == "structured":
        assert shown(keys={"trl": config}) == "config"


@pytest.mark.parametrize("method", FAST)
def test_the_role_developer(load, method):
    """It is rendered as a system message by templates that do not know it."""
    tokenizer = make_chat_tokenizer()
    known = "in messages if message.role != 'developer' %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("in messages %}", known)
    row = of_chat(method, [{"role": "developer", "content": "S"}, Q, A])
    assert load(method, CHATS[method], row, tokenizer) == right(method, "system:S", "user:Q", "assistant:A*")


@pytest.mark.parametrize("method", FAST)
@pytest.mark.parametrize("content", [[{"type": "text", "text": "See", "image": "x"}], [{"type": "text"}], 5])
def test_contents_that_are_not_text(load, method, content):
    """Templates print a number or a list as Python does, and omit parts that they do not know."""
    for messages in ([{**Q, "content": content}, A], [Q, {**A, "content": content}]):
        with pytest.raises(DataError, match=r"row 0: .*content of message \d \((user|assistant)\)"):
            load(method, CHATS[method], of_chat(method, messages))
