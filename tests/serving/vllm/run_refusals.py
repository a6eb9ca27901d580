"""What vLLM says to each of several configurations, or 'accepted'; in one process, without starting an engine."""

import json
import os
import sys
from pathlib import Path


def main():
    from vllm.engine.arg_utils import EngineArgs

    from divdec.serving.vllm.configuration import refusal

    reported = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        os.environ.update(case["environment"])
        try:
            options = {"max_model_len": 256, "enforce_eager": True, **case["options"]}
            EngineArgs(model=case["bundle"], **options).create_engine_config()
            reported.append("accepted")
        except Exception as error:
            ours = refusal(error)
            reported.append(f"divdec: {ours}" if ours is not None else f"vLLM: {error}")
        for name in case["environment"]:
            del os.environ[name]
    Path(sys.argv[2]).write_text(json.dumps(reported))


if __name__ == "__main__":
    main()
