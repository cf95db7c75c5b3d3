"""Whole runs on the CPU: a tiny random model, the standard library's text, a few steps."""

import json
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from ebft import load_config, train
from ebft.data.load import load_token_rows
from ebft.errors import ConfigError, told
from ebft.models.pretrained import load_tokenizer
from ebft.tools.fetch import convert_file
from tests.run.conftest import LORA, STRIDED, assert_equal, strided, weights
from tests.structured.trainers import logged

AUTO = {"auto_resume_from_checkpoints": True}


def contents(folder, pattern="*"):
    return {path: path.stat().st_mtime_ns for path in folder.rglob(pattern) if path.is_file()}


def test_rows_longer_than_the_models_positions_are_refused_before_it_is_loaded(make, monkeypatch):
    monkeypatch.setattr("ebft.run.training.load_model", None)
    for config in (strided(make, sequence_len=129), make(sequence_len=129, sample_packing=True)):
        with pytest.raises(ConfigError, match="sequence_len: 129 exceeds the 128 positions .* text has 129"):
            train(config)
    with pytest.raises(ConfigError, match="as many tokens may be in one document"):
        train(make(sequence_len=129, streaming=True))


def test_the_best_model_of_a_strided_run_is_the_one_with_the_lowest_cfm_loss(make, out):
    keys = {**LORA, "val_set_size": 2, "save_steps": 1, "eval_steps": 1, "gradient_checkpointing": True}
    result = train(strided(make, **keys, load_best_model_at_end=True))
    measured = logged(result.trainer, "eval_cfm_loss")
    assert len(measured) == 2 and result.trainer.state.best_metric == min(measured)
    assert (out / "adapter_model.safetensors").is_file() and (out / "tokenizer.json").is_file()
    assert {"loss", "ebft/alignment", "eval_cfm_loss"} <= set(result.metrics)
    assert "strided mode" in (out / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("keys", [LORA, {}], ids=["lora", "full"])
def test_a_gguf_file_trains_as_the_folder_made_of_it_does(make, resumed, tiny_gguf, tmp_path, keys):
    quantised = resumed(**keys, base_model=tiny_gguf.parent, gguf_file=tiny_gguf.name).model
    keys = {**keys, "base_model": convert_file(tiny_gguf, tmp_path / "folder"), "output_dir": tmp_path / "c"}
    dense = train(strided(make, **keys, max_steps=4)).model
    assert_equal(weights(quantised), weights(dense))
    if not keys.get("adapter"):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
        torch.testing.assert_close(saved.lm_head.weight, dense.lm_head.weight, rtol=0, atol=0)
        train(strided(make, base_model=tmp_path / "b", max_steps=1, output_dir=tmp_path / "d"))


def test_resuming_a_finished_run_neither_trains_nor_evaluates(make, out):
    keys = {**LORA, "save_steps": 2, "val_set_size": 2}
    first = train(strided(make, **keys))
    files = contents(out)
    assert (out / "metrics.jsonl").read_text().count("eval_cfm_loss") >= 1
    with pytest.warns(UserWarning, match="Training is already complete: .*checkpoint-2 is at step 2"):
        again = train(strided(make, **keys, **AUTO))
    assert again.trainer.state.global_step == 2 and files == contents(out)
    assert all(again.metrics[name] == first.metrics[name] for name in ("loss", "eval_cfm_loss"))
    assert_equal(weights(again.model), weights(first.model))


def test_an_earlier_checkpoint_at_the_end_of_a_run_does_not_replace_later_results(make, out, tmp_path):
    train(strided(make, max_steps=3, save_steps=1))
    files, resume = contents(out, "*.safetensors"), {"resume_from_checkpoint": out / "checkpoint-2"}
    for max_steps in (1, 2):
        with pytest.raises(ConfigError, match="checkpoint-2 is past the end .* has results up to step 3, which are"):
            train(strided(make, save_steps=1, max_steps=max_steps, **resume))
    assert files == contents(out, "*.safetensors")
    with pytest.warns(UserWarning, match="Training is already complete"):
        saved = train(strided(make, max_steps=2, output_dir=tmp_path / "other", **resume))
    assert saved.trainer.state.global_step == 2 and (tmp_path / "other" / "model.safetensors").is_file()

    files = contents(out / "checkpoint-1")
    with pytest.raises(ConfigError, match="output_dir: .*checkpoint-1 is a checkpoint, whose files a run would"):
        train(strided(make, output_dir=out / "checkpoint-1"))
    assert files == contents(out / "checkpoint-1")


# Those with tools or servers are trained in tests/structured/test_interactive.py and tests/nemo_gym.
OTHERS = ("grpo_tools", "nemo_gym", "nemo_gym_agents")
EXAMPLES = [path for path in sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")) if path.stem not in OTHERS]
assert EXAMPLES
# What the data of the examples looks like.
PAIR = {"input": "Say hello.", "output": "x = 1\n" * 12}
TURNS = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "hello"}]
QUESTION = {"question": PAIR["input"], "answer": PAIR["output"]}
ANSWERS = [{"role": "assistant", "content": text} for text in ("x = 1", "y = 2")]
COMPARED = {"chosen": [TURNS[0], ANSWERS[0]], "rejected": [TURNS[0], ANSWERS[1]]}
PREFERENCES = dict.fromkeys(("dpo", "ipo", "orpo", "simpo"), COMPARED)
PREFERENCES |= {"kto": {"prompt": TURNS[:1], "completion": ANSWERS[:1], "label": True}}
ROWS = {
    **PREFERENCES, "paper_full": QUESTION, "paper_lora": QUESTION, "strided_prompt_completion": PAIR,
    "structured_multiturn": {"messages": [*TURNS, *TURNS]},
    "sft_chat": {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "hello"}]},
    "reward_model": {"system": "", "input": "Say hello.", "chosen": "hello", "rejected": "no"},
    "process_reward_model": {"prompt": "Say hello.", "completions": ["hel", "lo"], "labels": [True, False]},
}  # fmt: skip
CHAT = ["chat_template=chatml", "sequence_len=120"]  # the tiny model has no chat template
# Servers are for make test-vllm.
SAMPLED = ["use_vllm=false", "async_prefetch=false", "max_completion_length=6", "vllm_mode=server"]
SAMPLED = [*(f"trl.{key}" for key in SAMPLED), "vllm="]
# The teacher reads the reference too, and the tiny model has 128 positions.
SELF_DISTILLED = ["sdft.teacher_prompt_template=Like {privileged_context} {prompt}", "trl.max_completion_length=6"]
SMALL = ["sequence_len=48", "max_steps=2", "evals_per_epoch=", "eval_steps=2", "gradient_accumulation_steps=1"]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains(path, tiny_llama_dir, text, tmp_path, monkeypatch):
    """For two steps on a tiny model and rows like its data."""
    overrides, is_structured = [], path.stem.startswith(("structured", "grpo", "gdpo", "sdft"))
    if is_structured or path.stem in ROWS:
        text = tmp_path / "rows.jsonl"
        text.write_text("\n".join([json.dumps(ROWS.get(path.stem, PAIR))] * 8))
    if is_structured:
        overrides = CHAT + (SELF_DISTILLED if path.stem == "sdft" else SAMPLED)
        monkeypatch.syspath_prepend(path.parent)
    elif path.stem in ("reward_model", *PREFERENCES):
        overrides = CHAT
    elif path.stem == "sft_chat":
        overrides = ["sequence_len=120", "special_tokens.eos_token="]
    rows = [f"datasets.0.path={text}", "datasets.0.split=train", "val_set_size=2"]
    if path.stem == "pretraining_stream":
        rows = [f"pretraining_dataset.0.path={text}", "pretraining_dataset.0.skip=2"]
        rows += [f"test_datasets.0.path={text}", "test_datasets.0.split=train[:2]", "streaming_multipack_buffer_size=4"]
    common = [f"base_model={tiny_llama_dir}", "special_tokens.pad_token=<|end|>", f"output_dir={tmp_path / 'out'}"]
    with warnings.catch_warnings(action="error", category=UserWarning):
        warnings.filterwarnings("ignore", module="torch")
        warnings.filterwarnings("ignore", message=".*no effect without (use_vllm|async)")
        config = load_config(path, [*common, *rows, *SMALL, *overrides])
    assert train(config).trainer.state.global_step == 2


def test_a_run_that_spent_its_budget_is_not_trained_on(make, out):
    keys = {**LORA, "max_steps": 6, "lr_scheduler": "linear", "logging_steps": 4, "save_steps": 50}
    first = train(strided(make, **keys, budget={"documents": 3}))
    assert first.trainer.state.global_step == 2 and first.metrics["budget/documents"] == 4
    rate = logged(first.trainer, "learning_rate")[-1]
    assert rate == pytest.approx(1e-3 * 5 / 6)  # the schedule is that of six steps
    with pytest.warns(UserWarning, match=r"already complete: .* step 2, .* Increase budget.documents to continue"):
        again = train(strided(make, **keys, budget={"documents": 3}, **AUTO))
    assert again.trainer.state.global_step == 2 and again.metrics["budget/documents"] == 4
    more = train(strided(make, **keys, budget={"documents": 5}, **AUTO))
    assert more.trainer.state.global_step == 3 and more.metrics["budget/documents"] == 6


@pytest.mark.parametrize("keys", [
    {"use_dynamic_finetuning": True}, {"use_eaft": True, "eaft_k": 5}, {"use_dft": True, "sample_packing": True},
])  # fmt: skip
def test_weighted_losses_of_a_run(make, out, keys):
    runs = [train(make(**given, logging_steps=1, output_dir=f"{out}{len(given)}")) for given in ({}, keys)]
    losses = [run.trainer.state.log_history[0]["loss"] for run in runs]
    assert losses[1] == pytest.approx(losses[0] * (0.002 if "use_eaft" not in keys else 1.6), rel=0.5)


def test_some_layers_at_a_time(make, tmp_path):
    """The layers of a period are trained, with the embeddings; a resumed run ends as an unbroken one."""
    keys = {"lisa_n_layers": 1, "lisa_step_interval": 2, "max_steps": 6, "save_steps": 1, "save_total_limit": 10}
    trainer = train(make(**keys, output_dir=tmp_path / "a")).trainer
    saved = [
        AutoModelForCausalLM.from_pretrained(tmp_path / "a" / f"checkpoint-{step}").state_dict() for step in range(1, 7)
    ]
    chosen = []
    for before, after in zip(saved, saved[1:]):
        moved = {name for name in before if not before[name].equal(after[name])}
        assert any("embed_tokens" in name for name in moved)
        chosen.append({name.split(".")[2] for name in moved if ".layers." in name})
    assert all(len(layers) == 1 for layers in chosen)
    assert chosen[1] == chosen[2] and chosen[3] == chosen[4] and len(set(map(tuple, chosen))) == 2
    assert {*map(id, trainer.optimizer.state)} == {
        id(each) for each in trainer.model.parameters() if each.requires_grad
    }
    resume = {"resume_from_checkpoint": tmp_path / "a" / "checkpoint-3"}
    again = train(make(**keys, output_dir=tmp_path / "b", **resume)).trainer
    assert_equal(weights(again.model), weights(trainer.model))
    for wrong in ({"lisa_n_layers": 9}, {"lisa_n_layers": 1, "lisa_layers_attribute": "transformer.h"}):
        with pytest.raises((ValueError, AttributeError)) as caught:
            train(make(**wrong))
        assert "lisa_layers_attribute" in told(caught.value)


@pytest.mark.parametrize("keys", [{}, {"sample_packing": True, "sequence_len": 64}, STRIDED])
def test_rows_in_their_order(make, keys):
    type = "ebft_pretrain.transform" if keys is STRIDED else "completion"
    config = make(type, **keys, curriculum_sampling=True, num_epochs=1, max_steps=None)
    seen = []

    class Spy(TrainerCallback):
        def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
            for batch in train_dataloader:
                seen.extend(batch["input_ids"][batch["attention_mask"].bool()].tolist())
            control.should_training_stop = True  # after a step

    with patch("ebft.run.trainer.callbacks_of", lambda config: [Spy()]):
        train(config)
    assert seen == [token for row in load_token_rows(config, load_tokenizer(config))[0] for token in row["input_ids"]]
