"""A case of the fuzzing test: drawn from its number, run, and its answer compared with the slow reference."""

import copy
import dataclasses
import random
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from divdec import DivergenceForCausalLM, Steering, UsageError
from divdec.decoding.speculative import Speculation
from divdec.errors import FailedClosed
from fuzz import options as tables
from fuzz.models import ARCHITECTURES, FEW, KINDS, PAD, VOCAB, WIDE, experts_of, model_of, takedowns, tokenizer
from support.reference import StepByStep

ANSWERED, REFUSED, NOT_TAKEN = "answered", "refused", "refused by transformers"
LIKELY = 1e-9  # a token that was drawn has at least this probability


class Finding(AssertionError):
    """An answer that differs from the reference, or an error that is no refusal."""


@dataclasses.dataclass
class Case:
    """Everything that an answer depends on; it follows from the number alone."""

    number: int
    architecture: str
    experts: str
    others: tuple[str, str]
    steering: Steering
    dtype: torch.dtype
    wide: bool
    entry: str
    """'generate', 'turns' (goes on from a kept cache), or 'forward'."""
    prompts: list[list[int]]
    padding: str
    """'left', 'right', 'both', or 'inferred' (at the left, no mask given)."""
    mask_dtype: torch.dtype
    copied: str
    """'', 'deepcopy' or 'saved' (and loaded)."""
    options: dict[str, Any]
    given_as: str
    """'arguments', 'config' or 'default': where the options are."""
    speculative: Any = None
    assistant: str = ""
    prefix: bool = False
    """Whether prefix_allowed_tokens_fn is given."""
    processor: bool = False
    criterion: bool = False
    streamer: bool = False
    negative_prompt: list[int] | None = None
    chunk: int = 0
    """Tokens of the first of two passes with a cache (forward)."""
    keep: int = 0
    """logits_to_keep (forward)."""

    def __str__(self):
        lines = [f"{field.name}: {getattr(self, field.name)}" for field in dataclasses.fields(self)]
        return "\n  ".join(["case", *lines])


def draw(number):
    """The case of that number."""
    chance = random.Random(number)
    name = list(ARCHITECTURES)[number % len(ARCHITECTURES)]
    architecture = ARCHITECTURES[name]
    others = tuple(chance.sample([other for other in ARCHITECTURES if other not in (name, "recurrent_gemma")], 2))
    kind = chance.choices(list(KINDS), KINDS.values())[0]
    # In half precision products and merged weights round differently.
    half = architecture.half and chance.random() < 0.25 and kind != "adapters"
    if half:
        others = tuple(
            other if ARCHITECTURES[other].half else "llama" if name != "llama" else "gpt2" for other in others
        )
    entry = chance.choices(("generate", "turns", "forward"), (80, 8, 12))[0]
    rows = chance.choices((1, 2, 3), (50, 25, 25))[0]
    pool = FEW if chance.random() < 0.6 else range(4, 290)
    prompts = [chance.choices(pool, k=chance.randint(1, 12)) for _ in range(rows)]
    padding = chance.choices(("left", "right", "both", "inferred"), (82, 4, 2, 12))[0]
    case = Case(
        number, name, kind, others, _steering(chance, kind, half), torch.bfloat16 if half else torch.float32,
        chance.random() < 0.2, entry, prompts, padding, chance.choice((torch.int64, torch.int64, torch.int32)),
        chance.choices(("", "deepcopy", "saved"), (92, 5, 3))[0], {}, "arguments",
    )  # fmt: skip
    if entry == "forward":
        case.padding = chance.choice(("left", "right", "both"))
        case.chunk = chance.choice((0, 0, *range(1, 8)))
        case.keep = chance.choice((0, 0, 1, 3))
        return case
    _draw_generation(chance, case)
    return case


def _steering(chance, kind, half):
    if kind == "registry":  # refuses other rules
        return Steering()
    if chance.random() < 0.4:
        k = chance.choice((1, 5, 20, 150, VOCAB - 2))
        eligible = None
        if k < 200 and chance.random() < 0.3:
            eligible = tuple(chance.sample(range(VOCAB), k + chance.randint(1, 100)))
        margin, fill = chance.choice((None, None, 0.3)), chance.choice(("hard", "hard", "soft"))
        return Steering("rank", k=k, margin=margin, fill=fill, vocabulary=eligible)
    if chance.random() < 0.05:
        return Steering(alpha=0.1)
    # Beyond a margin above 0 the rule jumps, where rounding decides; at 0 it is continuous. A full rule jumps where it
    # begins to move all tokens: `StepByStep.undecided`.
    margin, full = chance.choice(((None, False), (None, False), (0.0, False), (0.0, not half)))
    return Steering(alpha=chance.choice((0.5, 1.0, 1.5, 2.0, 5.0)), margin=margin, full=full)


def _draw_generation(chance, case):
    mode = chance.choices(("greedy", "sample", "beams", "drawn beams"), (50, 28, 14, 8))[0]
    options = {"do_sample": mode in ("sample", "drawn beams"), "max_new_tokens": chance.randint(1, 8)}
    drawn = [tables.ALWAYS_POSSIBLE]
    if options["do_sample"]:
        drawn.append(tables.SAMPLED)
    if "beams" in mode:
        drawn.append(tables.BEAMS)
        options["num_beams"] = chance.choice((2, 3))
        options["num_return_sequences"] = chance.randint(1, options["num_beams"])
    elif mode == "sample" and chance.random() < 0.3:
        options["num_return_sequences"] = 2
    else:
        drawn.append(tables.ONE_ANSWER)
    if chance.random() < 0.15:
        options["max_length"] = max(map(len, case.prompts)) + options.pop("max_new_tokens")
    way = chance.choices(("plain", "speculative", "assistant", "lookup"), (50, 32, 11, 7))[0]
    if "beams" in mode and chance.random() < 0.9:
        way = "plain"
    if way == "speculative":
        case.speculative = chance.choice((True, chance.randint(1, 6), Speculation(chance.choice((None, 1, 2, 5)))))
        case.prompts = case.prompts[:1] if chance.random() < 0.9 else case.prompts  # a batch decodes without drafts
    elif way != "plain":
        drawn.append(tables.ASSISTED)
        case.prompts = case.prompts[:1] if chance.random() < 0.9 else case.prompts
        options.pop("num_return_sequences", None)
        if way == "assistant":
            case.assistant = chance.choice(("retain", "target", case.others[1]))
        else:
            options["prompt_lookup_num_tokens"] = chance.randint(1, 4)
    case.options = options | tables.draw_options(chance, drawn)
    if "is_assistant" in case.options:  # its criterion reads the scores
        case.options |= {"return_dict_in_generate": True, "output_scores": True}
    if case.assistant:
        case.wide = False  # transformers wants an assistant of the same width
    longest = max(map(len, case.prompts)) + options.get("max_new_tokens", 1)
    if case.options.get("min_length", 0) > longest or case.options.get("min_new_tokens", 0) > options.get(
        "max_new_tokens", 1
    ):
        case.options.pop("min_length", None)
        case.options.pop("min_new_tokens", None)
    if "return_dict_in_generate" not in case.options:
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
            case.options.pop(name, None)
    ends = case.options.get("eos_token_id") or []
    if PAD in (ends if isinstance(ends, list) else [ends]) or case.options.get("pad_token_id", PAD) != PAD:
        case.padding = "left" if case.padding == "inferred" else case.padding  # transformers takes padding for text
    case.given_as = chance.choices(("arguments", "config", "default"), (70, 20, 10))[0]
    case.prefix = chance.random() < 0.06
    case.processor = chance.random() < 0.06
    case.criterion = chance.random() < 0.05
    case.streamer = len(case.prompts) == 1 and chance.random() < 0.08
    if "guidance_scale" in case.options and chance.random() < 0.4:
        case.negative_prompt = chance.choices(FEW, k=3)


# Running a case.


def run(number):
    """Run a case: its outcome, and the message of a refusal.

    Raises:
        Finding: the answer differs from the reference, or the error is no refusal.
    """
    case = draw(number)
    torch.manual_seed(number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            model, assistant = build(case)
            return (forward if case.entry == "forward" else generate)(case, model, assistant)
        except (UsageError, FailedClosed) as error:
            return REFUSED, f"{type(error).__name__}: {error}"
        except Finding as finding:
            raise Finding(f"{finding}\n{case}") from None
        except Exception as error:
            raise Finding(f"{type(error).__name__}: {error}\n{case}") from error


def build(case):
    """The steered model, with a reference of its answers, and the assistant."""
    target = model_of(case.architecture, 0, case.dtype, WIDE if case.wide else VOCAB)
    experts, divergence, retain = experts_of(case.experts, case.architecture, case.others, case.dtype)
    followed = takedowns() if "registry" in case.experts else None
    model = DivergenceForCausalLM.from_experts(target, experts, case.steering, takedowns=followed)
    if case.copied == "deepcopy":
        model = copy.deepcopy(model)
    elif case.copied == "saved":
        folder = tempfile.mkdtemp()
        try:
            model.save_pretrained(Path(folder) / "bundle")
            model = DivergenceForCausalLM.from_pretrained(Path(folder) / "bundle", dtype=case.dtype)
        finally:
            shutil.rmtree(folder)
    width = min(part.vocab_size for part in (target.config, experts, followed) if part is not None)
    model.reference = StepByStep(target, divergence, case.steering, width, followed)
    assistant = None
    if case.assistant:
        assistant = {"retain": retain, "target": target}.get(case.assistant) or model_of(
            case.others[1] if case.assistant == "retain" else case.assistant, 5, case.dtype
        )
        assistant = copy.copy(assistant)
        assistant.generation_config = copy.deepcopy(assistant.generation_config)
    return model, assistant


def padded(case):
    """Prompts side by side with their mask, padding where the case wants it."""
    width = max(map(len, case.prompts)) + (2 if case.padding == "both" else 0)
    ids, mask = [], []
    for row, prompt in enumerate(case.prompts):
        room = width - len(prompt)
        left = {"right": 0, "both": room - 1 - row % 2}.get(case.padding, room) if room else 0
        ids.append([PAD] * left + prompt + [PAD] * (room - left))
        mask.append([0] * left + [1] * len(prompt) + [0] * (room - left))
    return torch.tensor(ids), torch.tensor(mask)


def tolerance_of(case):
    """How far steered logits may lie from the reference's, and the divergence alone."""
    base = 2e-4 if case.dtype == torch.float32 else 0.2
    return base * (1 + 2 * abs(case.steering.alpha if case.steering.rule == "linear" else 0)), 2 * base


@torch.no_grad()
def forward(case, model, _):
    """Teacher forcing, with labels, in one pass or two; and the parts that the logits are made of."""
    ids, mask = padded(case)
    labels = ids.masked_fill(mask == 0, -100)
    given = {"attention_mask": mask.to(case.mask_dtype)}
    if case.chunk and case.chunk < ids.shape[1]:
        first = model(ids[:, : case.chunk], attention_mask=given["attention_mask"][:, : case.chunk])
        found = model(ids[:, case.chunk :], past_key_values=first.past_key_values, **given)
        logits = torch.cat([first.logits, found.logits], dim=1)
    elif case.keep:
        logits = model(ids, logits_to_keep=case.keep, **given).logits
    else:
        output = model(ids, labels=labels, **given)
        logits = output.logits
        parts = model.components(ids, **given)[1:]
        if not case.steering.full:
            same(case.steering.apply(*parts), logits, tolerance_of(case)[0], "components give other logits")
    tolerance, of_divergence = tolerance_of(case)
    expected, undecided = torch.zeros(*ids.shape, logits.shape[-1]), False
    for row, prompt in enumerate(case.prompts):
        for place, column in enumerate(mask[row].nonzero()[:, 0].tolist()):
            text = prompt[: place + 1]
            expected[row, column] = model.reference.logits(text)
            kept = column - ids.shape[1] + logits.shape[1]
            if model.reference.undecided(text, of_divergence):
                undecided = True
            elif kept >= 0:
                values = logits[row, kept].float()
                suppressed = model.reference.surely_suppressed(text, of_divergence)
                if not values[suppressed].isneginf().all():
                    raise Finding(f"row {row}, column {column}: a token is not suppressed")
                same(values, expected[row, column], tolerance, f"row {row}, column {column}: other logits")
    if not case.chunk and not case.keep and not undecided:
        labels[mask.cumsum(dim=1) == 1] = -100  # nothing stands before a text's first token, or padding
        loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if loss.isfinite() and not torch.isclose(loss, output.loss, atol=5 * tolerance, rtol=1e-3):
            raise Finding(f"loss {output.loss} instead of {loss}")
    return ANSWERED, "logits"


def same(found, expected, tolerance, message):
    """Finite values within a tolerance; −inf in one alone only for the few tokens that a rounding may exchange."""
    both = found.isfinite() & expected.isfinite()
    exchanged = int((found.isfinite() != expected.isfinite()).sum())
    largest = float((found - expected)[both].abs().max()) if both.any() else 0.0
    allowed = 0 if tolerance < 0.01 else found.shape[-1] // 4
    outside = int(((found - expected)[both].abs() > tolerance).sum())
    if found.isnan().any() or outside > allowed or exchanged > allowed + (2 if tolerance else 0):
        raise Finding(f"{message}: {outside} off by up to {largest:.3g}, {exchanged} suppressed in one alone")


class Streamer(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        pass


class BiasByLastToken(transformers.LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[torch.arange(len(scores)), (input_ids[:, -1] * 7) % VOCAB] += 3
        return scores


class StopAfter(transformers.StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] % 5 == 0) & (input_ids.shape[1] > 4)


def allowed_tokens(row, ids):
    return random.Random(f"{row} {int(ids[-1])}").sample(range(VOCAB), 100)


def arguments_of(case, assistant):
    """Arguments of `generate` beside the prompt: objects, and options of `GenerationConfig`."""
    values = dict(case.options)
    given: dict[str, Any] = {}
    if case.prefix:
        given["prefix_allowed_tokens_fn"] = allowed_tokens
    if case.processor:
        given["logits_processor"] = LogitsProcessorList([BiasByLastToken()])
    if case.criterion:
        given["stopping_criteria"] = StoppingCriteriaList([StopAfter()])
    if "stop_strings" in values:
        given["tokenizer"] = tokenizer()
    if assistant is not None:
        given["assistant_model"] = assistant
    if case.negative_prompt:
        given["negative_prompt_ids"] = torch.tensor([case.negative_prompt] * len(case.prompts))
    return given, values


@torch.no_grad()
def generate(case, model, assistant):
    """An answer of `generate`, compared with the reference token by token."""
    ids, mask = padded(case)
    given, values = arguments_of(case, assistant)
    attention = {} if case.padding == "inferred" else {"attention_mask": mask.to(case.mask_dtype)}
    if case.entry == "turns":
        ids, mask, cache = first_turn(case, model, ids, mask)
        attention = {"attention_mask": mask, "past_key_values": cache}
        if "max_length" in values:
            values["max_length"] += ids.shape[1]
    streamer = Streamer() if case.streamer else None
    try:
        if case.given_as == "config":
            given["generation_config"] = transformers.GenerationConfig(**values)
        elif case.given_as == "default":
            model.generation_config.update(**values)
        else:
            given |= values
        speculative = {} if case.speculative is None else {"speculative": case.speculative}
        output = model.generate(ids, **attention, **given, **speculative, streamer=streamer)
    except (UsageError, FailedClosed):
        raise
    except (ValueError, NotImplementedError) as error:
        if refused_by_transformers(error, model.target, ids, mask, {"streamer": streamer} | given | values):
            return NOT_TAKEN, str(error).splitlines()[0]
        raise
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    check(case, model, ids, mask, sequences, None if output is sequences else output, values, given)
    if streamer is not None:
        answered = [*sequences[:, : ids.shape[1]].flatten(), *sequences[:, ids.shape[1] :].T.flatten()]
        if streamer.tokens != torch.stack(answered).tolist():
            raise Finding(f"streamed {streamer.tokens}, answered {sequences.tolist()}")
    return ANSWERED, "tokens"


def refused_by_transformers(error, target, ids, mask, given):
    """Whether the target alone, without steering, refuses the call with the same message."""
    try:
        given.pop("generation_config", None)
        target.generate(ids, attention_mask=mask, **given)
    except Exception as own:
        texts = [str(each).replace(type(target).__name__, "").splitlines()[:1] for each in (own, error)]
        return type(own) is type(error) and texts[0] == [texts[1][0].replace("DivergenceForCausalLM", "")]
    return False


def first_turn(case, model, ids, mask):
    """An answer of three tokens, what follows it, and its cache; all rows go on to the end."""
    if len(ids) > 1 and case.padding != "inferred" and case.padding != "left":
        case.padding = "left"
        ids, mask = padded(case)
    speculative = {"speculative": case.speculative} if len(ids) == 1 and case.speculative else {}
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=PAD,
        return_dict_in_generate=True, **speculative,
    )  # fmt: skip
    added = torch.tensor([[FEW[row], FEW[2 + row]] for row in range(len(ids))])
    ids = torch.cat([output.sequences, added], dim=1)
    return ids, torch.cat([mask, mask.new_ones(len(ids), 5)], dim=1), output.past_key_values


# Comparing an answer.


def check(case, model, ids, mask, sequences, output, values, given):
    """Compare every token of an answer, and the scores returned with it.

    Raises:
        Finding: a token cannot have come from the reference's scores.
    """
    config, _ = GenerationMixin._prepare_generation_config(model, None, **values)
    GenerationMixin._prepare_special_tokens(model, config, True, device=ids.device, batch_size=len(ids))
    width = ids.shape[1]
    config.max_length = width + values["max_new_tokens"] if "max_new_tokens" in values else config.max_length
    if config.min_new_tokens is not None:
        config.min_length = config.min_new_tokens + width
    beams = config.num_beams > 1
    copies = len(sequences) // len(ids)
    if not torch.equal(sequences[:, :width], ids.repeat_interleave(copies, 0)):
        raise Finding("the answer does not begin with the prompt")
    if not width < sequences.shape[1] <= config.max_length:
        raise Finding(f"{sequences.shape[1] - width} tokens, of at most {config.max_length - width}")
    Comparison(case, model, ids, mask, sequences, output, config, given, beams, copies).compare()


class Comparison:
    """An answer and the reference, which reads the same tokens step by step."""

    def __init__(self, case, model, ids, mask, sequences, output, config, given, beams, copies):
        self.case, self.reference, self.sequences, self.output = case, model.reference, sequences, output
        self.config, self.beams, self.width = config, beams, ids.shape[1]
        self.tolerance, self.of_divergence = tolerance_of(case)
        self.scaled = self.tolerance * stretch(config)
        self.prompts = [row[real != 0].tolist() for row, real in zip(ids, mask, strict=True) for _ in range(copies)]
        self.negative = case.negative_prompt
        guided = config.guidance_scale not in (None, 1)
        self.guidance = config.guidance_scale if guided else None
        config.guidance_scale = None
        self.processors = GenerationMixin._get_logits_processor(
            model,
            config,
            input_ids_seq_length=self.width,
            encoder_input_ids=ids,
            prefix_allowed_tokens_fn=given.get("prefix_allowed_tokens_fn"),
            logits_processor=given.get("logits_processor") or LogitsProcessorList(),
            device="cpu",
            model_kwargs={"attention_mask": mask.repeat_interleave(copies, 0)},
        )
        for processor in self.processors:
            if isinstance(processor, transformers.PrefixConstrainedLogitsProcessor):
                processor._num_beams = copies if beams else 1
        criteria = given.get("stopping_criteria") or StoppingCriteriaList()
        self.criteria = GenerationMixin._get_stopping_criteria(model, config, criteria, given.get("tokenizer"))
        remembers = any(type(one).__name__.startswith("SynthID") for one in self.processors)
        assisted = case.assistant or "prompt_lookup_num_tokens" in case.options
        # transformers' own assisted decoding shows such a processor rejected drafts, too.
        self.loose = (remembers and bool(assisted)) or bool(self.guidance and assisted)

    def compare(self):
        """Go through the answer; see `check`."""
        rows = range(len(self.sequences))
        done = self._unfilled()
        totals, lengths = [0.0] * len(rows), [0] * len(rows)
        for step in range(self.sequences.shape[1] - self.width):
            end = self.width + step
            alive = [row for row in rows if not done[row]]
            if not alive:
                if self.beams or not torch.all(self.sequences[:, end:] == self.config._pad_token_tensor):
                    self._padding(rows, end)
                return self._totals(totals, lengths)
            texts = {row: self.prompts[row] + self.sequences[row, self.width : end].tolist() for row in alive}
            logits = torch.zeros(len(rows), self.reference.vocab_size)
            for row, text in texts.items():
                logits[row] = self.reference.logits(text)
            tokens = self.sequences[:, end].tolist()
            scores = self._scores(end, logits, texts)
            for row in rows:
                if done[row]:
                    self._padding([row], end, end + 1)
                    continue
                self._token(row, step, tokens[row], logits, scores, texts)
                totals[row] += float(scores[row, tokens[row]])
                lengths[row] += 1
            done = done | self.criteria(self.sequences[:, : end + 1], (scores,))
        if not done.all() and not self.beams:  # beams may end where none can still become the best
            raise Finding(f"the answer ends after {self.sequences.shape[1] - self.width} tokens without a reason")
        return self._totals(totals, lengths)

    def _unfilled(self):
        """Rows that beams leave empty, where fewer continuations are possible than were asked for."""
        empty = torch.zeros(len(self.sequences), dtype=torch.bool)
        if self.beams:
            ends, padding = self.config._eos_token_tensor, self.config._pad_token_tensor
            fill = -1 if ends is None else int(padding or ends[0])
            empty = (self.sequences[:, self.width :] == fill).all(dim=1)
        return empty

    def _padding(self, rows, start, end=None):
        padding = self.config._pad_token_tensor
        fill = [int(padding)] if padding is not None else []
        if self.beams and self.config._eos_token_tensor is not None:
            fill.append(int(self.config._eos_token_tensor[0]))
        if padding is None or not fill:
            return
        for row in rows:
            if not set(self.sequences[row, start:end].tolist()) <= set(fill):
                raise Finding(f"row {row} goes on after its end: {self.sequences[row].tolist()}")

    def _scores(self, end, logits, texts, keep_state=False):
        """Scores after guidance and all processors, −inf where the rule suppresses a token."""
        processors = copy.deepcopy(self.processors) if keep_state else self.processors
        scores = logits.clone()
        if self.guidance is not None:
            for row, text in texts.items():
                start = self.negative or [int(self.sequences[row, self.width - 1])]
                other = self.reference.logits(start + text[len(self.prompts[row]) :]).log_softmax(-1)
                own = logits[row].log_softmax(-1)
                scores[row] = self.guidance * (own - other) + other
        if self.beams:
            scores = scores.log_softmax(-1)
        scores = processors(self.sequences[:, :end], scores)
        return scores.masked_fill(logits.isneginf(), -torch.inf)

    def _token(self, row, step, token, logits, scores, texts):
        where = f"row {row}, token {step}"
        if self.reference.surely_suppressed(texts[row], self.of_divergence)[token]:
            raise Finding(f"{where}: token {token} is suppressed by the rule, and was answered")
        if self.reference.undecided(texts[row], self.of_divergence):
            return
        self._returned(row, step, logits, scores, texts)
        if self.loose:
            return
        if self._possible(scores[row], token):
            return
        # The most favourable rounding for this token.
        favourable = logits.clone()
        target, divergence = self.reference.parts(texts[row])
        if self.case.steering.rule == "rank":
            favourable[row, self._exchangeable(divergence)] = logits[row].min()
            favourable[row, token] = target[token]
        favourable[row, token] += 2 * self.tolerance
        if not self._possible(self._scores(self.width + step, favourable, texts, keep_state=True)[row], token):
            best = int(scores[row].argmax())
            plain = int(target.argmax())
            raise Finding(
                f"{where}: token {token} (score {scores[row, token]:.4f}), the reference's best is {best} "
                f"({scores[row, best]:.4f}), the unsteered target's is {plain}"
            )

    def _exchangeable(self, divergence):
        steering = self.case.steering
        allowed = torch.zeros(len(divergence), dtype=torch.bool)
        allowed[list(steering.vocabulary or range(len(divergence)))] = True
        ordered = divergence[allowed].sort().values
        low, high = ordered[steering.k - 1] - self.of_divergence, ordered[steering.k] + self.of_divergence
        exchangeable = allowed & (divergence > low) & (divergence < high)
        if steering.margin is not None:
            exchangeable |= allowed & ((divergence + steering.margin).abs() < self.of_divergence)
        return exchangeable

    def _possible(self, scores, token):
        if scores.isnan().any() or scores[token].isneginf():
            return False
        if self.beams:
            return True
        if self.config.do_sample:
            return float(scores.softmax(-1)[token]) >= LIKELY
        return bool(scores[token] >= scores.max() - self.scaled)

    def _returned(self, row, step, logits, scores, texts):
        """Compare the returned scores and logits, except of beams, whose rows change."""
        if self.output is None or self.beams:
            return
        suppressed = self.reference.surely_suppressed(texts[row], self.of_divergence)
        for name, expected, tolerance in (("logits", logits, self.tolerance), ("scores", scores, self.scaled)):
            found = getattr(self.output, name)
            if found is None:
                continue
            if not found[step][row][suppressed].isneginf().all():
                raise Finding(f"row {row}, token {step}: the returned {name} hold a suppressed token")
            if name == "logits" or (not self.loose and not self.config.do_sample):
                same(found[step][row], expected[row], tolerance, f"row {row}, token {step}: other {name}")

    def _totals(self, totals, lengths):
        if not self.beams or self.output is None or getattr(self.output, "sequences_scores", None) is None:
            return
        for row, score in enumerate(self.output.sequences_scores.tolist()):
            if not lengths[row] or score < -1e8:  # empty, or not ended
                continue
            expected = totals[row] / lengths[row] ** self.config.length_penalty
            if abs(score - expected) > self.scaled * max(lengths) * 2:
                raise Finding(f"row {row}: the score of the sequence is {score}, the reference's {expected}")


def stretch(config):
    """How much processors may enlarge a difference of logits."""
    factor = max(1.0, *(float(value or 1) for value in (config.repetition_penalty, config.encoder_repetition_penalty)))
    factor *= 1 + 2 * abs(config.guidance_scale or 0)
    if config.exponential_decay_length_penalty:
        factor *= 2 * config.exponential_decay_length_penalty[1] ** 8
    if config.do_sample:
        factor /= min(1.0, config.temperature or 1.0)
    return factor
