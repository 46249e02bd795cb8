"""The command line: what it prints, its exit codes, and no traceback for what the user got wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gnmr_fx
from gnmr_fx.cli import main
from gnmr_fx.doctor import devices, examine
from tests.loops import readable_kernels
from tests.test_integrations import instrumented, logged

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 96,
    "max_position_embeddings": 32,
    "dtype": "bfloat16",
}
"""The proportions of Llama 3 70B, a hundredth of its width."""


@pytest.fixture(autouse=True, scope="module")
def _readable_kernels() -> Iterator[None]:
    with readable_kernels():
        yield


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gnmr(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line; gives the exit code, stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()  # what the test's own imports have said
        try:
            code = main([str(part) for part in argv])
        except SystemExit as left:  # argparse
            code = int(left.code or 0)
        out = capsys.readouterr()
        assert "Traceback" not in out.out + out.err
        return code, out.out, out.err

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


# table ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["projections", "all"])
def test_bytes_of_a_config_are_those_of_a_run(gnmr, config, scope):
    from transformers import LlamaConfig, LlamaForCausalLM

    options = ["--batch", 2, "--sequence", 24, "--max-active", 0.5, "--recipe", "saved-int2-int8", "--scope", scope]
    code, out, err = gnmr("table", config, "--json", *options)
    assert (code, err) == (0, "")
    found = json.loads(out)

    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.bfloat16).train()
    gnmr_fx.instrument(model, "saved-int2-int8", max_active=0.5, scope=scope)
    model(input_ids=torch.zeros((2, 24), dtype=torch.long)).logits.sum().backward()
    table = gnmr_fx.table(model)
    observed = json.loads(table.to_json())
    assert found.pop("predicted").startswith("from shapes, without a run; inputs input_ids 2×24")
    assert observed.pop("predicted") == ""
    assert found == observed
    assert found["totals"]["bytes_full"] > 0
    code, out, err = gnmr("table", config / "config.json", *options)
    assert (code, err) == (0, "")
    assert "\n".join(out.splitlines()[:-1]) == str(table)
    assert out.splitlines()[-1].startswith("predicted from shapes")


def test_a_recipe_for_gemms_says_what_runs_here(gnmr, config):
    code, out, err = gnmr("table", config, "--recipe", "dsv3-fp6-fp8")
    assert code == 0
    assert "GEMMs fp6_e3m2 g128 x b128" in out
    assert "not run yet" in out
    assert err.startswith(f"gnmr-fx: GEMMs on this machine ({devices()[-1]}): emulated")


def test_the_default_sequence_is_the_models_context(gnmr, config):
    assert "inputs input_ids 1×32" in gnmr("table", config)[1]


def test_include_exclude_dtype_and_budget(gnmr, config):
    options = ["--include", "*.mlp", "--exclude", "*.down_proj", "--exclude", "*.1.*", "--dtype", "float32"]
    found = json.loads(gnmr("table", config, "--json", "--max-active", 1, *options)[1])
    assert [row["unit"] for row in found["rows"]] == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    assert found["rows"][0]["dtypes"] == ["float32"]
    assert found["budget"] == 1


@pytest.mark.parametrize(
    ("model_type", "family"),
    [("bert", "BertForMaskedLM"), ("vit", "ViTForImageClassification"), ("t5", "T5ForConditionalGeneration")],
)
def test_a_config_without_architectures(gnmr, tmp_path, model_type, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    code, out, err = gnmr("table", tmp_path, "--batch", 3, "--sequence", 8, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["totals"]["units_known"] == found["totals"]["units"] > 20
    assert ("3×3×224×224" if model_type == "vit" else "3×8") in found["predicted"]


MODULE = """
import torch
from torch import nn

def build(): return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
def pair(): return build(), torch.zeros(4, 16)
def keywords(): return build(), {"input": torch.zeros(4, 16)}
def nothing(): return "a model"
def fails(): raise ValueError("the lights are out\\nand more")
def bare(): return nn.LayerNorm(4)
def reads(): return Reads(), torch.zeros(4, 16)
number = 3
class Reads(nn.Linear):
    def __init__(self): super().__init__(16, 16)
    def forward(self, x): return super().forward(x) if x.sum().item() > 0 else x
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "netz_of_the_test.py").write_text(MODULE)
    (tmp_path / "broken_of_the_test.py").write_text("import no_such_thing_at_all\n")
    monkeypatch.chdir(tmp_path)
    yield "netz_of_the_test"
    sys.modules.pop("netz_of_the_test", None)


@pytest.mark.parametrize("name", ["pair", "keywords"])
def test_a_callable_with_inputs(gnmr, module, name):
    code, out, err = gnmr("table", f"{module}:{name}", "--json")
    assert (code, err) == (0, "")
    assert [row["bytes_full"] for row in json.loads(out)["rows"]] == [4 * 16 * 4, 4 * 32 * 4]


def test_a_callable_without_inputs_and_one_that_reads_values(gnmr, module):
    code, out, err = gnmr("table", f"{module}:build", "--dtype", "bfloat16")
    assert code == 0
    assert "2 units" in out
    assert "bytes are not known: no inputs" in err
    code, out, err = gnmr("table", f"{module}:reads")
    assert code == 0
    assert "1 unit" in out
    assert "not run on tensors without values" in err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["table", "no/such/folder"], 2, "nothing is downloaded"),
        (["table", "meta-llama/Llama-3-70B"], 2, "found no file or folder"),
        (["table", "."], 2, "expected a config.json"),
        (["table", "unknown"], 2, "that transformers"),
        (["table", "untyped"], 2, "that transformers"),
        (["table", "damaged"], 2, "that transformers"),
        (["table", "invalid"], 2, "that transformers"),
        (["table", "unbuildable"], 1, "expected LlamaForCausalLM to be built"),
        (["table", "netz_of_the_test.py"], 2, "that transformers"),
        (["table", "no_such_module:build"], 2, "found none of that name"),
        (["table", "broken_of_the_test:build"], 2, "no_such_thing_at_all"),
        (["table", "netz_of_the_test:missing"], 2, "callable 'missing'"),
        (["table", "netz_of_the_test:number"], 2, "found 3"),
        (["table", "netz_of_the_test:nothing"], 1, "found a str"),
        (["table", "netz_of_the_test:fails"], 1, "ValueError: the lights are out; --traceback"),
        (["table", "netz_of_the_test:bare"], 1, "NoRecoverableOperatorError"),
        (["table", "good", "--recipe", "saved-int4-int9"], 2, "did you mean 'saved-int4-int8'"),
        (["table", "good", "--recipe", "dsv3-fp8", "--scope", "all"], 2, "scope='projections'"),
        (["table", "good", "--max-active", "1.5"], 2, "max_active"),
        (["table", "good", "--max-active", "many"], 2, "a share such as 0.1"),
        (["table", "good", "--batch", "0"], 2, "from 1"),
        (["table", "good", "--include", "*.nothing"], 1, "PatternError"),
        (["table"], 2, "MODEL"),
        (["report", "no.jsonl"], 2, "does not open: No such file"),
        (["report", "."], 2, "does not open"),
        (["report", "netz_of_the_test.py"], 2, "first line"),
        (["report", "empty.jsonl"], 2, "an empty file"),
        (["dance"], 2, "dance"),
        ([], 2, "gnmr-fx doctor"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_the_user_got_wrong(gnmr, module, argv, code, message):
    for name, content in {
        "good": LLAMA,
        "unknown": {"model_type": "not_yet_invented"},
        "untyped": {},
        "invalid": {**LLAMA, "num_attention_heads": 7},
        "unbuildable": {**LLAMA, "hidden_act": "no_such_function"},
    }.items():
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(json.dumps(content))
    Path("damaged").mkdir()
    Path("damaged/config.json").write_text('{"model_type": "lla')
    Path("empty.jsonl").touch()
    found, out, err = gnmr(*argv)
    assert found == code
    assert message in err
    assert out == ""
    assert len(err.splitlines()) <= 3 or not argv or argv[0] == "dance" or "usage" in err


def test_traceback_shows_where(module, capsys):
    assert main(["table", f"{module}:fails", "--traceback"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "raise ValueError" in err


# report --------------------------------------------------------------------------------------------------------------


def test_report_prints_and_plots(gnmr, tmp_path):
    model = instrumented()
    logged(model, tmp_path / "run.jsonl", range(24))
    code, out, err = gnmr("report", tmp_path / "run.jsonl", "--plot", tmp_path / "run.png")
    assert code == 0
    assert out == f"{gnmr_fx.report(model)}\n"
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    code, out, err = gnmr("report", tmp_path / "run.jsonl", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(gnmr_fx.report(model).to_json())
    code, out, err = gnmr("report", tmp_path / "run.jsonl", "--plot", tmp_path / "run.doc")
    assert code == 2
    assert "run.doc" in err


def test_a_cut_log_is_read_up_to_there(gnmr, tmp_path):
    logged(instrumented(), tmp_path / "run.jsonl", range(9))
    data = (tmp_path / "run.jsonl").read_bytes()
    (tmp_path / "run.jsonl").write_bytes(data[:-30])
    code, out, err = gnmr("report", tmp_path / "run.jsonl")
    assert code == 0
    assert "8 steps" in out
    assert "cut; read up to step 8" in err


# doctor --------------------------------------------------------------------------------------------------------------


def test_doctor_says_what_works(gnmr):
    code, out, err = gnmr("doctor", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["packages"]["torch"] == torch.__version__
    assert {item["name"] for item in found["recipes"]} == set(gnmr_fx.RECIPES)
    assert all(item["works"] for item in found["recipes"])
    (bf16,) = (item for item in found["operators"] if item["name"] == "cpu: bf16 torch.mm")
    assert bf16["works"]
    assert "low-precision matrix products" in gnmr("doctor")[1]


def test_doctor_reports_what_does_not_work(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")

    def none(*args: Any) -> Any:
        raise NotImplementedError("no kernel\nmore")

    monkeypatch.setattr(torch, "_int_mm", none)
    found = examine()
    (compiler,) = (item for item in found.toolchain if item.name == "C++ compiler")
    assert not compiler.works
    assert "no-such-compiler" in compiler.note
    tried = {item.name: item for item in found.operators}
    assert tried["cpu: int8 torch._int_mm"] == ("cpu: int8 torch._int_mm", False, "NotImplementedError: no kernel")
    if devices() == ["cpu"]:
        assert all("plain PyTorch code" in item.note for item in found.recipes)


def test_doctor_says_which_gemms_are_native(monkeypatch):
    from gnmr_fx import doctor

    def only_fp8(operands: gnmr_fx.Operands, device: torch.device) -> tuple[Any, str]:
        return (object() if operands.left.is_fp8 else None), ""

    monkeypatch.setattr(doctor, "native_kernel", only_fp8)
    notes = {item.name: item.note for item in doctor.examine().recipes}
    assert notes["dsv3-fp6-fp8"].endswith(", GEMMs emulated -> native")
    assert notes["dsv3-fp8"].endswith(", GEMMs native")
    assert notes["gemm-int8-bf16"].endswith(", GEMMs emulated -> full")
    assert "GEMMs" not in notes["saved-int4-int8"]


# The script ----------------------------------------------------------------------------------------------------------


def test_the_installed_script(tmp_path):
    script = shutil.which("gnmr-fx", path=str(Path(sys.executable).parent))
    assert script is not None
    done = subprocess.run([script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "exit codes" in done.stdout
    code = "import sys, gnmr_fx_cli; gnmr_fx_cli.parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0  # help does not wait for torch
    done = subprocess.run([script, "report", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("gnmr-fx: expected a log")
    assert done.stderr.count("\n") == 1
    done = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert done.stdout == f"gnmr-fx {gnmr_fx.__version__}\n"


@pytest.mark.slow
def test_a_config_of_70_billion_parameters(tmp_path):
    """Time is that of the processor, in this process and its imports: others may be busy on the machine."""
    large = {
        **LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(large))
    code = (
        "import sys, resource; from gnmr_fx.cli import main; code = main(sys.argv[1:]); "
        "usage = resource.getrusage(resource.RUSAGE_SELF); "
        "print(code, usage.ru_utime + usage.ru_stime, usage.ru_maxrss, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "table", str(tmp_path), "--json"], capture_output=True, text=True
    )
    status, seconds, kilobytes = done.stderr.splitlines()[-1].split()
    assert status == "0"
    totals = json.loads(done.stdout)["totals"]
    # Per layer: what q/k/v, o, gate/up read (8192 wide each) and what down reads (28672), 4096 tokens, 2 bytes each.
    assert totals["bytes_full"] == 80 * 4096 * 2 * (3 * 8192 + 28672)
    assert int(kilobytes) < 2e6
    assert float(seconds) < 30
