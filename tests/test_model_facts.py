"""Real models: what each keeps, against figures worked out by hand. `KVFRAME_MODELS` names another such folder."""

import json
import os
from pathlib import Path

import pytest

from kvframe import load_plugins
from kvframe.models import inspect_model, max_model_len, model_dtype, model_specs, read_config
from kvframe.readers import ReadOptions

FOLDER = Path(os.environ.get("KVFRAME_MODELS") or Path(__file__).parent / "data" / "models")
FILES = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_real_model_keeps_what_its_file_says(path, tmp_path):
    facts = json.loads(path.read_text(encoding="utf-8"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(facts["hf_config"]), encoding="utf-8")
    host = load_plugins()
    config = read_config(file)
    options = ReadOptions(
        block_size=16,
        cache_dtype=host.cache_dtypes.get("bfloat16"),
        model_dtype=model_dtype(config),
        max_model_len=max_model_len(config) or 4096,
    )
    model = model_specs(config, host, options)
    assert inspect_model(model, host) == {"layers": facts["layers"], "bytes": facts["expected_bf16"]}


def test_there_are_files_to_test():
    assert FILES, f"no *.json in {FOLDER}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [16, 256])
def test_the_figures_depend_on_neither_block_size_nor_caching(path, block_size, caching):
    facts = json.loads(path.read_text(encoding="utf-8"))
    host = load_plugins()
    config = read_config(facts["hf_config"])
    options = ReadOptions(
        block_size=block_size,
        cache_dtype=host.cache_dtypes.get("bfloat16"),
        model_dtype="bfloat16",
        max_model_len=1 << 20,
        caching=caching,
    )
    assert inspect_model(model_specs(config, host, options), host)["bytes"] == facts["expected_bf16"]
