"""Training on preference data with TRL's trainers, which compute the losses.

Rows are token ids, as `ebft.data.preferences` returns them. The trainers add exact resuming, the compute budget, checks
for non-finite values, and held-out metrics that count every row once. `experimental` may change with TRL.
"""
