"""``python -m tests.pretending.closed_form FOLDER``: what joins models, on a pretended GPU.

Prints as JSON what each call gave there and on the CPU.
"""

import json
import sys
from pathlib import Path

import torch
from transformers.utils import logging

from tests.pretending.gpu import pretended_gpu  # isort: skip  (before what it changes)
from tests.closed_forms import TOLERANCE, calls, made


def main(root: Path) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    named, corpora = made(root)
    found = {}
    for precision in TOLERANCE:
        with pretended_gpu() as device:
            found[precision, "gpu"] = calls(
                root, root / precision, named, corpora, precision, device=device
            )
        found[precision, "cpu"] = calls(
            root, root / f"{precision}-cpu", named, corpora, precision, device="cpu"
        )
    print(json.dumps({" ".join(key): value for key, value in found.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
