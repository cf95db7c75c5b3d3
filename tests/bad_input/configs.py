"""Config files as the command line reads them: odd files, and unusual configs that can be trained or checked.

What is wrong with keys and values is in tests/config.
"""

from tests.bad_input.cases import bad, good

CHECK = "config --check run.yaml"


FILES = [
    bad("python object", "run.yaml", config="base_model: !!python/object/apply:os.system ['touch pwned']\n",
        command=CHECK, absent=("pwned",)),
    bad("folder", "folder.yaml", files={"folder.yaml/a": "x"}, command="config --check folder.yaml"),
]  # fmt: skip

UNUSUAL = [
    bad("an empty type, which means the default columns", "rows.jsonl", "row 0", "Set field_instruction",
        config={"datasets": [{"path": "rows.jsonl", "type": {}}]}),
    good("an environment variable", config={"output_dir": "${HOME}/out", "vllm": {"env": {"HF_TOKEN": "$HF_TOKEN"}}},
         command=CHECK, warns=("output_dir: '${HOME}/out'", "vllm.env.HF_TOKEN: '$HF_TOKEN'", "not replaced"),
         why="a folder can have this name, and PyYAML and axolotl do not replace variables either"),
    good("one held-out document", config={"val_set_size": 1e-9},
         why="a fraction holds out at least one document, which small data sets rely on"),
    good("more workers than cores", config={"dataloader_num_workers": 999},
         why="workers that wait for a disk or a network do not need a core each"),
    good("settings of GPUs", config={"flash_attention": True, "tf32": True},
         warns=("flash_attention_2 cannot be used", "tf32: true has no effect"),
         why="a config for GPUs can be tried on CPU, with the same results"),
    good("rows and samples that are longer than the data", config={"micro_batch_size": 10_000, "sequence_len": 10**6},
         why="batches and rows have the length of the data, whatever the limit"),
]  # fmt: skip

CASES = [*FILES, *UNUSUAL]
