"""What `import qconv` does to other packages: transformers is taught to read compressed outputs (_shards.py), and transformers 5
to load mixtures of experts (_experts.py).

Neither package is imported for it. The teaching waits until transformers imports the module that is taught, which is when
from_pretrained is about to need it.
"""
import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Optional, Sequence

TAUGHT = {"transformers.modeling_utils": "_shards", "transformers.quantizers.auto": "_experts"}  # each by a register()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
                  ) -> Optional[ModuleSpec]:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def and_teach(module: ModuleType) -> None:
                execute(module)
                teach(module)

            spec.loader.exec_module = and_teach  # type: ignore[method-assign]
        return spec


def teach(module: ModuleType) -> None:
    import transformers
    if module.__name__ != "transformers.quantizers.auto" or int(transformers.__version__.split(".")[0]) >= 5:
        importlib.import_module("." + TAUGHT[module.__name__], __package__).register(module)


def register() -> None:
    known = {finder.name for finder in sys.meta_path if isinstance(finder, _Finder)}
    for name in TAUGHT:
        if name in sys.modules:
            teach(sys.modules[name])
        elif name not in known:
            sys.meta_path.insert(0, _Finder(name))
