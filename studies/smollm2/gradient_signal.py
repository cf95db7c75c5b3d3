"""How much of each policy gradient is signal: rewards of different features, estimators and whitening, on one start.

    python studies/smollm2/gradient_signal.py                   # about 20 minutes on two CPU cores
    python studies/smollm2/gradient_signal.py --temperature 0.6

A batch's gradient g is an estimate of its mean E[g] over documents and rollouts. From many batches, products of
different ones estimate |E[g]|^2 without bias, and the share |E[g]|^2 / E|g|^2 says how much of a step points the same
way each time. The rewards are compared on the same rollouts, so that differences between them are not luck of the draw.
Gradients are those of the LoRA matrices B of the last third of the layers (the matrices A have none before the first
step). Writes results/gradient-signal-TASK-TEMPERATURE.json, and prints it as a table.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import settings
import stored
import torch
from options import scale_and_place, study_options
from run_cell import machine_card
from torch import Tensor

from ebft.tools.quickstart.run import console

# Reward -> embed_method, whitening_space (None: unwhitened), advantage_estimator, diversity_coef.
REWARDS = {
    "mean, whitened": ("mean_pooling", "feature", "rloo", 0.5),
    "mean, whitened by sample": ("mean_pooling", "sample", "rloo", 0.5),
    "mean": ("mean_pooling", None, "rloo", 0.5),
    "mean, diversity 1": ("mean_pooling", None, "rloo", 1.0),  # the gradient of the feature-matching loss itself
    "mean, group_norm": ("mean_pooling", None, "group_norm", 0.5),
    "last token, whitened": ("last_token", "feature", "rloo", 0.5),
    "last token, whitened by sample": ("last_token", "sample", "rloo", 0.5),  # the paper's recipe
    "last token": ("last_token", None, "rloo", 0.5),
}
CROSS_ENTROPY = "cross-entropy"


def main() -> None:
    """Measure, print and store."""
    arguments = read_arguments()
    _, place = scale_and_place(arguments)
    gradients = measure(place, arguments)
    found = {name: statistics(gradients, name) for name in gradients}
    for name, values in found.items():
        console.print(f"{name:32s}", "  ".join(f"{key} {value:.4g}" for key, value in values.items()), highlight=False)
    about = {"task": arguments.task, "temperature": arguments.temperature, "batches": arguments.batches}
    about |= {"documents_per_batch": arguments.documents, "machine": machine_card()}
    file = arguments.results / f"gradient-signal-{arguments.task}-{arguments.temperature:g}.json"
    stored.write_json(file, stored.rounded({**about, "gradients": found}))
    console.print(f"Stored: {file}")


def measure(place: settings.Place, arguments: argparse.Namespace) -> dict[str, Tensor]:
    """The gradient (batches, parameters) of each loss on batches of training documents."""
    from ebft import load_config
    from ebft.data.batches import DocumentCollator
    from ebft.data.load import load_datasets
    from ebft.features import FeatureNetwork
    from ebft.models.adapter import attach_adapter
    from ebft.models.load import load_base_model
    from ebft.models.tokenizer import load_tokenizer
    from ebft.prefix.forward import prepare

    paths = [f"base_model={place.base_model}", f"datasets.0.path={place.data(arguments.task, 'train')}"]
    rows_of_text = [f"datasets.0.type={settings.RAW_ROWS}"] if arguments.task == "raw" else []
    options = [*paths, *rows_of_text, f"ebft.temperature={arguments.temperature}"]
    config = load_config(settings.config_file("ebft"), options)
    tokenizer = load_tokenizer(config)
    rows, _ = load_datasets(config, tokenizer)
    torch.manual_seed(0)
    model = attach_adapter(load_base_model(config, tokenizer), config)
    network = FeatureNetwork(model, config.ebft.feature_layers, "mean_pooling")
    prepare(model)
    parameters = last_third(model)
    collate = DocumentCollator(tokenizer.pad_token_id)
    found: dict[str, list[Tensor]] = {}
    for batch in range(arguments.batches):
        first = batch * arguments.documents
        inputs = collate([rows[first + row] for row in range(arguments.documents)])
        for name, loss in losses(model, network, inputs, config.ebft).items():
            gradient = torch.autograd.grad(loss, parameters, retain_graph=True)
            found.setdefault(name, []).append(torch.cat([part.flatten() for part in gradient]))
        console.print(f"batch {batch + 1} of {arguments.batches}")
    return {name: torch.stack(batches) for name, batches in found.items()}


def losses(model: Any, network: Any, inputs: dict[str, Tensor], options: Any) -> dict[str, Tensor]:
    """The cross-entropy, and the policy-gradient loss of each of `REWARDS`, on one draw of rollouts."""
    from ebft.anchors import BlockOptions
    from ebft.features import pool, token_features
    from ebft.rewards import alignment_rewards, compute_advantages, diversity_rewards, whiten
    from ebft.strided.embed import layout_states
    from ebft.strided.layout import Documents, StridedLayout
    from ebft.strided.loss import cross_entropy_loss, policy_gradient_loss
    from ebft.strided.rollout import sample_rollouts

    documents = Documents.from_inputs(inputs)
    layout = StridedLayout.place(documents, BlockOptions.of(options))
    rollouts = sample_rollouts(model, documents, layout, temperature=options.temperature, text_gradient=True)
    found = {CROSS_ENTROPY: cross_entropy_loss(rollouts.text_logps, documents.ce_mask.sum())}
    with torch.no_grad():
        features = token_features(layout_states(network, documents, layout, rollouts.tokens))
        of_reference = features[layout.reference_index()]
        of_rollouts = features[len(documents.tokens) :].unflatten(0, rollouts.tokens.shape)
    for name, (embed_method, space, estimator, coefficient) in REWARDS.items():
        phi, phi_ref = pool(of_rollouts, embed_method), pool(of_reference, embed_method)
        if space is not None:
            phi, phi_ref = whiten(phi, phi_ref, space)
        diversity = coefficient * diversity_rewards(phi)
        rewards = alignment_rewards(phi, phi_ref) - diversity
        advantages = compute_advantages(rewards, estimator, diversity=diversity, rloo_baseline="independent")
        found[name] = policy_gradient_loss(advantages, rollouts.logps, layout.num_generated)
    return found


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


def statistics(gradients: dict[str, Tensor], name: str) -> dict[str, float]:
    """Of the gradient `name`: its norm in a batch, the share of signal, and the cosine of E[g] with cross-entropy's.

    The cosine is NaN where no signal was found. Estimates without bias may be below 0 or above 1.
    """
    own, other = gradients[name], gradients[CROSS_ENTROPY]
    norm = own.square().sum(1).mean().sqrt().item()
    squares = unbiased_product(own, own), unbiased_product(other, other)
    cosine = unbiased_product(own, other) / (squares[0] * squares[1]) ** 0.5 if min(squares) > 0 else float("nan")
    return {"norm": norm, "share_of_signal": squares[0] / norm**2, "cosine_with_cross_entropy": cosine}


def unbiased_product(a: Tensor, b: Tensor) -> float:
    """<E[a], E[b]> from batches (batches, parameters), by the products of different batches."""
    count = len(a)
    return ((a.sum(0) @ b.sum(0) - (a * b).sum()) / (count * (count - 1))).item()


def read_arguments() -> argparse.Namespace:
    """Task, sampling, how many batches, and folders."""
    parser = study_options(__doc__, "--model")
    parser.add_argument("--task", choices=("functions", "translation", "raw"), default="functions")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the rollouts (default 1)")
    parser.add_argument("--batches", type=int, default=40, help="gradients of each loss (default 40)")
    parser.add_argument("--documents", type=int, default=4, help="documents of a gradient (default 4)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
