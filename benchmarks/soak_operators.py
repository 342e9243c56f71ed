"""The operator of the soak: flushes, updates weights, releases memory and pauses at random moments.

Stock SGLang asserts that no client's request is left when weights or memory change, so clients are
stopped first for those; background builds never are. Then a request that must miss its chunks is
answered and the operation follows at once, beside the builds that it caused.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from benchmarks.soak_models import Setup
from benchmarks.soak_traffic import TENANTS, Tally, Traffic

MEAN_PAUSE_S = 8.0
LEAVING_S = 1.0
"""A server may learn late that a client hung up; then it is told to abort what is left."""
WATCH_S = 0.4
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
DISK = "/update_weights_from_disk"


class Gate:
    """What clients wait at; whoever closes it has the server without new requests."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._closing = asyncio.Lock()

    async def wait(self) -> None:
        """Return when it is open."""
        await self._open.wait()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Keep it closed for the time of a block; one block at a time."""
        async with self._closing:
            self._open.clear()
            try:
                yield
            finally:
                self._open.set()


class Operator:
    """Runs operations on the blending server and checks it after each.

    Args:
        http: Client of the blending server.
        stock: Client of the server that it is compared with.
        traffic: Of the clients; makes prompts and compares answers with stock's.
        tally: Of what happens.
        setup: The model, whose weights are loaded again, and its adapters, of which one is replaced.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        stock: httpx.AsyncClient,
        traffic: Traffic,
        tally: Tally,
        setup: Setup,
    ) -> None:
        model = setup.model
        self._http = http
        self._stock = stock
        self._setup = setup
        self._num_adapters = len(setup.adapters)
        self._traffic = traffic
        self._tally = tally
        self._model = model
        self._draw = random.Random("operator")
        weights = {"model_path": str(model), "weight_version": "soak"}
        self._stopped: dict[str, Callable[[], Awaitable[None]]] = {
            "flush": self._flush,
            "flush by GET": lambda: self._flush("GET"),
            "flush with a timeout": lambda: self._flush(timeout_s=30),
            "weights, cache flushed": lambda: self._call(DISK, {**weights, "flush_cache": True}),
            "weights, cache kept": lambda: self._call(DISK, {**weights, "flush_cache": False}),
            "memory": lambda: self._release(None),
            "memory of the weights": lambda: self._release(["weights"]),
            "memory of the cache": lambda: self._release(["kv_cache"]),
            "pause and abort": lambda: self._pause("abort"),
            "a step of reinforcement learning": self._reinforce,
            "abort of all": lambda: self._call("/abort_request", {"abort_all": True}),
        }
        if setup.adapters:
            self._stopped["another adapter under one name"] = self._replace_adapter
        self._beside: dict[str, Callable[[], Awaitable[None]]] = {
            "pause in place": lambda: self._pause("in_place"),
            "pause and retract": lambda: self._pause("retract"),
            "flush beside clients": self._flush_beside,
            "health": lambda: self._call("/health_generate", None, "GET"),
        }

    @property
    def kinds(self) -> list[str]:
        """Names of all operations, as they are counted."""
        return [*self._stopped, *self._beside]

    async def run(self, until_s: float, gate: Gate) -> None:
        """Operate at random moments until the time is over."""
        while time.monotonic() < until_s:
            await asyncio.sleep(self._draw.expovariate(1 / MEAN_PAUSE_S))
            kind = self._draw.choice(self.kinds)
            self._tally.counts[kind] += 1
            try:
                if kind in self._beside:
                    await self._beside[kind]()
                else:
                    await self._operate(kind, gate)
            except httpx.HTTPError as err:
                self._tally.violate(f"{kind}: {type(err).__name__} {err}")
                return

    async def _operate(self, kind: str, gate: Gate) -> None:
        async with gate.closed():
            await self._empty_server()
            await self._traffic.ask(self._cold())
            await asyncio.sleep(self._draw.choice((0.0, 0.0, 0.03, 0.12, 0.3)))
            beside = (await self._info())["chunks_pending"] > 0
            self._tally.counts["operations beside builds"] += beside
            await self._stopped[kind]()
            for ratio in (None, 1.0):
                await self._traffic.check_answer(self._draw, ratio)

    async def _empty_server(self) -> None:
        """Wait until no client's request is left, those of clients that hung up included."""
        await self._traffic.until_left()
        await asyncio.sleep(LEAVING_S)
        await self._call("/abort_request", {"abort_all": True})
        # An aborted request ends with the next decode step, of which this one takes several.
        text = self._draw.choice(("a", "b", "c"))
        await self._traffic.ask(
            self._traffic.body(self._draw, text, max_new_tokens=8, ignore_eos=True)
        )

    def _cold(self) -> dict[str, Any]:
        """Return a request whose chunks nobody has asked for."""
        text = self._traffic.prompt(self._draw, self._draw.randint(2, 12))
        salt = f"{self._draw.choice(TENANTS)} {self._draw.random()}"
        return {**self._traffic.body(self._draw, text, max_new_tokens=1), "cache_salt": salt}

    async def _call(self, path: str, body: dict[str, Any] | None, method: str = "POST") -> None:
        response = await self._http.request(method, path, json=body)
        self._tally.expect(
            response.status_code == httpx.codes.OK,
            f"{method} {path} {body}: {response.status_code} {response.text[:200]}",
        )

    async def _info(self) -> dict[str, Any]:
        state = (await self._http.get("/server_info")).raise_for_status().json()
        blend: dict[str, Any] = state["internal_states"][0]["sgl_blend"]
        return blend

    async def _flush(self, method: str = "POST", timeout_s: int = 0) -> None:
        await self._call(f"/flush_cache?timeout={timeout_s}", None, method)
        info = await self._info()
        pending = info["chunks_pending"] + info["probes_pending"]
        empty = pending == 0 and info["pool"]["free"] == info["pool"]["capacity"]
        self._tally.expect(empty, f"a flush left {pending} builds and probes, {info['pool']}")

    async def _flush_beside(self) -> None:
        response = await self._http.post("/flush_cache")
        self._tally.counts[f"flush beside clients: {response.status_code}"] += 1
        self._tally.expect(response.status_code in (200, 400), f"a flush gave {response.text}")

    async def _still(self, what: str) -> None:
        """Check that no build runs; copies to host memory may end, and give their locks back."""
        first = await self._info()
        await asyncio.sleep(WATCH_S)
        second = await self._info()
        before, after = first["pool"], second["pool"]
        still = first["chunks_built"] == second["chunks_built"]
        still &= before["free"] == after["free"] and before["locked"] >= after["locked"]
        self._tally.expect(still, f"a build ran during {what}: {before} {after}")

    async def _replace_adapter(self) -> None:
        """Give a name to other weights, on both servers."""
        name = max(self._setup.adapters)
        self._num_adapters += 1
        folder = self._setup.new_adapter(self._num_adapters)
        for http in (self._http, self._stock):
            gone = await http.post("/unload_lora_adapter", json={"lora_name": name})
            body = {"lora_name": name, "lora_path": str(folder)}
            come = await http.post("/load_lora_adapter", json=body)
            for response in (gone, come):
                ok = response.status_code == httpx.codes.OK
                self._tally.expect(ok, f"{response.request.url}: {response.text[:200]}")

    async def _release(self, tags: list[str] | None) -> None:
        body = {} if tags is None else {"tags": tags}
        await self._call(RELEASE, body)
        await self._still(f"released memory, {tags}")
        await self._call(RESUME, body)

    async def _pause(self, mode: str) -> None:
        await self._call("/pause_generation", {"mode": mode})
        if mode == "abort":  # SGLang's scheduler goes on in this mode
            await asyncio.sleep(WATCH_S)
        else:
            await self._still(f"a pause, {mode}")
        await self._call("/continue_generation", {})

    async def _reinforce(self) -> None:
        """Pause, release everything, bring new weights, go on."""
        await self._call("/pause_generation", {"mode": "retract"})
        await self._call(RELEASE, {})
        await self._call(RESUME, {"tags": ["weights"]})
        await self._call(DISK, {"model_path": str(self._model), "flush_cache": False})
        await self._call(RESUME, {"tags": ["kv_cache", "cuda_graph"]})
        await self._call("/flush_cache", None)
        await self._call("/continue_generation", {})
