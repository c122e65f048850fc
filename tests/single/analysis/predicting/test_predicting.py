"""The prediction of more ranks: formulas, the fit, what is refused, and whole predictions from made-up runs."""

import json
import math

import pytest

from hvdtrain.analysis.predicting import command, prediction
from hvdtrain.analysis.predicting.fitting import Point, fit
from hvdtrain.analysis.predicting.formulas import ALGORITHMS, Link, Ranks, exposed, halving, ring, tree
from hvdtrain.engines.errors import UserError
from hvdtrain.scaling import parse

INSIDE, BETWEEN = Link(1e-5, 1e9), Link(1e-4, 1e8)
WIRE = "--bandwidth-gbit 1 --latency-us 50"
MEGABYTES = 40e6  # of gradients: 16 buckets


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_rank_reduces_in_no_time(name):
    assert ALGORITHMS[name](1e6, Ranks(1, 1), INSIDE, BETWEEN) == 0


def test_two_ranks():
    for formula in (ring, halving):  # two messages of half the size, each way
        assert formula(1e6, Ranks(1, 2), INSIDE, BETWEEN) == pytest.approx(2 * 1e-5 + 1e6 / 1e9)
        assert formula(1e6, Ranks(2, 1), INSIDE, BETWEEN) == pytest.approx(2 * 1e-4 + 1e6 / 1e8)
    assert tree(1e6, Ranks(2, 1), INSIDE, BETWEEN) == pytest.approx(2 * (1e-4 + 1e6 / 1e8))


def test_many_ranks():
    assert ring(1e6, Ranks(4, 4), INSIDE, BETWEEN) == pytest.approx(30 * (1e-4 + 1e6 / 16 / 1e8))
    within, across = 4 * 1e-5 + 1.5 * 1e6 / 1e9, 4 * 1e-4 + 1.5 * 1e6 / 1e8
    assert halving(1e6, Ranks(4, 4), INSIDE, BETWEEN) == pytest.approx(within + across)
    assert halving(0, Ranks(5, 1), INSIDE, BETWEEN) == halving(0, Ranks(8, 1), INSIDE, BETWEEN)
    assert tree(0, Ranks(4, 4), INSIDE, BETWEEN) == pytest.approx(4 * 1e-5 + 4 * 1e-4)
    # For few bytes and many ranks the ring is the slow one, for many bytes the tree.
    assert halving(4, Ranks(1024, 1), INSIDE, BETWEEN) < ring(4, Ranks(1024, 1), INSIDE, BETWEEN) / 50
    assert tree(1e9, Ranks(1024, 1), INSIDE, BETWEEN) > 9 * ring(1e9, Ranks(1024, 1), INSIDE, BETWEEN)


def test_overlap_hides_all_but_the_last_bucket():
    assert exposed(3.0, backward=2.0, buckets=10) == 1.0
    assert exposed(3.0, backward=9.0, buckets=10) == pytest.approx(0.3)
    assert exposed(3.0, backward=9.0, buckets=1) == 3.0


def made(ranks: int, size: float, overhead=2e-4, latency=3e-5, bandwidth=2e9) -> Point:
    steps = 2 * (ranks - 1)
    seconds = overhead + steps * latency + steps / ranks * size / bandwidth
    return Point(ranks, size, seconds, seconds)


def test_the_fit_finds_what_the_data_were_made_of():
    found = fit([made(ranks, 4.0**power) for ranks in (2, 4, 8) for power in range(1, 14)], "made")
    assert (found.overhead, found.latency, found.bandwidth) == pytest.approx((2e-4, 3e-5, 2e9), rel=1e-6)
    assert found.residual < 1e-9
    assert (found.points, found.ranks) == (39, (2, 4, 8))


def test_one_number_of_ranks_cannot_tell_overhead_from_latency():
    found = fit([made(4, 4.0**power) for power in range(1, 14)], "made")
    assert found.latency is None
    assert (found.overhead, found.bandwidth) == pytest.approx((2e-4 + 6 * 3e-5, 2e9), rel=1e-6)


def test_the_residual_is_the_noise():
    noisy = [made(2, 2.0**power) for power in range(2, 26)]
    noisy = [p._replace(seconds=p.seconds * (1.2 if n % 2 else 0.8)) for n, p in enumerate(noisy)]
    found = fit([p._replace(scale=p.seconds) for p in noisy], "made")
    assert found.residual == pytest.approx(0.2, abs=0.03)
    assert found.bandwidth == pytest.approx(2e9, rel=0.3)


def test_nothing_is_ever_negative():
    falling = [Point(2, size, 1e-3 / size, 1e-3) for size in (1.0, 10.0, 100.0)]  # larger is faster: only noise
    found = fit(falling, "made")
    assert found.overhead > 0
    assert math.isinf(found.bandwidth)


@pytest.mark.parametrize(
    "points", [[], [made(2, 4.0), made(2, 64.0)], [made(2, 4.0)] * 9, [made(2, 4.0), made(4, 4.0), made(2, 4.0)]]
)
def test_too_few_points_are_refused(points):
    with pytest.raises(UserError, match=r"horovod: too few points to fit .*hvdtrain\.reduce --sweep"):
        fit(points, "horovod")


def benchmark(ranks: int, seconds: float, *, hosts: int = 1, communicates: bool = True, **more) -> dict:
    rank = {"device": "cpu", "threads": 1}
    return dict(
        description="horovod over Gloo", model="resnet18", batch_size_per_rank=8, amp="off", communicates=communicates,
        world_size=ranks, hosts=hosts, samples_per_second={"mean": 8 * ranks / seconds}, gradient_bytes=int(MEGABYTES),
        seconds_per_sample={"loading": 0, "compute": seconds / 8, "communication": 0}, ranks=[rank] * ranks,
        config={"compression": "none", "tuning": "auto", "image_size": 64},
    ) | more  # fmt: skip


def sweep(ranks: int = 2, hosts: int = 1, points=range(2, 27)) -> dict:
    rows = []
    for power in points:
        took = made(ranks, 2**power).seconds
        rows.append(dict(bytes=2**power, dtype="float32", seconds=took, seconds_least=took, seconds_most=took))
    config = {"tuning": "auto"}
    return dict(description="horovod over Gloo", world_size=ranks, hosts=hosts, config=config, rows=rows)


def rounds(*steps: float) -> dict:
    """One rank alone and two apart take the same; two that communicate what the ring takes more."""
    more = made(2, MEGABYTES).seconds
    return dict(
        runs=[
            run | {"round": number}
            for number, step in enumerate(steps, 1)
            for run in (
                benchmark(1, step, communicates=False),
                benchmark(2, step, communicates=False),
                benchmark(2, step + more),
            )
        ]
    )


@pytest.fixture
def leave(tmp_path):
    def write(name: str, **files):
        (tmp_path / name).mkdir()
        for file, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name / f"{file}.json").write_text(text)
        return tmp_path / name

    return write


def predict(tmp_path, line: str) -> dict:
    command.predict(parse(f"--output-dir {tmp_path / 'out'} {WIRE} --model-of {line}".split()))
    return json.loads((tmp_path / "out" / "prediction.json").read_text())


def test_a_whole_prediction(leave, tmp_path, capsys):
    one = leave("one", scaling=rounds(0.5, 0.4, 0.6))
    sweeps = [leave(f"sweep{ranks}", reduce=sweep(ranks)) for ranks in (2, 4, 8)]
    between = leave("two", benchmark=benchmark(2, 0.9, hosts=2), reduce=sweep(2, hosts=2))
    whole = predict(tmp_path, f"{one} {' '.join(map(str, sweeps))} --measured {between} --ranks-per-host 2 --payload 1")
    (engine,) = whole["engines"]
    assert engine["engine"] == "horovod over Gloo"
    assert (engine["buckets"], engine["gradient_bytes_on_wire"]) == (16, MEGABYTES)
    assert engine["fit"]["latency"] == pytest.approx(3e-5)
    assert [row["ranks"] for row in engine["predictions"]][::3] == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    row = next(row for row in engine["predictions"] if (row["ranks"], row["algorithm"]) == (64, "ring"))
    travels = [16 * (2e-4 + 126 * 8e-5) + 126 / 64 * MEGABYTES / bandwidth for bandwidth in (125e6, 1 / (8e-9 + 5e-10))]
    assert row["all_reduce_seconds"]["least"] == pytest.approx(travels[0])
    assert row["all_reduce_seconds"]["most"] == pytest.approx(travels[1])
    middle = math.sqrt(travels[0] * travels[1])
    assert row["step_seconds"]["middle"] == pytest.approx(0.5 + middle)
    assert row["step_seconds"]["least"] == pytest.approx(0.4 + travels[0])
    assert row["step_seconds"]["most"] == pytest.approx(0.6 + travels[1])
    assert row["step_seconds_overlapped"]["middle"] == pytest.approx(0.5 + max(middle / 16, middle - 0.5 * 2 / 3))
    here, there, *sizes = engine["checks"]
    assert (here["ranks"], here["hosts"], there["hosts"], len(sizes)) == (2, 1, 2, 25)
    assert there["measured_seconds"]["middle"] == pytest.approx(0.9)
    printed = capsys.readouterr().out
    assert "| 4,096 | 2,048 | ring |" in printed
    assert "| step | 2 | 2 | 900 (900 to 900) |" in printed
    assert (tmp_path / "out" / "prediction-horovod-over-gloo.png").read_bytes().startswith(b"\x89PNG")


def test_steps_alone_can_be_fitted_where_there_are_three_numbers_of_ranks(leave, tmp_path):
    runs = [benchmark(1, 0.5, communicates=False, round=1)]
    for ranks in (2, 4, 8):
        runs.append(benchmark(ranks, 0.5, communicates=False, round=1))
        runs.append(benchmark(ranks, 0.5 + made(ranks, MEGABYTES, overhead=0).seconds, round=1))
    whole = predict(tmp_path, leave("one", scaling=dict(runs=runs)))
    assert whole["engines"][0]["fit"]["bandwidth"] == pytest.approx(2e9, rel=1e-3)
    assert whole["engines"][0]["predictions"][0]["hosts"] == 2  # 16 ranks: 8, the most that was measured, on each


def test_an_engine_that_cannot_be_fitted_is_said_and_the_others_go_on(leave, tmp_path, capsys):
    runs = rounds(0.5)["runs"] + [benchmark(2, 0.7, description="ddp over Gloo", round=1)]
    whole = predict(tmp_path, str(leave("one", scaling=dict(runs=runs), reduce=sweep())))
    assert [engine["engine"] for engine in whole["engines"]] == ["horovod over Gloo"]
    assert "left out: ddp over Gloo: too few points" in capsys.readouterr().out


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("counts", [(2,), (2, 4, 8)])
def test_a_range_is_in_order_and_time_grows_with_the_ranks(name, counts, leave):
    measured = command.read([leave("a", scaling=rounds(0.5, 0.6), reduce=sweep(counts[0]))])
    measured.sums.extend(
        one for count in counts[1:] for one in command.read([leave(f"{count}", reduce=sweep(count))]).sums
    )
    (model,), _ = prediction.models(measured, command.read([]), BETWEEN, "none")
    before = 0.0
    for hosts in (1, 2, 16, 2048):
        found = prediction.predict(model, Ranks(hosts, 1), name)
        for span in (found.communication, found.plain, found.overlapped):
            assert span.least <= span.middle <= span.most
        assert found.overlapped.middle <= found.plain.middle
        assert found.communication.middle >= before
        before = found.communication.middle


@pytest.mark.parametrize(
    ("files", "flags", "complaint"),
    [
        ({}, "", "has no scaling.json, benchmark.json or reduce.json"),
        ({"scaling": "{"}, "", "scaling.json cannot be read"),
        ({"scaling": "[]"}, "", "is not what hvdtrain writes"),
        ({"scaling": {"runs": [{"world_size": 2}]}}, "", "is damaged or of an older hvdtrain"),
        ({"scaling": rounds(0.5)}, "", "too few points to fit"),
        ({"reduce": sweep()}, "", "no run without communication"),
        ({"scaling": rounds(0.5), "reduce": sweep(points=range(2, 4))}, "", "too few points to fit"),
        ({"scaling": rounds(0.5), "reduce": sweep()}, "--compression fp16", "no run of several ranks of one host"),
        ({"scaling": rounds(0.5), "reduce": sweep()}, "--ranks-per-host 4", "was not measured: use 1, 2, or measure"),
        ({"scaling": rounds(0.5), "reduce": sweep()}, "--ranks 17", "--ranks 17 does not fill hosts of 2"),
        ({"scaling": rounds(0.5), "reduce": sweep(hosts=2)}, "", "--model-of takes runs on one host, not on 2"),
        ({"scaling": rounds(0.5), "benchmark": benchmark(2, 0.5, model="alexnet")}, "", "cannot be compared: alexnet"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_line(files, flags, complaint, leave, tmp_path):
    with pytest.raises(UserError) as caught:
        predict(tmp_path, f"{leave('one', **files)} {flags}")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--model-of a", "needs the network: give, for example, --bandwidth-gbit 25"),
        ("--model-of a --bandwidth-gbit 25", "needs the network"),
        (f"--model-of a {WIRE} --payload 2", "give a share above 0"),
        ("--bandwidth-gbit 25", "--bandwidth-gbit needs --model-of DIR"),
        ("--compression fp16", "--compression needs --model-of DIR (flags of hvdtrain.benchmark follow --)"),
    ],
)
def test_bad_flags(flags, complaint):
    with pytest.raises(UserError) as caught:
        parse(flags.split())
    assert complaint in str(caught.value)
