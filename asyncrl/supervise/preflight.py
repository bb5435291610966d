"""The checks of a config before a run starts; each check is a function of this module.

`preflight` makes the checks that a run needs, builds the tiny model of a warm start, and raises the
error of the first failed check.  `run_checks` makes all checks, builds nothing, and yields one
finding for each.  The checks of disk and memory are estimates and never stop a run.
"""

import ast
import itertools
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from actors.gateway.hubs import prompt_files
from actors.rewards import check_reward_process, describe_reward_source, judge_all
from asyncrl.config import presets, rules
from asyncrl.config.agents import AgentConfig
from asyncrl.config.tree import Config
from asyncrl.contract import importing, toml_writer
from asyncrl.contract.blobs import images
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import TEMPLATE_COLUMNS, Prompt
from asyncrl.contract.printable import escape_line
from asyncrl.models import devices, fetch, installed, model_check
from asyncrl.models.tokenizer import collect_stop_tokens, encode_prompt, has_template
from asyncrl.records.jsonl import JsonObject
from asyncrl.supervise.hosts.cluster import WIDTHS, make_plan
from asyncrl.tasks import get_task
from asyncrl.tasks.data.row_objects import KEYS
from asyncrl.tasks.data.rows import find_files, read_rows
from asyncrl.tasks.evaluation_sets import TaskWithSets, build_task, resolve_reward_configs
from asyncrl.tasks.file import FileTask, suggest_answer_column

FIRST_PROMPTS = 64  # number of checked prompts of an endless split
MOST_PROMPTS = 2000  # most checked prompts of a fixed split
SCORED = 8  # reference answers that `run_checks` scores, and `preflight` two
MARKER = ".warm_start"  # a file of this name in the folder at `model.path` allows a warm start
NAMED_CHARACTERS = 240  # length of the list of missing characters in a message
# chat calls of OpenAI's and Anthropic's clients, and the URLs that they request
CHAT_CALL = re.compile(
    r"\.chat\.completions\b|\.(responses|messages)\.(create|parse|stream)$"
    r"|/chat/completions$|/v1/(responses|messages)$"
    # imports of frameworks and classes that only make chat calls
    r"|^from (pydantic_ai|smolagents|crewai)\b|^from .*\.(ChatOpenAI|ChatAnthropic|ChatLiteLLM"
    r"|OpenAIChatCompletionClient|OpenAIChatCompletionsModel|OpenAIResponsesModel)$"
)
TEXT_CALL = re.compile(
    r"(?<!chat)\.completions\.create$|(?<!chat)/completions$|^from langchain_openai\.OpenAI$"
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def say(text: str) -> None:
    """Print a line for the user on stderr."""
    print(text, file=sys.stderr)


class CheckOutcome(msgspec.Struct, frozen=True):
    """The outcome of a check; `later`: it needs a model that the run builds."""

    check: str
    state: Literal["ok", "note", "failed", "later"]
    text: str

    def as_line(self) -> str:
        return f"{self.check:10} {self.state:7} {self.text}"


class ModelNotBuilt(Exception):
    """The model to check does not exist yet: the run builds it."""


class DoubtfulCheck(Exception):
    """A check found a possible problem, but the run may still succeed."""


class Subject:
    """A config under check, with cached properties that several checks need."""

    def __init__(self, config: Config, *, compares: bool = False) -> None:
        self.config = config
        self.compares = compares  # see `model_check.check`; and answers with an empty completion
        self.notes: list[str] = []  # on the model
        self.doubts: list[str] = []  # on the rewards

    @property
    def path(self) -> Path:
        return Path(self.config.model.path)

    @cached_property
    def task(self) -> Any:
        """The task of `task.name`.  Raises ConfigError."""
        return build_task(self.config)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of a checked model.  Raises ConfigError."""
        return model_check.check(self.config, self.notes.append, compares=self.compares)

    @cached_property
    def raw(self) -> JsonObject:
        """The language model's part of config.json.  Raises NotYet or ConfigError."""
        if not (self.path / "config.json").is_file():
            raise ModelNotBuilt("once the model is built")
        return model_check.get_language_config(model_check.read_settings(self.path, "model.path"))

    @cached_property
    def parameters(self) -> int:
        """The number of parameters in the model's weight files."""
        self.raw  # noqa: B018 - raises NotYet
        return presets.count_parameters(self.path)

    @property
    def kv_cache(self) -> int:
        """Bytes of a generator's KV cache with all slots full; 0 without shapes in config.json."""
        from actors.engine_vllm import count_cache_bytes

        try:
            shape = SimpleNamespace(**self.raw)
            return count_cache_bytes(self.config, shape, self.config.generator.slots)
        except AttributeError:
            return 0


def fetch_data_sets(config: Config) -> Config:
    """Replace every `hf://datasets/...` in `config` by the path of its files.

    Each data set is downloaded once unless the hub's cache has it, so that all processes and a
    resumed run read the same files.  Raises ConfigError."""

    @cache
    def locate(source: str) -> str:
        if not source.startswith(fetch.DATA_SETS):
            return source
        say(f"fetching {source}")
        return fetch.download_data_set(source)

    def locate_in(task: Any) -> Any:
        return replace(task, **{key: locate(getattr(task, key)) for key in KEYS})

    task = locate_in(config.task)
    task = replace(task, mixture=[locate_in(part) for part in task.mixture])
    sets = [replace(chosen, file=locate(chosen.file)) for chosen in config.evaluation.sets]
    evaluation = replace(config.evaluation, sets=sets)
    local = replace(config, task=task, evaluation=evaluation)
    return local if local != config else config


def localize(config: Config) -> Config:
    """Download the model and data sets of the hub, and write the environment's prompts to files.

    Their names in the config are replaced by paths.  The hub's cache is used if it has them.
    Raises ConfigError."""
    config = fetch_data_sets(prompt_files.write_prompt_files(config))
    if not config.model.path.startswith(fetch.HUB):
        return config
    say(f"fetching {config.model.path}")
    path = str(fetch.download_model(config.model.path))
    return replace(config, model=replace(config.model, path=path))


def localize_sets(config: Config, sets: Sequence[str]) -> Sequence[str]:
    """Extend `sets` by the paths of `localize` for runs started from the command line."""
    tables = (msgspec.to_builtins(either) for either in (config, localize(config)))
    changed = toml_writer.find_differences(*tables).items()
    return [*sets, *(f"{key}={toml_writer.format_value(path)}" for key, (_, path) in changed)]


def check_packages(subject: Subject) -> str:
    """Check the packages of the engine, the backend, adapters and sessions over HTTP."""
    config = subject.config
    if problem := installed.find_missing_package(config):
        raise ConfigError(problem)
    return (
        f"generator.engine = {config.generator.engine}, learner.backend = {config.learner.backend}"
    )


def check_versions(subject: Subject) -> str:
    """Compare the versions of torch and transformers with those that asyncrl is tested with."""
    if untested := installed.list_untested_versions():
        raise DoubtfulCheck(
            f"untested versions: {untested}; the run starts, but results may differ"
        )
    return ", ".join(f"{name} {tested}" for name, tested in installed.TESTED.items())


def check_devices(subject: Subject) -> str:
    """Check that the GPUs in the config exist, or that a cluster's would suffice."""
    if subject.config.placement.nodes:
        return "; ".join(make_plan(subject.config).placement)
    if problem := devices.find_missing_gpus(subject.config):
        raise ConfigError(problem)
    return "; ".join(devices.describe_placement(subject.config))


def check_task(subject: Subject) -> str:
    """Check the task and the files that it reads."""
    task = subject.task
    splits = ("train", *subject.config.evaluation.names)
    sizes = {split: _count_prompts(task, split) for split in splits}
    counts = (f"{'endless' if n is None else n} {split}" for split, n in sizes.items() if n != 0)
    return f"{subject.config.task.name}: {', '.join(counts)} prompts"


def check_functions(subject: Subject) -> str:
    """Find the files of agents; call `loss.function` and `advantage.function` on two small rows."""
    config = subject.config
    for agent in config.agents.values():
        for path in (agent.function, agent.env, *agent.tools):
            file = path.rpartition(":")[0]
            if file.endswith(".py") and not Path(file).is_file():
                raise ConfigError(f"{agent.source_name}: there is no file {file}; correct the path")
    if "function" not in (config.loss.surrogate, config.advantage.name):
        return "loss and advantage are built in"
    from asyncrl import losses  # which imports torch

    called = losses.check_functions(config).items()
    return ", ".join(f"{key} = {path}" for key, path in called) + ": called on two small rows"


def _count_prompts(task: Any, split: str) -> int | None:
    """Return the number of prompts of a split, or None for an endless one."""
    if isinstance(task, TaskWithSets) and split not in task.sets:
        task = task.task
    size: int | None = len(task.sets[split]) if isinstance(task, FileTask) else task.size(split)
    return size


def is_own_models_folder(config: Config) -> bool:
    """Return whether a warm start may build a tiny model at `model.path`.

    It may use a folder `model*` of a project, a folder in `models` of a project, or a folder in
    which a file `.warm_start` allows it.  A project is the working directory, the folder that
    contains `runs`, or a folder that has a config and is not a run directory.  Any other
    `model.path` is more likely the misspelled path of a real model, and a tiny model trained in its
    place would look like a result."""
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


def explain_missing_model(config: Config) -> str:
    """Explain why `model.path` has no model, and how to get one."""
    path = config.model.path
    if hint := fetch.explain_missing_model(path):
        return f"model.path: {hint}"
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


def has_model(subject: Subject) -> bool:
    """Return whether `model.path` has a model.  Raises ConfigError if the run cannot build it."""
    if (subject.path / "config.json").is_file():
        return True
    if not subject.config.model.warm_start or not is_own_models_folder(subject.config):
        raise ConfigError(explain_missing_model(subject.config))
    return False


def check_model(subject: Subject) -> str:
    """Check the model at `model.path`.  Raises NotYet where a warm start will build it."""
    config = subject.config
    if not has_model(subject):
        raise ModelNotBuilt(
            f"{subject.path} does not exist yet: the run builds a tiny model (model.warm_start)"
        )
    subject.tokenizer  # noqa: B018 - raises ConfigError for a damaged model
    size = f"{subject.parameters:,} parameters, {config.model.dtype}, learning rate "
    size += f"{config.learner.lr:g}"
    return "; ".join([f"{subject.path}: {size}", *subject.notes])


def build_model(subject: Subject) -> None:
    """Build the tiny model of a warm start unless `model.path` has a model."""
    config = subject.config
    if has_model(subject):
        return
    from asyncrl.tasks.warm_start import warm_start

    say(f"building and warm-starting a tiny model for `{config.task.name}` in {subject.path}")
    report = warm_start(config, subject.path, say=say)
    say(f"warm start: {report['steps']} steps in {report['seconds']} s, loss {report['loss']:.3f}")


def check_tokenizer(subject: Subject) -> str:
    """Check the tokenizer and name the tokens that end a completion."""
    tokenizer = subject.tokenizer
    tokens = collect_stop_tokens(tokenizer, subject.config)
    stop_texts = [tokenizer.decode([token]) for token in tokens]
    return (
        f"{len(tokenizer.get_vocab()):,} tokens; completions end at "
        f"{', '.join(map(repr, stop_texts))}"
    )


def find_chat_call(agent: AgentConfig) -> str:
    """Find FILE:LINE of a chat call in the source of `agent.function` or `agent.command`.

    The import of a framework that only makes chat calls counts as one. The result is "" if the
    source has no chat calls, or also requests text completions."""
    names = [word for word in agent.command if word.endswith(".py")]
    if agent.function:
        names = [agent.function.rpartition(":")[0]]
    location = ""
    for path in filter(None, map(importing.find_source, names)):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # its import raises the error
        for line, call in _list_calls(tree):
            if CHAT_CALL.search(call):
                location = location or f"{path}:{line}"
            elif TEXT_CALL.search(call):
                return ""
    return location


def _list_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of attributes, strings and imports, which can show a call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, "." + ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in node.names:
                yield node.lineno, f"from {module}{name.name}"


def check_template(subject: Subject) -> str:
    """Check for a chat template if calls need one; `check_prompts` refuses chats without one."""
    subject.tokenizer  # noqa: B018
    if has_template(subject.path):
        return "the tokenizer has a chat template"
    agents = subject.config.agents.values()
    for agent in agents:
        if agent.tools:
            raise ConfigError(f"agent.tools: the tokenizer in {subject.path} has no chat template")
        if location := find_chat_call(agent):
            raise ConfigError(
                f"{agent.source_name}: {location} makes a chat call, and the tokenizer in "
                f"{subject.path} has no chat template: put a chat_template.jinja there, choose a "
                "model that has one, or request text completions (client.completions.create)"
            )
    for name in [agent.source_name for agent in agents if agent.http]:
        raise DoubtfulCheck(
            f"the tokenizer in {subject.path} has no chat template: {name} can only request text "
            "completions; put a chat_template.jinja there for chat calls"
        )
    return "no chat template, and text prompts need none"


def check_images(subject: Subject) -> str:
    """Check the settings of a model that reads images, and that sessions support images."""
    config = subject.config
    shape = subject.tokenizer.image_shape
    if shape is None:
        return "the model reads text"
    for problem in rules.apply_table("images", config):
        raise ConfigError(problem)
    for agent in config.agents.values() if config.uses_sessions else ():
        if not agent.http:
            source = agent.source_name if agent.uses_sessions else "task.mixture"
            raise ConfigError(
                f"{source}: environments, the run's tools and single completions beside sessions "
                "pass no images on; a model that reads images needs agent.serve, agent.command or "
                "agent.function"
            )
    return f"the model reads an image as {shape}"


def check_prompts(subject: Subject) -> str:
    """Check that no prompt is empty or too long for the context."""
    config = subject.config
    limit = config.generator.context - config.generator.max_new_tokens
    longest = 0
    for prompt in _read_first_prompts(subject):
        try:
            length = len(encode_prompt(subject.tokenizer, prompt))
        except ConfigError as error:
            raise ConfigError(f"{locate_prompt(config, prompt)}{error}") from error
        agent = config.agents.get(prompt.task, config.agent)
        if agent.uses_sessions and (prompt.is_continued or prompt.meta.get(TEMPLATE_COLUMNS[1])):
            raise ConfigError(
                f"{locate_prompt(config, prompt)}the calls of a session cannot continue an "
                f"assistant turn, and take no `{TEMPLATE_COLUMNS[1]}`"
            )
        longest = max(longest, length)
        if not length:
            raise ConfigError(
                f"task: {prompt.split} prompt {prompt.id} has no tokens under the tokenizer in "
                f"{subject.path}: it is empty, or has only unknown symbols"
            )
        if length > limit:
            raise ConfigError(
                f"generator.context: {prompt.split} prompt {prompt.id} has {length} tokens; "
                f"context {config.generator.context} less max_new_tokens "
                f"{config.generator.max_new_tokens} leaves {limit}; set generator.context to at "
                f"least {length + config.generator.max_new_tokens}, or leave the prompt out"
            )
    return f"the longest of the checked prompts has {longest} tokens; there is room for {limit}"


def locate_prompt(config: Config, prompt: Prompt) -> str:
    """Return the file and line of a prompt, with a colon; "" if no file has it."""
    task = next((part for part in config.task.mixture if part.title == prompt.task), config.task)
    files = {chosen.name: chosen.file for chosen in config.evaluation.sets}
    files |= {"heldout": task.heldout, "ood": task.ood}
    paths = find_files(files.get(prompt.split) or task.prompts) or []
    rows = itertools.chain.from_iterable(map(read_rows, paths))
    location, _ = next(itertools.islice(rows, prompt.id, None), ("", None))
    return f"{location}: " if location else ""


def _read_first_prompts(subject: Subject) -> Iterator[Any]:
    """Yield the prompts of each split that a check reads."""
    for split in ("train", *subject.config.evaluation.names):
        size = _count_prompts(subject.task, split)
        for number in range(FIRST_PROMPTS if size is None else min(size, MOST_PROMPTS)):
            yield subject.task.prompt(split, number, subject.config.seed)


def check_characters(subject: Subject) -> str:
    """Check that the vocabulary has the prompts' characters; the others become unknown tokens."""
    origins: dict[str, str] = {}  # character -> the first prompt that has it
    for prompt in _read_first_prompts(subject):
        text = prompt.text + "".join(str(turn.get("content") or "") for turn in prompt.messages)
        for character in sorted(set(text.replace(images.MARKER, ""))):
            if character.isprintable() and not character.isspace():
                origins.setdefault(character, f"{character!r} ({prompt.split} prompt {prompt.id})")
    tokens = {x: subject.tokenizer.encode(x, add_special_tokens=False) for x in origins}
    unknown = subject.tokenizer.unk_token_id
    missing = ", ".join(origins[x] for x, ids in tokens.items() if not ids or unknown in ids)
    if not missing:
        return f"the vocabulary has all {len(origins)} characters of the checked prompts"
    remedy = "change the prompts, or choose a model whose vocabulary has them"
    if subject.config.model.warm_start:
        remedy = f"delete {subject.path} to have a tiny model built for these prompts"
    raise DoubtfulCheck(
        f"task: the vocabulary in {subject.path} lacks {escape_line(missing, NAMED_CHARACTERS)}; "
        f"the model reads the unknown token in their place: {remedy}"
    )


def call_reward(subject: Subject) -> str:
    """Call each reward function on the reference answers of prompts, or on empty completions.

    One that takes lists gets all in one call. A judge, and the reward of sessions, is only started
    in its process. Raises DoubtfulCheck if a function prefers no answer to an empty completion.
    """
    config = subject.config
    parts = resolve_reward_configs(config)
    sets = {chosen.name for chosen in config.evaluation.sets}
    agents = config.agents
    for name, part in parts.items():
        if name in sets:
            prompts = _generate_prompts(subject.task, name, config.seed)
        else:
            of_part = _generate_prompts(get_task(part.task), "train", config.seed)
            prompts = (replace(prompt, task=name) for prompt in of_part)
        _call_on_prompts(subject, part, prompts, agents.get(name, config.agent).uses_sessions)
    training_prompts = _generate_prompts(subject.task, "train", config.seed)
    others = (prompt for prompt in training_prompts if prompt.task not in parts)
    called = _call_on_prompts(subject, config, others, config.uses_sessions)
    if subject.doubts:
        raise DoubtfulCheck(subject.doubts[0])
    if config.agent.uses_sessions:
        return f"{config.agent.source_name} gives the reward"
    if config.uses_sessions:
        named = {part: agent.source_name for part, agent in agents.items() if part}
        return ", ".join(f"{part}: {name}" for part, name in named.items()) + " give the reward"
    return called


def _generate_prompts(task: Any, split: str, seed: int) -> Iterator[Any]:
    """Yield the first prompts of a split, and all of a small one again and again."""
    size = _count_prompts(task, split) or FIRST_PROMPTS
    for index in range(FIRST_PROMPTS):
        yield task.prompt(split, index % size, seed)


def _call_on_prompts(
    subject: Subject, config: Config, prompts: Iterator[Any], in_sessions: bool
) -> str:
    """Call the reward function of `config` on the reference answers of the first of `prompts`.

    If the subject compares, more answers and an empty one, and doubts about their rewards are
    added to the subject's.
    """
    in_process = config.reward.uses_reward_processes
    if in_sessions or config.reward.judge.url:
        if in_process:
            check_reward_process(config)
        return f"{describe_reward_source(config.reward)}: not called, as a request may cost money"
    count = SCORED if subject.compares else 2
    responses = [(prompt, prompt.answer, [0]) for prompt in islice(prompts, count)]
    empty = [(prompt, "", [0]) for prompt, _, _ in responses[:1]] if subject.compares else []
    name = describe_reward_source(config.reward) if in_process else "the task's own"
    if in_process:
        results = check_reward_process(config, responses + empty)
    else:
        results = judge_all(config, subject.task, responses + empty)
    if failure := next((x.failed for x in results[: len(responses)] if x.failed), ""):
        raise ConfigError(f"{name}: {failure}")
    if not responses:
        return f"{name}: each part has another"
    prompt, result = responses[0][0], results[0]
    completion = f"the answer {prompt.answer!r}" if prompt.answer else "an empty answer"
    shown = f"{result.reward:g} for {completion} to {prompt.text[:40]!r}"
    answered = [x.reward for x, (_, answer, _) in zip(results, responses, strict=False) if answer]
    if not subject.compares or not answered:
        return f"{name}: {shown}"
    nothing = results[-1]
    if nothing.failed:
        subject.doubts.append(
            f"{name}: an empty completion, which a run may sample: {nothing.failed}"
        )
    elif max(answered) <= nothing.reward:
        problem = (
            f"{name}: {nothing.reward:g} for an empty completion, and no more for any of "
            f"{len(answered)} reference answers ({shown}): check the column of the answer "
            "(task.columns)"
        )
        if not in_process:
            raise ConfigError(problem)
        subject.doubts.append(
            f"{problem}, or whether the function expects a format that they do not have"
        )
    return f"{name}: {shown}; {nothing.reward:g} for an empty one"


def check_answers(subject: Subject) -> str:
    """Call the rewards, and check that the task's own reward has an answer to compare with."""
    called = call_reward(subject)
    task = getattr(subject.task, "task", subject.task)
    if not isinstance(task, FileTask) or subject.config.reward.uses_reward_processes:
        return called
    if not subject.config.uses_sessions and task.unanswered == len(task.sets["train"]):
        hint = suggest_answer_column(task.sets["train"][0]) or "add answers, or set reward.function"
        raise ConfigError(f"{subject.config.task.prompts}: no prompt has an `answer`: {hint}")
    return called


def check_disk(subject: Subject) -> str:
    """Check the disk space for checkpoints (weights, two moments), model, logs and recording."""
    config = subject.config
    runs = Path(config.runs).absolute()
    folder = next(path for path in (runs, *runs.parents) if path.exists())
    weights = subject.parameters * WIDTHS[config.model.dtype]
    required = weights * (3 * config.learner.keep_checkpoints + 1)
    record = config.record  # its bounded logs, and the recording
    log_limit = record.optimizer_steps_mib + (record.stream_mib if record.stream else 0)
    if record.samples_every and record.token_samples:
        log_limit += record.token_samples_mib
    required += log_limit << 20
    free = shutil.disk_usage(folder).free
    space = (
        f"{_format_size(required)} for checkpoints, model, logs and recording; "
        f"{_format_size(free)} free in {folder}"
    )
    if required > free:
        raise ConfigError(f"runs: {space}")
    return space


def check_memory(subject: Subject) -> str:
    """Estimate the memory of learner, generators and published versions, without activations."""
    import psutil

    config = subject.config
    weights = subject.parameters * WIDTHS[config.model.dtype]
    # weights, gradient, two moments; DeepSpeed in bfloat16 keeps float32 copies of three of them,
    # and FSDP2 of all four
    several = config.learner.backend != "torch"
    copies = 8 if several and config.model.dtype == "bfloat16" else 4
    learner = weights * (copies + len(model_check.list_references(config)))
    # the embedded engine holds the model as read, as fused for its kernels, and the fetched version
    generator = weights * (2 if config.generator.engine == "vllm" else 3) + subject.kv_cache
    versions = weights * config.weights.slots
    total = learner + config.generators * generator + versions
    estimate = (
        f"learner {_format_size(learner)}, {config.generators} generator(s) of "
        f"{_format_size(generator)}, published versions {_format_size(versions)}, and activations "
        "(docs/gpus.md)"
    )
    if config.model.device != "cpu" and devices.has_cuda():
        return estimate
    free = psutil.virtual_memory().available
    if total > free:
        raise DoubtfulCheck(
            f"{estimate}: {_format_size(total)} in all, but only {_format_size(free)} are free"
        )
    return f"{estimate}; {_format_size(free)} are free"


def _format_size(size: float) -> str:
    """Format a number of bytes in GiB or MiB."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 29 else f"{size / (1 << 20):.0f} MiB"


def check_exact(subject: Subject) -> None:
    """Run the self-test of exact mode if the config uses exact mode."""
    config = subject.config
    if not config.exact:
        return
    from asyncrl.supervise import exact_check  # which imports torch

    failure = exact_check.describe_failure(exact_check.check(config))
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
    for check in (
        *(check_packages, check_devices, check_task, check_functions, build_model, check_images),
        *(check_versions, check_template, check_prompts, check_characters, call_reward),
    ):
        try:
            check(subject)
        except DoubtfulCheck as doubt:
            say(f"warning: {doubt}")
    for note in subject.notes:
        say(f"model: {note}")
    check_exact(subject)


CHECKS: dict[str, Callable[[Subject], str]] = {
    "packages": check_packages,
    "devices": check_devices,
    "task": check_task,
    "model": check_model,
    "tokenizer": check_tokenizer,
    "template": check_template,
    "images": check_images,
    "prompts": check_prompts,
    "characters": check_characters,
    "reward": check_answers,
    "functions": check_functions,
    "disk": check_disk,
    "memory": check_memory,
    "versions": check_versions,
}
# check -> the checks that must pass first
NEEDS: dict[str, list[str]] = toml_writer.read_table(__file__)["needs"]


def run_checks(config: Config) -> Iterator[CheckOutcome]:
    """Yield the outcome of each check of CHECKS.

    A check is `later` if its prerequisite failed or it needs a model that the run builds."""
    subject = Subject(config, compares=True)
    blocked: dict[str, str] = {}
    for name, check in CHECKS.items():
        if reason := next((blocked[need] for need in NEEDS.get(name, ()) if need in blocked), ""):
            yield CheckOutcome(name, "later", reason)
            continue
        try:
            yield CheckOutcome(name, "ok", check(subject))
        except ModelNotBuilt as error:
            blocked[name] = f"once the {name} is built"
            yield CheckOutcome(name, "later", str(error))
        except DoubtfulCheck as error:
            yield CheckOutcome(name, "note", str(error))
        except ConfigError as error:
            blocked[name] = f"once the {name} check passes"
            yield CheckOutcome(name, "failed", str(error))
