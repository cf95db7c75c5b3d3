from tests.cli.conftest import ebft

__all__ = ["ebft"]
