"""The naive twin of strided EBFT: every short sequence through the plain model, one at a time, in loops. Imports
nothing from ebft. Written from the definitions: anchors per row, texts and rollouts that stop at their first end token
(`o.ends`), nested prefixes, features of each sequence from its own forward pass, float64 whitening by SVD,
leave-one-out baselines by leaving out."""

import contextlib
from types import SimpleNamespace

import torch


def options_of(args, ends):
    """The options of a step by a trainer's arguments, and the tokens that end a text."""
    return SimpleNamespace(**vars(args), ends=set(ends) if args.stop_at_end else set())


def blocks_of(ids, prompt, o):
    """The (anchor, end of the reference) of each block; `prompt` is its length, or a list of turns (start, end)."""
    found, ids = [], ids.tolist()
    for begin, end in prompt if isinstance(prompt, list) else [(prompt, len(ids))]:
        first = max(begin + o.min_completion_prefix, o.context_length) if begin else o.context_length
        for anchor in range(first, end, o.stride):
            full = anchor + o.generate_max_len
            ends_later = any(token in o.ends for token in ids[anchor:end])
            if full <= end or (ends_later and full <= (o.max_length or full)):
                found.append((anchor, anchor + stopped(ids[anchor : min(full, end)], o)))
    return found


def stopped(tokens, o):
    """The number of tokens up to the first that ends a text."""
    return next((number for number, token in enumerate(tokens, 1) if token in o.ends), len(tokens))


def plain_logits(model, ids):
    return model(input_ids=ids[None], use_cache=False).logits[0].float()


def distribution(logits, temperature, top_p):
    """The log-probabilities (V,) that are sampled from, given the logits (V,); minus infinity outside of a nucleus."""
    scores = logits / (temperature or 1.0)
    if temperature and top_p < 1:
        probabilities, mass = scores.detach().double().softmax(-1), 0.0
        kept = torch.zeros_like(scores, dtype=torch.bool)
        for index in probabilities.argsort(descending=True).tolist():
            kept[index] = True
            mass += probabilities[index].item()
            if mass >= top_p:
                break
        scores = scores.masked_fill(~kept, -torch.inf)
    return scores.log_softmax(-1)


def sampled_logp(logits, token, o):
    """Log-probability of a token that was sampled, which is in the nucleus, given the logits (V,) before it."""
    logps = distribution(logits, o.temperature, o.top_p)
    assert logps[token].isfinite()
    assert logps.isfinite().all() == (o.temperature == 0 or o.top_p == 1)
    return logps[token]


def block_feature(model, ids, start, o):
    """Embedding of tokens ids[start:], the block, after the prefix ids[:start]."""
    off = model.disable_adapter() if hasattr(model, "disable_adapter") else contextlib.nullcontext()
    assert not model.training
    with torch.no_grad(), off:
        states = model(input_ids=ids[None], use_cache=False, output_hidden_states=True).hidden_states
    depth = len(states) - 1
    tokens = []
    for position in range(start, len(ids)):
        parts = [states[int(f * depth)][0, position].double() for f in o.feature_layers]
        tokens.append(torch.cat([part / part.norm() for part in parts]))
    g = len(tokens)
    pooled = {
        "last_token": lambda: tokens[-1],
        "mean_pooling": lambda: sum(tokens) / g,
        "completion_mean": lambda: sum(tokens) / g,
        "concat": lambda: torch.cat([tokens[g // 4], tokens[g // 2], tokens[3 * g // 4]]),
    }[o.embed_method]()
    return pooled / pooled.norm()


def whitened(x, y, space):
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    inverse = torch.tensor([1 / v if v > 1e-5 * s.max() else 0.0 for v in s], dtype=x.dtype)
    if space == "feature":
        w = vt.T @ torch.diag(inverse) @ vt
        return x @ w, [y @ w] * len(x)
    left = u @ torch.diag(inverse) @ u.T
    return left @ x, list(left @ y.repeat(len(x), 1))


def rewards_of(x, ys, o):
    n = len(x)
    alignment = torch.stack([2 * x[j] @ ys[j] / (x[j].norm() * ys[j].norm()) for j in range(n)])
    diversity = torch.stack(
        [2 / (n - 1) * sum(x[j] @ x[k] for k in range(n) if k != j) if n > 1 else x.new_zeros(()) for j in range(n)]
    )
    return alignment, diversity, o.alignment_coef * alignment - o.diversity_coef * diversity


def advantages_of(x, ys, alignment, diversity, rewards, o):
    n = len(rewards)
    if o.advantage_estimator == "reinforce":
        return rewards.clone()
    if o.advantage_estimator == "group_norm":
        return (rewards - rewards.mean()) / rewards.std()
    result = []
    for j in range(n):
        others = [k for k in range(n) if k != j]
        if o.rloo_baseline == "mean":
            result.append(rewards[j] - sum(rewards[k] for k in others) / (n - 1))
            continue
        base = o.alignment_coef * sum(alignment[k] for k in others) / (n - 1)
        if n > 2:  # the others' diversity among themselves, with d's own scale 2/(n-1)
            pairs = [sum(x[k] @ x[m] for m in others if m != k) * 2 / (n - 1) for k in others]
            base = base - o.diversity_coef * sum(pairs) / (n - 2)
        result.append(rewards[j] - base)
    return torch.stack(result)


def oracle_step(model, rows, rollouts, o):
    """Everything a step computes, from rows = [(ids, prompt, ce_targets)] and rollouts (B, N, NB, G). Returns a
    namespace of lists by (row, block); `loss` carries the gradient."""
    out = SimpleNamespace(anchors=[], logps={}, alignment={}, diversity={}, rewards={}, advantages={}, cfm={})
    rl_terms, ce_terms = [], []
    for r, (ids, prompt, targets) in enumerate(rows):
        blocks = blocks_of(ids, prompt, o)
        out.anchors.append([anchor for anchor, _ in blocks])
        for b, (a, end) in enumerate(blocks):
            samples = [rollouts[r, j, b] for j in range(o.n_samples_per_prompt)]
            sequences = [torch.cat([ids[:a], sample[: stopped(sample.tolist(), o)]]) for sample in samples]
            x = torch.stack([block_feature(model, seq, a, o) for seq in sequences])
            ys = [block_feature(model, ids[:end], a, o)] * len(x)
            if o.use_whitening:
                x, ys = whitened(x, ys[0], o.whitening_space)
            alignment, diversity, rewards = rewards_of(x, ys, o)
            advantages = advantages_of(x, ys, alignment, diversity, rewards, o)
            out.alignment[r, b], out.diversity[r, b], out.rewards[r, b] = alignment, diversity, rewards
            out.advantages[r, b] = advantages
            out.cfm[r, b] = (x.mean(0) - sum(ys) / len(ys)).square().sum()
            for j, seq in enumerate(sequences):
                logits = plain_logits(model, seq)
                scored = [sampled_logp(logits[t - 1], seq[t], o) for t in range(a, len(seq))]
                out.logps[r, b, j] = torch.stack(scored)
                rl_terms.append(-advantages[j].float() * out.logps[r, b, j])
        logp = plain_logits(model, ids).log_softmax(-1)
        ce_terms += [-logp[i - 1, ids[i]] for i in targets]
    out.rl_loss = torch.cat(rl_terms).mean()
    out.ce_loss = torch.stack(ce_terms).mean()
    out.loss = o.rl_coef * out.rl_loss + o.ce_coef * out.ce_loss
    return out
