"""Small tokenizers with the chat templates of large ones."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's and Qwen's, without their default system message."""
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role']"
    " + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
SPECIAL = {
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
}
TEXT = (
    "user assistant system What is two and two? Four, of course. The court held that a contract "
    "needs offer and acceptance; nothing else. <|im_start|> <|eot_id|> <|begin_of_text|>"
)


def save_chat_tokenizer(directory: Path, kind: str, *, template: str | None = "") -> Path:
    """A byte-level BPE tokenizer of 400 tokens at most.

    Args:
        directory: Where to.
        kind: ``chatml``, whose tokenizer puts nothing before a text, or ``llama3``, whose
            tokenizer puts its beginning-of-sequence token there.
        template: Another template, or None for none; by default its own.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL[kind]),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([TEXT], trainer)
    first, end = SPECIAL[kind][0], SPECIAL[kind][{"chatml": 2, "llama3": 4}[kind]]
    if kind == "llama3":
        core.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{first} $A", special_tokens=[(first, core.token_to_id(first))]
                ),
            ]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=first, eos_token=end, pad_token=end
    )
    if template is not None:
        tokenizer.chat_template = template or {"chatml": CHATML, "llama3": LLAMA3}[kind]
    tokenizer.save_pretrained(directory)
    return directory
