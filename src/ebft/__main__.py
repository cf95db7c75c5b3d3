"""`python -m ebft`, the same as the command `ebft`."""

from ebft.tools.cli import main

main()
