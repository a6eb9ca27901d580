"""A process that serves a bundle with vLLM as `divdec serve` does: options as JSON."""

import json
import sys

from divdec.errors import UsageError
from divdec.serving.vllm.configuration import engine_arguments, run

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    try:
        run(engine_arguments(options.pop("bundle"), **options), api_key="a-key-of-the-tests")
    except UsageError as error:
        print(f"refused: {error}", file=sys.stderr)
        sys.exit(2)
