"""`python -m ebft`, the same as the command `ebft`."""

from ebft.cli import main

main()
