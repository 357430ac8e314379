"""What `import qconv` does to other packages: transformers 5 is taught to load mixtures of experts (_experts.py).

Neither package is imported for it. The teaching waits until transformers imports its table of quantizers, which is when
from_pretrained is about to need it.
"""
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Optional, Sequence

TABLE = "transformers.quantizers.auto"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
                  ) -> Optional[ModuleSpec]:
        if name != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def and_teach(module: ModuleType) -> None:
                execute(module)
                teach()

            spec.loader.exec_module = and_teach  # type: ignore[method-assign]
        return spec


def teach() -> None:
    import transformers
    if int(transformers.__version__.split(".")[0]) >= 5:
        from . import _experts
        _experts.register()


def register() -> None:
    if TABLE in sys.modules:
        teach()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
