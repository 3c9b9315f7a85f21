"""The system prompt that both agents of the stock game share: rules, tool schemas, examples.

It is long on purpose: every call repeats it word for word, which is what sharing saves.
"""

from __future__ import annotations

from collections.abc import Sequence

NUM_EXAMPLES = 4

RULES = """
you work in a shop . the user wants to know how many of one item are left on the shelf .
the clerk talks to the user . the clerk can not see the shelf . the clerk must ask the helper .
the helper can see the shelf . the helper does not talk to the user .
every call is one tool , then one word for it , then <end> . never write more than one call .
never guess a count . use the count that the tool gives . never use a count from an example .
a call that is not right is taken away and the agent must try again . the second time is the last .
"""

SCHEMAS = """
tool ask : { used by : clerk , takes : { name : item , type : word } , gives : { count : number } ,
  about : the helper will see how many of the item are left and give the count to the clerk } .
tool lookup : { used by : helper , takes : { name : item , type : word } ,
  gives : { ticket : number , count : number } ,
  about : see the shelf . the ticket is not the count } .
tool report : { used by : helper , takes : { name : count , type : number } , gives : { } ,
  about : give the count to the clerk . this is the last call of the helper } .
tool answer : { used by : clerk , takes : { name : count , type : number } , gives : { } ,
  about : give the count to the user . this is the last call of the clerk } .
the item is one of : ITEMS .
the count is one of : COUNTS .
"""

EXAMPLE = """
example {number} . the clerk : <user> how many are left of {item} <clerk> ask {item} <end>
<tool> ticket {ticket} : the count is {count} <clerk> answer {count} <end>
the helper : <task> the clerk wants to know about {item} <helper> lookup {item} <end>
<tool> ticket {ticket} : the count is {count} <helper> report {count} <end>
"""


def system_prompt(items: Sequence[str], counts: Sequence[str]) -> str:
    """Return the prompt as words with single spaces; the examples are about the first items."""
    schemas = SCHEMAS.replace("ITEMS", " , ".join(items)).replace("COUNTS", " , ".join(counts))
    examples = [
        EXAMPLE.format(number=counts[i + 1], item=items[i], count=counts[-1 - i], ticket=counts[i])
        for i in range(NUM_EXAMPLES)
    ]
    return " ".join(" ".join(["<system>", RULES, schemas, *examples]).split())
