"""Scoring: one pass for completions of several prompts, training with it and with TRL's rows, and padding."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from ebft.errors import ModelError
from ebft.models.causal_lm import decoder_layers
from ebft.prefix.attention import suffixes
from ebft.prefix.forward import prepare
from ebft.structured import RolloutGRPOTrainer, scoring, trl
from tests.strided.families import COUNTS_PADDING, FAMILIES, RUNNING_STATE, VOCAB, lora_targets, tiny_model
from tests.strided.test_cost import count_tokens
from tests.strided.test_exactness import compare_gradients
from tests.structured import conftest, oracle, trainers

TEMPERATURE = 0.7


def prompts(seed=0):
    """Prompts of 9, 1 and 23 tokens with several completions of unequal lengths, one of a single token."""
    generator = torch.Generator().manual_seed(seed)
    ids = lambda length: torch.randint(3, VOCAB, (length,), generator=generator)
    return [
        scoring.Prompt(ids(9), [ids(5), ids(1), ids(12)], [ids(7)]),
        scoring.Prompt(ids(1), [ids(4)]),
        scoring.Prompt(ids(23), [ids(6), ids(6)], [ids(1), ids(3)]),
    ]


def weights(count, seed):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def total(logps, entropies, references, with_entropy):
    """A scalar in which every value has another weight."""
    result = (weights(len(logps), 1) * logps).sum() + (weights(len(references), 2) * references).sum()
    return result + (weights(len(entropies), 3) * entropies).sum() if with_entropy else result


def expected(model, batch):
    """Log-probabilities and entropies of completions, and log-probabilities of references, sequence by sequence."""
    logps, entropies, references = [], [], []
    for prompt in batch:
        for ids in prompt.completions:
            logits = model(input_ids=torch.cat([prompt.ids, ids])[None]).logits[0, len(prompt.ids) - 1 : -1]
            scores = (logits.double() / TEMPERATURE).log_softmax(-1)
            logps.append(scores.gather(-1, ids[:, None]).squeeze(-1))
            entropies.append(-(scores.exp() * scores).sum(-1))
        for ids in prompt.references:
            references.append(oracle.token_logps(model, prompt.ids.tolist(), ids.tolist(), 1.0))
    return torch.cat(logps), torch.cat(entropies), torch.cat(references)


def compare(model, batch, entropy_gradient):
    plain = copy.deepcopy(model).eval()
    prepare(model.eval())
    found = scoring.score_completions(model, batch, temperature=TEMPERATURE, entropy_gradient=entropy_gradient)
    wanted = expected(plain, batch)
    for ours, theirs in zip((found.logps, found.entropies, found.references), wanted):
        torch.testing.assert_close(ours.detach(), theirs.detach().float(), atol=1e-4, rtol=0)
    total(found.logps, found.entropies, found.references, entropy_gradient).backward()
    total(*wanted, entropy_gradient).backward()
    compare_gradients(model, plain)


@pytest.mark.first(6)
@pytest.mark.parametrize(("family", "adapter"), [
    *((family, False) for family in ("llama", "gemma2", "gpt_oss", "gpt2", "gemma3_text", "mixtral")),
    *((family, True) for family in FAMILIES),
])  # fmt: skip
def test_one_pass_is_as_one_for_each_sequence(family, adapter):
    model = tiny_model(family)
    model = conftest.lora(model, target_modules=lora_targets(family)) if adapter else model
    compare(model, prompts(), entropy_gradient=not adapter)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_adjacent_prompts_are_computed_at_once(family, monkeypatch):
    """Of unequal lengths, as on a GPU; others have another number of completions."""
    ids = lambda length, seed: torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    sizes = [(9, [5, 2, 12]), (4, [3, 3, 3]), (17, [2, 2, 8]), (6, [4, 1]), (6, [9]), (5, [1]), (7, [3]), (8, [2, 4])]
    sizes.append((8, [3, 9]))
    drawn = [(ids(size, n), [ids(own, 10 * n + i) for i, own in enumerate(own)]) for n, (size, own) in enumerate(sizes)]
    batch = [scoring.Prompt(prompt, own[:1], own[1:]) for prompt, own in drawn]
    lengths = [[own - 1 for own in lengths] for _, lengths in sizes]
    grouped = lambda: [
        group.prompts.lengths
        for group in suffixes.PromptLayout([size for size, _ in sizes], lengths, torch.device("cpu")).groups
    ]
    assert grouped() == [[9], [4], [17], [6], [6], [7], [8], [8]]  # a completion of one token is only scored
    monkeypatch.setitem(suffixes.MOST_PADDING, "cpu", 10.0)
    monkeypatch.setitem(suffixes._HEADS_AS_ROWS, "cpu", 0)
    assert grouped() == [[9, 4, 17], [6, 6, 7], [8, 8]]
    compare(tiny_model(family), batch, entropy_gradient=False)
    monkeypatch.setattr(suffixes, "_MOST_SCORES", 3 * 2 * 256 * (4 + 9))
    assert grouped() != [[9, 4, 17], [6, 6, 7], [8, 8]]


OPTIONS = {
    "several micro-batches": {"per_device_train_batch_size": 8, "steps_per_generation": 3, "ce_coef": 0.3},
    "split groups": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6, "ce_coef": 0.1,
                     "gradient_checkpointing": True},
    "reference model": {"beta": 0.3, "mask_truncated_completions": True, "max_completion_length": 24},
    "ratios of sequences": {"num_iterations": 2, "loss_type": "dapo", "importance_sampling_level": "sequence"},
    "entropies": {"entropy_coef": 0.1, "top_entropy_quantile": 0.4},
}  # fmt: skip
CASES = [*((name, True) for name in OPTIONS), ("several micro-batches", False), ("reference model", False)]


@pytest.mark.first(5)
@pytest.mark.parametrize(("option", "adapter"), CASES)
def test_same_loss_and_gradients_as_with_separate_rows(chat_tokenizer, build, tmp_path, option, adapter):
    found, changes = {}, OPTIONS[option]
    reward = lambda completion_ids, **columns: [float(sum(ids) % 7) for ids in completion_ids]
    of_kind = {} if "ce_coef" in changes else {"kind": RolloutGRPOTrainer, "reward_funcs": reward}
    for shared in (True, False):
        model = conftest.chat_model(chat_tokenizer)
        if "beta" in changes:  # TRL loads a reference model by its name
            model.save_pretrained(tmp_path / "base")
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        torch.manual_seed(5)
        trainer = build(conftest.lora(model) if adapter else model, **of_kind, **changes)
        assert trainer.shares_prompts
        if not shared:
            trainer.scorer.score = lambda *rows: None  # the same rollouts, but TRL scores them
        torch.manual_seed(6)
        loss, gradients, rollouts, _ = trainers.one_step(trainer)
        found[shared] = loss, gradients, [rollout.ids for rollout in rollouts]
    assert found[True][2] == found[False][2]
    assert found[True][0] == pytest.approx(found[False][0], abs=1e-4)
    norm = torch.cat([g.flatten() for g in found[False][1].values()]).norm()
    assert norm > 1e-4
    for name, expected in found[False][1].items():
        assert (found[True][1][name] - expected).norm() <= 1e-3 * norm, name


@pytest.mark.parametrize("shared", [True, False])
def test_each_prompt_is_computed_once_or_as_in_trl(build, shared):
    trainer = build(ce_coef=0.3, gradient_accumulation_steps=1, shared_prefix=shared)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    assert trainer.shares_prompts == shared
    assert all((rollout.logps is not None) == shared for rollout in trainer.rollouts)
    trainer.compute_loss(trainer.model, inputs)  # compares both ways
    counts = count_tokens(decoder_layers(trainer.model.get_base_model()))
    trainer.compute_loss(trainer.model, inputs)
    parts = [(inputs[f"{name}_ids"], inputs[f"{name}_mask"]) for name in ("prompt", "completion", "reference")]
    (prompts, prompt_mask), (completions, completion_mask), (references, _) = parts
    assert prompt_mask.sum() == 4 * prompt_mask[0].sum()  # one group
    (reference,) = scoring.Rows.of(*parts).prompts[0].references
    if shared:
        expected = int(prompt_mask[0].sum()) + int((completion_mask.sum(1) - 1).sum()) + len(reference) - 1
    else:
        expected = prompts.numel() + completions.numel() + prompts.shape[1] + references.shape[1]
    assert counts == [expected] * 4


@pytest.mark.filterwarnings("ignore:Prompts are computed once per completion.*differ from those of the plain")
def test_models_that_mix_tokens_with_padding_are_refused(chat_tokenizer, build):
    model = conftest.chat_model(chat_tokenizer)
    # A layer that mixes tokens outside of attention, which no name reveals.
    decoder_layers(model)[1].mlp.register_forward_hook(lambda module, args, out: out + out.roll(1, dims=1))
    with pytest.raises(ModelError, match="log-probabilities of a padded row differ from those of the plain"):
        build(conftest.lora(model))


@pytest.mark.parametrize("family", RUNNING_STATE)
def test_padding_changes_nothing(family):
    model, before = tiny_model(family).train(), torch.random.get_rng_state()
    scoring.check_padding(model)
    assert model.training and torch.random.get_rng_state().equal(before)


@pytest.mark.parametrize("family", COUNTS_PADDING)
def test_states_that_pass_over_padding_are_refused(family):
    with pytest.raises(ModelError, match="padded.*cannot train this model; SFT, which pads on the right, can"):
        scoring.check_padding(tiny_model(family))


@pytest.mark.parametrize(("positions", "shares"), [(40, False), (512, True)])
def test_long_rows_with_changing_rotary_frequencies_are_separate(chat_tokenizer, build, positions, shares, recwarn):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": positions}
    trainer = build(conftest.lora(conftest.chat_model(chat_tokenizer, rope_parameters=rope)), ce_coef=0.3)
    counts, add = [], trainer.add_to_loss
    trainer.add_to_loss = lambda *args: counts.append(trainer.scorer.reference_logps is not None) or add(*args)
    trainers.one_step(trainer)
    assert any("sequences of more than 40 tokens" in str(warning.message) for warning in recwarn) == (not shares)
    assert counts == [shares] * 3 and trainer.scorer.reference_logps is None


def test_micro_batches_keep_groups_together():
    batches = []
    for part in torch.tensor([5, 0, 3, 7, 1, 6, 2, 4]).split(4):
        batches.append({trl.ROW: part, "ids": part[:, None] * 10, "count": torch.tensor(8), "no": None})
        batches[-1]["names"] = [str(i) for i in part.tolist()]
    first, second = trl.by_group(batches, 2)
    assert first[trl.ROW].tolist() == [5, 4, 0, 1] and second[trl.ROW].tolist() == [3, 2, 7, 6]
    assert first["ids"].flatten().tolist() == [50, 40, 0, 10] and second["names"] == ["3", "2", "7", "6"]
    assert first["count"] == 8


def test_prompts_that_occur_twice_keep_their_references():
    mask = torch.tensor([[0, 1, 1]] * 2 + [[1, 1, 1]] + [[0, 1, 1]])
    prompts = torch.tensor([[0, 4, 5], [0, 4, 5], [6, 7, 8], [0, 4, 5]]), mask
    completions = torch.arange(12).view(4, 3), torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0]])
    references = torch.arange(20, 28).view(4, 2), torch.tensor([[1, 1], [0, 0], [0, 1], [1, 0]])
    found = scoring.Rows.of(prompts, completions, references)
    assert [p.ids.tolist() for p in found.prompts] == [[4, 5], [6, 7, 8]] and found.of_row == [0, 0, 1, 0]
    assert [[ids.tolist() for ids in p.completions] for p in found.prompts] == [[[0, 1], [9]], [[6, 7, 8]]]
    assert [[ids.tolist() for ids in p.references] for p in found.prompts] == [[[20, 21], [26]], [[24, 25]]]
    assert found.completion_index.tolist() == [0, 1, 9, 6, 7, 8]
