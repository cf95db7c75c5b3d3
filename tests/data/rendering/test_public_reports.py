"""Faults that users of other projects reported, each with its small input and the right value.

Rows are read from JSON lines, as training reads them. The docstrings name the project and what was reported.
"""

import copy
import json
import warnings

import pytest
import torch

from ebft.config.schema import RunConfig
from ebft.data.load import load_token_rows
from ebft.data.preferences import load_preference_rows
from ebft.data.prompts import load_prompts
from ebft.data.reward_rows import load_comparisons
from ebft.errors import DataError
from tests.data.rendering.expected import Chat, ids_of, render, tokenizer_of
from tests.data.rendering.rows import SETTINGS, conversation

THOUGHT, ANSWER = "Count fingers.", "Seven."
ASKED = {"role": "user", "content": "How many?"}
REPLY = {"role": "assistant", "content": ANSWER}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Lisbon"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "Cloudy.", "name": "get_weather"}


def tool(name, properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


WEATHER = tool("get_weather", {"city": {"type": "string", "description": "Name of the town."}})


@pytest.fixture
def load(tmp_path_factory):
    """`load(method, template, rows, type=..., entry={...}, **keys)`: the rows that training reads from a file."""

    def loaded(method, template, rows, type=None, entry=None, tokenizer=None, **keys):
        path = tmp_path_factory.mktemp("data") / "rows.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
        settings, usual = SETTINGS[method]
        source = {"path": str(path), "type": type or usual, **(entry or {})}
        values = {"base_model": "unused", "sequence_len": 2000, "shuffle_merged_datasets": False, **settings, **keys}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = RunConfig.from_dict({**values, "datasets": [source]})
            tokenizer = tokenizer or tokenizer_of(template)
            kind = config.required_rows.kind
            if kind == "prompts":
                return list(load_prompts(config, tokenizer)[0])
            reads = {"tokens": load_token_rows, "comparisons": load_comparisons}
            return list(reads.get(kind, load_preference_rows)(config, tokenizer).train)

    return loaded


def text(template, ids):
    return tokenizer_of(template).decode(ids)


def labelled(template, row):
    """The text that a row trains on."""
    return text(template, [label for label in row["labels"] if label != -100])


def all_text(template, row):
    """The text of a row of any method, prompts and references rendered."""
    if "prompt" in row:
        turns = conversation(tokenizer_of(template), row).turns
        return text(template, [token for turn in turns for token in (*turn.lead_ids, *turn.reference_ids)])
    return text(template, [token for key, ids in row.items() if key.endswith("_ids") for token in ids])


METHODS = ("sft", "strided", "last_turn", "dpo", "kto", "reward_model")


def chat_row(method, messages, **others):
    """The row of a method for a chat; the rejected reply is another one."""
    *asked, reply = messages
    worse = {"role": "assistant", "content": "No idea."}
    if method == "dpo":
        return {"messages": asked, "chosen": reply, "rejected": worse, **others}
    if method == "kto":
        return {"prompt": asked, "completion": [reply], "label": True, **others}
    if method == "reward_model":
        return {"chosen": messages, "rejected": [*asked, worse], **others}
    return {"messages": messages, **others}


# --- Tokens at the edges


@pytest.mark.parametrize(
    ("method", "type", "row"),
    [
        ("sft", "completion", {"text": "<|begin_of_text|>Hello there."}),
        ("strided", "ebft_pretrain.transform", {"text": "<|begin_of_text|>Hello there."}),
        ("sft", "ebft_strided_structured.transform", {"input": "<|begin_of_text|>Hello", "output": " there."}),
        ("last_turn", "ebft_strided_structured.transform", {"input": "<|begin_of_text|>Hello", "output": " there."}),
        ("dpo", "passthrough", {"prompt": "<|begin_of_text|>Hello", "chosen": " you", "rejected": " all"}),
    ],
)
def test_text_that_starts_with_bos_gets_no_second_one(load, method, type, row):
    """open-r1 #462: the first two tokens of every training text were BOS."""
    (found,) = load(method, "trl/llama3", [row], type=type)
    tokenizer = tokenizer_of("trl/llama3")
    ids = conversation(tokenizer, found).prompt_ids if "prompt" in found else []
    ids = ids or found.get("input_ids") or found["prompt_ids"]
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1


def test_pairs_of_a_reward_model_have_one_bos(load):
    """reward-bench #164: the template writes BOS, and the tokenizer added another one."""
    (row,) = load("reward_model", "trl/llama3", [chat_row("reward_model", [ASKED, REPLY])])
    assert all(row[key].count(tokenizer_of("trl/llama3").bos_token_id) == 1 for key in ("chosen_ids", "rejected_ids"))


def test_completions_have_no_bos(load):
    """axolotl #1616: the chosen and the rejected completion started with BOS."""
    (row,) = load("dpo", "trl/llama3", [{"prompt": "Hello", "chosen": " you", "rejected": " all"}], type="passthrough")
    bos = tokenizer_of("trl/llama3").bos_token_id
    assert row["prompt_ids"].count(bos) == 1 and bos not in [*row["chosen_ids"], *row["rejected_ids"]]


def test_rendered_completions_have_one_end(load):
    """TRL #4481: EOS was appended to completions that the template had ended."""
    (row,) = load("dpo", "trl/qwen2_5", [chat_row("dpo", [ASKED, REPLY])])
    assert text("trl/qwen2_5", row["chosen_ids"]) == f"{ANSWER}<|im_end|>\n"


def test_the_end_of_gemmas_turns_is_trained(load):
    """axolotl #3754: turns end with <end_of_turn>, but only <eos>, which is never written, was looked for."""
    (row,) = load("sft", "trl/gemma3", [chat_row("sft", [ASKED, REPLY])])
    assert tokenizer_of("trl/gemma3").eos_token == "<eos>"
    assert labelled("trl/gemma3", row) == f"{ANSWER}<end_of_turn>\n"


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_the_end_of_glms_turns_is_trained(load, method):
    """ChatGLM-Tuning #44: the model does not learn to stop; GLM-4.5's replies end with <|user|>, as TRL trains them."""
    (row,) = load(method, "trl/glm4moe", [chat_row(method, [ASKED, REPLY])])
    trained = labelled("trl/glm4moe", row) if method == "sft" else text("trl/glm4moe", row["chosen_ids"])
    assert trained == f"\n<think></think>\n{ANSWER}<|user|>"


@pytest.mark.parametrize("eos", ["<|eot_id|>", "<|end_of_text|>"])
def test_llama_3_ends_turns_with_eot(load, eos):
    """llama-cookbook #640: whether turns end with <|eot_id|> or <|end_of_text|>, which base models have as EOS."""
    tokenizer = copy.deepcopy(tokenizer_of("trl/llama3"))
    tokenizer.add_special_tokens({"eos_token": eos})
    (row,) = load("sft", "trl/llama3", [chat_row("sft", [ASKED, REPLY])], tokenizer=tokenizer)
    assert tokenizer.decode([label for label in row["labels"] if label != -100]) == f"{ANSWER}<|eot_id|>"


def test_gpt_oss_ends_the_last_turn_with_return_only(load):
    """LLaMA-Factory #10269, harmony #57: <|end|> before <|return|>; earlier turns end with <|end|> alone."""
    (row,) = load("sft", "trl/gptoss", [chat_row("sft", [ASKED, REPLY, ASKED, {**REPLY, "content": "Eight."}])])
    first, last = (f"<|channel|>final<|message|>{answer}" for answer in (ANSWER, "Eight."))
    assert labelled("trl/gptoss", row) == f"{first}<|end|>{last}<|return|>"


def test_a_reply_that_starts_with_a_line_break_is_trained_whole(load):
    """prime-rl #1103: line breaks of the reply merged with that of the header, and the mask was off by one."""
    reply = "\n\nOne.\n"
    (row,) = load("sft", "ebft/chatml", [chat_row("sft", [ASKED, {**REPLY, "content": reply}])])
    whole = render("ebft/chatml", Chat([ASKED, {**REPLY, "content": reply}]))
    assert row["input_ids"] == ids_of("ebft/chatml", whole)
    assert labelled("ebft/chatml", row).endswith(f"{reply}<|im_end|>\n")


def test_the_completion_of_a_text_is_trained_whole(load):
    """AReaL #1427: a token across the join of question and answer counted as part of the question."""
    row = {"prompt": "def add(a, b):", "completion": "\n\n    return a"}
    (found,) = load("sft", "ebft/chatml", [row], type="ebft_strided_structured.transform")
    assert labelled("ebft/chatml", found) == row["completion"] + "<|im_end|>"


def test_spaces_that_a_tokenizer_adds_are_those_of_the_whole_text(load):
    """TRL #588: the tokens of the header of a reply were others than in the text, so nothing was trained on."""
    name = "ebft/mistral_v1+space"
    (row,) = load("sft", name, [chat_row("sft", [ASKED, REPLY])])
    assert row["input_ids"] == ids_of(name, render(name, Chat([ASKED, REPLY])))
    assert labelled(name, row).lstrip() == f"{ANSWER}</s>"


# --- Thinking


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("template", ["trl/deepseek_r1_distill", "trl/qwen2_5", "trl/gemma3"])
@pytest.mark.parametrize("place", ["content", "reasoning_content"])
def test_thinking_is_not_dropped(load, method, template, place):
    """TRL #6766: R1-Distill's template removes the thinking, and others do not read `reasoning_content`."""
    reply = {**REPLY, place: f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}" if place == "content" else THOUGHT}
    try:
        (row,) = load(method, template, [chat_row(method, [ASKED, reply])])
    except DataError as error:
        assert "thinking" in str(error) and "row 0" in str(error)
    else:
        assert THOUGHT in all_text(template, row)


@pytest.mark.parametrize("template", ["trl/deepseek_r1_distill", "trl/qwen3_6", "trl/nemotron_3_nano", "trl/gptoss"])
def test_a_plain_reference_does_not_continue_an_open_thinking_block(load, template):
    """DeepSeek-R1 #526: the generation prompt opens the thinking, which the reply then only closes."""
    (row,) = load("opencode", template, [{"input": ASKED["content"], "output": ANSWER}])
    assert render(template, Chat([ASKED, REPLY])).startswith(all_text(template, row))


@pytest.mark.parametrize("where", ["top", "entry", "row"])
@pytest.mark.parametrize("method", ["sft", "strided", "opencode", "dpo"])
def test_template_arguments_reach_the_template(load, method, where):
    """Rapid-MLX #389: `chat_template_kwargs: {enable_thinking: false}` was accepted and ignored."""
    off, template = {"enable_thinking": False}, "trl/qwen3_6"
    row = chat_row(method, [ASKED, REPLY]) if method != "opencode" else {"input": "How many?", "output": ANSWER}
    row |= {"chat_template_kwargs": off} if where == "row" else {}
    entry = {"chat_template_kwargs": off} if where == "entry" else {}
    keys = {"chat_template_kwargs": off} if where == "top" else {}
    (found,) = load(method, template, [row], entry=entry, **keys)
    prompt = render(template, Chat([ASKED], None, off), generation=True)
    assert prompt.endswith("</think>\n\n")
    if method == "dpo":
        assert text(template, found["prompt_ids"]) == prompt
    elif method == "opencode":
        found |= {"chat_template_kwargs": off} if where == "top" else {}  # those of a run are not in its rows
        assert text(template, conversation(tokenizer_of(template), found).prompt_ids) == prompt
    else:
        assert labelled(template, found) == f"{ANSWER}<|im_end|>\n"


def test_thinking_of_earlier_turns_is_what_the_template_makes_of_it(load):
    """ms-swift #4939: Qwen3 removes the thinking of earlier turns, in training as in sampling."""
    thinks = {**REPLY, "reasoning_content": THOUGHT}
    messages = [ASKED, thinks, ASKED, {**thinks, "content": "Eight."}]
    (row,) = load("sft", "trl/qwen3", [chat_row("sft", messages)])
    assert row["input_ids"] == ids_of("trl/qwen3", render("trl/qwen3", Chat(messages)))
    last = f"<think>\n{THOUGHT}\n</think>\n\nEight.<|im_end|>\n"
    assert labelled("trl/qwen3", row) == f"{ANSWER}<|im_end|>\n{last}"


# --- Tools


@pytest.mark.parametrize("method", METHODS)
def test_tools_and_their_calls_are_in_the_tokens(load, method):
    """axolotl #3824, TRL #6259: DPO and KTO dropped the calls, and never passed the tools to the template."""
    messages = [ASKED, CALLS, RESULT, REPLY]
    (row,) = load(method, "trl/qwen3", [chat_row(method, messages, tools=[WEATHER])])
    found = all_text("trl/qwen3", row)
    wanted = render("trl/qwen3", Chat(messages, [WEATHER]))
    assert found.startswith(wanted[: wanted.index(ANSWER) + len(ANSWER)])


@pytest.mark.parametrize("method", METHODS)
def test_arguments_as_json_text_are_not_encoded_again(load, method):
    """prime-rl #885: arguments are JSON text in OpenAI's format, which templates such as Qwen2.5's encode again."""
    call = {**CALL, "function": {**CALL["function"], "arguments": '{"city": "Lisbon"}'}}
    messages = [ASKED, {**CALLS, "tool_calls": [call]}, RESULT, REPLY]
    (row,) = load(method, "trl/qwen2_5", [chat_row(method, messages, tools=[WEATHER])])
    assert '"arguments": {"city": "Lisbon"}' in all_text("trl/qwen2_5", row)


@pytest.mark.parametrize("method", METHODS)
def test_tools_have_the_keys_of_the_file(load, method):
    """ms-swift #10125: Arrow gives each tool the keys of the others, with the value null; own nulls are kept."""
    other = tool("add", {"a": {"type": ["integer", "null"], "default": None}, "b": {"const": None, "title": "B"}})
    tools = [[WEATHER], [other], [WEATHER, other]]
    rows = [chat_row(method, [ASKED, REPLY], tools=given) for given in tools]
    found = load(method, "trl/qwen3", rows)
    for row, given in zip(found, tools, strict=True):
        for description in given:
            assert json.dumps(description) in all_text("trl/qwen3", row)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("others", [{}, {"days": 3}, {"region": "Norte"}], ids=["fewer", "other", "the same"])
@pytest.mark.parametrize("same_keys", [True, False], ids=["messages of the same keys", ""])
def test_nulls_in_arguments_are_kept(load, method, others, same_keys):
    """ms-swift #10125: what removes the nulls that Arrow adds must keep `{"region": null}` of the file.

    Arrow has a type with fixed keys only where the keys of all messages are the same.
    """
    arguments = [{"city": "Lisbon", "region": None}, {"city": "Porto", **others}]
    rows = []
    for given in arguments:
        call = {**CALL, "function": {**CALL["function"], "arguments": given}}
        messages = [ASKED, {**CALLS, "tool_calls": [call]}, RESULT, REPLY]
        if same_keys:
            messages = [{**dict.fromkeys(("tool_calls", "name")), **message} for message in messages]
        rows.append(chat_row(method, messages, tools=[WEATHER]))
    for row, given in zip(load(method, "trl/qwen3", rows), arguments, strict=True):
        assert f'"arguments": {json.dumps(given)}' in all_text("trl/qwen3", row)


@pytest.mark.parametrize("method", ["sft", "strided", "last_turn", "multiturn"])
@pytest.mark.parametrize("template", ["trl/qwen3", "trl/glm4moe"])
def test_calls_in_sharegpts_format_are_not_dropped(load, method, template):
    """LLaMA-Factory #2764: `function_call` and `observation` are a call and its result; templates do not know them."""
    call = json.dumps({"name": "get_weather", "arguments": {"city": "Lisbon"}})
    turns = [("human", "Warm?"), ("function_call", call), ("observation", "Cloudy."), ("gpt", "No.")]
    row = {"conversations": [{"from": role, "value": value} for role, value in turns], "tools": json.dumps([WEATHER])}
    try:
        (found,) = load(method, template, [row])
    except DataError as error:
        assert "function_call" in str(error) or "observation" in str(error)
    else:
        assert all(
            part in all_text(template, found) for part in ("Warm?", "Lisbon", "Cloudy.", "No.", "Name of the town")
        )


# --- Messages that templates ignore, and messages that are not targets


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("template", ["trl/qwen3", "trl/phi3", "trl/glm4moe"])
def test_developer_messages_are_not_dropped(load, method, template):
    """maxtext #4419: messages of the role `developer` were left out without a word."""
    try:
        (row,) = load(
            method, template, [chat_row(method, [{"role": "developer", "content": "Be brief."}, ASKED, REPLY])]
        )
    except DataError as error:
        assert "developer" in str(error)
    else:
        assert "Be brief." in all_text(template, row)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("template", ["trl/gemma", "trl/gemma3", "trl/deepseekv3", "ebft/mistral_v1"])
def test_system_messages_are_not_dropped(load, method, template):
    """node-llama-cpp #624: Gemma has no system role, and the system prompt never reached the model."""
    try:
        (row,) = load(method, template, [chat_row(method, [{"role": "system", "content": "Be brief."}, ASKED, REPLY])])
    except DataError as error:
        assert "system" in str(error).lower()
    else:
        assert "Be brief." in all_text(template, row)


PARTS = (
    lambda text: [{"type": "text", "text": text}],
    lambda text: [{"type": "input_text", "text": text[:2]}, {"type": "output_text", "text": text[2:]}],
    lambda text: [text[:2], {"text": text[2:], "image_url": None}],
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("template", ["ebft/chatml", "trl/llama3", "trl/gemma3", "trl/qwen2_5_vl", "trl/smolvlm"])
def test_contents_as_parts_are_text(load, method, template):
    """renderers #134, llama-cpp-python #2324: a list of parts became an empty turn or Python's text of a list.

    Templates of models with images leave out contents that are texts instead.
    """
    (plain,) = load(method, template, [chat_row(method, [ASKED, REPLY])])
    assert ASKED["content"] in all_text(template, plain) and ANSWER in all_text(template, plain)
    for parts in PARTS:
        messages = [{**message, "content": parts(message["content"])} for message in (ASKED, REPLY)]
        assert load(method, template, [chat_row(method, messages)]) == [plain]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("template", ["ebft/chatml", "trl/llama3", "trl/qwen2_5_vl"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "x"}}], "of type 'image_url'"),
        ([{"type": "text", "text": "See", "image": "x"}], "a part of type 'image', but models are trained on text"),
        ([["See"]], "a part of type 'list'"),
        ([None], "a part of type 'NoneType'"),
        ([{"type": "text", "text": None}], "a part whose text is missing"),
        ({"type": "text", "text": "See"}, "must be text or a list of parts with text, got dict"),
        (5, "must be text or a list of parts with text, got int"),
    ],
)
def test_contents_that_are_not_text(load, method, template, content, message):
    """Templates print a number or a list as Python does, and omit parts that they do not know."""
    for messages in ([{**ASKED, "content": content}, REPLY], [ASKED, {**REPLY, "content": content}]):
        with pytest.raises(DataError, match=rf"row 0: .*content of message \d \((user|assistant)\).*{message}"):
            load(method, template, [chat_row(method, messages)])


@pytest.mark.parametrize("template", ["trl/llama3_1", "trl/qwen2_5", "trl/qwen3", "trl/glm4moe", "trl/gptoss"])
@pytest.mark.parametrize("content", [{"sky": "grey"}, [{"type": "text", "text": "Cloudy."}], None, []])
def test_results_of_tools_are_json_or_text(load, template, content):
    """Objects are written as JSON, by the template or before it, and never as Python's text."""
    messages = [ASKED, CALLS, {**RESULT, "content": content}, REPLY]
    (row,) = load("sft", template, [chat_row("sft", messages, tools=[WEATHER])])
    found = all_text(template, row)
    assert ('"sky": "grey"' if isinstance(content, dict) else "Cloudy." if content else "") in found
    assert not any(text in found for text in ("'sky'", "'type'", "[]", "None"))


@pytest.mark.parametrize("method", ["sft", "strided"])
def test_messages_of_weight_zero_are_context(load, method):
    """axolotl #1702: `weight: 0`, as in the format of mistral-finetune, masks a message."""
    weighted = [{**message, "weight": weight} for message, weight in ((ASKED, 1), (REPLY, 0), (ASKED, 1))]
    (row,) = load(method, "trl/qwen2_5", [{"messages": [*weighted, {**REPLY, "content": "Eight.", "weight": 1}]}])
    assert labelled("trl/qwen2_5", row) == "Eight.<|im_end|>\n"


@pytest.mark.parametrize("type", ["ebft_strided_chat.transform", "ebft_chat_multiturn.transform_all_turns"])
def test_every_assistant_turn_of_a_strided_chat_is_trained(load, type):
    """SteptronOss #36: only the last turn had a loss; with one turn per row there is one row for each turn."""
    messages = [ASKED, REPLY, ASKED, {**REPLY, "content": "Eight."}]
    rows = load("strided", "trl/qwen2_5", [{"messages": messages}] * 3, type=type)
    found = [labelled("trl/qwen2_5", row) for row in rows]
    both = [f"{ANSWER}<|im_end|>\n", "Eight.<|im_end|>\n"]
    assert sorted(found) == sorted(["".join(both)] * 3 if "strided_chat" in type else both * 3)


# --- Rows without anything to learn


def test_rows_whose_reply_is_cut_off_are_not_trained(load):
    """TRL #3927: after truncation no token of the assistant was left, and the loss was that of nothing."""
    long = {**ASKED, "content": "How many? " * 60}
    rows = [chat_row("sft", [long, REPLY]), chat_row("sft", [ASKED, REPLY])]
    (row,) = load("sft", "trl/qwen2_5", rows, sequence_len=64)
    assert labelled("trl/qwen2_5", row) == f"{ANSWER}<|im_end|>\n"


@pytest.mark.parametrize("method", ["sft", "strided"])
def test_a_file_without_replies_is_an_error(load, method):
    """unsloth #2900: all labels were -100, which the loss does not show."""
    with pytest.raises(DataError, match="No usable rows"):
        load(method, "trl/qwen2_5", [{"messages": [ASKED]}, {"messages": [ASKED, {**REPLY, "content": ""}]}])


# --- Numbers of a step

DOCUMENTS = [("a", "bc"), ("one two", "three four five six seven"), ("x y", "z"), ("what", "a rather longer reply")]


@pytest.mark.parametrize(
    "keys",
    [
        {"micro_batch_size": 4},
        {"micro_batch_size": 1, "gradient_accumulation_steps": 4},
        {"micro_batch_size": 2, "gradient_accumulation_steps": 2},
        {"micro_batch_size": 1, "gradient_accumulation_steps": 4, "sample_packing": True},
        {"micro_batch_size": 4, "batch_flattening": True},
        {"micro_batch_size": 4, "special_tokens": {"pad_token": "<|im_end|>"}},
    ],
    ids=["batch", "accumulated", "both", "packed", "flattened", "pad is the end of turn"],
)
def test_the_loss_of_a_step_is_the_mean_over_its_tokens(tmp_path, keys):
    """TRL #2175, transformers #24725: the loss with accumulated gradients differs, for rows of unequal length.

    LLaMA-Factory #4224: packed rows attend to each other; llm-course #33: a padding token that is also the end of the
    turn is masked, so that models never stop.
    """
    from ebft import train
    from tests.structured.conftest import chat_model, make_chat_tokenizer

    tokenizer = make_chat_tokenizer()
    model = chat_model(tokenizer, seed=3)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    chats = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}] for asked, reply in DOCUMENTS
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    total, count = 0.0, 0
    for asked, reply in DOCUMENTS:
        before = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        start = len(tokenizer(before)["input_ids"])
        ids = torch.tensor(tokenizer(f"{before}{reply}<|im_end|>\n")["input_ids"])
        with torch.no_grad():
            logps = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])
        total, count = total - logps[start - 1 :].sum().item(), count + len(ids) - start
    values = {
        "base_model": str(tmp_path / "model"),
        "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "chat_template"}],
        "sequence_len": 128,
        "max_steps": 1,
        "logging_steps": 1,
        "torch_dtype": "float32",
        "save_strategy": "no",
        "output_dir": str(tmp_path / "out"),
        **keys,
    }
    with warnings.catch_warnings(action="ignore"):
        logs = train(RunConfig.from_dict(values)).trainer.state.log_history
    steps = [entry["loss"] for entry in logs if "loss" in entry]
    packed = keys.get("sample_packing", False)  # fewer rows than a step has
    assert steps[0] == pytest.approx(total / count, rel=1e-4) or packed and len(steps) == 0


def test_the_kl_term_of_kto_pairs_each_prompt_with_another_completion(tmp_path, monkeypatch):
    """TRL #1911: in batches of odd size, and in a last batch of one row, a row had its own completion."""
    from ebft.preferences.trainers import KTOTrainer
    from tests.preferences.runs import pairs, trained, write_inputs

    rows = [{**row, "completion": f"reply {number}"} for number, row in enumerate(pairs(7))]
    write_inputs(tmp_path, rows)
    seen = []
    step = KTOTrainer.training_step

    def spied(self, model, inputs, *args, **kwargs):
        for name in ("", "KL_"):
            masked = zip(inputs[f"{name}input_ids"], inputs[f"{name}completion_mask"], strict=True)
            seen.append([ids[mask.bool()].tolist() for ids, mask in masked])
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(KTOTrainer, "training_step", spied)
    trained("kto", tmp_path, micro_batch_size=3, max_steps=None, num_epochs=1)
    own, others = seen[::2], seen[1::2]
    assert sum(map(len, own)) >= 6
    assert all(a != b for batch, other in zip(own, others, strict=True) for a, b in zip(batch, other, strict=True))
