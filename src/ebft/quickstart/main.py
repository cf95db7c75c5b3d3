"""The quickstart from start to end: model and text, measurement, fine-tuning, measurement, report."""

from dataclasses import replace
from pathlib import Path

from ebft.config.load import load_config
from ebft.features import FeatureNetwork
from ebft.models.base import load_base_model
from ebft.models.tokenizer import load_tokenizer
from ebft.quickstart import report, samples, smollm2, tiny
from ebft.quickstart.measure import held_out_documents, measure
from ebft.quickstart.next_steps import what_next
from ebft.quickstart.phases import Phases, console
from ebft.quickstart.run import CONFIGS, check_output, own_copy, show_command
from ebft.run.freed_memory import keep_freed_memory
from ebft.run.training import train

TINY = "tiny"
METHODS = {"ebft": "Energy-based fine-tuning", "sft": "Supervised fine-tuning"}
LONGEST = 48  # tokens of the completions that are shown


def quickstart(model: str, output: Path | None, seed: int, scale: str, method: str = "ebft") -> None:
    """Model and text, measurement, energy-based fine-tuning (or SFT, with `method` "sft"), measurement, report."""
    keep_freed_memory()
    title = METHODS[method]
    default = tiny.OUTPUT if model == TINY else smollm2.OUTPUT
    output = output or (default if method == "ebft" else default.with_name(f"{default.name}-{method}"))
    console.print(f"[bold]{title}, seed {seed}.[/] Everything made goes to {output}.")
    check_output(output)
    own_copy(CONFIGS / ("tiny.yaml" if model == TINY else "smollm2.yaml"), output)
    phases = Phases(count=7 if model == TINY else 6)
    if model == TINY:
        run = tiny.prepare(phases, output, seed, scale)
    else:
        run = smollm2.prepare(phases, output, seed, model, scale)
    if method == "sft":
        run = replace(run, overrides=[*run.overrides, "rl="])
    config = load_config(run.config_file, run.overrides)
    tokenizer = load_tokenizer(config)

    with phases.phase("before", "Held-out files, before"):
        policy = load_base_model(config, tokenizer)
        network = FeatureNetwork(policy, config.ebft.feature_layers, config.ebft.embed_method)
        held_out = held_out_documents(config, tokenizer, run.groups)
        prompts = samples.choose_prompts(held_out.rows, LONGEST)
        before = measure(policy, network, held_out)
        written_before = samples.complete(policy, tokenizer, prompts, LONGEST)

    with phases.phase(method, f"{title} with LoRA"):
        show_command(run.config_file, run.overrides)
        result = train(config)

    with phases.phase("after", "Held-out files, after: the same documents, noise and feature network"):
        after = measure(result.model, network, held_out)
        written_after = samples.complete(result.model, tokenizer, prompts, LONGEST)

    with phases.phase("report", f"Result, seed {seed}: {len(held_out)} documents of held-out files"):
        shown = samples.make_samples(tokenizer, prompts, written_before, written_after)
        for sample in shown:
            console.print(samples.side_by_side(sample, console.width), "", soft_wrap=False)
        console.print(report.result_table(before, after))
        samples.save_samples(shown, output / "samples.txt")
        curves = result.trainer.state.log_history
        heading = f"{title}, {model}, seed {seed}"
        report.save_curves(curves, output / "curves.png", heading, config.ebft.use_whitening)
    configs = {**run.earlier, method: config}
    report.save_summary(output / "summary.json", seed, before, after, configs, map(vars, shown), phases.seconds)
    console.print(f"All of it took {sum(phases.seconds.values()) / 60:.1f} minutes.")
    what_next(output, run, shown[0].prompt)
