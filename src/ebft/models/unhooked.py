"""A module's forward without its hooks."""

from __future__ import annotations

from typing import Any

from torch import nn


class WithoutHooks(nn.Module):
    """Runs the forward of `inner` without the hooks of `inner`, with the same parameters; it may have hooks itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.__dict__["inner"] = inner  # not as a submodule: the parameters belong to the model

    def __getattr__(self, name: str) -> Any:
        if "inner" not in self.__dict__:  # while it is being copied
            raise AttributeError(name)
        return getattr(self.__dict__["inner"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


def without_hooks(module: nn.Module) -> WithoutHooks:
    """Return `module` without its hooks, the same object in every call."""
    if "without_hooks" not in module.__dict__:
        module.__dict__["without_hooks"] = WithoutHooks(module)
    return module.__dict__["without_hooks"]
