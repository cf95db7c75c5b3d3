"""Fields of the built-in transforms, checked against the tokenizer."""

import pytest

from ebft.data.apply import tokenise
from ebft.errors import DataError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def run(make_config, tokenizer):
    from datasets import Dataset

    def run(type, rows, field=None, template=None, **keys):
        config = make_config("unused", type, entry={"field": field}, **keys)
        tokenizer.chat_template = template
        return tokenise(Dataset.from_list(rows), config.datasets[0], config, tokenizer)[:]

    yield run
    tokenizer.chat_template = None


def test_pretrain_text(run, tokenizer):
    out = run("ebft_pretrain.transform", [{"text": "def f():"}, {"text": None}])
    ids = tokenizer("def f():")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert out["input_ids"] == [ids, []] and out["labels"] == [ids, []]
    assert out["prompt_length"] == [0, 0] and out["document"] == [0, 1]


@pytest.mark.parametrize(("column", "field"), [("content", None), ("code", "code")])
def test_pretrain_columns(run, column, field):
    assert run("ebft_pretrain.transform", [{column: "x"}], field=field)["input_ids"][0]


@pytest.mark.parametrize(
    ("row", "field", "text"),
    [
        ({"question": "x = 1\n", "answer": "y = 2"}, None, "x = 1\ny = 2"),
        ({"question": "x = 1\n", "answer": None}, None, "x = 1\n"),
        ({"question": "x = 1\n"}, None, "x = 1\n"),
        ({"prompt": "x = 1\n", "answer": "y = 2"}, None, "x = 1\ny = 2"),
        ({"question": "x = 1\n", "answer": "y = 2"}, "question", "x = 1\n"),
        ({"question": "x = 1\n", "answer": "y = 2", "text": "z = 3"}, None, "z = 3"),
    ],
)
def test_pretrain_reads_question_and_answer_as_one_text(run, tokenizer, row, field, text):
    assert run("ebft_pretrain.transform", [row], field=field)["input_ids"] == [tokenizer(text)["input_ids"]]


def test_pretrain_names_the_columns_that_are_there(run):
    with pytest.raises(
        DataError, match="row 0: no column with text: expected text, content, question, but the row has body"
    ):
        run("ebft_pretrain.transform", [{"body": "x"}])
    with pytest.raises(DataError, match="expected text, content, question, but the row has prompt, completion"):
        run("ebft_pretrain.transform", [{"prompt": "x", "completion": "y"}])


def test_pretrain_refuses_other_things_than_text(run):
    with pytest.raises(DataError, match="row 0: column 'text' must contain text, got int"):
        run("ebft_pretrain.transform", [{"text": 3}])


def test_completion_ends_with_eos(run, tokenizer):
    out = run("completion", [{"text": "x = 1"}])
    assert out["input_ids"][0] == [*tokenizer("x = 1")["input_ids"], tokenizer.eos_token_id]


@pytest.mark.parametrize(
    "row",
    [
        {"input": "Say hel", "output": "lo"},
        {"prompt": "Say hel", "completion": "lo"},
        {"question": "Say hel", "answer": "lo"},
        {"prompt": "Say hel", "answer": "lo"},
        {"instruction": "Say hel", "input": "", "output": "lo"},
    ],
)
def test_structured_boundary_is_exact(run, tokenizer, row):
    out = run("ebft_strided_structured.transform", [row])
    prompt = tokenizer("Say hel")["input_ids"]
    completion = tokenizer("lo", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    assert out["input_ids"] == [prompt + completion]
    assert out["labels"] == [[-100] * len(prompt) + completion]
    assert out["prompt_length"] == [len(prompt)]


def test_structured_joins_instruction_and_input(run, tokenizer):
    out = run("ebft_strided_structured.transform", [{"instruction": "Add.", "input": "1 2", "output": "3"}])
    assert out["prompt_length"] == [len(tokenizer("Add.\n\n1 2")["input_ids"])]


@pytest.mark.filterwarnings("ignore:train_on_inputs")
def test_structured_train_on_inputs(run):
    out = run("ebft_strided_structured.transform", [{"input": "a", "output": "b"}], train_on_inputs=True)
    assert out["labels"] == out["input_ids"]


def test_structured_without_reference_has_no_labels(run):
    out = run("ebft_strided_structured.transform", [{"input": "a", "output": None}])
    assert out["prompt_length"][0] == len(out["input_ids"][0])


def test_structured_names_the_known_pairs(run):
    with pytest.raises(DataError, match="supported pairs are input/output, .* the row has text"):
        run("ebft_strided_structured.transform", [{"text": "a"}])


CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Goodbye"},
    {"role": "user", "content": "Left out"},
]


def test_chat_reference_is_the_last_assistant_turn(run, tokenizer):
    out = run("ebft_strided_chat.transform_last_turn", [{"messages": CHAT}], template=CHATML)
    ids, length = out["input_ids"][0], out["prompt_length"][0]
    assert tokenizer.decode(ids[length:]) == "Goodbye<|im_end|>\n"
    assert tokenizer.decode(ids[:length]).endswith("<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n")
    assert out["labels"][0] == [-100] * length + ids[length:]
    assert out["turn_spans"][0] == [[length, len(ids)]]


@pytest.mark.parametrize("type", ["chat_template", "ebft_strided_chat", "ebft_chat_multiturn"])
@pytest.mark.filterwarnings("ignore:datasets.type")
def test_every_assistant_turn_is_trained_on(run, tokenizer, type):
    out = run(type, [{"messages": CHAT}], template=CHATML)
    ids, turns = out["input_ids"][0], out["turn_spans"][0]
    assert [tokenizer.decode(ids[start:end]) for start, end in turns] == ["Hello<|im_end|>\n", "Goodbye<|im_end|>\n"]
    inside = [any(start <= place < end for start, end in turns) for place in range(len(ids))]
    assert out["labels"][0] == [token if on else -100 for token, on in zip(ids, inside)]
    assert out["prompt_length"][0] == turns[1][0]


@pytest.mark.parametrize("type", ["ebft_strided_chat.transform_all_turns", "ebft_chat_multiturn.transform_all_turns"])
@pytest.mark.filterwarnings("ignore:datasets.type")
def test_a_row_of_every_answer(run, tokenizer, type):
    """The rows of a chat that ends with that answer; a chat without an answer is a row without a reference."""
    greeting = {"role": "assistant", "content": "Yes?"}
    chats = [CHAT, [greeting, *CHAT[:2]], CHAT[:1], [greeting]]
    out = run(type, [{"messages": messages} for messages in chats], template=CHATML)
    alone = [CHAT[:2], CHAT[:4], [greeting, *CHAT[:2]]]
    wanted = run("ebft_strided_chat.transform_last_turn", [{"messages": chat} for chat in alone], template=CHATML)
    assert out["document"] == [0, 0, 1, 2, 3]
    for field in ("input_ids", "labels", "prompt_length", "turn_spans"):
        assert out[field][:3] == wanted[field]
    assert set(map(tuple, out["labels"][3:])) <= {(-100,) * len(ids) for ids in out["input_ids"][3:]}


@pytest.mark.parametrize("messages", [CHAT[:1], [], [*CHAT[:1], {"role": "assistant", "content": ""}], CHAT[1:2]])
def test_chat_without_a_reply_has_nothing_to_learn(run, messages):
    rows = [{"messages": CHAT}, {"messages": messages}]
    out = run("ebft_strided_chat.transform", rows, template=CHATML)
    assert set(out["labels"][1]) <= {-100} and out["prompt_length"][1] == len(out["input_ids"][1])


def test_chat_without_template(run):
    with pytest.raises(DataError, match="the tokenizer has no chat template. Set chat_template"):
        run("ebft_strided_chat.transform", [{"messages": CHAT}])


def test_chat_with_a_template_that_rewrites_history(run, tokenizer):
    template = "{{ messages | length }}" + CHATML
    out = run("ebft_strided_chat.transform_last_turn", [{"messages": CHAT}], template=template)
    ids, length = out["input_ids"][0], out["prompt_length"][0]
    assert tokenizer.decode(ids).startswith("4<|im_start|>")
    assert tokenizer.decode(ids[length:]) == "Goodbye<|im_end|>\n"
    assert out["labels"][0] == [-100] * length + ids[length:]


def test_chat_with_a_template_that_refuses(run):
    refusing = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match="cannot render these messages: no system role"):
        run("ebft_strided_chat.transform", [{"messages": CHAT}], template=refusing)


@pytest.mark.parametrize("messages", ["Hi", [{"speaker": "human", "text": "Hi"}]])
def test_chat_with_other_messages(run, messages):
    with pytest.raises(DataError, match="column 'messages' must contain a list of messages with the keys role"):
        run("ebft_strided_chat.transform", [{"messages": messages}], template=CHATML)
