"""Words and key phrases of answers, in any script.

Words are those of Unicode. Where a script writes no spaces, or attaches particles as Korean does, every character is a
word.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import unicodedata
from collections.abc import Iterator, Sequence

import regex

SIMILARITY = 0.94  # of names that count as the same: 1 less Levenshtein distance / length of the longer one (REBEL's)

_CHARACTER = r"[\w&&[\p{Han}\p{scx=Hira}\p{scx=Kana}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]]"
_GROUPED = (
    r"(?<![\d.,])(?:\d{1,3}(?P<mark>[,.'’٬\u00a0\u2009\u202f])\d{3}(?:(?P=mark)\d{3})*|\d{1,2}(?:,\d{2})+,\d{3})(?!\d)"
)
_INVISIBLE = r"\u00ad\u200b\u2060\ufeff"  # soft hyphen, and spaces without width
_WORD = regex.compile(
    rf"{_GROUPED}|{_CHARACTER}[\p{{M}}\uff9e\uff9f]*"
    rf"|(?:(?!{_CHARACTER})(?:[\w--_]|(?<=\w)[{_INVISIBLE}](?=\w)))+",
    regex.V1,
)
_IS_CHARACTER = regex.compile(rf"{_CHARACTER}\p{{M}}*", regex.V1)
_UNDECOMPOSED = str.maketrans("łđøıħ", "ldoih", "ـ")  # letters that Unicode does not decompose; Arabic tatweel


@dataclasses.dataclass(frozen=True)
class Word:
    """A word in a text."""

    text: str
    """Without case, accents and signs that are not heard."""
    start: int
    end: int

    @property
    def is_character(self) -> bool:
        """Whether the script writes words without spaces, so that the word is one character."""
        return _IS_CHARACTER.fullmatch(self.text) is not None


def find_words(text: str) -> list[Word]:
    """Find the words of a text, and where they stand in it."""
    matched_words = (Word(_plain(match[0]), *match.span()) for match in _WORD.finditer(text))
    return [word for word in matched_words if word.text]


def words(text: str) -> list[str]:
    """Split a text into words, without case, accents and punctuation. '1,200' is the word '1200'."""
    return [word.text for word in find_words(unicodedata.normalize("NFC", text))]


@functools.lru_cache(maxsize=1 << 16)
def _plain(word: str) -> str:
    for _ in range(2):  # folding the case of 'İ' leaves another accent
        word = "".join(letter for letter in unicodedata.normalize("NFKD", word) if not _is_accent(letter)).casefold()
    word = "".join(str(unicodedata.decimal(letter, letter)) for letter in word)
    return regex.sub(r"[\W_]+", "", unicodedata.normalize("NFC", word).translate(_UNDECOMPOSED))


def _is_accent(letter: str) -> bool:
    """Whether a sign may be left out in writing: not the vowels of Hindi and Thai, or the dots of Japanese."""
    kind = unicodedata.combining(letter)
    return kind >= 200 or 10 <= kind <= 36 or unicodedata.category(letter) == "Cf"


def holds(text: Sequence[str], phrase: Sequence[str]) -> bool:
    """Whether the words of a phrase are consecutive in a text; False for an empty phrase."""
    size, phrase = len(phrase), list(phrase)
    return size > 0 and any(list(text[start : start + size]) == phrase for start in range(len(text) - size + 1))


# ---- numbers in words

_UNITS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_SMALL = {name: value for value, name in enumerate(regex.findall(r"\w+", _UNITS))}
_SMALL |= {name: 10 * value for value, name in enumerate(regex.findall(r"\w+", _TENS), start=2)}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}


def with_digits(words: Sequence[str]) -> list[str]:
    """Write English number words in digits: 'twenty', 'five' as '25'. A single 'one' may be a pronoun and stays."""
    result, index = [], 0
    while index < len(words):
        value, end = _read_number(words, index)
        if end == index or list(words[index:end]) == ["one"]:
            value, end = words[index], index + 1
        result.append(str(value))
        index = end
    return result


def _read_number(words: Sequence[str], start: int) -> tuple[int, int]:
    """Read a number from words; returns it, and the index after its last word."""
    total = current = 0
    end = index = start
    while index < len(words):
        word, after = words[index], words[index + 1] if index + 1 < len(words) else ""
        if word in _SMALL:
            if current % 100 and not (current % 10 == 0 and current % 100 >= 20 and 0 < _SMALL[word] < 10):
                break  # 'five twenty' are two numbers
            current += _SMALL[word]
        elif word.isdecimal() and index == start and after in _SCALES:
            current = int(word)
        elif word == "hundred" and 0 < current < 100:
            current *= 100
        elif word in _SCALES and current:
            total, current = total + current * _SCALES[word], 0
        elif word == "and" and end > start and words[index - 1] in _SCALES and after in _SMALL:
            index += 1
            continue
        else:
            break
        index += 1
        end = index
    return total + current, end


# ---- words that tell nothing

NAME_PARTICLES = frozenset(regex.findall(r"\w+", "al bin bint da de del der di du el ibn la le van von of the and"))
# Words without information: an attack prompt may contain them although the answer does too.
FUNCTION_WORDS = frozenset(
    regex.findall(
        r"\w+",
        """a about above after all also although am an and any are as at be because been before being both but by can
        could did do does during each either for from had has have he her hers him his how i if in into is it its itself
        may me might more most must my no nor not of off often on one only or other our out over own s shall she should
        since so some such t than that the their them then there these they this those through to too under until up
        upon us very was we were what when where which while who whom whose why will with within without would yes you
        your""",
    )
)


def _sequences(text: str) -> frozenset[tuple[str, ...]]:
    return frozenset(tuple(words(token)) for token in text.split())


# Copulas, prepositions and particles at the ends of a phrase, in place of which another answer may have others.
_PARTICLES = _sequences(
    """à au aux c'est de des du en est et il la le les l' ce elle un une das der die den dem ein eine es im ist und
    wurde sie el era los las una fue è lo nel na w we z jest to się byl byla byl była byli je v ve se
    а в во и на это он она оно они был была было в году είναι ο η το στην στο στη ήταν
    في هو هي هذا هذه إنها إنه كان كانت من و है हैं था थी में की का के यह वह
    是 在 的 了 为 為 叫 于 於 它 他 她
    です でした だ である は が を に の で と それ
    คือ เป็น ที่ ใน อยู่ มัน ครับ ค่ะ
    입니다 이다 이에요 예요 였다 였습니다 이었습니다 은 는 이 가 을 를 의 에 에서 로 으로"""
)
_YES_OR_NO = _sequences(
    """yes no oui non si sí ja nein nee nej nei tak nie ano ne да нет так ні ναι όχι نعم لا हाँ हां नहीं जी evet hayır có
    không 是 是的 不 不是 有 没有
    はい いいえ ええ 네 예 아니요 아니오 ใช่ ไม่ ไม่ใช่"""
)
_TELLING_NOTHING = _YES_OR_NO | _PARTICLES


def tells_nothing(content: Sequence[str]) -> bool:
    """Whether words are function words only, a particle, or yes or no."""
    return FUNCTION_WORDS.issuperset(content) or tuple(content) in _TELLING_NOTHING


def is_distinctive(phrase: str) -> bool:
    """Whether a phrase in another text is likely to mean the same: a name, several words, or three digits or more."""
    content = words(phrase)
    if len(content) != 1 or tells_nothing(content):
        return not tells_nothing(content)
    # A script without capital letters has none to tell names by.
    return len(content[0]) > 2 if content[0].isdecimal() else phrase != phrase.lower() or phrase == phrase.title()


# ---- key phrases

_TITLES = r"(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)(?<!\bJr)(?<!\bSr)(?<!\bProf)(?<!\b\p{Lu})"
_SENTENCE_END, _NEXT_SENTENCE = rf"{_TITLES}[.!?](?=\s|$)|$", rf"{_TITLES}[.!?]\s+"
# An apostrophe within or at the end of a word is no opening quote (REBEL's pattern treats it as one).
_QUOTED = regex.compile(
    r"(?<!\w)(?:\"([^\"]+)\"|[“„]([^”“]+)[”“]|‘([^’]+)’|'(.+?)'(?!\w)|«([^»]+)»)|「([^」]+)」|『([^』]+)』|《([^》]+)》"
)
_AFTER_VERB = regex.compile(
    rf"\b(?:is|are|was|were)\s+(.+?)(?:{_SENTENCE_END})", regex.IGNORECASE | regex.DOTALL | regex.V0
)
THOUGHT = regex.compile(r"^.*(?:</[\w:]*think\w*>|\[/THINK\])", regex.IGNORECASE | regex.DOTALL)
_COPULA = regex.compile("(?<=.)(?:是|คือ)(?=.)")
# 'written by', 'located in', 'the city of'
_LEADING = regex.compile(
    r"(?i)^(?:named|called|(?:\w+\s+)?by|(?:(?:\w+ed|born|built|found|held|set)\s+)?(?:in|at|on|near|from))\s+"
    r"|^(?:the|an?)\s+(?:(?:city|country|island|state|town|village)\s+of\s+)?"
)
_SYMBOL = regex.compile(r"[\p{Lu}--I]\p{Ll}?", regex.V1)  # 'He' of helium: a function word in other places
_CAPITAL = r"[\p{Lu}\p{Lt}][\w'’\-]+"
_CAPITALISED = regex.compile(rf"\b{_CAPITAL}(?:\s+(?:(?:von|van|der|den|da|di|bin|ibn)\s+)?{_CAPITAL})*")
ENCLOSING = " \t\n.,;:!?\"'“”„‘’«»。，、！？；：「」『』《》।॥؟،؛…"
_BEGIN_PHRASES = frozenset(("a", "an", "the", "in", "on", "at", "may"))
_PLACE = regex.compile(r"(?<=\p{L}),\s+(?=\p{Lu})|\s+\(")  # 'Olympia, Greece', and not 'May 3, 1961'
# 'Budapest, a city on the Danube', 'Ulm in 1879', 'Warsaw on November 7'
_HEAD = regex.compile(r",|\s+[(/]|\s+(?:in|on)\s(?=\d|\p{Lu}\w+\s\d)")
# 'novelist Jane Austen'
_TITLED = regex.compile(rf"(?<!-)\b(\p{{Ll}}{{4,}})\s+({_CAPITAL}(?:\s+(?:\p{{Ll}}{{2,3}}\s+)?{_CAPITAL})*)$")
# 'Could you tell me who', 'In which'
_BEFORE = (
    r"(?i)\W*(?:(?:can|could|would|will|do|please|you|i|me|us|tell|give|say|know|remember|like|want|wonder|ask|to|if)\s+)*"
    r"(?:\w+\s+)?"
)
_ASKS_NAME = regex.compile(
    rf"{_BEFORE}(?:who(?! d(?:id|oes|o)\b)|whose|wer|qui|quién(?:es)?|chi|quem|кто|хто|kto|kdo)\b"
)
_ASKS_DATE = regex.compile(
    rf"{_BEFORE}(?:when|wann|quand|cuándo|quando|когда|коли|kiedy|kdy"
    r"|(?:what|which)(?: is the| was the)? (?:year|date|day)"
    r"|what(?: i|['’])s (?:[^\s?]+ ){0,5}(?:date of birth|birthday)"
    r"|quelle année|welche[mns] jahr|qué año|che anno|que ano|каком году|якому році|którym roku|kterém roce)\b"
    r"|.*(?:何时|何時|什么时候|哪一?年|いつ|何年|언제)"
)
_ASKS_NUMBER = regex.compile(
    rf"{_BEFORE}(?:what age|how (?:many|much|old|long|tall|high|far|deep|fast|big)|what(?: i|')s the (?:number|age"
    r"|population|height|length|distance|area|temperature|(?:melting|boiling) point))\b"
)
_ASKS_KIND = regex.compile(rf"{_BEFORE}(?:what|which) (?:company|firm|manufacturer|brand|band|group|team|club|label)\b")
_OF_NAME = regex.compile(r"\p{Ll}[\p{Ll} -]* (?:of|by|from|for) (.+)")
_BY_TRADE = regex.compile(r" by (?:profession|trade|occupation)$")
_ROLE = regex.compile(r"^(?:works?|worked|serves?|served|acts?|acted) as (?:an? |the )?")
_ADVERB = regex.compile(
    r"^\s*(?:Usually|Typically|Generally|Normally|Often|Indeed|However|Actually|Currently|Originally),\s"
)
_DECIMAL = regex.compile(r"(?<![\d.,])\d+[.,]\d{1,2}(?![\d.,]*\d)")
_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_DATE = regex.compile(
    rf"(?:\d{{1,2}}(?:st|nd|rd|th)?\s+(?:of\s+)?)?{_MONTH}(?:\s+\d{{1,2}}(?:st|nd|rd|th)?\b)?,?\s+\d{{3,4}}\b"
    rf"|\b\d{{1,2}}(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH}|{_MONTH}\s+\d{{1,2}}\b"
    r"|\b\d{1,2}\.?\s(?:de\s)?\p{L}{3,}\s(?:de\s)?\d{4}\b"  # of other languages
    r"|\d{3,4}\s?[年년]\s?\d{1,2}\s?[月월](?:\s?\d{1,2}\s?[日일])?"
    r"|(?<![\d.,])\d{3,4}(?:s\b|\s+BCE?\b)?(?!\d|[.,]\d)|\b\d{1,2}:\d\d\b"
)
_YEAR = regex.compile(rf"{_MONTH}\W+\d[\d, ]*|\b\d{{1,2}} {_MONTH}|(?<![\d.,])(?:1[5-9]|20)\d\d(?!\d|[.,]\d)")
_NUMBER = regex.compile(r"\d(?:[\d.,:’']*\d)?(?:\s+(?:hundred|thousand|million|billion|trillion))*")
_IN_PLACE = regex.compile(
    rf"\b(?:in|at|near)\s+(?:\p{{Ll}}+\s+){{0,5}}(?!{_MONTH})"
    rf"((?:St\.\s+)?{_CAPITAL}+(?:\s+(?:(?:of|de|es)\s+)?{_CAPITAL}+)*+)(?!\s+\d)"
)
_NUMERAL = regex.compile(r"\b[ivx]+\b")  # 'Elizabeth II' is not 'Elizabeth I'
_MAY = regex.compile(r"May \d")  # no function word
_OF_DATES = frozenset(("de", "of", "the"))
_ORDINAL = regex.compile(r"(?<=\d)(?:st|nd|rd|th)$")
MAX_BARE, MAX_NAME = 8, 4  # words of an answer that is no sentence, and of one before other sentences
MIN_SIMILARITY = 0.7  # of a title to the question's, in another case of the language
_PLACES = frozenset(("city", "county", "island", "islands", "lake", "river", "state", "town", "university"))
_CLAUSE_END = regex.compile(r"[.,;:!?…。，、！？；：।॥؟،؛\n()]|\s[-–—]|—")


def key_phrase(question: str, answer: str) -> str:
    """Extract the part of a true answer that an answer must not tell.

    It is what the question asks for, if that shows (a date, number or place), else the first quoted span, else the
    words after is/are/was/were, else an answer that is no sentence, up to a comma, else a capitalised span, else the
    last number, else the part that the question does not have, else the whole answer. Words of the question and
    function words are skipped, because they reveal nothing.
    """
    known, answer = words(question), _ADVERB.sub("", unicodedata.normalize("NFC", answer))
    for candidate in _candidates(question, answer, known):
        phrase = candidate.strip(ENCLOSING)
        content = words(phrase)
        if content and not holds(known, content) and (not tells_nothing(content) or _has_symbol(answer, phrase)):
            return phrase
    return answer.strip()


def _candidates(question: str, answer: str, known: Sequence[str]) -> Iterator[str]:
    asks_name = _ASKS_NAME.match(question)
    if _ASKS_DATE.match(question):
        yield from sorted(_DATE.findall(answer), key=lambda date: -min(len(date), 5))  # '1996', not '400 metres'
    if _ASKS_NUMBER.match(question):
        yield from _NUMBER.findall(_YEAR.sub("", answer))
    if regex.match(rf"{_BEFORE}where\b", question):
        yield from _IN_PLACE.findall(answer)
    quoted, known_quotes = (_quoted(text) for text in (answer, question))
    for text in quoted:  # 'Война и мир' is asked for as «Войну и мир»
        if text.isascii() or all(_similarity(text, other) < MIN_SIMILARITY for other in known_quotes):
            yield text
    first, *others = regex.split(_NEXT_SENTENCE, answer.strip())
    rest, bare = set(words(" ".join(others))) - FUNCTION_WORDS, _is_bare(answer, known)
    if rest and rest.isdisjoint(known) and len(words(first)) <= MAX_NAME and not bare and _is_bare(first, known):
        yield first
    for match in _AFTER_VERB.finditer(answer):
        if bare and answer[match.start()].isupper():
            continue  # a title: 'The World Is Not Enough'
        subject = regex.split(_NEXT_SENTENCE, answer[: match.start()])[-1].strip()
        text = regex.sub(r"^\p{Ll}[^,;]*? by ", "", match[1]) if asks_name else match[1]
        phrase = _without_known(_LEADING.sub("", _LEADING.sub("", _BY_TRADE.sub("", text))), known)
        phrase = regex.split(r"\s+[(/]", phrase)[0]
        head = regex.split(r"\s(?:in|at)\s", _HEAD.split(phrase)[0])[0] if asks_name else _HEAD.split(phrase)[0]
        if is_name(head):
            yield head
            continue
        asked = set(known) & set(words(match[1])) - FUNCTION_WORDS and not set(known) & set(words(subject))
        if asked and is_name(subject) and regex.match(r"(?:the|an?|home)\s", match[1]):
            yield subject  # 'Portuguese is the official language of Brazil'
        if (asks_name or _ASKS_KIND.match(question)) and (owner := _OF_NAME.fullmatch(phrase)) and is_name(owner[1]):
            yield owner[1]
        titled = asks_name and _TITLED.search(head)
        yield titled[2] if titled and titled[1] not in FUNCTION_WORDS else phrase
    if bare:
        head = _PLACE.split(answer)[0]
        yield head if _MAY.match(head) else _without_known(head, known)
    runs = _new_runs(answer, known)
    titles = {word.text for word in find_words(question) if question[word.start].islower()}
    alone = {(run[0].start, run[0].end) for run in runs if len(run) == 1}
    spans = list(_CAPITALISED.finditer(answer))
    # 'Toyota makes the Corolla, a car sold in Japan' answers what makes it.
    after = words(answer[spans[0].end() :])[:1] if spans and not spans[0].start() else []
    if not asks_name and not {*after} & {*known} - FUNCTION_WORDS:
        spans.reverse()
    spans.sort(key=lambda match: bool(asks_name) and not set(known).isdisjoint(words(match[0])))
    for match in spans:
        begins = (
            not _CLAUSE_END.sub("", answer[: match.start()]).strip() or answer[: match.start()].rstrip()[-1] in ".!?"
        )
        if begins and not regex.search(r"\s", match[0]) and match.span() not in alone:
            continue  # the first word of a sentence, which is not always a name
        span = regex.sub(r"['’](?:s|[dt][ıiuü]r)$", "", match[0])  # Turkish: 'is Ankara'
        name = find_words(span)
        while len(name) > 1 and name[0].text in titles:  # 'President Barack Obama' is asked for as a president
            name = name[1:]
        span = span[name[0].start :] if name else span
        begins &= not span.startswith(("Will ", "May "))  # names, too
        yield _without_known(span, known) if begins else span  # 'C'est Victor Hugo'
    for run in reversed(runs):
        yield from (answer[word.start : word.end] for word in reversed(run) if word.text.isdecimal())
    if runs and not any(word.is_character for run in runs for word in run):
        yield _ROLE.sub("", _trim(answer, [word for run in runs for word in run], known))
    for run in sorted(runs, key=lambda run: run[0].start - run[-1].end):
        yield _COPULA.split(_trim(answer, run, known))[-1]


def _quoted(text: str) -> list[str]:
    return [next(filter(None, match.groups())) for match in _QUOTED.finditer(text)]


def _is_bare(answer: str, known: Sequence[str]) -> bool:
    """Whether an answer looks like a name, a date or a number alone, and not like a sentence."""
    content = [word.text for word in find_words(answer)]
    starts_anew = bool(content) and content[0] not in known and content[0] not in FUNCTION_WORDS - _BEGIN_PHRASES
    return starts_anew and len(content) <= MAX_BARE and answer.rstrip()[-1] not in ".!?…。！？।؟"


def _new_runs(answer: str, known: Sequence[str]) -> list[list[Word]]:
    """Split an answer into runs of words that the question does not have.

    A character counts as the question's only together with a neighbour.
    """
    answer_words = find_words(answer)
    single, pairs = set(known), set(itertools.pairwise(known))
    new = [True] * len(answer_words)
    for index, word in enumerate(answer_words):
        if not word.is_character and word.text in single:
            new[index] = False
        if index + 1 < len(answer_words) and (word.text, answer_words[index + 1].text) in pairs:
            new[index] = new[index + 1] = False
    runs: list[list[Word]] = []
    for index, word in enumerate(answer_words):
        if not new[index]:
            continue
        joined = index and new[index - 1] and not _CLAUSE_END.search(answer[answer_words[index - 1].end : word.start])
        if joined:
            runs[-1].append(word)
        else:
            runs.append([word])
    return runs


def _trim(text: str, run: Sequence[Word], known: Sequence[str]) -> str:
    """Return the text of a run of words, without words at its ends that tell nothing."""
    run, single = list(run), set(known)
    inflected = {word + end for word in known for end in ("s", "es", "d", "ed")}  # 'plays' of 'play'

    def removable(words: Sequence[Word], rest: int) -> bool:
        content = tuple(word.text for word in words)
        if rest < (2 if len(content) == 1 and words[0].is_character else 1):
            return False
        if content[0] in _SMALL:
            return False  # 'one hundred'
        if len(content) == 1 and content[0] in inflected and text[words[0].start].islower():
            return True
        return content in _PARTICLES or (len(content) == 1 and (content[0] in FUNCTION_WORDS or content[0] in single))

    sizes = range(5, 0, -1)
    while size := next((size for size in sizes if len(run) > size and removable(run[-size:], len(run) - size)), 0):
        start = run[-1].start
        if run[-1].text not in single and (text[start].isupper() or text[start - 1 : start] == "-"):
            break  # the last word belongs to a name: 'Theresa May', 'Moon Jae-in'
        run = run[:-size]
    while size := next((size for size in sizes if len(run) > size and removable(run[:size], len(run) - size)), 0):
        if run[0].text not in single and _MAY.match(text[run[0].start :]):
            break
        run = run[size:]
    return text[run[0].start : run[-1].end] if run else text


def _without_known(phrase: str, known: Sequence[str]) -> str:
    """Trim a phrase, unless only a kind of place is left: 'Guatemala City'."""
    rest = _trim(phrase, find_words(phrase), known)
    return phrase if rest.casefold() in _PLACES else rest


def is_name(phrase: str) -> bool:
    """Whether a phrase looks like a name: one to five capitalised words, besides particles such as 'al-' or 'van'."""
    capital = [word for word in regex.findall(r"[^\W_]+", phrase) if word.casefold() not in NAME_PARTICLES]
    if tells_nothing(words(phrase)):
        return False
    return 1 <= len(capital) <= 5 and all(word[0].isupper() for word in capital)


def tells(answer: str, phrase: str) -> bool:
    """Whether an answer contains a key phrase word for word, or nearly so if the phrase is a name.

    A phrase without words that tell something, such as 'No.', must be the answer's first clause. A phrase without
    words, such as an emoji, must be in the answer.
    """
    in_answer, in_phrase = with_digits(words(without_decimals(answer, phrase))), with_digits(words(phrase))
    if not in_phrase:
        return bool(phrase.strip()) and phrase.strip() in answer
    if tells_nothing(in_phrase):
        if _has_symbol(answer, phrase):
            return True
        return words(_first_clause(THOUGHT.sub("", answer))) == words(_first_clause(phrase))
    if holds(in_answer, in_phrase) or _has_date(in_answer, in_phrase):
        return True
    if not is_name(phrase):
        return False
    name, size = " ".join(in_phrase), len(in_phrase)
    windows = {" ".join(in_answer[start : start + size]) for start in range(len(in_answer) - size + 1)}
    numerals = _NUMERAL.findall(name)
    return any(_NUMERAL.findall(text) == numerals and _similarity(name, text) >= SIMILARITY for text in windows)


def without_decimals(answer: str, phrase: str) -> str:
    """Leave out the decimal fractions of an answer, unless the phrase has one: '12' is not in '12.5'."""
    return answer if regex.search(r"\d[.,]\d", phrase) else _DECIMAL.sub(" ", answer)


def _has_date(text: Sequence[str], date: Sequence[str]) -> bool:
    """Whether numbers and a month are next to each other in any order: 'March 14, 1879' is '14th of March 1879'."""
    plain, parts = ([_ORDINAL.sub("", word) for word in some if word not in _OF_DATES] for some in (text, date))
    if len(parts) < 2 or sum(not part.isdecimal() for part in parts) != 1:
        return False
    return any(set(parts) <= {*plain[start : start + len(parts)]} for start in range(len(plain)))


def _has_symbol(text: str, phrase: str) -> bool:
    """Whether a phrase looks like a symbol, and is in a text other than as the first word of a clause."""
    return _SYMBOL.fullmatch(phrase) is not None and any(
        regex.search(rf"\w\W*(?<!\w){phrase}(?!\w)", clause) for clause in _CLAUSE_END.split(text)
    )


def _first_clause(text: str) -> str:
    return next((clause for clause in _CLAUSE_END.split(text) if words(clause)), "")


def _similarity(text: str, other: str) -> float:
    """1 − Levenshtein distance / length of the longer text."""
    row = list(range(len(other) + 1))
    for index, letter in enumerate(text, start=1):
        diagonal, row[0] = row[0], index
        for column, against in enumerate(other, start=1):
            substituted = diagonal + (letter != against)
            diagonal, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, substituted)
    return 1 - row[-1] / max(len(text), len(other), 1)
