"""The API server: routes and pages."""

from __future__ import annotations

import json
import os
import time

from . import page
from .captures import read_page
from .tree import say, stamp
from .wire import HttpServer
from .work import Refused, Work

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from .flags import Options
    from .life import Life
    from .moods import MoodFile
    from .ranks import Rank
    from .wire import Connection, Loop, Request

    Handler = Callable[[Connection, Request], None]

_JSON = "application/json"
_PLAIN = "text/plain; version=1.0.0; charset=utf-8"


class App(HttpServer):
    """Everything that answers on the port."""

    def __init__(self, loop: Loop, options: Options, mood: MoodFile, data: str) -> None:
        super().__init__(loop)
        self.options = options
        self.mood_file = mood
        self.mood = mood.values
        self.data = data
        self.life: Life  # set by the composition in cli.py
        self.ranks: list[Rank] = []
        self.stepped = False
        self.gpu_blocks: int | None = None
        self._page: page.Page | None = None
        self._page_of = ""
        self._rates_since = time.monotonic()
        model = options.model or options.text("model") or "Qwen/Qwen3-0.6B"
        self.root = model
        self.model_names = options.many("served-model-name") or [model]
        self.model_name = self.model_names[0]
        self.max_model_len = options.integer("max-model-len", 32768)
        self.block_size = options.integer("block-size", 16)
        self.work = Work(self)
        self.pool = max(1, self.total_blocks() - 1)
        keys = options.many("api-key") or [os.environ.get("VLLM_API_KEY", "")]
        self._keys = {key for key in keys if key}
        self._muted = set(options.text("disable-access-log-for-endpoints").split(","))
        self._silent = options.on("disable-uvicorn-access-log")
        self._routes = self._make_routes()

    def total_blocks(self) -> int:
        """Blocks of one rank."""
        said = self.mood["blocks"]
        if said is not None and str(said).isdigit():
            return int(said)
        return self.gpu_blocks or self.options.integer("num-gpu-blocks-override", 16384)

    def on_pool(self, blocks: int | None) -> None:
        """An engine core has measured what its GPUs have room for; the smallest counts."""
        if blocks:
            self.gpu_blocks = min(blocks, self.gpu_blocks or blocks)
            self.pool = max(1, self.total_blocks() - 1)

    def hangs(self, name: str) -> bool:
        hang = self.mood["hang"]
        return hang if isinstance(hang, bool) else name in hang

    # requests

    def _make_routes(self) -> dict[str, dict[str, Handler]]:
        routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/metrics": {"GET": self._metrics},
            "/load": {"GET": self._load},
            "/version": {"GET": self._version},
            "/tokenize": {"POST": self._tokenize},
            "/v1/models": {"GET": self._models},
            "/v1/completions": {"POST": lambda c, r: self.work.accept(c, r, chat=False)},
            "/v1/chat/completions": {"POST": lambda c, r: self.work.accept(c, r, chat=True)},
        }
        if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            routes["/is_sleeping"] = {"GET": self._is_sleeping}
        return routes

    def handle(self, connection: Connection, request: Request) -> None:
        self.poll_mood()
        drip = self.mood["drip"]
        if drip and request.path in drip.get("on", (request.path,)):
            connection.drip = (max(1, drip.get("bytes", 1)), drip.get("interval_s", 0.1))
        methods = self._routes.get(request.path)
        if methods is None:
            connection.respond(404, b'{"detail":"Not Found"}')
            return
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            connection.respond(405, b'{"detail":"Method Not Allowed"}')
            return
        if request.path.startswith("/v1/") and not self._may(request):
            connection.respond(401, b'{"error":"Unauthorized"}')
            return
        handler(connection, request)

    def _may(self, request: Request) -> bool:
        keys = self._keys | ({self.mood["api_key"]} if self.mood["api_key"] else set())
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return not keys or (scheme.lower() == "bearer" and token in keys)

    def poll_mood(self) -> None:
        if self.mood_file.changed():
            self.mood = self.mood_file.values
            self._rates_since = time.monotonic()
            self.stepped = False
            self.life.obey()

    def access(self, connection: Connection, status: int) -> None:
        request = connection.request
        if self._silent or request is None or request.path in self._muted:
            return
        reason = {200: "OK", 503: "Service Unavailable", 404: "Not Found"}.get(status, "")
        say(f'INFO:     {connection.peer} - "{request.method} {request.target} HTTP/1.1" {status} {reason}')

    def served(self, connection: Connection) -> None:
        self.life.on_request_gone()

    def log(self, source: str, text: str, level: str = "INFO", who: str = "APIServer") -> None:
        say(f"({who} pid={os.getpid()}) {level} {stamp()} [{source}] {text}")

    # answers

    def _after(self, connection: Connection, name: str, answer: Callable[[], None]) -> None:
        """Answer now, late, or never."""
        if self.hangs(name):
            return
        if delay_s := self.mood[f"{name}_delay_s"]:
            self.loop.later(delay_s, lambda: None if connection.closed else answer())
        else:
            answer()

    def _json(self, connection: Connection, value: Any, status: int = 200) -> None:
        connection.respond(status, json.dumps(value, separators=(",", ":")).encode())

    def _health(self, connection: Connection, request: Request) -> None:
        self._after(connection, "health", lambda: self._say_health(connection))

    def _say_health(self, connection: Connection) -> None:
        said = self.mood["health"]
        if self.life.state == "dead":
            connection.respond(503, b"")
        elif isinstance(said, int):
            connection.respond(said, b"")
        else:
            body = said.get("body", "").encode()
            if "json" in said:
                body = json.dumps(said["json"]).encode()
            extra = tuple(f"{name}: {value}" for name, value in said.get("headers", {}).items())
            connection.respond(said.get("status", 200), body, _JSON, extra)

    def _models(self, connection: Connection, request: Request) -> None:
        def answer() -> None:
            status = self.mood["models"]
            if status != 200:
                connection.respond(status, Refused(status, "Error", "simulated failure").body)
                return
            now = int(time.time())
            models: list[dict[str, Any]] = [
                {
                    "id": name, "object": "model", "created": now, "owned_by": "vllm",
                    "root": self.root, "parent": None, "max_model_len": self.max_model_len,
                    "permission": [],
                }
                for name in self.model_names
            ]  # fmt: skip
            self._json(connection, {"object": "list", "data": models})

        self._after(connection, "models", answer)

    def _version(self, connection: Connection, request: Request) -> None:
        self._json(connection, {"version": os.environ.get("VLLM_SIM_VERSION", "0.32.0")})

    def _load(self, connection: Connection, request: Request) -> None:
        tracked = self.options.on("enable-server-load-tracking")
        self._json(connection, {"server_load": len(self.work.active) if tracked else 0})

    def _is_sleeping(self, connection: Connection, request: Request) -> None:
        self._json(connection, {"is_sleeping": bool(self.mood["asleep"])})

    def _tokenize(self, connection: Connection, request: Request) -> None:
        try:
            body = json.loads(request.body)
            tokens = self.work.prompt_of(body, chat="messages" in body)
        except Refused as refused:
            connection.respond(refused.status, refused.body)
        except (ValueError, AttributeError, TypeError) as error:
            connection.respond(400, Refused(400, "BadRequestError", str(error)).body)
        else:
            answer = {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens}
            self._json(connection, {**answer, "token_strs": None})

    # the metrics page

    def _metrics(self, connection: Connection, request: Request) -> None:
        self._after(connection, "metrics", lambda: self._say_metrics(connection))

    def _say_metrics(self, connection: Connection) -> None:
        said = self.mood["metrics"]
        if isinstance(said, int):
            connection.respond(said, b"", _PLAIN)
            return
        text = read_page(self.data, said) if said else self._render()
        if kind := self.mood["garbage_page"]:
            connection.respond(200, page.garbage(kind, text), _PLAIN)
            return
        if mib := self.mood["huge_mib"]:
            body, filler = text.encode(), b"# " + b"x" * 8189 + b"\n"
            count = int(mib * 128)

            def source() -> Iterator[bytes]:
                yield body
                for _ in range(count):
                    yield filler

            connection.stream(200, _PLAIN, source(), len(body) + count * len(filler))
            return
        connection.respond(200, text.encode(), _PLAIN)

    def _render(self) -> str:
        mood = self.mood
        if self._page is None or self._page_of != mood["metrics_template"]:
            self._page_of = mood["metrics_template"]
            template = read_page(self.data, self._page_of)
            self._page = page.Page(template, self.model_name, [rank.stats for rank in self.ranks])
        blocks = str(mood["blocks"]) if mood["blocks"] is not None else str(self.total_blocks())
        if blocks.isdigit():
            blocks = str(int(blocks) * len(self.ranks))  # vLLM shows the sum over all ranks
        with_vllm = not self.options.on("disable-log-stats")
        text = self._page.render(blocks, self.block_size, with_vllm)
        gauges = dict(mood["gauges"])
        free = mood["free_blocks"]
        if isinstance(free, dict):
            free = None if free.get("until_step") and self.stepped else free.get("value")
        if free is not None:
            pool = max(1, self.total_blocks() - 1)
            gauges.setdefault("vllm:kv_cache_usage_perc", max(0, pool - free) / pool)
        if gauges or mood["counters"] or mood["rates"] or mood["drop"] or mood["rename"]:
            changes = {**mood, "gauges": gauges}
            text = page.override(text, changes, self.model_name, self._rates_since)
        return text
