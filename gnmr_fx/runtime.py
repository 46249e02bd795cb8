"""The controller of a live model: where norms come from, when a step ends, and the guards it flips.

The decisions themselves are pure functions in :mod:`gnmr_fx.controller`. This is the glue, in the order of one step:

1. A guarded projection that runs in a forward sees to it that its weight carries a hook (sharding, unfreezing and the
   like may have put another parameter in place), and that a forward inside DDP is known as one. A unit whose weight is
   frozen listens to its adapters instead, or, where it has none, takes the norm of its output's gradient as it passes.
2. The hook on each unit's weight notes that its gradient was accumulated, and asks autograd for a callback at the end
   of that backward.
3. At the end of each backward, behind what others (DDP, FSDP2) do there, one fused call takes the norms of the
   accumulated gradients. They stay on the device. The last backward before the optimizer step counts: that is the
   gradient summed over micro-batches, and not yet clipped. Where an optimizer steps inside the backward, its units'
   norms are taken just before it does.
4. After the optimizer step the norms are moved to the host, summed over the ranks that train the same units, divided
   by the loss scale where a GradScaler drives the step, and decided on; the guards change there, and nowhere else.

An optimizer step that a GradScaler skips leaves norms that are not finite: they are reported as such with the next
step, as a risk and not as an entry of a history.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import math
import statistics
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gnmr_fx import distributed
from gnmr_fx.config import GnmrConfig
from gnmr_fx.controller import (
    MISSING,
    UNJUDGED,
    Decision,
    Verdict,
    check_costs,
    digest,
    init,
    state_from_dict,
    state_to_dict,
    update,
)
from gnmr_fx.costs import UNKNOWN, cost_of
from gnmr_fx.errors import GnmrWarning, RankMismatchError, StateMismatchError, UnknownUnitError
from gnmr_fx.frozen import FrozenWeight
from gnmr_fx.gemm import Spec
from gnmr_fx.gradients import NO_BACKWARD, Listener, OptimizerHook, WeightHooks, active_grad_scale, in_backward
from gnmr_fx.heard import Heard, Measured, Round, means, measured, root_means
from gnmr_fx.measure import Probe
from gnmr_fx.ops import remove_partitioner
from gnmr_fx.recipe import Recipe
from gnmr_fx.saved import Saver
from gnmr_fx.scope import AllSaved
from gnmr_fx.units import Handle, Memo, Unit, observers, register_observer, unregister_observer

STATE_VERSION = 3
_FOREIGN_STEPS_BEFORE_WARNING = 3
FORWARDS_BEFORE_WARNING = 1000
"""Forwards in training mode without a step of the controller after which it warns. Accumulating gradients over as many
micro-batches is the one way to get there with everything in order."""


class Event(NamedTuple):
    """A unit in a step in which it was risky, or went on or off the recovery path.

    ``outcome`` is ``"chosen"`` (on the recovery path from this step on), ``"refused"`` (risky or locked, but the budget
    went to others) or ``"released"`` (off the recovery path, and no longer a candidate). ``norm`` is the gradient norm
    (-1 where there was none), ratios are dimensionless, ``lock`` is in steps. ``changed`` says that the guard went the
    other way; ``forced``, that it was pinned by hand; ``first_non_finite``, that of the units whose norm is not finite
    in this step this one went so first: in the earliest backward, and there in the order of the backward, which is the
    reverse of that in which the forward ran them. (In a distributed run, as this rank saw it.) ``alpha`` and ``beta``
    are the thresholds in force. Under another signal than the default one its level and change stand in the place of
    ``gnmr`` and ``delta_gnmr``.
    """

    step: int
    unit: str
    norm: float
    gnmr: float
    delta_gnmr: float
    risk: float
    risky: bool
    outcome: Literal["chosen", "refused", "released"]
    lock: int
    changed: bool
    forced: bool
    first_non_finite: bool = False
    alpha: float = math.inf
    beta: float = math.inf

    @classmethod
    def of(cls, unit: str, verdict: Verdict, on: bool, **others: Any) -> Event:
        """The record of a verdict on ``unit``, which is ``on`` the recovery path from now on; ``others`` are fields."""
        return cls(
            unit=unit,
            norm=verdict.norm,
            gnmr=verdict.gnmr,
            delta_gnmr=verdict.delta_gnmr,
            risk=verdict.risk,
            risky=verdict.risky,
            outcome="chosen" if on else "refused" if verdict.candidate else "released",
            lock=verdict.lock,
            **others,
        )


class Site(NamedTuple):
    """A handle's place: ``getattr(module, attribute)`` is a handle of the unit of index ``unit``."""

    module: nn.Module
    attribute: str
    unit: int


class Controller:
    """Budgeted recovery of one model. Made by :func:`gnmr_fx.instrument`; got by :func:`gnmr_fx.controller`.

    Attributes:
        units: the recoverable units, in the order of ``flags``.
        flags: bool tensor [units] on the CPU, True = recovery path. Guards are views of it; read it, do not write it.
        events: records of risky and changed units, oldest first, at most ``config.max_events``.
        decision: the last :class:`gnmr_fx.controller.Decision`; None before the first step.
        scope: options of scope "all"; None where only what projections read is stored.
        probe: measures quantization errors, where the signal needs them.
        left_in_graph: for each compiled graph, by the indices of its units: what it keeps as it is, as JSON.
        trained: the model, whose optimizers are all listened to; None where units' weights tell which ones matter.
    """

    trained: nn.Module | None = None

    def __init__(
        self,
        units: Iterable[Unit],
        recipe: Recipe,
        config: GnmrConfig,
        max_active: int | float,
        seed: int = 0,
        scope: AllSaved | None = None,
    ) -> None:
        self.units: tuple[Unit, ...] = tuple(units)
        self.recipe = recipe
        self.config = config
        self.scope = scope
        self.saver = None if scope is None else Saver(scope)
        self.left_in_graph: dict[tuple[int, ...], str] = {}
        self.flags = torch.zeros(len(self.units), dtype=torch.bool)
        self.seed = torch.tensor(seed, dtype=torch.int64)
        self.memo = Memo()
        self.sites: list[Site] = []
        self.events: collections.deque[Event] = collections.deque(maxlen=config.max_events)
        self.decision: Decision | None = None
        self._state = init(len(self.units), config, max_active)
        self._unseen = list(self.units)  # units that never ran guarded, as far as is known
        self.probe = Probe(len(self.units))
        self._aim_probe()
        self._chosen = (False,) * len(self.units)  # the guards as decided, whether they are pinned by hand or not
        self._forced: tuple[bool, ...] | None = None
        self._counts: dict[str, int] = dict.fromkeys(
            ("events", "risky", "recovered", "refused", "switches", "most_active", "full", "non_finite"), 0
        )
        self._times_recovered = [0] * len(self.units)
        self._steps_recovered = [0] * len(self.units)
        self._seconds = 0.0
        self._optimizer_hooks: list[Any]
        self._costs_checked: bool
        self._order = [0] * len(self.units)
        self._clock = 0
        self._reset_step()
        self._detached()

    # What users read and call ----------------------------------------------------------------------------------------

    @property
    def max_active(self) -> int | float:
        """The budget: the most units on the recovery path in any step, or the most that these may cost in
        ``config.budget_unit``: a number, or a share (float) of what all units cost."""
        return self._state.max_active

    @property
    def step_count(self) -> int:
        """Optimizer steps seen."""
        return self._state.step

    @property
    def active(self) -> list[str]:
        """Names of the units on the recovery path now."""
        return [unit.name for unit, flag in zip(self.units, self.flags.tolist(), strict=True) if flag]

    @property
    def stats(self) -> dict[str, Any]:
        """Counts since the start: ``steps``, ``unit_steps``, ``risky`` / ``recovered`` / ``refused`` unit-steps,
        ``switches`` (guards that changed), ``most_active`` (most units at once), ``full`` (steps with the whole budget
        in use; for one that does not count units, in which it refused a unit), ``non_finite`` unit-steps,
        ``events``, ``events_dropped``, and ``seconds`` spent in the controller."""
        counts = self._counts
        return {
            "steps": self.step_count,
            "unit_steps": self.step_count * len(self.units),
            **counts,
            "events_dropped": max(0, counts["events"] - len(self.events)),
            "seconds": self._seconds,
        }

    @property
    def forced(self) -> bool:
        """Whether guards are pinned by :meth:`force`."""
        return self._forced is not None

    def times_recovered(self, index: int) -> int:
        """How often unit ``index`` went onto the recovery path."""
        return self._times_recovered[index]

    def steps_recovered(self, index: int) -> int:
        """In how many steps unit ``index`` was on the recovery path."""
        return self._steps_recovered[index]

    def step(self, grad_scale: float = 1.0) -> Decision:
        """End a step by hand, in a loop without a ``torch.optim`` optimizer. Call it after the weights were updated.

        With a torch optimizer this happens by itself, once per optimizer step. Norms are those at the end of the last
        backward; units whose gradient has not arrived since the last step count as missing. In a distributed run every
        rank has to call it.

        Args:
            grad_scale: what the loss was multiplied with before the backward.

        Raises:
            RankMismatchError: where ranks that train the same units disagree on what they run.
            BudgetError: where a budget in bytes or operations turns out to be too small for any unit.
        """
        decision = self._tick(grad_scale, by_hand=True)
        assert decision is not None
        return decision

    def _tick(self, grad_scale: float, by_hand: bool = False) -> Decision | None:
        """One step; None where, of several ranks, none has heard of a gradient."""
        start = time.perf_counter()
        if distributed.is_running():  # a shard may have taken the place of the weight that ran
            self._attach_hooks()
        groups = self._company()
        heard = self._heard(grad_scale, groups)
        if groups and not by_hand and all(norm == MISSING for norm in heard.norms):
            return None
        if heard.costs is not None and not self._costs_checked:
            check_costs(self.max_active, heard.costs, self.config.budget_unit)
            self._costs_checked = any(cost > 0.0 for cost in heard.costs)
        flags = self.flags.tolist()
        self._state, decision = update(
            self._state, heard.norms, self.config, errors=heard.errors, costs=heard.costs, recovered=flags
        )
        self._chosen = self._state.recovered
        target = self._chosen if self._forced is None else self._forced
        self._count(decision, target)
        self._apply(target, flags, decision)
        self.decision = decision
        if self.recipe.is_stochastic:
            self.seed.add_(1)
        self.memo.clear()
        self._aim_probe()
        self._reset_step()
        self._seconds += time.perf_counter() - start
        return decision

    def costs(self) -> list[float]:
        """What each unit costs on the recovery path, on this rank and by its last pass, in ``config.budget_unit``
        (bytes where that is units); negative where that is not known. Of a frozen weight the bytes of the exact one."""
        if self.recipe.frozen is not None:
            weights = (FrozenWeight.held_by(u.module, u.spec.parameter) for u in self.units)
            return [UNKNOWN if w is None else float(w.store.residual.nbytes) for w in weights]
        low, high, unit = self.recipe.low, self.recipe.high, self.config.budget_unit
        return [cost_of(u, low, high, "bytes" if unit == "units" else unit) for u in self.units]

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Forwards and gradients inside leave no trace here, and guards may be set at will: for measurements."""
        flags, seed = self.flags.clone(), int(self.seed)
        names = ("_round", "_seconds", "_clock", "_order", "_heard_since_foreign_step", "_warned_idle", "_last_group")
        kept = {name: copy.copy(self.__dict__[name]) for name in names}
        graphs, observations = dict(self.left_in_graph), [copy.copy(unit.observation) for unit in self.units]
        probe, self.probe = self.probe, Probe(len(self.units))
        for unit in self.units:
            unit.observation.calls, unit.observation.last = {}, dict(unit.observation.last)
        self._reset_step()
        self.memo.clear()
        try:
            yield
        finally:
            self.flags.copy_(flags)
            self.seed.fill_(seed)
            self.__dict__.update(kept)
            self.left_in_graph, self.probe = graphs, probe
            for unit, observation in zip(self.units, observations, strict=True):
                unit.observation.restore(observation)
            self.memo.clear()

    def force(self, which: Literal["high", "low"] | Iterable[str] | None) -> None:
        """Pin the guards, budget or not, for debugging and reference runs; ``None`` gives them back to the controller.

        Args:
            which: ``"high"`` or ``"low"`` for all units, or names of the units to put on the recovery path.

        Raises:
            UnknownUnitError: for a name that is no unit's.
        """
        if which is None:
            self._forced = None
            self._apply(self._chosen, self.flags.tolist(), self.decision, by_hand=True)
            return
        if isinstance(which, str) and which in ("high", "low"):
            self._forced = (which == "high",) * len(self.units)
        else:
            names = [which] if isinstance(which, str) else list(which)
            index = {unit.name: unit.index for unit in self.units}
            unknown = [name for name in names if name not in index]
            if unknown:
                raise UnknownUnitError(
                    f"expected 'high', 'low', None or names of units, found {unknown[0]!r}; "
                    f"units are {', '.join(list(index)[:5])}{', ...' if len(index) > 5 else ''}"
                )
            self._forced = tuple(unit.name in names for unit in self.units)
        self._apply(self._forced, self.flags.tolist(), self.decision, by_hand=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to decide as this one would: tensors, numbers and strings only.

        Take it after the optimizer step: norms of a gradient that is still being accumulated are not part of it. The
        same on all ranks of a distributed run, the seed of stochastic rounding apart if ``torch.initial_seed`` is.
        """
        return {
            "version": STATE_VERSION,
            "units": [unit.name for unit in self.units],
            "rules": state_to_dict(self._state),
            "flags": torch.tensor(self._chosen),
            "seed": int(self.seed),
            "counts": dict(self._counts),
            "seconds": self._seconds,
            "times_recovered": torch.tensor(self._times_recovered),
            "steps_recovered": torch.tensor(self._steps_recovered),
            "seen": torch.tensor([unit.observation.seen for unit in self.units], dtype=torch.bool),
            "went_non_finite": self._round.first_bad() > 0,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`. Nothing changes if it does not fit.

        Raises:
            StateMismatchError: for a state of another version, of other units or of another configuration.
        """
        version = state.get("version")
        if version != STATE_VERSION:
            raise StateMismatchError(
                f"expected a controller state of version {STATE_VERSION}, found {version!r}; "
                "pass what controller(model).state_dict() returned under this version of gnmr-fx"
            )
        absent = [name for name in self.state_dict() if name not in state]
        if absent:
            raise StateMismatchError(
                f"expected a controller state with {', '.join(absent)}, found only {', '.join(map(str, state))}; "
                "pass what controller(model).state_dict() returned, whole"
            )
        names = [unit.name for unit in self.units]
        if list(state["units"]) != names:
            missing = [n for n in names if n not in state["units"]]
            extra = [n for n in state["units"] if n not in names]
            raise StateMismatchError(
                f"expected a state of this model's {len(names)} units, found one of {len(state['units'])} units "
                f"(not in the state: {missing[:3] or 'none'}; not in the model: {extra[:3] or 'none'}); instrument the "
                "model with the same include and exclude as the run that was saved"
            )
        flags, times, steps, seen, bad = (
            _vector(name, state[name], dtype, len(names))
            for name, dtype in (
                ("flags", torch.bool),
                ("times_recovered", torch.int64),
                ("steps_recovered", torch.int64),
                ("seen", torch.bool),
                ("went_non_finite", torch.bool),
            )
        )
        loaded = state_from_dict(state["rules"], self.config, self.max_active, len(names))
        self._state = loaded
        self._aim_probe()
        self.seed.fill_(state["seed"])
        self._counts = dict(state["counts"])
        self._seconds = float(state["seconds"])
        kept = [event for event in self.events if event.step <= loaded.step]  # no records of a future given up
        self.events = collections.deque(kept, maxlen=self.config.max_events)
        self._times_recovered, self._steps_recovered = times.tolist(), steps.tolist()
        for unit, was_seen in zip(self.units, seen.tolist(), strict=True):
            unit.observation.was_seen |= was_seen
        self._reset_step()
        if bad.any():  # norms of a step that a GradScaler skipped
            self._round.went_bad, self._round.backwards = {bad.device: bad.int()}, 1
        self.decision = None
        self._chosen = tuple(flags.tolist())
        self._set_flags(self._chosen if self._forced is None else self._forced)

    # Guards ----------------------------------------------------------------------------------------------------------

    def handle(self, index: int) -> Handle:
        """A new handle of unit ``index``, connected to its guard."""
        recipe = self.recipe
        seed = self.seed if recipe.is_stochastic else None
        low, high = str(recipe.low), str(recipe.high)
        gemms = None if recipe.gemm is None else (Spec.of(recipe.gemm), Spec.of_eval(recipe.gemm))
        observation = self.units[index].observation
        return Handle(
            self.flags[index], seed, low, high, self.memo, observation, self.scope, self.saver, gemms, recipe.frozen
        )

    def connect(self) -> None:
        """Give every site its handle and start listening to gradients and optimizer steps."""
        for site in self.sites:
            object.__setattr__(site.module, site.attribute, self.handle(site.unit))
        if self.saver is not None:
            self.saver.first = self.handle(0)
        register_observer(self.flags, self)
        reference: weakref.ref[Listener] = weakref.ref(self)
        self._optimizer_hooks = [
            register_optimizer_step_pre_hook(OptimizerHook(reference, before=True)),
            register_optimizer_step_post_hook(OptimizerHook(reference, before=False)),
        ]
        for hook in self._optimizer_hooks:
            weakref.finalize(self, hook.remove)
        self._attach_hooks()
        self._place_weights()

    def disconnect(self) -> None:
        """Undo :meth:`connect`."""
        for site in self.sites:
            site.module.__dict__.pop(site.attribute, None)
        unregister_observer(self.flags)
        if self.scope is not None and not any(other.scope is not None for other in observers()):
            remove_partitioner()
        for hook in self._optimizer_hooks:
            hook.remove()
        self._hooks.remove()
        self._detached()

    def _detached(self) -> None:
        self._optimizer_hooks = []
        self._hooks = WeightHooks(len(self.units))
        self._stepped: set[int] = set()  # ids of the optimizers that stepped with the controller's last step or since
        self._last_group: distributed.ProcessGroup | None = None
        self._groups: tuple[Any, tuple[distributed.ProcessGroup, ...]] = (None, ())
        self._agreed: tuple[distributed.ProcessGroup, ...] = ()
        self._costs_checked = False
        self._foreign_steps = 0
        self._heard_since_foreign_step = False
        self._warned_foreign = False
        self._warned_idle = False

    # Forwards --------------------------------------------------------------------------------------------------------

    def projection_ran(self, index: int, counts: bool = True) -> None:
        """Called whenever unit ``index`` runs guarded: by a forward, or by a recomputation inside a backward.

        ``counts`` says whether a backward may follow.
        """
        task, now = torch._C._current_graph_task_id(), self._round
        if now.due and task != now.recomputed_in:
            self._tick(1.0)
            now = self._round
        if task != NO_BACKWARD:
            now.recomputed_in = task
            return
        if not counts:
            return
        unit = self.units[index]
        if unit.adapters is not None:
            if not now.calls[index]:  # adapters take a walk over modules to find
                self._listen(unit)
        elif unit.module._parameters.get(unit.spec.parameter) is not self._hooks.latest(index):
            self._listen(unit)
        self._clock += 1
        self._order[index] = self._clock
        if now.group is None:
            now.group = distributed.data_parallel_group()
        now.calls[index] += 1
        if now.calls[index] % FORWARDS_BEFORE_WARNING == 0 and not self._warned_idle:
            self._warn_idle()

    def _warn_idle(self) -> None:
        # Some units may run several times in a forward, others in few of them: as many as the unit in the middle.
        forwards = statistics.median_high(calls for calls in self._round.calls if calls)
        if forwards < FORWARDS_BEFORE_WARNING:
            return
        self._warned_idle = True
        if not self._round.backwards:
            why = (
                "no gradient arrived at the units' weights: backward() has to reach them (torch.autograd.grad leaves "
                "none there); run forwards that are not for training under torch.no_grad() or in eval()"
            )
        elif self._foreign_steps:
            why = "no optimizer that made a step holds their weights; build it from model.parameters()"
        else:
            why = (
                "gradients arrived, but no torch.optim optimizer that holds the units' weights made a step; without "
                "one, call gnmr_fx.controller(model).step() after each update (nothing is wrong if you accumulate "
                "gradients over this many micro-batches)"
            )
        warnings.warn(
            f"expected a step of the controller at least every {FORWARDS_BEFORE_WARNING} forwards in training mode, "
            f"found none in the last {forwards}, so no guard changes: {why}",
            GnmrWarning,
            stacklevel=2,
        )

    # Gradients -------------------------------------------------------------------------------------------------------

    def _attach_hooks(self) -> None:
        """Hook the weights as the modules hold them now: moving, wrapping and sharding may have replaced them."""
        for unit in self.units:
            self._listen(unit)

    def _listen(self, unit: Unit) -> None:
        heard = unit.heard()
        for parameter in heard:
            if not self._hooks.covers(unit.index, parameter):
                self._attach_hook(unit.index, parameter, len(heard))

    def _attach_hook(self, index: int, weight: Tensor, weights: int = 1) -> None:
        if weight.requires_grad and weight.is_leaf:
            self._hooks.attach(index, weight, weakref.ref(self), weights)

    def _aim_probe(self) -> None:
        """Measure errors in the step to come, if it is time to."""
        measurements, rest = divmod(self.step_count, self.config.signal_every)
        self.probe.reset(self.config.measures_errors and rest == 0, offset=measurements)

    def _reset_step(self) -> None:
        self._round = Round([0] * len(self.units))

    def gradient_arrived(self, index: int, weight: Tensor) -> None:
        """Called by the hook on the weight of unit ``index``, during a backward."""
        self._round.arrived[index] = weight
        self._await_end()

    def output_gradient(self, index: int, gradient: Tensor) -> None:
        """Called in a backward with the gradient of the output of unit ``index``, a frozen projection."""
        if self.units[index].spec.signal != "output":
            return
        self._round.output_gradient(index, gradient)
        self._await_end()

    def _await_end(self) -> None:
        """See to it that the end of the backward under way is heard."""
        now, task = self._round, torch._C._current_graph_task_id()
        if now.open_in != task:  # else its end is waited for already; an earlier one that failed has no end
            now.open_in = task
            # DDP queues its own callback after this one and only there finishes the gradients: queue behind it.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._backward_ended))

    def _backward_ended(self) -> None:
        start = time.perf_counter()
        now = self._round
        now.open_in = None
        self._heard_since_foreign_step = True
        now.backward_ended(self._gradients())
        for unit in self.units:
            unit.observation.close()
        self._seconds += time.perf_counter() - start
        if now.stepped_inside:
            # Inside another backward (reentrant checkpointing) guards must not change yet.
            if torch._C._current_autograd_node() is None:
                self._tick(1.0)
            else:
                now.due = True

    def _gradients(self) -> Iterator[tuple[int, Tensor]]:
        """The accumulated gradients that units listen to, by unit, as the optimizer will see them."""
        early = self._round.early
        for index in sorted(self._round.arrived):
            unit = self.units[index]
            if unit.adapters is not None:
                for parameter in unit.heard():
                    if parameter.grad is not None and (index, id(parameter)) not in early:
                        yield index, parameter.grad
            elif (index, 0) not in early:
                gradient = self._gradient(index)
                if gradient is not None:
                    yield index, gradient

    def _gradient(self, index: int) -> Tensor | None:
        """The accumulated gradient of a unit's weight.

        Of FSDP2's two parameters for one weight the gradient ends at the shard, which may not have had a hook yet.
        """
        arrived = self._round.arrived[index].grad
        if arrived is not None:
            return arrived
        held = self.units[index].parameter
        if held is None:
            return None
        if held.grad is not None and not self._hooks.covers(index, held):
            self._attach_hook(index, held)
        return held.grad

    def _heard(self, grad_scale: float, groups: tuple[distributed.ProcessGroup, ...]) -> Heard:
        """What the decision rests on: norms are ``MISSING`` where there is no gradient."""
        heard = self._heard_together(groups) if groups else self._heard_alone()
        if grad_scale == 1.0:
            return heard
        # Of what a scale of 0 has scaled nothing is known.
        exact = [norm / grad_scale if grad_scale else math.inf for norm in heard.norms]
        return heard._replace(
            norms=[MISSING if old < 0.0 else new for new, old in zip(exact, heard.norms, strict=True)]
        )

    def _heard_alone(self) -> Heard:
        """What this rank heard."""
        norms = self._round.norms()
        self._unseen = [unit for unit in self._unseen if not unit.observation.seen]
        for unit in self._unseen:
            norms[unit.index] = MISSING
        return Heard(
            norms,
            root_means(self.probe.sums(torch.device("cpu")).tolist()) if self.probe.is_open else None,
            None if self.config.budget_unit == "units" else self.costs(),
        )

    def _heard_together(self, groups: tuple[distributed.ProcessGroup, ...]) -> Heard:
        """What all ranks of the groups heard, by one sum over them."""
        now, count = self._round, len(self.units)
        heard_of: Iterable[Measured | Tensor] = now.pending or self._hooks.weights()
        device = distributed.device_for(groups, next(iter(heard_of), self.flags).device)
        self._agree(groups, device)
        # Rows: squared norms, how many ranks have one, how many have seen the unit run; if they matter, squared errors
        # and how many there are, costs and how many ranks know one. The last column tells whether all ranks are in the
        # same state.
        measuring, priced = self.probe.is_open, self.config.budget_unit != "units"
        table = torch.zeros(3 + 2 * measuring + 2 * priced, count + 1, dtype=torch.float64, device=device)
        for found in now.pending:
            values = found.norms.to(device, torch.float64).square() * torch.tensor(found.shards, device=device)
            at = torch.tensor(found.indices, device=device)
            table[0].index_add_(0, at, values)
            table[1, at] = 1.0
        for bad in now.went_bad.values():
            ever = (bad > 0).to(device)
            table[0, :count].masked_fill_(ever, math.inf)
            table[1, :count].masked_fill_(ever, 1.0)
        table[0].nan_to_num_(nan=math.inf, posinf=math.inf)
        table[2, :count] = torch.tensor([unit.observation.seen for unit in self.units], device=device)
        if measuring:
            table[3:5, :count] = self.probe.sums(device).nan_to_num_(nan=math.inf, posinf=math.inf)
        if priced:
            costs = torch.tensor(self.costs(), dtype=torch.float64, device=device)
            table[-2, :count], table[-1, :count] = costs.clamp(min=0.0), costs >= 0
        own = self._digest()
        table[0, count], table[1, count] = own, 1.0
        rows = distributed.sum_over(groups, table).tolist()
        if rows[0][count] != own * rows[1][count]:
            raise RankMismatchError(
                f"expected the same state of the controller on all ranks, found others than this rank's, which "
                f"is at step {self.step_count}; load the same controller state on every rank, and let every rank "
                "make the same optimizer steps"
            )
        rows = [row[:count] for row in rows]
        return Heard(
            [norm if seen else MISSING for norm, seen in zip(root_means(rows[:2]), rows[2], strict=True)],
            root_means(rows[3:5]) if measuring else None,
            means(rows[-2:]) if priced else None,
        )

    def _first_non_finite(self, decision: Decision) -> int | None:
        """The unit that went non-finite first in this step; None where all norms are finite."""
        broken = [index for index, verdict in enumerate(decision.units) if verdict.norm == math.inf]
        if not broken:
            return None
        first = self._round.first_bad().tolist()
        last = self._round.backwards + 1  # where another rank saw it, and this one did not
        return min(broken, key=lambda index: (first[index] or last, -self._order[index]))

    # Other ranks -----------------------------------------------------------------------------------------------------

    def _company(self) -> tuple[distributed.ProcessGroup, ...]:
        """Groups of the ranks that train the same units; empty in a run of one process."""
        now = self._round
        data_parallel = now.group if now.group is not None or any(now.calls) else self._last_group
        self._last_group = data_parallel
        key = (self._hooks.version, data_parallel)
        if self._groups[0] != key:
            self._groups = (key, distributed.groups_of(self._hooks.weights(), data_parallel))
        return self._groups[1]

    def _agree(self, groups: tuple[distributed.ProcessGroup, ...], device: torch.device) -> None:
        """Compare, once, what the ranks run: later steps rely on tables of the same size."""
        if groups != self._agreed:
            distributed.check_agreement(self._fingerprint(), groups, device)
            self._agreed = groups

    def _fingerprint(self) -> distributed.Fingerprint:
        config = {name: _comparable(getattr(self.config, name)) for name in self.config.__dataclass_fields__}
        return distributed.Fingerprint(
            {
                "units": str([(unit.name, unit.spec.operator, unit.spec.shape) for unit in self.units]),
                "recipe": repr(self.recipe),
                "scope": "projections" if self.scope is None else str(self.scope),
                "max_active": str(self.max_active),
                "config": str(config),
                "state": f"step {self.step_count}, digest {self._digest()}",
            }
        )

    def _digest(self) -> int:
        """A number that differs where the state that decisions depend on does."""
        return distributed.digest(digest(self._state).to_bytes(8, "big"))

    # Optimizers ------------------------------------------------------------------------------------------------------

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before every step of any ``torch.optim`` optimizer in the process."""
        if not in_backward():
            return
        for parameter in _parameters(optimizer):
            for index in self._hooks.units_of(parameter):
                if parameter.grad is not None:
                    key = (index, 0 if self.units[index].adapters is None else id(parameter))
                    (self._round.early[key],) = measured([(index, parameter.grad)])

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after every step of any ``torch.optim`` optimizer in the process."""
        if in_backward():
            self._round.stepped_inside = self._round.stepped_inside or self._owns(optimizer)
            return
        if not self._round.pending:
            self._attach_hooks()  # weights may have been unfrozen or replaced: be there for their next backward
            if not self._owns(optimizer):
                if self._round.arrived:  # and went elsewhere: FSDP2's shards were never to be seen
                    self._foreign_step(optimizer)
                return
            # Without company: another optimizer of the step that was ticked already, or no gradient. Other ranks may
            # have a gradient where this one has none, and wait for it if this optimizer begins the next step.
            begins = id(optimizer) in self._stepped and bool(self._company())
            self._stepped.add(id(optimizer))
            if not begins:
                return
        elif not self._owns(optimizer):
            self._foreign_step(optimizer)
            return
        self._stepped = {id(optimizer)}
        self._foreign_steps = 0
        self._tick(active_grad_scale())

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        if any(self._hooks.units_of(parameter) for parameter in _parameters(optimizer)):
            return True
        if self.trained is None:
            return False
        own = {id(parameter) for parameter in self.trained.parameters() if parameter.requires_grad}
        return any(id(parameter) in own for parameter in _parameters(optimizer))

    def _foreign_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Only steps between which gradients arrived: another model's optimizer is none of this one's business.
        self._foreign_steps += self._heard_since_foreign_step
        self._heard_since_foreign_step = False
        if self._foreign_steps >= _FOREIGN_STEPS_BEFORE_WARNING and not self._warned_foreign:
            self._warned_foreign = True
            warnings.warn(
                f"expected an optimizer that holds the weights of the {len(self.units)} recoverable units, found "
                f"{self._foreign_steps} steps of {type(optimizer).__name__} with none of them while gradients arrived; "
                "the controller does not tick: build the optimizer from model.parameters(); if FSDP2 never reshards "
                "after the backward, call gnmr_fx.instrument after fully_shard; without an optimizer of torch.optim, "
                "call gnmr_fx.controller(model).step() after each update",
                GnmrWarning,
                stacklevel=2,
            )

    # Records ---------------------------------------------------------------------------------------------------------

    def _count(self, decision: Decision, target: Sequence[bool]) -> None:
        counts, refused = self._counts, 0
        for verdict in decision.units:
            counts["risky"] += verdict.risky
            counts["non_finite"] += verdict.norm == math.inf
            refused += verdict.refused
        recovered = [index for index, high in enumerate(target) if high]
        for index in recovered:
            self._steps_recovered[index] += 1
        counts["refused"] += refused
        counts["recovered"] += len(recovered)
        counts["most_active"] = max(counts["most_active"], len(recovered))
        if self.config.budget_unit == "units":
            counts["full"] += len(recovered) == min(self.max_active, len(self.units))
        else:
            counts["full"] += refused > 0

    def _apply(
        self, target: Sequence[bool], flags: Sequence[bool], decision: Decision | None, by_hand: bool = False
    ) -> None:
        """Set the guards from ``flags`` to ``target``, and record changes and, if not made by hand, risks."""
        verdicts = (UNJUDGED,) * len(target) if decision is None else decision.units
        changed = [index for index, (new, old) in enumerate(zip(target, flags, strict=True)) if new != old]
        if by_hand:
            told, first = changed, None
            verdicts = tuple(verdict._replace(norm=MISSING, risky=False) for verdict in verdicts)
        else:
            told = [i for i, verdict in enumerate(verdicts) if verdict.risky or target[i] != flags[i]]
            first = self._first_non_finite(decision) if told and decision is not None else None
        for index in told:
            event = Event.of(
                self.units[index].name,
                verdicts[index],
                target[index],
                step=self.step_count,
                changed=target[index] != flags[index],
                forced=self.forced,
                first_non_finite=index == first,
                alpha=math.inf if decision is None else decision.alpha,
                beta=math.inf if decision is None else decision.beta,
            )
            self._counts["events"] += 1
            self.events.append(event)
        for index in changed:
            self._times_recovered[index] += target[index]
        if changed:
            self._counts["switches"] += len(changed)
            self._set_flags(target)

    def _set_flags(self, target: Sequence[bool]) -> None:
        self.flags.copy_(torch.tensor(target))
        self._place_weights()

    def _place_weights(self) -> None:
        """Bring the exact weights of the units on the recovery path to their device, and let go of all others."""
        if self.recipe.frozen is None:
            return
        for unit, high in zip(self.units, self.flags.tolist(), strict=True):
            weight = FrozenWeight.held_by(unit.module, unit.spec.parameter)
            if weight is not None:
                weight.store.recover() if high else weight.store.release()

    # Copies ----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_optimizer_hooks", "_hooks", "_round", "_last_group", "_groups", "_agreed"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._detached()
        self._reset_step()
        # The model's modules are complete by now: they hold no reference to the controller, and the root module lists
        # its children before it.
        self.connect()
        self.reinstall()

    def reinstall(self) -> None:
        """Put the generated forwards of a copy in place; set up by :mod:`gnmr_fx.instrument`."""


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _comparable(value: Any) -> str:
    """A text for a value of a configuration; of a schedule its name, as its address differs between processes."""
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)


def _vector(name: str, value: Any, dtype: torch.dtype, length: int) -> Tensor:
    """A copy, on the host, of an entry of a saved state."""
    if not isinstance(value, Tensor) or value.shape != (length,) or value.dtype != dtype:
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise StateMismatchError(
            f"{name} of the saved state: expected a {dtype} tensor of shape {(length,)}, found {found}; "
            "pass what controller(model).state_dict() returned, unchanged"
        )
    return value.detach().to("cpu", copy=True)
