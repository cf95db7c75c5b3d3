"""Sampling in the training process: with transformers' `generate`, or such that equal prompts are computed once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import pad

from ebft.machine import copy_to
from ebft.models.causal_lm import backbone_of, evaluating, unwrap_adapter
from ebft.models.sharding import is_partitioned, is_sharded
from ebft.prefix import gpu
from ebft.prefix.attention import DecodePass, PromptLayout, SharedCache, SuffixPass
from ebft.prefix.forward import backbone_states, head_of, run_wrapped, take_programs
from ebft.prefix.sampling import Softmax, Truncation, of_device, on_device, sample_tokens
from ebft.structured.rollouts.turns import Completion, Sampling


class Generator:
    """Generates with transformers' `generate`, with prompts padded on the left; `temperature` 0 is greedy decoding."""

    def __init__(self, sampling: Sampling, pad_token_id: int, cache_implementation: str | None = None) -> None:
        self._pad_token_id = pad_token_id
        self._end_ids = sorted(sampling.end_ids)
        warpers = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        self._kwargs = {
            "do_sample": sampling.temperature > 0,
            **(warpers if sampling.temperature > 0 else {}),
            "repetition_penalty": sampling.repetition_penalty,
            "eos_token_id": self._end_ids or None,
            "pad_token_id": pad_token_id,
            "cache_implementation": cache_implementation,
            "suppress_tokens": list(sampling.unknown) or None,
            **sampling.extra,
        }

    def __call__(self, model: nn.Module, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        """Return one completion per prompt; the model must be in eval mode, with gradients disabled."""
        if is_sharded(model):
            return run_wrapped(model, lambda causal_lm: self._generate(causal_lm, prompts, max_tokens))
        return self._generate(unwrap_adapter(model), prompts, max_tokens)

    def _generate(
        self, causal_lm: PreTrainedModel, prompts: list[list[int]], max_tokens: list[int]
    ) -> list[Completion]:
        input_ids = pad([torch.tensor(ids) for ids in prompts], self._pad_token_id, "left").to(causal_lm.device)
        mask = pad([torch.ones(len(ids), dtype=torch.long) for ids in prompts], 0, "left").to(input_ids.device)
        config = GenerationConfig(**self._kwargs, max_new_tokens=max(max_tokens), disable_compile=True)
        with only_config(causal_lm, config):
            output = causal_lm.generate(
                input_ids=input_ids,
                attention_mask=mask,
                stopping_criteria=StoppingCriteriaList([_OwnLimit(input_ids.shape[1], max_tokens, causal_lm.device)]),
                synced_gpus=False,  # see `lockstep`
            )
        completions = []
        for ids, limit in zip(output[:, input_ids.shape[1] :].tolist(), max_tokens):
            end = next((index for index, token in enumerate(ids) if token in self._end_ids), limit)
            completions.append(Completion(ids[: min(end + 1, limit)], None))  # the rest is padding
        return completions


class HFBackend:
    """Samples from the current policy of a trainer, in eval mode; with shared prompts where the model supports them."""

    def __init__(self, trainer: Any, sampling: Sampling, pad_token_id: int) -> None:
        self._trainer = trainer
        shares = trainer.shares_prompts and trainer.args.cache_implementation is None
        if shares and SharedPromptSampler.supports(sampling):
            self._sample = SharedPromptSampler(sampling, trainer.args.cuda_graphs)
        else:
            self._sample = Generator(sampling, pad_token_id, trainer.args.cache_implementation)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        trainer = self._trainer
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=False,  # see `lockstep`
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as policy,
            evaluating(policy),
            trainer.accelerator.autocast(),
        ):
            return self._sample(policy, prompts, max_tokens)


class ModelBackend:
    """Generates with a model outside of training."""

    def __init__(self, model: nn.Module, sampling: Sampling, pad_token_id: int) -> None:
        self._model, self._generator = model, Generator(sampling, pad_token_id)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        with evaluating(self._model):
            return self._generator(self._model, prompts, max_tokens)


@contextmanager
def only_config(causal_lm: PreTrainedModel, config: GenerationConfig) -> Iterator[PreTrainedModel]:
    """Temporarily replace the model's generation config, which transformers uses for values unset in `config`."""
    own, causal_lm.generation_config = causal_lm.generation_config, config
    try:
        yield causal_lm
    finally:
        causal_lm.generation_config = own


class _OwnLimit(StoppingCriteria):
    """Stops each row of a batch at a separate number of new tokens."""

    def __init__(self, prompt_length: int, max_tokens: list[int], device: torch.device) -> None:
        self._stop_at = on_device([prompt_length + count for count in max_tokens], device)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self._stop_at


class SharedPromptSampler:
    """Samples as transformers' `generate` does with the same parameters; `temperature` 0 is greedy decoding.

    Samples that have ended are dropped from the batch, on a GPU once per eight tokens. The log-probabilities are those
    of the distribution that is sampled from.
    """

    def __init__(self, sampling: Sampling, cuda_graphs: bool = False) -> None:
        self._cuda_graphs = cuda_graphs
        self._temperature, self._end_ids = sampling.temperature, sorted(sampling.end_ids)
        self._known = sampling.unknown.start if sampling.unknown else None
        self._truncation = Truncation.of(sampling.top_k, sampling.top_p, sampling.min_p)

    @staticmethod
    def supports(sampling: Sampling) -> bool:
        """Whether there are no parameters that only `generate` has."""
        return not sampling.extra and sampling.repetition_penalty == 1 and sampling.regex is None

    def __call__(self, model: nn.Module, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        """Return one completion per prompt; the model must be prepared, in eval mode, with gradients disabled."""

        def sample(causal_lm: PreTrainedModel) -> list[Completion]:
            with gpu.cheap_adapters(causal_lm):
                return self._sample(causal_lm, prompts, max_tokens)

        return run_wrapped(model if is_sharded(model) else unwrap_adapter(model), sample)

    def _sample(self, causal_lm: PreTrainedModel, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        device, head = causal_lm.device, head_of(causal_lm)
        layout, tokens, last = _prefill_layout(prompts, device)
        prefill = SuffixPass(layout, keeps_keys=True)
        states = backbone_states(causal_lm, tokens, prefill)[last]
        cache = SharedCache(prefill, max(max_tokens))
        records = self._cuda_graphs and gpu.can_record(device) and not is_sharded(causal_lm)
        decode = lambda token: backbone_states(causal_lm, token, DecodePass(cache, all_room=records))
        shape = recorded = None
        drawn = _Drawn(len(prompts), self._end_ids, device)
        for length in range(1, max(max_tokens) + 1):
            token = self._draw(head.logits(states), drawn)
            if drawn.is_full:
                drawn.read()
            goes_on = [max_tokens[index] > length and not drawn.has_ended(index) for index in drawn.live]
            kept = [row for row, does in enumerate(goes_on) if does]
            if not kept:
                break
            if len(kept) < len(drawn.live):
                rows = on_device(kept, device)
                token = token[rows]
                cache.keep(kept, rows)
                drawn.keep(kept, rows)
            if not records or shape != cache.shape:
                shape, recorded, states = cache.shape, None, decode(token)
            else:  # the second pass of a shape is recorded, and repeated while the shape is the same
                recorded = gpu.Recording(decode, token) if recorded is None else recorded
                states = recorded(token)
            cache.advance()
        drawn.read()
        return drawn.completions

    def _draw(self, logits: Tensor, drawn: _Drawn) -> Tensor:
        """Draw the next token of every sample of the batch, (N,), given logits (N, V)."""
        if self._temperature == 0:
            softmax = Softmax(logits, 1.0)
            token = softmax.most_likely(self._known)
        else:
            softmax = Softmax(logits, self._temperature, self._truncation)
            token = sample_tokens(softmax.probabilities[:, : self._known], drawn.noise())
        drawn.add(token.squeeze(-1), softmax.logps(token).squeeze(-1))
        return token.squeeze(-1)


# Tokens of each sample that are drawn before the process waits for the device, to read them and to drop the samples
# that have ended. On CPU, where there is nothing to wait for, ended samples would only be computed for longer.
_TOKENS_PER_READ = {"cpu": 1, "other": 8}


class _Drawn:
    """The tokens drawn so far; the last ones are on the device and not yet read.

    `live` are the indices of the N samples in the batch. Their random numbers come from the generator for CPU, so
    that they are the same on every device: for each token, one number per sample that has not ended, in order. Which
    samples have ended since the last `read` is known on the device only.
    """

    def __init__(self, count: int, end_ids: list[int], device: torch.device) -> None:
        self.completions = [Completion([], []) for _ in range(count)]
        self.live = list(range(count))
        self._end_ids, self._device, self._per_read = end_ids, device, of_device(_TOKENS_PER_READ, device)
        self._ends = on_device(end_ids, device)
        self._unread: list[tuple[list[int], Tensor, Tensor]] = []  # `live`, and results (N,)
        self._go_on: Tensor  # (N,) bool, whether samples have not ended; while tokens are unread
        self._numbers: Tensor | None = None  # random numbers until the next `read`
        self._last: Tensor | int = 0  # index of the last one that was used

    @property
    def is_full(self) -> bool:
        """Whether as many tokens are unread as may be."""
        return len(self._unread) == self._per_read

    def has_ended(self, index: int) -> bool:
        """Whether a sample had ended when it was last read."""
        return any(token in self._end_ids for token in self.completions[index].ids[-1:])

    def noise(self) -> Tensor:
        """Return the random numbers of the next token, (N, 1); any numbers for samples that have ended."""
        if not self._unread:  # no sample has
            self._state = torch.get_rng_state()
            (self._numbers,) = copy_to(self._device, torch.rand(len(self.live) * self._per_read))
            self._last = len(self.live) - 1
            return self._numbers[: len(self.live), None]
        index = self._go_on.cumsum(0) + self._last
        self._last = index[-1:]
        return self._numbers[index, None]

    def add(self, token: Tensor, logp: Tensor) -> None:
        """Add a token of every sample and its log-probability, (N,) each."""
        self._unread.append((self.live, token, logp))
        if not self.is_full:
            goes_on = (token[:, None] != self._ends).all(-1)
            self._go_on = goes_on if len(self._unread) == 1 else self._go_on & goes_on

    def keep(self, rows: list[int], index: Tensor) -> None:
        """Drop all samples of the batch except those with the given indices; `index` has them on the device."""
        self.live = [self.live[row] for row in rows]
        if self._unread:
            self._go_on = self._go_on[index]

    def read(self) -> None:
        """Wait for the tokens drawn since the last call, and add them to the completions that they continue."""
        if not self._unread:
            return
        lives, tokens, logps = zip(*self._unread)
        table, count = torch.stack([torch.cat(tokens).double(), torch.cat(logps).double()]).tolist(), 0
        for index, token, logp in zip(chain(*lives), *table):
            if not self.has_ended(index):
                self.completions[index].ids.append(int(token))
                self.completions[index].logps.append(logp)
                count += 1
        if self._numbers is not None and count < len(self._numbers):  # as if no others had been drawn
            torch.set_rng_state(self._state)
            torch.rand(count)
        self._unread = []


def _prefill_layout(contexts: list[list[int]], device: torch.device) -> tuple[PromptLayout, Tensor, Tensor]:
    """Return a layout in which adjacent contexts share prompts, its tokens, and the index of each context's last."""
    groups = [list(group) for _, group in groupby(range(len(contexts)), key=lambda index: contexts[index])]
    prompts = [contexts[group[0]] for group in groups]
    if len(groups) == len(contexts):  # later turns of conversations
        groups, prompts = _with_common_prefixes(contexts)
    suffixes = [[contexts[index][len(prompt) :] for index in group] for prompt, group in zip(prompts, groups)]
    tokens = [token for ids in [*prompts, *(ids for own in suffixes for ids in own)] for token in ids]
    lengths = [[len(ids) for ids in own] for own in suffixes]
    last, end, position = [], 0, sum(map(len, prompts))
    for prompt, own in zip(prompts, lengths):
        end += len(prompt)
        for length in own:
            position += length
            last.append(position - 1 if length else end - 1)
    layout = PromptLayout([len(prompt) for prompt in prompts], lengths, device)
    return layout, on_device(tokens, device), on_device(last, device)


def _with_common_prefixes(contexts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return groups of adjacent contexts, and the prefix that the contexts of each group have in common."""
    groups, prefixes = [[0]], [contexts[0]]
    for index, context in enumerate(contexts[1:], 1):
        prefix = prefixes[-1]
        common = next((i for i, (a, b) in enumerate(zip(prefix, context)) if a != b), min(len(prefix), len(context)))
        if 2 * common >= max(len(prefix), 1):
            groups[-1].append(index)
            prefixes[-1] = prefix[:common]
        else:
            groups.append([index])
            prefixes.append(context)
    return groups, prefixes


@contextmanager
def lockstep(model: nn.Module, accelerator: Any) -> Iterator[None]:
    """Let processes make different numbers of passes of `model` within the block; no effect if it is not sharded.

    ZeRO-3, which requires the same modules in the same order on all processes, gathers the whole model for the block.
    All processes must enter and leave the block together. Gradients must not be computed in it.
    """
    if is_partitioned(model):
        with unwrap_model_for_generation(model, accelerator):
            yield
        return
    if not is_sharded(model):
        yield
        return
    take_programs(model)
    idle(model)  # gathers what remains gathered between passes, so that later passes of all processes do the same

    def report(*_: Any) -> None:  # a result would replace the inputs
        _someone_goes_on(accelerator, True)

    hook = backbone_of(unwrap_adapter(model)).register_forward_pre_hook(report)
    try:
        yield
    finally:
        hook.remove()
    while _someone_goes_on(accelerator, False):
        idle(model)


def idle(model: nn.Module) -> None:
    """Run a forward pass of one token."""

    def one_token(causal_lm: PreTrainedModel) -> None:
        token = torch.zeros(1, 1, dtype=torch.long, device=causal_lm.device)
        causal_lm.forward_of_model(input_ids=token, use_cache=False)

    with evaluating(model):
        run_wrapped(model, one_token)


def _someone_goes_on(accelerator: Any, this_process: bool) -> bool:
    """Return whether a process makes another pass, as each process reports."""
    passes = accelerator.reduce(torch.tensor(float(this_process), device=accelerator.device), "sum")
    return this_process or bool(passes)
