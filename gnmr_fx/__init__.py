"""gnmr-fx: budgeted recovery for low-precision training, as an FX graph-rewriting pass for torch.compile.

model = gnmr_fx.instrument(model)
model = torch.compile(model)
print(gnmr_fx.table(model))
"""

from gnmr_fx.audit import Audit, audit
from gnmr_fx.config import GnmrConfig
from gnmr_fx.errors import (
    AdapterError,
    AlreadyInstrumentedError,
    AuditError,
    BudgetError,
    ConfigError,
    DoubleBackwardError,
    FormatError,
    FrozenWeightError,
    GnmrError,
    GnmrWarning,
    InvariantError,
    LazyParameterError,
    LogError,
    MissingDependencyError,
    MissingStateError,
    NativeKernelError,
    NoRecoverableOperatorError,
    NotInstrumentedError,
    PatternError,
    QuantizedWeightError,
    RankMismatchError,
    RecipeError,
    StateMismatchError,
    UnknownRecipeError,
    UnknownUnitError,
    UnsupportedBackendError,
    UnsupportedInputError,
    UnsupportedTransformError,
)
from gnmr_fx.instrument import controller, instrument, uninstrument
from gnmr_fx.operator_table import Table, table
from gnmr_fx.recipe import RECIPES, Format, FrozenRecipe, GemmPaths, GemmRecipe, Operands, Recipe, dsv3, dynamic_gemm
from gnmr_fx.report import Report, report
from gnmr_fx.scope import AllSaved

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "AdapterError",
    "AllSaved",
    "AlreadyInstrumentedError",
    "Audit",
    "AuditError",
    "BudgetError",
    "ConfigError",
    "DoubleBackwardError",
    "Format",
    "FormatError",
    "FrozenRecipe",
    "FrozenWeightError",
    "GemmPaths",
    "GemmRecipe",
    "GnmrConfig",
    "GnmrError",
    "GnmrWarning",
    "InvariantError",
    "LazyParameterError",
    "LogError",
    "MissingDependencyError",
    "MissingStateError",
    "NativeKernelError",
    "NoRecoverableOperatorError",
    "NotInstrumentedError",
    "Operands",
    "PatternError",
    "QuantizedWeightError",
    "RankMismatchError",
    "Recipe",
    "RecipeError",
    "Report",
    "StateMismatchError",
    "Table",
    "UnknownRecipeError",
    "UnknownUnitError",
    "UnsupportedBackendError",
    "UnsupportedInputError",
    "UnsupportedTransformError",
    "audit",
    "controller",
    "dsv3",
    "dynamic_gemm",
    "instrument",
    "report",
    "table",
    "uninstrument",
]
