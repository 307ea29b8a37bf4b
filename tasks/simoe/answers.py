"""Stage ``answers``: what a model answers to instructions that were held out, and its structure."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from infra.recipe.schema import Recipe, TuningConfig
from tasks.engine.artifacts import ANSWERS
from tasks.engine.stage import StageRun, stage
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
    SplitScore,
    references_of,
    score_answers,
)
from upcycle_core.evaluation.instructions.structure import structure_of
from upcycle_core.precision import Precision
from upcycle_core.progress import Progress
from upcycle_core.simoe.config import SimoeUpcyclingConfig


def _params(recipe: Recipe, _row: str) -> Iterator[str]:
    """What came later decides nothing where it is the default."""
    yield from ("tuning.max_new_tokens", "tuning.batch_size", "corpus.bos")
    if recipe.tuning.precision != TuningConfig().precision:
        yield "tuning.precision"


@stage(
    "answers/{tuned}",
    lambda recipe, row: ["instructions", model_of(row)],
    params=_params,
    each=tuned,
)
def answers(run: StageRun) -> None:
    """Write ``answers.json`` and, an instance a line, ``seen.jsonl`` and ``unseen.jsonl``."""
    arguments = answer_arguments(run.recipe, run.path)
    run.run_one(answers_piece, "evaluation", **arguments, model=run.path(model_of(run.item)))
    use = json.loads((run.out / ANSWERS).read_text()).get("use")
    row = run.recipe.baselines.get(run.item)
    config = section(run.recipe) if row is None else row.simoe or SimoeUpcyclingConfig()
    by_token = config.routing == "token"
    for warning in Use.from_dict(use).warnings(by_token=by_token) if use else ():
        run.session.log(f"{run.item}: {warning}")


def answer_arguments(recipe: Recipe, path: Callable[[str], Path]) -> dict[str, Any]:
    """What ``answers_piece`` is given for every model; ``path`` finds an artifact."""
    return {
        "instructions": path("instructions"),
        "max_new_tokens": recipe.tuning.max_new_tokens,
        "batch_size": recipe.tuning.batch_size,
        "precision": recipe.tuning.precision,
        "bos": recipe.corpus.bos,
        "device": recipe.compute.evaluation.device,
    }


def answers_piece(
    *,
    out: Path,
    progress: Progress,
    model: Path,
    instructions: Path,
    max_new_tokens: int,
    batch_size: int,
    precision: Precision,
    bos: Bos,
    device: str,
) -> None:
    """The piece: one model."""
    register_architectures()
    out.mkdir()
    common: dict[str, Any] = {"batch_size": batch_size, "precision": precision, "bos": bos}
    common |= {"device": device, "progress": progress}
    scores: dict[str, SplitScore] = {}
    rows: list[Mapping[str, Any]] = []
    for split in SPLITS:
        own = [json.loads(line) for line in (instructions / f"{split}.jsonl").open()]
        if not own:
            continue
        found = answer(model, own, max_new_tokens=max_new_tokens, **common)
        scores[split] = score_answers(found.texts, own, truncated=found.truncated)
        with (out / f"{split}.jsonl").open("w") as file:
            for row, text in zip(own, found.texts, strict=True):
                said = {"id": row["id"], "category": row["category"], "prompt": row["prompt"]}
                said |= {"references": references_of(row), "answer": text}
                file.write(json.dumps(said, ensure_ascii=False) + "\n")
        rows += own
    values = {
        "scores": {split: score.to_dict() for split, score in scores.items()},
        "figures": {
            f"{metric}_{split}": 100 * getattr(score, metric)
            for split, score in scores.items()
            for metric in METRICS
        },
        **_structure(model, rows, common),
    }
    (out / ANSWERS).write_text(json.dumps(values, indent=1) + "\n")


def champion_piece(*, model: Path, bos: Bos, **arguments: Any) -> None:
    """The piece: a model that may have been tuned before models brought their form along.

    Nothing stood before a question then, whatever the tokenizer puts before texts.
    """
    has_form = load_tokenizer(model).chat_template is not None
    answers_piece(model=model, bos=bos if has_form else "never", **arguments)


def _structure(
    model: Path, rows: list[Mapping[str, Any]], common: Mapping[str, Any]
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
