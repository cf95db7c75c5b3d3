"""Commands that show what a run has produced: `ebft show`, `ebft report`, `ebft evaluate`, `ebft inference`."""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ebft.errors import ConfigError, RunError
from ebft.printed import print_table, printable_json, safe_console, say
from ebft.run.config.schema import load_config
from ebft.run_files import check_rollouts, check_run, read_object
from ebft.tools.cli import arguments as shared
from ebft.tools.cli.arguments import complete_model, complete_term, config_and_model, option
from ebft.tools.console import listing, polite, say_loading
from ebft.tools.dashboard.report import write_report
from ebft.tools.dashboard.rollouts import REWARD, all_samples, sample_text, take, without_repetitions

COUNT, COUNT_INTERACTIVE = 5, 200


@listing
def show(
    folder: shared.RunFolder,
    best: Annotated[bool, typer.Option("--best", help="The best rollouts by --sort, best first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The worst rollouts by --sort, worst first.")] = False,
    sort: Annotated[
        str | None,
        option(
            "TERM",
            "A term: reward (default), alignment, diversity, advantage, length, or rewards/NAME of a reward "
            "function. Higher is better, except for diversity. Implies --best without --worst.",
            complete_term,
        ),
    ] = None,
    step: Annotated[
        int | None, option("N", "Only rollouts of optimizer step N, counted from 1 as in the logs.")
    ] = None,
    count: Annotated[
        int | None,
        option(
            "N",
            f"Number of rollouts. Default: {COUNT}, or {COUNT_INTERACTIVE} with --interactive.",
            min=1,
            names=("--count", "-n"),
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show whole prompts, not their last 400 characters.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Browse in a pager.")] = False,
) -> None:
    """Show the rollouts of a run with their references and the terms of their rewards.

    A run stores few of its rollouts by default, and every one of training with log_rollouts: all.

    \b
    Examples:
      ebft show outputs/run
      ebft show outputs/run --worst --sort alignment --count 20
      ebft show outputs/run --step 10 --best --json
    """
    check_rollouts(folder)
    order = "worst" if worst else "best" if best or sort else "newest"
    count = count or (COUNT_INTERACTIVE if interactive else COUNT)
    found = all_samples(folder, step)
    samples = take(found if as_json else without_repetitions(found), order, sort or REWARD, count)
    if not samples:
        why = "no rollouts yet, or its files cannot be read"
        if kept := list(all_samples(folder)):
            steps, terms = {each.step for each in kept}, dict.fromkeys(term for each in kept for term in each.terms)
            why = f"no such rollout. It has steps {min(steps)} to {max(steps)}, and terms {', '.join(terms)}"
        raise RunError(f"{folder} has {why}.")
    if as_json:
        # Without `copies`, since the list contains every copy of a completion.
        found = [{name: value for name, value in asdict(each).items() if name != "copies"} for each in samples]
        print(printable_json(json.dumps(found, indent=2, ensure_ascii=False)))
        return
    console = safe_console(soft_wrap=True, highlight=False)
    os.environ.setdefault("LESS", "-R")  # shows colours
    with console.pager(styles=True) if interactive else nullcontext():
        for sample in samples:
            console.print(sample_text(sample, full), end="\n\n")


@polite
def report(
    folder: shared.RunFolder,
    evaluation: Annotated[
        Path | None,
        option(
            "FILE.json",
            "Include this result of `ebft evaluate --output`. Default: evaluation.json in the folder, if any.",
        ),
    ] = None,
) -> None:
    """Write report.html into the output folder of a run: curves, samples, health messages, config and evaluation.

    `ebft train` writes it at the end of a run. The page is a single file without external resources.

    \b
    Examples:
      ebft report outputs/run
      ebft evaluate run.yaml --output outputs/run/evaluation.json && ebft report outputs/run
    """
    check_run(folder)
    if evaluation is not None and not _is_evaluation(evaluation):
        raise RunError(f"--evaluation: {evaluation} is not a result of `ebft evaluate --output`.")
    say(write_report(folder, evaluation))


@polite
def evaluate(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    model: Annotated[
        list[str] | None,
        option(
            "PATH",
            "Folder or Hub id of a model or an adapter; can be repeated. Default: base_model, and the trained "
            "model in output_dir if there is one. Differences are relative to the first model.",
            complete=complete_model,
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        option(
            "MODULE.FUNCTION",
            "Additional metric: a function (prompt, completions, row) -> float, as in evaluation.metrics.",
        ),
    ] = None,
    output: Annotated[Path | None, option("FILE.json", "Write all results to this file.")] = None,
    plot: Annotated[Path | None, option("FILE.png", "Plot curves and histograms to this file.")] = None,
) -> None:
    """Evaluate and compare models on the held-out data of a config.

    All models are evaluated on the same documents, with the same random numbers, in the feature space of the config's
    base_model.

    \b
    Examples:
      ebft evaluate run.yaml --model outputs/run --model outputs/sft --output result.json
      ebft evaluate run.yaml evaluation.samples=8 --metric my_module.passes_tests
    """
    run_config = load_config(config, overrides or [])
    if metric:
        run_config.evaluation.metrics = [*run_config.evaluation.metrics, *metric]
    say_loading()
    from ebft.tools.evaluation.result import check_plots, check_result_file, save_plots
    from ebft.tools.evaluation.run import evaluate  # imports torch, which is not needed for help and config errors

    if plot is not None:
        check_plots(plot)
    for path in filter(None, (output, plot)):
        check_result_file(path)
    if output is not None and output.is_file() and output.stat().st_size and not _is_evaluation(output):
        raise ConfigError(f"--output {output}: the file exists and is not the result of an evaluation.")
    save = None if output is None else lambda so_far: so_far.save(output)
    evaluation = evaluate(run_config, model, after_each=save)
    for table in filter(None, (evaluation.table(), evaluation.differences_table())):
        print_table(table)
    if output is not None:
        say(f"Results written to {output}")
    if plot is not None:
        save_plots(evaluation, plot)
        say(f"Plots written to {plot}")


def _is_evaluation(path: Path) -> bool:
    return "models" in (read_object(path) or {})


FEWEST_WHITENED = 4  # samples; the whitened rewards of fewer say only an order


@listing
def inference(
    source: shared.ConfigOrFolder,
    overrides: shared.Overrides = None,
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="Answer this prompt and exit.")] = None,
    completion: Annotated[
        bool | None,
        typer.Option(
            "--completion/--chat",
            help="Continue the prompt as plain text, or answer it with the chat template. Default: as the rows that "
            "the model was trained on, where the config or the run in the folder says so, or else the chat template.",
        ),
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Use the base model: switch the adapter off.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Show the base model and the trained model.")] = False,
    base_model: shared.BaseModel = None,
    lora_model_dir: shared.LoraModelDir = None,
    reference: Annotated[
        str | None, option("TEXT", "Show the feature-matching rewards of --samples replies against this text.")
    ] = None,
    samples: Annotated[
        int | None, option("N", "Number of replies scored with --reference (default: 4).", min=1, max=256)
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Largest number of tokens of a reply.")
    ] = 256,
    temperature: Annotated[
        float | None,
        option(None, "Sampling temperature; 0 is greedy. Default: the model's generation config.", min=0.0),
    ] = None,
    top_p: Annotated[float | None, option(None, "Nucleus sampling.", min=0.0, max=1.0)] = None,
    top_k: Annotated[int | None, option(None, "Top-k sampling.", min=0)] = None,
    seed: Annotated[int | None, option(None, "Random seed, set before every reply.", min=0, max=2**32 - 1)] = None,
) -> None:
    """Sample from a trained model, its adapter on or off.

    Without --prompt, prompts are read from the terminal, or one prompt from the standard input if that is no terminal.
    The model answers in its chat format if its tokenizer has a chat template and it was not trained on plain text.

    \b
    Examples:
      ebft inference run.yaml
      ebft inference outputs/run --prompt "What is a monad?" --compare
      ebft inference run.yaml --prompt "What is a monad?" --reference "A monoid in ..." --samples 4
    """
    config, folder = config_and_model(source, overrides, lora_model_dir)
    asked = sys.stdin.read().rstrip("\n") if prompt is None and not sys.stdin.isatty() else prompt
    has_samples, samples = samples is not None, samples or 4
    for is_wrong, message in (
        (config and base_model, "--base-model requires a folder: with a config, set base_model=MODEL."),
        (has_samples and reference is None, "--samples is the number of replies that --reference scores. Add it."),
        (reference and samples > 1 and temperature == 0, "--temperature 0 gives equal samples. Use --samples 1."),
        (asked is not None and not asked.strip(), "The prompt is empty. Give it with --prompt, or in a terminal."),
    ):
        if is_wrong:
            raise ConfigError(message)
    say_loading()
    from ebft.data.transforms.formats import written_prompt  # what follows imports torch
    from ebft.tools.inference.models import model_in_folder, model_of_run
    from ebft.tools.inference.sampling import Sampler, SamplingOptions, Scorer, Session

    loaded = model_in_folder(str(folder), base_model) if config is None else model_of_run(config, folder)
    if base or compare:
        with loaded.model(base=True):  # fails now if there is no base model
            pass
    sampler = Sampler(loaded, SamplingOptions(max_new_tokens, temperature, top_p, top_k, seed))
    has_template = loaded.tokenizer.chat_template is not None
    write = str if completion else loaded.write
    if completion is False and isinstance(write("..."), str):
        write = written_prompt(())
    sample = write("...")
    if isinstance(sample, list) and not has_template:
        write = str
    elif isinstance(sample, list) and len(sample) > 1:
        say(f"System message, from system_prompt of the datasets: {sample[0]['content']!r}", err=True)
    elif isinstance(sample, str) and completion is None and has_template:
        form = "plain text" if sample == "..." else repr(sample)
        say(f"The prompt is continued as {form}, as the model was trained; --chat asks in chat format.", err=True)
    scorer = Scorer(sampler, samples) if reference is not None else None
    if scorer is not None:
        say(f"Reward settings: {loaded.reward_settings}", err=True)
        if loaded.reward.get("use_whitening") and 1 < samples < FEWEST_WHITENED:
            say(
                f"Note: with use_whitening and fewer than {FEWEST_WHITENED} samples, rewards only tell which sample is "
                "closer to the reference. Increase --samples, best to n_samples_per_prompt of the run.",
                err=True,
            )
    session = Session(sampler, write, base, compare, scorer, reference)
    if asked is None:
        session.run()
    else:
        session.answer(asked)
