"""google-jetstream's own orchestrator and gRPC server drive our engine."""

import asyncio
import dataclasses
import logging
import socket
from pathlib import Path

import jax
import numpy as np
import pytest

import hacrl_jax
from hacrl_jax import generate, sharding, tokenizer
from hacrl_jax.config import MeshConfig
from hacrl_jax.sampler.rollout import rollout
from hacrl_jax.types import Problem, UserError

root = logging.getLogger()
before = (root.level, list(root.handlers))
try:
    from hacrl_jax import serving
except UserError as error:
    pytest.skip(f"needs the extra `jetstream`: {error}", allow_module_level=True)

after = (root.level, list(root.handlers))

import grpc  # noqa: E402
from jetstream.core import orchestrator, server_lib  # noqa: E402
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc  # noqa: E402
from jetstream.engine import engine_api  # noqa: E402

AGENT = Path(hacrl_jax.__file__).parent / "agents" / "tiny-llama"
QUESTIONS = [f"{a} + {3 * a + 1} = ?" for a in range(2, 14)]


def policy():
    found = generate.policy(str(AGENT))
    # One device of the eight: what is tested is the server.
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    found.mesh, found.params = mesh, jax.device_put(found.params, sharding.replicated(mesh))
    return found


@pytest.fixture(scope="module")
def served():
    settings = serving.Settings(slots=3, max_prompt=64, max_response=40, temperature=0.0, port=0)
    found = policy()
    server = serving.start(found, settings)
    yield server, found.tokenizer
    server.stop()


@pytest.fixture(scope="module")
def expected():
    """Our own greedy answers, without EOS."""
    found = policy()
    config = serving.RolloutConfig(prompts=12, samples=1, max_prompt=64, max_response=40, slots=5)
    engine, params = found.engine(config)
    ids = [prompt(found.tokenizer, question) for question in QUESTIONS]
    tokens = np.zeros((len(ids), 64), np.int32)
    for row, one in zip(tokens, ids, strict=True):
        row[: len(one)] = one
    lengths = np.asarray([len(one) for one in ids])
    answers = rollout(engine, params, tokens, lengths, np.arange(12), jax.random.key(0), samples=1, temperature=0.0)
    ends = np.asarray(answers.length - answers.stopped)
    return [np.asarray(row)[:end].tolist() for row, end in zip(answers.response, ends, strict=True)]


def prompt(tok, question):
    return tokenizer.render(tok, Problem(0, (("user", question),), "", "test"))


def by_text(question, max_tokens=40):
    content = jetstream_pb2.DecodeRequest.TextContent(text=question)
    return jetstream_pb2.DecodeRequest(text_content=content, max_tokens=max_tokens)


def by_ids(ids, max_tokens=40):
    content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=ids)
    return jetstream_pb2.DecodeRequest(token_content=content, max_tokens=max_tokens)


async def ask(stub, request):
    """(text, ids) of the whole stream."""
    text, ids = "", []
    async for response in stub.Decode(request):
        (sample,) = response.stream_content.samples
        text, ids = text + sample.text, ids + list(sample.token_ids)
    return text, ids


def talk(server, conversation):
    async def run():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            return await asyncio.wait_for(conversation(jetstream_pb2_grpc.OrchestratorStub(channel)), 300)

    return asyncio.run(run())


def test_it_is_the_packages_engine_and_server_and_logging_is_left_alone():
    assert issubclass(serving.JetStreamEngine, engine_api.Engine)
    assert issubclass(serving.Server, server_lib.JetStreamServer)
    assert issubclass(serving.Servicer, orchestrator.LLMOrchestrator)
    assert after == before


def test_concurrent_clients_get_our_own_answers(served, expected):
    server, tok = served

    async def conversation(stub):
        health = await stub.HealthCheck(jetstream_pb2.HealthCheckRequest())
        assert health.is_live
        texts = asyncio.gather(*(ask(stub, by_text(question)) for question in QUESTIONS))
        ids = asyncio.gather(*(ask(stub, by_ids(prompt(tok, question))) for question in QUESTIONS))
        return await texts, await ids

    texts, ids = talk(server, conversation)
    assert [found for _, found in ids] == expected
    assert [text for text, _ in texts] == [tokenizer.decode(tok, one) for one in expected]
    short = talk(server, lambda stub: ask(stub, by_ids(prompt(tok, QUESTIONS[0]), max_tokens=2)))
    assert short[1] == expected[0][:2]


def test_bad_requests_get_an_error_and_the_server_lives(served, expected):
    server, tok = served
    bad = [by_text(""), by_ids([]), by_ids([1] * 65), by_ids([tok.vocab_size]), by_ids([-1]), by_text("1", 0),
           by_text("1", 41), by_text("1 + " * 200), jetstream_pb2.DecodeRequest(max_tokens=3)]  # fmt: skip

    async def conversation(stub):
        for request in bad:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(stub, request)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        return await ask(stub, by_ids(prompt(tok, QUESTIONS[1])))

    assert talk(server, conversation)[1] == expected[1]


def test_a_client_that_hangs_up_frees_its_slot():
    """One slot, and answers that would run to the limit: the next client need not wait for it."""
    found = policy()
    found.tokenizer = dataclasses.replace(found.tokenizer, eos=(found.tokenizer.vocab_size - 1,))
    server = serving.start(found, serving.Settings(slots=1, max_prompt=32, max_response=400, temperature=0.0, port=0))
    engine, steps = server._driver._generate_engines[0], []
    generate_one = engine.generate
    engine.generate = lambda *arguments: steps.append(1) or generate_one(*arguments)
    ids = prompt(found.tokenizer, QUESTIONS[0])

    async def conversation(stub):
        endless = stub.Decode(by_ids(ids, max_tokens=400))
        await endless.read()
        waiting = stub.Decode(by_ids(ids, max_tokens=400))
        endless.cancel()
        waiting.cancel()
        return await ask(stub, by_ids(ids, max_tokens=3))

    try:
        assert len(talk(server, conversation)[1]) == 3
        assert len(steps) < 300
    finally:
        server.stop()


def test_the_orchestrator_alone(served, expected):
    server, tok = served

    async def conversation():
        found = []
        async for response in server_side.Decode(by_ids(prompt(tok, QUESTIONS[3]))):
            found += response.stream_content.samples[0].token_ids
        return found

    server_side = serving.Servicer(server._driver, tok, serving.Settings(max_prompt=64, max_response=40))
    assert asyncio.run(conversation()) == expected[3]


def test_a_listener_whose_loop_is_gone_does_not_end_the_sender():
    async def listen():
        return serving.Channel()

    channel = asyncio.run(listen())
    channel.add_result("late")
    channel.close()
    channel.cancel()
    assert channel.cancelled()


def test_it_listens_on_loopback_unless_told_otherwise(served):
    def reached(host):
        with socket.socket() as client:
            return client.connect_ex((host, served[0].port)) == 0

    assert reached("127.0.0.1")
    # All of 127.0.0.0/8 is this machine: a server on every address would answer at the second one too.
    assert not reached("127.0.0.2")


def test_text_is_sent_once_it_is_sure():
    """Stop strings across token borders, and characters made of several tokens."""
    tok = policy().tokenizer

    class Channel:
        cancelled = staticmethod(lambda: False)

        def __init__(self):
            self.results = []

        def add_result(self, result):
            self.results.append(result[0].text[0])

    def stream(text, stop, tokens=None):
        ids = tokenizer.encode(tok, text) if tokens is None else tokens
        request = serving.Request(max_tokens=99, return_channel=Channel(), complete=np.zeros(1, bool), tokenizer=tok,
                                  stop=stop)  # fmt: skip
        for one in ids:
            if not request.complete.all():
                request.enqueue_samples([serving.ReturnSample(text=[""], token_ids=[one])])
        return request

    whole = stream("12 + 34 = 46", ())
    assert "".join(whole.return_channel.results) == "12 + 34 = 46" and not whole.complete.all()
    cut = stream("12 + 34 = 46", ("4 =",))
    assert "".join(cut.return_channel.results) == "12 + 3" and cut.complete.all()
    held = stream("12 + 34", ("34 =",))
    assert "".join(held.return_channel.results) == "12 + "


def test_a_taken_port_is_told(served):
    with pytest.raises(UserError, match="cannot listen"):
        serving.start(policy(), serving.Settings(slots=1, max_prompt=16, max_response=8, port=served[0].port))
