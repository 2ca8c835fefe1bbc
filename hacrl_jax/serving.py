"""A trained agent behind google-jetstream's own orchestrator and gRPC server (extra `jetstream`).

The package drives an Engine with one thread each for prefill, insertion and decoding, and for turning tokens into text.
Three things it leaves to us: a request is validated before it reaches a thread, because an exception in one of them
kills the process; a client that hangs up frees its slot; text comes from all tokens of an answer, not from each alone,
so that characters made of several tokens are whole.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import AsyncIterator
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hacrl_jax import tokenizer
from hacrl_jax.config import RolloutConfig
from hacrl_jax.generate import Policy, before_stop
from hacrl_jax.sampler import decode
from hacrl_jax.sampler.engine import Engine
from hacrl_jax.sampler.sampling import Sampling, sampling
from hacrl_jax.tokenizer import Tokenizer
from hacrl_jax.types import Params, Problem, UserError

_root = logging.getLogger()
_before = (_root.level, list(_root.handlers))
jax.tree_map = jax.tree.map  # JAX removed the name, which google-jetstream 0.2.2 calls
try:
    import grpc
    from jetstream.core import orchestrator, server_lib
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
    from jetstream.core.utils import async_multifuture
    from jetstream.core.utils.return_sample import ReturnSample
    from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2
except ImportError as error:
    raise UserError(f"serving needs google-jetstream ({error}); pip install 'hacrl_jax[jetstream]'") from None
finally:  # importing the package sends every library's debug lines to stdout
    _root.setLevel(_before[0])
    _root.handlers[:] = _before[1]

TOKENIZED = "tokenized"  # a request's history_path: anything but empty keeps the package from adding a BOS of its own


@dataclass(frozen=True)
class Settings:
    """What the server serves: sizes, and how answers are drawn."""

    slots: int = 16
    max_prompt: int = 1024
    max_response: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 9000


class JetStreamEngine(engine_api.Engine):
    """Our engine in the package's terms. A request's key is the seed folded with its number in order of prefill."""

    def __init__(self, engine: Engine, params: Params, tok: Tokenizer, draw: Sampling, seed: int = 0):
        self._engine, self._params, self._tokenizer, self._draw = engine, params, tok, draw
        self._key = jax.random.key(seed)
        self._numbers = count()
        self._entries = np.zeros(engine.slots, np.int64)  # upper bounds of live cache entries
        self._most = np.zeros(engine.slots, np.int64)

    def load_params(self, *_: Any, **__: Any) -> Params:
        return self._params

    def prefill(
        self, *, params: Params, existing_prefix: Any = None, padded_tokens: Any, true_length: int
    ) -> dict[str, Any]:
        bucket = self._engine.prefill_shape(true_length)[1]
        tokens = np.zeros(bucket, np.int32)
        tokens[:true_length] = np.asarray(padded_tokens)[:true_length]
        prefix = self._engine.prefill(
            params=params, existing_prefix=existing_prefix, padded_tokens=tokens, true_length=true_length
        )
        # The length and the request's number stay on the host: insertion must not wait for the prefill.
        return {"prefix": prefix, "entries": np.int64(true_length - 1), "number": np.int64(next(self._numbers))}

    def insert(self, prefix: dict[str, Any], decode_state: decode.DecodeState, slot: int) -> decode.DecodeState:
        entries = int(prefix["entries"])
        limit = self._engine.config.max_response
        self._entries[slot], self._most[slot] = entries, entries + limit
        return self._engine.insert(
            prefix["prefix"], self._fit(decode_state), slot, key=self._key, problem=int(prefix["number"]), limit=limit
        )

    def generate(
        self, params: Params, decode_state: decode.DecodeState
    ) -> tuple[decode.DecodeState, engine_api.ResultTokens]:
        state, drawn = self._engine.generate(params, self._fit(decode_state), self._draw)
        self._entries = np.minimum(self._entries + 1, self._most)
        data = jnp.stack([drawn.token, drawn.valid.astype(jnp.int32), drawn.length], axis=1)  # [S, 3]
        return state, engine_api.ResultTokens(
            data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
        )

    def _fit(self, state: decode.DecodeState) -> decode.DecodeState:
        most = int(self._entries.max())
        needed, ample = self._engine.window(most), self._engine.window(most + 64)
        fits = needed <= state.window <= ample
        return state if fits else self._engine.resize(state, needed)

    def get_prefix_destination_sharding(self) -> Any:
        return self._engine.get_prefix_destination_sharding()

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        return tokenizer_pb2.TokenizerParameters(path="", extra_ids=0)

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> tokenizer_api.Tokenizer:
        return StopTokens(self._tokenizer)

    def init_decode_state(self, *_: Any, **__: Any) -> decode.DecodeState:
        self._entries[:] = self._most[:] = 0
        return self._engine.init_decode_state(0)

    @property
    def max_concurrent_decodes(self) -> int:
        return self._engine.max_concurrent_decodes

    @property
    def samples_per_slot(self) -> int:
        return self._engine.samples_per_slot

    @property
    def max_prefill_length(self) -> int:
        # The package pads to powers of two from 16 and looks this number up among them.
        return max(16, 1 << (self._engine.max_prefill_length - 1).bit_length())

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._engine.mesh

    @property
    def colocated_cpus(self) -> None:
        return self._engine.colocated_cpus

    def warm_up(self) -> None:
        """Compile what requests will need."""
        engine, params = self._engine, self._params
        state = self.init_decode_state()
        for window in engine.windows:
            state = engine.resize(state, window)
            for bucket in engine.prefill_buckets:
                if bucket <= window:
                    prefix = engine.prefill(params=params, padded_tokens=np.zeros(bucket), true_length=1)
                    state = engine.insert(prefix, state, 0, key=self._key, limit=1)
            state, _ = self.generate(params, state)
        self.init_decode_state()


class StopTokens(tokenizer_api.Tokenizer):
    """What the package asks of a tokenizer once requests come as ids and their text is made elsewhere."""

    def __init__(self, tok: Tokenizer):
        self._tokenizer = tok

    def encode(self, s: str, **_: Any) -> tuple[Any, int]:
        raise NotImplementedError("requests are tokenized before they are queued")

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return ""

    @property
    def pad_id(self) -> int:
        return 0

    @property
    def eos_id(self) -> int:
        return self._tokenizer.eos[0]

    @property
    def bos_id(self) -> int:
        return self._tokenizer.eos[0]  # never used: TOKENIZED

    @property
    def stop_tokens(self) -> set[int]:
        return set(self._tokenizer.eos)


@dataclass
class Request(orchestrator.ActiveRequest):
    """A request that ends at its limit, at a stop string, or when its client hangs up."""

    tokenizer: Tokenizer | None = None
    stop: tuple[str, ...] = ()
    tokens: list[int] = field(default_factory=list)
    sent: int = 0  # characters

    def enqueue_samples(self, generated_samples: list[ReturnSample]) -> None:
        if self.return_channel.cancelled():
            self.complete[:] = True  # the package then gives the slot to the next request
            return
        (sample,) = generated_samples
        self.tokens += sample.token_ids
        if len(self.tokens) >= self.max_tokens:
            self.complete[:] = True
        if not self.is_client_side_tokenization:
            text, cut = before_stop(tokenizer.decode(self.tokenizer, self.tokens), self.stop)
            if cut:
                self.complete[:] = True
            end = len(text) if self.complete.all() else self._safe(text)
            sample = ReturnSample(text=[text[self.sent : end]], token_ids=sample.token_ids)
            self.sent = max(self.sent, end)
        super().enqueue_samples([sample])

    def _safe(self, text: str) -> int:
        """How much of the text no later token can change: not a character in the making, nor a stop string's start."""
        end = len(text.rstrip(tokenizer.CUT_CHARACTER))
        for string in self.stop:
            for size in range(min(len(string) - 1, end), 0, -1):
                if text[:end].endswith(string[:size]):
                    end -= size
                    break
        return max(end, self.sent)


class Channel(async_multifuture.AsyncMultifuture):
    """The package's stream of answers, whose listener's event loop may be gone: that must not end the sender's thread,
    and with it the process. (It posts an answer's end in two messages; a listener may leave at the first.)"""

    def add_result(self, result: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            super().add_result(result)

    def set_exception(self, exception: Exception) -> None:
        with suppress(RuntimeError):
            super().set_exception(exception)


class Servicer(orchestrator.LLMOrchestrator):
    """The package's servicer with requests checked first. text_content is what the user says, put through the agent's
    chat template; token_content is the whole prompt."""

    def __init__(self, driver: orchestrator.Driver, policy_tokenizer: Tokenizer, settings: Settings):
        super().__init__(driver)
        self._tokenizer, self._settings = policy_tokenizer, settings

    async def Decode(  # the name of the protocol
        self, request: jetstream_pb2.DecodeRequest, context: grpc.aio.ServicerContext | None = None
    ) -> AsyncIterator[jetstream_pb2.DecodeResponse]:
        channel = Channel()
        if context:
            context.add_done_callback(channel.cancel)
        as_ids = request.WhichOneof("content") == "token_content"
        try:
            ids = self._prompt(request)
            limit = self._limit(request.max_tokens)
        except UserError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        active = Request(
            max_tokens=limit, return_channel=channel, history_path=TOKENIZED, prefill_content=ids,
            is_client_side_tokenization=as_ids, tokenizer=self._tokenizer, stop=self._settings.stop,
        )  # fmt: skip
        try:
            self._driver.place_request_on_prefill_queue(active)
        except queue.Full:
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests are waiting; try again later")
            return
        async for response in channel:
            if as_ids:
                yield self.process_client_side_tokenization_response(response)
            else:
                yield self.process_server_side_tokenization_response(response, [])

    def _prompt(self, request: jetstream_pb2.DecodeRequest) -> np.ndarray:
        """The prompt's ids. Raises UserError for one that is empty, too long, or has ids that do not exist."""
        match request.WhichOneof("content"):
            case "text_content" if request.text_content.text:
                ids = tokenizer.render(
                    self._tokenizer, Problem(0, (("user", request.text_content.text),), "", "request")
                )
            case "token_content" if request.token_content.token_ids:
                ids = list(request.token_content.token_ids)
            case _:
                raise UserError("the request has no text and no token ids")
        if not 0 <= min(ids) <= max(ids) < self._tokenizer.vocab_size:
            raise UserError(f"token ids must be from 0 to {self._tokenizer.vocab_size - 1}")
        if len(ids) > self._settings.max_prompt:
            raise UserError(f"the prompt has {len(ids)} tokens; this server takes {self._settings.max_prompt}")
        return np.asarray(ids, np.int32)

    def _limit(self, tokens: int) -> int:
        if not 1 <= tokens <= self._settings.max_response:
            raise UserError(f"max_tokens is {tokens}; this server takes 1 to {self._settings.max_response}")
        return tokens


class Server(server_lib.JetStreamServer):
    """The package's server with our servicer, on one address instead of on all of them."""

    def __init__(self, driver: orchestrator.Driver, servicer: Servicer, host: str, port: int, threads: int):
        self._driver = driver
        self._executor = futures.ThreadPoolExecutor(max_workers=threads)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(self._executor)
        self._loop_thread = Thread(target=self._loop.run_forever, daemon=True)
        self._loop_thread.start()

        async def listen() -> int:
            # Without it a second server on the port would take half of the first one's clients.
            self._grpc_server = grpc.aio.server(self._executor, options=[("grpc.so_reuseport", 0)])
            jetstream_pb2_grpc.add_OrchestratorServicer_to_server(servicer, self._grpc_server)
            return self._grpc_server.add_insecure_port(f"{host}:{port}")

        try:
            self.port = asyncio.run_coroutine_threadsafe(listen(), self._loop).result()
        except RuntimeError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error}") from None


async def _refuse(context: grpc.aio.ServicerContext | None, code: grpc.StatusCode, why: str) -> None:
    if context is None:
        raise UserError(why)
    await context.abort(code, why)


def driver(engine: JetStreamEngine) -> orchestrator.Driver:
    """The package's driver, with prefill and decoding on one engine."""
    params = engine.load_params()
    return orchestrator.Driver(
        prefill_engines=[engine], generate_engines=[engine], prefill_params=[params], generate_params=[params],
        interleaved_mode=True, jax_padding=False,
    )  # fmt: skip


def start(policy: Policy, settings: Settings) -> Server:
    """Load, compile, listen. Returns the running server: .port, .stop(), .wait_for_termination()."""
    config = RolloutConfig(
        prompts=settings.slots, samples=1, max_prompt=settings.max_prompt, max_response=settings.max_response,
        slots=settings.slots,
    )  # fmt: skip
    draw = sampling(settings.temperature, settings.top_p, settings.top_k, settings.min_p)
    adapter = JetStreamEngine(*policy.engine(config), policy.tokenizer, draw, settings.seed)
    adapter.warm_up()
    drive = driver(adapter)
    threads = max(64, adapter.max_concurrent_decodes)
    servicer = Servicer(drive, policy.tokenizer, settings)
    try:
        server = Server(drive, servicer, settings.host, settings.port, threads)
    except UserError:
        drive.stop()
        raise
    server.start()
    return server
