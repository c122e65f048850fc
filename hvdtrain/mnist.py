"""Train a ConvNet on MNIST, Fashion-MNIST or the embedded digits.

python -m hvdtrain.mnist                                  one process
horovodrun -np 2 python -m hvdtrain.mnist                 two ranks on this machine
horovodrun --gloo -np 2 python -m hvdtrain.mnist          the same without MPI
mpirun -np 4 python -m hvdtrain.mnist                     the same, started by MPI
horovodrun -np 8 -H a:4,b:4 python -m hvdtrain.mnist      two hosts

--dataset mnist --data-dir DIR      the IDX files in DIR, compressed or not
--recipe classic --epochs 10        plain SGD at a constant rate, as tutorials do
--output-dir OUT                    metrics.jsonl, summary.json, mistakes.json, checkpoints; started again, goes on there
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.data import idx
from hvdtrain.data.sharding import Batch, epoch_order, passes_per_step, shard, steps
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.exit_codes import run
from hvdtrain.engines.start import start
from hvdtrain.models.convnet import MODELS
from hvdtrain.models.weights import load_weights
from hvdtrain.training import flags as cli
from hvdtrain.training import optim
from hvdtrain.training.records.clock import Clock
from hvdtrain.training.records.metrics import Telemetry, parameters_sha256, seconds_since_process_start
from hvdtrain.training.records.misclassified import record_mistakes
from hvdtrain.training.records.profiling import Profile
from hvdtrain.training.resilience.guard import Guard
from hvdtrain.training.resume import Checkpoints

RECIPES: dict[str, dict[str, object]] = {
    # The quickest way to 99 %: one-cycle Adam with label smoothing. epochs: as FAST_EPOCHS has it for the data.
    "fast": dict(
        epochs=None, batch_size=64, lr=0.01, lr_scaling="none", lr_schedule="onecycle", warmup_epochs=0.0,
        optimizer="adam", momentum=0.9, weight_decay=0.0, label_smoothing=0.05,
    ),
    # The tutorial's: plain SGD at a constant rate.
    "classic": dict(
        epochs=10, batch_size=100, lr=1e-4, lr_scaling="none", lr_schedule="constant", warmup_epochs=0.0,
        optimizer="sgd", momentum=0.0, weight_decay=0.0, label_smoothing=0.0,
    ),
}  # fmt: skip
FAST_EPOCHS = {"mnist": 1, "fashion-mnist": 1, "digits": 10}  # digits: a fortieth of the samples
EVALUATION_BATCH = 64  # as in training: fits into a core's cache, and into memory that the process holds already


def parse(argv: Sequence[str] | None = None) -> Namespace:
    parser = cli.parser("mnist", __doc__)
    parser.add_argument(
        "--dataset", choices=idx.NAMES, default="auto", help="default: MNIST if it can be had, else digits"
    )
    parser.add_argument("--data-dir", type=Path, help="where the data files are, or go")
    parser.add_argument("--train-samples", type=cli.positive_int, help="train on the first so many samples only")
    parser.add_argument("--recipe", choices=tuple(RECIPES), default="fast")
    parser.add_argument("--model", choices=tuple(MODELS), default="convnet")
    cli.add_training(parser)
    cli.add_surviving(parser)
    cli.add_run(parser)
    cli.add_watching(parser)
    return parser.parse(argv, RECIPES)


def scaled(images: Tensor) -> Tensor:
    """Return uint8 [b, 1, 28, 28] as float32 in [0, 1], in channels_last.

    What the model computes follows the images' memory format: on a CPU 1.5 times faster than in the contiguous one. The
    weights stay contiguous, and so their gradients: Horovod refuses others.
    """
    return images.to(torch.float32, memory_format=torch.channels_last).div_(255)


def evaluate(
    engine: Engine, model: nn.Module, images: Tensor, labels: Tensor, output_dir: Path | None, telemetry: Telemetry
) -> tuple[float, float, int]:
    """Return mean loss, accuracy (0 to 1) and count over the whole test set, each sample counted once over all ranks.

    What the model gets wrong goes into `output_dir`, and the worst of it to TensorBoard.
    """
    engine.average_buffers(model)
    mine = shard(len(images), engine.rank, engine.size)
    sums = torch.zeros(3, dtype=torch.float64)  # loss, correct, count
    outputs = []
    model.eval()
    with torch.inference_mode():
        for some, truth in zip(images[mine].split(EVALUATION_BATCH), labels[mine].split(EVALUATION_BATCH), strict=True):
            logits = model(scaled(some))
            outputs.append(logits)
            sums[0] += F.cross_entropy(logits, truth, reduction="sum").cpu()
            sums[1] += (logits.argmax(1) == truth).sum().cpu()
            sums[2] += len(truth)
    model.train()
    loss, correct, count = engine.sum(sums, "evaluate").tolist()
    if output_dir is not None:
        worst = record_mistakes(engine, torch.cat(outputs), images, labels, output_dir)
        telemetry.mistakes(images, worst)
    return loss / count, correct / count, int(count)


def train(
    flags: Namespace,
    engine: Engine,
    dataset: idx.Dataset,
    telemetry: Telemetry,
    checkpoints: Checkpoints,
    guard: Guard,
    profile: Profile,
) -> int:
    at = checkpoints.begin(telemetry)  # where training stands: at the beginning, or where an earlier run left off
    begun = checkpoints.begun  # the rates and the global batch follow from this, also on other ranks than then
    train_images = dataset.train_images[: flags.train_samples].to(engine.device)
    train_labels = dataset.train_labels[: flags.train_samples].to(engine.device)
    test_images, test_labels = dataset.test_images.to(engine.device), dataset.test_labels.to(engine.device)

    torch.manual_seed(flags.seed)
    model = MODELS[flags.model]().to(engine.device)
    with engine.raising_together("weights"):
        if flags.weights is not None and engine.rank == 0:
            load_weights(model, flags.weights)
    peak_rate = optim.scaled_rate(flags.lr, flags.lr_scaling, begun.ranks, flags.reduction, begun.accumulate)
    optimizer = optim.build(flags.optimizer, model.parameters(), peak_rate, flags.momentum, flags.weight_decay)
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
        telemetry.graph(model, scaled(train_images[:1]))

    def loss_of(batch: Batch) -> Tensor:
        """Compute a loss again, outside of training: for the guard, to find the layer that went wrong."""
        with autocast:
            logits = model(scaled(train_images.index_select(0, batch.indices)))
            return F.cross_entropy(logits, train_labels[batch.indices], label_smoothing=flags.label_smoothing)

    def save() -> None:
        guard.compare_replicas(at, model)  # no checkpoint of weights that one rank has alone
        checkpoints.save(at, model, optimizer, scaler)

    steps_in_epoch = -(-len(train_images) // begun.global_batch)
    samples_planned = flags.epochs * len(train_images)
    mean_loss = float("nan")
    clock = Clock()
    for epoch in range(at.epoch, flags.epochs):
        if at.reached(flags.target_accuracy):
            break
        clock.restart()
        order = epoch_order(len(train_images), flags.seed, epoch)[at.taken :].to(engine.device)
        for step in steps(order, engine.rank, engine.size, flags.batch_size, global_batch=begun.global_batch):
            guard.begin_step(at, model)
            rate = peak_rate * optim.schedule_factor(flags.lr_schedule, at.samples / samples_planned)
            progress = at.samples / len(train_images)
            rate *= optim.warmup_factor(progress, flags.warmup_epochs, begun.ranks, flags.lr_scaling)
            optim.set_rate(optimizer, rate)
            optimizer.zero_grad()
            loss_sum, local_count = torch.zeros((), device=engine.device), 0
            for i, batch in enumerate(step.batches):
                # Several times faster than train_images[indices], whose kernel goes value by value.
                images = scaled(train_images.index_select(0, batch.indices))
                labels = train_labels.index_select(0, batch.indices)
                clock.mark("loading")
                with engine.backward_pass(replica, optimizer, i, len(step.batches)):
                    with autocast:
                        logits = replica(images)
                        loss = F.cross_entropy(logits, labels, label_smoothing=flags.label_smoothing)
                    scaler.scale(loss * batch.weight).backward()
                loss_sum += loss.detach() * batch.local_count
                local_count += batch.local_count
            clock.mark("compute", at=engine.gradients_ready())
            with engine.synchronized(optimizer):
                clock.mark("communication")
                # Unscales, and skips the step where a gradient overflowed: summed over ranks, so seen by all of them.
                if guard.finite(at, model, loss_sum, loss_of, step.batches) or scaler.is_enabled():
                    scaler.step(optimizer)
            scaler.update()
            clock.mark("compute")

            at.advance(step.count)
            clock.count(step.count, local_count)
            if at.step == 1 or at.step % flags.log_steps == 0 or at.taken == len(train_images):
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

        test_loss, test_accuracy, test_count = evaluate(
            engine, model, test_images, test_labels, flags.output_dir, telemetry
        )
        at.end_epoch(loss=test_loss, accuracy=test_accuracy, count=test_count)
        telemetry.event("evaluate", epoch=epoch + 1, **at.evaluation)
        save()
        telemetry.say(
            f"epoch {epoch + 1}/{flags.epochs}  train loss {mean_loss:.4f}  test loss {test_loss:.4f}  "
            f"test accuracy {test_accuracy:.2%} of {test_count:,}  {at.samples / at.train_seconds:,.0f} samples/s"
        )

    unsaved = checkpoints.close(guard.tick)
    telemetry.end(
        dict(
            dataset=dataset.name,
            engine=engine.name,
            world_size=engine.size,
            epochs=at.epoch,
            steps=at.step,
            samples=at.samples,
            test_accuracy=at.evaluation["accuracy"],
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
    tuning, timeline = flags.tuning == "auto", flags.profile is not None
    with start(flags.engine, tuning=tuning, device=flags.device, threads=flags.threads, timeline=timeline) as engine:
        cli.require_equal(engine, flags)
        flags.compression = engine.choose_compression(flags.compression)
        flags.amp = engine.choose_amp(flags.amp)
        if flags.gradient_predivide_factor is None:
            flags.gradient_predivide_factor = float(engine.size) if flags.compression == "fp16" else 1.0
        with engine.raising_together("start"):
            dataset = idx.load(flags.dataset, flags.data_dir, say=print if engine.rank == 0 else None)
            asked["epochs"] = flags.epochs = flags.epochs or FAST_EPOCHS[dataset.name]
            train_samples = min(flags.train_samples or len(dataset.train_images), len(dataset.train_images))
            if train_samples < engine.size:
                raise UserError(f"{train_samples} samples but {engine.size} ranks: use -np {train_samples} or fewer")
            data = dict(dataset=dataset.name, train_samples=train_samples, test_samples=len(dataset.test_images))
            checkpoints = Checkpoints(engine, flags, asked, data)
            telemetry = Telemetry(
                engine,
                flags.output_dir,
                progress=not flags.no_progress,
                continued=checkpoints.continues,
                tensorboard=flags.tensorboard,
            )
        engine.require_equal("the data", data, remedy="give every host the same data, or name it with --dataset")
        with (
            telemetry,
            Guard(engine, flags, telemetry) as guard,
            Profile(engine, flags, telemetry, guard.tick) as profile,
        ):
            telemetry.start(engine, dataset.name, dataset.reason, vars(flags))
            return train(flags, engine, dataset, telemetry, checkpoints, guard, profile)


if __name__ == "__main__":
    run(main)
