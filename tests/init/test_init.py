"""`ebft init`, and `ebft train` without a config: what they make of data of many shapes, and what they refuse."""

import json
import shutil

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM

from ebft import load_config
from ebft.methods import named_methods
from ebft.methods.method import Method
from ebft.run.config.schema import RunConfig, parse_yaml
from ebft.run.trainer import training_arguments
from ebft.tools.init.config import draft, method_named
from ebft.tools.init.draft import _scalar
from tests.structured.conftest import CHATML
from tests.terminal import Terminal, ebft_command

COUNT = 30
TEMPLATE = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHATML
ADD = "How much is {0} and {0}, if they are added?"
SUM = "Together, {0} and {0} are twice as much as {0}, which is {1}."
texts = lambda number: (ADD.format(number), SUM.format(number, 2 * number))
row = lambda names, number: dict(zip(names, texts(number), strict=True))


def chat(number, role="role", content="content", answer="assistant"):
    asked, answered = texts(number)
    return [{role: "user", content: asked}, {role: answer, content: answered}]


def compared(number):
    return {"chosen": chat(number), "rejected": [chat(number)[0], {"role": "assistant", "content": "I do not know."}]}


TOOLS = [{"name": "add", "description": "Adds numbers.", "parameters": {"type": "object", "properties": {}}}]
PAIR_TYPE = "ebft_strided_structured.transform"
USER = {"field_instruction": "query", "field_output": "reply"}
PREFERENCES = {"field_prompt": "question", "field_chosen": "chosen", "field_rejected": "rejected"}
KEYS = {"field_messages": "dialog", "message_property_mappings": {"role": "speaker", "content": "text"}}
messages_of = lambda number: dict(zip(("prompt", "completion"), ([message] for message in chat(number))))
labelled = lambda number: row(("prompt", "completion"), number) | {"label": number % 2 == 0}
steps_of = lambda number: {"prompt": texts(number)[0], "completions": list(texts(number)), "labels": [True, False]}
# Data: a file's name, the row of a number, the method that is proposed, and keys of the entry.
SHAPES = {
    "texts": ("jsonl", lambda i: {"text": " ".join(texts(i)), "id": i}, "ebft", {"type": "ebft_pretrain.transform"}),
    "one column": ("csv", lambda i: {"lyrics": " ".join(texts(i)), "year": i}, "ebft", {"field": "lyrics"}),
    "alpaca": ("json", lambda i: {**row(("instruction", "output"), i), "input": ""}, "ebft", {"type": "alpaca"}),
    "input/output": ("jsonl", lambda i: row(("input", "output"), i), "ebft", {"type": PAIR_TYPE}),
    "question/answer": ("csv", lambda i: row(("question", "answer"), i), "ebft", {"type": PAIR_TYPE}),
    "other names": ("parquet", lambda i: row(("query", "reply"), i), "ebft", {"type": USER}),
    "chats": ("jsonl", lambda i: {"messages": chat(i)}, "ebft", {"type": "chat_template"}),
    "messages": ("jsonl", messages_of, "ebft", {"type": "chat_template", "field_messages": None}),
    "chats with other keys": ("jsonl", lambda i: {"dialog": chat(i, "speaker", "text")}, "ebft", KEYS),
    "pairs": ("jsonl", lambda i: row(("question", "chosen"), i) | {"rejected": "No."}, "dpo", {"type": PREFERENCES}),
    "pairs of chats": ("jsonl", compared, "dpo", {"type": "chat_template.argilla_chat"}),
    "labels": ("jsonl", labelled, "kto", {"type": "passthrough"}),
    "steps": ("jsonl", steps_of, "process-reward-model", {"type": "stepwise_supervised"}),
}


def write_rows(path, row, count=COUNT):
    rows = [row(number) for number in range(count)]
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".csv":
        Dataset.from_list(rows).to_csv(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("timeit.repeat", lambda product, **options: [product().numel()])  # of dtypes, one of ten
    return tmp_path


@pytest.fixture
def data(here):
    """A function that writes the data of a name in SHAPES and returns its file."""
    return lambda name, count=COUNT: write_rows(here / f"rows.{SHAPES[name][0]}", SHAPES[name][1], count).name


@pytest.mark.first(5)
@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_of_data_gives_a_config_that_can_be_checked(ebft, data, tiny_llama_dir, name):
    done = ebft("init", data(name), "--model", tiny_llama_dir)
    assert done.exit_code == 0, done.output
    _, _, method, entry = SHAPES[name]
    assert f"Method: {method} (" in done.stdout and "ebft train run.yaml" in done.stdout
    config = load_config("run.yaml")
    found = config.datasets[0]
    if isinstance(entry.get("type"), dict):
        columns = found.user_defined or found.type
        assert {key: getattr(columns, key) for key in entry["type"]} == entry["type"]
    else:
        assert {key: getattr(found, key) for key in entry} == entry
    assert config.val_set_size == 3 and config.load_best_model_at_end and config.num_epochs == 3
    assert 64 <= config.sequence_len <= 128 and config.adapter == "lora" and config.eval_on_start
    assert (" run.yaml rl= " in done.stdout) == (config.rl == "ebft")
    assert ebft("config", "--check", "run.yaml").exit_code == 0


def test_processors_that_are_faster_in_bfloat16_use_it_with_an_adapter(ebft, data, tiny_llama_dir, monkeypatch):
    monkeypatch.setattr("ebft.tools.init.config.bfloat16_is_fast", lambda: True)
    for keys, expected in (([], True), (["adapter="], "auto")):
        assert ebft("init", data("chats"), "--model", tiny_llama_dir, "--overwrite", *keys).exit_code == 0
        assert load_config("run.yaml").bf16 == expected


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "options"), [("texts", []), ("chats", ["--method", "sft"]), ("labels", []), ("other names", [])]
)
def test_training_without_a_config_writes_the_one_it_uses(ebft, data, here, tiny_llama_dir, name, options):
    options = ["--model", tiny_llama_dir, "--data", data(name), *options]
    words = [*options, "max_steps=2", "output_dir=run", "--no-gradient-checkpointing"]
    assert ebft("train", *words, "--dry-run").exit_code == 0 and not (here / "run").exists()
    done = ebft("train", *words, "save_steps=1", "eval_steps=1")
    assert done.exit_code == 0 and "Config written to run/train.yaml" in done.stderr, done.output
    config = load_config(here / "run" / "train.yaml")
    assert config.max_steps == 2 and config.gradient_checkpointing is False
    state = json.loads((here / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 2 and any("eval_loss" in key or "eval_" in key for key in state["log_history"][0])


@pytest.mark.slow
def test_the_same_command_goes_on_and_another_one_is_refused(ebft, refused, data, here, tiny_llama_dir):
    words = ["train", "--model", tiny_llama_dir, "--data", data("alpaca"), "--method", "sft", "output_dir=run"]
    words += ["max_steps=2", "evals_per_epoch=", "saves_per_epoch=", "eval_steps=1", "save_steps=1"]
    assert ebft(*words).exit_code == 0
    written = (here / "run" / "train.yaml").read_text()
    again = ebft(*words, "resume_from_checkpoint=run/checkpoint-1")
    assert again.exit_code == 0, again.output
    assert (here / "run" / "train.yaml").read_text() == written and "Config written" not in again.stderr
    said = refused(*words, "learning_rate=1e-3")
    assert "run/train.yaml is the config of a run with other options" in said and "output_dir=FOLDER" in said
    resumed = ["train", "run/train.yaml", "auto_resume_from_checkpoints=true"]
    assert " ".join(resumed) in said and "resumed from checkpoint-2" in ebft(*resumed, "max_steps=3").output


@pytest.mark.parametrize(
    ("given", "expected"),
    [("evals_per_epoch=2", {"saves_per_epoch": 2}), ("eval_steps=5", {"save_steps": 5, "evals_per_epoch": None}),
     ("saves_per_epoch=2", {"evals_per_epoch": 2}),
     ("eval_strategy=no", {"load_best_model_at_end": None}),
     ("evals_per_epoch=2 saves_per_epoch=4", {"load_best_model_at_end": None})],
)  # fmt: skip
def test_checkpoints_are_saved_at_the_evaluations_that_are_given(data, tiny_llama_dir, given, expected):
    """As transformers wants it for the best one."""
    values = draft([data("alpaca")], str(tiny_llama_dir), "sft", given.split()).values
    expected = {"load_best_model_at_end": True, **expected}
    assert {key: values.get(key) for key in expected} == expected
    assert training_arguments(RunConfig.from_dict(values), rows=37, has_eval=True)


def test_several_files_and_a_split_for_evaluation(ebft, here, tiny_llama_dir):
    (here / "data").mkdir()
    for split in ("train", "test"):
        write_rows(here / "data" / f"{split}.jsonl", SHAPES["alpaca"][1])
    assert ebft("init", "data", "--model", tiny_llama_dir, "--method", "sft").exit_code == 0
    config = load_config("run.yaml")
    assert config.test_datasets[0].split == "test" and not config.val_set_size and config.load_best_model_at_end
    write_rows(here / "more.csv", SHAPES["question/answer"][1])
    done = ebft("init", "data/train.jsonl", "more.csv", "--model", tiny_llama_dir, "--output", "two.yaml")
    assert done.exit_code == 0, done.output
    found = load_config("two.yaml")
    assert [entry.type for entry in found.datasets] == ["alpaca", PAIR_TYPE] and found.val_set_size == 6


GPU = {"is_available": 1, "is_bf16_supported": 1, "current_device": 0, "device_count": 1}
GPU["get_device_capability"] = (8, 0)


def test_rows_and_batches_follow_the_data_the_options_and_the_memory(ebft, data, tiny_llama_dir, monkeypatch):
    given = ["init", data("input/output", 500), "--model", tiny_llama_dir, "--overwrite"]
    assert ebft(*given).exit_code == 0 and load_config("run.yaml").learning_rate == 1e-4
    ebft(*given, "learning_rate=0.5", "adapter=", "ebft.stride=4")
    config = load_config("run.yaml")
    assert config.gradient_accumulation_steps * config.micro_batch_size == 16 and config.val_set_size == 50
    assert config.learning_rate == 0.5 and config.adapter is None and config.ebft.stride == 4
    monkeypatch.setattr("ebft.tools.init.draft.available_memory", lambda placed_on: (2**17, "a small machine"))
    done = ebft(*given)
    small = load_config("run.yaml")
    assert small.micro_batch_size == 1 and small.gradient_accumulation_steps == 16
    assert "a small machine, which may not be enough" in done.stdout
    with monkeypatch.context() as on_gpu:
        for name, found in GPU.items():
            on_gpu.setattr(torch.cuda, name, lambda found=found: found)
        ebft(*given, "adapter=")
        assert load_config("run.yaml").optimizer == "adamw_bnb_8bit"
    ebft(*given, "--method", "ebft-structured")
    structured = load_config("run.yaml")
    assert structured.ebft.mode == "structured" and structured.trl.max_completion_length < 256


@pytest.mark.parametrize("given", [
    ["val_set_size=0"], ["test_datasets=[{path: rows.jsonl, type: completion}]"],
    ["micro_batch_size=3", "gradient_accumulation_steps=5"],
])  # fmt: skip
def test_what_is_given_replaces_what_would_be_proposed(ebft, here, data, tiny_llama_dir, given):
    done = ebft("init", data("input/output"), "--model", tiny_llama_dir, *given)
    assert done.exit_code == 0, done.output
    assert ebft("config", "--check", "run.yaml").exit_code == 0
    is_held_out = not given[0].startswith(("val_set_size", "test_datasets"))
    assert ("rows are held out" in done.stdout) == is_held_out
    assert ("rows per optimizer step" in (here / "run.yaml").read_text()) == ("micro_batch_size=3" not in given)


def test_a_model_with_a_chat_template_reads_pairs_as_chats(ebft, refused, data, here, tiny_llama_dir):
    folder = shutil.copytree(tiny_llama_dir, here / "chat-model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    kinds = "ebft_opencode.transform_strided", "chatml.prompt_pairs", "alpaca_chat"
    for name, kind in zip(("input/output", "labels", "alpaca"), kinds):
        done = ebft("init", data(name), "--model", folder, "--overwrite")
        assert done.exit_code == 0 and "is replaced with" not in done.output
        for others in (["ebft.mode=structured"], ["rl=sdft"], ["rl="]) if name != "labels" else ():
            assert ebft("config", "--check", "run.yaml", *others).exit_code == 0, "one file for every method"
        assert load_config("run.yaml").datasets[0].type == kind
    write_rows(here / "tools.jsonl", lambda i: {"conversations": chat(i, "from", "value", "gpt"), "functions": TOOLS})
    assert ebft("init", "tools.jsonl", "--model", folder, "--overwrite").exit_code == 0
    assert load_config("run.yaml").datasets[0].field_tools == "functions"
    said = refused("init", "tools.jsonl", "--model", tiny_llama_dir, "--output", "other.yaml")
    assert "Set chat_template=FILE" in said


@pytest.mark.parametrize(("words", "texts"), [
    ("init", ["DATA is missing", "in a terminal only"]),
    ("init pairs.jsonl --model MODEL --method dpo", ["--method dpo: it does not train on these", "ebft, ebft-struct"]),
    ("init pairs.jsonl --model MODEL --output kept.yaml", ["kept.yaml exists", "--overwrite"]),
    ("train kept.yaml --data pairs.jsonl", ["kept.yaml and --model, --data or --method", "Remove one"]),
])  # fmt: skip
def test_errors_say_what_to_give(refused, here, tiny_llama_dir, monkeypatch, words, texts):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_rows(here / "pairs.jsonl", SHAPES["input/output"][1])
    (here / "kept.yaml").write_text("kept")
    said = refused(*(word if word != "MODEL" else tiny_llama_dir for word in words.split()))
    assert all(text in said for text in texts), said
    assert not (here / "run.yaml").exists() and (here / "kept.yaml").read_text() == "kept"


def test_a_model_that_strided_mode_does_not_train_gets_the_next_method(ebft, refused, data, here, tiny_llama_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained("mamba")
    tokenizer.save_pretrained("mamba")
    done = ebft("init", data("texts"), "--model", "mamba")
    assert done.exit_code == 0 and "Method: sft (" in done.stdout
    assert "Not ebft: MambaForCausalLM has state-space" in done.stdout
    said = refused("init", "rows.jsonl", "--model", "mamba", "--method", "ebft", "--overwrite")
    assert "--method ebft: MambaForCausalLM has state-space" in said and "Methods that fit: sft." in said


def test_every_method_has_a_name_and_an_example():
    keys = named_methods()
    assert [name for name in keys if not isinstance(method_named(name), Method)] == []
    assert len({type(method_named(name)) for name in keys}) == len(keys)


@pytest.mark.parametrize("value", ["a: b", "no", "1e-4", "plain", "#x", "", "two\nlines", [1, "a, b"], {"a": 1}, 1e-5])
def test_values_are_read_as_they_were_written(value):
    assert parse_yaml(f"key: {_scalar(value)}") == {"key": value}


@pytest.mark.slow
def test_in_a_terminal_what_is_missing_is_asked_for(here, data, tiny_llama_dir):
    data("input/output")
    terminal = Terminal(ebft_command("init", "rows.jsonl"), columns=200)
    terminal.wait_for(lambda screen: "Base model" in screen)
    terminal.press(f"{tiny_llama_dir}\n")
    terminal.wait_for(lambda screen: "Method [ebft]" in screen)
    assert "sft " in terminal.screen
    terminal.press("sft\n")
    assert terminal.end() == 0
    assert load_config(here / "run.yaml").rl is None
