"""Stands for torchvision, whose wheels need CUDA: any name in it can be imported, and none does anything."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock


class Anything(ModuleType):
    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec):
        return Anything(spec.name)

    def exec_module(self, module):
        pass


__version__ = "0"
sys.meta_path.insert(0, Finder())
sys.modules[__name__].__class__ = Anything
