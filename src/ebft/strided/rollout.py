"""Block-parallel rollouts (appendix F): one prefill per document, then one decode step per token, cached.

S  document tokens   M  blocks   N  rollouts per block   G  tokens per rollout   V  vocabulary   R  rows of logits
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft.strided.attention import StridedPass
from ebft.strided.layout import Documents, Part, StridedLayout, split
from ebft.strided.logps import chosen_logps
from ebft.strided.loss import text_logps
from ebft.strided.policy import backbone_states, check_length, head_of, run_inside, vocab_size


@dataclass
class Rollouts:
    """What was sampled, and how likely it was under the distribution that it was sampled from.

    tokens (M, N, G) long; entropy (M, N, G) float32, in nats, of the tempered distribution before top_p;
    logps (M, N, G) float32; text_logps: of the reference tokens at temperature 1, where `documents.ce_mask` is on.
    The last two carry gradients where they were sampled with gradients enabled.
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
    """Sample every rollout of the layout from the model as it stands, dropout aside.

    noise (M, N, G): uniform numbers in [0, 1) that decide the tokens; drawn here where None. `temperature` 0 takes
    the most likely token, scored at temperature 1. `text_gradient` says whether the text's own log-probabilities are
    wanted, and with a gradient or without; None leaves them out. `tokens_per_pass`: as in `ebft.strided.loss.score`.
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

    return Rollouts(*run_inside(model, roll_out))


def _sample_part(
    causal_lm: PreTrainedModel,
    part: Part,
    temperature: float,
    top_p: float,
    noise: Tensor,
    text_gradient: bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`sample_rollouts` for the blocks of a part, inside the model's forward: the fields of `Rollouts`."""
    documents, layout = part.documents, part.layout
    m, n, g = noise.shape
    head, vocabulary = head_of(causal_lm), vocab_size(causal_lm)
    tokens, entropies, logps = [], [], []

    def draw(states: Tensor, noise: Tensor) -> None:
        """Draw the next token of every rollout from the states (R, D) before it, with noise (R, K)."""

        def choose(logp: Tensor, rows: slice) -> Tensor:
            if temperature == 0:
                entropies.append(torch.zeros_like(noise[rows]))
                return logp.argmax(-1, keepdim=True).expand_as(noise[rows])
            probabilities = logp.exp()
            entropies.append(_entropy(logp, probabilities).expand_as(noise[rows]))
            return sample_tokens(probabilities, noise[rows], top_p)

        drawn, logp = chosen_logps(states, choose, head, temperature or 1.0, vocabulary)
        tokens.append(drawn.view(m, n))
        logps.append(logp.view(m, n))

    prefill = StridedPass(layout, "prefill", documents.positions)
    text = backbone_states(causal_lm, documents.tokens, prefill)
    draw(text[layout.block_index - 1], noise[..., 0])
    for t in range(g - 1):
        step = StridedPass(layout, "decode", documents.positions, steps=1, first_step=t, cache=prefill.cache)
        draw(backbone_states(causal_lm, tokens[-1].flatten(), step), noise[..., t + 1].reshape(-1, 1))
    entropy = torch.cat([x.flatten() for x in entropies]).view(g, m, n).permute(1, 2, 0)
    sampled = torch.stack(tokens, -1), entropy, torch.stack(logps, -1)
    if text_gradient is None:
        return *sampled, None
    with torch.set_grad_enabled(text_gradient and torch.is_grad_enabled()):
        return *sampled, text_logps(text, documents, head, vocabulary)


def _entropy(logp: Tensor, probabilities: Tensor) -> Tensor:
    """Entropy (R, 1) of distributions (R, V)."""
    # The floor keeps 0 * log(0) at 0 where a model masks part of its vocabulary.
    finite = logp.clamp_min(torch.finfo(logp.dtype).min)
    return -(probabilities.unsqueeze(-2) @ finite.unsqueeze(-1)).squeeze(-1)


def sample_tokens(probabilities: Tensor, noise: Tensor, top_p: float = 1.0) -> Tensor:
    """Tokens (R, K) from probabilities (R, V), by inverting their distribution function at noise (R, K).

    With top_p < 1 only the smallest set of most likely tokens whose mass reaches top_p is kept. Uniform numbers
    in and tokens out: the same noise gives the same tokens however rows are batched.
    """
    if top_p < 1:
        probabilities = _nucleus(probabilities, top_p)
    # float64, because a float32 running sum over a large vocabulary loses the tail's small steps.
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    target = noise.double() * cumulative[..., -1:]
    return torch.searchsorted(cumulative, target, right=True).clamp_max(probabilities.shape[-1] - 1)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of most likely tokens whose mass reaches top_p (at least one)."""
    ordered, index = probabilities.sort(-1, descending=True)
    mass_before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probabilities).scatter(-1, index, ordered.masked_fill(mass_before >= top_p, 0.0))


class DocumentNoise:
    """Uniform noise per document from (seed, step, the document's own tokens): same however rows are spread.

    A document then draws the same rollouts on one process as on many, in any micro-batch. A document met again
    in the same step draws fresh ones.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._step: int | None = None
        self._met: Counter[bytes] = Counter()

    def draw(self, documents: Documents, layout: StridedLayout, step: int) -> Tensor:
        """Noise (M, N, G) in [0, 1) for the rollouts of a batch at an optimizer step."""
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
