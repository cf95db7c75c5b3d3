"""Where the policy gradient points: does a step of EBFT lower the held-out feature loss, by whitening, samples, length?

    python studies/smollm2/gradient_signal.py    # some hours on one CPU core

A batch's gradient g on training documents is an estimate of E[g] over documents and rollouts. It is compared with the
gradient h of the feature-matching loss itself, mean-pooled and unwhitened, on test documents with the largest number of
rollouts. From products of different batches, all without bias:

- cosine: of E[g] with E[h], where training goes in the long run;
- step_cosine: of the g of one step of 16 documents with E[h], how much of a step goes there;
- cosine_with_longest: of E[g] with E[h] of the longest rollouts, whether short rollouts serve long ones;
- share_of_signal: |E[g]|^2 / E|g|^2 of such a step.

Settings of one length share their rollouts, of which a setting of n samples takes the first n. Gradients are those of
the LoRA matrices B of the last third of the layers (the matrices A have none before the first step). The gradients of
each batch of these data are kept in OUTPUT/gradients (40 MB), so that a stopped run goes on, and one with more
--batches adds to what there is. Writes each length to results/gradient-signal-TASK-TEMPERATURE.json.

M  blocks   N  samples   G  their tokens   D  feature dimension
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

import settings
import stored
import torch
from job import without_paths
from options import parsed, scale_and_place, study_options
from run_cell import machine_card
from tables import SIGNAL_STEP
from torch import Tensor

from ebft.tools.quickstart.run import console, fingerprint

SPACES = {"unwhitened": None, "whitened": "feature", "whitened by sample": "sample"}  # the last as the paper has it
SAMPLES = (4, 8, 16, 32)
LENGTHS = (8, 16, 32)
DIVERSITY = 0.5  # of the rewards that are trained; 1 makes the gradient that of the feature-matching loss itself
HELD_OUT = "held-out loss"


def main() -> None:
    """Measure each length that is not stored yet, print and store."""
    arguments = read_arguments()
    _, place = scale_and_place(arguments)
    file = arguments.results / f"gradient-signal-{arguments.task}-{arguments.temperature:g}.json"
    about = {key: getattr(arguments, key) for key in ("task", "temperature", "batches", "documents", "longest")}
    found = stored.read(file) or {}
    if {key: found.get(key) for key in about} != about:
        found = {**about, "machine": machine_card(), "rows": {}, "lengths": {}}
    kept: dict[int, Tensor] = {}  # the held-out gradients, of which those of the longest rollouts are needed for all
    lengths = [length for length in LENGTHS if length <= arguments.longest]
    missing = [length for length in lengths if str(length) not in found["lengths"]]
    if missing:
        kept[lengths[-1]] = held_out(place, arguments, lengths[-1])
    for length in missing:
        target = kept.get(length)
        target = held_out(place, arguments, length) if target is None else target
        gradients = of_batches(place, arguments, length, "train")
        values = {
            name: statistics(own, target, kept[lengths[-1]], arguments.documents) for name, own in gradients.items()
        }
        found["rows"][str(length)] = rows_of(place, arguments, length)
        found["lengths"][str(length)] = values
        stored.write_json(file, stored.rounded(found))
        for name, row in values.items():
            shown = "  ".join(f"{key} {value:.4g}" for key, value in row.items())
            console.print(f"{length:3d} tokens, {name:28s}", shown, highlight=False)
    console.print(f"Stored: {file}")


def rows_of(place: settings.Place, arguments: argparse.Namespace, length: int) -> dict[str, int]:
    """How many rows of each part are long enough for rollouts of this length."""
    return {part: len(loaded(place, arguments, length, part)[2]) for part in ("train", "test")}


def held_out(place: settings.Place, arguments: argparse.Namespace, length: int) -> Tensor:
    """The gradient (batches, parameters) of the feature-matching loss on test documents."""
    return of_batches(place, arguments, length, "test")[HELD_OUT]


def of_batches(place: settings.Place, arguments: argparse.Namespace, length: int, part: str) -> dict[str, Tensor]:
    """The gradient (batches, parameters) of each loss on documents of a part: `test` has that of HELD_OUT alone."""
    data = place.data(arguments.task, part).read_text(encoding="utf-8")
    made_from = fingerprint([str(place.base_model), data, without_paths("ebft")])[:8]
    name = f"{arguments.task}-{arguments.temperature:g}-{part}-{length}-{arguments.documents}-{made_from}"
    files = [place.output / "gradients" / name / f"{batch}.pt" for batch in range(arguments.batches)]
    missing = [batch for batch, file in enumerate(files) if not file.exists()]
    if missing:
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for batch, gradients in computed(place, arguments, length, part, missing):
            torch.save(gradients, files[batch].with_suffix(".tmp"))
            files[batch].with_suffix(".tmp").rename(files[batch])
            console.print(f"{length} tokens, {part}: batch {batch + 1} of {arguments.batches}")
    batches = [torch.load(file, weights_only=True) for file in files]
    return {name: torch.stack([batch[name] for batch in batches]) for name in batches[0]}


def computed(
    place: settings.Place, arguments: argparse.Namespace, length: int, part: str, batches: list[int]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The gradient (parameters) of each loss on some batches, which depends on the batch's number alone."""
    from ebft.data.batches import DocumentCollator
    from ebft.features import FeatureNetwork
    from ebft.models.adapter import attach_adapter
    from ebft.models.load import load_base_model
    from ebft.prefix.forward import prepare

    config, tokenizer, rows = loaded(place, arguments, length, part)
    torch.manual_seed(0)
    model = attach_adapter(load_base_model(config, tokenizer), config)
    network = FeatureNetwork(model, config.ebft.feature_layers, "mean_pooling")
    prepare(model)
    parameters = last_third(model)
    collate = DocumentCollator(tokenizer.pad_token_id)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()  # rows are sorted by length
    for batch in batches:
        torch.manual_seed(batch)
        numbers = order[batch * arguments.documents : (batch + 1) * arguments.documents]
        inputs = collate([rows[number] for number in numbers])
        values = losses(model, network, inputs, config.ebft, part == "test")
        yield (
            batch,
            {
                name: torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters, retain_graph=True)])
                for name, loss in values.items()
            },
        )


def loaded(place: settings.Place, arguments: argparse.Namespace, length: int, part: str) -> tuple[Any, Any, list[Any]]:
    """Config, tokenizer and rows of a part for rollouts of this length."""
    from ebft import load_config
    from ebft.data.load import load_datasets
    from ebft.models.tokenizer import load_tokenizer

    temperature = arguments.temperature if part == "train" else 1.0
    options = [f"base_model={place.base_model}", f"datasets.0.path={place.data(arguments.task, part)}"]
    options += [f"datasets.0.type={settings.RAW_ROWS}"] if arguments.task == "raw" else []
    options += ["torch_dtype=float32"]  # which every processor computes in about as fast
    options += [f"ebft.temperature={temperature}", f"ebft.generate_max_len={length}", f"ebft.stride={length}"]
    config = load_config(settings.config_file("ebft"), [*options, f"ebft.n_samples_per_prompt={max(SAMPLES)}"])
    tokenizer = load_tokenizer(config)
    return config, tokenizer, load_datasets(config, tokenizer)[0]


def losses(model: Any, network: Any, inputs: dict[str, Tensor], options: Any, is_held_out: bool) -> dict[str, Tensor]:
    """The policy-gradient loss of each setting, or of the feature-matching loss itself, on one draw of rollouts."""
    from ebft.anchors import BlockOptions
    from ebft.features import pool, token_features
    from ebft.strided.embed import layout_states
    from ebft.strided.layout import Documents, StridedLayout
    from ebft.strided.loss import policy_gradient_loss
    from ebft.strided.rollout import sample_rollouts

    documents = Documents.from_inputs(inputs)
    layout = StridedLayout.place(documents, BlockOptions.of(options, (), None))
    rollouts = sample_rollouts(model, documents, layout, temperature=options.temperature)
    with torch.no_grad():
        features = token_features(layout_states(network, documents, layout, rollouts.tokens))
        phi_ref = pool(features[layout.reference_index()], "mean_pooling")  # (M, D)
        phi = pool(features[len(documents.tokens) :].unflatten(0, rollouts.tokens.shape), "mean_pooling")  # (M, N, D)
    loss = lambda n, advantages: policy_gradient_loss(advantages, rollouts.logps[:, :n], advantages.numel())
    if is_held_out:
        return {HELD_OUT: loss(phi.shape[1], advantages_of(phi, phi_ref, None, 1.0))}
    return {
        f"{title}, n = {n}": loss(n, advantages_of(phi[:, :n], phi_ref, space, DIVERSITY))
        for title, space in SPACES.items()
        for n in SAMPLES
    }


def advantages_of(phi: Tensor, phi_ref: Tensor, space: Any, coefficient: float) -> Tensor:
    """Advantages (M, N) of samples."""
    from ebft.rewards import alignment_rewards, compute_advantages, diversity_rewards, whiten

    if space is not None:
        phi, phi_ref = whiten(phi, phi_ref, space)
    diversity = coefficient * diversity_rewards(phi)
    return compute_advantages(alignment_rewards(phi, phi_ref) - diversity, "rloo", diversity=diversity)


def last_third(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The LoRA matrices B of the last third of the layers; the other parameters are frozen."""
    layer_of = {name: int(re.search(r"\.layers\.(\d+)\.", name)[1]) for name, _ in trainable(model)}
    first = (max(layer_of.values()) + 1) * 2 // 3
    for name, parameter in trainable(model):
        parameter.requires_grad_(layer_of[name] >= first)
    return [parameter for name, parameter in trainable(model) if "lora_B" in name]


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters that have a gradient."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def statistics(own: Tensor, target: Tensor, longest: Tensor, documents: int) -> dict[str, float]:
    """What the docstring of this file lists, and the jackknife error of each over batches, as NAME_error.

    Cosines are NaN where a gradient has no signal; they may exceed 1.
    """
    count = len(own)
    without = [
        estimates(*(torch.cat([part[:one], part[one + 1 :]]) for part in (own, target, longest)), documents)
        for one in range(count)
    ]
    found = estimates(own, target, longest, documents)
    for name in tuple(found):
        values = torch.tensor([part[name] for part in without], dtype=torch.float64)
        found[f"{name}_error"] = ((count - 1) * values.var(correction=0)).sqrt().item()
    return found


def estimates(own: Tensor, target: Tensor, longest: Tensor, documents: int) -> dict[str, float]:
    """`statistics` without errors, from gradients (batches, parameters)."""
    signal, of_target = unbiased_product(own, own), unbiased_product(target, target)
    # Noise falls with the number of documents, which are independent.
    squares = signal + (own.square().sum(1).mean().item() - signal) * documents / SIGNAL_STEP
    product = (own.mean(0) @ target.mean(0)).item()  # of other documents, so without bias
    return {
        "cosine": cosine(product, signal, of_target),
        "step_cosine": cosine(product, squares, of_target),
        "cosine_with_longest": cosine(
            (own.mean(0) @ longest.mean(0)).item(), signal, unbiased_product(longest, longest)
        ),
        "share_of_signal": signal / squares,
    }


def cosine(product: float, square: float, other: float) -> float:
    """<a, b> / (|a| |b|); NaN where an estimated square is not positive."""
    return product / (square * other) ** 0.5 if min(square, other) > 0 else float("nan")


def unbiased_product(a: Tensor, b: Tensor) -> float:
    """<E[a], E[b]> from batches (batches, parameters), by the products of different batches."""
    count = len(a)
    return ((a.sum(0) @ b.sum(0) - (a * b).sum()) / (count * (count - 1))).item()


def read_arguments() -> argparse.Namespace:
    """Task, sampling, how many batches, and folders."""
    parser = study_options(__doc__, "--model")
    parser.add_argument("--task", choices=("functions", "translation", "raw"), default="translation")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the rollouts of training (default 1)")
    parser.add_argument("--batches", type=int, default=40, help="gradients of each loss (default 40)")
    parser.add_argument("--documents", type=int, default=2, help="documents of a gradient (default 2)")
    parser.add_argument("--longest", type=int, choices=LENGTHS, default=LENGTHS[-1], help="tokens of the longest")
    arguments = parsed(parser)
    if arguments.batches < 3:
        parser.error(f"--batches {arguments.batches} is below 3: errors of estimates without bias need three batches")
    return arguments


if __name__ == "__main__":
    main()
