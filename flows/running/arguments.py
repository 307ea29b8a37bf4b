"""The arguments of every command, and what can be refused before anything heavy is imported.

Prefect, torch, Ray and MLflow take six seconds to import, of which neither ``--help`` nor a wrong
key needs any. So ``flows/__init__.py`` looks here first, when a command begins.
"""

import argparse
import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from infra.recipe.schema import Recipe
from tasks.data.texts import gone_models, missing_faults
from tasks.recipes import load_recipe
from upcycle_core.errors import InputError, raise_faults

FLOWS = Path(__file__).resolve().parents[1]
CHAT_PORT, SERVE_PORT = 8808, 8000
REBUILD = "make anew what later models build upon, too: tokenizer, seed, backbone"
GONE = {"plan": gone_models, "shrink": None, "tidy": None}
"""What must not be gone for those that read no text; a plan reads models' headers."""


class Parser(argparse.ArgumentParser):
    """One that lets options stand between other arguments: ``NAME --because REASON 7``.

    ``passes_on`` is whether what follows ``--`` is for another program, as ``options``.
    """

    passes_on = False

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse has it."""
        words = list(sys.argv[1:] if args is None else args)
        if "--" not in words:
            return self.parse_intermixed_args(words, namespace)
        if not self.passes_on:  # some of what follows may begin with a dash
            return super().parse_args(words, namespace)
        end = words.index("--")
        chosen = self.parse_intermixed_args(words[:end], namespace)
        chosen.options += words[end + 1 :]
        return chosen


def parser_of(command: str) -> Parser:
    """The parser of ``python -m flows.COMMAND``, described by the docstring of its module."""
    text = (FLOWS / f"{command}.py").read_text()
    about = (ast.get_docstring(ast.parse(text)) or "").replace("``", "")
    parser = Parser(
        prog=f"python -m flows.{command}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ARGUMENTS[command](parser)
    return parser


def load(chosen: argparse.Namespace) -> Recipe:
    """The recipe of a command that has one.

    Raises:
        InputError: With every fault of the files and changes.
    """
    return load_recipe(chosen.recipe, chosen.set, added=chosen.add)


def look_first(words: Sequence[str]) -> None:
    """End a command that asks for help, or for what cannot be, before it imports what it computes
    with; come back from every other.

    Args:
        words: As Python was called: ``python -m flows.dume recipe.yaml``.
    """
    after = list(words[words.index("-m") + 1 :]) if "-m" in words else []
    package, _, command = after[0].partition(".") if after else ("", "", "")
    if package != FLOWS.name or command not in ARGUMENTS:
        return
    chosen = parser_of(command).parse_args(after[1:])
    if not hasattr(chosen, "recipe"):
        return
    try:
        recipe = load(chosen)
        gone = GONE.get(command, missing_faults)
        raise_faults(gone(recipe) if gone else ())
    except InputError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def _recipe(parser: Parser) -> None:
    """``RECIPE [--add FILE ...] [--set KEY=VALUE ...]``."""
    _recipe_and(parser, "--add", nargs="+", default=[])


def _rows(parser: Parser) -> None:
    """``RECIPE [FILE ...] [--set KEY=VALUE ...]``."""
    _recipe_and(parser, "add", nargs="*", metavar="FILE")


def _recipe_and(parser: Parser, add: str, **options: Any) -> None:
    parser.add_argument("recipe", type=Path, help="YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one value"
    )
    parser.add_argument(add, type=Path, help="files of tasks or rows", **options)


def _dume(parser: Parser) -> None:
    _recipe(parser)
    parser.add_argument("--rebuild", action="store_true", help=REBUILD)


def _remade(parser: Parser) -> None:
    _rows(parser)
    parser.add_argument("--rebuild", action="store_true", help=REBUILD)


def _plan(parser: Parser) -> None:
    _recipe(parser)
    parser.add_argument(
        "--machine", nargs="+", default=[], metavar="PART=AMOUNT", help="memory=24GB cpus=2 ..."
    )
    parser.add_argument(
        "--rates", nargs="+", default=[], metavar="RATE=AMOUNT", help="fp32=900G read=2GB ..."
    )
    parser.add_argument("--measure", action="store_true", help="this machine's rates anew")


def _grow(parser: Parser) -> None:
    _recipe(parser)
    parser.add_argument("domain", help="the new domain")
    parser.add_argument("--rebuild", action="store_true", help="average it into the backbone too")


def _shrink(parser: Parser) -> None:
    _recipe(parser)
    parser.add_argument("domain", help="the one that leaves")
    parser.add_argument("--rebuild", action="store_true", help="take it out of the backbone too")


def _tidy(parser: Parser) -> None:
    _recipe(parser)
    parser.add_argument("--apply", action="store_true", help="remove what is shown")


class _Different(argparse.Action):
    """Values of which none is given twice: two runs of one seed are one, and deviate by nothing."""

    def __call__(self, parser: Any, chosen: Any, values: Any, option: str | None = None) -> None:
        if len(set(values)) < len(values):
            parser.error(f"argument {option}: a seed is given twice")
        setattr(chosen, self.dest, values)


def _each_seed(parser: Parser, about: str, **more: Any) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", action=_Different, help=about, **more)


def _seeds(parser: Parser) -> None:
    _recipe(parser)
    _each_seed(parser, "0, 1 and 2 by default", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True, help="folder for the page")


def _compare(parser: Parser) -> None:
    _rows(parser)
    parser.add_argument(
        "--tokens",
        dest="set",
        action="append",
        type="comparison.tokens={}".format,
        help="budget of each trained row, after the seed",
    )
    _each_seed(parser, "one run each; the recipe's by default")
    parser.add_argument("--out", type=Path, help="folder for a page with means and deviations")


def _ders(parser: Parser) -> None:
    _rows(parser)
    parser.add_argument("--out", type=Path, help="write a page of the results into this folder")


def _simoe(parser: Parser) -> None:
    _remade(parser)
    _each_seed(parser, "run once a seed")
    parser.add_argument("--out", type=Path, help="write a page of the results into this folder")


def _first_night(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", default=Path("texts"), help="texts")


def _notice(parser: Parser) -> None:
    parser.add_argument("block", metavar="TYPE/NAME", help="the block of the receiver")


def _announce(parser: Parser) -> None:
    parser.add_argument("what", nargs="?", default="text", help="what is new, for people")


def _rollback(parser: Parser) -> None:
    parser.add_argument("name", help="the registered model")
    about = "of the champion that is taken back: done again, no other follows it"
    parser.add_argument("version", nargs="?", type=int, help=about)
    parser.add_argument("--because", default="", metavar="REASON", help="is kept with the version")


def _restore(parser: Parser) -> None:
    parser.add_argument("name", help="the registered model")
    parser.add_argument("version", nargs="?", default="champion", help="a number, or an alias")
    parser.add_argument("--into", help="home to restore into; the one at work by default")
    parser.add_argument("--remote", help="DVC remote; the recipe's by default")


def _certify(parser: Parser) -> None:
    parser.add_argument("model", help="NAME@ALIAS or NAME/VERSION in the MLflow registry")
    parser.add_argument("--readers", nargs="+", help="who is asked (docs/serving.md); all")
    parser.add_argument(
        "--forms", nargs="+", metavar="FORM", help="fp32 (or bf16), and of GGUF F32, F16, Q8_0; all"
    )
    parser.add_argument(
        "--seconds", type=float, default=900, help="a reader may take for one form; 900"
    )


def _model(parser: Parser) -> None:
    """Let a command name a model, and say where and how it computes."""
    parser.add_argument("model", help="NAME@ALIAS or NAME/VERSION in the MLflow registry")
    parser.add_argument("--device", help="cpu, cuda, cuda:1; by default a GPU where there is one")
    parser.add_argument(
        "--precision", choices=("auto", "fp32", "bf16"), default="fp32", help="arithmetic"
    )


def _chat(parser: Parser) -> None:
    _model(parser)
    about = f"of the page; {CHAT_PORT} by default"
    parser.add_argument("--port", type=int, default=CHAT_PORT, help=about)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _generate(parser: Parser) -> None:
    _model(parser)
    parser.add_argument(
        "prompts",
        metavar="prompt",
        nargs="+",
        help="text to continue; a special token's name in it is text like any other",
    )
    parser.add_argument(
        "--chat", action="store_true", help="answer the prompt, in the model's chat template"
    )
    parser.add_argument("--tokens", type=_count, default=100, help="at most this many new tokens")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)


def _serve(parser: Parser) -> None:
    from infra.serving.follower import Patience, Swap
    from tasks.serving.engines import Name

    parser.add_argument("model", help="NAME@ALIAS, which is followed, or NAME/VERSION")
    parser.add_argument("--engine", choices=get_args(Name), default="transformers")
    about = f"of loopback ({SERVE_PORT}; 0: any)"
    parser.add_argument("--port", type=int, default=SERVE_PORT, help=about)
    parser.add_argument("--device", help="cpu, cuda, cuda:1; by default a GPU where there is one")
    parser.add_argument(
        "--precision", choices=("auto", "fp32", "bf16"), default="fp32", help="type of weights"
    )
    parser.add_argument("--python", type=Path, help="the interpreter of vLLM's environment")
    parser.add_argument(
        "--swap",
        choices=get_args(Swap),
        default="auto",
        help="when the alias moves: start the new engine beside the old one, or instead of it, "
        "while requests wait; auto: beside it where both fit into memory",
    )
    usual = Patience()
    parser.add_argument(
        "--hold", type=float, default=usual.hold, help="seconds that a request waits for an engine"
    )
    parser.add_argument(
        "--drain", type=float, default=usual.drain, help="seconds to finish what it is asked"
    )
    parser.add_argument(
        "--start", type=float, default=usual.start, help="seconds for an engine to come up"
    )
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="for the engine itself")
    parser.passes_on = True


ARGUMENTS: Mapping[str, Callable[[Parser], None]] = {
    "announce": _announce,
    "certify": _certify,
    "chat": _chat,
    "compare": _compare,
    "ders": _ders,
    "dume": _dume,
    "evaluate": _rows,
    "first_night": _first_night,
    "generate": _generate,
    "grow": _grow,
    "make": _remade,
    "notice": _notice,
    "plan": _plan,
    "restore": _restore,
    "retrain": _recipe,
    "rollback": _rollback,
    "seeds": _seeds,
    "serve": _serve,
    "shrink": _shrink,
    "simoe": _simoe,
    "symphony": _remade,
    "tidy": _tidy,
}
"""What each command can be told."""
