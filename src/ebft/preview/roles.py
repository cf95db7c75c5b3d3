"""What the tokens of a row are: prompt, reference, the end of a turn, or what is between two turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.data.conversation import Renderer
from ebft.data.transforms.rows import IGNORE
from ebft.preview.view import Run, printable

PROMPT, REFERENCE, END, BETWEEN, AFTER = "prompt", "reference", "end of turn", "between turns", "after the reference"


def generation_prompt(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None) -> str | None:
    """A line with what the chat template puts before a reply, None if there is no template or it is unknown."""
    if tokenizer.chat_template is None:
        return None
    asked = [{"role": "user", "content": "?"}]
    try:
        plain, whole = (
            tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=added, **(kwargs or {}))
            for added in (False, True)
        )
    except Exception:  # the template does not accept such a chat, or fails in another way
        return None
    if not whole.startswith(plain):
        return None
    return f'Generation prompt of the chat template: "{printable(whole[len(plain) :])}"'


class Roles:
    """Finds the roles of tokens, as runs, with the tokens that end a turn of a tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._ends = tokenizer, Renderer(tokenizer).end_ids()

    def of_document(self, document: Mapping[str, Any]) -> list[Run]:
        """Roles of a row of `input_ids`, `labels` and `prompt_length`; raw text has the role text.

        Turns that are trained on are references. Tokens without a label between two of them are between turns, unless
        they are in the last one, such as a thinking block.
        """
        ids, start = document["input_ids"], document["prompt_length"]
        trained = [label != IGNORE for label in document.get("labels", ids)]
        if not start and all(trained):
            return runs(["text"] * len(ids))
        if start and all(trained[:start]):  # train_on_inputs
            trained[:start] = [False] * start
        return runs(self._names(ids, trained, start, REFERENCE))

    def of_completion(
        self, prompt: Sequence[int], completion: Sequence[int], name: str, before: str = PROMPT
    ) -> list[Run]:
        """Roles of the ids of a prompt, which are named `before`, and of a completion, which is named `name`."""
        names = self._names(completion, [True] * len(completion), 0, name)
        return runs([before] * len(prompt) + names)

    def of_pair(self, ids: Sequence[int], other: Sequence[int], name: str) -> list[Run]:
        """Roles of one of two conversations that differ in their last reply, which is named `name`."""
        shared = len(commonprefix([list(ids), list(other)]))
        return self.of_completion(ids[:shared], ids[shared:], name, "in both texts")

    def of_gap(self, ids: Sequence[int]) -> list[Run]:
        """Roles of what is given between two replies: the end of the first one, and what follows."""
        ended = next((index + 1 for index, token in enumerate(ids) if token in self._ends), 0)
        return runs([END] * ended + [BETWEEN] * (len(ids) - ended))

    def _names(self, ids: Sequence[int], trained: Sequence[bool], last_turn: int, reference: str) -> list[str]:
        """The role of each token; the last turn starts at `last_turn`."""
        learned = [index for index, is_trained in enumerate(trained) if is_trained]
        first, last = min([last_turn, *learned[:1]]), max(learned, default=-1)
        names, ended = [PROMPT] * first, False
        for index in range(first, len(ids)):
            # White space after the token that ends a turn still belongs to the end.
            goes_on = trained[index] and index > first and trained[index - 1] and self._is_space(ids[index])
            if index == last_turn or (trained[index] and not goes_on):
                ended = False
            if ids[index] in self._ends and (trained[index] or names[-1:] == [reference]):
                names.append(END)
                ended = True
            elif not trained[index] and index > last:
                names.append(END if ended and self._is_space(ids[index]) else AFTER)
            elif ended:
                names.append(END if trained[index] else BETWEEN)
            else:
                names.append(reference if trained[index] or index >= last_turn else BETWEEN)
        return names

    def _is_space(self, token: int) -> bool:
        return not self._tokenizer.decode([token]).strip()


def role_steps(labels: Sequence[int]) -> list[Run]:
    """Roles of a row whose labels are the classes of steps: each run ends with a label."""
    names, number, last = [], 1, max((index for index, label in enumerate(labels) if label != IGNORE), default=-1)
    for index, label in enumerate(labels):
        step = f"{PROMPT} and step 1" if number == 1 else f"step {number}"
        names.append(step if index <= last else "after the last label")
        number += label != IGNORE
    return runs(names)


def runs(names: Sequence[str]) -> list[Run]:
    """Runs of tokens with the same name."""
    found, start = [], 0
    for name, group in groupby(names):
        stop = start + len(list(group))
        found.append(Run(name, start, stop))
        start = stop
    return found
