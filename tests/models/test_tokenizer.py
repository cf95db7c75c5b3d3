"""Special tokens, padding and chat templates."""

import warnings

import pytest
from transformers import AutoTokenizer

from ebft.catalog import named_template
from ebft.models.pretrained import load_tokenizer


def test_eos_pads_with_one_warning(make_config):
    with pytest.warns(UserWarning, match="special_tokens.pad_token") as caught:
        tokenizer = load_tokenizer(make_config())
    assert len(caught) == 1 and tokenizer.pad_token == tokenizer.eos_token == "<|end|>"
    with warnings.catch_warnings(action="error"):
        tokenizer = load_tokenizer(make_config(special_tokens={"pad_token": "<|pad|>"}))
    assert tokenizer.pad_token == "<|pad|>" and tokenizer.pad_token_id == 512


def test_reserved_tokens_get_other_texts(make_config, tiny_tokenizer_dir, tmp_path):
    tokenizer, reserving = AutoTokenizer.from_pretrained(tiny_tokenizer_dir), str(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_0|>", "<|reserved_1|>"]})
    tokenizer.add_tokens(["<plain_0>"])
    tokenizer.pad_token = "<|end|>"
    tokenizer.save_pretrained(reserving)
    before = load_tokenizer(make_config(tokenizer_config=reserving))
    texts = {"512": "<|think|>", 514: "<note>"}  # JSON has no numbers as keys
    tokenizer = load_tokenizer(make_config(tokenizer_config=reserving, added_tokens_overrides=texts))
    plain = before("one two")["input_ids"]
    assert len(tokenizer) == len(before) == 515 and tokenizer("one two")["input_ids"] == plain
    assert tokenizer("<|think|>one two<note>", add_special_tokens=False)["input_ids"] == [512, *plain[1:], 514]
    assert tokenizer.decode([512, 513, 514]) == "<|think|><|reserved_1|><note>"
    assert tokenizer.decode([512, 513, 514], skip_special_tokens=True) == "<note>"
    assert 512 not in tokenizer("<|reserved_0|>")["input_ids"]
    assert tokenizer.name_or_path == before.name_or_path and tokenizer.pad_token == "<|end|>"
    tokenizer.save_pretrained(tmp_path / "again")
    assert AutoTokenizer.from_pretrained(tmp_path / "again").decode([512, 513, 514]) == "<|think|><|reserved_1|><note>"


def test_names_of_models_keep_the_template_of_the_tokenizer(make_config, tiny_tokenizer_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    tokenizer.chat_template = "{{ messages | length }} messages"
    tokenizer.save_pretrained(tmp_path)
    keys = {"tokenizer_config": str(tmp_path), "special_tokens": {"pad_token": "<|end|>"}}
    with pytest.warns(UserWarning, match="chat_template: pixtral: the template of the tokenizer is used"):
        found = load_tokenizer(make_config(**keys, chat_template="pixtral"))
    again = load_tokenizer(make_config(**keys, chat_template="tokenizer_default_fallback_phi_4"))
    assert found.chat_template == again.chat_template == tokenizer.chat_template
    del keys["tokenizer_config"]
    fallback = load_tokenizer(make_config(**keys, chat_template="tokenizer_default_fallback_phi_4"))
    assert fallback.chat_template == named_template("phi_4")
