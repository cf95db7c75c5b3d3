"""The loss, its gradients and its metrics with the head in chunks, and with TRL's own forward passes."""

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import Trainer

from ebft.data.transforms.rows import IGNORE
from ebft.preferences import trainers
from ebft.preferences.experimental import PreparedBatches
from ebft.preferences.trainers import STATISTICS, score_in_chunks
from tests.preferences.runs import write_inputs
from tests.preferences.test_losses import trainer_of
from tests.strided.families import tiny_model

HEAD = {"unfrozen_parameters": ["lm_head"]}
ADAPTED_HEAD = {"lora_target_linear": None, "lora_target_modules": ["lm_head"]}  # refused with a reference model
LOSSES = [
    ("dpo", True, {}), ("dpo", False, {}), ("dpo", True, {"dpo_use_weighting": True}),
    ("dpo", False, {"dpo_use_weighting": True}), ("dpo", True, {"dpo_loss_type": ["sigmoid", "sft"]}),
    ("ipo", False, {}), ("dpo", True, {"lora_modules_to_save": ["embed_tokens", "lm_head"]}),
    ("kto", True, {}), ("kto", False, {}), ("orpo", True, {}), ("orpo", False, {}),
    ("simpo", True, {}), ("simpo", False, {"cpo_alpha": 0.3}),
    *((method, False, HEAD) for method in ("dpo", "kto", "orpo", "simpo")),
    ("orpo", True, ADAPTED_HEAD), ("simpo", True, ADAPTED_HEAD),
]  # fmt: skip


def step(*args, **changes):
    """The loss of four rows, its gradients, and what it logs."""
    torch.manual_seed(0)  # of the adapter
    trainer = trainer_of(*args, **changes)
    trainer.model.train()
    inputs = trainer._prepare_inputs(trainer.data_collator([trainer.train_dataset[index] for index in range(4)]))
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {name: weight.grad for name, weight in trainer.model.named_parameters() if weight.grad is not None}
    return loss.detach(), gradients, dict(trainer.logged("train"))


@pytest.mark.first(5)
@pytest.mark.parametrize(("method", "adapter", "changes"), LOSSES)
def test_they_are_those_of_trl(method, adapter, changes, tmp_path, monkeypatch):
    write_inputs(tmp_path)
    chunks = []
    choose = trainers.choose_tokens
    monkeypatch.setattr(trainers, "choose_tokens", lambda *args: chunks.append(1) or choose(*args))
    loss, gradients, logs = step(method, tmp_path, adapter, **changes)
    assert chunks
    chunks.clear()
    monkeypatch.setattr(trainers, "score_in_chunks", lambda *args: None)
    monkeypatch.delattr(PreparedBatches, "concatenated_forward")
    expected_loss, expected_gradients, expected_logs = step(method, tmp_path, adapter, **changes)
    assert not chunks
    torch.testing.assert_close(loss, expected_loss, atol=1e-6, rtol=1e-6)
    only_head = changes in (HEAD, ADAPTED_HEAD)
    assert gradients.keys() == expected_gradients.keys() and len(gradients) > (0 if only_head else 10)
    assert not only_head or all("lm_head" in name for name in gradients)
    for name, gradient in expected_gradients.items():
        assert (gradients[name] - gradient).norm() <= 3e-6 * max(1, gradient.norm()), name  # float32
    assert max(gradient.abs().max() for gradient in gradients.values()) > (1e-3 if only_head else 1e-2)
    of_scored_tokens = {"logits/chosen", "logits/rejected", "nll_loss"} if method in ("orpo", "simpo") else set()
    for name in expected_logs.keys() - of_scored_tokens:
        assert logs[name] == pytest.approx(expected_logs[name], rel=1e-4, abs=1e-5), name
    assert logs.keys() == expected_logs.keys()


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2", "granite", "gpt2", "opt"])
@pytest.mark.parametrize("trains_head", [True, False])
def test_every_output_is_that_of_the_logits(family, trains_head):
    """Of models that scale or cap their logits, tie the head, or add a bias; and of a frozen head."""
    model = tiny_model(family).eval()  # without dropout
    if not trains_head:
        model.requires_grad_(False).get_input_embeddings().register_forward_hook(
            lambda module, args, output: output.detach().requires_grad_()
        )
    ids = torch.randint(3, 20, (3, 7), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :3], labels[1, 5:] = IGNORE, IGNORE
    logps = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    logits, mask, targets = model(input_ids=ids).logits[:, :-1], labels[:, 1:] != IGNORE, ids[:, 1:, None]
    expected = {"log_probs": logps.gather(-1, targets).squeeze(-1), "entropy": -(logps.exp() * logps).sum(-1),
                "mean_logits": logits.mean(-1), "is_top1": logits.argmax(-1) == targets.squeeze(-1),
                "log_sum_sq_probs": logps.exp().square().sum(-1).log()}  # fmt: skip
    score_in_chunks(model, tuple(STATISTICS))
    found = model(input_ids=ids, labels=labels, fused_lm_head=True)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values * mask if values.is_floating_point() else values & mask)
    assert found.log_probs.requires_grad and not found.entropy.requires_grad
    torch.testing.assert_close(model(input_ids=ids).logits[:, :-1], logits)


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_no_tensor_of_a_step_has_the_logits_of_a_batch(method, tmp_path, monkeypatch):
    """The head gets the scored tokens alone, at most 16 at a time here."""
    monkeypatch.setattr("ebft.prefix.logps.LOGITS_PER_CHUNK", {"cpu": 1, "other": 1})
    trainer = trainer_of(method, write_inputs(tmp_path))
    sizes = []
    head = trainer.model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: sizes.append(output.shape[-2]))
    inputs = trainer._prepare_inputs(trainer.data_collator([trainer.train_dataset[index] for index in range(4)]))
    trainer.compute_loss(trainer.model, inputs).backward()
    rows = [trainer.train_dataset[index] for index in range(4)]
    scored = sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows)
    if method == "orpo":  # whose cross-entropy includes prompts
        scored += sum(len(row["prompt_ids"]) - 1 for row in rows)
    passes = 2 if method == "dpo" else 1  # of the policy and of the reference
    assert max(sizes) == 16 and sum(sizes) == passes * scored


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_fsdp_does_not_round_log_probabilities(method, tmp_path, monkeypatch):
    """With bf16, its outputs would be rounded, unless its plugin is changed before a model is sharded."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16")
    assert plugin.mixed_precision_policy.output_dtype is torch.bfloat16
    create = Trainer.create_accelerator_and_postprocess

    def with_plugin(trainer):
        create(trainer)
        trainer.accelerator.state.fsdp_plugin = plugin

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", with_plugin)
    trainer_of(method, write_inputs(tmp_path)).accelerator.state.fsdp_plugin = None
    assert plugin.mixed_precision_policy.output_dtype is None
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16
