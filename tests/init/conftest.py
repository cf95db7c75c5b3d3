"""The command line in this process, for tests of new configs."""

from tests.cli.conftest import ebft, refused

__all__ = ["ebft", "refused"]
