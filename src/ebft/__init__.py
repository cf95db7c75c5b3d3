"""Energy-based fine-tuning of language models (Jelassi et al. 2026, arXiv 2603.12248)."""
