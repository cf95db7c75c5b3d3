"""A tiny chat model for structured mode: byte-level tokenizer, ChatML template, end-of-turn token."""

import pytest
import torch

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2}


def make_chat_tokenizer():
    """One token per byte, and four special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|endoftext|>", chat_template=CHATML
    )


def chat_model(tokenizer, seed=0, **changes):
    """A random Llama whose weights are large enough that its distributions are far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 512, **changes}
    config = LlamaConfig(vocab_size=len(tokenizer), **ids, **sizes)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.12)
    return model.eval()


def save_chat_model(folder, **changes):
    """Write a `chat_model` and its tokenizer into `folder`, which is returned."""
    tokenizer = make_chat_tokenizer()
    chat_model(tokenizer, seed=1, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def lora(model, seed=0, scale=0.1, **changes):
    """`model` with a LoRA adapter that is not the identity."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    wrapped = get_peft_model(model, LoraConfig(**settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, scale)
    return wrapped


@pytest.fixture
def model(chat_tokenizer):
    return chat_model(chat_tokenizer)


@pytest.fixture
def build(chat_tokenizer, tmp_path):
    """`build(policy, dataset, kind=..., **changes)`: a trainer, of a policy with an adapter unless another is given."""
    from tests.structured.trainers import make

    def built(policy=None, dataset=None, tokenizer=chat_tokenizer, folder=tmp_path, **changes):
        policy = lora(chat_model(chat_tokenizer)) if policy is None else policy
        return make(policy, tokenizer, folder, dataset, **changes)

    return built
