from __future__ import annotations

from pathlib import Path

import pytest

from analysis.recordings.kept import until_changed


@until_changed("a", "b")
def texts(folder: Path, ending: str) -> list[str]:
    return [(folder / name).read_text() + ending for name in ("a", "b")]


def test_a_folder_is_read_again_only_if_a_file_changed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    first = texts(tmp_path, "!")
    assert first == ["1!", "2!"]
    (tmp_path / "c").write_text("another file")
    assert texts(tmp_path, "!") is first
    assert texts(tmp_path, "?") == ["1?", "2?"]
    (tmp_path / "new").write_text("3")
    (tmp_path / "new").rename(tmp_path / "b")  # as files of results are replaced
    assert texts(tmp_path, "!") == ["1!", "3!"]


def test_an_error_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            texts(tmp_path, "!")
    (tmp_path / "b").write_text("2")
    assert texts(tmp_path, "!") == ["1!", "2!"]
