"""The fault matrix: one row per test, its words in the marker ``fault``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_site import FAULT_CONF, FAULT_NODES, Site

from slurm_synergy.devcluster import DevCluster

ROW = ("broken", "happens", "seen")
"""What every row says: what is broken and when, what happens, what the user or admin sees."""


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers", "fault(broken, happens, seen, everywhere=True): a row of docs/faults.md"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rows that are not ``everywhere`` run with SYNERGY_FAULTS=all only, as `make faults` sets."""
    for item in items:
        marker = item.get_closest_marker("fault")
        if marker is None or Path(__file__).parent not in item.path.parents:
            continue
        for key in ROW:
            item.user_properties.append((key, marker.kwargs[key]))
        # Each wait has a deadline of its own, with words; this one has none.
        item.add_marker(pytest.mark.timeout(900))
        everywhere = marker.kwargs.get("everywhere", True)
        item.user_properties.append(("everywhere", "yes" if everywhere else "no"))
        if not everywhere and os.environ.get("SYNERGY_FAULTS") != "all":
            item.add_marker(pytest.mark.skip(reason="in `make faults` only (SYNERGY_FAULTS=all)"))


EPILOG = """#!/bin/bash
# Hangs for as many seconds as the file says.
[ -f '{flag}' ] && sleep "$(cat '{flag}')"
exit 0
"""


@pytest.fixture(scope="module")
def epilog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The epilog of all jobs; it hangs while the file ``hangs`` is beside it."""
    path = tmp_path_factory.mktemp("epilog") / "epilog"
    path.write_text(EPILOG.format(flag=path.with_name("hangs")), encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def epilog_hangs(epilog: Path) -> Iterator[Path]:
    """The file whose number of seconds every epilog sleeps while it is there."""
    yield epilog.with_name("hangs")
    epilog.with_name("hangs").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def fault_cluster(epilog: Path) -> Iterator[DevCluster]:
    """A cluster that the cases of one file share, and put in order again after each case."""
    conf = (*FAULT_CONF, f"Epilog={epilog}")
    with DevCluster(nodes=FAULT_NODES, real_node=False, extra_conf=conf) as cluster:
        yield cluster


@pytest.fixture
def site(
    fault_cluster: DevCluster, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Site]:
    """The world of one case. What it records goes to the results, for docs/faults.md."""
    one = Site(
        fault_cluster,
        tmp_path,
        lambda name, value: request.node.user_properties.append((name, value)),
    )
    yield one
    one.close()
