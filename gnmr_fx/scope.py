"""What is stored in another format: the inputs of projections, or all that autograd keeps."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from gnmr_fx.errors import ConfigError

__all__ = ["AllSaved", "get_scope"]

Attention = Literal["int8", "int4", "low"]
UnsupportedBackend = Literal["raise", "projections"]


@dataclass(frozen=True)
class AllSaved:
    """``scope="all"``: every saved activation is stored in its unit's format, not only what projections read.

    Args:
        min_bytes: tensors of fewer bytes are kept as they are.
        loss_head: whether what comes after the output head (logits, log-probabilities) is stored so as well.
        attention: how an attention's saved query and key are stored. ``"int8"``: in 8 bits where the path's format has
            fewer, since its backward sets their product against an exact log-sum-exp, and errors grow exponentially.
            ``"int4"``: in 4 bits where it has fewer, for 2-bit formats. ``"low"``: like everything else.
        unsupported_backend: what happens where a graph is compiled by a backend on which the partition pass cannot run
            (any but Inductor): ``"raise"``, or store inputs of ``"projections"`` only, which the table then says.

    Raises:
        ConfigError: for a value outside these.
    """

    min_bytes: int = 1 << 16
    loss_head: bool = False
    attention: Attention = "int8"
    unsupported_backend: UnsupportedBackend = "raise"

    def __post_init__(self) -> None:
        if isinstance(self.min_bytes, bool) or not isinstance(self.min_bytes, int) or self.min_bytes < 0:
            raise ConfigError(f"min_bytes: expected a number of bytes from 0, found {self.min_bytes!r}")
        if not isinstance(self.loss_head, bool):
            raise ConfigError(f"loss_head: expected True or False, found {self.loss_head!r}")
        _check_choice("attention", self.attention, get_args(Attention))
        _check_choice("unsupported_backend", self.unsupported_backend, get_args(UnsupportedBackend))

    @property
    def attention_bits(self) -> int:
        """The fewest bits that an attention's query and key are stored in."""
        return {"int8": 8, "int4": 4, "low": 0}[self.attention]

    def __str__(self) -> str:
        """A spec that :meth:`parse` reads back: operators in a graph carry their scope as text."""
        return ";".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @classmethod
    def parse(cls, spec: str) -> AllSaved:
        """The scope that ``str`` made ``spec`` of."""
        values: dict[str, Any] = dict(part.split("=") for part in spec.split(";"))
        values |= {"min_bytes": int(values["min_bytes"]), "loss_head": values["loss_head"] == "True"}
        return cls(**values)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name}: expected one of {', '.join(map(repr, choices))}, found {value!r}")


def get_scope(scope: str | AllSaved | None) -> AllSaved | None:
    """``scope`` as given to ``instrument``; None stands for ``"projections"``.

    Raises:
        ConfigError: for anything but ``"projections"``, ``"all"`` and an :class:`AllSaved`.
    """
    if isinstance(scope, AllSaved):
        return scope
    if scope == "all":
        return AllSaved()
    if scope in ("projections", None):
        return None
    near = difflib.get_close_matches(str(scope), ("projections", "all"), n=1, cutoff=0.4)
    suggestion = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"scope: expected 'projections', 'all' or a gnmr_fx.AllSaved with options, found {scope!r}{suggestion}"
    )
