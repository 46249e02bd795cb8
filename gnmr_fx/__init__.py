"""gnmr-fx: budgeted recovery for low-precision training, as an FX graph-rewriting pass for torch.compile.

model = gnmr_fx.instrument(model)
model = torch.compile(model)
print(gnmr_fx.table(model))
"""

from gnmr_fx.config import GnmrConfig
from gnmr_fx.errors import (
    AlreadyInstrumentedError,
    BudgetError,
    ConfigError,
    DoubleBackwardError,
    FormatError,
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
    RankMismatchError,
    RecipeError,
    StateMismatchError,
    UnknownRecipeError,
    UnknownUnitError,
    UnsupportedBackendError,
    UnsupportedTensorError,
    UnsupportedTransformError,
)
from gnmr_fx.instrument import controller, instrument, uninstrument
from gnmr_fx.operator_table import Table, table
from gnmr_fx.recipe import RECIPES, Format, GemmPaths, GemmRecipe, Operands, Recipe, dsv3, dynamic_gemm
from gnmr_fx.report import Report, report
from gnmr_fx.scope import AllSaved

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "AllSaved",
    "AlreadyInstrumentedError",
    "BudgetError",
    "ConfigError",
    "DoubleBackwardError",
    "Format",
    "FormatError",
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
    "RankMismatchError",
    "Recipe",
    "RecipeError",
    "Report",
    "StateMismatchError",
    "Table",
    "UnknownRecipeError",
    "UnknownUnitError",
    "UnsupportedBackendError",
    "UnsupportedTensorError",
    "UnsupportedTransformError",
    "controller",
    "dsv3",
    "dynamic_gemm",
    "instrument",
    "report",
    "table",
    "uninstrument",
]
