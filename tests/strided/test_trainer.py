"""The trainer as users meet it: training, logging, resuming, evaluating, and stopping on bad numbers."""

import logging

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel
from safetensors.torch import load_file
from torch.utils.data import ConcatDataset
from transformers import TrainerCallback

from ebft.data.documents import PackedRows
from ebft.errors import ConfigError, DataError, ModelError, NonFiniteLossError
from ebft.strided import StridedEBFTConfig, StridedEBFTTrainer
from ebft.structured import AsyncEBFTConfig, EBFTConfig
from tests.config.conftest import warned
from tests.strided.families import tiny_model
from tests.strided.short_run import documents
from tests.strided.test_exactness import checkpointing
from tests.structured.conftest import chat_model, lora, make_chat_tokenizer

pytestmark = pytest.mark.usefixtures("without_parity_check")
GUIDE_METRICS = {
    *(f"ebft/{name}" for name in ("alignment", "diversity", "mean_reward", "reward", "cfm_loss", "rl_loss", "ce_loss")),
    "ebft/advantages_std", "entropy", "grad_norm", "memory/peak_gib",
    "throughput/documents_per_s", "throughput/generated_tokens_per_s",
}  # fmt: skip
ROWS = Dataset.from_list([row for row in documents() if len(row["input_ids"]) > 18])
HELD_OUT = Dataset.from_list([row for row in documents() if len(row["input_ids"]) > 25][:4])


def make(tmp_path, model=None, train=None, evaluation=None, **changes):
    given = {"max_steps": 4, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    given |= {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, **changes}
    args = StridedEBFTConfig(output_dir=str(tmp_path), **given)
    model = model if model is not None else lora(tiny_model("llama"))
    train = train if train is not None else ROWS
    return StridedEBFTTrainer(model=model, args=args, train_dataset=train, eval_dataset=evaluation)


def logged(trainer, name="loss"):
    return [entry for entry in trainer.state.log_history if name in entry]


def test_names_of_options_and_arguments_of_axolotl(tmp_path):
    common = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True}
    args = StridedEBFTConfig(ebft_stride=5, ebft_generate_max_len=2, **common)
    assert args.stride == 5 and args.generate_max_len == 2
    assert StridedEBFTTrainer(lora(tiny_model("llama")), args, ROWS).train_dataset.num_rows == len(ROWS)
    assert EBFTConfig(ebft_ce_coef=0.5, **common).ce_coef == AsyncEBFTConfig(ebft_ce_coef=0.5, **common).ce_coef == 0.5
    with pytest.raises(ConfigError, match="stride and ebft_stride are two names of the same option"):
        StridedEBFTConfig(ebft_stride=5, stride=8, **common)
    with pytest.raises(TypeError, match="ebft_strid'"):
        StridedEBFTConfig(ebft_strid=5, **common)
    for kind in (StridedEBFTConfig, EBFTConfig):
        args = kind(**common, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch")
        assert (args.metric_for_best_model, args.greater_is_better) == ("cfm_loss", False)


def test_rows_of_text_are_tokenised_as_in_a_config(tmp_path):
    tokenizer, words = make_chat_tokenizer(), "one two three four"
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": words}]
    chat = tokenizer.apply_chat_template(turns, tokenize=False)
    args = StridedEBFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], generate_max_len=2, max_steps=1)
    kinds = {chat: [{"messages": turns}, {"prompt": turns[:1], "completion": turns[1:]}],
             2 * chat: [{"prompt": turns + turns[:1], "completion": words}],
             f"Say: {words}<|endoftext|>": [{"prompt": "Say: ", "completion": words}],
             f"{words}<|endoftext|>": [{"text": words}]}  # fmt: skip
    for text, row in ((text, row) for text, rows in kinds.items() for row in rows):
        trainer = StridedEBFTTrainer(chat_model(tokenizer), args, Dataset.from_list([row]), processing_class=tokenizer)
        found = trainer.train_dataset[0]
        assert tokenizer.decode(found["input_ids"]) == text
        start = found["turn_spans"][0][0] if found["turn_spans"] else found["prompt_length"]
        assert len(found["turn_spans"]) < 2 and tokenizer.decode(found["input_ids"][start:]).startswith(words)
        assert trainer.train().global_step == 1
    for part in (chat_model(tokenizer), tokenizer):
        part.save_pretrained(tmp_path / "named")
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    named = StridedEBFTTrainer(str(tmp_path / "named"), args, Dataset.from_list([row]), peft_config=adapter)
    assert named.train_dataset[0] == found and named.processing_class.vocab == tokenizer.vocab
    assert named.train().global_step == 1 and named.feature_network.shares_weights
    with pytest.raises(DataError, match="eval_dataset has the columns answer. Rows need input_ids or"):
        trainer.evaluate({"a": Dataset.from_list([{"answer": words}])})


def test_a_run_logs_evaluates_and_saves(tmp_path):
    """Every metric of the guide, evaluations that can be repeated and of two sets, and an adapter for plain PEFT."""
    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    model = lora(type(base).from_pretrained(tmp_path / "base"))
    trainer = make(tmp_path / "run", model, evaluation=HELD_OUT, eval_strategy="steps", eval_steps=1, max_steps=2)
    trainer.train()
    assert len(logged(trainer)) == 2
    for entry in logged(trainer):
        assert entry.keys() >= GUIDE_METRICS
        assert entry["ebft/reward"] == entry["ebft/mean_reward"]
        assert entry["ebft/mean_reward"] == pytest.approx(entry["ebft/alignment"] - entry["ebft/diversity"], abs=1e-5)
        assert entry["ebft/advantages_std"] > 0 and entry["throughput/generated_tokens_per_s"] > 0
        assert entry["loss"] == pytest.approx(entry["ebft/rl_loss"], abs=1e-4)
    assert [entry["step"] for entry in logged(trainer, "eval_cfm_loss")] == [1, 2]

    class Counter(TrainerCallback):
        batches = []

        def on_prediction_step(self, *_, eval_dataloader, **__):  # what a progress bar shows
            self.batches.append(len(eval_dataloader))

    trainer.add_callback(Counter)
    metrics = trainer.evaluate()
    assert len(Counter.batches) == Counter.batches[0] > 0
    assert metrics == trainer.evaluate() and trainer.model.training
    assert {"eval_ce_loss", "eval_alignment", "eval_diversity", "eval_cfm_loss_plugin"} <= metrics.keys()
    of_both = make(tmp_path, evaluation={"a": HELD_OUT, "b": HELD_OUT}, max_steps=1)
    several = of_both.evaluate()
    assert of_both.evaluate("a")["eval_cfm_loss"] == several["eval_a_cfm_loss"], "the name of a set, as in transformers"
    of_both.train()
    assert several["eval_a_cfm_loss"] == several["eval_b_cfm_loss"]
    trainer.save_model()
    ids = torch.randint(3, 90, (1, 12))
    expected = trainer.model.eval()(input_ids=ids).logits
    for loaded in (
        PeftModel.from_pretrained(type(base).from_pretrained(tmp_path / "base"), tmp_path / "run"),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run"),
    ):
        torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_an_evaluation_takes_no_time_of_the_steps(tmp_path, monkeypatch):
    """Also after an epoch that ends within an accumulation."""
    rows = Dataset.from_list(ROWS.to_list()[:4]).to_iterable_dataset()
    run = {"max_steps": 2, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 1}
    trainer = make(tmp_path, train=rows, evaluation=HELD_OUT, eval_strategy="epoch", **run)
    clock, evaluate = [0.0], trainer.evaluate
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    times, add = [], trainer.add_seconds
    monkeypatch.setattr(trainer, "add_seconds", lambda seconds: (times.append(seconds), add(1.0)))
    monkeypatch.setattr(trainer, "evaluate", lambda *args, **kwargs: (clock.append(clock.pop() + 100), evaluate())[1])
    trainer.train()
    assert times == [0.0] * len(times) and clock[0] >= 100 and len(times) > 2


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "every"), [("cosine", 1), ("linear", 3)])
def test_an_extended_run_goes_by_its_own_settings(schedule, every, tmp_path, monkeypatch):
    """A cosine schedule ends at 0, which the first step of an extended run must not use."""
    said = []
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda _, record: said.append(record.getMessage()))
    both = {"save_strategy": "steps", "eval_strategy": "steps", "eval_on_start": True, "evaluation": HELD_OUT}
    make(tmp_path, **both, lr_scheduler_type="cosine", max_steps=2, save_steps=2, eval_steps=1).train()
    second = {"lr_scheduler_type": schedule, "max_steps": 6, "logging_steps": every}
    resumed = make(tmp_path, **both, **second, save_steps=1, eval_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not any("do not match" in text for text in said)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in range(2, 7)}
    assert [entry["step"] for entry in logged(resumed, "eval_ce_loss")] == [0, 1, 2, 4, 6]
    rates = {entry["step"]: entry["learning_rate"] for entry in logged(resumed) if entry["step"] > 2}
    assert list(rates) == list(range(3, 7, every)) and rates[3] > 0
    saved = [load_file(tmp_path / f"checkpoint-{step}" / "adapter_model.safetensors") for step in (2, 3)]
    assert not all(saved[0][name].equal(saved[1][name]) for name in saved[0])
    whole = make(tmp_path / "whole", **second)
    whole.train()
    assert rates == {entry["step"]: entry["learning_rate"] for entry in logged(whole) if entry["step"] > 2}


def test_a_stop_in_the_evaluation_before_the_first_step_saves_nothing(tmp_path):
    trainer = make(tmp_path, eval_on_start=True, evaluation=ROWS)
    may_stop = []

    def stop(*args, **kwargs):
        may_stop.append(trainer.may_stop)
        raise KeyboardInterrupt

    trainer.evaluate = stop
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.save_stopped()
    assert may_stop == [True] and not list(tmp_path.glob("checkpoint-*"))


def test_non_finite_numbers_stop_before_the_update(tmp_path):
    for number, message, batches in (
        ("loss", r"loss is nan at step 2.*token ids \[\[", 3),
        ("norm", "norm is (nan|inf) at step 2", 1),
    ):
        model = tiny_model("llama")
        trainer = make(tmp_path, model=model, max_steps=3, ce_coef=1.0, gradient_accumulation_steps=batches)
        plain, broken = trainer.compute_loss, lambda value, t=trainer: value if t.state.global_step == 1 else 1.0
        if number == "loss":
            seen = []  # the first tokens of the batches of step 2, of which only the first has such a loss

            def compute_loss(model, inputs, *a, **k):
                seen.extend([inputs["input_ids"][0, :8].tolist()] * (broken(None) is None))  # noqa: B023
                return plain(model, inputs, *a, **k) + (broken(float("nan")) if len(seen) == 1 else 0.0)  # noqa: B023

            trainer.compute_loss = compute_loss
        else:
            model.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: g * broken(float("inf")))  # noqa: B023
        with pytest.raises(NonFiniteLossError, match=message) as raised:
            trainer.train()
        assert number == "norm" or (len(seen) == batches and f"token ids [{seen[0]}" in str(raised.value))
        assert trainer.state.global_step == 1 and all(p.isfinite().all() for p in model.parameters())


def test_one_sample_falls_back_to_reinforce_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="n_samples_per_prompt: 1 .* use_whitening is set to false"):
        trainer = make(tmp_path, evaluation=HELD_OUT, n_samples_per_prompt=1, use_whitening=True, max_steps=1)
    assert trainer.args.advantage_estimator == "reinforce" and trainer.args.diversity_coef == 0
    assert not trainer.args.use_whitening
    trainer.train()
    assert trainer.evaluate()["eval_cfm_loss"] > 0


@pytest.mark.parametrize(("changes", "match"), [
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"), ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    ({"grad_norms_every": 2, **checkpointing(True)}, "grad_norms_every is incompatible with reentrant gradient check"),
    *(({"single_pass": True, name: value}, f"single_pass is incompatible with {name}") for name, value in
      {"gradient_checkpointing": True, "rollout_tokens_per_pass": 8, "disable_dropout": False}.items()),
    ({"train": [{"input_ids": [3] * 10}]}, "no row that is long enough for a block: the longest has 10 token"),
    ({"grad_norms_every": 0, "rollout_tokens_per_pass": 8, "fsdp": True}, "rollout_tokens_per_pass is not"),
    ({"train": DatasetDict(a=ROWS)}, "train_dataset must be one dataset, got a"),
    ({"train": [{"input_ids": [3] * 129}]}, r"row of 129 tokens, which exceeds .*max_position_embeddings \(128\)"),
])  # fmt: skip
def test_settings_and_rows_that_are_refused(changes, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        make(tmp_path, **changes)


def test_calls_that_are_refused(tmp_path):
    trainer = make(tmp_path)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        trainer.compute_loss(trainer.model, {"input_ids": torch.ones(1, 200, dtype=torch.long)})
    with pytest.raises(ValueError, match="compute_metrics is not supported"):
        StridedEBFTTrainer(tiny_model("llama"), trainer.args, compute_metrics=print)
    make(tmp_path, grad_norms_every=0, **checkpointing(True))
    in_parts = tiny_model("llama")
    next(in_parts.parameters()).ds_id = 0
    with pytest.raises(ModelError, match="ZeRO-3 loaded the model in parts"):
        StridedEBFTTrainer(in_parts, trainer.args)


@pytest.mark.parametrize("single_pass", [True, False])
def test_mixed_precision_samples_as_it_trains(single_pass, tmp_path):
    """Also in a direct call: the model is only prepared for mixed precision by train()."""
    options = {"bf16": True, "single_pass": single_pass, "temperature": 1.0, "ce_coef": 0.5, "max_grad_norm": 0.0}
    model, seen, drawn, inside = tiny_model("llama"), [], [], []
    trainer = make(tmp_path, model=model, max_steps=1, learning_rate=0.0, **options)
    hook = model.lm_head.register_forward_hook(lambda module, args, out: drawn.append(out.dtype))
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: inside.append(out.dtype))
    training_loss = trainer.compute_loss

    def keep(model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, output = training_loss(model, inputs, True, num_items_in_batch)
        seen.append((inputs, output))
        return loss

    trainer.compute_loss = keep
    trainer.train()
    hook.remove()
    assert set(inside) == {torch.bfloat16} and set(drawn) == {torch.float32} and len(drawn) > 8
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


def test_rows_without_room_for_a_block_are_dropped_and_counted(tmp_path):
    """By their tokens, prompt and turns; by their mask, masked labels, and the documents of packed rows."""
    good, ids = {"input_ids": list(range(3, 43))}, [3] * 40
    rows = [good, {"input_ids": [3] * 10}, {"input_ids": [3] * 30}, {"input_ids": ids, "prompt_length": 37}]
    rows += [{"input_ids": [3] * 29, "prompt_length": 27, "turn_spans": turns} for turns in ([[1, 20]], [[25, 27]])]
    empty = {"prompt_length": 0, "turn_spans": []}
    for dataset in (rows, Dataset.from_list([{**empty, **row} for row in rows])):
        with pytest.warns(UserWarning, match="train_dataset: dropped 3 of 6 rows"):
            trainer = make(tmp_path, train=dataset)
        assert [len(row["input_ids"]) for row in trainer.train_dataset] == [40, 30, 29]
    bad = [{"input_ids": ids, "attention_mask": [1] * count + [0] * (40 - count)} for count in (5, 0)]
    bad += [{**good, "labels": [-100] * 38 + [5, 6]}, {"input_ids": ids, "position_ids": [0, 1, 2, 3, 4] * 8}]
    bad += [{**good, name: [0] * 38 + [1, 1]} for name in ("completion_mask", "assistant_masks")]
    bad += [{**good, "labels": [-100] * 40}]  # a prompt that was cut before its completion
    with pytest.warns(UserWarning, match="dropped 7 of 9 rows"):
        trainer = make(tmp_path, train=[good, *bad, good], per_device_train_batch_size=1, max_steps=3)
    assert list(trainer.train_dataset) == [good, good]
    trainer.train()
    stream = Dataset.from_list([good, {"input_ids": [3] * 7}, good]).to_iterable_dataset()
    changes = {"per_device_train_batch_size": 1, "max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    make(tmp_path, train=stream, **changes).train()  # the stream ends after two rows
    for step, count in ((1, 0), (3, 1)):
        trainer = make(tmp_path, train=stream, **{**changes, "max_steps": 4})
        _, said = warned(trainer.train, resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert sum("a stream that had ended" in text for text in said) == count
        assert trainer.state.global_step == 4


@pytest.mark.slow
def test_packed_rows_and_datasets_of_torch_without_room_are_dropped(tmp_path):
    """Also held-out ones that are given to `evaluate`."""
    short, good = {"input_ids": [3] * 7}, {"input_ids": list(range(3, 43))}
    packed = PackedRows([good, short, short], [[0], [1, 2], [0, 1]], [40, 14, 47])
    for dataset in (packed, ConcatDataset([[good, short], [good]])):
        with pytest.warns(UserWarning, match="dropped 1 of 3 rows"):
            trainer = make(tmp_path, train=dataset, per_device_train_batch_size=1, max_steps=3)
        trainer.train()
        with pytest.warns(UserWarning, match="eval_dataset: dropped 1 of 3 rows"):
            assert trainer.evaluate(dataset)["eval_cfm_loss"] >= 0
    masked = {**good, "labels": [-100] * 38 + [5, 6], "prompt_length": None}
    with pytest.warns(UserWarning, match="dropped 1 of 2 rows"):
        make(tmp_path, train=[{**good, "labels": good["input_ids"], "prompt_length": 0}, masked])


def test_the_order_of_length_groups_follows_from_the_seed_and_the_epoch(tmp_path):
    sampler = make(tmp_path, train_sampling_strategy="group_by_length")._get_train_sampler()
    first = list(sampler)
    torch.manual_seed(5)
    assert list(sampler) == first and sorted(first) == list(range(len(ROWS)))
    sampler.set_epoch(1)
    assert list(sampler) != first


class Averaging(torch.optim.SGD):
    """Its result is 1 above the weights that it trains at."""

    is_at_result = False

    def _move(self, is_at_result):
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.add_(float(is_at_result) - float(self.is_at_result))
        self.is_at_result = is_at_result

    def train(self):
        self._move(False)

    def eval(self):
        self._move(True)


def test_schedule_free_optimizers_save_and_evaluate_their_result(tmp_path):
    model = lora(tiny_model("llama"))
    name, weight = next(each for each in model.named_parameters() if "lora_B" in each[0])
    wanted, seen = weight.detach() + 1, []
    trainer = make(tmp_path, model, evaluation=HELD_OUT, save_strategy="steps", save_steps=2, max_steps=2)
    trainer.optimizer = Averaging([each for each in model.parameters() if each.requires_grad], lr=0.0)
    held_out = trainer._held_out_batches
    trainer._held_out_batches = lambda dataset: [seen.append(weight.detach().clone()), *held_out(dataset)][1:]
    trainer.train()
    torch.testing.assert_close(weight.detach(), wanted)
    trainer.optimizer.train()
    trainer.evaluate()
    saved = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    torch.testing.assert_close(seen, [wanted])
    torch.testing.assert_close(saved[name.replace(".default", "")], wanted)


@pytest.mark.parametrize("changes", [{}, {"use_whitening": True}, {"advantage_estimator": "group_norm"}])
def test_equal_rollouts_do_not_move_the_policy(changes, tmp_path):
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)  # all probability is on one token
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"n_samples_per_prompt": 4, "weight_decay": 0.0, "max_steps": 2, "ce_coef": 0.0, "adam_epsilon": 1e-12}
    trainer = make(tmp_path, model, **options, **changes)
    trainer.train()
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    logs = logged(trainer)
    assert logs and all(entry["grad_norm"] == 0 and entry["ebft/diversity"] > 0.1 for entry in logs)


TERMS = {"rl_coef": 0.7, "ce_coef": 0.3}


@pytest.mark.first(1)
@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("single_pass", [True, False])
def test_gradient_norms_of_terms_are_those_of_runs_on_one_term(adapter, single_pass, tmp_path):
    """The first step of each run has the same rollouts. A term without weight has the norm zero."""
    options = {"grad_norms_every": 1, "gradient_accumulation_steps": 2, "max_steps": 1, "max_grad_norm": 1e-3}
    first = {}
    for absent in (None, "rl", "ce"):
        model = lora(tiny_model("llama")) if adapter else tiny_model("llama")
        terms = {**TERMS, f"{absent}_coef": 0.0} if absent else TERMS
        trainer = make(tmp_path, model, single_pass=single_pass, **terms, **options)
        trainer.train()
        first[absent] = trainer.state.log_history[0]
    for term, absent in (("rl", "ce"), ("ce", "rl")):
        assert first[None][f"ebft/{term}_grad_norm"] == pytest.approx(first[absent]["grad_norm"], rel=1e-4)
        assert first[absent][f"ebft/{term}_grad_norm"] == pytest.approx(first[absent]["grad_norm"], rel=1e-5)
        assert first[absent][f"ebft/{absent}_grad_norm"] == 0.0 < first[absent]["grad_norm"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"single_pass": True}, {"single_pass": False}, {"gradient_checkpointing": True}, {"rollout_tokens_per_pass": 60},
], ids=str)  # fmt: skip
def test_training_is_the_same_with_and_without_norms_of_terms(options, tmp_path):
    """Equal parameters to the last bit, equal budgets, and no norms in steps without them."""
    runs = {}
    for every in (0, 2):
        model = lora(tiny_model("llama"))
        trainer = make(tmp_path / str(every), model, grad_norms_every=every, **TERMS, **options)
        trainer.train()
        runs[every] = dict(model.named_parameters()), logged(trainer)
    assert ["ebft/rl_grad_norm" in entry for entry in runs[0][1]] == [False] * 4
    assert ["ebft/rl_grad_norm" in entry for entry in runs[2][1]] == [False, True, False, True]
    assert all(a.equal(runs[2][0][name]) for name, a in runs[0][0].items())
    for entry, other in zip(runs[0][1], runs[2][1]):
        assert all(entry[key] == other[key] for key in ("loss", "grad_norm", "budget/flops"))
