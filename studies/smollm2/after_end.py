"""What long rollouts measure after the end token: their feature-matching loss as the study has it, and up to the end.

    python studies/smollm2/after_end.py --task translation --model MODEL ...  # folders of outputs/study/smollm2/models

The study's long rollouts continue after an end token. Here the same rollouts, of the same noise, are also pooled over
their tokens up to that token and no further. A minute or two for each model on a CPU core. Writes
results/after-end-TASK.json, and prints it.

M  documents   N  rollouts of one   G  their tokens   D  feature dimension
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import settings
import stored
import torch
from cells import planned
from options import parsed, scale_and_place, study_options
from run_cell import machine_card
from scale import Scale
from settings import Place
from torch import Tensor

from ebft.tools.quickstart.run import console


def main() -> None:
    """Measure every model, print and store."""
    arguments = read_arguments()
    scale, place = scale_and_place(arguments)
    found = {}
    for model in arguments.model:
        name = Path(model).name
        found[name] = measure(model, place, scale, arguments.task)
        for metric, by_length in found[name].items():
            console.print(f"{name}  {metric:16s}", "  ".join(f"{n}: {v:.4f}" for n, v in by_length.items()))
    file = arguments.results / f"after-end-{arguments.task}.json"
    stored.write_json(file, stored.rounded({"task": arguments.task, "machine": machine_card(), "models": found}))
    console.print(f"Stored: {file}")


def measure(model: str, place: Place, scale: Scale, task: str) -> dict[str, dict[int, float]]:
    """By length: the share of rollouts that end within it, the loss of all their tokens, and of those up to the end."""
    from ebft import load_config
    from ebft.data.batches import DocumentCollator
    from ebft.models.tokenizer import load_tokenizer
    from ebft.scores import curve_lengths
    from ebft.strided.rollout import DocumentNoise
    from ebft.tools.evaluation.models import load_subject
    from ebft.tools.evaluation.task import load_held_out

    cell = planned(task, "base", "none", 0)
    config = load_config(settings.config_file("evaluation"), settings.evaluation_overrides(place, scale, cell, "long"))
    tokenizer = load_tokenizer(config)
    rows, subject = load_held_out(config, tokenizer).rows, load_subject(config, model, tokenizer)
    collate, noise = DocumentCollator(tokenizer.pad_token_id), DocumentNoise(config.seed)
    lengths = curve_lengths(config.ebft.generate_max_len)
    parts: list[dict[str, Tensor]] = []
    for first in range(0, len(rows), config.micro_batch_size):  # other batches would round otherwise
        inputs = collate([rows[number] for number in range(len(rows))[first : first + config.micro_batch_size]])
        parts.append(losses(*rolled_out(subject, config, inputs, noise), tokenizer.eos_token_id, lengths))
    means = {name: torch.cat([part[name] for part in parts]).mean(0).tolist() for name in parts[0]}
    return {name: dict(zip(lengths, values)) for name, values in means.items()}


@torch.no_grad()
def rolled_out(subject: Any, config: Any, inputs: dict[str, Tensor], noise: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rollouts (M, N, G) of a batch with the study's noise, their features (M, N, G, D) and the references' (M, G, D).

    Documents that are too short for one have none.
    """
    from ebft.anchors import BlockOptions
    from ebft.features import token_features
    from ebft.models.causal_lm import evaluating, unwrap_adapter
    from ebft.prefix.forward import prepare
    from ebft.strided.embed import layout_states
    from ebft.strided.layout import Documents, StridedLayout
    from ebft.strided.rollout import sample_rollouts

    policy, documents = unwrap_adapter(subject.policy), Documents.from_inputs(inputs)
    prepare(policy)
    options = BlockOptions.of(config.ebft, (), None)
    options = replace(options, n_samples_per_prompt=config.evaluation.samples, merge_rollouts=None)
    layout = StridedLayout.place(documents, options)
    with evaluating(policy):
        drawn = noise.draw(documents, layout, step=0)
        temperature = config.evaluation.temperature
        tokens = sample_rollouts(policy, documents, layout, temperature=temperature, noise=drawn).tokens
        features = token_features(layout_states(subject.network, documents, layout, tokens))
    of_rollouts = features[len(documents.tokens) :].unflatten(0, tokens.shape)
    return tokens, of_rollouts, features[layout.reference_index()]


def losses(tokens: Tensor, features: Tensor, reference: Tensor, end_id: int, lengths: list[int]) -> dict[str, Tensor]:
    """Of each document and length (M, lengths): the share of ended rollouts, and the loss of all tokens and to the end.

    A rollout counts with its end token, as references do, and one without with all its tokens.
    """
    from ebft.features import pool
    from ebft.rewards import unbiased_cfm_loss

    kept = tokens_to_end(tokens, end_id)
    found: dict[str, list[Tensor]] = {"ended": [], "cfm_loss": [], "cfm_loss_to_end": []}
    for length in lengths:
        of_reference = pool(reference[:, :length], "mean_pooling")
        whole = pool(features[:, :, :length], "mean_pooling")
        is_kept = torch.arange(length) < kept[..., None]  # (M, N, length)
        to_end = pool(features[:, :, :length] * is_kept[..., None], "mean_pooling")  # normalised, so a sum will do
        found["ended"].append((tokens[..., :length] == end_id).any(-1).float().mean(-1))
        found["cfm_loss"].append(unbiased_cfm_loss(whole, of_reference))
        found["cfm_loss_to_end"].append(unbiased_cfm_loss(to_end, of_reference))
    return {name: torch.stack(values, -1) for name, values in found.items()}


def tokens_to_end(tokens: Tensor, end_id: int) -> Tensor:
    """How many tokens of each rollout (M, N, G) there are up to its first end token, that one included: (M, N)."""
    is_end = tokens == end_id
    return torch.where(is_end.any(-1), is_end.int().argmax(-1) + 1, tokens.shape[-1])


def read_arguments() -> argparse.Namespace:
    """Task, models, and folders."""
    parser = study_options(__doc__)
    parser.add_argument("--task", choices=("functions", "translation", "raw"), default="functions")
    parser.add_argument(
        "--model", nargs="+", required=True, help="folders of trained adapters, or the pretrained model"
    )
    return parsed(parser)


if __name__ == "__main__":
    main()
