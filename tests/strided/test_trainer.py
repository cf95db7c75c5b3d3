"""The trainer as users meet it: training, logging, resuming, evaluating, and stopping on bad numbers."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import TrainingArguments

from ebft.errors import ConfigError, NonFiniteLossError
from ebft.strided import StridedEBFTConfig, StridedEBFTTrainer
from tests.strided.families import tiny_model
from tests.strided.short_run import documents
from tests.strided.test_exactness import with_lora

GUIDE_METRICS = {
    "ebft/alignment",
    "ebft/diversity",
    "ebft/mean_reward",
    "ebft/reward",
    "ebft/cfm_loss",
    "ebft/rl_loss",
    "ebft/ce_loss",
    "ebft/advantages_std",
    "entropy",
    "grad_norm",
    "throughput/documents_per_s",
    "throughput/generated_tokens_per_s",
    "memory/peak_gib",
}


def make(tmp_path, model=None, train=None, evaluation=None, **changes):
    given = {
        "max_steps": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "disable_tqdm": True,
        **changes,
    }
    args = StridedEBFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], **given)
    model = model if model is not None else with_lora(tiny_model("llama"))
    rows = train if train is not None else Dataset.from_list([r for r in documents() if len(r["input_ids"]) > 18])
    return StridedEBFTTrainer(model=model, args=args, train_dataset=rows, eval_dataset=evaluation)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_memory_is_pinned_only_for_a_gpu_unless_set(tmp_path, monkeypatch, has_gpu):
    # Only for our class: transformers would set up the device, and turns it off itself with use_cpu.
    monkeypatch.setattr(
        "ebft.strided.trainer.torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: has_gpu))
    )
    given = {"output_dir": str(tmp_path), "report_to": [], "bf16": False}
    assert StridedEBFTConfig(**given).dataloader_pin_memory is has_gpu
    for chosen in (True, False):
        assert StridedEBFTConfig(**given, dataloader_pin_memory=chosen).dataloader_pin_memory is chosen


def test_every_metric_of_the_guide_is_logged(tmp_path):
    trainer = make(tmp_path)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 4
    for entry in steps:
        assert entry.keys() >= GUIDE_METRICS
        assert entry["ebft/reward"] == entry["ebft/mean_reward"]
        assert entry["ebft/mean_reward"] == pytest.approx(entry["ebft/alignment"] - entry["ebft/diversity"], abs=1e-5)
        assert entry["ebft/advantages_std"] > 0 and entry["throughput/generated_tokens_per_s"] > 0
        assert entry["loss"] == pytest.approx(entry["ebft/rl_loss"], abs=1e-4)


def test_training_moves_the_policy_towards_the_reference(tmp_path):
    """On one short document that is seen over and over, alignment rises and the feature-matching loss falls."""
    rows = [{"input_ids": [5, 6, 7, 8, 9, 10] * 4}] * 8
    trainer = make(
        tmp_path,
        model=tiny_model("llama", seed=2),
        train=rows,
        max_steps=40,
        learning_rate=3e-3,
        stride=4,
        context_length=4,
        generate_max_len=3,
        temperature=1.0,
        lr_scheduler_type="constant",
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    mean = lambda name, part: sum(entry[name] for entry in part) / len(part)
    assert mean("ebft/alignment", logs[-8:]) > mean("ebft/alignment", logs[:8]) + 0.2
    assert mean("ebft/cfm_loss", logs[-8:]) < mean("ebft/cfm_loss", logs[:8]) - 0.1


def test_resuming_gives_the_run_that_was_not_stopped(tmp_path):
    whole = make(tmp_path / "whole", max_steps=4, lr_scheduler_type="constant")
    whole.train()
    first = make(tmp_path / "parts", max_steps=4, lr_scheduler_type="constant", save_strategy="steps", save_steps=2)
    first.train()
    resumed = make(tmp_path / "parts", max_steps=4, lr_scheduler_type="constant")
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters()):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=name)
    logs = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (whole, resumed)]
    assert logs[0] == pytest.approx(logs[1], abs=1e-6)


def resumed_from_two(folder, first=None, **second):
    """A run that is stopped after two steps with the settings `first`, and resumed with `second`."""
    both = {"lr_scheduler_type": "cosine", "save_strategy": "steps", "save_steps": 2}
    make(folder, **{"max_steps": 2, **both, **(first or {})}).train()
    trainer = make(folder, **{**both, **second})
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return trainer


@pytest.mark.parametrize("changes", [{"max_steps": 5}, {"max_steps": 5, "lr_scheduler_type": "linear"}])
def test_the_first_step_after_resuming_has_the_learning_rate_of_the_new_schedule(tmp_path, changes):
    """A cosine schedule ends at 0, which the first step of an extended run must not use."""
    whole = make(tmp_path / "whole", **{"lr_scheduler_type": "cosine", **changes})
    whole.train()
    resumed = resumed_from_two(tmp_path / "parts", **changes)
    rates = [[e["learning_rate"] for e in t.state.log_history if "loss" in e][2:] for t in (whole, resumed)]
    assert rates[0] == rates[1] and rates[1][0] > 0


def test_an_extended_run_updates_the_weights_in_its_first_step(tmp_path):
    resumed = resumed_from_two(tmp_path, max_steps=4, save_steps=1)
    assert resumed.state.global_step == 4
    saved = [load_file(tmp_path / f"checkpoint-{step}" / "adapter_model.safetensors") for step in (2, 3)]
    assert not all(saved[0][name].equal(saved[1][name]) for name in saved[0])


def test_the_steps_between_logs_evaluations_and_saves_are_those_of_the_resumed_run(tmp_path, caplog, monkeypatch):
    rows = Dataset.from_list([r for r in documents() if len(r["input_ids"]) > 18])
    every = {"save_steps": 1, "logging_steps": 3, "eval_steps": 2, "eval_strategy": "steps", "evaluation": rows}
    first = {"eval_steps": 1, "eval_strategy": "steps", "evaluation": rows}
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    resumed = resumed_from_two(tmp_path, first, max_steps=6, **every)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in range(2, 7)}
    log = [entry for entry in resumed.state.log_history if entry["step"] > 2]
    assert [entry["step"] for entry in log if "loss" in entry] == [3, 6]
    assert [entry["step"] for entry in log if "eval_ce_loss" in entry] == [4, 6]
    assert "do not match" not in caplog.text


def test_an_evaluation_before_the_first_step_is_made_once(tmp_path):
    rows = Dataset.from_list([r for r in documents() if len(r["input_ids"]) > 18])
    resumed = resumed_from_two(
        tmp_path, {"eval_on_start": True, "evaluation": rows}, eval_on_start=True, evaluation=rows
    )
    assert [entry["step"] for entry in resumed.state.log_history if "eval_ce_loss" in entry] == [0]


def test_a_stop_in_the_evaluation_before_the_first_step_saves_nothing(tmp_path):
    rows = Dataset.from_list([r for r in documents() if len(r["input_ids"]) > 18])
    trainer = make(tmp_path, eval_on_start=True, evaluation=rows)
    may_stop = []

    def stop(*args, **kwargs):
        may_stop.append(trainer.may_stop)
        raise KeyboardInterrupt

    trainer.evaluate = stop
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.save_stopped()
    assert may_stop == [True] and not list(tmp_path.glob("checkpoint-*"))


def test_saved_adapter_loads_with_plain_peft(tmp_path):
    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    model = with_lora(type(base).from_pretrained(tmp_path / "base"))
    trainer = make(tmp_path / "run", model=model)
    trainer.train()
    trainer.save_model()
    ids = torch.randint(3, 90, (1, 12))
    expected = trainer.model.eval()(input_ids=ids).logits
    for loaded in (
        PeftModel.from_pretrained(type(base).from_pretrained(tmp_path / "base"), tmp_path / "run"),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run"),
    ):
        torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_full_model_saves_and_keeps_its_frozen_copy(tmp_path):
    model = tiny_model("qwen3")
    trainer = make(tmp_path, model=model, feature_device="cpu")
    before = {k: v.clone() for k, v in trainer.feature_network.causal_lm.state_dict().items()}
    trainer.train()
    trainer.save_model()
    after = trainer.feature_network.causal_lm.state_dict()
    assert all(before[k].equal(after[k]) for k in before)
    assert not any(before[k].equal(v) for k, v in model.state_dict().items() if "q_proj" in k)
    loaded = type(model).from_pretrained(tmp_path)
    ids = torch.randint(3, 90, (1, 12))
    torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert "attn" not in json.loads((tmp_path / "config.json").read_text()).get("_attn_implementation", "")


def test_feature_device_with_an_adapter_is_refused(tmp_path):
    with pytest.raises(ValueError, match="feature_device: cpu has no effect with an adapter"):
        make(tmp_path, feature_device="cpu")


def test_evaluation_is_logged_and_repeatable(tmp_path):
    held_out = Dataset.from_list([r for r in documents() if len(r["input_ids"]) > 25])
    trainer = make(tmp_path, evaluation=held_out, eval_strategy="steps", eval_steps=2)
    trainer.train()
    entries = [e for e in trainer.state.log_history if "eval_cfm_loss" in e]
    assert [e["step"] for e in entries] == [2, 4]
    assert trainer.evaluate() == trainer.evaluate()
    assert {"eval_ce_loss", "eval_alignment", "eval_diversity", "eval_cfm_loss_plugin"} <= entries[0].keys()
    assert trainer.model.training


def test_non_finite_loss_stops_before_the_update(tmp_path):
    model = tiny_model("llama")
    trainer = make(tmp_path, model=model, max_steps=3, ce_coef=1.0)
    plain = trainer.compute_loss
    trainer.compute_loss = lambda *a, **k: plain(*a, **k) * (float("nan") if trainer.state.global_step == 1 else 1.0)
    with pytest.raises(NonFiniteLossError, match=r"loss is nan at step 2.*token ids \[\["):
        trainer.train()
    assert trainer.state.global_step == 1
    assert all(p.isfinite().all() for p in model.parameters())


def test_non_finite_gradient_stops_before_the_update(tmp_path):
    model = tiny_model("llama")
    trainer = make(tmp_path, model=model, max_steps=3, ce_coef=1.0)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda g: g * float("inf") if trainer.state.global_step == 1 else g)
    with pytest.raises(NonFiniteLossError, match="gradient norm is (nan|inf) at step 2"):
        trainer.train()
    assert all(p.isfinite().all() for p in model.parameters())


def test_one_sample_falls_back_to_reinforce_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="n_samples_per_prompt"):
        trainer = make(tmp_path, n_samples_per_prompt=1)
    assert trainer.args.advantage_estimator == "reinforce" and trainer.args.diversity_coef == 0
    trainer.train()


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({"input_ids": torch.ones(1, 5, dtype=torch.long)}, "every document of the batch is too short for a block"),
        ({"input_ids": torch.ones(5, dtype=torch.long)}, "input_ids must be"),
        ({"input_ids": torch.ones(1, 40, dtype=torch.long), "attention_mask": torch.zeros(1, 40)}, "padding"),
        ({"input_ids": torch.ones(1, 40, dtype=torch.long), "attention_mask": torch.ones(1, 39)}, "the same shape"),
        ({"input_ids": torch.ones(1, 40, dtype=torch.long), "prompt_length": torch.tensor([-1])}, "prompt_length"),
        ({"input_ids": torch.ones(1, 200, dtype=torch.long)}, "max_position_embeddings"),
    ],
)
def test_unusable_batches_are_refused(inputs, match, tmp_path):
    trainer = make(tmp_path)
    with pytest.raises(ValueError, match=match):
        trainer.compute_loss(trainer.model, inputs)


def test_scalar_item_count_is_refused(tmp_path):
    trainer = make(tmp_path)
    inputs = {"input_ids": torch.randint(3, 90, (1, 40))}
    with pytest.raises(ValueError, match="num_items_in_batch"):
        trainer.compute_loss(trainer.model, inputs, num_items_in_batch=40)


@pytest.mark.parametrize("changes", [{"stride": 0}, {"temperature": -1.0}, {"embed_method": "first"}, {"top_p": 0.0}])
def test_bad_options_are_named(changes, tmp_path):
    with pytest.raises(ValueError, match=next(iter(changes))):
        StridedEBFTConfig(output_dir=str(tmp_path), use_cpu=True, **changes)


def test_model_by_name_with_a_new_adapter(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    args = StridedEBFTConfig(output_dir=str(tmp_path / "run"), use_cpu=True, report_to=[], max_steps=1)
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = StridedEBFTTrainer(str(tmp_path / "base"), args, peft_config=adapter, train_dataset=documents())
    trainer.train()
    assert trainer.feature_network.shares_weights
    with pytest.raises(ValueError, match="already has an adapter"):
        StridedEBFTTrainer(trainer.model, args, peft_config=adapter)
    with pytest.raises(ValueError, match="model must be a causal language model"):
        StridedEBFTTrainer(None, args)


def test_untokenised_datasets_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"train_dataset has no column input_ids \(columns: \['text'\]\)"):
        make(tmp_path, train=Dataset.from_list([{"text": "def f(): pass"}]))


def test_mixed_precision_samples_as_it_trains(tmp_path):
    """Under bf16 autocast the rollout pass and the training forward see the same numbers, up to summation order."""
    model = tiny_model("llama")
    trainer = make(tmp_path, model=model, bf16=True, max_steps=1, temperature=1.0)
    drawn = []
    model.lm_head.register_forward_hook(lambda module, args, out: drawn.append(out.dtype))
    trainer.train()
    assert set(drawn) == {torch.bfloat16}
    assert drawn.count(torch.bfloat16) > 8


@pytest.mark.parametrize("single_pass", [True, False])
def test_a_direct_call_computes_in_the_precision_of_training(single_pass, tmp_path):
    """The model is only prepared for mixed precision by train()."""
    options = {"bf16": True, "single_pass": single_pass, "temperature": 1.0, "ce_coef": 0.5, "max_grad_norm": 0.0}
    trainer = make(tmp_path, model=tiny_model("llama"), max_steps=1, learning_rate=0.0, **options)
    seen, training_loss = [], trainer.compute_loss

    def keep(model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, output = training_loss(model, inputs, True, num_items_in_batch)
        seen.append((inputs, output))
        return loss

    trainer.compute_loss = keep
    trainer.train()
    (inputs, trained), gradients = seen[0], {}
    for prepares in (True, False):
        if not prepares:
            trainer = make(tmp_path, model=tiny_model("llama"), max_steps=1, **options)
        trainer.state.global_step = 0  # which the sampling noise depends on
        loss, output = StridedEBFTTrainer.compute_loss(trainer, trainer.model, inputs, return_outputs=True)
        trainer.model.zero_grad()
        loss.backward()
        gradients[prepares] = [value.grad for value in trainer.model.parameters()]
        for name in ("rollouts", "logps", "rewards", "advantages"):
            assert torch.equal(getattr(output, name), getattr(trained, name)), (prepares, name)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients[True], gradients[False]))
    in_float32 = make(tmp_path, model=tiny_model("llama"), max_steps=1, **{**options, "bf16": False})
    assert not torch.equal(in_float32.compute_loss(in_float32.model, inputs, True)[1].logps, trained.logps)


def test_several_evaluation_sets(tmp_path):
    held_out = Dataset.from_list([r for r in documents() if len(r["input_ids"]) > 25])
    trainer = make(tmp_path, evaluation={"a": held_out, "b": held_out})
    metrics = trainer.evaluate()
    assert metrics["eval_a_cfm_loss"] == metrics["eval_b_cfm_loss"]


def test_rows_too_short_for_a_block_are_dropped_and_counted(tmp_path):
    rows = [{"input_ids": [3] * n} for n in (40, 10, 30)] + [{"input_ids": [3] * 40, "prompt_length": 37}]
    rows += [{"input_ids": [3] * 29, "prompt_length": 27, "turn_spans": turns} for turns in ([[1, 20]], [[25, 27]])]
    empty = {"prompt_length": 0, "turn_spans": []}
    for dataset in (rows, Dataset.from_list([{**empty, **row} for row in rows])):
        with pytest.warns(UserWarning, match="train_dataset: dropped 3 of 6 rows"):
            trainer = make(tmp_path, train=dataset)
        assert [len(row["input_ids"]) for row in trainer.train_dataset] == [40, 30, 29]
    with pytest.raises(ValueError, match="no row that is long enough for a block: it has 1 rows of at most 10 tokens"):
        make(tmp_path, train=rows[1:2])
    with pytest.raises(ValueError, match=r"row of 129 tokens, which exceeds .*max_position_embeddings \(128\)"):
        make(tmp_path, train=[{"input_ids": [3] * 129}])


@pytest.mark.parametrize(
    ("arguments", "kwargs", "match"),
    [
        ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha"),
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor"),
        ({}, {"compute_metrics": print}, "compute_metrics is not supported"),
    ],
)
def test_arguments_without_effect_are_refused(arguments, kwargs, match, tmp_path):
    args = StridedEBFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], **arguments)
    with pytest.raises(ValueError, match=match):
        StridedEBFTTrainer(tiny_model("llama"), args, **kwargs)


def test_sharded_parameters_of_deepspeed_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("ebft.strided.validation.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ConfigError, match="ZeRO-3 is not supported in strided mode: .* Use FSDP2, ZeRO-2 or DDP"):
        make(tmp_path)


def test_plain_training_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="args must be an instance of StridedEBFTConfig, got TrainingArguments"):
        StridedEBFTTrainer(tiny_model("llama"), TrainingArguments(output_dir=str(tmp_path), use_cpu=True))


def test_predict_is_refused_and_one_sample_still_evaluates(tmp_path):
    held_out = Dataset.from_list([r for r in documents() if len(r["input_ids"]) > 25])
    trainer = make(tmp_path, evaluation=held_out, n_samples_per_prompt=1)
    assert trainer.evaluate()["eval_cfm_loss"] > 0
    with pytest.raises(ValueError, match="Use evaluate"):
        trainer.predict(held_out)


def test_mismatched_labels_are_refused(tmp_path):
    trainer = make(tmp_path)
    inputs = {"input_ids": torch.ones(1, 40, dtype=torch.long), "labels": torch.ones(1, 45, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"labels must have the same shape as input_ids .*, got \(1, 45\)"):
        trainer.compute_loss(trainer.model, inputs)


def test_token_type_does_not_change_the_noise(tmp_path):
    trainer = make(tmp_path)
    ids = torch.randint(3, 90, (1, 40))
    out = []
    for dtype in (torch.int64, torch.int32):
        trainer = make(tmp_path, model=tiny_model("llama"))
        out.append(trainer.compute_loss(trainer.model, {"input_ids": ids.to(dtype)}, return_outputs=True)[1])
    assert out[0].rollouts.equal(out[1].rollouts)


@pytest.mark.slow
def test_rows_without_room_are_dropped_however_they_are_given(tmp_path):
    """By their mask, by a prompt that only the labels tell, and by the documents of packed rows."""
    good = {"input_ids": list(range(3, 43))}
    short = {"input_ids": [3, 4, 5], "attention_mask": [1, 1, 1]}
    padded = {"input_ids": [3] * 40, "attention_mask": [1] * 5 + [0] * 35}
    prompt = {"input_ids": list(range(3, 43)), "labels": [-100] * 38 + [5, 6]}
    packed = {"input_ids": [3] * 40, "position_ids": [0, 1, 2, 3, 4] * 8}
    nothing = {"input_ids": [3] * 40, "attention_mask": [0] * 40}
    for bad in (short, padded, prompt, packed, nothing):
        with pytest.warns(UserWarning, match="dropped 1 of 3 rows"):
            trainer = make(tmp_path, train=[good, bad, good], per_device_train_batch_size=1, max_steps=3)
        trainer.train()
        assert len(trainer.train_dataset) == 2


def test_a_second_forward_that_is_both_asked_for_and_ruled_out_is_refused(tmp_path):
    for name, value in (("gradient_checkpointing", True), ("rollout_tokens_per_pass", 8), ("disable_dropout", False)):
        with pytest.raises(ConfigError, match=f"single_pass is incompatible with {name}"):
            make(tmp_path, single_pass=True, **{name: value})


def test_looking_at_a_step_does_not_change_training(tmp_path):
    def losses(looks):
        trainer = make(tmp_path, max_steps=2, logging_steps=1)
        if looks:
            batch = next(iter(trainer.get_train_dataloader()))
            for _ in range(2):
                trainer.compute_loss(trainer.model, batch, return_outputs=True)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert losses(looks=True) == losses(looks=False)


@pytest.mark.parametrize("changes", [{}, {"use_whitening": True}, {"advantage_estimator": "group_norm"}])
def test_equal_rollouts_do_not_move_the_policy(changes, tmp_path):
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)  # all probability is on one token
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"n_samples_per_prompt": 4, "weight_decay": 0.0, "max_steps": 3, "ce_coef": 0.0, "adam_epsilon": 1e-12}
    trainer = make(tmp_path, model, **options, **changes)
    trainer.train()
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs and all(entry["grad_norm"] == 0 and entry["ebft/diversity"] > 0.1 for entry in logs)
