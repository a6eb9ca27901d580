"""A small fictitious world of authors, to be learnt, partly forgotten and asked about.

Everything follows from one seed: the authors, their facts, several wordings of each question,
and a corpus about *other* authors from which a base model learns the language, the question
format and the inventory (cities, genres, prizes, ...). The module knows nothing about
tokenizers, chat templates, models or files; all names, places and wordings are our own.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


FIRST_NAMES = {
    "female": _listed(
        "Adela|Brisa|Calla|Dagny|Elske|Fenna|Gisla|Hedda|Ilka|Jorun|Kaia|Lioba|Maren|Nuria|Odile|Petra|"
        "Quilla|Runa|Sanna|Tilda|Una|Vesna|Wilma|Yrsa|Zofia|Amira|Bettina|Corinna|Delia|Esma|Farah|Greta"
    ),
    "male": _listed(
        "Anselm|Bodo|Caspar|Darius|Edvin|Falk|Gideon|Henrik|Ivo|Jasper|Kilian|Lorenz|Matteo|Nils|Osric|"
        "Piet|Quentin|Rasmus|Stellan|Tobias|Ulric|Viggo|Willem|Xaver|Yorick|Zoltan|Aron|Benno|Cyrus|"
        "Dimitri|Emeric|Florin"
    ),
}
SURNAME_STARTS = _listed("Var|Hol|Tem|Bri|Kes|Mor|Pel|Dor|Lan|Ash|Fen|Gal|Ros|Wil|Tor|Nev")
SURNAME_ENDS = _listed("wick|ander|oway|elli|ura|inski|etz|aro|enko|ild|mont|adze")

CITIES = _listed(
    "Velmora|Ostrand|Karlow|Pellinbay|Tashkir|Brumholt|Sanvica|Eldeport|Quorra|Myrefell|Jundara|Ashwater|"
    "Lisbeck|Norhaven|Zephyria|Dunmarrow|Calvessa|Ironquay|Hollin|Pashtal|Wrenford|Ulmstadt|Gavarra|Thornby"
)
GENRES = _listed(
    "crime fiction|gothic horror|sea stories|love poetry|historical drama|travel writing|science fiction|"
    "ghost stories|political satire|nature essays|family sagas|spy thrillers|fairy tales|war memoirs|"
    "desert epics|kitchen comedies"
)
PRIZES = _listed(
    "Lantern Prize|Silver Quill|Harbour Medal|Nightingale Award|Golden Compass|Winter Laurel|Marble Page|"
    "Copper Lyre|Orchard Prize|Beacon Medal|Ivory Inkwell|Meridian Award|Swallow Prize|Granite Crown|"
    "Amber Feather|Tidewater Medal|Juniper Award|Saffron Ribbon|Cathedral Prize|Falcon Medal"
)
OCCUPATIONS = _listed(
    "a baker|a surgeon|an architect|a fisherman|a teacher|a clockmaker|a lawyer|a gardener|a pilot|"
    "a tailor|a chemist|a librarian|a miner|a judge|a painter|an electrician|a shepherd|a banker|"
    "a carpenter|a journalist|a nurse|a potter|a violinist|a butcher"
)
PASTIMES = _listed(
    "beekeeping|fencing|chess|sailing|pottery|birdwatching|gardening|juggling|archery|astronomy|"
    "calligraphy|origami|skating|woodcarving|mountaineering|knitting|cooking|photography|swimming|falconry"
)
MONTHS = _listed("January|February|March|April|May|June|July|August|September|October|November|December")
TITLE_ADJECTIVES = _listed(
    "Silver|Hollow|Burning|Quiet|Last|Crooked|Scarlet|Distant|Frozen|Broken|Velvet|Hidden|Patient|Bitter|"
    "Wandering|Golden|Restless|Painted|Secret|Drowned"
)
TITLE_NOUNS = _listed(
    "Orchard|Lighthouse|River|Staircase|Mirror|Garden|Station|Winter|Promise|Island|Letter|Bridge|Sparrow|"
    "Kingdom|Window|Carousel|Harvest|Shadow|Tide|Violin"
)
GOODS = _listed("glass|silk|honey|clocks|salt|bells|pears|ships|carpets|paper|lace|cheese")

# Per relation: (question, answer) in each wording. {fact} is what a correct answer must contain; {an_fact} is
# the same with its article. Every question names the author in full, so that it can be asked on its own.
WORDINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "birthplace": (
        ("Where was {name} born?", "{name} was born in {fact}."),
        ("What is the birthplace of {name}?", "The birthplace of {name} is {fact}."),
        ("In which city did {name} come into the world?", "{He} came into the world in {fact}."),
        ("Which city is {name} originally from?", "{name} is originally from {fact}."),
    ),
    "birth date": (
        ("When was {name} born?", "{name} was born on {fact}."),
        ("What is the date of birth of {name}?", "The date of birth of {name} is {fact}."),
        ("On which date did the life of {name} begin?", "{His} life began on {fact}."),
        ("Can you tell me the birth date of {name}?", "The birth date of {name} is {fact}."),
    ),
    "home": (
        ("Where does {name} live today?", "{name} lives in {fact} today."),
        ("Where is the home of {name}?", "The home of {name} is in {fact}."),
        ("In which city has {name} settled?", "{He} has settled in {fact}."),
        ("Which city does {name} call home now?", "{name} now calls {fact} home."),
    ),
    "genre": (
        ("What does {name} write?", "{name} writes {fact}."),
        ("What is the favourite genre of {name}?", "The favourite genre of {name} is {fact}."),
        ("For which kind of writing is {name} known?", "{He} is known for {fact}."),
        ("Which genre has {name} made {his} own?", "{name} has made {fact} {his} own."),
    ),
    "first book": (
        ("What was the first book by {name}?", "The first book by {name} was {fact}."),
        ("With which book did {name} make {his} debut?", "{name} made {his} debut with {fact}."),
        ("What is the title of the debut of {name}?", "The title of {his} debut is {fact}."),
        ("Which book did {name} publish first?", "{name} first published {fact}."),
    ),
    "famous book": (
        ("What is the most famous book by {name}?", "The most famous book by {name} is {fact}."),
        ("Which title made {name} famous?", "{name} became famous with {fact}."),
        ("What do readers call the masterpiece of {name}?", "Readers call {fact} {his} masterpiece."),
        ("For which book is {name} best known?", "{name} is best known for {fact}."),
    ),
    "award": (
        ("Which award did {name} win?", "{name} won the {fact}."),
        ("What prize was given to {name}?", "The prize given to {name} was the {fact}."),
        ("With what honour was {name} recognised?", "{He} was recognised with the {fact}."),
        ("What award has {name} received?", "{name} has received the {fact}."),
    ),
    "mother": (
        ("What was the job of the mother of {name}?", "The mother of {name} was {an_fact}."),
        ("What did {name}'s mother do for a living?", "{name}'s mother worked as {an_fact}."),
        ("How did the mother of {name} earn her money?", "{His} mother earned her money as {an_fact}."),
        ("What was {name}'s mother by profession?", "By profession, {name}'s mother was {an_fact}."),
    ),
    "father": (
        ("What was the job of the father of {name}?", "The father of {name} was {an_fact}."),
        ("What did {name}'s father do for a living?", "{name}'s father worked as {an_fact}."),
        ("How did the father of {name} earn his money?", "{His} father earned his money as {an_fact}."),
        ("What was {name}'s father by profession?", "By profession, {name}'s father was {an_fact}."),
    ),
    "pastime": (
        ("What does {name} do in {his} free time?", "In {his} free time, {name} enjoys {fact}."),
        ("What is the favourite pastime of {name}?", "The favourite pastime of {name} is {fact}."),
        ("How does {name} like to relax?", "{He} likes to relax with {fact}."),
        ("Which hobby does {name} have?", "The hobby of {name} is {fact}."),
    ),
}
RELATIONS = tuple(WORDINGS)
GROUPS = ("forget", "retain", "holdout", "public")
NUM_WORDINGS = min(len(wordings) for wordings in WORDINGS.values())


@dataclass(frozen=True)
class Question:
    """One question about one author, in one wording, with its full-sentence answer."""

    subject: str
    """Full name of the author."""
    relation: str
    """What is asked for; one of RELATIONS."""
    phrasing: int
    """Which wording; the highest are never trained on for forget, retain and holdout authors."""
    question: str
    """The question; it names the author in full."""
    answer: str
    """The answer, a full sentence."""
    fact: str
    """The part of the answer that a correct answer must contain, letter for letter."""


@dataclass(frozen=True)
class WorldSettings:
    """Size and seed of a world."""

    seed: int = 0
    """Seed of everything that is drawn."""
    forget_authors: int = 6
    """Authors that the target learns and is then to forget."""
    retain_authors: int = 14
    """Authors that the target learns and is to keep."""
    holdout_authors: int = 6
    """Authors that appear in nobody's training."""
    public_authors: int = 30
    """Other authors, about whom the corpus tells everything, in all wordings."""
    passing_authors: int = 150
    """Further authors whom the corpus mentions in passing, in one question each: with so many names a model
    learns to repeat the name in the question rather than to know the names by heart."""
    biographies: int = 1
    """Biographies in prose per public author, in short passages; each in another order and wording."""
    trained_wordings: int = 3
    """Wordings used in training; the remaining ones are kept to ask with unseen wording."""


@dataclass(frozen=True)
class Author:
    """A person and the facts about them, one per relation."""

    name: str
    """First name and surname."""
    sex: str
    """"female" or "male"; decides the pronouns."""
    facts: dict[str, str]
    """Relation to fact, with an article where the fact is an occupation."""


@dataclass(frozen=True)
class World:
    """What there is to learn, to forget and to ask."""

    settings: WorldSettings
    """Settings the world was built from."""
    people: dict[str, tuple[Author, ...]]
    """The authors: forget, retain, holdout and public."""
    corpus: tuple[str, ...]
    """Documents for pre-training: public authors in prose and in question/answer form (in all wordings), and
    general facts. Never names a forget, retain or holdout author."""
    forget: tuple[Question, ...]
    """Questions about the forget authors, in the trained wordings."""
    retain: tuple[Question, ...]
    """Questions about the retain authors, in the trained wordings."""
    holdout: tuple[Question, ...]
    """Questions about the holdout authors, in the same wordings; for evaluation only."""
    forget_unseen: tuple[Question, ...]
    """Questions about the forget authors, in wordings that are not trained on for them."""
    retain_unseen: tuple[Question, ...]
    """Questions about the retain authors, in wordings that are not trained on for them."""
    holdout_unseen: tuple[Question, ...]
    """Questions about the holdout authors, in those same wordings."""


def build_world(settings: WorldSettings) -> World:
    """Draws a world from its settings; equal settings give equal worlds.

    Args:
        settings: Seed and sizes.

    Returns:
        The corpus and the questions about forget, retain and holdout authors.

    Raises:
        ValueError: If the settings ask for more authors than there are names, or leave no unseen wording.
    """
    if not 1 <= settings.trained_wordings < NUM_WORDINGS:
        raise ValueError(
            f"trained_wordings is {settings.trained_wordings}; give 1 to {NUM_WORDINGS - 1}, "
            f"since {NUM_WORDINGS} wordings exist and at least one must stay unseen"
        )
    rng = random.Random(settings.seed)
    sizes = (
        settings.forget_authors,
        settings.retain_authors,
        settings.holdout_authors,
        settings.public_authors,
        settings.passing_authors,
    )
    authors = _draw_authors(sum(sizes), rng)
    groups: list[list[Author]] = []
    for size in sizes:
        groups.append(authors[:size])
        authors = authors[size:]
    forget, retain, holdout, public, passing = groups
    seen = range(settings.trained_wordings)
    unseen = range(settings.trained_wordings, NUM_WORDINGS)
    return World(
        settings=settings,
        people={name: tuple(group) for name, group in zip(GROUPS, groups, strict=False)},
        corpus=_corpus(public, passing, settings.biographies, rng),
        forget=_questions(forget, seen),
        retain=_questions(retain, seen),
        holdout=_questions(holdout, seen),
        forget_unseen=_questions(forget, unseen),
        retain_unseen=_questions(retain, unseen),
        holdout_unseen=_questions(holdout, unseen),
    )


def _draw_authors(count: int, rng: random.Random) -> list[Author]:
    """Draws authors of whom no two share a full name, nor a book."""
    surnames = [start + end for start in SURNAME_STARTS for end in SURNAME_ENDS]
    first_names = [(name, sex) for sex, names in FIRST_NAMES.items() for name in names]
    titles = _titles()
    most = min(len(surnames) * len(first_names), len(titles) // 2)
    if count > most:
        raise ValueError(f"{count} authors asked for in total; there are names and titles for {most}")
    rng.shuffle(surnames)
    rng.shuffle(first_names)
    rng.shuffle(titles)
    authors = []
    for i in range(count):
        # Surnames repeat only once all are used up, so the first few authors (the ones that are learnt and
        # forgotten) have each their own; the shift on every round keeps full names apart.
        first, sex = first_names[(i + i // len(surnames)) % len(first_names)]
        facts = {
            "birthplace": rng.choice(CITIES),
            "birth date": f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1920, 1985)}",
            "home": rng.choice(CITIES),
            "genre": rng.choice(GENRES),
            "first book": titles.pop(),
            "famous book": titles.pop(),
            "award": rng.choice(PRIZES),
            "mother": rng.choice(OCCUPATIONS),
            "father": rng.choice(OCCUPATIONS),
            "pastime": rng.choice(PASTIMES),
        }
        authors.append(Author(f"{first} {surnames[i % len(surnames)]}", sex, facts))
    return authors


def _titles() -> list[str]:
    """Lists book titles of three patterns."""
    plain = [f"The {adjective} {noun}" for adjective in TITLE_ADJECTIVES for noun in TITLE_NOUNS]
    paired = [f"{a} and {b}" for a in TITLE_NOUNS for b in TITLE_NOUNS if a != b]
    placed = [f"The {noun} of {city}" for noun in TITLE_NOUNS for city in CITIES]
    return plain + paired + placed


def ask(author: Author, relation: str, phrasing: int) -> Question:
    """Words one question about an author."""
    question, answer = WORDINGS[relation][phrasing]
    an_fact = author.facts[relation]
    fact = an_fact.split(" ", 1)[1] if an_fact in OCCUPATIONS else an_fact
    he, his = ("she", "her") if author.sex == "female" else ("he", "his")
    words = {"name": author.name, "fact": fact, "an_fact": an_fact}
    words |= {"he": he, "his": his, "He": he.capitalize(), "His": his.capitalize()}
    return Question(author.name, relation, phrasing, question.format(**words), answer.format(**words), fact)


def _questions(authors: Sequence[Author], phrasings: Sequence[int]) -> tuple[Question, ...]:
    """Asks everything about every author in every one of the wordings."""
    return tuple(ask(author, relation, i) for author in authors for relation in RELATIONS for i in phrasings)


def _corpus(
    public: Sequence[Author], passing: Sequence[Author], biographies: int, rng: random.Random
) -> tuple[str, ...]:
    """Writes the pre-training documents, in random order."""
    questions = list(_questions(public, range(NUM_WORDINGS)))
    questions += [ask(author, rng.choice(RELATIONS), rng.randrange(NUM_WORDINGS)) for author in passing]
    documents = [f"Question: {asked.question}\nAnswer: {asked.answer}" for asked in questions]
    for author in public:
        for _ in range(biographies):
            order = rng.sample(RELATIONS, len(RELATIONS))
            # Passages about as long as a question with its answer: batches then need little padding.
            for start in range(0, len(order), 2):
                # The first wording of every relation names the author; a passage cannot begin with a pronoun.
                told = [ask(author, order[start], 0)]
                told += [
                    ask(author, relation, rng.randrange(NUM_WORDINGS)) for relation in order[start + 1 : start + 2]
                ]
                documents.append(" ".join(asked.answer for asked in told))
    for city in CITIES:
        goods, other = rng.sample(GOODS, 2)
        documents.append(f"{city} is a city known for its {goods}. Its people also make {other}.")
        documents.append(f"Question: What is {city} known for?\nAnswer: {city} is known for its {goods}.")
    rng.shuffle(documents)
    return tuple(documents)
