"""Make the data beside this file with the code of an earlier commit; README.md says how.

``PYTHONPATH=.:tests python tests/old_version/make.py FOLDER``, in a clone without ``workspace/``.
"""

import importlib.metadata
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from texts import TRAINING, WORDS, pico_recipe, save_recipe, write_texts

ROOT = Path(__file__).resolve().parent.parent.parent
HOME = ROOT / "workspace"
DATABASE = HOME / "mlflow" / "mlflow.db"
DOMAINS = ("letters", "numbers")
PACKAGES = ("torch", "transformers", "tokenizers", "mlflow", "dvc")
PROMPT = "alpha beta one two"
TOKENS = (5, 40, 77, 80, 121, 190, 255, 290)
# A flow whose pictures have fewer points: they would be half of the archive.
FLOW = """
import runpy, sys
from matplotlib.figure import Figure

savefig = Figure.savefig
Figure.savefig = lambda self, path, **options: savefig(self, path, **{**options, "dpi": 10})
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""
LEFT_OUT = ("prefect", ".cache", "mlflow/mlflow.db", "*/.dvc/cache", "*/.dvc/tmp")
"""Of the home: what no restored version needs, what is in the remote too, and what is SQL there."""


def recipes(texts: Path) -> dict[str, dict[str, Any]]:
    """One recipe a method: H=8, 2 layers, 300 tokens, a few steps."""
    dume = pico_recipe(texts, name="old", domains=DOMAINS)
    dume["tokenizer"] = {"vocabulary_size": 300}
    dume["seed_model"]["shape"] |= {"hidden_size": 8, "intermediate_size": 16}
    dume["seed_model"]["training"] |= {"steps": 200, "learning_rate": 3e-2}
    dume["experts"]["training"] |= {"steps": 40, "learning_rate": 1e-2}
    dume["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    dume["versions"] = {"remote": "remote"}
    common = {key: dume[key] for key in dume if key not in ("statistics", "evaluation")}
    training = {**TRAINING, "steps": 6, "learning_rate": 1e-2}
    dense = {"method": "full-finetune", "training": training}
    symphony = {
        **dume,
        "name": "old-symphony",
        "moe": {"top_k": 2},
        "symphony": {
            "segmentation": "letters",
            "calibration": {"tokens": 400, "sequence_length": 32, "batch_size": 4},
        },
        "post_training": {"training": training},
        "baselines": {"dense": dense},
    }
    simoe = {
        **common,
        "name": "old-simoe",
        "instructions": {
            "sources": {"asks": {"files": ["{folder}/asks.jsonl"]}},
            "unseen": ["last"],
            "test_per_task": 3,
        },
        "tuning": {"training": training, "max_new_tokens": 4, "batch_size": 8},
        "simoe": {
            "experts": 2,
            "tau": 0.5,
            "mask_learning_rate": 1.5,
            "multiplier_learning_rate": 1.0,
        },
        "registry": {"gate": {"metric": "rouge_l_unseen"}},
        "baselines": {"dense": dense},
    }
    codecs = {"8-bit": {"codec": "quantised", "bits": 8}}
    return {
        "old": dume,
        "old-symphony": symphony,
        "old-simoe": simoe,
        "old-codecs": {"compression": {"codecs": codecs}},
    }


def write_instructions(file: Path) -> None:
    """Questions of two categories about the domains' words."""
    draw = random.Random(0)
    lines = []
    for domain in DOMAINS:
        for number, category in enumerate(("first", "last")):
            for _ in range(12):
                words = draw.sample(WORDS[domain], 3)
                lines.append(
                    {
                        "category": category,
                        "task": f"{category}-{domain}",
                        "domain": domain,
                        "prompt": f"{category}: {' '.join(words)}",
                        "response": words[-number],
                    }
                )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def environment() -> dict[str, str]:
    """Of every command: the home of a user who has set nothing."""
    ours = ("PREFECT_", "MLFLOW_", "RAY_", "UPCYCLE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(HOME / ".cache")}


def call(*command: str | Path) -> str:
    """What a command in the clone prints."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    print(done.stdout)
    return done.stdout


def artifacts(workspace: Path) -> dict[str, str]:
    """{artifact: sha256 of its provenance.json}, which holds those of its files."""
    from upcycle_core.checkpoints.hashing import sha256_file

    records = sorted(workspace.rglob("provenance.json"))
    return {str(r.parent.relative_to(workspace)): sha256_file(r) for r in records}


def golden(version: str, name: str, model: str = "model") -> dict[str, Any]:
    """What is known of a version that was just registered from the workspace ``name``."""
    reference = f"upcycle-{version}"
    how = ("--tokens", "12", "--temperature", "0")
    return {
        "recipe": name,
        "artifacts": artifacts(HOME / name),
        "model": model,
        "logits": logits(HOME / name / model),
        "text": call("-m", "flows.generate", reference, PROMPT, *how).removesuffix("\n"),
    }


def logits(model: Path) -> list[list[float]]:
    """Of the first 8 entries of the vocabulary, after each of ``TOKENS``."""
    import torch
    from tasks.architectures import register_architectures

    from upcycle_core.checkpoints.load import load_causal_lm

    register_architectures()
    with torch.no_grad():
        rows = load_causal_lm(model)(torch.tensor([TOKENS])).logits[0, :, :8]
    return [[round(value, 7) for value in row] for row in rows.tolist()]


def aliases() -> dict[str, list[str]]:
    """{version: the aliases that point at it}."""
    found: dict[str, list[str]] = {}
    with sqlite3.connect(DATABASE) as database:
        query = "SELECT name, version, alias FROM registered_model_aliases ORDER BY alias"
        for name, number, alias in database.execute(query):
            found.setdefault(f"{name}/{number}", []).append(alias)
    return found


def pack(archive: Path) -> None:
    """The home, its MLflow database as SQL."""
    with sqlite3.connect(DATABASE) as database:
        DATABASE.with_suffix(".sql").write_text("\n".join(database.iterdump()) + "\n")
    for path in (path for pattern in LEFT_OUT for path in HOME.glob(pattern)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(archive, "w:xz", preset=9) as file:
        file.add(HOME, arcname=".", filter=plain)


def main() -> None:
    """Build, register and teach the models, and write ``home.tar.xz`` and ``golden.json``."""
    folder = Path(sys.argv[1])
    HOME.mkdir()  # nobody's results go into the archive
    texts = write_texts(HOME / "texts", documents=20, heldout=4, words=24, domains=DOMAINS)
    write_instructions(texts / "asks.jsonl")
    files = {name: HOME / f"{name}.yaml" for name in recipes(texts)}
    for name, values in recipes(texts).items():
        save_recipe(files[name], values)

    versions = {}
    call("-c", FLOW, "flows.dume", files["old"])
    versions["upcycle-old/1"] = golden("old/1", "old")
    letters = texts / "letters" / "train.txt"
    letters.write_text(f"{letters.read_text()}\n<|doc|>\n{'mu lambda kappa iota ' * 8}\n")
    call("-c", FLOW, "flows.retrain", files["old"])
    versions["upcycle-old/2"] = golden("old/2", "old")
    call("-c", FLOW, "flows.ders", files["old"], files["old-codecs"])
    versions["upcycle-old-ders/1"] = golden("old-ders/1", "old", "compression/model")
    for name in ("symphony", "simoe"):
        call("-c", FLOW, f"flows.{name}", files[f"old-{name}"])
        versions[f"upcycle-old-{name}/1"] = golden(f"old-{name}/1", f"old-{name}")
    for version, pointing in aliases().items():
        versions[version]["aliases"] = pointing

    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    values = {
        "commit": commit,
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "home": str(HOME),
        "prompt": PROMPT,
        "tokens": TOKENS,
        "versions": versions,
    }
    (folder / "golden.json").write_text(json.dumps(values, indent=1) + "\n")
    pack(folder / "home.tar.xz")


if __name__ == "__main__":
    main()
