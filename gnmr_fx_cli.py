"""The command line's arguments, apart from the package: ``gnmr-fx --help`` does not wait for torch.

The commands themselves are in :mod:`gnmr_fx.cli`.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

OK, UNFIT_MODEL, USAGE = 0, 1, 2
"""Exit codes."""

_DESCRIPTION = "Budgeted recovery for low-precision PyTorch training: look at a model, a run, or this machine."
_EPILOG = """\
examples:
  gnmr-fx table path/to/Llama-3-70B --sequence 8192
  gnmr-fx table mymodels.net:build --scope all --json
  gnmr-fx report run.jsonl --plot run.png
  gnmr-fx doctor

exit codes: 0 all went well, 1 the model cannot be built or instrumented, 2 wrong use or a file that cannot be read
"""
_TABLE = """\
Print the recoverable operators of a model and what they keep for the backward, without running it: it is built on
the meta device, so a model of any size takes seconds and no memory to speak of. Nothing is downloaded.
"""
_TABLE_EPILOG = """\
MODEL is one of
  a folder with a Hugging Face config.json, or that file
  module:callable    what is called without arguments and returns a torch.nn.Module, or a pair of it and example
                     inputs (a tuple, a dict or a tensor); the current folder is on the import path

Bytes need inputs: token ids of --batch × --sequence, or --batch images, for a Hugging Face model; else the example
inputs. With --scope all they are those of eager mode: under torch.compile, its partitioner decides what is kept.

examples:
  gnmr-fx table ./Llama-3-70B --batch 1 --sequence 8192 --recipe saved-int2-int8
  gnmr-fx table ./bert-base/config.json --max-active 0.1 --scope all
  gnmr-fx table mymodels.net:build --json > table.json
"""
_REPORT = """\
Print what the controller of a run did, and why, from the log that gnmr_fx.integrations wrote (jsonl=...). It may be of
a run that is still going on, or was killed.
"""
_DOCTOR = """\
Say what this machine can run: devices, compile toolchain, low-precision matrix products, recipes. Everything is
tried, on tiny tensors.
"""


def parser() -> argparse.ArgumentParser:
    """The parser; ``command`` of what it returns is ``"table"``, ``"report"`` or ``"doctor"``."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("gnmr-fx", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw)
    top.add_argument("--version", action="store_true", help="print the version and exit")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")

    table = commands.add_parser(
        "table",
        help="the recoverable operators of a model, with bytes",
        description=_TABLE,
        epilog=_TABLE_EPILOG,
        formatter_class=raw,
    )
    table.add_argument("model", metavar="MODEL", help="folder, config.json or module:callable")
    table.add_argument("--recipe", default="saved-int4-int8", help="name of a recipe (`gnmr-fx doctor` lists them)")
    table.add_argument(
        "--scope",
        choices=("projections", "all"),
        default="projections",
        help="what is stored in another format: what projections read, or whatever autograd keeps",
    )
    table.add_argument(
        "--max-active", type=_budget, default=5, metavar="N", help="the budget: units (5), or a share of them (0.1)"
    )
    table.add_argument("--batch", type=_positive, default=1, metavar="N", help="sequences or images (default 1)")
    table.add_argument(
        "--sequence",
        type=_positive,
        metavar="N",
        help="tokens in each sequence (default: the model's context, at most 4096)",
    )
    table.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the parameters (default: the configuration's, else float32)",
    )
    table.add_argument("--include", action="append", metavar="GLOB", help="only units that match (may be repeated)")
    table.add_argument("--exclude", action="append", metavar="GLOB", help="not units that match (may be repeated)")

    report = commands.add_parser(
        "report",
        help="what the controller of a run did, from its log",
        description=_REPORT,
        epilog="example:\n  gnmr-fx report run.jsonl --plot run.png\n",
        formatter_class=raw,
    )
    report.add_argument("log", metavar="LOG.jsonl", help="a log of gnmr-fx")
    report.add_argument("--plot", metavar="FILE", help="also draw units × steps (.png, .pdf, .svg)")

    doctor = commands.add_parser(
        "doctor",
        help="what this machine can run natively",
        description=_DOCTOR,
        formatter_class=raw,
    )
    for command in (table, report, doctor):
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return top


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return number


def _budget(text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise argparse.ArgumentTypeError(f"expected a number of units such as 5 or a share such as 0.1, found {text!r}")


def run(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code. (What argparse itself finds wrong exits with 2.)"""
    arguments = parser().parse_args(argv)
    if arguments.version:
        from importlib.metadata import version

        print(f"gnmr-fx {version('gnmr-fx')}")
        return OK
    if arguments.command is None:
        parser().print_help(sys.stderr)
        return USAGE
    from gnmr_fx.cli import execute  # everything else: seconds of imports

    return execute(arguments)


def script() -> int:
    """:func:`run` in a process of its own, which ends with it: collecting garbage would be a tenth of its time."""
    gc.disable()
    return run()
