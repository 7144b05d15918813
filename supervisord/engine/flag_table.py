"""Flags that came and went: what to write instead. Whether a release has a flag is asked of the release itself.

Sources: the flags of the released packages from 0.9.2 to 0.33.0, and the pull requests named beside an entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from supervisord.engine.version import Version


@dataclass(frozen=True, slots=True)
class Moved:
    """A flag that some releases lack.

    `gone`: from this release on it is surely not there; NEVER: no release since 0.9 has it. `since`: before this
    release it is surely not there. `remedy` holds for releases that have one of the flags `instead`, if there are any.
    """

    remedy: str
    instead: tuple[str, ...] = ()
    gone: tuple[int, int] | None = None
    since: tuple[int, int] | None = None

    def lacking(self, version: Version | None) -> bool:
        """Whether this release surely lacks it."""
        if self.gone == NEVER:
            return True
        if version is None:
            return False
        release = (version.major, version.minor)
        return (self.gone is not None and release >= self.gone) or (self.since is not None and release < self.since)


NEVER: Final = (0, 0)

_SPECULATIVE: Final = 'write it into the table speculative-config: { model = "...", num_speculative_tokens = 5 }'
_AWQ: Final = "remove it: vLLM reads the quantisation of a model from the model's own files"
_V0: Final = "remove it: it belonged to the engine V0"
_UPGRADE: Final = "remove it, or install a newer vLLM"


def _speculative() -> Moved:
    return Moved(_SPECULATIVE, ("speculative-config",), NEVER)


MOVED: Final[Mapping[str, Moved]] = {
    # PR 15466: one JSON value in place of a dozen flags, before 0.9.
    "speculative-model": _speculative(),
    "num-speculative-tokens": _speculative(),
    "speculative-model-quantization": _speculative(),
    "speculative-draft-tensor-parallel-size": _speculative(),
    "speculative-max-model-len": _speculative(),
    "speculative-disable-by-batch-size": _speculative(),
    "ngram-prompt-lookup-max": _speculative(),
    "ngram-prompt-lookup-min": _speculative(),
    "spec-decoding-acceptance-method": _speculative(),
    # Flags of another project that how-tos pass on; no release of `vllm serve` had them.
    "awq-ckpt": Moved(_AWQ, (), NEVER),
    "awq-wbits": Moved(_AWQ, (), NEVER),
    "awq-group-size": Moved(_AWQ, (), NEVER),
    "enable-moe-optimization": Moved("remove it: vLLM picks the kernels of a mixture of experts itself", (), NEVER),
    "cuda-version": Moved("remove it: the CUDA that vLLM was built for counts", (), NEVER),
    "disable-log-requests": Moved("remove it: requests are logged only with enable-log-requests", (), (0, 17)),
    "num-scheduler-steps": Moved(_V0, (), (0, 11)),
    "preemption-mode": Moved(_V0, (), (0, 11)),
    "swap-space": Moved(
        "remove it: preempted requests are computed again; kv-offloading-size keeps KV blocks in host memory, in GiB",
        (),
        (0, 18),
    ),
    # What 0.32 lacks; when each went was not looked up, so only the installed release can refuse them.
    "use-v2-block-manager": Moved(_V0),
    "num-lookahead-slots": Moved(_V0),
    "enable-reasoning": Moved("remove it: reasoning-parser alone turns it on", ("reasoning-parser",)),
    "guided-decoding-backend": Moved(
        'write structured-outputs-config = { backend = "..." }', ("structured-outputs-config",)
    ),
    "task": Moved('write runner = "pooling", and perhaps convert, for what does not generate', ("runner", "convert")),
    "rope-scaling": Moved("write it into the table hf-overrides", ("hf-overrides",)),
    "rope-theta": Moved("write it into the table hf-overrides", ("hf-overrides",)),
    "max-seq-len-to-capture": Moved("use max-cudagraph-capture-size", ("max-cudagraph-capture-size",)),
    "cuda-graph-sizes": Moved("use cudagraph-capture-sizes", ("cudagraph-capture-sizes",)),
    "override-pooler-config": Moved("use pooler-config", ("pooler-config",)),
    "disable-mm-preprocessor-cache": Moved("write mm-processor-cache-gb = 0", ("mm-processor-cache-gb",)),
    # What older releases lack.
    "enable-log-requests": Moved(_UPGRADE, (), since=(0, 10)),
    "disable-access-log-for-endpoints": Moved(_UPGRADE, (), since=(0, 13)),
    "shutdown-timeout": Moved(_UPGRADE, (), since=(0, 18)),
    "watchdog-config": Moved(_UPGRADE, (), since=(0, 33)),
}
