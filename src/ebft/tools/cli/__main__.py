"""`python -m ebft.tools.cli`, for launchers such as torchrun."""

from ebft.tools.cli import main

main()
