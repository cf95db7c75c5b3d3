"""Block-parallel rollouts (appendix F): one prefill per document, then one cached decode step per token.

S  document tokens   M  blocks   N  rollouts per block   G  tokens per rollout   V  vocabulary   R  rows of logits
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ebft.prefix.cpu import ActivationReuse
from ebft.prefix.forward import backbone_states, check_length, head_of, run_wrapped
from ebft.prefix.logps import Head, Scored, choose_tokens, with_gradient
from ebft.prefix.sampling import Softmax, Truncation, sample_tokens
from ebft.strided.layout import Documents, Part, StridedLayout, split
from ebft.strided.loss import text_logps
from ebft.strided.passes import StridedPass
from ebft.strided.tree import Draws, RolloutTree


@dataclass
class Rollouts:
    """Sampled tokens with their entropy and log-probabilities under the distribution they were sampled from.

    tokens (M, N, G) long; entropy (M, N, G) float32, in nats; logps (M, N, G) float32; text_logps: log-probabilities of
    the reference tokens selected by `documents.ce_mask`, at temperature 1 and without truncation. The last two carry
    gradients if gradients were enabled during sampling.
    """

    tokens: Tensor
    entropy: Tensor
    logps: Tensor
    text_logps: Tensor | None


def sample_rollouts(
    model: nn.Module,
    documents: Documents,
    layout: StridedLayout,
    *,
    temperature: float,
    truncation: Truncation | None = None,
    noise: Tensor | None = None,
    text_gradient: bool | None = None,
    tokens_per_pass: int | None = None,
) -> Rollouts:
    """Sample every rollout of the layout from the model's current weights, without dropout.

    noise (M, N, G): uniform random numbers in [0, 1) that determine the tokens; drawn here if None. `truncation`:
    tokens are sampled and scored under the distribution that it leaves. With `temperature` 0, the most likely token is
    selected and scored at temperature 1 among all tokens. `text_gradient`: whether the log-probabilities of the text
    are computed with (True) or without (False) a gradient; None omits them. `tokens_per_pass`: as in
    `ebft.strided.loss.score`.
    """
    if noise is None:
        noise = torch.rand(layout.num_blocks, layout.num_samples, layout.generate_max_len, device=layout.device)
    parts = split(documents, layout, tokens_per_pass)
    truncation = truncation if temperature else None

    def roll_out(causal_lm: PreTrainedModel) -> tuple[Tensor | None, ...]:
        check_length(causal_lm, int(documents.lengths.max()))
        sampled = [
            _sample_part(causal_lm, part, temperature, truncation, noise[part.blocks], text_gradient) for part in parts
        ]
        return tuple(None if xs[0] is None else torch.cat(xs) for xs in zip(*sampled))

    return Rollouts(*run_wrapped(model, roll_out))


def _sample_part(
    causal_lm: PreTrainedModel,
    part: Part,
    temperature: float,
    truncation: Truncation | None,
    noise: Tensor,
    text_gradient: bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run `sample_rollouts` for the blocks of a part, inside the model's forward; returns the fields of `Rollouts`."""
    documents, layout, head = part.documents, part.layout, head_of(causal_lm)
    by_step = noise.movedim(-1, 0)  # (G, M, N)
    if not torch.is_grad_enabled():
        drawn = _draw(causal_lm, head, part, temperature, truncation, by_step, None)
        logps = torch.cat([draws.collect(scored.logps) for draws, scored in drawn.steps])
        text = None if text_gradient is None else text_logps(drawn.text, documents, head)
        return drawn.tokens, drawn.entropy, logps.view(by_step.shape).movedim(0, -1), text
    recording = ActivationReuse(len(documents.tokens), by_step[1:].numel())
    with torch.no_grad():
        drawn = _draw(causal_lm, head, part, temperature, truncation, by_step, recording)
    torch.clear_autocast_cache()  # it contains weights that were cast without a graph
    nodes = drawn.tree.nodes(len(by_step) - 1)
    positions = documents.positions
    run = StridedPass(layout=layout, document_positions=positions, nodes=nodes, recording=recording.replayed())
    states = backbone_states(causal_lm, torch.cat([documents.tokens, nodes.tokens]), run)
    text, of_nodes = states.split([len(documents.tokens), len(nodes.tokens)])
    predicting = torch.cat([text[layout.block_index - 1], of_nodes])
    found = _with_gradient(predicting, [scored for _, scored in drawn.steps], head, temperature or 1.0, truncation)
    logps = drawn.tree.all_draws().collect(found).view(by_step.shape).movedim(0, -1)
    if text_gradient is None:
        return drawn.tokens, drawn.entropy, logps, None
    with torch.set_grad_enabled(text_gradient):
        return drawn.tokens, drawn.entropy, logps, text_logps(text, documents, head)


def _with_gradient(
    states: Tensor, steps: list[Scored], head: Head, temperature: float, truncation: Truncation | None
) -> Tensor:
    """Return the log-probabilities (rows, columns) of all steps, differentiable with respect to states (rows, D)."""
    found = []
    for _, group in groupby(steps, key=lambda scored: scored.slopes is None):
        scored = Scored.joined(list(group))
        of_group, states = states.tensor_split([len(scored.tokens)])
        found.append(with_gradient(of_group, scored, head, temperature, truncation))
    columns = max(x.shape[1] for x in found)
    return torch.cat([F.pad(x, (0, columns - x.shape[1])) for x in found])


@dataclass
class _Drawn:
    """Tokens and entropy (M, N, G), their tree, draws and scores of each step, and the documents' states (S, D)."""

    tokens: Tensor
    entropy: Tensor
    tree: RolloutTree
    steps: list[tuple[Draws, Scored]]
    text: Tensor


def _draw(
    causal_lm: PreTrainedModel,
    head: Head,
    part: Part,
    temperature: float,
    truncation: Truncation | None,
    noise: Tensor,
    recording: ActivationReuse | None,
) -> _Drawn:
    """Prefill the documents, then sample token by token, with noise (G, M, N).

    `recording` is used for a later pass with gradients.
    """
    layout, positions = part.layout, part.documents.positions
    tree = RolloutTree(layout.num_blocks, layout.num_samples, layout.merge_rollouts, noise.device)
    tokens, entropies, steps = [], [], []

    def draw(states: Tensor, noise: Tensor) -> None:
        """Sample the next token of every rollout, given the states (rows, D) that predict them."""
        draws, of_rows = tree.draws(), []
        noise = draws.spread(noise.flatten())

        def choose(softmax: Softmax, rows: slice) -> Tensor:
            if temperature == 0:
                of_rows.append(torch.zeros_like(noise[rows]))
                return softmax.most_likely().expand_as(noise[rows])
            of_rows.append(softmax.entropy().expand_as(noise[rows]))
            return sample_tokens(softmax.probabilities, noise[rows])

        # Slopes take a product for each distinct token of a row, the head in backward takes two for each row. First
        # tokens, of which each row has all samples, are often distinct.
        few = len(tree.levels) > 0 or layout.num_samples < 3
        slopes = recording is not None and few and head.gives_slopes(draws.shape[1])
        scored = choose_tokens(states, choose, head, temperature or 1.0, slopes, truncation)
        steps.append((draws, scored))
        tokens.append(draws.collect(scored.tokens))
        entropies.append(draws.collect(torch.cat(of_rows)))
        tree.grow(tokens[-1])

    of_documents = None if recording is None else recording.of_documents()
    prefill = StridedPass(layout=layout, document_positions=positions, recording=of_documents)
    text = backbone_states(causal_lm, part.documents.tokens, prefill)
    draw(text[layout.block_index - 1], noise[0])
    for of_step in noise[1:]:
        level = tree.levels[-1]
        step = StridedPass(
            layout=layout,
            document_positions=positions,
            nodes=level,
            cache=prefill.cache,
            recording=None if recording is None else recording.of_step(len(level.tokens)),
        )
        draw(backbone_states(causal_lm, level.tokens, step), of_step)
    shape = noise.shape
    return _Drawn(*(torch.stack(x).view(shape).movedim(0, -1) for x in (tokens, entropies)), tree, steps, text)


class DocumentNoise:
    """Uniform noise for each document, seeded with (seed, step, the document's tokens).

    A document therefore gets the same rollouts with any number of processes and in any micro-batch. A document that
    occurs again in the same step gets different noise.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._step: int | None = None
        self._met: Counter[bytes] = Counter()

    def draw(self, documents: Documents, layout: StridedLayout, step: int) -> Tensor:
        """Return the noise (M, N, G) in [0, 1) for the rollouts of a batch at an optimizer step."""
        if step != self._step:
            self._step, self._met = step, Counter()
        tokens, noise = documents.tokens.cpu(), []
        for (start, end), anchors in zip(layout.spans, layout.anchors):
            shape = (len(anchors), layout.num_samples, layout.generate_max_len)
            noise.append(torch.rand(shape, generator=self._generator(tokens[start:end], step)))
        return torch.cat(noise).to(layout.device)

    def _generator(self, tokens: Tensor, step: int) -> torch.Generator:
        identity = hashlib.blake2b(tokens.contiguous().numpy().tobytes(), digest_size=16).digest()
        met = self._met[identity]
        self._met[identity] += 1
        key = hashlib.blake2b(f"{self.seed}:{step}:{met}:".encode() + identity, digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
