"""`ebft doctor CONFIG --for CARD`: plans on the device without data are what real steps on the CPU measure."""

import contextlib
import io
import re
import warnings
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.guard import COMMON, LORA, METHODS, MeasureStep, inputs_of
from ebft import RunConfig, errors, train
from ebft.models.load import load_model_config
from ebft.models.pretrained import load_tokenizer
from ebft.run.training import arranged, run_rows
from ebft.tools.doctor import known
from ebft.tools.doctor import plan as planning
from ebft.tools.doctor.memory import changed
from ebft.tools.doctor.plan import BEFORE, STEP, Planner, Request, StepPlan, Use
from tests.doctor.test_doctor import doctor

__all__ = ["doctor"]
pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_acc") or not hasattr(torch._C._acc, "register_python_privateuseone_device_guard"),
    reason="this version of PyTorch has no backends that are written in Python",
)
AS_ON_CPU = {"ebft.single_pass": True, "ebft.merge_rollouts": True}  # as it is there by default
SHAPES = {  # of Llamas with 2 and 100 million weights
    "tiny": {},
    "medium": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "head_dim": 64},
}


@pytest.fixture(scope="module")
def planner():
    with Planner() as found:
        yield found


def config_of(name, folder, shape="tiny", **keys):
    """The config of a method of `benchmarks.guard` in `folder`, with four rows and a model of another shape."""
    transform, of_method = METHODS[name]
    inputs = inputs_of(transform, folder)
    if SHAPES[shape]:
        config = LlamaConfig.from_pretrained(folder / "base")
        for key, value in SHAPES[shape].items():
            setattr(config, key, value)
        config.num_attention_heads = config.hidden_size // config.head_dim
        config.num_key_value_heads = 4
        LlamaForCausalLM(config).save_pretrained(folder / "base")
    rows = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(rows[-4:]))
    return RunConfig.from_dict({**COMMON, "bf16": False, **of_method, **inputs, **keys})


def measured(config):
    """FLOPs and peak bytes of the third step, from PyTorch's counters."""
    step = MeasureStep()
    with contextlib.ExitStack() as during:
        during.enter_context(patch("ebft.run.trainer.ProgressBar", step))
        during.enter_context(patch("ebft.prefix.cpu._onednn_is_faster", lambda: False))
        during.enter_context(contextlib.redirect_stdout(io.StringIO()))
        during.enter_context(contextlib.redirect_stderr(io.StringIO()))
        during.enter_context(warnings.catch_warnings(action="ignore"))
        train(config)
    return step.cost


@pytest.mark.parametrize("name, shape", [
    ("SFT", "tiny"), ("strided LoRA", "tiny"), ("structured LoRA", "tiny"), ("DPO LoRA", "tiny"), ("strided", "medium"),
    ("structured LoRA", "medium"),
])  # fmt: skip
@pytest.mark.slow
def test_a_plan_is_what_a_real_step_measures(planner, tmp_path, name, shape):
    """Each phase runs the operations of the real step: within 15% of its peak, and within 6% of its FLOPs."""
    one_row = {"micro_batch_size": 1} if (name, shape) == ("strided", "medium") else {}  # which takes a minute
    config = config_of(name, tmp_path, shape, **one_row)
    config = changed(config, AS_ON_CPU if config.method.samples_blocks else {})
    tokenizer, model_config = load_tokenizer(config), load_model_config(config)
    rows, _ = arranged(config, run_rows(config, tokenizer), model_config)
    plan = planner(Request(config, model_config, rows=rows, tokenizer=tokenizer, on_gpu=False))
    assert not isinstance(plan, str), plan
    cost = measured(config)
    peak = max(use.peak for phase, use in plan.phases.items() if phase not in BEFORE)
    flops = sum(use.flops for phase, use in plan.phases.items() if phase not in BEFORE)
    print(f"{name}, {shape}: peak {peak / cost.peak_bytes:.3f}, FLOPs {flops / cost.flops:.3f} of what is measured")
    assert peak == pytest.approx(cost.peak_bytes, rel=0.15)
    assert flops == pytest.approx(cost.flops, rel=0.06)


@pytest.mark.slow
def test_what_stays_in_memory_depends_on_the_keys(planner, tmp_path):
    """Weights, gradients and states of a full model and of an adapter; quantised weights, 8-bit states."""
    full = config_of("SFT", tmp_path)
    request = Request(full, load_model_config(full))

    def plan(**keys):
        found = planner(replace(request, config=full.model_copy(update=keys)))
        assert not isinstance(found, str), found
        return found

    before, in_update = plan(), lambda found: found.phases["optimizer"].peak
    assert before.parameters == before.trained
    assert before.phases["model"].peak == pytest.approx(4 * before.parameters, rel=0.02)
    assert in_update(before) == pytest.approx(16 * before.trained, rel=0.05)  # weights, gradients, two states
    saved = in_update(before) - in_update(plan(optimizer="adamw_bnb_8bit"))
    assert saved == pytest.approx(6 * before.trained, rel=0.02)
    lora, quantised = plan(**LORA), plan(**LORA | {"adapter": "qlora", "load_in_4bit": True})
    assert lora.trained < lora.parameters / 5 and in_update(lora) < in_update(before) / 2
    assert quantised.phases["model"].peak < lora.phases["model"].peak and in_update(quantised) < in_update(lora)
    assert plan(sequence_len=512).total > 1.3 * before.total


@pytest.mark.slow
def test_adapters_are_folded_where_the_memory_of_the_card_allows(planner, tmp_path):
    """The weights of adapted layers are in memory twice while rollouts are sampled in float32, not in bfloat16."""
    config = config_of("strided LoRA", tmp_path, sequence_len=32, micro_batch_size=1, bf16=False)
    model_config, card = load_model_config(config), known.CARDS["h100"]
    requests = [planning._request(config, model_config, each) for each in (card, replace(card, memory=0.01))]
    folded, plain = (planner(request).phases["rollouts"] for request in requests)
    assert folded.kernels < plain.kernels
    layers = model_config.num_hidden_layers
    width, inner, heads = model_config.hidden_size, model_config.intermediate_size, model_config.head_dim
    attention = 2 * width * heads * (model_config.num_attention_heads + model_config.num_key_value_heads)
    weights = 4 * layers * (attention + 3 * width * inner)
    assert folded.peak - plain.peak == pytest.approx(weights, rel=0.1)
    rounded = config.model_copy(update={"bf16": True})
    same = [planning._request(rounded, model_config, each) for each in (card, replace(card, memory=24))]
    assert same[0] == same[1]


def write_config(folder, **keys):
    """A config of SFT whose data does not exist."""
    config = config_of("SFT", folder)
    data = [{"path": str(folder / "missing.jsonl"), "type": "chat_template"}]
    keys = {**COMMON, "base_model": config.base_model, "output_dir": str(folder / "out"), "datasets": data, **keys}
    (folder / "run.yaml").write_text(repr(keys))  # a mapping of YAML
    return folder / "run.yaml"


@pytest.mark.slow
def test_rollouts_are_as_long_as_the_config_allows(planner, tmp_path):
    """No sample ends early, though tokens that are read with numbers without values are 0."""
    config = config_of("structured LoRA", tmp_path)

    def kernels(length):
        trl = config.trl.model_copy(update={"max_completion_length": length})
        request = Request(config.model_copy(update={"trl": trl}), load_model_config(config))
        return planner(request).phases["rollouts"].kernels

    assert kernels(64) > 3 * kernels(16)


@pytest.mark.slow
def test_a_step_that_does_not_fit_lists_what_makes_it_fit(doctor, tmp_path):
    code, found = doctor(write_config(tmp_path), "--memory", "1.1GiB")
    message = found["ok", "changes"]
    assert code == 1 and "micro_batch_size: 2 with gradient_accumulation_steps: 2 (same step)" in message, found
    needed = float(re.search(r"with all of these it needs (\d+) MiB", message)[1])
    assert needed < 0.1 * 1024 < float(re.search(r"(\d+) MiB at the peak", found["error", "memory"])[1])
    assert list(found).index(("error", "memory")) < list(found).index(("ok", "changes"))


@pytest.mark.slow
def test_a_step_that_fits_has_a_floor_of_time(doctor, tmp_path):
    """The phases are in their order; what other kernels than sdpa save is not planned."""
    code, found = doctor(write_config(tmp_path, flex_attention=True), "--for", "H100")
    assert code == 0 and "h100 has room for 78.1 GiB. The step fits" in found["ok", "memory"], found
    assert "at least" in found["ok", "time"] and "kernels" in found["ok", "peak memory, loss and backward"]
    assert "flex_attention is planned as sdpa" in found["warning", "attention"]
    phases = [name for _, name in found if name.startswith("peak memory")]
    assert phases[-2:] == ["peak memory, loss and backward", "peak memory, optimizer"]


@pytest.mark.parametrize("total, level", [(0.91, "warning"), (0.89, "ok")])
def test_a_step_that_leaves_little_of_the_room_is_a_warning(tmp_path, total, level):
    """As without a card: more than 90% of the room may not fit with fragments or other rows."""
    config = config_of("SFT", tmp_path)
    peak = int(total * 78.1 * 2**30)
    use = Use(peak=peak, elsewhere=0, kernels=1.0, flops=1e12, moved=1e9, flops_elsewhere=0.0)
    with patch.object(planning, "Planner") as planner:
        planner.return_value.__enter__.return_value.return_value = StepPlan({STEP: use}, parameters=1, trained=1)
        found = {check.name: check for check in planning.planned(config, "h100", known.CARDS["h100"])}
    assert found["memory"].level == level and ("tight" in found["memory"].message) == (level == "warning")


@pytest.mark.parametrize("given, size", [("80GB", 80e9 / 2**30), ("80GiB", 80), ("80", 80), ("23.5 G", 23.5)])
def test_the_memory_of_a_card(given, size):
    """GB are 10^9 bytes, as vendors count, and GiB 2^30."""
    assert known.gpu_card(None, given)[1].memory == pytest.approx(size)
    assert known.gpu_card("h100", given)[1] == replace(known.CARDS["h100"], memory=pytest.approx(size))


@pytest.mark.parametrize("name, count", [
    ("meta-llama/Llama-3.2-1B", 1_235_814_400), ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
])  # fmt: skip
def test_known_shapes_have_the_weights_of_the_published_models(name, count):
    """The numbers that the Hub shows for the files of these models."""
    values = dict(known.KNOWN[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    assert model.num_parameters() == count


def test_shapes_of_models_that_cannot_be_reached(tmp_path, ebft):
    config = config_of("SFT", tmp_path).model_copy(update={"base_model": "meta-llama/Llama-3.2-1B-Instruct"})
    found, source = planning.model_config_of(config)
    assert (found.hidden_size, found.num_hidden_layers) == (2048, 16) and "known shape" in source
    with pytest.raises(errors.ModelError, match=r"whose shape is known: .*Qwen/Qwen3-4B"):
        planning.model_config_of(config.model_copy(update={"base_model": "nobody/has-this"}))
    path = write_config(tmp_path, base_model="nobody/has-this")
    result = ebft("doctor", path, "--for", "h100")
    assert result.exit_code == 1 and "1 errors, 0 warnings" in result.stdout
    (tmp_path / "base" / "config.json").write_text("{")
    [error] = planning.planned(config.model_copy(update={"base_model": str(tmp_path / "base")}), "h", None)
    assert error.level == "error" and "config.json" in error.message and "To plan without" not in error.message
    assert "add it, as in" in ebft("doctor", "--for", "h100").stderr
