"""Models in GGUF files: the weights and the tokens they hold, and ordinary models from then on."""

import shutil

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ebft.errors import ModelError
from ebft.models.load import load_base_model, load_model
from ebft.models.pretrained import load, load_tokenizer, pretrained_config, pretrained_model, pretrained_tokenizer
from ebft.models.weights import load_gguf_model, load_gguf_tokenizer
from tests.gguf_files import write_gguf

LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
TEXTS = ["def add(a, b):\n    if a:\n\treturn  a + b\n\n\n    # the end\n", "émigré 東京 🙂 \u00a0 naïve",
         "  leading, trailing  \n", "x = [\n    1, 22,\n    333]  # 4  5", ""]  # fmt: skip


@pytest.fixture(scope="module")
def base(tiny_llama_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_llama_dir), AutoTokenizer.from_pretrained(tiny_llama_dir)


@pytest.fixture
def make_gguf_config(make_config, tiny_gguf):
    return lambda **keys: make_config(**{"base_model": str(tiny_gguf.parent), "gguf_file": tiny_gguf.name, **keys})


def test_weights_are_those_that_the_blocks_stand_for(base, tmp_path):
    held = write_gguf(tmp_path / "model.gguf", *base)
    model = load_gguf_model(str(tmp_path / "model.gguf"))
    found = model.state_dict()
    assert model.dtype == torch.float32 and found.keys() == held.keys()
    for name, weight in held.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0)
    twin = base[0]
    twin.load_state_dict(held)
    ids = torch.tensor([[1, 40, 41, 300, 7]])
    torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=0, atol=1e-6)


def test_saved_model_is_an_ordinary_one(make_gguf_config, tiny_gguf, tmp_path, monkeypatch):
    (tmp_path / tiny_gguf.name).write_bytes(b"another file")  # of the same name, in the current folder
    monkeypatch.chdir(tmp_path)
    config = make_gguf_config()
    assert config.model_name == str(tiny_gguf)
    tokenizer = load_tokenizer(config)
    model = load_base_model(config, tokenizer)
    assert model.name_or_path == model.config.name_or_path == str(tiny_gguf)
    model.save_pretrained(tmp_path)
    saved = (tmp_path / "config.json").read_text()
    assert "quantization" not in saved and "A Title" not in saved
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, rtol=0, atol=0)
    assert again.generation_config.eos_token_id == tokenizer.eos_token_id
    half = make_gguf_config(torch_dtype="bfloat16")
    assert load_base_model(half, tokenizer).dtype == torch.bfloat16


def test_files_of_another_model_beside_it_are_not_taken(make_gguf_config, tiny_gguf, tmp_path):
    folder = tmp_path / "both"
    folder.mkdir()
    shutil.copy(tiny_gguf, folder)
    config = make_gguf_config(base_model=str(folder))
    wanted = load_tokenizer(config)
    words = Tokenizer(WordLevel({"<unk>": 0, "def": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    found = load_tokenizer(config)
    assert [found(text)["input_ids"] for text in TEXTS] == [wanted(text)["input_ids"] for text in TEXTS]
    assert found.special_tokens_map == wanted.special_tokens_map and found.eos_token is not None


@pytest.mark.parametrize("pre", ["gpt-2", "smollm"])
def test_tokens_are_those_of_the_model_and_saved_as_they_are(base, tmp_path, pre):
    """Digits are split where the file says so."""
    write_gguf(tmp_path / "model.gguf", *base, pre=pre, add_bos=False)
    tokenizer = load_gguf_tokenizer(str(tmp_path / "model.gguf"))
    own = Tokenizer.from_str(base[1].backend_tokenizer.to_str())
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        own.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        assert tokenizer.tokenize("\n    1") == [*tokenizer.tokenize("\n    "), "1"]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == own.encode(text, add_special_tokens=False).ids == again(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == ("<|end|>", "<|begin|>", "<|end|>")
    assert again.special_tokens_map == tokenizer.special_tokens_map


@pytest.mark.parametrize("add_bos", [True, False])
def test_first_token_and_template_are_those_of_the_file(base, tmp_path, add_bos):
    write_gguf(tmp_path / "m.gguf", *base, add_bos=add_bos, chat_template="{{ messages[0].content }}!", pre="of-mars")
    with pytest.warns(UserWarning, match="the pre-tokenizer 'of-mars' is not supported.*tokenizer_config"):
        tokenizer = load_gguf_tokenizer(str(tmp_path / "m.gguf"))
    tokenizer.save_pretrained(tmp_path)
    for found in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert (found("text")["input_ids"][0] == tokenizer.bos_token_id) == add_bos
        assert found.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_names_of_gguf_files_are_names_of_models(tiny_gguf, make_gguf_config):
    name = str(tiny_gguf)
    config = make_gguf_config()
    wanted = load_base_model(config, load_tokenizer(config))
    for found in (pretrained_model(name, dtype=torch.float32), load(name, None, seed=0)):
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), wanted.parameters()))
    assert pretrained_config(name).hidden_size == 32
    assert pretrained_tokenizer(name)("a")["input_ids"] == load_tokenizer(config)("a")["input_ids"]


def test_new_tokens_beside_an_adapter_are_refused_before_the_model_is_loaded(make_gguf_config, monkeypatch):
    config = make_gguf_config(special_tokens={"pad_token": "<|pad|>"})
    assert load_model(config, load_tokenizer(config)).get_input_embeddings().num_embeddings == 513
    config = make_gguf_config(special_tokens={"pad_token": "<|pad|>"}, **LORA)
    monkeypatch.setattr("ebft.models.load.pretrained_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ModelError, match="does not save new tokens.*ebft fetch .* --output DIR"):
        load_model(config, load_tokenizer(config))
