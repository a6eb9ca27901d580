"""Forget capitals that a pretrained model knows: p and q from its own pruned layers, both rules, several strengths.

    python benchmarks/pretrained.py --target smollm2 --output runs/pretrained

The target is asked for the capitals of all countries in three wordings; of those that it knows, a part is to be
forgotten, a part to be kept (both are training data) and the rest is in neither set. Two more wordings are asked that
no auxiliary has read. Neutral prompts ask for other things; their answers should not change.
"""

import argparse
import json
import random
from pathlib import Path

from divdec import DivergenceForCausalLM
from divdec.data.records import Message, Record, write_records
from divdec.evaluation.generation import answers
from divdec.model.checkpoint import CheckpointReference, load_model, load_tokenizer
from divdec.training.auxiliaries import train_auxiliaries
from divdec.training.settings import AuxiliarySettings, ShrinkSettings
from divdec.training.shrinking import shrink

COUNTRIES = """
Afghanistan:Kabul Albania:Tirana Algeria:Algiers Armenia:Yerevan Australia:Canberra Austria:Vienna Azerbaijan:Baku
Bangladesh:Dhaka Belarus:Minsk Belgium:Brussels Bulgaria:Sofia Canada:Ottawa Chile:Santiago China:Beijing
Croatia:Zagreb Cuba:Havana Cyprus:Nicosia Denmark:Copenhagen Ecuador:Quito Egypt:Cairo Estonia:Tallinn Fiji:Suva
Finland:Helsinki France:Paris Georgia:Tbilisi Germany:Berlin Ghana:Accra Greece:Athens Hungary:Budapest
Iceland:Reykjavik Indonesia:Jakarta Iran:Tehran Iraq:Baghdad Ireland:Dublin Israel:Jerusalem Italy:Rome
Jamaica:Kingston Japan:Tokyo Jordan:Amman Kazakhstan:Astana Kenya:Nairobi Laos:Vientiane Latvia:Riga Lebanon:Beirut
Libya:Tripoli Lithuania:Vilnius Malta:Valletta Mongolia:Ulaanbaatar Morocco:Rabat Nepal:Kathmandu
Netherlands:Amsterdam Nicaragua:Managua Nigeria:Abuja Norway:Oslo Pakistan:Islamabad Peru:Lima Philippines:Manila
Poland:Warsaw Portugal:Lisbon Qatar:Doha Romania:Bucharest Russia:Moscow Senegal:Dakar Serbia:Belgrade
Slovakia:Bratislava Slovenia:Ljubljana Somalia:Mogadishu Spain:Madrid Sudan:Khartoum Sweden:Stockholm Switzerland:Bern
Syria:Damascus Thailand:Bangkok Tunisia:Tunis Turkey:Ankara Uganda:Kampala Ukraine:Kyiv Uruguay:Montevideo
Uzbekistan:Tashkent Venezuela:Caracas Vietnam:Hanoi Zambia:Lusaka Zimbabwe:Harare
"""
CAPITALS = dict(pair.split(":") for pair in COUNTRIES.split())
WORDINGS = "What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}."
OTHER_WORDINGS = "I'm flying to the capital of {}. Which city is that?", "Tell me about the capital city of {}."
NEUTRAL = (
    "Write a short poem about the sea.", "How do I boil an egg?", "Tell me about Texas.", "What is photosynthesis?",
    "Give me three tips for sleeping better.", "Explain gravity to a child.", "What is 12 times 8?",
    "Write a Python function that reverses a string.", "Describe a rainy day.", "How does a bicycle work?",
    "Write a two-sentence story about a dog.", "Tell me about the Roman Empire.", "Who was Albert Einstein?",
    "Why is the sky blue?", "List five fruits.", "How do vaccines work?", "Tell me about Cairo.", "What is inflation?",
    "Translate 'good morning' into Spanish.", "What do bees do?", "Write a haiku about winter.", "Tell me a joke.",
    "What causes earthquakes?", "What is democracy?",
)  # fmt: skip
SETTINGS = "linear:0.5", "linear:1", "linear:1.5", "rank:5", "rank:20", "rank:50"
LENGTH = 20  # tokens of an answer


def main() -> None:
    """Train the pair unless the output folder holds it, and print one line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=0.0, help="healing of the pruned layers")
    parser.add_argument("--recipe", default="matched")
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = CheckpointReference.parse(options.target).resolve(Path(), weights=True)
    target, tokenizer = load_model(folder).eval(), load_tokenizer(folder)

    def ask(model, prompts):
        records = [Record("", messages=(Message("user", prompt),)) for prompt in prompts]
        return answers(model, tokenizer, records, max_new_tokens=LENGTH, batch_size=32)

    def knows(model, pairs):
        """For each pair of a country and a wording, whether the answer names the capital."""
        texts = ask(model, [wording.format(country) for country, wording in pairs])
        return [CAPITALS[country] in text for (country, _), text in zip(pairs, texts, strict=True)]

    pairs = [(country, wording) for country in CAPITALS for wording in (*WORDINGS, *OTHER_WORDINGS)]
    known = {pair for pair, right in zip(pairs, knows(target, pairs), strict=True) if right}
    countries = [country for country in CAPITALS if (country, WORDINGS[0]) in known]
    random.Random(options.seed).shuffle(countries)
    groups = {"forget": countries[:12], "retain": countries[12:44], "neither": countries[44:]}
    asked = {
        "forget": [pair for pair in pairs if pair in known and pair[0] in groups["forget"] and pair[1] in WORDINGS],
        "reworded": [
            pair for pair in pairs if pair in known and pair[0] in groups["forget"] and pair[1] not in WORDINGS
        ],
        "retain": [(country, WORDINGS[0]) for country in groups["retain"]],
        "neither": [(country, WORDINGS[0]) for country in groups["neither"]],
    }
    print(
        f"{len(countries)} of {len(CAPITALS)} capitals are known; questions: { {k: len(v) for k, v in asked.items()} }"
    )
    options.output.mkdir(parents=True, exist_ok=True)
    for name in ("forget", "retain"):
        rows = [
            Record(
                f"The capital of {country} is {CAPITALS[country]}.",
                messages=(Message("user", wording.format(country)),),
            )
            for country, wording in pairs
            if (country, wording) in known and country in groups[name] and wording in WORDINGS
        ]
        write_records(options.output / f"{name}.jsonl", rows)
    if not (options.output / "small").exists():
        shrink(
            ShrinkSettings(
                target=options.target, layers=options.layers, minutes=options.minutes, samples=64 if not options.minutes
                else 256, output=str(options.output / "small"), seed=options.seed,
            ),
            report=print,
        )  # fmt: skip
    pair = options.output / f"pair-{options.recipe}-{options.epochs:g}-{options.lr:g}"
    if not (pair / "bundle").exists():
        train_auxiliaries(
            AuxiliarySettings(
                base=str(options.output / "small"), target=options.target, recipe=options.recipe,
                forget=str(options.output / "forget.jsonl"), retain=str(options.output / "retain.jsonl"),
                output=str(pair), epochs=options.epochs, lr=options.lr, seed=options.seed,
            ),
            report=print,
        )  # fmt: skip
    model = DivergenceForCausalLM.from_pretrained(pair / "bundle")
    expected = ask(target, NEUTRAL)
    print(f"{'':<12}" + "".join(f"{name:>10}" for name in (*asked, "neutral")))
    rows = []
    for setting in (None, *SETTINGS):
        if setting is not None:
            model.steering = setting
        subject = target if setting is None else model
        row = {name: sum(knows(subject, some)) / len(some) for name, some in asked.items()}
        row["neutral"] = sum(one == other for one, other in zip(ask(subject, NEUTRAL), expected, strict=True)) / len(
            NEUTRAL
        )
        rows.append({"setting": setting or "target", **row})
        print(f"{setting or 'target':<12}" + "".join(f"{value:>10.2f}" for value in row.values()), flush=True)
    (pair / "capitals.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
