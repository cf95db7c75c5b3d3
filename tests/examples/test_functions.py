"""Documented functions as prompt/completion rows."""

import textwrap

from ebft.tools.quickstart.smollm2 import Function, function_of, function_text, functions, unique, within_tokens

FILE = textwrap.dedent(
    '''
    class Shape:
        def area(self, scale=1):
            """Return the area."""

            # of a rectangle
            return scale * self.width * self.height

    def bare(x):
        return x

    def only_documented():
        """Do nothing."""

    def usage():
        """Print the usage."""
        print("""
    column 0
    """)

    def one_line(): "Return 1."; return 1

    async def later(job):
        """Wait for it.

        >>> later(1)
        """
        return await job
    '''
)


def found(**limits) -> dict[str, Function]:
    return {function.name: function for function in functions({"shapes.py": FILE}, **limits)}


def test_only_whole_documented_functions_with_a_body_are_taken():
    area = found()["area"]
    assert area.input == 'def area(self, scale=1):\n    """Return the area."""'
    assert area.output == "\n\n    # of a rectangle\n    return scale * self.width * self.height\n"
    assert area.file == "shapes.py" and not area.has_examples
    assert set(found()) == {"area", "later"} and found()["later"].has_examples
    for limit, text in (("longest_input", area.input), ("longest_output", area.output)):
        assert "area" in found(**{limit: len(text)}) and "area" not in found(**{limit: len(text) - 1})


def test_a_completion_ends_where_its_function_does():
    prompt = 'def f(x):\n    "Double."'
    completion = "\n    y = 2 * x\n\n    return y\n\ndef g(x):\n    return x"
    assert function_text(prompt, completion) == prompt + "\n    y = 2 * x\n\n    return y\n"
    assert len(function_of(prompt, completion).body) == 3
    for completion in ("", "\n", "\n    return (", "\nreturn x", "\nThis function doubles."):
        assert function_of(prompt, completion) is None, completion


class Words:
    """A tokenizer whose tokens are words."""

    def __call__(self, text):
        return type("Encoding", (), {"input_ids": text.split()})


def test_limits_in_tokens():
    row = Function("def f(x): 'Two words.'", "\n    return 2 * x\n", "f", "f.py")
    kept = lambda longest, output: list(within_tokens([row], Words(), longest, output))
    assert kept(4, (4, 4)) == [row]
    assert not kept(3, (4, 4)) and not kept(4, (5, 9)) and not kept(4, (1, 3))


def test_a_body_is_taken_once():
    first, second = (Function(name, "\n    return 1\n", name, "f.py") for name in "ab")
    seen: set[str] = set()
    assert list(unique([first, second], seen)) == [first]
    assert list(unique([first], seen)) == []
