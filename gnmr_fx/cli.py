"""The commands of ``gnmr-fx``: ``table``, ``report`` and ``doctor``. Their arguments are in :mod:`gnmr_fx_cli`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gnmr_fx.errors import (
    BudgetError,
    ConfigError,
    GnmrError,
    LogError,
    MissingDependencyError,
    RecipeError,
    UnknownRecipeError,
)
from gnmr_fx.recipe import get_recipe
from gnmr_fx_cli import OK, UNFIT_MODEL, USAGE, run

__all__ = ["CommandError", "execute", "main"]

main = run
_DEFAULT_SEQUENCE = 4096
_MISUSE = (UnknownRecipeError, RecipeError, BudgetError, ConfigError, LogError, MissingDependencyError)


class CommandError(Exception):
    """A failure of a command, told in a line; ``code`` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def execute(arguments: argparse.Namespace) -> int:
    """Run the command that was parsed; returns the exit code. An error is one line on stderr, without a traceback."""
    command: Callable[[argparse.Namespace], None] = {"table": _table, "report": _report, "doctor": _doctor}[
        arguments.command
    ]
    try:
        with _quiet():
            command(arguments)
        return OK
    except BrokenPipeError:  # the reader of the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (CommandError, GnmrError) as error:
        if arguments.traceback:
            traceback.print_exception(error)
        if isinstance(error, CommandError):
            message, code = str(error), error.code
        elif isinstance(error, _MISUSE):
            message, code = str(error), USAGE
        else:
            message, code = f"{type(error).__name__}: {error}", UNFIT_MODEL
        _note(message)
        return code


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that other libraries log and warn while they are imported and models are built."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = ("transformers", "torch", "torchao", "gnmr_fx.passes.capture")
        levels = {name: logging.getLogger(name).level for name in names}
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def _note(message: str) -> None:
    print(f"gnmr-fx: {message}", file=sys.stderr)


# table ---------------------------------------------------------------------------------------------------------------


class Built(NamedTuple):
    """A model on the meta device, and its inputs: None where they are to be made from its configuration."""

    model: nn.Module
    inputs: Any = None


def _table(arguments: argparse.Namespace) -> None:
    from gnmr_fx.predict import inputs_of, predict

    get_recipe(arguments.recipe)  # a typo is told before a model is built
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    path = Path(arguments.model)
    if path.exists():
        built = Built(_from_config(path, dtype))
    elif ":" in arguments.model:
        built = _from_callable(arguments.model, dtype)
    else:
        raise CommandError(
            f"expected a folder with a config.json, that file, or module:callable, found no file or folder "
            f"{arguments.model!r} (nothing is downloaded)",
            USAGE,
        )
    inputs = built.inputs
    if inputs is None:
        inputs = inputs_of(built.model, arguments.batch, arguments.sequence or _context(built.model))
    try:
        found = predict(
            built.model,
            arguments.recipe,
            inputs=inputs,
            max_active=arguments.max_active,
            scope=arguments.scope,
            include=arguments.include,
            exclude=arguments.exclude,
        )
    except GnmrError:
        raise
    except Exception as error:
        raise CommandError(
            f"expected {type(built.model).__name__} to run on tensors without values, found "
            f"{type(error).__name__}: {_first_line(error)}",
            UNFIT_MODEL,
        ) from error
    print(found.to_json() if arguments.json else found)
    if found.recipe.gemm is not None:
        from gnmr_fx.doctor import devices, what_computes

        device = devices()[-1]
        _note(f"GEMMs on this machine ({device}): {what_computes(found.recipe.gemm, torch.device(device))}")
    if inputs is None:
        _note("bytes are not known: no inputs; let the callable return the module and its example inputs")
    elif not found.predicted:
        _note(f"bytes are not known: the forward does not run on tensors without values ({found.capture_note})")


def _context(model: nn.Module) -> int:
    """Tokens that a model takes, as far as its configuration tells, at most 4096."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return min(limit, _DEFAULT_SEQUENCE) if isinstance(limit, int) and limit > 0 else _DEFAULT_SEQUENCE


def _from_config(path: Path, dtype: torch.dtype | None) -> nn.Module:
    """A Hugging Face model from a local configuration."""
    if path.is_dir() and not (path / "config.json").is_file():
        raise CommandError(f"expected a config.json in the folder {path}, found none", USAGE)
    try:
        import transformers
    except ImportError as error:
        raise CommandError(
            "expected the package transformers, which a config.json needs, found none; "
            "pip install 'gnmr-fx[transformers]'",
            USAGE,
        ) from error
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many types: JSON, a missing or an unknown model_type, a value out of range
        raise CommandError(
            f"expected a configuration at {path} that transformers {transformers.__version__} knows, found "
            f"{type(error).__name__}: {_first_line(error)}",
            USAGE,
        ) from error
    kind = _model_class(transformers, config)
    try:
        with torch.device("meta"):
            return kind._from_config(config, dtype=dtype or getattr(config, "dtype", None) or torch.float32)
    except Exception as error:
        raise CommandError(
            f"expected {kind.__name__} to be built from {path}, found {type(error).__name__}: {_first_line(error)}",
            UNFIT_MODEL,
        ) from error


def _model_class(transformers: Any, config: Any) -> Any:
    """The class that the configuration names, else the most specific one that transformers has for it."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in ("ForCausalLM", "ForSeq2SeqLM", "ForMaskedLM", "ForImageClassification", ""):
        mapping = getattr(transformers, f"AutoModel{auto}")._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple | list) else found
    raise CommandError(
        f"expected a configuration of a model, found a {type(config).__name__}, for which transformers has none", USAGE
    )


def _from_callable(spec: str, dtype: torch.dtype | None) -> Built:
    """What ``module:callable`` returns, called under the meta device."""
    module_name, _, attribute = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        what = "found none of that name" if _is_missing(error, module_name) else f"found {type(error).__name__}"
        raise CommandError(
            f"expected to import the module {module_name!r}, {what}: {_first_line(error)}", USAGE
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    build: Any = module
    for name in attribute.split("."):
        build = getattr(build, name, None)
    if not callable(build):
        raise CommandError(f"expected {module_name!r} to have a callable {attribute!r}, found {build!r}", USAGE)
    try:
        with torch.device("meta"):
            made = build()
    except Exception as error:
        raise CommandError(
            f"expected {spec} to return a module (it is called with torch.device('meta') in force), found that it "
            f"raises {type(error).__name__}: {_first_line(error)}; --traceback shows where",
            UNFIT_MODEL,
        ) from error
    pair = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(pair[0], nn.Module):
        raise CommandError(
            f"expected {spec} to return a torch.nn.Module, or a pair of one and its inputs, found a "
            f"{type(made).__name__}",
            UNFIT_MODEL,
        )
    return Built(pair[0] if dtype is None else pair[0].to(dtype), pair[1])


def _is_missing(error: Exception, module_name: str) -> bool:
    return isinstance(error, ModuleNotFoundError) and module_name.startswith(error.name or "?")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


# report --------------------------------------------------------------------------------------------------------------


def _report(arguments: argparse.Namespace) -> None:
    from gnmr_fx.integrations.jsonl import read_log

    try:
        log = read_log(arguments.log)
    except OSError as error:
        raise CommandError(
            f"expected a log of gnmr-fx, found that {arguments.log} does not open: {error.strerror}", USAGE
        ) from error
    found = log.report()
    print(found.to_json(2) if arguments.json else found)
    if log.cut:
        _note(f"the last line of {arguments.log} is cut; read up to step {log.steps[-1]['step'] if log.steps else 0}")
    if arguments.plot:
        try:
            print(f"plot written to {found.plot(arguments.plot)}", file=sys.stderr)
        except (OSError, ValueError) as error:
            raise CommandError(
                f"expected to write a plot to {arguments.plot}, found {_first_line(error)}", USAGE
            ) from error


# doctor --------------------------------------------------------------------------------------------------------------


def _doctor(arguments: argparse.Namespace) -> None:
    from gnmr_fx.doctor import examine

    found = examine()
    print(found.to_json(2) if arguments.json else found)


if __name__ == "__main__":
    sys.exit(main())
