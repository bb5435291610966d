"""Keys that a config's methods do not read are errors, or dropped for a later layer's choice."""

import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithms_kit import D, batch, config, theta
from click.testing import CliRunner

from asyncrl.algorithms import loss as sl
from asyncrl.algorithms import settings
from asyncrl.algorithms.batch import LossBatch
from asyncrl.cli import main
from asyncrl.config import bundled_configs, layers, load, rules
from asyncrl.config.methods import METHODS
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.compare import arms

BARE = 'model.path = "m"\ntask.name = "sort"\n'


def written(tmp_path: Path, text: str, name: str = "c.toml") -> Path:
    path = tmp_path / name
    path.write_text(BARE + text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[loss]\ndppo_threshold = 0.1\n", "belongs to loss.surrogate = dppo or ipo, not to ppo"),
        ('[loss]\nsurrogate = "gmpo"\neps_lo = 0.1\n', "did you mean loss.eps_low?"),
        (
            '[loss]\nsurrogate = "bapo"\ncov_share = 0.1\n',
            r"did you mean loss.bapo_share\? \(bapo reads coefficient, reduction",
        ),
        ("[correction]\nlevel = 'token'\n", "or interpolate or version or ema, not to behavior"),
        ("[advantage]\nlam = 0.9\n", "belongs to advantage.name = gae, not to rloo"),
        ("[advantage]\nname = 'reinforce'\nema_decay = 0.5\n", "baseline = ema or prompt"),
        *(
            (
                f'[loss]\nsurrogate = "reshape"\n[reshape]\nbudget = "global"\n{key} = {value}\n',
                f"reshape.{key}: belongs to reshape.budget = none or tokens, not to global",
            )
            for key, value in {
                "mode": '"base"',
                "tau": 0.5,
                "temperature": 2.0,
                "gamma_min": 0.1,
            }.items()
        ),
        (
            '[loss]\nsurrogate = "reshape"\n[reshape]\nmode = "constant"\nrho_min = 0.5\n',
            "reshape.rho_min: belongs to reshape.mode = v3.1 or base, not to constant",
        ),
        *(
            (
                f"[kl]\npreset = 'distill'\n[loss]\ncoefficient = 0.0\n{more}",
                f"{key}: acts only where loss.coefficient is set, and it is 0.0",
            )
            for more, key in (
                ("eps_high = 0.3\n", "loss.eps_high"),
                ("[advantage]\nname = 'grpo'\nddof = 0\n", "advantage.ddof"),
                ("[advantage]\nrewards = 'unit'\n", "advantage.rewards"),
            )
        ),
        (
            "[loss]\ncoefficient = 0.0\n[kl]\npreset = 'distill'\n[kl.reward]\ncoefficient = 0.1\n",
            "loss.coefficient = 0 leaves out the advantage, so KL in the reward would do nothing",
        ),
        ("[reshape]\ntau = 2.0\n", "reshape.tau: belongs to loss.surrogate = reshape, not to ppo"),
        ("[value]\nlr = 1e-3\n", "value.lr: belongs to advantage.name = gae, not to rloo"),
        ("[kl.loss]\nestimator = 'k2'\n", "acts only where kl.loss.coefficient is set, and it is"),
        ("[stop]\nagainst = 'behavior'\n", "acts only where stop.kl_max is set, and it is 0.0"),
        ("[staleness]\nhalf_life = 3.0\n", "staleness.on_exceed = downweight, not to pace"),
        (
            "[loss]\nnorm_length = 8\n",
            "loss.reduction = seq-mean-token-sum-norm, not to token-mean",
        ),
        ("[loss]\nsurogate = 'ppo'\n", "did you mean loss.surrogate?"),
        ("[loss]\nsurrogate = 3\n", "loss.surrogate: Invalid value 3; choose one of"),
        ("[loss]\nsurrogate = 'sapo'\nsapo_tau_pos = 0.0\n", "sapo_tau_pos: Expected `float` > 0"),
        ("[loss]\nsurrogate = 'sapo'\nsapo_tau_neg = -1.0\n", "sapo_tau_neg: Expected `float` > 0"),
    ],
)
def test_an_unread_key_is_refused_at_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as caught:
        load.load(path)
    line = len(BARE.splitlines()) + len(text.splitlines())
    assert str(caught.value).startswith(f"{path}:{line}: ")


def test_the_order_of_items_in_one_command_does_not_matter(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    both = ["loss.surrogate=dppo", "loss.dppo_threshold=0.1"]
    assert load.load(path, both) == load.load(path, both[::-1])
    with pytest.raises(ConfigError, match=r"--set loss\.pull=0\.1: loss\.pull: belongs to"):
        load.load(path, ["loss.surrogate=dppo", "loss.pull=0.1"])
    # an arm drops what an earlier item gave
    assert load.load(path, [*both, "loss.surrogate=vanilla"]).loss == settings.VanillaLoss()


def test_a_later_method_drops_the_keys_of_the_one_before(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '[loss]\nsurrogate = "dppo"\ndppo_threshold = 0.1\nentropy = 0.01\n'
        '[correction]\nproximal = "recompute"\nreject = "ratio"\nreject2 = "k2"\n'
        'reject2_hi = 0.1\n[staleness]\non_exceed = "downweight"\nhalf_life = 3.0\n',
    )
    noted: list[str] = []
    sets = ["loss.surrogate=ppo", "correction.reject=none", "staleness.on_exceed=pace"]
    made = load.load(path, sets, noted.append)
    assert made.loss == settings.PpoLoss(entropy=0.01)
    assert made.correction == settings.RecomputedCorrection()
    dropped = {line.split(":")[0] for line in noted}
    assert dropped == {
        f"dropped {key}"
        for key in (
            "loss.dppo_threshold",
            "correction.reject2",
            "correction.reject2_hi",
            "staleness.half_life",
        )
    }
    show = CliRunner().invoke(main, ["config", "show", str(path), "--set", "loss.surrogate=ppo"])
    assert "dropped loss.dppo_threshold: belongs to loss.surrogate = dppo" in show.stderr
    assert "dppo_threshold" not in show.stdout
    assert load.convert(tomllib.loads(show.stdout), "shown") == load.load(
        path, ["loss.surrogate=ppo"]
    )
    # a coefficient of zero drops the keys of the file that it stops
    path = written(tmp_path, "[loss]\neps_high = 0.3\n[advantage]\nwhiten = true\n")
    sets = ["loss.coefficient=0", "kl.preset=distill"]
    made = load.load(path, sets)
    assert made.loss == settings.PpoLoss(coefficient=0.0)
    assert made.advantage == settings.RlooAdvantage()
    for beside, noted in (("advantage.truncated=mask", 0), ("advantage.name=grpo", 1)):
        said = rules.find_warnings(load.load(path, [*sets, beside]))
        assert sum("does not enter the loss" in line for line in said) == noted


@pytest.mark.parametrize("preset", ["tis", "mis_normalized", "none"])
def test_a_preset_may_be_set_on_every_shipped_config(preset: str) -> None:
    """As `asyncrl run --resume RUN --set correction.preset=mis` needs it."""
    for name in bundled_configs.list_names():
        made = load.load(name, [f"correction.preset={preset}"])
        written_by_run = tomllib.loads(load.dump(load.load(name)))
        resumed = load.convert(written_by_run, "run", sets=[f"correction.preset={preset}"])
        assert made.correction.proximal == "recompute" and resumed == made


def with_unread(name: str) -> dict[str, Any]:
    """A run's config.toml as it was when it had every key of every method."""
    raw = tomllib.loads(load.dump(load.load(name)))
    raw["advantage"] |= {"lam": 0.95, "gamma": 1.0, "ema_decay": 0.9, "part_weights": {}}
    raw["correction"] |= {"level": "token", "bound": "truncate", "self_normalize": False}
    raw["loss"] |= {"dppo_threshold": 0.2, "pull": 0.0, "norm_length": 0}
    raw["value"] = {"trunk": "own", "lr": 0.0}
    raw["reshape"] = {"form": "power", "tau": 1.0}
    raw["staleness"] |= {"half_life": 2.0}
    raw["kl"]["reward"] |= {"target": 6.0, "estimator": "k1"}
    return raw


def test_a_config_that_an_older_run_wrote_loads_as_it_trained() -> None:
    """Its unread keys never acted; a key that is given by hand beside them is still an error."""
    for name in ("demo", "decoupled"):
        raw = with_unread(name)
        assert load.convert(raw, "config.toml") == load.load(name)
        with pytest.raises(ConfigError, match=r"--set loss\.pull=0\.2: loss\.pull: belongs to"):
            load.convert(raw, "config.toml", sets=["loss.pull=0.2"])
        made = load.convert(raw, "config.toml", sets=["loss.surrogate=dppo"])
        assert isinstance(made.loss, settings.DppoLoss)


def variants() -> list[Any]:
    return [
        pytest.param(section, tag, id=f"{section}-{tag}")
        for section, kind in (
            ("advantage", settings.Advantage),
            ("loss", settings.Loss),
            ("correction", settings.Correction),
        )
        for tag in (layers.get_tag(struct)[1] for struct in settings.list_variants(kind))
    ]


@pytest.mark.parametrize(("section", "tag"), variants())
def test_what_is_written_loads_back_equal(section: str, tag: str) -> None:
    """Every method with its defaults; nothing that is not read is written."""
    key = layers.get_tag(layers.list_structs(layers.map_fields(Config)[section].type)[0])[0]
    made = load.build({"model": {"path": "m"}, "task": {"name": "sort"}, section: {key: tag}})
    raw = tomllib.loads(load.dump(made))
    assert load.build(raw) == made and layers.find_unread(layers.flatten(raw, Config), Config) == []
    assert raw[section][key] == tag


@pytest.mark.parametrize(
    ("sets", "warned"),
    [
        ((), "reshape: controls variance and not drift"),
        (("reshape.budget=global",), "reshape: controls variance and not drift"),
        (("reshape.budget=tokens",), ""),
        (("reshape.clip=0.2",), ""),
    ],
)
def test_a_reshape_without_a_repair_is_warned_of(sets: tuple[str, ...], warned: str) -> None:
    made = load.load("demo", ["method=reshape", "learner.epochs=2", *sets])
    warnings = [line for line in rules.find_warnings(made) if line.startswith("reshape:")]
    assert bool(warned) == bool(warnings) and all(line.startswith(warned) for line in warnings)


def test_every_biased_estimator_in_the_reward_is_warned_of() -> None:
    kinds = {
        "k1": "",
        "k1+": "a + changes nothing",
        **dict.fromkeys(("k2", "k2+", "abs", "abs+"), "has a strongly biased gradient; use k1"),
        **dict.fromkeys(("k3", "k3+", "low_var_kl", "low_var_kl+"), "known to collapse; use k1"),
    }
    for estimator, warned in kinds.items():
        sets = ["kl.reward.coefficient=0.1", f"kl.reward.estimator={estimator!r}"]
        lines = [x for x in rules.find_warnings(load.load("demo", sets)) if x.startswith("kl:")]
        assert len(lines) == bool(warned) and all(warned in line for line in lines), estimator


def test_a_method_sets_all_that_it_is_and_gives_way_to_what_is_given(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    path.write_text('method = "gmpo"\n' + BARE + "[loss]\neps_high = 0.3\n")
    made = load.load(path)
    assert made.loss == settings.GmpoLoss(reduction="seq-mean-token-mean", eps_high=0.3)
    assert made.advantage == settings.GrpoAdvantage()
    assert made.correction == settings.BehaviorCorrection()
    assert load.load(path, ["advantage.name=rloo"]).advantage == settings.RlooAdvantage()
    # a clip range of PPO is none of GMPO's, whose default is another
    made = load.load("demo", ["loss.eps_low=0.1", "loss.entropy=0.01", "method=gmpo"])
    assert made.loss == settings.GmpoLoss(reduction="seq-mean-token-mean", entropy=0.01)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_may_be_set_on_a_config_of_another(name: str) -> None:
    """The result is the method's, whatever was there; a written config needs no method."""
    method = METHODS[name]
    of = {}
    for source in ("demo", "decoupled"):
        items = [f"method={name}"] if source == "demo" else ["learner.minibatches=1"]
        made = load.load(source, [*items, f"method={name}"])
        for key, value in method.keys.items():
            assert layers.get_value(layers.read_keys(made), Config, key) == value, key
        raw = tomllib.loads(load.dump(made))
        assert "method" not in raw and load.convert(raw, "written") == made
        of[source] = (made.loss, made.advantage, made.correction)
    assert of["demo"] == of["decoupled"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gmppo", "gmpo"),
        ("REINFORCE++", "reinforce_pp"),
        ("Dr.GRPO", "dr_grpo"),
        ("reinforc", "reinforce"),
        ("flash_reinforce", "flash-reinforce"),
        # published algorithms whose names differ by a letter from a method's
        *((name, "") for name in ("gppo", "aspo", "luspo", "dpo", "kto", "opo", "prpo", "drpo")),
        *((name, "") for name in ("reinforce-rej", "reinforce-ada", "reinforce-pro", "cppo")),
    ],
)
def test_unknown_methods_get_a_hint_if_misspelled(name: str, hint: str, tmp_path: Path) -> None:
    """In a config and as an arm."""
    path = written(tmp_path, "")
    for call in (lambda: load.load(path, [f"method={name!r}"]), lambda: arms.parse_arm(name)):
        with pytest.raises(ConfigError) as refused:
            call()
        said = re.findall(r"did you mean ([\w-]+)\?", str(refused.value))
        assert said == ([hint] if hint else []), refused.value
    path.write_text("method = ['gmpo']\n" + BARE)
    with pytest.raises(ConfigError, match=f"{path}:1: method: .* is unknown"):
        load.load(path)


def test_a_method_without_kl_drops_that_of_the_method_before_it(tmp_path: Path) -> None:
    """From a resolved config, which has every key."""
    path = written(tmp_path, "")
    path.write_text(load.dump(load.load(path, ["method=grpo"])))
    assert load.load(path).kl.loss.coefficient == 0.04
    for name in ("dapo", "dr_grpo", "gspo", "cispo"):
        assert load.load(path, [f"method={name}"]).kl.loss.coefficient == 0.0


def test_methods_are_listed_with_source_and_evidence() -> None:
    shown = CliRunner().invoke(main, ["methods", "--json"])
    listed = json.loads(shown.stdout.splitlines()[-1])["methods"]
    assert list(listed) == list(METHODS)
    for name, row in listed.items():
        assert row["source"] and row["keys"]["loss.surrogate"], name
        if not row["evidence"]:
            continue
        page, _, anchor = row["evidence"].partition("#")
        text = (bundled_configs.FOLDER.parent / page).read_text()
        titles = {line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")}
        assert not anchor or anchor in {
            title.replace(",", "").replace(" ", "-") for title in titles
        }, anchor
    plain = CliRunner().invoke(main, ["methods"])
    assert "gmpo: GMPO: the geometric mean ratio of a completion" in plain.stdout
    assert "source: arXiv 2507.20673 (code); measured: docs/staleness.md" in plain.stdout
    assert "source: AReaL (code); not measured here" in plain.stdout
    logs = "".join(p.read_text() for p in (bundled_configs.FOLDER.parent / "docs/log").glob("*.md"))
    variants = (*settings.list_variants(settings.Loss), *settings.list_variants(settings.Advantage))
    parts = {variant.__struct_config__.tag for variant in variants}
    for name in (name for name, method in METHODS.items() if not method.evidence):
        if name in parts:  # the logs name the advantage or the surrogate
            continue
        assert f"`{name}`" not in logs, f"{name} was measured"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"method": "vcpo-length"}, 'method: vcpo-length was removed; write method = "vcpo"'),
        ({"method": "vcpo-logits"}, 'method: vcpo-logits was removed; write method = "vcpo"'),
        ({"method": "k25"}, 'method: k25 was removed; write method = "dis" with loss.band_lo'),
        ({"method": "m2po"}, 'method: m2po was removed; write method = "m2po-published"'),
        (
            {"correction": {"preset": "m2po"}},
            'correction.preset = m2po was removed; write method = "m2po-published"',
        ),
        (
            {"correction": {"proximal": "behavior", "m2": 0.04, "m2_over": "all"}},
            "correction.m2_over = all was removed; write correction.m2 alone",
        ),
        (
            {"advantage": {"name": "opob", "squared_norm": "length"}},
            "advantage.squared_norm = length was removed; write advantage.name = opob",
        ),
    ],
)
def test_a_removed_method_is_refused_by_name(sections: dict[str, Any], said: str) -> None:
    raw = {"model": {"path": "m"}, "task": {"name": "sort"}, **sections}
    with pytest.raises(ConfigError, match=f"^c.toml.*: {re.escape(said)}"):
        load.convert(raw, "c.toml")


def test_removed_keys_that_change_nothing_are_dropped() -> None:
    """The config of an earlier run gives every key."""
    base = {"model": {"path": "m"}, "task": {"name": "sort"}}
    behavior = {"proximal": "behavior"}
    for earlier, now in (
        ({"correction": behavior | {"m2_over": "all"}}, {"correction": behavior}),
        (
            {"correction": behavior | {"m2": 0.04, "m2_over": "pushing"}},
            {"correction": behavior | {"m2": 0.04}},
        ),
        (
            {"advantage": {"name": "opob", "squared_norm": "gradient"}},
            {"advantage": {"name": "opob"}},
        ),
    ):
        assert load.convert(base | earlier, "c.toml") == load.convert(base | now, "c.toml")


def bare(advantage: dict[str, Any], **more: Any) -> Any:
    keys = {key: value for key, value in advantage.items() if key != "name"}
    kinds = {k.__struct_config__.tag: k for k in settings.list_variants(settings.Advantage)}
    sections = {
        "seed": 0,
        "staleness": SimpleNamespace(on_exceed="pace"),
        "correction": settings.RecomputedCorrection(),
        "advantage": kinds[advantage["name"]](**keys),
        "learner": SimpleNamespace(epochs=1, minibatches=1, distributed=False),
        "loss": settings.PpoLoss(),
        "kl": settings.KL(),
        "reshape": settings.Reshape(),
        "stop": settings.Stop(),
        "value": settings.Value(),
        "generator": SimpleNamespace(max_new_tokens=64),
    }
    return SimpleNamespace(**{**sections, **more})


def with_values(b: LossBatch) -> LossBatch:
    b.values = torch.randn(len(b.seq), generator=torch.Generator().manual_seed(1), dtype=D)
    b.bootstrap = torch.rand(len(b.rewards), generator=torch.Generator().manual_seed(2), dtype=D)
    return b


def prepared(c: Any, per_token: bool) -> sl.PreparedBatch:
    b = with_values(batch(3))
    if per_token:
        b.token_rewards = torch.rand(
            len(b.seq), generator=torch.Generator().manual_seed(3), dtype=D
        )
    return sl.prepare(b, c)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", ["gae", "reinforce_pp", "grpo"])
def test_an_advantage_of_a_name_alone(name: str, per_token: bool) -> None:
    keys: dict[str, Any] = (
        {"name": name}
        if name != "grpo" or per_token
        else {"name": name, "ddof": 1, "eps": 1e-4, "whiten": False}
    )
    got = prepared(bare(keys), per_token)
    want = prepared(config(advantage={"name": name}), per_token)
    assert torch.equal(got.advantage, want.advantage) and float(want.advantage.abs().max()) > 0
    assert (got.returns is None) == (want.returns is None)
    assert got.returns is None or torch.equal(got.returns, want.returns)  # type: ignore[arg-type]
    assert got.metrics == want.metrics


@pytest.mark.parametrize("truncated", ["penalty", "soft", "fixed", "zero"])
def test_a_penalty_nobody_gave_is_none(truncated: str) -> None:
    b, c = batch(3), bare({"name": "rloo", "whiten": False, "truncated": truncated})
    b.truncated = torch.arange(12) % 2 == 0
    want = torch.where(b.truncated, 0.0, b.rewards) if truncated in ("zero", "fixed") else b.rewards
    assert sl.prepare(b, c).metrics["reward/used_mean"] == pytest.approx(float(want.mean()))
    if truncated == "soft":  # a ramp of one token: below the limit nothing, at it the whole
        c.advantage = settings.RlooAdvantage(
            truncated="soft", truncation_penalty=1.0, truncation_ramp=1
        )
        drawn = torch.bincount(b.seq[b.mask], minlength=12)  # what stands between turns is not
        c.generator = SimpleNamespace(max_new_tokens=int(drawn.max()))
        longest = drawn == c.generator.max_new_tokens
        assert sl.prepare(b, c).metrics["reward/used_mean"] == pytest.approx(
            float((b.rewards - longest.to(D)).mean())
        )


def test_a_whole_step_with_bare_sections_is_that_of_the_defaults() -> None:
    lp = theta(batch(3))
    found = []
    for c in (bare({"name": "rloo", "whiten": False}), config()):
        b = batch(3)
        prep = sl.prepare(b, c)
        assert not sl.needs_current(prep) and not sl.needs_proximal_first(c)
        assert not sl.needs_start_first(c)
        step = sl.begin_step(prep, torch.arange(12))
        loss, sums = sl.compute_micro_loss(prep, step, torch.arange(len(b.seq)), lp)
        gradient = torch.autograd.grad(loss, lp)[0]
        found.append((gradient, sl.finish(sums), step.metrics, step.lr_scale, step.prepass))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1:] == found[1][1:]
    assert found[0][2:] == ({}, 1.0, {})


def test_terms_of_bare_sections_have_the_defaults_of_the_configuration() -> None:
    """KL in the loss: k3, on policy; the value loss: 0.1 of it, not clipped."""
    lp = theta(batch(3))
    now = torch.randn(
        len(batch(3).seq), generator=torch.Generator().manual_seed(9), dtype=D, requires_grad=True
    )
    kl = settings.KL(loss=settings.KLLoss(coefficient=0.3))
    found = []
    for c in (
        bare({"name": "gae"}, kl=kl),
        config(advantage={"name": "gae"}, kl={"loss": {"coefficient": 0.3}}),
    ):
        b = with_values(batch(3))
        prep = sl.prepare(b, c)
        loss, sums = sl.compute_micro_loss(
            prep, sl.begin_step(prep, torch.arange(12)), torch.arange(len(b.seq)), lp, None, now
        )
        found.append((torch.autograd.grad(loss, (lp, now)), sl.finish(sums)))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert found[0][1] == found[1][1]
    assert found[0][1]["loss/kl"] > 0 and found[0][1]["loss/value"] > 0


def test_a_stop_of_a_limit_alone_skips_from_the_start() -> None:
    for stop in (settings.Stop(kl_max=0.5), config(stop={"kl_max": 0.5}).stop):
        prep = sl.prepare(batch(3), bare({"name": "rloo", "whiten": False}, stop=stop))
        assert prep.budget is None and not sl.needs_current(prep)
        a, w = sl.sum_update_kl(prep, torch.arange(len(prep.batch.seq)), theta(batch(3)).detach())
        x = theta(batch(3)).detach() - prep.start
        weight = (prep.start - prep.batch.behavior).exp().clamp(max=2.0)
        assert float(a) == pytest.approx(float((weight * (x.exp() - 1 - x))[prep.valid].sum()))
        assert float(w) == pytest.approx(float(weight[prep.valid].sum()))


def test_draws_of_bare_sections_are_those_of_the_configuration() -> None:
    loss = settings.ClipCovLoss(cov_share=0.3, cov_lo=-1.0, cov_hi=1.0)
    whole = config(
        loss={"surrogate": "clip_cov", "cov_share": 0.3, "cov_lo": -1.0, "cov_hi": 1.0}, seed=0
    )
    chosen = []
    for c in (bare({"name": "rloo", "whiten": False}, loss=loss), whole):
        prep = sl.prepare(batch(3), c, number=2)
        chosen.append(
            sl.begin_step(prep, torch.arange(12), theta(batch(3)).detach()).prepass["chosen"]
        )
    assert torch.equal(chosen[0], chosen[1]) and chosen[0].any()
