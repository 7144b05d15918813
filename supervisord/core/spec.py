"""The configuration as data: every table and key of the TOML file, its default, bounds and meaning.

This is the one place where a key is described. `config.py` reads TOML into these classes, the configuration reference
is generated from them, and the core decides with them. Nothing here touches a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

ENGINE_NAME_PATTERN: Final = r"^[a-z0-9][a-z0-9_-]{0,31}$"

FlagValue = str | int | float | bool | tuple[Any, ...] | Mapping[str, Any]
"""A value under `[engine.X.args]`: true and false are switches, a tuple is one flag with values, a mapping is JSON."""

_EMPTY: Final[dict[str, Any]] = {}


def key(
    doc: str,
    default: Any = ...,
    *,
    low: float | None = None,
    high: float | None = None,
    repr: bool = True,  # noqa: A002 (as dataclasses.field calls it)
) -> Any:
    """One configuration key: its sentence for the reference, its default (none: required), its inclusive bounds.

    `repr` off: it may be a secret.
    """
    metadata = {"doc": doc, "low": low, "high": high}
    if default is ...:
        return field(metadata=metadata, repr=repr)
    if default is _EMPTY:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSpec:
    """`[supervisor]`: the daemon itself."""

    state_dir: str = key("where the daemon keeps what must survive it", "/var/lib/vllm-supervisor")
    socket: str = key("Unix socket of the control API", "/run/vllm-supervisor/control.sock")
    listen: str = key('address of /ready and /metrics, "HOST:PORT"; "" turns both off', "127.0.0.1:9401")
    metrics_token_file: str | None = key(
        "file with the token (Authorization: Bearer) with which other machines get /metrics; unset: they get none", None
    )
    launcher: Literal["auto", "systemd", "plain"] = key(
        "how engines are run: transient systemd services, or child processes of the daemon", "auto"
    )
    poll_interval_s: float = key("seconds between two looks at each engine", 5.0, low=0.2, high=3600)
    ready_timeout_s: float = key(
        "READY=1 is sent when every autostart engine has settled, or after this; 0 = at once",
        0.0,
        low=0,
        high=86400,
    )
    max_parallel_starts: int = key("engines that may start at the same time", 4, low=1, high=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """`[gpu]`: what is done to the GPUs of the machine."""

    persistence: Literal["auto", "on", "off", "leave"] = key(
        "persistence mode: auto = by generation and class of each GPU", "auto"
    )
    persistence_override: Mapping[str, str] = key("persistence mode by UUID, PCI id or name glob", _EMPTY)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """`[engine.X.probe]`: how an engine is asked whether it works."""

    timeout_s: float = key("total time for one probe request", 15.0, low=0.1, high=600)
    canary_after_s: float = key(
        "a tiny completion is sent when nothing has moved for this long", 60.0, low=1, high=86400
    )
    canary_deadline_s: float = key("a canary without a whole answer by then has failed", 30.0, low=1, high=3600)
    canary_failures: int = key("failed canaries in a row that count as evidence", 3, low=1, high=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSpec:
    """`[engine.X.warmup]`: what is run against the engine before it counts as ready."""

    enabled: bool = key("warm the engine up before it is ready", default=True)
    prefill_tokens: int = key("tokens in one prefill prompt", 512, low=1, high=1_000_000)
    decode_tokens: int = key("tokens generated in the decode stage", 32, low=1, high=100_000)
    max_rounds: int = key("rounds at most until the latency settles", 5, low=1, high=100)
    timeout_s: float = key("the whole warm-up may take this long", 300.0, low=1, high=86400)
    on_failure: Literal["ready", "restart"] = key("after a failed warm-up: ready (and degraded), or restart", "ready")
    prime: tuple[str, ...] = key("files with prompts that fill the prefix cache, one a file", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartSpec:
    """`[engine.X.restart]`: when and how an engine is restarted."""

    free_blocks_min: int | None = key(
        "fewer free KV blocks than this is a fault if the engine is idle; unset: 100, or 5 % of a small pool",
        None,
        low=0,
        high=1_000_000_000,
    )
    free_blocks_for_s: float = key("for this long, and at least 3 samples", 30.0, low=0, high=86400)
    under_load: Literal["wait", "drain", "restart"] = key("low free blocks while requests run and tokens flow", "wait")
    stall_after_s: float = key("work pending and nothing moved for this long is a stall", 180.0, low=1, high=86400)
    unreachable_after_s: float = key("/health and /metrics both fail for this long", 300.0, low=1, high=86400)
    creep_mib_per_h: float = key(
        "memory growth that is a leak, with the margin below: GPU memory is replaced for it, host memory told",
        60.0,
        low=0.1,
        high=1_000_000,
    )
    creep_margin_mib: float = key(
        "and this far above the level after warm-up; more in the first five windows", 512.0, low=0, high=10_000_000
    )
    creep_window_s: float = key("and for this long, 12 minutes at least", 3600.0, low=720, high=604_800)
    on_kv_shortfall: Literal["restart", "alert"] = key("a KV pool far smaller than at the last good start", "restart")
    maintenance_window: str = key(
        'when voluntary restarts may happen: "CRON DURATION", e.g. "0 3 * * * 2h"; "" = always', ""
    )
    max_restarts: int = key("restarts within the window before giving up", 5, low=0, high=10_000)
    max_restarts_window_s: float = key("that window", 3600.0, low=1, high=604_800)
    backoff_initial_s: float = key("first delay before a restart; 0 = at once", 1.0, low=0, high=86400)
    backoff_max_s: float = key("longest delay before a restart", 300.0, low=0, high=86400)
    backoff_reset_after_s: float = key("this long ready starts the delays over", 600.0, low=0, high=604_800)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSpec:
    """`[engine.X.slo]`: limits that alert and never restart."""

    ttft_p95_ms: float = key("95th percentile of the time to the first token", 500.0, low=0, high=3_600_000)
    gpu_util_min_percent: float = key("GPU utilisation below this while requests wait; 0 = off", 0.0, low=0, high=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """`[engine.X]`: one `vllm serve` process. `[engine_defaults]` holds the same keys and is merged under each."""

    name: str = field(metadata={"internal": True})
    command: tuple[str, ...] = key("the program and its first arguments", ("vllm", "serve"))
    model: str = key("model: a directory or a hub name")
    gpus: tuple[str, ...] = key("GPUs by UUID, PCI id or index; [] = CPU engine", ())
    host: str = key("address that the engine listens on", "127.0.0.1")
    port: int = key("port that the engine listens on", low=1, high=65535)
    user: str | None = key("user that the engine runs as, when the daemon is root", None)
    autostart: bool = key("start the engine with the daemon", default=True)
    profile: str = key("launch profile: auto, none or a name (docs/profiles.md)", "auto")
    replica_group: str | None = key("engines of one group are never all down by our own choice", None)
    api_key_file: str | None = key("file with the API key, given to the engine as VLLM_API_KEY", None)
    start_timeout_s: float = key(
        "a start may stand still (no progress) for this long; two polls or more", 600.0, low=1, high=86400
    )
    start_timeout_max_s: float = key("a start may take this long in all", 3600.0, low=1, high=604_800)
    drain_timeout_s: float = key("requests in flight may finish for this long before a stop", 30.0, low=0, high=86400)
    drain_min_s: float = key(
        "a drain takes at least this long, so that a gateway sees it; longer than its checks take",
        0.0,
        low=0,
        high=86400,
    )
    stop_timeout_s: float = key("SIGKILL follows SIGTERM after this", 60.0, low=1, high=86400)
    args: Mapping[str, FlagValue] = key("flags of vllm serve, without dashes", _EMPTY)
    env: Mapping[str, str] = key("extra environment of the engine", _EMPTY)
    probe: ProbeSpec = field(default_factory=ProbeSpec)
    warmup: WarmupSpec = field(default_factory=WarmupSpec)
    restart: RestartSpec = field(default_factory=RestartSpec)
    slo: SloSpec = field(default_factory=SloSpec)

    @property
    def served_name(self) -> str:
        """What requests call the model: vLLM goes by the first of several names, and by `model` without any."""
        named = self.args.get("served-model-name") or self.model
        return str(named[0] if isinstance(named, tuple) else named)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifySpec:
    """`[notify.X]`: a webhook that is told of events (docs/notifications.md)."""

    name: str = field(metadata={"internal": True})
    url: str = key("where messages are posted to, https:// or http://; told as scheme and host only", repr=False)
    events: tuple[str, ...] = key("kinds and groups of events, see below", ("important",))
    headers_file: str | None = key('file with headers to send, "NAME: VALUE" a line, such as Authorization', None)
    ca_file: str | None = key("certificates (PEM) to trust instead of the machine's", None)
    timeout_s: float = key("total time for one attempt to deliver", 10.0, low=0.1, high=60)
    repeat_s: float = key(
        "of what is told again within this time the last is sent at its end, with the number; 0 = each at once. "
        "failed and gpu_quarantined are always sent at once",
        300.0,
        low=0,
        high=86400,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """The whole configuration, merged and validated."""

    supervisor: SupervisorSpec = field(default_factory=SupervisorSpec)
    gpu: GpuSpec = field(default_factory=GpuSpec)
    engines: Mapping[str, EngineSpec] = field(default_factory=dict)
    notify: Mapping[str, NotifySpec] = field(default_factory=dict)
    """Nothing is decided with it, and URLs of webhooks may be secrets: no recording holds it."""
