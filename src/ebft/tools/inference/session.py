"""A session in the terminal: prompts are read, replies are streamed, and commands start with a slash."""

from __future__ import annotations

from collections.abc import Callable

from rich.columns import Columns
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import TextStreamer

from ebft.data.messages import Message
from ebft.errors import DataError
from ebft.printed import safe_console, say
from ebft.tools.inference.sampling import Sampler, ScoredReplies, Scorer

COMMANDS = {
    "/base": "answer with the base model",
    "/tuned": "answer with the trained model",
    "/reset": "forget the conversation",
    "/help": "show these commands",
    "/exit": "end the session, as Ctrl-D does",
}


class Session:
    """A conversation, or single completions where `chats` is false, with a trained model or its base model.

    With `compare`, both answer, each with its own conversation. With `scorer` and `reference`, the rewards of samples
    are shown instead of a single reply. Ctrl-C stops a reply, and at the prompt it ends the session.
    """

    def __init__(
        self,
        sampler: Sampler,
        chats: bool,
        base: bool = False,
        compare: bool = False,
        scorer: Scorer | None = None,
        reference: str | None = None,
    ) -> None:
        self._sampler, self._chats, self.base = sampler, chats, base
        self._compares, self._scorer, self._reference = compare, scorer, reference
        self._console = safe_console()
        self._messages: dict[bool, list[Message]] = {False: [], True: []}

    def answer(self, text: str) -> None:
        """Answer one prompt, and print the reply."""
        if self._scorer is not None:
            self._show_scores(text)
        elif self._compares:
            self._show_both(text)
        else:
            streamer = TextStreamer(self._sampler.loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
            if not self._reply(text, self.base, streamer).strip():
                say("(The reply is empty: the model ended it at once.)", err=True)

    def run(self, read: Callable[[str], str] = input) -> None:
        """Read prompts and answer them until the end of input, /exit or Ctrl-C."""
        kind = "chat" if self._chats else "completion"
        say(f"{self._sampler.loaded.name}: {kind}. /help shows the commands; Ctrl-D ends the session.")
        while True:
            try:
                line = read(f"{'base' if self.base else 'tuned'}> ").strip()
            except (EOFError, KeyboardInterrupt):
                say()
                return
            if line == "/exit":
                return
            if line:
                self._handle(line)

    def _handle(self, line: str) -> None:
        if line in COMMANDS:
            self._command(line)
            return
        if line.startswith("/") and " " not in line:
            say(f"Unknown command {line}; /help shows the commands.")
            return
        try:
            self.answer(line)
        except KeyboardInterrupt:
            say("\n(stopped)")
        except DataError as error:  # such as a conversation that is too long
            say(error, err=True)

    def _command(self, name: str) -> None:
        if name in ("/base", "/tuned"):
            self.base = name == "/base"
        elif name == "/reset":
            self._messages = {False: [], True: []}
        else:
            for command, about in COMMANDS.items():
                say(f"{command}  {about}")

    def _prompt(self, text: str, base: bool) -> str | list[Message]:
        return [*self._messages[base], {"role": "user", "content": text}] if self._chats else text

    def _reply(self, text: str, base: bool, streamer: TextStreamer | None = None) -> str:
        prompt = self._prompt(text, base)
        reply = self._sampler.text(self._sampler.reply_ids(prompt, base, streamer=streamer)[0])
        if self._chats:
            self._messages[base] = [*prompt, {"role": "assistant", "content": reply}]
        return reply

    def _show_both(self, text: str) -> None:
        replies = {"base": self._reply(text, True), "tuned": self._reply(text, False)}
        width = self._console.width // 2 - 1
        panels = [Panel(Text(reply), title=title, width=width) for title, reply in replies.items()]
        self._console.print(Columns(panels))

    def _show_scores(self, text: str) -> None:
        sides = (True, False) if self._compares else (self.base,)
        found = [(side, self._scorer(self._prompt(text, side), self._reference, side)) for side in sides]
        self._console.print(Group(*(_table("base" if side else "tuned", scored) for side, scored in found)))


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
