"""Damaged or unsuitable base models, tokenizers and saved adapters, and valid ones that look unusual."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bad_input.cases import Case, bad, good

Change = Callable[[Path], None]
WEIGHTS = "model.safetensors"


def model(name: str, change: Change, *expect: str, **config: Any) -> Case:
    return bad(name, *expect, model=change, config=config)


def intact(name: str, change: Change, warns: tuple[str, ...] = (), **config: Any) -> Case:
    return good(name, model=change, config=config, warns=warns)


def write(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def remove(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def cut(name: str, size: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def settings(name: str = "config.json", **values: Any) -> Change:
    """Change keys of a JSON file; None removes one."""

    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text()) | values
        kept = {key: value for key, value in found.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return change


GENERATION = "generation_config.json"


def generation(name: str, warns: tuple[str, ...], why: str = "", **values: Any) -> Case:
    """A model whose generation config is repaired before it is trained and saved whole."""
    return good(f"generation: {name}", model=write(GENERATION, json.dumps(values)), warns=warns, why=why, trains=True)


def null(key: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: None}))

    return change


def tensors(edit: Callable[[dict], dict], name: str = WEIGHTS) -> Change:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        save_file(edit(load_file(folder / name)), folder / name, metadata={"format": "pt"})

    return change


def without(part: str) -> Change:
    return tensors(lambda found: {key: value for key, value in found.items() if part not in key})


def renamed(old: str, new: str) -> Change:
    return tensors(lambda found: {key.replace(old, new): value for key, value in found.items()})


def halved(part: str) -> Change:
    shrink = lambda key, value: value[: len(value) // 2].contiguous() if part in key else value
    return tensors(lambda found: {key: shrink(key, value) for key, value in found.items()})


def as_pickle(name: str) -> Change:
    """Weights as a pickle that creates a file when it is loaded without weights_only."""

    def change(folder: Path) -> None:
        import torch
        from safetensors.torch import load_file

        torch.save({**load_file(folder / WEIGHTS), "evil": Evil(str(folder / "pwned"))}, folder / name)
        (folder / WEIGHTS).unlink()

    return change


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


def then(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def tied(folder: Path) -> None:
    """A model whose output layer is the embedding, and is not in the file."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.config.tie_word_embeddings = True
    loaded.tie_weights()
    loaded.save_pretrained(folder)


def sharded(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    loaded.save_pretrained(folder, max_shard_size="40KB")


def nan(folder: Path) -> None:
    tensors(lambda found: {key: value * float("nan") for key, value in found.items()})(folder)


def lost_shard(folder: Path) -> None:
    sharded(folder)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def remote_code(folder: Path) -> None:
    (folder / "modeling_own.py").write_text("open('pwned', 'w')\n")
    settings(model_type="own", auto_map={"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"})(
        folder
    )


def remote_tokenizer(folder: Path) -> None:
    (folder / "tokenization_own.py").write_text("open('pwned', 'w')\n")
    settings("tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["tokenization_own.T", None]})(
        folder
    )


def adapter(**changes: Any) -> Change:
    """A saved LoRA adapter in `model/adapter`, with changed settings."""

    def change(folder: Path) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora).save_pretrained(folder / "adapter")
        settings("adapter/adapter_config.json", **changes)(folder)

    return change


LORA = {"adapter": "lora", "lora_r": 2, "lora_alpha": 4, "lora_target_linear": True}
SAVED = {"adapter": "lora", "lora_model_dir": "model/adapter"}
CONFIG, ADAPTER = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"


def saved(name: str, change: Change, *expect: str, **changes: Any) -> Case:
    return bad(f"adapter: {name}", "lora_model_dir", *expect, model=then(adapter(**changes), change), config=SAVED)


def unchanged(folder: Path) -> None:
    pass


def pickled_adapter(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save({**load_file(folder / ADAPTER), "evil": Evil("pwned")}, folder / "adapter/adapter_model.bin")
    (folder / ADAPTER).unlink()


MODELS = [
    bad("model does not exist", "base_model", "./nothing", config={"base_model": "./nothing"}),
    bad("model is a file", "base_model", config={"base_model": "rows.jsonl"}),
    bad("model is an empty folder", "base_model", "folder", config={"base_model": "folder"},
        files={"folder": Path.mkdir}),
    bad("model is not on the Hub", "base_model", "nobody/nothing", config={"base_model": "nobody/nothing"}),
    bad("model with a long name", "base_model", config={"base_model": "a" * 5000}),
    bad("model with a NUL", "run.yaml", "NUL", config={"base_model": "a\0b"}),
    model("no config.json", remove("config.json"), "config.json"),
    model("empty config.json", write("config.json", ""), "config.json"),
    model("config.json is not JSON", write("config.json", "{'model_type': 'llama'}"), "config.json"),
    model("config.json is a list", write("config.json", "[]"), "config.json"),
    model("config.json is null", write("config.json", "null"), "config.json"),
    model("config.json is binary", write("config.json", bytes(range(256))), "config.json"),
    model("no model_type", settings(model_type=None, architectures=None), "model_type"),
    model("unknown model_type", settings(model_type="llamma"), "llamma"),
    model("encoder", settings(model_type="bert"), "bert"),
    model("hidden size is text", settings(hidden_size="big"), "hidden_size"),
    model("hidden size is negative", settings(hidden_size=-32), "base_model"),
    model("hidden size 0", settings(hidden_size=0), "base_model"),
    model("no layers", settings(num_hidden_layers=0), "num_hidden_layers"),
    model("layers is a list", settings(num_hidden_layers=[2]), "num_hidden_layers"),
    model("heads do not divide", settings(num_attention_heads=5, num_key_value_heads=5), "config.json", "heads"),
    model("hidden size is null", null("hidden_size"), "config.json: hidden_size: invalid value None"),
    model("positions are negative", settings(max_position_embeddings=-1), "config.json: max_position_embeddings"),
    model("unknown dtype", settings(dtype="float99"), "config.json: dtype: invalid value 'float99'"),
    model("0 heads", settings(num_attention_heads=0), "base_model"),
    model("vocabulary is text", settings(vocab_size="many"), "vocab_size"),
    model("other vocabulary", settings(vocab_size=600), "embed_tokens"),
    model("other hidden size", settings(hidden_size=64), "embed_tokens"),
    model("other MLP size", settings(intermediate_size=48), "mlp"),
    model("more layers than weights", settings(num_hidden_layers=4), "layers.2"),
    model("unknown activation", settings(hidden_act="sweesh"), "sweesh"),
    model("unknown rope", settings(rope_parameters={"rope_type": "magic", "rope_theta": 1e4}), "base_model"),
    model("no weights", remove(WEIGHTS), "safetensors"),
    model("empty weights", write(WEIGHTS, b""), WEIGHTS),
    model("weights are text", write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:1\n"), WEIGHTS),
    model("cut off weights", cut(WEIGHTS, 5000), WEIGHTS),
    model("cut off header", cut(WEIGHTS, 20), WEIGHTS),
    model("one tensor missing", without("layers.1.mlp.up_proj"), "layers.1.mlp.up_proj"),
    model("no output layer", without("lm_head"), "lm_head"),
    model("no norm", without("model.norm"), "model.norm"),
    model("a layer missing", without("layers.1."), "layers.1"),
    model("all tensors renamed", renamed("model.", "network."), "model."),
    model("a tensor renamed", renamed("q_proj", "query"), "q_proj"),
    model("a smaller tensor", halved("layers.0.self_attn.q_proj"), "q_proj"),
    model("a shard missing", lost_shard, "safetensors"),
    bad("weights are NaN", "finite", model=nan, trains=True),
    model("pickle .bin", as_pickle("pytorch_model.bin"), "pytorch_model.bin", "safetensors"),
    model("pickle .pt", as_pickle("model.pt"), "model.pt", "safetensors"),
    model("pickle .pth", as_pickle("consolidated.00.pth"), "consolidated.00.pth", "safetensors"),
    bad("code of a model", "trust_remote_code", model=remote_code, absent=("pwned",)),
    bad("code of a tokenizer", "trust_remote_code", model=remote_tokenizer, absent=("pwned",)),
    model("model_type not a causal LM", unchanged, "model_type", model_type="LlamaModel"),
    model("GGUF that is not there", unchanged, "gguf_file", gguf_file="model.gguf"),
    model("GGUF that is text", write("model.gguf", "hello"), "model.gguf", gguf_file="model.gguf"),
    bad("GGUF folder", "gguf_file", config={"base_model": "folder"}, files={"folder/model.gguf": "x"}),
]  # fmt: skip

TOKENIZERS = [
    model("no tokenizer", remove("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    model("no tokenizer.json", remove("tokenizer.json"), "tokenizer"),
    model("tokenizer.json is not JSON", write("tokenizer.json", "{"), "tokenizer"),
    model("tokenizer.json is cut off", cut("tokenizer.json", 3000), "tokenizer"),
    model("tokenizer.json is a list", write("tokenizer.json", "[]"), "tokenizer"),
    model("tokenizer_config.json is not JSON", write("tokenizer_config.json", "{"), "tokenizer"),
    model("tokenizer_config.json is a list", write("tokenizer_config.json", "[1]"), "tokenizer"),
    model("no end of text", settings("tokenizer_config.json", eos_token=None), "eos_token"),
    model("tokenizer_config not there", unchanged, "tokenizer_config", tokenizer_config="./nothing"),
    model("chat_template not there", unchanged, "chat_template", chat_template="./nothing.jinja"),
    model("chat_template not Jinja", unchanged, "chat_template", chat_template="{% for m in %}"),
    model("chat_template not UTF-8", write("t.jinja", b"\xff{{ a }}"), "chat_template", "UTF-8",
          chat_template="model/t.jinja"),
    model("no chat template", unchanged, "chat_template", chat_template="tokenizer_default"),
    model("special tokens", unchanged, "pad_token", special_tokens={"pad_token": 5}),
]  # fmt: skip

ADAPTERS = [
    bad("adapter: not there", "lora_model_dir", config={**SAVED, "lora_model_dir": "./nothing"}),
    bad("adapter: a file", "lora_model_dir", config={**SAVED, "lora_model_dir": "rows.jsonl"}),
    bad("adapter: an empty path", "lora_model_dir", config={**SAVED, "lora_model_dir": ""}),
    saved("no weights", remove(ADAPTER), "adapter_model.safetensors"),
    saved("cut off", cut(ADAPTER, 100), "adapter_model.safetensors"),
    saved("empty", write(ADAPTER, b""), "adapter_model.safetensors"),
    saved("config is not JSON", write(CONFIG, "{"), "adapter_config.json"),
    saved("config is empty", write(CONFIG, ""), "adapter_config.json"),
    saved("config is a list", write(CONFIG, "[]"), "adapter_config.json"),
    saved("config is null", write(CONFIG, "null"), "adapter_config.json"),
    saved("config is {}", write(CONFIG, "{}"), "peft_type"),
    saved("no peft_type", unchanged, "peft_type", peft_type=None),
    saved("unknown peft_type", unchanged, "adapter_config.json: peft_type: invalid value 'MAGIC'", peft_type="MAGIC"),
    saved("lora_alpha is text", unchanged, "adapter_config.json: lora_alpha: invalid value 'x'", lora_alpha="x"),
    saved("NaN", tensors(lambda found: {key: value * float("nan") for key, value in found.items()}, ADAPTER),
          ADAPTER, "NaN or infinite"),
    saved("no rank", unchanged, "adapter", r=None),
    saved("other rank", unchanged, "adapter", r=3),
    saved("rank is text", unchanged, "adapter_config.json: r: invalid value 'two'", r="two"),
    saved("rank 0", unchanged, "adapter", r=0),
    saved("other modules", unchanged, "adapter", target_modules=["query"]),
    saved("more modules", unchanged, "k_proj", target_modules=["q_proj", "k_proj"]),
    saved("tensors renamed", tensors(lambda found: {f"x.{key}": value for key, value in found.items()}, ADAPTER),
          "q_proj"),
    saved("half of the tensors", tensors(
        lambda found: {key: value for key, value in found.items() if "layers.0" in key}, ADAPTER), "layers.1"),
    saved("no tensors", tensors(lambda found: {}, ADAPTER), "q_proj"),
    saved("pickle", pickled_adapter, "adapter_model.bin", "safetensors"),
    bad("adapter: no such module", "lora_target_modules", "query",
        config={**LORA, "lora_target_linear": False, "lora_target_modules": ["query"]}),
    bad("adapter: not a regular expression", "lora_target_modules",
        config={**LORA, "lora_target_linear": False, "lora_target_modules": "q_proj("}),
    bad("adapter: no such module to save", "lora_modules_to_save", config={**LORA, "lora_modules_to_save": ["heads"]}),
]  # fmt: skip

GENERATION_CONFIGS = [
    generation("temperature without do_sample", ("settings without effect", "do_sample: true"), temperature=0.6,
               why="models were published so, and sampling is what is meant"),
    generation("temperature with do_sample: false", ("temperature: null",), temperature=0.6, do_sample=False),
    generation("temperature 0", ("temperature: null",), temperature=0.0, why="greedy, as other programs write it"),
    generation("beams, outputs and a cache", (
        "length_penalty: null", "output_scores: null", "cache_implementation: null"),
        length_penalty=0.5, output_scores=True, use_cache=False, cache_implementation="static"),
    generation("as transformers saves it", (), temperature=0.6, do_sample=True),
    intact("generation: not saved with an adapter", write(GENERATION, json.dumps({"temperature": 0.6})), **LORA),
    model("generation: 0 tokens", write(GENERATION, json.dumps({"max_new_tokens": 0})), GENERATION, "max_new_tokens"),
    model("generation: a number is text", write(GENERATION, json.dumps({"max_new_tokens": "x"})), GENERATION),
    model("generation: greedy, 4 sequences", write(GENERATION, json.dumps({"num_return_sequences": 4})), GENERATION),
    model("generation: half a file", write(GENERATION, "{"), GENERATION),
]  # fmt: skip

VALID = [
    intact("as it is", unchanged),
    intact("lora", unchanged, **LORA),
    intact("tied output layer", tied),
    intact("tied output layer, lora", tied, **LORA),
    intact("shards", sharded),
    intact("fewer layers than weights", settings(num_hidden_layers=1), warns=("does not use", "layers.1")),
    intact("unknown key in config.json", settings(favourite_colour="green")),
    intact("buffers beside the weights", tensors(lambda found: found | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": found["model.norm.weight"][:4].clone()})),
    intact("safetensors beside a pickle", write("pytorch_model.bin", b"not read")),
    intact("a saved adapter", adapter(), **SAVED),
    intact("an adapter with another base", adapter(base_model_name_or_path="elsewhere"), **SAVED),
    intact("an adapter of a newer PEFT", adapter(some_new_option=None), **SAVED),
    intact("a new padding token", unchanged, special_tokens={"pad_token": "<pad>"}),
    intact("a chat template", unchanged, chat_template="chatml"),
    intact("a file of a chat template", write("t.jinja", "{{ messages }}"), chat_template="model/t.jinja"),
    good("home", config={"base_model": "~/model"}),
]  # fmt: skip

CASES = [*MODELS, *TOKENIZERS, *ADAPTERS, *GENERATION_CONFIGS, *VALID]
