"""The strict configuration schema: every default is here, and only here.

``load`` reads YAML, lays the named presets under it and dotted overrides over it, and validates the whole. Sources of
the defaults: arXiv 2603.02604, table of hyperparameters, and the authors' code where the text is silent
(docs/objective.md sets them side by side).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hacrl_jax.mistakes import explain
from hacrl_jax.presets import PRESETS
from hacrl_jax.types import UserError

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Dtype = Literal["auto", "float32", "bfloat16"]


def _tuple(item: type) -> Any:
    return Annotated[tuple[item, ...], Field(strict=False)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class OptimizerConfig(Strict):
    """AdamW with global-norm clipping; lr is the peak."""

    lr: NonNegativeFloat = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0  # in updates
    weight_decay: NonNegativeFloat = 0.01
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    grad_clip: NonNegativeFloat = 1.0  # global norm; 0 is off


class LoraConfig(Strict):
    rank: Positive = 16
    alpha: float = 32.0
    targets: _tuple(str) = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class PromptConfig(Strict):
    """How an agent sees a problem. template_args go to the chat template; format serves models without one."""

    template_args: dict[str, Any] = Field(default_factory=lambda: {"enable_thinking": False})
    date_string: str = "26 Jul 2024"  # what a template that prints the date (Llama 3.2) gets, never the clock
    system: str | None = None
    format: str = "{problem}\n"


class MeshConfig(Strict):
    """Devices along each axis; -1 takes what the others leave."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


class AgentConfig(Strict):
    name: str
    model: str  # a folder in Hugging Face format, or a hub id
    revision: str | None = None
    dtype: Dtype = "auto"  # compute dtype; parameters are float32
    prompt: PromptConfig = PromptConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    micro_batch: NonNegative = 0  # rows per forward and backward; 0: all, on one CPU as many as its caches like
    packing: bool = False  # several sequences in a row, as many micro-batches as their tokens need
    logprob_chunk: Positive = 2048  # ids of the vocabulary whose logits exist at one time, per device
    remat: Literal["auto", "none", "dots", "full", "offload"] = "auto"  # auto: dots, or none for short rows on one CPU
    attention: Literal["xla", "splash"] = "xla"
    offload: Literal["none", "moments", "all"] = "none"  # waits in host memory while other agents have their turn
    mesh: MeshConfig | None = None  # other axes for the same devices; None: the run's


class ArithmeticConfig(Strict):
    """The embedded task; hacrl_jax/tasks/arithmetic.py says what each field does."""

    digits: Positive = 2
    operations: _tuple(str) = ("+", "-", "*")
    size: Positive = 4096
    seed: NonNegative = 0


class DataConfig(Strict):
    """source: `arithmetic`, a JSONL/JSON/Parquet file, or a Hugging Face data set id."""

    source: str = "arithmetic"
    name: str | None = None  # how metrics call it; default: the source's stem
    split: str = "train"
    subset: str | None = None
    fields: dict[str, str] = Field(default_factory=dict)  # question, answer, id: other column names
    instruction: str = ""  # appended to the question
    limit: NonNegative = 0  # first rows only; 0 is all
    allow_bad_rows: bool = False
    arithmetic: ArithmeticConfig = ArithmeticConfig()


class RolloutConfig(Strict):
    prompts: Positive = 128  # B
    samples: Positive = 8  # G
    max_prompt: Positive = 1024
    max_response: Positive = 4096
    temperature: Annotated[float, Field(gt=0)] = 1.0
    slots: NonNegative = 0  # decode rows in flight; 0 is as many as samples, at most 256
    shrink: NonNegative = 4  # how often the slots may be halved for the last rows; each adds two programs to warm-up
    dispatch_steps: Positive = 16  # decode steps per dispatch at most
    cache_dtype: Dtype = "auto"


class ObjectiveConfig(Strict):
    """The settings of hacpo.py (docs/objective.md). delta is 1 - the lower bound that the paper's table prints."""

    ratio: Literal["sequence", "token"] = "sequence"
    cross: Literal["hacpo", "naive", "none"] = "hacpo"
    eps_low: NonNegativeFloat = 3e-4
    eps_high: NonNegativeFloat = 4e-4
    delta: Annotated[float, Field(ge=0, le=1)] = 0.2
    delta_step: NonNegativeFloat = 0.025
    alpha: NonNegativeFloat = 1.0
    clip_cross: bool = True
    allow_closed_clip: bool = False  # accept a schedule whose lower bound reaches 1 before the last update
    capability: Literal["positive_rate", "mean_reward"] = "positive_rate"
    capability_window: Positive = 5
    capability_baseline: bool = True
    capability_gradient: bool = True
    binary_guard: bool = True
    uniform_guard: bool = True
    advantage_by_std: bool = True
    advantage_eps: float = 1e-6
    max_abs_log_ratio: float = 10.0
    aggregation: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    aggregation_constant: NonNegative = 0  # for `constant`; 0 is the minibatch's sequences times max_response
    order: Literal["own_first", "mixed"] = "own_first"
    eos: Literal["trained", "excluded"] = "trained"
    cross_too_long: Literal["drop", "truncate"] = "drop"
    source_logprob: Literal["recomputed", "sampler"] = "recomputed"
    kl_coefficient: NonNegativeFloat = 0.001
    kl_estimator: Literal["k1", "k2", "k3", "k3_straight_through"] = "k3"
    groups: Literal["keep", "drop", "resample"] = "keep"  # groups without signal
    resample_attempts: Positive = 3
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    overlong_buffer: NonNegative = 0  # tokens before max_response over which the penalty grows to 1
    tis_cap: NonNegativeFloat = 0.0  # truncated importance sampling against the sampler's log-probs; 0 is off


class EvalSet(Strict):
    data: DataConfig
    samples: Positive = 1  # k of avg@k
    temperature: NonNegativeFloat = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: NonNegative = 0
    min_p: float = 0.0
    max_response: NonNegative = 0  # 0 is the rollout's


class EvalConfig(Strict):
    every: NonNegative = 0  # steps; 0 is never during training
    before: bool = True
    after: bool = True
    final_max_response: NonNegative = 0  # response tokens of the evaluation after training; 0 is each set's
    sets: _tuple(EvalSet) = ()


class PolicyConfig(Strict):
    """What is a matter of taste in grading; docs/verification.md explains each switch."""

    boxes: Literal["last", "all"] = "last"
    percent: Literal["either", "value", "number"] = "either"
    units: Literal["known", "ignore", "require"] = "known"
    rounding: NonNegative = 6  # significant digits from which a decimal may stand for what rounds to it; 0 is never
    tolerance: NonNegativeFloat = 0.0  # relative, for gold answers written as decimals


class VerifierConfig(Strict):
    workers: Positive = 2
    deadline: Annotated[float, Field(gt=0)] = 5.0  # seconds per answer
    memory_mb: Positive = 1024  # per worker
    max_error_share: Annotated[float, Field(ge=0, le=1)] = 0.2  # of a step's answers, before the run stops
    policy: PolicyConfig = PolicyConfig()


class LengthRewardConfig(Strict):
    """0 up to `free`, falling to -1 at `limit`."""

    weight: NonNegativeFloat = 0.0
    unit: Literal["tokens", "characters"] = "tokens"  # tokens of the agent that wrote the response
    free: NonNegative = 0
    limit: Positive = 4096


class CustomRewardConfig(Strict):
    """A function of your own; hacrl_jax/tasks/rewards.py says what it receives and returns."""

    function: str  # path/to/file.py:name
    weight: float = 1.0
    deadline: Annotated[float, Field(gt=0)] = 60.0  # seconds per batch
    on_error: Literal["stop", "drop"] = "stop"  # drop: the batch counts as not scorable


class RewardConfig(Strict):
    """A weighted sum, the same for all agents that learn from the response."""

    correct: float = 1.0
    incorrect: float = 0.0
    format: NonNegativeFloat = 0.0  # weight of a well-formed response: one complete box at the end, <think> closed
    length: LengthRewardConfig = LengthRewardConfig()
    custom: _tuple(CustomRewardConfig) = ()


class CheckpointConfig(Strict):
    every: NonNegative = 10  # steps; 0 is only the last
    keep_last: Positive = 2
    keep_every: NonNegative = 0  # steps whose multiples stay for good; 0 is none
    folder: str = ""  # a folder or a URL such as gs://bucket/path, NAME is added; default: in the run folder


class JournalConfig(Strict):
    """What a step writes into rollouts/ before its update: text for people, tensors for `hacrl replay`."""

    text: bool = True
    tensors: bool = True
    keep_tensors: NonNegative = 20  # of the last steps; 0 keeps all


class GuardConfig(Strict):
    """When a run ends by itself (docs/runs.md). Seconds; 0 turns a limit off."""

    nonfinite: NonNegative = 5  # updates of an agent in a row without a finite loss and gradient
    grace: NonNegative = 30  # from a signal to the end, whatever goes on
    stuck: NonNegative = 1800  # without a sign of life: all stacks are written to the run folder
    stuck_exit: NonNegative = 7200  # without a sign of life: the end


class HostsConfig(Strict):
    """Processes of one run on several hosts (docs/pods.md). TPU pods, SLURM and Open MPI are found by themselves.

    start, wait, heartbeat are seconds: until all have joined, for a host's part of a step, until a host counts as dead.
    """

    coordinator: str = ""  # address:port of the first process; the other two are needed with it
    count: NonNegative = 0
    index: NonNegative = 0
    start: Positive = 300
    wait: Annotated[float, Field(gt=0)] = 600.0
    heartbeat: Positive = 30


class Config(Strict):
    name: str
    runs: str = "runs"  # the folder that holds runs/NAME
    seed: NonNegative = 0
    preset: _tuple(str) = ()
    steps: NonNegative = 0  # 0: as many as `epochs` passes need
    epochs: Positive = 1
    minibatch: Positive = 64  # prompts
    agents: _tuple(AgentConfig)
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    eval: EvalConfig = EvalConfig()
    verifier: VerifierConfig = VerifierConfig()
    reward: RewardConfig = RewardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    journal: JournalConfig = JournalConfig()
    guard: GuardConfig = GuardConfig()
    mesh: MeshConfig = MeshConfig()
    hosts: HostsConfig = HostsConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        names = [agent.name for agent in self.agents]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"agents needs at least one agent, with distinct names; got {names}")
        if self.hosts.coordinator and not self.hosts.index < self.hosts.count:
            raise ValueError(f"hosts.index {self.hosts.index} is not below hosts.count {self.hosts.count}")
        if self.rollout.prompts % self.minibatch:
            raise ValueError(f"minibatch {self.minibatch} does not divide rollout.prompts {self.rollout.prompts}")
        for agent in self.agents:
            rows = self.minibatch * self.rollout.samples
            if agent.micro_batch and rows % agent.micro_batch:
                raise ValueError(
                    f"agents.{agent.name}.micro_batch {agent.micro_batch} does not divide the {rows} sequences of a "
                    "minibatch"
                )
        self._check_cross()
        return self

    def updates_per_step(self) -> int:
        """Optimizer updates of each agent in one step."""
        own = self.rollout.prompts // self.minibatch
        shared = self.objective.cross != "none" and self.objective.order == "own_first"
        return own * len(self.agents) if shared else own

    def _check_cross(self) -> None:
        objective, others = self.objective, len(self.agents) - 1
        if not others or objective.cross == "none":
            return
        rows = self.minibatch * self.rollout.samples
        if objective.order == "own_first" and rows % others:
            raise ValueError(f"the {rows} sequences of a minibatch have no equal shares for {others} partners")
        last = self.updates_per_step() - 1
        closed = 1 - objective.delta + last * objective.delta_step >= 1
        if objective.cross == "hacpo" and objective.clip_cross and closed and not objective.allow_closed_clip:
            raise ValueError(
                f"objective: the lower cross bound 1 - delta + m * delta_step reaches 1 by update {last} of a step; "
                "from there on partners teach nothing; lower delta_step, or set objective.allow_closed_clip=true"
            )


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML file, apply ``key=value`` overrides (dotted, list indices allowed) and validate.

    The file's own presets lie under its keys; ``preset=NAME`` among the overrides lies over the file (or an ablation of
    a file that states its values would change nothing), and under the other overrides.

    Raises UserError with one line per mistake: what, where, what to do.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"config file {path} does not exist")
    try:
        tree = OmegaConf.load(path)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    return override(tree, overrides, where=str(path))


def override(raw: Any, overrides: list[str] | tuple[str, ...], where: str = "config") -> Config:
    """``load`` for a config that is in memory already: a dict, or OmegaConf's tree."""
    try:
        tree = OmegaConf.create(raw)
        pairs = [each.partition("=") for each in overrides]
        for key, equals, value in sorted(pairs, key=lambda pair: pair[0] != "preset"):
            if not equals or not key:
                raise UserError(f"override {key + equals + value!r} is not of the form key=value")
            if key == "preset":
                tree = OmegaConf.merge(tree, _presets(_yaml_value(value)["value"], where))
            OmegaConf.update(tree, key, OmegaConf.create({"value": None} | _yaml_value(value)).value, force_add=True)
        raw = OmegaConf.to_container(tree, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"{where}: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{where}: a config is a mapping of keys, not a {type(raw).__name__}")
    return resolve(raw, where=where)


def resolve(raw: dict[str, Any], where: str = "config") -> Config:
    """Lay the presets that raw names under raw, and validate. Errors as in load."""
    names = _names(raw.get("preset"))
    try:
        return Config.model_validate(_merge(_presets(names, where), raw) | {"preset": names})
    except ValidationError as error:
        raise UserError("; ".join(f"{where}: {explain(detail, Config)}" for detail in error.errors())) from None


def dump(config: Config) -> str:
    """The resolved config as YAML that load reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _names(preset: Any) -> tuple[Any, ...]:
    return (preset,) if isinstance(preset, str) else tuple(preset or ())


def _presets(preset: Any, where: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in _names(preset):
        if name not in PRESETS:
            raise UserError(f"{where}: preset: no preset {name!r}; there are {', '.join(PRESETS)}")
        merged = _merge(merged, PRESETS[name])
    return merged


def _yaml_value(text: str) -> dict[str, Any]:
    # OmegaConf's own parser, so that 1e-6 is a number here as it is in a file.
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))


def _merge(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
