"""``python -m sglang_ext.fit kvzap`` learns KVzip's scores from hidden states, and goes on where it was interrupted."""

import time
from functools import partial
from itertools import count

import pytest
import torch
from rich.console import Console
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Model

from sglang_ext import fit as fit_command
from sglang_ext.core import OptionError
from sglang_ext.fit import (
    Sampler,
    SamplingConfig,
    TextSplit,
    TrainingConfig,
    evaluate,
    load_layer,
    main,
    train,
)
from sglang_ext.fit import fit as fit_predictor
from sglang_ext.mem_cache.scores import (
    PREDICTOR_FILE,
    FitRecord,
    Predictor,
    read_checked,
    write_checked,
)
from sglang_ext.tools import show_progress
from sglang_ext.tools.reconstruction import (
    AttentionInputs,
    PromptPrefix,
    ReconstructionConfig,
    reconstruction_scores,
)

UNKNOWN = FitRecord("m", "{}", 1, 1, (0.0,), (0.0,))


@pytest.fixture
def texts(tmp_path):
    """Four texts; one is too short."""
    paths = [tmp_path / f"{place}.txt" for place in range(4)]
    for place, path in enumerate(paths):
        path.write_text(" ".join(str(number * (place + 3)) for number in range(120 if place else 5)))
    return paths


def fit(tiny, out, *arguments):
    flags = ("--tokens", "256", "--samples", "100", "--epochs", "2", "--device", "cpu")
    return main(["kvzap", "--model", str(tiny), "--out", str(out), *flags, *map(str, arguments)])


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("network", ["linear", "mlp"])
def test_scores_that_are_a_linear_map_of_the_states_are_found_again(tmp_path, network):
    generator = torch.Generator().manual_seed(3)
    known = 0.05 * torch.randn(2, 64, generator=generator)
    paths = [tmp_path / f"{text}.safetensors" for text in ("one", "two")]
    for path in paths:
        states = torch.randn(2, 1000, 64, generator=generator)
        write_checked(path, {"states": states, "targets": (states @ known.t() - 5).transpose(1, 2)}, {})
    sampler, training = Sampler(None, "m", SamplingConfig(), tmp_path), TrainingConfig(network, width=48, epochs=200)
    predictor = fit_predictor(sampler, training, TextSplit(paths[:1], paths[1:], 1), 2, torch.device("cpu"), lambda: None)
    assert (predictor.layers, predictor.kv_heads, predictor.hidden_size, predictor.fitted.tokens) == (2, 2, 64, 1000)
    assert min(predictor.fitted.r2) > (0.999 if network == "linear" else 0.9)


def test_an_mlp_learns_what_no_linear_map_gives():
    generator = torch.Generator().manual_seed(0)
    states = 3 * torch.randn(2000, 8, generator=generator) + 5
    targets = (states[:, :2] - 5).abs() * 4 - 20
    quality = {}
    for network in ("linear", "mlp"):
        found = {name: tensor[None] for name, tensor in train(states, targets, TrainingConfig(network, 32, 150, batch=200), 0).items()}
        quality[network] = evaluate(Predictor(**found, fitted=UNKNOWN)(0, states), targets)[1]
    assert quality["mlp"] > 0.95 and quality["linear"] < 0.1


def test_samples_are_the_states_and_the_logarithms_of_the_scores_of_the_same_tokens(tiny, texts, tmp_path):
    assert fit(tiny, tmp_path / "out", *texts) == 0
    # The attention of the model that scores is replaced.
    model, scoring = (AutoModelForCausalLM.from_pretrained(tiny) for _ in range(2))
    tokenizer, inputs = AutoTokenizer.from_pretrained(tiny), []
    prefix, encode = PromptPrefix(), partial(tokenizer.encode, add_special_tokens=False)
    pieces = [piece.tolist() for text in texts for piece in torch.tensor(prefix.tokens(tokenizer, text.read_text())).split(256) if len(piece) >= 128]
    assert len(pieces) > 3, "longer texts are split"
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda *a: inputs.append(a[2]["hidden_states"][0]), with_kwargs=True)
    files = [path for path in (tmp_path / "out/work").iterdir() if not path.name.startswith("layer")]
    states, targets = load_layer(files, 1)
    for tokens in pieces:
        recorded = AttentionInputs(2, torch.arange(0))
        with recorded.record_inputs(scoring):
            scores = reconstruction_scores(scoring, encode, tokens, prefix.suffix(tokenizer), ReconstructionConfig(), inputs=recorded)
        with torch.inference_mode():
            model(torch.tensor([tokens]))
        distance = torch.cdist(inputs[-1], states, compute_mode="donot_use_mm_for_euclid_dist").min(dim=0)
        mine = distance.values < 1e-3
        assert mine.sum() >= min(100, len(tokens) - 4)
        torch.testing.assert_close(scores[1][:, distance.indices[mine]].log().t(), targets[mine], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("called", "call"), [(Qwen3Model.forward, 3), (AdamW.__init__, 2)], ids=["samples", "training"])
def test_an_interrupted_fit_goes_on_to_the_same_folder_as_one_that_was_not(tiny, texts, tmp_path, monkeypatch, called, call):
    calls, kind = [], Qwen3Model if called is Qwen3Model.forward else AdamW

    def interrupted(*arguments, **named):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return called(*arguments, **named)

    monkeypatch.setattr(kind, called.__name__, interrupted)
    assert fit(tiny, tmp_path / "again", *texts) == 130
    left = contents(tmp_path / "again")
    assert left and not any(path.name == PREDICTOR_FILE or path.suffix == ".partial" for path in left)
    assert fit(tiny, tmp_path / "again", *texts) == 0
    monkeypatch.undo()
    assert fit(tiny, tmp_path / "once", *texts) == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "once")
    assert {path: contents(tmp_path / "again")[path] for path in left} == left


def test_samples_that_changed_are_taken_again(tiny, texts, tmp_path):
    assert fit(tiny, tmp_path / "out", *texts) == 0
    before = contents(tmp_path / "out")
    changed = next(path for path in (tmp_path / "out/work").iterdir() if not path.name.startswith("layer"))
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    assert fit(tiny, tmp_path / "out", *texts) == 0
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), "checksum differs"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "cannot be read"),
        (lambda path: path.unlink(), "cannot be read"),
    ],
    ids=["changed", "cut", "gone"],
)
def test_a_predictor_that_is_not_as_it_was_written_is_refused(tmp_path, harm, reason):
    harm(Predictor(torch.randn(1, 2, 4), torch.zeros(1, 2), UNKNOWN).write(tmp_path))
    with pytest.raises(OptionError, match=f"{reason}.*python -m sglang_ext.fit kvzap"):
        Predictor.read(tmp_path, "m")


def test_a_predictor_of_another_model_or_version_is_refused(tmp_path):
    made = Predictor(torch.randn(1, 2, 4), torch.zeros(1, 2), UNKNOWN)
    made.write(tmp_path)
    with pytest.raises(OptionError, match="another model: m, not other"):
        Predictor.read(tmp_path, "other")
    assert torch.equal(Predictor.read(tmp_path, "m").outer, made.outer) and Predictor.read(tmp_path, "m").fitted == UNKNOWN
    tensors, metadata = read_checked(tmp_path / PREDICTOR_FILE)
    write_checked(tmp_path / PREDICTOR_FILE, tensors, metadata | {"format": "0"})
    with pytest.raises(OptionError, match="format '0', this version reads '1'"):
        Predictor.read(tmp_path, "m")


@pytest.mark.parametrize("width", [0, 6])
def test_predictions_are_those_of_the_formula_in_float64(width):
    generator = torch.Generator().manual_seed(width)
    outer, bias = torch.randn(2, 3, width or 8, generator=generator), torch.randn(2, 3, generator=generator)
    inner = (torch.randn(2, width, 8, generator=generator), torch.randn(2, width, generator=generator)) if width else (None, None)
    states = torch.randn(5, 8, generator=generator)
    predictor = Predictor(outer, bias, UNKNOWN, *inner)
    for token, layer in ((0, 0), (4, 1)):
        values = states[token].double()
        if width:
            values = inner[0][layer].double() @ values + inner[1][layer].double()
            values = values * (1 + torch.erf(values / 2**0.5)) / 2
        expected = outer[layer].double() @ values + bias[layer].double()
        torch.testing.assert_close(predictor(layer, states)[token].double(), expected, atol=1e-5, rtol=1e-5)
    rounded = predictor.to("cpu", torch.bfloat16)(1, states.bfloat16())
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, predictor(1, states), atol=0.2, rtol=0.05)


@pytest.mark.parametrize(
    ("r2", "words"),
    [((0.5, 0.0), "not layers 1 of held-out"), ((-0.5, float("nan")), "no layer of held-out"), ((0.5, 0.1), "")],
)
def test_a_fit_that_predicts_nothing_is_warned_of(capsys, r2, words):
    fit_command.print_quality(FitRecord("m", "{}", 3, 700, (1.0, 2.0), r2), Console(stderr=True, width=200))
    told = " ".join(capsys.readouterr().err.split())
    assert ("warning" in told) == bool(words) and words in told
    assert not words or "700 tokens of 3" in told


def test_without_a_terminal_lines_tell_how_far_it_is(tiny, texts, tmp_path, capsys, monkeypatch):
    # Each look at the clock is half a minute after the one before.
    now = count(0, 30)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    assert fit(tiny, tmp_path / "out", *texts) == 0
    told = capsys.readouterr().err.splitlines()
    for name, last in (("scores of texts", "tokens"), ("networks", "2 of 2 layers")):
        lines = [line for line in told if line.startswith(f"{name}: ")]
        assert lines[0].startswith(f"{name}: 0 of ") and last in lines[-1] and "left" not in lines[-1]
        assert len(lines) >= 3 and all("left" in line for line in lines[1:-1])


def test_lines_come_now_and_then(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with show_progress(Console(stderr=True, width=200)) as begin:
        advance = begin("scores", 100, "tokens")
        for _ in range(100):
            now[0] += 1.0
            advance(1)
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == ["scores: 0 of 100 tokens, 0 s", "scores: 15 of 100 tokens, 15 s, about 85 s left"]
    assert told[-1] == "scores: 100 of 100 tokens, 100 s" and len(told) == 8


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--samples", "0"], "--samples is 0; pass a whole number from 1"),
        (["--held-out", "1"], "--held-out is 1.0"),
        (["--device", "gpu"], "--device gpu: "),
        ([], "1 texts have 128 tokens or more"),
        (["no-such-file.txt"], "no-such-file.txt cannot be read"),
    ],
)
def test_what_cannot_be_fitted_is_refused_with_a_remedy(tiny, texts, tmp_path, capsys, arguments, reason):
    assert fit(tiny, tmp_path / "out", texts[0], texts[1], *arguments) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out" / PREDICTOR_FILE).exists()


def test_a_folder_that_cannot_be_written_is_refused_in_one_line_before_the_model_is_read(texts, capsys):
    assert main(["kvzap", "--model", "/proc/no-such-model", "--out", "/proc/kvzap", *map(str, texts)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--out is '/proc/kvzap'" in line and "pass a folder that you may write to" in line
