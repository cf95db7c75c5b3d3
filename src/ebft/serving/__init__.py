"""A stock vLLM OpenAI server for structured training: its command line, its life and its end.

`command` turns a config into a command and an environment, `devices` chooses GPUs, `server` starts, watches and stops
the process, and `supervisor` is what makes sure that none of its processes outlives the one that started it.
"""
