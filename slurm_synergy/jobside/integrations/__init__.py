"""Frameworks with a training loop or checkpoints of their own, each in a module of its own.

* ``lightning``: a callback for Lightning's Trainer
* ``huggingface``: a callback for the Trainer of transformers
* ``fsdp``: a model that is sharded over the ranks, through ``torch.distributed.checkpoint``

Plain DistributedDataParallel needs none of them: register the model as it is. Importing this
package imports no framework.
"""

from __future__ import annotations

__all__: list[str] = []
