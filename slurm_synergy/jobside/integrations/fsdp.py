"""A model whose parameters are sharded over the ranks (FSDP), saved and loaded by all of them.

::

    model = FullyShardedDataParallel(Net())           # or fully_shard(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    synergy.register(sharded=ShardedState(model, optimizer), scheduler=scheduler)
    synergy.resume()

Each rank writes its own shards through ``torch.distributed.checkpoint``; another number of ranks
reads them back as it needs them. What is no tensor (learning rates and the like) is the same on all
ranks and goes into a JSON file. The index of the shards is a pickle: it is read with the few types
allowed that it needs, so that a checkpoint cannot run code.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from slurm_synergy.errors import CheckpointError

__all__ = ["ShardedState"]

_VALUES = "values.json"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_OPTIMIZER, _MODEL = "optimizer/", "model/"
# Single names only: a dotted one could reach what these modules have imported.
_INDEX_TYPES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


class ShardedState:
    """What :func:`slurm_synergy.jobside.register` takes for a sharded model and its optimizers."""

    def __init__(self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self._model, self._optimizers = model, optimizers

    def save_files(self, directory: Path) -> None:
        """Write this rank's shards; all ranks call it together."""
        tensors, values = _split(self._state())
        writer = FileSystemWriter(directory, single_file_per_rank=True, overwrite=True)
        with _as_ours():
            save(tensors, storage_writer=writer, no_dist=not _distributed())
        if not _distributed() or dist.get_rank() == 0:
            try:
                text = json.dumps(values)
            except TypeError as err:
                raise CheckpointError(
                    f"the optimizer holds what JSON cannot express: {err}"
                ) from err
            (directory / _VALUES).write_text(text)

    def load_files(self, directory: Path) -> None:
        """Read what this rank needs of the shards of any number of ranks."""
        tensors, values = _split(self._state())
        with _as_ours():
            load(tensors, storage_reader=_Reader(directory), no_dist=not _distributed())
        saved = json.loads((directory / _VALUES).read_bytes())
        missing = sorted(values.keys() - saved.keys())
        if missing:
            raise CheckpointError(f"{directory}: no values of {', '.join(missing)}")
        # JSON has lists for the tuples of an optimizer.
        kept = {name: _like(value, saved[name]) for name, value in values.items()}
        state = {**tensors, **kept}
        set_state_dict(
            self._model,
            self._optimizers,
            model_state_dict=_under(_MODEL, state),
            optim_state_dict=_under(_OPTIMIZER, state),
            options=_FLAT,
        )

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizers, options=_FLAT)
        return {
            **{f"{_MODEL}{name}": value for name, value in model.items()},
            **{f"{_OPTIMIZER}{name}": value for name, value in optimizer.items()},
        }


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def _as_ours() -> Iterator[None]:
    """Errors are CheckpointErrors (PyTorch's is no Exception); one process alone is no warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as err:
            raise CheckpointError(f"the shards: {err}") from err


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def _like(present: Any, saved: Any) -> Any:
    return tuple(saved) if isinstance(present, tuple) and isinstance(saved, list) else saved


def _under(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


class _IndexUnpickler(pickle.Unpickler):
    """Reads the index of the shards, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        known = name in _INDEX_TYPES.get(module, ())
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not known and not is_dtype:
            raise CheckpointError(f"the index of the shards asks for {module}.{name}: refused")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Reads shards with a checked index."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Any:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
