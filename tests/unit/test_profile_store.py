"""Measured profiles: as documents, in the ledger, over the service, and on the command line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from manual_clock import ManualClock
from ran import Ran
from service_world import ServiceWorld

from slurm_synergy.cli import control, profile_cmd
from slurm_synergy.cli.control import Target, ask
from slurm_synergy.controller import profile_shelf
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.profile_shelf import ProfileShelf
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import PipelineModel, Plan, Profile, ProfileOrigin
from slurm_synergy.errors import LeaseError, ModelError
from slurm_synergy.profiler.documents import from_document, to_document
from slurm_synergy.profiler.evidence import (
    UNTYPED,
    Evidence,
    StoredProfile,
    checked_key,
    merged,
)
from slurm_synergy.profiler.sweep import Confidence, Measurement

UID = os.getuid()


def stored(key: str = "mine", owner_uid: int = UID, **changes: Any) -> StoredProfile:
    profile = Profile(
        key=key,
        gpu_rate_per_gpu={"v100": 1000.0},
        pipeline=PipelineModel(
            preprocess=((1, 100.0), (10, 1000.0), (24, 2400.0)),
            dataset_mib=50_000.0,
            samples_per_epoch=500_000,
            process_mem_mib=4096,
        ),
        origin=ProfileOrigin.MEASURED,
        sample_count=400,
    )
    evidence = Evidence(
        gpu_type="v100",
        gpus=1,
        most_cpus=24,
        proportional_cpus=3,
        points=(
            Measurement(cpus=24, samples_per_s=1000.0, iterations=50, wait_share=0.01),
            Measurement(cpus=1, samples_per_s=100.0, iterations=50, busy_samples_per_s=990.0),
        ),
        confidence=Confidence.HIGH,
        measured_s=1_700_000_000.0,
        owner_uid=owner_uid,
        source="synergy-profile on somewhere",
        data="data set 50000 MiB in 500000 items, in memory",
    )
    return StoredProfile(profile=profile, evidence=replace(evidence, **changes))


# -- documents -------------------------------------------------------------------------------------


def test_a_document_comes_back_as_it_was_also_over_json() -> None:
    table = StoredProfile(profile=CATALOGUE["resnet18-imagenet"])
    for one in (stored(), table, stored(confidence=Confidence.LOW, why="cut off")):
        text = json.dumps(to_document(one), allow_nan=False)
        assert from_document(json.loads(text)) == one


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("format",), "else", "this is no profile"),
        (("version",), 2, "version 2; 1 can be read"),
        (("key",), "no spaces please", "is no profile key"),
        (("key",), "x" * 101, "is no profile key"),
        (("samples_per_s_per_gpu",), {"v100": "fast"}, "samples_per_s_per_gpu.v100: expected a"),
        (("samples_per_s_per_gpu",), {"v100": -1}, "must be positive"),
        (("pipeline", "preprocess"), 5, "pipeline.preprocess: expected a list"),
        (("pipeline", "preprocess"), [{"cpus": 1.5, "samples_per_s": 1}], "[0].cpus: expected a"),
        (("pipeline", "storage_mib_s"), -3, "out of range"),
        (("evidence", "confidence"), "sure", "'sure' is not known"),
        (("evidence", "points"), [{}] * 257, "at most 256 entries"),
        (("evidence", "source"), "x" * 401, "at most 400 characters"),
        (("evidence", "why"), "so\nrm -rf", "control characters"),
        (("evidence", "source"), "\x1b[2J", "control characters"),
        (("samples_per_s_per_gpu",), {"v\x1b[2J": 1.0}, "is no name"),
        (("samples_per_s_per_gpu",), {f"g{i}": 1.0 for i in range(257)}, "at most 256 entries"),
        # Large and small enough to make a round compute with infinities.
        (("samples_per_s_per_gpu",), {"v100": 1e300}, "v100: 1e+300 is not within"),
        (("samples_per_s_per_gpu",), {"v100": 10**400}, "v100: 1000"),
        (("samples_per_s_per_gpu",), {"v100": float("nan")}, "v100: nan is not within"),
        (("samples_per_s_per_gpu",), {"v100": 5e-324}, "is less than"),
        (("pipeline", "process_mem_mib"), 10**400, "is not within"),
        (("pipeline", "process_mem_mib"), -1, "-1 is negative"),
        (("restart_s",), -5, "restart_s: -5 is negative"),
        (("table",), {"cpus_per_gpu": [10**400]}, "is not a fitting number"),
        (("table",), {"cpus_per_gpu": [float("inf")]}, "is not a fitting number"),
        (("origin",), "stars", "'stars' is not known"),
    ],
)
def test_a_document_that_is_wrong_is_refused_naming_the_place(
    place: tuple[str, ...], value: object, words: str
) -> None:
    document = to_document(stored())
    inner = document
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    with pytest.raises(ModelError, match=re.escape(words)):
        from_document(document)
    for nonsense in (None, [], "x", {}, {"format": 5}):
        with pytest.raises(ModelError):
            from_document(nonsense)


def test_gpu_rates_of_other_types_are_kept_when_one_is_measured() -> None:
    old = replace(stored().profile, gpu_rate_per_gpu={"v100": 900.0, "a100": 2000.0})
    assert merged(stored().profile, old).gpu_rate_per_gpu == {"v100": 1000.0, "a100": 2000.0}
    built_in = replace(old, origin=ProfileOrigin.CATALOGUE)
    for other in (None, built_in, replace(old, key="else")):
        assert merged(stored().profile, other) == stored().profile


def test_keys_are_those_of_the_hint() -> None:
    assert checked_key("run-1.2_x") == "run-1.2_x"
    for wrong in ("", "-x", "a b", "a/b", "a\n"):
        with pytest.raises(ModelError, match="no profile key"):
            checked_key(wrong)


# -- the ledger ------------------------------------------------------------------------------------


def test_the_ledger_keeps_profiles_with_what_they_rest_on(
    tmp_path: Path, clock: ManualClock
) -> None:
    with Ledger(tmp_path, clock=clock) as ledger:
        ledger.save_profile(stored("b").profile, stored("b").evidence)
        ledger.save_profile(Profile(key="a", gpu_rate_per_gpu={"v100": 1.0}))
    with Ledger(tmp_path, clock=clock) as ledger:
        assert ledger.stored_profiles() == (
            StoredProfile(profile=Profile(key="a", gpu_rate_per_gpu={"v100": 1.0})),
            stored("b"),
        )
        assert ledger.stored_profile("b") == stored("b")
        assert ledger.profile("b") == stored("b").profile
        assert ledger.forget_profile("b")
        assert not ledger.forget_profile("b")
        assert ledger.stored_profile("b") is None


def test_nobody_changes_what_others_rely_on(tmp_path: Path, clock: ManualClock) -> None:
    def document(one: StoredProfile) -> str:
        return json.dumps(to_document(one))

    operators = frozenset({0})
    with Ledger(tmp_path, clock=clock) as ledger:
        shelf = ProfileShelf(ledger, CATALOGUE.get)

        def keys(uid: int) -> list[str]:
            seen: Any = shelf.profiles(viewer_uid=uid, operators=operators)["profiles"]
            return [one["key"] for one in seen]

        # Whatever a document says, a user's profile is the user's.
        shelf.import_profile(document(stored("theirs", 0)), uid=1001, operators=operators)
        found = ledger.stored_profile("theirs")
        assert found is not None
        assert found.evidence is not None
        assert found.evidence.owner_uid == 1001
        for call in (
            lambda: shelf.import_profile(document(stored("theirs")), uid=2, operators=operators),
            lambda: shelf.forget_profile("theirs", uid=2, operators=operators),
        ):
            with pytest.raises(LeaseError, match=r"belongs to .*: only the owner"):
                call()
        assert (keys(1001), keys(2), keys(0)) == (["theirs"], [], ["theirs"])
        # What an operator imported is for all, and only operators replace what is built in.
        name = "resnet18-imagenet"
        with pytest.raises(LeaseError, match="is built in: take another key"):
            shelf.import_profile(document(stored(name)), uid=1001, operators=operators)
        shelf.import_profile(document(stored(name, 0)), uid=0, operators=operators)
        assert keys(2) == [name]
        plain = StoredProfile(profile=stored("plain").profile)
        with pytest.raises(LeaseError, match="says nothing about its measurement"):
            shelf.import_profile(document(plain), uid=1001, operators=operators)
        shelf.import_profile(document(plain), uid=0, operators=operators)
        assert keys(2) == ["plain", name]
        assert shelf.forget_profile("theirs", uid=1001, operators=operators)["forgotten"]
        with pytest.raises(LeaseError, match=r"no profile is kept under 'theirs'$"):
            shelf.forget_profile("theirs", uid=1001, operators=operators)
        with pytest.raises(LeaseError, match="it is built in, and stays"):
            shelf.forget_profile("m5-audio", uid=0, operators=operators)
        # A job of theirs that names no key would believe it.
        for key in ("u1002-run-train-0123456789abcdef0123", "u0-run-0a"):
            with pytest.raises(LeaseError, match="jobs of another user that name no key"):
                shelf.import_profile(document(stored(key)), uid=1001, operators=operators)
        for key in ("u1001-run-0123456789abcdef0123", "u2-net"):
            shelf.import_profile(document(stored(key)), uid=1001, operators=operators)
        for nonsense in ("", "{", "[" * 100_000, '{"format": 1}'):
            with pytest.raises(LeaseError, match="cannot be imported"):
                shelf.import_profile(nonsense, uid=0, operators=operators)


def test_a_user_cannot_fill_the_store(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_shelf, "MOST_OF_A_USER", 3)
    with Ledger(tmp_path, clock=clock) as ledger:
        shelf = ProfileShelf(ledger, CATALOGUE.get)
        for number in range(3):
            one = stored(f"p{number}", 1001)
            ledger.save_profile(one.profile, one.evidence)
        text = json.dumps(to_document(stored("more")))
        with pytest.raises(LeaseError, match="has 3 profiles"):
            shelf.import_profile(text, uid=1001, operators=frozenset({0}))
        assert shelf.import_profile(text, uid=1002, operators=frozenset({0}))["key"] == "more"
        text = json.dumps(to_document(stored("p1")))
        assert shelf.import_profile(text, uid=1001, operators=frozenset({0}))["replaced"]


# -- the command line ------------------------------------------------------------------------------


@pytest.fixture
def world(
    tmp_path: Path, munge_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServiceWorld]:
    world = ServiceWorld(tmp_path / "state", munge_socket, operators=frozenset({UID}))
    monkeypatch.setenv("SYNERGY_ENDPOINT", world.server.endpoint)
    monkeypatch.setenv("SYNERGY_MUNGE_SOCKET", str(munge_socket))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    yield world
    world.close()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SYNERGY_ENDPOINT", raising=False)
    monkeypatch.setattr(control, "DEFAULT_PATH", tmp_path / "none.yaml")
    monkeypatch.setattr(control, "ENDPOINT_FILE", tmp_path / "none")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def document_file(tmp_path: Path, one: StoredProfile) -> Path:
    path = tmp_path / f"{one.profile.key}.json"
    path.write_text(json.dumps(to_document(one)), encoding="utf-8")
    return path


def test_a_profile_is_imported_listed_shown_exported_and_forgotten(
    world: ServiceWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = document_file(tmp_path, stored())
    assert Ran(capsys, "profile", "import", str(file)).out == "profile mine: kept\n"
    assert Ran(capsys, "profile", "import", str(file)).out == "profile mine: replaced\n"
    listed = json.loads(Ran(capsys, "profile", "list", "--json").out)["profiles"]
    assert [one["profile"] for one in listed[:2]] == ["mine", "alexnet-imagenet"]
    assert listed[0]["saturating_cores_per_gpu"] == {"v100": 10.0}
    assert (listed[0]["confidence"], listed[1]["confidence"]) == ("high", None)
    row = Ran(capsys, "profile", "list").out.splitlines()[1]
    assert re.search(r"^mine .* 1000 +10 +48\.8G +measured, confidence high, of \w+$", row)
    shown = Ran(capsys, "profile", "show", "mine").out
    assert "mine (from the controller's store)" in shown
    assert "on 1 GPU of type v100 with up to 24 cores: synergy-profile on somewhere" in shown
    assert "\ndata set 50000 MiB in 500000 items, in memory\n" in shown
    assert re.search(r"^24 +1000 +50 +1%$", shown, re.MULTILINE)
    assert (
        "data set 48.8 GiB in 500000 samples, storage taken not to limit, processes 4 GiB" in shown
    )
    copy = tmp_path / "copy.json"
    assert Ran(capsys, "profile", "export", "mine", "--output", str(copy)).status == 0
    assert from_document(json.loads(copy.read_text(encoding="utf-8"))) == stored()
    assert json.loads(Ran(capsys, "profile", "export", "mine").out) == to_document(stored())
    assert Ran(capsys, "profile", "forget", "mine").out == "profile mine: forgotten\n"
    gone = Ran(capsys, "profile", "forget", "mine")
    assert (gone.status, "no profile is kept under 'mine'" in gone.err) == (1, True)


def test_a_profile_without_a_gpu_type_gets_one_of_the_cluster(
    world: ServiceWorld,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds: list[str] = []
    plain_ask = ask

    def ask_with_nodes(target: Target, what: str, **given: Any) -> Any:
        if what == "status":
            return {"nodes": [{"gpu_type": kind, "gpus": 4} for kind in kinds]}
        return plain_ask(target, what, **given)

    def imported(*options: str) -> Ran:
        return Ran(capsys, "profile", "import", str(file), *options)

    def kept_as() -> dict[str, float]:
        document = json.loads(Ran(capsys, "profile", "export", "mine").out)
        assert document["evidence"]["gpu_type"] in document["samples_per_s_per_gpu"]
        rates: dict[str, float] = document["samples_per_s_per_gpu"]
        return rates

    monkeypatch.setattr(profile_cmd, "ask", ask_with_nodes)
    typed = stored()
    assert typed.evidence is not None
    untyped = StoredProfile(
        profile=replace(typed.profile, gpu_rate_per_gpu={UNTYPED: 1000.0}),
        evidence=replace(typed.evidence, gpu_type=UNTYPED),
    )
    file = document_file(tmp_path, untyped)
    kinds[:] = ["a100", "gpu"]  # there are nodes to which it applies as it is
    assert imported().out == "profile mine: kept\n"
    assert kept_as() == {"gpu": 1000.0}
    kinds[:] = ["a100", "a100"]
    assert imported().out == "profile mine: replaced, for GPUs of type a100\n"
    assert kept_as() == {"a100": 1000.0}
    kinds[:] = ["a100", "v100"]
    refused = imported()
    assert refused.status == 1
    assert "this cluster has a100, v100: import it with --gpu-type" in refused.err
    assert imported("--gpu-type", "v100").out == "profile mine: replaced, for GPUs of type v100\n"
    unknown = imported("--gpu-type", "h100")
    assert unknown.status == 1
    assert "--gpu-type 'h100': this cluster has a100, v100; name the one" in unknown.err
    file = document_file(tmp_path, typed)
    assert "was measured on 'v100': leave its type" in imported("--gpu-type", "a100").err


def test_one_profile_that_cannot_be_read_does_not_hide_the_others(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    for one in (stored("good"), stored("odd", gpu_type="v\n")):
        world.ledger.save_profile(one.profile, one.evidence)
    listed = Ran(capsys, "profile", "list", "--json")
    assert json.loads(listed.out)["profiles"][0]["profile"] == "good"
    assert '"odd"' not in listed.out
    assert "left out, as it cannot be read: odd: profile.evidence.gpu_type" in listed.err


def test_a_credential_is_good_for_the_one_document_that_it_was_made_for(
    world: ServiceWorld, munge_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slurm_synergy.controller import auth

    honest = auth.control_payload
    target = Target(endpoint=world.server.endpoint, source="test", munge_socket=munge_socket)
    # On the way somebody else's document was put into the call.
    monkeypatch.setattr(auth, "control_payload", lambda nonce, body="": honest(nonce, "another"))
    with pytest.raises(LeaseError, match="made for another call"):
        ask(target, "import", body=json.dumps(to_document(stored())))
    assert world.ledger.stored_profiles() == ()


def test_without_a_controller_files_own_profiles_and_the_catalogue_are_found(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = Ran(capsys, "profile", "list")
    assert listed.status == 0
    assert "resnet18-imagenet" in listed.out
    assert "without the controller's store" in listed.err
    folder = tmp_path / "data" / "slurm-synergy" / "profiles"
    folder.mkdir(parents=True)
    document_file(folder, stored("own"))
    assert "own (from /" in Ran(capsys, "profile", "show", "own").out
    file = document_file(tmp_path, stored("file"))
    assert "file (from /" in Ran(capsys, "profile", "show", str(file)).out
    missing = Ran(capsys, "profile", "show", "nothing")
    assert missing.status == 1
    assert "there is no profile 'nothing'" in missing.err
    broken = tmp_path / "broken.json"
    broken.write_text("{}", encoding="utf-8")
    wrong = Ran(capsys, "profile", "show", str(broken))
    assert (wrong.status, str(broken) in wrong.err) == (1, True)


def test_a_profile_is_drawn_in_the_terminal_and_as_png(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = document_file(tmp_path, stored())
    drawn = Ran(capsys, "profile", "plot", str(file), "--cpus", "12").out.splitlines()
    assert drawn[0] == "mine on 1 GPU of type v100: 100% = 1000 samples/s"
    assert re.search(r"^ +5 +50% ", drawn[-5])
    assert drawn[-1].split()[0] == "1"
    pytest.importorskip("matplotlib")
    png = tmp_path / "w.png"
    done = Ran(capsys, "profile", "plot", "resnet18-imagenet", "--output", str(png))
    assert done.status == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    unknown = Ran(capsys, "profile", "plot", str(file), "--gpu-type", "h100")
    assert (unknown.status, "knows no GPU type 'h100', only v100" in unknown.err) == (1, True)


def test_advice_is_ready_to_be_put_into_a_script(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = document_file(tmp_path, stored())
    assert Ran(capsys, "advise", str(file)).out.splitlines()[2:] == [
        "# v100, 1 GPU: 10 cores reach 100% of your speed (1000 samples/s), 9 reach 90%",
        "#SBATCH --gres=gpu:v100:1",
        "#SBATCH --cpus-per-task=10",
        "#SBATCH --mem=4G",
    ]
    content = json.loads(Ran(capsys, "advise", str(file), "--json").out)
    assert [one["cpus"] for one in content["advice"][0]["sizes"]] == [10, 9]
    low = document_file(tmp_path, stored("low", confidence=Confidence.LOW, why="cut off"))
    assert "# confidence is low: cut off" in Ran(capsys, "advise", str(low)).out
    many = Ran(capsys, "advise", str(file), "--gpus", "16")
    assert many.status == 1
    assert "v100: 16 GPUs are more than the 8 of such a node; give fewer with --gpus" in many.err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ("advise", "{bare}"),
            "does not say how fast data gets ready with how many cores: measure",
        ),
        (("profile", "plot", "{bare}"), "does not say how fast data gets ready"),
        (("advise", "{norate}"), "knows the speed of no GPU type: measure it with synergy-profile"),
        (("profile", "plot", "{norate}"), "knows the speed of no GPU type"),
        (("advise", "{dir}"), "{dir}: cannot be read: Is a directory; name a readable file"),
        (("advise", "{dir}/no.json"), "no.json: there is no such file; name one, or a profile"),
        (("profile", "plot", "{good}", "--gpu-type", ""), "knows no GPU type '', only v100"),
        (("profile", "plot", "{big}", "--mem-gib", "1"), "--mem-gib = 1: is less than the 3 GiB"),
        (
            ("profile", "export", "{good}", "--output", "{dir}/a/b"),
            "--output = '{dir}/a/b': cannot",
        ),
        (("profile", "plot", "{good}", "--output", "{dir}/a/b.png"), "name a file in a directory"),
        (("profile", "import", "{dir}/empty.json"), "empty.json: not a profile"),
        (("profile", "import", "{norate}"), "samples_per_s_per_gpu: names no GPU type"),
        (("profile", "forget", "a b"), "'a b' is no profile key"),
        (("advise", "12_3"), "the controller's address is not known"),
    ],
)
def test_wrong_input_is_named_with_its_remedy(
    alone: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    told: str,
) -> None:
    """Also: what is wrong in the input is said before a controller is looked for."""
    if "plot" in argv and "--output" in argv:
        pytest.importorskip("matplotlib")
    good = stored()
    assert good.profile.pipeline is not None
    large = replace(good.profile.pipeline, process_mem_mib=3 * 1024)
    places = {
        "good": good.profile,
        "bare": replace(good.profile, pipeline=None),
        "norate": replace(good.profile, gpu_rate_per_gpu={}),
        "big": replace(good.profile, pipeline=large),
    }
    named = {
        name: str(document_file(tmp_path, replace(good, profile=replace(one, key=name))))
        for name, one in places.items()
    }
    folder = tmp_path / "dir.json"
    folder.mkdir()
    (folder / "empty.json").touch()
    named["dir"] = str(folder)
    ran = Ran(capsys, *(part.format(**named) for part in argv))
    assert ran.status in (1, 2)
    assert told.format(**named) in ran.err
    assert "Traceback" not in ran.err


def test_advice_for_a_job_takes_its_profile_its_gpus_and_the_clusters_nodes(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    one = stored("mine")
    world.ledger.save_profile(one.profile, one.evidence)
    lease = world.grant(1, 10, uid=UID)
    plan = Plan(round=3, policy="srtf", mechanism="tune", placements=(lease.placement,), waiting={})
    world.publish((world.status(1, lease=lease), world.status(2)), plan)
    world.observe((world.status(1, lease=lease), world.status(2)), profile_key="mine")
    out = Ran(capsys, "advise", "1").out
    assert "# v100, 2 GPUs: 20 cores reach 100% of your speed (2000 samples/s), 18 reach 90%" in out
    nobody = Ran(capsys, "advise", "77")
    assert (nobody.status, "knows no job 77: name a queued" in nobody.err) == (1, True)
    member = Ran(capsys, "advise", "77_1")
    assert (member.status, "knows no job 77_1" in member.err) == (1, True)
    world.observe((world.status(2),))
    unknown = Ran(capsys, "advise", "2")
    assert (unknown.status, "the profile of job 2 is not known" in unknown.err) == (1, True)
