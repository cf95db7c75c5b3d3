from tests.evaluation.fixtures import models, rows, write_config

__all__ = ["models", "rows", "write_config"]
