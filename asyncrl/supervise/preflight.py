"""The checks of a config before a run starts; each check is a function of this module.

`preflight` makes those that a run needs, builds the tiny model of a warm start, and raises the
error of the first check that fails.  `findings` makes all checks, builds nothing, and yields one
finding each.  The checks of disk and memory are estimates and never stop a run.
"""

from __future__ import annotations

import ast
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from actors.gateway.hubs import prompt_files
from asyncrl.config.agents import AgentConfig
from asyncrl.config.engines import image_refusal
from asyncrl.config.tree import Config
from asyncrl.contract import importing, toml_writer
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import escape_line
from asyncrl.models import devices, fetch
from asyncrl.tasks.data.hub import with_data_sets

FIRST_PROMPTS = 64  # checked prompts of an endless split
MOST_PROMPTS = 2000  # checked prompts of a fixed split
MARKER = ".warm_start"  # a file of this name in the folder at `model.path` allows a warm start
NAMED_CHARACTERS = 240  # length of the list of missing characters in a message
WIDTHS = {"float32": 4, "bfloat16": 2}  # bytes per number
# chat calls of OpenAI's and Anthropic's clients, or the URLs that they request
CHAT_CALL = re.compile(
    r"\.chat\.completions\b|\.(responses|messages)\.(create|parse|stream)$"
    r"|/chat/completions$|/v1/(responses|messages)$"
    # imports of frameworks, and of classes in them, that ask for nothing but chat
    r"|^from (pydantic_ai|smolagents|crewai)\b|^from .*\.(ChatOpenAI|ChatAnthropic|ChatLiteLLM"
    r"|OpenAIChatCompletionClient|OpenAIChatCompletionsModel|OpenAIResponsesModel)$"
)
TEXT_CALL = re.compile(
    r"(?<!chat)\.completions\.create$|(?<!chat)/completions$|^from langchain_openai\.OpenAI$"
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def say(text: str) -> None:
    """Print a line for the user on stderr."""
    print(text, file=sys.stderr, flush=True)


class Finding(msgspec.Struct, frozen=True):
    """The outcome of a check; `later`: it needs a model that the run itself builds."""

    check: str
    state: Literal["ok", "note", "failed", "later"]
    text: str


def line(finding: Finding) -> str:
    """Format a finding for a reader."""
    return f"{finding.check:10} {finding.state:7} {finding.text}"


class NotYet(Exception):
    """The model to check does not exist yet: the run builds it."""


class Doubt(Exception):
    """A check found a possible problem, with which the run may still succeed."""


class Subject:
    """A config under check, with cached properties that several checks need."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def path(self) -> Path:
        return Path(self.config.model.path)

    @cached_property
    def task(self) -> Any:
        """The task of `task.name`.  Raises ConfigError."""
        from asyncrl.tasks.evaluation_sets import task_of

        return task_of(self.config)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of a checked model.  Raises ConfigError."""
        from asyncrl.models import model_check

        return model_check.check(self.config)

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The language model's part of config.json.  Raises NotYet or ConfigError."""
        from asyncrl.models import model_check

        if not (self.path / "config.json").is_file():
            raise NotYet("once the model is built")
        return model_check.get_language_config(model_check.read_settings(self.path, "model.path"))

    @cached_property
    def parameters(self) -> int:
        """The number of parameters in the model's weight files."""
        from asyncrl.models import model_check

        self.raw  # noqa: B018 - raises NotYet
        shapes = (
            entry["shape"]
            for _, _, entries in model_check.read_headers(self.path)
            for entry in entries.values()
        )
        return sum(math.prod(shape) for shape in shapes)

    @property
    def references(self) -> list[Any]:
        """The reference models that the learner also holds."""
        from asyncrl.models import model_check

        return model_check.list_references(self.config)

    @property
    def kv_cache(self) -> int:
        """Bytes of the KV cache of a generator with all slots full.

        0 where config.json lacks the shapes."""
        generator, raw = self.config.generator, self.raw
        if generator.kv_cache_mib:
            return generator.kv_cache_mib << 20
        heads = raw.get("num_key_value_heads") or raw.get("num_attention_heads") or 0
        if not (heads and raw.get("hidden_size") and raw.get("num_hidden_layers")):
            return 0
        head = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        row = 2 * WIDTHS[self.config.model.dtype] * raw["num_hidden_layers"] * heads * head
        return int(generator.slots * generator.context * row)


def located(config: Config, report: Callable[[str], None] = say) -> Config:
    """Replace the hub's names of the model and of data sets by their directories, and write the
    environment's own prompts to files.

    They are downloaded unless the hub's cache has them.  Raises ConfigError."""
    config = with_data_sets(prompt_files.write_prompt_files(config), report)
    if not config.model.path.startswith(fetch.HUB):
        return config
    report(f"fetching {config.model.path}")
    path = str(fetch.download_model(config.model.path))
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))


def located_sets(config: Config, sets: Sequence[str]) -> Sequence[str]:
    """Extend `sets` by the paths of `located`, for runs started from the command line."""
    local = located(config)
    paths = {
        "model.path": (config.model.path, local.model.path),
        "task.prompts": (config.task.prompts, local.task.prompts),
        "task.heldout": (config.task.heldout, local.task.heldout),
        "task.ood": (config.task.ood, local.task.ood),
        "task.mixture": (config.task.mixture, local.task.mixture),
        "evaluation.sets": (config.evaluation.sets, local.evaluation.sets),
    }
    new = [
        f"{key}={toml_writer.format_value(msgspec.to_builtins(now))}"
        for key, (before, now) in paths.items()
        if now != before
    ]
    return [*sets, *new] if new else sets


def packages_installed(subject: Subject) -> str:
    """Check the packages of the engine, the backend, adapters and sessions over HTTP."""
    from asyncrl.models.installed import find_missing_package

    config = subject.config
    if why := find_missing_package(config):
        raise ConfigError(why)
    return (
        f"generator.engine = {config.generator.engine}, learner.backend = {config.learner.backend}"
    )


def versions_tested(subject: Subject) -> str:
    """Compare the versions of torch and transformers with those that asyncrl is tested with."""
    from asyncrl.models.installed import TESTED, list_untested_versions

    if other := list_untested_versions():
        raise Doubt(f"untested versions: {other}; the run starts, but results may differ")
    return ", ".join(f"{name} {tested}" for name, tested in TESTED.items())


def devices_present(subject: Subject) -> str:
    """Check the GPUs that the config names."""
    if why := devices.find_missing_gpus(subject.config):
        raise ConfigError(why)
    return "; ".join(devices.describe_placement(subject.config))


def task_reads(subject: Subject) -> str:
    """Check the task and the files that it reads."""
    task = subject.task
    sizes = {split: _size(task, split) for split in _splits(subject)}
    counts = (f"{'endless' if n is None else n} {split}" for split, n in sizes.items() if n != 0)
    return f"{subject.config.task.name}: {', '.join(counts)} prompts"


def _splits(subject: Subject) -> list[str]:
    """The splits of the task, and its sets."""
    return ["train", "heldout", "ood", *(one.name for one in subject.config.evaluation.sets)]


def _size(task: Any, split: str) -> int | None:
    """The number of prompts of a split; None for an endless one."""
    from asyncrl.tasks.evaluation_sets import TaskWithSets
    from asyncrl.tasks.file import FileTask

    if isinstance(task, TaskWithSets) and split not in task.sets:
        task = task.task
    size: int | None = len(task.sets[split]) if isinstance(task, FileTask) else task.size(split)
    return size


def is_own_models_folder(config: Config) -> bool:
    """Whether a warm start may build a tiny model at `model.path`.

    It may as a folder `model*` of a project, in the folder `models` of a project, or where a file
    `.warm_start` allows it.  A project is the working directory, the folder that contains `runs`,
    or a folder that has a config and is not a run directory.  Anywhere else, `model.path` is more
    likely the misspelled path of a real model, and a tiny model trained in its place would look
    like a result."""
    path = Path(config.model.path).absolute()
    if (path / MARKER).exists():
        return True
    project = path.parent.parent if path.parent.name == "models" else path.parent
    if path.parent.name != "models" and not path.name.startswith("model"):
        return False
    runs = Path(config.runs).absolute()
    if project in (Path.cwd(), runs, runs.parent):
        return True
    return any(project.glob("*.toml")) and not (project / "logs").exists()


def no_model_at(config: Config) -> str:
    """Explain why there is no model at `model.path`, and what to do."""
    path = config.model.path
    if why := fetch.explain_missing_model(path):
        return f"model.path: {why}"
    folder, _, name = path.partition("/")
    if HUB_NAME.fullmatch(path) and folder != "models" and not Path(folder).exists():
        return (
            f"model.path: {path} is not a directory; fetch the hub's model there with `asyncrl "
            f'model get hf://{path} models/{name}`, or at the start with model.path = "hf://{path}"'
        )
    remedy = "model.warm_start = true builds a tiny one for the task"
    if config.model.warm_start:
        remedy = (
            "model.warm_start builds one only in a project's folder model or models: set "
            f'model.path = "models/{Path(path).name}", or create the file {Path(path) / MARKER} to '
            "allow this path"
        )
    return f"model.path: {path} is not a model directory (it has no config.json); {remedy}"


def model_there(subject: Subject) -> str:
    """Check the model at `model.path`.  Raises NotYet where a warm start will build it."""
    config = subject.config
    if not (subject.path / "config.json").is_file():
        if not config.model.warm_start or not is_own_models_folder(config):
            raise ConfigError(no_model_at(config))
        raise NotYet(
            f"{subject.path} does not exist yet: the run builds a tiny model (model.warm_start)"
        )
    subject.tokenizer  # noqa: B018 - raises ConfigError for a damaged model
    return f"{subject.path}: {subject.parameters:,} parameters, {config.model.dtype}"


def model_built(subject: Subject) -> None:
    """Build the tiny model of a warm start, unless there is a model at `model.path`."""
    config = subject.config
    if (subject.path / "config.json").is_file():
        return
    if not config.model.warm_start or not is_own_models_folder(config):
        raise ConfigError(no_model_at(config))
    from asyncrl.tasks.warm_start import warm_start

    say(f"building and warm-starting a tiny model for `{config.task.name}` in {subject.path}")
    report = warm_start(config, subject.path)
    say(f"warm start: {report['steps']} steps in {report['seconds']} s, loss {report['loss']:.3f}")


def tokenizer_ends(subject: Subject) -> str:
    """Check the tokenizer, and name the tokens that end a completion."""
    from asyncrl.models.tokenizer import collect_stop_tokens

    tokenizer = subject.tokenizer
    ends = [tokenizer.decode([token]) for token in collect_stop_tokens(tokenizer, subject.config)]
    return f"{len(tokenizer.get_vocab()):,} tokens; completions end at {', '.join(map(repr, ends))}"


def chat_call(agent: AgentConfig) -> str:
    """Find FILE:LINE of a chat call in the source of `agent.function` or `agent.command`.

    The import of a framework that makes no other calls counts as one.

    "" where there is none, or where the source also requests text completions."""
    words = [agent.function.rpartition(":")[0]] if agent.function else agent.command
    names = [word for word in words if agent.function or word.endswith(".py")]
    location = ""
    for path in filter(None, map(importing.source_path, names)):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # importing it raises the error
        for line, call in _calls(tree):
            if CHAT_CALL.search(call):
                location = location or f"{path}:{line}"
            elif TEXT_CALL.search(call):
                return ""
    return location


def _calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines of a source with what may tell of a call there: attributes, texts, imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, "." + ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, f"from {name.name}"
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                yield node.lineno, f"from {node.module}.{name.name}"


def template_there(subject: Subject) -> str:
    """Check for a chat template where calls need one.  `prompts_fit` refuses chats without."""
    from asyncrl.models.tokenizer import has_template

    subject.tokenizer  # noqa: B018
    if has_template(subject.path):
        return "the tokenizer has a chat template"
    for agent in subject.config.agents.values():
        if agent.tools:
            raise ConfigError(f"agent.tools: the tokenizer in {subject.path} has no chat template")
        if where := chat_call(agent):
            raise ConfigError(
                f"{agent.source_name}: {where} makes a chat call, and the tokenizer in "
                f"{subject.path} has no chat template: put a chat_template.jinja there, choose a "
                "model that has one, or request text completions (client.completions.create)"
            )
    for agent in subject.config.agents.values():
        if agent.http:
            raise Doubt(
                f"the tokenizer in {subject.path} has no chat template: {agent.source_name} can "
                "only request text completions; put a chat_template.jinja there for chat calls"
            )
    return "no chat template, and text prompts need none"


def images_read(subject: Subject) -> str:
    """Check the settings of a model that reads images, and that sessions pass images on."""
    config = subject.config
    shape = subject.tokenizer.image_shape
    if shape is None:
        return "the model reads text"
    if problem := image_refusal(config):
        raise ConfigError(problem)
    for agent in config.agents.values() if config.uses_sessions else ():
        if not agent.http:
            kind = agent.source_name if agent.uses_sessions else "task.mixture"
            raise ConfigError(
                f"{kind}: environments, the run's tools and single completions beside sessions "
                "pass no images on; a model that reads images needs agent.serve, agent.command or "
                "agent.function"
            )
    return f"the model reads an image as {shape}"


def prompts_fit(subject: Subject) -> str:
    """Check that no prompt is empty or too long for the context."""
    from asyncrl.models.tokenizer import encode_prompt

    config = subject.config
    room = config.generator.context - config.generator.max_new_tokens
    longest = 0
    for prompt in _first_prompts(subject):
        length = len(encode_prompt(subject.tokenizer, prompt))
        longest = max(longest, length)
        if not length:
            raise ConfigError(
                f"task: {prompt.split} prompt {prompt.id} has no tokens under the tokenizer in "
                f"{subject.path}: it is empty, or has only unknown symbols"
            )
        if length > room:
            raise ConfigError(
                f"generator.context: {prompt.split} prompt {prompt.id} has {length} tokens; "
                f"context {config.generator.context} less max_new_tokens "
                f"{config.generator.max_new_tokens} leaves {room}; set generator.context to at "
                f"least {length + config.generator.max_new_tokens}, or leave the prompt out"
            )
    return f"the longest of the checked prompts has {longest} tokens; there is room for {room}"


def _first_prompts(subject: Subject) -> Iterator[Any]:
    """Yield the prompts of each split that a check reads."""
    for split in _splits(subject):
        size = _size(subject.task, split)
        for number in range(FIRST_PROMPTS if size is None else min(size, MOST_PROMPTS)):
            yield subject.task.prompt(split, number, subject.config.seed)


def characters_known(subject: Subject) -> str:
    """Check that the vocabulary has the prompts' characters; others become the unknown token."""
    from asyncrl.models.tokenizer import has_character

    known: dict[str, bool] = {}
    affected: dict[str, str] = {}  # missing character -> the first prompt that has it
    for prompt in _first_prompts(subject):
        text = prompt.text + "".join(str(turn.get("content")) for turn in prompt.messages)
        for character in sorted(set(text)):
            if character.isspace() or not character.isprintable():
                continue
            if character not in known:
                known[character] = has_character(subject.tokenizer, character)
            if not known[character]:
                affected.setdefault(character, f"{prompt.split} prompt {prompt.id}")
    if not affected:
        return f"the vocabulary has all {len(known)} characters of the checked prompts"
    named = ", ".join(f"{character!r} ({where})" for character, where in affected.items())
    remedy = (
        f"delete {subject.path} to have a tiny model built for these prompts"
        if subject.config.model.warm_start
        else "change the prompts, or choose a model whose vocabulary has them"
    )
    raise Doubt(
        f"task: the vocabulary in {subject.path} lacks {escape_line(named, NAMED_CHARACTERS)}; the "
        f"model reads the unknown token in their place: {remedy}"
    )


def reward_called(subject: Subject) -> str:
    """Call the reward function on the prompt's reference answer, or on an empty completion."""
    from actors.rewards import describe_reward_source, judge_all

    config = subject.config
    reward_imports(subject)
    if config.agent.uses_sessions:
        return f"{config.agent.source_name} gives the reward"
    if config.uses_sessions:
        agents = {part: one.source_name for part, one in config.agents.items() if part}
        return ", ".join(f"{part}: {name}" for part, name in agents.items()) + " give the reward"
    if config.reward.judge.url:
        return f"{describe_reward_source(config.reward)}: not called, as a request may cost money"
    prompt = subject.task.prompt("train", 0, config.seed)
    completions = [(prompt, prompt.answer, [0])]
    name = (
        describe_reward_source(config.reward)
        if config.reward.uses_reward_processes
        else "the task's own"
    )
    (result,) = judge_all(config, subject.task, completions)
    if result.failed:
        raise ConfigError(f"{name}: {result.failed}")
    completion = f"the answer {prompt.answer!r}" if prompt.answer else "an empty answer"
    return f"{name}: {result.reward:g} for {completion} to {prompt.text[:40]!r}"


def disk_free(subject: Subject) -> str:
    """Check the disk space for checkpoints (weights, two moments), model, logs and recording."""
    config = subject.config
    runs = Path(config.runs).absolute()
    folder = next(path for path in (runs, *runs.parents) if path.exists())
    weights = subject.parameters * WIDTHS[config.model.dtype]
    needed = weights * (3 * config.learner.keep_checkpoints + 1)
    needed += _largest_logs_mib(config) << 20
    free = shutil.disk_usage(folder).free
    space = (
        f"{_gib(needed)} for checkpoints, model, logs and recording; {_gib(free)} free in {folder}"
    )
    if needed > free:
        raise ConfigError(f"runs: {space}")
    return space


def _largest_logs_mib(config: Config) -> int:
    """Return the MiB that the bounded logs of a run and its recording may take."""
    record = config.record
    logs_tokens = record.samples_every and record.token_samples
    return (
        record.optimizer_steps_mib
        + (record.token_samples_mib if logs_tokens else 0)
        + (record.stream_mib if record.stream else 0)
    )


def memory_needed(subject: Subject) -> str:
    """Estimate the memory of learner, generators and published versions, without activations."""
    import psutil

    config = subject.config
    weights = subject.parameters * WIDTHS[config.model.dtype]
    # weights, gradient, two moments; DeepSpeed in bfloat16 keeps float32 copies of three of them,
    # and FSDP2 of all four
    several = config.learner.backend != "torch"
    copies = 8 if several and config.model.dtype == "bfloat16" else 4
    learner = weights * copies + len(subject.references) * weights
    # the embedded engine holds the model as read, as fused for its kernels, and the fetched version
    generator = weights * (2 if config.generator.engine == "vllm" else 3) + subject.kv_cache
    versions = weights * config.weights.slots
    total = learner + config.generators * generator + versions
    parts = (
        f"learner {_gib(learner)}, {config.generators} generator(s) of {_gib(generator)}, "
        f"published versions {_gib(versions)}, and activations (docs/memory.md)"
    )
    if config.model.device != "cpu" and devices.has_cuda():
        return parts
    free = psutil.virtual_memory().available
    if total > free:
        raise Doubt(f"{parts}: {_gib(total)} in all, but only {_gib(free)} are free")
    return f"{parts}; {_gib(free)} are free"


def _gib(size: float) -> str:
    """Format a number of bytes for a reader."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 29 else f"{size / (1 << 20):.0f} MiB"


def reward_imports(subject: Subject) -> None:
    """Check the reward function, judge or reward model in a process of its own."""
    from actors.rewards import check_reward_process
    from asyncrl.tasks.evaluation_sets import configs_of_rewards

    config = subject.config
    if config.reward.function and ":" not in config.reward.function:
        raise ConfigError(f"reward.function: {config.reward.function} is not module:function")
    if config.reward.uses_reward_processes:
        check_reward_process(config)
    for own in configs_of_rewards(config).values():
        if own.reward.uses_reward_processes:
            check_reward_process(own)


def exact_agrees(subject: Subject) -> None:
    """Run the self-test of exact mode, if the config asks for exact mode."""
    config = subject.config
    if not config.exact:
        return
    from asyncrl.supervise import exact_check  # which imports torch

    failure = exact_check.failure(exact_check.check(config))
    if failure and config.exact is True:
        raise ConfigError(
            f"exact: {failure}; `asyncrl doctor --exact CONFIG` shows the table; with "
            'exact = "try" the run starts anyway'
        )
    say(
        f'exact: {failure}; continuing, as exact = "try" asks'
        if failure
        else "exact: engine and learner agree bitwise in the self-test"
    )


def preflight(config: Config) -> None:
    """Check `config` before a run.  Raises the ConfigError of the first check that fails."""
    subject = Subject(config)
    packages_installed(subject)
    devices_present(subject)
    task_reads(subject)
    model_built(subject)
    images_read(subject)
    for check in (versions_tested, template_there, prompts_fit, characters_known):
        try:
            check(subject)
        except Doubt as doubt:
            say(f"warning: {doubt}")
    reward_imports(subject)
    exact_agrees(subject)


CHECKS: dict[str, Callable[[Subject], str]] = {
    "packages": packages_installed,
    "devices": devices_present,
    "task": task_reads,
    "model": model_there,
    "tokenizer": tokenizer_ends,
    "template": template_there,
    "images": images_read,
    "prompts": prompts_fit,
    "characters": characters_known,
    "reward": reward_called,
    "disk": disk_free,
    "memory": memory_needed,
    "versions": versions_tested,
}
# check -> the checks that must pass first
NEEDS = dict.fromkeys(("tokenizer", "template", "images", "disk", "memory"), ("model",)) | {
    "prompts": ("model", "task"),
    "characters": ("model", "task"),
    "reward": ("task",),
}


def findings(config: Config) -> Iterator[Finding]:
    """Yield the outcome of each check of CHECKS.

    A check whose prerequisite failed, or needs a model that the run builds, is `later`."""
    subject = Subject(config)
    missing: dict[str, str] = {}
    for name, check in CHECKS.items():
        if reason := next((missing[need] for need in NEEDS.get(name, ()) if need in missing), ""):
            yield Finding(name, "later", reason)
            continue
        try:
            yield Finding(name, "ok", check(subject))
        except NotYet as error:
            missing[name] = f"once the {name} is built"
            yield Finding(name, "later", str(error))
        except Doubt as error:
            yield Finding(name, "note", str(error))
        except ConfigError as error:
            missing[name] = f"once the {name} check passes"
            yield Finding(name, "failed", str(error))
