"""Rows of the built-in transforms for structured mode, written out by hand."""

import pytest

from ebft.data import apply, transforms
from tests.data.conftest import assistant, user

SYSTEM, HI = {"role": "system", "content": "Be kind."}, user("Hi")
GREETED = [SYSTEM, assistant("Welcome."), HI, assistant("Hello"), user("2+2?"), assistant("4"), user("Bye")]
TOLD = assistant("Hello", weight=0)
CALL = [{"name": "add"}]
WHOLE = [{"type": "function", "function": CALL[0]}]
CALLED = [user("2+2?"), assistant(None, tool_calls=CALL, name=None), {"role": "tool", "content": "4"}, assistant("4.")]
PARTS = [HI, assistant([{"type": "text", "text": "Hello"}, " you"])]
EARLIER = assistant("<reasoning>warm up</reasoning>\n1")
PROMPT = [user("1+0?"), EARLIER, user("2+2?")]
APART = [PROMPT[0], assistant("1", reasoning_content="warm up"), PROMPT[2]]
THINKS = assistant("4", reasoning_content="two and two")
THOUGHT, JOINED = "<thinking> two and two </thinking>\n4", "<think>\ntwo and two\n</think>\n\n4"
TAGGED = [user("What is <think>a</think>?"), assistant("A tag.", reasoning_content="hm"), user("So?"), assistant("So.")]
MULTITURN, REASONING = "ebft_chat_multiturn.transform", "ebft_reasoning.transform"


@pytest.mark.parametrize(("type", "row", "prompt", "truth", "rest"), [
    ("ebft_opencode.transform", {"input": "Add 1 2", "output": "3", "id": 7}, [user("Add 1 2")], "3", None),
    (MULTITURN, GREETED, GREETED[:3], "Hello", GREETED[4:6]),
    (MULTITURN, CALLED, [CALLED[0], {"role": "assistant", "tool_calls": WHOLE}, CALLED[2]], "4.", []),
    (MULTITURN, {"prompt": GREETED[2:5], "ground_truth": "4"}, [HI, TOLD, GREETED[4]], "4", []),
    (MULTITURN, {"prompt": [HI], "ground_truth": '[{"sum": 4}]'}, [HI], '[{"sum": 4}]', []),
    (MULTITURN, {"prompt": [HI], "completion": '[{"role": "assistant", "content": "4"}]'}, [HI], "4", []),
    (f"{MULTITURN}_all_turns", {"prompt": GREETED[2:3], "completion": GREETED[3:]}, [[HI], GREETED[2:5]],
     ["Hello", "4"], None),
    (f"{MULTITURN}_last_turn", GREETED, GREETED[:5], "4", None),
    (f"{MULTITURN}_last_turn", PARTS, [HI], "Hello you", None),
    (f"{MULTITURN}_all_turns", GREETED, [GREETED[:3], GREETED[:5]], ["Hello", "4"], None),
    (f"{MULTITURN}_all_turns", [HI], [[HI]], [None], None),
    *((function, chat, chat or [], None, rest)
      for function, rest in ((MULTITURN, []), (f"{MULTITURN}_last_turn", None))
      for chat in ([HI], [assistant("Welcome.")], [SYSTEM, assistant("Welcome.")], [], None)),
    (REASONING, [*PROMPT, assistant(THOUGHT), user("Thanks")], PROMPT, THOUGHT, None),
    (REASONING, [*PROMPT, THINKS], PROMPT, JOINED, None),
    (REASONING, [*PROMPT, assistant(THOUGHT, reasoning_content="two")], PROMPT, THOUGHT, None),
    (f"{REASONING}_answer_only", [*PROMPT, assistant(THOUGHT), user("Thanks")], PROMPT, "4", None),
    (f"{REASONING}_split_thinking", [*PROMPT, assistant(THOUGHT)], APART, JOINED, None),
    (f"{REASONING}_split_thinking", [*PROMPT, assistant("two and two</think>4")], APART, JOINED, None),
    (f"{REASONING}_split_thinking", TAGGED, TAGGED[:3], "So.", None),
])  # fmt: skip
def test_rows(make_config, chatml, type, row, prompt, truth, rest):
    config = make_config("unused", type, ebft={"mode": "structured"})
    transform_fn, map_kwargs = transforms.find_transform(type)(apply.ConfigView(config), dataset=config.datasets[0])
    assert map_kwargs["remove_columns"] == "__all__"
    found = transform_fn(row if isinstance(row, dict) else {"messages": row, "id": 3}, tokenizer=chatml)
    if map_kwargs.get("many"):
        found = {key: [each[key] for each in found] for key in found[0]}
    expected = {"prompt": prompt, "ground_truth": truth}
    assert found == (expected if rest is None else {**expected, "remaining_turns": rest})
