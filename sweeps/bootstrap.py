"""Find or make the Python environment of a make target, and print the interpreter to use.

    python3 sweeps/bootstrap.py [EXTRA …] [EXTRA? …]

This script runs before anything is installed, so it uses only the standard library. Below, *this
interpreter* is the one that runs the script: the Makefile's ``PYTHON``. The script takes the first
of these choices that applies:

1. Use ``.venv``, if this interpreter is the one in ``.venv``, or if ``.venv`` was made for this
   interpreter and the current ``constraints.txt``. Install the requirements that ``.venv`` lacks.
2. Use this interpreter, if it has every requirement, and if its PyTorch sees the GPU when a GPU is
   needed.
3. Make ``.venv`` on top of this interpreter, if its PyTorch sees the GPU but other requirements are
   missing, or if only an optional extra is missing. Keep this interpreter's PyTorch, because on a
   GPU node it matches the driver.
4. Make ``.venv`` with all requirements, at the versions that ``constraints.txt`` pins.
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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "rooftile-ready"
PINS = ROOT / "constraints.txt"
FAILED = ROOT / ".venv-failed"
"""File that records which optional extras could not be installed, and when."""
_DAY = 86_400.0  # seconds

POINTING_MODULE = "rooftile/__init__.py"
POINTER = f"""\
\"\"\"Rooftile, as it is in the checkout at {ROOT}.\"\"\"

import sys

sys.path.insert(0, {str(ROOT)!r})

from analysis import rooftile

sys.modules[__name__] = rooftile
"""
"""Source of a module that makes ``import rooftile`` load the checkout's ``analysis/rooftile``."""

# Code that prints, as JSON, which requirements an interpreter lacks and whether its PyTorch sees a
# GPU.
_PROBE = r"""
import importlib.metadata as metadata, json, re, sys

def numbers(text):
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])

missing = []
for requirement in json.loads(sys.argv[1]):
    name, _, oldest = requirement.partition(">=")
    try:
        if numbers(metadata.version(name)) < numbers(oldest):
            missing.append(requirement)
    except metadata.PackageNotFoundError:
        missing.append(requirement)
gpu = False
if not any(requirement.startswith("torch>") for requirement in missing):
    sys.path.insert(0, sys.argv[2])
    try:
        from kernels.device import select_device
        gpu = select_device("gpu").gpu is not None
    except Exception:
        pass
print(json.dumps([missing, gpu]))
"""


def main(extras: list[str]) -> int:
    """Print the path of an interpreter with the extra ``measure`` and the ``extras``.

    An extra whose name ends in ``?`` is optional: if it cannot be installed, for example on a node
    without access to a package index, the interpreter may lack it.

    Returns:
        The exit code: 0 for success, 1 if no interpreter with the required extras could be set up,
        or 2 if an extra does not exist.
    """
    declared = _project()["optional-dependencies"]
    for extra in extras:
        if extra.removesuffix("?") not in declared:
            _say(f"The extra {extra} does not exist; use one of {', '.join(declared)}.")
            return 2
    needed = ["measure", *(extra for extra in extras if not extra.endswith("?"))]
    python = set_up(requirements(needed))
    if python is None:
        return 1
    for extra in extras:
        if extra.endswith("?"):
            extended = add_if_possible(needed, extra.removesuffix("?"))
            if extended is not None:
                python = extended
    print(python)
    return 0


def add_if_possible(needed: list[str], extra: str) -> str | None:
    """Return the path of an interpreter with the extras ``needed`` and with ``extra``.

    If ``extra`` cannot be installed, print a message and return None. After a failure, installation
    is not tried again for a day, because every attempt takes seconds on a node without access to a
    package index.
    """
    failed_at = read_failed()
    tried_today = extra in failed_at
    try:
        python = set_up(requirements([*needed, extra]), optional=True, offline=tried_today)
    except (OSError, subprocess.CalledProcessError):
        python = None
    new_failed_at = dict(failed_at)
    if python is not None:
        new_failed_at.pop(extra, None)
    else:
        _say(
            f"The optional extra {extra} could not be installed; everything else works without "
            "it. After a failure, installation is not tried again for a day; to try sooner, run "
            "`make clean` and then the same command."
        )
        if not tried_today:
            new_failed_at[extra] = time.time()
    if new_failed_at != failed_at:
        with suppress(OSError):
            FAILED.write_text(json.dumps(new_failed_at), encoding="utf-8")
    return python


def read_failed() -> dict[str, float]:
    """Return the time of each optional extra's failed installation, in seconds since 1970.

    Only failures within the last day count. The result is empty if :data:`FAILED` is missing or
    damaged.
    """
    try:
        recorded = json.loads(FAILED.read_text(encoding="utf-8"))
        failed_at = {str(extra): float(moment) for extra, moment in recorded.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return {}
    # A time in the future is ignored, too: the clock may have been wrong when it was written.
    now = time.time()
    return {extra: moment for extra, moment in failed_at.items() if 0 <= now - moment < _DAY}


def set_up(wanted: list[str], optional: bool = False, offline: bool = False) -> str | None:
    """Return the path of an interpreter with the requirements, or None if the set-up fails.

    Args:
        wanted: requirements as ``name>=version``.
        optional: True if the caller can do without the requirements. A new ``.venv``, if one is
            needed, is then made on top of this interpreter, and pip does not wait long for the
            package index.
        offline: True to install nothing, and to return None if an installation would be needed.

    Raises:
        OSError, subprocess.CalledProcessError: if a file cannot be read or written, or if an
            interpreter fails.
    """
    if Path(sys.prefix).resolve() == VENV.resolve():
        # 1. Use .venv if this interpreter is in it, for example because the user activated .venv. A
        # new .venv would remove the packages of this interpreter, so the missing ones are added.
        missing_here, _ = probe(sys.executable, wanted)
        return str(PYTHON) if _added_to_venv(missing_here, optional, offline) else None
    recorded_digest, installed = read_stamp()
    if recorded_digest == _venv_digest():
        # Also use .venv if it was made for this interpreter, after adding what .venv lacks.
        missing_in_venv = [requirement for requirement in wanted if requirement not in installed]
        if not _added_to_venv(missing_in_venv, optional, offline):
            return None
        if missing_in_venv:
            _write_stamp([*installed, *missing_in_venv])
        return str(PYTHON)
    # 2. Otherwise use this interpreter if it has all requirements.
    missing_here, sees_gpu = probe(sys.executable, wanted)
    if not missing_here and (sees_gpu or not needs_gpu()):
        return sys.executable
    if offline:
        return None
    if sees_gpu or optional:
        # 3. Otherwise make .venv on top of this interpreter, to keep its PyTorch.
        is_made = replace_venv(sys.executable, missing_here, optional)
    else:
        # 4. Otherwise make .venv with all requirements.
        is_made = replace_venv(None, wanted, optional)
    if not is_made:
        return None
    _write_stamp(wanted)
    return str(PYTHON)


def _added_to_venv(missing: list[str], optional: bool, offline: bool) -> bool:
    """Install missing requirements in ``.venv``; return True if none is missing afterwards."""
    if not missing:
        return True
    return not offline and install(missing, _venv_pins(), hurried=optional)


def _write_stamp(requirements: list[str]) -> None:
    """Record what ``.venv`` depends on (:func:`_venv_digest`), and which requirements it has."""
    STAMP.write_text("\n".join([_venv_digest(), *requirements]), encoding="utf-8")


def replace_venv(on_top_of: str | None, missing: list[str], hurried: bool = False) -> bool:
    """Replace ``.venv`` with a new one, and install the requirements ``missing`` in the new one.

    If the new ``.venv`` cannot be completed, restore the old one and return False. ``on_top_of`` is
    as in :func:`make_venv`, and ``hurried`` as in :func:`install`.
    """
    old_venv = VENV.with_name(VENV.name + "-before")
    if VENV.exists():
        shutil.rmtree(old_venv, ignore_errors=True)
        VENV.rename(old_venv)
    is_made = False
    try:
        if make_venv(on_top_of):
            # On top of another interpreter, .venv uses that interpreter's PyTorch and Triton.
            pins = PINS if on_top_of is None else _write_pins_without_torch()
            is_made = install(missing, pins, hurried)
    finally:  # the old environment also comes back after an error, and after Ctrl+C
        if is_made:
            shutil.rmtree(old_venv, ignore_errors=True)
        else:
            shutil.rmtree(VENV, ignore_errors=True)
            if old_venv.exists():
                old_venv.rename(VENV)
    return is_made


def requirements(extras: list[str]) -> list[str]:
    """Return the requirements of the project and of the ``extras`` on this platform.

    Each requirement has the form ``name>=version``.
    """
    project = _project()
    declared = list(project["dependencies"])
    for extra in extras:
        declared += project["optional-dependencies"][extra]
    applicable = []
    for line in declared:
        requirement, _, marker = line.partition(";")
        # The only marker in pyproject.toml is the one for Linux.
        if not marker.strip() or sys.platform == "linux":
            applicable.append(requirement.strip())
    return applicable


def _project() -> dict[str, Any]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def probe(python: str, wanted: list[str]) -> tuple[list[str], bool]:
    """Return the requirements that an interpreter lacks, and whether its PyTorch sees a GPU.

    If the interpreter cannot run this check, return all requirements and False.
    """
    answer = subprocess.run(
        [python, "-c", _PROBE, json.dumps(wanted), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        return wanted, False
    # The report is the last line, because imported packages may print lines before it.
    missing, sees_gpu = json.loads(answer.stdout.strip().splitlines()[-1])
    return missing, sees_gpu


def needs_gpu() -> bool:
    """Return True if the NVIDIA driver lists a GPU and ``DEVICE=cpu`` does not exclude it."""
    if os.environ.get("DEVICE") == "cpu":
        return False
    device_files = glob.glob("/dev/nvidia[0-9]*")
    return bool(device_files) or os.path.isdir("/proc/driver/nvidia/gpus")


def make_venv(on_top_of: str | None = None) -> bool:
    """Make ``.venv``, which contains pip and a module that points to the checkout.

    ``import rooftile`` loads the checkout through this module. If ``.venv`` cannot be created,
    print what to do and return False. ``on_top_of`` is the path of an interpreter whose packages
    ``.venv`` also sees, or None for an isolated ``.venv``.
    """
    _say("Setting up .venv (once) …")
    try:
        venv.create(VENV, with_pip=True)
    except OSError as error:
        _say(
            f"The environment .venv could not be created ({error.strerror}): make sure that {ROOT} "
            "is writable and has free space."
        )
        return False
    except subprocess.CalledProcessError:
        _say(
            "The environment .venv could not be created: install your system's package for "
            "Python's venv module (python3-venv on Debian and Ubuntu), or set PYTHON to another "
            "Python."
        )
        return False
    site_packages = Path(_ask(PYTHON, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    pointing_module = site_packages / POINTING_MODULE
    pointing_module.parent.mkdir(exist_ok=True)
    pointing_module.write_text(POINTER, encoding="utf-8")
    if on_top_of is not None:
        # --system-site-packages is not enough: if the other interpreter is in an environment, the
        # option skips that environment and shows only the packages of its base interpreter. A .pth
        # file adds the other interpreter's folders, which are named site- or dist-packages.
        base_folders = _ask(
            on_top_of, "import sys; print(*(p for p in sys.path if 'packages' in p), sep='\\n')"
        )
        base_file = site_packages / "rooftile-base.pth"
        base_file.write_text(base_folders + "\n", encoding="utf-8")
    return True


def _ask(python: str | Path, code: str) -> str:
    answer = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def install(missing: list[str], pins: Path, hurried: bool = False) -> bool:
    """Install the requirements ``missing`` in ``.venv``.

    If pip fails, print the reason and return False. ``pins`` is the file with pip's constraints. If
    ``hurried`` is True, pip waits five seconds for the package index and does not retry.
    """
    names = [requirement.partition(">=")[0] for requirement in missing]
    _say(f"Installing {', '.join(names)} …")
    # pip would compile bytecode on one core. compileall does it below on all cores.
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
        *missing,
    ]
    answer = subprocess.run(pip, capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        compile_all = [str(PYTHON), "-m", "compileall", "-q", "-j", "0", str(VENV / "lib")]
        # Errors are ignored, because a file that does not compile is never imported.
        subprocess.run(compile_all, capture_output=True, check=False)
        return True
    _say(
        f"The packages could not be installed ({_reason(answer.stderr)}): check the network and "
        "the package index, or set PYTHON to an interpreter that has them."
    )
    return False


def _reason(stderr: str) -> str:
    """Return why pip failed, from what it printed to stderr."""
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    if not errors:
        return "pip failed"
    # The constraints are exact versions that fit each other. If pip says that they conflict, it
    # found no file of such a version, usually because the package index did not answer. pip says
    # that a connection broke only if it may retry.
    if "conflicting dependencies" in errors[0]:
        if "connection broken" in stderr:
            return "pip could not reach the package index"
        return "pip found no suitable version of a package, or the index did not answer"
    return errors[0].removeprefix("ERROR: ")


def _venv_pins() -> Path:
    """Return the path of the constraints file for packages in ``.venv``."""
    without_torch = VENV / PINS.name
    return without_torch if without_torch.exists() else PINS


def _write_pins_without_torch() -> Path:
    """Copy the constraints, without PyTorch and Triton, into ``.venv``."""
    lines = PINS.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.partition("==")[0] not in ("torch", "triton")]
    without_torch = VENV / PINS.name
    without_torch.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return without_torch


def _venv_digest() -> str:
    """Return a digest of what a new ``.venv`` depends on: this interpreter and the constraints."""
    pins = PINS.read_text(encoding="utf-8")
    parts = [sys.executable, sys.version, pins]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def read_stamp() -> tuple[str, list[str]]:
    """Return the digest and the requirements that :func:`_write_stamp` recorded for ``.venv``.

    Both are empty if ``.venv`` does not exist or was not completed.
    """
    try:
        digest, *installed = STAMP.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return "", []
    return digest, installed


def _say(text: str) -> None:
    """Print a message to stderr, because make reads the interpreter from stdout."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
