"""What rounding of features does to whitened advantages: `python -m benchmarks.whitening MODEL TEXT...`.

Prints, for features computed in 16 bits and 4 and 16 samples, the cosine similarity of advantages with those of float32
features, by the tolerance of whitening, and the size of the rounding errors. The table is in docs/paper.md.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft.anchors import BlockOptions
from ebft.features import FeatureNetwork
from ebft.prefix.forward import prepare
from ebft.rewards import alignment_rewards, compute_advantages, diversity_rewards, first_equal, whiten
from ebft.rewards import whitening_tolerance as tolerance
from ebft.strided.embed import embed_blocks
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.rollout import sample_rollouts

EXACT = 1e-5
KINDS = {"bfloat16": (torch.bfloat16, False), "autocast": (torch.bfloat16, True), "float16": (torch.float16, False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text", nargs="+")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    prepare(model)
    ids = torch.tensor(tokenizer("\n".join(Path(path).read_text() for path in given.text))["input_ids"][: 8 * 256])
    inputs = {"input_ids": ids.view(8, 256), "attention_mask": torch.ones(8, 256, dtype=torch.long)}
    for samples in (4, 16):
        documents = Documents.from_inputs(inputs)
        blocks = {"stride": 16, "context_length": 16, "generate_max_len": 8, "min_completion_prefix": 0}
        layout = StridedLayout.place(documents, BlockOptions(n_samples_per_prompt=samples, **blocks))
        torch.manual_seed(0)
        with torch.no_grad():
            tokens = sample_rollouts(model, documents, layout, temperature=0.6, text_gradient=False).tokens
        exact = embed(model, documents, layout, tokens, None, False)
        for name, (dtype, autocast) in KINDS.items():
            rounded = embed(model, documents, layout, tokens, dtype, autocast)
            size = torch.linalg.svdvals(rounded[0] - exact[0])[:, 0] / torch.linalg.svdvals(exact[0])[:, 0]
            quantiles = (size / torch.finfo(dtype).eps).quantile(torch.tensor([0.5, 0.9])).tolist()
            raised = tolerance(dtype)
            columns = {}
            for column, space, tol, tol_rounded in (
                *(("1e-5", "feature", EXACT, EXACT), ("same", "feature", raised, raised)),
                *(("2 eps", "feature", EXACT, raised), ("sample", "sample", EXACT, EXACT)),
            ):
                found = advantages(*exact, space, tol), advantages(*rounded, space, tol_rounded)
                columns[column] = cosine_similarity(*(each.flatten() for each in found), dim=0).item()
            columns |= {"errors in eps, median": quantiles[0], "90%": quantiles[1]}
            print(len(tokens), "groups,", samples, name, *(f"{key}: {value:.3f}" for key, value in columns.items()))


@torch.no_grad()
def embed(
    model: torch.nn.Module, documents: Documents, layout: StridedLayout, tokens: Tensor, dtype, autocast: bool
) -> tuple[Tensor, Tensor]:
    network = FeatureNetwork(model, [0.25, 0.5, 0.75], "last_token")
    if dtype is not None and not autocast:
        network.causal_lm.to(dtype)
    with torch.autocast("cpu", dtype=dtype) if autocast else nullcontext():
        phi, reference = embed_blocks(network, documents, layout, tokens)
    first = first_equal(tokens).unsqueeze(-1)
    return phi.gather(-2, first.expand_as(phi)), reference


def advantages(phi: Tensor, reference: Tensor, space: str, tol: float) -> Tensor:
    phi, reference = whiten(phi, reference, space, tol)
    diversity = diversity_rewards(phi)
    return compute_advantages(alignment_rewards(phi, reference) - diversity, "rloo", diversity=diversity)


if __name__ == "__main__":
    main()
