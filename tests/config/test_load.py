import pytest

from ebft.config.axolotl import UNSUPPORTED_KEYS
from ebft.config.load import load_config
from ebft.errors import ConfigError, EBFTError


def assert_fails(path, *parts, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    for part in parts:
        assert part in str(caught.value)


def test_the_smallest_config(write):
    config = load_config(write())
    assert config.base_model == "some/model" and config.rl is None


def test_numbers_in_scientific_notation(write):
    config = load_config(write("learning_rate: 1e-5\nadam_epsilon: 1E-9\nweight_decay: 2.5e-2\n"))
    assert (config.learning_rate, config.adam_epsilon, config.weight_decay) == (1e-5, 1e-9, 0.025)


def test_no_is_a_word_not_false(write):
    assert load_config(write("save_strategy: no\n")).save_strategy == "no"


def test_errors_are_value_errors():
    assert issubclass(ConfigError, EBFTError) and issubclass(EBFTError, ValueError)


def test_a_missing_file(tmp_path):
    assert_fails(tmp_path / "absent.yaml", "absent.yaml", "No such file", "Give the path")


def test_malformed_yaml_names_file_and_line(write):
    assert_fails(write("ebft: [1,\n"), "run.yaml, line 6", "invalid YAML")


def test_a_repeated_key(write):
    assert_fails(write("seed: 1\nseed: 2\n"), "run.yaml, line 6", 'duplicate key "seed"')


def test_an_empty_file(write):
    assert_fails(write(required=False), "is empty", "base_model")


def test_a_list_instead_of_keys(write):
    assert_fails(write("- a\n", required=False), "key: value")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("? [a]\n: 1\n", "invalid YAML: a key must be a scalar"),
        ("{a: b}: c\n", "invalid YAML"),
        ("wandb_name: &x [*x]\n", "an alias (*name) refers to a value that contains it"),
        ("seed: 012\n", "line 5: invalid YAML: the number 012 is ambiguous"),
        ("seed: !!int abc\n", "line 5: invalid YAML: the value 'abc' does not have the type"),
        ("%YAML 1.1\n---\nseed: 1\n", "invalid YAML: configs are read as YAML 1.2"),
        ("seed: " + "[" * 3000 + "\n", "invalid YAML"),
    ],
)
def test_odd_yaml_is_told_in_words(write, text, message):
    assert_fails(write(text), message)


def test_missing_keys(write):
    assert_fails(write("seed: 1\n", required=False), "base_model is missing", "datasets is missing")


@pytest.mark.parametrize(
    ("text", "unknown", "nearest"),
    [
        ("learning_rte: 1.0e-5\n", "'learning_rte'", "'learning_rate'"),
        ("rl: ebft\nebft:\n  stryde: 4\n", "'ebft.stryde'", "'ebft.stride'"),
        ("special_tokens:\n  pad: x\n", "'special_tokens.pad'", "'special_tokens.pad_token'"),
        ("stride: 4\n", "'stride'", "'ebft.stride'"),
        ("special_tokens: {bos: x}\n", "'special_tokens.bos'", "'special_tokens.bos_token'"),
        ("unlike_anything: 1\n", "'unlike_anything'", "Run `ebft config` to list all keys"),
        ("num_train_epochs: 2\n", "'num_train_epochs'", "Use 'num_epochs' instead"),
        ("lora_rank: 8\n", "'lora_rank'", "Use 'lora_r' instead"),
        ("trl: {max_new_tokens: 8}\n", "'trl.max_new_tokens'", "Use 'trl.max_completion_length' instead"),
        ("fsdp_release: 2\n", "'fsdp_release'", "Run `ebft config` to list all keys"),
    ],
)
def test_an_unknown_key_names_the_nearest(write, text, unknown, nearest):
    assert_fails(write(text), "Unknown key", unknown, nearest)


@pytest.mark.parametrize("key", UNSUPPORTED_KEYS)
def test_a_key_of_other_trainers_says_what_to_do(write, key):
    assert_fails(write(f"{key}: 1\n"), f"{key} is not supported: {UNSUPPORTED_KEYS[key]}.")


def test_max_steps_minus_one_is_unset(write):
    assert load_config(write("max_steps: -1\n")).max_steps is None


def test_resume_from_checkpoint_is_a_folder(write):
    assert_fails(
        write("resume_from_checkpoint: true\n"),
        "invalid value true; expected the folder of a checkpoint",
        "auto_resume_from_checkpoints: true",
    )


def test_an_unknown_key_in_a_list_entry(write):
    assert_fails(write(), "'datasets.0.splt'", "'datasets.0.split'", overrides=["datasets.0.splt=train"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: high\n", "learning_rate: invalid value 'high'; expected a number."),
        ("micro_batch_size: 0\n", "micro_batch_size: invalid value 0; expected a value of at least 1."),
        ("micro_batch_size: true\n", "micro_batch_size: invalid value True; expected an integer."),
        (
            "gradient_checkpointing: offload_disk\n",
            "gradient_checkpointing: offload_disk is not supported: activations are recomputed, and not offloaded. Use "
            "gradient_checkpointing: true.",
        ),
        ("bf16: maybe\n", "bf16: invalid value 'maybe'; expected true or false or 'auto'."),
        ("seed: 5000000000\n", "seed: invalid value 5000000000; expected a value of at most 4294967295."),
        (
            "rl: sft\n",
            "rl: invalid value 'sft'; expected 'ebft', 'grpo', 'gdpo', 'dpo', 'ipo', 'kto', 'orpo' or 'simpo' (leave "
            "it out for SFT).",
        ),
        ("rl: ebft\nebft: {stride: 1e23}\n", "ebft.stride: invalid value 1e+23"),
        ("rl: ebft\nebft: {stride: 3000000}\n", "at most 1000000"),
        ("wandb_name: 7\n", "put it in quotes"),
        ("val_set_size: 1.5\n", "val_set_size: invalid value 1.5; expected a value below 1.0 or an integer."),
        ("learning_rate: .nan\n", "expected a finite number"),
        *(
            (
                f"special_tokens: {{{name}: ''}}\n",
                f"special_tokens.{name}: invalid value ''; expected a non-empty string.",
            )
            for name in ("pad_token", "eos_token", "bos_token", "unk_token")
        ),
        ("lora_target_modules: ''\n", "lora_target_modules: invalid value ''; expected a non-empty string or a list."),
        ("lora_target_modules: []\n", "lora_target_modules: invalid value []; expected "),
        ("lora_target_modules: []\n", "or a list with at least 1 element."),
        (
            "evaluation: {temperature: 0.0001}\n",
            "evaluation.temperature: invalid value 0.0001; expected a value of at least 0.001.",
        ),
    ],
)
def test_a_wrong_value_is_told_in_words(write, text, message):
    assert_fails(write(text), message)


def test_every_wrong_key_is_listed(write):
    assert_fails(write("seed: x\nlora_dropout: 2\n"), "seed: invalid value 'x'", "lora_dropout: invalid value 2")


def test_an_empty_list_of_datasets(write):
    assert_fails(write(), "datasets: invalid value []", overrides=["datasets=[]"])


def test_words_that_only_yaml_1_1_takes_for_something_else(write):
    config = load_config(write("wandb_name: 1:30\nwandb_project: yes\nsave_strategy: no\nwandb_entity: 2024-02-30\n"))
    assert (config.wandb_name, config.wandb_project) == ("1:30", "yes")
    assert (config.save_strategy, config.wandb_entity) == ("no", "2024-02-30")


def test_an_override_does_not_reach_the_anchor_through_its_alias(write):
    text = "test_datasets: &held_out [{path: a, type: completion}]\n"
    path = write(f"base_model: m\n{text}datasets: *held_out\n", required=False)
    config = load_config(path, ["datasets.0.split=train[:75%]", "test_datasets.0.split=train[75%:]"])
    assert (config.datasets[0].split, config.test_datasets[0].split) == ("train[:75%]", "train[75%:]")


def test_nested_aliases_do_not_fill_the_memory(write):
    levels = "".join(f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    assert_fails(write(f"fsdp_config:\n  a0: &a0 1\n{levels}"), "more than 100000 values")
