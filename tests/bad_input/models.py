"""Damaged or unsuitable base models, tokenizers and saved adapters, and valid ones that look unusual."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import file_edits as edit
from tests.bad_input.cases import Case, bad, good

INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
CONFIG, ADAPTER = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"


def model(name: str, change: edit.Change, *expect: str, **config: Any) -> Case:
    """A model that is refused, and whose code or pickles are not run."""
    return bad(name, *expect, model=change, config=config, absent=("pwned",))


def saved(name: str, change: edit.Change, *expect: str, **changes: Any) -> Case:
    return bad(f"adapter: {name}", "lora_model_dir", *expect, model=edit.then(adapter(**changes), change), config=SAVED)


def intact(name: str, change: edit.Change, warns: tuple[str, ...] = (), **config: Any) -> Case:
    return good(name, model=change, config=config, warns=warns)


def generation(name: str, warns: tuple[str, ...], **values: Any) -> Case:
    """A model whose generation config is repaired before it is trained and saved whole."""
    return good(f"generation: {name}", model=edit.write(GENERATION, values), warns=warns, trains=True)


def code(file: str, name: str, **values: Any) -> edit.Change:
    """Settings that name Python code, which creates a file when it is run."""
    return edit.then(edit.write(file, "open('pwned', 'w')\n"), edit.settings(name, **values))


def stored_as(dtype: str, part: str = "", name: str = edit.WEIGHTS) -> edit.Change:
    return edit.values(lambda value: (value * 10).to(getattr(torch, dtype)), part, name)


def with_more(**more: list[int]) -> edit.Change:
    """Add tensors of the given sizes."""
    return edit.tensors(lambda found: found | {key.replace("__", "."): torch.ones(*size) for key, size in more.items()})


def copied(old: str, new: str, name: str = edit.WEIGHTS) -> edit.Change:
    """Add copies of the tensors whose names contain `old` under other names."""
    more = lambda found: {key.replace(old, new): value.clone() for key, value in found.items() if old in key}
    return edit.tensors(lambda found: found | more(found), name)


def one_infinite(embeddings: Any) -> Any:
    embeddings[301, 3] = float("inf")
    return embeddings


class Evil:
    """A pickle of it creates a file when it is loaded without weights_only."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


def as_pickle(name: str, source: str = edit.WEIGHTS) -> edit.Change:
    def change(folder: Path) -> None:
        torch.save({**load_file(folder / source), "evil": Evil("pwned")}, folder / name)
        (folder / source).unlink()

    return change


def tied(folder: Path) -> None:
    """A model whose output layer is the embedding, and is not in the file."""
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.config.tie_word_embeddings = True
    loaded.tie_weights()
    loaded.save_pretrained(folder)


def sharded(folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    (folder / edit.WEIGHTS).unlink()
    loaded.save_pretrained(folder, max_shard_size="40KB")


def entries(keep: Callable[[str, str], bool]) -> edit.Change:
    """A sharded model with only some names and files in its index."""
    kept = lambda weights: {key: file for key, file in weights.items() if keep(key, file)}
    return edit.then(sharded, edit.edited(INDEX, lambda found: {**found, "weight_map": kept(found["weight_map"])}))


def lost_shard(folder: Path) -> None:
    sharded(folder)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def vocabulary(size: int) -> edit.Change:
    """Other embeddings: the first ones, and the first ones again."""
    change = lambda own: own.repeat(2, 1)[:size].clone() if len(own) == 512 else own
    return edit.then(edit.settings(vocab_size=size), edit.values(change))


def adapter(**changes: Any) -> edit.Change:
    """A saved LoRA adapter in `model/adapter`, with changed settings."""

    def change(folder: Path) -> None:
        lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora).save_pretrained(folder / "adapter")
        edit.settings("adapter/adapter_config.json", **changes)(folder)

    return change


LORA = {"adapter": "lora", "lora_r": 2, "lora_alpha": 4, "lora_target_linear": True}
SAVED = {"adapter": "lora", "lora_model_dir": "model/adapter"}


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:1\n"
MODELS = [
    bad("model is a file", "base_model", config={"base_model": "rows.jsonl"}),
    bad("model is an empty folder", "base_model", "folder", "no config.json", config={"base_model": "folder"},
        files={"folder": Path.mkdir}),
    model("config.json is not JSON", edit.write("config.json", "{'model_type': 'llama'}"), "config.json"),
    model("other vocabulary", edit.settings(vocab_size=600), "embed_tokens"),
    model("weights are a pointer", edit.write(edit.WEIGHTS, POINTER), edit.WEIGHTS, "Git LFS"),
    model("no tokenizer", edit.then(edit.settings(model_type="codegen"), no_tokenizer), "has no tokenizer", "_config"),
    model("a smaller tensor", edit.values(lambda own: own[:5].clone(), "layers.0.self_attn.q_proj"), "q_proj"),
    model("a shard missing", lost_shard, "safetensors"),
    model("one value is infinite", edit.values(one_infinite, "embed_tokens"), "infinite values", "(model.embed_tokens"),
    model("weights are zeros", edit.values(lambda own: own * 0), "embeddings of all tokens are equal"),
    model("int32 weights", stored_as("int32"), "stored as torch.int32", "no quantization_config"),
    model("float8 weights with scales", edit.then(stored_as("float8_e4m3fn", "q_proj"),
                                             with_more(model__layers__0__self_attn__q_proj__weight_scale_inv=[1, 1])),
          "float8_e4m3fn", "scales", "quantization_config"),
    model("index of one shard only", entries(lambda key, file: "-00001-" in file), "weights lack"),
    model("pickle with code", as_pickle("pytorch_model.bin"), "pytorch_model.bin", "weights_only"),
    model("code of a model", code("own.py", "config.json", model_type="own", auto_map={
        "AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}), "trust_remote_code"),
]  # fmt: skip

TOKENIZERS = [
    model("tokenizer.json is cut off", edit.cut("tokenizer.json", 3000), "tokenizer"),
    model("no end of text", edit.settings("tokenizer_config.json", eos_token=edit.GONE), "eos_token"),
    model("chat_template not Jinja", edit.unchanged, "chat_template", chat_template="{% for m in %}"),
]  # fmt: skip

ADAPTERS = [
    bad("adapter: not there", "lora_model_dir", config={**SAVED, "lora_model_dir": "./nothing"}),
    saved("more layers", copied(".1.", ".7.", name=ADAPTER), "layers.7.self_attn.q_proj"),
    saved("NaN", edit.values(lambda own: own * float("nan"), name=ADAPTER), ADAPTER, "NaN or infinite"),
    saved("other modules", edit.unchanged, "adapter", target_modules=["query"]),
    saved("tensors renamed", edit.named(lambda key: f"x.{key}", ADAPTER), "q_proj"),
]  # fmt: skip

GENERATION_CONFIGS = [
    generation("temperature with do_sample: false", ("temperature: null",), temperature=0.6, do_sample=False),
    generation("beams, outputs and a cache", (
        "length_penalty: null", "output_scores: null", "cache_implementation: null"),
        length_penalty=0.5, output_scores=True, use_cache=False, cache_implementation="static"),
    model("generation: a number is text", edit.write(GENERATION, {"max_new_tokens": "x"}), "base_model"),
]  # fmt: skip

VALID = [
    intact("tied output layer", tied),
    # A config.json with fewer layers is how a model is shortened.
    intact("more layers than config.json", copied("layers.1.", "layers.2."), warns=("contain 9 tensors", "layers.2")),
    intact("tensors of another model", with_more(encoder__w=[3], vision__w=[4]), warns=("2 tensors", "encoder.w")),
    intact("two tensors of tied layers", edit.settings(tie_word_embeddings=True),
           warns=("tie_word_embeddings: true", "differs")),
    intact("fewer embeddings than tokens", vocabulary(400), warns=("512 tokens", "400", "112")),
    intact("pickle", edit.pickled(edit.WEIGHTS)),  # of tensors only, which are read without running code
    intact("a saved adapter", adapter(), **SAVED),
]  # fmt: skip

CASES = [*MODELS, *TOKENIZERS, *ADAPTERS, *GENERATION_CONFIGS, *VALID]
