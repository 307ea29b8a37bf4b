"""Find a model: a directory as it is, or a repository of the hub, fetched once."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from upcycle_core.errors import Fault, InputError

# Configuration, tokenizer, safetensors; no pickle, no code, no other formats.
WANTED = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)


def resolve_model(reference: str, cache_dir: Path) -> Path:
    """Return the directory of a model.

    Args:
        reference: A directory, or a repository of the Hugging Face hub (``owner/name``).
        cache_dir: Where fetched repositories are kept.

    Raises:
        InputError: Neither a directory nor a repository that can be fetched; says which it is.
    """
    directory = Path(reference).expanduser()
    if directory.is_dir():
        return directory
    try:
        found = snapshot_download(reference, cache_dir=cache_dir, allow_patterns=list(WANTED))
    except HFValidationError:
        remedy = "is no directory, nor owner/name of a repository; mend the path"
    except GatedRepoError:
        remedy = "is a gated repository; accept its terms on the hub and log in with hf auth login"
    except RepositoryNotFoundError:
        remedy = "is neither a directory nor a repository of the hub; mend the name, or log in"
    except LocalEntryNotFoundError:
        remedy = "is no directory, and the hub cannot be reached to fetch it; give a directory"
    except OSError as error:
        remedy = f"could not be fetched ({error}); try again, or give a directory"
    else:
        return Path(found)
    raise InputError(Fault("model", reference, remedy))
