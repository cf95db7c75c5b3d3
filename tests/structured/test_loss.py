"""The loss of EBFTTrainer and its gradients against the naive oracle, and what counts in the cross-entropy."""

import copy
import math

import pytest
import torch
from datasets import Dataset

from ebft.models.adapter import freeze_except
from tests.strided.families import RUNNING_STATE, for_oracle, tiny_model
from tests.structured import oracle
from tests.structured.conftest import chat_model, lora
from tests.structured.trainers import USER, compare_step, logged


@pytest.mark.first(6)
@pytest.mark.parametrize("bounds", [(None, 3.0), (0.8, None), (0.9, 1.1)])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_ratios_of_stale_samples_have_a_floor_and_a_cap(build, mode, bounds):
    low, high = bounds
    given = {"mode": mode, "clip_min": low, "clip_max": high}
    trainer = build(**{f"vllm_importance_sampling_{name}": value for name, value in given.items()})
    torch.manual_seed(0)
    now, then = torch.randn(2, 5, 4).mul(0.5).unbind()

    def weight(ratio):
        if mode.endswith("mask"):
            return 0.0 if low is not None and ratio < low or high is not None and ratio > high else ratio
        return min(max(ratio, low or 0.0), high or math.inf)

    tokens = [[math.exp(a - b) for a, b in zip(*rows)] for rows in zip(now.tolist(), then.tolist())]
    wanted = [[weight(r) for r in (row if mode.startswith("token") else [math.prod(row)])] for row in tokens]
    torch.testing.assert_close(trainer.importance_ratio(now - then), torch.tensor(wanted))


SOME_LAYERS = {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OPTIONS = [
    {"ce_coef": 0.3, "use_whitening": True},
    {"advantage_estimator": "grpo", "top_p": 0.8, "ce_coef": 0.1},
    {"advantage_estimator": "reinforce", "alignment_coef": 0.5},
    {"rloo_baseline": "mean", "diversity_coef": 0.7, "embed_method": "completion_mean"},
    {"scale_rewards": "group", "use_whitening": True},
    {"num_generations": 2, "top_k": 7, "min_p": 0.3},
    {"ce_coef": 0.1, "embed_method": "concat", "gradient_checkpointing": True},
    {"steps_per_generation": 6, "gradient_accumulation_steps": 6, "per_device_train_batch_size": 2, "ce_coef": 0.2},
]
VARIANTS = {
    "adapter": ("llama", lora),
    "fused experts": ("qwen3_moe", lambda model: lora(model, target_modules=["v_proj"], target_parameters=EXPERTS)),
    "some of the weights": ("llama", lambda model: freeze_except(model, [r"model\.layers\.[13]\.", r"model\.norm"])),
    "dora": ("llama", lambda model: lora(model, use_dora=True)),
    "rank-stabilised, some layers": ("llama", lambda model: lora(model, use_rslora=True, **SOME_LAYERS)),
    "learned positions": ("gpt2", lambda model: lora(model, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)),
}
# One of each kind: soft-capping, logit scaling, learned positions, sinks, experts, latent attention.
SHARING = ("gemma2", "cohere2", "granite", "opt", "gpt_oss", "qwen3_moe", "deepseek_v3")
# In padded rows: running states, and learned positions, which padding would shift.
ONE_ROW = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12, "steps_per_generation": 12}
PADDED = [*((family, {}) for family in RUNNING_STATE), ("qwen3_5_text", ONE_ROW), ("gpt2", {"shared_prefix": False})]
CASES = [*(("adapter", changes) for changes in OPTIONS[:3]), PADDED[0], *((name, {}) for name in [*VARIANTS][1:])]
CASES += [*(("adapter", changes) for changes in OPTIONS[3:]), *((name, {}) for name in SHARING), *PADDED[1:]]


@pytest.mark.first(6)
@pytest.mark.filterwarnings("ignore:Prompts are computed once per completion:UserWarning")
@pytest.mark.parametrize(("variant", "changes"), CASES)
def test_loss_and_gradients_are_those_of_single_sequences(chat_tokenizer, build, variant, changes):
    family, trained = VARIANTS.get(variant, (variant, lambda model: model))
    sizes = {"vocab_size": len(chat_tokenizer), "eos_token_id": 1, "bos_token_id": None}
    sizes["n_positions" if family == "gpt2" else "max_position_embeddings"] = 256
    base = tiny_model(family, **sizes).eval()
    with torch.no_grad():
        for name, parameter in base.named_parameters() if variant == family else ():
            parameter.mul_(0.6 if parameter.dim() >= 2 and not name.endswith("A_log") else 1.0)
    # The load-balancing loss of experts, which TRL adds, is no part of the oracle.
    experts = {"router_aux_loss_coef": 0.0} if hasattr(base.config, "output_router_logits") else {}
    changes = {**experts, **(changes if variant == "adapter" else {"ce_coef": 0.3, **changes})}
    trainer = build(trained(copy.deepcopy(base)), **changes)
    assert trainer.shares_prompts == (variant in (*VARIANTS, *SHARING))
    torch.manual_seed(0)
    twin = trained(copy.deepcopy(base))
    twin.load_state_dict(trainer.model.state_dict())
    rollouts, gradients, expected = compare_step(trainer, twin, for_oracle(base))
    assert len({len(rollout.prompt_ids) for rollout in rollouts}) > 1
    assert len({len(rollout.replies) for rollout in rollouts}) > 1  # conversations of several lengths
    assert len(expected) == 19 if variant == "some of the weights" else len(expected) > 7
    scale = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (gradient - gradients[name]).norm() < 1e-3 * max(gradient.norm(), 0.02 * scale), name
        if variant in VARIANTS:
            assert (gradient - gradients[name]).abs().max() < 1e-3 * gradient.abs().max(), name


@pytest.mark.parametrize(("family", "changes"), [
    ("gpt2", {"n_positions": 256, "shared_prefix": False}),  # learned positions, in TRL's padded rows
    ("mixtral", {"top_k": 3}),  # TRL scores the loss, which has the term of the router, and knows no top-k
])  # fmt: skip
def test_a_reference_model_agrees_with_itself(chat_tokenizer, build, family, changes):
    sizes = {name: changes[name] for name in changes.keys() & {"n_positions"}}
    policy = tiny_model(family, vocab_size=len(chat_tokenizer), eos_token_id=1, **sizes)
    options = {name: value for name, value in changes.items() if name not in sizes}
    trainer = build(policy, beta=0.1, learning_rate=0.0, max_steps=1, **options)
    trainer.train()
    assert logged(trainer, "kl") == [pytest.approx(0.0, abs=1e-5)]


@pytest.mark.parametrize(("generation", "accumulation", "iterations"), [(4, 2, 1), (1, 3, 1), (1, 6, 2)])
def test_the_cross_entropy_is_a_mean_over_its_own_step(chat_tokenizer, build, generation, accumulation, iterations):
    """Two steps on one generation batch and one on several; references of very different lengths."""
    dataset = Dataset.from_list([{"prompt": f"q{i}", "ground_truth": "ab" * 4**i} for i in range(3)] * 2)
    options = {"alignment_coef": 0.0, "diversity_coef": 0.0, "ce_coef": 1.0, "learning_rate": 0.0, "max_steps": 2}
    options |= {"steps_per_generation": generation, "gradient_accumulation_steps": accumulation}
    options |= {"num_iterations": iterations, "skip_zero_advantage_batches": False}
    policy, references = chat_model(chat_tokenizer), []
    trainer = build(policy, dataset, **options)
    names, compute = ("prompt_ids", "prompt_mask", "reference_ids", "reference_mask"), trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: (
        references.append([inputs[name] for name in names]) or compute(model, inputs)
    )
    trainer.train()
    losses = logged(trainer)
    for step, loss in enumerate(losses):
        nll, count = 0.0, 0
        for batch in references[accumulation * step : accumulation * (step + 1)]:
            for prompt, mask, reference, counts in zip(*batch):
                if ids := reference[: int(counts.sum())].tolist():
                    nll -= oracle.token_logps(policy, prompt[mask.bool()].tolist(), ids, 1.0).sum().item()
                    count += len(ids)
        assert loss == pytest.approx(nll / count, abs=1e-3)
    assert logged(trainer, "ebft/ce_loss") == pytest.approx(losses, abs=1e-4)


def test_thinking_can_be_left_out_of_the_cross_entropy(chat_tokenizer, build):
    dataset = Dataset.from_list([{"prompt": [USER("q")], "ground_truth": "<think>so</think>\nyes"}] * 4)
    counts = {}
    for masked in (False, True):
        trainer = build(chat_model(chat_tokenizer), dataset, ce_coef=1.0, mask_thinking_ce=masked)
        trainer.model.train()
        mask = trainer._references([dataset[0]] * 4)["reference_mask"]
        counts[masked] = mask.sum().item()
        assert mask.any(-1).tolist() == [True, False, False, False]
    assert counts[False] - counts[True] == len("<think>so</think>\n") and counts[True] == len("yes") + 1


@pytest.mark.parametrize("name", ["another/revision", pytest.param("", marks=pytest.mark.slow)])
def test_the_reference_is_a_copy_of_the_model(chat_tokenizer, build, name):
    """Whatever the name in its configuration leads to."""
    policy = chat_model(chat_tokenizer)
    policy.config.name_or_path = name
    expected = {name: weight.clone() for name, weight in policy.state_dict().items()}
    trainer = build(policy, beta=0.1)
    trainer.train()
    reference = trainer.ref_model.state_dict()
    assert reference.keys() == expected.keys() and policy.config.name_or_path == name
    assert all(torch.equal(reference[name], weight) for name, weight in expected.items())
    assert any(not torch.equal(weight, expected[name]) for name, weight in policy.state_dict().items())
    first, second = logged(trainer, "kl")
    assert first == pytest.approx(0, abs=1e-6) and second > 0
