"""Parameters that upcycling adds, counted, beside the figures that the DeRS paper prints.

    python -m benchmarks.ders_parameters
    python -m benchmarks.ders_parameters --config PATH/config.json --experts 4 \\
        --layers every-other --codec low_rank --rank 4 --universal none

Nothing is timed and no weight is read: both models are built without storage and subtracted. The
deviation is ours minus the paper's in units of the last digit that the paper prints.

Sizes are those of the published configurations, with two remarks. Qwen-1.8B's code halves its
``intermediate_size`` of 11008; transformers has no class for it, and a Llama of its sizes has the
same FFN (gated, no bias). Coder-MoE is built with XFT, whose router has a second matrix, of the
noise that it learns to add: it counts twice there.

N experts, H hidden size, I intermediate size, L MoE layers, p drop rate, r rank. What comes out is,
with F the numbers of one FFN's matrices (3 H I if it is gated, else 2 H I) and S the sum of their
sides (3 (H + I), or 2 (H + I)):

    vanilla L (N - 1) F, sparse L N (1 - p) F, low rank L N r S, each with L N H of the routers,

L F more for a universal FFN of its own, N + 1 for N where it is one more delta. Where the FFN has
biases, each expert has its own, as N copies have.
"""

import argparse
import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModel

from benchmarks.common import parser_of, print_result, print_table
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.ders.source import dense_config
from upcycle_core.ders.upcycle import ders_config, moe_layers
from upcycle_core.errors import Fault, InputError

EXPERTS = 4
UNIVERSAL, ROUTER = ".mlp.universal.", ".mlp.gate.weight"
MODELS: Mapping[str, Mapping[str, Any]] = {
    "StableLM-2-1.6B": {
        "model_type": "stablelm",
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "use_qkv_bias": True,
    },
    "Qwen-1.8B": {
        "model_type": "llama",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008 // 2,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "Phi-2": {
        "model_type": "phi",
        "vocab_size": 51200,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "DeepSeek-Coder-1.3B": {
        "model_type": "llama",
        "vocab_size": 32256,
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
}
STABLE, QWEN, PHI, CODER = MODELS


@dataclass(frozen=True)
class Row:
    """One model of the paper.

    Args:
        table: Where it is printed.
        model: Its dense model.
        printed: Added parameters; those of universal FFNs first where they are printed apart.
        config: DeRS upcycling; None for N copies of each FFN.
        universal: Whether there is a universal FFN, where ``config`` does not say.
        doubt: Why the printed figure cannot be right.
    """

    table: str
    model: str
    printed: str
    config: DersUpcyclingConfig | None = None
    universal: bool = False
    doubt: str = ""


def _sparse(p: float, universal: Any = "none", layers: Any = "every-other") -> DersUpcyclingConfig:
    return DersUpcyclingConfig(codec="sparse", drop_rate=p, universal=universal, layers=layers)


def _rank(r: int, universal: Any = "none", layers: Any = "every-other") -> DersUpcyclingConfig:
    return DersUpcyclingConfig(codec="low_rank", rank=r, universal=universal, layers=layers)


PAPER = (
    Row("1", STABLE, "1.24B"),
    Row("1", STABLE, "0.26M", _sparse(0.9999)),
    Row("1", STABLE, "1.20M", _rank(1)),
    Row("1", QWEN, "1.22B"),
    Row("1", QWEN, "0.26M", _sparse(0.9999)),
    Row("1", QWEN, "1.19M", _rank(1)),
    Row("1", PHI, "2.52B"),
    Row("1", PHI, "1.11M", _sparse(0.9999)),
    Row("1", PHI, "2.42M", _rank(1)),
    Row("2", STABLE, "0.42B+1.24B", universal=True),
    Row(
        "2",
        STABLE,
        "0.42B+0.29M",
        _sparse(0.9999, "own"),
        doubt="Table 1 prints 0.26M for the same layers",
    ),
    Row("2", STABLE, "0.42B+1.20M", _rank(1, "own")),
    Row("2", PHI, "0.84B+2.52B", universal=True),
    Row("2", PHI, "0.84B+1.11M", _sparse(0.9999, "own")),
    Row("2", PHI, "0.84B+2.42M", _rank(1, "own")),
    Row("3", CODER, "0.81B+2.43B", universal=True),
    Row("4", CODER, "0.81B+0.72M", _sparse(0.9999, "own", "all")),
    Row("4", CODER, "0.81B+3.64M", _sparse(0.999, "own", "all")),
    Row("4", CODER, "0.81B+32.9M", _sparse(0.99, "own", "all")),
    Row("3, 4", CODER, "0.81B+325M", _sparse(0.9, "own", "all")),
    Row("4", CODER, "0.81B+2.57M", _rank(1, "own", "all")),
    Row("3, 4", CODER, "0.81B+9.09M", _rank(4, "own", "all")),
    Row("4", CODER, "0.81B+35.2M", _rank(16, "own", "all")),
    Row("4", CODER, "0.81B+140M", _rank(64, "own", "all")),
    Row("S7", STABLE, "1.66B", universal=True),
    Row("S7", STABLE, "2.17M", _sparse(0.999, "delta")),
    Row("S7", STABLE, "5.63M", _rank(4, "delta")),
    Row("S7", PHI, "3.36B", universal=True),
    Row("S7", PHI, "5.18M", _sparse(0.999, "delta")),
    Row("S7", PHI, "9.18M", _rank(4, "delta")),
    Row("S8", CODER, "3.24B", universal=True),
    Row("S8", CODER, "406M", _sparse(0.9, "delta", "all")),
    Row("S8", CODER, "11.3M", _rank(4, "delta", "all")),
)


@dataclass(frozen=True)
class Added:
    """Parameters of an upcycled model that its dense model does not have, in numbers.

    Args:
        experts: Of the experts: those of N copies but one, or of the deltas and their biases.
        routers: Of the routers, N H a layer.
        universal: Of universal FFNs with weights of their own.
    """

    experts: int
    routers: int
    universal: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.experts + self.routers + self.universal


def added_by_ders(dense: Mapping[str, Any], config: DersUpcyclingConfig, *, experts: int) -> Added:
    """Count what DeRS upcycling adds (section 3.4), by building both models on the meta device.

    Args:
        dense: The content of the dense model's config.json.
        config: Codec, its drop rate or rank, layers, universal FFN.
        experts: N.

    Raises:
        InputError: What cannot be upcycled so.
    """
    upcycled = ders_config(dense, config, experts=experts, top_k=1)
    with torch.device("meta"):
        return _difference(AutoModel.from_config(upcycled), _dense_model(dense))


def added_by_copies(
    dense: Mapping[str, Any],
    *,
    experts: int,
    layers: Literal["all", "every-other"] = "all",
    universal: bool = False,
) -> Added:
    """Count what vanilla upcycling adds: N copies of each FFN, and a router.

    Args:
        dense: The content of the dense model's config.json.
        experts: N.
        layers: Blocks that become Mixture-of-Experts.
        universal: Whether every token passes through one copy more.

    Raises:
        InputError: Fewer than two experts, or a dense model without ``layers`` and ``mlp``.
    """
    if experts < 2:
        raise InputError(Fault("experts", experts, "must be 2 or more"))
    with torch.device("meta"):
        model = _dense_model(dense)
        for layer in moe_layers(layers, len(model.layers)):
            block = nn.Module()
            ffn = model.layers[layer].mlp
            block.experts = nn.ModuleList(copy.deepcopy(ffn) for _ in range(experts))
            block.gate = nn.Linear(model.config.hidden_size, experts, bias=False)
            if universal:
                block.universal = ffn
            model.layers[layer].mlp = block
        return _difference(model, _dense_model(dense))


def _dense_model(dense: Mapping[str, Any]) -> Any:
    model = AutoModel.from_config(dense_config(dense))
    layers = getattr(model, "layers", None)
    if not layers or not hasattr(layers[0], "mlp"):
        remedy = "its blocks are not called layers, or have no mlp; give the dense text model"
        raise InputError(Fault("config.model_type", dense.get("model_type"), remedy))
    return model


def _difference(upcycled: nn.Module, dense: nn.Module) -> Added:
    sizes = {name: parameter.numel() for name, parameter in upcycled.named_parameters()}
    universal = sum(size for name, size in sizes.items() if UNIVERSAL in name)
    routers = sum(size for name, size in sizes.items() if name.endswith(ROUTER))
    before = sum(parameter.numel() for parameter in dense.parameters())
    return Added(sum(sizes.values()) - before - universal - routers, routers, universal)


def count(row: Row) -> Added:
    """Ours for one row of the paper."""
    if row.config is not None:
        return added_by_ders(MODELS[row.model], row.config, experts=EXPERTS)
    layers: Any = "all" if row.model == CODER else "every-other"
    return added_by_copies(
        MODELS[row.model], experts=EXPERTS, layers=layers, universal=row.universal
    )


def deviations(row: Row, added: Added) -> Iterator[tuple[str, float]]:
    """Each printed figure and how far ours lies from it, in units of its last digit."""
    routers = added.routers * (2 if row.model == CODER else 1)
    ours = [added.experts + routers + added.universal]
    printed = row.printed.split("+")
    if len(printed) == 2:
        ours = [added.universal, added.experts + routers]
    for figure, number in zip(printed, ours, strict=True):
        unit = 10.0 ** {"M": 6, "B": 9}[figure[-1]]
        decimals = len(figure[:-1].partition(".")[2])
        yield figure, (number / unit - float(figure[:-1])) * 10**decimals


def main() -> None:
    """Count and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--config", type=Path, help="config.json of a dense model")
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--layers", choices=("all", "every-other"), default="all")
    parser.add_argument("--codec", choices=("vanilla", "sparse", "low_rank"), default="low_rank")
    parser.add_argument("--drop-rate", type=float)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--universal", choices=("none", "own", "delta"), default="none")
    options = parser.parse_args()
    if options.config is None:
        _print_paper()
        return
    try:
        _print_one(options)
    except InputError as error:
        parser.error(str(error))


def _print_paper() -> None:
    rows, ratios = [], {}
    for row in PAPER:
        added = count(row)
        found = list(deviations(row, added))
        shown = ", ".join(f"{deviation:+.2f}" for _, deviation in found)
        rows.append([row.table, row.model, _method(row), *_numbers(added), row.printed, shown])
        rows[-1].append(row.doubt)
        ratios[f"{row.table} {row.model} {_method(row)}"] = max(abs(d) for _, d in found)
    columns = ["table", "dense model", "upcycling", "experts", "routers", "universal", "paper"]
    columns += ["deviation", "remark"]
    print_table(f"added parameters, {EXPERTS} experts", columns, rows)
    figures = {row.printed: row.doubt for row in PAPER if row.doubt}
    print_result("ders_parameters", ratios, {"doubted": figures})


def _print_one(options: argparse.Namespace) -> None:
    dense = json.loads(options.config.read_text(encoding="utf-8"))
    dense = dense.get("text_config") or dense  # of a LLaVA its language model
    if options.codec == "vanilla":
        universal = options.universal != "none"
        added = added_by_copies(
            dense, experts=options.experts, layers=options.layers, universal=universal
        )
    else:
        config = DersUpcyclingConfig(
            codec=options.codec,
            drop_rate=options.drop_rate,
            rank=options.rank,
            layers=options.layers,
            universal=options.universal,
        )
        added = added_by_ders(dense, config, experts=options.experts)
    columns = ["experts", "routers", "universal", "total"]
    print_table(
        f"added parameters of {options.config}", columns, [[*_numbers(added), f"{added.total:,}"]]
    )


def _numbers(added: Added) -> list[str]:
    return [f"{n:,}" for n in (added.experts, added.routers, added.universal)]


def _method(row: Row) -> str:
    if row.config is None:
        return "vanilla, universal" if row.universal else "vanilla"
    rate = row.config.drop_rate if row.config.codec == "sparse" else row.config.rank
    universal = {"none": "", "own": ", universal", "delta": ", universal as delta"}
    return f"{row.config.codec} {rate}{universal[row.config.universal]}"


if __name__ == "__main__":
    main()
