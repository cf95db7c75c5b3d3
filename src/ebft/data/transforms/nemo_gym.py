"""Rows of NeMo Gym: `{responses_create_params, agent_ref, ...}` -> `{prompt, nemo_gym_row, nemo_gym_server}`.

All messages are the prompt. `nemo_gym_row` is the line of the file, unchanged: its nested values must reach the servers
as they are, but a table of all rows would add to each of them the keys of the others. `nemo_gym_server` is the name of
the row's server: that of `agent_ref`, or else the `server_name` of the file in `nemo_gym_datasets`.
"""

import json
from typing import Any

from ebft.data.messages import Message
from ebft.errors import DataError
from ebft.nemo_gym.keys import path_in


def nemo_gym(cfg, dataset, **kwargs):
    """Transform for rows of NeMo Gym."""
    names = {path_in(cfg.nemo_gym_dir, entry.path): entry.server_name for entry in cfg.nemo_gym_datasets}
    server_name = names.get(path_in(".", dataset.path))

    def transform_fn(example, tokenizer=None):
        row = _parsed(example["line"])
        return {
            "prompt": _messages(row["responses_create_params"]),
            "nemo_gym_row": example["line"],
            "nemo_gym_server": _server(row, server_name),
        }

    return transform_fn, {"remove_columns": "__all__"}


def _parsed(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"the line is not valid JSON ({error}).") from error
    params = row.get("responses_create_params") if isinstance(row, dict) else None
    if not isinstance(params, dict) or not isinstance(params.get("input"), str | list):
        raise DataError("a row of NeMo Gym must contain responses_create_params with the messages in `input`.")
    return row


def _server(row: dict[str, Any], server_name: str | None) -> str:
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, dict) else None
    name = server_name if name is None else name
    if not isinstance(name, str) or not name:
        raise DataError(
            "the row has no agent_ref with a name, and its file has no server_name. Set server_name in "
            "nemo_gym_datasets."
        )
    return name


def _messages(params: dict[str, Any]) -> list[Message]:
    """The messages of a request of the Responses API, as a chat template expects them."""
    given = params["input"]
    given = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [{"role": "system", "content": params["instructions"]}] if params.get("instructions") else []
    for item in given:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            messages.append({"role": "assistant", "tool_calls": [{"type": "function", "function": call}]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": item.get("output")})
        elif kind in (None, "message") and isinstance(item, dict) and "role" in item:
            messages.append({"role": item["role"], "content": item.get("content")})
        elif kind != "reasoning":  # templates leave out earlier reasoning
            raise DataError(f"responses_create_params.input contains {item!r:.80}, which is not a supported message.")
    return messages
