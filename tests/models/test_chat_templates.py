"""The named chat templates: renderings and trained texts written out from the formats that the models document."""

import warnings

import pytest
from datasets import Dataset
from jinja2 import TemplateError

from ebft.catalog import TEMPLATES, named_template
from ebft.data.apply import Source, tokenise
from ebft.models.pretrained import apply_chat_template_choice
from ebft.run.config.schema import RunConfig
from tests.structured.conftest import make_chat_tokenizer
from tests.structured.trainers import ASSISTANT, USER

SYSTEM = {"role": "system", "content": "Be brief"}
TURNS = [USER("Hi"), ASSISTANT("Hello"), USER("Bye"), ASSISTANT("See you")]


def written(system, user, start, end, space=""):
    """The system prompt and three turns with the start of a reply, and what is trained on in all turns."""
    hello, see_you = (f"{space}{text}{end}" for text in ("Hello", "See you"))
    return system + user.format("Hi") + start + hello + user.format("Bye") + start, hello + see_you


CHATML = ("<|im_start|>system\nBe brief<|im_end|>\n", "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n",
          "<|im_end|>\n")  # fmt: skip
GEMMA = "<start_of_turn>user\n{}<end_of_turn>\n", "<start_of_turn>model\n", "<end_of_turn>\n"
GEMMA4 = written("BOS<|turn>system\nBe brief<turn|>\n", "<|turn>user\n{}<turn|>\n", "<|turn>model\n", "<turn|>\n")
GEMMA4 = (GEMMA4[0] + "<|channel>thought\n<channel|>", GEMMA4[1])  # the prompt ends with an empty thought
PHI = "<|system|>\nBe brief<|end|>\n", "<|user|>\n{}<|end|>\n", "<|assistant|>\n", "<|end|>\n"
TURN = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>".format
WITH_SYSTEM = [text.replace("Hi", "Be brief\n\nHi", 1) for text in written("BOS", *GEMMA)]
# Mistral's have the system prompt in the last turn of the user.
FORMATS = {
    "alpaca": written("BOSBe brief\n\n", "### Instruction:\n{}\n\n", "### Response:\n", "EOS\n\n"),
    "chatml": written(*CHATML),
    "cohere": written(f"BOS{TURN('SYSTEM')}Be brief<|END_OF_TURN_TOKEN|>", TURN("USER") + "{}<|END_OF_TURN_TOKEN|>",
                      TURN("CHATBOT"), "<|END_OF_TURN_TOKEN|>"),
    "deepseek_v2": written("BOSBe brief\n\n", "User: {}\n\n", "Assistant:", "EOS", " "),
    "deepseek_v3": written("BOSBe brief", "<｜User｜>{}", "<｜Assistant｜>", "EOS"),
    "gemma": written("BOS", *GEMMA),
    "gemma3": tuple(WITH_SYSTEM),
    "gemma3n": tuple(WITH_SYSTEM),
    "gemma4": GEMMA4,
    "gemma4_unified": GEMMA4,
    "llama3": written("BOS<|start_header_id|>system<|end_header_id|>\n\nBe brief<|eot_id|>",
                      "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
                      "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "llama4": written("BOS<|header_start|>system<|header_end|>\n\nBe brief<|eot|>",
                      "<|header_start|>user<|header_end|>\n\n{}<|eot|>",
                      "<|header_start|>assistant<|header_end|>\n\n", "<|eot|>"),
    "llava": ("Be brief USER: Hi ASSISTANT: Hello USER: Bye ASSISTANT:", " Hello  See you "),
    "metharme": written("BOS<|system|>Be brief", "<|user|>{}", "<|model|>", "EOS"),
    "mistral_v1": ("BOS [INST] Be brief\n\nHi [/INST] HelloEOS [INST] Bye [/INST]", " HelloEOS See youEOS"),
    "mistral_v2v3": ("BOS[INST] Hi[/INST] HelloEOS[INST] Be brief\n\nBye[/INST]", " HelloEOS See youEOS"),
    "mistral_v3_tekken": ("BOS[INST]Hi[/INST]HelloEOS[INST]Be brief\n\nBye[/INST]", "HelloEOSSee youEOS"),
    "mistral_v7_tekken": written("BOS[SYSTEM_PROMPT]Be brief[/SYSTEM_PROMPT]", "[INST]{}[/INST]", "", "EOS"),
    "nemotron_h": written(*CHATML),
    "phi_3": written(*PHI),
    "phi_35": written(*PHI),
    "phi_4": written("<|im_start|>system<|im_sep|>Be brief<|im_end|>", "<|im_start|>user<|im_sep|>{}<|im_end|>",
                     "<|im_start|>assistant<|im_sep|>", "<|im_end|>"),
    # The reply to the last user turn has a block for thinking.
    "qwen3": (written(*CHATML)[0], "Hello<|im_end|>\n<think>\n\n</think>\n\nSee you<|im_end|>\n"),
    "qwen_25": written(*CHATML),
}  # fmt: skip


@pytest.fixture
def tokenizer():
    """One token per byte."""
    tokenizer = make_chat_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "BOS", "eos_token": "EOS"})
    return tokenizer


def rendered(tokenizer, name, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, chat_template=named_template(name), tokenize=False, **kwargs)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(tokenizer, name):
    assert set(FORMATS) == set(TEMPLATES)
    messages = TURNS if name == "gemma" else [SYSTEM, *TURNS]
    assert rendered(tokenizer, name, messages[:-1], add_generation_prompt=True) == FORMATS[name][0]
    with pytest.raises(TemplateError, match="is for chats without tools; use tokenizer_default or a file"):
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
    thoughtful = lambda text: ASSISTANT(f"<think>\nhm\n</think>\n\n{text}")
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
        with pytest.warns(UserWarning, match=f"chat_template: {name} replaces the template of the tokenizer, which"):
            apply_chat_template_choice(tokenizer, name)
        assert tokenizer.chat_template == named_template(name)


@pytest.mark.parametrize(("choice", "markers"), [
    ("llama3", "llama3 writes <|start_header_id|>, <|end_header_id|>, <|eot_id|>, which the vocabulary lacks"),
    ("<|a|>{{ messages[0].content }}", "'<|a|>{{ messages[0].content }}' writes <|a|>, which the vocabulary lacks"),
])  # fmt: skip
def test_markers_that_the_tokenizer_splits_give_one_warning(tokenizer, choice, markers):
    tokenizer.chat_template = None
    with warnings.catch_warnings(record=True, action="always") as caught:
        apply_chat_template_choice(tokenizer, choice)
        apply_chat_template_choice(tokenizer, choice)  # as with a model that was trained so
    (message,) = (str(each.message) for each in caught)
    assert message.startswith(f"chat_template: {markers}") and "Add them: tokens: [" in message
