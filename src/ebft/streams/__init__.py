"""Training on a stream of packed documents, and continuing it exactly."""
