"""Forward passes of a causal LM in which sequences share a prefix, used by strided and structured mode.

forward.py   running a model inside its wrappers (DDP, FSDP, PEFT), its hidden states and language model head
attention/   attention to a shared prefix and to a sequence's own tokens
logps.py     log-probabilities; the language model head is applied to scored positions only
sampling.py  drawing tokens from a distribution
cpu.py       cheaper products on CPU, and their reuse
parity.py    comparison with the plain model, and of a sequence with itself far back in a pass
"""
