"""Calls of the reward functions that users write.

checked.py      errors and invalid rewards say which function and line they come from
workers.py      prompt groups in worker processes
chunks.py       some prompt groups at a time
processes.py    processes that call functions, with a time limit
"""
