"""Recordings come from strangers: their names are text wherever they are shown, and no paths."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.markdown import plain
from kernels.machine import known_machine
from sweeps.store import read_run, write_run
from tests.support.command_line import analysis
from tests.support.synthetic import gemm_cases, model_law, problems, random_sizes, record
from tests.support.tiers import quick_and_long

ROOT = Path(__file__).resolve().parents[2]
H100 = known_machine("nvidia-h100-sxm")
NAMES = [
    "<script>alert(1)</script>",
    "a | b | c",
    "![x](https://example.org/x.png) [y](javascript:alert(1)) <https://example.org>",
    "`code` **bold** $x^2$ $",
    "two\nlines\r\n# heading\n| table |",
    "\x1b]0;title\x07\x1b[2J\u202egnp.exe",
    "&lt;b&gt; \\ \\| ' \" --> ]]>",
    "{0} %s {machine.name} \ud83d",
]
SLUGS = ["../../escaped", "/tmp/escaped", "a/../../b", "A B", "", "x\n"]


def hostile(folder: Path, name: str) -> Path:
    """A recording in which everything that is free to choose is ``name``."""
    cases = gemm_cases(dict.fromkeys(random_sizes(60)))
    cases = [replace(case, sweep="square", implementation=name) for case in cases[:30]] + cases[30:]
    machine = replace(H100, name=name, sources={name: name})
    return record(
        folder, cases, model_law()(problems(cases)), machine=machine,
        software={"torch": name, "cuda": name, name: name},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_and_long(NAMES))
def test_a_hostile_name_is_text_on_every_page(tmp_path: Path, name: str) -> None:
    results = tmp_path / "results"
    folder = results / H100.slug
    try:
        hostile(folder, name)
    except UnicodeEncodeError:  # half a character: no file can have it but as an escape
        hostile(folder, "@@")
        for path in (folder / "run.json", folder / "measurements.csv"):
            escaped = json.dumps(name)[1:-1] if path.suffix == ".json" else "x"
            path.write_text(path.read_text().replace("@@", escaped))
    for verb in ("report", "rules"):
        done = analysis(verb, "--machine", H100.slug, "--results", str(results))
        assert done.returncode == 0, done.stderr
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", done.stdout + done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    assert [path.name for path in results.iterdir()] == [H100.slug]
    pages = sorted(folder.glob("*.md"))
    assert len(pages) >= 2
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(script|https|b>)|(?<!\\)(\]\(|\*\*bold)", text)
        tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        assert tables
        for table in tables:
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
        assert sum(line.startswith("# ") for line in text.splitlines()) == 1
    drawings = sorted(folder.rglob("*.svg"))
    assert drawings
    for drawing in drawings:
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.parse(drawing).iter()}
        assert not tags & {"script", "a", "foreignObject"}


@pytest.mark.parametrize("slug", quick_and_long(SLUGS))
def test_a_hostile_slug_writes_no_file(tmp_path: Path, slug: str) -> None:
    results = tmp_path / "a" / "results"
    folder = hostile(results / H100.slug, "plain")
    run = read_run(folder)
    write_run(folder, {**run, "machine": {**run["machine"], "slug": slug}})
    before = sorted(tmp_path.rglob("*"))
    for verb in ("report", "rules", "table", "plot"):
        done = analysis(verb, "--machine", H100.slug, "--results", str(results))
        assert done.returncode == 2
        assert "is not a valid machine name" in done.stderr.splitlines()[-1]
    assert sorted(tmp_path.rglob("*")) == before


def test_an_address_does_not_become_a_link() -> None:
    assert plain("www.example.org") == r"www\.example.org"


def test_all_controls_of_the_direction_of_text_are_replaced() -> None:
    assert plain("a\u200eb\u061cc\u200fd") == "a b c d"


def test_only_a_command_in_backticks_stays_code() -> None:
    assert plain("run `make rules`, then *stop*") == r"run `make rules`, then \*stop\*"
    assert plain("`[x](http://y)`") == r"\`[x\](http:&#47;&#47;y)\`"
    assert plain("one ` here") == r"one \` here"


@pytest.mark.parametrize("name", NAMES)
def test_plain_text_reads_as_it_was(name: str) -> None:
    """What is escaped comes back as the text that it was, without what cannot be printed."""
    html = re.sub(r"\\([\\`*|\]])", r"\1", plain(name))
    html = html.replace("&#47;&#47;", "//").replace("&lt;", "<").replace("&amp;", "&")
    assert html == re.sub(r"[\x00-\x1f\u202e\ud83d]+", " ", name)
