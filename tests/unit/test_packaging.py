"""Manual pages, completion, and an installation in a directory of its own."""

from __future__ import annotations

import gzip
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
import yaml

from slurm_synergy.cli.commands import cli
from slurm_synergy.config import Settings, render_default_yaml
from slurm_synergy.controller.daemon import argument_parser
from slurm_synergy.nodehelper.parts import argument_parser as node_parser

ROOT = Path(__file__).resolve().parents[2]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return dict(_script("make_man").pages("2026-01-01"))


def test_there_is_a_page_for_every_program_and_the_settings(pages: dict[str, str]) -> None:
    assert set(pages) == {
        "synergyctl.1",
        "synergy-srun.1",
        "synergy-profile.1",
        "synergy.yaml.5",
        "slurm-synergyd.8",
    }
    for name, text in pages.items():
        assert text.startswith(".TH ")
        assert not re.search(r"@[A-Z_]+@", text), name
        assert {".SH NAME", ".SH SYNOPSIS", ".SH DESCRIPTION", ".SH SEE ALSO"} - set(
            text.splitlines()
        ) <= {".SH SYNOPSIS"}


def _plain(text: str) -> str:
    return text.replace(r"\-", "-").replace(r"\e", "\\")


def test_the_pages_name_every_command_option_and_key(pages: dict[str, str]) -> None:
    page = _plain(pages["synergyctl.1"])

    def check(group: click.Group, prefix: str) -> None:
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                check(command, f"{prefix}{name} ")
            else:
                assert f"\n.SS {prefix}{name}" in page
                for option in command.params:
                    assert isinstance(option, click.Argument) or option.opts[0] in page

    check(cli, "")
    shown = yaml.safe_load(render_default_yaml())
    settings = _plain(pages["synergy.yaml.5"])
    for section, keys in shown.items():
        names = [f"{section}.{key}" for key in keys] if isinstance(keys, dict) else [section]
        for name in names:
            assert f"{name}\n" in settings, name
    assert set(shown) == set(Settings.model_fields)
    for action in (*argument_parser()._actions, *node_parser()._actions):
        assert action.option_strings[-1] in _plain(pages["slurm-synergyd.8"])
    wrapper = _plain(pages["synergy-srun.1"])
    for word in ("--synergy-dry-run", "SYNERGY_ENDPOINT", "SYNERGY_STOP_SIGNAL"):
        assert f".B {word}" in wrapper


def test_text_from_programs_cannot_become_a_request(pages: dict[str, str]) -> None:
    escaped = _script("make_man").escaped
    assert escaped(".so /etc/passwd\n'x\\n") == "\\&.so /etc/passwd\n\\&'x\\en"


def test_groff_has_nothing_against_them(pages: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed (Debian: apt-get install groff)")
    for name, text in pages.items():
        file = tmp_path / name
        file.write_text(text)
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-z", str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), name


def _completed(words: str, function: str, tmp_path: Path) -> set[str]:
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("synergyctl", "slurm-synergyd"):
        module = "cli.main" if name == "synergyctl" else "cli.synergyd"
        program = programs / name
        program.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            f"from slurm_synergy.{module} import main\nsys.exit(main())\n"
        )
        program.chmod(0o755)
    script = (
        f"source {ROOT}/etc/completion.bash\nCOMP_WORDS=({words})\n"
        f'COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n{function}\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'
    )
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
    )
    return set(done.stdout.split())


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    assert _completed("synergyctl dra", "_synergyctl", tmp_path) == {"drain"}
    assert "--json" in _completed("synergyctl summary --", "_synergyctl", tmp_path)
    found = _completed("slurm-synergyd --d", "_slurm_synergyd", tmp_path)
    assert found == {"--dry-run"}


def _install(destdir: Path, script: str = "install.sh") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "DESTDIR": str(destdir),
        "PREFIX": "/usr",
        # The programs themselves: what they depend on is pip's part, and takes minutes.
        "PIP_OPTIONS": "--no-deps --no-index",
    }
    return subprocess.run(
        [str(ROOT / "scripts" / script), sys.executable],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


@pytest.mark.slow
def test_an_installation_has_its_files_where_admins_expect_them(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    pytest.importorskip("wheel")
    destdir = tmp_path / "root"
    settings = destdir / "etc/slurm-synergy/synergy.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text("mode: act\n")
    done = _install(destdir)
    assert done.returncode == 0, done.stderr
    assert settings.read_text() == "mode: act\n"  # the admin's own
    assert "is there and stays" in done.stdout

    for name, place in (
        ("synergyctl", "bin"),
        ("synergy-srun", "bin"),
        ("synergy-profile", "bin"),
        ("slurm-synergyd", "sbin"),
    ):
        link = destdir / "usr" / place / name
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        first = link.read_text().splitlines()[0]
        assert first == "#!/usr/lib/slurm-synergy/bin/python"
        assert os.access(link, os.X_OK)
    for page in ("man1/synergyctl.1", "man1/synergy-srun.1", "man5/synergy.yaml.5"):
        text = gzip.decompress((destdir / "usr/share/man" / f"{page}.gz").read_bytes())
        assert text.startswith(b".TH ")
    unit = (destdir / "usr/lib/systemd/system/slurm-synergyd.service").read_text()
    assert "\nExecStart=/usr/lib/slurm-synergy/bin/slurm-synergyd --config " in unit
    assert "/opt/" not in unit
    account = (destdir / "usr/lib/sysusers.d/slurm-synergy.conf").read_text()
    assert "\nu slurm-synergy " in account
    assert "\nUser=slurm-synergy\n" in unit
    share = destdir / "usr/share/slurm-synergy"
    assert (share / "job_submit.lua").read_text() == (ROOT / "etc/job_submit.lua").read_text()
    assert (share / "grafana/slurm-synergy.json").is_file()
    assert (destdir / "usr/share/bash-completion/completions/synergyctl").is_file()

    staged = str(destdir).encode()
    for file in destdir.rglob("*"):
        if file.is_symlink():
            continue
        mode = stat.S_IMODE(file.stat().st_mode)
        wanted = (0o755,) if file.is_dir() else (0o644, 0o755)
        assert mode in wanted or file == settings, f"{file}: {mode:o}"
        if file.is_file() and file.suffix != ".pyc":
            assert staged not in file.read_bytes(), file
    packages = next((destdir / "usr/lib/slurm-synergy/lib").glob("python3*/site-packages"))
    shown = subprocess.run(
        [sys.executable, "-c", "import slurm_synergy; print(slurm_synergy.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(packages)},
    )
    assert shown.stdout.startswith(str(packages))

    done = _install(destdir, "uninstall.sh")
    assert done.returncode == 0, done.stderr
    left = sorted(str(file.relative_to(destdir)) for file in destdir.rglob("*") if file.is_file())
    assert left == ["etc/slurm-synergy/synergy.yaml"]
    assert not [file for file in destdir.rglob("*") if file.is_symlink()]


@pytest.mark.slow
def test_a_debian_package_has_the_installation_and_says_what_it_needs(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    pytest.importorskip("wheel")
    base = Path("/usr/bin/python3")
    if shutil.which("dpkg-deb") is None or not base.exists():
        pytest.skip("dpkg-deb or /usr/bin/python3 is missing: no Debian")
    shown = subprocess.run([base, "--version"], capture_output=True, text=True, check=True)
    minor = int(shown.stdout.split(".")[1])
    if minor < 11:
        pytest.skip(f"the distribution's {shown.stdout.strip()} is too old")
    done = subprocess.run(
        [str(ROOT / "scripts" / "make-deb.sh"), sys.executable],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OUT": str(tmp_path), "PIP_OPTIONS": "--no-deps --no-index"},
    )
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("slurm-synergy_*.deb")
    assert done.stdout.strip() == str(package)

    def told(*argv: str) -> str:
        argv = ("dpkg-deb", argv[0], str(package), *argv[1:])
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    fields = dict(line.split(": ", 1) for line in told("--field").splitlines() if ": " in line)
    assert fields["Package"] == "slurm-synergy"
    assert f"python3 (>= 3.{minor}), python3 (<< 3.{minor + 1})" in fields["Depends"]
    assert "munge" in fields["Depends"]
    assert "slurm-client (>= 22.05)" in fields["Depends"]
    control = tmp_path / "control"
    told("--control", str(control))
    assert (control / "conffiles").read_text() == "/etc/slurm-synergy/synergy.yaml\n"
    for name in ("postinst", "prerm", "postrm"):
        assert os.access(control / name, os.X_OK)
        subprocess.run(["sh", "-n", str(control / name)], check=True)
    assert "systemd-sysusers slurm-synergy.conf" in (control / "postinst").read_text()
    root = tmp_path / "root"
    told("--extract", str(root))
    assert (root / "usr/bin/synergyctl").is_symlink()
    assert (root / "usr/lib/slurm-synergy/bin/python3").resolve() == base.resolve()
    for unit in ("slurm-synergyd", "slurm-synergyd-node"):
        text = (root / f"usr/lib/systemd/system/{unit}.service").read_text()
        assert "\nExecStart=/usr/lib/slurm-synergy/bin/slurm-synergyd " in text
    guides = root / "usr/share/doc/slurm-synergy"
    for page in ROOT.glob("docs/**/*.md"):
        assert (guides / page.relative_to(ROOT / "docs")).read_text() == page.read_text()
    owners = {line.split()[1] for line in told("--contents").splitlines()}
    assert owners == {"root/root"}


@pytest.mark.parametrize(("name", "value"), [("PREFIX", "usr"), ("PREFIX", "/a b")])
def test_a_place_that_cannot_be_used_is_refused_before_anything_is_done(
    tmp_path: Path, name: str, value: str
) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "install.sh"), sys.executable],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DESTDIR": str(tmp_path), name: value},
    )
    assert done.returncode == 2
    assert "install: " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_head_of_slurm_tree_is_its_help() -> None:
    script = str(ROOT / "scripts" / "slurm-tree.sh")
    shown = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("Tests on another Slurm release")
    assert "make DIR SUITE ARCHIVE [KEYRING]" in shown.stdout and "set -e" not in shown.stdout
    wrong = subprocess.run([script, "start"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "--help tells what they do" in wrong.stderr
