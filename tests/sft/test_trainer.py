"""The SFT trainer: the cross-entropy in chunks is the model's own loss, the router loss, and losses of evaluations."""

import copy
from functools import wraps
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from trl.models.activation_offloading import OffloadActivations

from ebft.errors import ModelError
from ebft.prefix import logps
from ebft.sft.cross_entropy import weighted_cross_entropy
from tests.monitor.sft_run import plain_trainer

SHAPE = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def tiny_model(kind="llama", **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHAPE, "num_key_value_heads": 2, **changes, "pad_token_id": 0})
    return AutoModelForCausalLM.from_config(config)


def rows(count):
    """Documents of 9 to 14 tokens whose first tokens are not learned, and one token of which the label differs."""
    found = []
    for i in range(count):
        ids = list(range(3, 12 + i % 6))
        found.append({"input_ids": ids, "labels": [-100] * (i % 4 + 1) + ids[i % 4 + 1 : -1] + [2]})
    return found


def sft_trainer(folder, model, settings=None, train_dataset=None, eval_dataset=None, **given):
    return plain_trainer(folder, model, train_dataset or rows(12), eval_dataset or rows(5), given, **settings or {})


def logged(folder, chunked, dtype=torch.float32, **changes):
    """Everything that a run of three steps of two micro-batches logs, without times; and its trainer."""
    settings = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", **changes}
    trainer = sft_trainer(folder, tiny_model().to(dtype), settings, chunked_cross_entropy=chunked)
    trainer.train()
    history = [{k: v for k, v in entry.items() if "second" not in k and "runtime" not in k and "time" not in k}
               for entry in trainer.state.log_history]  # fmt: skip
    return history, trainer


@pytest.mark.parametrize("changes", [
    {}, {"average_tokens_across_devices": False}, {"bf16": True}, {"dtype": torch.float64}
])  # fmt: skip
def test_a_run_logs_the_same_with_the_loss_in_chunks(changes, tmp_path, monkeypatch):
    monkeypatch.setattr(logps, "LOGITS_PER_CHUNK", {"cpu": 1})  # 16 positions, the least
    whole, plain = logged(tmp_path, False, **changes)
    found, trainer = logged(tmp_path, None, **changes)
    assert (plain.is_in_chunks, trainer.is_in_chunks) == (False, True)
    tolerance = 3e-2 if changes.get("bf16") else 1e-5
    assert len(found) == len(whole) == 7 and "eval_perplexity_all" in whole[1]
    for ours, expected in zip(found, whole):
        assert "loss" not in ours or ours["budget/flops"] < expected["budget/flops"]
        is_same = {key: value for key, value in expected.items() if key not in ("budget/flops", "total_flos")}
        assert {key: ours[key] for key in is_same} == pytest.approx(is_same, rel=tolerance)
    for weight, expected in zip(trainer.model.parameters(), plain.model.parameters()):
        torch.testing.assert_close(weight, expected, rtol=tolerance, atol=tolerance / 10)
    seen = []  # no logits of padding
    trainer.model.lm_head.register_forward_hook(lambda head, args, logits: seen.append(logits.numel() // 37))
    trainer.evaluate()
    assert sum(seen) == sum(len(row["input_ids"]) - 1 for row in rows(5))


@pytest.mark.parametrize("chunked", [None, False])
def test_chunks_that_differ_from_the_logits_of_the_model_stop_the_run(chunked, tmp_path):
    """A model that scales logits by their position, which the head does not know."""
    model = tiny_model()
    own = type(model).forward

    @wraps(own)
    def scaled(self, *args, **kwargs):
        output = own(self, *args, **kwargs)
        output.logits = output.logits * torch.arange(1, output.logits.shape[1] + 1)[:, None]
        return output

    with patch.object(type(model), "forward", scaled):
        trainer = sft_trainer(tmp_path, model, chunked_cross_entropy=chunked)
        if chunked is False:
            assert trainer.train().global_step == trainer.args.max_steps
        else:
            assert trainer.is_in_chunks
            with pytest.raises(ModelError, match="log-probabilities in chunks differ .*chunked_cross_entropy: false"):
                trainer.train()


@pytest.mark.slow
def test_a_compiled_run_logs_the_same_with_the_models_own_loss(tmp_path):
    found, trainer = logged(tmp_path, None, torch_compile=True, torch_compile_backend="aot_eager")
    whole, _ = logged(tmp_path, False)
    assert not trainer.is_in_chunks and len(found) == len(whole) == 7
    for ours, expected in zip(found, whole):
        is_same = {key: expected[key] for key in expected.keys() - {"budget/flops", "total_flos"}}  # of plain models
        assert {key: ours[key] for key in is_same} == pytest.approx(is_same, rel=1e-5) and "budget/flops" not in ours


@pytest.fixture
def offloading_on_cpu(monkeypatch):
    """TRL's hooks with the CPU as the accelerator, whose activations they copy; the copies that were made."""
    copies = []
    pack = OffloadActivations.__init__

    def on_cpu(self, **settings):
        with patch("torch.accelerator.current_accelerator", lambda: torch.device("cpu")):
            pack(self, **{**settings, "use_streams": False, "use_pin_memory": False})
        taken = self.pack_hook
        self.pack_hook = lambda tensor: copies.append(tuple(tensor.shape)) or taken(tensor)

    monkeypatch.setattr(OffloadActivations, "__init__", on_cpu)
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)  # called where bitsandbytes is imported
    return copies


@pytest.mark.parametrize("chunked", [None, False])
@pytest.mark.parametrize("adapter", [False, True])
def test_offloading_keeps_numbers_and_leaves_the_head_alone(chunked, adapter, offloading_on_cpu, tmp_path):
    found = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = tiny_model(tie_word_embeddings=False)
        model = get_peft_model(model, LoraConfig(target_modules="all-linear")) if adapter else model
        trainer = sft_trainer(tmp_path, model, chunked_cross_entropy=chunked, activation_offloading=offloads)
        trainer.train()
        assert bool(offloading_on_cpu) == offloads
        found.append([(entry.get("loss"), entry.get("grad_norm")) for entry in trainer.state.log_history])
    assert found[0] == found[1] and len(found[0]) == 4
    assert chunked is False or all(shape[-1:] != (37,) for shape in offloading_on_cpu)


ROWS = [{**row, "labels": [*row["labels"][:-1], row["input_ids"][-1]]} for row in rows(6)]


def mixtral(weight):
    settings = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": weight}
    return tiny_model("mixtral", num_key_value_heads=1, **settings)


def naive_cross_entropy(model, rows, over_vocabulary=False):
    """The mean over the labels of all rows, one row at a time, of their tokens or of all tokens of the vocabulary."""
    losses = []
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"][1:])
        logits = model(input_ids=ids, output_router_logits=False).logits[0, :-1]
        logits, labels = logits[labels != -100], labels[labels != -100]
        whole = -logits.log_softmax(-1).mean(-1)
        losses.append(whole if over_vocabulary else F.cross_entropy(logits, labels, reduction="none"))
    return torch.cat(losses).mean()


def routed_loss(model, batches):
    """The load-balancing losses of batches, weighted with their labels, without their coefficient."""
    labels = [batch["labels"][:, 1:].ne(-100).sum() for batch in batches]
    losses = [model(**batch, output_router_logits=True).aux_loss for batch in batches]
    return sum(count * loss for count, loss in zip(labels, losses)) / sum(labels), sum(labels)


@pytest.mark.parametrize(("size", "accumulation"), [(6, 1), (2, 3), (1, 6)])
def test_the_weight_of_the_router_loss_does_not_depend_on_the_split(size, accumulation, tmp_path):
    model = mixtral(1.0)
    settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    run = sft_trainer(tmp_path, model, {**settings, "max_steps": 1, "max_grad_norm": 0.0}, train_dataset=ROWS)
    batches = list(run.get_train_dataloader())
    routed, count = routed_loss(model, batches)
    expected = naive_cross_entropy(model, ROWS) + routed
    expected.backward()
    wanted = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    for batch in batches:
        run.training_step(model, batch, num_items_in_batch=count)
    for weight, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-6)
    model.zero_grad()
    run.train()
    assert run.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("size", "smoothing"), [(1, 0.0), (4, 0.0), (6, 0.1)])
def test_the_loss_of_an_evaluation_is_the_mean_over_tokens(size, smoothing, tmp_path):
    """It is the cross-entropy of the labels, one of which is not the token, also with label smoothing."""
    settings, held_out = {"per_device_eval_batch_size": size, "label_smoothing_factor": smoothing}, rows(6)
    for chunked in (None, False):
        run = sft_trainer(tmp_path, tiny_model(), settings, eval_dataset=held_out, chunked_cross_entropy=chunked)
        metrics = run.evaluate()
        assert smoothing or metrics["eval_loss"] == metrics["eval_ce_loss"]
        assert metrics["eval_loss"] == pytest.approx(naive_cross_entropy(run.model, held_out).item(), rel=1e-5)


def test_a_loss_that_needs_the_logits_is_not_computed_in_chunks(tmp_path):
    """Label smoothing is a share of the mean over the vocabulary."""
    model, settings = tiny_model(), {"per_device_train_batch_size": 12, "max_steps": 1}
    with torch.no_grad():
        nll, smooth = naive_cross_entropy(model, ROWS), naive_cross_entropy(model, ROWS, over_vocabulary=True)
    for given, expected in (
        ({}, nll), ({"compute_loss_func": lambda outputs, labels, **_: outputs["logits"].sum() * 0 + 7.0}, 7.0),
        ({"label_smoothing_factor": 0.1}, 0.9 * nll + 0.1 * smooth),
    ):  # fmt: skip
        chosen = {**settings, **given}
        function = chosen.pop("compute_loss_func", None)
        run = sft_trainer(tmp_path, copy.deepcopy(model), chosen, train_dataset=ROWS, compute_loss_func=function)
        run.train()
        assert run.state.log_history[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
        if given:
            with pytest.raises(ModelError, match="chunked_cross_entropy is not supported: label_smoothing_factor and"):
                sft_trainer(tmp_path, model, chosen, compute_loss_func=function, chunked_cross_entropy=True)


def test_the_loss_of_an_evaluation_includes_the_router_loss(tmp_path):
    model = mixtral(0.5)
    run = sft_trainer(tmp_path, model, {"per_device_eval_batch_size": 4}, eval_dataset=ROWS)
    metrics, (routed, _) = run.evaluate(), routed_loss(model, list(run.get_eval_dataloader()))
    assert metrics["eval_ce_loss"] == pytest.approx(naive_cross_entropy(model, ROWS).item(), rel=1e-5)
    assert metrics["eval_loss"] - metrics["eval_ce_loss"] == pytest.approx(0.5 * routed.item(), rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"alpha": 1.0, "k": 3}, {"alpha": 0.5, "k": 99}])
def test_weighted_losses(options):
    """Values and gradients, token by token."""
    torch.manual_seed(0)
    logits = torch.randn(3, 7, 11, requires_grad=True)
    labels = torch.randint(11, (3, 7)).masked_fill(torch.rand(3, 7) < 0.4, -100)
    loss = weighted_cross_entropy({"logits": logits}, labels, 9, **options)
    total = 0.0
    for row in range(3):
        for place in range(6):
            if (label := labels[row, place + 1]) != -100:
                p = logits[row, place].softmax(-1)
                best = torch.stack(sorted(p, reverse=True)[: options.get("k", 1)])
                best = best / best.sum()
                weight = (-(best * best.log()).sum()) ** options["alpha"] if options else p[label]
                total = total - weight.detach() * p[label].log()
    torch.testing.assert_close(loss, total / 9)
    torch.testing.assert_close(*(torch.autograd.grad(each, logits)[0] for each in (loss, total / 9)))
    mean = weighted_cross_entropy({"logits": logits}, labels, **options)
    torch.testing.assert_close(mean, total / labels[:, 1:].ne(-100).sum())
