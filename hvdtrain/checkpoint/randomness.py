"""Random numbers that a program draws itself, outside of `step.batches`: a resumed run draws the same.

The global generators of torch, Python and numpy, and those given to `Run.register`. Each rank has its own states. The code
at the head of an epoch runs again when an epoch is resumed, so a checkpoint has two of each: the state with which the epoch
began, and the one with which the steps go on.
"""

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.checkpoint.own import Moment, Provider, Saved
from hvdtrain.checkpoint.sums import digest_of_values
from hvdtrain.engines import collectives
from hvdtrain.engines.base import Engine
from hvdtrain.engines.portable import difference_of_values
from hvdtrain.inputs.sharding import mixed_seed, seed_generators

GeneratorStates = dict[str, Any]  # by the name of the generator
Pair = tuple[GeneratorStates, GeneratorStates]  # at the beginning of the epoch, and after the last step
SPAWNED = "n_children_spawned"  # numpy counts those that `spawn` has returned beside the state
GLOBAL = "global "  # prefix; with a space, so that no name in `Run.register` has it


def is_generator(what: object) -> bool:
    """Return whether `what` is a generator of torch, Python or numpy whose state can be saved."""
    if isinstance(what, (torch.Generator, random.Random)):
        # Those numbers come from the kernel, and have no state.
        return not isinstance(what, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(what, (numpy.random.Generator, numpy.random.RandomState))


def generator_state(generator: Any) -> Any:
    """Return the state of a generator, or of the modules `random` and `numpy.random`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "getstate"):
        version, words, gauss = generator.getstate()
        return [version, torch.tensor(words), gauss]
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    bits = generator.bit_generator
    return bits.state | {SPAWNED: getattr(getattr(bits, "seed_seq", None), SPAWNED, 0)}


def set_state(generator: Any, state: Any) -> None:
    """Set what `generator_state` has returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif hasattr(generator, "getstate"):
        version, words, gauss = state
        generator.setstate((version, tuple(words.tolist()), gauss))
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        bits = generator.bit_generator
        bits.state = {name: value for name, value in state.items() if name != SPAWNED}
        if (count := state.get(SPAWNED, 0)) and (more := count - bits.seed_seq.n_children_spawned) > 0:
            # numpy's count of spawned generators can only be moved by spawning.
            bits.seed_seq.spawn(more)


class Generators(Provider):
    """The generators of this rank. say: prints a line. keeps: whether there are checkpoints."""

    def __init__(self, engine: Engine, seed: int, say: Callable[[str], None], *, keeps: bool):
        self._engine, self._seed, self._say, self._keeps = engine, seed, say, keeps
        self.registered: dict[str, Any] = {}
        self._held: Pair | None = None  # of this rank in the checkpoint, until `begin`
        self._seeds_anew = False  # this rank is not in the checkpoint
        self._began: GeneratorStates | None = None  # when the current epoch began
        self._go_on: GeneratorStates | None = (
            None  # after the last step of an epoch; in a resumed epoch, before its first step
        )

    def _all(self) -> dict[str, Any]:
        generators: dict[str, Any] = {f"{GLOBAL}torch": torch.default_generator, f"{GLOBAL}random": random}
        if "numpy" in sys.modules:
            generators[f"{GLOBAL}numpy"] = sys.modules["numpy"].random
        if (device := self._engine.device).type == "cuda":
            generators[f"{GLOBAL}cuda"] = torch.cuda.default_generators[device.index or 0]
        return generators | self.registered

    def _states(self) -> GeneratorStates:
        return {name: generator_state(generator) for name, generator in self._all().items()}

    def _set(self, states: GeneratorStates) -> None:
        for name, generator in self._all().items():
            if name in states:
                set_state(generator, states[name])

    # ---- the places in a program between which it may draw

    def begin(self, samples: int) -> None:
        """Restore what the checkpoint has, before the first epoch. samples: done so far."""
        if self._seeds_anew:
            seed_generators(mixed_seed(self._seed, "generators", samples, self._engine.rank), self._engine.device)
            for name, generator in self.registered.items():
                reseed(generator, mixed_seed(self._seed, name, samples, self._engine.rank))
        if self._held is not None:
            began, self._go_on = self._held
            self._set(began)
        self._held, self._seeds_anew = None, False  # a second loop goes on with its own

    def leave_loop(self) -> None:
        """Restore the states of the last step, where a limit of steps has ended the loop that is resumed."""
        self._set(self._go_on or {})

    def begin_epoch(self) -> None:
        """Note the states at the head of an epoch."""
        if self._keeps:
            self._began = self._states()

    def begin_steps(self, samples_of_epoch: int) -> None:
        """Restore the states of the last step, in an epoch that is resumed."""
        if samples_of_epoch and self._go_on is not None:
            self._set(self._go_on)
        self._go_on = None

    def end_steps(self) -> None:
        """Note the states after the last step of an epoch."""
        if self._keeps:
            self._go_on = self._states()

    # ---- checkpoints

    def state(self, moment: Moment) -> Any:
        if self._began is None:  # an evaluation before the first epoch was stopped
            return self._held
        if moment.epoch_ended:
            return self._states(), {}
        return self._began, self._states() if moment.in_steps or self._go_on is None else self._go_on

    def is_common(self, *, many: bool) -> bool:
        return many

    def common(self, engine: Engine, moment: Moment) -> Any:
        """The states that all ranks have alike."""
        pair: Pair | None = self.state(moment)
        if pair is None:  # on every rank
            return None
        names = engine.broadcast_object(sorted(self._all()), "generators.names")
        # 15 hexadecimal digits are 60 bits: an int64, also with the other sign.
        hashes = [int(digest_of_values(states.get(name))[:15], 16) for states in pair for name in names]
        largest = torch.tensor([hashes, [-one for one in hashes]])
        engine.all_reduce_(largest, "max", "generators.alike")
        alike = [name for name, most, least in zip(names * 2, *largest.tolist(), strict=True) if most == -least]
        return tuple({name: state for name, state in states.items() if alike.count(name) == 2} for states in pair)

    def load(self, saved: Saved) -> None:
        """Keep what `begin` restores. A rank that is not in the checkpoint takes what all of its ranks had alike."""
        pairs: list[Pair] = list(saved.states)
        if any(pair is None for pair in pairs):
            return
        if saved.common:
            self._seeds_anew, self._held = True, pairs[0]
            what = "the mean of running statistics, and no random numbers of single ranks"
            self._say(f"a checkpoint of more than {collectives.MANY} ranks has {what}: the run continues with these")
            return
        if saved.rank < len(pairs):
            self._held = pairs[saved.rank]
        if saved.ranks_now <= len(pairs):
            return
        alike = [
            {
                name: state
                for name, state in states.items()
                if not any(difference_of_values(state, pair[which].get(name)) for pair in pairs)
            }
            for which, states in enumerate(pairs[0])
        ]
        if saved.rank >= len(pairs):
            self._seeds_anew, self._held = True, (alike[0], alike[1])
        unlike = [name for name in pairs[0][0] if name not in alike[0] and not name.startswith(GLOBAL)]
        if unlike:
            message = f"the checkpoint has {' and '.join(unlike)} of {len(pairs)} ranks, each another one"
            self._say(f"{message}: on the other ranks, they begin from new seeds")

    def load_earlier(self, saved: Saved) -> None:
        newest = self._held, self._seeds_anew
        self.load(saved)
        if self._held is not None:
            began, go_on = self._held
            self._set(go_on or began)  # after an epoch, there is one
        self._held, self._seeds_anew = newest


def reseed(generator: object, seed: int) -> None:
    """Seed a generator of torch, Python or numpy. Does nothing for another object."""
    numpy = sys.modules.get("numpy")
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif numpy is not None and isinstance(generator, numpy.random.Generator):
        # A Generator of numpy cannot be seeded again: it takes the state of a new one.
        kind = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    elif numpy is not None and isinstance(generator, numpy.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
