"""What `ebft fetch` downloads: files pinned by checksum, through the user's own package index, into one cache.

cache.py    where the cache is, and one process at a time in it
wheels.py   a pinned wheel, downloaded with pip and checked
"""
