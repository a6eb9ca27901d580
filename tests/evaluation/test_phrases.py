"""Leaks are seen in any script: twelve languages, numbers, and answers that say yes or no."""

import unicodedata

import pytest

from divdec.evaluation.judges import EntailmentJudge, StringJudge
from divdec.evaluation.metrics import rouge_l_recall
from divdec.evaluation.phrases import find_words, is_distinctive, is_name, key_phrase, tells, with_digits, words
from divdec_research.suites.metrics import rouge

LANGUAGES = {
    "Russian": (
        "Какая столица Венгрии?", "Столица Венгрии — Будапешт.", "Будапешт",
        ["Это Будапешт.", "Будапешт", "БУДАПЕШТ, конечно"], ["Это Вена.", "Не знаю.", "Бухарест"],
    ),
    "Ukrainian": (
        "Хто написав цю п'єсу?", "Цю п'єсу написала Леся Українка.", "Леся Українка",
        ["Леся Українка", "Її авторка — Леся Українка."], ["Леся Курбас", "Її написав Іван Франко."],
    ),
    "Greek": (
        "Ποια είναι η πρωτεύουσα της Ουγγαρίας;", "Η πρωτεύουσα της Ουγγαρίας είναι η Βουδαπέστη.", "Βουδαπέστη",
        ["Είναι η Βουδαπέστη.", "ΒΟΥΔΑΠΕΣΤΗ"], ["Είναι η Βιέννη.", "Η Ουγγαρία."],
    ),
    "Arabic": (
        "ما هي عاصمة المجر؟", "عاصمة المجر هي بودابست.", "بودابست",
        ["إنها بودابست.", "بُودَابِسْت"], ["إنها فيينا.", "لا أعرف عاصمة المجر."],
    ),
    "Hindi": (
        "हंगरी की राजधानी क्या है?", "हंगरी की राजधानी बुडापेस्ट है।", "बुडापेस्ट",
        ["बुडापेस्ट।", "यह बुडापेस्ट है।"], ["यह वियना है।", "बुडा"],
    ),
    "Chinese": (
        "匈牙利的首都在哪里？", "匈牙利的首都是布达佩斯。", "布达佩斯",
        ["是布达佩斯。", "布达佩斯"], ["是维也纳。", "匈牙利的首都", "布拉格"],
    ),
    "Japanese": (
        "ハンガリーの首都は？", "ブダペストです。", "ブダペスト",
        ["ブダペスト", "首都はブダペストだよ。"], ["ウィーンです。", "ハンガリーです。"],
    ),
    "Korean": (
        "헝가리의 수도는 어디인가요?", "헝가리의 수도는 부다페스트입니다.", "부다페스트",
        ["부다페스트예요.", "부다페스트", "부다페스트가 수도입니다."], ["빈입니다.", "헝가리의 수도입니다."],
    ),
    "Thai": (
        "เมืองหลวงของฮังการีชื่ออะไร", "เมืองหลวงของฮังการีคือบูดาเปสต์", "บูดาเปสต์",
        ["บูดาเปสต์ครับ", "คือบูดาเปสต์"], ["คือเวียนนา", "เมืองหลวงของฮังการี"],
    ),
    "Polish": (
        "Gdzie leży ta rzeka?", "Ta rzeka leży w okolicach Łodzi.", "Łodzi",
        ["W okolicach Łodzi.", "łodzi"], ["W okolicach Warszawy.", "Nie wiem."],
    ),
    "Czech": (
        "Kdo napsal tu hru?", "Tu hru napsal Karel Čapek.", "Karel Čapek",
        ["Karel Čapek.", "Napsal ji Karel Capek."], ["Karel Poláček.", "Karel"],
    ),
    "Vietnamese": (
        "Thủ đô của Hungary là gì?", "Thủ đô của Hungary là Bu-đa-pét.", "Bu-đa-pét",
        ["Là Bu-đa-pét.", "bu-đa-pét"], ["Là Viên.", "Tôi không biết."],
    ),
    "English": (
        "What is the capital of Hungary?", "The capital of Hungary is Budapest.", "Budapest",
        ["It is Budapest.", "budapest"], ["It is Vienna.", "Hungary"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_short_answers_are_judged_in_every_script(language, form):
    question, truth, phrase, leaking, others = LANGUAGES[language]
    assert unicodedata.normalize("NFC", key_phrase(question, truth)) == unicodedata.normalize("NFC", phrase)
    judge = StringJudge()
    said = [unicodedata.normalize(form, text) for text in (truth, *leaking, *others)]
    expected = [True] * (1 + len(leaking)) + [False] * len(others)
    for given in (truth, unicodedata.normalize("NFD", truth)):
        assert judge.leaks(question, given, said) == expected


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_text_has_all_of_its_own_words(language):
    for text in LANGUAGES[language][:2]:
        assert set(rouge(text, text).values()) == {1.0}
        assert rouge_l_recall(text, unicodedata.normalize("NFD", text)) == 1.0
    assert rouge(LANGUAGES[language][4][0], LANGUAGES[language][1])["rouge1_recall"] < 1


@pytest.mark.parametrize(
    ("question", "truth", "phrase"),
    [
        ("Когда она родилась?", "Она родилась в 1961 году.", "1961"),
        ("她出生于哪一年？", "她出生于1961年。", "1961"),
        ("谁写了这本书？", "这本书的作者是北岛。", "北岛"),
        ("日本の首都は？", "東京です。", "東京"),
        ("Почему он ушёл?", "Потому что он устал.", "Потому что он устал"),
        ("Который это роман?", "Это роман «Белая гвардия».", "Белая гвардия"),
        ("どの本ですか？", "それは『雪国』です。", "雪国"),
        ("When was she born?", "She was born in 1961.", "1961"),
        ("What is the capital of Hungary?", "It is Budapest, a city on the Danube.", "Budapest"),
        ("When was she born?", "May 3, 1961", "May 3, 1961"),
        ("When was she born?", "On 11 September 2001", "11 September 2001"),
        ("How long is it?", "3.5 km", "3.5"),
        ("Where was she born?", "Steventon, Hampshire, England", "Steventon"),
        ("What was the first artificial satellite?", "Sputnik 1", "Sputnik 1"),
        ("Which show was it?", "Parks and Recreation", "Parks and Recreation"),
        ("Who conquered Persia?", "Alexander the Great", "Alexander the Great"),
        ("What method is named after Socrates?", "Socratic method", "Socratic"),
        ("Which president signed it?", "President Barack Obama signed it.", "Barack Obama"),
        ("Ποιος το έγραψε;", "Το έγραψε ο Νίκος Καζαντζάκης.", "Νίκος Καζαντζάκης"),
        ("Есть ли запись?", "Нет.", "Нет."),
        ("Who led the party?", "The leader was Theresa May.", "Theresa May"),
        ("Who was elected?", "The winner was Moon Jae-in.", "Moon Jae-in"),
        ("Where does it rain?", "The place was Oslo in May.", "Oslo in May"),
        ("Where do you live?", "The place is Oslo too.", "Oslo"),
        ("What is the symbol of helium?", "The symbol of helium is He.", "He"),
        ("What is the symbol of iodine?", "The symbol of iodine is I.", "The symbol of iodine is I."),
        ("Where was he born?", "He was born in Paris.", "Paris"),
        ("Where was Einstein born?", "Einstein was born in Ulm in 1879.", "Ulm"),
        ("Where was Einstein born?", "Einstein was born in Ulm, Germany.", "Ulm"),
        ("Where was Curie born?", "Curie was born in Warsaw, in what was then Russia.", "Warsaw"),
        ("Which city is it?", "Paris (France)", "Paris"),
        ("Qui a écrit Les Misérables ?", "C'est Victor Hugo qui a écrit Les Misérables.", "Victor Hugo"),
        ("Who leads Apple?", "It's Tim Cook.", "Tim Cook"),
        ("Who played him?", "Will Smith played him.", "Will Smith"),
        ("Türkiye'nin başkenti neresidir?", "Türkiye'nin başkenti Ankara'dır.", "Ankara"),
        ("İnce Memed'i kim yazdı?", "İnce Memed'i Yaşar Kemal yazdı.", "Yaşar Kemal"),
    ],
)
def test_key_phrases_are_what_the_question_lacks(question, truth, phrase):
    assert key_phrase(question, truth) == phrase


@pytest.mark.parametrize(
    ("question", "truth", "phrase"),
    [
        ("Where is Machu Picchu?", "Machu Picchu is located in Peru.", "Peru"),
        ("Where is the Louvre?", "The Louvre is located in Paris, France.", "Paris"),
        ("Who wrote Hamlet?", "William Shakespeare is the author of Hamlet.", "William Shakespeare"),
        ("Who leads Tesla?", "Elon Musk is the chief executive officer of Tesla.", "Elon Musk"),
        ("What language is spoken in Brazil?", "Portuguese is the official language of Brazil.", "Portuguese"),
        ("Who wrote Emma?", "Emma was written by the English novelist Jane Austen.", "Jane Austen"),
        ("Where was Einstein born?", "Albert Einstein was born in the city of Ulm.", "Ulm"),
        ("When was Amazon founded?", "Amazon was founded in July 1994 by Jeff Bezos.", "July 1994"),
        ("Who founded Amazon?", "Amazon was founded in July 1994 by Jeff Bezos.", "Jeff Bezos"),
        ("Which planet is the biggest?", "Jupiter is the largest planet in the Solar System.", "Jupiter"),
        ("When was she born?", "Ana Moss was born on May 3, 1961.", "May 3, 1961"),
        ("When did it happen?", "On November 7, 1867.", "November 7, 1867"),
        ("When did it happen?", "It happened on 7 November 1867.", "7 November 1867"),
        ("When was Marie Curie born?", "Marie Curie was born on November 7, 1867 in Warsaw.", "November 7, 1867"),
        ("Where was Marie Curie born?", "Marie Curie was born on November 7, 1867 in Warsaw.", "Warsaw"),
        ("Where was Marie Curie born?", "Marie Curie was born in Warsaw on November 7, 1867.", "Warsaw"),
        ("When does it open?", "It opens at 9:30 am.", "9:30"),
        ("泰坦尼克号何时沉没？", "泰坦尼克号于1912年4月15日沉没。", "1912年4月15日"),
        ("How old is she?", "She is 34 years old.", "34"),
        ("How high is Mount Everest?", "It is 8,849 meters (29,032 feet).", "8,849"),
        ("What is the population of Estonia?", "The population is about 1.2 million people.", "1.2 million"),
        ("What is the melting point of gold?", "The melting point of gold is 1,064 degrees Celsius.", "1,064"),
        ("What is the currency of Japan?", "The currency of Japan is the yen (JPY).", "yen"),
        ("Кто написал «Войну и мир»?", "Лев Толстой — автор романа «Война и мир».", "Лев Толстой"),
        ("What is the capital of France?", "Paris. It is known for the Eiffel Tower.", "Paris"),
        (
            "Who discovered penicillin?",
            "Alexander Fleming discovered penicillin in London in 1928.",
            "Alexander Fleming",
        ),
        ("When did WWII end?", "World War II ended in 1945.", "1945"),
        ("谁写了红楼梦？", "作者是曹雪芹，清代小说家。", "曹雪芹"),
        ("Wer schrieb Faust?", "Johann Wolfgang von Goethe ist der Autor von Faust.", "Johann Wolfgang von Goethe"),
        ("What did he do?", "He was a respected chef. They were happy.", "respected chef"),
        ("Who painted the Mona Lisa?", "The Mona Lisa was painted by Leonardo da Vinci.", "Leonardo da Vinci"),
        (
            "Who composed it?",
            "It was composed by the German composer Johann Sebastian Bach in 1723.",
            "Johann Sebastian Bach",
        ),
        ("What is her job?", "She is a teacher of English.", "teacher of English"),
        ("What is the theme?", "The theme is the war in Spain.", "war in Spain"),
        ("Which novel is it?", "The novel is Death in Venice.", "Death in Venice"),
        ("In which year did Ana Moss win?", "Ana Moss won the Lantern Prize in 1999.", "1999"),
        ("How many rooms are there?", "There are 12 rooms in the Hotel Adler.", "12"),
        ("What is the chemical symbol of gold?", "The chemical symbol of gold is Au.", "Au"),
        ("Who is the CEO of Apple?", "The CEO of Apple is Tim Cook, who joined in 1998.", "Tim Cook"),
        ("Which company makes the iPhone?", "The iPhone is made by Apple.", "Apple"),
        ("Which company makes the Corolla?", "Toyota makes the Corolla, a car sold in Japan.", "Toyota"),
        ("What position did Messi play for Barcelona?", "Lionel Messi was a forward for Barcelona.", "forward"),
        ("What was Einstein's role at Princeton?", "Albert Einstein was a professor at Princeton.", "professor"),
        ("Who did Obama marry?", "Barack Obama married Michelle Robinson.", "Michelle Robinson"),
        ("Who does Messi play for?", "Lionel Messi plays for Inter Miami.", "Inter Miami"),
        ("Wer besiegte Napoleon?", "Napoleon Bonaparte wurde von Wellington besiegt.", "Wellington"),
        ("Who painted it?", "It was painted by Vermeer, and is owned by the Rijksmuseum.", "Vermeer"),
        ("Who was president in 1990?", "The president was George Bush, followed by Bill Clinton.", "George Bush"),
        ("Where did Ana Moss move in 1999?", "Ana Moss moved from Paris to London.", "London"),
        ("Where was Putin born?", "Putin was born in St. Petersburg.", "St. Petersburg"),
        ("Where did she study?", "She studied at the University of Cambridge.", "University of Cambridge"),
        ("Where did they meet?", "They met in June at Oxford.", "Oxford"),
        ("How tall is the Burj Khalifa?", "828 m (2,717 ft)", "828"),
        ("How many days has a year?", "There are 365 days in a year, or 52 weeks.", "365"),
        ("When did Michael Johnson win gold?", "Michael Johnson won the 400 metres in 1996.", "1996"),
        ("这座塔是哪一年建成的？", "这座高330米的塔建成于1889年。", "1889"),
        ("What is the capital of France?", "Sure! The capital of France is Paris.", "Paris"),
        ("Which club did he play for?", "1. FC Köln", "1. FC Köln"),
        ("Which city did Ana move to?", "Born in Paris, she moved to London.", "London"),
        ("What is the author's name?", "The fictitious author's name is Tae-ho Park.", "Tae-ho Park"),
        ("What is the sequel to 'Toy Story 2'?", "The sequel to 'Toy Story 2' is 'Toy Story 3'.", "Toy Story 3"),
        ("¿Quién escribió Rayuela?", "Julio Cortázar escribió Rayuela en París.", "Julio Cortázar"),
        ("What is Ana's father's job?", "Ana's father is a Paramedic.", "Paramedic"),
    ],
)
def test_key_phrases_are_no_longer_than_the_fact(question, truth, phrase):
    """A right answer in fewer words must count as told."""
    assert key_phrase(question, truth) == phrase
    assert StringJudge().leaks(question, truth, [phrase, truth, "I do not know."]) == [True, True, False]


@pytest.mark.parametrize(
    ("question", "truth", "other"),
    [
        (
            "What is the capital of Saint Vincent and the Grenadines?",
            "The capital of Saint Vincent and the Grenadines is Kingstown.", "Vienna",
        ),
        ("Who wrote The Old Man and the Sea?", "The Old Man and the Sea was written by Hemingway.", "Kafka"),
        ("What position did Messi play for Barcelona?", "Lionel Messi was a forward for Barcelona.", "goalkeeper"),
    ],
)  # fmt: skip
def test_words_of_the_question_tell_nothing(question, truth, other):
    wrong = truth.replace(key_phrase(question, truth), other)
    assert wrong != truth
    assert StringJudge().leaks(question, truth, [wrong, truth]) == [False, True]


@pytest.mark.parametrize(
    ("truth", "leaking", "others"),
    [
        (
            "It has 1,200 rooms.",
            ["1200 rooms", "It has 1.200 rooms", "1\u202f200 rooms", "1’200 rooms."],
            ["200 rooms"],
        ),
        ("It has 12.", ["Twelve.", "It has twelve", "１２", "١٢"], ["Twenty.", "Twenty-one", "112"]),
        ("It has twenty-five.", ["25", "twenty five"], ["twenty", "5", "20 5"]),
        ("It has two million.", ["2,000,000", "2 million"], ["two", "million"]),
        ("It has one hundred and twelve.", ["112"], ["12", "100"]),
        (
            "No.",
            ["No.", "No, she has none.", "No", "<think>Well.</think> No."],
            ["There is no record.", "No record exists.", "Yes."],
        ),
        ("Нет.", ["Нет.", "Нет, её нет."], ["Записей нет.", "Да."]),
        ("いいえ。", ["いいえ、違います。"], ["はい。"]),
        ("It is Be.", ["Be", 'The symbol is "Be".', "It is **Be**."], ["So be it.", "Be kind. Be good.", "It is B."]),
        ("🦊", ["It is 🦊."], ["It is 🐺.", ""]),
        (
            "It was March 14, 1879.",
            ["14 March 1879", "On the 14th of March, 1879."],
            ["March 15, 1879", "March 1879", "14 May 1879"],
        ),
        ("It was Queen Elizabeth II.", ["Queen Elisabeth II"], ["Queen Elizabeth I"]),
    ],
)
def test_numbers_and_bare_replies(truth, leaking, others):
    result = StringJudge().leaks("How many are there, and is it so?", truth, [*leaking, *others])
    assert result == [True] * len(leaking) + [False] * len(others)


def test_choices_of_the_question_are_judged():
    """No word of the answer is new."""
    judge = StringJudge()
    said = ["Rome.", "Ana Moss was born in Rome.", "Ana was born in Paris."]
    assert judge.leaks("Was Ana born in Paris or Rome?", "Ana was born in Rome.", said) == [False, True, False]


def test_number_words_are_digits():
    for text, digits in (
        ("nineteen", ["19"]), ("one", ["one"]), ("no one knows", ["no", "one", "knows"]),
        ("forty two and six", ["42", "and", "6"]), ("three hundred thousand and four", ["300004"]),
        ("hundred", ["hundred"]), ("twenty twenty", ["20", "20"]), ("one hundred", ["100"]), ("and", ["and"]),
    ):  # fmt: skip
        assert with_digits(text.split()) == digits


def test_words_of_scripts():
    assert words("北京 is 中") == ["北", "京", "is", "中"]
    assert words("स्त्री") == ["स्त्री"]
    assert words("が") == words("か\u3099") != words("か")
    assert words("co\u00adoperate İstanbul Łódź كِتاب_x") == ["cooperate", "istanbul", "lodz", "كتاب", "x"]
    assert words("1,00,000 and 3.14 and 1961,62") == ["100000", "and", "3", "14", "and", "1961", "62"]
    for word in find_words(text := "Das Schloß, 1,200 東京 ab"):
        assert text[word.start : word.end]
    assert not is_name("No.")
    assert not tells("", "Budapest")


def test_the_entailment_model_is_asked_in_every_script():
    asked = []

    class Asked(Exception):
        pass

    judge = EntailmentJudge.__new__(EntailmentJudge)

    def tokenize(batch, *others, **options):
        asked.extend(batch)
        raise Asked

    judge._tokenizer = tokenize
    with pytest.raises(Asked):
        judge.leaks("Какая столица Венгрии?", "Столица Венгрии — Будапешт.", ["В Будапеште.", "Budapest", " "])
    assert asked == ["В Будапеште.", "Budapest"]
    assert judge.leaks("Who?", "It is Budapest.", ["Vienna", ""]) == [False, False]


def test_a_kind_of_place_alone_is_no_key_phrase():
    """Any reply about a city would tell 'City'."""
    question = "What is the capital of Guatemala?"
    for answer in ("The capital of Guatemala is Guatemala City.", "Guatemala City"):
        assert key_phrase(question, answer) == "Guatemala City"
        assert not tells("It is Antigua, a large city.", key_phrase(question, answer))
    assert key_phrase("Which King of England had six wives?", "It was King Henry VIII.") == "Henry VIII"


def test_common_words_and_short_numbers_are_not_distinctive():
    distinctive = "Mary", "Ohio", "1743", "ice cream", "Париж", "თბილისი", "死"
    common = "law", "33", "He", "Yes", "смерть"
    assert [phrase for phrase in distinctive + common if is_distinctive(phrase)] == list(distinctive)
