"""Training in the environments of NeMo Gym: its rows, the rewards of its servers, and the rollouts of its agents."""
