"""Check before training that the server's model, vocabulary and log-probabilities match those of the trainer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ebft.errors import RolloutError
from ebft.models.causal_lm import evaluating, unwrap_adapter
from ebft.structured.rollouts.backend import Sampling
from ebft.structured.rollouts.client import VLLMClient

_TEXT = "def add(a, b):\n    return a + b\n\n# Every token counts: 3.14159, naïve, 東京."
_TOKENS = 32  # number of sampled tokens to compare
# Tolerance of the mean difference of log-probabilities between server and trainer, in nats. Different dtypes (bfloat16
# and float32) and quantisation cause up to about 0.1; a different model differs by more than 1, one of the same family
# by tenths.
_SAME_NAME, _OTHER_NAME = 0.25, 0.05


def check_server(
    client: VLLMClient,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    base_model: str,
    *,
    compare_weights: bool,
) -> tuple[dict[str, Any], float | None]:
    """Check the server and return the entry of its base model. Raises RolloutError if it does not match the trainer.

    With `compare_weights`, the server samples some tokens from its base model, and their log-probabilities are compared
    with those of `model`, with its adapter disabled, at the same temperature. Their mean absolute difference is
    returned too, or None.
    """
    client.wait_until_up()
    entry = client.base_model()
    served = entry.get("root") or entry["id"]
    who = f"The vLLM server at {client.address} serves {served}, and this run trains {base_model}"
    theirs, ours = client.tokenize(entry["id"], _TEXT), tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    if theirs != ours:
        raise RolloutError(
            f"{who}: their tokenizers differ (a test text is encoded to different ids, {len(theirs)} and {len(ours)} "
            "tokens). Start the server with the config of this run: `ebft vllm-serve CONFIG`."
        )
    _check_vocabulary(client, entry["id"], tokenizer, sampling, who)
    if not compare_weights:
        return entry, None
    probe = replace(sampling, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, regex=None, extra={})
    [completion] = client.complete(entry["id"], [ours], [_TOKENS], replace(probe, end_ids=frozenset()))
    tempered, plain = (_logps(model, ours, completion.ids, t) for t in (probe.temperature, 1.0))
    sampled = torch.tensor(completion.logps, dtype=torch.float64)
    difference = (sampled - tempered).abs().mean().item()
    limit = _SAME_NAME if _same_place(served, base_model) else _OTHER_NAME
    if difference <= limit:
        return entry, difference
    if probe.temperature != 1.0 and (sampled - plain).abs().mean().item() <= limit:
        raise RolloutError(
            f"The vLLM server at {client.address} reports log-probabilities at temperature 1, but this run requires "
            f"them at its sampling temperature {probe.temperature}. Start the server with --logprobs-mode "
            "processed_logprobs, as `ebft vllm-serve` does."
        )
    raise RolloutError(
        f"{who}: they are different models. The log-probabilities of {_TOKENS} sampled tokens differ by "
        f"{difference:.2f} nats on average (tolerance: {limit}). Start the server with the config of this run: `ebft "
        "vllm-serve CONFIG`."
    )


def _check_vocabulary(
    client: VLLMClient, model: str, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, who: str
) -> None:
    """Raise RolloutError if the server's model has no embedding for the last token id of the tokenizer."""
    try:
        client.complete(model, [[len(tokenizer) - 1]], [1], sampling)
    except RolloutError as error:
        if "vocabulary" not in str(error):
            raise
        raise RolloutError(
            f"{who}, whose tokenizer has {len(tokenizer)} tokens, more than the vocabulary of the server's model. "
            "Tokens added by special_tokens are not in the base model. Save a base model that contains them, and use "
            "it for training and serving."
        ) from error


def _logps(model: Any, prompt_ids: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """Return the log-probabilities of `ids` after the prompt under the base model, at a temperature, in float64."""
    causal_lm = unwrap_adapter(model)
    tokens = torch.tensor([prompt_ids + ids], device=next(causal_lm.parameters()).device)
    with evaluating(model), model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
        logits = causal_lm(input_ids=tokens).logits[0, len(prompt_ids) - 1 : -1].double().cpu()
    logps = (logits / temperature).log_softmax(-1)
    return logps.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)


def _same_place(first: str, second: str) -> bool:
    paths = [Path(name).expanduser() for name in (first, second)]
    return first == second or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))
