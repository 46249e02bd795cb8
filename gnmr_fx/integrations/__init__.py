"""Where training happens elsewhere: trainers, loggers.

Each module stands alone and is imported by name, so that none of the libraries is needed by another:

* :mod:`gnmr_fx.integrations.metrics`, the numbers of one step; :mod:`gnmr_fx.integrations.jsonl` writes them, and
  everything :func:`gnmr_fx.report` needs, to a file that ``gnmr-fx report`` reads;
* :mod:`gnmr_fx.integrations.tensorboard` (package ``tensorboard``);
* :mod:`gnmr_fx.integrations.hf` (``transformers``), :mod:`gnmr_fx.integrations.lightning` (``lightning`` or
  ``pytorch_lightning``): callbacks;
* :mod:`gnmr_fx.integrations.torchtitan`: a model converter.
"""
