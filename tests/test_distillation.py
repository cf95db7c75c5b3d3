"""Self-distillation: the loss against plain passes, what the teacher reads, and what is refused."""

import json
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from ebft import RunConfig, errors, train
from tests.golden.runs import LORA, sentence
from tests.preferences.runs import write_inputs

TEXTS = [{"input": sentence(number, 2 + number % 4), "output": sentence(number + 5, 1 + number % 3)}
         for number in range(10)]  # fmt: skip
CHATS = [{"messages": [{"role": "user", "content": row["input"]}, {"role": "assistant", "content": row["output"]}]}
         for row in TEXTS]  # fmt: skip
TEMPLATE = "{prompt} is {privileged_context}. {prompt}"


def config_of(folder, adapter=True, rows=TEXTS, **changes):
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kind = "ebft_chat_multiturn.transform" if "messages" in rows[0] else "ebft_strided_structured.transform_prompts"
    ends = {"stop_token_ids": [*range(0, 100, 6)]}  # often, so that completions differ in length
    trl = {"num_generations": 2, "max_completion_length": 8, "temperature": 0.8, "generation_kwargs": ends,
           **changes.pop("trl", {})}  # fmt: skip
    return RunConfig.from_dict({"base_model": str(folder / "model"), "rl": "sdft",
                                "datasets": [{"path": str(folder / "rows.jsonl"), "type": kind}], "trl": trl,
                                "sequence_len": 128, "micro_batch_size": 4, "gradient_accumulation_steps": 2,
                                "max_steps": 2, "logging_steps": 1, "learning_rate": 5e-3, "torch_dtype": "float32",
                                "save_strategy": "no", "seed": 3, "output_dir": str(folder / "out"),
                                **(LORA if adapter else {}), **changes})  # fmt: skip


def trained(*args, **changes):
    with warnings.catch_warnings(action="ignore"):
        return train(config_of(*args, **changes))


def divergence(student, teacher):
    """Jensen-Shannon, as alpha 0.5 is, of two rows of logits."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    kl = lambda x, y: (x * (x / y).log()).sum(-1)
    return 0.5 * kl(p, (p + q) / 2) + 0.5 * kl(q, (p + q) / 2)


@pytest.mark.parametrize(("adapter", "rows", "positions", "dtype"), [
    (True, TEXTS, "rotary", "float32"), (False, CHATS, "rotary", "float32"), (False, TEXTS, "learned", "float32"),
    (True, TEXTS, "rotary", "bfloat16")])  # fmt: skip
def test_loss_and_gradients_are_those_of_plain_passes(adapter, rows, positions, dtype, tmp_path):
    """Of student and teacher that differ, completion by completion; in bfloat16 logits are rounded, not divergences."""
    write_inputs(tmp_path)
    if positions == "learned":
        size = len(AutoTokenizer.from_pretrained(tmp_path / "model"))
        torch.manual_seed(0)
        shape = GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=256, initializer_range=0.3)
        GPT2LMHeadModel(shape).save_pretrained(tmp_path / "model")
    sdft = {"distillation_mode": "full_logits", "teacher_prompt_template": TEMPLATE}
    config = config_of(tmp_path, adapter, rows, sdft=sdft)
    trainer = trained(tmp_path, adapter, rows, sdft=sdft, torch_dtype=dtype).trainer
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    view = config.method.row_view(config, tokenizer)
    data = [trainer.train_dataset[number] for number in (0, 0, 3, 3)]
    model, trainer.current_gradient_accumulation_steps = trainer.model.train(), 1
    batch = trainer._prepare_training_batch(data)
    model.zero_grad()
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    losses = []
    for row, ids, mask in zip(data, batch["completion_ids"], batch["completion_mask"]):
        done, prompt = ids[mask.bool()], row["prompt"]
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        read = TEMPLATE.format(prompt=text, privileged_context=row["ground_truth"])
        logits = []
        for one, content in ((model, text), (base, read)):
            if isinstance(prompt, str):
                start = tokenizer(content)["input_ids"]
            else:
                start = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=True,
                                                      add_generation_prompt=True)["input_ids"]  # fmt: skip
            shown = view(row).parts
            assert [token.id for token in shown[0 if one is model else -1].tokens] == list(start)
            whole = torch.cat([torch.tensor(start), done])[None]
            logits.append(one(whole).logits[0, len(start) - 1 : -1].float() / 0.8)
        losses.append(divergence(logits[0], logits[1].detach()).mean())
    expected = torch.stack(losses).mean()
    expected.backward()
    assert len({int(mask.sum()) for mask in batch["completion_mask"]}) > 1, "completions of one length"
    torch.testing.assert_close(loss, expected, rtol=1e-4 if dtype == "float32" else 1e-2, atol=1e-7)
    assert max(gradient.abs().max() for gradient in found.values()) > 1e-6
    for name, weight in model.named_parameters():
        if weight.grad is not None and dtype == "float32":
            torch.testing.assert_close(found[name], weight.grad, rtol=1e-3, atol=1e-7)
        elif weight.grad is not None:
            assert torch.cosine_similarity(found[name].flatten(), weight.grad.flatten(), dim=0) > 0.99


def test_what_has_no_effect_is_said_and_what_would_be_lost_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="trl.beta, log_rollouts: all, sample_packing: true: no effect with rl: sdft"):
        config_of(tmp_path, log_rollouts="all", sample_packing=True, trl={"beta": 0.1})
    with pytest.warns(UserWarning, match="sdft.distillation_topk with distillation_mode: full_logits: no effect"):
        config_of(tmp_path, sdft={"distillation_mode": "full_logits", "distillation_topk": 5})
    write_inputs(tmp_path)
    turns = [{"messages": [*row["messages"], *row["messages"]]} for row in CHATS]
    long = [{"input": "one " * 25, "output": "two " * 5}] * 4
    for error, words, changes in (
        (errors.ConfigError, "temperature cannot be set here", {"trl": {"generation_kwargs": {"temperature": 2.0}}}),
        (errors.DataError, "training row 0 has several turns", {"rows": turns}),
        (errors.DataError, "row 0: .* exceed .* positions",
         {"rows": long, "sequence_len": 512,
          "sdft": {"teacher_prompt_template": "{prompt}" * 5 + "{privileged_context}"}}),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            trained(tmp_path, **changes)


def test_held_out_loss_is_the_mean_over_completions_whatever_the_batches(tmp_path):
    """Three prompts in batches of one and two, and of three at once; of greedy completions, which are the same."""
    write_inputs(tmp_path)
    trainer, losses = trained(tmp_path, val_set_size=3, eval_batch_size=2, max_steps=1, eval_steps=1).trainer, []
    trainer.generation_config.do_sample = False
    for size in (2, 4, 6):
        trainer.args.per_device_eval_batch_size = size
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


def test_nothing_of_the_model_changes_samples_or_losses(tmp_path):
    """Its dropout, which models apply in training, and its generation config."""
    write_inputs(tmp_path)
    first = trained(tmp_path)
    assert first.metrics["budget/documents"] == 8
    for file, values in (("config.json", {"attention_dropout": 0.5}), ("generation_config.json", {"min_p": 0.9})):
        path = tmp_path / "model" / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    plain, changed = (run.trainer.state.log_history[0]["loss"] for run in (first, trained(tmp_path)))
    assert changed == plain
