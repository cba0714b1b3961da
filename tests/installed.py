"""Install the wheel into an empty environment, and use it there as people would.

    python tests/installed.py [--write FILE]

Everything is pinned by ``constraints.txt``. First without PyTorch: what asks must work beside
another package that is called ``kernels``, and what measures must say what it lacks. Then with
PyTorch: a model is audited, two shapes are measured. With ``--write`` the command's start-up is
then compared with the checkout's, in the same environment, and written to FILE. It exits 1 where
something is not as it should be.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels.machine import of_cpu

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 1_000_000
PAIRS = 9  # of start-ups
MEASURING = ("torch", "transformers")  # which audit and a sweep on a CPU need
QUESTION = ("predict", "--machine", "nvidia-h100-sxm", "--gemm", "8192,50257,768,bf16", "--json")
SWEEP = """question = "Is a round size faster?"
op = "gemm"
[[block]]
shapes = ["63,64,64", "64,64,64"]
"""
CONFIG = {
    "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 1000,
    "n_positions": 128,
}  # fmt: skip


class Installed:
    """An environment and a folder to work in, neither of which knows the checkout."""

    def __init__(self, folder: Path) -> None:
        self.env, self.work = folder / "env", folder / "work"
        self.work.mkdir()
        venv.create(self.env, with_pip=True)
        # Not PYTHONPATH or anything else of whoever runs this.
        self.variables = {"PATH": f"{self.env / 'bin'}:{os.defpath}", "HOME": str(folder)}
        self.variables |= {k: v for k, v in os.environ.items() if k.startswith("PIP_")}

    def run(self, *command: str | Path, code: int = 0, cwd: Path | None = None) -> str:
        """Run a command of the environment; what it prints, on both streams if it fails."""
        program = self.env / "bin" / command[0]
        answer = subprocess.run(
            [program, *command[1:]], cwd=cwd or self.work, env=self.variables, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        words = " ".join(map(str, command))
        must(answer.returncode == code, f"{words} exits {answer.returncode}: {answer.stderr}")
        return answer.stdout if not code else answer.stdout + answer.stderr

    def install(self, *packages: str | Path) -> None:
        # Python compiles what is imported; pip would compile all there is.
        self.run("pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check",
                 "-c", ROOT / "constraints.txt", *packages)  # fmt: skip


def must(holds: bool, sentence: str) -> None:
    """End with a sentence where something does not hold."""
    if not holds:
        sys.exit(sentence)


def say(text: str) -> None:
    print(text, flush=True)


def build(folder: Path) -> Path:
    """The wheel by way of a source distribution, in an environment whose packages are pinned."""
    code = "from setuptools import build_meta; build_meta.build_sdist('..')"
    source = folder / "source"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps",
         "--disable-pip-version-check", "--wheel-dir", str(folder), str(archive)],
        check=True, env={**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")},
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


def copy_source(folder: Path) -> None:
    """What git tracks, or would: a build leaves folders behind where it works."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def check_content(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    must(tops == {"rooftile", f"{wheel.name.rpartition('-py3')[0]}.dist-info"}, f"it holds {tops}")
    strange = [name for name in names if "test" in name or "recording" in Path(name).name
               or Path(name).suffix in (".csv", ".parquet", ".png", ".ipynb")]  # fmt: skip
    must(not strange, f"the wheel holds {strange}")
    size = wheel.stat().st_size
    must(size < MOST_BYTES, f"the wheel has {size} bytes")
    say(f"{wheel.name}: {size / 1e3:.0f} kB, {len(names)} files, top level {sorted(tops)}")


def check_asking(here: Installed) -> None:
    """Without PyTorch, and beside another package that is called `kernels`."""
    must(json.loads(here.run("rooftile", *QUESTION))["basis"] == "shipped", "no shipped answer")
    here.run("python", "-m", "rooftile", *QUESTION)
    here.run("rooftile", "recommend", *QUESTION[1:])
    must(len(json.loads(here.run("rooftile", "machines", "--json"))) > 20, "machines are missing")
    for verb in ("run", "doctor", "check", "implementations", "machine", "clock", "profile"):
        told = here.run("rooftile", verb, code=2)
        must("pip install 'rooftile[measure]'" in told and "Traceback" not in told, told)
    told = here.run("rooftile", "audit", "gpt2", "--machine", "nvidia-h200", code=2)
    must("This needs PyTorch" in told, told)
    recorded: list[str | Path] = ["--machine", "cpu-amd-epyc-2t", "--results"]
    recorded.append(ROOT / "tests" / "recordings")
    here.run("rooftile", "recommend", *recorded, "--gemm", "1037,1024,1024,bf16")
    here.run("rooftile", "predict", *recorded, "--gemm", "1037,1024,1024,fp16", code=2)
    here.run("python", ROOT / "tests" / "examples.py", ROOT / "README.md")
    whose = here.run("python", "-c", "from importlib.util import find_spec\nimport rooftile\n"
                     "print(find_spec('kernels').origin)")  # fmt: skip
    must(whose.strip().endswith("site-packages/kernels/__init__.py"), f"kernels is {whose}")
    say("asking works without PyTorch, beside another package called kernels")


def check_measuring(here: Installed) -> None:
    """With PyTorch: a small model, two shapes, and the notebook as a script."""
    (here.work / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (here.work / "two.toml").write_text(SWEEP, encoding="utf-8")
    told = here.run("rooftile", "audit", "config.json", "--machine", "nvidia-h200",
                    "--seq", "128", "--json")  # fmt: skip
    must(len(json.loads(told)["products"]) > 0, "an audit without products")
    told = here.run("rooftile", "run", "two.toml", "--budget", "10s", "--device", "cpu", "--json")
    document = json.loads(told)
    must(document["counts"]["measured"] > 0, f"nothing was measured: {told}")
    must((here.work / document["folder"] / "measurements.csv").exists(), "no measurements.csv")
    here.run("rooftile", "report", "--machine", document["machine"])
    notebook = ROOT / "analysis" / "rooftile" / "hidden-size.ipynb"
    here.run("python", ROOT / "tests" / "examples.py", notebook)
    say(f"{document['counts']['measured']} cases measured; the notebook shows what it runs to")


def start_ups(here: Installed) -> dict[str, object]:
    """Seconds of one question: the command, and the checkout's, by turns in one environment."""
    ways = {
        "rooftile predict": (["rooftile", *QUESTION], here.work),
        "python -m analysis predict": (["python", "-m", "analysis", *QUESTION], ROOT),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(PAIRS + 1):
        for name, (command, cwd) in ways.items():
            began = time.perf_counter()
            here.run(*command, cwd=cwd)
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    one, other = medians.values()
    return {
        "protocol": f"median of {PAIRS} alternating pairs after one that warms up",
        "python": platform.python_version(), "packages": "constraints.txt",
        "machine": f"{of_cpu({}, 0.0, os.cpu_count() or 1).name}, {os.cpu_count()} cores",
        "seconds": medians, "ratio": one / other,
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Everything, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="rooftile-installed-") as name:
        folder = Path(name)
        copy_source(folder / "source")
        wheel = build(folder)
        check_content(wheel)
        here = Installed(folder)
        here.install(wheel)
        say(here.run("pip", "check").strip())
        here.run("pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                 "-c", ROOT / "constraints.txt", "kernels")  # fmt: skip
        check_asking(here)
        here.run("pip", "uninstall", "--quiet", "--yes", "kernels")
        here.install(*MEASURING)
        say(here.run("pip", "check").strip())
        check_measuring(here)
        if arguments[:1] == ["--write"]:
            found = start_ups(here)
            say(f"start-up over the checkout's: {found['ratio']:.2f}")
            Path(arguments[1]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
