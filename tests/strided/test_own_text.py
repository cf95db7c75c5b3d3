"""A model trained on its own text stays as it is: the expected gradient of the reward is zero, also on end tokens. With
as much weight on diversity as on alignment, the expected reward of a sample does not depend on it if the reference has
the policy's own distribution. The texts of these tests are sampled from the model by a plain loop."""

import copy
import itertools

import pytest
import torch

from ebft import anchors, features, strided
from ebft.data.documents import DocumentCollator
from ebft.prefix.forward import prepare
from ebft.rewards import alignment_rewards, compute_advantages, diversity_rewards
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.loss import embed_blocks, score
from tests.strided.families import tiny_model

END, USER, LONGEST = 2, 3, 16


def small_model(vocabulary=6, seed=0):
    """A model with a bias on the logits, whose gradient says what is learned of each token."""
    model = tiny_model("gptj", seed=seed, vocab_size=vocabulary, n_embd=16, n_layer=1, n_head=2, pad_token_id=None)
    model.generation_config.eos_token_id = END
    return model


@torch.no_grad()
def continued(model, rows, generator, longest):
    """Rows of token ids, each continued by the model up to its end token, or to `longest` tokens."""
    rows = [list(row) for row in rows]
    going = set(range(len(rows)))
    while going := {number for number in going if len(rows[number]) < longest and (rows[number][-1] != END)}:
        by_length = {}
        for number in going:
            by_length.setdefault(len(rows[number]), []).append(number)
        for numbers in by_length.values():
            logits = model(input_ids=torch.tensor([rows[n] for n in numbers]), use_cache=False).logits[:, -1]
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            for number, token in zip(numbers, drawn.squeeze(1).tolist()):
                rows[number].append(token)
    return rows


def texts(model, count, generator):
    return [{"input_ids": ids} for ids in continued(model, [[1]] * count, generator, LONGEST)]


def answers(model, count, generator):
    """Prompts of different lengths."""
    prompts = [[1, *[USER] * (number % 3), 4] for number in range(count)]
    rows = continued(model, prompts, generator, LONGEST)
    return [{"input_ids": ids, "prompt_length": len(prompt)} for ids, prompt in zip(rows, prompts)]


def chats(model, count, generator):
    """Two replies, each after a question; a chat whose first reply is cut has no second one."""
    asked = [[1, USER, 4]] * count
    first = continued(model, asked, generator, LONGEST)
    again = [ids + [USER] * (1 + number % 2) + [5] if ids[-1] == END else ids for number, ids in enumerate(first)]
    second = continued(model, again, generator, LONGEST)
    rows = []
    for before, context, ids in zip(first, again, second):
        spans = [[3, len(before)], [len(context), len(ids)]]
        rows.append({"input_ids": ids, "prompt_length": 3, "turn_spans": [s for s in spans if s[0] < s[1]]})
    return rows


def deviations(tmp_path, rows_of, batches, rows, **options):
    """The mean gradient in standard errors: of the bias of each token, and of random directions of all weights."""
    model = small_model()
    frozen, generator = copy.deepcopy(model).eval(), torch.Generator().manual_seed(0)
    settings = {"stride": 3, "context_length": 1, "generate_max_len": 4, "n_samples_per_prompt": 4, "temperature": 1.0,
                "feature_layers": [0.0, 1.0], "embed_method": "mean_pooling", "max_length": LONGEST}  # fmt: skip
    settings |= options
    args = strided.StridedEBFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], **settings)
    trainer = strided.StridedEBFTTrainer(model=model, args=args)
    names = [name for name, _ in model.named_parameters()]
    biases, directions = [], []
    for batch in range(batches):
        args.seed = batch  # of the noise
        inputs = DocumentCollator(0)(rows_of(frozen, rows, generator))
        model.zero_grad()
        loss, output = trainer.compute_loss(model, inputs, return_outputs=True)
        (loss * output.lengths.sum()).backward()  # the sum: a mean over a random number of tokens has a bias
        gradients = dict(zip(names, (parameter.grad for parameter in model.parameters())))
        biases.append(gradients["lm_head.bias"].double())
        flat = torch.cat([gradient.flatten() for gradient in gradients.values()]).double()
        mixing = torch.randn(20, len(flat), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        directions.append(mixing @ flat)
    return [torch.stack(each).mean(0) / (torch.stack(each).std(0) / batches**0.5) for each in (biases, directions)]


@pytest.mark.slow
@pytest.mark.usefixtures("without_parity_check")
@pytest.mark.parametrize(("rows_of", "options"), [
    (chats, {"embed_method": "last_token"}), (texts, {}), (answers, {"n_samples_per_prompt": 2}),
    (answers, {"advantage_estimator": "reinforce"})])  # fmt: skip
def test_the_expected_gradient_is_zero(rows_of, options, tmp_path):
    bias, directions = deviations(tmp_path, rows_of, 12, 96, **options)
    assert bias.abs().max() < 4 and directions.square().mean() < 4, (bias, directions)


@pytest.mark.slow
@pytest.mark.usefixtures("without_parity_check")
def test_blocks_of_the_texts_that_go_on_teach_not_to_end(tmp_path):
    """Which shows that the test above would find it."""
    bias, _ = deviations(tmp_path, answers, 6, 96, stop_at_end=False)
    assert bias[END] > 6  # descending it makes ends less likely


@pytest.mark.parametrize("samples", [2, 3])
def test_the_mean_of_the_estimator_is_the_gradient_of_the_loss(samples):
    """By enumeration of the seven texts of up to two tokens that a vocabulary of three has."""
    model = small_model(vocabulary=3)
    network = features.FeatureNetwork(model, [0.0, 1.0], "mean_pooling")
    prepare(model)
    possible = torch.tensor([[END, END], [0, END], [1, END], [0, 0], [0, 1], [1, 0], [1, 1]])
    rows = {"input_ids": torch.tensor([[1, 0, 1, 0, END, END, END], [1, 1, 0, 1, 1, 0, 1]])}
    rows["attention_mask"] = torch.tensor([[1] * 5 + [0] * 2, [1] * 7])
    documents = Documents.from_inputs(rows)
    options = anchors.BlockOptions(3, 1, 2, len(possible), end_ids=(END,))
    layout = StridedLayout.place(documents, options)
    assert layout.anchors == [[1, 4], [1, 4]]  # the second of the first text has a reference of one token
    every = possible.expand(layout.num_blocks, -1, -1)
    logps, _ = score(model, documents, layout, every, temperature=1.0, text_gradient=False, apply_dropout=False)
    logps = logps.sum(-1)  # (M, 7)
    torch.testing.assert_close(logps.exp().sum(-1), torch.ones(layout.num_blocks), msg="all that can be sampled")
    phi, phi_ref = embed_blocks(network, documents, layout, every)
    loss = (torch.einsum("mk,mkd->md", logps.exp(), phi) - phi_ref).square().sum()

    draws = torch.tensor(list(itertools.product(range(7), repeat=samples)))  # (K, n)
    chances = logps.detach()[:, draws].sum(-1).exp()  # (M, K)
    phi = phi[:, draws]
    diversity = diversity_rewards(phi)
    rewards = alignment_rewards(phi, phi_ref[:, None].expand(-1, len(draws), -1)) - diversity
    advantages = compute_advantages(rewards, "rloo", diversity=diversity)
    estimate = -(chances[..., None] * advantages * logps[:, draws]).sum() / samples
    weights = list(model.parameters())
    exact = torch.autograd.grad(loss, weights, retain_graph=True)
    for ours, theirs in zip(torch.autograd.grad(estimate, weights), exact):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert sum(gradient.abs().sum() for gradient in exact) > 0.1
