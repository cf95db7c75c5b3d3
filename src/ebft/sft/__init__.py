"""Supervised fine-tuning.

trainer.py        the trainer: the loss of labelled tokens, evaluation, rows of a stream
cross_entropy.py  the loss in chunks of positions, without the logits of all tokens
packed.py         several documents in a row
"""
