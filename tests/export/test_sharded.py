"""Checkpoints in parts become folders for from_pretrained. Those of two processes are in tests/run/test_sharded.py."""

import pickle
import shutil
import warnings

import pytest
from torch.distributed import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft.errors import ModelError
from ebft.files import write_checksums
from ebft.tools.export.checkpoint import merge_sharded
from tests.cli.conftest import plain
from tests.file_edits import write


def save_parts(weights, folder):
    with warnings.catch_warnings(action="ignore"):  # that there is one process only
        checkpoint.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)


@pytest.fixture
def parts(tiny_llama_dir, tmp_path):
    """A checkpoint of a full model."""
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(tiny_llama_dir, folder)
    (folder / "model.safetensors").unlink()
    save_parts(AutoModelForCausalLM.from_pretrained(tiny_llama_dir).state_dict(), folder)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "scheduler.pt").write_bytes(b"")
    return folder


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model(parts, tiny_llama_dir, tmp_path):
    write_checksums(parts)
    merged = merge_sharded(parts)
    assert merged.folder == parts / "merged" and not merged.is_adapter
    assert files(merged.folder) == files(tiny_llama_dir)
    again = merge_sharded(parts / "pytorch_model_fsdp_0", tmp_path / "small", shard_size="20KB").folder
    assert len(list(again.glob("model-*.safetensors"))) > 2


def test_the_command(ebft, parts, tmp_path):
    result = ebft("merge-sharded", parts, "--output", tmp_path / "merged")
    assert result.exit_code == 0, result.output
    assert f"Merged model saved in {tmp_path / 'merged'}" in result.stdout and "21 weights" in result.stdout
    assert "is a pickle file" in plain(result.stderr)
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    failed = ebft("merge-sharded", parts, "--max-shard-size", "many")
    assert failed.exit_code == 1 and "'many'" in failed.stderr and not (parts / "merged").exists()


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_whose_config_ties_its_embeddings(is_tied, tiny_llama_dir, tmp_path):
    """Weights that differ nevertheless, as transformers loads them from a checkpoint with both, remain different."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, tie_word_embeddings=True)
    if is_tied:
        model = AutoModelForCausalLM.from_config(model.config)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    for folder in ("whole", "parts"):
        model.save_pretrained(tmp_path / folder)
    (tmp_path / "parts" / "model.safetensors").unlink()
    save_parts(model.state_dict(), tmp_path / "parts")
    assert files(merge_sharded(tmp_path / "parts").folder) == files(tmp_path / "whole")


def test_a_checkpoint_of_another_program_needs_the_base_model(parts, tiny_llama_dir):
    for path in (*parts.glob("*.json"), *parts.glob("*.jinja")):
        path.unlink()
    with pytest.raises(ModelError, match="--base-model"):
        merge_sharded(parts)
    merged = merge_sharded(parts, base=str(tiny_llama_dir)).folder
    assert files(merged)["model.safetensors"] == files(tiny_llama_dir)["model.safetensors"]
    assert len(AutoTokenizer.from_pretrained(merged)) == 512


PARTS = "pytorch_model_fsdp_0"
INDEX = f"{PARTS}/.metadata"


def change_checked_part(folder):
    write_checksums(folder)
    (path,) = folder.glob("*/*.distcp")
    content = path.read_bytes()
    path.write_bytes(content[:-500] + bytes([content[-500] ^ 255]) + content[-499:])


@pytest.mark.parametrize(("change", "message"), [
    (write(INDEX, pickle.dumps(print)), "builtins.print does not"),
    (change_checked_part, r"distcp is damaged \(wrong checksum\)"),
    (write("merged/mine", ""), "merged is not empty. Remove it, or choose another folder with --output"),
])  # fmt: skip
def test_what_cannot_be_merged_says_why(parts, change, message):
    change(parts)
    with pytest.raises((ModelError, OSError, RuntimeError, pickle.UnpicklingError), match=message):
        merge_sharded(parts)
    assert not list(parts.glob("merged*/*model*"))
