"""The metrics of the report: name -> heading with the direction that is better."""

FEATURES = {
    "ce_loss": "cross-entropy ↓",
    "cfm_loss": "CFM loss ↓",
    "cfm_loss_long": "CFM loss, long ↓",
    "alignment": "alignment ↑",
    "diversity": "diversity ↓",
}
SAMPLES = {
    "pair_distance": "distance of samples ↑",
    "distinct": "distinct samples ↑",
    "distinct_2": "distinct-2 ↑",
}
# Of full completions, by task; those of SAMPLES follow.
COMPLETIONS = {
    "functions": {
        "parses_pass@1": "parses ↑",
        "parses_greedy": "parses, greedy ↑",
        "substance_pass@1": "names ↑",
        "substance_greedy": "names, greedy ↑",
        **SAMPLES,
    },
    "translation": {
        "chrf_greedy": "chrF, greedy ↑",
        "chrf_pass@1": "chrF ↑",
        "chrf_pass@N": "chrF, best of 4 ↑",
        **SAMPLES,
    },
    "raw": {},
}
# Of the first screen: heading -> metrics, of which a task has one.
MAIN = {
    "cross-entropy ↓": ("ce_loss",),
    "CFM loss, 8 tokens ↓": ("cfm_loss",),
    "CFM loss, long ↓": ("cfm_loss_long",),
    "names or chrF, greedy ↑": ("substance_greedy", "chrf_greedy"),
    "names or chrF, samples ↑": ("substance_pass@1", "chrf_pass@1"),
}
# Of a corpus as a whole, so that a mean over seeds is all that is known of them.
CORPUS = {
    "corpus_bleu_greedy": "BLEU, greedy ↑",
    "corpus_chrf_greedy": "corpus chrF, greedy ↑",
    "corpus_bleu_pass@1": "BLEU ↑",
    "corpus_chrf_pass@1": "corpus chrF ↑",
}


def columns(task: str) -> dict[str, str]:
    """Every metric of a task that has an interval."""
    return FEATURES | COMPLETIONS[task]


def is_better_higher(metric: str) -> bool:
    """The direction of a metric."""
    return (FEATURES | COMPLETIONS["functions"] | COMPLETIONS["translation"])[metric].endswith("↑")
