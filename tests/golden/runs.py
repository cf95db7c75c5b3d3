"""The runs of the golden files: ten steps of each method on a tiny model, made from fixed seeds, and what they log."""

import json
import platform
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from ebft import load_config, train
from tests.structured.conftest import save_chat_model

FOLDER = Path(__file__).parent
# What is logged of time and memory, which no two runs share.
OF_THE_MACHINE = ("runtime", "per_second", "_per_s", "memory/", "wait_s", "generation_s", "rollouts/reward_s",
                  "step_time")  # fmt: skip
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")

WORDS = ["the", "sum", "of", "two", "small", "numbers", "is", "one", "that", "a", "child", "can", "find"]
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
COMMON = {"sequence_len": 160, "micro_batch_size": 4, "gradient_accumulation_steps": 1, "torch_dtype": "float32"}
COMMON |= {"max_steps": 10, "eval_steps": 5, "logging_steps": 1, "learning_rate": 2.0e-3, "warmup_steps": 2}
COMMON |= {"save_strategy": "no", "seed": 7}
STRIDED_EBFT = {"mode": "strided", "stride": 4, "context_length": 4, "generate_max_len": 4, "n_samples_per_prompt": 3}
STRIDED = {"rl": "ebft", "ebft": {**STRIDED_EBFT, "temperature": 0.6, "use_whitening": True, "ce_coef": 0.03}}
STRUCTURED = {"rl": "ebft", "ebft": {"mode": "structured", "use_whitening": True, "gt_length_floor": 1},
              "trl": {"num_generations": 4, "max_completion_length": 10, "temperature": 0.8}}  # fmt: skip


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`base` with other values; those of a section change that section."""
    sections = {key: {**base[key], **value} for key, value in changes.items() if isinstance(base.get(key), dict)}
    return {**base, **changes, **sections}


MEAN = {"embed_method": "mean_pooling"}
PAIRED, PROMPTS = ("pairs", "ebft_strided_structured.transform"), ("pairs", "ebft_opencode.transform")
GROUPED, REWARDS = {"advantage_estimator": "group_norm"}, ["tests.golden.runs.spaces_and_es", "feature_matching"]
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name -> (rows, transform, keys)
    "strided_lora": ("text", "ebft_pretrain.transform", changed(STRIDED, **LORA, ebft={"grad_norms_every": 5})),
    "strided_full": (*PAIRED, changed(STRIDED, ebft={**MEAN, "whitening_space": "feature", "temperature": 1.0})),
    "strided_packed": (*PAIRED, changed(STRIDED, **LORA, sample_packing=True, micro_batch_size=2,
                                        ebft={"use_whitening": False})),
    "strided_accumulation": ("chats", "ebft_strided_chat.transform_last_turn", changed(
        STRIDED, gradient_accumulation_steps=3, micro_batch_size=2, ebft=GROUPED)),
    "structured_single_turn": (*PROMPTS, changed(STRUCTURED, **LORA)),
    "structured_several_turns": ("chats", "ebft_chat_multiturn.transform", changed(
        STRUCTURED, gradient_accumulation_steps=2, ebft={**MEAN, **GROUPED})),
    "structured_cross_entropy": (*PROMPTS, changed(STRUCTURED, **LORA, ebft={
        "ce_coef": 0.1, "use_whitening": False, "advantage_estimator": "grpo"})),
    "grpo": (*PROMPTS, {"rl": "grpo", **LORA, "trl": {**STRUCTURED["trl"], "reward_funcs": REWARDS}}),
    "sft": ("chats", "chat_template", {**LORA, "gradient_accumulation_steps": 2}),
    "dpo": ("comparisons", "chatml.icr", {"rl": "dpo", **LORA, "dpo_loss_type": ["sigmoid", "sft"]}),
    "reward_model": ("comparisons", "bradley_terry.chat_template",
                     {**LORA, "reward_model": True, "center_rewards_coefficient": 0.01}),
    "process_reward_model": ("steps", "stepwise_supervised",
                             {"process_reward_model": True, "gradient_accumulation_steps": 2}),
}  # fmt: skip


def spaces_and_es(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that the text alone decides: the share of spaces and of the letter e."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [sum(letter in " e" for letter in text) / max(1, len(text)) for text in texts]


def run(name: str, folder: Path) -> dict[str, Any]:
    """What the run `name` logged, step by step, and the norm of every trained weight at its end."""
    config = load_config(write_inputs(name, folder))
    with warnings.catch_warnings(action="ignore"):
        trainer = train(config).trainer
    history = trainer.state.log_history
    steps = [{key: value for key, value in entry.items() if not is_of_the_machine(key)} for entry in history]
    trained = {key: weight for key, weight in trainer.model.named_parameters() if weight.requires_grad}
    return {"steps": steps, "weight_norms": {key: w.detach().double().norm().item() for key, w in trained.items()}}


def is_of_the_machine(key: str) -> bool:
    return any(mark in key for mark in OF_THE_MACHINE)


def write_inputs(name: str, folder: Path, runs: dict[str, tuple[str, str, dict[str, Any]]] = RUNS) -> Path:
    """The run's model, rows and config file, in `folder`; returns the config file."""
    rows, transform, keys = runs[name]
    save_chat_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[rows]()), encoding="utf-8")
    config = {**COMMON, **keys, "base_model": str(folder / "model"), "output_dir": str(folder / "out")}
    config |= {"val_set_size": 4, "datasets": [{"path": str(folder / "rows.jsonl"), "type": transform}]}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def sentence(number: int, words: int) -> str:
    return " ".join(WORDS[(number * 5 + place * place) % len(WORDS)] for place in range(words))


def texts() -> list[dict[str, str]]:
    return [{"text": sentence(number, 5 + number % 9) + "."} for number in range(40)]


def pairs() -> list[dict[str, str]]:
    row = lambda n: {"input": f"Say {sentence(n, 2 + n % 3)}:", "output": " " + sentence(n + 3, 3 + n % 4)}
    return [row(number) for number in range(40)]


def chats() -> list[dict[str, Any]]:
    """Conversations of one to three exchanges."""
    found = []
    for number in range(40):
        messages = []
        for turn in range(1 + number % 3):
            messages.append({"role": "user", "content": sentence(number + turn, 1)})
            messages.append({"role": "assistant", "content": sentence(number + 7 * turn, 2 + turn)})
        found.append({"messages": messages})
    return found


def comparisons() -> list[dict[str, str]]:
    """A longer and a shorter reply each."""
    row = lambda n: {"input": sentence(n, 2), "chosen": sentence(n + 1, 4 + n % 3), "rejected": sentence(n, 1)}
    return [row(number) for number in range(40)]


def judged() -> list[dict[str, Any]]:
    """Replies of which two in three are desirable."""
    row = lambda n: {"question": sentence(n, 2), "completion": sentence(n + 1, 2 + n % 3), "label": n % 3 > 0}
    return [row(number) for number in range(40)]


def steps() -> list[dict[str, Any]]:
    """Prompts with one to three steps, of which every other one is right."""
    found = []
    for number in range(40):
        steps, labels = zip(*((sentence(number + i, 2), (number + i) % 2 == 0) for i in range(1 + number % 3)))
        found.append({"prompt": sentence(number, 2), "completions": [*steps], "labels": [*labels]})
    return found


ROWS = {"text": texts, "pairs": pairs, "chats": chats, "comparisons": comparisons, "judged": judged, "steps": steps}


def machine() -> dict[str, str]:
    """What decides the last digits: the processor, what PyTorch uses of it, and the libraries."""
    of_torch = {"processor": processor(), "instructions": torch.backends.cpu.get_cpu_capability()}
    return {**of_torch, **{name: version(name) for name in LIBRARIES}}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("vendor_id", "cpu family", "model\t", "stepping")
        return " ".join(line.partition(":")[2].strip() for line in lines[:12] if line.startswith(wanted))
    except OSError:
        return platform.processor()
