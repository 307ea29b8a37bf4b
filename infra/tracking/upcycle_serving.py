"""Text from a registered model: what MLflow loads as its Python function.

This file lies beside the weights of every version and needs torch and transformers alone.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed


def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> "Generator":
    return Generator(Path(path), **(model_config or {}))


def _context(config: Any) -> int | None:
    """Tokens that the model was made for; some ropes are stretched beyond what it says."""
    longest: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    factor, before = rope.get("factor"), rope.get("original_max_position_embeddings")
    if longest is None or not isinstance(factor, int | float):
        return longest
    return max(longest, int(factor * (before or longest)))


class Generator:
    """Answers prompts with a registered checkpoint.

    Args:
        directory: The version's files; own architectures bring their code, which is run.
        bos: Whether a beginning-of-sequence token stands before a text: always, never, or where
            the tokenizer itself puts one (auto).
    """

    def __init__(self, directory: Path, bos: str = "auto") -> None:
        self.bos = bos
        own = "auto_map" in json.loads((directory / "config.json").read_text())
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": own}
        self.tokenizer = AutoTokenizer.from_pretrained(directory, **local)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", **local)
        self.model = model.to(device).eval()

    def get_raw_model(self) -> "Generator":
        """What MLflow hands to those who ask for more than texts: ``model`` and ``tokenizer``."""
        return self

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[str]:
        """Continue each prompt; with a chat template, ``chat: true`` answers it.

        Args:
            model_input: A text, texts, or a table whose first column holds them.
            params: ``max_new_tokens`` (at most what the model's context has room for),
                ``temperature`` (0: greedy), ``seed``, ``chat``.

        Returns:
            What follows each prompt, without it.

        Raises:
            ValueError: A prompt is empty, or leaves no room in the model's context.
        """
        asked = {"max_new_tokens": 100, "temperature": 0.0, "seed": 0, "chat": False}
        asked |= params or {}
        if hasattr(model_input, "iloc"):
            model_input = model_input.iloc[:, 0].tolist()
        prompts = [model_input] if isinstance(model_input, str) else list(model_input)
        return [self._continued(str(prompt), asked) for prompt in prompts]

    def _continued(self, prompt: str, asked: dict[str, Any]) -> str:
        ids_1S = self._ids(prompt, chat=asked["chat"])
        context = _context(self.model.config)
        length = ids_1S.shape[1]
        if not length:
            raise ValueError("the prompt is empty; write something")
        if context and length >= context:
            raise ValueError(
                f"the prompt has {length} tokens, and the model's context {context}; shorten it, "
                "so that there is room for an answer"
            )
        tokens = int(asked["max_new_tokens"])
        sampling: dict[str, Any] = {"do_sample": False}
        if asked["temperature"] > 0:
            set_seed(int(asked["seed"]))
            sampling = {"do_sample": True, "temperature": float(asked["temperature"])}
        if asked["chat"]:
            sampling["eos_token_id"] = self._ends()
        with torch.inference_mode():
            said_1T = self.model.generate(
                ids_1S,
                attention_mask=torch.ones_like(ids_1S),
                max_new_tokens=min(tokens, context - length) if context else tokens,
                pad_token_id=self.tokenizer.eos_token_id,
                **sampling,
            )
        return str(self.tokenizer.decode(said_1T[0, ids_1S.shape[1] :], skip_special_tokens=True))

    def _ends(self) -> list[int]:
        """What ends an answer to a chat: the template says which special token."""
        own = self.model.generation_config.eos_token_id
        added = self.tokenizer.added_tokens_decoder.items()
        ends = [self.tokenizer.eos_token_id, *([own] if isinstance(own, int) else own or ())]
        ends += [index for index, token in added if token.special]
        return sorted({end for end in ends if end is not None})

    def _ids(self, prompt: str, *, chat: bool) -> torch.Tensor:
        """Token ids [1, S]; a special token's name in a prompt stays text."""
        if chat:
            messages = [{"role": "user", "content": prompt}]
            found = self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=True,
                return_dict=False,
                sanitize_control_tokens=True,
            )
        else:
            found = [*self._prefix(), *self._plain(prompt)]
        if self.bos == "always" and found[:1] != [self.tokenizer.bos_token_id]:
            found = [self.tokenizer.bos_token_id, *found]
        return torch.tensor([found], device=self.model.device)

    def _prefix(self) -> list[int]:
        """What the tokenizer itself puts before a text; what it puts behind one is left out."""
        if self.bos != "auto":
            return []
        whole, plain = self.tokenizer("a")["input_ids"], self._plain("a")
        starts = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return list(whole[: next(starts, 0)])

    def _plain(self, text: str) -> list[int]:
        alone = {"split_special_tokens": True, "add_special_tokens": False}
        return list(self.tokenizer(text, **alone)["input_ids"])
