"""Play episodes with a model and capture every call exactly as it was sampled."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from tool_game import MAX_SAMPLED, SYSTEM_IDS, TOKENIZER, Episode, Task
from torch import Tensor, nn

from prefix_rewrite import CapturedCall

END = TOKENIZER.ids["<end>"]
Player = Callable[[Sequence[Episode]], list[list[int]]]


@dataclass(frozen=True)
class ScoredCall:
    """One captured call and what the game gave for it.

    Calls of one task at the same turn form a group: GRPO compares them with each other.
    """

    captured: CapturedCall
    reward: float
    group: tuple[int, str]


@dataclass(frozen=True)
class Rollout:
    """All calls of a batch of episodes, and the fraction of the episodes that were solved."""

    calls: list[ScoredCall]
    solved: float

    @property
    def reward(self) -> float:
        """Mean reward of a call."""
        return mean(call.reward for call in self.calls)


def play(player: Player, tasks: Sequence[Task], num_episodes: int, seed: int) -> Rollout:
    """Let a player play each task `num_episodes` times, all episodes side by side."""
    rng = random.Random(seed)
    episodes = [
        (number, Episode(task, rng))
        for number, task in enumerate(tasks)
        for _ in range(num_episodes)
    ]
    calls: list[ScoredCall] = []
    while active := [(number, episode) for number, episode in episodes if not episode.done]:
        # Those who are behind go first, so that all contexts of a batch are equally long.
        turn = min(episode.turn_index for _, episode in active)
        batch = [(number, episode) for number, episode in active if episode.turn_index == turn]
        samples = player([episode for _, episode in batch])
        for (number, episode), sampled in zip(batch, samples, strict=True):
            captured = CapturedCall(episode.context, sampled)
            group = (number, episode.turn.tool)
            calls.append(ScoredCall(captured, episode.act(sampled), group))
    return Rollout(calls, mean(episode.solved for _, episode in episodes))


def scripted_player(episodes: Sequence[Episode]) -> list[list[int]]:
    """Make the right call everywhere: what the model imitates before it plays itself."""
    return [episode.right_call for episode in episodes]


@torch.no_grad()
def model_player(model: nn.Module, seed: int) -> Player:
    """Sample calls from a model that reads the system prompt once, as inference servers do."""
    generator = torch.Generator().manual_seed(seed)
    cache = model(input_ids=torch.tensor([SYSTEM_IDS]), use_cache=True).cache

    def player(episodes: Sequence[Episode]) -> list[list[int]]:
        contexts = torch.tensor([episode.context for episode in episodes])
        return sample(model, cache, contexts, generator)

    return player


@torch.no_grad()
def sample(
    model: nn.Module, prompt_cache: Any, contexts: Tensor, generator: torch.Generator
) -> list[list[int]]:
    """Sample a call after each context, up to and with `<end>`, at temperature 1.

    Args:
        model: a transformers model.
        prompt_cache: its cache after the system prompt; stays as it is.
        contexts: [B, T] token ids, each row starting with the system prompt.
        generator: makes the samples repeatable.
    """
    cache = copy.deepcopy(prompt_cache)
    cache.reorder_cache(torch.zeros(len(contexts), dtype=torch.long))
    start, tokens = len(SYSTEM_IDS), contexts[:, len(SYSTEM_IDS) :]
    sampled = []
    for _ in range(MAX_SAMPLED):
        position_ids = torch.arange(start, start + tokens.shape[1])[None]
        logits = model(
            input_ids=tokens, position_ids=position_ids, cache=cache, logits_to_keep=1
        ).logits
        start += tokens.shape[1]
        tokens = torch.multinomial(logits[:, -1].softmax(-1), 1, generator=generator)
        sampled.append(tokens)
    rows = torch.cat(sampled, dim=1).tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows]
