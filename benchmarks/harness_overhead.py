"""A generation task through our adapter / the same through the harness's own command line.

    python -m benchmarks.harness_overhead [--prompts N] [--repeats N]

A random Llama (H 512, 8 layers) answers prompts of about 100 tokens with 32 new ones, greedily, in
batches of the same size. Each way is a process of its own with one thread, from the definition in
YAML to a file with every item, imports included; the answers must be the same item by item. Without
start-up means: less the time of the same command on a single prompt; the command line looks through
all tasks that the harness has, the adapter loads the one that it is given. CPU time, which
neighbours on the machine disturb less, stands beside the clock's.
"""

import importlib.metadata
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.children import ChildFigures, child_command, measure_child
from benchmarks.common import alternate, median, median_ratio, parser_of, print_result, print_table
from upcycle_core.checkpoints.load import quiet_loading
from upcycle_core.evaluation.tasks.adapter import evaluate_tasks
from upcycle_core.evaluation.tasks.config import EvaluationTask, TaskEvaluationConfig
from upcycle_core.evaluation.tasks.definitions import write_task
from upcycle_core.evaluation.tasks.items import read_items, write_items

TASK = "words"
BATCH = 16
NEW_TOKENS = 32
WORDS = (60, 80)
"""Shortest and longest prompt."""
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
SETTLED = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Neither side waits for a network."""
Answers = dict[str, tuple[str, float]]


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=3)
    parser.add_argument("--prompts", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="harness-") as name:
        compare(Path(name), options.prompts, options.repeats)


def compare(folder: Path, prompts: int, repeats: int) -> None:
    """Make model and task, measure both ways in turns, check the answers, print."""
    length = make(folder, prompts)
    ways: dict[str, Callable[[Path, int], list[str]]] = {
        "adapter": partial(child_command, run_adapter),
        "command line": _command_line,
    }
    environment = {**SETTLED, "HF_HOME": str(folder / "cache")}
    measures = {
        f"{way} {limit}": partial(measure_child, command(folder, limit), environment=environment)
        for limit in (1, prompts)
        for way, command in ways.items()
    }
    for way in ways:  # files into the page cache; the harness keeps its copy of the data as well
        measures[f"{way} 1"]()
    found = alternate(measures, repeats)
    same_answers(folder, prompts)
    ratio = ratios(found, prompts)
    rows = [
        [name, *(median([getattr(run, what) for run in runs]) for what in ("wall_s", "cpu_s"))]
        for name, runs in found.items()
    ]
    title = f"{prompts} prompts of {length:.0f} tokens, {NEW_TOKENS} new, batches of {BATCH}"
    print_table(f"{title} (medians)", ["way, prompts", "wall s", "CPU s"], rows)
    print_table("ratio", ["adapter / command line", "value"], [list(p) for p in ratio.items()])
    figures = {
        "repeats": repeats,
        "prompts": prompts,
        "prompt_tokens": length,
        "runs": found,
        "lm_eval": importlib.metadata.version("lm_eval"),
    }
    print_result("harness_overhead", ratio, figures)


def ratios(found: Mapping[str, Sequence[ChildFigures]], prompts: int) -> dict[str, float]:
    """Adapter / command line, whole and without start-up, each a median over the rounds."""
    ratio = {}
    for what in ("wall", "cpu"):
        times = {name: [getattr(run, f"{what}_s") for run in runs] for name, runs in found.items()}
        whole, start = (
            [times[f"{way} {limit}"] for way in ("adapter", "command line")]
            for limit in (prompts, 1)
        )
        rest = [
            [run - single for run, single in zip(*pair, strict=True)]
            for pair in zip(whole, start, strict=True)
        ]
        ratio[what] = median_ratio(*whole)
        ratio[f"{what}_without_start_up"] = median_ratio(*rest)
    return ratio


def make(folder: Path, prompts: int) -> float:
    """Write model, tokenizer, data and definition; returns the mean length of a prompt, tokens."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 7))) for _ in range(400)]
    texts = [" ".join(draw.choices(words, k=draw.randint(*WORDS))) for _ in range(prompts)]
    tokenizer = _tokenizer(texts)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    with quiet_loading():
        model = LlamaForCausalLM(LlamaConfig.from_dict({**SHAPE, **ends}))
        model.save_pretrained(folder / "model")
    rows = [
        {"id": f"item-{index}", "prompt": text, "answer": draw.choice(words)}
        for index, text in enumerate(texts)
    ]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    definition = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "words.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": NEW_TOKENS, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    _definition(folder).parent.mkdir()
    _definition(folder).write_text(json.dumps(definition))  # JSON is YAML
    return sum(len(tokenizer(text)["input_ids"]) for text in texts) / prompts


def run_adapter(folder: Path, limit: int) -> None:
    """What a child process of ours does."""
    out = folder / f"adapter-{limit}"
    shutil.rmtree(out, ignore_errors=True)
    task = EvaluationTask(definition=str(_definition(folder)), limit=limit)
    write_task(task, out / TASK, folder=None, root=folder, seed=0, texts=tuple)
    config = TaskEvaluationConfig(batch_size=BATCH)
    _, items = evaluate_tasks(folder / "model", {TASK: out / TASK}, config=config)
    write_items(items, out / "items.parquet")


def same_answers(folder: Path, prompts: int) -> None:
    """Check that both ways gave every item the same answer and the same score."""
    for limit in (1, prompts):
        ours, theirs = _our_answers(folder, limit), _their_answers(folder, limit)
        assert len(ours) == limit, f"{len(ours)} answers to {limit} prompts"
        assert ours == theirs, "adapter and command line answer differently"


def _tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on ``texts``."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")


def _definition(folder: Path) -> Path:
    return folder / "definitions" / f"{TASK}.yaml"


def _command_line(folder: Path, limit: int) -> list[str]:
    options = {
        "model": "hf",
        "model_args": f"pretrained={folder / 'model'}",
        "tasks": TASK,
        "include_path": _definition(folder).parent,
        "device": "cpu",
        "batch_size": BATCH,
        "limit": limit,
        "output_path": folder / f"command-line-{limit}",
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--log_samples"]
    return command + [str(part) for name, value in options.items() for part in (f"--{name}", value)]


def _our_answers(folder: Path, limit: int) -> Answers:
    items = read_items(folder / f"adapter-{limit}" / "items.parquet")
    return {item.id: (item.response, item.score) for item in items}


def _their_answers(folder: Path, limit: int) -> Answers:
    logs = sorted((folder / f"command-line-{limit}").rglob(f"samples_{TASK}_*.jsonl"))
    samples = map(json.loads, logs[-1].read_text().splitlines())  # the newest
    return {s["doc"]["id"]: (s["filtered_resps"][0], s["exact_match"]) for s in samples}


if __name__ == "__main__":
    main()
