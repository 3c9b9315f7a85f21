"""The stock game: two agents must make four calls in the right order to answer one question.

    user -> clerk: ask ITEM -> helper: lookup ITEM -> helper: report COUNT -> clerk: answer COUNT

The clerk cannot see the shelf, so it hands the question to a helper, a sub-agent with a context of
its own. Both contexts start with the same long system prompt. A wrong call never stays in a
context: for its one retry the agent sees an error note in the call's place, and whatever the
retry, the game goes on from the right call. Every tool result bears a random ticket, so episodes
of one task part for good at their first result. Together this makes the calls of a batch a real
prefix forest, with long chains, forks after any token, and dead ends.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from stock_prompt import system_prompt

ITEMS = ("apples", "bricks", "candles", "drums", "eggs", "forks", "gloves", "hats")
COUNTS = tuple(str(count) for count in range(10))
MAX_SAMPLED = 3  # a right call is `tool word <end>`
MAX_TRIES = 2
PART_CREDIT = 0.2  # for each of: the right tool, a word of the right kind, the right word, <end>

USER = "<user> how many are left of {item} <clerk>"
TASK = "<task> the clerk wants to know about {item} <helper>"
RESULT = "<tool> ticket {ticket} : the count is {count} <{reader}>"
ERROR = "<tool> error : that call is not right , try again : {word} <{agent}>"


class Tokenizer:
    """One token for each word."""

    def __init__(self, text: str):
        self.words = sorted(set(text.split()))
        self.ids = {word: index for index, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        return [self.ids[word] for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[index] for index in ids)


SYSTEM_TEXT = system_prompt(ITEMS, COUNTS)
TOKENIZER = Tokenizer(f"{SYSTEM_TEXT} {ERROR.format(word='', agent='clerk')}")
SYSTEM_IDS = TOKENIZER.encode(SYSTEM_TEXT)


@dataclass(frozen=True)
class Turn:
    """One call that must be made: who makes it, with which tool, and what word goes with it."""

    agent: str
    tool: str
    takes: str


TURNS = (
    Turn("clerk", "ask", "item"),
    Turn("helper", "lookup", "item"),
    Turn("helper", "report", "count"),
    Turn("clerk", "answer", "count"),
)


@dataclass(frozen=True)
class Task:
    """One question of the user; only the shelf knows the count."""

    item: str
    count: str


def draw_tasks(num_tasks: int, rng: random.Random) -> list[Task]:
    """Draw tasks about different items."""
    return [Task(item, rng.choice(COUNTS)) for item in rng.sample(ITEMS, num_tasks)]


@dataclass
class Episode:
    """One play of a task. Read `context`, sample a call, hand it to `act`, until `done`.

    Attributes:
        task: the question.
        rng: draws the tickets.
        turn_index: turns that are over.
        tries: wrong calls at this turn so far.
        solved: no turn was lost so far.
    """

    task: Task
    rng: random.Random
    turn_index: int = 0
    tries: int = 0
    solved: bool = True
    _contexts: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._contexts["clerk"] = SYSTEM_IDS + TOKENIZER.encode(USER.format(item=self.task.item))

    @property
    def done(self) -> bool:
        return self.turn_index == len(TURNS)

    @property
    def turn(self) -> Turn:
        return TURNS[self.turn_index]

    @property
    def context(self) -> list[int]:
        """Token ids that the agent whose turn it is sees now."""
        context = self._contexts[self.turn.agent]
        if not self.tries:
            return list(context)
        return context + TOKENIZER.encode(ERROR.format(word=self._word, agent=self.turn.agent))

    @property
    def right_call(self) -> list[int]:
        """Token ids of the one right call."""
        return TOKENIZER.encode(f"{self.turn.tool} {self._word} <end>")

    def act(self, sampled_ids: list[int]) -> float:
        """Play one sampled call; return its reward: 1 if right, else part of it."""
        right_call = self.right_call
        if sampled_ids == right_call:
            self._go_on(right_call)
            return 1.0
        credit = self._part_credit(sampled_ids)
        self.tries += 1
        if self.tries == MAX_TRIES:
            self.solved = False
            self._go_on(right_call)
        return credit

    @property
    def _word(self) -> str:
        return self.task.item if self.turn.takes == "item" else self.task.count

    def _part_credit(self, sampled_ids: list[int]) -> float:
        words = TOKENIZER.decode(sampled_ids).split()
        tool, word, end = (words + [""] * MAX_SAMPLED)[:MAX_SAMPLED]
        kind = ITEMS if self.turn.takes == "item" else COUNTS
        parts = (tool == self.turn.tool, word in kind, word == self._word, end == "<end>")
        return PART_CREDIT * sum(parts)

    def _go_on(self, right_call: list[int]) -> None:
        """Put the right call in its agent's context, and its outcome where it is to be read."""
        self._contexts[self.turn.agent] += right_call
        if self.turn.tool == "ask":
            task = TASK.format(item=self.task.item)
            self._contexts["helper"] = SYSTEM_IDS + TOKENIZER.encode(task)
        elif self.turn.tool == "lookup":
            self._show_result("helper")
        elif self.turn.tool == "report":
            self._show_result("clerk")
        self.turn_index += 1
        self.tries = 0

    def _show_result(self, reader: str) -> None:
        ticket = self.rng.choice(COUNTS)
        result = RESULT.format(ticket=ticket, count=self.task.count, reader=reader)
        self._contexts[reader] += TOKENIZER.encode(result)
