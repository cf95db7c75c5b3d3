"""The rewards of the examples, on completions as texts and as chats."""

import pytest

from ebft.tools.fetch import examples_folder


@pytest.fixture
def verifier(monkeypatch):
    monkeypatch.syspath_prepend(examples_folder())
    import verifier

    return verifier


BARE = "def f():\n    return 1\n"
HALF = 'Here it is:\n```python\ndef f():\n    """One."""\n    return 1\n\ndef g():\n    return 2\n```\n'


@pytest.mark.parametrize(
    ("text", "parses", "documented"),
    [(BARE, 1, 0), (HALF, 1, 0.5), ("x = 1", 1, 0), ("def f(:", 0, 0), ("", 0, 0), ("null\0byte", 0, 0)],
)
def test_rewards_of_code(verifier, text, parses, documented):
    for completions in ([text], [[{"role": "assistant", "content": text}]]):
        assert verifier.parses(completions) == [parses] and verifier.documented(completions) == [documented]
