"""Makes PyTorch's DataLoader, and DALI, lease-aware in programs that run under a launcher.

The launcher puts this directory on PYTHONPATH. Standard library only; written for any Python 3, as
the user's interpreter need not be the launcher's. It must never harm the user's program: whatever
fails here costs one line on stderr. The sitecustomize of the user or of the system runs as usual.
"""

# ruff: noqa: PTH100, PTH118, PTH120, UP031, BLE001

import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))
_PACKAGE_NAME = "slurm_synergy"
# What is patched when the program imports it: by which module of ours, and its function.
_TARGETS = {
    "torch.utils.data": ("torch_loader", "install"),
    "nvidia.dali.pipeline": ("dali_loader", "install_pipelines"),
    "nvidia.dali.plugin.pytorch": ("dali_loader", "install_iterators"),
}


def _complain(error: Exception) -> None:
    sys.stderr.write(
        "slurm-synergy: the data loader is left as it is: %s: %s\n" % (type(error).__name__, error)
    )


class _PatchingLoader:
    """Runs the original loader, then makes the module's loaders lease-aware."""

    def __init__(self, original: "Any") -> None:
        self._original = original

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._original, name)

    def create_module(self, spec: "Any") -> "Any":
        return self._original.create_module(spec)

    def exec_module(self, module: "Any") -> None:
        module.__spec__.loader = module.__loader__ = self._original
        self._original.exec_module(module)
        try:
            ours, install = _TARGETS[module.__name__]
            patch = importlib.import_module("slurm_synergy.jobside." + ours)
            getattr(patch, install)(module)
        except Exception as error:
            _complain(error)


class _Finder:
    """Finds this package for the user's interpreter, and the module to be patched."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name == _PACKAGE_NAME:
            return importlib.util.spec_from_file_location(
                name,
                os.path.join(_PACKAGE, "__init__.py"),
                submodule_search_locations=[_PACKAGE],
            )
        if name not in _TARGETS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _PatchingLoader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


def _run_next_sitecustomize() -> None:
    """Python imports only the first sitecustomize of the path; run the one behind ours too."""
    rest = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("SYNERGY_BOARD") and os.environ.get("SYNERGY_INJECT") != "0":
    try:
        # Remembered before any library narrows the mask of the main thread.
        if "SYNERGY_GRANTED_CPUS" not in os.environ and hasattr(os, "sched_getaffinity"):
            os.environ["SYNERGY_GRANTED_CPUS"] = ",".join(
                str(cpu) for cpu in sorted(os.sched_getaffinity(0))
            )
        finder: "Any" = _Finder()
        sys.meta_path.insert(0, finder)
    except Exception as error:
        _complain(error)

_run_next_sitecustomize()
