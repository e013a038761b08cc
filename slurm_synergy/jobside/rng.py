"""The random number generators of a process: saved, restored, seeded.

States are numbers and tensors only, so that they can be written without pickling. Only the
libraries that the program itself has imported are looked at.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["capture_rng", "restore_rng", "seed_rng"]


def _torch() -> Any:
    return sys.modules.get("torch")


def capture_rng() -> dict[str, Any]:
    """The states of Python's, NumPy's and PyTorch's generators, as numbers and tensors."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(words), gauss]}
    if "numpy.random" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy.random"].get_state()
        state["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(cached)]
    torch = _torch()
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the generators back to what :func:`capture_rng` saw."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state and "numpy.random" in sys.modules:
        numpy = sys.modules["numpy"]
        name, keys, position, has_gauss, cached = state["numpy"]
        words_of_32_bit = numpy.array(keys, dtype=numpy.uint32)
        numpy.random.set_state((name, words_of_32_bit, position, has_gauss, cached))
    torch = _torch()
    if torch is not None and "torch" in state:
        torch.set_rng_state(state["torch"])
        saved = state.get("cuda", [])
        if saved and torch.cuda.is_available():
            for device in range(min(len(saved), torch.cuda.device_count())):
                torch.cuda.set_rng_state(saved[device], device)


def seed_rng(seed: int) -> None:
    """Seed all generators: for a rank that the checkpoint has no state of."""
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed & 0xFFFFFFFF)
    torch = _torch()
    if torch is not None:
        torch.manual_seed(seed)
