from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels.common.checks import check_counts, check_folder
from kernels.common.errors import UserError


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_a_count_is_an_integer_of_at_least_one(value: object) -> None:
    check_counts(SimpleNamespace(loss_chunks=1), "loss_chunks")
    with pytest.raises(UserError, match=r"--loss-chunks is .*; it must be a whole number"):
        check_counts(SimpleNamespace(loss_chunks=value), "loss_chunks")


def test_a_file_to_write_is_no_folder_and_in_one(tmp_path: Path) -> None:
    check_folder(tmp_path / "a.md")
    with pytest.raises(UserError, match="is a folder; name a file"):
        check_folder(tmp_path)
    with pytest.raises(UserError, match=r"is not a folder, so a\.md cannot be written"):
        check_folder(tmp_path / "b" / "a.md")
