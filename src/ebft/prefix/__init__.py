"""Forward passes of a causal LM in which sequences share a prefix, used by strided and structured mode.

policy.py     running a model inside its wrappers (DDP, FSDP, PEFT), its hidden states and language model head
attention/    attention to a shared prefix and to a sequence's own tokens
logps.py      log-probabilities; the language model head is applied to scored positions only
sampling.py   drawing tokens from a distribution
agreement.py  comparison with the plain model
distant_tokens.py  comparison of a sequence with itself far back in a pass
"""
