"""What each row of a comparison cost: the stages behind it, their time and memory."""

from infra.recipe.schema import Recipe
from tasks.engine.costs import Cost, read_cost
from tasks.engine.workspace import Workspace


def row_costs(recipe: Recipe, workspace: Workspace) -> dict[str, Cost]:
    """{row: what was spent on it after the seed}; a row is absent if any part of it is unknown.

    Evaluation is left out: every row has the same.
    """
    experts = [f"experts@{domain}" for domain in recipe.domains]
    statistics = [f"statistics@{domain}" for domain in recipe.domains]
    dume = [*experts, "backbone", *statistics, "router", "model"]
    stages = {
        "seed": [],
        "model_averaging": experts,
        "random_routing": [*experts, "backbone", "model"],
        "dume": dume,
        "oracle": [*experts, "backbone", "model"],
    }
    for name, row in recipe.baselines.items():
        begun = dume if row.method == "dume" else experts if row.uses_experts else []
        stages[name] = [*begun, f"baselines-{name}"] if row.trains else begun
    found = {}
    for row_name, labels in stages.items():
        costs = [read_cost(workspace, label) for label in labels]
        known = [cost for cost in costs if cost is not None]
        if len(known) == len(costs):
            found[row_name] = Cost.together(known)
    return found
