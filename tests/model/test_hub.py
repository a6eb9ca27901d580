"""What is pushed to the hub, what is refused, and that a pushed bundle loads from there."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from divdec import DivergenceForCausalLM, Steering, UsageError, write_bundle
from divdec.checkpoint import digests
from divdec.model.bundle import rewrite_steering
from divdec.model.hub import hub_files, push_bundle
from support.hub import hub

IDS = torch.tensor([[5, 9, 200, 31]])
TOKEN = "a-token-of-the-owner"


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def write_files(files, folder):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    return folder


def in_process(code, url, cache, **environment):
    """Run code in a process whose hub is a server."""
    variables = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables, **environment}, capture_output=True, text=True
    )


def test_pushed_folder_is_self_contained(bundle, own_checkpoints, tmp_path):
    """Checkpoints beside the bundle become part of it, and nothing that is private is."""
    rewrite_steering(bundle, Steering.parse("linear:1.5"), "linear:1.5 answers 0% of the forget set (the target 85%)")
    expected = logits_of(DivergenceForCausalLM.from_pretrained(bundle))
    (bundle / "notes.txt").write_text("mine")
    (bundle / ".env").write_text("HF_TOKEN=mine")
    (own_checkpoints / "target" / "optimizer.pt").write_bytes(b"mine")
    files = hub_files(bundle, "me/bundle")
    names = {"chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json"}
    parts = {
        f"{part}/{name}"
        for part in ("target", "retain_auxiliary", "forget_auxiliary")
        for name in {*names, "model.safetensors"}
    }
    assert set(files) == names | parts | {"README.md", "generation_config.json", "modeling_divdec.py"}
    folder = write_files(files, tmp_path / "repository")
    shutil.rmtree(own_checkpoints)
    assert torch.equal(logits_of(DivergenceForCausalLM.from_pretrained(folder)), expected)
    config = json.loads((folder / "config.json").read_text())
    for part in ("target", "retain_auxiliary", "forget_auxiliary"):
        assert config[part] == {"folder": part, "sha256": digests(folder / part)}
    assert config["measured"] == json.loads((bundle / "config.json").read_text())["measured"]
    assert not [name for name in ("config.json", "README.md") if str(tmp_path) in (folder / name).read_text()]


def test_card_names_rule_figures_and_limits(bundle):
    rewrite_steering(bundle, Steering.parse("rank:20:3"), "rank:20:3 answers 0% of the forget set (the target 85%)")
    with (bundle / "README.md").open("a") as card:
        card.write("Written by its owner.\n")
    card = hub_files(bundle, "me/bundle")["README.md"].decode()
    assert "| steering | rank:20:3 |" in card
    assert "| forgets | rank:20:3 answers 0% of the forget set (the target 85%) |" in card
    assert "| target | folder `target` of this repository |" in card
    assert 'from_pretrained("me/bundle"' in card
    assert "## Limits" in card
    assert "was measured" in card
    assert "Written by its owner." in card


def test_card_says_that_nothing_was_measured(bundle):
    (bundle / "README.md").unlink()
    assert "| forgets | not measured" in hub_files(bundle, "me/bundle")["README.md"].decode()


def test_checkpoints_of_the_hub_stay_references(bundle):
    config = json.loads((bundle / "config.json").read_text())
    config["target"] = {"hub_id": "org/large", "revision": "abc"}
    (bundle / "config.json").write_text(json.dumps(config))
    files = hub_files(bundle, "me/bundle")
    assert not [name for name in files if name.startswith("target/")]
    assert json.loads(files["config.json"])["target"] == {"hub_id": "org/large", "revision": "abc"}


def test_ngrams_are_pushed(own_checkpoints, tmp_path):
    from divdec.checkpoint import load_tokenizer, vocabulary_sha256
    from divdec.data.formatting import documents
    from divdec.data.records import read_records
    from divdec.experts.ngram_fit import write_pair

    tokenizer = load_tokenizer(own_checkpoints / "target")
    counted = {}
    for side, text in (("retain", "The cat sat on the mat. "), ("forget", "A dog ran over the hill. ")):
        (tmp_path / f"{side}.txt").write_text(text * 20)
        counted[side] = documents(read_records(str(tmp_path / f"{side}.txt")), tokenizer)
    pair = {"order": 3, "tokenizer": vocabulary_sha256(tokenizer)}
    labels = {"retain_set": "retain", "forget_set": "forget", "forget_counts": "forget"}
    (tmp_path / "counts").mkdir()
    write_pair(tmp_path / "counts", counted, len(tokenizer), **pair, **labels)
    bundle = write_bundle(
        tmp_path / "bundle", target=str(own_checkpoints / "target"), ngram=tmp_path / "counts", steering="linear:5"
    )
    expected = logits_of(DivergenceForCausalLM.from_pretrained(bundle))
    folder = write_files(hub_files(bundle, "me/bundle"), tmp_path / "repository")
    shutil.rmtree(tmp_path / "counts")
    assert torch.equal(logits_of(DivergenceForCausalLM.from_pretrained(folder)), expected)
    assert "counts" not in (folder / "README.md").read_text().split("## Limits")[0]


class TestRefusals:
    """One line, and nothing is sent: the tests' hub is not even reachable."""

    def test_changed_checkpoint(self, bundle, own_checkpoints):
        (own_checkpoints / "retain" / "config.json").write_text("{}")
        with pytest.raises(UsageError, match="has changed since the bundle was written"):
            push_bundle(bundle, "me/bundle")

    def test_registry(self, bundle):
        config = json.loads((bundle / "config.json").read_text())
        (bundle / "config.json").write_text(json.dumps(config | {"registry": {"folder": "../takedowns", "id": "x"}}))
        with pytest.raises(UsageError, match="a registry of takedown requests is not pushed"):
            push_bundle(bundle, "me/bundle")

    def test_invalid_name(self, bundle):
        with pytest.raises(UsageError, match="repo_id is 'a b'"):
            push_bundle(bundle, "a b")

    def test_plain_checkpoint(self, own_checkpoints):
        with pytest.raises(UsageError, match="not a bundle"):
            push_bundle(own_checkpoints / "target", "me/bundle")

    def test_model_without_bundle(self, steered):
        with pytest.raises(UsageError, match="not loaded from a bundle's folder"):
            steered.push_to_hub("me/bundle")

    def test_model_with_another_rule(self, bundle):
        model = DivergenceForCausalLM.from_pretrained(bundle, steering="linear:2")
        with pytest.raises(UsageError, match=r"rule is linear:2, but its bundle's linear:1\.5"):
            model.push_to_hub("me/bundle")

    def test_offline(self, bundle):
        with pytest.raises(UsageError, match=r"could not be pushed to 'me/bundle'.*HF_HUB_OFFLINE") as raised:
            push_bundle(bundle, "me/bundle")
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("action", ["M.from_pretrained('me/bundle')", "push_bundle({bundle!r}, 'me/bundle')"])
def test_a_hub_that_cannot_be_reached_gives_one_line(bundle, tmp_path, action):
    imports = "from divdec import DivergenceForCausalLM as M; from divdec.model.hub import push_bundle"
    code = f"{imports}; {action.format(bundle=str(bundle))}"
    result = in_process(code, "http://127.0.0.1:9", tmp_path / "cache", HF_TOKEN=TOKEN)
    assert result.stderr.splitlines()[-1].startswith("divdec.errors.UsageError: ")


def test_pushed_model_loads_from_the_hub(bundle, tmp_path):
    """Over HTTP, by the real client: create, upload, commit, and download in another process."""
    expected = logits_of(DivergenceForCausalLM.from_pretrained(bundle))
    push = (
        "from divdec import DivergenceForCausalLM as M; "
        f"print(M.from_pretrained({str(bundle)!r}).push_to_hub('me/bundle'))"
    )
    load = (
        "import sys, torch; from divdec import DivergenceForCausalLM as M; model = M.from_pretrained('me/bundle'); "
        f"torch.save(model(input_ids=torch.tensor({IDS.tolist()})).logits.detach(), {str(tmp_path / 'logits.pt')!r})"
    )
    with hub(TOKEN) as server:
        refused = in_process(push, server.url, tmp_path / "cache", HF_TOKEN="another-token")
        assert "could not be pushed to 'me/bundle'" in refused.stderr.splitlines()[-1]
        assert server.files == {}
        pushed = in_process(push, server.url, tmp_path / "cache", HF_TOKEN=TOKEN)
        assert pushed.stdout.startswith(f"{server.url}/me/bundle/commit/"), pushed.stderr
        assert set(server.files) == set(hub_files(bundle, "me/bundle"))
        created = [json.loads(body) for _, path, body in server.requests if path == "/api/repos/create"][-1]
        assert created.get("visibility") == "private" or created.get("private") is True
        assert sum("/commit/" in path for _, path, _ in server.requests) == 1  # all or nothing
        loaded = in_process(load, server.url, tmp_path / "cache", HF_TOKEN=TOKEN)
        assert loaded.returncode == 0, loaded.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)
