"""The list of runs, and how many steps SFT gets for the FLOPs of EBFT."""

from collections import Counter

import pytest
from budget import cost_of, matched_steps
from cells import ABLATIONS, FACTORS, all_cells
from settings import cell_overrides, config_file
from sizes import SIZES

from ebft import load_config


def test_every_cell_has_a_name_of_its_own():
    names = [cell.name for cell in all_cells((0, 1, 2))]
    assert len(names) == len(set(names))


def test_each_factor_changes_one_key_of_the_centre():
    assert all(len(keys) == (name != "centre") for name, keys in {**FACTORS, **ABLATIONS}.items())


def test_methods_by_task():
    cells = all_cells((0,))
    assert {cell.task for cell in cells if cell.method == "rlvr"} == {"functions"}
    assert Counter(cell.method for cell in cells) == {"none": 4, "ebft": 27, "sft": 4, "sft_flops": 4, "rlvr": 2}


@pytest.mark.parametrize("size", SIZES)
def test_every_cell_has_a_valid_config(tmp_path, size):
    for cell in all_cells((0,)):
        if cell.method == "none":
            continue
        config = load_config(config_file(cell.method), cell_overrides(tmp_path, SIZES[size], cell))
        assert config.seed == cell.seed and str(tmp_path) in config.base_model
        assert config.is_strided == (cell.method == "ebft")


def test_documents_of_grpo_are_prompts(tmp_path):
    by_method = {cell.method: cell for cell in all_cells((0,)) if (cell.task, cell.start) == ("functions", "base")}
    config = lambda method: load_config(
        config_file(method), cell_overrides(tmp_path, SIZES["small"], by_method[method], steps=10)
    )
    assert cost_of({}, config("sft"))["documents"] == 80
    assert cost_of({}, config("rlvr"))["documents"] == 80
    assert cost_of({"budget/flops": 5.0}, config("ebft")) == {
        "documents": 80,
        "generated_tokens": None,
        "flops": 5.0,
        "steps": 10,
    }


def test_matched_steps_spend_the_same_flops():
    sft = [{"flops": 100.0, "steps": 10}, {"flops": 300.0, "steps": 30}]
    ebft = [{"flops": 900.0, "steps": 10}, {"flops": 1100.0, "steps": 10}]
    assert matched_steps(sft, ebft) == 100


def test_matched_steps_need_flops_of_both():
    with pytest.raises(ValueError, match="budget/flops"):
        matched_steps([{"flops": None, "steps": 10}], [{"flops": 5.0, "steps": 10}])
    with pytest.raises(ValueError, match="budget/flops"):
        matched_steps([], [{"flops": 5.0, "steps": 10}])
