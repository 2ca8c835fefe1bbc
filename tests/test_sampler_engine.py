"""The engine and continuous batching: right in every slot, whatever the slots, the order and the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hacrl_jax import sharding
from hacrl_jax.config import MeshConfig, RolloutConfig
from hacrl_jax.models import decoder
from hacrl_jax.sampler.engine import Engine
from hacrl_jax.sampler.rollout import rollout
from hacrl_jax.sampler.sampling import distribution, gaps, sampling
from hacrl_jax.types import UserError

MODEL = decoder.DecoderConfig(
    "Qwen3ForCausalLM", 97, 32, 64, 2, 4, 2, 8, 1e-6, 1e4, None, tie_word_embeddings=True, qk_norm=True,
    max_position_embeddings=512,
)  # fmt: skip
VOCAB = 90  # ids of the tokenizer: the model has seven rows more
GRAPHDEF, SHAPES, AXES = decoder.abstract(MODEL)
PARAMS = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, decoder.init(MODEL, jax.random.key(1)))
LENGTHS = np.array([1, 15, 16, 17, 40, 5, 3])  # one, around a bucket's border, the largest
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (7, 40))
IDS = np.arange(7) + 100
FORWARD = jax.jit(lambda params, tokens: decoder.logits(params, decoder.apply(
    GRAPHDEF, params, tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))[0]))  # fmt: skip


def make(slots=3, eos=(3, 5), dtype=jnp.float32, mesh=None, attention=None, lanes=None, **changes):
    """(engine, its copy of the parameters)."""
    config = {"prompts": 7, "samples": 3, "max_prompt": 40, "max_response": 24, "slots": slots, "dispatch_steps": 4}
    engine = Engine(GRAPHDEF, MODEL, SHAPES, eos=eos, vocab_size=VOCAB, config=RolloutConfig(**config | changes),
                    dtype=dtype, mesh=mesh, axes=AXES, attention=attention, lanes=lanes)  # fmt: skip
    return engine, engine.load_params(PARAMS)


@pytest.fixture(scope="module", params=["unrolled", "xla"])
def three(request):
    """Three slots, with CPU's attention over the cache and with the accelerators'."""
    return make(attention=request.param)


def sample(made, seed=5, order=range(7), samples=3, **options):
    order = np.asarray(order)
    return rollout(*made, PROMPTS[order], LENGTHS[order], IDS[order], jax.random.key(seed), samples=samples, **options)


def forced(prompts, lengths, rollouts, samples=3):
    """[N, R] rows of the full forward's logits, at which each response token is predicted."""
    n, r = rollouts.response.shape
    whole = np.zeros((n, 64 + r), int)
    for row in range(n):
        length = lengths[row // samples]
        whole[row, :length] = prompts[row // samples, :length]
        whole[row, length : length + r] = rollouts.response[row]
    at = (np.repeat(lengths, samples)[:, None] - 1 + np.arange(r))[..., None]
    return jnp.where(jnp.arange(97) < VOCAB, jnp.take_along_axis(FORWARD(PARAMS, whole), at, 1), -jnp.inf)


def inside(rollouts):
    return np.arange(rollouts.response.shape[1]) < np.asarray(rollouts.length)[:, None]


def test_log_probs_equal_teacher_forcing(three):
    found = sample(three, temperature=0.9)
    logits = forced(PROMPTS, LENGTHS, found)
    expected = jnp.take_along_axis(jax.nn.log_softmax(logits / 0.9), found.response[..., None], -1)[..., 0]
    np.testing.assert_allclose(
        np.where(inside(found), found.logprob, 0), np.where(inside(found), expected, 0), atol=1e-4
    )
    assert found.response.max() < VOCAB
    for row, length, stopped in zip(np.asarray(found.response), found.length, found.stopped, strict=True):
        ends = np.isin(row[: int(length)], (3, 5))
        assert not ends[:-1].any() and bool(ends[-1]) == bool(stopped) and (stopped or length == 24)
        assert not row[int(length) :].any()
    by_prompt = np.asarray(found.response).reshape(7, 3, -1)
    assert (by_prompt[:, 0] != by_prompt[:, 1]).any(-1).all()  # samples of one prompt differ


def test_greedy_equals_the_full_forward(three):
    found = sample(three, temperature=0.0, samples=1)
    best = forced(PROMPTS, LENGTHS, found, samples=1).argmax(-1)
    np.testing.assert_array_equal(np.where(inside(found), found.response, 0), np.where(inside(found), best, 0))
    assert len({int(length) for length in found.length}) > 1


def test_greedy_equals_transformers(three):
    torch = pytest.importorskip("torch", reason="compares with transformers' generate")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    theirs = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, tie_word_embeddings=True,
        max_position_embeddings=512,
    )).eval()  # fmt: skip
    state = {"model.embed_tokens.weight": PARAMS["embed"], "lm_head.weight": PARAMS["embed"],
             "model.norm.weight": PARAMS["norm"]}  # fmt: skip
    places = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", "q_norm": "self_attn.q_norm",
              "k_norm": "self_attn.k_norm"}  # fmt: skip
    for name, leaf in PARAMS["layers"].items():
        for i in range(2):
            part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            place = places.get(name, f"{part}.{name}")
            state[f"model.layers.{i}.{place}.weight"] = leaf[i] if name in places else leaf["kernel"][i].T
    theirs.load_state_dict({name: torch.tensor(np.array(value)) for name, value in state.items()})
    found = sample(three, temperature=0.0, samples=1)
    for row in range(7):
        ids = torch.tensor(PROMPTS[row : row + 1, : LENGTHS[row]])
        whole = torch.ones_like(ids)
        out = theirs.generate(
            ids, attention_mask=whole, do_sample=False, max_new_tokens=24, eos_token_id=[3, 5], pad_token_id=0,
            suppress_tokens=list(range(VOCAB, 97)),
        )[0, LENGTHS[row] :]  # fmt: skip
        np.testing.assert_array_equal(found.response[row, : int(found.length[row])], out)


@pytest.mark.slow
def test_samples_do_not_depend_on_slots_order_or_batch(three):
    """On 5,000 tokens; where a sample diverges, the two best perturbed scores were closer than 1e-3."""
    shape = {"samples": 30, "max_response": 48, "prompts": 7}
    made = make(slots=7, **shape, dispatch_steps=16)
    reference = sample(made, samples=30)
    assert int(reference.length.sum()) > 5000
    for other, order in ((make(slots=64, **shape), range(7)), (make(slots=5, **shape), [6, 2, 0, 4, 1, 3, 5])):
        found = sample(other, order=order, samples=30)
        back = np.argsort(order)
        mine = np.asarray(found.response).reshape(7, 30, -1)[back].reshape(210, -1)
        differ = (mine != reference.response) & inside(reference)
        if differ.any():
            rows = np.flatnonzero(differ.any(1))
            key = jax.random.key(5)
            logits = forced(PROMPTS, LENGTHS, reference, samples=30)
            for row in rows:
                at = int(differ[row].argmax())
                own = jax.random.fold_in(jax.random.fold_in(key, int(IDS[row // 30])), int(row % 30))
                scores = distribution(logits[row, at][None], sampling(1.0), VOCAB)
                assert gaps(scores, jax.random.fold_in(own, at)[None])[0] < 1e-3
        same = np.mean(~differ[inside(reference)])
        assert same > 0.99
    half = make(slots=64, dtype=jnp.bfloat16, **shape)
    one = make(slots=5, dtype=jnp.bfloat16, **shape)
    a, b = sample(half, samples=30), sample(one, samples=30)
    print(f"bfloat16: {np.mean((a.response == b.response)[inside(a)]):.3f} of the tokens are the same")


def test_slot_reuse_leaves_no_trace(three):
    """What a slot gives after other rows is what it gives at first, with poison in every entry of the cache."""
    engine = three[0]
    fresh = sample(three, order=[4])

    def poisoned(entries=None, *, empty=engine.init_decode_state):
        state = empty(entries)
        return state.replace(cache=jax.tree.map(lambda part: jnp.full_like(part, 1e4), state.cache))

    engine.init_decode_state = poisoned
    try:
        again = sample(three, order=[4])
    finally:
        del engine.init_decode_state
    np.testing.assert_array_equal(again.response, fresh.response)
    np.testing.assert_array_equal(again.logprob, fresh.logprob)


def test_limits_end_rows_and_more_rows_than_the_engine_keeps_come_in_passes():
    made = make(slots=4, prompts=2, samples=4, eos=())
    limit = np.random.default_rng(2).integers(1, 25, 21)
    found = sample(made, samples=3, limit=limit)
    np.testing.assert_array_equal(found.length, limit)
    assert not found.stopped.any()
    short = sample(made, samples=1, max_response=7)
    assert short.response.shape == (7, 7) and (short.length == 7).all()


@pytest.mark.parametrize("shape", [None, {"data": 2, "fsdp": 1, "tensor": 2}])
def test_rows_that_are_left_move_to_fewer_slots(three, shape):
    """What they give is what they give where they stay."""
    made = make(slots=16, eos=(), mesh=shape and sharding.make_mesh(MeshConfig(**shape)))
    limit = np.where(np.arange(21) % 6 == 2, 24, 1 + np.arange(21) % 9)
    seen, step = [], made[0].generate_many
    made[0].generate_many = lambda params, state, *rest, **more: (
        seen.append((state.slots, state.window)) or step(params, state, *rest, **more)
    )
    found = sample(made, limit=limit)
    slots = [count for count, _ in seen]
    assert slots[0] == 16 and slots == sorted(slots, reverse=True) and len(set(slots)) == 4
    assert all(count % 2 == 0 for count in slots) or shape is None
    assert all(window in made[0].windows_of(count) for count, window in seen)
    expected = sample(make(slots=3, eos=()), limit=limit)
    np.testing.assert_array_equal(found.length, limit)
    np.testing.assert_array_equal(found.response, expected.response)
    np.testing.assert_allclose(found.logprob, expected.logprob, atol=1e-5)


def test_lanes_share_the_slots_and_change_no_sample():
    """Also where prompts do not divide, where one prompt leaves a lane empty, and where answers come in passes."""
    limit = np.random.default_rng(2).integers(1, 25, 21)
    one, two = make(slots=3), make(slots=7, lanes=2, prompts=5)
    assert two[0].slots == 4 and make(slots=32)[0].lanes == 2 and make(slots=31)[0].lanes == 1
    for options in ({"limit": limit}, {"order": [4]}, {"order": [1, 2, 6], "samples": 1, "temperature": 0.0}):
        found, expected = sample(two, **options), sample(one, **options)
        for name in ("response", "length", "stopped"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        np.testing.assert_allclose(found.logprob, expected.logprob, atol=1e-5)


def test_what_fails_in_a_lane_is_told():
    made = make(slots=4, lanes=2)
    made[0].bulk_insert = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        sample(made)


def test_bad_requests_are_told(three):
    engine, params = three
    for length in (0, 41):
        with pytest.raises(UserError, match=f"problem 9 has {length} tokens"):
            rollout(engine, params, np.zeros((1, 41), int), [length], [9], jax.random.key(0), samples=1)
    with pytest.raises(UserError, match="max_response 25"):
        sample(three, max_response=25)
    with pytest.raises(UserError, match="512 positions"):
        make(max_response=500)


@pytest.mark.parametrize(("slots", "shrink"), [(5, 4), (32, 1)])
def test_nothing_compiles_after_the_warm_up(slots, shrink):
    made = make(slots=slots, shrink=shrink)
    names = list(made[0].warm_up(made[1], (sampling(1.0), sampling(0.0))))
    decode = [name for name in names if name.startswith("decode")]
    assert len(names) - len(decode) == len(made[0].prefill_buckets)
    assert made[0].lanes == (2 if slots == 32 else 1)
    assert len(decode) == 2 * sum(len(made[0].windows_of(slots)) for slots in made[0].slot_counts)
    sample(made)  # the few programs outside the engine: cutting the answers, folding the key
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    sample(made, seed=6, order=[6, 5, 4, 3, 2, 1, 0])
    sample(made, seed=7, order=[4, 4, 4, 0, 0, 0, 0], temperature=0.0)
    assert not compiled


@pytest.mark.parametrize("shape", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "fsdp": 8, "tensor": 1}])
@pytest.mark.parametrize("attention", ["unrolled", "xla"])
def test_eight_devices_give_the_ids_of_one(three, shape, attention):
    mesh = sharding.make_mesh(MeshConfig(**shape))
    made = make(slots=8, mesh=mesh, attention=attention)
    state = made[0].init_decode_state(0)
    keys, values = ({shard.data.shape for shard in part.addressable_shards} for part in state.cache[0])
    slots, width = 8 // (shape["data"] * shape["fsdp"]), 16 // shape["tensor"]
    assert values == {(slots, 16, width)} and keys == ({(slots, width, 16)} if attention == "unrolled" else values)
    np.testing.assert_array_equal(sample(made).response, sample(three).response)


def test_the_copy_has_its_own_memory_and_reuses_it(three):
    engine, _ = three
    donated = jax.tree.map(jnp.copy, PARAMS)
    copy = engine.load_params(donated)
    jax.tree.map(lambda leaf: leaf.delete(), donated)
    first = copy["layers"][1]["q_proj"]["kernel"]
    np.testing.assert_array_equal(first, PARAMS["layers"]["q_proj"]["kernel"][1])
    place = first.unsafe_buffer_pointer()
    newer = engine.load_params(jax.tree.map(lambda leaf: leaf + 1, PARAMS), copy)
    assert first.is_deleted() and newer["layers"][1]["q_proj"]["kernel"].unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(newer["norm"], PARAMS["norm"] + 1)
    half, params = make(dtype=jnp.bfloat16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert half.init_decode_state(0).cache[0][0].dtype == jnp.bfloat16


def test_a_decode_step_needs_little_memory_beside_the_cache():
    """Float32 on CPU: temporaries below a quarter of the cache."""
    made = make(slots=64, max_prompt=128, max_response=256)
    engine, params = made
    state = engine.init_decode_state()
    arguments = (params, state, sampling(1.0), np.int32(4), np.int32(65))
    memory = engine._many.lower(*arguments).compile().memory_analysis()
    cache = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
    assert memory.temp_size_in_bytes < cache / 4


def test_the_engine_steps_one_token_at_a_time(three):
    """JetStream's contract: prefill, insert, generate, slot by slot."""
    engine, params = three
    state = engine.init_decode_state()
    expected = sample(three, temperature=0.0, samples=1)
    for slot, row in enumerate((4, 0)):
        tokens = PROMPTS[row, :40]
        prefix = engine.prefill(params=params, padded_tokens=tokens, true_length=int(LENGTHS[row]))
        state = engine.insert(prefix, state, slot)
    drawn = []
    for _ in range(3):
        state, step = engine.generate(params, state, sampling(0.0))
        drawn.append(step)
    np.testing.assert_array_equal([step.token[0] for step in drawn], expected.response[4, :3])
    assert drawn[0].valid.tolist() == [True, True, False]
    assert engine.max_concurrent_decodes == 3 and engine.max_prefill_length == 40 and engine.samples_per_slot == 1
