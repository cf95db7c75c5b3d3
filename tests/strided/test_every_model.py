"""Every causal language model of the installed transformers equals separate plain passes, or is refused. `pytest -m
slow -s tests/strided/test_every_model.py` prints which of them are equal, refused, or not built."""

import copy
from types import SimpleNamespace

import pytest
import torch

from ebft import anchors, errors, features
from ebft.models import causal_lm, pretrained
from ebft.prefix.forward import ATTENTION, ROWS, STATES, way_of
from ebft.strided import loss, validation
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.rollout import sample_rollouts
from ebft.structured.scoring import check_shared_prompt_parity as check_shared_prompts
from ebft.structured.scoring import score_completions
from tests.strided.every_model import NAMES, NOT_BUILT, build
from tests.strided.families import VOCAB, WITH_STATES
from tests.strided.oracle import block_feature, blocks_of, plain_logits
from tests.structured.rollouts.test_local import later_turns, sample
from tests.structured.test_scoring import TEMPERATURE, expected, prompts

# Refused in strided mode. Others that do not share prompts and have no running states run a row for each rollout.
_REFUSED = {
    "differ from those of the plain model": "bert bert-generation big_bird camembert data2vec-text electra ernie "
    "megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xmod",
    "has several streams of hidden states": "deepseek_v4 gemma3n_text hy_v4",
    "has . hidden states for . layers": "dory longcat_flash",
    "decoder layers in a ModuleList": "hrm_text prophetnet",
    "does not run with plain passes": "cpmant inkling2_loop_text inkling2_text xlnet",
}
_WITHOUT_SHARED_PROMPTS = {
    "does not support the attention interface": "bart big_bird bigbird_pegasus biogpt blenderbot blenderbot-small "
    "cpmant gpt_neox_japanese marian mbart megatron-bert mvp openai-gpt pegasus plbart prophetnet reformer "
    "rembert roformer trocr whisper xglm xlm xlnet",
    "does not use causal attention": "bert bert-generation camembert data2vec-text electra ernie roberta "
    "roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod",
    "state-space, convolution or linear-attention layers": "falcon_mamba jamba mamba minimax recurrent_gemma rwkv "
    "xlstm",
    "do(es)? not (share running states|support)": "inkling2_loop_text inkling2_text inkling_text mamba2",
    "does not run with strided attention": "doge hy_v4",
    "does not keep its 32 decoder layers in a ModuleList": "hrm_text",
    "differ from those of the plain model": "deepseek_v4 zaya",
}
WITH_STATES = *WITH_STATES, "bailing_hybrid", "kimi_linear", "lara_mini", "lfm3"
REFUSED, WITHOUT_SHARED_PROMPTS = (
    {name: reason for reason, names in of_mode.items() for name in names.split()}
    for of_mode in (_REFUSED, _WITHOUT_SHARED_PROMPTS)
)
WITHOUT_SHARED_PROMPTS |= dict.fromkeys(WITH_STATES, "do not share running states")
SIZES = {"stride": 12, "context_length": 6, "generate_max_len": 3}
FEATURES = {"feature_layers": [0.0, 0.5, 1.0], "embed_method": "last_token"}
OPTIONS = SimpleNamespace(**SIZES, **FEATURES, min_completion_prefix=0, max_length=None, ends=set())


def close(ours, theirs, atol=2e-4):
    torch.testing.assert_close(ours, theirs.float(), atol=atol, rtol=0)


def logps_of(plain, ids, start):
    """Log-probabilities of the tokens ids[start:], from one plain pass."""
    scores = (plain_logits(plain, ids) / TEMPERATURE).log_softmax(-1)[start - 1 : -1]
    return scores.gather(-1, ids[start:, None]).squeeze(-1)


def strided_mode(model, plain):
    """Three documents of unequal lengths, up to five blocks and two rollouts: log-probabilities and features."""
    network = features.FeatureNetwork(model, **FEATURES)
    pretrained.disable_dropout(model)
    validation.check_parity(model, network, as_trained=True)
    name = model.config.model_type
    assert way_of(model) == (STATES if name in WITH_STATES else ROWS if name in WITHOUT_SHARED_PROMPTS else ATTENTION)
    lengths = torch.tensor([33, 58, 21])
    ids = torch.randint(3, VOCAB, (3, 58), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(58) < lengths[:, None]).long()
    documents = Documents.from_inputs({"input_ids": ids, "attention_mask": mask})
    layout = StridedLayout.place(documents, anchors.BlockOptions(n_samples_per_prompt=2, **SIZES))
    with causal_lm.evaluating(model):
        sampled = sample_rollouts(model, documents, layout, temperature=TEMPERATURE)
    how = {"temperature": TEMPERATURE, "text_gradient": False, "apply_dropout": False}
    scored = loss.score(model.train(), documents, layout, sampled.tokens, **how)[0]
    phi, phi_ref = loss.embed_blocks(network, documents, layout, sampled.tokens)
    found = [(row, blocks_of(row[:length], 0, OPTIONS)) for row, length in zip(ids, lengths)]
    blocks = [(row, anchor) for row, of_row in found for anchor, _ in of_row]
    assert len(blocks) == len(scored) == 10
    for b, (row, anchor) in enumerate(blocks):
        close(phi_ref[b], block_feature(plain, row[: anchor + 3], anchor, OPTIONS))
        for j, rollout in enumerate(sampled.tokens[b]):
            sequence = torch.cat([row[:anchor], rollout])
            logps = logps_of(plain, sequence, anchor)
            # Their steps of one token in transformers do not limit the time step; training does not use them.
            close(sampled.logps[b, j], logps, 2e-2 if model.config.model_type in ("nemotron_h", "zamba2") else 2e-4)
            close(scored[b, j], logps)
            close(phi[b, j], block_feature(plain, sequence, anchor, OPTIONS))


def shared_prompts(model, plain):
    """Samples of five contexts, and scores of completions and references of three prompts."""
    pretrained.disable_dropout(model)
    check_shared_prompts(model)
    contexts = later_turns()
    for context, completion in zip(contexts, sample(model, contexts, [5, 2, 1, 4, 5])):
        close(torch.tensor(completion.logps), logps_of(plain, torch.tensor(context + completion.ids), len(context)))
    found = score_completions(model.train(), prompts(), temperature=TEMPERATURE)
    for ours, theirs in zip(found, expected(plain, prompts())):
        close(ours, theirs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*each rollout is run with the text before it")
@pytest.mark.parametrize("name", NAMES)
def test_every_model_is_equal_or_refused(name):
    if name in NOT_BUILT:
        with pytest.raises(Exception):  # noqa: B017, PT011 - of any kind, from the model
            build(name)
        print(f"{name}: not built")
        return
    model = build(name).eval()
    for run, reasons in ((strided_mode, REFUSED), (shared_prompts, WITHOUT_SHARED_PROMPTS)):
        reason = reasons.get(name)
        with torch.no_grad():
            if reason is None:
                run(copy.deepcopy(model), model)
            else:
                with pytest.raises(errors.ModelError, match=reason):
                    run(copy.deepcopy(model), model)
        print(f"{name}, {run.__name__}: {'equal' if reason is None else f'refused ({reason})'}")
