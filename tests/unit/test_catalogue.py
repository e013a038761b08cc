from __future__ import annotations

import pytest
from builders import job, node, pending

from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import ProfileOrigin
from slurm_synergy.core.pipeline import demand, job_rate, proportional_share


def test_every_entry_is_complete_and_named_by_its_key() -> None:
    for key, entry in CATALOGUE.items():
        assert entry.key == key
        assert entry.origin is ProfileOrigin.CATALOGUE
        assert set(entry.gpu_rate_per_gpu) == {"v100", "a100"}
        assert entry.pipeline is not None and entry.pipeline.process_mem_mib > 0


# Published for one V100 at 3 cores and 62.5 GB: best speed-up over that share.
@pytest.mark.parametrize(
    ("key", "speedup"),
    [
        ("alexnet-imagenet", 2.94),
        ("shufflenet-imagenet", 2.89),
        ("resnet18-imagenet", 2.4),
        ("mobilenet-imagenet", 1.55),
        ("resnet50-imagenet", 1.15),
        ("m5-audio", 2.5),
        ("deepspeech2-librispeech", 1.0),
        ("gnmt-wmt16", 1.0),
        ("transformerxl-wikitext103", 1.0),
        ("lstm-wikitext2", 1.0),
    ],
)
def test_the_published_speedup_comes_out_at_the_demand(key: str, speedup: float) -> None:
    status = pending(job(), CATALOGUE[key])
    share = proportional_share(status, node(), 1)
    wish = demand(status, node(), 1)
    full = type(share)(gpus=1, cpus=wish.cpus, mem_mib=wish.mem_mib)
    base = job_rate(CATALOGUE[key], "v100", [share])
    best = job_rate(CATALOGUE[key], "v100", [full])
    assert base is not None and best is not None
    assert best / base == pytest.approx(speedup, rel=0.035)


def test_audio_meets_the_published_memory_columns() -> None:
    entry = CATALOGUE["m5-audio"]
    status = pending(job(), entry)
    base = job_rate(entry, "v100", [proportional_share(status, node(), 1)])
    for mem_gb, relative in [(62.5, 1.5), (125.0, 2.0), (187.5, 2.5)]:
        mem_mib = round(mem_gb * 1e9 / 2**20)
        share = type(proportional_share(status, node(), 1))(gpus=1, cpus=12, mem_mib=mem_mib)
        rate = job_rate(entry, "v100", [share])
        assert base is not None and rate is not None
        # The table counts all memory as cache, the model takes the processes' off first.
        assert relative * 0.85 <= rate / base <= relative * 1.02
