"""Block-parallel rollouts (appendix F): one prefill per document, then one cached decode step per token.

S  document tokens   M  blocks   N  rollouts per block   G  tokens per rollout   V  vocabulary   R  rows of logits
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft.models.recording import Recording
from ebft.prefix.head import head_of
from ebft.prefix.logps import Head, Scored, choose_tokens, with_gradient
from ebft.prefix.policy import backbone_states, check_length, run_wrapped
from ebft.prefix.sampling import sample_tokens
from ebft.prefix.softmax import Softmax
from ebft.strided.layout import Documents, Part, StridedLayout, split
from ebft.strided.loss import text_logps
from ebft.strided.passes import StridedPass


@dataclass
class Rollouts:
    """Sampled tokens with their entropy and log-probabilities under the distribution they were sampled from.

    tokens (M, N, G) long; entropy (M, N, G) float32, in nats, of the distribution at the sampling temperature before
    top_p; logps (M, N, G) float32; text_logps: log-probabilities of the reference tokens selected by
    `documents.ce_mask`, at temperature 1. The last two carry gradients if gradients were enabled during sampling.
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
    top_p: float = 1.0,
    noise: Tensor | None = None,
    text_gradient: bool | None = None,
    tokens_per_pass: int | None = None,
) -> Rollouts:
    """Sample every rollout of the layout from the model's current weights, without dropout.

    noise (M, N, G): uniform random numbers in [0, 1) that determine the tokens; drawn here if None. With
    `temperature` 0, the most likely token is selected and scored at temperature 1. `text_gradient`: whether the
    log-probabilities of the text are computed with (True) or without (False) a gradient; None omits them.
    `tokens_per_pass`: as in `ebft.strided.loss.score`.
    """
    if noise is None:
        noise = torch.rand(layout.num_blocks, layout.num_samples, layout.generate_max_len, device=layout.device)
    parts = split(documents, layout, tokens_per_pass)

    def roll_out(causal_lm: PreTrainedModel) -> tuple[Tensor | None, ...]:
        check_length(causal_lm, int(documents.lengths.max()))
        sampled = [
            _sample_part(causal_lm, part, temperature, top_p, noise[part.blocks], text_gradient) for part in parts
        ]
        return tuple(None if xs[0] is None else torch.cat(xs) for xs in zip(*sampled))

    return Rollouts(*run_wrapped(model, roll_out))


def _sample_part(
    causal_lm: PreTrainedModel,
    part: Part,
    temperature: float,
    top_p: float,
    noise: Tensor,
    text_gradient: bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run `sample_rollouts` for the blocks of a part, inside the model's forward; returns the fields of `Rollouts`."""
    documents, head = part.documents, head_of(causal_lm)
    if not torch.is_grad_enabled():
        drawn = _draw(causal_lm, head, part, temperature, top_p, noise, None)
        logps = torch.stack([scored.logps.view(noise.shape[:2]) for scored in drawn.scored], -1)
        text = None if text_gradient is None else text_logps(drawn.text, documents, head)
        return drawn.tokens, drawn.entropy, logps, text
    m, n, g = noise.shape
    recording = Recording(len(documents.tokens), m * n, g - 1)
    with torch.no_grad():
        drawn = _draw(causal_lm, head, part, temperature, top_p, noise, recording)
    torch.clear_autocast_cache()  # it contains weights that were cast without a graph
    run = StridedPass(part.layout, "score", documents.positions, steps=g - 1, recording=recording.replayed())
    states = backbone_states(causal_lm, torch.cat([documents.tokens, drawn.tokens[..., :-1].flatten()]), run)
    text, rollout = states.split([len(documents.tokens), m * n * (g - 1)])
    first = with_gradient(text[part.layout.block_index - 1], drawn.scored[0], head, temperature or 1.0)
    later = with_gradient(rollout, _in_order(drawn.scored[1:]), head, temperature or 1.0) if g > 1 else first[:0]
    logps = torch.cat([first.unsqueeze(-1), later.view(m, n, g - 1)], dim=-1)
    if text_gradient is None:
        return drawn.tokens, drawn.entropy, logps, None
    with torch.set_grad_enabled(text_gradient):
        return drawn.tokens, drawn.entropy, logps, text_logps(text, documents, head)


def _in_order(steps: list[Scored]) -> Scored:
    """Reorder scores by step (M * N rows each) into scores by rollout (M * N * steps rows)."""
    return Scored(*(None if x[0] is None else torch.stack(x, 1).flatten(0, 1) for x in zip(*steps)))


@dataclass
class _Drawn:
    """Tokens and entropy (M, N, G), the scores of each of the G steps, and the documents' last hidden states (S, D)."""

    tokens: Tensor
    entropy: Tensor
    scored: list[Scored]
    text: Tensor


def _draw(
    causal_lm: PreTrainedModel,
    head: Head,
    part: Part,
    temperature: float,
    top_p: float,
    noise: Tensor,
    recording: Recording | None,
) -> _Drawn:
    """Prefill the documents, then sample token by token. `recording` is used for a later pass with gradients."""
    layout, positions = part.layout, part.documents.positions
    m, n, g = noise.shape
    entropies, scored = [], []

    def draw(states: Tensor, noise: Tensor) -> Tensor:
        """Return the next token of every rollout (M * N,), from the previous states (R, D) and noise (R, K)."""

        def choose(softmax: Softmax, rows: slice) -> Tensor:
            if temperature == 0:
                entropies.append(torch.zeros_like(noise[rows]))
                return softmax.most_likely().expand_as(noise[rows])
            entropies.append(softmax.entropy().expand_as(noise[rows]))
            return sample_tokens(softmax.probabilities, noise[rows], top_p)

        slopes = recording is not None and not head.trained and noise.shape[-1] == 1
        scored.append(choose_tokens(states, choose, head, temperature or 1.0, slopes))
        return scored[-1].tokens.flatten()

    of_documents = None if recording is None else recording.of_documents()
    prefill = StridedPass(layout, "prefill", positions, recording=of_documents)
    text = backbone_states(causal_lm, part.documents.tokens, prefill)
    tokens = [draw(text[layout.block_index - 1], noise[..., 0])]
    for t in range(g - 1):
        of_step = None if recording is None else recording.of_step(t)
        step = StridedPass(layout, "decode", positions, 1, first_step=t, cache=prefill.cache, recording=of_step)
        tokens.append(draw(backbone_states(causal_lm, tokens[-1], step), noise[..., t + 1].reshape(-1, 1)))
    entropy = torch.cat([x.flatten() for x in entropies]).view(g, m, n).permute(1, 2, 0)
    return _Drawn(torch.stack(tokens, -1).view(m, n, g), entropy, scored, text)


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
