"""What is sampled is what the model would have sampled: frequencies, nuclei, greedy decoding, and the noise."""

import copy
import itertools

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ebft import StridedEBFTTrainer
from ebft.anchors import BlockOptions
from ebft.prefix import gpu
from ebft.prefix.forward import prepare
from ebft.prefix.sampling import Truncation, sample_tokens
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.passes import RolloutTree
from ebft.strided.rollout import DocumentNoise, sample_rollouts
from tests.devices.recording import PretendRecording, pretend_recordings
from tests.strided.families import tiny_model
from tests.strided.oracle import distribution, plain_logits
from tests.strided.test_exactness import ENDS, lora_targets, make_trainer, unequal_batch
from tests.structured.conftest import lora


@torch.no_grad()
def next_tokens(model, ids, temperature, top_p):
    """The probabilities of the token after `ids`, from a plain forward pass."""
    return distribution(plain_logits(model, ids)[-1], temperature, top_p).exp()


@pytest.mark.first(1)
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (0.6, 0.9), (1.0, 0.5)])
def test_frequencies_match_the_plain_model(temperature, top_p):
    model = tiny_model("llama", vocab_size=6).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 6, (2, 11), generator=generator)
    mask = torch.arange(11) < torch.tensor([11, 8])[:, None]
    plain = copy.deepcopy(model)
    documents = Documents.from_inputs({"input_ids": ids, "attention_mask": mask})
    layout = StridedLayout.place(documents, BlockOptions(4, 3, 2, 4000))
    torch.manual_seed(1)
    kept = Truncation.of(None, top_p, None)
    with torch.no_grad():
        tokens = sample_rollouts(prepare(model), documents, layout, temperature=temperature, truncation=kept).tokens
    assert layout.anchors == [[3, 7], [3]]
    for block, (row, anchor) in enumerate(((0, 3), (0, 7), (1, 3))):
        prefix = ids[row, :anchor]
        first = next_tokens(plain, prefix, temperature, top_p)
        after = [next_tokens(plain, torch.cat([prefix, torch.tensor([a])]), temperature, top_p) for a in range(6)]
        wanted = 4000 * first[:, None] * torch.stack(after)
        counts = torch.zeros(6, 6)
        for a, b in tokens[block].tolist():
            counts[a, b] += 1
        assert counts[wanted == 0].eq(0).all()  # nothing outside the nucleus
        seen = wanted >= 5
        statistic = ((counts - wanted)[seen] ** 2 / wanted[seen]).sum().item()
        freedom = int(seen.sum()) - 1
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_ids_beyond_the_tokenizer_are_not_sampled(tmp_path, temperature):
    """The tokenizer of this trainer has 8 of the model's tokens."""
    words = Tokenizer(WordLevel({str(n): n for n in range(8)}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1")
    args = make_trainer(tiny_model("llama"), tmp_path, temperature=temperature).args
    trainer = StridedEBFTTrainer(tiny_model("llama"), args=args, processing_class=tokenizer)
    out = trainer.compute_loss(trainer.model, unequal_batch()[0], return_outputs=True)[1]
    assert out.rollouts.max() < 8


def test_greedy_equals_generate(tmp_path):
    model = tiny_model("qwen3").eval()
    plain = copy.deepcopy(model)
    inputs, rows = unequal_batch()
    trainer = make_trainer(model, tmp_path, temperature=0.0, n_samples_per_prompt=2)
    out = trainer.compute_loss(trainer.model, inputs, return_outputs=True)[1]
    greedy = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    for r, (ids, _, _) in enumerate(rows):
        for b, anchor in enumerate(out.anchors[r][out.block_mask[r]].tolist()):
            expected = plain.generate(ids[None, :anchor], **greedy)[0, anchor:].tolist()
            length = int(out.lengths[r, 0, b])
            assert out.rollouts[r, 0, b].tolist() == out.rollouts[r, 1, b].tolist()
            assert out.rollouts[r, 0, b, :length].tolist() == expected[:length]
            assert length == next((t for t, token in enumerate(expected, 1) if token in ENDS), 4)


@pytest.mark.parametrize("vocabulary", [5, 512, 1300])
def test_tokens_without_probability_are_never_drawn(vocabulary):
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    noise = torch.tensor([[0.0, 0.25, 0.5, 0.75, 1 - 2**-24]])
    assert sample_tokens(probabilities, noise).tolist() == [[1, 1, 3, 3, 3]]
    # What is not a number is reported where the loss is, not by an index that does not exist.
    probabilities = torch.full((3, vocabulary), float("nan"))
    tokens = sample_tokens(probabilities, torch.tensor([[0.0], [0.4], [0.99]], dtype=torch.float64))
    assert tokens.shape == (3, 1) and tokens.min() >= 0 and tokens.max() < vocabulary


@pytest.mark.parametrize("vocabulary", [5, 512, 513, 1300])
def test_sampling_inverts_the_cumulative_sum(vocabulary):
    """Also of vocabularies of several groups of tokens, which the models of other tests do not have."""
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.randn(4, vocabulary, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    noise = torch.rand(4, 200, generator=generator, dtype=torch.float64)
    assert sample_tokens(probabilities, noise).equal(torch.searchsorted(probabilities.cumsum(-1), noise, right=True))


@pytest.mark.first(2)
@pytest.mark.usefixtures("without_parity_check")
@pytest.mark.parametrize(
    ("family", "recorded"), [("llama", True), ("mistral", False), ("gpt2", True), ("qwen3_5_text", False)]
)
@pytest.mark.parametrize("adapter", [True, False])
def test_a_recorded_step_is_the_step(family, recorded, adapter, tmp_path, monkeypatch):
    """Loss, gradients and counted FLOPs are the same, with rollouts in parts; windows and states are not recorded."""
    pretend_recordings(monkeypatch)
    monkeypatch.setattr(gpu, "is_accelerator", lambda device: True)
    monkeypatch.setattr(gpu, "_memory", lambda device: 2**30)
    found = []
    for graphs in (False, True):
        model = tiny_model(family, seed=5)
        model = lora(model, target_modules=lora_targets(family)) if adapter else model
        options = {"generate_max_len": 5, "rollout_tokens_per_pass": 75, "single_pass": False, "merge_rollouts": False}
        trainer = make_trainer(model, tmp_path, cuda_graphs=graphs, **options)
        with trainer.budget.meter.watching([model]), trainer.budget.meter.counting():
            loss, out = trainer.compute_loss(trainer.model, unequal_batch(2)[0], return_outputs=True)
            loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append((loss, out.rollouts, trainer.budget.meter.flops, *grads))
    torch.testing.assert_close(*found)
    assert PretendRecording.replays == 3 * PretendRecording.count and (PretendRecording.count > 1) == recorded


def documents_of(*rows):
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    documents = Documents.from_inputs({"input_ids": ids, "attention_mask": mask})
    return documents, StridedLayout.place(documents, BlockOptions(2, 2, 2, 3))


def test_noise_follows_the_document_not_the_batch():
    """A document draws the same noise alone, beside a longer one, and in the other order; and fresh noise when due."""
    short, long, noise = list(range(6)), list(range(3, 14)), DocumentNoise(0)
    together = DocumentNoise(0).draw(*documents_of(short, long), step=4)
    swapped = DocumentNoise(0).draw(*documents_of(long, short), step=4)
    alone, again, later = (noise.draw(*documents_of(short), step=step) for step in (4, 4, 5))
    other = DocumentNoise(1).draw(*documents_of(short), step=4)
    blocks = len(alone)
    assert together[:blocks].equal(alone) and swapped[-blocks:].equal(alone)
    assert together[blocks:].equal(swapped[:-blocks])
    drawn = [alone, again, later, other, *DocumentNoise(0).draw(*documents_of(long, long), step=4).chunk(2)]
    assert not any(a.equal(b) for a, b in itertools.combinations(drawn, 2))


@pytest.mark.parametrize(("temperature", "top_p"), [(0.5, 1.0), (1.0, 1.0), (0.5, 0.6), (1.0, 0.9)])
def test_entropy_of_each_sampled_distribution(temperature, top_p):
    """In nats, of the tempered and truncated distribution, also where a model rules out tokens with minus infinity."""
    model = prepare(tiny_model("llama", vocab_size=6).eval())
    plain = copy.deepcopy(model)
    model.lm_head.register_forward_hook(lambda module, args, out: out.index_fill(-1, torch.tensor([2]), float("-inf")))
    documents, layout = documents_of([1, 3, 4, 5, 1, 3, 4])
    with torch.no_grad():
        kept = Truncation.of(None, top_p, None)
        drawn = sample_rollouts(model, documents, layout, temperature=temperature, truncation=kept)
        for b, anchor in enumerate(layout.anchors[0]):
            logits = plain_logits(plain, documents.tokens[:anchor])[-1]
            logits[2] = float("-inf")
            logps = distribution(logits, temperature, top_p)
            expected = -(logps.exp() * logps.clamp_min(-1e9)).sum()
            torch.testing.assert_close(drawn.entropy[b, :, 0], expected.expand(3), atol=1e-4, rtol=1e-4)
    assert drawn.tokens.ne(2).all()


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_every_rollout_is_a_path_of_its_tree(merge, steps):
    """Beside a naive dictionary of beginnings."""
    generator = torch.Generator().manual_seed(steps)
    rollouts = torch.tensor([0, 7, 2**31 + 5])[torch.randint(3, (5, 4, steps), generator=generator)]
    tree = RolloutTree(5, 4, merge, rollouts.device)
    for of_step in rollouts.unbind(-1):
        draws = tree.draws()
        assert draws.collect(draws.spread(of_step.flatten())).equal(of_step.flatten())
        tree.grow(of_step.flatten())
    if steps:
        draws, drawn = tree.all_draws(), rollouts.movedim(-1, 0).flatten()
        assert draws.collect(draws.spread(drawn)).equal(drawn)
        # From the blocks and all nodes but the last.
        assert draws.shape[0] == 5 + sum(len(level.tokens) for level in tree.levels[:-1])
    nodes = tree.nodes(steps)
    assert nodes.block[nodes.by_block].equal(nodes.block.sort().values)
    assert nodes.by_block[nodes.rank].equal(torch.arange(len(nodes.tokens)))
    beginnings = {}
    for block, sample, step in itertools.product(range(5), range(4), range(steps)):
        node = nodes.of_rollouts[block, sample, step].item()
        beginning = tuple(rollouts[block, sample, : step + 1].tolist())
        assert (nodes.block[node], nodes.step[node]) == (block, step)
        assert tuple(nodes.tokens[nodes.path[node, : step + 1]].tolist()) == beginning
        assert nodes.path[node, step:].eq(node).all()
        key = (block, beginning) if merge else (block, sample, beginning)
        assert beginnings.setdefault(key, node) == node
    assert sorted(beginnings.values()) == list(range(len(nodes.tokens)))
    assert not (merge and steps == 4) or len(nodes.tokens) < 5 * 4 * 4
