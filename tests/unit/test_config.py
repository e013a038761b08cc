"""Settings: what is accepted, what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from slurm_synergy.config import (
    Settings,
    load_settings,
    parse_address,
    parse_settings,
    render_default_yaml,
)
from slurm_synergy.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_shipped_file_is_the_rendered_defaults() -> None:
    assert (ROOT / "etc" / "synergy.yaml").read_text() == render_default_yaml()


def test_the_rendered_file_says_exactly_the_defaults() -> None:
    assert parse_settings(render_default_yaml()) == Settings()


def test_the_rendered_file_has_every_key_with_a_description() -> None:
    shown = yaml.safe_load(render_default_yaml())

    def check(model: type[BaseModel], values: dict[str, object]) -> None:
        assert list(values) == list(model.model_fields)
        for name, field in model.model_fields.items():
            assert field.description, name
            if isinstance(field.default, BaseModel):
                check(type(field.default), values[name])  # type: ignore[arg-type]

    check(Settings, shown)
    assert max(map(len, render_default_yaml().splitlines())) <= 100


def test_an_empty_file_and_commented_out_sections_mean_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("# nothing\n")
    assert load_settings(file) == Settings()
    file.write_text("slurm:\n  # conf: /x\nleases:\n  munge:\n")
    assert load_settings(file) == Settings()


def test_values_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        "scheduling: {policy: fifo, round_s: 10, poll_s: 0.5}\n"
        "leases: {listen: '[::1]:0', munge: {socket: /run/m}}\n"
        "operators: [root, 1000]\nenforcement: requeue\nstate_dir: /x/y\n"
    )
    settings = load_settings(file)
    assert settings.scheduling.round_s == 10.0
    assert settings.leases.munge.socket == Path("/run/m")
    assert settings.operators == ("root", 1000)
    assert settings.enforcement == "requeue"


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings().scheduling.round_s = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("scheduling: {polcy: srtf}", ("scheduling.polcy", "'srtf'", "did you mean 'policy'?")),
        ("leases: {munge: {sock: /x}}", ("leases.munge.sock", "did you mean 'socket'?")),
        ("foo: 1", ("foo = 1", "unknown key; known here: cluster, slurm")),
        ("scheduling: {round_s: '5m'}", ("scheduling.round_s = '5m'", "number", "seconds")),
        ("scheduling: {round_s: 0}", ("scheduling.round_s = 0", "more than 0;")),
        ("scheduling: {round_s: .nan}", ("scheduling.round_s", "finite")),
        ("scheduling: {dry_run: 1}", ("scheduling.dry_run = 1", "true or false")),
        ("scheduling: {poll_s: 9, round_s: 5}", ("scheduling", "must not exceed round_s")),
        ("scheduling: 5", ("scheduling = 5", "must be a section of keys")),
        ("scheduling: {sia: {power: 0}}", ("scheduling.sia.power = 0", "must not be 0")),
        ("scheduling: {sia: {most_factor: 1}}", ("scheduling.sia.most_factor = 1", "less than 1")),
        ("scheduling: {sia: {idle_cost: -1}}", ("scheduling.sia.idle_cost = -1",)),
        ("scheduling: {sia: {gap: 0}}", ("scheduling.sia.gap = 0",)),
        ("scheduling: {sia: {lambda: 1}}", ("scheduling.sia.lambda",)),
        (
            "scheduling: {gavel: {quantum_s: 0.5}}",
            ("scheduling.gavel.quantum_s = 0.5", "at least 1;", "How long a job keeps"),
        ),
        ("scheduling: {themis: {quantum_s: 1e9}}", ("scheduling.themis.quantum_s", "86400")),
        ("scheduling: {themis: {fills: 1}}", ("scheduling.themis.fills = 1", "true or false")),
        ("scheduling: {gavel: {quantum: 60}}", ("gavel.quantum = 60", "did you mean 'quantum_s'?")),
        ("scheduling: {shockwave: {rounds: 2.5}}", ("shockwave.rounds = 2.5", "whole number")),
        ("scheduling: {shockwave: {limit_s: 0}}", ("shockwave.limit_s = 0", "at least 0.1")),
        ("scheduling: {shockwave: {makespan: .inf}}", ("shockwave.makespan", "k: what a second")),
        ("scheduling: {pollux: {power: 0}}", ("pollux.power = 0", "must not be 0", "use -1")),
        ("scheduling: {pollux: {population: 1}}", ("pollux.population = 1", "at least 2")),
        ("scheduling: {pollux: {seed: -1}}", ("pollux.seed = -1", "at least 0")),
        ("scheduling: {pollux: fast}", ("scheduling.pollux = 'fast'", "a section of keys")),
        ("pool: {type_partitions: {a100: 'x y'}}", ("pool.type_partitions = 'x y'", "a name")),
        ("pool: {type_partitions: [a100]}", ("pool.type_partitions",)),
        ("enforcement: borow", ("enforcement = 'borow'", "auto, shared, borrow or requeue;")),
        (
            "enforcement: often",
            ("enforcement = 'often'", "must be one of auto, shared, borrow or requeue;"),
        ),
        ("leases: {listen: here}", ("leases.listen = 'here'", "HOST:PORT")),
        ("slurm: {conf: etc/slurm.conf}", ("slurm.conf = 'etc/slurm.conf'", "absolute path")),
        (
            "slurm: {partition: 'a b'}",
            ("slurm.partition = 'a b'", "must be a name: letters, digits"),
        ),
        ("operators: []", ("operators", "at least 1")),
        ("operators: root", ("operators = 'root'", "must be a list, e.g. [root]")),
        ("leases: {advertise: '0.0.0.0:1'}", ("leases.advertise", "nobody can call")),
        ("log_level: info\nlog_level: debug", ("line 2", "'log_level' is written twice")),
        ("a: [", ("line 1", "not valid YAML")),
        ("[1]", ("must be a mapping", "not a list")),
        ("hello", ("must be a mapping of sections, not 'hello';",)),
        ("scheduling: {round_s: '300'}", ("round_s = '300'", "number, without quotes")),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(text, file="/etc/s.yaml")
    message = str(caught.value)
    assert message.startswith("/etc/s.yaml")
    for jargon in ("Settings", "tuple", "dictionary", "instance", "pattern", "Input"):
        assert jargon not in message
    for part in parts:
        assert part in message


def test_a_missing_and_an_unreadable_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*no such file.*config --default"):
        load_settings(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"cluster: {name: \xff}")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_settings(tmp_path / "latin.yaml")


def test_the_reservation_has_a_name_of_its_own_per_controller() -> None:
    assert Settings().reservation_name == "synergy"
    other = parse_settings("cluster: {controller_name: blue}")
    assert other.reservation_name == "synergy-blue"
    assert parse_settings("pool: {reservation_name: dl}").reservation_name == "dl"


def test_addresses_are_read_and_refused() -> None:
    assert parse_address("head:7737") == ("head", 7737)
    assert parse_address("[fe80::1]:0") == ("fe80::1", 0)
    for wrong in (
        "head",
        "head:",
        ":7",
        "head:70000",
        "head:x",
        "::1:7",
        "a b:7",
        "http://h:1",
        "h:١",
    ):
        with pytest.raises(ValueError, match=r"port|HOST:PORT|brackets"):
            parse_address(wrong)
