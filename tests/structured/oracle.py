"""The naive twin of structured EBFT: one plain forward per sequence, formulas in float64, none of our code."""

import math

import torch


def embedding(model, prompt_ids, completion_ids, feature_layers, embed_method):
    """The embedding of one sequence from a forward pass of that sequence alone."""
    with torch.no_grad():
        states = model(input_ids=torch.tensor([prompt_ids + completion_ids]), output_hidden_states=True).hidden_states
    depth = len(states) - 1
    layers = [states[int(fraction * depth)][0].double() for fraction in feature_layers]
    features = torch.cat([layer / layer.norm(dim=-1, keepdim=True) for layer in layers], dim=-1)
    own = features[len(prompt_ids) :] if completion_ids else features[-1:]
    if embed_method == "last_token":
        pooled = features[-1]
    elif embed_method == "mean_pooling":
        pooled = features.mean(0)
    elif embed_method == "completion_mean":
        pooled = own.mean(0)
    else:
        pooled = torch.cat([own[len(own) * quarter // 4] for quarter in (1, 2, 3)])
    return pooled / pooled.norm()


def group_rewards(samples, reference, **options):
    """Rewards of one group from embeddings (N, D) and (D,), see `reward_terms`."""
    alignment, pairs = reward_terms(samples, reference, **options)
    return torch.stack([alignment[j] - sum(pairs[j]) for j in range(len(samples))])


def advantages_of(alignment, pairs, estimator, baseline="independent"):
    """Advantages of one group from the terms of `reward_terms`."""
    n = len(alignment)
    rewards = [alignment[j] - sum(pairs[j]) for j in range(n)]
    if estimator == "reinforce":
        return torch.stack(rewards)
    if estimator == "group_norm":
        rewards = torch.stack(rewards)
        return (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    found = []
    for j in range(n):
        others = [k for k in range(n) if k != j]
        if baseline == "mean":
            found.append(rewards[j] - sum(rewards[k] for k in others) / (n - 1))
            continue
        # What the other samples' mean reward would be without sample j: a group of n - 1, with fewer pairs in each sum.
        left = sum(alignment[k] for k in others) / (n - 1)
        if n > 2:
            among = sum(pairs[k][i] for k in others for i in others if i != k)
            left = left - among * (n - 1) / (n - 2) / (n - 1)
        found.append(rewards[j] - left)
    return torch.stack(found)


def reward_terms(samples, reference, *, whitening=None, alignment_coef=1.0, diversity_coef=1.0):
    """Alignment of each sample (N, D) with the reference (D,), and its similarity with each other one, weighted."""
    n = len(samples)
    references = reference.expand(n, -1)
    if whitening is not None:
        u, s, vt = torch.linalg.svd(samples, full_matrices=False)
        kept = s > 1e-5 * s.max()
        inverse = torch.where(kept, 1 / s, 0.0)
        if whitening == "feature":
            w = vt.T @ torch.diag(inverse) @ vt  # D x D, which the library never forms
            samples, references = samples @ w, references @ w
        else:
            left = u @ torch.diag(inverse) @ u.T
            samples, references = left @ samples, left @ references
    alignment, pairs = [], []
    for j in range(n):
        alignment.append(alignment_coef * 2 * samples[j] @ references[j] / (samples[j].norm() * references[j].norm()))
        pairs.append([diversity_coef * 2 / max(n - 1, 1) * (samples[j] @ samples[k]) * (k != j) for k in range(n)])
    return alignment, pairs


def token_logps(model, prompt_ids, ids, temperature, top_k=0, top_p=1.0, min_p=None):
    """Log-probabilities of `ids` after the prompt in the distribution that is sampled from, with gradients."""
    logits = model(input_ids=torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
    logps = (logits.double() / temperature).log_softmax(-1)
    if not top_k and top_p == 1 and not min_p:
        return logps.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
    found = []
    for row, token in zip(logps, ids):
        order = row.tolist()
        order = sorted(range(len(order)), key=lambda index: -order[index])
        if min_p:
            order = [index for index in order if row[index] >= row[order[0]] + math.log(min_p)]
        order = order[:top_k] if top_k else order
        mass, kept = row[order].exp().sum(), []
        for index in order:
            if kept and row[kept].exp().sum() >= top_p * mass:
                break
            kept.append(index)
        found.append(row[token] - row[kept if token in kept else [*kept, token]].logsumexp(0))
    return torch.stack(found)


def loss(policy, base, tokenizer, rollouts, batch, args):
    """The loss of one optimizer step's rollouts and rows, sequence by sequence."""
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    n, rl, nll, counted = args.num_generations, [], [], 0
    for start in range(0, len(rollouts), n):
        group, row = rollouts[start : start + n], batch[start]
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        reference, labelled, compared = [], [], []
        for message in [{"role": "assistant", "content": row["ground_truth"]}, *row["remaining_turns"]]:
            text = message["content"]
            if message["role"] == "user":
                text = f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            else:
                text += "<|im_end|>"
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            reference += ids
            labelled += [message["role"] == "assistant"] * len(ids)
            # Replies of the reference are cut where sampled ones are.
            limit = args.max_completion_length if message["role"] == "assistant" else len(ids)
            compared += ids if len(ids) <= limit else [*ids[:-1][:limit], ids[-1]]
        phi = []
        for rollout in group:
            assert rollout.prompt_ids == prompt
            ids = rollout.ids[:-1] if rollout.ids[-1] in ends else rollout.ids
            phi.append(embedding(base, prompt, ids, args.feature_layers, args.embed_method))
        target = embedding(base, prompt, compared[:-1], args.feature_layers, args.embed_method)
        whitening = args.whitening_space if args.use_whitening else None
        weights = {"alignment_coef": args.alignment_coef, "diversity_coef": args.diversity_coef}
        terms = reward_terms(torch.stack(phi), target, whitening=whitening, **weights)
        advantages = advantages_of(*terms, args.advantage_estimator, args.rloo_baseline)
        if args.scale_rewards == "group" and args.advantage_estimator != "group_norm":
            rewards = group_rewards(torch.stack(phi), target, whitening=whitening, **weights)
            advantages = advantages / (rewards.std() + 1e-4)
        for rollout, advantage in zip(group, advantages):
            truncation = {name: getattr(args, name) for name in ("top_k", "top_p", "min_p")}
            logps = token_logps(policy, prompt, rollout.ids, args.temperature, **truncation)
            sampled = torch.tensor(rollout.generated, dtype=torch.bool)
            rl.append(-(advantage * torch.exp(logps - logps.detach()))[sampled].mean())
        logps = token_logps(policy, prompt, reference, 1.0)
        nll.append(-logps[torch.tensor(labelled)].sum())
        counted += sum(labelled)
    return torch.stack(rl).mean() + args.ce_coef * torch.stack(nll).sum() / counted
