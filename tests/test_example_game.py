"""The example in `examples/`: the game's rules, exact capture, weights, and short runs of it."""

from __future__ import annotations

import io
import json
import random
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from prefix_rewrite import CapturedCall, ForestError, PrefixForest, prefix_compile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
game, rollout, compare, call_data, tiny_hybrid, train_agent = map(
    import_module,
    ("tool_game", "rollout", "compare", "call_data", "tiny_hybrid", "train_agent"),
)
encode, decode = game.TOKENIZER.encode, game.TOKENIZER.decode
VOCAB_SIZE = len(game.TOKENIZER.words)


def new_episode(item: str = "drums", count: str = "7", seed: int = 0):
    return game.Episode(game.Task(item, count), random.Random(seed))


def after_system(context: list[int]) -> str:
    assert context[: len(game.SYSTEM_IDS)] == game.SYSTEM_IDS
    return decode(context[len(game.SYSTEM_IDS) :])


def clumsy_player(seed: int):
    """Make calls of random words, right ones at times, that may end too early or never."""
    rng = random.Random(seed)

    def player(episodes):
        return [
            episode.right_call
            if rng.random() < 0.4
            else [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, game.MAX_SAMPLED))]
            for episode in episodes
        ]

    return player


def play_clumsily(seed: int, num_tasks: int = 3, num_episodes: int = 4):
    tasks = game.draw_tasks(num_tasks, random.Random(seed))
    return rollout.play(clumsy_player(seed), tasks, num_episodes, seed)


def test_right_calls_tell_this_story():
    episode, seen = new_episode(), []
    while not episode.done:
        seen.append((episode.turn.agent, after_system(episode.context)))
        assert episode.act(episode.right_call) == 1.0
    ticket = random.Random(0).choice(game.COUNTS)
    asked = "<user> how many are left of drums <clerk>"
    task = "<task> the clerk wants to know about drums <helper>"
    assert seen[0] == ("clerk", asked)
    assert seen[1] == ("helper", task)
    assert seen[2] == (
        "helper",
        f"{task} lookup drums <end> <tool> ticket {ticket} : the count is 7 <helper>",
    )
    assert seen[3][1].startswith(f"{asked} ask drums <end> <tool> ticket")
    assert seen[3][1].endswith(": the count is 7 <clerk>")
    assert episode.solved


def test_a_wrong_call_gives_way_to_a_note_and_leaves_no_trace():
    episode = new_episode()
    before = episode.context
    episode.act(encode("ask hats <end>"))
    note = "<tool> error : that call is not right , try again : drums <clerk>"
    assert episode.context == before + encode(note)
    assert episode.act(encode("ask drums <end>")) == 1.0
    assert episode.turn.tool == "lookup" and episode.solved
    clean = new_episode()
    clean.act(clean.right_call)
    assert episode.context == clean.context
    assert episode._contexts == clean._contexts


def test_a_second_wrong_call_loses_the_turn_but_not_the_game():
    episode, clean = new_episode(), new_episode()
    episode.act(encode("ask"))
    episode.act(encode("ask 7 <end>"))
    clean.act(clean.right_call)
    assert episode.context == clean.context
    assert not episode.solved and not episode.done


@pytest.mark.parametrize(
    ("call", "reward"),
    [
        ("ask drums <end>", 1.0),
        ("ask drums ask", 0.6),
        ("lookup drums <end>", 0.6),
        ("ask hats <end>", 0.6),
        ("ask hats", 0.4),
        ("ask 7 <end>", 0.4),
        ("ask <end>", 0.2),
        ("ask", 0.2),
        ("<end>", 0.0),
        ("drums ask drums", 0.0),
    ],
)
def test_reward_counts_what_is_right(call, reward):
    assert new_episode().act(encode(call)) == pytest.approx(reward)


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=game.MAX_SAMPLED))
def test_only_the_right_call_earns_all(sampled):
    episode = new_episode()
    is_right = sampled == episode.right_call
    reward = episode.act(sampled)
    assert (reward == 1.0) if is_right else (0.0 <= reward <= 0.8 + 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_calls_are_captured_exactly_as_given_and_taken(seed):
    player, log = clumsy_player(seed), []

    def recording(episodes):
        contexts = [episode.context for episode in episodes]
        assert len({len(context) for context in contexts}) == 1
        samples = player(episodes)
        log.extend(zip(contexts, samples, strict=True))
        return samples

    tasks = game.draw_tasks(3, random.Random(seed))
    played = rollout.play(recording, tasks, 4, seed)
    assert len(played.calls) == len(log)
    for call, (context, sampled) in zip(played.calls, log, strict=True):
        assert call.captured.token_ids.tolist() == context + sampled
        assert call.captured.sampled.tolist() == [False] * len(context) + [True] * len(sampled)


def test_a_batch_of_calls_is_a_forest_with_one_trunk_and_many_forks():
    stats = PrefixForest.from_calls(call.captured for call in play_clumsily(0).calls).stats()
    assert stats.num_roots == 1
    assert stats.num_branch_points >= 12
    assert stats.max_branch_depth >= 4
    assert stats.sharing > 10


def test_scripted_plays_solve_every_game_in_one_call_a_turn():
    tasks = game.draw_tasks(len(game.ITEMS), random.Random(0))
    played = rollout.play(rollout.scripted_player, tasks, 2, 0)
    assert played.solved == 1.0 and played.reward == 1.0
    assert len(played.calls) == 2 * len(tasks) * len(game.TURNS)


@pytest.fixture(scope="module")
def model():
    return tiny_hybrid.build_model(VOCAB_SIZE, seed=0)


def test_samples_are_those_of_the_model_without_a_cache(model):
    tasks = game.draw_tasks(2, random.Random(1))
    episodes = [game.Episode(task, random.Random(1)) for task in tasks for _ in range(2)]
    for episode in episodes:
        episode.act(encode("ask"))
    player = rollout.model_player(model, seed=5)
    first = player(episodes)
    generator, rows = torch.Generator().manual_seed(5), [episode.context for episode in episodes]
    for _ in range(game.MAX_SAMPLED):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(rows), use_cache=False).logits[:, -1]
        picked = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        rows = [row + ids for row, ids in zip(rows, picked.tolist(), strict=True)]
    for episode, row, sampled in zip(episodes, rows, first, strict=True):
        new = row[len(episode.context) :]
        end = encode("<end>")[0]
        assert sampled == (new[: new.index(end) + 1] if end in new else new)
    generator.manual_seed(5)
    assert rollout.model_player(model, seed=5)(episodes) == first
    assert player(episodes) != first


def test_advantages_compare_a_call_with_its_own_group():
    call = CapturedCall([1], [2])
    scored = [
        rollout.ScoredCall(call, reward, group)
        for reward, group in [
            (1.0, (0, "ask")),
            (0.0, (0, "ask")),
            (0.6, (1, "ask")),
            (0.6, (1, "ask")),
            (0.2, (0, "lookup")),
        ]
    ]
    assert train_agent.advantages(scored) == pytest.approx([1.0, -1.0, 0, 0, 0], abs=1e-3)


def test_a_calls_weight_is_spread_over_its_tokens():
    calls = [CapturedCall([1], [2, 3]), CapturedCall([1], []), CapturedCall([1, 4], [5])]
    weights = train_agent.spread(calls, [3.0, 7.0, -6.0])
    assert weights.tolist() == [1.0, 1.0, -2.0]


@pytest.fixture(scope="module")
def compiled(model):
    return prefix_compile(model)


@pytest.fixture(scope="module")
def few_calls():
    return [call.captured for call in play_clumsily(2, num_tasks=1, num_episodes=2).calls]


def test_forest_and_calls_alone_agree(model, compiled, few_calls):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = compare.compare(model, compiled, few_calls, repeats=1)
    assert result.logprob_difference < 1e-5
    assert result.gradient_difference < 1e-4
    assert result.speedup == result.alone_seconds / result.forest_seconds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_small_error_shows_in_the_comparison(model, compiled, few_calls):
    def slightly_wrong(forest):
        return SimpleNamespace(logprobs=1.001 * compiled(forest).logprobs)

    result = compare.compare(model, slightly_wrong, few_calls, repeats=1)
    assert result.gradient_difference == pytest.approx(1e-3, rel=0.01)
    assert result.logprob_difference > 1e-3


def segments_file(path: Path) -> None:
    np.savez(
        path,
        tokens=np.asarray([70, 80, 90, 80, 60], dtype=np.uint32),
        seg_ptr=np.asarray([0, 2, 3, 5]),
        call_segs=np.asarray([0, 1, 0, 1, 2, 0]),
        call_ptr=np.asarray([0, 2, 5, 6]),
        n_out=np.asarray([1, 2, 0]),
    )


def test_calls_of_segments_read_as_the_same_calls_in_lines(tmp_path):
    segments_file(tmp_path / "calls.npz")
    lines = [
        {"prompt_ids": [70, 80], "output_ids": [90]},
        {"prompt_ids": [70, 80], "output_ids": [90, 80, 60]},
        {"prompt_ids": [70, 80], "output_ids": []},
    ]
    (tmp_path / "calls.jsonl").write_text("\n".join(map(json.dumps, lines)))
    read = [call_data.load_calls(tmp_path / name) for name in ("calls.npz", "calls.jsonl")]
    for a, b in zip(*read, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.sampled.tolist() == b.sampled.tolist()


def test_dense_ids_keep_the_forest():
    calls = [call.captured for call in play_clumsily(3).calls]
    spread_out = [CapturedCall.from_tokens(c.token_ids * 1000 + 7, c.sampled) for c in calls]
    dense, vocab_size = call_data.use_dense_ids(spread_out)
    used = {token for call in dense for token in call.token_ids.tolist()}
    assert used == set(range(vocab_size))
    assert PrefixForest.from_calls(dense).stats() == PrefixForest.from_calls(calls).stats()


def test_only_the_first_calls_within_the_limit_are_kept():
    calls = [CapturedCall([1] * n, [2]) for n in (3, 5, 2)]
    assert call_data.keep_first(calls, 13) == calls
    assert call_data.keep_first(calls, 10) == calls[:2]
    assert call_data.keep_first(calls, 9) == calls[:1]
    with pytest.raises(ForestError, match="at most 3 tokens, its first call has 4"):
        call_data.keep_first(calls, 3)
    with pytest.raises(ForestError, match="it holds no call"):
        call_data.keep_first([], 3)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def test_a_short_run_trains_measures_and_draws(console, tmp_path, monkeypatch):
    monkeypatch.setattr(train_agent, "NUM_TASKS", 1)
    monkeypatch.setattr(train_agent, "NUM_EPISODES", 2)
    output = tmp_path / "new" / "run.png"
    curve = train_agent.train_on_game(
        console, steps=2, warm_up=1, seed=0, repeats=1, output=output
    )
    assert curve.steps == [0, 2, 3]
    assert all(0.0 <= value <= 1.0 for value in curve.reward + curve.solved)
    text = console.file.getvalue()
    assert "GRPO 2" in text and "x faster" in text and "x fewer" in text
    assert output.read_bytes().startswith(b"\x89PNG")


def test_a_step_on_calls_from_a_file_says_what_it_cut(console, tmp_path):
    segments_file(tmp_path / "calls.npz")
    train_agent.train_on_file(
        console,
        tmp_path / "calls.npz",
        max_tokens=8,
        seed=0,
        repeats=1,
        output=tmp_path / "run.png",
    )
    text = " ".join(console.file.getvalue().split())
    assert "the first 2 of 3 calls have at most 8 tokens" in text
    assert "4 sampled tokens of 2 calls" in text
    assert (tmp_path / "run.png").exists()
