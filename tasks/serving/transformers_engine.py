"""``transformers serve``, told of the architectures of our own.

``python -m tasks.serving.transformers_engine serve MODEL [OPTION ...]``

It looks a class up by name in transformers alone. With the installed classes there, no code that
lies beside a checkpoint has to be trusted. transformers' own command asks the package index for a
newer version first; this one asks nobody. And it writes a line for each request, for ever.
"""

import transformers
import uvicorn.config
from transformers.cli.transformers import app

from tasks.scoring.architectures import register_architectures
from upcycle_core.baselines.bam import BamForCausalLM
from upcycle_core.ders.model import DersForCausalLM
from upcycle_core.simoe.model import SimoeForCausalLM

OWN = (BamForCausalLM, DersForCausalLM, SimoeForCausalLM)


def log_no_requests() -> None:
    """Let uvicorn, started with its own settings of logs from now on, write none of requests."""
    uvicorn.config.LOGGING_CONFIG["loggers"]["uvicorn.access"]["handlers"] = []


if __name__ == "__main__":
    log_no_requests()
    register_architectures()
    for network in OWN:
        setattr(transformers, network.__name__, network)
    app()
