"""Replies of a trained model with transformers' `generate`, their rewards, and a session in the terminal."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rich.columns import Columns
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, TextStreamer, set_seed

from ebft.data.conversation import Renderer
from ebft.data.messages import Message
from ebft.errors import DataError, ModelError
from ebft.models.causal_lm import end_token_ids, positions_of, unknown_ids, unwrap_adapter
from ebft.printed import printable, safe_console, say
from ebft.structured.reward import FeatureMatchingReward
from ebft.tools.inference.models import Loaded


@dataclass(frozen=True)
class SamplingOptions:
    """How replies are sampled. What is None is taken from the generation config of the model; temperature 0 is greedy.

    `seed` is set before every reply, so that the same prompt gives the same reply.
    """

    max_new_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    def generation_config(self, model: nn.Module) -> GenerationConfig:
        found = copy.deepcopy(unwrap_adapter(model).generation_config)
        found.max_length = None
        found.max_new_tokens = self.max_new_tokens
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        given = {name: value for name, value in given.items() if value is not None}
        if self.temperature == 0:
            found.do_sample, found.temperature, found.top_p, found.top_k = False, None, None, None
        elif given:
            found.do_sample = True
            found.update(**given)
        return found


class Sampler:
    """Samples replies to prompts, a text or messages, from a trained model or its base model."""

    def __init__(self, loaded: Loaded, options: SamplingOptions) -> None:
        self.loaded, self.options = loaded, options
        self.renderer = Renderer(loaded.tokenizer, loaded.template)
        self.positions = positions_of(loaded.tuned)

    def reply_ids(
        self, prompt: str | list[Message], base: bool = False, samples: int = 1, streamer: Any = None
    ) -> list[list[int]]:
        """The token ids of `samples` replies, each with the token that ended it, if one did.

        Raises DataError if the prompt cannot be rendered, or leaves no position for a reply; ModelError if the model
        computes NaN.
        """
        ids = self.renderer.prompt_ids(prompt)
        with self.loaded.model(base) as model, torch.no_grad():
            causal_lm = unwrap_adapter(model)
            ends = sorted(end_token_ids(model, self.renderer.template.end_ids))
            config = self.options.generation_config(model)
            if self.positions is not None:
                if len(ids) >= self.positions:
                    raise DataError(f"The prompt has {len(ids)} tokens, but the model has {self.positions} positions.")
                config.max_new_tokens = min(config.max_new_tokens, self.positions - len(ids))
            unknown = unknown_ids(model, self.loaded.tokenizer)
            config.suppress_tokens = [*(config.suppress_tokens or []), *unknown] or None
            config.num_beams = 1  # replies are shown while they are written
            config.eos_token_id, config.pad_token_id = ends or None, self.loaded.tokenizer.pad_token_id
            if samples > 1:
                config.num_return_sequences, config.do_sample = samples, True
            if self.options.seed is not None:
                set_seed(self.options.seed)
            inputs = torch.tensor([ids], device=causal_lm.device)
            output = causal_lm.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=config,
                logits_processor=[_RefusesNaN("The base model" if base else self.loaded.name)],
                streamer=streamer,
            )
        replies = [row[len(ids) :].tolist() for row in output]
        stops = [next((n for n, token in enumerate(reply) if token in ends), len(reply)) for reply in replies]
        return [reply[: stop + 1] for reply, stop in zip(replies, stops)]  # the rest is padding

    def text(self, ids: list[int]) -> str:
        """A reply as text, without special tokens."""
        return self.loaded.tokenizer.decode(ids, skip_special_tokens=True)


class _RefusesNaN(LogitsProcessor):
    """Raises ModelError for logits that are NaN: greedy search takes token 0 then, without an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.isnan().any():
            raise ModelError(f"{self._name} computes NaN. Use an earlier checkpoint, or a lower learning_rate.")
        return scores


@dataclass(frozen=True)
class ScoredReplies:
    """Samples of one prompt, with their rewards and the terms of the rewards."""

    texts: list[str]
    ids: list[list[int]]
    rewards: list[float]
    alignment: list[float]  # in the space of the reward: whitened with use_whitening
    diversity: list[float]
    cfm: float


class Scorer:
    """Samples replies and scores them with `FeatureMatchingReward`, whose feature network is the base model."""

    def __init__(self, sampler: Sampler, samples: int) -> None:
        self._sampler, self._samples = sampler, samples

    @cached_property
    def reward(self) -> FeatureMatchingReward:
        """The reward, with the feature settings of the config, or their defaults."""
        loaded = self._sampler.loaded
        model = loaded.tuned if loaded.shares_base else loaded.base
        options = {**loaded.reward, "feature_device": None}  # the model is where the feature network is
        return FeatureMatchingReward(
            model, loaded.tokenizer, self._samples, chat_template_kwargs=loaded.template, copy=False, **options
        )

    def __call__(self, prompt: str | list[Message], reference: str, base: bool = False) -> ScoredReplies:
        """Sample replies to a prompt and score them against a reference text; see `Sampler.reply_ids`."""
        n = self._samples
        row = self.reward.renderer.of_row({"prompt": prompt, "ground_truth": reference})
        length, positions = len(row.prompt_ids) + len(row.reference_ids), self._sampler.positions
        if positions is not None and length > positions:
            raise DataError(f"Prompt and reference have {length} tokens, but the model has {positions} positions.")
        ids = self._sampler.reply_ids(prompt, base, n)
        rewards = self.reward([prompt] * n, completion_ids=ids, ground_truth=[reference] * n)
        match = self.reward.last
        return ScoredReplies(
            [self._sampler.text(reply) for reply in ids],
            ids,
            rewards,
            match.alignment.flatten().tolist(),
            match.diversity.flatten().tolist(),
            match.cfm.item(),
        )


COMMANDS = {
    "/base": "answer with the base model",
    "/tuned": "answer with the trained model",
    "/reset": "forget the conversation",
    "/help": "show these commands",
    "/exit": "end the session, as Ctrl-D does",
}


EMPTY = "(The reply is empty: the model ended it at once.)"


class _Printed(TextStreamer):
    """Prints a reply while it is generated; in a terminal with control characters as visible symbols."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text) if sys.stdout.isatty() else text, stream_end)


class Session:
    """A conversation, or completions of texts, as `write` makes of prompts, of a trained model, its base or both;
    rewards with a `scorer`."""

    def __init__(
        self,
        sampler: Sampler,
        write: Callable[[str], str | list[Message]],
        base: bool = False,
        compare: bool = False,
        scorer: Scorer | None = None,
        reference: str | None = None,
    ) -> None:
        self._sampler, self._write, self.base = sampler, write, base
        self._compares, self._scorer, self._reference = compare, scorer, reference
        self._console = safe_console()
        self._messages: dict[bool, list[Message]] = {False: [], True: []}

    def answer(self, text: str) -> None:
        """Answer one prompt, and print the reply."""
        if self._scorer is not None:
            sides = (True, False) if self._compares else (self.base,)
            found = [(side, self._scorer(self._prompt(text, side), self._reference, side)) for side in sides]
            self._console.print(Group(*(_table("base" if side else "tuned", scored) for side, scored in found)))
        elif self._compares:
            replies = {"base": self._reply(text, True), "tuned": self._reply(text, False)}
            shown = {title: reply if reply.strip() else EMPTY for title, reply in replies.items()}
            width = self._console.width // 2 - 1
            panels = [Panel(Text(reply), title=title, width=width) for title, reply in shown.items()]
            self._console.print(Columns(panels))
        else:
            streamer = _Printed(self._sampler.loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
            if not self._reply(text, self.base, streamer).strip():
                say(EMPTY, err=True)

    def run(self, read: Callable[[str], str] = input) -> None:
        """Read prompts and answer them until the end of input, /exit or Ctrl-C."""
        kind = "completion" if isinstance(self._write("..."), str) else "chat"
        say(f"{self._sampler.loaded.name}: {kind}. /help shows the commands; Ctrl-D ends the session.")
        while True:
            try:
                line = read(f"{'base' if self.base else 'tuned'}> ").strip()
            except (EOFError, KeyboardInterrupt):
                say()
                return
            if line == "/exit":
                return
            if line in ("/base", "/tuned"):
                self.base = line == "/base"
            elif line == "/reset":
                self._messages = {False: [], True: []}
            elif line == "/help":
                for command, about in COMMANDS.items():
                    say(f"{command}  {about}")
            elif line.startswith("/") and " " not in line:
                say(f"Unknown command {line}; /help shows the commands.")
            elif line:
                try:
                    self.answer(line)
                except KeyboardInterrupt:
                    say("\n(stopped)")
                except DataError as error:  # such as a conversation that is too long
                    say(error, err=True)

    def _prompt(self, text: str, base: bool) -> str | list[Message]:
        asked = self._write(text)
        return asked if isinstance(asked, str) else [*(self._messages[base] or asked[:-1]), asked[-1]]

    def _reply(self, text: str, base: bool, streamer: TextStreamer | None = None) -> str:
        prompt = self._prompt(text, base)
        reply = self._sampler.text(self._sampler.reply_ids(prompt, base, streamer=streamer)[0])
        if isinstance(prompt, list):
            self._messages[base] = [*prompt, {"role": "assistant", "content": reply}]
        return reply


def _table(title: str, scored: ScoredReplies) -> Table:
    mean = sum(scored.rewards) / len(scored.rewards)
    table = Table(title=f"{title}: mean reward {mean:+.4f}, cfm {scored.cfm:.4f}")
    for column in ("reward", "alignment", "diversity"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("reply", overflow="fold")
    rows = zip(scored.rewards, scored.alignment, scored.diversity, scored.texts)
    for reward, alignment, diversity, text in rows:
        table.add_row(f"{reward:+.4f}", f"{alignment:+.4f}", f"{diversity:+.4f}", Text(text))
    return table
