from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.common.errors import UserError
from kernels.config import HAND_WRITTEN, large_tile, next_wave_edge
from kernels.machine import Machine, cpu_machine, known_machine
from kernels.operation import Layer, Lstm, Series, Workload
from kernels.problem import Conv, Gemm
from sweeps.cases.axes import Edges, Multiple, parse_axis, parse_size_axis, resolve_axis
from sweeps.cases.case import CACHES, Case
from sweeps.cases.expand import expand
from sweeps.cases.spec import FOLDER, Sweep, all_sweeps, read_sweep
from sweeps.planning.choice import sweep_cases

H200 = known_machine("nvidia-h200")
CPU = replace(cpu_machine({"fp32": 2e11, "bf16": 4e11}, 3e10, 2), emulated=("bf16",))


def library(problem: Workload, machine: Machine) -> str:
    return "cublas" if problem.op == "gemm" else "cudnn"


def no_config(name: str, declared: str, problem: Workload, machine: Machine) -> list[str]:
    return [""]


def cases_of(sweep: Sweep, machine: Machine = H200) -> list[Case]:
    return expand(sweep, machine, library, no_config)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Sweep:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return read_sweep(path)

    return write


def values(declared: Any, known: dict[str, Any] | None = None) -> list[Any]:
    axis = parse_size_axis(declared, "x.toml: m", "m", ("n", "k"))
    return resolve_axis(axis, {"dtype": "bf16", **(known or {})}, H200, "m")


def test_axes() -> None:
    assert values(7) == [7]
    assert values([1, 5]) == [1, 5]
    assert values({"from": 2, "to": 9, "step": 3}) == [2, 5, 8]
    assert values({"from": 2, "to": 8, "step": 3}) == [2, 5, 8]
    assert values({"from": 3, "to": 50, "times": 2}) == [3, 6, 12, 24, 48]
    assert values({"around": 10, "by": 3}) == [7, 8, 9, 10, 11, 12, 13]
    assert values({"around": 2, "by": 3, "step": 2}) == [1, 3, 5]  # nothing below 1
    assert values("4*k", {"k": 8}) == [32]
    assert values("k", {"k": 8}) == [8]
    assert parse_size_axis("2 * n", "", "m", ("n",)) == Multiple(2, "n")
    assert parse_size_axis([1, "2x1"], "", "stride", ()) == (1, "2x1")
    assert parse_size_axis(0, "", "padding", ()) == (0,)
    assert parse_axis("bf16", "") == ("bf16",)
    assert parse_axis(["bf16", "fp32"], "") == ("bf16", "fp32")


def test_axes_denser_at_tile_edges() -> None:
    rows = 256  # of the largest Hopper tile
    got = values({"from": 200, "to": 600, "step": 100, "edges": "tiles"}, {"dtype": "bf16"})
    assert got == sorted({200, 300, 400, 500, 600} | {255, 256, 257, 511, 512, 513})
    assert large_tile("hopper", "bf16")[0] == rows


def test_axes_denser_at_wave_edges() -> None:
    declared = {"from": 1024, "to": 9000, "step": 1000, "edges": "waves"}
    got = values(declared, {"n": 4096, "k": 64, "dtype": "bf16"})
    axis = parse_size_axis(declared, "", "m", ())
    assert isinstance(axis, Edges)
    near = [v for v in got if v not in axis.values]
    assert near
    # There are 4096 / 128 = 32 tiles across. On 132 SMs, a wave therefore has four rows of tiles,
    # and there is an edge every 1024 rows.
    edge = next_wave_edge(1100, 4096, 256, 128, 132)
    assert edge == 2048
    assert {edge - 1, edge, edge + 1} <= set(got)


def test_too_long_a_range_with_edges_says_what_to_change() -> None:
    long = {"from": 64, "to": 20_000_000, "times": 2, "edges": "tiles"}
    with pytest.raises(UserError, match="tiles, but edges can be .* shorten the axis, or remove"):
        values(long)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"form": 1, "to": 2, "step": 1}, "has an unknown key 'form'; did you mean 'from'?"),
        ({"from": 1, "to": 2}, "must be a range (with the keys from, to and step), powers"),
        ({"around": 8, "by": 1, "edges": "tiles"}, "edges cannot be combined with around and by;"),
        ({"from": 5, "to": 2, "step": 1}, "to is 2, but from is 5; swap"),
        ({"from": 1, "to": 9, "times": 1}, "times must be at least 2"),
        ({"from": 1, "to": 30_000, "step": 1}, "has 30,000 values, but at most 20,000 are"),
        ({"from": 1, "to": "9", "step": 1}, "to must be a whole number of at least 1, not '9'"),
        ({"from": 1, "to": 9, "step": 1, "edges": "wave"}, "did you mean 'waves'"),
        ({"from": 1, "to": 9, "step": 1, "edges": ["tiles"]}, "edges is ['tiles']; did you mean"),
        ({"from": 1, "to": 9, "step": 1, "edges": 10**15}, "edges is 1000000000000000; use one of"),
        ({"around": 1, "by": 5, "step": 20}, "has no value of at least 1; use a smaller step."),
        ([], "is an empty list"),
        (1.9, "takes whole numbers of at least 1, not 1.9"),
        (True, "takes whole numbers of at least 1, not True"),
        (0, "takes whole numbers of at least 1, not 0"),
        ([8, "16"], "takes whole numbers of at least 1, not '16'"),
        ("q", "a multiple of another size, not 'q'."),
        ("9" * 30, "takes whole numbers of at least 1, not '999"),
    ],
)
def test_a_bad_axis_names_file_key_and_the_nearest_word(declared: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_size_axis(declared, "mine.toml: block 1: m", "m", ())
    assert str(caught.value).startswith("mine.toml: block 1: m")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("declared", "name", "words"),
    [
        ("0x1", "stride", "at least 1 or pairs such as \"2x1\", not '0x1'."),
        ("2x", "padding", "at least 0 or pairs such as \"2x1\", not '2x'."),
        ("1x" + "9" * 20, "dilation", "is too large; the largest"),
        ("0*m", "n", "at least 1, not 0."),
        ("99999999999999*m", "n", "is too large; the largest"),
    ],
)
def test_both_numbers_of_a_pair_and_factors_are_checked(
    declared: str, name: str, words: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse_size_axis(declared, f"mine.toml: block 1: {name}", name, ("m",))
    assert str(caught.value).startswith(f"mine.toml: block 1: {name}")
    assert words in str(caught.value)
    assert parse_size_axis("0x1", "", "padding", ()) == ("0x1",)


HEAD = 'question = "Why?"\nop = "gemm"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('op = "gemm"\n[[block]]\nm = 1\nn = 1\nk = 1\n', "mine.toml has no 'question'"),
        ('question = "Why?"\nop = "gem"\n[[block]]\n', "mine.toml: op is 'gem'; did you mean"),
        (HEAD + "[[blok]]\nm = 1\n", "has an unknown key 'blok'; did you mean 'block'"),
        (HEAD + "[[block]]\nm = 1\nn = 1\n", "has no 'k'; add it, or a list of shapes."),
        ("question = 'Why?'\nop = 'linear'\n[[block]]\nshapes = ['8,8']\n",
         "block 1 has no 'tokens'; add it."),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\nlayuot = 'nn'\n", "did you mean 'layout'"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\nlayout = 'mn'\n", "layout is 'mn'; did you mean"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\ndtype = ['bf61']\n", "did you mean 'bf16'"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\ndtype = ['fp16', 'all']\n",
         "block 1: dtype 'all' cannot be combined with other dtypes; give it by itself, or list"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\ncache = 'hot'\n", "cache is 'hot'"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\ncache = 'weight-cold'\n", "'weights-cold'?"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\ncache = ['cold', 'weights-cold']\n"
         "mode = ['burst', 'sustained']\n", "block 1: cache 'weights-cold' is available only "
         "in mode 'burst'; remove 'sustained' from mode."),
        ("question = 'Why?'\nop = 'projections'\n[[block]]\ncount = 3\nm = 1\nn = 1\nk = 1\n"
         "cache = 'weights-cold'\n", "cache 'weights-cold' is available only for gemm and linear, "
         "not for projections; use 'cold' or 'warm'."),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\non = 'gpus'\n", "did you mean 'gpu'"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\nwhere = ['flop <= 3']\n", "did you mean 'flops'"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\nwhere = ['flops']\n", "is not a filter; write a"),
        (HEAD + "[[block]]\nshapes = ['1,2']\n", "'1,2' is not a shape; give m,n,k as numbers"),
        (HEAD + "[[block]\n", "is not valid TOML"),
        (HEAD + "[block]\nm = 1\nn = 1\nk = 1\n", "begin each block with [[block]], in double"),
        (HEAD + "block = 'x'\n", "begin each block with [[block]], in double brackets"),
        ("question = 1\nop = 'gemm'\nblock = []\n", "question must be a sentence, not 1"),
        (HEAD + "default = 'no'\nblock = []\n", "default must be true or false, not 'no'"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\nwhere = [1]\n", "is not a filter; write a"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\nwhere = 'm < 2'\n", "must be a list of filters"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\nwhere = ['dtype < 5']\n", "operator after dtype"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\nwhere = ['dtype == bf61']\n", "'bf16'"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\nwhere = ['m == bf16']\n", "the right side of"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\nwhere = ['m == nan']\n", "the right side of"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\nwhere = ['flops < dtype']\n",
         "must be a number or a name such as flops, not 'dtype'; use one of batch, m, n, k, flops, "
         "bytes, intensity."),
        (HEAD + "[[block]]\nm = 'n'\nn = 'm'\nk = 1\n", "m and n are defined in terms of"),
        (HEAD + "[[block]]\nm = 'n'\nn = 'm'\nk = 'm'\n",
         "block 1: m and n are defined in terms of one another; give at least one of them as "
         "numbers."),
        (HEAD + "[[block]]\nm = {from = 1, to = 9, step = 1, edges = 'waves'}\n"
         "n = {from = 1, to = 9, step = 1, edges = 'waves'}\nk = 1\n",
         "block 1: m and n are defined in terms of one another; give at least one of them as "
         "numbers without edges."),
        (HEAD + "[[block]]\nm = 'm'\nn = 1\nk = 1\n", "multiple of another size, not 'm'"),
        ("question = 'Why?'\nop = 'conv'\n[[block]]\nimages = 2\nc = 8\nh = 4\nw = 4\nkout = 'q'\n"
         "r = 1\ns = 1\n", "not 'q'; use one of images, c, h, w, r, s."),
        (HEAD + "[[block]]\nm = 'kk'\nn = 1\nk = 1\n", "did you mean 'k'"),
        (HEAD + "[[block]]\nm = {from = 1, to = 9, step = 1, edges = 'waves'}\nn = 'm'\nk = 1\n",
         "m and n are defined in terms of"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = {from = 1, to = 9, step = 1, edges = 'waves'}\n",
         "waves have edges only along m, n and tokens; remove edges"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\ndtype = {from = 1}\n", "takes a word"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\nconfig = 5\n", "config must be a string, not 5"),
        (HEAD + "[[block]]\nshapes = ['1,2,3']\nm = 4\n", "both shapes and 'm'"),
        (HEAD + "[[block]]\nshapes = ['1,2,q']\n", "'1,2,q' is not a shape; give m,n,k as numbers"),
        (HEAD + "[[block]]\nshapes = ['2x1,2,3']\n", "'2x1,2,3' is not a shape; give m,n,k"),
        (HEAD + "[[block]]\nshapes = '1,2,3'\n", "must be a list of strings"),
        (HEAD + "[[block]]\nshapes = ['1,2,3']\nvary = {nn = [1]}\n",
         "block 1: vary has an unknown key 'nn'; did you mean 'n'"),
        (HEAD + "[[block]]\nshapes = ['1,2,3']\nvary = {n = []}\n", "vary.n is an empty list"),
        (HEAD + "[[block]]\nshapes = ['1,2,3']\nvary = {n = [1.5]}\n",
         "vary.n takes whole numbers, not 1.5"),
        (HEAD + "[[block]]\nshapes = ['1,2,3']\nvary = {n = {from = 1}}\n",
         "vary.n takes whole numbers, not {'from': 1}"),
        (HEAD + "[[block]]\nshapes = ['1,2,3']\nvary = {n = -2}\n",
         "vary.n is -2, which makes n of '1,2,3' smaller than 1"),
        (HEAD + "[[block]]\nshapes = ['1,2,3']\nvary = [1]\n", "vary must be a table such as"),
        (HEAD + "[[block]]\nm = 1\nn = 1\nk = 1\nvary = {n = 1}\n", "has vary but no shapes"),
        (HEAD + "[[block]]\nshapes = ['1,2,3']\nvry = {n = 1}\n", "did you mean 'vary'"),
    ],
)  # fmt: skip
def test_a_bad_file_gets_one_sentence(write: Any, text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        write(text)
    assert words in str(caught.value)
    assert "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_block_is_the_product_of_its_axes_filtered(write: Any) -> None:
    sweep = write(
        HEAD + "[[block]]\nm = [16, 32]\nn = 'm'\nk = [8, 64]\ndtype = ['fp32', 'bf16']\n"
        "layout = ['nn', 'nt']\nwhere = ['flops <= 100000', 'k != m']\n"
    )
    cases = cases_of(sweep)
    assert len(cases) == len(set(cases))
    expected = {
        Gemm(m, m, k, dtype, layout)
        for m in (16, 32) for k in (8, 64) for dtype in ("fp32", "bf16") for layout in ("nn", "nt")
        if 2 * m * m * k <= 100_000
    }  # fmt: skip
    assert {case.problem for case in cases} == expected
    assert {(case.implementation, case.mode, case.cache) for case in cases} == {
        ("cublas", "burst", "cold")
    }


def test_a_file_in_another_encoding_is_not_valid_toml(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes('question = "Größe?"\n'.encode("latin-1"))
    with pytest.raises(UserError, match="mine.toml is not valid TOML .*utf-8.*; correct it"):
        read_sweep(path)


def test_blocks_and_dtypes_depend_on_the_kind_of_machine(write: Any) -> None:
    sweep = write(
        HEAD + "[[block]]\non = 'gpu'\nm = 1\nn = 1\nk = 1\n"
        "[[block]]\non = 'cpu'\nm = 2\nn = 2\nk = 2\n"
    )
    assert {c.problem.dtype for c in cases_of(sweep)} == {"fp32", "tf32", "fp16", "bf16"}
    for emulated, dtypes in (((), {"fp32", "bf16"}), (("bf16",), {"fp32"})):
        on_cpu = cases_of(sweep, replace(CPU, emulated=emulated))
        assert {c.problem.dtype for c in on_cpu} == dtypes
        assert {c.problem.m for c in on_cpu} == {2}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("declared", "dtypes"),
    [("['bf16', 'fp32']", {"fp32"}), ("'bf16'", {"bf16"}), ("'emulated'", {"bf16"})],
)
def test_an_emulated_dtype_is_measured_only_where_a_block_is_about_it(
    write: Any, declared: str, dtypes: set[str]
) -> None:
    sweep = write(HEAD + f"[[block]]\nm = 2\nn = 2\nk = 2\ndtype = {declared}\n")
    emulating = replace(CPU, emulated=("bf16",))
    assert {c.problem.dtype for c in cases_of(sweep, emulating)} == dtypes
    assert {c.problem.dtype for c in sweep_cases(sweep, emulating, ("bf16",))} == {"bf16"}


def test_configs_come_from_the_implementation_or_the_file(write: Any) -> None:
    sweep = write(
        HEAD + "[[block]]\nm = 8\nn = 8\nk = 8\ndtype = 'bf16'\nconfig = ['', 'autotune=on']\n"
    )
    cases = expand(sweep, H200, library, lambda name, text, *_: [text or f"chosen for {name}"])
    assert [case.config for case in cases] == ["chosen for cublas", "autotune=on"]


def test_linear_layers_have_three_passes(write: Any) -> None:
    sweep = write(
        'question = "Why?"\nop = "linear"\nshapes = ["64,128"]\n[[block]]\ntokens = 32\n'
        "dtype = 'bf16'\n"
    )
    got = {case.problem for case in cases_of(sweep)}
    assert got == {
        Gemm(32, 128, 64, "bf16", "nt"), Gemm(32, 64, 128, "bf16", "nn"),
        Gemm(128, 64, 32, "bf16", "tn"),
    }  # fmt: skip


def test_cold_weights_are_a_state_of_the_cache_for_gemms(write: Any) -> None:
    for op, sizes in (("gemm", "m = 8\nn = 8\nk = 8"), ("linear", "tokens = 8\nshapes = ['8,8']")):
        sweep = write(
            f'question = "Why?"\nop = "{op}"\n[[block]]\n{sizes}\ndtype = "bf16"\n'
            'cache = ["cold", "warm", "weights-cold"]\n'
        )
        cases = cases_of(sweep)
        assert {case.cache for case in cases} == {"cold", "warm", "weights-cold"}
        assert {case.cache for case in cases if case.shared_a} == {"weights-cold"}
        assert len({case.id for case in cases}) == len(cases)
        assert all(Case.from_columns(case.columns()) == case for case in cases)


def test_listed_shapes_are_varied_one_size_at_a_time(write: Any) -> None:
    sweep = write(
        HEAD + "[[block]]\nshapes = ['8,16,32', '9,16,32']\nvary = {m = [0, 1], k = -1}\n"
        "dtype = 'bf16'\n"
    )
    assert [case.problem for case in cases_of(sweep)] == [
        Gemm(8, 16, 32, "bf16"), Gemm(9, 16, 32, "bf16"), Gemm(8, 16, 31, "bf16"),
        Gemm(10, 16, 32, "bf16"), Gemm(9, 16, 31, "bf16"),  # 9,16,32 is there already
    ]  # fmt: skip


def test_waves_along_the_tokens_are_those_of_the_passes_whose_rows_they_are(write: Any) -> None:
    sweep = write(
        'question = "Why?"\nop = "linear"\n[[block]]\nshapes = ["1024,4096"]\ndtype = "bf16"\n'
        'tokens = { from = 1920, to = 2112, step = 96, edges = "waves" }\n'
    )
    declared = {1920, 2016, 2112}
    by_layout: dict[str, set[int]] = {}
    for case in cases_of(sweep):
        gemm = case.problem
        assert isinstance(gemm, Gemm)
        tokens = gemm.k if gemm.layout == "tn" else gemm.m
        by_layout.setdefault(gemm.layout, set()).add(tokens)
    # In the forward pass there are 32 tiles across, so a wave has four rows of tiles. In the
    # gradient of the input there are eight tiles across, so a wave has 16 rows of tiles.
    assert by_layout["nt"] == declared | {2047, 2048, 2049}
    assert by_layout["nn"] == by_layout["tn"] == declared


def test_other_operations_have_axes_of_their_own(write: Any) -> None:
    def problems_of(text: str) -> list[Workload]:
        return [case.problem for case in cases_of(write(f'question = "?"\n{text}'))]

    layers = problems_of(
        'op = "layer"\n[[block]]\nlayer = ["relu", "softmax"]\nimages = 8\nc = 64\nh = 1\nw = 1\n'
        'dtype = "bf16"\n'
    )
    assert layers == [Layer("relu", 8, 64, 1, 1, "bf16"), Layer("softmax", 8, 64, 1, 1, "bf16")]
    series = problems_of(
        'op = "projections"\n[[block]]\ncount = 3\nm = 4\nn = "2*k"\nk = 8\ndtype = "bf16"\n'
    )
    assert series == [Series("projections", 3, 4, 16, 8, "bf16")]
    lstm = problems_of(
        'op = "lstm"\n[[block]]\nsteps = 2\nminibatch = 4\nhidden = 8\nfeatures = 16\n'
        'dtype = "bf16"\n'
    )
    assert lstm == [Lstm(2, 4, 8, 16, "bf16")]
    with pytest.raises(UserError, match="layer is 'rely'; did you mean 'relu'"):
        problems_of('op = "layer"\n[[block]]\nlayer = "rely"\nimages = 8\nc = 6\nh = 1\nw = 1\n')


@pytest.mark.parametrize(
    ("sizes", "line", "words"),
    [
        (
            "shapes = ['3,9,9,8,3,3,2x1,1,1,1']",
            "where = ['stride <= 2']",
            "stride is 2x1, but only a single number can be multiplied",
        ),
        (
            "c = 8\nh = 9\nw = 9\nkout = 8\nr = 3\ns = 3\nstride = 1\npadding = '1x0'",
            "groups = 'padding'",
            "padding is 1x0, but only a single number can be multiplied",
        ),
    ],
)
def test_a_size_with_two_numbers_is_neither_compared_nor_multiplied(
    write: Any, sizes: str, line: str, words: str
) -> None:
    sweep = write(f'question = "Why?"\nop = "conv"\n[[block]]\nimages = 1\n{sizes}\n{line}\n')
    with pytest.raises(UserError, match=words):
        cases_of(sweep)


def test_an_impossible_problem_names_its_file(write: Any) -> None:
    sweep = write(
        'question = "Why?"\nop = "conv"\n[[block]]\nimages = 1\nshapes = ["3,2,2,8,5,5,1,0,1,1"]\n'
    )
    with pytest.raises(UserError, match="mine.toml declares an invalid problem: a 5×5 filter"):
        cases_of(sweep)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("config = 'bogus'", "mine.toml: config 'bogus' is invalid"),
        (
            "implementation = 'cublsa'",
            "mine.toml: implementation 'cublsa' is not known; did you mean",
        ),
    ],
)
def test_what_only_the_implementations_know_names_its_file(
    write: Any, line: str, words: str
) -> None:
    sweep = write(
        f"{HEAD}[[block]]\nm = 8\nn = 8\nk = 8\nimplementation = 'triton-tiled'\n{line}\n"
        if "config" in line
        else f"{HEAD}[[block]]\nm = 8\nn = 8\nk = 8\n{line}\n"
    )
    with pytest.raises(UserError) as caught:
        sweep_cases(sweep, H200)
    assert words in str(caught.value)


def test_a_chain_of_multiples_is_followed(write: Any) -> None:
    sweep = write(HEAD + "[[block]]\nm = '2*n'\nn = '3*k'\nk = [1, 2]\ndtype = 'bf16'\n")
    assert {case.problem for case in cases_of(sweep)} == {
        Gemm(6, 3, 1, "bf16"), Gemm(12, 6, 2, "bf16"),
    }  # fmt: skip


# --- The sweeps that are shipped -----------------------------------------------------------------


def test_every_shipped_file_begins_with_its_question() -> None:
    for path in FOLDER.glob("*.toml"):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith('question = "'), path.name
        assert first.endswith('?"'), path.name


@pytest.mark.parametrize("machine", [H200, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("name", sorted(all_sweeps()))
def test_every_shipped_sweep_has_cases_everywhere(name: str, machine: Machine) -> None:
    """Two kinds of sweeps have exceptions.

    Sweeps of Triton kernels need a GPU, so they are not run by default. Sweeps of emulated dtypes
    need a CPU that emulates one.
    """
    sweep = all_sweeps()[name]
    cases = cases_of(sweep, machine)
    assert cases or (machine is CPU and not sweep.default) or "emulated" in name
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        assert Case.from_columns(case.columns()) == case


def test_every_hand_written_family_is_timed_beside_the_library() -> None:
    timed = {
        case.implementation
        for name in ("families", "families-conv") for case in cases_of(all_sweeps()[name])
    }  # fmt: skip
    assert timed == {*HAND_WRITTEN, "cublas", "cudnn"}


def test_the_public_grid_is_spread_over_all_sizes_and_every_state_of_the_cache() -> None:
    cases = cases_of(all_sweeps()["public-grid"])
    gemms = {case.problem for case in cases if isinstance(case.problem, Gemm)}
    assert len(gemms) == 150
    assert Counter(case.cache for case in cases) == dict.fromkeys(CACHES, 150)
    for gemm in gemms:
        assert (gemm.dtype, gemm.layout, gemm.batch) == ("bf16", "nt", 1)
        assert gemm.n % 32 == gemm.k % 32 == 0
        assert gemm.flops <= 8e12
        assert gemm.bytes <= 4e9
    # Each of the eight octants of the cube of logarithms has some of the GEMMs.
    middles = {"m": 2**7.5, "n": 2**10.5, "k": 2**10.5}
    eighths = Counter(tuple(getattr(g, d) > at for d, at in middles.items()) for g in gemms)
    assert len(eighths) == 8
    assert min(eighths.values()) >= 12


_OFFSETS = (-1, 1, 2, 4, 8, 64)


def test_the_suite_has_what_was_promised() -> None:
    gpu = {name: [c.problem for c in cases_of(sweep)] for name, sweep in all_sweeps().items()}

    def gemms(name: str) -> set[tuple[int, int, int]]:
        return {(p.m, p.n, p.k) for p in gpu[name] if isinstance(p, Gemm)}

    for base in (1024, 4096):  # each dimension has all offsets from 0 to 16
        for offset in range(17):
            off = base + offset
            assert {(off, base, base), (base, off, base), (base, base, off)} <= gemms("alignment")
    vocabularies = {(n, k) for _, n, k in gemms("transformer")}
    assert {(50257, 768), (50304, 768)} <= vocabularies
    assert {(28672, 4096), (57344, 8192)} <= vocabularies  # Llama-3 8B and 70B, gate and up
    assert {(2304, n, 4096) for n in range(1536, 1665, 8)} <= gemms("sources")
    assert {(256, 256, 1024), (257, 256, 1024)} <= gemms("sources")
    assert (512, 4096, 1024) in gemms("sources")
    channels = {p.c for p in gpu["conv-channels"] if isinstance(p, Conv)}
    assert {3, 4, 63, 64, 65} <= channels
    layouts = {(p.layout, p.pass_) for p in gpu["conv-layouts"] if isinstance(p, Conv)}
    assert len(layouts) == 6
    resnet = {(p.c, p.h, p.kout, p.r) for p in gpu["resnet50"] if isinstance(p, Conv)}
    assert len(resnet) >= 20
    assert {p.layout for p in gpu["layouts"] if isinstance(p, Gemm)} == {"nn", "nt", "tn", "tt"}
    assert {m for m, _, _ in gemms("skinny")} >= {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
    more = [case.problem for case in cases_of(all_sweeps()["one-more"])]
    forward = {p for p in more if isinstance(p, Gemm) and (p.layout, p.dtype) == ("nt", "bf16")}
    layers = {
        p for p in forward
        if all({replace(p, n=p.n + o), replace(p, k=p.k + o)} <= forward for o in _OFFSETS)
    }  # fmt: skip
    assert len(layers) == 24
    for p in layers:
        assert {replace(p, layout="nn", n=p.k, k=p.n), Gemm(p.n, p.k, p.m, "bf16", "tn")} <= {*more}
    sustained = cases_of(all_sweeps()["sustained"])
    assert sum(case.mode == "sustained" for case in sustained) >= 20
