"""Whole runs on the CPU: a tiny random model, the standard library's text, a few steps."""

import json
import shutil
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ebft import load_config, train
from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.run.stopping import TrainingInterrupted
from ebft.tools.evaluation.models import own_models
from ebft.tools.fetch import convert_file

LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
STRIDED = {
    "rl": "ebft",
    "ebft": {"mode": "strided", "generate_max_len": 4, "n_samples_per_prompt": 2},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Twelve rows of source code in a JSON Lines file."""
    source = Path(textwrap.__file__).read_text()
    path = tmp_path_factory.mktemp("text") / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": source[at : at + 400]}) for at in range(0, 4800, 400)))
    return path


@pytest.fixture
def make(tiny_llama_dir, text, tmp_path):
    """`make(**keys)`: a config for two steps over that text."""

    def make_config(type="completion", **keys):
        values = {
            "base_model": tiny_llama_dir,
            "datasets": [{"path": text, "type": type}],
            "special_tokens": {"pad_token": "<|end|>"},
            "sequence_len": 48,
            "micro_batch_size": 2,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "output_dir": tmp_path / "out",
        }
        return RunConfig.from_dict({**values, **keys})

    return make_config


def strided(make, **keys):
    return make("ebft_pretrain.transform", **{**STRIDED, **keys})


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("keys", [{}, {"sample_packing": True}])
def test_rows_longer_than_the_models_positions_are_refused_before_it_is_loaded(make, keys, monkeypatch):
    monkeypatch.setattr("ebft.run.training.load_model", None)
    for config in (strided(make, sequence_len=129, **keys), make(sequence_len=129, **keys)):
        with pytest.raises(ConfigError, match="sequence_len: 129 exceeds the 128 positions .* longest text has 129"):
            train(config)


def test_only_documents_must_fit_into_the_models_positions(make, tmp_path):
    """Positions of packed rows start at 0 in every document."""
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join(json.dumps({"text": "def f(x):\n    return x\n" * 3}) for _ in range(8)))
    for config in (make(), strided(make)):
        entry = config.datasets[0].model_copy(update={"path": str(short)})
        keys = {"datasets": [entry], "sequence_len": 400, "sample_packing": True, "micro_batch_size": 1}
        trainer = train(config.model_copy(update=keys)).trainer
        assert max(trainer.train_dataset.lengths) > 128 and trainer.state.global_step == 2


def test_rows_of_streams_keep_to_the_models_positions(make, monkeypatch):
    monkeypatch.setattr("ebft.run.training.load_model", None)
    stream = make(sequence_len=129, streaming=True)
    with pytest.raises(ConfigError, match="as many tokens may be in one document"):
        train(stream)


def test_strided_lora(make):
    result = train(strided(make, **LORA, val_set_size=2, gradient_checkpointing=True))
    out = Path(result.output_dir)
    assert (out / "adapter_model.safetensors").is_file() and (out / "tokenizer.json").is_file()
    assert result.trainer.state.global_step == 2
    assert {"loss", "ebft/alignment", "eval_cfm_loss"} <= set(result.metrics)
    card = (out / "README.md").read_text()
    assert "strided mode" in card and "| `ebft.n_samples_per_prompt` | `2` |" in card and "2603.12248" in card


def test_strided_full_fine_tuning_moves_the_weights(make):
    result = train(strided(make))
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(make().base_model)
    after = AutoModelForCausalLM.from_pretrained(result.output_dir)
    moved = [not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters())]
    assert any(moved)


@pytest.mark.parametrize("keys", [{"load_best_model_at_end": True}, {"save_strategy": "best"}])
def test_the_best_model_is_the_one_with_the_lowest_cfm_loss(make, keys):
    state = train(strided(make, **LORA, val_set_size=2, save_steps=1, eval_steps=1, **keys)).trainer.state
    measured = [entry["eval_cfm_loss"] for entry in state.log_history if "eval_cfm_loss" in entry]
    assert len(measured) == 2 and state.best_metric == min(measured)


def test_plain_fine_tuning_lowers_the_loss(make):
    result = train(make(max_steps=12, lr_scheduler="constant", learning_rate=5e-3, val_set_size=2, evals_per_epoch=1))
    losses = [entry["loss"] for entry in result.trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] and "eval_loss" in result.metrics
    assert "SFT" in (Path(result.output_dir) / "README.md").read_text()


def test_plain_lora_in_bfloat16(make):
    result = train(make(**LORA, bf16=True, gradient_checkpointing=True))
    assert result.model.get_base_model().dtype == torch.bfloat16
    assert result.trainer.args.bf16


@pytest.mark.slow
@pytest.mark.parametrize("keys", [LORA, {}], ids=["lora", "full"])
def test_a_gguf_file_trains_as_the_folder_made_of_it_does(make, tiny_gguf, tmp_path, keys):
    from transformers import AutoModelForCausalLM

    keys = {**keys, "max_steps": 4, "save_steps": 2}
    from_file = {"base_model": tiny_gguf.parent, "gguf_file": tiny_gguf.name}
    train(strided(make, **from_file, **keys, output_dir=tmp_path / "a"))
    checkpoint = tmp_path / "a" / "checkpoint-2"
    resumed = train(
        strided(make, **from_file, **keys, output_dir=tmp_path / "b", resume_from_checkpoint=checkpoint)
    ).model
    folder = convert_file(tiny_gguf, tmp_path / "folder")
    dense = train(strided(make, base_model=folder, **keys, output_dir=tmp_path / "c")).model
    for name, value in weights(resumed).items():
        torch.testing.assert_close(value, weights(dense)[name], rtol=0, atol=0)
    if not keys.get("adapter"):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
        torch.testing.assert_close(saved.lm_head.weight, dense.lm_head.weight, rtol=0, atol=0)
        train(strided(make, base_model=tmp_path / "b", max_steps=1, output_dir=tmp_path / "d"))


def test_a_resumed_run_ends_where_an_unbroken_one_does(make, tmp_path):
    keys = {**LORA, "max_steps": 4, "save_steps": 2}
    unbroken = weights(train(strided(make, **keys, output_dir=tmp_path / "a")).model)
    checkpoint = tmp_path / "a" / "checkpoint-2"
    resumed = train(strided(make, **keys, output_dir=tmp_path / "b", resume_from_checkpoint=checkpoint))
    assert resumed.trainer.state.global_step == 4
    for name, value in weights(resumed.model).items():
        torch.testing.assert_close(value, unbroken[name], rtol=0, atol=0)


def test_a_resumed_run_says_which_settings_of_the_optimizer_are_in_effect(make, tmp_path):
    def optimizer(trainer):
        (group, *_), schedule = trainer.optimizer.param_groups, trainer.lr_scheduler
        return schedule.base_lrs[0], group["weight_decay"], group["betas"], group["eps"]

    first = train(make(save_steps=2))
    changes = {"learning_rate": 1e-2, "weight_decay": 0.1, "adam_beta1": 0.5, "adam_epsilon": 1e-4}
    checkpoint = tmp_path / "out" / "checkpoint-2"
    with pytest.warns(UserWarning, match="learning_rate: 0.01 has no effect, the run continues with 0.001"):
        second = train(make(max_steps=4, save_steps=2, **changes, resume_from_checkpoint=checkpoint))
    assert optimizer(second.trainer) == optimizer(first.trainer)
    # The settings in effect are those that the next checkpoint is saved with.
    with pytest.warns(UserWarning, match="adam_beta1: 0.5 has no effect, the run continues with 0.9"):
        train(make(max_steps=5, **changes, auto_resume_from_checkpoints=True))
    with warnings.catch_warnings(action="error", category=UserWarning):
        warnings.filterwarnings("ignore", message="(?!Optimizer settings)")
        train(make(max_steps=6, lr_scheduler="cosine", auto_resume_from_checkpoints=True))


def test_a_resumed_run_says_what_it_continues_with(make, tmp_path, tiny_llama_dir, recwarn):
    """Other base weights and settings are a line each, once; rows that are held out are compared too."""
    model = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, model)
    keys = {**LORA, "base_model": model, "save_steps": 1, "auto_resume_from_checkpoints": True}
    said = lambda: [str(recwarn.pop(UserWarning).message) for _ in list(recwarn)]
    lines = lambda: [line for line in said() if line.startswith(("Resumed", "No effect", "The ", "Training is"))]
    train(strided(make, **keys, max_steps=1, val_set_size=2))
    shutil.move(model, tmp_path / "moved")
    keys["base_model"] = tmp_path / "moved"
    train(strided(make, **keys, max_steps=2, val_set_size=2))
    assert lines() == []

    weights = load_file(tmp_path / "moved" / "model.safetensors")
    save_file({name: value * 0.5 for name, value in weights.items()}, tmp_path / "moved" / "model.safetensors")
    other = {"ebft": {**STRIDED["ebft"], "temperature": 0.9}}
    train(strided(make, **keys, **other, max_steps=3, val_set_size=3))
    found = lines()
    starts = ["Resumed with ebft.temperature: 0.9 instead of 0.6 (", "Resumed with val_set_size: 3 instead of 2 ("]
    starts += ["Resumed with other weights of base_model: ", "The training data differ", "The evaluation data differ"]
    assert len(found) == len(starts) and all(any(line.startswith(start) for line in found) for start in starts), found
    assert str(tmp_path / "out" / "checkpoint-2") in found[0]
    train(strided(make, **keys, **other, max_steps=4, val_set_size=3))
    assert lines() == []
    train(strided(make, **keys, max_steps=4, val_set_size=3))
    first, second = lines()
    assert first.startswith("No effect: ebft.temperature: 0.6 instead of 0.9. The run of ")
    assert second.startswith("Training is already complete")


def test_another_schedule_and_clipping_apply_to_the_remaining_steps(make, tmp_path):
    train(make(save_steps=2, max_steps=4, output_dir=tmp_path / "a"))
    keys = {"max_steps": 4, "lr_scheduler": "constant", "max_grad_norm": 1e-6}
    checkpoint = tmp_path / "a" / "checkpoint-2"
    with pytest.warns(UserWarning, match="lr_scheduler: constant replaces cosine from here on"):
        result = train(make(**keys, resume_from_checkpoint=checkpoint))
    assert result.trainer.lr_scheduler.get_last_lr()[0] == 1e-3 and result.trainer.args.max_grad_norm == 1e-6


def test_a_resumed_run_with_another_adapter_is_refused(make):
    train(strided(make, **LORA, save_steps=2))
    with pytest.raises(ConfigError, match="lora_r: 8 differs from lora_r: 4 of .*checkpoint-2"):
        train(strided(make, **{**LORA, "lora_r": 8}, auto_resume_from_checkpoints=True))
    with pytest.raises(ConfigError, match="lora_target_linear: false differs from lora_target_linear: true"):
        modules = {"lora_target_linear": False, "lora_target_modules": ["q_proj"]}
        train(strided(make, **{**LORA, **modules}, auto_resume_from_checkpoints=True))


def test_auto_resume_takes_the_newest_complete_checkpoint(make, tmp_path):
    train(make(save_steps=1))
    (tmp_path / "out" / "checkpoint-9").mkdir()  # one whose saving was cut off
    result = train(make(max_steps=3, auto_resume_from_checkpoints=True))
    steps = [entry["step"] for entry in result.trainer.state.log_history if "loss" in entry]
    assert steps == [1, 2, 3]


@pytest.mark.parametrize("adapter", [{}, LORA])
def test_resuming_a_finished_run_trains_nothing(make, tmp_path, adapter):
    first = train(strided(make, **adapter, save_steps=2))
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.warns(UserWarning, match="Training is already complete: .*checkpoint-2 is at step 2"):
        again = train(strided(make, **adapter, save_steps=2, auto_resume_from_checkpoints=True))
    assert again.trainer.state.global_step == 2 and again.metrics["loss"] == first.metrics["loss"]
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    for name, value in weights(again.model).items():
        torch.testing.assert_close(value, weights(first.model)[name], rtol=0, atol=0)


def test_resuming_a_finished_run_evaluates_nothing_again(make, tmp_path):
    keys = {"save_steps": 2, "val_set_size": 2}
    first = train(strided(make, **keys))
    evaluations = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert evaluations.count("eval_cfm_loss") >= 1
    with pytest.warns(UserWarning, match="Training is already complete"):
        again = train(strided(make, **keys, auto_resume_from_checkpoints=True))
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == evaluations
    assert again.metrics["eval_cfm_loss"] == first.metrics["eval_cfm_loss"]


def test_an_earlier_checkpoint_at_the_end_of_a_run_does_not_replace_later_results(make, tmp_path):
    train(strided(make, max_steps=3, save_steps=1))
    out = tmp_path / "out"
    files = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    for max_steps in (1, 2):
        config = strided(make, save_steps=1, max_steps=max_steps, resume_from_checkpoint=out / "checkpoint-2")
        with pytest.raises(ConfigError, match="at step 2, at or past the end .* has results up to step 3, which are"):
            train(config)
    assert files == {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    keys = {"max_steps": 2, "output_dir": tmp_path / "other", "resume_from_checkpoint": out / "checkpoint-2"}
    with pytest.warns(UserWarning, match="Training is already complete"):
        saved = train(strided(make, **keys))
    assert saved.trainer.state.global_step == 2 and (tmp_path / "other" / "model.safetensors").is_file()


def test_an_evaluation_of_an_unfinished_run_names_its_checkpoint(make, tmp_path):
    train(strided(make, save_steps=1))
    shutil.copytree(tmp_path / "out" / "checkpoint-1", tmp_path / "half" / "checkpoint-1")
    config = strided(make, output_dir=tmp_path / "half")
    with pytest.warns(UserWarning, match="so only the base model is evaluated.*--model .*half/checkpoint-1"):
        assert own_models(config) == [config.base_model]


def test_a_checkpoint_is_no_output_folder(make, tmp_path):
    train(strided(make, save_steps=1))
    folder = tmp_path / "out" / "checkpoint-1"
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ConfigError, match="output_dir: .*checkpoint-1 is a checkpoint, whose files a run would"):
        train(strided(make, output_dir=folder))
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_finished_run_without_its_model_gets_it_from_the_checkpoint(make, tmp_path):
    train(make(save_steps=2))
    model = tmp_path / "out" / "model.safetensors"
    before = model.read_bytes()
    model.unlink()
    with pytest.warns(UserWarning, match="Training is already complete"):
        train(make(num_epochs=1, auto_resume_from_checkpoints=True))
    assert model.read_bytes() == before


def test_a_missing_checkpoint_is_told_before_anything_is_loaded(make, tmp_path):
    config = make(base_model="does/not-exist", resume_from_checkpoint=tmp_path / "nope")
    with pytest.raises(
        ConfigError, match="resume_from_checkpoint: .*nope is not a folder. output_dir .* has no complete checkpoint"
    ):
        train(config)


@pytest.fixture
def press(monkeypatch):
    """`press(number)`: send this signal to the process in the second step of every run."""
    import os

    from transformers import TrainerCallback

    class Press(TrainerCallback):
        def __init__(self, number):
            self.number = number

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                os.kill(os.getpid(), self.number)

    return lambda number: monkeypatch.setattr("ebft.run.trainer.ConsoleMetrics", lambda: Press(number))


@pytest.mark.filterwarnings("ignore:output_dir")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_saves_a_checkpoint(make, press, tmp_path, name):
    import signal

    number = getattr(signal, name)
    press(number)
    earlier = tmp_path / "out" / "checkpoint-300" / "trainer_state.json"  # of another run in the same folder
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    (earlier.parent / "ebft_run.json").touch()
    handler = signal.getsignal(number)
    with pytest.raises(
        TrainingInterrupted, match="Stopped at step 1.*resume_from_checkpoint=.*checkpoint-1$"
    ) as caught:
        train(make(max_steps=50, save_strategy="no"))
    assert signal.getsignal(number) is handler and caught.value.signal_number == number


def test_a_signal_does_not_recommend_a_checkpoint_without_optimizer_state(make, press):
    import signal

    press(signal.SIGINT)
    with pytest.raises(TrainingInterrupted, match="saved in .*checkpoint-1, but training cannot be resumed from it"):
        train(make(max_steps=50, save_strategy="no", save_only_model=True))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rl": "grpo"}, "rl: grpo needs trl.reward_funcs"),
        ({"rl": "ebft", "ebft": {"mode": "strided", "temperature": 0}}, "temperature: 0"),
        ({"ddp": True}, "--num-processes 2"),
        ({"output_dir": __file__}, "output_dir: .* is a file"),
        ({"output_dir": "/proc/nowhere/out"}, "output_dir: "),
    ],
)
def test_what_cannot_be_trained_is_refused_early(make, keys, message):
    with pytest.raises(ConfigError, match=message):
        train(make(base_model="does/not-exist", **keys))


def test_ddp_false_refuses_several_processes(make, monkeypatch):
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="2 processes were launched"):
        train(make(ddp=False))


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
PREFERENCES = {
    "dpo": COMPARED,
    "kto": {"prompt": TURNS[:1], "completion": ANSWERS[:1], "label": True},
    "ipo": COMPARED,
    "orpo": COMPARED,
    "simpo": COMPARED,
}
ROWS = {
    **PREFERENCES,
    "paper_full": QUESTION,
    "paper_lora": QUESTION,
    "strided_prompt_completion": PAIR,
    "structured_multiturn": {"messages": [*TURNS, *TURNS]},
    "sft_chat": {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "hello"}]},
    "reward_model": {"system": "", "input": "Say hello.", "chosen": "hello", "rejected": "no"},
    "process_reward_model": {"prompt": "Say hello.", "completions": ["hel", "lo"], "labels": [True, False]},
}

SMALL = (
    "sequence_len=48",
    "max_steps=2",
    "val_set_size=2",
    "evals_per_epoch=",
    "eval_steps=2",
    "gradient_accumulation_steps=1",
)
TASKS = {  # the paper's other tasks, as the comments of paper_full.yaml give them
    "raw code": ["datasets.0.type=ebft_pretrain.transform"],
    "question and answer": ["datasets.0.type=completion"],
    "translation": [
        "ebft.stride=2",
        "ebft.context_length=4",
        "ebft.generate_max_len=4",
        "ebft.embed_method=mean_pooling",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains(path, tiny_llama_dir, text, tmp_path, monkeypatch):
    train_example(path, [], tiny_llama_dir, text, tmp_path, monkeypatch)


@pytest.mark.parametrize("task", TASKS)
def test_the_paper_recipe_trains_on_its_other_tasks(task, tiny_llama_dir, text, tmp_path, monkeypatch):
    path = next(path for path in EXAMPLES if path.stem == "paper_full")
    train_example(path, TASKS[task], tiny_llama_dir, text, tmp_path, monkeypatch)


def prepared(text):
    """Overrides of the other examples: all rows, in a small run."""
    return [f"datasets.0.path={text}", "datasets.0.split=train", *SMALL]


def stream_of(text):
    """Overrides of the example of a stream: its rows, of which two are held out."""
    stream = [f"pretraining_dataset.0.path={text}", "pretraining_dataset.0.skip=2", "streaming_multipack_buffer_size=4"]
    held_out = [f"test_datasets.0.path={text}", "test_datasets.0.split=train[:2]"]
    return [*stream, *held_out, *(key for key in SMALL if not key.startswith("val_set_size"))]


def train_example(path, overrides, tiny_llama_dir, text, tmp_path, monkeypatch):
    """Train the config `path` for two steps on a tiny model and rows like its data."""
    is_structured = path.stem.startswith(("structured", "grpo", "gdpo"))
    if path.stem == "reward_model":
        overrides = ["chat_template=chatml", "sequence_len=120"]
    if is_structured or path.stem in ROWS:
        text = tmp_path / "rows.jsonl"
        text.write_text("\n".join([json.dumps(ROWS.get(path.stem, PAIR))] * 8))
    if is_structured:  # the tiny model has no chat template, and servers are for make test-vllm
        overrides = ["chat_template=chatml", "trl.use_vllm=false", "trl.async_prefetch=false", "sequence_len=120"]
        overrides += ["trl.max_completion_length=6", "trl.vllm_mode=server", "vllm="]
        monkeypatch.syspath_prepend(path.parent)
    if path.stem == "sft_chat":
        overrides = ["sequence_len=120", "special_tokens.eos_token="]
    if path.stem in PREFERENCES:
        overrides = ["chat_template=chatml", "sequence_len=120"]
    overrides = [
        f"base_model={tiny_llama_dir}",
        "special_tokens.pad_token=<|end|>",
        f"output_dir={tmp_path / 'out'}",
        *(stream_of(text) if path.stem == "pretraining_stream" else prepared(text)),
        *overrides,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", module="torch")
        warnings.filterwarnings("ignore", message=".*no effect without (use_vllm|async)")
        config = load_config(path, overrides)
    result = train(config)
    assert result.trainer.state.global_step == 2


def test_what_transformers_refuses_is_a_config_error(make):
    with pytest.raises(ConfigError, match="The trainer does not accept these settings: .*strategy"):
        train(make(base_model="does/not-exist", val_set_size=2, save_steps=3, load_best_model_at_end=True))


@pytest.mark.parametrize("save", [{"save_steps": 50}, {"save_strategy": "epoch"}])
def test_a_run_that_spent_its_budget_is_not_trained_on(make, tmp_path, save):
    keys = {**LORA, "max_steps": 6, "lr_scheduler": "linear", "logging_steps": 4, **save}
    first = train(strided(make, **keys, budget={"documents": 3}))
    assert first.trainer.state.global_step == 2 and first.metrics["budget/documents"] == 4
    assert {"budget/generated_tokens", "budget/flops"} <= set(first.metrics)
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["log_history"][-1]["budget/documents"] == 4
    rate = [entry["learning_rate"] for entry in first.trainer.state.log_history if "learning_rate" in entry][-1]
    assert rate == pytest.approx(1e-3 * 5 / 6)  # the schedule is that of six steps
    with pytest.warns(UserWarning, match=r"already complete: .* step 2, .* Increase budget.documents to continue"):
        again = train(strided(make, **keys, budget={"documents": 3}, auto_resume_from_checkpoints=True))
    assert again.trainer.state.global_step == 2 and again.metrics["budget/documents"] == 4
    more = train(strided(make, **keys, budget={"documents": 5}, auto_resume_from_checkpoints=True))
    assert more.trainer.state.global_step == 3 and more.metrics["budget/documents"] == 6
