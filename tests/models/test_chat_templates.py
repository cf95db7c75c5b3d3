"""The named chat templates: renderings and trained texts written out from the formats that the models document."""

import warnings

import pytest
from datasets import Dataset
from jinja2 import TemplateError

from ebft.data.apply import Source, tokenise
from ebft.models.tokenizer import NAMES, apply_chat_template_choice, named_template
from ebft.run.config.schema import RunConfig
from tests.structured.conftest import make_chat_tokenizer

SYSTEM = {"role": "system", "content": "Be brief"}
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]
CHATML = """<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant
Hello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"""
GEMMA = """BOS<start_of_turn>user\nBe brief\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>
<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"""
PHI = """<|system|>\nBe brief<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>
Hello<|end|>\n<|user|>\nBye<|end|>\n<|assistant|>\n"""
# The system prompt and three turns with the start of a reply, and what is trained on in all turns.
FORMATS = {
    "alpaca": (
        "BOSBe brief\n\n### Instruction:\nHi\n\n### Response:\nHelloEOS\n\n### Instruction:\nBye\n\n### Response:\n",
        "HelloEOS\n\nSee youEOS\n\n",
    ),
    "chatml": (CHATML, "Hello<|im_end|>\nSee you<|im_end|>\n"),
    "cohere": (
        "BOS<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>"
        "Hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Hello<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Bye<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "Hello<|END_OF_TURN_TOKEN|>See you<|END_OF_TURN_TOKEN|>",
    ),
    "deepseek_v2": ("BOSBe brief\n\nUser: Hi\n\nAssistant: HelloEOSUser: Bye\n\nAssistant:", " HelloEOS See youEOS"),
    "deepseek_v3": ("BOSBe brief<｜User｜>Hi<｜Assistant｜>HelloEOS<｜User｜>Bye<｜Assistant｜>", "HelloEOSSee youEOS"),
    "gemma": (GEMMA.replace("Be brief\n\n", ""), "Hello<end_of_turn>\nSee you<end_of_turn>\n"),
    "gemma3": (GEMMA, "Hello<end_of_turn>\nSee you<end_of_turn>\n"),
    "gemma3n": (GEMMA, "Hello<end_of_turn>\nSee you<end_of_turn>\n"),
    "llama3": (
        "BOS<|start_header_id|>system<|end_header_id|>\n\nBe brief<|eot_id|><|start_header_id|>user<|end_header_id|>"
        "\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "Hello<|eot_id|>See you<|eot_id|>",
    ),
    "llama4": (
        "BOS<|header_start|>system<|header_end|>\n\nBe brief<|eot|><|header_start|>user<|header_end|>\n\nHi<|eot|>"
        "<|header_start|>assistant<|header_end|>\n\nHello<|eot|><|header_start|>user<|header_end|>\n\nBye<|eot|>"
        "<|header_start|>assistant<|header_end|>\n\n",
        "Hello<|eot|>See you<|eot|>",
    ),
    "mistral_v1": ("BOS [INST] Be brief\n\nHi [/INST] HelloEOS [INST] Bye [/INST]", " HelloEOS See youEOS"),
    "mistral_v2v3": ("BOS[INST] Hi[/INST] HelloEOS[INST] Be brief\n\nBye[/INST]", " HelloEOS See youEOS"),
    "mistral_v3_tekken": ("BOS[INST]Hi[/INST]HelloEOS[INST]Be brief\n\nBye[/INST]", "HelloEOSSee youEOS"),
    "mistral_v7_tekken": (
        "BOS[SYSTEM_PROMPT]Be brief[/SYSTEM_PROMPT][INST]Hi[/INST]HelloEOS[INST]Bye[/INST]",
        "HelloEOSSee youEOS",
    ),
    "phi_3": (PHI, "Hello<|end|>\nSee you<|end|>\n"),
    "phi_35": (PHI, "Hello<|end|>\nSee you<|end|>\n"),
    "phi_4": (
        "<|im_start|>system<|im_sep|>Be brief<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant"
        "<|im_sep|>Hello<|im_end|><|im_start|>user<|im_sep|>Bye<|im_end|><|im_start|>assistant<|im_sep|>",
        "Hello<|im_end|>See you<|im_end|>",
    ),
    # The reply to the last user turn has a block for thinking.
    "qwen3": (CHATML, "Hello<|im_end|>\n<think>\n\n</think>\n\nSee you<|im_end|>\n"),
    "qwen_25": (CHATML, "Hello<|im_end|>\nSee you<|im_end|>\n"),
}


@pytest.fixture
def tokenizer():
    """One token per byte."""
    tokenizer = make_chat_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "BOS", "eos_token": "EOS"})
    return tokenizer


def rendered(tokenizer, name, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, chat_template=named_template(name), tokenize=False, **kwargs)


def chat(name):
    return TURNS if name == "gemma" else [SYSTEM, *TURNS]


@pytest.mark.parametrize("name", FORMATS)
def test_formats(tokenizer, name):
    assert set(FORMATS) == set(NAMES)
    messages = chat(name)
    assert rendered(tokenizer, name, messages[:-1], add_generation_prompt=True) == FORMATS[name][0]
    with pytest.raises(TemplateError, match="has no format for tools|is for chats without tools"):
        rendered(tokenizer, name, TURNS, tools=[{"type": "function", "function": {"name": "f"}}])
    tokenizer.chat_template = named_template(name)
    config = RunConfig.from_dict({"base_model": "x", "datasets": [{"path": "x", "type": "chat_template"}]})
    row = tokenise(Source(config.datasets[0], Dataset.from_list([{"messages": messages}])), config, tokenizer)[0]
    assert tokenizer.decode(row["input_ids"]) == rendered(tokenizer, name, messages)
    assert tokenizer.decode([label for label in row["labels"] if label != -100]) == FORMATS[name][1]


TOOL = {"role": "tool", "content": "x"}
REFUSED = [("gemma", [SYSTEM, *TURNS], "gemma has no system turn; use gemma3")]
REFUSED += [(name, [*TURNS, TOOL], f"{name} has no role tool") for name in ("deepseek_v2", "cohere", "alpaca")]
REFUSED += [(name, [TURNS[0], TURNS[2]], f"{name} needs turns of user and assistant that alternate")
            for name in ("gemma", "gemma3", "mistral_v1")]  # fmt: skip


def test_chats_that_are_refused_and_a_system_prompt_of_its_own(tokenizer):
    for name, messages, error in REFUSED:
        with pytest.raises(TemplateError, match=error):
            rendered(tokenizer, name, messages)
    assert "You are Qwen, created by Alibaba Cloud" in rendered(tokenizer, "qwen_25", TURNS[:1])


def test_thinking_of_qwen3(tokenizer):
    thoughtful = lambda text: {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{text}"}
    text = rendered(tokenizer, "qwen3", [TURNS[0], thoughtful("Hello"), TURNS[2], thoughtful("Bye")])
    user = lambda text: f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert text == f"{user('Hi')}Hello<|im_end|>\n{user('Bye')}<think>\nhm\n</think>\n\nBye<|im_end|>\n"
    apart = {"role": "assistant", "content": "Bye", "reasoning_content": "hm"}
    assert rendered(tokenizer, "qwen3", [TURNS[0], thoughtful("Hello"), TURNS[2], apart]) == text
    off = rendered(tokenizer, "qwen3", TURNS[:1], add_generation_prompt=True, enable_thinking=False)
    assert off == user("Hi") + "<think>\n\n</think>\n\n"


def test_the_template_of_the_tokenizer_is_replaced_unless_it_has_the_same_format(tokenizer):
    chatml = named_template("chatml")
    own = chatml.replace("assistant\\n' -", "assistant\\n' + ('' if tools else '') -") + " "
    tokenizer.chat_template = own
    with warnings.catch_warnings(action="error"):
        apply_chat_template_choice(tokenizer, "chatml")
    assert tokenizer.chat_template == own
    # The second ends finished chats differently.
    for there, name in ((own, "phi_4"), (chatml + "{% if not add_generation_prompt %}EOS{% endif %}", "chatml")):
        tokenizer.chat_template = there
        with pytest.warns(
            UserWarning, match=f"chat_template: {name} replaces the template of the tokenizer, which has"
        ):
            apply_chat_template_choice(tokenizer, name)
        assert tokenizer.chat_template == named_template(name)


@pytest.mark.parametrize(("choice", "markers"), [
    ("llama3", "llama3 writes <|start_header_id|>, <|end_header_id|>, <|eot_id|>, which the vocabulary lacks"),
    ("<|a|>{{ messages[0].content }}", "'<|a|>{{ messages[0].content }}' writes <|a|>, which the vocabulary lacks"),
])  # fmt: skip
def test_markers_that_the_tokenizer_splits_give_one_warning(tokenizer, choice, markers):
    tokenizer.chat_template = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apply_chat_template_choice(tokenizer, choice)
        apply_chat_template_choice(tokenizer, choice)  # as with a model that was trained so
    (message,) = (str(each.message) for each in caught)
    assert message.startswith(f"chat_template: {markers}") and "Add them: tokens: [" in message
