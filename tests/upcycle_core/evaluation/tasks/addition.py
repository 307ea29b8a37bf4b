"""A tiny model that has learned to add, and the questions to ask it."""

import json
from functools import cache
from pathlib import Path

import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "\n+=0123456789"
STEPS, BATCH = 300, 128


def sums():
    """Every sum of two numbers below 100 in a fixed random order: (question, answer)."""
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(0)).tolist()
    return [(f"{i // 100:02d}+{i % 100:02d}=", f"{i // 100 + i % 100:03d}") for i in order]


def tokenizer():
    """One token a character; the line end is the end of text as well."""
    vocabulary = {character: i for i, character in enumerate(CHARACTERS)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="\n"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    plain.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="\n", pad_token="\n")


@cache
def adder():
    """A Llama that has seen nine tenths of the sums, for a few seconds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model, encode = LlamaForCausalLM(config), tokenizer()
    ids = torch.tensor([encode(f"{q}{a}\n")["input_ids"] for q, a in sums()[1000:]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    for _ in range(STEPS):
        batch = ids[torch.randint(len(ids), (BATCH,))]
        logits = model(batch).logits[:, 5:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 6:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def save_adder(directory: Path) -> Path:
    """Its checkpoint."""
    adder().save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def write_definition(folder: Path, count: int) -> Path:
    """A task definition of the harness: the first ``count`` sums, none of them seen."""
    rows = [{"id": f"sum-{q}", "prompt": q, "answer": a} for q, a in sums()[:count]]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    definition = {
        "task": "addition",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    path = folder / "addition.yaml"
    path.write_text(yaml.safe_dump(definition, sort_keys=False))
    return path
