from __future__ import annotations

from pathlib import Path

import pytest

from analysis.imports.problems import as_problems, read_problems
from kernels.common.errors import UserError
from kernels.problem import Conv, Gemm, Problem
from sweeps.schema import problem_columns


def written(folder: Path, text: str) -> Path:
    path = folder / "shapes.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_gives_its_problems_in_its_order(tmp_path: Path) -> None:
    text = "\ufeffm, n,k,dtype,layout,batch\n64,32,16,bf16,,\n 8,8,8,fp32,tn,3\n"
    assert read_problems(written(tmp_path, text)) == [
        Gemm(64, 32, 16, "bf16"), Gemm(8, 8, 8, "fp32", "tn", 3),
    ]  # fmt: skip


def test_the_columns_of_our_measurements_give_their_problems_again(tmp_path: Path) -> None:
    problems: list[Problem] = [
        Conv.parse("32,64,56,56,128,3,3,2,1x0,1,1,fp16,nchw,dgrad"), Gemm(5, 6, 7, "bf16", "nn", 2),
    ]  # fmt: skip
    rows = [problem_columns(problem) for problem in problems]
    names = list(rows[0] | rows[1])
    lines = [",".join(str(row.get(name, "")) for name in names) for row in rows]
    assert read_problems(written(tmp_path, "\n".join([",".join(names), *lines]))) == problems


def test_a_convolution_needs_its_sizes_alone(tmp_path: Path) -> None:
    text = "op,batch,c,h,w,kout,r,s,dtype\nconv,32,64,56,56,64,3,3,bf16\n"
    (problem,) = read_problems(written(tmp_path, text))
    assert problem == Conv.parse("32,64,56,56,64,3,3,1,0,1,1,bf16")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no column 'm'. Add m, n, k and dtype"),
        ("a,b\n1,2\n", "has no column 'm'. Add m, n, k and dtype"),
        ("m,n,k,dtype,layuot\n1,1,1,bf16,nt\n", "column 'layuot'.*'layout'"),
        ("m,n,k,dtype\n8,8,8,bf16\n8,8,,bf16\n", "line 3 of .* has no k"),
        ("m,n,k,dtype\n8,8,8,bf17\n", "line 2 of .*'bf16'"),
        ("m,n,k,dtype\n8,8,x,bf16\n", "line 2 of .* has a size that is not a whole number"),
        ("m,n,k,dtype\n8,8,8,bf16,nt\n", "line 2 of .* has more cells than the header"),
        ("m,m,k,dtype,n\n8,8,8,bf16,8\n", "has the column 'm' twice"),
        ("m,n,k,dtype\n", "has no line below its header"),
        ("op,m,n,k,dtype\ngem,8,8,8,bf16\n", "line 2 of .*'gem'.*'gemm'"),
    ],
)
def test_what_cannot_be_read_is_a_sentence_that_names_the_line(
    tmp_path: Path, text: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        read_problems(written(tmp_path, text))


def test_a_file_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_problems(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UserError, match="is not a CSV file"):
        read_problems(tmp_path / "binary.csv")


def test_a_huge_size_is_a_sentence() -> None:
    with pytest.raises(UserError, match="must be a whole number"):
        as_problems((10**400, 64, 64, "bf16"))
