"""Train a torchvision classifier on images: ResNet-50 on ImageNet, or any model on any folder.

python -m hvdtrain.imagenet --data-dir DIR                          one process; DIR has train/CLASS/*.jpg and val/
mpirun -np 8 python -m hvdtrain.imagenet --data-dir DIR             eight ranks, one GPU each
torchrun --nproc-per-node 8 -m hvdtrain.imagenet --engine ddp --data-dir DIR

--dataset shards --data-dir DIR     tar files, DIR/train/*.tar and DIR/val/*.tar (hvdtrain.data.shards makes them)
--dataset synthetic                 random images, made once on the device
--model resnet18 --image-size 64    any torchvision classifier, any size
--amp bf16 --compile                mixed precision, torch.compile
--recipe goyal                      the schedule of arXiv:1706.02677
--output-dir OUT                    metrics.jsonl, summary.json and checkpoints; started again, the run goes on from there
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.data.corrupt import Losses
from hvdtrain.data.images import open_folder
from hvdtrain.data.loading import Loaded, Plan, Source, default_workers, mixed_seed, start_workers_early
from hvdtrain.data.sharding import passes_per_step
from hvdtrain.data.shards import open_shards
from hvdtrain.data.synthetic import open_synthetic
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.exit_codes import run
from hvdtrain.engines.start import cores_of_rank, start
from hvdtrain.models.classifiers import build_model, require_torchvision
from hvdtrain.models.weights import load_weights
from hvdtrain.training import flags as cli
from hvdtrain.training import optim
from hvdtrain.training.records.clock import Clock
from hvdtrain.training.records.metrics import Telemetry, parameters_sha256, seconds_since_process_start
from hvdtrain.training.records.profiling import Profile
from hvdtrain.training.resilience.guard import Guard
from hvdtrain.training.resume import Checkpoints

# Without --lr: 0.1 for every 256 images of the global batch (arXiv:1706.02677, section 2.1).
RECIPES: dict[str, dict[str, object]] = {
    # What most ResNet-50 results of today share: cosine, label smoothing.
    "cosine": dict(
        epochs=90, batch_size=64, lr_scaling="linear", lr_schedule="cosine", warmup_epochs=5.0,
        optimizer="sgd", momentum=0.9, weight_decay=5e-5, label_smoothing=0.1,
    ),
    # As in arXiv:1706.02677: a tenth after 30, 60 and 80 epochs.
    "goyal": dict(
        epochs=90, batch_size=32, lr_scaling="linear", lr_schedule="step", warmup_epochs=5.0,
        optimizer="sgd", momentum=0.9, weight_decay=1e-4, label_smoothing=0.0,
    ),
}  # fmt: skip
MEMORY_FORMATS = {"channels_last": "channels_last", "contiguous": "contiguous_format"}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, from 0 to 1: red, green, blue


def parse(argv: Sequence[str] | None = None) -> Namespace:
    parser = cli.parser("imagenet", __doc__)
    parser.add_argument("--dataset", choices=("folder", "shards", "synthetic"), default="folder")
    parser.add_argument("--data-dir", type=Path, help="has train/ and val/, of folders or of shards")
    parser.add_argument("--train-shards", help="a glob, a brace pattern, a URL or pipe:COMMAND, in place of --data-dir")
    parser.add_argument("--test-shards", help="the same for the test set")
    parser.add_argument("--train-samples", type=cli.positive_int, help="an epoch takes so many (default: all)")
    parser.add_argument(
        "--classes", type=cli.positive_int, help="for shards and synthetic (default: shards' own, or 1000)"
    )
    parser.add_argument("--image-size", type=cli.positive_int, default=224, help="pixels (default: 224)")
    parser.add_argument("--workers", type=cli.count, help="input processes per rank (default: from this rank's cores)")
    parser.add_argument(
        "--max-broken",
        type=cli.non_negative,
        default=0.001,
        help="stop when more samples cannot be read: below 1 a share of them all, else a number (default: 0.001)",
    )
    parser.add_argument("--recipe", choices=tuple(RECIPES), default="cosine")
    parser.add_argument("--model", default="resnet50", help="any torchvision classifier (default: resnet50)")
    parser.add_argument("--memory-format", choices=tuple(MEMORY_FORMATS), default="channels_last")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    cli.add_training(parser)
    cli.add_surviving(parser)
    cli.add_run(parser)
    cli.add_watching(parser)
    flags = parser.parse(argv, RECIPES)
    flags.lr = flags.lr or 0.1 * flags.batch_size / 256
    return flags


def scaled(images: Tensor, pixels: Tensor, memory_format: torch.memory_format) -> Tensor:
    """uint8 [b, 3, side, side], on the host or not, to float32 of mean 0 and deviation 1 on the device of `pixels`."""
    images = images.to(pixels.device, non_blocking=True).to(torch.float32, memory_format=memory_format)
    return images.sub_(pixels[0]).div_(pixels[1])


def open_source(flags: Namespace, engine: Engine) -> Source:
    if flags.dataset == "synthetic":
        count = flags.train_samples or 100 * flags.batch_size * engine.size
        return open_synthetic(engine, flags.image_size, flags.batch_size, flags.classes or 1000, count, -(-count // 10))
    prepare = dict(side=flags.image_size, seed=flags.seed, workers=flags.workers)
    if flags.dataset == "folder":
        return open_folder(engine, flags.data_dir, **prepare)
    patterns = (flags.train_shards, flags.test_shards)
    return open_shards(
        engine, flags.data_dir, patterns, classes=flags.classes, train_count=flags.train_samples, **prepare
    )


def evaluate(
    engine: Engine,
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    batches: Iterable[Loaded],
    losses: Losses,
    tick: Callable[[], None] = lambda: None,
) -> tuple[float, float, float, int]:
    """Return mean loss, top-1 and top-5 accuracy (0 to 1) and count over the test set, each sample once over all ranks."""
    engine.average_buffers(model)
    sums = torch.zeros(4, dtype=torch.float64, device=engine.device)  # loss, in the first, in the first five, count
    model.eval()
    with torch.inference_mode():
        for batch in batches:
            tick()
            losses.note(batch.broken)
            if batch.samples == 0:
                continue
            truth = batch.labels.to(engine.device)
            logits = forward(batch.images).float()
            hits = logits.topk(min(5, logits.shape[1])).indices == truth[:, None]
            sums[0] += F.cross_entropy(logits, truth, reduction="sum")
            sums[1] += hits[:, 0].sum()
            sums[2] += hits.sum()
            sums[3] += batch.samples
    model.train()
    loss, first, five, count = engine.sum(sums.cpu(), "evaluate").tolist()
    if count == 0:
        raise UserError(
            "the test set has not one image that can be read: see --test-shards, --data-dir", everywhere=True
        )
    return loss / count, first / count, five / count, int(count)


def train(
    flags: Namespace,
    engine: Engine,
    source: Source,
    telemetry: Telemetry,
    checkpoints: Checkpoints,
    guard: Guard,
    profile: Profile,
) -> int:
    at = checkpoints.begin(telemetry)  # where training stands: at the beginning, or where an earlier run left off
    begun = checkpoints.begun  # the rates and the global batch follow from this, also on other ranks than then
    memory_format = getattr(torch, MEMORY_FORMATS[flags.memory_format])
    pixels = torch.tensor([MEAN, DEVIATION], device=engine.device).view(2, 3, 1, 1) * 255

    torch.manual_seed(flags.seed)
    # The weights stay contiguous, and so their gradients: Horovod refuses tensors in channels_last. The images alone decide
    # in which format the layers compute.
    model = build_model(flags.model, source.classes, flags.image_size).to(engine.device)
    with engine.raising_together("weights"):
        if flags.weights is not None and engine.rank == 0:
            load_weights(model, flags.weights)
    peak_rate = optim.scaled_rate(flags.lr, flags.lr_scaling, begun.ranks, flags.reduction, begun.accumulate)
    optimizer = optim.build(flags.optimizer, optim.decay_groups(model), peak_rate, flags.momentum, flags.weight_decay)
    replica, optimizer = engine.distribute(
        model,
        optimizer,
        compression=flags.compression,
        predivide=flags.gradient_predivide_factor,
        reduction=flags.reduction,
        accumulate=passes_per_step(begun.global_batch, engine.size, flags.batch_size),
    )
    engine.broadcast(model, optimizer)
    autocast = torch.autocast(engine.device.type, cli.AMP_DTYPES[flags.amp], enabled=flags.amp != "off")
    scaler = torch.amp.GradScaler(engine.device.type, enabled=flags.amp == "fp16")
    checkpoints.restore(model, optimizer, scaler)
    if flags.tensorboard:
        telemetry.graph(model, torch.zeros(1, 3, flags.image_size, flags.image_size, device=engine.device))
    compiled = torch.compile(replica, dynamic=False) if flags.compile else replica

    def test_forward(images: Tensor) -> Tensor:
        with autocast:
            return model(scaled(images, pixels, memory_format))

    plan = Plan(
        source.train_count, min(flags.train_samples or source.train_count, source.train_count), flags.seed, flags.epochs,
        engine.rank, engine.size, flags.batch_size, flags.accumulate, begun.global_batch, at.epoch, at.taken,
    )  # fmt: skip
    batches = iter(source.train(plan))  # the batches of the plan below, in its order: workers run ahead of it
    losses = Losses(flags.max_broken, source.train_count)
    steps_in_epoch = plan.steps_per_epoch()
    samples_planned = flags.epochs * plan.per_epoch
    mean_loss = float("nan")
    clock = Clock()

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute a loss again, outside of training: for the guard, to find the layer that went wrong."""
        images, labels = batch
        with autocast:
            return F.cross_entropy(model(images), labels, label_smoothing=flags.label_smoothing)

    def save() -> None:
        guard.compare_replicas(at, model)  # no checkpoint of weights that one rank has alone
        checkpoints.save(at, model, optimizer, scaler)

    for epoch in range(at.epoch, flags.epochs):
        if at.reached(flags.target_accuracy):
            break
        clock.restart()
        for step in plan.epoch(epoch):
            guard.begin_step(at, model)
            torch.manual_seed(
                mixed_seed(flags.seed, at.samples, engine.rank)
            )  # dropout: the same again after a restart
            rate = peak_rate * optim.schedule_factor(flags.lr_schedule, at.samples / samples_planned)
            progress = at.samples / plan.per_epoch
            rate *= optim.warmup_factor(progress, flags.warmup_epochs, begun.ranks, flags.lr_scaling)
            optim.set_rate(optimizer, rate)
            optimizer.zero_grad()
            loss_sum, local_count = torch.zeros((), device=engine.device), 0
            for i, batch in enumerate(step.batches):
                loaded = next(batches)
                losses.note(loaded.broken)
                images, labels = scaled(loaded.images, pixels, memory_format), loaded.labels.to(engine.device)
                if len(labels) == 1 < flags.batch_size:
                    # An uneven end may leave one image, of which batch norm has no variance: twice, it has the same mean.
                    images, labels = images.repeat(2, 1, 1, 1), labels.repeat(2)
                # Broken samples add nothing: the others keep the weight that they had beside them.
                count = min(batch.local_count, loaded.samples)
                weight = batch.weight * count / max(batch.local_count, 1)
                clock.mark("loading")
                with engine.backward_pass(replica, optimizer, i, len(step.batches)):
                    with autocast:
                        logits = compiled(images)
                        loss = F.cross_entropy(logits, labels, label_smoothing=flags.label_smoothing)
                    scaler.scale(loss * weight).backward()
                loss_sum += loss.detach() * count
                local_count += count
            clock.mark("compute", at=engine.gradients_ready())
            with engine.synchronized(optimizer):
                clock.mark("communication")
                # Unscales, and skips the step where a gradient overflowed: summed over ranks, so seen by all of them.
                if guard.finite(at, model, loss_sum, loss_of, [(images, labels)]) or scaler.is_enabled():
                    scaler.step(optimizer)
            scaler.update()
            clock.mark("compute")

            at.advance(step.count)
            clock.count(step.count, local_count)
            if at.step == 1 or at.step % flags.log_steps == 0 or at.taken == plan.per_epoch:
                losses.settle(engine, telemetry)
                mean_loss = engine.mean(loss_sum / max(local_count, 1), local_count, "loss")
                window = clock.measure(engine, (logits.argmax(1) == labels).sum(), len(labels))
                telemetry.event(
                    "train",
                    epoch=epoch + 1,
                    step=at.step,
                    samples=at.samples,
                    loss=mean_loss,
                    accuracy=window.accuracy,
                    loss_rank0=loss_sum.item() / max(local_count, 1),
                    learning_rate=rate,
                    broken=losses.total(),
                    **window.rates,
                )
                telemetry.progress(epoch + 1, flags.epochs, at.step, flags.epochs * steps_in_epoch, mean_loss, window)
                clock.mark("reporting")
            profile.step(at.step, clock)
            stops = guard.stops(at)
            if stops or checkpoints.due(at.step):
                at.train_seconds += clock.lap()
                save()
                clock.mark("saving")
            if stops:
                return guard.leave(at, checkpoints)
        at.train_seconds += clock.lap()
        telemetry.event("ranks", epoch=epoch + 1, **clock.per_rank())

        test_loss, test_accuracy, top5, test_count = evaluate(
            engine, model, test_forward, source.test(), losses, guard.tick
        )
        losses.settle(engine, telemetry)
        at.end_epoch(loss=test_loss, accuracy=test_accuracy, accuracy_top5=top5, count=test_count)
        telemetry.event("evaluate", epoch=epoch + 1, **at.evaluation, broken=losses.total())
        save()
        telemetry.say(
            f"epoch {epoch + 1}/{flags.epochs}  train loss {mean_loss:.4f}  test loss {test_loss:.4f}  "
            f"test accuracy {test_accuracy:.2%} (top 5 {top5:.2%}) of {test_count:,}  "
            f"{at.samples / at.train_seconds:,.0f} samples/s"
        )

    unsaved = checkpoints.close(guard.tick)
    telemetry.end(
        dict(
            dataset=source.name,
            engine=engine.name,
            world_size=engine.size,
            epochs=at.epoch,
            steps=at.step,
            samples=at.samples,
            broken=losses.total(),
            test_accuracy=at.evaluation["accuracy"],
            test_accuracy_top5=at.evaluation["accuracy_top5"],
            test_loss=at.evaluation["loss"],
            test_count=at.evaluation["count"],
            train_seconds=at.train_seconds,
            total_seconds=seconds_since_process_start(),
            samples_per_second=at.samples / at.train_seconds,
            parameters_sha256=parameters_sha256(model),
        )
    )
    if unsaved:
        raise Failure(unsaved)
    if flags.target_accuracy is not None and not at.reached(flags.target_accuracy):
        telemetry.say(f"target accuracy {flags.target_accuracy:.2%} not reached")
        return 3
    return 0


def main() -> int:
    flags = parse()
    asked = dict(vars(flags))
    if flags.dataset != "synthetic" and flags.workers != 0:
        start_workers_early()
    tuning, timeline = flags.tuning == "auto", flags.profile is not None
    with start(flags.engine, tuning=tuning, device=flags.device, threads=flags.threads, timeline=timeline) as engine:
        cli.require_equal(engine, flags)
        flags.compression = engine.choose_compression(flags.compression)
        flags.amp = engine.choose_amp(flags.amp)
        if flags.gradient_predivide_factor is None:
            flags.gradient_predivide_factor = float(engine.size) if flags.compression == "fp16" else 1.0
        if flags.workers is None:
            flags.workers = default_workers(cores_of_rank(engine), engine.device)
        with engine.raising_together("start"):
            require_torchvision()
        source = open_source(flags, engine)
        if source.train_count < engine.size:
            count = source.train_count
            raise UserError(f"{count} samples but {engine.size} ranks: use -np {count} or fewer", everywhere=True)
        data = dict(
            dataset=source.name, train_samples=flags.train_samples or source.train_count, classes=source.classes
        )
        with engine.raising_together("output"):
            checkpoints = Checkpoints(engine, flags, asked, data)
            telemetry = Telemetry(
                engine,
                flags.output_dir,
                progress=not flags.no_progress,
                continued=checkpoints.continues,
                tensorboard=flags.tensorboard,
            )
        with (
            telemetry,
            Guard(engine, flags, telemetry) as guard,
            Profile(engine, flags, telemetry, guard.tick) as profile,
        ):
            telemetry.start(engine, source.name, source.reason, vars(flags))
            return train(flags, engine, source, telemetry, checkpoints, guard, profile)


if __name__ == "__main__":
    run(main)
