"""`ebft preprocess CONFIG [key=value ...]`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ebft.config.load import load_config
from ebft.errors import ConfigError, DataError
from ebft.files import is_free
from ebft.printed import safe_console, say
from ebft.run.checks import check_types
from ebft.tools.cli.arguments import ConfigFile, Overrides, renamed
from ebft.tools.cli.console import listing

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
        typer.Option(
            "--count",
            "-n",
            metavar="N",
            min=1,
            help="Number of rows for training and for evaluation to show (default: 5); implies --debug unless --html "
            "is given.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the same rows to this HTML file.", show_default=False),
    ] = None,
    former_debug_num: Annotated[int | None, typer.Option("--debug-num", min=1, hidden=True)] = None,
) -> None:
    """Load the config, prepare or find the rows, and show them."""
    count = renamed(count, former_debug_num, "--count", "--debug-num")
    run_config = load_config(config, overrides or [])
    check_types(run_config)
    if html is not None and not html.absolute().parent.is_dir():
        raise DataError(f"--html {html}: the folder {html.parent} does not exist. Create it, or choose another file.")
    if html is not None and html.is_file() and not is_free(html, b"<!doctype html>"):
        raise DataError(f"--html {html}: the file exists and is not an HTML preview. Choose another file.")
    from ebft.models.tokenizer import load_tokenizer  # imports transformers, which is slow and not needed for help
    from ebft.run.prepared_rows import describe, prepare_rows

    shows = debug or html is not None or count is not None
    tokenizer = load_tokenizer(run_config)
    if run_config.streaming:
        if not shows:
            raise ConfigError(
                "streaming: the rows of a stream are not prepared and stored, but read while training runs. Use "
                "--debug to show the first ones, or remove streaming."
            )
        rows = run_config.method.load_rows(run_config, tokenizer)
        _show(run_config, tokenizer, rows, True, count or 5, debug or html is None, html)
        return
    base = Path(run_config.dataset_prepared_path or DEFAULT_FOLDER)
    prepared = prepare_rows(run_config, tokenizer, base)
    if shows:
        _show(run_config, tokenizer, prepared.rows, prepared.is_new, count or 5, debug or html is None, html)
    say(describe(prepared))
    if run_config.dataset_prepared_path is None:
        command = ["ebft", "train", str(config), *(overrides or []), f"dataset_prepared_path={DEFAULT_FOLDER}"]
        say(f"Train on them with: {shlex.join(command)}", err=True)


def _show(config, tokenizer, rows, is_new: bool, number: int, in_terminal: bool, html: Path | None) -> None:
    """Show the first rows in the terminal, and write them to an HTML file; `is_new`: they were prepared now."""
    from ebft.methods.views import first_rows, generation_prompt
    from ebft.tools.preview import legend, page, show_reports, show_row

    train = config.method.arrange(config, rows.train)
    shown = list(first_rows(number, config.method.row_view(config, tokenizer), train, rows.evaluation))
    note = generation_prompt(tokenizer, config.required_rows.chat_template_kwargs)
    if html is not None:
        try:
            html.write_text(page("Prepared rows", rows.reports, shown, note), encoding="utf-8")
        except OSError as error:
            raise DataError(f"--html {html}: cannot be written ({error.strerror}). Choose another file.") from error
    if in_terminal:
        console = safe_console(highlight=False)
        for line in (*show_reports(rows.reports, are_printed=is_new), legend(), *([Text(note)] if note else [])):
            console.print(line)
        for title, view in shown:
            console.print(*show_row(title, view), sep="\n")
    if html is not None:
        say(f"Rows written to {html}")


preprocess.__doc__ = f"""Prepare the rows of a config and store them, for use by `ebft train`.

Rows are loaded, transformed and tokenised, and stored in dataset_prepared_path (default: {DEFAULT_FOLDER}). Training
with the same dataset_prepared_path uses them if data, transforms, tokenizer and settings are the same.

Examples:

ebft preprocess run.yaml dataset_prepared_path=prepared

ebft preprocess run.yaml --debug

ebft preprocess run.yaml --count 20 --html rows.html
"""
