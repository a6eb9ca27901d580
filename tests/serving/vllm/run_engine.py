"""A process of its own that answers requests with vLLM: JSON in, JSON out."""

import json
import sys
from pathlib import Path


def main():
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError

    job = json.loads(Path(sys.argv[1]).read_text())
    options = {"dtype": "float32", "max_model_len": 256, "gpu_memory_utilization": 0.3, **job["options"]}
    llm = LLM(job["bundle"], **options)
    rounds = []
    for batch in job["rounds"]:
        prompts = [{"prompt_token_ids": request["ids"]} for request in batch]
        settings = [SamplingParams(**whole_numbers(request["sampling"])) for request in batch]
        try:
            rounds.append([answer(output) for output in llm.generate(prompts, settings, use_tqdm=False)])
        except VLLMValidationError as error:
            rounds.append(str(error))
    Path(sys.argv[2]).write_text(json.dumps(rounds))


def whole_numbers(sampling):
    """JSON has no numbers as keys."""
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    return sampling


def answer(output):
    best = output.outputs[0]
    return {
        "tokens": list(best.token_ids),
        "cached": output.num_cached_tokens,
        "logprobs": [table(result) for result in best.logprobs or []],
        "prompt_logprobs": [table(result) for result in output.prompt_logprobs or []],
    }


def table(result):
    return None if result is None else {str(token): value.logprob for token, value in result.items()}


if __name__ == "__main__":
    main()
