"""Transforms of the user's own: how they are found and called, and what is said about wrong ones."""

import os
import signal
import textwrap

import pytest
from datasets import Dataset

from ebft.data.apply import tokenise
from ebft.data.transforms import TRANSFORMS, find_transform
from ebft.errors import DataError


@pytest.fixture
def run_own(make_config, tokenizer, tmp_path, monkeypatch, request):
    """Run a module with the given body over rows, from a working directory that holds it."""

    def run(body, rows=({"a": "x"}, {"a": "y"}), **keys):
        name = f"own_{abs(hash(request.node.nodeid))}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(body))
        monkeypatch.chdir(tmp_path)
        config = make_config("unused", f"{name}.transform", **keys)
        return tokenise(Dataset.from_list(list(rows)), config.datasets[0], config, tokenizer)

    return run


def simple(result, map_kwargs='{"remove_columns": "__all__"}'):
    return f"""
    def transform(cfg, **kwargs):
        def transform_fn(example, tokenizer=None):
            return {result}
        return transform_fn, {map_kwargs}
    """


def test_own_transform(run_own, tokenizer):
    ids = 'tokenizer(example["a"])["input_ids"]'
    rows = run_own(simple(f'{{"input_ids": {ids}, "labels": {ids}, "prompt_length": 1}}'))
    assert rows.column_names == ["input_ids", "labels", "prompt_length", "turn_spans", "document"]
    assert rows["turn_spans"][:] == [[], []]
    assert rows[1]["input_ids"] == tokenizer("y")["input_ids"] and rows[1]["prompt_length"] == 1


@pytest.mark.parametrize("read", ["cfg.sequence_len", 'cfg["sequence_len"]', 'cfg.get("sequence_len")'])
def test_config_reads_as_attributes_and_as_a_mapping(run_own, read):
    body = f"""
    def transform(cfg, **kwargs):
        assert cfg.get("no_such_key") is None and "no_such_key" not in cfg
        length = {read}
        return lambda example, tokenizer=None: {{"input_ids": [length], "labels": [length]}}, {{}}
    """
    assert run_own(body)[0]["input_ids"] == [64]


@pytest.mark.parametrize(("labels", "prompt"), [([-100, 5, 6], 1), ([4, -100, 6], 0), ([-100] * 3, 0)])
def test_prompt_that_only_the_labels_tell(run_own, labels, prompt):
    assert run_own(simple(f'{{"input_ids": [4, 5, 6], "labels": {labels}}}'))[0]["prompt_length"] == prompt


def test_turns_of_an_own_transform(run_own):
    fields = '"input_ids": [4, 5, 6, 7], "labels": [4, 5, 6, 7], "turn_spans": [(0, 1), (2, 4)]'
    assert run_own(simple(f"{{{fields}}}"))[0]["turn_spans"] == [[0, 1], [2, 4]]


def test_padding_is_taken_off(run_own):
    rows = run_own(simple('{"input_ids": [1, 2, 0], "labels": [1, 2, -100], "attention_mask": [1, 1, 0]}'))
    assert rows[0]["input_ids"] == [1, 2] and rows[0]["labels"] == [1, 2]


def test_columns_that_are_not_removed_count_as_fields(run_own):
    rows = [{"input_ids": [4, 5]}]
    assert run_own(simple('{"labels": [4, 5]}', "{}"), rows)[0]["input_ids"] == [4, 5]


def test_batched_transform_may_change_the_number_of_rows(run_own):
    ids = "[[1]] * 3"
    rows = run_own(simple(f'{{"input_ids": {ids}, "labels": {ids}}}', '{"remove_columns": "__all__", "batched": True}'))
    assert rows["document"][:] == [0, 0, 0]


def test_several_processes_give_the_same_rows(run_own):
    body = simple('{"input_ids": [ord(example["a"])], "labels": [1]}')
    rows = [{"a": chr(97 + number)} for number in range(6)]
    assert run_own(body, rows, dataset_num_proc=2)[:] == run_own(body, rows)[:]


def test_sigterm_ends_the_processes_of_a_transform_whatever_this_process_does_with_it(run_own, tmp_path):
    """A handler in Python may never run in an idle process of a pool, which is then waited for without end."""
    seen = tmp_path / "seen"
    body = f"""
    import signal
    def transform(cfg, **kwargs):
        def one(example, tokenizer=None):
            with open({str(seen)!r}, "a") as file:
                print(repr(signal.getsignal(signal.SIGTERM)), file=file)
            return {{"input_ids": [1], "labels": [1]}}
        return one, {{}}
    """
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        run_own(body, [{"a": "x"}] * 4, dataset_num_proc=2)
        forked = os.fork()
        if forked == 0:
            os._exit(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
        assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0  # other processes are as they were
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert seen.read_text().splitlines() == [repr(signal.SIG_DFL)] * 4


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            '{"prompt": "x", "ground_truth": "y"}',
            "row 0: the transform returned prompt and ground_truth, but strided mode trains on rows of input_ids "
            "and labels. Use ebft_pretrain.transform, .*ebft_reasoning.transform_strided, .*change the method",
        ),
        ('{"prompt": "x"}', "row 0: the field 'input_ids' is missing; the transform returned prompt"),
        ('{"input_ids": [1]}', "row 0: the field 'labels' is missing"),
        ('{"input_ids": [1, 2], "labels": [1]}', "labels has 1 entries, but input_ids has 2"),
        ('{"input_ids": "abc", "labels": [1]}', "input_ids must be a list of token ids, got abc"),
        (
            '{"input_ids": [1], "labels": [1], "prompt_length": -1}',
            "prompt_length must be a non-negative integer, got -1",
        ),
        ('{"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [0, 1]}', "must be ones followed by zeros"),
        *(
            (
                f'{{"input_ids": [1, 2, 3], "labels": [1, 2, 3], "turn_spans": {spans}}}',
                rf"pairs .* row's 3 tokens.*{got}",
            )
            for spans, got in (
                ("[[0, 4]]", r"got \[\[0, 4\]\]"),
                ("[[1, 3], [0, 1]]", "in order and without overlaps"),
                ("[[0, 2], [1, 3]]", "without overlaps"),
                ("[[2, 2]]", "got"),
                ("[1, 2]", "got"),
                ("[['a', 'b']]", "got"),
                ("3", "got 3"),
            )
        ),
        ("[1, 2]", "the transform returned list; it must return a dict of fields"),
        ('example["b"]', r"row 0: KeyError: 'b' \(.*, line 4: .*\). The row has the columns a"),
    ],
)
def test_wrong_results_name_transform_row_and_field(run_own, result, message):
    with pytest.raises(DataError, match=message) as caught:
        run_own(simple(result))
    assert str(caught.value).startswith("unused, train: transform 'own_")


def test_transform_that_returns_no_pair(run_own):
    with pytest.raises(DataError, match=r"returned function; it must return \(transform_fn, map_kwargs\)"):
        run_own("def transform(cfg, **kwargs):\n    return lambda example: {}\n")


@pytest.mark.parametrize("name", [name for name, found in TRANSFORMS.items() if found.file != "preferences"])
def test_built_in_names(name):
    module, _, function = name.partition(".")
    if function == "transform":
        assert find_transform(name) is find_transform(module)
    found = find_transform(name).__name__.replace("ebft_strided_chat", module)
    assert found == f"{module}_{function}".replace("_transform", "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ebft_pretrian.transform", "the module was not found.*Did you mean 'ebft_pretrain'"),
        ("vicuna", "unknown name 'vicuna'.*Custom functions are written as module.function"),
        (
            "context_qa.load_v2",
            "'context_qa.load_v2' is a prompt strategy of axolotl that is not built in.*field_output",
        ),
        (
            "sharegpt:chat",
            "'sharegpt:chat' is a prompt strategy of axolotl that is not built in.*chat_template, alpaca",
        ),
        ("ebft_pretrain.transfrom", "has no function 'transfrom'. Available functions: transform.$"),
        (
            "ebft_chat_multiturn.transform_frist",
            "no function 'transform_frist'. Available functions: transform, transform_last_turn, transform_all_turns",
        ),
        (
            "textwrap.nothing",
            "module textwrap has no function 'nothing'. Available functions: TextWrapper, wrap, fill, shorten",
        ),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(DataError, match=message):
        find_transform(name)
