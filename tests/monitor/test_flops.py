"""FLOPs as counted in training, against PyTorch's own counter over everything that a run executes."""

from math import prod

import pytest
import torch
import trl
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ebft.monitor.budget import FlopMeter
from ebft.transformers_internals import checkpointing_argument
from tests.monitor.sft_run import plain_trainer
from tests.strided.families import tiny_model
from tests.strided.test_trainer import make as make_strided
from tests.structured.conftest import chat_model, lora
from tests.structured.trainers import logged
from tests.structured.trainers import make as make_structured


def executed(run):
    """FLOPs of the products of linear layers; attention runs as products of batches, which are other operators."""
    # Large products run in oneDNN on some processors, whose operator PyTorch's counter does not know.
    onednn = torch.ops.mkldnn._linear_pointwise
    known = {onednn: lambda x, weight, *args, **kwargs: 2 * prod(x) * weight[0]}
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        run()
    counts = counter.get_flop_counts()["Global"]
    return sum(flops for op, flops in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm, onednn))


def check(trainer, rel=1e-3):
    wanted = executed(trainer.train)
    counts = logged(trainer, "budget/flops")
    assert counts[-1] == pytest.approx(wanted, rel=rel)
    assert counts == sorted(counts) and counts[0] > 0
    hooks = [hook for module in trainer.model.modules() for hook in module._forward_hooks.values()]
    assert not any(isinstance(getattr(hook, "__self__", None), FlopMeter) for hook in hooks)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("checkpointing", [None, False, pytest.param(True, marks=pytest.mark.slow)])
def test_plain(tmp_path, adapted, checkpointing, monkeypatch):
    monkeypatch.setattr("ebft.sft.trainer.check_chunks", lambda *args: None)  # runs before training
    model = lora(tiny_model("llama")) if adapted else tiny_model("llama")
    name = checkpointing_argument()
    given = {} if checkpointing is None else {f"{name}_kwargs": {"use_reentrant": checkpointing}}
    if adapted and checkpointing:
        model.enable_input_require_grads()
    check(plain_trainer(tmp_path, model, **{name: checkpointing is not None}, **given))


SINGLE = {"single_pass": True, "ce_coef": 0.1}
STRIDED = [SINGLE | {"single_pass": False}, {**SINGLE, "feature_layers": [0.25]}, {"rollout_tokens_per_pass": 120}]


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("options", [*STRIDED, {"gradient_checkpointing": True}], ids=str)
def test_strided(tmp_path, adapted, options):
    model = lora(tiny_model("llama")) if adapted else tiny_model("llama")
    check(make_strided(tmp_path, model, max_steps=2, **options))


def plain_head(hidden, weight, bias, labels, temperature, *rest):
    """What TRL's kernel computes, with products that PyTorch's counter sees."""

    def score(hidden, weight):
        logp = (hidden @ weight.T / temperature).log_softmax(-1)
        return logp.gather(-1, labels[:, None])[:, 0]

    logps = checkpoint(score, hidden, weight, use_reentrant=False)
    return logps, *[torch.zeros_like(logps)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("options", [{}, {"ce_coef": 0.3, "num_iterations": 2}, {"beta": 0.1}], ids=str)
@pytest.mark.parametrize("shared_prefix", [False, True])
def test_structured(chat_tokenizer, tmp_path, adapted, options, shared_prefix, monkeypatch):
    monkeypatch.setattr(trl.trainer.utils._ChunkedLogProbFunction, "apply", plain_head)
    monkeypatch.setattr(trl.trainer.utils, "_use_triton", lambda device: True)  # only what is scored, as on a GPU
    model = lora(chat_model(chat_tokenizer)) if adapted else chat_model(chat_tokenizer)
    if "beta" in options and not adapted:  # the reference model is loaded anew
        model.save_pretrained(tmp_path / "base")
        model = type(model).from_pretrained(tmp_path / "base")
    trainer = make_structured(model, chat_tokenizer, tmp_path, shared_prefix=shared_prefix, **options)
    assert trainer.shares_prompts == shared_prefix
    # With a frozen head TRL's logits for cross-entropy are a product of batches, which `executed` does not count.
    check(trainer, rel=0.02 if "ce_coef" in options and not shared_prefix else 1e-3)


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "llama4_text", "qwen3_moe"])
def test_layers_that_are_not_linear(family):
    """Layers that multiply in their own way: GPT-2's transposed ones, and experts in one tensor."""
    model = tiny_model(family, attn_implementation="eager")
    model.set_experts_implementation("eager") if family in ("mixtral", "qwen3_moe") else None
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    meter = FlopMeter()

    def step():
        with meter.watching([model]), meter.counting():
            model(input_ids=ids, labels=ids).loss.backward()

    with FlopCounterMode(display=False) as counter:
        step()
    heads = counter.get_flop_counts()["Global"]
    linear = sum(flops for op, flops in heads.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    stacked = heads.get(torch.ops.aten.bmm, 0) if family == "llama4_text" else 0
    # Routers and, among the batched products of llama4_text, attention are not counted: a few percent here.
    assert meter.flops == pytest.approx(linear + stacked, rel=0.12 if stacked else 0.05)
    assert meter.flops <= linear + stacked


def test_what_a_server_generates_is_counted_from_its_tokens(chat_tokenizer, tmp_path):
    """Prompt and completion through the decoder once for each sample, the head where a token was sampled."""
    model = lora(chat_model(chat_tokenizer))
    trainer = make_structured(model, chat_tokenizer, tmp_path)
    prompts, completions = [[5] * 7] * 4, [[6] * 3, [6] * 2, [6], [6] * 4]
    trainer.count_completions(prompts, completions, None)
    assert trainer.budget.meter.flops == 0  # generate() is watched
    trainer.use_vllm = True
    trainer.count_completions(prompts, completions, [[1] * 3, [1, 0], [1], [0] * 4])
    numbers = sum(weight.numel() for name, weight in model.named_parameters() if weight.dim() == 2)
    head, embedding = 64 * len(chat_tokenizer), 64 * len(chat_tokenizer)
    decoder = numbers - head - embedding
    assert trainer.budget.meter.flops == 2 * (decoder * (28 + 10) + head * 5)
    trainer.budget.gather(trainer.accelerator)
    assert trainer.budget.totals["documents"] == 2 and trainer.budget.totals["generated_tokens"] == 10 + 5


def test_counting_keeps_no_activation_that_checkpointing_releases():
    model, meter, inputs = tiny_model("llama").train(), FlopMeter(), []
    model.gradient_checkpointing_enable({"use_reentrant": False})
    keep = lambda _, given: inputs.append(torch.multiprocessing.reductions.StorageWeakRef(given[0].untyped_storage()))
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(keep)
    with meter.watching([model]), meter.counting():
        out = model(input_ids=torch.arange(3, 15)[None]).logits  # which keeps the graph
    assert out.requires_grad and inputs[0].expired()
