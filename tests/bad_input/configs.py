"""Invalid config files, and valid ones that look unusual; checked with `ebft config --check`."""

import json
import os
from typing import Any

from tests.bad_input.cases import BASE, GRPO, Case, bad, good

CHECK = "config --check run.yaml"
TEXT = json.dumps(BASE, indent=1)


def broken(name: str, *expect: str, **rest: Any) -> Case:
    return bad(name, *expect, command=CHECK, **rest)


def valid(name: str, **rest: Any) -> Case:
    return good(name, command=CHECK, **rest)


def key(name: str, value: Any, *expect: str) -> Case:
    """An invalid value of a key; the error names the key."""
    return broken(f"{name}={value!r:.30}", name.rpartition(".")[2], *expect, config=nested(name, value))


def right(name: str, value: Any) -> Case:
    return valid(f"{name}={value!r:.30}", config=nested(name, value))


def nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def laughs(depth: int) -> str:
    """Aliases that expand to 9**depth values, ten times as many per level of `depth`."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, depth)]
    return "\n".join(lines) + "\n"


PLAIN = "base_model: model\ndatasets: [{path: rows.jsonl, type: completion}]\n"
LISTS = "\n".join(f"l{n}: &l{n} {{a: *l{n - 1}, b: *l{n - 1}}}" for n in range(1, 40))
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}

SYNTAX = [
    broken("empty file", "run.yaml", "empty", config=""),
    broken("only a comment", "run.yaml", "empty", config="# nothing\n"),
    broken("a list", "run.yaml", "mapping", config="- base_model: x\n"),
    broken("a word", "run.yaml", "mapping", config="hello\n"),
    broken("a long word", "run.yaml", "mapping", config="hello" * 2000),
    broken("not UTF-8", "run.yaml", "UTF-8", config=TEXT.encode("utf-16")),
    broken("latin-1", "run.yaml", "UTF-8", config=b"base_model: caf\xe9\n"),
    broken("binary", "run.yaml", config=bytes(range(256))),
    broken("NUL in the text", "run.yaml", config="base_model: a\0b\n"),
    broken("tab as indentation", "line 2", config="ebft:\n\tstride: 4\n"),
    broken("unclosed quote", "line", config='base_model: "model\nrl: ebft\n'),
    broken("unclosed bracket", "line", config="datasets: [{path: a, type: b}\nrl: ebft\n"),
    broken("colon in a value", "line 1", config="base_model: a: b\n"),
    broken("duplicate key", "line", "rl", config="rl: ebft\nbase_model: model\nrl: grpo\n"),
    broken("duplicate key in a section", "line", "stride", config="ebft:\n  stride: 4\n  stride: 8\n"),
    broken("duplicate key in an entry", "line", "path", config="datasets:\n- {path: a, type: b, path: c}\n"),
    broken("two documents", "run.yaml", config="base_model: a\n---\nbase_model: b\n"),
    broken("python object", "run.yaml", config="base_model: !!python/object/apply:os.system ['touch pwned']\n",
           absent=("pwned",)),
    broken("python name", "run.yaml", config="base_model: !!python/name:os.system\n"),
    broken("unknown tag", "run.yaml", config="base_model: !model x\n"),
    broken("YAML 1.1", "run.yaml", "1.2", config="%YAML 1.1\n---\nbase_model: model\n"),
    broken("YAML 1.1 after a comment", "run.yaml", "1.2", config="# run\n%YAML 1.1\n---\nbase_model: model\n"),
    broken("billion laughs", "run.yaml", "alias", config=laughs(12) + PLAIN),
    broken("billion laughs in mappings", "run.yaml", "alias", config="l0: &l0 {a: 1}\n" + LISTS + "\n" + PLAIN),
    broken("billion laughs in merge keys", "run.yaml", config="l0: &l0 {a: 1}\n" + "\n".join(
        f"l{n}: &l{n} {{<<: [*l{n - 1}, *l{n - 1}], k{n}: 1}}" for n in range(1, 40)
    )),
    broken("recursive alias", "run.yaml", "alias", config="datasets: &a [*a]\n"),
    broken("a tag that does not fit", "line 2", "word", config="base_model: model\nseed: !!int word\n"),
    broken("a tag of another kind", "line 1", config="base_model: !!bool [model]\n"),
    broken("half of a surrogate pair", "run.yaml", "surrogate", config='base_model: m\nmodel_type: "\\ud800"\n'),
    broken("half of a surrogate pair in a key", "run.yaml", "surrogate", config='"\\udfff": m\n'),
    broken("a mapping that is too deep", "run.yaml", "too deep", config="a: " + "{a: " * 120 + "1" + "}" * 120),
    broken("undefined alias", "run.yaml", "line 1", config="base_model: *model\n"),
    broken("deep nesting", "run.yaml", config="[" * 5000),
    broken("long integer", "run.yaml", config="seed: " + "9" * 10_000 + "\n"),
    broken("a key that is a list", "run.yaml", config="[a, b]: 1\n"),
    broken("a key that is a number", "7", config={7: 1}),
    broken("a key that is null", "unknown key", config="base_model: m\n~: 1\n"),
    broken("impossible date", "run.yaml", config="x: 2024-02-31\n"),
    broken("file does not exist", "nothing.yaml", config="", files={}),
    broken("folder", "folder.yaml", files={"folder.yaml/a": "x"}),
    broken("FIFO", "fifo.yaml", files={"fifo.yaml": os.mkfifo}), broken("device", "/dev/zero"),
    broken("a huge line", "run.yaml", config="base_model: " + "x" * 100_000 + ": y\n"),
]  # fmt: skip
SYNTAX = [
    Case(**{**vars(case), "command": {
        "file does not exist": "config --check nothing.yaml",
        "folder": "config --check folder.yaml",
        "FIFO": "config --check fifo.yaml",
        "device": "config --check /dev/zero",
    }.get(case.name, case.command)})
    for case in SYNTAX
]  # fmt: skip

STRUCTURE = [
    key("learning_rate", "fast"), key("learning_rate", 0), key("learning_rate", -1e-5), key("learning_rate", True),
    key("learning_rate", [1e-5]), key("learning_rate", {"start": 1}),
    broken("learning_rate nan", "learning_rate", "finite", config=TEXT.replace("0.0001", ".nan")),
    broken("learning_rate inf", "learning_rate", "finite", config=TEXT.replace("0.0001", ".inf")), key("max_steps", 0),
    key("max_steps", -2), key("max_steps", 1.5), key("max_steps", "10"), key("max_steps", True),
    key("max_steps", 2**63, "at most 1000000000"), key("num_epochs", 1e300, "at most 1000000"),
    key("micro_batch_size", 2**31, "at most 1000000"), key("gradient_accumulation_steps", 10**9),
    key("sequence_len", 2**31), key("save_steps", 2**63), key("warmup_steps", 1e300), key("weight_decay", 1e300),
    key("dataloader_num_workers", 10**5), key("dataset_num_proc", 10**9),
    key("lr_groups", [{"name": "a", "modules": ["b"], "lr": 1e300}], "lr_groups.0.lr"), key("seed", -1),
    key("seed", 2**32), key("seed", 2**400), key("num_epochs", 0), key("micro_batch_size", 0),
    key("micro_batch_size", "auto"), key("sequence_len", 1), key("sequence_len", "1k"), key("weight_decay", -0.1),
    key("adam_beta1", 1), key("warmup_ratio", 1.5), key("max_grad_norm", -1), key("val_set_size", -1),
    key("val_set_size", 1.5), key("save_strategy", "never"), key("save_steps", 0), key("rl", "dpo"),
    key("rl", ["ebft"]), key("bf16", "yes"), key("adapter", "dora"), key("optimizer", "adamx"),
    key("lr_scheduler", "cosin"), key("report_to", "tensorbord"), key("output_dir", ""), key("output_dir", ["out"]),
    key("base_model", ""), key("base_model", 5), key("base_model", " "), key("datasets", []),
    key("datasets", "rows.jsonl"),
    bad("an empty type, which means the default columns", "rows.jsonl", "row 0", "Set field_instruction",
        config={"datasets": [{"path": "rows.jsonl", "type": {}}]}),
    key("evaluation.pass_at", [1, 100], "evaluation.samples", "got 2"),
    key("datasets", {"path": "rows.jsonl", "type": "completion"}), key("datasets", ["rows.jsonl"]),
    key("datasets", [{"path": "rows.jsonl"}], "type"), key("datasets", [{"type": "completion"}], "path"),
    key("datasets", [{"path": "", "type": "ebft_pretrain.transform"}], "path"),
    key("datasets", [{"path": "  ", "type": "ebft_pretrain.transform"}], "path"),
    key("datasets", [{"path": "rows.jsonl", "type": ""}], "type"),
    key("datasets", [{"path": "rows.jsonl", "type": "ebft_pretrain.transfrm"}], "transfrm"),
    key("datasets", [{"path": "rows.jsonl", "type": "ebft_pretrian.transform"}], "ebft_pretrain"),
    key("datasets", [{"path": "rows.jsonl", "type": "ebft_pretrain.transform", "splt": "train"}], "splt"),
    key("datasets", [{"path": "rows.jsonl", "type": "ebft_pretrain.transform", "ds_type": "xml"}], "ds_type"),
    key("datasets", [{"path": "rows.jsonl", "type": "ebft_pretrain.transform", "split": ""}], "split"),
    key("datasets", [{"path": "rows.jsonl", "type": "ebft_pretrain.transform", "data_files": []}], "data_files"),
    key("datasets", [{"path": "rows.jsonl", "type": "ebft_pretrain.transform", "data_files": ""}], "data_files"),
    key("datasets", [None]),
    key("datasets", [{"path": f"rows{n}.jsonl", "type": 5, "x": 1} for n in range(200)], "more"),
    key("ebft", "strided"), key("ebft", []), key("ebft.stride", 0), key("ebft.stride", 10**7), key("ebft.stride", 2.5),
    key("ebft.temperature", -0.5), key("ebft.temperature", 0), key("ebft.temperature", 1e-6),
    key("ebft.temperature", 1e6, "at most 100"), key("trl.temperature", 1e6, "at most 100"),
    key("trl.num_generations", 2**40), key("ebft.top_p", 0), key("ebft.top_p", 1.1), key("ebft.feature_layers", []),
    key("ebft.feature_layers", [1.5]), key("ebft.feature_layers", [0.5, 0.5]), key("ebft.feature_layers", 0.5),
    key("ebft.embed_method", "max"), key("ebft.whitening_space", "token"), key("ebft.advantage_estimator", "gae"),
    key("ebft.mode", "stride"), key("ebft.strde", 4, "stride"), key("ebft.generate_max_len", 64, "sequence_len"),
    broken("no signal: coefficients", "rl_coef", "ce_coef", config={"ebft": {"rl_coef": 0, "ce_coef": 0}}),
    broken("no signal: reward", "alignment_coef", config={"ebft": {"alignment_coef": 0, "diversity_coef": 0}}),
    broken("no signal: structured rl_coef", "rl_coef",
           config={"ebft": {"mode": "structured", "rl_coef": 0, "ce_coef": 0}, "trl": {"num_generations": 2},
                   "micro_batch_size": 2, "datasets": [{"path": "pairs.jsonl", "type": "ebft_opencode.transform"}]}),
    broken("no signal: structured reward", "alignment_coef", config={
        "ebft": {"mode": "structured", "alignment_coef": 0, "diversity_coef": 0}, "trl": {"num_generations": 2},
        "micro_batch_size": 2, "datasets": [{"path": "pairs.jsonl", "type": "ebft_opencode.transform"}]
    }),
    broken("missing base_model", "base_model", config={"base_model": None}),
    broken("missing datasets", "datasets", config={"datasets": None}),
    broken("empty base_model", "base_model", config=TEXT.replace('"base_model": "model"', '"base_model": null')),
    broken("unknown key", "learning_rate", config={"learning_rte": 1}),
    broken("unknown long key", "run.yaml", config={"x" * 5000: 1}),
    broken("500 unknown keys", "more", config={f"key_{n}": n for n in range(500)}),
    broken("long value", "learning_rate", config={"learning_rate": "x" * 10_000}),
    broken("long list for a number", "learning_rate", config={"learning_rate": list(range(5000))}),
    broken("bf16 and fp16", "bf16", "fp16", config={"bf16": True, "fp16": True}),
    broken("adapter without rank", "lora_r", config={"adapter": "lora", "lora_target_linear": True}),
    broken("adapter without targets", "lora_target", config={"adapter": "lora", "lora_r": 4, "lora_alpha": 8}),
    broken("empty targets", "lora_target_modules",
           config={**LORA, "lora_target_linear": False, "lora_target_modules": []}),
    broken("rank 0", "lora_r", config={**LORA, "lora_r": 0}),
    broken("rank above all sizes", "lora_r", "65536", config={**LORA, "lora_r": 10**9}),
    broken("all-linear beside names", "lm_head, q_proj",
           config={**LORA, "lora_target_linear": None, "lora_target_modules": ["all-linear", "lm_head", "q_proj"]}),
    broken("infinity in a mapping", "lr_scheduler_kwargs", "finite",
           config=TEXT[:-1] + ', "lr_scheduler_kwargs": {"a": [.inf]}}'),
    broken("line break after a path", "output_dir", ">-", config=PLAIN + "output_dir: >\n  outputs/run\n"),
    broken("line break after a Hub id", "hub_model_id", ">-", config=PLAIN + "hub_model_id: |\n  me/run\n"),
    broken("qlora without 4 bit", "load_in_4bit", config={**LORA, "adapter": "qlora"}),
    broken("4 and 8 bit", "load_in_8bit", config={**LORA, "load_in_4bit": True, "load_in_8bit": True}),
    broken("both warmups", "warmup_ratio", config={"warmup_steps": 1, "warmup_ratio": 0.1}),
    broken("best without data", "save_strategy", config={"save_strategy": "best"}),
    broken("test_datasets and val_set_size", "val_set_size",
           config={"val_set_size": 1, "test_datasets": BASE["datasets"]}),
    broken("grpo without rewards", "reward_funcs", config={**GRPO, "trl": {"num_generations": 2}}),
    broken("grpo: groups do not fit", "num_generations",
           config={**GRPO, "micro_batch_size": 1, "trl": {"num_generations": 3, "reward_funcs": ["feature_matching"]}}),
    broken("grpo: one generation", "num_generations",
           config={**GRPO, "micro_batch_size": 1, "trl": {"num_generations": 1, "reward_funcs": ["feature_matching"]}}),
    broken("grpo: weights", "reward_weights", config={**GRPO, "trl": {"num_generations": 2,
                                                                      "reward_funcs": ["feature_matching"],
                                                                      "reward_weights": [1.0, 2.0]}}),
    broken("grpo: duplicate reward", "feature_matching",
           config={**GRPO, "trl": {"num_generations": 2, "reward_funcs": ["feature_matching", "feature_matching"]}}),
    broken("rows of the other kind", "nemo_gym", "input_ids",
           config={"datasets": [{"path": "rows.jsonl", "type": "nemo_gym.transform"}]}),
    broken("deepspeed file", "deepspeed", config={"deepspeed": "nothing.json"}),
    broken("resume twice", "auto_resume", config={"resume_from_checkpoint": "a", "auto_resume_from_checkpoints": True}),
    broken("resume true", "resume_from_checkpoint", config={"resume_from_checkpoint": True}),
    broken("axolotl plugin", "plugins", config={"plugins": ["axolotl.integrations.x.Y"]}),
]  # fmt: skip

VALID = [
    valid("as it is"), right("max_steps", -1), right("evaluation.pass_at", [2, 1]), right("max_steps", 10**9),
    right("num_epochs", 10**6), right("sequence_len", 2**24), right("micro_batch_size", 4096),
    right("ebft.temperature", 10), right("budget", {"flops": 1e26, "generated_tokens": 10**13}),
    right("max_grad_norm", 1e9), right("warmup_steps", 0.5),
    valid("a folded path", config=PLAIN + "output_dir: >-\n  outputs/run\n"),
    valid("a chat template that ends with a line break", config=PLAIN + "chat_template: |\n  {{ messages }}\n"),
    valid("an environment variable", config={"output_dir": "${HOME}/out", "vllm": {"env": {"HF_TOKEN": "$HF_TOKEN"}}},
          warns=("output_dir: '${HOME}/out'", "vllm.env.HF_TOKEN: '$HF_TOKEN'", "not replaced"),
          why="a folder can have this name, and PyYAML and axolotl do not replace variables either"),
    valid("dollars that are ordinary text",
          config={"chat_template": "{{ '${x}' }}", "tokens": ["${x}"], "wandb_name": "costs $5", "output_dir": "a$b"},
          unwarned=("replaced",)),
    valid("a schedule of evaluations without data", config={"eval_steps": 10}, warns=("eval_steps: no effect",),
          why="published configs have it with val_set_size: 0, and the rest of the run is as asked"),
    good("one held-out document", config={"val_set_size": 1e-9}, command="train run.yaml",
         warns=("val_set_size: 1e-09 of 4 documents is less than one",),
         why="a fraction holds out at least one document, which small data sets rely on"),
    good("more workers than cores", config={"dataloader_num_workers": 999}, command="train run.yaml",
         warns=("dataloader_num_workers: 999 is more than",),
         why="workers that wait for a disk or a network do not need a core each"),
    good("settings of GPUs", config={"flash_attention": True, "tf32": True}, command="train run.yaml",
         warns=("flash_attention_2 cannot be used", "tf32: true has no effect"),
         why="a config for GPUs can be tried on CPU, with the same results"),
    valid("empty values mean unset", config=TEXT.replace('"max_steps": 1', '"max_steps": null, "wandb_run_id": null')),
    right("learning_rate", 1), valid("1e-5 is a number", config=TEXT.replace("0.0001", "1e-5")),
    right("seed", 2**32 - 1), right("bf16", "auto"), right("val_set_size", 0.5), right("val_set_size", 3),
    right("ebft.feature_layers", [0, 1]), right("ebft.rl_coef", 0.5),
    valid("rl_coef 0 with a cross-entropy", config={"ebft": {"rl_coef": 0, "ce_coef": 0.1}}),
    valid("YAML 1.2", config="%YAML 1.2\n---\n" + TEXT),
    bad("a million samples", "ebft.n_samples_per_prompt", "1,000,000 rollouts", "GiB", "has",
        config={"ebft": {"n_samples_per_prompt": 1_000_000}}),
    good("many samples", config={"ebft": {"n_samples_per_prompt": 512}}),
    good("rows and samples that are longer than the data", config={"micro_batch_size": 10_000, "sequence_len": 10**6},
         why="batches and rows have the length of the data, whatever the limit"),
    valid("percent in a value", config=TEXT[1:-1].join(["{", ', "chat_template": "x\\n%YAML 1.1 {{ a }}"}'])),
    valid("aliases", config="base_model: model\nrl: ebft\nebft: {mode: strided}\ndatasets:\n- &d {path: rows.jsonl, "
          "type: ebft_pretrain.transform}\ntest_datasets: [*d]\n"),
    valid("merge key", config="base_model: model\nrl: ebft\nebft: {mode: strided}\ndatasets:\n- &d {path: rows.jsonl, "
          "type: ebft_pretrain.transform}\n- {<<: *d, path: more.jsonl}\n"),
    valid("byte order mark", config=b"\xef\xbb\xbf" + TEXT.encode()),
    valid("Windows line ends", config=TEXT.replace("\n", "\r\n").encode()),
    valid("unicode path", config={"output_dir": "modèle-東京"}),
    valid("no is a word", config=TEXT.replace('"out"', "no")), valid("lora", config=LORA),
    valid("grpo with feature_matching",
          config={**GRPO, "trl": {"num_generations": 2, "reward_funcs": ["feature_matching"]}}),
    valid("a symlink", config={}, files={"link.yaml": lambda path: path.symlink_to("run.yaml")}),
]  # fmt: skip

CASES = [*SYNTAX, *STRUCTURE, *VALID]
