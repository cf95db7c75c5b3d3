"""Checkpoints in parts become folders for from_pretrained. Those of two processes are in tests/run/test_sharded.py."""

import json
import pickle
import shutil
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch.distributed import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft.errors import ModelError
from ebft.files import write_checksums
from ebft.models.pretrained import pretrained_model
from ebft.tools.export.sharded import merge_sharded


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
    for ours, theirs in zip(*(AutoModelForCausalLM.from_pretrained(f).parameters() for f in (again, tiny_llama_dir))):
        assert torch.equal(ours, theirs)


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


def test_an_adapter(tiny_llama_dir, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    for folder in ("whole", "parts"):
        model.save_pretrained(tmp_path / folder)
    (tmp_path / "parts" / "adapter_model.safetensors").unlink()
    save_parts(get_peft_model_state_dict(model), tmp_path / "parts")
    merged = merge_sharded(tmp_path / "parts")
    assert merged.is_adapter and files(merged.folder) == files(tmp_path / "whole")
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), merged.folder)


def test_a_checkpoint_of_another_program_needs_the_base_model(parts, tiny_llama_dir):
    for path in (*parts.glob("*.json"), *parts.glob("*.jinja")):
        path.unlink()
    with pytest.raises(ModelError, match="neither config.json nor adapter_config.json. Name .* --base-model MODEL"):
        merge_sharded(parts)
    merged = merge_sharded(parts, base=str(tiny_llama_dir)).folder
    assert files(merged)["model.safetensors"] == files(tiny_llama_dir)["model.safetensors"]
    assert len(AutoTokenizer.from_pretrained(merged)) == 512


def occupy(folder):
    (folder / "merged").mkdir()
    (folder / "merged" / "mine").write_text("")


def change_width(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"intermediate_size": 64', '"intermediate_size": 96'))


def change_bytes(folder):
    write_checksums(folder)
    (path,) = folder.glob("*/*.distcp")
    content = bytearray(path.read_bytes())
    content[-500] ^= 255
    path.write_bytes(content)


def cut(folder):
    (path,) = folder.glob("*/*.distcp")
    path.write_bytes(path.read_bytes()[:-500])


def of_deepspeed(folder):
    shutil.rmtree(folder / "pytorch_model_fsdp_0")
    (folder / "global_step3").mkdir()


PARTS = "pytorch_model_fsdp_0"
INDEX = f"{PARTS}/.metadata"


def change_index(change):
    """Changes the index of a checkpoint in place."""

    def changed(folder):
        index = pickle.loads((folder / INDEX).read_bytes())
        change(index)
        (folder / INDEX).write_bytes(pickle.dumps(index))

    return changed


def lose_chunk(index):
    index.state_dict_metadata["model.lm_head.weight"].chunks.clear()


def lose_storage(index):
    del index.storage_data[next(key for key in index.storage_data if key.fqn == "model.lm_head.weight")]


def lose_offset(index):
    next(iter(index.storage_data.values())).offset = None


def break_archive(folder):
    """Without checksums, as in checkpoints of other programs."""
    (path,) = folder.glob("*/*.distcp")
    path.write_bytes(b"x" * path.stat().st_size)


def refer_to_lost_part(folder):
    (folder / "ebft_checksums.json").write_text(json.dumps({f"{PARTS}/other.distcp": 1}))


def configure(**changes):
    """Changes config.json."""

    def changed(folder):
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(found | changes))

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: next(folder.glob("*/*.distcp")).unlink(), "is incomplete or damaged: __0_0.distcp is missing"),
        (lambda folder: (folder / PARTS / ".metadata").unlink(), "is incomplete: .metadata is missing"),
        (lambda folder: (folder / PARTS / ".metadata").write_bytes(pickle.dumps(print)), "builtins.print does not"),
        (lambda folder: (folder / INDEX).write_bytes(b"\x80\x04\x8a\xff\xff"), "is incomplete or damaged: the index"),
        (change_index(lose_chunk), "damaged: parts of model.lm_head.weight are missing in the index"),
        (change_index(lose_storage), "damaged: parts of model.lm_head.weight are missing in the index"),
        (change_index(lose_offset), "damaged: the index is damaged"),
        (break_archive, "cannot be read"),
        (refer_to_lost_part, "other.distcp is missing"),
        (
            lambda folder: (folder / "ebft_checksums.json").write_text("[]"),
            "checksums.json is damaged: it is not a JSON",
        ),
        (configure(hidden_size=-32), "does not describe a causal language model"),
        (configure(num_attention_heads=0), "does not describe a causal language model"),
        (lambda folder: (folder / "merged").symlink_to("other"), "merged is a symbolic link. Remove it"),
        (cut, "bytes instead of at least"),
        (change_bytes, r"distcp is damaged \(wrong checksum\)"),
        (change_width, "the weights do not fit the config of .*mlp.down_proj.weight is of another shape"),
        (occupy, "merged is not empty. Remove it, or choose another folder with --output"),
        (of_deepspeed, "a checkpoint of DeepSpeed, not of FSDP2.*zero_to_fp32.py"),
        (lambda folder: shutil.rmtree(folder / PARTS), "has no folder pytorch_model_fsdp_0"),
    ],
)
def test_what_cannot_be_merged_says_why(parts, change, message):
    change(parts)
    with pytest.raises(ModelError, match=message):
        merge_sharded(parts)
    assert not list(parts.glob("merged*/*model*"))


def test_the_largest_size_of_a_file(parts, tmp_path):
    for place, size in enumerate(("20kib", "20k", "20480")):
        folder = merge_sharded(parts, tmp_path / str(place), shard_size=size).folder
        assert max(path.stat().st_size for path in folder.glob("*.safetensors")) < 80_000
    with pytest.raises(ModelError, match="--max-shard-size: invalid value 'small'"):
        merge_sharded(parts, tmp_path / "other", shard_size="small")


def test_other_files_are_left_alone(parts):
    (parts / "merged.tmp").mkdir()
    (parts / "merged.tmp" / "mine").write_text("kept")
    (parts / "folder.json").mkdir()
    merge_sharded(parts)
    assert (parts / "merged.tmp" / "mine").read_text() == "kept"
    assert not list(parts.glob("merged.*[!p]"))


def test_loading_parts_names_the_command(parts):
    (parts / "rng_state.pth").write_bytes(b"")
    with pytest.raises(ModelError, match="has saved in parts. Run `ebft merge-sharded .*checkpoint-3`"):
        pretrained_model(str(parts))


def test_other_folders(parts, tiny_llama_dir):
    with pytest.raises(ModelError, match="has checkpoints in parts: checkpoint-3. Give one of them"):
        merge_sharded(parts.parent)
    with pytest.raises(ModelError, match="has its weights in safetensors files already"):
        merge_sharded(tiny_llama_dir)
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        merge_sharded(parts / "nowhere")
