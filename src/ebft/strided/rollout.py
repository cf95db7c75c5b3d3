"""Block-parallel rollouts (appendix F): one prefill per document, then one decode step per token, cached.

M  blocks   N  rollouts per block   G  tokens per rollout   V  vocabulary   R  rows of logits
"""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebft.strided.attention import StridedPass
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.policy import check_length

# Rows of logits held at once: 2**25 float32 numbers are 128 MiB.
LOGITS_PER_CHUNK = 2**25


def rows_per_chunk(causal_lm: PreTrainedModel) -> int:
    """How many rows of logits to hold at once."""
    return max(16, LOGITS_PER_CHUNK // causal_lm.config.get_text_config().vocab_size)


def sample_rollouts(
    causal_lm: PreTrainedModel,
    documents: Documents,
    layout: StridedLayout,
    *,
    temperature: float,
    top_p: float = 1.0,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample every rollout of the layout from the model as it stands (call it in eval mode, without gradients).

    noise (M, N, G): uniform numbers in [0, 1) that decide the tokens; drawn here where None.
    Returns tokens (M, N, G) long and the entropy (M, N, G) float32, in nats, of the tempered distribution each was
    drawn from. `temperature` 0 takes the most likely token.
    """
    m, n, g = layout.num_blocks, layout.num_samples, layout.generate_max_len
    check_length(causal_lm, int(documents.lengths.max()))
    if noise is None:
        noise = torch.rand(m, n, g, device=layout.device)
    prefill = StridedPass(layout, "prefill", documents.positions)
    rows = rows_per_chunk(causal_lm)

    def first(hidden: Tensor, head) -> tuple[Tensor, Tensor]:
        return _sample(hidden[0, layout.block_index - 1], head, noise[..., 0], temperature, top_p, rows)

    drawn = [causal_lm(input_ids=documents.tokens[None], strided=prefill, on_hidden=first)]
    for t in range(g - 1):
        decode = StridedPass(layout, "decode", documents.positions, steps=1, first_step=t, cache=prefill.cache)

        def following(hidden: Tensor, head, t=t) -> tuple[Tensor, Tensor]:
            return _sample(hidden[0], head, noise[..., t + 1].reshape(-1, 1), temperature, top_p, rows)

        last = drawn[-1][0].reshape(1, -1)
        drawn.append(causal_lm(input_ids=last, strided=decode, on_hidden=following))
    tokens, entropy = (torch.stack([x.reshape(m, n) for x in xs], dim=-1) for xs in zip(*drawn))
    return tokens, entropy


def _sample(states: Tensor, head, noise: Tensor, temperature: float, top_p: float, rows: int) -> tuple[Tensor, Tensor]:
    """Tokens (R, K) for hidden states (R, D) and noise (R, K), with the entropy of each row, (R, K)."""
    tokens, entropies = [], []
    for states_chunk, noise_chunk in zip(states.split(rows), noise.split(rows)):
        logits = head(states_chunk)
        if temperature == 0:
            tokens.append(logits.argmax(-1, keepdim=True).expand_as(noise_chunk))
            entropies.append(torch.zeros_like(noise_chunk))
            continue
        logp = tempered_logp(logits, temperature)
        probabilities = logp.exp()
        # The floor keeps 0 * log(0) at 0 where a model masks part of its vocabulary.
        finite_logp = logp.clamp_min_(torch.finfo(logp.dtype).min)
        entropy = -(probabilities.unsqueeze(-2) @ finite_logp.unsqueeze(-1)).squeeze(-1)
        tokens.append(sample_tokens(probabilities, noise_chunk, top_p))
        entropies.append(entropy.expand_as(noise_chunk))
    return torch.cat(tokens), torch.cat(entropies)


def tempered_logp(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities (R, V), float32, of softmax(logits / temperature): what is sampled is what is scored."""
    logits = logits.float()
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)


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
