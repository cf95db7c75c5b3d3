"""`python -m ebft.cli`, for launchers such as torchrun."""

from ebft.cli import main

main()
