"""What many tests share: the command line, a small tokenizer and a tiny random model, as a user would have them."""

import functools
import gc
import json
import os
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

# Also of processes that tests start: threads that wait for each other take the cores from other tests.
os.environ["OMP_NUM_THREADS"] = "1"  # read when PyTorch is imported, which the process that starts others does not do
gc.disable()  # until tests are collected: what they import is not searched again and again

# Read by rich, typer and click, some on import: what commands print must not depend on where the tests run.
for name in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "LINES", "NO_COLOR", "PY_COLORS", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Let `make test` fail with a warning that pyproject.toml does not list. As errors, they would change the runs."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")  # none in the processes of xdist
    if session.config.option.markexpr == "not slow" and reporter is not None and reporter.stats.get("warnings"):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test with the mark `first(n)`, cases after the first n are slow."""
    cases = Counter()
    for item in items:
        cases[item.nodeid.partition("[")[0]] += 1
        mark = item.get_closest_marker("first")
        if mark and cases[item.nodeid.partition("[")[0]] > mark.args[0]:
            item.add_marker(pytest.mark.slow)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def found_once():
    """Looks up once what takes 15 s of all tests: seeds of absent devices, packages, and versions."""
    import torch
    from accelerate.utils import imports

    from ebft import machine

    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = device.manual_seed_all if device.is_available() else lambda seed: None
    imports._is_package_available = functools.cache(imports._is_package_available)
    machine.version = functools.cache(machine.version)


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, whatever ran before it: adapters and samples are random."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """`ebft train` starts no further processes on a machine with several GPUs."""
    monkeypatch.setattr("ebft.tools.launch.plan.visible_gpus", lambda: 0)


@pytest.fixture(autouse=True, scope="module")
def imported_objects_are_not_searched_again():
    """A collection of garbage takes 0.4 s with all that PyTorch and transformers create, and every training has one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory) -> Path:
    """A byte-level BPE of 512 tokens trained on a few modules of the standard library; no padding token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    stdlib = Path(sysconfig.get_paths()["stdlib"])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"vocab_size": 512, "special_tokens": ["<|begin|>", "<|end|>"], "show_progress": False}
    trainer = trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train([str(stdlib / name) for name in ("argparse.py", "textwrap.py", "calendar.py")], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    folder = tmp_path_factory.mktemp("tiny-tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", model_max_length=128
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama_dir(tiny_tokenizer_dir, tmp_path_factory) -> Path:
    """A random Llama (2 layers, hidden 32, 4 heads, 2 key/value heads, 128 positions) with the tokenizer beside it."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    sizes |= {"vocab_size": len(tokenizer), "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **ends))
    folder = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tiny_llama_dir, tmp_path_factory) -> Path:
    """The tiny Llama and its tokenizer as a GGUF file, alone in its folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.gguf_files import write_gguf

    path = tmp_path_factory.mktemp("tiny-gguf") / "tiny.Q8_0.gguf"
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    write_gguf(path, model, AutoTokenizer.from_pretrained(tiny_llama_dir))
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def ebft():
    """`ebft("config", "--check", path)`: the command line in this process."""
    from typer.testing import CliRunner

    from ebft.tools.cli import app
    from tests.cli.conftest import TERMINAL

    def run(*arguments):
        width = {"COLUMNS": os.environ["COLUMNS"]} if "COLUMNS" in os.environ else {}  # a test may set another one
        return CliRunner(env=TERMINAL | width).invoke(app, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def refused(ebft):
    """`refused("train", path)`: what a command says that ends with exit code 2, in one line."""
    from tests.cli.conftest import flat

    def run(*arguments):
        result = ebft(*arguments)
        assert result.exit_code == 2 and "Traceback" not in result.output, (arguments, result.output)
        return flat(result.stderr)

    return run


@pytest.fixture
def run_file(tiny_llama_dir, tmp_path):
    """A strided config with a section for each method, over twelve pairs."""
    rows = [{"input": f"question {i} is", "output": f" the answer to it is {i}, and no other"} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    strided = {"mode": "strided", "context_length": 4, "stride": 4, "generate_max_len": 2, "n_samples_per_prompt": 2}
    config = {"base_model": str(tiny_llama_dir), "special_tokens": {"pad_token": "<|end|>"}, "sequence_len": 64}
    config |= {"rl": "ebft", "ebft": strided, "trl": {"num_generations": 2, "max_completion_length": 6}}
    config |= {"datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "ebft_strided_structured.transform"}]}
    config |= {"val_set_size": 2, "micro_batch_size": 2, "save_strategy": "no", "output_dir": str(tmp_path / "out")}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    return tmp_path / "run.yaml"


@pytest.fixture(scope="session")
def chat_tokenizer():
    """A tokenizer with a token for each byte and a chat template."""
    from tests.structured.conftest import make_chat_tokenizer

    return make_chat_tokenizer()


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real model, fetched now if need be; without it, tests are skipped, or fail in continuous integration."""
    from ebft.errors import FetchError
    from ebft.tools.fetch import fetch_model

    try:
        return fetch_model("smollm2-135m")
    except FetchError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"the pretrained model is not here: {error}")
