"""Utilization, floor and verdict follow from known peaks; a tiny program gets all of them in one measurement."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from fakes.table_runtime import save_table
from references import tiny_folder

from strop.artifact import Artifact, Manifest, read_manifest, write_manifest
from strop.errors import UserError
from strop.evals._rounds import Rounds
from strop.evals._work import Work
from strop.evals.roofline import QUANTITIES, Bound, Job, Roofline, Trial, describe, summarize, verdict
from strop.export.eager import Eager
from strop.gate import Gate, check_gates, decide
from strop.metric import MeasureContext, Measurement
from strop.stage import Context

ONE_THREAD = MeasureContext(threads=1)
QUICK = {"context": 16, "prompt_tokens": 32, "repeats": 5, "probe_bytes": 1 << 22, "gemm_size": 64}
DECODE = Work({"linears": 60_000_000, "keys_values": 20_000_000}, {"linears": 240_000_000})
PREFILL = Work({"linears": 60_000_000, "keys_values": 0}, {"linears": 32_000_000_000})
JOB = Job(DECODE, PREFILL, 0)
READS, PRODUCTS = 40e9, 160e9


def trial(decode_s: float, prefill_s: float = 0.4, *, copies: float = 1.0, drift: float = 0.0) -> Trial:
    """Twelve rounds on a machine of 40 GB/s and 160 GFLOP/s that slows down by `drift` from round to round."""
    slower = (1 + drift) ** np.arange(12)
    decode = decode_s * slower[:, None] * [2 * copies / (1 + copies), 2 / (1 + copies)]
    return Trial(decode, prefill_s * slower, READS / slower, PRODUCTS / slower, Rounds([[]] * 12, [], False))


def test_utilization_is_of_the_peak_of_the_same_round() -> None:
    found = summarize(JOB, trial(0.004, drift=0.1))
    assert [found["mbu"].estimate.value, found["mbu"].estimate.upper] == pytest.approx([0.5, 0.5])  # 80 MB in 2 ms
    assert found["mfu"].estimate.value == pytest.approx(0.5)  # 32 GFLOP in 200 ms
    assert found["gap"].estimate.value == pytest.approx(2)
    assert found["ridge"].estimate.value == pytest.approx(4)


def test_times_and_peaks_are_medians_in_their_units() -> None:
    found = {name: x.estimate.value for name, x in summarize(JOB, trial(0.008)).items()}
    assert found["decode_ms"] == pytest.approx(8)
    assert found["floor_ms"] == pytest.approx(2)
    assert found["prefill_ms"] == pytest.approx(400)
    assert found["read_gb_per_s"] == pytest.approx(40)
    assert found["gemm_gflop_per_s"] == pytest.approx(160)
    assert [found["bytes_per_token"], found["flops_per_token"]] == [80_000_000, 240_000_000]
    assert found["decode_intensity"] == 3


def test_the_floor_is_arithmetic_where_that_takes_longer() -> None:
    heavy = replace(JOB, decode=Work({"linears": 80_000_000}, {"linears": 640_000_000}))
    found = summarize(heavy, trial(0.008))
    assert found["floor_ms"].estimate.value == pytest.approx(4)
    assert found["gap"].estimate.value == pytest.approx(2)


def test_what_is_counted_is_exact_and_what_is_timed_has_bounds() -> None:
    times = trial(0.008)
    times = replace(times, decode_s=times.decode_s * np.exp(np.random.default_rng(0).normal(0, 0.05, (12, 2))))
    found = summarize(JOB, times)
    assert found["bytes_per_token"].estimate.confidence == 1
    assert found["mbu"].estimate.lower < found["mbu"].estimate.value < found["mbu"].estimate.upper
    assert found["mbu"].samples == 12
    assert set(found) == set(QUANTITIES)


def test_copies_that_differ_widen_what_depends_on_them() -> None:
    same, other = (summarize(JOB, trial(0.008, copies=x)) for x in (1.0, 1.25))
    for name in QUANTITIES:
        before, after = same[name].estimate, other[name].estimate
        factor = 1.25 if name in ("mbu", "mfu", "gap", "decode_ms", "prefill_ms") else 1
        assert after.value == pytest.approx(before.value)
        assert [after.lower, after.upper] == pytest.approx([before.lower / factor, before.upper * factor])


def test_too_many_disturbed_rounds_make_what_is_timed_noisy() -> None:
    times = trial(0.008)
    found = summarize(JOB, replace(times, rounds=replace(times.rounds, is_noisy=True)))
    assert found["mbu"].estimate.is_noisy
    assert not found["bytes_per_token"].estimate.is_noisy
    assert not summarize(JOB, times)["mbu"].estimate.is_noisy


@pytest.mark.parametrize(
    ("mbu", "mfu", "bound"),
    [
        (0.9, 0.1, "memory"),
        (0.5, 0.1, "memory"),
        (0.6, 0.7, "compute"),
        (0.1, 0.5, "compute"),
        (0.49, 0.1, "overhead"),
        (0.1, 0.49, "overhead"),
        (1.3, 1.1, "memory"),
    ],
)
def test_a_verdict_names_what_makes_up_at_least_half_of_the_time(mbu: float, mfu: float, bound: Bound) -> None:
    assert verdict(mbu, mfu) == bound


@pytest.mark.parametrize(("decode_s", "bound"), [(0.0025, "memory"), (0.01, "overhead")])
def test_the_detail_places_both_points_under_the_roof(decode_s: float, bound: Bound) -> None:
    found = json.loads(json.dumps(describe(JOB, trial(decode_s)), allow_nan=False))
    decode, prefill = found["points"]["decode"], found["points"]["prefill"]
    assert (decode["bound"], prefill["bound"]) == (bound, "compute")
    assert decode["intensity"] < found["peaks"]["flops_per_s"]["value"] / found["peaks"]["bytes_per_s"]["value"]
    assert decode["flops_per_s"]["value"] == pytest.approx(240e6 / decode_s)
    assert decode["bytes"] == {"linears": 60_000_000, "keys_values": 20_000_000}
    assert prefill["mfu"]["value"] == pytest.approx(0.5)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A tiny llama in eager."""
    folder = tmp_path_factory.mktemp("roofline")
    source, out = tiny_folder(folder / "source", "llama"), folder / "eager"
    out.mkdir()
    result = Eager().run(Artifact(source, "checkpoint", "0" * 64), out, Context(folder, threads=1))
    write_manifest(out, Manifest("program", "1" * 64, result["spec"].to_json(), asdict(result["traits"])))
    return Artifact(out, "program", "1" * 64)


@pytest.fixture(scope="module")
def measured(program: Artifact) -> dict[str, Measurement]:
    return Roofline(**QUICK).measure(program, {"parent": program}, ONE_THREAD)


def test_a_program_is_measured_with_the_peaks_of_its_machine(measured: dict[str, Measurement]) -> None:
    assert set(measured) == set(Roofline().names())
    assert {name: x.unit for name, x in measured.items()} == dict(Roofline().names())
    value = {name: x.estimate.value for name, x in measured.items()}
    assert min(value.values()) > 0
    assert 1 < value["read_gb_per_s"] < 2000
    assert value["mbu"] < 0.5  # a model of 200 kB starts more kernels than it reads bytes
    assert measured["mbu"].detail["points"]["decode"]["bound"] == "overhead"
    assert value["gap"] == pytest.approx(value["decode_ms"] / value["floor_ms"], rel=0.5)


def test_the_protocol_carries_all_that_must_agree(measured: dict[str, Measurement]) -> None:
    protocol = measured["mbu"].protocol
    assert {*QUICK, "threads", "isa", "cpu", "cores", "runtime", "dtype", "kernels"} == set(protocol)
    assert {x: protocol[x] for x in QUICK} == QUICK
    assert len({x.fingerprint for x in measured.values()}) == 1


def test_a_context_that_the_program_has_no_room_for_is_refused(program: Artifact) -> None:
    with pytest.raises(UserError, match=r"context 16 and prompt_tokens 500 do not fit .* 128 tokens"):
        Roofline(**{**QUICK, "prompt_tokens": 500}).measure(program, {}, ONE_THREAD)


def test_a_gpu_has_no_roofline_of_the_processors(program: Artifact, tmp_path: Path) -> None:
    manifest = read_manifest(program.path)
    write_manifest(tmp_path, replace(manifest, traits={**(manifest.traits or {}), "device": "cuda"}))
    assert Roofline(**QUICK).measure(replace(program, path=tmp_path), {}, ONE_THREAD) == {}  # type: ignore[arg-type]


def test_a_program_without_a_table_has_no_roofline(tmp_path: Path) -> None:
    zeros = np.zeros((11, 11), np.float32)
    fake = save_table(tmp_path / "table", zeros, zeros)
    assert Roofline(**QUICK).measure(fake, {}, ONE_THREAD) == {}
    write_manifest(fake.path, replace(read_manifest(fake.path), spec={"opaque_bytes": 7}))
    assert Roofline(**QUICK).measure(fake, {}, ONE_THREAD) == {}


def test_a_gate_can_bind_it(measured: dict[str, Measurement]) -> None:
    low, high = (Gate(metric="roofline.mbu", at_least=x) for x in (1e-9, 0.9))
    check_gates([low, high], {"roofline": Roofline()}, ["main / eager"])
    known = replace(measured["mbu"], estimate=replace(measured["mbu"].estimate, is_noisy=False))
    outcomes = [decide(x, "main / eager", known, Roofline.kind).outcome for x in (low, high)]
    assert outcomes == ["PASS", "FAIL"]
