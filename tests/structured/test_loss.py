"""The loss of EBFTTrainer and its gradients against the naive oracle, and what counts in the cross-entropy."""

import copy

import pytest
import torch
from datasets import Dataset
from torch.nn import functional as F

from ebft.errors import ModelError
from ebft.models.adapter import freeze_except
from tests.strided.families import tiny_model
from tests.structured import oracle
from tests.structured.conftest import chat_model, lora
from tests.structured.trainers import USER, make, one_step


@pytest.mark.parametrize(
    "changes",
    [
        {"ce_coef": 0.3, "use_whitening": True},
        {"advantage_estimator": "grpo"},
        {"advantage_estimator": "reinforce", "alignment_coef": 0.5},
        {"rloo_baseline": "mean", "diversity_coef": 0.7},
        {"scale_rewards": "group", "use_whitening": True},
        {"num_generations": 2},
        {"top_p": 0.8, "ce_coef": 0.1},
        {"top_k": 7, "min_p": 0.05},
        {"embed_method": "completion_mean", "diversity_coef": 0.5},
        {"ce_coef": 0.1, "embed_method": "concat", "gradient_checkpointing": True},
        {"steps_per_generation": 6, "gradient_accumulation_steps": 6, "per_device_train_batch_size": 2, "ce_coef": 0.2},
    ],
)
def test_loss_and_gradients_are_those_of_single_sequences(chat_tokenizer, tmp_path, changes):
    policy = lora(chat_model(chat_tokenizer))
    trainer = make(policy, chat_tokenizer, tmp_path, **changes)
    loss, gradients, rollouts, batch = one_step(trainer)
    assert len({len(rollout.replies) for rollout in rollouts}) > 1  # conversations of several lengths
    twin, base = lora(chat_model(chat_tokenizer)), chat_model(chat_tokenizer)
    wanted = oracle.loss(twin.eval(), base, chat_tokenizer, rollouts, batch, trainer.args)
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), abs=1e-4)
    compared = 0
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            assert F.cosine_similarity(parameter.grad.flatten(), gradients[name].flatten(), dim=0) > 0.9999
            assert (parameter.grad - gradients[name]).abs().max() < 1e-3 * parameter.grad.abs().max()
            compared += 1
    assert compared == len(gradients) > 20


def test_rollouts_reward_and_cross_entropy_share_one_rendering(chat_tokenizer, tmp_path, monkeypatch):
    trainer = make(lora(chat_model(chat_tokenizer)), chat_tokenizer, tmp_path, ce_coef=0.3)
    rendered = []
    conversation_of = type(trainer.generation.renderer)._conversation
    monkeypatch.setattr(
        type(trainer.generation.renderer),
        "_conversation",
        lambda *given: rendered.append(given[1:]) or conversation_of(*given),
    )
    *_, batch = one_step(trainer)
    assert len(rendered) == len(batch) // trainer.args.num_generations > 1


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
VARIANTS = {
    "dora": ("llama", {"use_dora": True}),
    "rank-stabilised, some layers": (
        "llama",
        {"use_rslora": True, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]},
    ),
    "fused experts": ("qwen3_moe", {"target_modules": ["v_proj"], "target_parameters": EXPERTS}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_lora(chat_tokenizer, tmp_path, variant):
    family, settings = VARIANTS[variant]

    def base():
        sizes = {"max_position_embeddings": 256, "vocab_size": len(chat_tokenizer)}
        return tiny_model(family, eos_token_id=1, bos_token_id=None, **sizes).eval()

    experts = {"router_aux_loss_coef": 0.0} if family == "qwen3_moe" else {}
    trainer = make(lora(base(), **settings), chat_tokenizer, tmp_path, ce_coef=0.3, **experts)
    loss, gradients, rollouts, batch = one_step(trainer)
    twin = lora(base(), **settings)
    wanted = oracle.loss(twin.eval(), base(), chat_tokenizer, rollouts, batch, trainer.args)
    assert_same_gradients(loss, gradients, wanted, twin)


def test_some_of_the_weights(chat_tokenizer, tmp_path):
    patterns = [r"model\.layers\.[13]\.", r"model\.norm"]
    trainer = make(freeze_except(chat_model(chat_tokenizer), patterns), chat_tokenizer, tmp_path, ce_coef=0.3)
    loss, gradients, rollouts, batch = one_step(trainer)
    twin, base = freeze_except(chat_model(chat_tokenizer), patterns), chat_model(chat_tokenizer)
    wanted = oracle.loss(twin, base, chat_tokenizer, rollouts, batch, trainer.args)
    assert len(gradients) == 19
    assert_same_gradients(loss, gradients, wanted, twin)


def assert_same_gradients(loss, gradients, wanted, twin):
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), abs=1e-4)
    expected = {name: parameter.grad for name, parameter in twin.named_parameters() if parameter.grad is not None}
    assert expected.keys() == gradients.keys() and len(expected) > 7
    for name, gradient in expected.items():
        assert (gradient - gradients[name]).abs().max() < 1e-3 * gradient.abs().max(), name


# One of each kind: soft-capping, logit scaling, learned positions, sinks, experts, latent attention, running states.
SCORED = ["gemma2", "cohere2", "granite", "opt", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "lfm2"]


@pytest.mark.parametrize("family", SCORED)
def test_every_family_scores_what_it_samples(chat_tokenizer, tmp_path, family):
    def tiny():
        known = {"vocab_size": len(chat_tokenizer), "eos_token_id": 1, "bos_token_id": None}
        sizes = {"n_positions": 256} if family == "gpt2" else {}
        model = tiny_model(family, max_position_embeddings=256, **known, **sizes)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(0.6)
        return model.eval()

    # The load-balancing loss of experts, which TRL adds, is no part of the oracle.
    experts = {"router_aux_loss_coef": 0.0} if hasattr(tiny().config, "output_router_logits") else {}
    trainer = make(tiny(), chat_tokenizer, tmp_path, ce_coef=0.3, **experts)
    loss, _, rollouts, batch = one_step(trainer)
    wanted = oracle.loss(tiny(), tiny(), chat_tokenizer, rollouts, batch, trainer.args)
    assert loss == pytest.approx(wanted.item(), abs=1e-4)


def test_learned_positions_do_not_count_padding(chat_tokenizer, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    def gpt2():
        torch.manual_seed(0)
        sizes = {"n_embd": 64, "n_layer": 4, "n_head": 2, "n_positions": 256, "initializer_range": 0.2}
        ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(chat_tokenizer), **sizes, **ids)).eval()
        return lora(model, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)

    trainer = make(gpt2(), chat_tokenizer, tmp_path, ce_coef=0.3)
    loss, gradients, rollouts, batch = one_step(trainer)
    twin = gpt2()
    base = copy.deepcopy(twin).unload()
    wanted = oracle.loss(twin.eval(), base, chat_tokenizer, rollouts, batch, trainer.args)
    assert loss == pytest.approx(wanted.item(), abs=1e-4)


def test_a_reference_model_with_learned_positions_agrees_with_itself(chat_tokenizer, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(chat_tokenizer), **sizes, **ids)).save_pretrained(tmp_path / "gpt2")
    policy = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    trainer = make(policy, chat_tokenizer, tmp_path, beta=0.1, learning_rate=0.0, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    policy.resize_token_embeddings(len(chat_tokenizer) + 8)
    with pytest.raises(ModelError, match="its saved base model, but the base model has 260 token embeddings"):
        make(policy, chat_tokenizer, tmp_path, beta=0.1)


def test_the_cross_entropy_is_a_mean_over_its_own_step(chat_tokenizer, tmp_path):
    """Two optimizer steps on one generation batch, references of very different lengths, no update in between."""
    dataset = Dataset.from_list([{"prompt": f"q{i}", "ground_truth": "ab" * (1 if i % 2 else 20)} for i in range(8)])
    options = {"alignment_coef": 0.0, "diversity_coef": 0.0, "ce_coef": 1.0, "learning_rate": 0.0, "max_steps": 2}
    options["skip_zero_advantage_batches"] = False
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    policy = chat_model(chat_tokenizer)
    trainer = make(policy, chat_tokenizer, tmp_path, dataset, **options, **sizes)
    steps = []
    compute = trainer._compute_loss

    def noted(model, inputs):
        steps.append((inputs["prompt_ids"], inputs["prompt_mask"], inputs["reference_ids"], inputs["reference_mask"]))
        return compute(model, inputs)

    trainer._compute_loss = noted
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for step, loss in enumerate(losses):
        nll, count = 0.0, 0
        for prompts, masks, references, counted in steps[2 * step : 2 * step + 2]:
            for prompt, mask, reference, counts in zip(prompts, masks, references, counted):
                ids = reference[: int(counts.sum())].tolist()
                if ids:
                    nll -= oracle.token_logps(policy, prompt[mask.bool()].tolist(), ids, 1.0).sum().item()
                    count += len(ids)
        assert loss == pytest.approx(nll / count, abs=1e-3)
    assert abs(losses[0] - losses[1]) > 1e-3


def test_thinking_can_be_left_out_of_the_cross_entropy(chat_tokenizer, tmp_path):
    dataset = Dataset.from_list([{"prompt": [USER("q")], "ground_truth": "<think>so</think>\nyes"}] * 4)
    counts = {}
    for masked in (False, True):
        trainer = make(
            chat_model(chat_tokenizer), chat_tokenizer, tmp_path, dataset, ce_coef=1.0, mask_thinking_ce=masked
        )
        trainer.model.train()
        references = trainer._references([dataset[0]] * 4)
        counts[masked] = references["reference_mask"].sum().item()
        assert references["reference_mask"].any(-1).tolist() == [True, False, False, False]
    assert counts[False] - counts[True] == len("<think>so</think>\n") and counts[True] == len("yes") + 1


def test_the_reference_of_a_model_in_memory_is_a_copy_of_it(chat_tokenizer, tmp_path):
    policy = chat_model(chat_tokenizer)
    assert policy.config.name_or_path == ""
    expected = {name: weight.clone() for name, weight in policy.state_dict().items()}
    trainer = make(policy, chat_tokenizer, tmp_path, beta=0.1, max_steps=2)
    trainer.train()
    reference = trainer.ref_model.state_dict()
    assert reference.keys() == expected.keys() and policy.config.name_or_path == ""
    assert all(torch.equal(reference[name], weight) for name, weight in expected.items())
    assert any(not torch.equal(weight, expected[name]) for name, weight in policy.state_dict().items())
    first, second = (log["kl"] for log in trainer.state.log_history if "kl" in log)
    assert first == pytest.approx(0, abs=1e-6) and second > 0
