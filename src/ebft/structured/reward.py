"""The feature-matching reward of full completions, as a TRL reward function, and loading of rewards by their names."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ebft import catalog, errors, files, machine, scores
from ebft import transformers_internals as internals
from ebft.config.options import RewardOptions, RewardOptionTypes
from ebft.config.rules import options_from
from ebft.config.section import option_names
from ebft.config.trl import TRLSection
from ebft.config.user_functions import find_function
from ebft.data.conversation import Conversation, Prompt, Renderer, without_end
from ebft.data.messages import REPLY, ROW_KWARGS, TOOLS, Message
from ebft.features import FeatureNetwork, pool_sequence, token_features
from ebft.models import pretrained
from ebft.models.adapter import load_saved_adapter, read_adapter_config
from ebft.models.causal_lm import SCORE, backbone_of, end_token_ids
from ebft.models.sharding import is_sharded
from ebft.prefix.forward import run_wrapped, take_programs
from ebft.prefix.parity import compare, refusing
from ebft.prefix.sampling import on_device
from ebft.rewards import FeatureMatch, match_features

FEATURE_MATCHING = "feature_matching"  # the name of the reward in configs and in TRL's logs


class FeatureMatchingReward:
    """`alignment_coef * alignment - diversity_coef * diversity` (eq. 6-7) of completions against their references.

    A TRL reward function: `GRPOTrainer(reward_funcs=[FeatureMatchingReward(model, tokenizer, num_generations=8)])`. A
    `model` with a PEFT adapter is used with the adapter disabled; any other model is copied and frozen, on
    `feature_device` if given. `options` are `ebft.config.options.RewardOptions`. All sequences are token ids.
    The terminating token of a completion (the end of sequence of the tokenizer or model, the end of turn of the chat
    template, or one of `stop_token_ids`) is removed, because the reference does not have one. Completions follow the
    prompt with its generation prompt; the reference is what the chat template renders for it in the whole conversation.
    References are cut at `max_completion_length` tokens, where completions are cut: pass the value of the trainer.
    `chat_template_kwargs` must be the ones used to render the prompts; a row may have its own, and descriptions of
    tools, in the columns `chat_template_kwargs` and `tools`. With `copy=False`, a model without adapter is used
    directly, which requires that it is not trained. If `feature_network` is given, a causal LM with the tokens of
    `model`, features come from it.
    """

    __name__ = FEATURE_MATCHING

    def __init__(
        self,
        model: nn.Module | str,
        tokenizer: PreTrainedTokenizerBase,
        num_generations: int,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        stop_token_ids: Iterable[int] = (),
        max_completion_length: int | None = None,
        copy: bool = True,
        feature_network: nn.Module | None = None,
        **options: Unpack[RewardOptionTypes],
    ) -> None:
        model = pretrained.load(model)
        pretrained.check_adapter(model)
        self.options: RewardOptions = options_from(RewardOptions, dict(options))
        if num_generations == 1 and self.options.use_whitening:
            self.options.use_whitening = False
            errors.warn("num_generations: 1 has no other completion to whiten with: use_whitening is set to false.")
        self.num_generations = num_generations
        self.renderer: Renderer = Renderer(tokenizer, chat_template_kwargs)
        self.end_ids: set[int] = end_token_ids(model, {*self.renderer.template.end_ids, *stop_token_ids})
        given = self.options.feature_layers, self.options.embed_method, self.options.feature_device
        self.network: FeatureNetwork = FeatureNetwork(model, *given, copy=copy, network=feature_network)
        if feature_network is not None:
            check_features(self.network)
        # TRL samples completions after the generation prompt. A trainer that samples after the prompts of
        # conversations, which references share, sets this to False.
        self.follows_generation_prompt = True
        self.max_completion_length: int | None = max_completion_length
        self.last: FeatureMatch | None = None

    def __call__(
        self,
        prompts: list[Prompt],
        completions: list[Any] | None = None,
        completion_ids: list[list[int]] | None = None,
        *,
        ground_truth: list[str],
        remaining_turns: list[list[Message] | None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return one reward per completion.

        All lists have the same length and are ordered by group, with `num_generations` entries per group.
        `completion_ids` are the ids after the prompt, including all `remaining_turns`. Raises DataError if a
        reference is empty, ValueError if the lists are inconsistent, NonFiniteLossError if a reward is not finite.
        """
        embedded, first = [], []
        for row, conversation, samples in self._groups(prompts, completion_ids, ground_truth, remaining_turns, columns):
            prompt, ids = self._continued(row, conversation, samples)
            embedded.append(embed_continuations(self.network, prompt, ids))
            first.append([ids.index(sample) for sample in ids[:-1]])
        embeddings = torch.stack(embedded)
        self.last = match_features(
            embeddings[:, :-1],
            embeddings[:, -1],
            self.options,
            computed_in=self.network.computed_in,
            first=on_device(first, embeddings.device),
        )
        metrics = metrics_of(self.last)
        values = torch.cat([torch.stack([*metrics.values()]), self.last.rewards.flatten()]).tolist()  # one wait for all
        rewards = values[len(metrics) :]
        if not all(map(math.isfinite, rewards)):
            raise errors.NonFiniteLossError("The feature-matching reward is not finite: load its model in float32.")
        if log_metric is not None:
            for name, value in zip(metrics, values):
                log_metric(name, value)
        return rewards

    def _continued(
        self, row: dict[str, Any], conversation: Conversation, samples: list[list[int]]
    ) -> tuple[list[int], list[list[int]]]:
        """Return the prompt that all sequences start with, and how the samples and then the reference go on."""
        follows = conversation.prompt_ids
        if self.follows_generation_prompt:  # which TRL renders without the row's own tools and arguments
            follows = self.renderer.prompt_ids(row["prompt"])
            if (row.get(TOOLS) or row.get(ROW_KWARGS)) and follows != conversation.generation_prompt_ids:
                warnings.warn(
                    f"The columns {TOOLS} and {ROW_KWARGS} are in the references, but not in the prompts, which the "
                    "trainer renders without them. Use EBFTTrainer, or remove the columns.",
                    stacklevel=4,
                )
        prompt, continued = conversation.compared(follows, [list(ids) for ids in samples], self.max_completion_length)
        return prompt, [without_end(ids, self.end_ids) for ids in continued]

    def _groups(
        self, prompts, completion_ids, ground_truth, remaining_turns, columns
    ) -> list[tuple[dict[str, Any], Conversation, list[list[int]]]]:
        """Return (row, conversation, token ids of its samples) for every group."""
        n = self.num_generations
        remaining = remaining_turns if remaining_turns is not None else [None] * len(prompts)
        rows = list(zip(prompts, ground_truth, remaining, strict=True))
        if len(rows) != len(completion_ids) or len(rows) % n:
            raise ValueError(f"{len(completion_ids)} completions of {len(rows)} rows: no groups of num_generations {n}")
        fewest = min(len(list(same)) for _, same in groupby(rows))
        if n > 1 and fewest >= 2 * n:  # the trainer's groups are probably larger
            warnings.warn(
                f"FeatureMatchingReward has num_generations {n}, but every prompt occurs at least {fewest} times in a "
                "row. If this is the trainer's num_generations, pass the same value to FeatureMatchingReward, since "
                "samples are compared within groups.",
                stacklevel=3,
            )
        groups = []
        for start in range(0, len(prompts), n):
            group = slice(start, start + n)
            if any(row != rows[start] for row in rows[group]):
                raise ValueError(
                    f"completions {start} to {start + n - 1} have different prompts or references: set num_generations"
                )
            reference = ground_truth[start]
            if not isinstance(reference, str) or not reference.strip():
                raise errors.DataError(f"row {start} has no reference: ground_truth is {reference!r}")
            row = {"prompt": prompts[start], "ground_truth": reference, "remaining_turns": remaining[start]}
            row |= {name: columns[name][start] for name in (TOOLS, REPLY, ROW_KWARGS) if columns.get(name) is not None}
            conversation = self.renderer.of_row(row)
            groups.append((row, conversation, completion_ids[group]))
        return groups


def reward_of(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, trl: Any, options: Any, feature_network: Any = None
) -> FeatureMatchingReward:
    """Return the reward for the settings `trl` of the trainer, with the options that are among `options`."""
    return FeatureMatchingReward(
        model,
        tokenizer,
        trl.num_generations,
        chat_template_kwargs=trl.chat_template_kwargs,
        stop_token_ids=(trl.generation_kwargs or {}).get("stop_token_ids", ()),
        feature_network=feature_network,
        **{name: getattr(options, name) for name in option_names(RewardOptions)},
    )


def metrics_of(match: FeatureMatch) -> dict[str, Tensor]:
    """Return the means of the terms, scalars, by the names under which both modes log them."""
    terms = {"alignment": match.alignment, "diversity": match.diversity, "cfm_loss": match.cfm}
    terms |= {"mean_reward": match.rewards, "reward": match.rewards}
    return {f"ebft/{name}": values.mean() for name, values in terms.items()}


def held_out_values(match: FeatureMatch, options: RewardOptions, computed_in: torch.dtype) -> dict[str, Tensor]:
    """Return the held-out feature-matching metrics of every group, repeated for its samples: (M * N,) each.

    Features are normalised but not whitened, as in strided mode (`ebft.scores.feature_scores`).
    """
    n = match.samples.shape[1]
    values = scores.feature_scores(
        match.samples,
        match.reference,
        alignment_coef=options.alignment_coef,
        diversity_coef=options.diversity_coef,
        pass_at=sorted({1, n}),
        computed_in=computed_in,
    )
    return {name: value.repeat_interleave(n) for name, value in values.items()}


def embed_continuations(network: FeatureNetwork, prompt_ids: list[int], continuations: list[list[int]]) -> Tensor:
    """Return the embeddings (K, D) of `prompt_ids + continuations[k]`, in float32, on the network's device.

    They equal the results of separate passes, because padding is on the right only, which causal models do not
    attend to. `mean_pooling` is the mean over all tokens without padding, including the prompt; `completion_mean` the
    mean over the continuation; `concat` the states at one quarter, one half and three quarters of the continuation.
    Except for `mean_pooling`, an empty continuation is replaced by the prompt's last token.
    """
    prompt, own = continuation_features(network, prompt_ids, continuations)
    return torch.stack([pool_sequence(prompt, features, network.embed_method) for features in own])


def continuation_features(
    network: FeatureNetwork, prompt_ids: list[int], continuations: list[list[int]]
) -> tuple[Tensor, list[Tensor]]:
    """Return the features of the prompt's tokens, (P, D), and of each continuation's tokens, (its length, D)."""
    lengths = [len(ids) for ids in continuations]
    if not prompt_ids or not shares_prompts(network.causal_lm):
        features = _run(network, _padded([prompt_ids + ids for ids in continuations]))
        prompt, own = features[0, : len(prompt_ids)], features[:, len(prompt_ids) :]
    else:
        cache = DynamicCache(config=network.causal_lm.config.get_text_config())
        features = _run(network, torch.tensor([prompt_ids]), cache)
        prompt = features[0]
        if max(lengths) > 0:
            cache.batch_repeat_interleave(len(continuations))
            own = _run(network, _padded(continuations), cache)
        else:
            own = features[:, :0].expand(len(continuations), -1, -1)
    return prompt, [row[:length] for row, length in zip(own, lengths)]


def shares_prompts(causal_lm: PreTrainedModel) -> bool:
    """Whether several continuations can use the prompt's cache, which excludes layers with a recurrent state."""
    if internals.has_running_state(causal_lm):
        return False
    layers = DynamicCache(config=causal_lm.config.get_text_config()).layers
    return all(type(layer) in (internals.DynamicLayer, internals.DynamicSlidingWindowLayer) for layer in layers)


def check_features(network: FeatureNetwork) -> None:
    """Raise ModelError if the features of a short random prompt with three continuations are not the model's.

    The model runs each sequence separately, with eager attention and `output_hidden_states`.
    """
    generator, vocabulary = torch.Generator().manual_seed(0), network.causal_lm.config.get_text_config().vocab_size
    prompt, *own = (torch.randint(0, vocabulary, (size,), generator=generator).tolist() for size in (8, 1, 4, 2))
    with refusing(network.causal_lm, "shared prompts"):
        shared, found = continuation_features(network, prompt, own)
        sequences = [torch.tensor([prompt + ids], device=network.device) for ids in own]
        with internals.override_attn_implementation(network.causal_lm, "eager"):
            expected = [token_features(network.plain_hidden_states(sequence))[0] for sequence in sequences]
    differences = [torch.cat([shared, ours]) - plain for ours, plain in zip(found, expected)]
    compare(network.causal_lm, "features with shared prompts", torch.cat(differences).norm(dim=-1))


def _run(network: FeatureNetwork, tokens: Tensor, cache: Cache | None = None) -> Tensor:
    """Return the features (K, tokens, D) of `tokens`, which follow those in `cache` and are added to it."""

    def run(causal_lm: PreTrainedModel) -> Tensor:
        backbone = backbone_of(causal_lm)
        arguments = {} if cache is None else {internals.cache_argument(backbone): cache}
        (ids,) = machine.copy_to(network.device, tokens)
        return backbone(ids, use_cache=cache is not None, **arguments).last_hidden_state

    def forward(model: nn.Module) -> Tensor:
        if not is_sharded(model):
            return run(network.causal_lm)
        take_programs(model)
        return run_wrapped(model, run)  # gathers the weights

    return token_features(network.hidden_states(forward))


def _padded(rows: list[list[int]]) -> Tensor:
    """Return rows of token ids as one tensor, padded on the right; the padding value does not affect any result."""
    return pad_sequence([torch.tensor(ids, dtype=torch.long) for ids in rows], batch_first=True)


def load_reward_funcs(
    trl: TRLSection, ebft: RewardOptions, model: Any, tokenizer: PreTrainedTokenizerBase, built_in: Mapping[str, Any]
) -> list:
    """Return the rewards of `trl.reward_funcs`: functions by import path, `feature_matching`, or reward models.

    A name with a slash is the folder or the Hub id of a reward model. `built_in` are other rewards by their names.
    `feature_matching` uses the options of the section `ebft:`; with `rl: ebft`, the trainer adds it itself.
    """

    def load_one(name: str) -> Any:
        if name == FEATURE_MATCHING:
            return reward_of(model, tokenizer, trl, ebft)
        if name in built_in:
            return built_in[name]
        return load_reward_model(name) if "/" in name else find_function("trl.reward_funcs", name)

    return [load_one(name) for name in trl.reward_funcs or []]


def load_reward_model(name: str) -> PreTrainedModel:
    """The reward model in a folder, also of an adapter, or with a Hub id, an entry of `trl.reward_funcs`.

    Its weights have the data type that they are saved in; an adapter is merged. Raises ConfigError for a model without
    exactly one score per text.
    """
    folder = Path(catalog.lasting_name(name))
    is_adapter = (folder / files.ADAPTER_CONFIG).is_file()
    with errors.doing(f"loading the reward model {name} (trl.reward_funcs)"):
        base = str(read_adapter_config(folder).base_model_name_or_path) if is_adapter else name
        found = pretrained.find_model(base, f"base model of {folder}" if is_adapter else "trl.reward_funcs")
        config = pretrained.pretrained_config(found)
        problem = catalog.reward_problem(name, None if is_adapter else config.to_dict() | {"id2label": config.id2label})
        if problem is not None:
            raise errors.ConfigError(problem)
        if is_adapter:
            config.num_labels, tokens = SCORE.num_labels, len(pretrained.pretrained_tokenizer(str(folder)))
            model = pretrained.pretrained_model(found, SCORE, may_lack_head=True, config=config, dtype="auto")
            model = load_saved_adapter(model, str(folder), tokens).merge_and_unload()
            model.config.name_or_path = str(folder)
        else:
            model = pretrained.pretrained_model(found, SCORE, dtype="auto")
        pretrained.pretrained_tokenizer(str(model.config.name_or_path))  # TRL loads it from there
    return model.eval().requires_grad_(False)
