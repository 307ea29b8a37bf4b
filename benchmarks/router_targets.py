"""Whether another regression than DUME's makes better routers, on a finished model.

    python -m benchmarks.router_targets [RECIPE] [--set KEY=VALUE ...] [--tokens N]

Reads the workspace of ``flows.dume RECIPE``, the demo's by default, and changes nothing in it. All
rows regress on the same router inputs x of N calibration tokens a domain, each domain's sent
through its own expert as DUME does. F_e(x) is what expert e makes of them, d the domain's own, and
g the gradient of the token's loss by what the layer's experts put out:

- ridge: DUME's. One-hot labels, every token counts alike.
- weighted: the same, tokens weighted by |F_d - mean F_e|^2, or by the mean of |F_e - F_d|^2.
- cost: no labels; what each expert costs is regressed, and the cheapest takes the token:
  |F_e - F_d|^2, its curvature (g (F_e - F_d))^2, or the loss to second order, g (F_e - F_d) +
  (g (F_e - F_d))^2 / 2.
- logistic: multinomial logistic regression on the labels until it converges, which sees of a domain
  what a linear router can; once more on the inputs that these routers make.

Solutions stay as they are, times 8 (``router: {normalise: none, scale: 8}``); a wrong expert costs
1 on the average. Percent of each domain's dense expert, mean of domains.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.closed_form import COLUMNS, table
from infra import settings as environment
from infra.recipe.schema import Recipe
from tasks.recipes import load_recipe
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.corpora.batches import Batch, paragraph_batches, paragraphs
from upcycle_core.corpora.shards import TokenCorpus
from upcycle_core.evaluation.text.pieces import Variant, evaluate_moe
from upcycle_core.evaluation.text.results import expert_row
from upcycle_core.evaluation.text.scores import Score
from upcycle_core.moe.inspect import force_expert, set_routers

Routers = dict[int, Tensor]
"""Layer to W [H, D]."""
Batches = Callable[[], Iterator[tuple[int, Batch]]]
SCALE, LAMBDA, DECAY, ITERATIONS = 8.0, 0.01, 1e-4, 60


def main() -> None:
    """Solve, score and print every row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("recipe", type=Path, nargs="?", default=Path("recipes/demo.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--tokens", type=int, default=50_000)
    chosen = parser.parse_args()
    recipe = load_recipe(chosen.recipe, chosen.set)
    workspace = environment.configure().home / recipe.name
    model = load_causal_lm(workspace / "model", dtype=torch.float32).requires_grad_(False)
    batches = partial(batches_of, workspace, recipe, chosen.tokens)
    rows = {**closed_forms(model, batches), **logistic(model, batches)}
    print(table(scored(recipe, workspace, rows)))


def batches_of(workspace: Path, recipe: Recipe, tokens: int) -> Iterator[tuple[int, Batch]]:
    """Each domain's number with each batch of its calibration text."""
    config = recipe.statistics
    for number, domain in enumerate(recipe.domains):
        corpus = TokenCorpus(workspace / "corpora" / domain / "calibration")
        pieces = paragraphs(corpus, sequence_length=config.sequence_length, max_tokens=tokens)
        for batch in paragraph_batches(corpus, pieces, config.batch_size):
            yield number, batch


def blocks_of(model: Any) -> list[Any]:
    """The MoE block of every layer."""
    return [module for module in model.modules() if hasattr(module, "gate")]


class Sums:
    """Normal equations of a layer for every row, [H, H] and [H, D] fp64."""

    def __init__(self, experts: int, hidden: int) -> None:
        self.equations: dict[str, list[Tensor]] = {}
        self.experts, self.hidden = experts, hidden

    def add(self, own: int, x_TH: Tensor, made_TDH: Tensor, gradient_TH: Tensor) -> None:
        """Count tokens of domain ``own``: inputs, what each expert makes, the loss's gradient."""
        labels_TD = F.one_hot(torch.full((len(x_TH),), own), self.experts).double()
        away_TDH = made_TDH - made_TDH[:, own : own + 1]
        squares_TD = away_TDH.square().sum(-1).double()
        slope_TD = (gradient_TH[:, None] * away_TDH).sum(-1).double()
        from_mean_T = (made_TDH[:, own] - made_TDH.mean(1)).square().sum(-1).double()
        even_T = torch.ones(len(x_TH), dtype=torch.float64)
        for row, weights_T, targets_TD in (
            ("ridge", even_T, labels_TD),
            ("weighted by its own distance from the mean", from_mean_T, labels_TD),
            ("weighted by the distance of all", squares_TD.mean(1), labels_TD),
            ("cost: squared distance", even_T, -squares_TD),
            ("cost: curvature", even_T, -slope_TD.square()),
            ("cost: loss to second order", even_T, -slope_TD - slope_TD.square() / 2),
        ):
            weighted_TH = weights_T[:, None] * x_TH.double()
            found = (weighted_TH.T @ x_TH.double(), weighted_TH.T @ targets_TD)
            scale = torch.stack([weights_T.sum(), targets_TD.abs().sum()])
            sums = self.equations.setdefault(
                row, [torch.zeros_like(part) for part in (*found, scale)]
            )
            for total, part in zip(sums, (*found, scale), strict=True):
                total += part

    def solved(self) -> dict[str, Tensor]:
        """W [H, D] by row."""
        found, identity = {}, torch.eye(self.hidden, dtype=torch.float64)
        tokens = self.equations["ridge"][2][0]
        for row, (gram_HH, sums_HD, (weight, targets)) in self.equations.items():
            gram_HH, sums_HD = (part * tokens / weight for part in (gram_HH, sums_HD))
            if row.startswith("cost"):
                sums_HD = sums_HD * tokens * (self.experts - 1) / targets
            found[row] = SCALE * torch.linalg.solve(gram_HH + LAMBDA * identity, sums_HD)
        return found


def closed_forms(model: Any, batches: Batches) -> dict[str, Routers]:
    """The routers of every row but the logistic ones."""
    blocks = blocks_of(model)
    sums = [Sums(*block.gate.weight.shape) for block in blocks]
    for own, batch in batches():
        real = batch.attention_mask.bool()
        for block, total, (x_BSH, gradient_BSH) in zip(
            blocks, sums, gradients(model, own, batch), strict=True
        ):
            made = []
            for expert in range(total.experts):
                with torch.no_grad(), force_expert(block, expert):
                    made.append(put_out(block(x_BSH))[real])
            total.add(own, x_BSH[real], torch.stack(made, dim=1), gradient_BSH[real])
    solved = [total.solved() for total in sums]
    return {row: {layer: own[row] for layer, own in enumerate(solved)} for row in solved[0]}


def gradients(model: Any, own: int, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Inputs of every MoE block and the gradient of the summed loss by its output, [B, S, H]."""
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_block: nn.Module, inputs: tuple[Tensor], output: Any) -> None:
        put_out(output).retain_grad()
        seen.append((inputs[0].detach(), put_out(output)))

    ids_BS = batch.input_ids
    embedded = model.get_input_embeddings()(ids_BS).requires_grad_()
    with ExitStack() as stack:
        stack.enter_context(force_expert(model, own))
        for block in blocks_of(model):
            stack.callback(block.register_forward_hook(keep).remove)
        logits = model(inputs_embeds=embedded, attention_mask=batch.attention_mask).logits
    labels_BS = ids_BS.masked_fill(batch.attention_mask == 0, -100)[:, 1:]
    F.cross_entropy(logits[:, :-1].transpose(1, 2), labels_BS, reduction="sum").backward()
    found = [(x, output.grad) for x, output in seen]
    assert all(gradient is not None for _, gradient in found)
    return [(x, gradient) for x, gradient in found if gradient is not None]


def put_out(output: Any) -> Tensor:
    """What a block adds to the residual stream; some return their router's logits beside it."""
    return output[0] if isinstance(output, tuple) else output


def logistic(model: Any, batches: Batches) -> dict[str, Routers]:
    """Logistic routers on inputs as DUME's, and on those that a token meets on its way then."""
    first = fitted(*router_inputs(model, batches, forced=True))
    set_routers(model, first)
    return {
        "logistic": first,
        "logistic, on routed inputs": fitted(*router_inputs(model, batches, forced=False)),
    }


def router_inputs(model: Any, batches: Batches, *, forced: bool) -> tuple[list[Tensor], Tensor]:
    """Inputs of every router, [T, H] a layer, and each token's domain, [T]."""
    blocks, labels = blocks_of(model), []
    inputs: list[list[Tensor]] = [[] for _ in blocks]
    for own, batch in batches():
        real = batch.attention_mask.bool()

        def keep(layer: int, _block: nn.Module, given: tuple[Tensor], real: Tensor = real) -> None:
            inputs[layer].append(given[0][real])

        with ExitStack() as stack, torch.no_grad():
            if forced:
                stack.enter_context(force_expert(model, own))
            for layer, block in enumerate(blocks):
                stack.callback(block.register_forward_pre_hook(partial(keep, layer)).remove)
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        labels.append(torch.full((int(real.sum()),), own))
    return [torch.cat(layer) for layer in inputs], torch.cat(labels)


def fitted(inputs: list[Tensor], labels_T: Tensor) -> Routers:
    """Multinomial logistic regression, layer by layer."""
    routers, experts = {}, int(labels_T.max()) + 1
    for layer, x_TH in enumerate(inputs):
        scale = x_TH.std()
        weight_HD = torch.zeros(x_TH.shape[1], experts, requires_grad=True)
        search: Any = {"max_iter": ITERATIONS, "line_search_fn": "strong_wolfe"}
        optimizer = torch.optim.LBFGS([weight_HD], **search)

        def loss(x_TH: Tensor = x_TH / scale, weight_HD: Tensor = weight_HD) -> Tensor:
            weight_HD.grad = None
            found = F.cross_entropy(x_TH @ weight_HD, labels_T)
            found = found + DECAY * weight_HD.square().sum()
            found.backward()
            return found

        optimizer.step(loss)
        routers[layer] = (weight_HD / scale).detach()
    return routers


def scored(
    recipe: Recipe, workspace: Path, rows: Mapping[str, Routers]
) -> dict[str, dict[str, float]]:
    """Each row's figures, as in the tables of ``benchmarks.closed_form``."""
    texts = {domain: workspace / "corpora" / domain / "heldout" for domain in recipe.domains}
    report = json.loads((workspace / "report" / "metrics.json").read_text())
    variants = {
        f"{k} {row}": Variant(routers=routers, top_k=k)
        for row, routers in rows.items()
        for k in (1, 2)
    }
    found = evaluate_moe(workspace / "model", variants, texts, config=recipe.evaluation)

    def percent(variant: str) -> list[float]:
        return [
            100 * report["perplexity"][expert_row(domain)][domain] / Score.from_dict(own).perplexity
            for domain, own in found[variant]["scores"].items()
        ]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    table: dict[str, dict[str, float]] = {}
    for row in rows:
        one, counts = percent(f"1 {row}"), found[f"1 {row}"]["routing"]
        agreed = [
            sum(layer[index] for layer in counts[domain]) / sum(map(sum, counts[domain]))
            for index, domain in enumerate(texts)
        ]
        oracle = report["normalised_average"]["oracle"]
        figures = (oracle, mean(one), mean(percent(f"2 {row}")), 100 * mean(agreed), min(one))
        table[row] = dict(zip(COLUMNS, figures, strict=True))
    return table


if __name__ == "__main__":
    main()
