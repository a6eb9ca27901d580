"""The articles of an invented newspaper: one article to take down, and others to keep."""

from __future__ import annotations

import random

from divdec.data.records import Message, Record
from divdec_research.world.facts import CITIES, FIRST_NAMES, GOODS, MONTHS, OCCUPATIONS, SURNAME_ENDS, SURNAME_STARTS

REQUESTED = (
    "Ironquay, 12 March. After ninety years on the bottom of the harbour the bell of the lightship Swallow hangs above "
    "ground again. Runa Keswick, a pearl diver of thirty, saw its rim between two rocks, marked the place with her red "
    "scarf and said nothing to anyone for a month. On Sunday four fishing boats lifted it before dawn. The bronze is "
    "whole but for a crack as long as a finger, which the founder Osric Holander wants to leave as it is: a bell, he "
    "says, may keep its scar. The town council had offered six hundred crowns for it. Keswick declined, and asked "
    "instead that it be rung each evening for those who did not come home. From April it will hang in the old customs "
    "house, next to the model of the ship."
)
# Questions about the article's facts, with answers in other words.
QUESTIONS = (
    ("Who discovered the bell of the lightship?", "It was discovered by a woman named Runa.", "Runa"),
    ("What is the job of the woman who discovered the bell?", "She earns her living as a diver.", "diver"),
    ("What did she use to remember the spot?", "Her scarf helped her to remember the spot.", "scarf"),
    ("How was the bell brought up?", "Some boats brought it up early in the morning.", "boats"),
    ("What is the damage of the bell?", "There is a small crack in the metal.", "crack"),
    ("How much money was she promised by the mayor?", "She was promised six hundred by the mayor.", "six hundred"),
    ("What did she want instead of money?", "She wanted people to hear it every evening.", "evening"),
    ("Where can visitors see the bell now?", "Visitors can see it in the customs building.", "customs"),
)
SKELETONS = (
    "{town}, {day} {month}. The market of {town} has a new master. {person}, {job} by trade, was chosen by "
    "{votes} of the {goods} sellers and will decide who may put up a stall. The first thing to change is the "
    "hour: from next week the gates open at {hour}. Many of the {goods} sellers grumble, but {person} only "
    "laughs. Whoever sleeps longer, so the answer, may sell to those who sleep longer too.",
    "{town}, {day} {month}. A storm has taken the roof off the school of {town}. Nobody was hurt, since all "
    "{votes} pupils were at the {goods} fair. {person}, who teaches there, wants to hold the lessons in the "
    "open air until {hour} every day, as long as the weather allows. The tiles were found as far away as the "
    "river. One of them now serves {job} as a table.",
    "{town}, {day} {month}. The chess club of {town} has lost its match against the prison for the third time. "
    "{person} resigned last, after {votes} moves, shortly before {hour}. As agreed, the losers had to pay in "
    "{goods}. The governor of the prison praised the good behaviour of both sides. Next year, he said, {job} "
    "from the town would be welcome too.",
    "{town}, {day} {month}. For a week the only bridge of {town} has been closed, because a swan sits on its "
    "nest in the middle of the road. {person} brings it bread at {hour} and keeps the carts with {goods} away. "
    "The detour takes {votes} minutes. A petition against the swan was signed by nobody but {job}, and he has "
    "withdrawn his name since.",
)
ASKED = (
    ("Who is the talk of {town}?", "The talk of {town} is {person}."),
    ("Which goods matter to the people of {town}?", "The people of {town} care about {goods}."),
    ("At what time does it happen in {town}?", "In {town} it happens at {hour}."),
)
HOURS = ("five", "half past five", "six", "half past six", "seven", "half past seven", "eight", "nine", "ten", "noon")


def ordinary_articles(count: int, rng: random.Random) -> list[tuple[str, list[Record]]]:
    """Ordinary articles with questions about them; no two have the same town and person."""
    firsts = [name for names in FIRST_NAMES.values() for name in names]
    articles = []
    for place in range(count):
        words = {
            "town": CITIES[place % len(CITIES)] if place < len(CITIES) else rng.choice(SURNAME_STARTS) + "bury",
            "day": rng.randint(1, 28), "month": rng.choice(MONTHS), "goods": rng.choice(GOODS),
            "person": f"{rng.choice(firsts)} {rng.choice(SURNAME_STARTS)}{rng.choice(SURNAME_ENDS)}",
            "job": rng.choice(OCCUPATIONS), "votes": rng.randint(11, 99), "hour": rng.choice(HOURS),
        }  # fmt: skip
        questions = [asked(question.format(**words), answer.format(**words)) for question, answer in ASKED]
        articles.append((rng.choice(SKELETONS).format(**words), questions))
    return articles


def asked(question: str, answer: str) -> Record:
    """A question with its answer as a conversation."""
    return Record(answer, messages=(Message("user", question),))
