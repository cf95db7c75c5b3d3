"""Running vLLM's OpenAI server for structured training.

`command` builds the command line and environment, `devices` selects GPUs, `server` starts, monitors and stops the
process, and `supervisor` ensures that all server processes terminate with the process that started them.
"""
