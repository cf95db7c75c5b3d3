"""`ebft inference CONFIG|FOLDER [key=value ...]`."""

import sys
from typing import Annotated

import typer

from ebft.errors import ConfigError, DataError
from ebft.printed import say
from ebft.tools.cli.arguments import BaseModel, ConfigOrFolder, LoraModelDir, Overrides, read_source
from ebft.tools.cli.console import listing

FEWEST_WHITENED = 4  # samples of which rewards after whitening say more than an order


@listing
def inference(
    source: ConfigOrFolder,
    overrides: Overrides = None,
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="Answer this prompt and exit.")] = None,
    completion: Annotated[
        bool, typer.Option("--completion", help="Continue the prompt as plain text, without the chat template.")
    ] = False,
    base: Annotated[bool, typer.Option("--base", help="Use the base model: switch the adapter off.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Show the base model and the trained model.")] = False,
    base_model: BaseModel = None,
    lora_model_dir: LoraModelDir = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="TEXT",
            help="Show the feature-matching rewards of --samples replies against this text.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=1, max=256, help="Number of replies scored with --reference.")
    ] = 4,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Largest number of tokens of a reply.")
    ] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            min=0.0,
            help="Sampling temperature; 0 is greedy. Default: the model's generation config.",
            show_default=False,
        ),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", min=0.0, max=1.0, help="Nucleus sampling.", show_default=False)
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=0, help="Top-k sampling.", show_default=False)] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, help="Random seed, set before every reply.", show_default=False),
    ] = None,
) -> None:
    """Sample from a trained model, its adapter on or off.

    Without --prompt, prompts are read from the terminal, or one prompt from the standard input if that is no terminal.
    The model answers in its chat format if its tokenizer has a chat template.

    Examples:

    ebft inference run.yaml

    ebft inference outputs/run --prompt "What is a monad?" --compare

    ebft inference run.yaml --prompt "What is a monad?" --reference "A monoid in ..." --samples 4
    """
    config, folder = read_source(source, overrides, lora_model_dir)
    if config is not None and base_model is not None:
        raise ConfigError("--base-model requires a folder: with a config, set base_model=MODEL.")
    if reference is not None and not reference.strip():
        raise ConfigError("--reference: the text is empty.")
    if reference is not None and samples > 1 and temperature == 0:
        raise ConfigError("--temperature 0 gives equal samples, whose rewards are equal too. Use --samples 1.")
    if base and compare:
        raise ConfigError("--base and --compare exclude each other: --compare shows both models.")
    if prompt is not None and not prompt.strip():
        raise ConfigError("--prompt: the text is empty.")
    asked = prompt if prompt is not None else _from_stdin()
    from ebft.tools.inference.models import model_in_folder, model_of_run  # what follows imports torch
    from ebft.tools.inference.sampling import Sampler, SamplingOptions, Scorer, Session

    loaded = model_in_folder(str(folder), base_model) if config is None else model_of_run(config, folder)
    if base or compare:
        with loaded.model(base=True):  # fails now if there is no base model
            pass
    sampler = Sampler(loaded, SamplingOptions(max_new_tokens, temperature, top_p, top_k, seed))
    chats = loaded.tokenizer.chat_template is not None and not completion
    scorer = Scorer(sampler, samples) if reference is not None else None
    if scorer is not None:
        say(f"Reward settings: {loaded.reward_settings}", err=True)
        if loaded.reward.get("use_whitening") and 1 < samples < FEWEST_WHITENED:
            say(
                f"Note: rewards with use_whitening are relative to the {samples} samples that they are whitened with. "
                f"With fewer than {FEWEST_WHITENED}, they only tell which sample is closer to the reference. Increase "
                "--samples, best to n_samples_per_prompt of the run.",
                err=True,
            )
    session = Session(sampler, chats, base, compare, scorer, reference)
    if asked is None:
        session.run()
    else:
        session.answer(asked)


def _from_stdin() -> str | None:
    """The prompt on the standard input, or None if it is a terminal."""
    if sys.stdin.isatty():
        return None
    text = sys.stdin.read().rstrip("\n")
    if not text.strip():
        raise DataError("The standard input is empty. Give a prompt with --prompt, or start the command in a terminal.")
    return text
