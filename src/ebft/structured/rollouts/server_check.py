"""Is the server the right one? Its model, vocabulary and log-probabilities against the trainer's, before training."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ebft.errors import RolloutError
from ebft.models.causal_lm import evaluating, unwrap_adapter
from ebft.structured.rollouts.client import VLLMClient
from ebft.structured.rollouts.sampling import Sampling

_TEXT = "def add(a, b):\n    return a + b\n\n# Every token counts: 3.14159, naïve, 東京."
_TOKENS = 32  # sampled to compare
# Mean difference of log-probabilities, in nats, between server and trainer. Types (bfloat16 here, float32 there) and
# quantisation cost up to about 0.1; another model differs by whole nats, one of the same family by tenths.
_SAME_NAME, _OTHER_NAME = 0.25, 0.05


def check_server(
    client: VLLMClient,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    base_model: str,
    *,
    compare_weights: bool,
) -> dict[str, Any]:
    """The server's entry for its base model, once it is known to fit; RolloutError says what does not.

    With `compare_weights` the server samples some tokens from its base model, and their log-probabilities are compared
    with those of `model` (its adapter disabled) at the same temperature.
    """
    client.wait_until_up()
    entry = client.base_model()
    served = entry.get("root") or entry["id"]
    who = f"The vLLM server at {client.address} serves {served}, and this run trains {base_model}"
    theirs, ours = client.tokenize(entry["id"], _TEXT), tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    if theirs != ours:
        raise RolloutError(
            f"{who}: their tokenizers differ (a text becomes {len(theirs)} and {len(ours)} tokens, or others). Start "
            " the server from the config that is trained: `ebft vllm-serve CONFIG`."
        )
    _check_vocabulary(client, entry["id"], tokenizer, sampling, who)
    if not compare_weights:
        return entry
    probe = replace(sampling, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, regex=None, extra={})
    [completion] = client.complete(entry["id"], [ours], [_TOKENS], replace(probe, end_ids=frozenset()))
    tempered, plain = (_logps(model, ours, completion.ids, t) for t in (probe.temperature, 1.0))
    sampled = torch.tensor(completion.logps, dtype=torch.float64)
    difference = (sampled - tempered).abs().mean().item()
    limit = _SAME_NAME if _same_place(served, base_model) else _OTHER_NAME
    if difference <= limit:
        return entry
    if probe.temperature != 1.0 and (sampled - plain).abs().mean().item() <= limit:
        raise RolloutError(
            f"The vLLM server at {client.address} reports log-probabilities at temperature 1, and sampling at "
            f"{probe.temperature} needs them at that temperature. Start it with --logprobs-mode processed_logprobs, as "
            "`ebft vllm-serve` does."
        )
    raise RolloutError(
        f"{who}: they are different models. Log-probabilities of {_TOKENS} sampled tokens differ by {difference:.2f} "
        f"nats on average (at most {limit} is allowed). Start the server from the config that is trained: `ebft "
        "vllm-serve CONFIG`."
    )


def _check_vocabulary(
    client: VLLMClient, model: str, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, who: str
) -> None:
    """The server refuses token ids that its model has no embedding for."""
    try:
        client.complete(model, [[len(tokenizer) - 1]], [1], sampling)
    except RolloutError as error:
        if "vocabulary" not in str(error):
            raise
        raise RolloutError(
            f"{who}, whose tokenizer has {len(tokenizer)} tokens, more than the server's model knows. Tokens added by "
            "special_tokens are not in the base model: save a base model that has them, and train and serve that."
        ) from error


def _logps(model: Any, prompt_ids: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """Log-probabilities of `ids` after the prompt under the base model at a temperature, float64."""
    causal_lm = unwrap_adapter(model)
    tokens = torch.tensor([prompt_ids + ids], device=next(causal_lm.parameters()).device)
    with evaluating(model), model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
        logits = causal_lm(input_ids=tokens).logits[0, len(prompt_ids) - 1 : -1].double().cpu()
    logps = (logits / temperature).log_softmax(-1)
    return logps.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)


def _same_place(first: str, second: str) -> bool:
    paths = [Path(name).expanduser() for name in (first, second)]
    return first == second or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))
