"""The model card: what a checkpoint is and how it was made, for whoever finds it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from upcycle_core.checkpoints.writer import write_text

MODEL_CARD = "README.md"


def write_model_card(
    directory: Path,
    *,
    title: str,
    recipe_text: str,
    method: str,
    experts: Sequence[str] = (),
    origin: str | None = None,
    licence: str | None = None,
    given: Mapping[str, str] | None = None,
    form: str | None = None,
) -> None:
    """Write README.md beside a checkpoint of experts.

    The text depends on the arguments and the checkpoint's config.json alone: it holds no time, no
    host and no commit.

    Args:
        directory: The checkpoint, with its config.json.
        title: Name of the model.
        recipe_text: The resolved recipe as YAML.
        method: What joined the experts (``DUME``), or found them (``SIMoE``).
        experts: Domains, in the order of the experts; none if they were made of one model.
        origin: What it was made of, in a sentence; said of ``experts`` and ``method`` by default.
        licence: Identifier for hubs; the experts' own decides where none is given.
        given: Domain to what its expert was made from, where that was no checkpoint, and to what
            was changed in it to fit the others.
        form: How it wants to be asked, where it answers instructions.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if licence is not None:
        front.append(f"license: {licence}")
    front += ["tags:", "- moe", "- merge", "---"]
    rows = [f"| {index} | {name} |" for index, name in enumerate(experts)]
    if origin is None:
        origin = f"A dense model in which instruction tuning found experts, by {method}"
        if experts:
            origin = f"A Mixture-of-Experts of {len(experts)} dense models, joined by {method}"
        origin += " with Upcycle."
    body = [
        f"# {title}",
        origin,
        _table(config),
        *(["\n".join(["| expert | domain |", "| --- | --- |", *rows])] if experts else []),
        *(["\n".join(f"- {name}: {said}" for name, said in given.items())] if given else []),
        "Load it with transformers alone:",
        fenced("python", _usage(config, chat=form is not None)),
        *([form] if form is not None else []),
        "The recipe that made it:",
        fenced("yaml", recipe_text.strip()),
    ]
    if licence is None:
        whose = "all its experts" if experts else "the dense model and of the instructions"
        body.append(f"It may be used as far as the licences of {whose} allow.")
    write_text(directory / MODEL_CARD, "\n".join(front) + "\n\n" + "\n\n".join(body) + "\n")


def _usage(config: dict, *, chat: bool) -> str:
    # An architecture that transformers does not know brings its code along.
    trust = ", trust_remote_code=True" if "auto_map" in config else ""
    inputs = 'tokenizer("Once upon a time", return_tensors="pt")'
    if chat:
        inputs = """tokenizer.apply_chat_template(
    [{"role": "user", "content": "What is two and two?"}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)"""
    return f"""\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH"{trust})
model = AutoModelForCausalLM.from_pretrained("PATH"{trust})
inputs = {inputs}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))"""


def _table(config: dict) -> str:
    dense = config.get("dense", config)  # our own architectures keep the dense one's whole
    rows = {
        "architecture": config["architectures"][0],
        "layers": dense.get("num_hidden_layers"),
        "hidden size": dense.get("hidden_size"),
        "experts a token": config.get("num_experts_per_tok"),
        "experts, interpolated": config.get("num_simoe_experts"),
        "weights": config["dtype"],
    }
    lines = [f"| {key} | {value} |" for key, value in rows.items() if value is not None]
    return "\n".join(["| what | value |", "| --- | --- |", *lines])


def fenced(language: str, text: str) -> str:
    """A code block whose fence is longer than any in ``text``."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"
