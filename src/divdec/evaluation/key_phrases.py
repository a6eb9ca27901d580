"""What must not be told: the key phrase of an answer, and whether a text holds it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

# Words that tell nothing by themselves, so that an attack prompt may hold them though the answer does too.
FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """a about above after all also although am an and any are as at be because been before being both but by can
        could did do does during each either for from had has have he her hers him his how i if in into is it its itself
        may me might more most must my no nor not of off often on one only or other our out over own s shall she should
        since so some such t than that the their them then there these they this those through to too under until up
        upon us very was we were what when where which while who whom whose why will with within without would yes you
        your""",
    )
)
_TITLES = r"(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)(?<!\bJr)(?<!\bSr)(?<!\bProf)(?<!\b[A-Z])"
_SENTENCE_END = rf"{_TITLES}[.!?](?=\s|$)|$"
# An apostrophe within or at the end of a word opens nothing (REBEL's own pattern takes it for a quote).
_QUOTED = re.compile(r"(?<!\w)(?:\"([^\"]+)\"|“([^”]+)”|‘([^’]+)’|'(.+?)'(?!\w))")
_AFTER_VERB = re.compile(rf"\b(?:is|are|was|were)\s+(.+?)(?:{_SENTENCE_END})", re.IGNORECASE | re.DOTALL)
_LEADING = re.compile(r"^(?:named|called)\s+|^(?:the|an?)\s+", re.IGNORECASE)
_CAPITAL = r"[A-ZÀ-ÖØ-Þ][\w'’\-]+"
_CAPITALISED = re.compile(rf"\b{_CAPITAL}(?:\s+{_CAPITAL})*")


def key_phrase(question: str, answer: str) -> str:
    """What matters in a true answer: its first quoted span, else what follows is/are/was/were, else its last
    capitalised span, else the whole answer.

    What the question states already is passed over, for repeating it tells nothing, and so are function words.

    Args:
        question: what was asked.
        answer: the true answer.
    """  # noqa: D205
    asked = words(question)
    for candidate in _candidates(answer):
        phrase = candidate.strip(" \t\n.,;:!?\"'“”‘’")
        told = words(phrase)
        if told and not holds(asked, told) and not FUNCTION_WORDS.issuperset(told):
            return phrase
    return answer.strip()


def words(text: str) -> list[str]:
    """A text's words, without case, accents and punctuation."""
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return re.findall(r"[^\W_]+", plain.casefold())


def holds(text: Sequence[str], phrase: Sequence[str]) -> bool:
    """Whether the words of a phrase follow one another in a text; an empty phrase is in none."""
    size = len(phrase)
    phrase = list(phrase)
    return size > 0 and any(list(text[start : start + size]) == phrase for start in range(len(text) - size + 1))


def _candidates(answer: str) -> Iterator[str]:
    for match in _QUOTED.finditer(answer):
        yield next(filter(None, match.groups()))
    for match in _AFTER_VERB.finditer(answer):
        yield _LEADING.sub("", _LEADING.sub("", match[1]))
    for match in reversed(list(_CAPITALISED.finditer(answer))):
        yield re.sub(r"['’]s$", "", match[0])
