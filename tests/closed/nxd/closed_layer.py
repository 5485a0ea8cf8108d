"""The closed packages below NxD Inference: each of their modules can be imported, and each name in them is blank.

A blank name can be imported, subclassed, subscripted, compared and used as a decorator; any other call of it fails.
What a run really uses is in the files of this folder; they come first, since their finder is the ordinary one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PACKAGES = ("torch_xla", "torch_neuronx", "neuronxcc", "libneuronxla", "nki", "nkilib", "neuronxlogger")
# Open packages for images and training, which the package imports and text models do not use; if they are missing.
UNUSED = ("torchvision", "PIL", "diffusers", "accelerate", "scipy", "transformers.utils.fx", "whisper", "tiktoken")
# The package's own models of images: their imports need a working torchvision.
IMAGE_MODELS = tuple(
    f"neuronx_distributed_inference.models.{name}." for name in ("mllama", "qwen2_vl", "qwen3_vl", "pixtral", "llama4")
)
DECORATORS = ("jit", "nki_jit", "baremetal", "xla_call", "wrap_nki", "trace")
BUILDER = "neuronx_distributed.trace.model_builder"


class Blank(type):
    """A name without a meaning: a class, so that it may be a base class and an annotation."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        place = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.{name}"}
        setattr(cls, name, Blank(name, (), place))
        return getattr(cls, name)

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        name = cls.__name__
        if cls.__bases__ != (object,):
            return super().__call__(*arguments, **keywords)  # a subclass with a meaning
        if len(arguments) == 1 and (
            isinstance(arguments[0], types.FunctionType | type) or hasattr(arguments[0], "func_name")
        ):
            return arguments[0]  # a decorator
        if not arguments and name in DECORATORS:
            return lambda function: function  # one with options
        if name[0].isupper() or name.startswith("_") or "_enum" in cls.__qualname__:
            return super().__call__()
        raise NotImplementedError(f"{cls.__module__}.{cls.__qualname__} is closed and has no stand-in")

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class BlankModule(types.ModuleType):
    """A module in which each name is blank."""

    def __getattr__(self, name: str) -> Any:
        return _member(self, name)


def blank(module: str) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a module whose other names are blank."""
    return lambda name: _member(sys.modules[module], name)


def _member(module: types.ModuleType, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {module.__name__} has no attribute {name}")
    setattr(module, name, Blank(name, (), {"__module__": module.__name__}))
    return getattr(module, name)


class _Blanks(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return BlankModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Names come as they are read, except for one that is called by an import."""
        if module.__name__.endswith(".mllama.utils"):
            module.add_instruct = lambda text, **images: text  # type: ignore[attr-defined]


class _LastFinder(importlib.abc.MetaPathFinder):
    """What no file provides is blank."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        parts = name.split(".")
        if {".".join(parts[: end + 1]) for end in range(len(parts))} & {*PACKAGES, *UNUSED}:
            return importlib.machinery.ModuleSpec(name, _Blanks(), is_package=True)
        return None


class _FirstFinder(importlib.abc.MetaPathFinder):
    """Models of images are blank, and the last step of the model builder is the runtime's."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name.startswith(IMAGE_MODELS):
            return importlib.machinery.ModuleSpec(name, _Blanks(), is_package=True)
        if name != BUILDER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            from torch_neuronx import compiled_model

            module.ModelBuilder.build_nxd_model = compiled_model.build

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Register the finders, once."""
    if not any(type(finder).__name__ == _LastFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _FirstFinder())
        sys.meta_path.append(_LastFinder())


install()
