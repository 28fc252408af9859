"""The command line: `python -m memory_saving_gradients`, or `memory-saving-gradients`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memory_saving_gradients import commands
from memory_saving_gradients._quiet import COMMAND
from memory_saving_gradients.graph.devices import DEVICES, LOCAL
from memory_saving_gradients.options.budgets import BudgetError
from memory_saving_gradients.planning.strategies import STRATEGIES

_TARGET = """\
TARGET is a .keras file, or MODULE:CALLABLE, where the callable returns a Keras model. If it has a
parameter `weights`, it is called with weights=None, as memory does not depend on their values. A
model that is not compiled is analysed with SGD and the mean squared error."""

_EXIT_CODES = """\
exit codes: 0 done, 1 failed, 2 wrong usage, 3 no plan within the budget was found, 130 Ctrl-C"""

_INPUT_SHAPE: dict[str, Any] = {
    "metavar": "S",
    "help": "the shape of an example, if the model does not define it: 32,32,3 or 128:int32",
}


_DEVICE: dict[str, Any] = {
    "choices": [*DEVICES, LOCAL],
    "help": "the device to plan for, and whose memory is told (this machine's GPU, else cpu); on a "
    "GPU, Keras compiles with XLA",
}


_VERIFY: dict[str, Any] = {
    "action": "store_true",
    "help": "ask XLA's compiler what it allocates; nothing runs",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Train networks that do not fit into memory, on TensorFlow.",
        epilog=f"{COMMAND} COMMAND --help says more about a command.\n{_EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"{COMMAND} {_version()}")
    everywhere = argparse.ArgumentParser(add_help=False)
    everywhere.add_argument("--debug", action="store_true", help="show tracebacks")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, what: str, *examples: str) -> argparse.ArgumentParser:
        shown = "\n".join(f"  {COMMAND} {name} {example}".rstrip() for example in examples)
        return subparsers.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.\n\n{_TARGET}",
            epilog=f"examples:\n{shown}\n\n{_EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[everywhere],
        )

    _add_report(add)
    _add_max_batch(add)
    return parser


#: Makes the parser of a command from its name, what it does, and examples.
_Add = Callable[..., argparse.ArgumentParser]


def _add_report(add: _Add) -> None:
    report = add(
        "report",
        "report how much memory a model saves, what is kept, and what is alive at the peak",
        "keras.applications:ResNet50 --batch-size 32",
        "my_model.keras --memory-budget 4GB --measure --plot figures",
        "my_package.models:build --checkpoints speed --json report.json",
    )
    report.add_argument("target", metavar="TARGET")
    report.add_argument("--input-shape", **_INPUT_SHAPE)
    report.add_argument("--device", **_DEVICE)
    report.add_argument("--batch-size", type=_positive, default=32, metavar="N", help="default: 32")
    how = report.add_mutually_exclusive_group()
    how.add_argument("--checkpoints", choices=sorted(STRATEGIES), help="default: memory")
    how.add_argument(
        "--memory-budget",
        type=_budget,
        metavar="B",
        help='the peak to stay within: "4GB", "800MiB", or a share of the plain peak such as 0.5',
    )
    how.add_argument(
        "--max-overhead",
        type=float,
        metavar="X",
        help="the extra cost to stay within, as a share of the step's, such as 0.1",
    )
    report.add_argument(
        "--measure",
        action="store_true",
        help="also train a few steps, plain and saving, in fresh processes: peaks and times",
    )
    report.add_argument("--verify", **_VERIFY)
    report.add_argument(
        "--pieces",
        action="store_true",
        help="compute the largest tensors in pieces where that lowers the peak or keeps the budget",
    )
    report.add_argument("--plot", type=Path, metavar="DIR", help="draw the plan into a folder")
    report.add_argument("--json", type=Path, metavar="FILE", help="write the report as data")
    report.set_defaults(run=commands.report)


def _add_max_batch(add: _Add) -> None:
    largest = add(
        "max-batch",
        "find the largest batch that trains in a given memory, plain and with recomputation",
        "keras.applications:ResNet50 --memory 11GB",
        "my_model.keras --memory device --device a100 --verify",
    )
    largest.add_argument("target", metavar="TARGET")
    largest.add_argument("--input-shape", **_INPUT_SHAPE)
    largest.add_argument(
        "--memory", type=_budget, required=True, metavar="B", help='such as "11GB"'
    )
    largest.add_argument("--device", **_DEVICE)
    largest.add_argument("--verify", **_VERIFY)
    largest.set_defaults(run=commands.largest_batch)


def _version() -> str:
    try:
        return importlib.metadata.version("memory_saving_gradients")
    except importlib.metadata.PackageNotFoundError:  # it runs from its source tree
        return "of a source tree"


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an int of at least 1, got {text!r}")
    return int(text)


def _budget(text: str) -> str | int | float:
    """A number of bytes as an int, a share as a float, anything else as it is."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: the arguments of the program; by default those it was called with.

    Returns:
        The exit code.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by `_quiet`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            options.run(options)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except BudgetError as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 3
    except Exception as error:
        if options.debug:
            raise
        print(f"error: {error} (--debug shows where)", file=sys.stderr)
        return 1
    return 0


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
