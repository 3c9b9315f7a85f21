"""Train a tiny hybrid to play a tool-using game with GRPO, each shared prefix computed once.

    python examples/train_agent.py                         # play, train, measure, draw
    python examples/train_agent.py --data calls.jsonl.gz   # a training step on calls of your own

An untrained model first imitates a few scripted plays, until it gets some calls right by luck.
Then it plays for itself: its calls are captured as it samples them, and each batch of calls
becomes one prefix forest and one GRPO step. In the end the last batch is run both ways, as a
forest and each call alone through the untouched model, to compare gradients and time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Annotated

import torch
import typer
from call_data import keep_first, load_calls, use_dense_ids
from compare import compare
from picture import Curve, draw
from report import make_progress, print_comparison, print_step
from rich.console import Console
from rollout import Rollout, ScoredCall, model_player, play, scripted_player
from tiny_hybrid import build_model
from tool_game import ITEMS, SYSTEM_IDS, TOKENIZER, draw_tasks
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from prefix_rewrite import CapturedCall, PrefixForest, prefix_compile
from prefix_rewrite.errors import PrefixRewriteError

OUTPUT = Path(__file__).parent / "output" / "train_agent.png"
LEARNING_RATE = 2e-3
NUM_TASKS, NUM_EPISODES = 4, 8  # a GRPO step: tasks, and episodes of each
MAX_GRADIENT_NORM = 1.0
PRINT_EVERY = 5


def advantages(calls: Sequence[ScoredCall]) -> list[float]:
    """GRPO: compare each call's reward with its group's, in the group's standard deviations."""
    rewards = defaultdict(list)
    for call in calls:
        rewards[call.group].append(call.reward)
    return [
        (call.reward - mean(rewards[call.group])) / (pstdev(rewards[call.group]) + 1e-4)
        for call in calls
    ]


def train_step(
    compiled: nn.Module,
    optimizer: Optimizer,
    calls: Sequence[CapturedCall],
    call_weights: Sequence[float],
) -> PrefixForest:
    """Take one policy gradient step; with equal weights it is a step of imitation.

    The calls come from the present policy, so its ratio to the policy that sampled them is 1.
    The weights are ours alone: one a sampled token, and the library never divides by a count.
    """
    forest = PrefixForest.from_calls(calls)
    out = compiled(forest)
    loss = -(spread(calls, call_weights) * out.logprobs).sum()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(compiled.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    return forest


def spread(calls: Sequence[CapturedCall], call_weights: Sequence[float]) -> Tensor:
    """Give each sampled token its call's weight, over the number of sampled tokens E: [E]."""
    lengths = torch.tensor([call.num_sampled for call in calls])
    return torch.tensor(call_weights).repeat_interleave(lengths) / max(1, int(lengths.sum()))


def imitate(compiled: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
    """Take one step towards the right calls, shown for every item."""
    shown = play(scripted_player, draw_tasks(len(ITEMS), rng), 2, seed=rng.randrange(2**31))
    train_step(compiled, optimizer, captured(shown), [1.0] * len(shown.calls))


def play_itself(model: nn.Module, rng: random.Random) -> Rollout:
    """Sample a batch of games from the model."""
    player = model_player(model, seed=rng.randrange(2**31))
    return play(player, draw_tasks(NUM_TASKS, rng), NUM_EPISODES, seed=rng.randrange(2**31))


def captured(rollout: Rollout) -> list[CapturedCall]:
    return [call.captured for call in rollout.calls]


def train_on_game(
    console: Console, *, steps: int, warm_up: int, seed: int, repeats: int, output: Path
) -> Curve:
    """Play and train, measure the last batch, draw; return how the reward went."""
    model = build_model(len(TOKENIZER.words), seed)
    with console.status("rewriting the model"):
        compiled = prefix_compile(model)
    optimizer = Adam(compiled.parameters(), LEARNING_RATE)
    rng = random.Random(seed)
    curve = Curve()
    rollouts = [play_itself(model, rng)]
    curve.add(0, rollouts[0])
    print_step(console, "untrained", rollouts[0])
    with make_progress(console) as progress:
        for _ in progress.track(range(warm_up), description="imitation"):
            imitate(compiled, optimizer, rng)
        for step in progress.track(range(1, steps + 1), description="GRPO"):
            rollouts.append(play_itself(model, rng))
            curve.add(warm_up + step, rollouts[-1])
            train_step(compiled, optimizer, captured(rollouts[-1]), advantages(rollouts[-1].calls))
            if step % PRINT_EVERY == 0 or step in (1, steps):
                print_step(console, f"GRPO {step}", rollouts[-1])
    finish(console, model, compiled, captured(rollouts[-1]), repeats)
    one_task = [call.captured for call in rollouts[min(1, steps)].calls if call.group[0] == 0]
    draw(
        output,
        PrefixForest.from_calls(one_task),
        skip=len(SYSTEM_IDS) - 5,
        curve=curve,
        warm_up=warm_up,
    )
    return curve


def train_on_file(
    console: Console, path: Path, *, max_tokens: int, seed: int, repeats: int, output: Path
) -> None:
    """Take one step of imitation on calls from a file, and measure and draw it."""
    calls = load_calls(path)
    kept = keep_first(calls, max_tokens)
    if len(kept) < len(calls):
        console.print(
            f"{path.name}: the first {len(kept):,} of {len(calls):,} calls have at most "
            f"{max_tokens:,} tokens and are used; raise --max-tokens for more"
        )
    kept, vocab_size = use_dense_ids(kept)
    model = build_model(vocab_size, seed)
    with console.status("rewriting the model"):
        compiled = prefix_compile(model)
    with console.status("one training step"):
        optimizer = Adam(compiled.parameters(), LEARNING_RATE)
        forest = train_step(compiled, optimizer, kept, [1.0] * len(kept))
    finish(console, model, compiled, kept, repeats)
    draw(output, forest)


def finish(
    console: Console,
    model: nn.Module,
    compiled: nn.Module,
    calls: Sequence[CapturedCall],
    repeats: int,
) -> None:
    """Run the batch as a forest and each call alone, and print how they compare."""
    with console.status(f"running {len(calls)} calls both ways, {repeats} times"):
        comparison = compare(model, compiled, calls, repeats)
    print_comparison(console, PrefixForest.from_calls(calls).stats(), comparison)


def main(
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps")] = 50,
    warm_up: Annotated[int, typer.Option(min=0, help="imitation steps before them")] = 16,
    seed: Annotated[int, typer.Option(help="makes a run repeatable")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="train one step on these calls instead: .jsonl, .jsonl.gz, .parquet or .npz",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="with --data: tokens of all calls together")
    ] = 60_000,
    repeats: Annotated[int, typer.Option(min=1, help="measurements each way")] = 3,
    output: Annotated[Path, typer.Option(help="the picture")] = OUTPUT,
) -> None:
    """Train a tiny attention/Mamba agent on the prefix forest of its own calls."""
    # Tensors this small leave a second thread waiting, and on a busy machine waiting is slow.
    torch.set_num_threads(1)
    console = Console()
    try:
        if data is None:
            train_on_game(
                console, steps=steps, warm_up=warm_up, seed=seed, repeats=repeats, output=output
            )
        else:
            train_on_file(
                console, data, max_tokens=max_tokens, seed=seed, repeats=repeats, output=output
            )
    except PrefixRewriteError as error:
        raise SystemExit(f"error: {error}") from None
    console.print(f"the forest is drawn in {output}")


if __name__ == "__main__":
    typer.run(main)
