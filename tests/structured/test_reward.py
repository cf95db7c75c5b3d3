"""FeatureMatchingReward against the naive oracle, what it refuses, and embeddings of every model family."""

import copy
import warnings

import pytest
import torch

from ebft import FeatureMatchingReward
from ebft.errors import DataError, NonFiniteLossError
from ebft.features import FeatureNetwork
from ebft.structured.reward import embed_continuations, shares_prompts
from tests.strided.families import FAMILIES, RUNNING_STATE, VOCAB, for_oracle, tiny_model
from tests.structured import conftest, oracle, trainers

LAYERS = [0.25, 0.5, 1.0]


def groups_of(tokenizer, n, kind):
    """Three groups of unequal prompts, references and completions, some of which end by themselves, one empty."""
    eos, end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")
    generator = torch.Generator().manual_seed(n)
    texts = ["hi", "a much longer question than the others, to be answered", "why?"]
    references = ["yes.", "no, and here is a longer reason", "because"]
    prompts, truths, ids = [], [], []
    for text, reference in zip(texts, references):
        prompt = text if kind == "text" else [{"role": "system", "content": "Be brief."}, trainers.USER(text)]
        for j in range(n):
            length = int(torch.randint(0 if j == 1 else 1, 20, (), generator=generator)) if j else 7
            sampled = torch.randint(4, len(tokenizer), (length,), generator=generator).tolist()
            prompts.append(prompt)
            truths.append(reference)
            ids.append(sampled + [[], [eos], [end]][j % 3] if sampled or j % 3 else [eos])
    return prompts, truths, ids


def expected(base, tokenizer, prompts, truths, ids, n, method, **options):
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    rewards = []
    for start in range(0, len(prompts), n):
        if isinstance(prompts[start], str):
            prompt = tokenizer(prompts[start])["input_ids"]
        else:
            rendered = tokenizer.apply_chat_template(prompts[start], add_generation_prompt=True, return_dict=True)
            prompt = rendered["input_ids"]
        samples = [x[:-1] if x[-1] in ends else x for x in ids[start : start + n]]
        phi = torch.stack([oracle.embedding(base, prompt, x, LAYERS, method) for x in samples])
        reference = tokenizer(truths[start], add_special_tokens=False)["input_ids"]
        rewards.append(oracle.group_rewards(phi, oracle.embedding(base, prompt, reference, LAYERS, method), **options))
    return torch.cat(rewards)


COEFFICIENTS = {"alignment_coef": 0.7, "diversity_coef": 0.3}
METHODS = ("last_token", "mean_pooling", "completion_mean", "concat")


@pytest.mark.parametrize(("kind", "n", "method", "whitening"), [
    *((kind, n, method, None) for method in METHODS for kind, n in (("text", 2), ("chat", 8), ("text", 4))),
    ("chat", 1, "mean_pooling", None),
    *(("chat", n, "mean_pooling", space) for space in ("feature", "sample") for n in (2, 3, 8)),
])  # fmt: skip
def test_equals_one_forward_per_sequence(model, chat_tokenizer, kind, n, method, whitening):
    prompts, truths, ids = groups_of(chat_tokenizer, n, kind)
    more = COEFFICIENTS if whitening else {}
    options = {"feature_layers": LAYERS, "embed_method": method, **more}
    options |= {"use_whitening": True, "whitening_space": whitening} if whitening else {}
    reward = FeatureMatchingReward(model, chat_tokenizer, num_generations=n, **options)
    found = torch.tensor(reward(prompts, None, ids, ground_truth=truths), dtype=torch.float64)
    wanted = expected(model, chat_tokenizer, prompts, truths, ids, n, method, whitening=whitening, **more)
    assert (found - wanted).abs().max() < (1e-3 if whitening else 1e-5)
    assert wanted.std() > 3e-3  # the comparison says something


def test_features_come_from_the_base_model_as_it_was(model, chat_tokenizer, tmp_path):
    prompts, truths, ids = groups_of(chat_tokenizer, 2, "text")
    model.save_pretrained(tmp_path)
    networks = model, str(tmp_path), conftest.lora(conftest.chat_model(chat_tokenizer))
    of_model, of_name, of_adapter = (FeatureMatchingReward(network, chat_tokenizer, 2) for network in networks)
    before = of_model(prompts, None, ids, ground_truth=truths)
    assert of_name(prompts, None, ids, ground_truth=truths) == before
    assert of_adapter(prompts, None, ids, ground_truth=truths) == pytest.approx(before, abs=1e-5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.1)
    assert of_model(prompts, None, ids, ground_truth=truths) == before


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"ground_truth": ["a", "a", " ", " "]}, DataError, "row 2 has no reference"),
    ({"prompts": ["a"] * 3, "completion_ids": [[5]] * 3, "ground_truth": ["x"] * 3}, ValueError, "groups of num_gene"),
    ({"prompts": ["a", "b", "c", "c"]}, ValueError, "0 to 1 have different prompts"),
    ({"prompts": ["", "", "b", "b"]}, DataError, "empty prompt"),
    ({"ground_truth": list("abcc")}, ValueError, "0 to 1 have different prompts or references"),
])  # fmt: skip
def test_refuses_what_does_not_fit(model, chat_tokenizer, change, error, message):
    given = {"prompts": ["a", "a", "b", "b"], "completion_ids": [[5], [6], [7], [8]], "ground_truth": ["x"] * 4}
    with pytest.raises(error, match=message):
        FeatureMatchingReward(model, chat_tokenizer, 2)(completions=None, **{**given, **change})


def test_larger_groups_than_its_own_are_warned_of_and_a_network_that_overflows_is_refused(model, chat_tokenizer):
    given = {"completion_ids": [[5], [6], [7], [8]] * 2, "ground_truth": ["x"] * 4 + ["y"] * 4}
    with pytest.warns(UserWarning, match="num_generations 2, but every prompt occurs at least 4 times in a row"):
        FeatureMatchingReward(model, chat_tokenizer, 2)(["a"] * 4 + ["b"] * 4, **given)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(float("inf"))
    with pytest.raises(NonFiniteLossError, match="not finite"):
        FeatureMatchingReward(model, chat_tokenizer, 2)(["a", "a"], None, [[5], [6]], ground_truth=["x", "x"])


def test_references_are_compared_without_a_stop_token_as_samples_are(model, chat_tokenizer):
    reference = "yes.\n"
    ids = chat_tokenizer(reference, add_special_tokens=False)["input_ids"]
    options = {"embed_method": "last_token", "diversity_coef": 0.0, "stop_token_ids": ids[-1:]}
    found = FeatureMatchingReward(model, chat_tokenizer, 2, **options)(
        ["hi"] * 2, None, [ids, ids[:-1]], ground_truth=[reference] * 2
    )
    assert found == pytest.approx([2.0, 2.0], abs=1e-5)


# What the generation prompt opens, and what the template writes before a reply.
OPENS = {
    "closed by the reply": ("<think>\n", "<think>\n\n</think>\n\n"),
    "not in the reply": ("<think>\n", ""),
    "only in the reply": ("", "<think>\n\n</think>\n\n"),
}


@pytest.mark.parametrize("kind", OPENS)
@pytest.mark.parametrize("follows_generation_prompt", [True, False])
def test_samples_and_references_are_whole_renderings(model, chat_tokenizer, kind, follows_generation_prompt):
    """A sample with the text of the reference has its embedding, and others those of their own whole text."""
    opened, written = OPENS[kind]
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{{ '" + written.replace("\n", "\\n") + "' }}{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + opened + "{% endif %}"
    )
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = [trainers.USER("hi")]
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    given = start + (opened if follows_generation_prompt or written.startswith(opened) else "")
    reference = start + written + "yes."
    texts = [reference if reference.startswith(given) else given + "yes.", given + "no"]
    reward = FeatureMatchingReward(model, tokenizer, 2, embed_method="mean_pooling", diversity_coef=0.0)
    reward.follows_generation_prompt = follows_generation_prompt
    completions = [encode(text[len(given) :]) for text in texts]
    with warnings.catch_warnings(action="ignore"):
        found = reward([prompt] * 2, None, completions, ground_truth=["yes."] * 2)
    depths = reward.options.feature_layers
    embedded = [oracle.embedding(model, encode(text), [], depths, "mean_pooling") for text in (*texts, reference)]
    assert found == pytest.approx([2 * float(phi @ embedded[2]) for phi in embedded[:2]], abs=1e-5)
    if texts[0] == reference:
        assert found[0] == pytest.approx(2.0, abs=1e-5)


def test_columns_that_trl_does_not_render(model, chat_tokenizer):
    """Samples follow the prompt that TRL renders, without the tools of the row; the reference has them."""
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = "{% if tools %}tools {{ tools[0].name }}\n{% endif %}" + tokenizer.chat_template
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt, start = [trainers.USER("hi")], "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    reward = FeatureMatchingReward(model, tokenizer, 2, embed_method="mean_pooling", diversity_coef=0.0)
    with pytest.warns(UserWarning, match="columns tools and chat_template_kwargs are in the references, but not in"):
        completions, tools = [encode("yes."), encode("no")], ['[{"name": "f"}]'] * 2
        found = reward([prompt] * 2, None, completions, ground_truth=["yes."] * 2, tools=tools)
    texts = [start + "yes.", start + "no", "tools f\n" + start + "yes."]
    phi = [oracle.embedding(model, encode(text), [], reward.options.feature_layers, "mean_pooling") for text in texts]
    assert found == pytest.approx([2 * float(sample @ phi[2]) for sample in phi[:2]], abs=1e-5)


FAST = ("llama", "gemma2", "gpt_oss", "gpt2", "bloom", "deepseek_v3", "llama4_text", "qwen3_5_text")


@pytest.mark.first(len(FAST))
@pytest.mark.parametrize("family", dict.fromkeys((*FAST, *FAMILIES, *RUNNING_STATE)))
def test_every_family_shares_the_prompt_unless_it_has_a_running_state(family):
    model = tiny_model(family).eval()
    assert shares_prompts(model) == (family in FAMILIES)
    generator, plain = torch.Generator().manual_seed(3), for_oracle(model)
    draw = lambda count: torch.randint(3, VOCAB, (count,), generator=generator).tolist()
    prompt, continuations = draw(23), [draw(count) for count in (5, 1, 17, 0, 9)]
    for method in METHODS:
        for given in (continuations, [[], []]):
            found = embed_continuations(FeatureNetwork(model, LAYERS, method), prompt, given)
            wanted = torch.stack([oracle.embedding(plain, prompt, ids, LAYERS, method) for ids in given])
            assert (found - wanted).abs().max() < 1e-5
