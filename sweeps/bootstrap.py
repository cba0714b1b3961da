"""Find or make the Python environment of a make target, and print the interpreter to use.

    python3 sweeps/bootstrap.py [EXTRA …] [EXTRA? …]

This runs before anything is installed, so it uses only the standard library. It tries in order:

1. If ``PYTHON`` has everything, and its PyTorch sees the GPU if there is one, it is used. No
   environment is made and no index is asked.
2. If its PyTorch sees the GPU but something else is missing, ``.venv`` is made on top of it and
   only the missing packages are added: on a GPU node the installed PyTorch fits the driver.
3. Otherwise ``.venv`` gets everything, pinned by ``constraints.txt``.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "rooftile-ready"
FAILED = ROOT / ".venv-failed"
"""File that says which optional extras could not be installed, and when.

They are not tried again for a day."""
_DAY = 86_400.0

POINTING_MODULE = "rooftile/__init__.py"
POINTER = f"""\
\"\"\"Rooftile, as it is in the checkout at {ROOT}.\"\"\"

import sys

sys.path.insert(0, {str(ROOT)!r})

from analysis import rooftile

sys.modules[__name__] = rooftile
"""
"""Source of a module that makes an environment's ``import rooftile`` mean the checkout."""

# An interpreter runs this to tell which requirements it lacks and whether its PyTorch sees a GPU.
_PROBE = r"""
import importlib.metadata as metadata, json, re, sys

def numbers(text):
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])

lacks = []
for requirement in json.loads(sys.argv[1]):
    name, _, oldest = requirement.partition(">=")
    try:
        if numbers(metadata.version(name)) < numbers(oldest):
            lacks.append(requirement)
    except metadata.PackageNotFoundError:
        lacks.append(requirement)
gpu = False
if not any(requirement.startswith("torch>") for requirement in lacks):
    sys.path.insert(0, sys.argv[2])
    try:
        from kernels.device import select_device
        gpu = select_device("gpu").gpu is not None
    except Exception:
        pass
print(json.dumps([lacks, gpu]))
"""


def main(groups: list[str]) -> int:
    """Print the interpreter that has some extras, setting it up if need be.

    An extra whose name ends in ``?`` is optional. If it cannot be added, as on a node without a
    package index, the interpreter without it is printed.
    """
    needed = ["measure", *(group for group in groups if not group.endswith("?"))]
    python = set_up(requirements(needed))
    if python is None:
        return 1
    for group in groups:
        if group.endswith("?"):
            python = add_if_possible(needed, group.removesuffix("?")) or python
    print(python)
    return 0


def add_if_possible(needed: list[str], group: str) -> str | None:
    """Return the interpreter with an optional extra added. If that fails, say so and return None.

    On a node without a package index, installing is tried once a day, not in every call. A file
    remembers when an extra failed.
    """
    failed_at = read_failed()
    tried_today = time.time() - failed_at.get(group, 0.0) < _DAY
    try:
        python = set_up(requirements([*needed, group]), optional=True, offline=tried_today)
    except (OSError, subprocess.CalledProcessError):
        python = None
    remembered = dict(failed_at)
    if python is not None:
        remembered.pop(group, None)
    else:
        _say(
            f"The optional extra {group} could not be installed; everything else works without "
            "it. The next attempt is tomorrow, or after `make clean`."
        )
        if not tried_today:
            remembered[group] = time.time()
    if remembered != failed_at:
        with suppress(OSError):
            FAILED.write_text(json.dumps(remembered), encoding="utf-8")
    return python


def read_failed() -> dict[str, float]:
    """Return when optional extras failed to install within the last day, in seconds since 1970."""
    try:
        failed = json.loads(FAILED.read_text(encoding="utf-8"))
        return {
            str(group): float(at) for group, at in failed.items() if time.time() - float(at) < _DAY
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def set_up(wanted: list[str], optional: bool = False, offline: bool = False) -> str | None:
    """Return the interpreter with the requirements, setting it up if need be; None if that fails.

    Args:
        wanted: requirements as ``name>=version``.
        optional: add what is missing to the packages of this interpreter and replace nothing,
            whether or not its PyTorch sees a GPU. An index that does not answer within five seconds
            is given up.
        offline: install nothing.
    """
    base, installed = read_stamp()
    if base == _base():
        # 1. The environment was made for this interpreter. Add what it lacks.
        lacks = [requirement for requirement in wanted if requirement not in installed]
        if lacks and (offline or not install(lacks, _pins(), hurried=optional)):
            return None
    else:
        # 2. Use this interpreter if it has everything.
        lacks, sees_gpu = probe(sys.executable, wanted)
        if not lacks and (sees_gpu or not needs_gpu()):
            return sys.executable
        # 3. Otherwise make an environment. It is made on top of this interpreter if the PyTorch of
        # that sees the GPU, or if nothing may be replaced.
        if offline:
            return None
        installed = []
        if sees_gpu or optional:
            is_made = replace_venv(sys.executable, lacks, optional)
        else:
            is_made = replace_venv(None, wanted, optional)
        if not is_made:
            return None
    if lacks or not installed:
        STAMP.write_text("\n".join([_base(), *installed, *wanted]), encoding="utf-8")
    return str(PYTHON)


def replace_venv(on_top_of: str | None, lacks: list[str], hurried: bool = False) -> bool:
    """Make ``.venv`` and install into it. If that fails, put back the one that was there.

    Args:
        on_top_of: interpreter whose packages the environment sees; None: it sees no others.
        lacks: requirements to install.
        hurried: True to give up an index that does not answer within seconds.

    Returns:
        True if the new environment is in place.
    """
    old_venv = VENV.with_name(VENV.name + "-before")
    if VENV.exists():
        shutil.rmtree(old_venv, ignore_errors=True)
        VENV.rename(old_venv)
    if make_venv(on_top_of) and install(lacks, _pins(without_torch=on_top_of is not None), hurried):
        shutil.rmtree(old_venv, ignore_errors=True)
        return True
    shutil.rmtree(VENV, ignore_errors=True)
    if old_venv.exists():
        old_venv.rename(VENV)
    return False


def requirements(groups: list[str]) -> list[str]:
    """Return ``name>=version`` of the project's dependencies and some extras on this platform."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = list(project["dependencies"])
    for group in groups:
        declared += project["optional-dependencies"][group]
    applicable = []
    for line in declared:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if not marker or sys.platform == "linux":  # the only marker in use is for Linux
            applicable.append(requirement)
    return applicable


def probe(python: str, wanted: list[str]) -> tuple[list[str], bool]:
    """Return the requirements that an interpreter lacks, and whether its PyTorch sees a GPU."""
    answer = subprocess.run(
        [python, "-c", _PROBE, json.dumps(wanted), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        return wanted, False
    lacks, gpu = json.loads(answer.stdout.strip().splitlines()[-1])
    return lacks, gpu


def needs_gpu() -> bool:
    """Return True if an NVIDIA GPU is present and wanted, even if PyTorch cannot use it."""
    devices = glob.glob("/dev/nvidia[0-9]*") or os.path.isdir("/proc/driver/nvidia/gpus")
    return bool(devices) and os.environ.get("DEVICE") != "cpu"


def make_venv(on_top_of: str | None = None) -> bool:
    """Make ``.venv``, which sees the packages of another interpreter if one is given."""
    _say("Setting up .venv (once) …")
    try:
        venv.create(VENV, with_pip=True)
    except (OSError, subprocess.CalledProcessError):
        _say(
            "The environment .venv could not be created: install your system's package for "
            "Python's venv module (python3-venv on Debian and Ubuntu), or set PYTHON to another "
            "Python."
        )
        return False
    site = _ask(PYTHON, "import sysconfig; print(sysconfig.get_path('purelib'))")
    pointing = Path(site) / POINTING_MODULE
    pointing.parent.mkdir(exist_ok=True)
    pointing.write_text(POINTER, encoding="utf-8")
    if on_top_of is not None:
        # --system-site-packages would not do: inside another environment, it would skip that
        # environment and show the bare interpreter below it.
        base = _ask(
            on_top_of, "import sys; print(*(p for p in sys.path if 'packages' in p), sep='\\n')"
        )
        (Path(site) / "rooftile-base.pth").write_text(base + "\n", encoding="utf-8")
    return True


def _ask(python: str | Path, code: str) -> str:
    """Return what an interpreter prints when it runs some code."""
    answer = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def install(lacks: list[str], pins: Path, hurried: bool = False) -> bool:
    """Install what is missing. If that fails, print one sentence and return False.

    With ``hurried``, a missing index is reported within seconds instead of minutes.
    """
    names = [requirement.partition(">=")[0] for requirement in lacks]
    _say(f"Installing {', '.join(names)} …")
    # pip compiles bytecode on one core, so this is left to compileall, which uses all cores.
    pip = [
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--disable-pip-version-check",
        "-c",
        str(pins),
        *(["--retries", "0", "--timeout", "5"] if hurried else []),
        *lacks,
    ]
    answer = subprocess.run(pip, capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        compile_all = [str(PYTHON), "-m", "compileall", "-q", "-j", "0", str(VENV / "lib")]
        # Errors are ignored, because a file that does not compile is never imported.
        subprocess.run(compile_all, capture_output=True, check=False)
        return True
    errors = [line for line in answer.stderr.splitlines() if line.startswith("ERROR")]
    reason = errors[0] if errors else "pip failed"
    _say(
        f"The packages could not be installed ({reason}): check the network and the package "
        "index, or set PYTHON to an interpreter that has them."
    )
    return False


def _pins(without_torch: bool | None = None) -> Path:
    """Return the constraints: as they are, or without PyTorch for an environment on top of another.

    With None, return the constraints with which the environment was made.
    """
    kept_pins = VENV / "constraints.txt"
    if without_torch is None:
        return kept_pins if kept_pins.exists() else ROOT / "constraints.txt"
    if not without_torch:
        return ROOT / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.partition("==")[0] not in ("torch", "triton")]
    kept_pins.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return kept_pins


def _base() -> str:
    """Return a digest of what an environment is made from; with another digest it is made again."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    parts = [sys.executable, sys.version, pins]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def read_stamp() -> tuple[str, list[str]]:
    """Return the base of the existing environment and the requirements installed in it.

    The base is the digest of :func:`_base` when the environment was made. It is empty, as is the
    list, if there is no environment.
    """
    try:
        base, *installed = STAMP.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return "", []
    return base, installed


def _say(text: str) -> None:
    """Print to stderr, because make reads the interpreter from stdout."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
