"""The nine configs of the guide and our own examples load as they are, with the warnings they deserve."""

from pathlib import Path

import pytest

from ebft.run.checks import check_runnable
from ebft.run.config.schema import load_config
from tests.config.conftest import warned

HERE = Path(__file__).parent
GUIDE = sorted((HERE / "configs").glob("*.yaml"))
FOLDER = HERE.parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))
SERVE_MODULE = ["vllm.serve_module has no effect"]
WARNINGS = {
    "llama-3b-strided": ["torch_compile: true is set to false in strided mode"],
    **dict.fromkeys(("qwen35-9b-structured", "qwen35-4b-structured-async"), SERVE_MODULE),
}
STRIDED = {"llama-1b-strided", "llama-1b-strided-structured", "llama-3b-strided", "llama-8b-strided-fft"}


def load(path):
    return warned(load_config, path=path)


def test_configs_of_the_guide_load_unmodified():
    assert len(GUIDE) == 9
    for path in GUIDE:
        config, messages = load(path)
        starts = WARNINGS.get(path.stem, [])
        assert all(message.startswith(start) for message, start in zip(messages, starts, strict=True))
        assert config.rl == "ebft" and (config.method.name == "strided mode") == (path.stem in STRIDED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_loads_without_a_warning_and_trains_all_weights_in_float32(path):
    config, messages = load(path)
    assert messages == [] and (config.adapter is not None or config.torch_dtype == "float32")


def test_the_paper_recipe_with_lora_is_the_full_one_but_for_the_adapter():
    full, lora = (load(FOLDER / f"paper_{kind}.yaml")[0].model_dump() for kind in ("full", "lora"))
    different = {key for key in full if full[key] != lora[key]}
    adapter = {"adapter", "lora_r", "lora_alpha", "lora_target_linear"}
    assert different - adapter == {"torch_dtype", "learning_rate", "output_dir"}
    full, _ = load(FOLDER / "paper_full.yaml")
    assert full.learning_rate == 1e-6
    assert (full.lr_scheduler, full.warmup_ratio) == ("constant_with_warmup", 0.03)
    assert full.micro_batch_size * full.gradient_accumulation_steps * full.ebft.n_samples_per_prompt == 64


@pytest.mark.parametrize("path", [path for path in GUIDE if path.stem not in STRIDED], ids=lambda path: path.stem)
def test_a_structured_config_of_the_guide_can_be_trained(path, tmp_path):
    config, _ = load(path)
    config.output_dir = str(tmp_path)
    config.report_to, config.wandb_project, config.use_tensorboard = None, None, False
    check_runnable(config)
    kwargs = config.method.own_arguments(config)
    assert (kwargs["num_generations"], kwargs["loss_type"], kwargs["epsilon"]) == (4, "grpo", 0.2)
    assert kwargs["use_vllm"] == ("novllm" not in path.stem)
    assert kwargs["async_prefetch"] == ("async" in path.stem)


@pytest.mark.parametrize("path", sorted((HERE / "configs" / "moe").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_of_a_mixture_of_experts_loads_unmodified(path):
    config, messages = load(path)
    assert config.load_in_4bit and config.quantize_moe_experts and config.experts_implementation is None
    asked = path.read_text(encoding="utf-8")
    assert any(message.startswith("cut_cross_entropy: True") for message in messages) == ("use_cut_cross" in asked)
    assert any(text.startswith("experts_implementation: scattermoe") for text in messages) == ("n: scatter" in asked)
