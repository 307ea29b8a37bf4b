"""What lies beside a registered checkpoint so that MLflow's own tools load and serve it."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
from mlflow.models import Model, ModelSignature
from mlflow.types.schema import ColSpec, DataType, ParamSchema, ParamSpec, Schema

from upcycle_core.checkpoints.tokenizer import copy_tokenizer

SERVING = Path(__file__).with_name("upcycle_serving.py")
PACKAGES = ("torch", "transformers", "accelerate")
"""What the loader and every architecture of ours need."""
EXAMPLE = "The derivative of a function"


def write_mlmodel(out: Path, checkpoint: Path, *, model_id: str, run_id: str, bos: str) -> None:
    """Write ``MLmodel``, the loader's code and its environment; the checkpoint goes beside them.

    Its flavours are ``python_function`` and, of a checkpoint with a tokenizer, ``transformers``,
    whose loader wants the tokenizer in a folder of its own.

    Args:
        out: A path where nothing lies yet.
        checkpoint: The directory that is registered.
        model_id: Of MLflow's logged model.
        run_id: Of the run that made it.
        bos: What stands before a text, as the recipe's ``corpus.bos``.
    """
    mlflow.pyfunc.save_model(
        path=str(out),
        loader_module=SERVING.stem,
        code_paths=[str(SERVING)],
        model_config={"bos": bos},
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in PACKAGES],
        signature=_signature(),
        input_example=([EXAMPLE], {"max_new_tokens": 20}),
        mlflow_model=Model(model_id=model_id, run_id=run_id),
    )
    described = Model.load(str(out))
    described.model_size_bytes = size_of(checkpoint) + size_of(out)
    file = checkpoint / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    if "architectures" in config and (checkpoint / "tokenizer_config.json").exists():
        described.add_flavor(
            "transformers",
            transformers_version=version("transformers"),
            task="text-generation",
            instance_type="TextGenerationPipeline",
            pipeline_model_type=config["architectures"][0],
            model_binary=".",
            source_model_name="",
            components=["tokenizer"],
            tokenizer_type="AutoTokenizer",
            torch_dtype=f"torch.{config.get('dtype') or config.get('torch_dtype') or 'float32'}",
        )
        copy_tokenizer(checkpoint, out / "components" / "tokenizer")
    described.save(str(out / "MLmodel"))


def size_of(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _signature() -> ModelSignature:
    """Texts to texts, with what ``upcycle_serving`` takes beside them."""
    texts = Schema([ColSpec(DataType.string)])
    params: list[tuple[str, DataType, Any]] = [
        ("max_new_tokens", DataType.integer, 100),
        ("temperature", DataType.double, 0.0),
        ("seed", DataType.integer, 0),
        ("chat", DataType.boolean, False),
    ]
    specs = [ParamSpec(name, kind, default) for name, kind, default in params]
    return ModelSignature(inputs=texts, outputs=texts, params=ParamSchema(specs))
