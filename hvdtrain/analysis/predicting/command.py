"""The flags and the command `hvdtrain.scaling --model-of DIR...`."""

import re
from argparse import Namespace
from pathlib import Path

from hvdtrain.analysis import measuring, plotting
from hvdtrain.analysis.predicting import prediction, showing
from hvdtrain.analysis.predicting.formulas import ALGORITHMS, Link, Ranks
from hvdtrain.analysis.predicting.runs import WIRE_DTYPES, read, require_alike
from hvdtrain.engines import flags as cli
from hvdtrain.engines.errors import UserError

RANKS = [2**power for power in range(4, 13)]  # 16 to 4,096
# A full Ethernet frame takes 1,538 bytes on the wire (IEEE 802.3: preamble, header, checksum, gap). With TCP time stamps
# over IPv4, 1,448 of them are payload.
PAYLOAD = 1448 / 1538
ONLY = ("bandwidth_gbit", "latency_us", "ranks_per_host", "compression", "payload", "measured")  # need --model-of


def add_flags(parser: cli.Parser) -> None:
    """Add the flags of the prediction."""
    group = parser.add_argument_group("predict instead of measuring")
    group.add_argument(
        "--model-of", type=Path, nargs="+", metavar="DIR",
        help="--output-dir of runs on one host: hvdtrain.scaling, and preferably also hvdtrain.reduce --sweep",
    )  # fmt: skip
    group.add_argument(
        "--bandwidth-gbit", type=cli.positive, help="bandwidth of each host's network, Gbit/s in each direction"
    )
    group.add_argument(
        "--latency-us", type=cli.non_negative, help="latency of the network, one way: half of what ping reports"
    )
    group.add_argument("--ranks-per-host", type=cli.positive_int, help="default: the most measured on one host")
    group.add_argument("--compression", choices=tuple(WIRE_DTYPES), help="compression of gradients (default: none)")
    group.add_argument(
        "--payload", type=cli.positive,
        help=f"share of the bandwidth without headers (default: {PAYLOAD:.3f}, TCP with an MTU of 1,500 bytes)",
    )  # fmt: skip
    group.add_argument(
        "--measured", type=Path, nargs="+", metavar="DIR", help="runs over that network, to compare with the prediction"
    )


def check(flags: Namespace) -> None:
    """Fill in defaults. Raises UserError if the network is not given, or if such flags are given without --model-of."""
    told = [name for name in ONLY if getattr(flags, name) is not None]
    if not flags.model_of:
        if told:
            name = told[0].replace("_", "-")
            raise UserError(f"--{name} needs --model-of DIR (flags of hvdtrain.benchmark follow --)")
        return
    if not {"bandwidth_gbit", "latency_us"} <= set(told):
        raise UserError("--model-of needs the network: give, for example, --bandwidth-gbit 25 --latency-us 20")
    flags.compression, flags.payload = flags.compression or "none", flags.payload or PAYLOAD
    flags.measured = flags.measured or []
    if flags.payload > 1:
        raise UserError(f"--payload {flags.payload:g}: give a share above 0, at most 1")


def predict(flags: Namespace) -> int:
    """Fit, predict and compare; print tables; write prediction.json and one picture per engine. Raises UserError."""
    plotting.require_matplotlib()
    measured, checked = read(flags.model_of), read(flags.measured)
    require_alike([*measured.steps, *checked.steps])
    places = [step.ranks for step in measured.steps] + [one.ranks for one in measured.sums]
    most = max((ranks.hosts for ranks in places), default=1)
    if most > 1:
        raise UserError(f"--model-of takes runs on one host, not on {most}: pass those with --measured")
    wire = Link(flags.latency_us * 1e-6, flags.bandwidth_gbit * 1e9 / 8 * flags.payload)
    found, refused = prediction.models(measured, checked, wire, flags.compression)
    for why in refused:
        print(f"left out: {why}", flush=True)
    per_host = flags.ranks_per_host or max(ranks.per_host for ranks in found[0].computing if ranks.hosts == 1)
    counts = flags.ranks or RANKS
    for count in counts:
        if count % per_host:
            raise UserError(f"--ranks {count} does not fill hosts of {per_host}: use multiples, or --ranks-per-host")
    measuring.make_directory(flags.output_dir)
    kept = []
    for model in found:
        rows = [
            prediction.predict(model, Ranks(count // per_host, per_host), name)
            for count in counts
            for name in ALGORITHMS
        ]
        checks = prediction.compare(model, measured) + prediction.compare(model, checked)
        title = f"{model.engine}, gradients {'in fp16' if model.compression == 'fp16' else 'uncompressed'}"
        print(f"\n{title}\n{showing.about(model)}\n\n{showing.table(model, rows)}", flush=True)
        if checks:
            print(f"\n{showing.check_table(checks)}", flush=True)
        picture = flags.output_dir / f"prediction-{re.sub('[^a-z0-9]+', '-', model.engine.lower())}.png"
        showing.draw(model, rows, checks, picture)
        kept.append(
            dict(
                engine=model.engine, compression=model.compression, fit=model.fit._asdict(), wire=wire._asdict(),
                gradient_bytes_on_wire=model.size, buckets=model.buckets,
                predictions=[
                    dict(
                        ranks=row.ranks.total, hosts=row.ranks.hosts, algorithm=row.algorithm,
                        all_reduce_seconds=row.communication._asdict(), step_seconds=row.plain._asdict(),
                        step_seconds_overlapped=row.overlapped._asdict(), computing_seconds=row.computing,
                    )
                    for row in rows
                ],
                checks=[
                    dict(
                        what=one.what, ranks=one.ranks.total, hosts=one.ranks.hosts, bytes=one.bytes,
                        measured_seconds=one.measured._asdict(), predicted_seconds=one.predicted._asdict(),
                    )
                    for one in checks
                ],
            )
        )  # fmt: skip
    measuring.write_json(flags.output_dir / "prediction.json", dict(config=vars(flags), engines=kept))
    print(f"\n{flags.output_dir}: prediction.json, prediction-*.png, .svg, .pdf", flush=True)
    return 0
