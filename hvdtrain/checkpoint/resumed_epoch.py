"""An epoch that is resumed: what the program does at its head, and in its tail up to an evaluation in which the run was
stopped, is done again, and was in the checkpoint.

So the states of the checkpoint are noted before the head, and put back when the steps go on, and again when the program
comes to that evaluation.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from hvdtrain.checkpoint import contents
from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.checkpoint.objects import GroupSettings, settings_of
from hvdtrain.checkpoint.own import Modes, Moment, extra_state, load_extra_state
from hvdtrain.engines.collectives import load_exactly
from hvdtrain.engines.portable import difference_of_values, from_json, to_json
from hvdtrain.loop.prepare import Prepared
from hvdtrain.loop.state import TrainState

Groups = list[dict[str, Any]]  # of an optimizer
Changed = list[list[Any]]  # JSON: optimizer, group, name of a setting, its value before the epoch's head, and after it


class States:
    """The states of this rank's models, optimizers and registered objects at one moment."""

    def __init__(self, prepared: Prepared, registered: Mapping[str, Any]):
        self._optimizers = prepared.optimizers
        self._others = {name: one for name, one in registered.items() if not isinstance(one, nn.Module)}
        modules = [*prepared.models, *(one for one in registered.values() if isinstance(one, nn.Module))]
        self._tensors = [(one, one.clone()) for module in modules for one in contents.tensors_of(module).values()]
        self._extra = [(module, copy.deepcopy(held)) for module in modules if (held := extra_state(module))]
        # A state_dict has the tensors of the optimizer themselves, which the program is about to change.
        self._of_optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in self._optimizers]
        self._of_others = {name: copy.deepcopy(one.state_dict()) for name, one in self._others.items()}

    def put_back(self, groups_of: Callable[[int, Groups], Groups] = lambda number, held: held) -> None:
        """Give all objects these states. groups_of: returns the settings that an optimizer gets, by its number."""
        with torch.no_grad():
            for tensor, before in self._tensors:
                tensor.copy_(before)
        for module, extra in self._extra:
            if difference_of_values(extra, extra_state(module)):
                load_extra_state(module, extra)
        for number, (optimizer, held) in enumerate(zip(self._optimizers, self._of_optimizers, strict=True)):
            wanted = held | {name: groups_of(number, groups) for name, groups in held.items() if name == "param_groups"}
            if difference_of_values(wanted, optimizer.state_dict()):
                load_exactly(optimizer, wanted)
        for name, state in self._of_others.items():
            if difference_of_values(state, self._others[name].state_dict()):
                self._others[name].load_state_dict(state)


class ResumedEpoch:
    """The states of this rank's objects at the places of a program where an epoch may go on. No method is a collective."""

    def __init__(
        self, prepared: Prepared, registered: dict[str, Any], facts: Facts | None, modes: Modes, *, lengthened: bool
    ):  # fmt: skip
        """registered: objects by name, also later ones. facts: of the checkpoint that is resumed. lengthened: with another
        number of epochs or steps."""
        self._prepared, self._optimizers, self._registered = prepared, prepared.optimizers, registered
        self.modes, self._lengthened = modes, lengthened
        facts = facts or {}
        self._changed: Changed | None = facts.get("head", [])  # None: it follows from the settings
        self._stopped_in: int = facts.get("evaluation", 0)  # the evaluation of the epoch, from 1; 0: none
        self._before: GroupSettings = []
        self._after: GroupSettings | None = None
        self._states: States | None = None  # None: nothing is noted
        self._begins = False  # nothing of the epoch has run yet
        self._evaluations = 0  # of this epoch, outside of its steps

    def note(self, state: TrainState) -> None:
        """Note all states as of the last step, before the program comes to the head of the epoch, if that is resumed."""
        self.modes.begin(state.step)
        if not state.samples_of_epoch and not self._stopped_in:
            return
        self._begins, self._states = True, States(self._prepared, self._registered)
        # The head runs again, and would apply a relative change, such as a halved rate, a second time.
        for number, group, name, before, _ in self._changed or () if self._lengthened else ():
            if not self._is_scheduled(self._optimizers[number]):
                self._optimizers[number].param_groups[group][name] = from_json(before)

    def begin_head(self) -> None:
        """Note the settings with which an epoch begins, unless it is the one that is resumed."""
        if not self._begins:
            self._forget()
            self._before, self._after, self._changed = settings_of(self._optimizers), None, None
        self._begins, self._evaluations = False, 0

    def begin_steps(self, state: TrainState) -> None:
        """Undo what the head of an epoch that is resumed has changed."""
        if self._states is None:
            self._after = settings_of(self._optimizers)
        elif state.samples_of_epoch:
            self._put_back()
            if not self._stopped_in:
                self._forget()

    def evaluates(self, *, again: bool) -> None:
        """Undo the same, and what the tail has changed, if the run was stopped in this evaluation of the epoch. again: an
        epoch that is resumed has this evaluation again, as it is not in its steps."""
        self._evaluations += again
        if again and self._evaluations == self._stopped_in:
            self._put_back()
            self._forget()

    def stops(self, in_epoch: bool) -> Moment:
        """Return which evaluation this is, for a checkpoint. Until the one in which the run was stopped before, it is that
        one, also before the loop, and its states are put back."""
        if not in_epoch:
            return Moment(outside=True, evaluation=self._stopped_in)
        self._put_back()
        return Moment(evaluation=self._stopped_in or self._evaluations)

    def _forget(self) -> None:
        self._states, self._stopped_in = None, 0

    def changed_at_head(self) -> Changed:
        """Return the settings of optimizers that the head of this epoch has changed, for a checkpoint."""
        if self._changed is not None:
            return self._changed
        after = settings_of(self._optimizers) if self._after is None else self._after
        return [
            [number, place, name, to_json(group[name]), to_json(later[name])]
            for number, (groups, later_groups) in enumerate(zip(self._before, after, strict=True))
            for place, (group, later) in enumerate(zip(groups, later_groups, strict=False))
            for name in group.keys() & later.keys()
            if group[name] is not later[name] and difference_of_values(group[name], later[name])
        ]

    def _put_back(self) -> None:
        """Give all objects the states that were noted, if there are some."""
        if self._states is not None:
            self.modes.set()
            self._states.put_back(self._with_the_new_end)

    def _with_the_new_end(self, number: int, held: Groups) -> Groups:
        """Return the settings of an optimizer. Where a rate may follow the new end of the run, those that the head has just
        set, unless it has set the same when the epoch began, from the same."""
        if not self._lengthened or self._is_scheduled(self._optimizers[number]):
            return held
        groups: Groups = self._optimizers[number].state_dict()["param_groups"]
        for of, place, name, _, after in self._changed or ():
            if of == number and to_json(groups[place][name]) == after:
                groups[place][name] = held[place][name]
        return groups

    def _is_scheduled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a registered scheduler has brought the optimizer's rates to where they are."""
        schedulers = (w for w in self._registered.values() if isinstance(w, lr_scheduler.LRScheduler))
        return any(one.optimizer is optimizer for one in schedulers)
