"""Rollouts of structured mode: conversations generated with generate() or a vLLM server, optionally prefetched."""
