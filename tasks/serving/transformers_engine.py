"""``transformers serve``, told of the architectures of our own.

``python -m tasks.serving.transformers_engine serve MODEL [OPTION ...]``

It looks a class up by name in transformers alone. With the installed classes there, no code that
lies beside a checkpoint has to be trusted. transformers' own command asks the package index for a
newer version first; this one asks nobody.
"""

import transformers
from transformers.cli.transformers import app

from tasks.scoring.architectures import register_architectures
from upcycle_core.baselines.bam import BamForCausalLM
from upcycle_core.ders.model import DersForCausalLM
from upcycle_core.simoe.model import SimoeForCausalLM

OWN = (BamForCausalLM, DersForCausalLM, SimoeForCausalLM)

if __name__ == "__main__":
    register_architectures()
    for network in OWN:
        setattr(transformers, network.__name__, network)
    app()
