"""Operations other than GEMMs and convolutions: FLOPs, bytes and the results of the libraries."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import implementations
from kernels.common.errors import UserError
from kernels.config import Storage
from kernels.correctness.reference import check
from kernels.device import select_device, this_cpu
from kernels.library.vendor import LibraryConfig
from kernels.operands import random_operands
from kernels.operation import (
    LAYERS,
    OPERATIONS,
    SERIES,
    Layer,
    Lstm,
    Operation,
    Series,
    as_problem,
    operation_of,
    products_of,
)
from kernels.problem import Gemm
from kernels.registry import library_for
from sweeps.schema import problem_columns, problem_of

sizes = st.integers(1, 9)
dtypes = st.sampled_from(["fp32", "bf16"])
operations = st.one_of(
    st.builds(
        Layer, st.sampled_from(list(LAYERS)), st.integers(2, 9), sizes, sizes, sizes, dtypes,
        st.sampled_from(["nhwc", "nchw"]),
    ),
    st.builds(Series, st.sampled_from(SERIES), sizes, sizes, sizes, sizes, dtypes),
    st.builds(Lstm, sizes, sizes, sizes, sizes, dtypes),
)  # fmt: skip


def _normalised_values(operation: Operation) -> float:
    """Return the number of values over which an operation normalises; infinite if it does not."""
    if not isinstance(operation, Layer):
        return math.inf
    pixels = operation.n * operation.h * operation.w
    return {"layernorm": operation.c, "batchnorm": pixels}.get(operation.op, math.inf)


@settings(max_examples=150)
@given(operation=operations)
def test_the_libraries_compute_what_the_reference_does(operation: Operation) -> None:
    machine = this_cpu().machine
    library = implementations()[library_for(operation, machine)]
    assert library.supports(operation, machine) is None
    for config in [*library.configs(operation, machine), LibraryConfig(offset=1)]:
        operands = random_operands(operation, "cpu")
        result = library.prepare(operation, [operands], config)(0)
        # In 16 bits, the variance of a few almost equal values is mostly a rounding error.
        if operation.dtype == "bf16" and _normalised_values(operation) < 8:
            continue
        assert check(operation, operands, result).ok, (config, operation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("op", LAYERS)
def test_a_gpu_computes_layers_as_the_reference_does(op: str, dtype: str) -> None:
    device = select_device("gpu")
    layer = Layer(op, 8, 64, 6, 6, dtype)
    library = implementations()[library_for(layer, device.machine)]
    assert library.supports(layer, device.machine) is None
    operands = random_operands(layer, device.torch_name)
    assert check(layer, operands, library.prepare(layer, [operands])(0)).ok


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_wrong_entry_is_found(name: str) -> None:
    if name in LAYERS:
        operation: Operation = Layer(name, 3, 8, 6, 5, "fp32")
    else:
        operation = Lstm(4, 3, 8, 6, "fp32") if name == "lstm" else Series(name, 3, 5, 7, 9, "fp32")
    machine = this_cpu().machine
    operands = random_operands(operation, "cpu")
    library = implementations()[library_for(operation, machine)]
    result = library.prepare(operation, [operands])(0).clone()
    assert check(operation, operands, result).ok
    result[-1, -1, -1] += 0.01 * result.abs().max()
    assert not check(operation, operands, result).ok


@given(operation=operations)
def test_columns_hold_everything(operation: Operation) -> None:
    assert problem_of(problem_columns(operation)) == operation
    assert operation_of(operation.columns()) == operation


def test_arithmetic_intensities_are_the_sources() -> None:
    """The values are from slides about HPC, for fp16."""
    rows = {op: Layer(op, 64, 1024, 8, 8, "fp16") for op in LAYERS}
    assert rows["relu"].intensity == 0.25
    assert rows["maxpool"].intensity == 2.25
    assert rows["layernorm"].intensity < 10
    assert Gemm(512, 4096, 1024, "fp16").intensity == pytest.approx(315, abs=0.5)
    assert Gemm(1, 4096, 1024, "fp16").intensity == pytest.approx(1, abs=0.01)


def test_a_series_is_as_much_work_fused_as_apart() -> None:
    projections = Series("projections", 3, 64, 128, 256, "bf16")
    assert projections.fused == Gemm(64, 384, 256, "bf16", "nt")
    timesteps = Series("timesteps", 3, 64, 128, 256, "bf16")
    assert timesteps.fused == Gemm(192, 128, 256, "bf16", "nt")
    for series in (projections, timesteps):
        ((count, one),) = products_of(series)
        assert count * one.flops == series.flops == series.fused.flops


def test_an_lstm_is_its_gates_products() -> None:
    lstm = Lstm(10, 16, 32, 24, "fp32")
    assert products_of(lstm) == (
        (1, Gemm(160, 128, 24, "fp32", "nt")),
        (10, Gemm(16, 128, 32, "fp32", "nt")),
    )
    assert lstm.flops == 2 * 160 * 128 * (24 + 32)


def test_invalid_sizes_and_words_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'relu'"):
        Layer("rely", 1, 1, 1, 1, "fp32")
    with pytest.raises(UserError, match="hidden must be a whole number"):
        Lstm(1, 1, 0, 1, "fp32")
    for too_large in (
        lambda: Layer("relu", 2**30, 2**30, 1, 1, "fp32"),
        lambda: Series("timesteps", 2**10, 2**10, 2**30, 2**30, "fp32"),
        lambda: Lstm(1, 1, 2**30, 2**30, "fp32"),
    ):
        with pytest.raises(UserError, match="more than any machine has"):
            too_large()
    with pytest.raises(TypeError, match="neither a GEMM nor a convolution"):
        as_problem(Lstm(1, 1, 1, 1, "fp32"))


def test_hand_written_kernels_refuse_other_operations_in_a_sentence() -> None:
    machine = this_cpu().machine
    for name, implementation in implementations().items():
        if name.startswith("triton-"):
            reason = implementation.supports(Series("projections", 3, 8, 8, 8, "fp32"), machine)
            assert reason is not None
            assert reason.endswith(".")


@pytest.mark.parametrize("problem", [Gemm(8, 16, 24, "bf16", "tn"), Gemm(4, 8, 8, "fp32", "nt", 3)])
def test_misplaced_operands_begin_at_odd_addresses(problem: Gemm) -> None:
    dense = random_operands(problem, "cpu")
    elsewhere = random_operands(problem, "cpu", storage=Storage(offset=1))
    for before, after in zip(dense, elsewhere, strict=True):
        assert after.data_ptr() % 16 == after.element_size()
        assert after.stride() == before.stride()
        assert after.shape == before.shape


def test_a_librarys_config_says_only_what_differs() -> None:
    assert str(LibraryConfig()) == ""
    assert str(LibraryConfig(reduced=False, offset=1)) == "reduced=off;offset=1"
    for text in ("graph=on", "paced=on", "reduced=off", "fused=on;offset=3", "ld_multiple=64"):
        assert LibraryConfig.parse(text) == LibraryConfig.parse(str(LibraryConfig.parse(text)))


def test_a_paced_launch_says_that_its_gaps_count() -> None:
    gemm = Gemm(8, 8, 8, "fp32")
    library = implementations()[library_for(gemm, this_cpu().machine)]
    sets = [random_operands(gemm, "cpu")]
    assert library.prepare(gemm, sets, LibraryConfig(paced=True)).paced
    assert not library.prepare(gemm, sets).paced


@pytest.mark.gpu
def test_a_graph_computes_what_its_launches_do() -> None:
    device = select_device("gpu")
    series = Series("timesteps", 5, 16, 32, 64, "bf16")
    sets = [random_operands(series, device.torch_name, seed) for seed in (0, 1)]
    launch = implementations()["cublas"].prepare(series, sets, LibraryConfig(graph=True))
    for index, operands in enumerate(sets):
        operands.out.fill_(float("nan"))
        assert check(series, operands, launch(index)).ok
