"""Rows of token ids: which tokens are the prompt and which are scored, what is dropped, and what is an error."""

import warnings

import pytest

from ebft.data.preferences import load_preference_rows
from ebft.errors import DataError
from tests.data.space_tokenizers import SCHEMES, space_tokenizer
from tests.preferences.runs import config_of, write_inputs
from tests.structured.conftest import make_chat_tokenizer

ASKED = {"role": "user", "content": "Hi"}
PAIR = {"prompt": "Hi", "chosen": "Yes", "rejected": "No!"}
CHAT = {"prompt": [ASKED], "chosen": [{"role": "assistant", "content": "Yes"}]}
CHAT |= {"rejected": [{"role": "assistant", "content": "No!"}]}


def loaded(tmp_path, rows, method="dpo", **changes):
    write_inputs(tmp_path, rows)
    datasets = [{"path": str(tmp_path / "rows.jsonl"), "type": changes.pop("type", "passthrough")}]
    config = config_of(method, tmp_path, datasets=datasets, shuffle_merged_datasets=False, **changes)
    return load_preference_rows(config, make_chat_tokenizer())


def tokens(ids):
    return make_chat_tokenizer().convert_ids_to_tokens(ids)


def test_texts_end_with_the_token_that_ends_a_text(tmp_path):
    (row,) = loaded(tmp_path, [PAIR]).train
    assert list(row) == ["prompt_ids", "chosen_ids", "rejected_ids"]
    assert tokens(row["prompt_ids"]) == ["H", "i"]
    assert tokens(row["chosen_ids"]) == ["Y", "e", "s", "<|endoftext|>"]
    assert tokens(row["rejected_ids"]) == ["N", "o", "!", "<|endoftext|>"]


def test_a_text_that_has_this_token_gets_no_second_one(tmp_path):
    (row,) = loaded(tmp_path, [{**PAIR, "chosen": "Yes<|endoftext|>"}]).train
    assert tokens(row["chosen_ids"]) == ["Y", "e", "s", "<|endoftext|>"]


def test_chats_are_rendered_with_the_template_up_to_the_end_of_the_turn(tmp_path):
    (row,) = loaded(tmp_path, [CHAT]).train
    start = ["<|im_start|>", *"user", "Ċ", *"Hi", "<|im_end|>", "Ċ", "<|im_start|>", *"assistant", "Ċ"]
    assert tokens(row["prompt_ids"]) == start
    assert tokens(row["chosen_ids"]) == ["Y", "e", "s", "<|im_end|>", "Ċ"]
    assert tokens(row["rejected_ids"]) == ["N", "o", "!", "<|im_end|>", "Ċ"]


def test_a_text_format_has_the_same_prompt_as_the_template(tmp_path):
    (chat,) = loaded(tmp_path, [CHAT]).train
    (text,) = loaded(tmp_path, [{"question": "Hi", "chosen": "Yes", "rejected": "No!"}], type="chatml.intel").train
    assert text["prompt_ids"] == chat["prompt_ids"]
    assert tokens(text["chosen_ids"]) == ["Y", "e", "s", "<|im_end|>", "<|endoftext|>"]


def test_labels_are_booleans(tmp_path):
    rows = [{"prompt": "Hi", "completion": text, "label": label} for text, label in (("Yes", 1), ("No!", 0))]
    found = loaded(tmp_path, rows, "kto").train
    assert found.column_names == ["prompt_ids", "completion_ids", "label"] and found["label"][:] == [True, False]
    assert tokens(found[1]["completion_ids"]) == ["N", "o", "!", "<|endoftext|>"]


def test_unusable_rows_are_dropped_and_counted(tmp_path):
    rows = [PAIR, {**PAIR, "prompt": " "}, {**PAIR, "chosen": None}, {**PAIR, "rejected": "x" * 40}, PAIR]
    found = loaded(tmp_path, rows, sequence_len=40)
    assert len(found.train) == 2
    assert str(found.reports[0]) == (
        "datasets: 5 documents produced 2 rows; dropped 1 without a prompt, 1 without a completion (or with only one "
        "of chosen and rejected), 1 whose prompt and completions do not fit within sequence_len"
    )


def test_the_longest_completion_may_fill_the_sequence(tmp_path):
    exact = {**PAIR, "rejected": "x" * 37}  # 2 + 37 + the end
    assert len(loaded(tmp_path, [exact], sequence_len=40).train) == 1
    with pytest.raises(DataError, match="No usable rows are left: provide rows whose prompt and completions"):
        loaded(tmp_path, [exact], sequence_len=39)


def test_documents_are_held_out_as_with_other_methods(tmp_path):
    rows = loaded(tmp_path, [{**PAIR, "prompt": str(number)} for number in range(8)], val_set_size=2)
    assert (len(rows.train), len(rows.evaluation)) == (6, 2) and "document" not in rows.train.column_names


@pytest.mark.parametrize(
    ("rows", "method", "message"),
    [
        ([{**PAIR, "chosen": CHAT["chosen"]}], "dpo", "prompt, chosen and rejected must all be text, or all lists"),
        ([{"prompt": "Hi", "completion": "a", "label": "yes"}], "kto", "label must be true .* or false, got 'yes'"),
    ],
)
def test_malformed_rows_name_the_source_and_the_row(rows, method, message, tmp_path):
    with pytest.raises(DataError, match=rf"rows.jsonl, train: transform 'passthrough', row 0: {message}"):
        loaded(tmp_path, rows, method)


def test_a_custom_transform_returns_the_same_fields(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def pairs(cfg, **kwargs):\n"
        "    return lambda row, tokenizer=None: {'prompt': 'Hi', 'chosen': row['a'], 'rejected': row['b']}, {}\n"
        "def half(cfg, **kwargs):\n    return lambda row, tokenizer=None: {'prompt': 'Hi', 'chosen': 'a'}, {}\n"
    )
    monkeypatch.chdir(tmp_path)
    (row,) = loaded(tmp_path, [{"a": "Yes", "b": "No!"}], type="mine.pairs").train
    assert tokens(row["chosen_ids"]) == ["Y", "e", "s", "<|endoftext|>"]
    with pytest.raises(DataError, match="the field 'rejected' is missing; .*rl: dpo trains on rows of prompt, chosen"):
        loaded(tmp_path, [{"a": "Yes", "b": "No!"}], type="mine.half")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_completions_follow_the_prompt_without_an_added_space(scheme, tmp_path):
    tokenizer = space_tokenizer(scheme, "{% for m in messages %}[{{ m.content }}]\n{% endfor %}")
    texts = {"prompt": "b\n", "chosen": "c b", "rejected": "Hi"}
    asked = {name: [{"role": "user", "content": text.strip()}] for name, text in texts.items()}
    write_inputs(tmp_path, [texts])
    datasets = [{"path": str(tmp_path / "rows.jsonl"), "type": "passthrough"}]
    config = config_of("dpo", tmp_path, datasets=datasets)
    (row,) = load_preference_rows(config, tokenizer).train
    shown = {name: tokenizer.convert_ids_to_tokens(ids) for name, ids in row.items()}
    assert shown == {"prompt_ids": ["▁b", "\n"], "chosen_ids": ["c", "▁b", "</s>"], "rejected_ids": ["Hi", "</s>"]}
    write_inputs(tmp_path, [asked])
    (row,) = load_preference_rows(config, tokenizer).train
    whole = tokenizer.apply_chat_template(asked["prompt"] + asked["chosen"], return_dict=True)["input_ids"]
    assert row["prompt_ids"] + row["chosen_ids"] == whole


@pytest.mark.parametrize("opened", ["<think>", ""])
def test_a_template_that_renders_the_prompt_differently_before_a_completion(opened, tmp_path):
    tokenizer = make_chat_tokenizer()
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>OPENED{% else %}<|im_end|>{% endif %}"
    ).replace("OPENED", opened)
    write_inputs(tmp_path, [CHAT])
    datasets = [{"path": str(tmp_path / "rows.jsonl"), "type": "passthrough"}]
    (row,) = load_preference_rows(config_of("dpo", tmp_path, datasets=datasets), tokenizer).train
    assert {name: tokenizer.decode(ids) for name, ids in row.items()} == {
        "prompt_ids": "2<|im_start|>Hi<|im_start|>",
        "chosen_ids": "Yes<|im_end|>",
        "rejected_ids": "No!<|im_end|>",
    }


def test_a_special_token_without_a_name_before_a_completion_is_not_left_out(tmp_path):
    tokenizer = make_chat_tokenizer()
    assert "<|im_end|>" not in tokenizer.all_special_tokens
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A: <|im_start|>{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}A: <|im_end|>{% endif %}"
    )
    write_inputs(tmp_path, [CHAT])
    datasets = [{"path": str(tmp_path / "rows.jsonl"), "type": "passthrough"}]
    with pytest.raises(DataError, match=r"writes another text before message 1 \(assistant\) than before a new reply"):
        load_preference_rows(config_of("dpo", tmp_path, datasets=datasets), tokenizer)


def without_markers():
    """The tokenizer of the other tests without <|im_start|> and <|im_end|>."""
    return space_tokenizer("never")


def warned(tmp_path, types, tokenizer):
    """The warnings of markers from the rows of several datasets."""
    write_inputs(tmp_path, [{"question": "b", "prompt": "b", "chosen": "c", "rejected": "Hi"}])
    datasets = [{"path": str(tmp_path / "rows.jsonl"), "type": name} for name in types]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_preference_rows(config_of("dpo", tmp_path, datasets=datasets), tokenizer)
    return [str(each.message) for each in caught if "the vocabulary lacks" in str(each.message)]


def test_markers_of_a_text_format_that_are_split_give_one_warning(tmp_path):
    (message,) = warned(tmp_path, ["chatml.intel", "chatml.prompt_pairs"], without_markers())
    assert message.startswith("datasets.type: chatml.intel writes <|im_start|>, <|im_end|>, which the vocabulary lacks")
    assert 'tokens: ["<|im_start|>", "<|im_end|>"]' in message
    assert "lora_modules_to_save: [embed_tokens, lm_head]" in message
    assert "<|eot_id|>" in warned(tmp_path, ["llama3.intel"], make_chat_tokenizer())[0]


def test_markers_that_need_no_warning(tmp_path):
    assert warned(tmp_path, ["chatml.intel"], make_chat_tokenizer()) == []
    tokenizer = without_markers()
    tokenizer.chat_template = make_chat_tokenizer().chat_template  # warned of when it is set
    assert warned(tmp_path, ["chatml.intel"], tokenizer) == []


def test_completions_with_different_prompts(tmp_path):
    tokenizer = make_chat_tokenizer()
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    completions = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    write_inputs(tmp_path, [{**CHAT, **completions, "rejected": completions["rejected"] + CHAT["prompt"]}])
    datasets = [{"path": str(tmp_path / "rows.jsonl"), "type": "passthrough"}]
    with pytest.raises(DataError, match="renders the messages before the completions differently before each of them"):
        load_preference_rows(config_of("dpo", tmp_path, datasets=datasets), tokenizer)
