"""Agent-shaped captured calls at any scale, of random tokens: turns, retries, sub-agents, edits.

They exercise planning; nothing can be learnt from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prefix_rewrite.calls import CapturedCall
from prefix_rewrite.segments import IntArray


@dataclass(frozen=True)
class EpisodeShape:
    """What episodes look like; lengths are in tokens, and vary by a quarter up and down.

    The defaults give the magnitudes of a public training gate of 16 episodes: 40.4 million call
    tokens, a forest of 3.7 million, 0.99 million sampled.

    Attributes:
        num_episodes: episodes, alternately of the same task as the one before and of a new one.
        turns: turns of the main agent.
        system: system prompt with its tools, one for the agent and one for sub-agents.
        task: task description.
        sampled: tokens that a turn samples.
        observation: tokens that the environment answers with.
        retry: probability that a turn is sampled again from the same context.
        sub_agent: probability that a turn starts a sub-agent, which has its own context.
        sub_agent_turns: turns of a sub-agent.
        best_of: samples of the last turn, of which each is kept.
        max_context: context above which the older half of the turns becomes a summary.
        vocab_size: ids are below it.
    """

    num_episodes: int = 16
    turns: int = 44
    system: int = 3500
    task: int = 800
    sampled: int = 250
    observation: int = 540
    retry: float = 0.08
    sub_agent: float = 0.3
    sub_agent_turns: int = 15
    best_of: int = 4
    max_context: int = 15_500
    vocab_size: int = 131_072


DEFAULT_SHAPE = EpisodeShape()


def agent_calls(shape: EpisodeShape = DEFAULT_SHAPE, *, seed: int = 0) -> Iterator[CapturedCall]:
    """Yield the captured calls of all episodes; equal shapes and seeds give equal calls.

    Example:
        >>> shape = EpisodeShape(num_episodes=1, turns=3, sub_agent=0.0, retry=0.0, best_of=2)
        >>> len(list(agent_calls(shape)))
        4
    """
    writer = _Writer(shape, np.random.default_rng(seed))
    systems = writer.text(shape.system), writer.text(shape.system)
    task = writer.text(shape.task)
    for episode in range(shape.num_episodes):
        if episode % 2 == 0:
            task = writer.text(shape.task)
        yield from writer.episode(systems, task)


@dataclass(frozen=True)
class _Writer:
    shape: EpisodeShape
    rng: np.random.Generator

    def text(self, length: int) -> IntArray:
        low, high = max(1, length * 3 // 4), max(2, length * 5 // 4)
        return self.rng.integers(self.shape.vocab_size, size=self.rng.integers(low, high))

    def episode(
        self, systems: tuple[IntArray, IntArray], task: IntArray
    ) -> Iterator[CapturedCall]:
        """Yield the calls of a main agent and of its sub-agents, in the order they are made."""
        shape, rng = self.shape, self.rng
        context = [systems[0], task]
        for turn in range(shape.turns):
            is_last = turn == shape.turns - 1
            attempts = shape.best_of if is_last else 1 + int(rng.random() < shape.retry)
            for _ in range(attempts):
                answer = self.text(shape.sampled)
                yield CapturedCall(np.concatenate(context), answer)
            context.append(answer)
            if rng.random() < shape.sub_agent:
                yield from self.sub_agent(systems[1])
            context.append(self.text(shape.observation))
            if sum(map(len, context)) > shape.max_context:
                context[2 : len(context) // 2] = [self.text(shape.task)]

    def sub_agent(self, system: IntArray) -> Iterator[CapturedCall]:
        context = [system, self.text(self.shape.task)]
        for _ in range(self.shape.sub_agent_turns):
            answer = self.text(self.shape.sampled)
            yield CapturedCall(np.concatenate(context), answer)
            context += [answer, self.text(self.shape.observation)]
