"""Stage ``answers``: what a model answers to instructions that were held out, and its structure."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from infra.recipe.schema import Recipe, TuningConfig
from tasks.engine.artifacts import ANSWERS
from tasks.engine.stage import StageRun, stage
from tasks.engine.workspace import take
from tasks.scoring.architectures import register_architectures
from tasks.simoe.rows import model_of, section, tuned
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.corpora.config import Bos
from upcycle_core.evaluation.instructions.activations import Use, expert_activations
from upcycle_core.evaluation.instructions.answers import answer
from upcycle_core.evaluation.instructions.scores import (
    METRICS,
    SPLITS,
    Split,
    references_of,
    score_answers,
)
from upcycle_core.evaluation.instructions.structure import structure_of
from upcycle_core.progress import Progress
from upcycle_core.simoe.config import SimoeUpcyclingConfig


def _params(recipe: Recipe, _row: str) -> Iterator[str]:
    """What came later decides nothing where it is the default."""
    yield from ("tuning.max_new_tokens", "tuning.batch_size", "corpus.bos")
    if recipe.tuning.precision != TuningConfig().precision:
        yield "tuning.precision"


@stage(
    "answers/{tuned}",
    lambda recipe, row: [*(f"instructions/{split}.jsonl" for split in SPLITS), model_of(row)],
    params=_params,
    each=tuned,
)
def answers(run: StageRun) -> None:
    """Write ``answers.json`` and, an instance a line, ``seen.jsonl`` and ``unseen.jsonl``.

    One piece after the other: what a killed flow has asked is not asked again.
    """
    arguments = answer_arguments(run.recipe, run.path) | {"model": run.path(model_of(run.item))}
    asked = {
        split: run.done(split, split_piece, "evaluation", split=split, **arguments)
        for split in SPLITS
    }
    del arguments["max_new_tokens"]
    looked = run.done("structure", structure_piece, "evaluation", **arguments)
    for done in asked.values():
        if done.result is not None:
            take(done.path, run.out)
    _write(run.out, {split: done.result for split, done in asked.items()}, looked.result)
    row = run.recipe.baselines.get(run.item)
    config = section(run.recipe) if row is None else row.simoe or SimoeUpcyclingConfig()
    by_token = config.routing == "token"
    use = looked.result.get("use")
    for warning in Use.from_dict(use).warnings(by_token=by_token) if use else ():
        run.session.log(f"{run.item}: {warning}")


def answer_arguments(recipe: Recipe, path: Callable[[str], Path]) -> dict[str, Any]:
    """What ``answers_piece`` is given for every model; ``path`` finds an artifact."""
    return {
        "instructions": path(f"instructions/{SPLITS[0]}.jsonl").parent,
        "max_new_tokens": recipe.tuning.max_new_tokens,
        "batch_size": recipe.tuning.batch_size,
        "precision": recipe.tuning.precision,
        "bos": recipe.corpus.bos,
        "device": recipe.compute.evaluation.device,
    }


def split_piece(
    *,
    out: Path,
    progress: Progress,
    split: Split,
    model: Path,
    instructions: Path,
    max_new_tokens: int,
    **common: Any,
) -> dict[str, Any] | None:
    """The piece: one model's answers to one split; None, and no file, where it asks nothing."""
    register_architectures()
    own = _rows(instructions, split)
    if not own:
        return None
    found = answer(model, own, max_new_tokens=max_new_tokens, progress=progress, **common)
    score = score_answers(found.texts, own, truncated=found.truncated)
    out.mkdir(exist_ok=True)
    with (out / f"{split}.jsonl").open("w") as file:
        for row, text in zip(own, found.texts, strict=True):
            said = {"id": row["id"], "category": row["category"], "prompt": row["prompt"]}
            said |= {"references": references_of(row), "answer": text}
            file.write(json.dumps(said, ensure_ascii=False) + "\n")
    figures = {f"{metric}_{split}": 100 * getattr(score, metric) for metric in METRICS}
    return {"scores": score.to_dict(), "figures": figures}


def structure_piece(
    *, out: Path, progress: Progress, model: Path, instructions: Path, **common: Any
) -> dict[str, Any]:
    """The piece: one model's parameters, and what is to be seen in a SIMoE alone."""
    register_architectures()
    rows = [row for split in SPLITS for row in _rows(instructions, split)]
    return _structure(model, rows, {**common, "progress": progress})


def answers_piece(*, out: Path, progress: Progress, max_new_tokens: int, **common: Any) -> None:
    """The piece: all of one model."""
    common["progress"] = progress
    asked = {
        split: split_piece(out=out, split=split, max_new_tokens=max_new_tokens, **common)
        for split in SPLITS
    }
    _write(out, asked, structure_piece(out=out, **common))


def champion_piece(*, model: Path, bos: Bos, **arguments: Any) -> None:
    """The piece: a model that may have been tuned before models brought their form along.

    Nothing stood before a question then, whatever the tokenizer puts before texts.
    """
    has_form = load_tokenizer(model).chat_template is not None
    answers_piece(model=model, bos=bos if has_form else "never", **arguments)


def _rows(instructions: Path, split: Split) -> list[dict[str, Any]]:
    with (instructions / f"{split}.jsonl").open() as lines:
        return [json.loads(line) for line in lines]


def _write(
    out: Path, asked: Mapping[Split, Mapping[str, Any] | None], structure: Mapping[str, Any]
) -> None:
    """Write what ``split_piece`` and ``structure_piece`` have found."""
    found = {split: one for split, one in asked.items() if one is not None}
    values = {
        "scores": {split: one["scores"] for split, one in found.items()},
        "figures": {
            name: value for one in found.values() for name, value in one["figures"].items()
        },
        **structure,
    }
    (out / ANSWERS).write_text(json.dumps(values, indent=1) + "\n")


def _structure(
    model: Path, rows: Sequence[Mapping[str, Any]], common: Mapping[str, Any]
) -> dict[str, Any]:
    """Parameters, and what is to be seen in a SIMoE alone: of others no weight is read."""
    from upcycle_core.simoe.model.modeling_simoe import SimoeForCausalLM, gated_modules

    config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    sizes = {name: p.numel() for name, p in network.named_parameters()}
    found: dict[str, Any] = {"parameters": sum(sizes.values())}
    if isinstance(network, SimoeForCausalLM):
        network = load_causal_lm(model, device="cpu")  # it is looked at, not run
        structure = structure_of(gated_modules(network))
        found["structure"] = structure.to_dict()
        own = [n for n in sizes if n.endswith(".delta") or n.startswith("router.")]
        dense = found["parameters"] - sum(sizes[name] for name in own)
        found["density_parameters"] = round(dense + structure.density * structure.parameters)
        del network
        activations = expert_activations(model, rows, **common)
        found["activations"] = [activation.to_dict() for activation in activations]
        found["use"] = Use.of(activations).to_dict()
    return found
