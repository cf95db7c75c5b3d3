"""A small chat model that either calls the calculator of the examples, or answers, with equal probability."""

import json
from importlib import resources
from pathlib import Path

import torch

from tests.structured.conftest import chat_model, make_chat_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2 + 3"}}\n</tool_call>'
ANSWER = "5"
RESULT = (  # what Qwen3's template puts between the end of a call and the next turn
    "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_LOGIT = 11.0  # of the tokens that can follow; the others have logits near 0


def tool_tokenizer():
    """The byte-level tokenizer with Qwen3's chat template, which presents tools, and one token for the whole call."""
    tokenizer = make_chat_tokenizer()
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = (resources.files("trl") / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    tokenizer.add_tokens([CALL])
    return tokenizer


def tool_model(tokenizer):
    """A Llama whose next token depends on the last one: a call or the answer after a line break, then the end."""
    model = chat_model(tokenizer, num_hidden_layers=2, max_position_embeddings=2048)
    call, end = (tokenizer.convert_tokens_to_ids(token) for token in (CALL, "<|im_end|>"))
    answer, line = (tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in (ANSWER, "\n"))
    follows = {line: [call, answer], call: [end], answer: [end]}
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.01 if "layers" in name else 1.0)
        embeddings, head = model.get_input_embeddings().weight, model.lm_head.weight
        head.normal_(0, 0.01)
        for token, others in follows.items():
            direction = embeddings[token] / embeddings[token].norm()
            head[others] += direction * _LOGIT / embeddings.shape[1] ** 0.5
    return model


def make_tool_model(folder: Path) -> Path:
    """Save the model in `folder`, with rows in rows.jsonl whose columns are those of GSM8K."""
    tokenizer = tool_tokenizer()
    tool_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [{"question": f"What is 2 + 3, {name}?", "answer": "The sum.\n#### 5"} for name in ("Ada", "Bo", "Cy", "Di")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4), encoding="utf-8")
    return folder
