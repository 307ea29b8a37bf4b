"""Text asked for against text there is: a recipe may ask for more tokens than a corpus holds."""

from collections.abc import Mapping
from pathlib import Path

from tasks.engine.stage_run import StageRun
from upcycle_core.corpora.reader import TokenCorpus


def say_lacking(
    run: StageRun, texts: Mapping[str, Path], asked: int | None, *, key: str, again: bool = False
) -> None:
    """Say of which texts there are fewer tokens than the recipe asks for.

    Args:
        run: The stage that reads them.
        texts: Splits by name.
        asked: Tokens of each; None for all there are.
        key: Where the recipe says so.
        again: Whether they are read again from the beginning, until there are enough.
    """
    for name, path in texts.items():
        had = int(TokenCorpus(path).offsets[-1])
        if asked is None or not 0 < had < asked:
            continue
        done = f"they are read {asked / had:.1f} times over" if again else "all of them are read"
        said = f"{key} asks for {asked:,} tokens, and {name} has {had:,}: {done}"
        run.session.log(f"{run.stage.label(run.item)}: {said}")
