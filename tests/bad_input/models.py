"""Damaged or unsuitable base models, tokenizers and saved adapters, and valid ones that look unusual."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bad_input.cases import Case, bad, good

Change = Callable[[Path], None]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def model(name: str, change: Change, *expect: str, **config: Any) -> Case:
    return bad(name, *expect, model=change, config=config)


def intact(name: str, change: Change, warns: tuple[str, ...] = (), why: str = "", **config: Any) -> Case:
    return good(name, model=change, config=config, warns=warns, why=why)


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


def values(edit: Callable[[Any], Any], part: str = "", name: str = WEIGHTS) -> Change:
    """Change the tensors whose name contains `part`."""
    return tensors(lambda found: {key: edit(value) if part in key else value for key, value in found.items()}, name)


def one_infinite(folder: Path) -> None:
    def edit(own: Any) -> Any:
        own[301, 3] = float("inf")
        return own

    values(edit, "embed_tokens")(folder)


def stored_as(dtype: str, part: str = "", name: str = WEIGHTS) -> Change:
    import torch

    return values(lambda value: (value * 10).to(getattr(torch, dtype)), part, name)


def with_more(**more: list[int]) -> Change:
    """Add tensors of the given sizes."""
    import torch

    return tensors(lambda found: found | {key.replace("__", "."): torch.ones(*size) for key, size in more.items()})


def more_layers(found: dict) -> dict:
    last = {key: value for key, value in found.items() if "layers.1." in key}
    return found | {key.replace(".1.", f".{n}."): value.clone() for key, value in last.items() for n in range(2, 7)}


def index(**changes: Any) -> Change:
    """A sharded model with other values in its index."""
    return then(sharded, settings(INDEX, **changes))


def entries(keep: Callable[[str, str], bool]) -> Change:
    """A sharded model with only some names and files in its index."""

    def change(folder: Path) -> None:
        sharded(folder)
        weights = json.loads((folder / INDEX).read_text())["weight_map"]
        settings(INDEX, weight_map={key: file for key, file in weights.items() if keep(key, file)})(folder)

    return change


def exchanged(folder: Path) -> None:
    sharded(folder)
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    first.rename(folder / "other")
    second.rename(first)
    (folder / "other").rename(second)


def smaller_vocabulary(size: int) -> Change:
    cut_off = tensors(lambda found: {key: own[:size].clone() if len(own) == 512 else own for key, own in found.items()})
    return then(settings(vocab_size=size), cut_off)


def lost_shard(folder: Path) -> None:
    sharded(folder)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def remote_code(folder: Path) -> None:
    (folder / "modeling_own.py").write_text("open('pwned', 'w')\n")
    settings(model_type="own", auto_map={"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"})(
        folder
    )


def token_ids(number: int, added: bool = False) -> Change:
    """Change the id of the last token, or add one with an id."""

    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        if added:
            token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            content["added_tokens"].append({"id": number, "content": "<|x|>", "special": True, **token})
        else:
            content["model"]["vocab"][list(content["model"]["vocab"])[-1]] = number
        path.write_text(json.dumps(content))

    return change


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
    model("unknown activation", settings(hidden_act="sweesh"),
          "config.json: hidden_act: transformers does not know 'sweesh'. Correct it"),
    model("0 key-value heads", settings(num_key_value_heads=0), "config.json: num_key_value_heads: invalid value 0"),
    model("dropout above 1", settings(attention_dropout=2.0), "config.json: attention_dropout: invalid value 2.0",
          "from 0 to less than 1"),
    model("dropout below 0", settings(attention_dropout=-0.1), "config.json: attention_dropout"),
    model("unknown rope", settings(rope_parameters={"rope_type": "magic", "rope_theta": 1e4}),
          "config.json: rope_parameters.rope_type: transformers does not know 'magic'"),
    model("no weights", remove(WEIGHTS), "safetensors"), model("empty weights", write(WEIGHTS, b""), WEIGHTS),
    model("weights are text", write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:1\n"), WEIGHTS),
    model("cut off weights", cut(WEIGHTS, 5000), WEIGHTS), model("cut off header", cut(WEIGHTS, 20), WEIGHTS),
    model("one tensor missing", without("layers.1.mlp.up_proj"), "layers.1.mlp.up_proj"),
    model("no output layer", without("lm_head"), "lm_head"), model("no norm", without("model.norm"), "model.norm"),
    model("a layer missing", without("layers.1."), "layers.1"),
    model("all tensors renamed", renamed("model.", "network."), "model."),
    model("a tensor renamed", renamed("q_proj", "query"), "q_proj"),
    model("a smaller tensor", halved("layers.0.self_attn.q_proj"), "q_proj"),
    model("a shard missing", lost_shard, "safetensors"),
    model("weights are NaN", values(lambda own: own * float("nan")), "NaN", "embed_tokens"),
    model("one tensor is infinite", values(lambda own: own / 0, "layers.1.mlp.up"), "infinite", "layers.1.mlp.up_proj"),
    model("one value is infinite", one_infinite, "infinite values", "(model.embed_tokens.weight)"),
    model("weights are 1e38", values(lambda own: own * 0 + 1e38), "above 1e+19", "embed_tokens"),
    model("weights are zeros", values(lambda own: own * 0), "embeddings of all 512 tokens are equal"),
    model("int32 weights", stored_as("int32"), "stored as int32", "no quantization_config"),
    model("complex weights", stored_as("complex64", "model.norm"), "complex numbers (model.norm.weight)"),
    model("dtype of integers", settings(dtype="int32"), "config.json: dtype: invalid value 'int32'"),
    model("bool weights", stored_as("bool"), "stored as bool", "no quantization_config"),
    model("one int8 tensor", stored_as("int8", "layers.0.mlp.up"), "int8 (model.layers.0.mlp.up_proj.weight)"),
    model("float8 weights with scales", then(stored_as("float8_e4m3fn", "q_proj"),
                                             with_more(model__layers__0__self_attn__q_proj__weight_scale_inv=[1, 1])),
          "float8_e4m3fn with scales", "weight_scale_inv", "quantization_config"),
    model("unknown quantisation", settings(quantization_config={"quant_method": "magic"}), "does not know", "'magic'"),
    model("quantisation is text", settings(quantization_config="gptq"), "config.json: quantization_config", "'gptq'"),
    model("no method of quantisation", settings(quantization_config={"bits": 4}), "config.json", "quant_method"),
    model("index is not JSON", then(sharded, write(INDEX, "{")), INDEX, "read as JSON"),
    model("index is binary", then(sharded, write(INDEX, bytes(range(256)))), INDEX, "read as JSON"),
    model("index is a list", then(sharded, write(INDEX, "[]")), INDEX, "expected an object"),
    model("index nested deeply", then(sharded, write(INDEX, "[" * 100_000)), INDEX, "nested too deeply"),
    model("index without metadata", index(metadata=None), f"{INDEX}: metadata"),
    model("index without weights", index(weight_map=None), f"{INDEX}: weight_map"),
    model("index with no weights", index(weight_map={}), f"{INDEX}: weight_map"),
    model("index with a number as file", index(weight_map={"lm_head.weight": 5}), f"{INDEX}: weight_map", "got 5"),
    model("index of a file not there", index(weight_map={"lm_head.weight": "a.safetensors"}), INDEX, "a.safetensors"),
    model("index of one shard only", entries(lambda key, file: "-00001-" in file), "weights lack"),
    model("rope_theta is text", settings(rope_parameters={"rope_type": "default", "rope_theta": "1e4"}),
          "config.json: rope_parameters.rope_theta: invalid value '1e4'"),
    model("old rope_theta is text", settings(rope_theta="1e4"), "config.json: rope_theta: invalid value '1e4'"),
    model("rope_theta is negative", settings(rope_parameters={"rope_type": "default", "rope_theta": -5}), "rope_theta"),
    model("rope_theta is 0", settings(rope_parameters={"rope_type": "default", "rope_theta": 0}),
          "config.json: rope_parameters.rope_theta: invalid value 0"),
    model("rope factor is text", settings(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": "8"}),
          "config.json: rope_parameters.factor: invalid value '8'"),
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
    model("huge id of a token", token_ids(2**31 - 1), "tokenizer.json", "2147483647", "between 0 and 16,777,215"),
    model("id of a token beyond 64 bits", token_ids(10**30), "tokenizer.json", "between 0 and"),
    model("negative id of a token", token_ids(-1), "tokenizer.json", "the id -1"),
    model("huge id of an added token", token_ids(4 * 10**9, added=True), "tokenizer.json", "'<|x|>' the id 4000000000"),
    intact("ids with a gap", token_ids(511 + 10**5)),
    model("tokenizer.json is {}", write("tokenizer.json", "{}"), "tokenizer.json lacks model and added_tokens"),
    model("tokenizer.json is a list", write("tokenizer.json", "[]"), "tokenizer"),
    model("tokenizer_config.json is not JSON", write("tokenizer_config.json", "{"), "tokenizer"),
    model("tokenizer_config.json is a list", write("tokenizer_config.json", "[1]"), "tokenizer"),
    model("longest text is text", settings("tokenizer_config.json", model_max_length="many"),
          "tokenizer_config.json: model_max_length: invalid value 'many'"),
    model("longest text is a list", settings("tokenizer_config.json", model_max_length=[1]), "model_max_length"),
    model("tokenizer.json nested deeply", write("tokenizer.json", "[" * 100_000), "tokenizer.json", "too deeply"),
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
    saved("config is noise", write(CONFIG, "[" * 10**7), "adapter_config.json", "nested too deeply"),
    saved("config is binary noise", write(CONFIG, bytes(range(256)) * 40_000), "adapter_config.json", "read as JSON"),
    saved("int32 tensors", stored_as("int32", name=ADAPTER), "as int32", "floating-point"),
    saved("tensors of another model", tensors(
        lambda found: found | {f"x.{key}": own.clone() for key, own in found.items()}, ADAPTER), "no part"),
    saved("more layers", tensors(lambda found: found | {
        key.replace(".1.", ".7."): own.clone() for key, own in found.items()}, ADAPTER), "layers.7.self_attn.q_proj"),
    saved("modules is a number", unchanged, "adapter_config.json", target_modules=5),
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
    bad("adapter: unknown modules beside known ones", "lora_target_modules: 'query'", "q_proj",
        config={**LORA, "lora_target_linear": False, "lora_target_modules": ["q_proj", "query"]}),
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
    intact("as it is", unchanged), intact("lora", unchanged, **LORA), intact("tied output layer", tied),
    intact("tied output layer, lora", tied, **LORA), intact("shards", sharded),
    intact("index without an entry", entries(lambda key, file: "layers.1.mlp.up_proj" not in key),
           why="all tensors of the files that the index names are read"),
    intact("exchanged shards", exchanged, why="tensors are found by their names in the files, not by the index"),
    intact("index beside one file", write(INDEX, "{"), why="transformers reads model.safetensors, not the index"),
    intact("damaged file that is not read", write("consolidated.safetensors", "x"), why="it is not in an index"),
    intact("more layers than config.json", tensors(more_layers), warns=("contain 45 tensors", "layers.2"),
           why="config.json with fewer layers is how a model is shortened"),
    intact("tensors of another model", with_more(encoder__w=[3], vision__w=[4]), warns=("2 tensors", "encoder.w"),
           why="the text model of a multimodal one is stored with the other parts"),
    intact("integer buffers",
           tensors(lambda found: found | {"model.layers.0.self_attn.bias": found["model.norm.weight"][:4].bool()}),
           warns=("does not use",)),
    intact("half precision", stored_as("float16")), intact("double precision", stored_as("float64")),
    intact("float8 weights without scales", stored_as("float8_e4m3fn", "q_proj"), warns=("stored as float8_e4m3fn",)),
    intact("one layer of zeros", values(lambda own: own * 0, "layers.1.mlp.down"), why="added layers start like this"),
    intact("equal embeddings of some tokens", values(lambda own: own * (own[:, :1] > 0), "embed_tokens"),
           why="tokens that were not in the training data"),
    intact("two tensors of tied layers", settings(tie_word_embeddings=True),
           warns=("tie_word_embeddings: true", "differs"), why="transformers uses both; servers may not"),
    intact("equal tensors of tied layers", then(settings(tie_word_embeddings=True), tensors(lambda found: found | {
        "lm_head.weight": found["model.embed_tokens.weight"].clone()
    }))),
    intact("no quantisation", null("quantization_config")),
    intact("integer rope_theta", settings(rope_parameters={"rope_type": "default", "rope_theta": 10000})),
    intact("longest text is not known", settings("tokenizer_config.json", model_max_length=10**30)),
    intact("longest text is null", settings("tokenizer_config.json", model_max_length=None)),
    intact("fewer embeddings than tokens", smaller_vocabulary(400), warns=("512 tokens", "400", "112 of them"),
           why="tokens are added to the tokenizer of a base model before it is trained"),
    intact("more embeddings than tokens", then(settings(vocab_size=800), tensors(lambda found: {key: own.repeat(2, 1)[
        :800
    ] if len(own) == 512 else own for key, own in found.items()}))),
    intact("fewer layers than weights", settings(num_hidden_layers=1), warns=("does not use", "layers.1")),
    intact("unknown key in config.json", settings(favourite_colour="green")),
    intact("buffers beside the weights", tensors(lambda found: found | {"model.layers.0.self_attn.rotary_emb.inv_freq":
                                                                            found["model.norm.weight"][:4].clone()})),
    intact("safetensors beside a pickle", write("pytorch_model.bin", b"not read")),
    intact("a saved adapter", adapter(), **SAVED),
    intact("adapter: other settings in the config", adapter(), warns=("lora_r: 16 has no effect", "has 2"), **SAVED,
           lora_r=16),
    intact("adapter: other modules in the config", adapter(), warns=("lora_target_modules", "['q_proj']"), **SAVED,
           lora_target_modules=["k_proj"]),
    intact("adapter: the same settings in the config", adapter(), **SAVED, lora_r=2, lora_alpha=8),
    intact("adapter: more modules than the model has", adapter(target_modules=["q_proj", "query"]), **SAVED,
           why="one list of modules is used for many models; all tensors of the file are used"),
    intact("adapter: float16", then(adapter(), stored_as("float16", name=ADAPTER)), **SAVED),
    intact("an adapter with another base", adapter(base_model_name_or_path="elsewhere"), **SAVED),
    intact("an adapter of a newer PEFT", adapter(some_new_option=None), **SAVED),
    intact("a new padding token", unchanged, special_tokens={"pad_token": "<pad>"}),
    intact("dropout of other kinds",
           then(settings(resid_pdrop=False, embd_pdrop=True, attention_dropout=0.1), null("classifier_dropout"))),
    intact("a chat template", unchanged, chat_template="chatml"),
    intact("a file of a chat template", write("t.jinja", "{{ messages }}"), chat_template="model/t.jinja"),
    good("home", config={"base_model": "~/model"}),
]  # fmt: skip

CASES = [*MODELS, *TOKENIZERS, *ADAPTERS, *GENERATION_CONFIGS, *VALID]
