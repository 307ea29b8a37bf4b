"""Prompts of Super-NaturalInstructions (Wang et al. 2022, arXiv 2204.07705)."""

import string
from collections.abc import Mapping, Sequence

EXAMPLES = 2
"""Positive examples that a prompt shows."""


def superni_prompt(
    instance: str,
    definition: str,
    positive_examples: Sequence[Mapping[str, str]],
    *,
    shown: int = EXAMPLES,
) -> str:
    """Tk-Instruct's ``def-pos`` encoding, odd blanks included; ``def`` if no example is shown.

    Its blank after the last ``Output:`` is left out: T5's tokenizer drops it, and a decoder's would
    take it from the answer's first word.

    Args:
        instance: The instance's input.
        definition: The task's.
        positive_examples: Each with ``input`` and ``output``.
        shown: How many of them are shown, the first ones. Where a task has fewer, fewer are.
    """
    parts = [_closed(f"Definition: {definition.strip()}") + "\n\n"]
    for number, example in enumerate(positive_examples[:shown], 1):
        question = _closed(f"Input: {example['input'].strip()}")
        answer = _closed(f" Output: {example['output'].strip()}")
        parts.append(f" Positive Example {number} -\n{question}\n{answer}\n\n")
    question = _closed(f"Input: {instance.strip()}")
    parts.append(f"Now complete the following example -\n{question}\nOutput:")
    return "".join(parts)


def _closed(text: str) -> str:
    """``text`` with a full stop, unless it ends in punctuation."""
    return text if text[-1] in string.punctuation else text + "."
