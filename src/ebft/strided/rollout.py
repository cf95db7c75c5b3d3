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

from ebft.models.recording import Recording
from ebft.strided.attention import StridedPass
from ebft.strided.layout import Documents, Part, StridedLayout, split
from ebft.strided.logps import Head, Scored, Softmax, choose_tokens, with_gradient
from ebft.strided.loss import text_logps
from ebft.strided.policy import backbone_states, check_length, head_of, run_wrapped

# Neighbouring tokens that sampling takes together at first.
_RUN = 512
_BELOW_ONE = 1 - 2**-52  # times a float64 is less than it


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

    return Rollouts(*run_wrapped(model, roll_out))


def _sample_part(
    causal_lm: PreTrainedModel,
    part: Part,
    temperature: float,
    top_p: float,
    noise: Tensor,
    text_gradient: bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`sample_rollouts` for the blocks of a part, inside the model's forward: the fields of `Rollouts`."""
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
    torch.clear_autocast_cache()  # of weights that were converted without a graph
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
    """What was scored token by token (M * N rows each), rollout by rollout (M * N * steps rows)."""
    return Scored(*(None if x[0] is None else torch.stack(x, 1).flatten(0, 1) for x in zip(*steps)))


@dataclass
class _Drawn:
    """Tokens and entropy (M, N, G), what was scored for each of the G, and the documents' last hidden states."""

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
    """Prefill the documents, then draw token after token. With a recording, for a forward that takes gradients."""
    layout, positions = part.layout, part.documents.positions
    m, n, g = noise.shape
    entropies, scored = [], []

    def draw(states: Tensor, noise: Tensor) -> Tensor:
        """The next token of every rollout (M * N,), from the states (R, D) before it, with noise (R, K)."""

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


def sample_tokens(probabilities: Tensor, noise: Tensor, top_p: float = 1.0) -> Tensor:
    """Tokens (R, K) from probabilities (R, V), by inverting their distribution function at noise (R, K).

    With top_p < 1 only the smallest set of most likely tokens whose mass reaches top_p is kept. Uniform numbers
    in and tokens out: the same noise gives the same tokens however rows are batched.
    """
    if top_p < 1:
        probabilities = _nucleus(probabilities, top_p)
    # First a run of neighbouring tokens, then one of them: the running sums are short, and in float64, because those of
    # float32 lose the tail's small steps.
    vocabulary = probabilities.shape[-1]
    runs = vocabulary // _RUN
    sums = probabilities[:, : runs * _RUN].unflatten(-1, (runs, _RUN)).sum(-1)
    sums = torch.cat([sums, probabilities[:, runs * _RUN :].sum(-1, keepdim=True)], -1)
    run, rest = _invert(sums, noise)
    index = run.unsqueeze(-1) * _RUN + torch.arange(_RUN, device=probabilities.device)  # (R, K, _RUN)
    inside = probabilities.gather(-1, index.clamp_max(vocabulary - 1).flatten(1)).view_as(index)
    token, _ = _invert(inside.masked_fill_(index >= vocabulary, 0.0), rest.unsqueeze(-1))
    # Probabilities that are not numbers find the end; the loss that follows names the model as diverged.
    return (run * _RUN + token.squeeze(-1)).clamp_max(vocabulary - 1)


def _invert(weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Where noise (..., K) in [0, 1) falls among weights (..., V), and how far between there and the next, in [0, 1).

    What has no weight is never found.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = noise * cumulative[..., -1:]
    found = torch.searchsorted(cumulative, target, right=True).clamp_max(weights.shape[-1] - 1)
    weight = weights.gather(-1, found).double()
    below = cumulative.gather(-1, found) - weight
    return found, ((target - below) / weight).clamp(0.0, _BELOW_ONE)


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of most likely tokens whose mass reaches top_p (at least one)."""
    ordered, index = weights.sort(-1, descending=True)
    mass_before = ordered.cumsum(-1) - ordered
    dropped = mass_before >= top_p * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(weights).scatter(-1, index, ordered.masked_fill(dropped, 0.0))


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
