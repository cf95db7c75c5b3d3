"""Every case of bad input gives one clear error, and every valid case is accepted."""

import pytest

from tests.bad_input import configs, data_files, folders, models, user_code
from tests.bad_input.cases import complaint, invoke, prepare

TABLES = {module.__name__.rpartition(".")[2]: module.CASES for module in (
    configs, data_files, models, user_code, folders)}  # fmt: skip
CASES = [(table, case) for table, cases in TABLES.items() for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("table", "case"), CASES, ids=[f"{table}: {case.name}" for table, case in CASES])
def test_case(table, case, tmp_path, tiny_llama_dir, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    prepare(case, tmp_path, tiny_llama_dir)
    assert complaint(case, invoke(case, tmp_path), tmp_path) is None
