"""Models: the base model, its tokenizer and its adapter."""

from ebft.models.adapter import attach_adapter, linear_names
from ebft.models.base import load_base_model, load_model, load_model_config
from ebft.models.precision import weights_dtype
from ebft.models.tokenizer import load_tokenizer

__all__ = [
    "attach_adapter",
    "linear_names",
    "load_base_model",
    "load_model",
    "load_model_config",
    "load_tokenizer",
    "weights_dtype",
]
