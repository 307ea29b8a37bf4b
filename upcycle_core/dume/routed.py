"""Experts repaired once more, on the tokens that the solved routers send them.

The first repair mends an expert for its own domain's tokens. Routers send it others too, and what
the merged model then lacks is the drift from the expert of the token's own domain, its teacher.
All domains' calibration text goes through the routed model layer by layer, each token through the
expert that is first for it, and each expert's down projection is regressed on what it was sent:

    dW_e = argmin sum_{t: e(t) = e} ||r_t - dW_e a_t||^2 + lambda_e ||dW_e||^2

r is the teacher's residual stream less the routed model's, a the inner activations; lambda is
chosen as in ``repair``. The next layer sees what the repaired experts of this one make.

No paper of it is known to us. Shapes: T tokens, B paragraphs, S tokens a paragraph, H hidden size,
I intermediate size, D domains.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from upcycle_core.activations.regression import HALVES, DriftSums, solve_drift
from upcycle_core.activations.resume import LayersDone, digest_of
from upcycle_core.activations.stream import LayerStream, Passing
from upcycle_core.allocator import trim
from upcycle_core.architectures.families import family_of
from upcycle_core.backbone.write import Plan, weights_type, write_model
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.writer import write_json
from upcycle_core.corpora.batches import Batch
from upcycle_core.dume.calibration import calibration_batches, layers_done
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.repair import REPORT, HeadTarget
from upcycle_core.precision import chosen
from upcycle_core.precision import weights_type as type_in
from upcycle_core.progress import Progress, Silent


@dataclass
class _Text:
    """A batch on its way through the routed model and its own domain's expert."""

    half: int
    counts_T: Tensor
    """Which tokens of the flattened batch count, bool."""
    routed: Passing
    own: Passing


class _RoutedFFN(nn.Module):
    """A layer's experts behind their router; each token goes to the first of them.

    Args:
        experts: The layer's FFNs.
        router_HD: W, in the type of the activations.
    """

    def __init__(self, experts: list[nn.Module], router_HD: Tensor) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.router_HD = router_HD
        self.rows: list[Tensor] = []
        """Of the last batch: the tokens that each expert was sent."""
        self.inner: list[Tensor] = []
        """What these are before its down projection, [T_e, I]."""

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_TH = x_BSH.reshape(-1, x_BSH.shape[-1])
        first_T = (x_TH @ self.router_HD).argmax(-1)
        out_TH = torch.zeros_like(x_TH)
        self.rows = [(first_T == e).nonzero().flatten() for e in range(len(self.experts))]
        self.inner = []
        for expert, rows in zip(self.experts, self.rows, strict=True):
            inner: list[Tensor] = []
            down: Any = expert.down_proj
            hook = down.register_forward_pre_hook(lambda _m, given, to=inner: to.append(given[0]))
            out_TH[rows] = expert(x_TH[rows])
            hook.remove()
            self.inner += inner
        return out_TH.reshape(x_BSH.shape)


def repair_routed(
    backbone: Path,
    experts: Mapping[str, Path],
    repaired: Mapping[str, Path],
    corpora: Mapping[str, Path],
    routers: Mapping[int, Tensor],
    out: Path,
    *,
    config: StatisticsConfig,
    max_shard_bytes: int,
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Write each repaired expert as a dense model, its MLPs repaired for what it is sent.

    Args:
        backbone: What ``write_backbone`` wrote.
        experts: Domain to its dense checkpoint, the teacher of its tokens.
        repaired: Domain to what ``repair_expert`` wrote; its order is the order of the experts.
        corpora: Domain to a split's directory, the calibration tokens.
        routers: Layer to W [H, D], columns in the order of ``repaired``.
        out: The directory that is written: a checkpoint with ``repair.json`` a domain. Beside it
            lies what each layer has made, until all is written: the same call goes on there.
        config: How much text is read, and in which arithmetic.
        max_shard_bytes: Size of one safetensors file.
        device: Where all models' layers are computed, one after the other.
        progress: Hears of every layer, and of every tensor.

    Returns:
        Of each domain's expert and layer ``lambda`` (None: not repaired), ``drift``, the share of
        the drift that is left on unseen text, and ``tokens``, how many it was sent.

    Raises:
        InputError: Activations are not finite.
    """
    progress, shared = progress or Silent(), CheckpointReader(backbone, field="backbone")
    readers = {name: CheckpointReader(path, field="repaired") for name, path in repaired.items()}
    texts = {name: calibration_batches(corpora[name], config) for name in readers}
    passes = _Passes(shared, experts, readers, corpora, texts, config=config, device=device)
    layers = shared.config["num_hidden_layers"]
    weights = digest_of(routers[index] for index in range(layers))
    done = layers_done(out, [weights, asdict(config)], passes.streams, [*texts.values()])
    progress.start(f"repairing what is routed{chosen(config.precision, device)}", layers, "layers")
    _repaired(passes, routers, done, layers, progress)
    said = {name: [facts[name] for facts in done.facts] for name in readers}
    for name, reader in readers.items():
        write_model(
            out / name,
            _plan(reader, done, name),
            reader.config,
            source=reader,
            max_shard_bytes=max_shard_bytes,
            what=f"writing {name}",
            progress=progress,
        )
        write_json(out / name / REPORT, said[name])
    done.remove()
    return said


def _repaired(
    passes: "_Passes",
    routers: Mapping[int, Tensor],
    done: LayersDone,
    layers: int,
    progress: Progress,
) -> None:
    """Go on through all layers."""
    progress.advance(len(done.facts))
    if len(done.facts) < layers:
        done.go_on(passes.passing)
    for index in range(len(done.facts), layers):
        made, facts = passes.repair(index, routers[index])
        trim()  # the sums of a layer; the next one has its own
        done.keep(made, passes.passing if index < layers - 1 else {}, facts)
        progress.advance()


def _plan(reader: CheckpointReader, done: LayersDone, name: str) -> Plan:
    """The repaired expert's tensors, down projections from what the layers have made."""
    family, dtype = family_of(reader.config), weights_type(reader)
    downs = {family.ffn(layer).down: layer for layer in range(len(done.facts))}
    plan: Plan = {}
    for tensor, shape in family.tensors(reader.config).items():
        new = partial(done.made, downs[tensor], name) if tensor in downs else None
        plan[tensor] = (shape, dtype, new or partial(reader.tensor, tensor))
    return plan


class _Passes:
    """All domains' text, on its way through the routed model and through their own experts."""

    def __init__(
        self,
        shared: CheckpointReader,
        experts: Mapping[str, Path],
        readers: Mapping[str, CheckpointReader],
        corpora: Mapping[str, Path],
        batches: Mapping[str, Sequence[Batch]],
        *,
        config: StatisticsConfig,
        device: str,
    ) -> None:
        self._dtype, self._device = type_in(config.precision, device), device
        self._family, self._readers = family_of(shared.config), readers
        first, *others = readers.values()
        self._routed = self._stream(first, beside=[reader.directory for reader in others])
        owns = {name: CheckpointReader(path, field="expert") for name, path in experts.items()}
        self._own = {name: self._stream(reader) for name, reader in owns.items()}
        self._texts = {name: self._started(name, batches[name]) for name in readers}
        self._heads = {
            name: HeadTarget(shared, owns[name], corpora[name])
            for name, reader in readers.items()
            if json.loads((reader.directory / REPORT).read_text())[-1]["target"] == "head"
        }
        """Of domains whose last layer was repaired towards the expert's logits."""

    def _stream(self, reader: CheckpointReader, beside: Sequence[Path] = ()) -> LayerStream:
        where: dict[str, Any] = {"dtype": self._dtype, "device": self._device, "beside": beside}
        return LayerStream(reader.directory, reader.tensor, **where)

    def _started(self, name: str, batches: Sequence[Batch]) -> list[_Text]:
        ids = [batch.input_ids for batch in batches]
        started = self._routed.start(ids), self._own[name].start(ids)
        return [
            _Text(batch.fold, batch.counted.bool().flatten().to(self._device), *pair)
            for batch, *pair in zip(batches, *started, strict=True)
        ]

    @property
    def streams(self) -> list[LayerStream]:
        """All models that text goes through."""
        return [self._routed, *self._own.values()]

    @property
    def passing(self) -> dict[str, Passing]:
        """What goes from layer to layer, by domain, batch and model."""
        found = {}
        for domain, texts in self._texts.items():
            for number, text in enumerate(texts):
                found[f"{domain}.{number}.routed"] = text.routed
                found[f"{domain}.{number}.own"] = text.own
        return found

    @torch.inference_mode()
    def repair(
        self, index: int, router_HD: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Take the text through a layer; each expert's repaired down projection [H, I], and what
        is said of it."""
        found: dict[str, Tensor] = {}
        said: dict[str, dict[str, Any]] = {}
        with self._layer(index, router_HD) as routed:
            sums = self._sums(index, routed)
            for expert, (name, reader) in zip(routed.experts, self._readers.items(), strict=True):
                factor, left, delta_IH = solve_drift(sums[name], index, "experts.repair")
                down_HI = reader.tensor(self._family.ffn(index).down)
                found[name] = (down_HI.double() + delta_IH.T.cpu()).to(down_HI.dtype).contiguous()
                down: Any = expert.down_proj
                down.weight.copy_(found[name])
                tokens = sum(half.tokens for half in sums[name])
                said[name] = {"layer": index, "lambda": factor, "drift": left, "tokens": tokens}
            for text in (text for texts in self._texts.values() for text in texts):
                text.routed.hidden_BSH = self._routed.through(text.routed)
        return found, said

    @contextmanager
    def _layer(self, index: int, router_HD: Tensor) -> Iterator[_RoutedFFN]:
        """The merged model's layer, with all experts in the place of its FFN."""
        with self._routed.layer(index) as layer:
            dense: Any = layer.mlp
            experts = []
            for reader in self._readers.values():
                expert, prefix = copy.deepcopy(dense), f"model.layers.{index}.mlp."
                expert.load_state_dict({n: reader.tensor(prefix + n) for n in expert.state_dict()})
                experts.append(expert)
            stored = router_HD.to(weights_type(next(iter(self._readers.values()))))
            layer.mlp = _RoutedFFN(experts, stored.to(self._device, self._dtype))
            try:
                yield layer.mlp
            finally:
                layer.mlp = dense

    def _sums(self, index: int, routed: _RoutedFFN) -> dict[str, list[DriftSums]]:
        """The sums of each expert's two halves; teachers' streams go on to the next layer."""
        sums: dict[str, list[DriftSums]] = {}
        is_last = index == self._routed.model.config.num_hidden_layers - 1
        for domain, texts in self._texts.items():
            head = self._heads.get(domain) if is_last else None
            with self._own[domain].layer(index):
                for text in texts:
                    text.own.hidden_BSH = self._own[domain].through(text.own)
                    now_TH = _flat(self._routed.through(text.routed))
                    target_TH = _flat(text.own.hidden_BSH)
                    drift_TH = (target_TH if head is None else head.target(target_TH)) - now_TH
                    for name, rows, a_TI in zip(
                        self._readers, routed.rows, routed.inner, strict=True
                    ):
                        if name not in sums:
                            shape = (a_TI.shape[-1], drift_TH.shape[-1], str(a_TI.device))
                            sums[name] = [DriftSums.zeros(*shape) for _ in range(HALVES)]
                        counts = text.counts_T[rows]
                        is_first = rows[counts] % text.own.hidden_BSH.shape[1] == 0
                        sums[name][text.half].add(a_TI[counts], drift_TH[rows[counts]], is_first)
        return sums


def _flat(x_BSH: Tensor) -> Tensor:
    """[T, H] in the precision that drifts are computed in."""
    wide = torch.float64 if x_BSH.dtype == torch.float64 else torch.float32
    return x_BSH.reshape(-1, x_BSH.shape[-1]).to(wide)
