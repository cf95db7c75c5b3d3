"""`python -m ebft`, for launchers such as torchrun."""

from ebft.tools.cli import main

main()
