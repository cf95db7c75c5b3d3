"""Packed rows of SFT compared with each document alone: losses, gradients, held-out metrics, and refused models."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from transformers import TrainingArguments

from ebft import errors, transformers_internals
from ebft.data.documents import JoiningCollator, pack_rows
from ebft.sft.packed import model_inputs, why_not_separated
from ebft.sft.trainer import SFTTrainer
from tests.strided.families import RUNNING_STATE, tiny_model

NO_DROPOUT = {"llama": {}, "gemma2": {}, "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
LENGTHS = [9, 3, 14, 2, 6, 11, 4, 7]


def documents():
    """Eight documents of unequal lengths, some with a masked prompt, some with masked tokens in between."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, 97, (length,), generator=generator).tolist()
        prompt = number % 3 if length > 3 else 0
        labels = [-100] * prompt + ids[prompt:]
        if length > 10:
            labels[7] = -100
        rows.append({"input_ids": ids, "labels": labels, "prompt_length": prompt})
    return rows


def oracle(model, rows):
    """The mean over all trained tokens of -log p, each document in a pass of its own; and the number of tokens."""
    total, count = 0, 0
    for row in rows:
        logps = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        for position in range(1, len(row["input_ids"])):
            if row["labels"][position] != -100:
                total = total - logps[position - 1, row["labels"][position]]
                count += 1
    return total / count, count


def make_trainer(folder, model, train, evaluation=None, batch_flattening=False, **changes):
    settings = {"max_steps": 1, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3, "logging_steps": 1}
    settings |= {"learning_rate": 0.0, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    settings |= {"remove_unused_columns": False, "prediction_loss_only": True, "max_grad_norm": 0.0, **changes}
    data = {"train_dataset": train, "eval_dataset": evaluation, "batch_flattening": batch_flattening}
    return SFTTrainer(model, TrainingArguments(str(folder), **settings), JoiningCollator(0), **data)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def step(trainer, batches):
    """The loss and the gradients of one optimizer step over `batches` of rows."""
    trainer.model.zero_grad()
    batches = [trainer.data_collator(rows) for rows in batches]
    count = trainer._get_num_items_in_batch(batches, trainer.args.device)
    trainer.current_gradient_accumulation_steps = len(batches)
    loss = sum(trainer.training_step(trainer.model, batch, count) for batch in batches)
    return loss.item(), gradients(trainer.model), int(count)


def check_step(trainer, batches, expected, wanted, count):
    loss, found, tokens = step(trainer, batches)
    assert tokens == count and loss == pytest.approx(expected, rel=1e-5)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-5 + 1e-4 * value.abs().max().item(), rtol=0, msg=name)
    trainer.budget.gather(trainer.accelerator)
    assert trainer.budget.totals["documents"] == 8


@pytest.mark.parametrize("family", NO_DROPOUT)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("flattened", [False, True])
def test_packed_rows_have_the_loss_and_the_gradients_of_their_documents(family, attention, flattened, tmp_path):
    """Also in rows that are longer than the positions of the model, which are enough for each document."""
    model = tiny_model(family, max_position_embeddings=16, **NO_DROPOUT[family])
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip(f"since transformers 5.24, {family} has no sdpa attention")
    model.set_attn_implementation(attention)
    rows = documents()
    expected, count = oracle(model, rows)
    expected.backward()
    wanted = gradients(model)
    if flattened:
        trainer = make_trainer(tmp_path, model, rows, batch_flattening=True)
        batches = [rows[:3], rows[3:]]
    else:
        packed = pack_rows(rows, 21)
        assert sorted(packed.lengths) == [15, 20, 21]
        trainer = make_trainer(tmp_path, model, packed)
        batches = [[packed[0], packed[2]], [packed[1]]]
    check_step(trainer, batches, expected.item(), wanted, count)


def test_the_routers_loss_counts_no_padding(tmp_path):
    """It is a mean over tokens: rows of a batch are joined, so that it has those of the documents alone."""
    model = tiny_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
    packed = pack_rows(documents(), 16)
    trainer = make_trainer(tmp_path, model, packed)
    batch = trainer.data_collator([packed[0], packed[3]])
    assert trainer.is_padding_free(batch)
    inputs = model_inputs(batch, True)
    assert inputs["input_ids"].shape == (1, 25) and "attention_mask" not in inputs
    loss, _, _ = step(trainer, [[packed[0], packed[3]]])
    plain = model(**inputs, num_items_in_batch=inputs["labels"].ne(-100).sum()).loss.item()
    assert loss == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("flattened", [False, True])
def test_held_out_metrics_are_those_of_separate_documents(flattened, tmp_path):
    model, rows = tiny_model("llama").eval(), documents()
    with torch.no_grad():
        expected = oracle(model, rows)[0].item()
        all_labels = [{**row, "labels": row["input_ids"]} for row in rows]
        expected_all = oracle(model, all_labels)[0].item()
    evaluation = rows if flattened else pack_rows(rows, 16)
    metrics = make_trainer(tmp_path, model, rows, evaluation, batch_flattening=flattened).evaluate()
    assert metrics["eval_ce_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["eval_ce_loss_all"] == pytest.approx(expected_all, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


def test_flash_attention_gets_the_rows_of_a_batch_as_one(tmp_path, monkeypatch):
    """Its kernels read the boundaries of documents from the positions of a single row."""
    packed = pack_rows(documents(), 16)
    with monkeypatch.context() as patched:
        patched.setattr("ebft.sft.trainer.has_flash_attention", lambda model: True)
        trainer = make_trainer(tmp_path, tiny_model("llama"), packed)
        assert trainer.is_padding_free(trainer.data_collator([packed[0]]))
        assert not trainer.is_padding_free(trainer.data_collator(documents()))
        inputs = model_inputs(JoiningCollator(0)([packed[0], packed[3]]), padding_free=True)
    lengths = [len(row["input_ids"]) for index in (0, 3) for row in packed[index]["documents"]]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()[:-1]]
    assert inputs["position_ids"].eq(0).nonzero()[:, 1].tolist() == starts
    for flash in (False, True):
        monkeypatch.setattr("ebft.sft.trainer.has_flash_attention", lambda model, flash=flash: flash)
        trainer = make_trainer(tmp_path, tiny_model("llama"), documents(), batch_flattening="auto")
        assert trainer.is_padding_free(trainer.data_collator(documents())) == flash


def test_rows_that_come_packed_are_trained_as_such(tmp_path):
    model, rows = tiny_model("llama"), documents()
    expected, _ = oracle(model, rows)
    row = {"input_ids": [token for each in rows for token in each["input_ids"]], "seq_lengths": LENGTHS}
    row["labels"] = [label for each in rows for label in (-100, *each["labels"][1:])]
    assert step(make_trainer(tmp_path, model, [row]), [[row]])[0] == pytest.approx(expected.item(), rel=1e-5)


def test_documents_that_see_one_another_are_noticed(tmp_path, monkeypatch):
    """With a mask that ignores the positions, the comparison before the first step differs; with bf16, it does not."""
    packed = pack_rows(documents(), 16)
    trainer = make_trainer(tmp_path, tiny_model("llama"), packed, bf16=True)
    assert trainer.train().metrics["train_loss"] > 0
    model = tiny_model("llama")
    plain = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, position_ids=None, **kwargs: plain(*args, **kwargs))
    message = "LlamaForCausalLM does not separate the documents of a packed row.*eager"
    with pytest.warns(UserWarning, match=message):
        make_trainer(tmp_path, model, packed).train()
    with pytest.raises(errors.ModelError, match=f"{message}.*Remove batch_flattening"):
        make_trainer(tmp_path, model, documents(), batch_flattening=True).train()


KEEP_STATE = "state passes from one document of a row to the next"
OWN_ATTENTION = "does not support the attention interface"
JOINED = {
    **dict.fromkeys(("opt", "llama4_text", "gpt_oss"), "does not separate the documents of a packed row"),
    **dict.fromkeys(("bloom", "mpt", "falcon", "gptj", "codegen", "gpt_neo", "stablelm"), OWN_ATTENTION),
    **dict.fromkeys(RUNNING_STATE, f"{KEEP_STATE}|{OWN_ATTENTION}"),
}


@pytest.mark.first(6)
@pytest.mark.filterwarnings("ignore:.*the documents of packed rows are computed as separate rows:UserWarning")
@pytest.mark.parametrize("family", JOINED)
def test_documents_that_share_no_row_are_computed_separately(family, tmp_path):
    """Every family: values and gradients of each document alone, of several rows and micro-batches, and held out."""
    model, rows = tiny_model(family, **({"dropout": 0.0} if family == "opt" else {})).eval(), documents()
    expected, count = oracle(model, rows)
    expected.backward()
    wanted, packed = gradients(model), pack_rows(rows, 16)
    # Since transformers 5.24, GPT-J and CodeGen use the attention interface and separate the documents of a row.
    is_joined = JOINED[family] != OWN_ATTENTION or not transformers_internals.takes_attention_functions(model)
    with pytest.warns(UserWarning, match=JOINED[family]) if is_joined else nullcontext():
        trainer = make_trainer(tmp_path, model, packed, packed)
        trainer._check_once(model, trainer.data_collator([packed[0]]))
    check_step(trainer, [[packed[0], packed[3]], [packed[1], packed[2]]], expected.item(), wanted, count)
    assert trainer.evaluate()["eval_ce_loss"] == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("family", RUNNING_STATE)
def test_flattened_batches_of_layers_with_a_running_state_are_refused(family, tmp_path):
    with pytest.raises(errors.ModelError, match=rf"({KEEP_STATE}|{OWN_ATTENTION}).*Remove batch_flattening"):
        make_trainer(tmp_path, tiny_model(family), documents(), batch_flattening=True)


def test_the_comparison_leaves_the_model_as_it_was():
    model = tiny_model("llama").train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert why_not_separated(model, model, False) is None
    assert model.training and torch.get_rng_state().equal(state)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
