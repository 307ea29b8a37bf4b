"""Whether weights are finite: by smallest and largest value, against asking of each.

    python -m benchmarks.finite_check [--megabytes N] [--repeats N] [--threads N]

A file of random weights in each type, in the page cache. `isfinite` asks every value, in pieces of
the mapped file; `aminmax` is what `CheckpointReader.non_finite` does; `one pass` what a flow does
with a new model: it reads the file once, hashes it and looks. CPU seconds a GB.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.common import alternate, median, median_ratio, parser_of, print_result, print_table
from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.checkpoints.known import KnownFiles
from upcycle_core.checkpoints.reader import CheckpointReader, chunks

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
AT_MOST = 0.2
MATRIX = 2048


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=5)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, ratios, figures = [], {}, {}
    with tempfile.TemporaryDirectory(prefix="finite-") as folder:
        for name, dtype in TYPES.items():
            place = save(Path(folder, name), dtype, options.megabytes)
            gigabytes = (place / "model.safetensors").stat().st_size / 1e9
            measures: dict[str, Callable[[], float]] = {
                "isfinite": partial(cpu_seconds, by_isfinite, place),
                "aminmax": partial(cpu_seconds, by_aminmax, place),
                "sha256": partial(cpu_seconds, sha256_file, place / "model.safetensors"),
                "one pass": partial(cpu_seconds, by_one_pass, place),
            }
            found = alternate(measures, options.repeats)
            each = {way: median(times) / gigabytes for way, times in found.items()}
            ratios[name] = median_ratio(found["aminmax"], found["isfinite"])
            figures[name] = each
            rows += [[name, way, each[way], each[way] / each["isfinite"]] for way in each]
    print_table("CPU seconds a GB", ["type", "way", "seconds", "ratio"], rows)
    print_result("finite_check", ratios, {"goal": {"at_most": AT_MOST}, "seconds_per_gb": figures})


def save(folder: Path, dtype: torch.dtype, megabytes: int) -> Path:
    """A checkpoint's directory with random matrices."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    count = max(1, megabytes * 10**6 // (MATRIX * MATRIX * dtype.itemsize))
    tensors = {f"w{i}": torch.randn(MATRIX, MATRIX).to(dtype) for i in range(count)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def cpu_seconds(call: Callable[[Path], object], path: Path) -> float:
    """CPU time of the process, all threads, for one call."""
    started = time.process_time()
    call(path)
    return time.process_time() - started


def by_isfinite(place: Path) -> None:
    """Every value of every tensor."""
    reader = CheckpointReader(place)
    tensors = (reader.tensor(name) for name in reader.tensors)
    assert all(bool(torch.isfinite(piece).all()) for t in tensors for piece in chunks(t))


def by_aminmax(place: Path) -> None:
    """As the library does where nothing is remembered."""
    assert not CheckpointReader(place).non_finite


def by_one_pass(place: Path) -> None:
    """As a flow does of a model that is new to it."""
    reader = CheckpointReader(place, known=KnownFiles(None))
    assert not reader.non_finite
    assert reader.digests


if __name__ == "__main__":
    main()
