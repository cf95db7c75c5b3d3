from tests.evaluation.fixtures import models, rows, unmeasured, write_config

__all__ = ["models", "rows", "unmeasured", "write_config"]
