"""The router loss of a mixture of experts in SFT, and the losses of evaluations, for every split of the rows."""

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, TrainingArguments

from ebft.data.batches import DocumentCollator
from ebft.errors import ModelError
from ebft.sft.trainer import SFTTrainer, coefficient

SIZES = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
ROWS = [{"input_ids": [3 + (7 * i + 5 * j) % 60 for j in range(4 + 3 * i)]} for i in range(6)]


def mixtral(**settings):
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=4, **settings)
    return MixtralForCausalLM(config).eval()


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1))


def trainer(folder, model, rows=6, accumulation=1, **settings):
    settings |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation, "max_steps": 1}
    settings |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    args = TrainingArguments(str(folder), max_grad_norm=0.0, **settings)
    collator = DocumentCollator(0, with_prompt_length=False)
    return SFTTrainer(model, args, collator, train_dataset=ROWS, eval_dataset=ROWS)


def naive_cross_entropy(model, rows):
    """The mean over the predicted tokens of all rows, one row at a time."""
    losses = []
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        logits = model(input_ids=ids, output_router_logits=False).logits
        losses.append(F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none"))
    return torch.cat(losses).mean()


def router_loss(model, batch):
    """The load-balancing loss of a batch, without its weight."""
    return model(**batch, output_router_logits=True).aux_loss


@pytest.mark.parametrize(("rows", "accumulation"), [(6, 1), (2, 3), (1, 6)])
def test_the_weight_of_the_router_loss_does_not_depend_on_the_split(tmp_path, rows, accumulation):
    model = mixtral(output_router_logits=True, router_aux_loss_coef=1.0)
    run = trainer(tmp_path, model, rows, accumulation)
    batches = list(run.get_train_dataloader())
    tokens = [batch["labels"][:, 1:].ne(-100).sum().item() for batch in batches]
    shares = [count / sum(tokens) for count in tokens]
    routed = sum(share * router_loss(model, batch) for share, batch in zip(shares, batches, strict=True))
    expected = naive_cross_entropy(model, ROWS) + routed
    expected.backward()
    wanted = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    for batch in batches:
        run.training_step(model, batch, num_items_in_batch=torch.tensor(sum(tokens)))
    for weight, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-6)
    model.zero_grad()
    run.train()
    assert run.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("size", "smoothing"), [(1, 0.0), (4, 0.0), (6, 0.1)])
def test_the_loss_of_an_evaluation_is_the_mean_over_tokens(tmp_path, size, smoothing):
    """It is the cross-entropy, also with label smoothing."""
    run = trainer(tmp_path, llama(), per_device_eval_batch_size=size, label_smoothing_factor=smoothing)
    metrics = run.evaluate()
    assert smoothing or metrics["eval_loss"] == metrics["eval_ce_loss"]
    assert metrics["eval_loss"] == pytest.approx(naive_cross_entropy(run.model.eval(), ROWS).item(), rel=1e-5)


def test_the_loss_of_an_evaluation_includes_the_router_loss(tmp_path):
    model = mixtral(output_router_logits=True, router_aux_loss_coef=0.5)
    run = trainer(tmp_path, model, per_device_eval_batch_size=4)
    metrics = run.evaluate()
    first, second = run.get_eval_dataloader()
    tokens = [batch["labels"][:, 1:].ne(-100).sum() for batch in (first, second)]
    routed = (tokens[0] * router_loss(model, first) + tokens[1] * router_loss(model, second)) / sum(tokens)
    assert metrics["eval_ce_loss"] == pytest.approx(naive_cross_entropy(model, ROWS).item(), rel=1e-5)
    assert metrics["eval_loss"] - metrics["eval_ce_loss"] == pytest.approx(0.5 * routed.item(), rel=1e-4)


def test_models_whose_router_loss_has_an_unknown_weight_are_refused():
    with pytest.raises(ModelError, match="load-balancing loss of a llama model is not known.*output_router_logits"):
        coefficient(llama())
