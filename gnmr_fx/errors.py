"""Errors and warnings, one class per kind of failure.

Every message says what was expected, what was found and what to do next. All errors derive from
:class:`GnmrError`; those about a bad argument value also derive from :class:`ValueError`, so generic
handlers keep working.
"""


class GnmrError(Exception):
    """Base class of every error raised by gnmr-fx."""


class AlreadyInstrumentedError(GnmrError):
    """``instrument`` was given a model (or a part of one) that is instrumented already."""


class NotInstrumentedError(GnmrError):
    """A query such as ``table`` or ``controller`` was given a model that is not instrumented."""


class NoRecoverableOperatorError(GnmrError):
    """The model holds no operator that gnmr-fx can recover, or the patterns left none."""


class LazyParameterError(GnmrError):
    """The model holds a lazy parameter whose shape is not known yet."""


class UnknownRecipeError(GnmrError, ValueError):
    """A recipe name that does not exist."""


class RecipeError(GnmrError, ValueError):
    """A recipe that does not go with the model or with another argument."""


class FormatError(GnmrError, ValueError):
    """An invalid :class:`gnmr_fx.Format`, or a tensor that a format cannot hold."""


class ConfigError(GnmrError, ValueError):
    """An invalid value in :class:`gnmr_fx.GnmrConfig`."""


class BudgetError(GnmrError, ValueError):
    """An invalid ``max_active``."""


class PatternError(GnmrError, ValueError):
    """An ``include`` or ``exclude`` pattern that matches no recoverable operator."""


class StateMismatchError(GnmrError, ValueError):
    """A controller state that belongs to other units, another configuration or another version."""


class MissingStateError(GnmrError, FileNotFoundError):
    """A run is resumed from a checkpoint without a controller state, or from one that cannot be found."""


class LogError(GnmrError, ValueError):
    """A log that cannot be read, or that belongs to another run."""


class UnknownUnitError(GnmrError, ValueError):
    """A unit name that the controller does not have."""


class RankMismatchError(GnmrError, RuntimeError):
    """Ranks of a distributed run that train one model with other units, another configuration or another state."""


class DoubleBackwardError(GnmrError, RuntimeError):
    """A second derivative was asked of a guarded operator, whose saved activation is quantized."""


class UnsupportedTransformError(GnmrError, RuntimeError):
    """A ``torch.func`` transform (``grad``, ``vmap``, ...) over a guarded operator."""


class AdapterError(GnmrError, ValueError):
    """A recipe for frozen weights under adapters was given a model without adapters, or without a frozen weight."""


class QuantizedWeightError(GnmrError, ValueError):
    """A weight that another library has quantized or sharded already, or that is no floating-point tensor."""


class FrozenWeightError(GnmrError, RuntimeError):
    """A weight that gnmr-fx stores quantized was replaced, unfrozen, or read in a way that is not covered."""


class UnsupportedInputError(GnmrError, TypeError):
    """An activation of a dtype or kind that a guarded operator cannot take."""


class UnsupportedBackendError(GnmrError, RuntimeError):
    """A model in scope "all" was compiled by a backend on which the partition pass cannot run."""


class NativeKernelError(GnmrError, RuntimeError):
    """A recipe asks for native kernels where torch has none for the device, the formats or the shapes."""


class AuditError(GnmrError, ValueError):
    """A model, recipe or loss function that :func:`gnmr_fx.audit` cannot measure gaps of."""


class InvariantError(GnmrError, RuntimeError):
    """A pass broke one of its stated invariants; a bug in gnmr-fx, not in the model."""


class MissingDependencyError(GnmrError, ImportError):
    """An optional dependency is needed for what was asked."""


class GnmrWarning(UserWarning):
    """Category of every warning issued by gnmr-fx."""
