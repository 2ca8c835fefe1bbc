"""The exchange: on the device between agents of one tokenizer, through text between others; the order of updates."""

from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hacrl_jax
from hacrl_jax import exchange, tokenizer
from hacrl_jax.agent import Agent
from hacrl_jax.config import AgentConfig, Config, DataConfig, ObjectiveConfig, PromptConfig, RolloutConfig
from hacrl_jax.types import Rollouts

AGENTS = Path(hacrl_jax.__file__).parent / "agents"
B, G, P, R = 3, 2, 5, 8
N = B * G


@pytest.fixture(scope="module")
def tokenizers():
    return [tokenizer.load(AGENTS / name, PromptConfig()) for name in ("tiny-qwen3-a", "tiny-qwen3-b", "tiny-llama")]


def rollouts(seed: int = 0, high: int = 90) -> Rollouts:
    """Ragged responses of which about half end in the id 7."""
    rng = np.random.default_rng(seed)
    length, stopped = rng.integers(1, R + 1, N), rng.random(N) < 0.5
    ids = rng.integers(10, high, (N, R))
    ids[np.arange(N)[stopped], length[stopped] - 1] = 7
    inside = np.arange(R) < length[:, None]
    return jax.tree.map(jnp.asarray, Rollouts(
        prompt=np.zeros((B, P), np.int32), prompt_length=np.ones(B, np.int32),
        response=np.where(inside, ids, 0).astype(np.int32), length=length.astype(np.int32),
        logprob=np.where(inside, rng.normal(-2, 0.5, (N, R)), 0).astype(np.float32), stopped=stopped,
    ))  # fmt: skip


def said(tok, lines: list[str]) -> Rollouts:
    """Rollouts that say these lines, each ended by the agent's EOS."""
    encoded = [[*tokenizer.encode(tok, line), tok.eos[0]] for line in lines]
    width = max(map(len, encoded))
    ids = np.zeros((len(lines), width), np.int32)
    for row, line in zip(ids, encoded, strict=True):
        row[: len(line)] = line
    length = jnp.asarray([len(line) for line in encoded], jnp.int32)
    return Rollouts(
        jnp.zeros((1, 3), jnp.int32), jnp.asarray([3]), jnp.asarray(ids), length,
        jnp.zeros(ids.shape), jnp.ones(len(lines), bool),
    )  # fmt: skip


PROMPTS = jnp.asarray(np.arange(1, B * P + 1).reshape(B, P), jnp.int32)
LENGTHS = jnp.asarray([P, 2, 4], jnp.int32)


def test_rows_are_the_prompt_and_right_after_it_the_response():
    own, score = rollouts(), jnp.asarray(np.random.default_rng(1).normal(-2, 0.5, (N, R)), jnp.float32)
    rows = exchange.same_tokenizer_rows(own, score, PROMPTS, LENGTHS, -1, eos="trained")
    layout = exchange.layout(rows)
    for i in range(N):
        start, length = int(LENGTHS[i // G]), int(own.length[i])
        whole = [*PROMPTS[i // G, :start].tolist(), *own.response[i, :length].tolist()]
        assert rows.tokens[i, : start + length].tolist() == whole
        assert not np.any(rows.tokens[i, start + length :])
        assert np.flatnonzero(layout["scored"][i]).tolist() == list(range(start, start + length))
        assert layout["segment"][i].sum() == start + length
        np.testing.assert_allclose(rows.source_logprob[i], score[i, :length].mean(), rtol=1e-6)
        chex.assert_trees_all_equal(rows.source_token_logprob[i, start : start + length], score[i, :length])


def test_the_samplers_log_probs_cost_no_forward_pass():
    agent = SimpleNamespace(config=SimpleNamespace(objective=ObjectiveConfig(source_logprob="sampler")))
    assert Agent.score(agent, [], own := rollouts()) is own.logprob


def test_the_final_eos_becomes_the_learners():
    own, score = rollouts(), jnp.zeros((N, R))
    rows = exchange.same_tokenizer_rows(own, score, PROMPTS, LENGTHS, 5, eos="trained")
    for i in range(N):
        last = int(LENGTHS[i // G]) + int(own.length[i]) - 1
        assert rows.tokens[i, last] == (5 if own.stopped[i] else own.response[i, own.length[i] - 1])


def test_excluded_eos_leaves_both_sides_unless_it_is_all_there_is():
    length, stopped = jnp.asarray([4, 1, 3]), jnp.asarray([True, True, False])
    assert exchange.scored_lengths(length, stopped, "excluded").tolist() == [3, 1, 3]
    assert exchange.scored_lengths(length, stopped, "trained").tolist() == [4, 1, 3]


def test_exchange_between_agents_of_one_tokenizer_stays_on_the_device(monkeypatch):
    objective, reward = ObjectiveConfig(), jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, N)), jnp.float32)

    @jax.jit
    def build(first, second, scores, reward, ratio, final_eos):
        parts = tuple(
            exchange.same_tokenizer_rows(own, score, PROMPTS, LENGTHS, eos_id, eos="trained")
            for own, score, eos_id in zip((first, second), scores, final_eos, strict=True)
        )
        fates = [(own.length, own.stopped) for own in (first, second)]
        return exchange.assemble(
            parts, reward, fates, ratio, prompts=B, responses=R, chosen=(0, 1), learner=0, objective=objective
        )

    arguments = (
        rollouts(0), rollouts(1), (jnp.zeros((N, R)), jnp.zeros((N, R))), reward, jnp.ones(2), jnp.asarray([-1, 5]),
    )  # fmt: skip
    assert "callback" not in str(jax.make_jaxpr(build)(*arguments))
    build(*arguments)

    def forbidden(*_, **__):
        raise AssertionError("a device array was copied to the host")

    kind = type(jnp.zeros(()))
    monkeypatch.setattr(kind, "_value", property(forbidden))  # what tolist, item, float() and printing go through
    for method in ("__array__", "tolist", "item", "copy_to_host_async"):
        monkeypatch.setattr(kind, method, forbidden)
    for module, name in ((np, "asarray"), (np, "array"), (jax, "device_get")):  # numpy reads CPU buffers directly
        monkeypatch.setattr(module, name, forbidden)
    copies = (lambda: np.asarray(reward), reward.tolist, lambda: float(reward[0, 0]), lambda: jax.device_get(reward))
    for copy in copies:
        with pytest.raises(AssertionError):  # the patches do see copies
            copy()
    with jax.transfer_guard("disallow_explicit"):
        rows = jax.block_until_ready(build(*arguments))
    monkeypatch.undo()
    assert rows.tokens.shape == (2 * N, P + R)


def test_a_view_in_another_tokenizer_decodes_to_the_sources_text(tokenizers):
    qwen, _, llama = tokenizers
    assert qwen.fingerprint != llama.fingerprint
    lines = ["12+3475=3487\n\\boxed{3487}", "", "naïve 日本語 🙂 é", "a <|im_end|> b", " trailing \r\n\t"]
    own = said(qwen, lines)
    width = own.response.shape[1]
    wide = own.replace(response=jnp.pad(own.response, ((0, 0), (0, 40))), logprob=jnp.zeros((len(lines), width + 40)))
    buffer = exchange.share([wide, wide], [wide.logprob] * 2, np.zeros((2, len(lines))), [tuple(lines)] * 2)
    prompts, length = jnp.asarray([[3, 4, 5]], jnp.int32), jnp.asarray([3], jnp.int32)
    rows, lost = exchange.other_tokenizer_rows(buffer, 0, prompts, length, qwen, llama, ObjectiveConfig())
    assert lost.dropped == 0 and lost.inflation == rows.scored_length.sum() / own.length.sum()
    for i, line in enumerate(lines):
        ids = rows.tokens[i, 3 : 3 + int(rows.scored_length[i])].tolist()
        assert ids[-1] == llama.eos[0]
        assert tokenizer.decode(llama, ids[:-1]) == line


def test_what_does_not_fit_is_dropped_or_cut_and_counted(tokenizers):
    _, _, llama = tokenizers
    qwen = tokenizers[0]
    lines = ["1", "12345 " * 3]
    own = said(llama, lines)
    assert own.response.shape[1] < len(tokenizer.encode(qwen, lines[1]))
    buffer = exchange.share([own, own], [own.logprob] * 2, np.zeros((2, 2)), [tuple(lines)] * 2)
    arguments = (buffer, 0, jnp.zeros((1, 3), jnp.int32), jnp.asarray([3]), llama, qwen)
    rows, lost = exchange.other_tokenizer_rows(*arguments, ObjectiveConfig())
    assert (lost.lossy, lost.too_long, lost.inflation) == (0, 1, 1.0)
    assert rows.valid.tolist() == [True, False]
    rows, lost = exchange.other_tokenizer_rows(*arguments, ObjectiveConfig(cross_too_long="truncate"))
    assert lost.dropped == 0
    assert rows.scored_length.tolist()[1] == own.response.shape[1]


def config(n: int, **changes) -> Config:
    agents = tuple(AgentConfig(name=str(k), model="-") for k in range(n))
    objective = ObjectiveConfig(allow_closed_clip=True, **changes)
    rollout = RolloutConfig(prompts=8, samples=3)
    return Config(name="x", minibatch=4, agents=agents, data=DataConfig(), rollout=rollout, objective=objective)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("learner", [0, "last"])
def test_own_first_visits_every_row_once_in_equal_shares(n, learner):
    learner = 0 if learner == 0 else n - 1
    updates = exchange.minibatches(config(n), learner)
    assert len(updates) == config(n).updates_per_step() == 2 * n
    assert sorted(np.concatenate(updates).tolist()) == list(range(n * 24))
    for m, rows in enumerate(updates):
        shares = np.bincount(rows // 24, minlength=n)
        assert len(rows) == 12
        if m < 2:
            assert shares[learner] == 12
        else:
            assert set(np.delete(shares, learner).tolist()) == {12 // (n - 1)} and shares[learner] == 0


def test_mixed_updates_hold_whole_prompts():
    updates = exchange.minibatches(config(2, order="mixed"), 1)
    assert len(updates) == 2
    for rows in updates:
        prompts = rows % 24 // 3
        assert all(np.sum(prompts == prompt) == 2 * 3 for prompt in set(prompts.tolist()))


@pytest.mark.parametrize("changes", [{}, {"order": "mixed"}, {"cross": "none"}], ids=str)
@pytest.mark.parametrize("n, samples", [(1, 3), (2, 3), (3, 3), (3, 4), (4, 6)])
def test_rows_that_share_a_prompt_are_found_in_every_minibatch(n, samples, changes):
    cfg = config(n, **changes)
    cfg = cfg.model_copy(update={"rollout": RolloutConfig(prompts=12, samples=samples)})
    for learner in range(n):
        group = exchange.shared(cfg, learner)
        assert samples % group == 0
        assert group == samples or (n > 2 and not changes)
        for rows in exchange.minibatches(cfg, learner):
            prompts = rows % (12 * samples) // samples
            assert (prompts.reshape(-1, group) == prompts[::group, None]).all()


def test_without_partners_only_own_rows_are_there():
    assert exchange.sources(3, 1, ObjectiveConfig(cross="none")) == (1,)
    updates = exchange.minibatches(config(3, cross="none"), 1)
    assert sorted(np.concatenate(updates).tolist()) == list(range(24))
