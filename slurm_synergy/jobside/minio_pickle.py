"""Any item of a data set as bytes of the data cache, and back.

A pickle, behind the content of its larger arrays and tensors: this way they need not be copied out
of the cache by somebody who only reads them. In this order: a zero and the number of arrays (4
bytes each), their lengths (8 bytes each), the arrays (from multiples of 8 on), the pickle. Without
such arrays it is the pickle alone, which never begins with a zero.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import warnings
from typing import Any

__all__ = ["packed", "unpacked"]

_START = struct.Struct("<II")
_NONE = bytes(4)
_APART_BYTES = 1024
_ZEROS = bytes(8)

_warned = False


class _Pickler(pickle.Pickler):
    """Tensors as the arrays they are: torch's own way makes a file of each."""

    def reducer_override(self, thing: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(thing) is not torch.Tensor or thing.requires_grad:
            return NotImplemented
        plain = thing.device.type == "cpu" and thing.layout is torch.strided
        if not plain or thing.is_conj() or thing.is_neg() or thing.dtype in _no_arrays(torch):
            return NotImplemented
        array = thing.numpy()
        if not array.size or not array.flags.c_contiguous:
            return _tensor, (array,)
        return _tensor_over, (pickle.PickleBuffer(array), array.dtype.str, array.shape)


def _no_arrays(torch: Any) -> tuple[Any, ...]:
    names = ("bfloat16", "complex32", "float8_e4m3fn", "float8_e5m2", "quint8", "qint8", "qint32")
    return tuple(getattr(torch, name) for name in names if hasattr(torch, name))


def _tensor_over(buffer: Any, kind: str, shape: tuple[int, ...]) -> Any:
    """In fewer steps than by way of numpy's own pickles."""
    import numpy as np

    array = np.frombuffer(buffer, dtype=kind)
    return _tensor(array if len(shape) == 1 else array.reshape(shape))


def _tensor(array: Any) -> Any:
    import torch

    global _warned
    if not _warned and not array.flags.writeable:
        _warned = True
        # PyTorch says it once: who asked for views knows that they are not to be written.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.from_numpy(array)
    return torch.from_numpy(array)


def packed(thing: Any) -> bytes:
    """``thing`` as bytes. Raises what pickling it raises."""
    arrays: list[memoryview] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.readonly or len(raw) < _APART_BYTES:
            return True
        arrays.append(raw)
        return False

    target = io.BytesIO()
    _Pickler(target, protocol=5, buffer_callback=stays_inside).dump(thing)
    if not arrays:
        return target.getvalue()
    lengths = [len(each) for each in arrays]
    pieces: list[bytes | memoryview] = [
        _START.pack(0, len(arrays)),
        struct.pack(f"<{len(arrays)}Q", *lengths),
    ]
    for each in arrays:
        pieces.append(each)
        pieces.append(_ZEROS[: -len(each) & 7])
    pieces.append(target.getbuffer())
    return b"".join(pieces)


def unpacked(content: memoryview, *, shared: bool = False) -> Any:
    """What :func:`packed` made bytes of; a new object each time.

    With ``shared`` its larger arrays and tensors are parts of ``content``, and not to be written.
    """
    if len(content) < _START.size or content[:4] != _NONE:
        return pickle.loads(content)
    count = _START.unpack_from(content)[1]
    at = _START.size + 8 * count
    arrays: list[memoryview | bytearray] = []
    for length in struct.unpack_from(f"<{count}Q", content, _START.size):
        array = content[at : at + length]
        arrays.append(array if shared else bytearray(array))
        at += length + (-length & 7)
    return pickle.loads(content[at:], buffers=arrays)
