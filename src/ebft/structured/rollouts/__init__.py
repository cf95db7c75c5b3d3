"""Rollouts of structured mode: conversations over the policy's own generate or a vLLM server, ahead of time or not."""
