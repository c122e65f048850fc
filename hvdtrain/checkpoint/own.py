"""What each rank has of its own, as one part of a checkpoint: a dictionary for each rank.

own          JSON as uint8: of each rank, by the name of a provider, the values without their tensors, and how many int64
             the bytes of these take
own.bytes    int64 [n]: these bytes, of all ranks and providers one after the other

Whoever has something of its own, such as buffers or generators of random numbers, is a `Provider`. Every rank gets the
dictionaries of all ranks of the checkpoint, so that a provider can say what becomes of them on another number of ranks.

Of more than `collectives.MANY` ranks, running statistics and generators are one state for all, in rank 0's dictionary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint import contents
from hvdtrain.checkpoint.sums import digest_of_values
from hvdtrain.engines import collectives
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import (
    COUNTER,
    buffers_of_models,
    is_extra,
    named_parameters,
    prefixes_of_models,
    running_statistics,
    uncompiled_name,
)
from hvdtrain.engines.portable import difference_of_values, flattened, require_no_meta, to_json, unflattened

OWN, BYTES = "own", "own.bytes"
EXTRA = "extra "  # prefix of the providers of `ExtraState`
UNLIKE = "the checkpoint does not match the model"
HOW = "let get_extra_state return numbers, strings, bytes or tensors, also in lists and dictionaries"
COMMON = "common "  # prefix of a provider's state for all ranks; with a space, as no other name has it at the beginning
NO_BYTES = torch.empty(0, dtype=torch.int64)
PackedStates = dict[str, tuple[Any, int]]  # of one rank: by provider, its state as JSON, and the length of its bytes


class Moment(NamedTuple):
    """Where in training a checkpoint is saved."""

    in_steps: bool = False  # after a step, not after all steps of an epoch
    epoch_ended: bool = False  # after the evaluation of a whole epoch
    evaluation: int = 0  # in this one of those of an epoch that are not in its steps, from 1
    outside: bool = False  # in an evaluation outside of the loop over epochs


IN_STEPS = Moment(in_steps=True)


class Saved(NamedTuple):
    """What a checkpoint has of a provider."""

    states: Sequence[Any]  # of each rank of the checkpoint; None: it had none
    rank: int  # this one's number
    ranks_now: int
    same: bool  # every rank gets what rank 0 had, as with --evaluate
    common: bool = False  # the checkpoint has one state for all ranks

    @property
    def goes_on(self) -> bool:
        """Whether each rank goes on as itself."""
        return len(self.states) == self.ranks_now and not self.same and not self.common

    @property
    def state(self) -> Any:
        """What this rank had, or else rank 0."""
        return self.states[self.rank if self.goes_on else 0]


class Provider:
    """One thing of which each rank has its own. No collectives in it: a process may have several ranks."""

    only_if_unlike = False  # it is saved if it differs between ranks: else, the checkpoint has rank 0's
    about = ("what a rank has of its own", "keep to numbers, text, tensors and collections of these")  # and the remedy

    def state(self, moment: Moment) -> Any:
        """Return what this rank has: numbers, text, bytes, tensors and collections of these. None: nothing."""

    def is_common(self, *, many: bool) -> bool:
        """Whether `common` is saved instead, alike on every rank. many: there are more than `collectives.MANY` ranks."""
        return False

    def common(self, engine: Engine, moment: Moment) -> Any:
        """Return one state for all ranks, which rank 0 writes. A collective."""

    def load(self, saved: Saved) -> None:
        """Take it back, also where the checkpoint has nothing of it. Raises UserError, the same on every rank."""

    def load_earlier(self, saved: Saved) -> None:
        """Have what an earlier checkpoint has between two loops (ended_loops.py). Keep what is loaded for the next one."""


class Own:
    """Saves and restores what providers have. same: see `Saved`."""

    def __init__(self, engine: Engine, *, same: bool):
        self._engine, self._same = engine, same
        # A checkpoint has a dictionary of each of `count` ranks. This process has the states of `ranks`: inside of
        # `as_rank(number)`, providers return and take that of one of them.
        self.ranks: Sequence[int] = engine.own
        self.count, self.as_rank = engine.size, engine.as_rank
        self._providers: dict[str, Provider] = {}
        self._saved: list[dict[str, tuple[Any, Tensor]]] | None = None  # of a run that is resumed, until it trains
        self._read_back = False  # whether the first checkpoint of this run was

    def add(self, name: str, provider: Provider) -> None:
        """Save this, too, from now on, and load it if the run is resumed."""
        self._providers[name] = provider
        if self._saved is not None:
            self._load(name, self._saved, provider.load)

    def _load(self, name: str, ranks: Sequence[dict[str, tuple[Any, Tensor]]], load: Callable[[Saved], None]) -> None:
        """Let a provider load what each rank of a checkpoint has."""
        for_all = ranks[0].get(COMMON + name)
        packed = [one.get(name) for one in ranks] if for_all is None else [for_all]
        states = [None if one is None else unflattened(*one) for one in packed]
        for rank in self.ranks:
            with self.as_rank(rank):
                load(Saved(states, rank, self.count, self._same, common=for_all is not None))

    def save(self, moment: Moment) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint. A collective. Raises UserError on every rank."""
        packed, sums = list[dict[str, tuple[Any, Tensor]]](), list[dict[str, str]]()  # of each of this process's ranks
        with self._engine.raising_together("checkpoint.own"):
            for rank in self.ranks:
                with self.as_rank(rank):
                    packed.append(dict(self._each(moment, flattened)))
                    sums.append(dict(self._each(moment, digest_of_values, only_if_unlike=True)))
        common = {COMMON + name: flattened(state) for name, state in self._common(moment)}
        self._read_back = True
        if self.count > 1 and any(provider.only_if_unlike for provider in self._providers.values()):
            everyone = [one for theirs in self._engine.all_gather_object(sums, "checkpoint.sums") for one in theirs]
            unlike = [name for name in self._providers if len({one.get(name) for one in everyone}) > 1]
            for rank, one in zip(self.ranks, packed, strict=True):
                with self.as_rank(rank):
                    one |= {name: flattened(self._providers[name].state(moment)) for name in unlike}
        ranks, whole = self._engine.all_gather_packed(*in_one_row(packed), "checkpoint.own")
        (for_all,), row = in_one_row([common])  # not gathered: rank 0 writes
        ranks[0] = for_all | ranks[0]
        return {OWN: contents.json_tensor(ranks), BYTES: joined_rows([row, whole])}

    def _is_many(self) -> bool:
        """Whether ranks are so many that some states are one for all. Not if they are those of fewer processes."""
        # Each checkpoint would send the statistics of every rank to every other: 0.24 MiB of each for ResNet-50.
        return self.count == self._engine.size > collectives.MANY

    def _common(self, moment: Moment) -> Iterator[tuple[str, Any]]:
        """Yield what is saved once for all ranks. A collective."""
        for name, provider in self._providers.items():
            common = provider.is_common(many=self._is_many())
            if common and (state := provider.common(self._engine, moment)) is not None:
                yield name, state

    def _each(
        self, moment: Moment, pack: Callable[[Any], Any], *, only_if_unlike: bool = False
    ) -> Iterator[tuple[str, Any]]:
        """Yield what `pack` makes of the state of each provider of this kind. Raises UserError for what cannot be saved."""
        for name, provider in self._providers.items():
            wanted = provider.only_if_unlike == only_if_unlike and (self.count > 1 or not only_if_unlike)
            if not wanted or provider.is_common(many=self._is_many()) or (state := provider.state(moment)) is None:
                continue
            what, remedy = provider.about
            with contents.storable(what, remedy):
                yield name, pack(state)
                if not self._read_back and (why := difference_of_values(state, unflattened(*flattened(state)))):
                    raise UserError(f"{what} cannot be restored: {why}: {remedy}")

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Read what providers load when they are added. A collective. tensors: of the checkpoint, on rank 0."""
        self._saved = self._read(tensors)

    def _read(self, tensors: Mapping[str, Tensor]) -> list[dict[str, tuple[Any, Tensor]]]:
        ranks, row = contents.decoded(tensors[OWN]) if tensors else None, tensors.get(BYTES, NO_BYTES)
        return unpacked_states(*self._engine.broadcast_packed(ranks, row, "checkpoint.own"))

    def load_earlier(self, tensors: Mapping[str, Tensor]) -> None:
        """Let providers have what an earlier checkpoint has. A collective. tensors: of that, on rank 0."""
        ranks = self._read(tensors)
        for name, provider in self._providers.items():
            self._load(name, ranks, provider.load_earlier)

    def forget(self) -> None:
        """Free what was read."""
        self._saved = None


def in_one_row(packed: Sequence[dict[str, tuple[Any, Tensor]]]) -> tuple[list[PackedStates], Tensor]:
    """Return what `unpacked_states` makes this of again."""
    told: list[PackedStates] = [{name: (value, len(row)) for name, (value, row) in one.items()} for one in packed]
    return told, joined_rows([row for one in packed for _, row in one.values()])


def joined_rows(rows: Sequence[Tensor]) -> Tensor:
    """Return rows of int64 as one."""
    # Without a copy, if only one has values: the order of an epoch may be long.
    full = [row for row in rows if len(row)]
    return full[0] if len(full) == 1 else torch.cat([NO_BYTES, *full])


def unpacked_states(ranks: Sequence[PackedStates], row: Tensor) -> list[dict[str, tuple[Any, Tensor]]]:
    """Return, of each rank and by provider, what `flattened` had returned. row: all bytes."""
    rows = iter(row.split([length for one in ranks for _, length in one.values()]))
    return [{name: (value, next(rows)) for name, (value, _) in one.items()} for one in ranks]


# ---- buffers


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield each buffer in the state_dict with its name there. Others are made again by the module."""
    for path, layer in module.named_modules():
        for name, buffer in layer._buffers.items():
            if name not in layer._non_persistent_buffers_set:
                yield uncompiled_name(f"{path}.{name}" if path else name), buffer


class Buffers(Provider):
    """The floating-point buffers of models; or only_statistics: running statistics alone, as of a registered module."""

    def __init__(self, models: Sequence[nn.Module], *, only_statistics: bool = False):
        self._models, self._only_statistics = models, only_statistics

    def _named(self) -> dict[str, Tensor]:
        """Return each buffer once, by its unique name."""
        return {
            name: buffer.tensor
            for name, buffer in buffers_of_models(self._models).items()
            if buffer.saved and buffer.tensor.is_floating_point() and (buffer.is_statistic or not self._only_statistics)
        }

    def state(self, moment: Moment) -> Any:
        return self._named() or None

    def is_common(self, *, many: bool) -> bool:
        return many

    def common(self, engine: Engine, moment: Moment) -> Any:
        """The mean of running statistics, and rank 0's other buffers."""
        named, statistics = self._named(), {id(buffer) for buffer in running_statistics(self._models)}
        means = {name: buffer.double() for name, buffer in named.items() if id(buffer) in statistics}
        engine.average_(list(means.values()))  # in float64: equal ones keep their bits
        return {
            name: means[name].to(buffer.dtype) if name in means else buffer for name, buffer in named.items()
        } or None

    def load(self, saved: Saved) -> None:
        """On another number of ranks: the mean of running statistics, and rank 0's of other buffers."""
        here, there = self._named(), saved.state or {}
        for name in {**there, **here}:
            if name not in here or name not in there or here[name].shape != there[name].shape:
                raise UserError(
                    f"{UNLIKE}: {name} is not the same buffer in both: build the model as the run did", everywhere=True
                )
        averaged = {id(buffer) for buffer in running_statistics(self._models)} if not saved.goes_on else set[int]()
        for name, buffer in here.items():
            buffer.copy_(mean([one[name] for one in saved.states]) if id(buffer) in averaged else there[name])

    load_earlier = load


def mean(values: Sequence[Tensor]) -> Tensor:
    """Return the mean of tensors of one shape. Equal ones keep their bits."""
    # The sum of equal numbers is rounded: their mean may have other bits.
    if all(torch.equal(value, values[0]) for value in values):
        return values[0]
    return torch.stack(list(values)).to(torch.promote_types(values[0].dtype, torch.float32)).mean(0)


# ---- states of layers


def extra_state(module: nn.Module) -> dict[str, Any]:
    """Return what is neither parameter nor buffer in a state_dict: of `get_extra_state`, and what hooks add."""
    return {uncompiled_name(key): value for key, value in module.state_dict().items() if is_extra(key, value)}


def load_extra_state(module: nn.Module, held: Mapping[str, Any]) -> None:
    """Give it back. Raises UserError if the module has other names, or does not take it."""
    here = extra_state(module)
    for key in sorted({*held} ^ {*here}):
        whose = "the model lacks it" if key in held else "the checkpoint lacks it"
        raise UserError(f"{UNLIKE}: {key}: {whose}: build the model as the run did", everywhere=True)
    if not held:
        return
    try:
        contents.load_by_own_names(module, held)
    except Exception as error:  # any: set_extra_state is the author's own
        last = (str(error) or type(error).__name__).splitlines()[-1].strip()
        message = f"{next(iter(held))} does not take what it returned when the checkpoint was written ({last})"
        remedy = "let set_extra_state take what get_extra_state returns"
        raise UserError(f"{message}: {remedy}", everywhere=True) from error


def share_extra_state(engine: Engine, module: nn.Module) -> None:
    """Give every rank rank 0's. A collective, if the module has such state."""
    if states := extra_state(module):
        load_extra_state(module, unflattened(*engine.broadcast_packed(*flattened(states), "extra.share")))


def extra_states_in(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return rank 0's in a checkpoint, by the name of the module."""
    of_rank_0 = unpacked_states(contents.decoded(tensors[OWN]), tensors[BYTES])[0] if OWN in tensors else {}
    return {name.removeprefix(EXTRA): unflattened(*one) for name, one in of_rank_0.items() if name.startswith(EXTRA)}


class ExtraState(Provider):
    """The extra state of a module."""

    about = "the extra state of a layer", HOW

    def __init__(self, module: nn.Module):
        self._module = module

    def state(self, moment: Moment) -> Any:
        states = extra_state(self._module)
        for name, value in states.items():
            with contents.storable(name, HOW):
                to_json(value, require_no_meta)
        return states or None

    def load(self, saved: Saved) -> None:
        load_extra_state(self._module, saved.state or {})


# ---- modes of modules


class Modes(Provider):
    """Which modules are in evaluation mode, of models and registered ones, and which parameters of models are frozen or
    trained since the loop began. On another number of ranks: as on rank 0."""

    def __init__(self, models: Sequence[nn.Module], replicas: Sequence[nn.Module], registered: Mapping[str, Any]):
        """registered: objects by name, also later ones."""
        self._models, self._replicas, self._registered = models, replicas, registered
        self._in_loop: list[str] = []  # both, by name, in the loop over epochs
        self._loaded = False  # from a checkpoint, for the first loop after it
        self._began: list[tuple[str, nn.Parameter, bool]] = []  # whether each was trained when the loop began

    def _named(self) -> Iterator[tuple[str, nn.Module]]:
        tops = list(zip(prefixes_of_models(self._models), self._models, strict=True))
        tops += [(f"registered {name}.", one) for name, one in self._registered.items() if isinstance(one, nn.Module)]
        for prefix, top in tops:
            for path, module in top.named_modules():
                yield prefix + uncompiled_name(f"{path}."), module

    def begin(self, step: int) -> None:
        """Note which parameters the program itself has frozen before its loop, and its modes, or take the checkpoint's."""
        self._began = [(f"{name} trained", one, one.requires_grad) for name, one in named_parameters(self._models)]
        # Without a step, the program has set them since, before its loop.
        self.set() if self._loaded and step else self.state(IN_STEPS)
        self._loaded = False

    def state(self, moment: Moment) -> Any:
        # Outside of the loop, the program sets modes before and after it, and does that again in a resumed run. An epoch in
        # which a limit of steps has ended goes on with those of its last step, whatever the program has set for its tail.
        if moment.in_steps or moment.epoch_ended or (moment.evaluation and not moment.outside):
            self._in_loop = list(dict.fromkeys(name for name, module in self._named() if not module.training))
            self._in_loop += [name for name, one, trained in self._began if one.requires_grad != trained]
        return self._in_loop or None

    def load(self, saved: Saved) -> None:
        self._in_loop, self._loaded = saved.state or [], True

    def load_earlier(self, saved: Saved) -> None:
        newest = self._in_loop
        self.load(saved)
        self.begin(1)
        self._in_loop, self._loaded = newest, True

    def set(self) -> None:
        """Give modules and parameters what they had when this was noted last."""
        changed = set(self._in_loop)
        for name, module in self._named():
            module.training = name not in changed
        for name, parameter, trained in self._began:
            parameter.requires_grad_(trained != (name in changed))
        for model, replica in zip(self._models, self._replicas, strict=True):
            replica.training = model.training


# ---- what should be the same on all ranks, and is not


class Unlike(Provider):
    """A state that is saved if it differs between ranks, such as of a buffer of images that each rank has made.

    name: for the line that is said on another number of ranks. take, give: return and set the state.
    """

    only_if_unlike = True

    def __init__(self, name: str, take: Callable[[], Any], give: Callable[[Any], None], say: Callable[[str], None]):
        self.about = contents.about_registered(name)
        self._name, self._take, self._give, self._say = name, take, give, say

    def state(self, moment: Moment) -> Any:
        return self._take()

    def load(self, saved: Saved) -> None:
        if saved.state is None:
            return
        if saved.goes_on:
            self._give(saved.state)
        else:
            self._say(f"each rank had its own {self._name}: on another number of ranks, all begin with rank 0's")

    load_earlier = load


def unlike_integers(models: Sequence[nn.Module], say: Callable[[str], None]) -> Unlike:
    """Return the buffers that are no floating-point numbers, such as the position in a queue of samples."""

    def take() -> dict[str, Tensor]:
        return {
            name: buffer.tensor
            for name, buffer in buffers_of_models(models).items()
            # The counters of batch norm are the same everywhere.
            if buffer.saved and not buffer.tensor.is_floating_point() and not name.endswith(COUNTER)
        }

    def give(state: Mapping[str, Tensor]) -> None:
        buffers = take()
        for name, value in state.items():
            buffers[name].copy_(value)

    return Unlike("integer buffers", take, give, say)


def unlike_object(name: str, what: Any, say: Callable[[str], None]) -> Unlike:
    """Return a registered object; of a module, without running statistics, of which each rank has its own anyway."""

    def take() -> Any:
        if not isinstance(what, nn.Module):
            return what.state_dict()
        statistics = {buffer.data_ptr() for buffer in running_statistics([what])}
        return {key: held for key, held in contents.tensors_of(what).items() if held.data_ptr() not in statistics}

    def give(state: Any) -> None:
        contents.load_registered(
            name, what, contents.tensors_of(what) | state if isinstance(what, nn.Module) else state
        )

    return Unlike(name, take, give, say)
