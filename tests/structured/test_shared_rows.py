"""Training with shared prompts against training with TRL's rows, with the options that change what is scored."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ebft.errors import ModelError
from ebft.models.causal_lm import decoder_layers
from ebft.structured import RolloutGRPOConfig, RolloutGRPOTrainer
from ebft.structured.scoring import check_parity
from ebft.structured.shared_prompt import Rows
from ebft.structured.trl import ROW, by_group
from tests.strided.families import tiny_model
from tests.strided.test_cost import count_tokens
from tests.structured.conftest import chat_model, lora
from tests.structured.trainers import arguments, make, one_step, rows


def length_reward(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


def make_grpo(policy, tokenizer, folder, **changes):
    args = arguments(folder, RolloutGRPOConfig, **changes)
    return RolloutGRPOTrainer(policy, length_reward, args, train_dataset=rows(), processing_class=tokenizer)


OPTIONS = {
    "cross-entropy": {"ce_coef": 0.3},
    "several micro-batches of a generation": {
        "per_device_train_batch_size": 8,
        "steps_per_generation": 3,
        "gradient_accumulation_steps": 3,
        "ce_coef": 0.3,
    },
    "split groups": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6},
    "reference model": {"beta": 0.3},
    "old policy": {"num_iterations": 2, "loss_type": "dapo"},
    "sequence ratios": {"num_iterations": 2, "importance_sampling_level": "sequence"},
    "entropy bonus": {"entropy_coef": 0.1},
    "high entropy tokens": {"top_entropy_quantile": 0.4},
    "truncated completions masked": {"mask_truncated_completions": True, "max_completion_length": 24},
    "gradient checkpointing": {"gradient_checkpointing": True, "ce_coef": 0.1},
}


@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_same_loss_and_gradients_as_with_separate_rows(chat_tokenizer, tmp_path, changes, adapter):
    found = {}
    for shared in (True, False):
        model = chat_model(chat_tokenizer)
        if "beta" in changes:  # TRL loads a reference model by its name
            model.save_pretrained(tmp_path / "base")
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        policy = lora(model) if adapter else model
        builder = make if "ce_coef" in changes else make_grpo
        torch.manual_seed(5)
        trainer = builder(policy, chat_tokenizer, tmp_path, **changes)
        assert trainer.shares_prompts
        if not shared:
            trainer.score = lambda *rows: None  # the same rollouts, but TRL scores them
        torch.manual_seed(6)
        loss, gradients, rollouts, _ = one_step(trainer)
        found[shared] = loss, gradients, [rollout.ids for rollout in rollouts]
    assert found[True][2] == found[False][2]
    assert found[True][0] == pytest.approx(found[False][0], abs=1e-4)
    norm = torch.cat([g.flatten() for g in found[False][1].values()]).norm()
    assert norm > 1e-4
    for name, expected in found[False][1].items():
        assert (found[True][1][name] - expected).norm() <= 1e-3 * norm, name


@pytest.mark.slow
@pytest.mark.parametrize("masking", [{}, {"mask_thinking_ce": True}])
def test_same_evaluation_as_with_separate_rows(chat_tokenizer, tmp_path, masking):
    found = []
    for shared in (True, False):
        trainer = make(lora(chat_model(chat_tokenizer)), chat_tokenizer, tmp_path, **masking)
        if not shared:
            trainer.score = lambda *rows: None
        torch.manual_seed(3)
        found.append(trainer.evaluate(rows()))
    names = [
        name for name in found[0] if not name.endswith(("time", "per_second", "wait_s", "generation_s", "reward_s"))
    ]
    assert {"eval_ce_loss", "eval_ce_loss_all", "eval_loss"} <= set(names)
    for name in names:
        assert found[0][name] == pytest.approx(found[1][name], abs=1e-4, nan_ok=True), name


def test_each_prompt_is_computed_once(chat_tokenizer, tmp_path):
    model = lora(chat_model(chat_tokenizer))
    trainer = make(model, chat_tokenizer, tmp_path, ce_coef=0.3, gradient_accumulation_steps=1)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = next(iter(trainer.get_train_dataloader()))
    inputs = trainer._prepare_inputs(batch)
    trainer.compute_loss(trainer.model, inputs)  # compares both ways
    counts = count_tokens(decoder_layers(model.get_base_model()))
    trainer.compute_loss(trainer.model, inputs)
    prompt = int(inputs["prompt_mask"][0].sum())
    completions = int((inputs["completion_mask"].sum(1) - 1).sum())
    reference = Rows.of(
        *[(inputs[f"{name}_ids"], inputs[f"{name}_mask"]) for name in ("prompt", "completion", "reference")]
    )
    (reference,) = reference.prompts[0].references
    assert inputs["prompt_mask"].sum() == 4 * prompt  # one group
    assert counts == [prompt + completions + len(reference) - 1] * 4


def test_without_sharing_rows_and_rollouts_are_those_of_trl(chat_tokenizer, tmp_path):
    trainer = make(lora(chat_model(chat_tokenizer)), chat_tokenizer, tmp_path, ce_coef=0.3, shared_prefix=False)
    assert not trainer.shares_prompts
    counts = count_tokens(decoder_layers(trainer.model.get_base_model()))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 3
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    assert all(rollout.logps is None for rollout in trainer.rollouts)
    counts[:] = [0] * 4
    trainer.compute_loss(trainer.model, inputs)
    rows = inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
    assert counts == [rows + inputs["prompt_ids"].shape[1] + inputs["reference_ids"].shape[1]] * 4


def mixes_neighbours(model):
    """A layer that mixes tokens outside of attention, which no name reveals."""
    decoder_layers(model)[1].mlp.register_forward_hook(lambda module, args, out: out + out.roll(1, dims=1))


def drops_keywords(model):
    """A layer that does not pass keyword arguments on to its attention function."""
    attention = decoder_layers(model)[1].self_attn
    plain = attention.forward

    def forward(*args, prefix_pass=None, attention_mask=None, **kwargs):
        return plain(*args, attention_mask=None if prefix_pass else attention_mask, **kwargs)

    attention.forward = forward


@pytest.mark.slow
def test_models_that_cannot_share_prompts_are_scored_in_separate_rows(chat_tokenizer, tmp_path):
    model = chat_model(chat_tokenizer)
    drops_keywords(model)
    with pytest.warns(UserWarning, match="Prompts are computed once per completion.*does not forward keyword"):
        trainer = make(lora(model), chat_tokenizer, tmp_path, ce_coef=0.3)
    loss, _, rollouts, _ = one_step(trainer)
    assert not trainer.shares_prompts and loss == loss and all(rollout.logps is None for rollout in rollouts)


@pytest.mark.filterwarnings("ignore:Prompts are computed once per completion.*differ from those of the plain")
def test_models_that_mix_tokens_with_padding_are_refused(chat_tokenizer, tmp_path):
    model = chat_model(chat_tokenizer)
    mixes_neighbours(model)
    with pytest.raises(ModelError, match="log-probabilities of a padded row differ from those of the plain"):
        make(lora(model), chat_tokenizer, tmp_path)


def test_the_parity_check_leaves_random_state_and_modes(chat_tokenizer):
    model = lora(chat_model(chat_tokenizer)).get_base_model()
    modes = lambda: [module.training for module in model.modules()]
    before = torch.random.get_rng_state(), modes()
    check_parity(model)
    assert torch.random.get_rng_state().equal(before[0]) and modes() == before[1]


def test_long_sequences_with_changing_rotary_frequencies_are_scored_in_separate_rows(chat_tokenizer, tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for positions, shares in ((40, False), (512, True)):
        model = chat_model(chat_tokenizer, rope_parameters={**rope, "original_max_position_embeddings": positions})
        trainer = make(lora(model), chat_tokenizer, tmp_path, ce_coef=0.3)
        counts = []
        add = trainer.add_to_loss
        trainer.add_to_loss = lambda *args, add=add, trainer=trainer, counts=counts: (
            counts.append(trainer.scorer.reference_logps is not None) or add(*args)
        )
        if shares:
            one_step(trainer)
        else:
            with pytest.warns(UserWarning, match="sequences of more than 40 tokens"):
                one_step(trainer)
        assert counts == [shares] * 3 and trainer.scorer.reference_logps is None


def test_models_with_a_running_state_are_scored_in_separate_rows(chat_tokenizer, tmp_path):
    with pytest.warns(UserWarning, match="because they cannot be shared: .*linear_attention[^.]*\\.$"):
        trainer = make(tiny_model("qwen3_5_text", vocab_size=len(chat_tokenizer)), chat_tokenizer, tmp_path)
    assert not trainer.shares_prompts


def test_micro_batches_keep_groups_together():
    rows = torch.tensor([5, 0, 3, 7, 1, 6, 2, 4])
    batches = [
        {
            ROW: part,
            "ids": part[:, None] * 10,
            "names": [str(i) for i in part.tolist()],
            "count": torch.tensor(8),
            "no": None,
        }
        for part in rows.split(4)
    ]
    first, second = by_group(batches, 2)
    assert first[ROW].tolist() == [5, 4, 0, 1] and second[ROW].tolist() == [3, 2, 7, 6]
    assert first["ids"].flatten().tolist() == [50, 40, 0, 10] and second["names"] == ["3", "2", "7", "6"]
    assert first["count"] == 8


def test_prompts_that_occur_twice_keep_their_references():
    prompts = (
        torch.tensor([[0, 4, 5], [0, 4, 5], [6, 7, 8], [0, 4, 5]]),
        torch.tensor([[0, 1, 1]] * 2 + [[1, 1, 1]] + [[0, 1, 1]]),
    )
    completions = torch.arange(12).view(4, 3), torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0]])
    references = torch.arange(20, 28).view(4, 2), torch.tensor([[1, 1], [0, 0], [0, 1], [1, 0]])
    found = Rows.of(prompts, completions, references)
    assert [p.ids.tolist() for p in found.prompts] == [[4, 5], [6, 7, 8]] and found.of_row == [0, 0, 1, 0]
    assert [[ids.tolist() for ids in p.completions] for p in found.prompts] == [[[0, 1], [9]], [[6, 7, 8]]]
    assert [[ids.tolist() for ids in p.references] for p in found.prompts] == [[[20, 21], [26]], [[24, 25]]]
    assert found.completion_index.tolist() == [0, 1, 9, 6, 7, 8] and found.longest == 6
