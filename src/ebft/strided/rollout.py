"""Block-parallel rollouts (appendix F): one prefill per document, then one cached decode step per token.

S  document tokens   M  blocks   N  rollouts per block   G  tokens per rollout   V  vocabulary   R  rows of logits
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ebft.machine import copy_to
from ebft.models.sharding import is_sharded
from ebft.prefix import gpu
from ebft.prefix.cpu import ActivationReuse
from ebft.prefix.forward import ATTENTION, backbone_states, check_length, head_of, run_wrapped, way_of
from ebft.prefix.logps import Scored, choose_tokens, with_gradient
from ebft.prefix.sampling import Softmax, Truncation, sample_tokens
from ebft.strided.layout import Documents, Part, StridedLayout, split
from ebft.strided.loss import text_logps
from ebft.strided.passes import Draws, Level, Nodes, RegularDraws, RolloutTree, StridedPass


@dataclass
class Rollouts:
    """Sampled tokens with their entropy and log-probabilities under the distribution they were sampled from.

    tokens (M, N, G) long, the end token repeated after the end of a rollout; entropy (M, N, G) float32, in nats; logps
    (M, N, G) float32; both are 0 after the end. text_logps: log-probabilities of the reference tokens selected by
    `documents.ce_mask`, at temperature 1 and without truncation. The last two carry gradients if gradients were enabled
    during sampling.
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
        with gpu.cheap_adapters(causal_lm):
            sampled = [
                _sample_part(causal_lm, part, temperature, truncation, noise[part.blocks], text_gradient)
                for part in parts
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
    documents, by_step = part.documents, noise.movedim(-1, 0)  # (G, M, N)
    differentiates = torch.is_grad_enabled()
    reuse = ActivationReuse(len(documents.tokens), by_step[1:].numel()) if differentiates else None
    sampler = BlockSampler(causal_lm, part, temperature, truncation, reuse)
    with torch.no_grad():
        text = sampler.run(by_step)
    if reuse is None:
        logps = torch.cat([draws.collect(scored.logps) for draws, scored in sampler.steps])
    else:
        torch.clear_autocast_cache()  # it contains weights that were cast without a graph
        nodes = sampler.tree.nodes(len(by_step) - 1)
        states = backbone_states(
            causal_lm, torch.cat([documents.tokens, nodes.tokens]), sampler.forward_pass(nodes, reuse.replayed())
        )
        text, of_nodes = states.split([len(documents.tokens), len(nodes.tokens)])
        logps = sampler.tree.all_draws().collect(sampler.with_gradient(torch.cat([sampler.before(text), of_nodes])))
    if text_gradient is None:
        scored_text = None
    else:
        with torch.set_grad_enabled(text_gradient and differentiates):
            scored_text = text_logps(text, documents, sampler.head)
    tokens, entropy, logps = (
        values.view(by_step.shape).movedim(0, -1)
        for values in (torch.cat(sampler.tokens), torch.cat(sampler.entropies), logps)
    )
    return tokens, part.layout.up_to_end(entropy, tokens), part.layout.up_to_end(logps, tokens), scored_text


class BlockSampler:
    """Samples the rollouts of a part token by token: one prefill, then one cached pass per token.

    tokens, entropies: (R,) of each step; steps: its draws, and their scores by row and column; tree: the rollouts so
    far. `reuse` records the matrix products for a later pass with gradients.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        part: Part,
        temperature: float,
        truncation: Truncation | None,
        reuse: ActivationReuse | None = None,
    ):
        self.causal_lm, self.head, self.part, self.reuse = causal_lm, head_of(causal_lm), part, reuse
        self.is_greedy, self.temperature, self.truncation = temperature == 0, temperature or 1.0, truncation
        layout = part.layout
        self.tree = RolloutTree(layout.num_blocks, layout.num_samples, layout.merge_rollouts, layout.device)
        self.tokens: list[Tensor] = []
        self.entropies: list[Tensor] = []
        self.steps: list[tuple[Draws | RegularDraws, Scored]] = []

    def run(self, noise: Tensor) -> Tensor:
        """Sample all tokens, given noise (G, M, N), and return the documents' states (S, D)."""
        reuse = self.reuse
        prefill = self.forward_pass(None, None if reuse is None else reuse.of_documents())
        text = backbone_states(self.causal_lm, self.part.documents.tokens, prefill)
        self._draw(self.before(text), noise[0])

        def decode(tokens: Tensor, step: int | Tensor) -> Tensor:
            level = replace(self.tree.levels[-1], tokens=tokens, step=step)
            reused = None if reuse is None else reuse.of_step(len(tokens))
            return backbone_states(self.causal_lm, tokens, self.forward_pass(level, reused, prefill))

        layout, recorded, places = self.part.layout, None, torch.arange(len(noise), device=noise.device)
        may_record = layout.cuda_graphs and gpu.can_record(layout.device) and not layout.merge_rollouts
        may_record &= reuse is None and way_of(self.causal_lm) == ATTENTION and not is_sharded(self.causal_lm)
        for step, of_step in enumerate(noise[1:]):
            tokens, place = self.tree.levels[-1].tokens, places[step : step + 1]
            # The first pass, which runs as usual, makes the tiles. With sliding windows, every pass makes its own.
            if step == 1 and may_record and "moves" not in prefill.kept:
                recorded = gpu.Recording(decode, tokens, place)
            self._draw(decode(tokens, step) if recorded is None else recorded(tokens, place), of_step)
        return text

    def forward_pass(self, nodes: Level | Nodes | None, reuse: Any, prefill: StridedPass | None = None) -> StridedPass:
        """Return a pass over the part's documents, over a level of rollouts after the `prefill`, or over both."""
        layout, positions = self.part.layout, self.part.documents.positions
        shared = {} if prefill is None else {"cache": prefill.cache, "kept": prefill.kept}
        return StridedPass(layout=layout, document_positions=positions, nodes=nodes, reuse=reuse, **shared)

    def before(self, text: Tensor) -> Tensor:
        """Return the states (M, D) that predict the first tokens of the blocks, from the documents' states (S, D)."""
        return text[self.part.layout.block_index - 1]

    def _draw(self, states: Tensor, noise: Tensor) -> None:
        """Sample the next token of every rollout, given the states (rows, D) that predict them."""
        draws, entropies, known = self.tree.draws(), [], self.part.layout.vocabulary
        noise = draws.spread(noise.flatten())

        def choose(softmax: Softmax, rows: slice) -> Tensor:
            if self.is_greedy:
                entropies.append(torch.zeros_like(noise[rows]))
                return softmax.most_likely(known).expand_as(noise[rows])
            entropies.append(softmax.entropy().expand_as(noise[rows]))
            return sample_tokens(softmax.probabilities[:, :known], noise[rows])

        # Slopes take a product for each distinct token of a row, the head in backward takes two for each row. First
        # tokens, all samples of a row, are often distinct.
        few = len(self.tree.levels) > 0 or self.part.layout.num_samples < 3
        slopes = self.reuse is not None and few and self.head.gives_slopes(draws.shape[1])
        scored = choose_tokens(states, choose, self.head, self.temperature, slopes, self.truncation)
        self.steps.append((draws, scored))
        tokens = draws.collect(scored.tokens)
        if self.tokens and self.part.layout.end_ids:  # an ended rollout stays where it is
            tokens = torch.where(torch.isin(self.tokens[-1], self.part.layout.end_tokens), self.tokens[-1], tokens)
        self.tokens.append(tokens)
        self.entropies.append(draws.collect(torch.cat(entropies)))
        self.tree.grow(self.tokens[-1])

    def with_gradient(self, states: Tensor) -> Tensor:
        """Return the log-probabilities (rows, columns) of all steps, differentiable in the states (rows, D)."""
        found = []
        for _, group in groupby((scored for _, scored in self.steps), key=lambda scored: scored.slopes is None):
            scored = Scored.joined(list(group))
            of_group, states = states.tensor_split([len(scored.tokens)])
            found.append(with_gradient(of_group, scored, self.head, self.temperature, self.truncation))
        columns = max(x.shape[1] for x in found)
        return torch.cat([F.pad(x, (0, columns - x.shape[1])) for x in found])


class DocumentNoise:
    """Uniform noise for each document, seeded with (seed, step, the document's tokens).

    A document therefore gets the same rollouts with any number of processes and in any micro-batch. A document that
    occurs again in the same step gets different noise.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._step: int | None = None
        self._seen: Counter[bytes] = Counter()

    def draw(self, documents: Documents, layout: StridedLayout, step: int) -> Tensor:
        """Return the noise (M, N, G) in [0, 1) for the rollouts of a batch at an optimizer step."""
        if step != self._step:
            self._step, self._seen = step, Counter()
        tokens, noise = documents.host_tokens, []
        for (start, end), anchors in zip(layout.spans, layout.anchors):
            identity = hashlib.blake2b(tokens[start:end].contiguous().numpy().tobytes(), digest_size=16).digest()
            key = f"{self.seed}:{step}:{self._seen[identity]}:".encode() + identity
            self._seen[identity] += 1
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
            shape = (len(anchors), layout.num_samples, layout.generate_max_len)
            noise.append(torch.rand(shape, generator=torch.Generator().manual_seed(seed)))
        return copy_to(layout.device, torch.cat(noise))[0]
