"""Check that planted problems are named first, and that a healthy trace has no finding."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis import rooftile
from analysis.advice.options import Question
from analysis.advice.times import times_of
from analysis.explain.explain import TraceVerdict, explain_traces
from analysis.explain.explain_report import TraceExplanation, _shortened, notes
from analysis.explain.kernel_evidence import ELIGIBLE, NOT_ELIGIBLE, USED
from analysis.model.basis import find_basis
from kernels.common.errors import UserError
from kernels.problem import Conv, Gemm, Problem
from tests.studies.trace_speed import measured, write_trace
from tests.support.command_line import analysis
from tests.support.gpu_traces import ALIGN2, DTYPE_NAMES, NVJET, GpuTrace, training_step

NOWHERE = Path("no-such-results")
H100 = "nvidia-h100-sxm"
RESULTS = Path(__file__).parents[3] / "results"
CPU = RESULTS / "published" / "cpu-intel-xeon-avx512bf16-1t"
ALIGN1 = "cutlass_tensorop_bf16_s16816fprop_optimized_bf16_64x64_16x10_nhwc_align1"
ALIGN1_GEMM = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>"
SIMT = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>"
XMMA = (
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize256x128x64_"
    "warpgroupsize2x1x1_g1_execute_segment_k_off_kernel__5x_cudnn"
)
TO_NHWC = "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, float>(float*)"
SPLIT = "nvjet_hsh_64x8_64x16_1x1_v_bz_splitK_NNT"
REDUCE = "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, float>(float*)"


def expected_us(problem: Problem) -> float:
    time: float = times_of([problem], find_basis(H100, NOWHERE))[0]["time_us"]
    return time


def healthy(made: GpuTrace) -> None:
    """Add layers that take as long as expected."""
    for _ in range(4):
        for m, n, k in ((8192, 3072, 1024), (8192, 1024, 4096)):
            made.gemm(m, n, k, "bf16", [(NVJET, expected_us(Gemm(m, n, k, "bf16")))])
        made.op("aten::native_layer_norm", kernels=[("vectorized_layer_norm_kernel", 20.0)])


def vocabulary(made: GpuTrace) -> None:
    healthy(made)
    made.gemm(8192, 50257, 1024, "bf16", [(ALIGN2, 4300.0)])


def channels(made: GpuTrace) -> None:
    healthy(made)
    made.conv((64, 33, 112, 112), 64, 3, "bf16", [(ALIGN1, 900.0)])


def cuda_cores(made: GpuTrace) -> None:
    healthy(made)
    made.gemm(4096, 4096, 4096, "fp32", [("ampere_sgemm_128x128_tn", 2800.0)])


def transposes(made: GpuTrace) -> None:
    healthy(made)
    conv = Conv.parse("64,256,56,56,256,3,3,1,1,1,1,bf16")
    kernels = [(TO_NHWC, 150.0), (XMMA, expected_us(conv)), (TO_NHWC, 100.0)]
    for _ in range(4):
        made.conv((64, 256, 56, 56), 256, 3, "bf16", kernels, nhwc=False)


def decode(made: GpuTrace) -> None:
    for _ in range(20):
        for n, k in ((6144, 4096), (4096, 4096)):
            made.gemm(1, n, k, "bf16", [("gemv2T_kernel_val", 4.0)])
            made.op("aten::mul", kernels=[("elementwise_kernel", 1.5)])


def split(made: GpuTrace) -> None:
    healthy(made)
    gemm = Gemm(64, 4096, 4096, "bf16")
    for _ in range(10):
        kernels = [(SPLIT, 2 * expected_us(gemm)), (REDUCE, expected_us(gemm))]
        made.gemm(64, 4096, 4096, "bf16", kernels)


def verdict_on(tmp_path: Path, plant: Callable[[GpuTrace], None], **options: Any) -> TraceVerdict:
    made = GpuTrace(**options)
    plant(made)
    return explain_traces([made.write(tmp_path / "trace.json.gz")], None, NOWHERE)


@pytest.mark.parametrize(
    ("plant", "subject", "text"),
    [
        (vocabulary, "8192×50257×1024 bf16 nt",
         ["pad N 50257 → 50264 (vocabulary). Verdict: likely",
          "loads 2 elements at a time (align2)"]),
        (channels, "64×33×112×112", ["pad C 33 → 40", "loads one element at a time (align1)",
                                     "2.7× the expected time"]),
        (cuda_cores, "4096×4096×4096 fp32 nt",
         ["compute in TF32; one call is then", "CUDA cores instead of Tensor Cores"]),
        (transposes, "64×256×56×56", ["channels_last", "is spent on converting layouts"]),
        (decode, "GPU idle for", ["launches kernels more slowly than the GPU runs them"]),
        (split, "64×4096×4096", ["3.0× the expected time", "spent on adding up the partial sums"]),
    ],
)  # fmt: skip
def test_a_planted_problem_is_named_first(
    tmp_path: Path, plant: Callable[[GpuTrace], None], subject: str, text: list[str]
) -> None:
    verdict = verdict_on(tmp_path, plant)
    first = verdict.findings[0]
    assert subject in first.subject
    for words in text:
        assert words in first.text
    assert 0.05 < first.saves_us / verdict.account.span_us < 1
    assert first.subject in str(TraceExplanation(verdict)).splitlines()[0]


def test_small_savings_of_one_size_are_a_finding_together(tmp_path: Path) -> None:
    """The batches of a server all differ, so each shape saves only a little."""

    def step(made: GpuTrace) -> None:
        for m in range(256, 8192, 64):
            us = 2 * expected[m]
            made.gemm(m, 50257, 1024, "bf16", [(ALIGN2, us)])
            made.gemm(m, 4096, 4096, "bf16", [(NVJET, 5.0 + m / 20)])

    problems = [Gemm(m, 50257, 1024, "bf16") for m in range(256, 8192, 64)]
    rows = times_of(problems, find_basis(H100, NOWHERE))
    expected = {p.m: row["time_us"] for p, row in zip(problems, rows, strict=True)}
    first = verdict_on(tmp_path, step).findings[0]
    assert first.subject == "the size 50257 (vocabulary) of 124 operations"
    assert first.text.endswith(" and 120 more")


def test_images_that_are_stored_channels_last_need_not_be(tmp_path: Path) -> None:
    def step(made: GpuTrace) -> None:
        kernels = [(TO_NHWC, 150.0), (XMMA, 450.0)]
        made.conv((64, 256, 56, 56), 256, 3, "bf16", kernels, nhwc=True)

    assert verdict_on(tmp_path, step).findings == ()


def test_a_size_of_several_operations_is_one_finding(tmp_path: Path) -> None:
    verdict = explain_traces([training_step().write(tmp_path / "trace.json")], None, NOWHERE)
    (finding,) = verdict.findings
    assert finding.subject == "the size 50257 (vocabulary) of 3 operations"
    saves = [entry.saves_us for entry in verdict.operations if entry.finding]
    assert len(saves) == 3
    assert finding.saves_us == pytest.approx(sum(saves))
    for shape in ("8192×50257×768 bf16 nt", "8192×768×50257 bf16 nn", "50257×768×8192 bf16 tn"):
        assert shape in finding.text
    healthy_step = training_step(vocabulary=50304)
    for event in healthy_step.events:  # replace slow kernels by kernels that are fast enough
        if event["cat"] == "kernel" and "align2" in event["name"]:
            event.update(name=NVJET, dur=800.0)
    path = healthy_step.write(tmp_path / "healthy.json")
    assert explain_traces([path], None, NOWHERE).findings == ()


def test_idle_time_that_the_profiler_may_have_caused_has_a_note(tmp_path: Path) -> None:
    idle, busy = verdict_on(tmp_path, decode), verdict_on(tmp_path, vocabulary)
    assert [any("The profiler slows" in note for note in notes(v)) for v in (idle, busy)] == [
        True,
        False,
    ]


def test_a_size_gets_one_new_value_in_all_operations(tmp_path: Path) -> None:
    """A real step of gpt2-xl on an H100: each operation by itself prefers another vocabulary."""

    def head(made: GpuTrace) -> None:
        made.gemm(8192, 50257, 1600, "bf16", [(ALIGN1_GEMM, 15254.0)])
        made.gradients(8192, 50257, 1600, [(ALIGN1_GEMM, 10806.0)], [(ALIGN1_GEMM, 10016.0)])

    made = GpuTrace()
    head(made)
    path = made.write(tmp_path / "trace.json")
    verdict = explain_traces([path], H100, RESULTS)
    (finding,) = verdict.findings
    assert finding.subject == "the size 50257 (vocabulary) of 3 operations"
    assert len({entry.change.partition(" ")[2] for entry in verdict.operations}) == 1
    assert finding.saves_us == pytest.approx(sum(entry.saves_us for entry in verdict.operations))


def test_tf32_for_several_operations_is_one_finding(tmp_path: Path) -> None:
    def step(made: GpuTrace) -> None:
        for n in (4096, 8192):
            made.gemm(4096, n, 4096, "fp32", [(SIMT, 0.66 * n)])

    (finding,) = verdict_on(tmp_path, step).findings
    assert finding.subject == "TF32 for 2 operations in fp32"
    assert "TF32 also saves time in 1 other operation: mm (4096×4096×4096 fp32 nt)" in finding.text
    assert "align1" not in finding.text  # a kernel for CUDA cores is always one of align1


def test_rows_that_torch_compile_padded_are_aligned(tmp_path: Path) -> None:
    """The weight's gradient of a real compiled step of GPT-2, whose logits have padded rows."""
    kind = DTYPE_NAMES["bf16"]

    def wgrad(made: GpuTrace) -> None:
        made.op(
            "aten::addmm", [[50257, 768], [50257, 12288], [12288, 768]],
            [[768, 1], [1, 50304], [768, 1]], [kind] * 3, [""] * 3, [(NVJET, 1823.0)],
        )  # fmt: skip

    (entry,) = verdict_on(tmp_path, wgrad).operations
    assert entry.operation.shape == "50264×768×12288 bf16 tn"
    assert entry.expected is not None
    assert entry.expected.time_us < 1823.0
    assert not entry.change


def test_a_healthy_trace_has_no_finding(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, healthy)
    assert verdict.findings == ()
    assert {entry.saves_us for entry in verdict.operations} == {0.0}
    text = str(TraceExplanation(verdict))
    assert "No change would save much time." in text.splitlines()[0]
    gemm = verdict.operations[0]
    assert gemm.expected is not None
    assert gemm.operation.each_us == pytest.approx(gemm.expected.time_us, rel=1e-3)
    assert gemm.tensor_cores == USED


def test_a_shape_that_is_already_fast_needs_no_padding(tmp_path: Path) -> None:
    """Advice on alignment assumes a price, and this trace shows that the price is too high."""
    padded = expected_us(Gemm(8192, 50264, 1024, "bf16"))

    def fast(made: GpuTrace) -> None:
        healthy(made)
        made.gemm(8192, 50257, 1024, "bf16", [(NVJET, 0.95 * padded)])

    assert verdict_on(tmp_path, fast).findings == ()


def test_a_saving_is_never_more_than_the_time_above_the_other_size(tmp_path: Path) -> None:
    padded = expected_us(Gemm(8192, 50264, 1024, "bf16"))

    def slightly_slow(made: GpuTrace) -> None:
        made.gemm(8192, 50257, 1024, "bf16", [(NVJET, 1.2 * padded)])

    (finding,) = verdict_on(tmp_path, slightly_slow).findings
    assert finding.saves_us == pytest.approx(0.2 * padded, rel=0.05)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("void cutlass::Kernel2<cutlass_80_s16816gemm_bf16_64x64_nt_align8>(Params)",
         "cutlass_80_s16816gemm_bf16_64x64_nt_align8"[:40] + "…"),
        ("void at::RowwiseMomentsCUDAKernel<float>", "at::RowwiseMomentsCUDAKernel<float>"),
        ("void cub::DeviceReduceKernel<cub::Policy>", "cub::DeviceReduceKernel<cub::Policy>"),
        ("ampere_sgemm_128x128_tn", "ampere_sgemm_128x128_tn"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<int>(int)",
         "CatArrayBatchedCopy<int>(int)"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(Args<int>)",
         "internal::gemvx::kernel<int, float>(Args<int>)"[:40] + "…"),
        ("void cutlass::Kernel<cutlass::gemm::kernel::Gemm<float, int>>(Params)", "Gemm"),
        ("void (anonymous namespace)::fill<float>(int)", "fill<float>(int)"),
        ("void f(int) const", "f(int) const"),
        ("", ""),
    ],
)  # fmt: skip
def test_only_a_return_type_and_the_template_of_cutlass_are_left_out_of_a_name(
    kernel: str, name: str
) -> None:
    assert _shortened(kernel) == name


def test_attention_and_grouped_gemms_have_expected_times(tmp_path: Path) -> None:
    bf16 = DTYPE_NAMES["bf16"]

    def layers(made: GpuTrace) -> None:
        shape, stride = [4, 16, 2048, 128], [4194304, 262144, 128, 1]
        made.op(
            "aten::_scaled_dot_product_flash_attention", [*[shape] * 3, [], [], [], []],
            [*[stride] * 3, [], [], [], []], [bf16] * 7, ["", "", "", "0.", "True", "False", ""],
            [("pytorch_flash::flash_fwd_kernel", 400.0)],
        )  # fmt: skip
        made.op(
            "aten::_grouped_mm", [[8192, 2048], [8, 2048, 4096], [8]],
            [[2048, 1], [8388608, 1, 2048], [1]], [bf16, bf16, "int"], [""] * 3,
            [("void cutlass::device_kernel<GroupedGemm>", 9000.0)],
        )  # fmt: skip

    grouped, attention = verdict_on(tmp_path, layers).operations
    assert grouped.expected is not None
    assert "× the expected time" in grouped.finding
    assert attention.expected is not None
    assert (attention.tensor_cores, grouped.tensor_cores) == (USED, None)


@pytest.mark.parametrize(
    ("dtype", "kernel", "use"),
    [("bf16", NVJET, USED), ("fp32", "ampere_sgemm_128x128_tn", ELIGIBLE),
     ("bf16", "ampere_sgemm_128x128_tn", ELIGIBLE), ("bf16", "my_kernel", None)],
)  # fmt: skip
def test_tensor_cores_are_used_or_could_be_or_nobody_knows(
    tmp_path: Path, dtype: str, kernel: str, use: str | None
) -> None:
    def step(made: GpuTrace) -> None:
        made.gemm(64, 64, 64, dtype, [(kernel, 5.0)])
        made.op("aten::relu", kernels=[("elementwise_kernel", 1.0)])

    uses = {e.operation.op: e.tensor_cores for e in verdict_on(tmp_path, step).operations}
    assert uses == {"mm": use, "relu": NOT_ELIGIBLE}


def test_without_shapes_the_report_says_how_to_record_them(tmp_path: Path) -> None:
    text = str(TraceExplanation(verdict_on(tmp_path, vocabulary, record_shapes=False)))
    assert "No shapes were recorded." in text.splitlines()[0]
    assert "    with torch.profiler.profile(record_shapes=True) as profiler:" in text


def test_a_trace_without_strides_is_compared_with_a_note(tmp_path: Path) -> None:
    made = GpuTrace()
    vocabulary(made)
    for event in made.events:
        event["args"].pop("Input Strides", None)
    verdict = explain_traces([made.write(tmp_path / "trace.json")], None, NOWHERE)
    assert "8192×50257×1024 bf16 nt" in verdict.findings[0].subject
    assert "the layouts nt and nchw are assumed" in str(TraceExplanation(verdict))


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    def step(made: GpuTrace) -> None:
        made.graph([(NVJET, 50.0)])
        made.gemm(64, 64, 64, "bf16", [(NVJET, 50.0)], lost_kernel=True)
        made.op("aten::relu", kernels=[("elementwise_kernel", 50.0)])
        made.event("cpu_op", "aten::mm", 5.0, -3.0, 1)

    text = str(TraceExplanation(verdict_on(tmp_path, step)))
    assert "50.0% of the operations' time is spent in kernels of CUDA graphs" in text
    assert "The trace has no kernel for 1 call of a matrix operation, for example" in text
    assert "1 event without a name or with impossible times was left out" in text


def test_a_slow_machine_is_told_from_slow_shapes(tmp_path: Path) -> None:
    def step(made: GpuTrace, slowdown: float) -> None:
        for n in range(1024, 1024 * 7, 1024):
            us = slowdown * expected_us(Gemm(8192, n, 1024, "bf16"))
            made.gemm(8192, n, 1024, "bf16", [(NVJET, us)])

    slow = verdict_on(tmp_path, lambda made: step(made, 1.5))
    assert slow.slowdown == pytest.approx(1.5, rel=1e-3)
    assert slow.findings == ()
    assert "longer than expected (median ratio 1.5)" in str(TraceExplanation(slow))
    assert verdict_on(tmp_path, lambda made: step(made, 1.0)).slowdown == 1.0
    assert verdict_on(tmp_path, vocabulary).slowdown == 1.0

    def one_is_slower(made: GpuTrace) -> None:
        step(made, 1.5)
        us = 6 * expected_us(Gemm(4096, 4096, 1024, "bf16"))
        made.gemm(4096, 4096, 1024, "bf16", [(NVJET, us)])

    (finding,) = verdict_on(tmp_path, one_is_slower).findings
    assert "4096×4096×1024" in finding.subject
    assert "takes 6.0× the expected time" in finding.text


def test_another_query_gives_other_sizes(tmp_path: Path) -> None:
    made = GpuTrace()
    vocabulary(made)
    path = made.write(tmp_path / "trace.json")
    verdict = explain_traces([path], None, NOWHERE, question=Question("choose", 0.02))
    text = verdict.findings[0].text
    assert text.startswith("choose M 8192 → 8320, N 50257 → 50432 (tokens, ")
    assert "% per FLOP (" in text


def test_the_command_prints_and_writes_everything(tmp_path: Path) -> None:
    made = GpuTrace()
    vocabulary(made)
    trace, table, page = tmp_path / "t.json.gz", tmp_path / "t.csv", tmp_path / "t.md"
    made.write(trace)
    shipped = ("--results", tmp_path / "none")  # use shipped constants, not imported tables
    told = analysis("explain", trace, "--json", "--csv", table, "--markdown", page, *shipped)
    assert (told.returncode, told.stderr) == (0, "")
    document = json.loads(told.stdout)
    assert document["machine"] == H100
    assert document["gpu_time_us"] == pytest.approx(sum(
        operation["total_us"] for operation in document["operations"]
    ))  # fmt: skip
    first = document["operations"][0]
    assert first | {
        "op": "mm", "problem": "8192,50257,1024,bf16,nt,1", "calls": 1, "kernel": ALIGN2,
        "tensor_cores": "used", "change": "N 50257 → 50264", "tile": "32x32x128",
    } == first  # fmt: skip
    assert first["time_us"] == pytest.approx(4300.0)
    assert first["lo_us"] < first["predicted_us"] < first["hi_us"]
    assert document["findings"][0]["saves_us"] == pytest.approx(first["saves_us"])
    assert document["amdahl"]["bound"] == pytest.approx(
        1 / (1 - document["amdahl"]["matrix_share"])
    )
    with open(table, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["op"] for row in rows] == [o["op"] for o in document["operations"]]
    assert page.read_text(encoding="utf-8").startswith("## t.json.gz on nvidia-h100-sxm: ")
    assert analysis("explain", trace).stdout.startswith("t.json.gz on nvidia-h100-sxm: ")


@pytest.mark.long
def test_a_trace_of_50_mb_is_explained_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, 50_000_000)
    told = measured("explain", path)
    assert told["events"] > 10_000
    assert told["peak_mb"] < 300


def test_python_explains_traces_too(tmp_path: Path) -> None:
    made = GpuTrace()
    vocabulary(made)
    path = made.write(tmp_path / "trace.json")
    for given in (path, str(path), [path, path]):
        explained = rooftile.explain(given, "h100 sxm", results=NOWHERE)
        assert isinstance(explained, rooftile.TraceExplanation)
    assert explained.operations.iloc[0]["calls"] == 2
    with pytest.raises(UserError, match="no trace is given"):
        rooftile.explain([])
    choice = rooftile.explain(path, choose="2%", results=NOWHERE).operations.iloc[0]
    assert "N 50257 → 50432" in choice["change"]


def cpu_trace(tmp_path: Path, **header: Any) -> Path:
    path = tmp_path / "cpu.json"
    event = {
        "ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 900_000.0, "pid": 1,
        "tid": 1, "args": {"Input Dims": [[512, 512], [512, 512]], "Concrete Inputs": ["", ""],
                           "Input Strides": [[512, 1], [1, 512]], "Input type": ["float"] * 2},
    }  # fmt: skip
    path.write_text(json.dumps({**header, "traceEvents": [event]}))
    return path


def test_a_cpu_trace_is_compared_with_a_cpu_that_was_recorded(tmp_path: Path) -> None:
    verdict = explain_traces([cpu_trace(tmp_path)], None, NOWHERE, against=CPU)
    assert verdict.machine.slug == CPU.name
    assert "measured" in verdict.source
    assert "× the expected time" in verdict.findings[0].text
    told = TraceExplanation(verdict)
    assert told.to_json()["idle_us"] == 0
    assert "GPU" not in str(told)


def test_a_machine_is_looked_for_in_both_folders(tmp_path: Path) -> None:
    trace = cpu_trace(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    for first, second in ((CPU.parent, empty), (empty, CPU.parent)):
        for name in (CPU.name, "avx512bf16-1t"):
            verdict = explain_traces([trace], name, second, against=first)
            assert verdict.source.startswith("measured ")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "is not recorded. Run `make sweep` here first, or name the trace's machine"),
        (("--machine", "h200"), "the trace is from a CPU, but nvidia-h200 is a GPU"),
        (("--machine", "nothing"), "machine 'nothing' is not known"),
        (("--against", "no-such-folder"), "no-such-folder is not a folder"),
        (("--against", str(CPU), "--machine", "h200"), "Leave --machine out"),
        (("--pad", "10%", "--choose", "10%"), "give one of them, not both"),
        (("--pad", ""), "--pad takes a share from 0% to 1,000%, not ''. Give a share"),
        (("--csv", "no-such-folder/x.csv"), "no-such-folder is not a folder"),
    ],
)
def test_a_machine_that_does_not_fit_gets_a_sentence(
    tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    told = analysis("explain", cpu_trace(tmp_path), *options, "--results", tmp_path / "none")
    assert told.returncode == 2
    assert says in told.stderr
    assert len(told.stderr.splitlines()) == 1


def test_a_gpu_trace_without_kernels_gets_a_sentence(tmp_path: Path) -> None:
    path = cpu_trace(tmp_path, deviceProperties=[{"name": "NVIDIA H100 80GB HBM3"}])
    with pytest.raises(UserError, match="has no kernels. Record it with ProfilerActivity.CUDA"):
        explain_traces([path], None, NOWHERE)
    assert explain_traces([path], None, NOWHERE, against=CPU).account.kind == "cpu"


def test_traces_of_unknown_or_different_gpus_get_a_sentence(tmp_path: Path) -> None:
    paths: list[Path] = []
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "Radeon 7", ""):
        made = GpuTrace(name)
        made.gemm(64, 64, 64, "bf16", [(NVJET, 5.0)])
        paths.append(made.write(tmp_path / f"{len(paths)}.json"))
    with pytest.raises(UserError, match="several kinds of GPUs"):
        explain_traces(paths[:2], None, NOWHERE)
    with pytest.raises(UserError, match="'Radeon 7', which is neither known nor recorded"):
        explain_traces(paths[2:3], None, NOWHERE)
    with pytest.raises(UserError, match="does not name its GPU; name the machine with --machine"):
        explain_traces(paths[3:], None, NOWHERE)
    assert explain_traces(paths, "h200", NOWHERE).account.operations[0].calls == 4


def test_a_damaged_calibration_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(CPU, tmp_path / CPU.name)
    (tmp_path / CPU.name / "calibration.json").write_text("{")
    trace = cpu_trace(tmp_path)
    monkeypatch.setattr("analysis.explain.explain.cpu_slug", lambda *_: CPU.name)
    with pytest.raises(UserError, match=r"calibration.json"):
        explain_traces([trace], None, tmp_path)
    with pytest.raises(UserError, match=r"calibration.json"):
        explain_traces([trace], CPU.name, CPU.parent, against=tmp_path)
