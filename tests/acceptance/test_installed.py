"""The wheel, installed into an empty environment and used there as people would."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from kernels.common.program import ROOT
from tests.support.installed import MEASURING, QUESTION, Installed, build
from tests.support.published import PUBLISHED, SLUG

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("installed")]

MOST_BYTES = 1_000_000
SWEEP = """question = "Is a round size faster?"
op = "gemm"
[[block]]
shapes = ["63,64,64", "64,64,64"]
"""
CONFIG = {
    "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 1000,
    "n_positions": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def asking(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel next to another package that is called ``kernels``, without PyTorch."""
    here = Installed(tmp_path_factory.mktemp("installed"))
    here.install(wheel)
    here.run("pip", "check")
    here.install("--no-deps", "kernels")
    return here


@pytest.fixture(scope="module")
def measuring(asking: Installed) -> Installed:
    """The same environment with PyTorch and without the other package."""
    asking.run("pip", "uninstall", "--quiet", "--yes", "kernels")
    asking.install(*MEASURING)
    asking.run("pip", "check")
    return asking


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"rooftile", f"{wheel.name.rpartition('-py3')[0]}.dist-info"}, f"it holds {tops}"
    strange = [name for name in names if "test" in name or "recording" in Path(name).name
               or Path(name).suffix in (".csv", ".parquet", ".png", ".ipynb")]  # fmt: skip
    assert not strange, f"the wheel holds {strange}"
    size = wheel.stat().st_size
    assert size < MOST_BYTES, f"the wheel has {size} bytes"


def test_without_pytorch_it_answers_and_says_what_measuring_needs(asking: Installed) -> None:
    here = asking
    assert json.loads(here.run("rooftile", *QUESTION))["basis"] == "shipped", "no shipped answer"
    here.run("python", "-m", "rooftile", *QUESTION)
    here.run("rooftile", "recommend", *QUESTION[1:])
    assert len(json.loads(here.run("rooftile", "machines", "--json"))) > 20, "machines are missing"
    for verb in ("run", "doctor", "check", "implementations", "profile"):
        told = here.run("rooftile", verb, code=2)
        assert "pip install 'rooftile[measure]'" in told, told
        assert "Traceback" not in told, told
    told = here.run("rooftile", "audit", "gpt2", "--machine", "nvidia-h200", code=2)
    assert "This command needs PyTorch" in told, told
    recorded: list[str | Path] = ["--machine", SLUG, "--results"]
    recorded.append(PUBLISHED)
    here.run("rooftile", "recommend", *recorded, "--gemm", "1037,1024,1024,bf16")
    here.run("rooftile", "predict", *recorded, "--gemm", "1037,1024,1024,fp16", code=2)
    here.run("python", ROOT / "tests" / "support" / "examples.py", ROOT / "README.md")
    whose = here.run("python", "-c", "from importlib.util import find_spec\nimport rooftile\n"
                     "print(find_spec('kernels').origin)")  # fmt: skip
    assert whose.strip().endswith("site-packages/kernels/__init__.py"), f"kernels is {whose}"


def test_with_pytorch_it_audits_measures_and_runs_the_notebook(measuring: Installed) -> None:
    here = measuring
    (here.work / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (here.work / "two.toml").write_text(SWEEP, encoding="utf-8")
    told = here.run("rooftile", "audit", "config.json", "--machine", "nvidia-h200",
                    "--seq", "128", "--json")  # fmt: skip
    assert len(json.loads(told)["products"]) > 0, "an audit without products"
    told = here.run("rooftile", "run", "two.toml", "--budget", "10s", "--device", "cpu", "--json")
    document = json.loads(told)
    assert document["counts"]["measured"] > 0, f"nothing was measured: {told}"
    assert (here.work / document["folder"] / "measurements.csv").exists(), "no measurements.csv"
    here.run("rooftile", "report", "--machine", document["machine"])
    notebook = ROOT / "analysis" / "rooftile" / "hidden-size.ipynb"
    here.run("python", ROOT / "tests" / "support" / "examples.py", notebook)
