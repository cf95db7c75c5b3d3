"""The run config: the keys of all methods in one class, its checks, and the reference of its options. No torch."""
