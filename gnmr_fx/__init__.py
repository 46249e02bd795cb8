"""gnmr-fx: budgeted recovery for low-precision training, as an FX graph-rewriting pass for torch.compile.

    model = gnmr_fx.instrument(model)
    model = torch.compile(model)
    print(gnmr_fx.table(model))
"""

from gnmr_fx.config import GnmrConfig
from gnmr_fx.errors import *  # noqa: F403
from gnmr_fx.instrument import controller, instrument, uninstrument
from gnmr_fx.recipe import RECIPES, Format, Recipe
from gnmr_fx.report import report, table

__version__ = "0.1.0"
