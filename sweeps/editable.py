"""Build backend whose editable installations point to the checkout.

``pip install .`` builds the namespace ``rooftile`` (:mod:`sweeps.wheel`). ``pip install -e .``
instead builds a wheel whose only module, the *pointing module*, makes ``import rooftile`` load the
checkout's ``analysis/rooftile``.
"""

from __future__ import annotations

import base64
import hashlib
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from setuptools.build_meta import *  # noqa: F403
from setuptools.build_meta import build_wheel

from sweeps.bootstrap import POINTER, POINTING_MODULE


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return an empty list, because an editable build needs only setuptools."""
    return []


def build_editable(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel with only the pointing module and the metadata of the project's normal wheel.

    The parameters and the result (the wheel's file name) are those of PEP 660.
    """
    # 1. Build the project's normal wheel, and take its metadata except RECORD, which lists the
    # files of that wheel.
    with tempfile.TemporaryDirectory() as folder:
        wheel_name: str = build_wheel(folder, config_settings)
        with zipfile.ZipFile(Path(folder) / wheel_name) as wheel:
            metadata = {
                member: wheel.read(member)
                for member in wheel.namelist()
                if ".dist-info/" in member and not member.endswith("/RECORD")
            }
    # 2. Write a wheel with the metadata, the pointing module and a RECORD of both. All metadata is
    # in the same folder, so any of its files names that folder.
    any_member = next(iter(metadata))
    info_folder = any_member.partition("/")[0]
    members = {POINTING_MODULE: POINTER.encode(), **metadata}
    record = "".join(f"{path},{_digest(content)}\n" for path, content in members.items())
    # RECORD also lists itself, but without a hash and a size.
    members[f"{info_folder}/RECORD"] = f"{record}{info_folder}/RECORD,,\n".encode()
    target = Path(wheel_directory) / wheel_name
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as pointing_wheel:
        for path, content in members.items():
            pointing_wheel.writestr(path, content)
    return wheel_name


def _digest(content: bytes) -> str:
    """Return the hash and the size of a file in the format of RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"sha256={digest},{len(content)}"
