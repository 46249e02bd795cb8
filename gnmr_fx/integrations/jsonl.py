"""A log as a text file: a header line, then one JSON object per optimizer step.

It holds what :func:`gnmr_fx.report` needs, so the report can be made from the file alone, after the run or while it
goes on, and plain numbers beside that, for any other reader (``pandas.read_json(path, lines=True)``).

Line 1, the header: ``{"gnmr_fx": version, "log": 1, "recipe": {...}, "scope": ..., "units": [names], "budget": units,
"config": {...}, "start": {...}}``. Every other line: ``{"step": ..., **step_metrics, "active": [indices of units],
"events": [records], "stats": {...}}``. What JSON has no number for is a string: ``"Infinity"``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from torch import nn

import gnmr_fx
from gnmr_fx.config import GnmrConfig, threshold
from gnmr_fx.errors import GnmrError, LogError
from gnmr_fx.instrument import ModelController
from gnmr_fx.integrations.metrics import Meter
from gnmr_fx.recipe import NF4, Format, FrozenRecipe, GemmPaths, GemmRecipe, Operands, Recipe
from gnmr_fx.report import Report
from gnmr_fx.runtime import Event
from gnmr_fx.text import counted, recipe_data, to_json

__all__ = ["JsonlLogger", "Log", "read_log"]

LOG_VERSION = 1
_SCHEDULE = "schedule"


class JsonlLogger:
    """Writes one line for each optimizer step of an instrumented model, and flushes it.

    Args:
        path: the file. Its folder is made if need be.
        model: the instrumented model, or its controller.
        overwrite: whether a run that starts anew may replace the log of another.
        with_last: whether the step that the controller has just made is the first to be logged, not the next one.

    If the file is there already and the controller has made steps (a resumed run), the log goes on: lines of steps
    after the controller's are dropped, as is a line that was cut. If the controller has made none, the file has to be
    without steps, unless ``overwrite`` is set.

    Raises:
        LogError: for a file that is no such log, or the log of other units, another recipe, budget or configuration.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module | ModelController,
        *,
        overwrite: bool = False,
        with_last: bool = False,
    ) -> None:
        self.path = Path(path)
        self._meter = Meter(model)
        self._step = self._controller.step_count - with_last
        self._events_seen = self._controller.stats["events"] - len(self._events_after(self._step))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        keep = 0 if overwrite and not self._step else _continued(self.path, self._header(), self._step)
        self._file: IO[str] = open(self.path, "r+" if keep else "w", encoding="utf-8")  # noqa: SIM115
        if keep:
            self._file.seek(keep)
            self._file.truncate()
        else:
            self._write(self._header())

    @property
    def _controller(self) -> ModelController:
        return self._meter.controller

    def log(self) -> bool:
        """Write the line of the controller's last step; nothing, and False, where that is written already.

        Call it after each optimizer step. Where the controller has made several steps since the last call, only the
        last one gets a line (with the records of all).
        """
        controller = self._controller
        if controller.step_count == self._step:
            return False
        self._step = controller.step_count
        stats = controller.stats
        new = min(stats["events"] - self._events_seen, len(controller.events))
        self._events_seen = stats["events"]
        events = list(itertools.islice(reversed(controller.events), new))[::-1]
        self._write(
            {
                "step": self._step,
                **self._meter.read(),
                **_scheduled(controller.config, self._step),
                "active": controller.flags.nonzero().flatten().tolist(),
                "forced": controller.forced,
                "events": [event._asdict() for event in events],
                "stats": stats,
            }
        )
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(to_json(line, None) + "\n")
        self._file.flush()

    def _events_after(self, step: int) -> list[Event]:
        newest_first = itertools.takewhile(lambda event: event.step > step, reversed(self._controller.events))
        return list(newest_first)[::-1]

    def _header(self) -> dict[str, Any]:
        controller = self._controller
        units = controller.units
        active, times = controller.flags.tolist(), [controller.times_recovered(unit.index) for unit in units]
        steps = [controller.steps_recovered(unit.index) for unit in units]
        if self._step < controller.step_count:  # as it was before the last step
            steps = [count - on for count, on in zip(steps, active, strict=True)]
            place = {unit.name: unit.index for unit in units}
            for event in self._events_after(self._step):
                times[place[event.unit]] -= event.changed and event.outcome == "chosen"
                active[place[event.unit]] ^= event.changed
        return {
            "gnmr_fx": gnmr_fx.__version__,
            "log": LOG_VERSION,
            "recipe": recipe_data(controller.recipe),
            "scope": "projections" if controller.scope is None else str(controller.scope),
            "units": [unit.name for unit in units],
            "budget": controller.max_active,
            "config": _config_data(controller.config),
            "start": {
                "step": self._step,
                "active": [index for index, on in enumerate(active) if on],
                "times_recovered": times,
                "steps_recovered": steps,
            },
        }


def _config_data(config: GnmrConfig) -> dict[str, Any]:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: _SCHEDULE if callable(value) else value for name, value in values.items()}


def _scheduled(config: GnmrConfig, step: int) -> dict[str, float]:
    """The thresholds of a step, where they are schedules."""
    bounds = {"alpha": config.alpha, "beta": config.beta}
    return {name: threshold(bound, step, name) for name, bound in bounds.items() if callable(bound)}


def _continued(path: Path, header: Mapping[str, Any], step: int) -> int:
    """How many bytes of an existing log stay when it goes on after ``step``; 0 where there is none to go on with."""
    if not path.exists() or not path.stat().st_size:
        return 0
    log = read_log(path)
    last = log.steps[-1]["step"] if log.steps else 0
    if not step and last:
        raise LogError(
            f"expected no log of an earlier run at {path}, found one of {counted(len(log.steps), 'step')}, and this "
            "run starts at step 0; name another file, remove that one, or resume from the run's checkpoint "
            "(overwrite=True of JsonlLogger replaces it)"
        )
    known = json.loads(to_json(header, None))
    for name in ("recipe", "scope", "units", "budget", "config"):
        if log.header[name] != known[name]:
            raise LogError(
                f"expected the log of this run at {path}, found one with another {name}: {_short(log.header[name])} "
                f"there, {_short(known[name])} here; name another file"
            )
    return 0 if not step and not last else log.end_of(step)


def _short(value: Any, most: int = 120) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else f"{text[:most]}..."


# Reading -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Log:
    """A log as read from its file.

    Attributes:
        path: the file.
        header: its first line.
        steps: the other lines, one per step, steps ascending.
        ends: the byte after the header's line, and after the line of each step.
        cut: whether the last line was not complete, and left out.
    """

    path: Path
    header: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    ends: Sequence[int]
    cut: bool

    def end_of(self, step: int) -> int:
        """The byte after the last line of steps up to ``step``."""
        return self.ends[sum(line["step"] <= step for line in self.steps)]

    def report(self) -> Report:
        """What :func:`gnmr_fx.report` said after the last step in the log.

        Raises:
            LogError: where a line does not hold what it should.
        """
        try:
            return _report(self)
        except (KeyError, TypeError, ValueError, IndexError, GnmrError) as error:
            raise LogError(
                f"expected a log of gnmr-fx at {self.path}, found a line without what it should hold "
                f"({type(error).__name__}: {error})"
            ) from error


def read_log(path: str | os.PathLike[str]) -> Log:
    """Read a log that :class:`JsonlLogger` wrote, up to the last complete line.

    Raises:
        LogError: for an empty file, a file that is no such log, one of a newer version, or a damaged line before the
            last one.
        OSError: where the file cannot be read.
    """
    path = Path(path)
    data = path.read_bytes()
    if not data:
        raise LogError(f"expected a log of gnmr-fx at {path}, found an empty file")
    lines = data.split(b"\n")
    cut = bool(lines.pop())  # what follows the last line's end
    ends = list(itertools.accumulate(len(line) + 1 for line in lines))
    parsed = [_parsed(line) for line in lines]
    header = parsed[0] if parsed else None
    if header is None or "gnmr_fx" not in header:
        raise LogError(
            f"expected a log of gnmr-fx at {path}, whose first line tells its version, found "
            f"{'no complete line' if not lines else _text(lines[0])}"
        )
    if header.get("log") != LOG_VERSION or not {"recipe", "units", "budget", "config", "start"} <= header.keys():
        raise LogError(
            f"expected a log of version {LOG_VERSION} at {path}, found version {header.get('log')!r}, written by "
            f"gnmr-fx {header['gnmr_fx']}; read it with that version"
        )
    steps: list[Mapping[str, Any]] = []
    for number, line in enumerate(parsed[1:], 2):
        if line is None and number == len(parsed) and not cut:  # cut, and then a line's end was written
            cut = True
            ends.pop()
            break
        if line is None or not isinstance(line.get("step"), int) or (steps and line["step"] <= steps[-1]["step"]):
            raise LogError(
                f"expected line {number} of {path} to be a JSON object with a step after that of the line before, "
                f"found {_text(lines[number - 1])}"
            )
        steps.append(line)
    return Log(path, header, steps, ends, cut)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:  # UnicodeDecodeError is one
        return None
    return found if isinstance(found, dict) else None


def _text(line: bytes, most: int = 60) -> str:
    return repr(line[:most].decode("utf-8", "replace")) + ("..." if len(line) > most else "")


def _report(log: Log) -> Report:
    header, start, units = log.header, log.header["start"], tuple(log.header["units"])
    events = [
        Event(**{name: _number(value) for name, value in event.items()})
        for line in log.steps
        for event in line["events"]
    ]
    times, steps = list(start["times_recovered"]), list(start["steps_recovered"])
    place = {unit: index for index, unit in enumerate(units)}
    for event in events:
        times[place[event.unit]] += event.changed and event.outcome == "chosen"
    for line in log.steps:
        for index in line["active"]:
            steps[index] += 1
    last = log.steps[-1] if log.steps else {"active": start["active"], "forced": False, "stats": _no_steps(start)}
    stats = {name: _number(value) for name, value in last["stats"].items()}
    return Report(
        units=units,
        active=tuple(index in last["active"] for index in range(len(units))),
        times_recovered=tuple(times),
        steps_recovered=tuple(steps),
        stats={**stats, "events_dropped": max(0, stats["events"] - len(events))},
        events=tuple(events),
        recipe=_recipe(header["recipe"]),
        budget=header["budget"],
        forced=last["forced"],
        config=_config(header["config"], log.steps),
    )


def _no_steps(start: Mapping[str, Any]) -> dict[str, Any]:
    names = ("unit_steps", "events", "risky", "recovered", "refused", "switches", "most_active", "full", "non_finite")
    return {"steps": start["step"], **dict.fromkeys(names, 0), "events_dropped": 0, "seconds": 0.0}


_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _number(value: Any) -> Any:
    """``value``, and what stands for a float that JSON does not know as that float."""
    return _NUMBERS.get(value, value) if isinstance(value, str) else value


def _config(data: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> GnmrConfig:
    """The configuration; a schedule is known at the logged steps alone, and there it is what it was."""

    def schedule(name: str) -> Callable[[int], float]:
        values = {line["step"]: _number(line[name]) for line in lines}
        return lambda step: values[step]

    known = {field.name for field in fields(GnmrConfig)}
    options: dict[str, Any] = {
        name: schedule(name) if value == _SCHEDULE else _number(value) for name, value in data.items() if name in known
    }
    return GnmrConfig(**options)


def _recipe(data: Mapping[str, Any]) -> Recipe:
    """The recipe that :func:`gnmr_fx.text.recipe_data` made ``data`` of."""
    low, high, name = Format.parse(data["low"]), Format.parse(data["high"]), data["name"]
    if "gemm" in data:
        options: dict[str, Any] = {
            name: GemmPaths(**{path: Operands.parse(text) for path, text in value.items()})
            if isinstance(value, Mapping)
            else value
            for name, value in data["gemm"].items()
        }
        return Recipe(low, high, name, GemmRecipe(**options))
    if "frozen" in data:
        spec = data["frozen"]["low"]
        weights: Any = spec if spec == NF4 else Format.parse(spec)
        return Recipe(low, high, name, frozen=FrozenRecipe(**{**data["frozen"], "low": weights}))
    return Recipe(low, high, name)
