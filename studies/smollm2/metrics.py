"""The metrics of the report."""

# Metric -> heading with the direction that is better.
COLUMNS = {
    "raw": {
        "ce_loss": "cross-entropy ↓",
        "cfm_loss": "CFM loss ↓",
        "alignment": "alignment ↑",
        "diversity": "diversity ↓",
    },
    "functions": {
        "ce_loss": "cross-entropy ↓",
        "cfm_loss": "CFM loss ↓",
        "alignment": "alignment ↑",
        "diversity": "diversity ↓",
        "parses_pass@1": "parses ↑",
        "parses_greedy": "parses, greedy ↑",
        "parses_pass@N": "parses, one of N ↑",
        "uses_names_pass@1": "names ↑",
        "uses_names_greedy": "names, greedy ↑",
        "passes_doctest_pass@1": "doctest ↑",
        "passes_doctest_pass@N": "doctest, one of N ↑",
    },
}
