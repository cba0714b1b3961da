"""Tests of the Python interface: its answers are the command line's, for shapes in many forms."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pandas as pd
import pytest

from analysis import rooftile
from analysis.imports.problems import as_problems
from analysis.rooftile import Conv, Gemm, UserError
from tests.support.command_line import analysis
from tests.support.published import RECORDED

H100 = "nvidia-h100-sxm"
SHAPE = "2048,50257,768,bf16"
NUMPYS = np.array([8192, 50257, 768])
FUNCTIONS = [
    getattr(rooftile, name) for name in ("predict", "recommend", "audit", "load", "machines")
]


def answer_of(verb: str, *arguments: str | Path) -> Any:
    result = analysis(verb, *map(str, arguments), "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_prediction_is_the_commands(tmp_path: Path) -> None:
    (row,) = rooftile.predict(SHAPE, H100, results=tmp_path).to_dict("records")
    assert row == answer_of("predict", "--machine", H100, "--gemm", SHAPE, "--results", tmp_path)


def test_rows_of_one_shape_on_all_machines_are_adjacent(tmp_path: Path) -> None:
    rows = rooftile.predict([SHAPE, "64,64,64,fp16"], [H100, "h200"], results=tmp_path)
    assert list(rows["machine"]) == [H100, "nvidia-h200"] * 2
    assert list(rows["problem"].str.partition(",")[0]) == ["2048", "2048", "64", "64"]


def test_a_loaded_recording_may_be_changed() -> None:
    first = rooftile.load(RECORDED)
    first.rows["time_us"] = 1.0
    first.run["machine"]["name"] = "mine"
    second = rooftile.load(RECORDED)
    assert second.rows["time_us"].max() > 1.0
    assert second.run["machine"]["name"] != "mine"


def test_advice_is_the_commands(tmp_path: Path) -> None:
    (row,) = rooftile.recommend(
        SHAPE, H100, choose=0.15, change=["N"], multiple=64, results=tmp_path
    ).to_dict("records")
    expected = answer_of(
        "recommend", "--machine", H100, "--gemm", SHAPE, "--choose", "15%", "--change", "n",
        "--multiple", "64", "--results", tmp_path,
    )  # fmt: skip
    assert json.loads(json.dumps(row)) == expected


def test_an_audit_is_the_commands(tmp_path: Path) -> None:
    result = rooftile.audit("gpt2", H100, batch=2, seq=64, vary="vocab", results=tmp_path)
    expected = answer_of(
        "audit", "gpt2", "--machine", H100, "--batch", "2", "--seq", "64", "--vary", "vocab",
        "--results", tmp_path,
    )  # fmt: skip
    assert json.loads(json.dumps(result.to_json())) == expected
    assert list(result.products["role"]) == [product["role"] for product in expected["products"]]
    assert list(result.changes["dimension"]) == [lever["dimension"] for lever in expected["levers"]]
    assert str(result).startswith(f"gpt2, train, batch 2 on {H100}\nStep: ")


def test_machines_are_the_commands(tmp_path: Path) -> None:
    rows = rooftile.machines(results=tmp_path)
    assert [row["slug"] for row in answer_of("machines", "--results", tmp_path)] == list(
        rows["slug"]
    )


def test_a_recording_is_found_by_its_folder_and_by_its_machine() -> None:
    by_folder = rooftile.load(RECORDED)
    by_name = rooftile.load(RECORDED.name, results=RECORDED.parent)
    pd.testing.assert_frame_equal(by_folder.rows, by_name.rows)
    assert by_folder.machine.kind == "cpu"


@pytest.mark.parametrize(
    "shape",
    [
        "8192,50257,768,bf16", (8192, 50257, 768, "bf16"), Gemm(8192, 50257, 768, "bf16"),
        [8192, 50257, 768, "bf16"],
        Gemm(NUMPYS[0], NUMPYS[1], NUMPYS[2], "bf16"), (np.float32(8192), 50257, 768, "BF16"),
        (8192, 50257, 768, "bf16", None), rooftile.predict("8192,50257,768,bf16", H100),
        (np.int64(8192), 50257, 768.0, "bf16", "nt", 1), ["8192,50257,768,bf16"],
        pd.DataFrame({"m": [8192.0], "n": [50257], "k": ["768"], "dtype": "bf16", "batch": None}),
        pd.DataFrame({"m": [8192], "n": 50257, "k": 768, "dtype": "bf16", "mine": "x"}),
    ],
)  # fmt: skip
def test_a_shape_is_written_in_many_ways(shape: Any) -> None:
    assert as_problems(shape) == [Gemm(8192, 50257, 768, "bf16")]


def test_convolutions_and_several_shapes() -> None:
    conv = Conv.parse("32,64,56,56,64,3,3,2x1,1,1,1,bf16")
    as_tuple = (32, 64, 56, 56, 64, 3, 3, (2, 1), 1, 1, 1, "bf16")
    assert as_problems(as_tuple) == [conv]
    assert Conv(32, 64, 56, 56, 64, 3, 3, (2, 1), 1, 1, 1, "bf16") == conv  # type: ignore[arg-type]
    assert as_problems((as_tuple, "64,64,64,fp32")) == [conv, Gemm(64, 64, 64, "fp32")]
    assert as_problems(shape for shape in (conv, conv)) == [conv, conv]
    frame = rooftile.load(RECORDED).products
    assert as_problems(frame) == [
        Conv.parse(p.spec()) if isinstance(p, Conv) else Gemm.parse(p.spec())
        for p in as_problems(frame)
    ]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("64,64,64", "--gemm takes M,N,K,dtype"), ((64, 64, 64), "--gemm takes M,N,K,dtype"),
        ((64.5, 64, 64, "bf16"), "M in M,N,K,dtype"), ("1,2,3,4,5,6,7", "--conv takes"),
        (64, "64 is not a shape"), ({"m": 8}, "{'m': 8} is not a shape"),
        (None, "None is not a shape"),
        ([], "no shape was given"), ((), "no shape was given"),
        ([None], "None is not a shape"),
        (pd.DataFrame({"m": [1]}), "the DataFrame has no column 'n'"),
        (pd.DataFrame({"m": [1.5], "n": 1, "k": 1, "dtype": "bf16"}), "row 0 of the DataFrame"),
        (pd.DataFrame({"m": [], "n": [], "k": [], "dtype": []}), "the DataFrame has no rows"),
        (pd.DataFrame({"m": [1, None], "n": 1, "k": 1, "dtype": "bf16"}), "row 1 of the DataFrame"),
    ],
)  # fmt: skip
def test_what_is_no_shape_is_refused_in_a_sentence(shape: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        rooftile.predict(shape, H100)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pad": 0.1, "choose": 0.1}, "not both"), ({"pad": "x"}, "--pad takes a share"),
        ({"change": ""}, "--change has an empty name"),
        ({"fix": "m,"}, "--fix has an empty name"),
        ({"multiple": "8"}, "--multiple is '8'"), ({"machine": ["h200"]}, "give one machine"),
        ({"pad": 12.5}, "--pad takes a share"),
        ({"choose": -0.1}, "--choose takes a share"), ({"change": "q"}, "no size Q"),
        ({"multiple": 0}, "--multiple is 0; it must"),
    ],
)  # fmt: skip
def test_wishes_that_cannot_be_met_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        rooftile.recommend(SHAPE, **{"machine": H100, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "training"}, "--mode is 'training'"), ({"batch": 0}, "--batch is 0"),
        ({"tp": -1}, "--tp is -1"), ({"loss_chunks": 2.5}, "--loss-chunks is 2.5"),
        ({"parameters": 9.0}, "--parameters takes a share"), ({"batch": "8"}, "--batch is '8'"),
        ({"attention": 2.0}, "--attention takes a share"),
        ({"fuse": ["kv"]}, "--fuse is 'kv'"), ({"sizes": {"depth": 3}}, "'depth'"),
        ({"machine": "h9000"}, "is not known"),
    ],
)  # fmt: skip
def test_an_audit_that_cannot_be_made_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        rooftile.audit("gpt2", **{"machine": H100, **options})


def test_names_may_be_one_text_and_keep_their_case(tmp_path: Path) -> None:
    one = rooftile.recommend(SHAPE, H100, pad="10%", change="n,K", results=tmp_path)
    other = rooftile.recommend(SHAPE, H100, pad=0.1, change=["N", "k"], results=tmp_path)
    pd.testing.assert_frame_equal(one, other)


def test_a_factorys_sizes_keep_their_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = "import torch\ndef small(dFF=2050):\n    return torch.nn.Linear(512, dFF)\n"
    (tmp_path / "a_factory.py").write_text(model, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    result = rooftile.audit("a_factory:small", H100, inputs="bfloat16[4096,512]", vary="dFF",
                           results=tmp_path)  # fmt: skip
    assert set(result.changes["dimension"]) == {"dFF"}


def test_types_can_be_imported() -> None:
    from analysis.rooftile import Audit, Recording, Shape

    assert rooftile.load(RECORDED).__class__ is Recording
    assert Audit.__name__ == "Audit"
    assert str in get_args(Shape)
    with pytest.raises(AttributeError):
        rooftile.nothing  # noqa: B018


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: str(function.__name__))
def test_a_function_says_what_it_takes_returns_and_raises(function: Any) -> None:
    docstring = inspect.getdoc(function) or ""
    for heading in ("Args:", "Returns:", ">>> "):
        assert heading in docstring
    arguments = docstring.partition("Args:")[2].partition("Returns:")[0]
    for name in inspect.signature(function).parameters:
        assert f"{name}:" in arguments, name
    names = {"pd": pd, "Audit": object, "Recording": object, "Shape": object}
    names |= {"Iterable": list, "Sequence": list, "Mapping": dict}
    hints = get_type_hints(function, localns=names)
    assert set(hints) == {*inspect.signature(function).parameters, "return"}
