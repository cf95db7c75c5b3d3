"""The real model of `ebft fetch`: its tokens are the published tokenizer's, and its answers end where they should."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CODE = (
    'def total(xs):\n    """Add up, naïvely 🙂."""\n    return sum(\n        [\n            1, 22,  333,\n\t]\n    )\n'
)


def test_tokens_and_answers_that_end_with_the_end_of_turn(smollm2_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token]
    assert special == ["<|im_start|>", "<|im_end|>", "<|im_end|>"] and len(tokenizer) == 49152
    assert tokenizer.tokenize("\n    12") == ["ĊĠĠĠĠ", "1", "2"]  # digits are alone, and leave the spaces together
    ids = tokenizer(CODE)["input_ids"]
    assert tokenizer.bos_token_id not in ids and tokenizer.decode(ids) == CODE
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(CODE)["input_ids"] == ids
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    assert model.dtype == torch.float32
    question = [{"role": "user", "content": "What is the capital of France?"}]
    given = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    prompt = tokenizer.apply_chat_template(question, **given)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
