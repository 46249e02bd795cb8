"""The controller of a live model: where norms come from, when a step ends, and the guards it flips.

The decisions themselves are pure functions in :mod:`gnmr_fx.controller`. This is the glue, in the order of one step:

1. A hook on each unit's weight notes that its gradient was accumulated, and asks autograd for a callback at the end of
   that backward.
2. At the end of each backward, behind what others (DDP) do there, one fused call takes the norms of the accumulated
   gradients. They stay on the device. The last backward before the optimizer step counts: that is the gradient summed
   over micro-batches, and not yet clipped.
3. After the optimizer step the norms are moved to the host, divided by the loss scale where a GradScaler drives the
   step, and decided on; the guards change there, and nowhere else.

An optimizer step that a GradScaler skips leaves norms that are not finite: they are reported as such with the next
step, as a risk and not as an entry of a history.
"""

from __future__ import annotations

import collections
import math
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook

from gnmr_fx.config import GnmrConfig
from gnmr_fx.controller import MISSING, Decision, init, state_from_dict, state_to_dict, update
from gnmr_fx.errors import GnmrWarning, StateMismatchError, UnknownUnitError
from gnmr_fx.gradients import GradientHook, Listener, OptimizerHook, active_grad_scale, gradient_norms, remove_hook
from gnmr_fx.ops import remove_partitioner
from gnmr_fx.recipe import Recipe
from gnmr_fx.saved import Saver
from gnmr_fx.scope import AllSaved
from gnmr_fx.units import Handle, Memo, Unit, observers, register_observer, unregister_observer

STATE_VERSION = 1
_FOREIGN_STEPS_BEFORE_WARNING = 3


class Event(NamedTuple):
    """A unit in a step in which it was risky, or went on or off the recovery path.

    ``outcome`` is ``"chosen"`` (on the recovery path from this step on), ``"refused"`` (risky or locked, but the budget
    went to others) or ``"released"`` (off the recovery path, and no longer a candidate). ``norm`` is the gradient norm
    (-1 where there was none), ratios are dimensionless, ``lock`` is in steps. ``changed`` says that the guard went the
    other way; ``forced``, that it was pinned by hand.
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
        left_in_graph: for each compiled graph, by the indices of its units: what it keeps as it is, as JSON.
    """

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
        self._forced: Tensor | None = None
        self._counts: dict[str, int] = dict.fromkeys(
            ("events", "risky", "recovered", "refused", "switches", "most_active", "full", "non_finite"), 0
        )
        self._times_recovered = torch.zeros(len(self.units), dtype=torch.int64)
        self._steps_recovered = torch.zeros(len(self.units), dtype=torch.int64)
        self._seconds = 0.0
        self._optimizer_hook: Any
        self._hooks: list[Any]
        self._reset_step()
        self._detached()

    # What users read and call ----------------------------------------------------------------------------------------

    @property
    def max_active(self) -> int:
        """The budget: the most units on the recovery path in any step."""
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
        in use), ``non_finite`` unit-steps, ``events``, ``events_dropped``, and ``seconds`` spent in the controller."""
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
        return int(self._times_recovered[index])

    def steps_recovered(self, index: int) -> int:
        """In how many steps unit ``index`` was on the recovery path."""
        return int(self._steps_recovered[index])

    def step(self, grad_scale: float = 1.0) -> Decision:
        """End a step by hand, in a loop without a ``torch.optim`` optimizer. Call it after the weights were updated.

        With a torch optimizer this happens by itself, once per optimizer step. Norms are those at the end of the last
        backward; units whose gradient has not arrived since the last step count as missing.

        Args:
            grad_scale: what the loss was multiplied with before the backward.
        """
        start = time.perf_counter()
        norms = self._host_norms(grad_scale)
        self._state, decision = update(self._state, norms, self.config)
        self._count(decision, norms)
        self._apply(decision.active if self._forced is None else self._forced, decision, norms)
        self.decision = decision
        self.seed.add_(1)
        self.memo.clear()
        self._reset_step()
        self._attach_hooks()
        self._seconds += time.perf_counter() - start
        return decision

    def force(self, which: Literal["high", "low"] | Iterable[str] | None) -> None:
        """Pin the guards, budget or not, for debugging and reference runs; ``None`` gives them back to the controller.

        Args:
            which: ``"high"`` or ``"low"`` for all units, or names of the units to put on the recovery path.

        Raises:
            UnknownUnitError: for a name that is no unit's.
        """
        if which is None:
            self._forced = None
            self._apply(torch.zeros_like(self.flags) if self.decision is None else self.decision.active, self.decision)
            return
        if isinstance(which, str) and which in ("high", "low"):
            flags = torch.full_like(self.flags, which == "high")
        else:
            names = [which] if isinstance(which, str) else list(which)
            index = {unit.name: unit.index for unit in self.units}
            unknown = [name for name in names if name not in index]
            if unknown:
                raise UnknownUnitError(
                    f"expected 'high', 'low', None or names of units, found {unknown[0]!r}; "
                    f"units are {', '.join(list(index)[:5])}{', ...' if len(index) > 5 else ''}"
                )
            flags = torch.zeros_like(self.flags)
            flags[[index[name] for name in names]] = True
        self._forced = flags
        self._apply(flags, self.decision)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to decide as this one would: tensors, numbers and strings only."""
        return {
            "version": STATE_VERSION,
            "units": [unit.name for unit in self.units],
            "rules": state_to_dict(self._state),
            "flags": self.flags.clone(),
            "seed": int(self.seed),
            "counts": dict(self._counts),
            "seconds": self._seconds,
            "times_recovered": self._times_recovered.clone(),
            "steps_recovered": self._steps_recovered.clone(),
            "seen": [unit.observation.seen for unit in self.units],
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
        names = [unit.name for unit in self.units]
        if list(state["units"]) != names:
            missing = [n for n in names if n not in state["units"]]
            extra = [n for n in state["units"] if n not in names]
            raise StateMismatchError(
                f"expected a state of this model's {len(names)} units, found one of {len(state['units'])} units "
                f"(not in the state: {missing[:3] or 'none'}; not in the model: {extra[:3] or 'none'}); instrument the "
                "model with the same include and exclude as the run that was saved"
            )
        loaded = state_from_dict(state["rules"], self.config, self.max_active, len(names))
        self._state = loaded
        self.seed.fill_(state["seed"])
        self._counts = dict(state["counts"])
        self._seconds = float(state["seconds"])
        kept = [event for event in self.events if event.step <= loaded.step]  # no records of a future given up
        self.events = collections.deque(kept, maxlen=self.config.max_events)
        self._times_recovered = state["times_recovered"].clone()
        self._steps_recovered = state["steps_recovered"].clone()
        for unit, seen in zip(self.units, state["seen"], strict=True):
            unit.observation.was_seen |= bool(seen)
        self._reset_step()
        self.flags.copy_(state["flags"] if self._forced is None else self._forced)

    # Guards ----------------------------------------------------------------------------------------------------------

    def handle(self, index: int) -> Handle:
        """A new handle of unit ``index``, connected to its guard."""
        fmts = (self.recipe.low, self.recipe.high)
        seed = self.seed if any(fmt.is_stochastic for fmt in fmts) else None
        low, high = map(str, fmts)
        return Handle(
            self.flags[index], seed, low, high, self.memo, self.units[index].observation, self.scope, self.saver
        )

    def connect(self) -> None:
        """Give every site its handle and start listening to gradients and optimizer steps."""
        for site in self.sites:
            object.__setattr__(site.module, site.attribute, self.handle(site.unit))
        if self.saver is not None:
            self.saver.first = self.handle(0)
        register_observer(self.flags, self)
        reference: weakref.ref[Listener] = weakref.ref(self)
        self._optimizer_hook = register_optimizer_step_post_hook(OptimizerHook(reference))
        weakref.finalize(self, self._optimizer_hook.remove)
        self._attach_hooks()

    def disconnect(self) -> None:
        """Undo :meth:`connect`."""
        for site in self.sites:
            site.module.__dict__.pop(site.attribute, None)
        unregister_observer(self.flags)
        if self.scope is not None and not any(other.scope is not None for other in observers()):
            remove_partitioner()
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        for weight, hook in self._hooks:
            remove_hook(weight, hook)
        self._detached()

    def _detached(self) -> None:
        self._optimizer_hook = None
        self._hooks = [(None, None)] * len(self.units)
        self._foreign_steps = 0
        self._heard_since_foreign_step = False
        self._warned_foreign = False

    # Gradients -------------------------------------------------------------------------------------------------------

    def _attach_hooks(self) -> None:
        """Hook the weights as the modules hold them now: moving, wrapping and sharding may have replaced them."""
        for unit in self.units:
            if "_parameters" not in unit.module.__dict__:
                continue  # a copy of a model under way, whose own parameters are not there yet
            weight, (hooked, hook) = unit.weight, self._hooks[unit.index]
            if weight is hooked or not (weight.requires_grad and weight.is_leaf):
                continue
            if hooked is not None:
                remove_hook(hooked, hook)
            new = weight.register_post_accumulate_grad_hook(GradientHook(weakref.ref(self), unit.index))
            self._hooks[unit.index] = (weight, new)

    def _reset_step(self) -> None:
        self._fresh = bytearray(len(self.units))
        self._pending: list[tuple[list[int], Tensor]] = []
        self._overflowed: dict[torch.device, Tensor] = {}
        self._backward_open = False

    def gradient_arrived(self, index: int) -> None:
        """Called by the hook on the weight of unit ``index``, during a backward."""
        self._fresh[index] = 1
        if not self._backward_open:
            self._backward_open = True
            # DDP queues its own callback after this one and only there finishes the gradients: queue behind it.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._backward_ended))

    def _backward_ended(self) -> None:
        start = time.perf_counter()
        self._backward_open = False
        self._heard_since_foreign_step = True
        for indices, norms in self._pending:
            overflowed = self._overflowed.setdefault(
                norms.device, torch.zeros(len(self.units), dtype=torch.bool, device=norms.device)
            )
            overflowed[indices] |= ~norms.isfinite()
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = collections.defaultdict(list)
        for index, (fresh, (weight, _)) in enumerate(zip(self._fresh, self._hooks, strict=True)):
            if fresh and weight.grad is not None:
                by_kind[weight.grad.device, weight.grad.dtype].append(index)
        self._pending = [
            (indices, gradient_norms([self._hooks[index][0].grad for index in indices])) for indices in by_kind.values()
        ]
        for unit in self.units:
            unit.observation.close()
        self._seconds += time.perf_counter() - start

    def _host_norms(self, grad_scale: float) -> Tensor:
        """Norms [units], float64 on the host; ``MISSING`` where there is no gradient."""
        found = [MISSING] * len(self.units)
        for indices, values in self._pending:
            for index, norm in zip(indices, values.tolist(), strict=True):
                found[index] = norm / grad_scale
        for overflowed in self._overflowed.values():
            for index in overflowed.nonzero().flatten().tolist():
                found[index] = math.inf
        seen = [norm if unit.observation.seen else MISSING for unit, norm in zip(self.units, found, strict=True)]
        return torch.tensor(seen, dtype=torch.float64)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after every step of any ``torch.optim`` optimizer in the process."""
        if not self._pending:
            self._attach_hooks()  # weights may have been unfrozen or replaced: be there for their next backward
            return
        weights = {id(unit.weight) for unit in self.units}
        if any(id(p) in weights for group in optimizer.param_groups for p in group["params"]):
            self.step(grad_scale=active_grad_scale())
            self._foreign_steps = 0
            return
        # Only steps between which gradients arrived: another model's optimizer is none of this one's business.
        self._foreign_steps += self._heard_since_foreign_step
        self._heard_since_foreign_step = False
        if self._foreign_steps >= _FOREIGN_STEPS_BEFORE_WARNING and not self._warned_foreign:
            self._warned_foreign = True
            warnings.warn(
                f"expected an optimizer that holds the weights of the {len(self.units)} recoverable units, found "
                f"{self._foreign_steps} steps of {type(optimizer).__name__} with none of them while gradients arrived; "
                "the controller does not tick: build the optimizer from model.parameters(), or call "
                "gnmr_fx.controller(model).step() after each update",
                GnmrWarning,
                stacklevel=2,
            )

    # Records ---------------------------------------------------------------------------------------------------------

    def _count(self, decision: Decision, norms: Tensor) -> None:
        target = decision.active if self._forced is None else self._forced
        self._steps_recovered += target
        counted = torch.stack((decision.risky, decision.refused, ~norms.isfinite(), target)).sum(dim=1)
        risky, refused, non_finite, recovered = counted.tolist()
        counts = self._counts
        counts["risky"] += risky
        counts["refused"] += refused
        counts["non_finite"] += non_finite
        counts["recovered"] += recovered
        counts["most_active"] = max(counts["most_active"], recovered)
        counts["full"] += recovered == min(self.max_active, len(self.units))

    def _apply(self, target: Tensor, decision: Decision | None, norms: Tensor | None = None) -> None:
        """Set the guards to ``target`` and record what is worth it: changes, and with ``norms`` this step's risks."""
        changed = target != self.flags
        told = changed if norms is None or decision is None else changed | decision.risky
        if not told.any():
            return
        self._times_recovered += changed & target
        self._counts["switches"] += int(changed.sum())
        for index in told.nonzero().flatten().tolist():
            self._counts["events"] += 1
            self.events.append(self._event(index, bool(target[index]), bool(changed[index]), decision, norms))
        self.flags.copy_(target)

    def _event(self, index: int, on: bool, changed: bool, decision: Decision | None, norms: Tensor | None) -> Event:
        candidate = decision is not None and bool(decision.candidates[index])
        return Event(
            step=self.step_count,
            unit=self.units[index].name,
            norm=MISSING if norms is None else float(norms[index]),
            gnmr=1.0 if decision is None else float(decision.gnmr[index]),
            delta_gnmr=1.0 if decision is None else float(decision.delta_gnmr[index]),
            risk=0.0 if decision is None else float(decision.risk[index]),
            risky=norms is not None and decision is not None and bool(decision.risky[index]),
            outcome="chosen" if on else "refused" if candidate else "released",
            lock=0 if decision is None else int(decision.lock[index]),
            changed=changed,
            forced=self.forced,
        )

    # Copies ----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_optimizer_hook", "_hooks", "_pending", "_overflowed", "_fresh"):
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
