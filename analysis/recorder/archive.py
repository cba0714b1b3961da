"""Pack the recording of a machine into one archive that is small enough to e-mail."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sweeps.store import write_whole

ARCHIVE_BYTES = 16_000_000
"""Maximum estimated size, in bytes, of an archive that can be attached to an e-mail."""

# Names of folders that are not packed.
_LEFT_OUT = {"samples", "runs"}

# File extensions, the most valuable first. Files with other extensions come last.
_ORDER = (".json", ".csv", ".md", ".txt", ".html", ".png", ".svg")


def write_archive(results: Path, folders: Sequence[Path], limit: int = ARCHIVE_BYTES) -> Path:
    """Pack a machine's folders into one archive, and return the path of the archive.

    The archive is written to ``results`` and named after the first folder. Samples, old runs and
    hidden files are left out. A file that would make the archive's estimated size exceed ``limit``
    bytes is also left out, but is listed in the archive's ``left-out.txt``.

    ``folders`` are the machine's folders in ``results``; a folder may be missing.

    Raises:
        UserError: if the archive cannot be written.
        OSError: if a file cannot be read.
    """
    path = results / f"{folders[0].name}.tar.gz"
    buffer = io.BytesIO()
    left_out: list[str] = []
    packed_bytes = 0
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in _files(results, folders):
            name = str(file.relative_to(results))
            # What a file adds to the archive is estimated by compressing the file separately.
            compressed_bytes = len(gzip.compress(file.read_bytes()))
            if packed_bytes + compressed_bytes > limit:
                left_out.append(name)
                continue
            packed_bytes += compressed_bytes
            archive.add(file, arcname=name, filter=_anonymise)
        if left_out:
            text = "\n".join(left_out).encode() + b"\n"
            member = tarfile.TarInfo("left-out.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    write_whole(path, buffer.getvalue())
    return path


def _files(results: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the files to pack, the most valuable first."""
    files = []
    for folder in folders:
        for file in folder.rglob("*"):
            is_left_out = not _LEFT_OUT.isdisjoint(file.relative_to(results).parts)
            is_hidden = file.name.startswith(".")
            if file.is_file() and not is_hidden and not is_left_out:
                files.append(file)
    rank_of = {suffix: rank for rank, suffix in enumerate(_ORDER)}
    last_rank = len(_ORDER)  # rank of a file with any other extension
    yield from sorted(files, key=lambda file: (rank_of.get(file.suffix, last_rank), str(file)))


def _anonymise(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
