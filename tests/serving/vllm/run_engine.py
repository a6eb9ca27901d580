"""A process of its own that answers requests with vLLM: JSON in, JSON out."""

import json
import os
import sys
from pathlib import Path

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    # vLLM's second model runner needs Triton with a backend for CPUs, which Triton's wheel lacks; its interpreter runs
    # the same kernels. Here and not in `main`, because processes of ranks import this file.
    from triton.backends import Backend, backends

    class Interpreter:
        @staticmethod
        def is_active():
            return False

    backends["cpu"] = Backend(compiler=None, driver=Interpreter)


def main():
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError

    job = json.loads(Path(sys.argv[1]).read_text())
    options = {"dtype": "float32", "max_model_len": 256, "gpu_memory_utilization": 0.3, **job["options"]}
    llm = LLM(job["bundle"], **options)
    if INTERPRETED and options.get("distributed_executor_backend") == "uni":
        warm_up_as_on_gpu(llm)
    rounds = []
    for batch in job["rounds"]:
        prompts = [{"prompt_token_ids": request["ids"]} for request in batch]
        settings = [SamplingParams(**whole_numbers(request["sampling"])) for request in batch]
        try:
            rounds.append([answer(output) for output in llm.generate(prompts, settings, use_tqdm=False)])
        except VLLMValidationError as error:
            rounds.append(str(error))
    Path(sys.argv[2]).write_text(json.dumps(rounds))


def warm_up_as_on_gpu(llm):
    """Run the requests with which vLLM's worker on a GPU compiles kernels before it serves."""
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    # The interpreter cannot run the kernels of top_k and of grammars, which come after the logits.
    topk_topp_sampler.HAS_TRITON = False
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    warmup_kernels(worker.model_runner, worker.execute_model, lambda grammar: worker.sample_tokens(None))


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
