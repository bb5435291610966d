"""Games of two: whose turn it is, who answers for the other side, and what of it is trained."""

import itertools
import json
import random
import re
import socket
import struct
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from agent_envs import Longer, answers
from process_kit import ROOT, run_command

from actors.gateway.environment_worker import (
    EnvironmentEvent,
    EnvironmentHost,
    EnvironmentOperation,
    EnvironmentSetup,
    resolve,
    serve,
)
from asyncrl.cli.config import TEXTS
from asyncrl.config import load, rules
from asyncrl.config.agents import AgentConfig
from asyncrl.config.tree import TaskConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.contract.toml_writer import fill
from asyncrl.experiments.play import HumanPlayer, ModelPlayer, PlayEvent, make_ticket, play
from asyncrl.models.policy import build_model
from asyncrl.tasks import arena, games, get_task, guess_task, nim
from asyncrl.tasks.calc import END
from asyncrl.tasks.games import (
    GameMatch,
    OpponentMove,
    SeededRandom,
    check,
    choose_random_move,
    make_text_opponent,
)
from asyncrl.transport.worker_pool import frame

LONGER = f"{ROOT}/tests/support/agent_envs.py:Longer"


BUNDLED = [load.load(path).agent.env for path in sorted((ROOT / "configs").glob("*.toml"))]
OLDER = ["asyncrl.tasks.nim:Nim", "asyncrl.tasks.guess:Guess"]  # in configs of older runs


@pytest.mark.parametrize("path", [*filter(None, BUNDLED), *OLDER])
def test_environments_of_all_configs_exist(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", ModuleType("textarena"))
    monkeypatch.delitem(sys.modules, path.partition(":")[0], raising=False)
    assert callable(resolve(path).reset)
    assert resolve("asyncrl.tasks.nim:best") is resolve("asyncrl.tasks.nim:best_move")


def options(kind: str = "", text: str = "ab=") -> dict[str, Any]:
    return {"prompt": Prompt(0, text, meta={"kind": kind})}


def match(opponent: games.Opponent | None, kind: str = "", seed: int = 0) -> tuple[GameMatch, str]:
    made = GameMatch(Longer(), "them", opponent)
    said, info = made.reset(seed=seed, options=options(kind))
    assert info == {}
    return made, said


def test_the_seed_says_which_side_the_policy_plays() -> None:
    """And the function that plays the other one reads all that its side has heard and said."""
    read: list[str] = []

    def function(text: str) -> str:
        read.append(text)
        return "ccc"

    first, said = match(make_text_opponent(function), seed=4)
    assert (said, first.asked, first.opponent_moves, read) == ("ab=", 0, [], [])
    assert first.step("a") == ("3=", 0.0, False, False, {})
    assert first.opponent_moves == [OpponentMove("1=", "ccc")] and read == ["1="]
    assert first.step("bb")[0] == "3=" and read[1:] == ["1=\nccc\n2="]
    assert first.step("abcdefgh") == ("", 1.0, True, False, {"parts": {"won": 1.0, "length": 11.0}})
    assert len(first.opponent_moves) == 1

    second, said = match(make_text_opponent(function), seed=5)
    assert said == "3="
    assert second.opponent_moves == [OpponentMove("ab=", "ccc")] and not second.asked
    assert [second.step(text)[0] for text in ("a", "a")] == ["3=", "3="]
    assert second.step("a") == ("", 0.0, True, False, {"parts": {"won": 0.0, "length": 3.0}})
    assert second.opponent_moves == []
    draw, _ = match(make_text_opponent(lambda _text: "a"))
    assert [draw.step("a")[1] for _ in range(3)][-1] == 0.5
    quiet = GameMatch(SimpleNamespace(), "them", None)
    quiet.close()
    closed = []
    GameMatch(SimpleNamespace(close=lambda: closed.append(1)), "them", None).close()
    assert closed == [1]


def test_against_itself_whoever_is_to_move_is_asked() -> None:
    asked = []
    for seed in (0, 1):
        made, said = match(None, seed=seed)
        turns = [(made.asked, said)]
        for text in ("a", "bb", "ccc", "dddd", "eeeee"):
            said, reward, ended, *_ = made.step(text)
            assert not ended and not reward and not made.opponent_moves
            turns.append((made.asked, said))
        asked.append(turns)
        reward, ended = made.step("ffffff")[1:3]
        assert (reward, ended) == (float(seed == 1), True)
    told = ["ab=", "1=", "2=", "3=", "4=", "5="]
    assert asked[0] == list(zip([0, 1] * 3, told, strict=True))
    assert asked[1] == list(zip([1, 0] * 3, told, strict=True))
    with pytest.raises(ValueError, match="returned player 2: a two-player game has"):
        match(None, "three")


def test_a_game_that_ends_before_the_policys_turn_is_begun_again() -> None:
    """Nothing of it could be trained.  Once the policy has had a turn it is an outcome."""
    made, _ = match(None, "quits", seed=1)
    assert made.asked == 1
    for game in (2, 3):
        assert made.step("h") == ("ab=", 0.0, False, False, {}) and made.asked == game
    assert made.step("a")[0] == "1=" and not made.asked
    assert made.step("bb")[0] == "2=" and made.asked == 3
    assert made.step("h")[1:3] == (0.5, True)  # two letters each
    seeds = []

    class Ends:
        def reset(self, *, seed: int, options: Any) -> None:
            seeds.append(seed)

        def turn(self) -> tuple[int, str]:
            return 0, ""

        def play(self, text: str) -> tuple[float, float]:
            return 1.0, 0.0

    endless = GameMatch(Ends(), "them", make_text_opponent(str))
    with pytest.raises(RuntimeError, match=f"{games.DEALT} games in a row ended before"):
        endless.reset(seed=7, options={})
    assert seeds == list(range(7, 7 + 2 * games.DEALT, 2))  # on the same side, of other luck


def test_random_moves_are_the_sessions_own_luck() -> None:
    def moves(seed: int) -> Any:
        made, _ = match(choose_random_move, seed=seed)
        yield made.opponent_moves
        for _ in range(2):
            made.step("a")
            yield made.opponent_moves

    alone = [list(moves(seed)) for seed in range(12)]
    random.seed(3)
    before = random.getstate()
    together = list(zip(*[moves(seed) for seed in range(12)], strict=True))
    assert random.getstate() == before
    assert [list(each) for each in zip(*together, strict=True)] == alone
    drawn = {told.move for game in alone for turn in game for told in turn}
    assert drawn == {"a", "bb"} and len({str(game) for game in alone[::2]}) > 2
    with SeededRandom(5), pytest.raises(KeyError):
        raise KeyError
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("opponent", "kind", "text", "said"),
    [
        (make_text_opponent(answers), "", "", "the opponent them raised KeyError: 'gone'"),
        (make_text_opponent(answers), "", "a", "them returned NoneType, not the text of a move"),
        (choose_random_move, "mute", "a", "raised ValueError: the game lists no legal moves"),
    ],
)
def test_an_opponent_that_fails_says_so(
    opponent: games.Opponent, kind: str, text: str, said: str
) -> None:
    made, _ = match(opponent, kind)
    with pytest.raises(RuntimeError, match=re.escape(said)):
        made.step(text)


def test_a_class_is_checked_before_a_session_begins() -> None:
    class Speechless:
        reset = turn = play = None

    check(Longer, "x", ["random", "self"])
    check(Speechless, "x", ["self"])
    check(lambda: None, "x", ["random"])
    check(dict, "x", [])
    with pytest.raises(ConfigError, match=r"no moves: .* with reset, turn, play, moves; leave"):
        check(Speechless, "x", ["random", "self"])
    with pytest.raises(ConfigError, match=r"x has no reset: .* with reset, turn, play; leave"):
        check(dict, "x", ["self"])
    with pytest.raises(ConfigError, match=r"x is a two-player game: set agent\.opponent"):
        check(Longer, "x", [])


def host(env: str, opponent: str = "", eval_opponent: str = "") -> EnvironmentHost:
    agent = AgentConfig(env=env, opponent=opponent, eval_opponent=eval_opponent)
    return EnvironmentHost(EnvironmentSetup(agent))


def test_a_process_of_environments_plays_it() -> None:
    made = host("agent_envs:Longer", "agent_envs:answers", "random")
    made.opponents["self"] = None

    def begun(opponent: str, seed: int, kind: str = "") -> EnvironmentEvent | None:
        prompt = Prompt(0, "ab=", meta={"kind": kind})
        return made.apply(
            EnvironmentOperation(1, "reset", prompt=prompt, seed=seed, opponent=opponent)
        )

    def step(text: str) -> EnvironmentEvent | None:
        return made.apply(EnvironmentOperation(1, "step", text=text))

    assert begun("self", 1) == EnvironmentEvent(1, "ok", "ab=", asked=1)
    assert step("a") == EnvironmentEvent(1, "ok", "1=")
    assert step("a") == EnvironmentEvent(1, "ok", "1=", asked=1)
    assert begun("agent_envs:answers", 1) == EnvironmentEvent(1, "ok", "2=", told=[("ab=", "cc")])
    assert step("bb") == EnvironmentEvent(1, "ok", "3=", told=[("2=", "ccc")])
    got = step("")
    why = "RuntimeError: the opponent agent_envs:answers raised KeyError: 'gone' in step"
    assert got == EnvironmentEvent(1, "failed", why=f"the environment raised {why}")
    got = begun("random", 0, "three")
    assert got is not None and got.kind == "failed" and "player 2" in got.why


@pytest.mark.parametrize(
    ("env", "opponent", "said"),
    [
        ("agent_envs:Talks", "self", "agent.env = agent_envs:Talks has no turn"),
        ("agent_envs:Longer", "", "agent_envs:Longer is a two-player game: set agent.opponent, "),
        ("agent_envs:Longer", "no_such:f", "the opponent no_such:f: importing it raised Module"),
        ("no_such:Env", "", "agent.env = no_such:Env: importing it raised ModuleNotFoundError: "),
    ],
)
def test_a_process_says_why_it_cannot_begin(env: str, opponent: str, said: str) -> None:
    setup = EnvironmentSetup(AgentConfig(env=env, opponent=opponent))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(msgspec.msgpack.encode(setup)))
        serve(theirs)
        (length,) = struct.unpack(">I", ours.recv(4))
        got = msgspec.msgpack.decode(ours.recv(length), type=EnvironmentEvent)
    assert got.kind == "broken" and said in got.why
    assert got.why.endswith("write module:name or file.py:name") == (env == "no_such:Env")


def test_a_game_of_two_by_one_line() -> None:
    """Of textarena, against itself and against random moves, which come first."""
    pytest.importorskip("textarena")
    before = random.getstate()
    made = host("textarena:TicTacToe-v0", "random", "self")
    assert random.getstate() == before

    def begin(seed: int, opponent: str) -> Any:
        return made.apply(
            EnvironmentOperation(1, "reset", prompt=Prompt(0, "0"), seed=seed, opponent=opponent)
        )

    def play(text: str) -> Any:
        return made.apply(EnvironmentOperation(1, "step", text=text))

    got = begin(6, "self")
    assert not got.asked and got.obs.startswith("You are Player 0")
    got = play("well")  # its own words are known
    assert not got.asked and "invalid move" in got.obs and "well" not in got.obs
    got = play("[4]")
    assert got.asked == 1 and "You are Player 1" in got.obs and "\n[Player 0] [4]\n" in got.obs
    assert [play(text).ended for text in ("[0]", "[3]", "[1]")] == [False] * 3
    got = play("[5]")
    assert got.ended and got.reward == 1 and got.parts == {"won": 1.0, "invalid": 0.0}
    for seed in range(1, 9, 2):
        ((told, move),) = begin(seed, "random").told
        assert told.startswith("You are Player 0") and f"'{move}'" in told
        assert not play("").ended
        got = play("")
        assert got.ended and got.reward == -1 and got.parts["invalid"] == 1.0
    with pytest.raises(ConfigError, match=r"has to be 2, received 1; a two-player game needs"):
        host("textarena:TicTacToe-v0")


def test_the_real_games() -> None:
    """Random moves are those the game lists; three players, or one with an opponent: refused."""
    pytest.importorskip("textarena")
    made = arena.find_game("TicTacToe-v0", 2)
    for seed in range(6):
        env = GameMatch(made(), "random", choose_random_move)
        said, _ = env.reset(seed=seed, options={})
        assert f"You are Player {seed % 2}" in said
        ended, told = False, list(env.opponent_moves)
        while not ended:
            said, reward, ended, _, info = env.step(arena.BRACKETS.findall(said)[-9:][-1])
            told += env.opponent_moves
        assert info["parts"]["invalid"] == 0.0 and info["parts"]["won"] == float(reward > 0)
        assert len({each.move for each in told}) == len(told) >= 2
    with pytest.raises(ConfigError, match=r"with 2 players: .* with more players are not"):
        arena.find_game("ThreePlayerTicTacToe-v0", 2)
    with pytest.raises(ConfigError, match=r"has to be 1, received 2; agent\.opponent needs a two"):
        arena.find_game("GuessTheNumber-v0", 2)


def test_nim_by_hand() -> None:
    game = nim.NimGame()
    game.reset(seed=0, options=options(text="201:"))
    assert game.turn() == (0, "201:") and game.moves() == ["a1", "a2", "c1"]
    assert game.play("a2") is None and game.turn() == (1, "001:") and game.play("c1") == (0.0, 1.0)
    for wrong in ("b1", "a3", "a0", "", "a1 "):
        game.reset(seed=0, options=options(text="201:"))
        assert game.play(wrong) == (0.0, 1.0)
    game.reset(seed=0, options=options(text="001:"))
    assert game.play("c1") == (1.0, 0.0)


def test_who_plays_its_best_moves_wins_whatever_is_won() -> None:
    @cache
    def won(heaps: tuple[int, ...]) -> bool:
        """By trying everything: can who is to move win?"""
        return any(
            not won(tuple(nim.apply_move(list(heaps), m)))
            for m in nim.list_legal_moves(list(heaps))
        )

    for heaps in itertools.product(range(nim.MOST + 1), repeat=3):
        if not any(heaps):
            continue
        move = nim.best_move("a1\n" + "".join(map(str, heaps)) + ":")
        assert move in nim.list_legal_moves(list(heaps))
        assert won(heaps) == (not won(tuple(nim.apply_move(list(heaps), move))))


def test_demonstrated_moves_stand_behind_what_the_game_says() -> None:
    task = nim.NimTask()
    pairs = task.make_demonstrations(2000, 0)
    assert pairs == nim.NimTask().make_demonstrations(2000, 0) and len(pairs) == 2000
    legal = began = 0
    for number, (before, move) in enumerate(pairs):
        *past, now = before.split(END)
        heaps = [[int(stone) for stone in said[:3]] for said in (*past, now)]
        played = [said[4:] for said in past]
        assert now[3:] == ":" and set(before.replace(END, "") + move) <= set(task.symbols)
        for mine, left, then in zip(heaps, played, heaps[1:], strict=False):
            assert left in nim.list_legal_moves(mine)
            theirs = nim.apply_move(mine, left)
            assert then in [nim.apply_move(theirs, each) for each in nim.list_legal_moves(theirs)]
        legal += move in nim.list_legal_moves(heaps[-1])
        if past:
            assert (before.rpartition(END)[0]) == "".join(pairs[number - 1])
        began += not past
        assert len(past) < 6 and len(move) < 4
    assert 0.85 < legal / 2000 < 0.95 and 500 < began < 1000
    prompts = [task.prompt(split, 3, 0) for split in ("train", "heldout", "ood")]
    assert [(each.id, each.split) for each in prompts] == [(3, "train"), (3, "heldout"), (3, "ood")]
    assert task.prompt("heldout", 3, 1) == prompts[1] and task.size("heldout") == 2048
    texts = {task.prompt("train", index, 0).text for index in range(300)}
    assert len(texts) == 27 and task.size("train") is None
    assert [task.prompt("train", i, 0) for i in range(9)] != [
        task.prompt("train", i, 1) for i in range(9)
    ]
    with pytest.raises(ValueError, match="the environment gives it"):
        task.reward(prompts[0], "a1")
    game = GameMatch(nim.NimGame(), "random", choose_random_move)
    said, _ = game.reset(seed=1, options={"prompt": prompts[0]})
    assert said != prompts[0].text and game.opponent_moves[0].observation == prompts[0].text


def longer(*sets: str) -> Any:
    return load.load(
        ROOT / "configs" / "calc.toml", ["agent.tools=[]", f"agent.env='{LONGER}'", *sets]
    )


SELF = ("agent.opponent='self'", "agent.eval_opponent='random'")


def test_both_sides_are_shown_turn_by_turn() -> None:
    texts = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"]

    def shown(*sets: str) -> list[tuple[str, int, str, bool]]:
        settings = longer(*sets)
        lines = iter(texts)
        player = HumanPlayer(settings, lambda: next(lines, None))
        found = list(play(settings, make_ticket(settings, 1), player))
        assert found[-1].kind == "ended" and found[-1].parts["won"] == found[-1].reward
        return [(x.kind, x.turn, x.text, x.other) for x in found[:-1]]

    both = shown(*SELF)
    assert [(turn, text) for kind, turn, text, _ in both if kind == "answered"] == [
        (turn, text) for turn, text in enumerate(texts, 1)
    ]
    sides = [other for kind, _, _, other in both if kind == "asked"]
    assert sides[:2] * 3 == sides and sides[0] != sides[1]
    assert sides == [other for kind, _, _, other in both if kind == "answered"]
    fixed = shown("agent.opponent='random'")
    begins = sides[0]  # the other side of this seed, by its turn 0
    moves = [(turn, text) for kind, turn, text, other in fixed if kind == "answered" and other]
    assert [turn for turn, _ in moves] == ([0, 1, 2] if begins else [1, 2, 3])
    assert all(text in ("a", "bb") for _, text in moves)
    assert len([1 for kind, _, _, other in fixed if kind == "asked" and other]) == 3
    assert [x[2] for x in fixed if x[0] == "answered" and not x[3]] == texts[:3]


def test_a_model_plays_both_sides(tmp_path: Path) -> None:
    """On ids that a run would train on the policy's side; the other's are none of its rows."""
    build_model(tmp_path, "0123456789*+-=?#e", hidden=32, layers=1, seed=3)
    settings = longer(*SELF, f"model.path='{tmp_path}'", "generator.max_new_tokens=3")
    ticket = make_ticket(settings, 0)
    player = ModelPlayer(settings, ticket)
    found = list(play(settings, ticket, player))
    drawn = {
        side: sum(x.tokens for x in found if x.kind == "answered" and x.other is side)
        for side in (True, False)
    }
    assert sum(x.kind == "asked" for x in found) == 6 and not any(x.row for x in found)
    (row,) = player.session.build_training_rows()
    assert int(np.frombuffer(row.mask, np.uint8).sum()) == drawn[False] > 0
    assert player.session.aside == drawn[True] > 0


def test_the_command_shows_the_other_side() -> None:
    def show(**turn: Any) -> str:
        return fill(TEXTS["turn"], turn=PlayEvent("asked", 2, "312:", **turn)).rstrip()

    assert show(other=True) == "--- turn 2, the other side\n312:"
    assert show(tokens=9, other=True) == "--- turn 2, the other side (9 tokens)\n312:"
    new = "a new training sequence"
    assert new in show(row=True) and new not in show()


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["agent.opponent='Random'"], "agent.opponent: Random; choose random or self, or write"),
        (["agent.eval_opponent='m:f g'"], "agent.eval_opponent: m:f g; choose random or self"),
        (["agent.eval_opponent=''"], "agent.eval_opponent: against itself, a policy always"),
        (["agent.opponent=''"], "agent.eval_opponent: is for a two-player game; set agent.opp"),
        (["agent.env=''", "agent.serve=true"], "agent.opponent: plays the other side of an env"),
        (["agent.env=''"], "task.name: nim needs an environment that gives prompts and rewards"),
    ],
)
def test_what_opponents_may_be(sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load.load("nim", sets)


def test_who_plays_the_other_side() -> None:
    made = AgentConfig(env="e", opponent="m:f")
    assert made.choose_opponent("train") == made.choose_opponent("eval") == "m:f"
    made = AgentConfig(env="e", opponent="self", eval_opponent="random")
    assert (made.choose_opponent("train"), made.choose_opponent("eval")) == ("self", "random")
    for name in ("random", "file.py:f", "self"):
        assert load.load("nim", [f"agent.opponent='{name}'"]).agent.opponent == name


# nobody is taken for hung or gone, and nothing is drawn again, because others have the cores
SETS = tuple(
    f"""
exact=true model.path='m' model.warm_start=false staleness.max_lag=0 learner.steps=2
learner.groups=4 learner.group_size=4 generator.slots=16 generator.max_new_tokens=6
evaluation.every=0 evaluation.prompts=4 evaluation.final_prompts=4 evaluation.ood_prompts=1
record.samples_every=1 record.samples=0 agent.env='{LONGER}' agent.step_s=3600
agent.deadline_s=7200 wires.lease_s=3600 wires.connect_s=1200 watchdog.floor_s=3600
watchdog.startup_s=3600
""".split()
)


def test_runs_against_itself_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """In exact mode at limit 0, twice: every token drawn is trained or set aside, each of the
    policy's side once, with the probability that the learner finds."""
    build_model(tmp_path / "m", "0123456789abc:=", hidden=32, layers=1)
    found = []
    for name in ("one", "other"):
        sets = [part for each in (*SETS, f"name='{name}'") for part in ("--set", each)]
        argv = [sys.executable, "-m", "asyncrl.cli", "run", "nim", "--json", *sets]
        found.append(run_command(argv, cwd=tmp_path, timeout=7200).check().json)
    one, other = found
    assert one["weights_digest"] == other["weights_digest"]
    assert one["trained_ids"] == other["trained_ids"]
    folders = [tmp_path / "runs" / name for name in ("one", "other")]
    first, second = ([json.loads(x) for x in (f / "samples.jsonl").open()] for f in folders)
    parts = ("ticket", "sample", "tokens", "logprobs", "mask", "versions", "reward", "calls")
    assert [[s[part] for part in parts] for s in first] == [
        [s[part] for part in parts] for s in second
    ]
    ledger = one["ledger"]
    assert ledger["generated"] == ledger["trained"] + ledger["set_aside"]
    assert ledger["trained"] == sum(sum(s["mask"]) for s in first)
    assert ledger["set_aside"] == sum(s["aside"] for s in first) > 0
    assert len({(s["ticket"], s["sample"]) for s in first}) == len(first) == 32
    assert all(s["calls"] == 6 and not s["rows"] for s in first)
    # 4 tokens for the heaps, 2 or 3 for "n=": special tokens count with their letters
    sides = {s["ticket"]: len(s["prompt_tokens"]) == 4 for s in first}
    assert all((len(s["prompt_tokens"]) == 4) == sides[s["ticket"]] for s in first), "one a group"
    assert set(sides.values()) == {True, False}
    largest = [
        row["mismatch/max_at_lag_0"]
        for row in map(json.loads, (folders[0] / "metrics.jsonl").open())
        if "mismatch/max_at_lag_0" in row
    ]
    assert largest == [0.0, 0.0]


def test_sessions_of_one_process_have_a_luck_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The games draw from the global generator: two sessions by turns see what each sees alone."""
    pytest.importorskip("textarena")

    def played(seed: int, raw: str = "") -> Any:
        env, ended = arena.ArenaGame(f"Blackjack-v0{raw}"), False
        yield env.reset(seed=seed, options={})[0]
        while not ended:
            *turn, ended, truncated, info = env.step("[Hit]")
            yield turn, truncated, info

    alone = [list(played(seed)) for seed in (7, 8)]
    random.seed(1)
    before = random.getstate()
    turns = list(itertools.zip_longest(played(7), played(8, "-raw")))
    assert random.getstate() == before, "nor is anybody else's changed"
    together = [[turn for turn in each if turn] for each in zip(*turns, strict=True)]
    assert together == alone and alone[0] != alone[1]
    assert all("[Hit]" not in turn[0] for (turn, *_) in alone[0][1:]), "its own words"
    assert alone[0][-1][1:] == (False, {"parts": {"invalid": 0.0}})
    # by one line of config
    made = host("textarena:GuessTheNumber-v0")
    got = made.apply(EnvironmentOperation(3, "reset", prompt=Prompt(0, "0"), seed=5))
    assert got is not None and got.kind == "ok" and "between 1 and 20" in str(got.obs)
    with pytest.raises(ConfigError, match=r"^agent.env = textarena:Chess-v9: Environment .* not f"):
        host("textarena:Chess-v9")
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[arena\]'"):
        arena.ArenaGame("GuessTheNumber-v0")


def test_the_real_game() -> None:
    """Halving wins within five guesses, whatever the number; the seed decides it; what is no
    guess, twice, ends it without pay."""
    pytest.importorskip("textarena")
    from asyncrl.tasks.guess import GuessGame

    found = set()
    for seed in range(30):
        env = GuessGame()
        assert env.reset(seed=seed, options={})[0] == guess_task.GuessTask.question
        low, high, reward = 1, 20, 0.0
        for _ in range(guess_task.FAIREST):
            guess = (low + high) // 2
            obs, reward, ended, *_ = env.step(str(guess))
            if ended:
                found.add(guess)
                break
            low, high = (low, guess - 1) if obs == "<" else (guess + 1, high)
            assert obs in "<>"
        assert reward == 1.0 and ended
    assert len(found) > 10
    env = GuessGame()
    env.reset(seed=3, options={})
    assert env.step("x")[:3] == ("!", 0.0, False) and env.step("")[1:3] == (0.0, True)
    whole = arena.ArenaGame("GuessTheNumber-v0")
    first, _ = whole.reset(seed=3, options={})
    assert "between 1 and 20" in first and "[GAME]" not in first
    said, *_ = whole.step("I say [1]")
    assert said == "The target number is higher."
    near, *_ = env.reset(seed=3, options={})
    assert near != first


def test_demonstrated_guesses_stand_behind_what_the_game_says() -> None:
    pytest.importorskip("textarena")
    task = guess_task.GuessTask()
    pairs = task.make_demonstrations(400, 0)
    assert len(pairs) == 400 and pairs == guess_task.GuessTask().make_demonstrations(400, 0)
    sessions: list[list[tuple[str, str]]] = []
    for before, guess in pairs:
        if before == task.question:
            sessions.append([])
        sessions[-1].append((before, guess))
    hits = 0
    for turns in sessions[:-1]:
        whole = task.question
        for (before, guess), (after, _) in itertools.pairwise(turns):
            assert before == whole
            whole = after
            sign = after.removeprefix(before + guess + END)
            assert sign in ("<", ">", "!") and len(guess) < 4
        assert len(turns) <= guess_task.FAIREST
        hits += len(turns) < guess_task.FAIREST
    assert 0.2 < hits / len(sessions) < 0.8  # spoiled on purpose


@pytest.mark.parametrize("name", ["seeds", "guess", "nim"])
def test_tasks_whose_environment_pays(name: str) -> None:
    task = get_task(TaskConfig(name=name))
    assert task.prompt("train", 5, 0).id == 5 and task.size("train") is None
    assert task.size("heldout") and task.prompt("heldout", 1, 0).split == "heldout"
    with pytest.raises(ValueError, match="the environment gives it"):
        task.reward(task.prompt("train", 0, 0), "")
    assert rules.check(load.load("guess", [f"task.name={name}", "model.warm_start=false"])) == []
