"""Paired speed: known delays come out as their ratio, guards repeat bad pairs, percentiles need their sample."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.table_runtime import save_table
from pydantic import ValidationError
from references import VOCAB_SIZE, tiny_tokenizer

from strop.artifact import Artifact
from strop.errors import UserError
from strop.evals._pairs import WARM_UP_MOST, WARM_UP_WINDOW, Arm, Duel, Load, Pair, is_steady, warm_up
from strop.evals.latency import QUANTITIES, Latency, Trial, difference_of_copies, is_narrow, summarize
from strop.metric import Estimate, MeasureContext, Measurement
from strop.worker import Timing

LOAD = Load([[1, 2, 3, 4]] * 5, 3, 1)
QUICK = {"prompts": 5, "prompt_tokens": 8, "new_tokens": 5, "min_pairs": 10, "max_pairs": 10}


def timing(tpot_s: float, *, ttft_s: float = 0.1, share: float = 1.0, switches: int = 0) -> Timing:
    """A generation of 3 tokens on one thread."""
    return Timing(ttft_s, (tpot_s, tpot_s), share * (ttft_s + 2 * tpot_s), switches, (1, 2, 3))


class ScriptedWorker:
    """Generations that were written down before, and which prompts were asked for."""

    def __init__(self, timings: Sequence[Timing], log: list[Any] | None = None) -> None:
        self.timings: Iterator[Timing] = iter(timings)
        self.log = [] if log is None else log

    def decode(self, prompt: Sequence[int], num_tokens: int) -> Timing:
        self.log.append(self)
        return next(self.timings)


def arm(*timings: Timing, log: list[Any] | None = None) -> Arm:
    worker: Any = ScriptedWorker(timings, log)
    return Arm(worker, timing(0.1), (0.1,), 1.0)


def trial(pairs: Sequence[Pair], same: Sequence[Pair] | None = None, **fields: Any) -> Trial:
    """A candidate against one reference, `parent`."""
    still = [Pair(i % 5, timing(0.01), timing(0.01)) for i in range(10)]
    duels = [Duel(arm(), arm(), LOAD, list(x)) for x in (still if same is None else same, pairs)]
    return Trial(
        **{"same": duels[0], "against": {"parent": duels[1]}, "itself": [], "confidence": 0.98, "seed": 0, **fields}
    )


def noisy(generator: np.random.Generator, ratio: float, pairs: int, sigma: float = 0.01) -> list[Pair]:
    factors = np.exp(generator.normal(0, sigma, (pairs, 2)))
    return [Pair(i % 5, timing(0.01 * ratio * a), timing(0.01 * b)) for i, (a, b) in enumerate(factors)]


def test_a_slower_candidate_has_a_longer_time_and_a_lower_rate() -> None:
    made = trial(noisy(np.random.default_rng(0), 2, 40))
    time_ratio = summarize(QUANTITIES["tpot_ms"], made).ratios["parent"]
    rate_ratio = summarize(QUANTITIES["decode_tokens_per_s"], made).ratios["parent"]
    assert time_ratio.value == pytest.approx(2, rel=0.02)
    assert rate_ratio.value == pytest.approx(1 / time_ratio.value)
    assert time_ratio.lower < 2 < time_ratio.upper
    assert time_ratio.confidence == 0.98


def test_values_are_those_of_the_candidate_and_its_copy() -> None:
    pairs = [Pair(i % 5, timing(0.02, ttft_s=0.4), timing(0.001)) for i in range(20)]
    same = [Pair(i % 5, timing(0.02, ttft_s=0.4), timing(0.02, ttft_s=0.4)) for i in range(10)]
    made = trial(pairs, same)
    values = {name: summarize(quantity, made).estimate.value for name, quantity in QUANTITIES.items()}
    assert [values["tpot_ms"], values["tpot_p99_ms"]] == pytest.approx([20, 20])
    assert values["decode_tokens_per_s"] == pytest.approx(50)
    assert values["ttft_ms"] == pytest.approx(400)
    assert values["prefill_tokens_per_s"] == pytest.approx(10)
    assert summarize(QUANTITIES["tpot_ms"], made).samples == 40


@pytest.mark.parametrize("difference", [1.2, 1 / 1.2])
def test_a_difference_between_two_copies_widens_every_interval_by_it(difference: float) -> None:
    pairs = noisy(np.random.default_rng(1), 2, 20)
    same = noisy(np.random.default_rng(2), difference, 10)
    for quantity in (QUANTITIES["tpot_ms"], QUANTITIES["decode_tokens_per_s"]):
        narrow, wide = (summarize(quantity, trial(pairs, x)) for x in (None, same))
        before, after = narrow.ratios["parent"], wide.ratios["parent"]
        assert after.value == before.value
        assert after.lower < before.lower / 1.19
        assert after.upper > before.upper * 1.19
        assert wide.estimate.upper / wide.estimate.lower > 1.19**2
        assert not after.is_noisy


def test_memory_that_lies_badly_does_not_pass_a_slower_candidate() -> None:
    # Each process has a speed of its own, 4 % apart. The candidate is 6 % slower; at most 5 % is allowed.
    generator = np.random.default_rng(4)
    passed = {"with": 0, "without": 0}
    for _ in range(100):
        ours, theirs, twin = np.exp(generator.normal(0, 0.04, 3))
        pairs, same = noisy(generator, 1.06 * ours / theirs, 20), noisy(generator, ours / twin, 10)
        found = summarize(QUANTITIES["tpot_ms"], trial(pairs, same)).ratios["parent"]
        plain = summarize(QUANTITIES["tpot_ms"], trial(pairs)).ratios["parent"]
        passed["with"] += found.upper <= 1.05
        passed["without"] += plain.upper <= 1.05
    assert passed["without"] >= 20
    assert passed["with"] < 0.6 * passed["without"]


def test_two_equal_copies_are_seldom_called_different() -> None:
    generator = np.random.default_rng(3)
    still = noisy(generator, 2, 20)
    alarms = [
        difference_of_copies(QUANTITIES["tpot_ms"], trial(still, noisy(generator, 1, 10, 0.05))) for _ in range(200)
    ]
    assert sum(x > 1 for x in alarms) <= 2  # a true rate of 0.1 % gives 3 or more once in 900 tries


def test_the_program_itself_as_a_reference_has_a_ratio_of_exactly_one() -> None:
    made = trial([], against={}, itself=["parent"])
    assert summarize(QUANTITIES["tpot_ms"], made).ratios["parent"] == Estimate.exact(1.0)


def test_arms_alternate_and_prompts_take_turns() -> None:
    log: list[Any] = []
    ours, theirs = arm(*[timing(0.1)] * 4, log=log), arm(*[timing(0.2)] * 4, log=log)
    duel = Duel(ours, theirs, LOAD)
    duel.collect(4)
    assert ["ours" if x is ours.worker else "theirs" for x in log] == [
        "ours", "theirs", "theirs", "ours", "ours", "theirs", "theirs", "ours"
    ]  # fmt: skip
    assert [x.prompt for x in duel.pairs] == [0, 1, 2, 3]
    assert all(x.ours.tpot_s == 0.1 and x.theirs.tpot_s == 0.2 for x in duel.pairs)


@pytest.mark.parametrize(
    ("bad", "why"), [({"share": 0.5}, "50% of the time instead of 100%"), ({"switches": 90}, "involuntary")]
)
def test_a_disturbed_pair_is_repeated(bad: dict[str, Any], why: str) -> None:
    duel = Duel(arm(timing(0.1), timing(0.1, **bad), timing(0.1)), arm(*[timing(0.2)] * 3), LOAD)
    duel.collect(2)
    assert len(duel.pairs) == 2
    assert len(duel.objections) == len(duel.disturbed) == 1
    assert why in duel.objections[0]
    assert not duel.is_noisy


def test_too_many_disturbed_pairs_are_a_noisy_machine() -> None:
    duel = Duel(arm(*[timing(0.1, share=0.1)] * 20), arm(*[timing(0.1)] * 20), LOAD)
    duel.collect(4)
    assert duel.is_noisy
    assert len(duel.objections) == 3
    assert [x.prompt for x in duel.pairs] == [0, 1, 2]  # what there is, for the report


def test_warm_up_ends_when_times_are_steady() -> None:
    falling = [timing(0.1 + 1 / (1 + i) ** 3) for i in range(WARM_UP_MOST)]
    warm = warm_up(arm(*falling).worker, LOAD)
    assert WARM_UP_WINDOW < len(warm.warm_up_s) < WARM_UP_MOST
    assert warm.cold == falling[0]
    assert warm.cpu_share == pytest.approx(1)


def test_warm_up_gives_up_on_a_machine_that_is_never_steady() -> None:
    warm = warm_up(arm(*[timing(0.1 * (1 + i % 2)) for i in range(WARM_UP_MOST)]).worker, LOAD)
    assert len(warm.warm_up_s) == WARM_UP_MOST


def test_a_trend_is_not_steady_even_if_it_is_slow() -> None:
    assert is_steady([1, 1.01, 0.99, 1, 1.01])
    assert not is_steady([1.04, 1.03, 1.02, 1.01, 1.0])
    assert not is_steady([1, 1, 1, 1])


def test_narrow_depends_on_how_far_from_one_the_ratio_is() -> None:
    assert is_narrow(Estimate(1, 0.98, 1.02), 0.05)
    assert not is_narrow(Estimate(1, 0.97, 1.03), 0.05)
    assert is_narrow(Estimate(6, 5.8, 6.2), 0.05)
    assert not is_narrow(Estimate(6, 5.5, 6.5), 0.05)


def test_a_percentile_counts_generations_and_says_what_it_needs() -> None:
    assert "tpot_p90_ms" not in Latency().names()
    assert Latency().refusal("tpot_p90_ms") == (
        "tpot_p90_ms needs 100 generations, min_pairs 20 gives no more: set min_pairs to 100"
    )
    assert set(Latency(min_pairs=200).names()) - set(Latency().names()) == {
        "ttft_p90_ms", "ttft_p95_ms", "tpot_p90_ms", "tpot_p95_ms"
    }  # fmt: skip


def test_fewer_most_than_fewest_pairs_are_refused() -> None:
    with pytest.raises(ValidationError, match="max_pairs 12 is below min_pairs 20"):
        Latency(max_pairs=12)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Measurement], dict[str, Artifact]]:
    """A program with steps of 2 ms against one with steps of 6 ms."""
    folder = tmp_path_factory.mktemp("latency")
    table = np.random.default_rng(0).normal(size=(VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
    programs = {}
    for name, step_s in (("candidate", 0.002), ("parent", 0.006)):
        programs[name] = save_table(folder / name, table, table, behaviour={"step_s": step_s}, key=name)
        tiny_tokenizer().save_pretrained(folder / name)
    references = dict.fromkeys(("parent", "parent_same_runtime"), programs["parent"])
    references["plain"] = programs["candidate"]
    found = Latency(**QUICK).measure(programs["candidate"], references, MeasureContext(threads=1))  # type: ignore[arg-type]
    return found, programs


def test_known_delays_come_out_as_their_ratio(measured: tuple[dict[str, Measurement], dict[str, Artifact]]) -> None:
    found, _ = measured
    assert set(found) == set(Latency().names())
    assert found["decode_tokens_per_s"].ratios["parent"].value == pytest.approx(3, rel=0.4)  # however busy the machine
    assert found["ttft_ms"].ratios["parent"].value < 0.9
    assert found["tpot_ms"].estimate.value >= 2
    assert found["tpot_ms"].ratios["plain"].value == 1


def test_two_names_of_one_reference_are_timed_once(
    measured: tuple[dict[str, Measurement], dict[str, Artifact]],
) -> None:
    ratios = measured[0]["tpot_ms"].ratios
    assert ratios["parent"] == ratios["parent_same_runtime"]
    duels = measured[0]["decode_tokens_per_s"].detail["duels"]
    assert measured[0]["tpot_ms"].samples == duels["parent"]["pairs"] + 2 * duels["twin"]["pairs"]


def test_detail_tells_pairs_starts_and_the_copy(measured: tuple[dict[str, Measurement], dict[str, Artifact]]) -> None:
    detail = json.loads(json.dumps(measured[0]["decode_tokens_per_s"].to_json(), allow_nan=False))["detail"]
    assert detail["duels"]["parent"]["pairs"] >= 6
    assert len(detail["duels"]["twin"]["tpot_ratio"]) == detail["duels"]["twin"]["pairs"]
    assert detail["arms"]["candidate"]["load_s"] < detail["arms"]["candidate"]["start_s"]
    assert detail["same_program"]["lower"] < detail["same_program"]["upper"]


def test_equal_conditions_have_one_fingerprint(measured: tuple[dict[str, Measurement], dict[str, Artifact]]) -> None:
    found, programs = measured
    assert found["ttft_ms"].fingerprint == found["tpot_ms"].fingerprint
    other = Latency(**{**QUICK, "new_tokens": 2}).measure(programs["candidate"], {}, MeasureContext(threads=1))  # type: ignore[arg-type]
    assert other["tpot_ms"].fingerprint != found["tpot_ms"].fingerprint
    assert other["tpot_ms"].samples == 2 * other["decode_tokens_per_s"].detail["duels"]["twin"]["pairs"]
    assert other["tpot_ms"].ratios == {}


def test_a_text_too_short_for_the_prompts_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The assert statement raises if the expression is not true. " * 4)
    table = np.zeros((VOCAB_SIZE, VOCAB_SIZE), np.float32)
    program = save_table(tmp_path / "program", table, table)
    tiny_tokenizer().save_pretrained(program.path)
    with pytest.raises(UserError, match=r"prompts: .* gives \d+ of 8 tokens, 500 are asked for"):
        Latency(text=str(text), prompts=500, prompt_tokens=8).measure(program, {}, MeasureContext(threads=1))


def test_quantile_ratios_pair_the_same_quantile() -> None:
    generator = np.random.default_rng(4)
    pairs = noisy(generator, 1, 100, 0.3)
    slower = [Pair(x.prompt, replace(x.ours, token_s=tuple(3 * t for t in x.theirs.token_s)), x.theirs) for x in pairs]
    found = summarize(QUANTITIES["tpot_p90_ms"], trial(slower)).ratios["parent"]
    assert math.isclose(found.value, 3)
    assert math.isclose(found.lower, 3, rel_tol=1e-6)
