"""Create shards from an image folder: python -m hvdtrain.datasets.make_shards FOLDER SHARDS

Converts FOLDER/train/CLASS/* and FOLDER/val/CLASS/* to SHARDS/train/000000.tar ... and SHARDS/val/000000.tar ..., in random
order. Also writes the index of each shard, the number of samples and the names of the classes (000000.tar.index, sizes.json,
classes.json). The image files are not re-encoded.
"""

from hvdtrain.launching import startup

if __name__ == "__main__":
    startup.begin()

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

from hvdtrain import cli
from hvdtrain.datasets.images import list_folder, refuse_other_classes
from hvdtrain.datasets.tar_shards import obtain
from hvdtrain.engines import atomic, lines
from hvdtrain.engines.errors import UserError
from hvdtrain.flags import Flags
from hvdtrain.inputs.sharding import epoch_order
from hvdtrain.launching.exit_codes import run_command


def make_shards(root: Path, target: Path, per_shard: int, seed: int) -> int:
    """Write the shards of one split, of nearly equal size. Return their number."""
    classes, listing = list_folder(root)
    order = epoch_order(len(listing.labels), seed, 0)
    count = -(-len(order) // per_shard)
    target.mkdir(parents=True)
    sizes = {}
    for number, indices in enumerate(order.tensor_split(count)):
        path = target / f"{number:06d}.tar"
        with atomic.replacing(path, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            for index in indices.tolist():
                name = Path(listing.name(index))
                content = (root / name).read_bytes()
                key = f"{index:08d}-{name.stem.replace('.', '_')}"  # a key ends at the first dot
                label = str(int(listing.labels[index])).encode()
                for kind, data in ((".cls", label), (name.suffix.lower(), content)):
                    member = tarfile.TarInfo(key + kind)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        obtain(path)
        sizes[path.name] = len(indices)
    atomic.write_atomically(target / "sizes.json", json.dumps(sizes, indent=0) + "\n", sync=False)
    atomic.write_atomically(target / "classes.json", json.dumps(classes, indent=0) + "\n", sync=False)
    return count


def parse(argv: Sequence[str] | None = None) -> Flags:
    """Return the command's flags. Raises UserError."""
    parser = cli.Parser("hvdtrain.datasets.make_shards", __doc__)
    parser.add_argument("folder", type=Path, help="has train/CLASS/* and val/CLASS/*")
    parser.add_argument("shards", type=Path, help="a new directory")
    parser.add_argument("--samples-per-shard", type=cli.positive_int, default=1000, help="maximum (default: 1000)")
    parser.add_argument("--seed", type=cli.seed, default=1, help="seed of the order (default: 1)")
    return parser.parse_args(argv)


def main() -> int:
    """Run the command. Returns its exit code. Raises UserError."""
    flags = parse()
    for split in ("train", "val"):
        if not (flags.folder / split).is_dir():
            raise UserError(f"{flags.folder / split} is not a directory: name the one that has train/ and val/")
        if (flags.shards / split).exists():
            raise UserError(f"{flags.shards / split} exists: name a new directory")
    refuse_other_classes(*(list_folder(flags.folder / split)[0] for split in ("train", "val")))
    try:
        for split in ("train", "val"):
            count = make_shards(flags.folder / split, flags.shards / split, flags.samples_per_shard, flags.seed)
            lines.say(f"{flags.shards / split}: {count} shards")
    except OSError as error:
        raise UserError(f"{error.filename or flags.shards}: {error.strerror}") from error
    return 0


if __name__ == "__main__":
    run_command(main)
