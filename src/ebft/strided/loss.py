"""The features of a layout and its log-probabilities, in one pass each, and the two terms of the loss.

S  document tokens   M  blocks   N  rollouts per block   G  tokens per rollout
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ebft.features import FeatureNetwork, pool, token_features
from ebft.machine import copy_to
from ebft.monitor.metrics import read_numbers
from ebft.prefix.forward import ROWS, backbone_states, head_of, prepare, run_wrapped, way_of
from ebft.prefix.logps import Head, token_logps
from ebft.prefix.sampling import Truncation
from ebft.strided.layout import Documents, Part, StridedLayout, split
from ebft.strided.passes import RolloutTree, StridedPass


def embed_blocks(
    network: FeatureNetwork,
    documents: Documents,
    layout: StridedLayout,
    rollouts: Tensor,
    *,
    tokens_per_pass: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the embeddings of the rollouts, (M, N, D), and of the reference blocks, (M, D), in float32.

    `rollouts` is (M, N, G). Runs one forward pass over [documents | rollouts]. The states of a reference block are
    the document's, which attend to the same prefix as the rollouts. Embeddings are of the tokens up to the end of the
    text.
    """
    lengths = [rollouts.shape[-1]]
    return embed_prefixes(network, documents, layout, rollouts, lengths, tokens_per_pass=tokens_per_pass)[0]


def embed_prefixes(
    network: FeatureNetwork,
    documents: Documents,
    layout: StridedLayout,
    rollouts: Tensor,
    lengths: list[int],
    *,
    tokens_per_pass: int | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Return `embed_blocks` of at most the first `lengths[i]` tokens of every block, for each i, from a single pass.

    A token's states do not depend on later tokens, so the states of a shorter rollout begin the states of a longer
    one.
    """
    generated: list[list[Tensor]] = [[] for _ in lengths]
    reference: list[list[Tensor]] = [[] for _ in lengths]
    for part in split(documents, layout, tokens_per_pass):
        tokens = rollouts[part.blocks]
        features = token_features(layout_states(network, part.documents, part.layout, tokens))
        of_documents, of_rollouts = features.split([len(part.documents.tokens), tokens.numel()])
        references = part.layout.reference_index()
        for found, states, ids in (
            (reference, of_documents[references.to(features.device)], part.documents.tokens[references]),
            (generated, of_rollouts.unflatten(0, tokens.shape), tokens),
        ):
            until_end = part.layout.lengths(ids).to(features.device) if part.layout.end_ids else None
            for index, length in enumerate(lengths):
                kept = None if until_end is None else until_end.clamp_max(length)
                found[index].append(pool(states[..., :length, :], network.embed_method, kept))
    home = rollouts.device  # the feature network may be on another device
    found = [[torch.cat(phi), torch.cat(phi_ref)] for phi, phi_ref in zip(generated, reference)]
    if network.device.type == "cpu":
        found = [copy_to(home, *pair) for pair in found]
    return [(phi.to(home), phi_ref.to(home)) for phi, phi_ref in found]


def layout_states(
    network: FeatureNetwork, documents: Documents, layout: StridedLayout, rollouts: Tensor
) -> list[Tensor]:
    """Return the hidden states of [documents | rollouts] at each feature depth: (S + M * N * G, hidden size) each.

    They are on the feature network's device.
    """
    device = network.device
    documents, layout = documents.to(device), layout.to(device)
    prepare(network.causal_lm, may_run_rows=True)
    nodes = RolloutTree.of(rollouts.to(device), layout.merge_rollouts).nodes(rollouts.shape[-1])
    tokens = torch.cat([documents.tokens, nodes.tokens])
    run = StridedPass(layout=layout, document_positions=documents.positions, nodes=nodes)
    if way_of(network.causal_lm) == ROWS:
        states = network.plain_hidden_states(run.rows(tokens))
    else:
        states = network.hidden_states(
            lambda model: run_wrapped(model, lambda causal_lm: backbone_states(causal_lm, tokens, run)[None])
        )
    s, states = len(documents.tokens), [run.of_tokens(x) for x in states]
    return [torch.cat([x[:s], x[s:][nodes.of_rollouts.flatten()]]) for x in states]


def score(
    model: nn.Module,
    documents: Documents,
    layout: StridedLayout,
    rollouts: Tensor,
    *,
    temperature: float,
    truncation: Truncation | None = None,
    text_gradient: bool,
    apply_dropout: bool,
    tokens_per_pass: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one forward pass over [documents | rollouts] through `model`, which may be wrapped (DDP, FSDP, PEFT).

    With `tokens_per_pass`, the batch is split into several forward passes of at most that many rollout tokens each,
    together with the documents they need. These are recomputed in backward one at a time, so that only one pass
    holds its activations in memory.

    Returns the log-probabilities of the rollouts (M, N, G) at `temperature`, under the distribution that `truncation`
    leaves, to which their tokens belong (rounding could exclude them), and 0 after the end of a rollout; and at
    temperature 1 the log-probabilities of the reference tokens selected by `documents.ce_mask`. Both are in float32.
    The last token of a rollout is scored but is not an input of the forward pass.
    """
    parts = split(documents, layout, tokens_per_pass)

    def of_part(causal_lm: PreTrainedModel, part: Part) -> tuple[Tensor, Tensor]:
        documents, layout, sampled = part.documents, part.layout, rollouts[part.blocks]
        # With dropout, the states of equal tokens differ.
        tree = RolloutTree.of(sampled, layout.merge_rollouts and not apply_dropout)
        nodes = tree.nodes(sampled.shape[-1] - 1)
        run = StridedPass(
            layout=layout, document_positions=documents.positions, nodes=nodes, apply_dropout=apply_dropout
        )
        states = backbone_states(causal_lm, torch.cat([documents.tokens, nodes.tokens]), run)
        text, of_nodes = states.split([len(documents.tokens), len(nodes.tokens)])
        # A rollout's first token is predicted at document position a_b - 1, each later token at the token before it.
        draws, by_step, head = tree.all_draws(), sampled.movedim(-1, 0), head_of(causal_lm)
        predicting = torch.cat([text[layout.block_index - 1], of_nodes])
        several = None if tree.merge else layout.num_blocks  # without merging, nodes draw one token each
        found = token_logps(predicting, draws.spread(by_step.flatten()), head, temperature, truncation, several)
        logps = draws.collect(found).view(by_step.shape).movedim(0, -1)
        with torch.set_grad_enabled(text_gradient and torch.is_grad_enabled()):
            return logps, text_logps(text, documents, head)

    def forward(causal_lm: PreTrainedModel) -> tuple[Tensor, Tensor]:
        recomputes = len(parts) > 1 and torch.is_grad_enabled()
        run = partial(checkpoint, of_part, use_reentrant=False) if recomputes else of_part
        logps, text = (torch.cat(values) for values in zip(*(run(causal_lm, part) for part in parts)))
        return layout.up_to_end(logps, rollouts), text

    return run_wrapped(model, forward)


def text_logps(states: Tensor, documents: Documents, head: Head) -> Tensor:
    """Return the log-probabilities of the document tokens selected by `ce_mask`, from hidden states (S, D)."""
    predicted = documents.predicted
    return token_logps(states[predicted - 1], documents.tokens[predicted, None], head, 1.0).squeeze(-1)


def policy_gradient_loss(advantages: Tensor, logps: Tensor, num_tokens: Tensor | int) -> Tensor:
    """Return `rl_loss`, the REINFORCE loss `-(A logp).sum() / num_tokens` (appendix F).

    advantages (M, N), logps (M, N, G). The advantages are detached.
    """
    return -(advantages.detach().unsqueeze(-1) * logps).sum() / num_tokens


def cross_entropy_loss(logps: Tensor, num_tokens: Tensor | int) -> Tensor:
    """Return `ce_loss`, the mean negative log-likelihood of the reference text, from its log-probabilities."""
    return -logps.sum() / num_tokens


class TermGradients:
    """Gradients of the terms of a loss, summed over the micro-batches of an optimizer step.

    The parameters' `.grad` is not changed: hooks that accumulate or reduce gradients (such as DDP's) do not run, and
    the graph is retained for the backward pass of the loss.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._sums: dict[str, list[Tensor]] = {}

    def add(self, **terms: Tensor) -> None:
        """Accumulate the gradient of each scalar term under its name. A term without a graph adds nothing."""
        for name, term in terms.items():
            sums = self._sums.setdefault(name, [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters])
            if not term.requires_grad:
                continue
            with torch.autocast(term.device.type, enabled=False):
                grads = torch.autograd.grad(term, self._parameters, retain_graph=True, allow_unused=True)
            for total, grad in zip(sums, grads):
                if grad is not None:
                    total += grad

    def drain(self, accelerator: Any) -> dict[str, float]:
        """Return the norm of each term's gradient over all parameters, with gradients summed over ranks, and reset."""
        squares = {
            name: [accelerator.reduce(total, "sum").double().square().sum() for total in sums]
            for name, sums in self._sums.items()
        }
        self._sums.clear()
        numbers = iter(read_numbers([number for of_term in squares.values() for number in of_term]))
        return {name: sum(next(numbers) for _ in of_term) ** 0.5 for name, of_term in squares.items()}
