"""A PEFT LoRA adapter merged into its base, one tensor at a time: W + scaling B A (2106.09685).

What comes out is what ``merge_and_unload`` of peft makes in fp32, to the last bit, without peft and
without the model in memory. R rank, O rows and I columns of a base matrix; scaling is alpha / R, or
alpha / sqrt(R) (rsLoRA).
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from upcycle_core.architectures.family import EMBEDDING, LM_HEAD
from upcycle_core.checkpoints.given_as import write_given_as
from upcycle_core.checkpoints.reader import INDEX_FILE, SINGLE_FILE, CheckpointReader
from upcycle_core.checkpoints.tokenizer import VOCABULARIES, copy_tokenizer, tokenizer_files
from upcycle_core.checkpoints.writer import TensorSpec, write_json, write_sharded, write_text
from upcycle_core.errors import Fault, InputError, raise_faults

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_SHARD_BYTES = 5_000_000_000
PREFIX = "base_model.model."
PART = re.compile(r"(?P<module>.+)\.lora_(?P<part>(embedding_)?[AB](\.weight|\.bias)?)")
# Where a linear layer was wrapped, peft keeps what it had under this name.
WRAPPED = ".base_layer."
# Where tokens were added peft saves modules that are trained whole once more, and as they began.
TRAINED, BEGUN = ".modules_to_save.", ".original_module."
WITHOUT_EFFECT = frozenset(
    {
        # Read here.
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "peft_type"),
        *("base_model_name_or_path", "init_lora_weights", "revision"),
        # Which tensors there are says the file itself.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("modules_to_save", "bias", "lora_bias"),
        # peft lays it aside for linear layers, and our families have no others.
        "fan_in_fan_out",
        # The head then has the embedding's tensors, and the file has them for both.
        "ensure_weight_tying",
        # Of training and of how peft loads it.
        *("task_type", "auto_mapping", "peft_version", "inference_mode", "lora_dropout"),
        *("megatron_core", "runtime_config", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "qalora_group_size"),
    }
)
"""Keys of adapter_config.json that change no merged weight, beyond what is read of them."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base as it is."""
SHOWN = 3


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one matrix.

    Args:
        a: Name of A [R, I] in the adapter.
        b: Name of B [O, R].
        scaling: Their product's factor.
        transposed: Whether it is of an embedding, whose matrix is (B A)^T [I, O].
    """

    a: str
    b: str
    scaling: float
    transposed: bool


class Adapter:
    """A LoRA adapter directory: its settings, and what it does to which tensor of a base.

    Args:
        directory: Holds ``adapter_config.json`` and ``adapter_model.safetensors``.

    Attributes:
        base_name: The base that it names itself, a directory or hub id; None if it names none.
        revision: The branch, tag or commit of that base on the hub; None for its newest.
        ranks: Its different ranks, ascending.
        low_rank: What is added, by the name of the base's tensor.
        replaced: Names of tensors in the adapter that take the place of the base's (``.weight`` and
            ``.bias`` of modules that were trained whole), by the base's name.
        bias: Names of what is added to biases, with its factor, by the base's name.

    Raises:
        InputError: Another method than LoRA, or a variant that is no sum W + scaling B A; weights
            missing or pickled; a tensor that has no meaning, or numbers that are none.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = adapter_settings(directory)
        raise_faults(_setting_faults(self.config, directory))
        self.base_name: str | None = self.config.get("base_model_name_or_path") or None
        revision = self.config.get("revision")
        self.revision: str | None = revision if revision not in ("", "main") else None
        self._file = _weights(directory)
        self.low_rank: dict[str, LowRank] = {}
        self.replaced: dict[str, str] = {}
        self.bias: dict[str, tuple[str, float]] = {}
        raise_faults(self._sort(set(self._file.keys())))
        self.ranks = sorted({self.shape(pair.a)[0] for pair in self.low_rank.values()})
        raise_faults(self._value_faults())

    def tensor(self, name: str) -> Tensor:
        """A tensor of the adapter, as it is stored."""
        return self._file.get_tensor(name)

    @property
    def adds(self) -> bool:
        """Whether anything is added to a weight or a bias."""
        pairs = [(pair.a, pair.b) for pair in self.low_rank.values()]
        pairs += [(name, name) for name, _ in self.bias.values()]
        return any(bool(self.tensor(a).any()) and bool(self.tensor(b).any()) for a, b in pairs)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its sizes, from the header."""
        return tuple(self._file.get_slice(name).get_shape())

    def product_shapes(self) -> dict[str, tuple[int, ...]]:
        """Sizes of what is added, by the base's names."""
        shapes = {n: (self.shape(p.b)[0], self.shape(p.a)[1]) for n, p in self.low_rank.items()}
        return {n: s[::-1] if self.low_rank[n].transposed else s for n, s in shapes.items()}

    def merged(self, name: str, base: Tensor) -> Tensor:
        """The base's tensor ``name`` with what the adapter does to it, of the same type."""
        if name in self.low_rank:
            pair = self.low_rank[name]
            product = _wide(self.tensor(pair.b)) @ _wide(self.tensor(pair.a))
            delta = (product.T if pair.transposed else product) * pair.scaling
        elif name in self.bias:
            added, scaling = self.bias[name]
            delta = _wide(self.tensor(added)) * scaling
        else:
            return base
        return (_wide(base) + delta).to(base.dtype)

    def _value_faults(self) -> Iterator[Fault]:
        """Numbers that are none."""
        place = str(self.directory / ADAPTER_WEIGHTS)
        for name in sorted(self._file.keys()):
            tensor = self.tensor(name)
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
                remedy = f"{name} holds no finite floating-point numbers; give another checkpoint"
                yield Fault("adapter", place, remedy)

    def _sort(self, names: set[str]) -> Iterator[Fault]:
        """Give every tensor its meaning; yield those that have none."""
        place, parts = str(self.directory / ADAPTER_WEIGHTS), dict[str, dict[str, str]]()
        for name in sorted(name for name in names if BEGUN not in name):
            inner = name.removeprefix(PREFIX).replace(WRAPPED, ".").replace(TRAINED, ".")
            part = PART.fullmatch(inner)
            if part:
                kind = part["part"].removesuffix(".weight")
                parts.setdefault(part["module"], {})[kind] = name
            elif inner.endswith((".weight", ".bias")) and name.startswith(PREFIX):
                self.replaced[inner] = name
            else:
                yield Fault("adapter", place, f"{name} is no tensor of LoRA; merge it with peft")
        for module, kinds in parts.items():
            start = "embedding_" if any(kind.startswith("embedding_") for kind in kinds) else ""
            left = {f"{start}A", f"{start}B"} - set(kinds)
            if left or not set(kinds) <= {f"{start}A", f"{start}B", "B.bias"}:
                remedy = f"{module} has {sorted(kinds)}: A and B belong together; save it again"
                yield Fault("adapter", place, remedy)
                continue
            a, b = kinds[f"{start}A"], kinds[f"{start}B"]
            rank, scaling = self._rank_and_scaling(module)
            if len(self.shape(a)) != 2 or self.shape(a)[0] != rank or self.shape(b)[1:] != (rank,):
                found = f"A {list(self.shape(a))} and B {list(self.shape(b))}"
                yield Fault("adapter", place, f"{module} has {found}, its config says r = {rank}")
            self.low_rank[f"{module}.weight"] = LowRank(a, b, scaling, bool(start))
            if "B.bias" in kinds:
                self.bias[f"{module}.bias"] = (kinds["B.bias"], scaling)

    def _rank_and_scaling(self, module: str) -> tuple[int, float]:
        """R, and alpha / R or alpha / sqrt(R); a module's own where a pattern names it."""
        rank = _of_pattern(self.config.get("rank_pattern"), module, self.config["r"])
        alpha = _of_pattern(self.config.get("alpha_pattern"), module, self.config["lora_alpha"])
        return rank, alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter, and no whole model beside it."""
    whole = any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    return (directory / ADAPTER_CONFIG).is_file() and not whole


def merge_adapter(adapter: Adapter, base: Path, out: Path) -> None:
    """Write the base with the adapter merged into it as an ordinary checkpoint.

    Weights have the base's type; sums are at least fp32. The tokenizer is the adapter's own where
    it brings one. A tied head stays tied unless the adapter touches the head or the embedding: the
    model that was trained then has two matrices, or the adapter does the same to both.

    Args:
        adapter: What to merge.
        base: Checkpoint directory of safetensors.
        out: Empty directory to fill. The largest tensor and its product are all that is held.

    Raises:
        InputError: A tensor has no place in this base, or another shape: it is another model's
            adapter. It changes nothing: all B or A are zero, what was trained whole is the base's.
    """
    reader = CheckpointReader(base, field="base")
    config = dict(reader.config)
    head = {LM_HEAD, EMBEDDING} & {*adapter.low_rank, *adapter.replaced}
    is_missing = bool(head) and LM_HEAD not in reader.tensors
    is_parted = bool(head) and not _has_one_vocabulary(adapter)
    sources = {name: name for name in reader.tensors} | ({LM_HEAD: EMBEDDING} if is_missing else {})
    whole = _whole(adapter, is_tied=is_missing or config.get("tie_word_embeddings") is True)
    raise_faults(_base_faults(adapter, whole, reader, sources))
    if not adapter.adds and all(
        torch.equal(adapter.tensor(own), reader.tensor(sources[name]))
        for name, own in adapter.replaced.items()
    ):
        remedy = "changes nothing: each B A is zero, as before training; give the trained one"
        raise InputError(Fault("adapter", str(adapter.directory), remedy))

    def produce(name: str) -> Tensor:
        own = whole.get(name)
        dtype = reader.tensors[sources[name]].dtype
        start = reader.tensor(sources[name]) if own is None else adapter.tensor(own).to(dtype)
        return adapter.merged(name, start)

    def shape(name: str) -> tuple[int, ...]:
        own = whole.get(name)
        return reader.tensors[sources[name]].shape if own is None else adapter.shape(own)

    if is_missing and not is_parted:
        del sources[LM_HEAD]
    specs = [TensorSpec(n, shape(n), reader.tensors[sources[n]].dtype) for n in sorted(sources)]
    write_sharded(out, specs, produce, max_shard_bytes=MAX_SHARD_BYTES)
    # Some store a tied head all the same; its name in the files says nothing about that.
    if is_parted and config.get("tie_word_embeddings") is not False:
        config["tie_word_embeddings"] = False
    if EMBEDDING in sources and "vocab_size" in config:
        config["vocab_size"] = shape(EMBEDDING)[0]
    write_json(out / "config.json", config)
    if (base / "generation_config.json").is_file():
        write_text(out / "generation_config.json", (base / "generation_config.json").read_text())
    _copy_words(adapter.directory, base, out)
    write_given_as(out, _said(adapter))


def _copy_words(directory: Path, base: Path, out: Path) -> None:
    """The adapter's tokenizer, or the base's with a chat template of the adapter's."""
    brings_words = any((directory / name).is_file() for name in VOCABULARIES)
    copy_tokenizer(directory if brings_words else base, out)
    if not brings_words:
        for name in tokenizer_files(directory):
            if "chat_template" in str(name):
                (out / name).parent.mkdir(exist_ok=True)
                write_text(out / name, (directory / name).read_text(encoding="utf-8"))


def _whole(adapter: Adapter, *, is_tied: bool) -> dict[str, str]:
    """Tensors of the adapter that take the place of the base's, by the base's name.

    Beside LoRA of a longer embedding peft saves what that had, once: a tied head has the same.
    """
    own = adapter.replaced.get(EMBEDDING, "")
    shares = is_tied and WRAPPED in own and LM_HEAD not in adapter.replaced
    return adapter.replaced | ({LM_HEAD: own} if shares else {})


def _has_one_vocabulary(adapter: Adapter) -> bool:
    """Whether what is done to head and embedding is the same, as peft saves a tied one that it
    resized, or whose two ends it was to keep tied."""
    one, other = (adapter.replaced.get(name) for name in (EMBEDDING, LM_HEAD))
    if (one is None) != (other is None):
        return False
    if one and other and not torch.equal(adapter.tensor(one), adapter.tensor(other)):
        return False
    embedding, head = (adapter.low_rank.get(name) for name in (EMBEDDING, LM_HEAD))
    if embedding is None or head is None:
        return embedding is head
    # (B A)^T of the one is B A of the other.
    crossed = ((embedding.a, head.b), (embedding.b, head.a))
    is_same = all(torch.equal(adapter.tensor(a).T, adapter.tensor(b)) for a, b in crossed)
    return is_same and embedding.scaling == head.scaling


def _wide(tensor: Tensor) -> Tensor:
    """In fp32 at least, which is what peft computes in."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _said(adapter: Adapter) -> str:
    rank = "/".join(map(str, adapter.ranks)) or "0"
    whole = f", {len(adapter.replaced)} tensors whole" if adapter.replaced else ""
    count = len(adapter.low_rank)
    return f"LoRA adapter (rank {rank}, {count} matrices{whole}) merged into its base"


def _base_faults(
    adapter: Adapter,
    whole: Mapping[str, str],
    reader: CheckpointReader,
    sources: Mapping[str, str],
) -> Iterator[Fault]:
    """Where the adapter does not fit the base, in one fault; a vocabulary that is half resized."""
    shapes = {name: reader.tensors[source].shape for name, source in sources.items()}
    for name in {EMBEDDING, LM_HEAD} & shapes.keys() & whole.keys():
        rows, *columns = adapter.shape(whole[name])
        if columns == list(shapes[name][1:]):  # tokens were added
            shapes[name] = (rows, *columns)
    touched = {name: adapter.shape(own) for name, own in whole.items()}
    touched |= {name: adapter.shape(own) for name, (own, _) in adapter.bias.items()}
    misfits = []
    for name, shape in [*touched.items(), *adapter.product_shapes().items()]:
        if shapes.get(name) != shape:
            here = list(shapes[name]) if name in shapes else "not there"
            misfits.append(f"{name} is {here}, the adapter's is {list(shape)}")
    if misfits:
        more = f"; and {len(misfits) - SHOWN} more" if len(misfits) > SHOWN else ""
        remedy = f"is an adapter of another model than {reader.directory}, where "
        remedy += f"{'; '.join(misfits[:SHOWN])}{more}; name its base in seed_model.model"
        yield Fault("adapter", str(adapter.directory), remedy)
        return
    sizes = {shapes[name][0] for name in (EMBEDDING, LM_HEAD) if name in shapes}
    if len(sizes) > 1:
        remedy = f"embedding and head would have {sorted(sizes)} rows; save both with the adapter"
        yield Fault("adapter", str(adapter.directory), remedy)


def adapter_settings(directory: Path) -> dict[str, Any]:
    """What ``adapter_config.json`` holds.

    Raises:
        InputError: It cannot be read, or holds something else.
    """
    path = directory / ADAPTER_CONFIG
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(Fault("adapter", str(path), f"cannot be read ({error})")) from error
    if not isinstance(settings, dict):
        raise InputError(Fault("adapter", str(path), "holds no settings; save the adapter again"))
    return settings


def _setting_faults(config: Mapping[str, Any], directory: Path) -> Iterator[Fault]:
    """What makes it another method than W + scaling B A, or leaves that open."""
    field = f"adapter {directory}"
    if config.get("peft_type") != "LORA":
        remedy = "only LORA is merged here; merge it with peft and give the result"
        yield Fault(f"{field}: peft_type", config.get("peft_type"), remedy)
        return
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            yield Fault(f"{field}: {key}", value, "must be a positive number; save it again")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict) or not all(map(_is_pattern, pattern.items())):
            remedy = "must give patterns of names positive numbers; save it again"
            yield Fault(f"{field}: {key}", pattern, remedy)
    start = config.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        remedy = "changes the base as well; convert it to plain LoRA with peft"
        remedy += " (path_initial_model_for_weight_conversion), or merge it with peft"
        yield Fault(f"{field}: init_lora_weights", start, remedy)
    for key in sorted(set(config) - WITHOUT_EFFECT - {"init_lora_weights"}):
        if config[key]:
            remedy = "is no plain LoRA; merge it with peft (merge_and_unload) and give the result"
            yield Fault(f"{field}: {key}", config[key], remedy)


def _is_pattern(item: tuple[str, Any]) -> bool:
    try:
        re.compile(item[0])
    except re.error:
        return False
    return isinstance(item[1], int | float) and item[1] > 0


def _weights(directory: Path) -> Any:
    path = directory / ADAPTER_WEIGHTS
    if not path.is_file() and any(directory.glob("adapter_model.*")):
        remedy = "holds pickled weights, which can run code; save the adapter as safetensors"
        raise InputError(Fault("adapter", str(directory), remedy))
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        remedy = f"is missing, truncated or no safetensors file ({error}); fetch it again"
        raise InputError(Fault("adapter", str(path), remedy)) from error


def _of_pattern(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first key that matches the end of a module's name, as peft reads it."""
    own = (v for key, v in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(own, default)
