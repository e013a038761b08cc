"""Puts the job's data cache under DALI's own file reader, ``fn.readers.file``.

The reader stays, and decides as before which sample comes when: its order, shards, padding, sizes
and checkpoints depend on how many files there are, not on what is in them. Behind its back it is
given one tiny file under as many names, numbered by the labels, and a Python function turns these
numbers into the contents, from the cache, and the labels. That is done in the graph that a pipeline
has before it is built, so ``serialize`` and everything that looks at the graph sees the program's.

Only readers that shuffle, as those for training do; where anything about it is not certain, the
reader is left as it is, with one line. Attributes of DALI that are used here are not documented.
"""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, cast

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside.board import Board
from slurm_synergy.jobside.dali_listing import Unclear, listing
from slurm_synergy.jobside.data_told import tell_files
from slurm_synergy.jobside.minio import read_cached
from slurm_synergy.jobside.minio_inject import has_budget
from slurm_synergy.jobside.minio_job import JobCache, job_cache
from slurm_synergy.jobside.minio_store import Item, Offer
from slurm_synergy.jobside.session import Session, say

__all__ = ["checkpoint_of", "read_through_cache"]

_SCHEMAS = ("readers__File", "FileReader")
_WHAT = ("file_root", "files", "file_list", "labels")
_FILTERS = ("file_filters", "dir_filters", "case_sensitive_filter")
_OURS = "_synergy_cached"
_PREFIX = "__synergy_cached_"
_TINY = "reader-stub"


def read_through_cache(pipe: Any, session: Session) -> None:
    """Before ``pipe`` is built: give its training readers the cache, where that can be exact.

    May raise what the program's own definition of the graph raises.
    """
    fields = pipe.__dict__
    if _OURS not in fields:
        if fields.get("_built") or fields.get("_backend_prepared") or fields.get("_deserialized"):
            return
        if session.board is None or not _is_on(session.board):
            return
        if not fields.get("_py_graph_built"):
            pipe._build_graph()
        try:
            _exchange(pipe, session.board.path)
        except Exception as err:  # noqa: BLE001 (the program reads as it did)
            say(f"DALI reads past the data cache: {err if str(err) else type(err).__name__}")
            fields[_OURS] = ()
    checkpoint = fields.get("_checkpoint")
    if fields.get(_OURS) and not fields.get("_built") and isinstance(checkpoint, bytes):
        fields["_checkpoint"] = _with_ours(checkpoint, fields[_OURS])


def _is_on(board: Board) -> bool:
    if os.environ.get("SYNERGY_INJECT") == "0":
        return False
    try:
        return has_budget(board.read_lease().mem_mib)
    except LeaseError:
        return False  # the board's writer died inside


# -- the graph ------------------------------------------------------------------------------------


def _exchange(pipe: Any, board: Path) -> None:
    """Put the pairs of operators in place of the readers, all of them or none."""
    graph: list[Any] = []
    ours: list[str] = []
    sinks = list(pipe._sinks)
    try:
        for instance in pipe._ops:
            if not _trains(instance):
                graph.append(instance)
                continue
            if not ours:
                _check(pipe)
            files = _files_of(instance)
            graph += _pair(pipe, instance, files, _tiny_file(board))
            ours.append(_PREFIX + instance.name)
            tell_files(files.paths)
    finally:
        pipe._sinks[:] = sinks  # a Python function is one, and its outputs are used
    pipe._ops = graph
    pipe.__dict__[_OURS] = tuple(ours)


def _given(instance: Any) -> dict[str, Any]:
    """The arguments of an operator that its class was made with."""
    return getattr(getattr(instance, "_op", None), "_init_args", None) or {}


def _trains(instance: Any) -> bool:
    if getattr(getattr(instance, "_op", None), "schema_name", "") not in _SCHEMAS:
        return False
    given = _given(instance)
    return bool(given.get("random_shuffle") or given.get("shuffle_after_epoch"))


def _check(pipe: Any) -> None:
    """Raises Unclear where the pipeline would notice."""
    if not pipe._exec_dynamic:
        raise Unclear("Python functions need the pipeline's exec_dynamic")
    if pipe._checkpoint is not None and not isinstance(pipe._checkpoint, bytes):
        raise Unclear("its checkpoint is not bytes")
    if pipe._enable_checkpointing and not hasattr(type(pipe), "_get_checkpoint"):
        raise Unclear("this release of DALI makes checkpoints in another way")
    for instance in pipe._ops:
        given = _given(instance)
        # Contents from memory do not carry the name of their file.
        if given.get("key") == "source_info" or given.get("cache_size"):
            raise Unclear(f"{instance.name} asks for the names of the files")
        if given.get("skip_cached_images"):
            raise Unclear(f"{instance.name} skips what the decoder has kept")


def _files_of(instance: Any) -> _Files:
    operator = instance._op
    schema = operator.schema
    before, after = operator.spec, instance.spec
    for name in schema.GetArgumentNames():
        if _is_free(before, name) and not _is_free(after, name):
            raise Unclear(f"{instance.name} was given {name} when it was called")
    defaults = ast.literal_eval(schema.GetArgumentDefaultValueString("file_filters"))
    return _Files(*listing(_given(instance), defaults))


def _is_free(spec: Any, name: str) -> bool:
    """The argument has no value there yet; DALI refuses a second one."""
    try:
        spec.copy().AddArg(name, 0)
    except RuntimeError:
        return False
    return True


def _pair(pipe: Any, instance: Any, files: _Files, tiny: str) -> list[Any]:
    import nvidia.dali.ops as ops

    kind, name = type(instance._op), instance.name
    same = {
        key: value
        for key, value in _given(instance).items()
        if key not in _WHAT + _FILTERS and not key.startswith("_")
    }
    count = len(files.paths)
    with pipe:
        # Names of outputs are made of that of their operator. What comes behind asks for those of
        # the program's reader, and the program and checkpoints for the reader: so the function is
        # made under its name, and the names of the operators are exchanged then.
        reader = kind(files=[tiny] * count, labels=list(range(count)), name=f"{name}_", **same)
        number = cast("Any", reader())[1]
        function = ops.PythonFunction(
            function=files.contents, num_outputs=2, batch_processing=True, name=name
        )
        content = cast("Any", function(number))[0]
    number.source._name, content.source._name = name, _PREFIX + name
    return [number.source, content.source]


def _tiny_file(board: Path) -> str:
    """A file of one byte on this node, which goes with the board."""
    path = board.with_name(_TINY)
    if not path.exists():
        draft = board.with_name(f".{_TINY}.{os.getpid()}")
        draft.write_bytes(b"\0")
        draft.replace(path)
    return str(path)


# -- contents -------------------------------------------------------------------------------------

# DALI calls from threads of its own, several where there are several pipelines.
_turn = threading.Lock()


class _Batch:
    """The job's cache as one batch sees it: what was read is put in at its end."""

    def __init__(self, cache: JobCache) -> None:
        self.source, self.get, self._cache = cache.source, cache.get, cache
        self.takes_more = cache.takes_more
        self.offers: list[Offer] = []

    @property
    def buffers(self) -> _Batch:
        """Where files are read into: see :meth:`take`."""
        return self

    def take(self, size: int) -> memoryview | None:
        """No buffer of those that are used again: DALI's threads are not the only ones."""
        return None

    def put(self, item: Item, content: bytes | memoryview, stamp: int = 0) -> None:
        self.offers.append((item, content, stamp))


class _Files:
    """The files of a reader, by the numbers that it gives them."""

    def __init__(self, paths: list[str], labels: Sequence[int]) -> None:
        import numpy as np

        self.paths, self._labels = paths, np.array(labels, dtype=np.int32)

    def contents(self, numbers: list[Any]) -> tuple[list[Any], list[Any]]:
        """Contents and labels of a batch, as DALI's reader gives them."""
        chosen = [int(number.item()) for number in numbers]
        with _turn:
            batch = _Batch(job_cache())
            found = [self._content(batch, self.paths[at]) for at in chosen]
            batch._cache.put_all(batch.offers)
        return found, [self._labels[at : at + 1] for at in chosen]

    def _content(self, batch: _Batch, path: str) -> Any:
        import numpy as np

        view = read_cached(cast("JobCache", batch), path, len(self.paths))
        content = Path(path).read_bytes() if view is None else view
        return np.frombuffer(content, dtype=np.uint8) if len(content) else np.empty(0, np.uint8)


# -- checkpoints ----------------------------------------------------------------------------------
# A checkpoint of DALI lists its operators, ours among them though it has no state. It is taken out,
# and put in again, so that a checkpoint fits the program's own graph as well.


def _entry(name: str) -> bytes:
    """The field for an operator without a state, as protocol buffers write it."""
    text = name.encode()
    inner = b"\n" + _varint(len(text)) + text + b"\x12\x00"
    return b"\n" + _varint(len(inner)) + inner


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _with_ours(checkpoint: bytes, names: tuple[str, ...]) -> bytes:
    return b"".join(map(_entry, names)) + _without_ours(checkpoint, names)


def checkpoint_of(saving: Callable[..., bytes]) -> Callable[..., bytes]:
    """``Pipeline._get_checkpoint``, whose result holds nothing of our operators."""

    @wraps(saving)
    def save(self: Any, *args: Any, **kwargs: Any) -> bytes:
        return _without_ours(saving(self, *args, **kwargs), self.__dict__.get(_OURS) or ())

    return save


def _without_ours(checkpoint: bytes, names: tuple[str, ...]) -> bytes:
    if not names:
        return checkpoint
    ours = {_entry(name) for name in names}
    return b"".join(part for part in _parts(checkpoint) if part not in ours)


def _parts(message: bytes) -> Iterator[bytes]:
    """The fields of a message of which all are of variable length; else the rest as it is."""
    at = 0
    while at < len(message):
        start, size, shift = at, 0, 0
        if message[at] & 0x87 != 0x02:
            break
        at += 1
        while True:
            byte = message[at]
            at += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        at += size
        yield message[start:at]
    else:
        return
    yield message[at:]
