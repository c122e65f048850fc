"""Time to a validation loss between two namespaced hosts: every step's gradients in fp16 against --sync-every.

python -m tests.bench.slow_network --rate 100mbit --text FILE every:steps=1800 h20:steps=2000,sync-every=20

A side is NAME:FLAG=VALUE,...; flags of hvdtrain.lm, beside --compression fp16. Needs root, as all hosts for tests.
One JSON line for each side and seed: validation loss, seconds in steps, steps.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.e2e.cluster import Cluster

LM = "-m hvdtrain.lm --recipe shakespeare-cpu --threads 1 --no-progress --sample-tokens 0 --compression fp16 --log-steps 100"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="", help="of tc; empty: no limit")
    parser.add_argument("--text", type=lambda given: Path(given).resolve(), required=True, metavar="FILE")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--engine", default="horovod")
    parser.add_argument("sides", nargs="+", metavar="NAME:FLAG=VALUE,...")
    flags = parser.parse_args()
    for seed in flags.seeds.split(","):
        for side in flags.sides:
            name, _, given = side.partition(":")
            own = [f"--{one}" for one in given.split(",") if one]
            with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), ["a", "b"], rate=flags.rate) as cluster:
                out = Path(folder, "out")
                program = ["-m", "hvdtrain.starter"] if flags.engine == "horovod" else []
                command = [sys.executable, *program, *LM.split(), "--engine", flags.engine, "--text", str(flags.text)]
                command += [*own, "--seed", seed, "--output-dir", str(out), "--checkpoint-steps", "0"]
                place = dict(WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="9000")
                ranks = {
                    host: cluster.start(host, command, RANK=str(number), **place) for number, host in enumerate("ab")
                }
                done = cluster.finish(ranks, 880)
                assert all(one.code == 0 for one in done.values()), done
                summary = json.loads((out / "summary.json").read_text())
            kept = {key: summary[key] for key in ("validation_loss", "train_seconds", "steps", "parameters_sha256")}
            print(json.dumps({"side": name, "seed": int(seed), "rate": flags.rate, **kept}), flush=True)


if __name__ == "__main__":
    main()
