"""What `ebft evaluate` should find, by plain forward passes of one short sequence each. Imports nothing of ebft."""

import json

import torch


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def nll(model, ids):
    """Negative log-likelihood of tokens 1.. of one sequence: (L - 1,)."""
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return -logp.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)


def cross_entropy(model, sequences):
    """Mean NLL over the tokens from `start` on (never the first) of (ids, start) sequences."""
    parts = [nll(model, ids)[max(start, 1) - 1 :] for ids, start in sequences]
    return torch.cat(parts).mean().item()


def feature(base, ids, start, fractions=(0.25, 0.5, 0.75)):
    """The last token's feature, one layer after the other normalised."""
    with torch.no_grad():
        states = base(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    depth = len(states) - 1
    parts = [states[int(f * depth)][0, -1].double() for f in fractions]
    joined = torch.cat([part / part.norm() for part in parts])
    return joined / joined.norm()


def sample(model, ids, length, generator, temperature=1.0):
    """`length` tokens after `ids`, one forward each."""
    ids = list(ids)
    for _ in range(length):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
        ids.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    return ids


def cfm(model, base, sequences, *, stride, context_length, length, samples, seed=0):
    """Mean unbiased feature-matching loss over the blocks of (ids, prompt_length) sequences, and its parts by block."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for ids, prompt_length in sequences:
        anchor = max(prompt_length, context_length)
        while anchor + length <= len(ids):
            y = feature(base, ids[: anchor + length], anchor)
            x = [feature(base, sample(model, ids[:anchor], length, generator), anchor) for _ in range(samples)]
            pairs = [x[j] @ x[k] for j in range(samples) for k in range(samples) if j != k]
            blocks.append((y @ y - 2 * sum(v @ y for v in x) / samples + sum(pairs) / len(pairs)).item())
            anchor += stride
    return sum(blocks) / len(blocks)
