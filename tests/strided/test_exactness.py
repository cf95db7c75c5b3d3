"""Every field of StridedOutput, and the gradient of the loss, against the naive oracle."""

import copy
import itertools
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from ebft.errors import ModelError
from ebft.prefix import gpu
from ebft.prefix.attention import passes, tiles
from ebft.strided import StridedEBFTConfig, StridedEBFTTrainer
from tests.strided.families import COUNTS_PADDING, FAMILIES, RUNNING_STATE, VOCAB, lora_targets, tiny_model
from tests.strided.oracle import options_of, oracle_step
from tests.structured.conftest import lora

BASE = {"stride": 5, "context_length": 4, "generate_max_len": 4, "n_samples_per_prompt": 3, "min_completion_prefix": 2}
BASE |= {"temperature": 0.7, "feature_layers": [0.0, 0.5, 0.75], "ce_coef": 0.3, "use_whitening": False}
# Many, so that rollouts and references often end within a block.
ENDS = [2, 5, 11, 17, 23, 31, 41, 53, 67, 83]


def make_trainer(model, tmp_path, **changes):
    (model.get_base_model() if isinstance(model, PeftModel) else model).generation_config.eos_token_id = ENDS
    args = StridedEBFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], seed=3, **{**BASE, **changes})
    return StridedEBFTTrainer(model=model, args=args)


def unequal_batch(seed=0):
    """Right-padded rows of a text that is cut, a prompt and a completion that ends, and a short text that ends."""
    generator = torch.Generator().manual_seed(seed)
    lengths, prompts = [27, 22, 13], [0, 7, 0]
    input_ids = torch.randint(3, VOCAB, (3, 27), generator=generator)
    input_ids[[0, 1, 2], [26, 21, 12]] = torch.tensor([4, 5, 11])
    mask = torch.arange(27) < torch.tensor(lengths)[:, None]
    labels = input_ids.masked_fill(~mask, -100)
    labels[1, :7] = -100
    rows = [(ids[:length], p, range(max(p, 1), length)) for ids, length, p in zip(input_ids, lengths, prompts)]
    inputs = {"input_ids": input_ids, "attention_mask": mask.long(), "labels": labels}
    return {**inputs, "prompt_length": torch.tensor(prompts)}, rows


TURNS = {"stride": 3}


def chat_batch(seed=0):
    """Rows with several turns, adjacent, too short for a block and before the end; one with a prompt; a text."""
    generator = torch.Generator().manual_seed(seed)
    lengths, prompts = [31, 22, 26, 13], [19, 7, 18, 0]
    turns = [[(3, 11), (14, 17), (19, 31)], [], [(2, 9), (9, 15), (18, 24)], []]
    masked = [{4, 5, 20}, {0, 1, 2, 3, 4, 5, 6, 9}, {10}, set()]  # labels outside of turns are not trained on either
    input_ids = torch.randint(3, VOCAB, (4, 31), generator=generator)
    # Turns that end with an end token, with one and another token after it, and without one; a text that ends.
    input_ids[[0, 0, 0, 2, 2, 2, 3], [10, 16, 30, 8, 13, 14, 12]] = torch.tensor([5, 4, 11, 6, 17, 7, 23])
    mask = torch.arange(31) < torch.tensor(lengths)[:, None]
    labels, rows = input_ids.masked_fill(~mask, -100), []
    for r, length in enumerate(lengths):
        labels[r, list(masked[r])] = -100
        inside = [i for start, end in turns[r] or [(max(prompts[r], 1), length)] for i in range(start, end)]
        rows.append((input_ids[r, :length], turns[r] or prompts[r], [i for i in inside if i not in masked[r]]))
    inputs = {"input_ids": input_ids, "attention_mask": mask.long(), "labels": labels}
    inputs["prompt_length"] = torch.tensor(prompts)
    inputs["turn_spans"] = torch.tensor([own + [(0, 0)] * (3 - len(own)) for own in turns])
    return inputs, rows


def switched_by_flags(model):
    """Let `disable_adapter` only set the flags of layers: PEFT's goes through all modules for every sequence."""
    layers = [part for part in model.modules() if isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper))]

    @contextmanager
    def disable_adapter():
        for layer in layers:
            layer._disable_adapters = True
        yield
        for layer in layers:
            layer._disable_adapters = False

    model.disable_adapter = disable_adapter


def exact(tmp_path, model, batch, grads=True, **changes):
    """Compare a step of a trainer with these settings with the oracle; see `compare`."""
    plain = copy.deepcopy(model)
    if isinstance(plain, PeftModel):
        switched_by_flags(plain)
    if plain.config._attn_implementation == "flex_attention":
        plain.config._attn_implementation = "eager"
    trainer = make_trainer(model, tmp_path, **changes)
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    return compare(trainer, plain, *batch, grads)


def checkpointing(use_reentrant):
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}


def distinct_beginnings(out, steps):
    """Beginnings of up to `steps` tokens that the rollouts of a block have."""
    return len({
        (row, block, tuple(out.rollouts[row, sample, block, :length].tolist()))
        for row, block in out.block_mask.nonzero().tolist()
        for sample in range(out.rollouts.shape[1])
        for length in range(1, steps + 1)
    })  # fmt: skip


def compare(trainer, plain, inputs, rows, grads=True):
    trainer.model.train()
    plain.eval()
    loss, out = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
    options = options_of(trainer.args, ENDS)
    # A copy of the policy that no strided code has touched; features come from the frozen base.
    expected = oracle_step(plain, rows, out.rollouts, options)
    blocks = [len(a) for a in expected.anchors]
    assert out.block_mask.sum(1).tolist() == blocks
    for r, anchors in enumerate(expected.anchors):
        assert out.anchors[r, : blocks[r]].tolist() == anchors
        assert out.anchors[r, blocks[r] :].eq(0).all()
        for b in range(blocks[r]):
            for j in range(options.n_samples_per_prompt):
                logps, length = expected.logps[r, b, j].detach(), int(out.lengths[r, j, b])
                assert length == len(logps)
                torch.testing.assert_close(out.logps[r, j, b, :length], logps, atol=1e-4, rtol=0)
                assert out.logps[r, j, b, length:].eq(0).all()
                assert out.rollouts[r, j, b, length:].eq(out.rollouts[r, j, b, length - 1]).all()
            for name in ("alignment", "diversity", "rewards", "advantages"):
                ours, theirs = getattr(out, name)[r, :, b], getattr(expected, name)[r, b].float()
                torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(out.cfm[r, b], expected.cfm[r, b].float(), atol=1e-3, rtol=1e-3)
        for name in ("rollouts", "logps", "alignment", "diversity", "rewards", "advantages"):
            assert getattr(out, name)[r, :, blocks[r] :].eq(0).all()
        assert out.cfm[r, blocks[r] :].eq(0).all()
    for name in ("rl_loss", "ce_loss", "loss"):
        torch.testing.assert_close(getattr(out, name), getattr(expected, name).detach(), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(loss.detach(), out.loss)
    if grads:
        loss.backward()
        expected.loss.backward()
        compare_gradients(trainer.model, plain)
    return out


def compare_gradients(model, plain):
    ours = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    theirs = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    scale = torch.cat([g.flatten() for g in theirs.values() if g is not None]).norm()
    assert scale > 1e-3
    total = 0.0
    for name, expected in theirs.items():
        if expected is None:
            assert ours[name] is None or ours[name].norm() < 1e-6 * scale, name
            continue
        total += (ours[name] - expected).square().sum()
        assert (ours[name] - expected).norm() <= 1e-3 * max(expected.norm(), 0.02 * scale), name
    assert total.sqrt() <= 1e-3 * scale


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *RUNNING_STATE, *COUNTS_PADDING])
def test_family_with_lora(family, tmp_path):
    exact(tmp_path, lora(tiny_model(family), target_modules=lora_targets(family)), unequal_batch())


@pytest.mark.first(3)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt2", "gemma3_text", "bloom", "gpt_neo", "phimoe",
                                    "qwen3_5_text"])  # fmt: skip
def test_family_full_fine_tuning(family, tmp_path):
    exact(tmp_path, tiny_model(family), unequal_batch(1))


@pytest.mark.slow
def test_adjacent_blocks_of_running_states_are_refused(tmp_path):
    with pytest.raises(ModelError, match="ebft.stride: 1 is not supported"):
        exact(tmp_path, tiny_model("qwen3_5_text"), unequal_batch(1), stride=1)


@pytest.mark.first(2)
@pytest.mark.parametrize("family", ["bloom", "gptj", "stablelm", "falcon", "llama4_text", "nemotron_h"])
@pytest.mark.parametrize("use_reentrant", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_attention_outside_the_interface_is_recomputed(family, use_reentrant, tmp_path):
    """Layers that receive the pass with their mask: in backward too, after the call of the model has returned."""
    model = lora(tiny_model(family), target_modules=lora_targets(family))
    exact(tmp_path, model, unequal_batch(4), **checkpointing(use_reentrant))


REWARDS = {
    "whitening": {"use_whitening": True},
    "whitening in sample space": {"use_whitening": True, "whitening_space": "sample"},
    "two samples": {"n_samples_per_prompt": 2, "use_whitening": True},
    "five samples, half diversity": {"n_samples_per_prompt": 5, "diversity_coef": 0.5, "alignment_coef": 2.0},
    "mean baseline": {"rloo_baseline": "mean"},
    "group norm": {"advantage_estimator": "group_norm"},
    "reinforce": {"advantage_estimator": "reinforce", "rl_coef": 0.5},
    "one sample": {"n_samples_per_prompt": 1, "advantage_estimator": "reinforce", "diversity_coef": 0.0},
    "one sample, whitening": {"n_samples_per_prompt": 1, "use_whitening": True},
    "mean pooling": {"embed_method": "mean_pooling"},
    "completion mean": {"embed_method": "completion_mean"},
    "concat": {"embed_method": "concat", "generate_max_len": 6},
    "last layer": {"feature_layers": [1.0, 0.4]},
    "embedding only": {"feature_layers": [0.0]},
}
PASSES = {
    "one token": {"generate_max_len": 1},
    "stride beyond the block": {"stride": 9, "generate_max_len": 2},
    "stride one": {"stride": 1, "generate_max_len": 3, "n_samples_per_prompt": 2},
    "long context": {"context_length": 10},
    "no ends": {"stop_at_end": False, "stride": 3},
    "cut near an end": {"max_length": 24, "stride": 3},
    "no cross-entropy": {"ce_coef": 0.0},
    "no policy gradient": {"rl_coef": 0.0},
    "nucleus": {"top_p": 0.8},
    "small nucleus, many samples": {"top_p": 0.3, "n_samples_per_prompt": 5, "temperature": 1.0},
    "two samples of a nucleus": {"top_p": 0.6, "n_samples_per_prompt": 2},
    "nucleus in a second forward": {"top_p": 0.8, "single_pass": False},
    "nucleus of passes and reentrant checkpointing": {
        "top_p": 0.6, "rollout_tokens_per_pass": 24, **checkpointing(True)},
    "greedy with top_p": {"top_p": 0.5, "temperature": 0.0, "n_samples_per_prompt": 2},
    "temperature one": {"temperature": 1.0},
    "reentrant checkpointing": checkpointing(True),
    "non-reentrant checkpointing": checkpointing(False),
    "second forward": {"single_pass": False},
    "one block in a pass": {"rollout_tokens_per_pass": 1},
    "five blocks in a pass": {"rollout_tokens_per_pass": 60},
    "passes and reentrant checkpointing": {"rollout_tokens_per_pass": 24, **checkpointing(True)},
    "passes and non-reentrant checkpointing": {"rollout_tokens_per_pass": 24, **checkpointing(False)},
}  # fmt: skip
OPTIONS = REWARDS | PASSES
CASES = [*((name, True) for name in OPTIONS), *((name, False) for name in PASSES)]


@pytest.mark.first(8)
@pytest.mark.usefixtures("without_parity_check")
@pytest.mark.parametrize(("name", "adapter"), CASES)
def test_option(name, adapter, tmp_path):
    model = tiny_model("llama", seed=5)
    exact(tmp_path, lora(model) if adapter else model, unequal_batch(2), **OPTIONS[name])


@pytest.mark.first(2)
@pytest.mark.usefixtures("without_parity_check")
@pytest.mark.parametrize("name", [
    "concat", "five blocks in a pass", "whitening", "group norm", "second forward", "one block in a pass",
    "passes and reentrant checkpointing", "stride one", "long context"])  # fmt: skip
def test_turns(name, tmp_path):
    exact(tmp_path, lora(tiny_model("llama", seed=5)), chat_batch(2), **{**TURNS, **OPTIONS[name]})


@pytest.mark.first(2)
@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_oss"])
def test_turns_with_full_fine_tuning(family, tmp_path):
    out = exact(tmp_path, tiny_model(family, seed=5), chat_batch(3), **TURNS)
    anchors = [row[mask].tolist() for row, mask in zip(out.anchors, out.block_mask)]
    # Written out by hand; without ends they would stop at 27, 18, 20 and 7.
    assert anchors == [[5, 8, 21, 24, 27, 30], [9, 12, 15, 18], [4, 11, 20], [4, 7, 10]]


FEW = ["second forward", "five blocks in a pass", "passes and reentrant checkpointing"]
SAME = itertools.product(FEW, ["llama", "gemma2", "gpt_oss", "gpt2", "bloom"])


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "family", "adapter"), [(*case, number % 2 == 0) for number, case in enumerate(SAME)])
def test_rollouts_that_begin_with_the_same_tokens(name, family, adapter, tmp_path):
    """At a low temperature many do. The oracle computes every rollout by itself."""
    model = tiny_model(family, seed=5)
    changes = {**OPTIONS[name], "temperature": 0.2, "n_samples_per_prompt": 5, "generate_max_len": 5}
    out = exact(tmp_path, lora(model) if adapter else model, unequal_batch(2), **changes)
    assert distinct_beginnings(out, 5) < 0.9 * int(out.block_mask.sum()) * 5 * 5


def test_a_step_leaves_the_model_as_it_was_and_no_graph_but_its_loss(tmp_path):
    model = tiny_model("gemma2").eval()
    ids = torch.randint(3, VOCAB, (2, 20))
    before = model(input_ids=ids).logits
    trainer = make_trainer(model, tmp_path)
    trainer.model.train()
    out = trainer.compute_loss(trainer.model, unequal_batch()[0], return_outputs=True)[1]
    assert model.config._attn_implementation == "eager" and all(m.training for m in trainer.model.modules())
    assert not any(value.requires_grad for value in vars(out).values())
    torch.testing.assert_close(trainer.model.eval()(input_ids=ids).logits, before, atol=0, rtol=0)


def test_dropout_is_off_by_default_and_said(tmp_path):
    config = LoraConfig(r=4, lora_dropout=0.2, target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.warns(UserWarning, match="lora_dropout: 0.2 is not applied"):
        exact(tmp_path, get_peft_model(tiny_model("gpt2"), config), unequal_batch(), grads=False)


def test_dropout_acts_when_asked_for(tmp_path):
    outputs = []
    for disable in (True, False):
        trainer = make_trainer(tiny_model("gpt2"), tmp_path, disable_dropout=disable)
        trainer.model.train()
        outputs.append(trainer.compute_loss(trainer.model, unequal_batch()[0], return_outputs=True)[1])
    assert outputs[0].rollouts.equal(outputs[1].rollouts)
    torch.testing.assert_close(outputs[0].rewards, outputs[1].rewards)
    assert (outputs[0].logps - outputs[1].logps).abs().max() > 1e-3


def test_bfloat16_stays_near_float32(tmp_path):
    """bf16 rounding only: as near to a float32 copy as the plain model in bf16 is, on the same rollouts."""
    model = tiny_model("llama").to(torch.bfloat16)
    half, plain = copy.deepcopy(model).eval(), copy.deepcopy(model).float()
    trainer = make_trainer(model, tmp_path)
    inputs, rows = unequal_batch()
    loss, out = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
    loss.backward()
    options = options_of(trainer.args, ENDS)
    expected = oracle_step(plain.eval(), rows, out.rollouts, options)
    rounded = oracle_step(half, rows, out.rollouts, options)
    ours = torch.cat([out.logps[r, j, b, : len(logps)] - logps for (r, b, j), logps in expected.logps.items()]).abs()
    plain_bf16 = torch.cat([rounded.logps[key] - logps for key, logps in expected.logps.items()]).abs()
    assert 0 < ours.mean() < 1.5 * plain_bf16.mean() and ours.max() < 2 * plain_bf16.max()
    assert out.logps.dtype == torch.float32
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.first(3)
@pytest.mark.usefixtures("without_parity_check")
@pytest.mark.parametrize(("family", "adapter"), [
    ("llama", True), ("llama", False), ("mistral", False), ("qwen3", True), ("gemma2", True), ("gpt_oss", False),
    ("bloom", False), ("llama4_text", True)])  # fmt: skip
@pytest.mark.parametrize("rows, at_once", [(4096, 0), (40, 0), (40, 2**26)], ids=["one tile", "tiles", "at once"])
def test_branches_of_accelerators(family, adapter, rows, at_once, tmp_path, monkeypatch):
    """What saves kernels, on CPU: fused layers, folded adapters, and all documents at once or in tiles of their own."""
    monkeypatch.setattr(gpu, "is_accelerator", lambda device: True)
    monkeypatch.setattr(gpu, "_memory", lambda device: 2**30)
    monkeypatch.setattr("ebft.prefix.logps.LOGITS_PER_CHUNK", {"cpu": 1})
    monkeypatch.setitem(passes._ROWS_PER_TILE, "cpu", rows)
    [monkeypatch.setitem(limits, "cpu", at_once) for limits in (tiles.MOST_SCORES, passes.MOST_PADDING)]
    model = tiny_model(family, seed=5)
    model = lora(model, target_modules=lora_targets(family)) if adapter else model
    exact(tmp_path, model, unequal_batch(2), single_pass=False, merge_rollouts=False)
