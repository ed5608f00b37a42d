"""Perplexity while decoding: the texts, teacher forcing against a plain forward call, distance to dense."""

import json
import math
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rcq_cli.engine import scoring
from rcq_cli.engine.decoder import Engine
from rcq_cli.engine.scoring import TargetScores
from rcq_cli.errors import SpecError, UnsupportedHere
from rcq_cli.finish import rescore
from rcq_cli.modes import dense, naive
from rcq_cli.options import parse_options
from rcq_cli.presets import Flags, resolve
from rcq_cli.protocols import Completion, EncodedPrompt, Loaded, Sample, TaskRequest
from rcq_cli.spec import RunSpec
from rcq_cli.store import RunReader
from rcq_cli.tasks.ppl import TASK, Options
from tests.unit.stub_bench import execute

VOCABULARY = 259


class Bytes:
    """One token per byte, behind a BOS."""

    bos_id, eos_ids, has_chat_template, sha256 = 0, (1,), False, "bytes"

    def encode(self, text):
        return tuple(byte + 3 for byte in text.encode())

    def decode(self, ids):
        return bytes(i - 3 for i in ids if i >= 3).decode("utf-8", "replace")

    def prompt(self, user, answer_prefix, *, chat="auto", bos="auto"):
        assert (answer_prefix, chat) == ("", "off")
        ids = self.encode(user)
        if bos == "never":
            return EncodedPrompt(ids, tuple(range(len(ids))), user)
        return EncodedPrompt((0, *ids), (-1, *range(len(ids))), user)


def tiny_model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.15,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


def tiny_loaded(model=None):
    return Loaded(
        name="tiny",
        model=model or tiny_model(),
        tokenizer=Bytes(),
        fingerprint={"model.id": "tiny", "model.dtype": "float32"},
        max_positions=4096,
        prefill_chunk=100,
    )


@pytest.fixture(scope="module")
def loaded():
    return tiny_loaded()


@pytest.fixture(scope="module")
def engine(loaded):
    return Engine(loaded, backend="reference")


@pytest.fixture
def books(tmp_path):
    """Seven books, of which the last has too few tokens for a context of 512."""
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(6):
        lines = (f"Book {number} line {line} tells of boat {line * 7 % 13}." for line in range(300))
        (folder / f"book{number}.txt").write_text("\n\n".join(lines))
    (folder / "short.txt").write_text("Too short.")
    return str(folder)


def build(books="builtin", ctx=512, samples=4, **options):
    return list(TASK.samples(TaskRequest("", ctx, samples, 0, Options(corpus=books, **options)), Bytes()))


def nll_of_one_forward(model, sample):
    """The NLL of each target from a single pass over all ids, in float64 from float32 logits."""
    ids = torch.tensor([sample.prompt_ids])
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0].double()
    logp = torch.log_softmax(logits[:-1], -1)
    return -logp.gather(1, ids[0, 1:, None])[:, 0]


# -- the texts -----------------------------------------------------------------------------------------------


def test_a_sample_is_a_whole_context_with_one_bos(books):
    for sample in build(books, target_tokens=40):
        assert len(sample.prompt_ids) == 512
        assert [i for i, token in enumerate(sample.prompt_ids) if token == 0] == [0]
        assert (sample.targets, sample.max_new_tokens, sample.context_len) == (40, 40, 472)
        assert sample.meta["bytes"] == 40
        assert sample.references == sample.stop_ids == ()
    assert 0 not in build(books, bos="never")[0].prompt_ids


def test_a_text_is_what_stands_in_the_book(books):
    sample = build(books)[2]
    text = Bytes().decode(sample.prompt_ids)
    book = (Path(books) / sample.meta["book"]).read_text()
    end = sample.meta["start"] + sample.targets
    assert book[end - 511 : end] == text
    assert sample.cluster == sample.meta["book"] == "book2.txt"


def test_targets_are_the_same_at_every_context(books):
    for short, long in zip(build(books, ctx=256, longest=1024), build(books, ctx=1024), strict=True):
        assert short.prompt_ids[-short.targets :] == long.prompt_ids[-long.targets :]
        assert short.prompt_ids[1:] == long.prompt_ids[-255:]
    with pytest.raises(SpecError, match=r"longest=512 is below --ctx 1024"):
        build(books, ctx=1024, longest=512)


def test_the_longest_context_asked_for_fixes_the_targets():
    plan = resolve("eval", Flags(tasks=("ppl",), ctx=("1k", "4k"), modes=("dense",)))
    assert [batch[0].task_options["longest"] for batch in plan.batches] == [4096, 4096]
    plan = resolve("eval", Flags(tasks=("ppl",), ctx=("1k",), modes=("dense",), task_options=("longest=8k",)))
    assert plan.batches[0][0].task_options["longest"] == 8192


def test_books_come_in_turn_and_short_ones_not_at_all(books):
    samples = build(books, samples=100)
    assert [sample.cluster for sample in samples[:7]] == [f"book{i}.txt" for i in (0, 1, 2, 3, 4, 5, 0)]
    assert max(samples.count(s) for s in samples) == 1
    per_book = {s.cluster: [o.meta["start"] for o in samples if o.cluster == s.cluster] for s in samples}
    assert all(len(starts) <= 4 for starts in per_book.values())
    assert all(b - a >= 1024 for starts in per_book.values() for a, b in pairwise(starts))
    assert samples[:5] == build(books, samples=5)


def test_independent_texts_lie_side_by_side(books):
    samples = build(books, samples=5, targets="independent", target_tokens="half", bos="never")
    assert [sample.targets for sample in samples] == [256] * 5
    assert [s.meta["start"] + 256 for s in samples] == [512, 1024, 1536, 2048, 2560]
    assert {sample.cluster for sample in samples} == {"book0.txt"}


def test_no_book_is_read_before_it_is_needed(monkeypatch):
    from rcq_cli.tasks import _prose

    asked = []
    real = _prose.paragraph
    monkeypatch.setattr(_prose, "paragraph", lambda book, number: asked.append(book) or real(book, number))
    assert [s.cluster for s in islice(build(samples=2), 2)] == ["builtin-0", "builtin-1"]
    assert set(asked) == {0, 1}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"books": "missing-folder"}, "does not exist"),
        ({"longest": 0}, r"longest=0 is below --ctx 512"),
        ({"ctx": 200, "target_tokens": 200}, r"ctx 200 is too small.*context of 202"),
    ],
)
def test_what_cannot_be_is_a_usage_error(options, match):
    with pytest.raises(SpecError, match=match):
        build(**options)


def test_a_corpus_of_short_books_is_refused(books):
    with pytest.raises(SpecError, match=r"no book of corpus .* has 60001 tokens"):
        build(books, ctx=60_000)


def test_a_corpus_named_twice_is_refused():
    with pytest.raises(SpecError, match="same option twice"):
        Options(corpus="a", text="b")
    assert Options(text="b").text == "b"


def test_a_hub_corpus_that_is_not_here_names_the_flag(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UnsupportedHere, match=r"corpus=hf:no/such-books is not available.*online=true"):
        build("hf:no/such-books")


def test_options_of_the_command_line_are_read():
    given = {"target_tokens": "1k", "targets": "independent", "longest": "64k", "pooled": "true"}
    options = parse_options(Options, given, "option of task ppl")
    assert (options.target_tokens, options.longest, options.pooled) == (1024, 65536, True)
    assert parse_options(Options, {"target_tokens": "half"}, "x").target_tokens == "half"


# -- teacher forcing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ctx", [255, 256, 513])
def test_dense_decoding_equals_one_forward_pass(loaded, engine, books, ctx):
    sample = build(books, ctx=ctx, samples=1, target_tokens=50)[0]
    prefill = engine.prefill(sample.prompt_ids[: sample.context_len], score_prompt=True)
    done = engine.decode(prefill, sample, dense.MODE, dense.Options())
    expected = nll_of_one_forward(loaded.model, sample)
    assert torch.tensor(done.completion.series["nll"]).double() == pytest.approx(expected[-50:], abs=1e-5)
    total, tokens = done.completion.series["prompt_nll"]
    assert tokens == sample.context_len - 1
    assert total / tokens == pytest.approx(float(expected[:-50].mean()), abs=1e-5)


def test_every_target_takes_one_step_under_the_mode(engine, books):
    sample = build(books, samples=1)[0]
    done = engine.decode(
        engine.prefill(sample.prompt_ids[: sample.context_len]), sample, dense.MODE, dense.Options()
    )
    assert len(done.step_ns) == len(done.completion.series["nll"]) == done.engagement["steps"] == 32
    assert (done.completion.text, done.completion.output_ids) == ("", ())


def test_a_prompt_scored_or_not_gives_the_same_prefill(engine, books):
    sample = build(books, samples=1)[0]
    ids = sample.prompt_ids[: sample.context_len]
    plain, scored = engine.prefill(ids), engine.prefill(ids, score_prompt=True)
    assert torch.allclose(plain.logits, scored.logits, atol=1e-5)
    assert plain.scored is None


def test_dense_beside_itself_differs_in_nothing(engine, books):
    sample = build(books, samples=1)[0]
    prefill = engine.prefill(sample.prompt_ids[: sample.context_len])
    engine.add_reference(prefill, sample)
    twin = dense.Dense()
    twin.name = "twin"
    series = engine.decode(prefill, sample, twin, dense.Options()).completion.series
    assert max(series["kl"]) < 1e-9
    assert set(series["flip"]) == set(series["dlogp"]) == {0.0}


def test_naive_is_measured_against_dense(loaded, engine, books):
    sample = build(books, samples=1)[0]
    prefill = engine.prefill(sample.prompt_ids[: sample.context_len])
    assert set(engine.decode(prefill, sample, naive.MODE, naive.Options()).completion.series) == {"nll"}
    engine.add_reference(prefill, sample)
    series = engine.decode(prefill, sample, naive.MODE, naive.Options()).completion.series
    assert min(series["kl"]) >= 0
    assert max(series["kl"]) > 1e-6
    expected = nll_of_one_forward(loaded.model, sample)[-32:]
    changes = [float(e) - n for e, n in zip(expected, series["nll"], strict=True)]
    assert list(series["dlogp"]) == pytest.approx(changes, abs=1e-4)


def test_golden_divergence():
    scores = TargetScores([0], keep=True)
    scores.add(torch.tensor([2.0, 1.0, 0.0, -1.0]))
    other = TargetScores([0], reference=scores.as_reference())
    other.add(torch.tensor([1.5, 1.6, 0.0, -1.0]))
    series = other.series()
    assert series["kl"][0] == pytest.approx(0.1194247, abs=1e-6)
    assert series["dlogp"][0] == pytest.approx(-0.4395972, abs=1e-6)
    assert series["flip"] == (1.0,)


def test_what_is_not_kept_counts_as_one_event(monkeypatch):
    monkeypatch.setattr(scoring, "KEPT", 2)
    monkeypatch.setattr(scoring, "_ROOM_ENTRIES", 0)
    scores = TargetScores([0], keep=True)
    scores.add(torch.tensor([2.0, 1.0, 0.0, -1.0]))
    other = TargetScores([0], reference=scores.as_reference())
    other.add(torch.tensor([1.5, 1.6, 0.0, -1.0]))
    dense_p = torch.softmax(torch.tensor([2.0, 1.0, 0.0, -1.0]).double(), -1)
    here = torch.softmax(torch.tensor([1.5, 1.6, 0.0, -1.0]).double(), -1)
    groups = [(dense_p[0], here[0]), (dense_p[1], here[1]), (dense_p[2:].sum(), here[2:].sum())]
    expected = sum(float(p * (p / q).log()) for p, q in groups)
    assert other.series()["kl"][0] == pytest.approx(expected, abs=1e-6)
    assert expected < 0.1194247


def test_a_shift_by_one_is_noticed():
    # a model that knows every next token has no loss only when targets are aligned
    targets = [3, 1, 2]
    right, late = TargetScores(targets), TargetScores(targets)
    for number in range(3):
        right.add(100.0 * torch.nn.functional.one_hot(torch.tensor(targets[number]), 5).float())
        late.add(100.0 * torch.nn.functional.one_hot(torch.tensor(targets[number - 1]), 5).float())
    assert sum(right.series()["nll"]) < 1e-6
    assert min(late.series()["nll"]) > 99


# -- scores --------------------------------------------------------------------------------------------------


def scored(nll, **series):
    sample = Sample("ppl/8/0", 0, "b", (), 4, (), 4, (), 0, {"bytes": 16}, None, len(nll))
    return TASK.score(sample, Completion((), "", "length", {"nll": tuple(nll), **series}))


def test_golden_perplexity():
    reference = scored([2.0] * 4, prompt_nll=(8.0, 4.0))
    candidate = scored([2.2] * 4, prompt_nll=(8.0, 4.0))
    assert reference["perplexity"] == pytest.approx(7.389056, abs=1e-6)
    assert candidate["perplexity"] == pytest.approx(9.025013, abs=1e-6)
    assert candidate["perplexity"] / reference["perplexity"] == pytest.approx(1.221403, abs=1e-6)
    assert candidate["perplexity_pooled"] / reference["perplexity_pooled"] == pytest.approx(
        1.105171, abs=1e-6
    )
    assert candidate["bits_per_token"] == pytest.approx(3.173929, abs=1e-6)
    assert candidate["bits_per_byte"] == pytest.approx(3.173929 / 4, abs=1e-6)
    assert (candidate["nll_suffix"], candidate["n_targets"]) == (pytest.approx(2.2), 4)
    assert not {"kl_mean", "top1_flip"} & set(candidate)


def test_divergences_are_summed_up():
    kl = [i / 100 for i in range(200)]
    found = scored([1.0] * 200, kl=tuple(kl), flip=(1.0, *[0.0] * 199), dlogp=(-0.5, *[0.25] * 199))
    assert found["kl_mean"] == pytest.approx(0.995)
    assert found["kl_p99"] == pytest.approx(1.97)
    assert found["top1_flip"] == pytest.approx(0.005)
    assert found["abs_dlogp"] == pytest.approx((0.5 + 0.25 * 199) / 200)


def test_a_perplexity_no_float_can_hold_is_infinite():
    assert scored([800.0])["perplexity"] == math.inf


# -- runs ----------------------------------------------------------------------------------------------------


def specs(books, *modes, **changes):
    options = {"dense": {}, "naive": json.loads(json.dumps(vars_of(naive.Options())))}
    return tuple(
        RunSpec(
            model="tiny",
            task="ppl",
            mode=mode,
            **{"ctx": 300, "samples": 2, "task_options": {"corpus": books, "longest": 300}} | changes,
            mode_options=options[mode],
        )
        for mode in modes
    )


def vars_of(options):
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


def test_a_run_tells_the_distance_to_dense(tmp_path, loaded, engine, books):
    folders = execute(tmp_path / "out", engine, specs(books, "dense", "naive"), model=loaded)
    (reference,), (candidate,) = (RunReader(folder).cells() for folder in folders)
    assert (reference["metric"], reference["n"], reference["status"]) == ("perplexity", 2, "complete")
    assert reference["fill_ratio_min"] == 1.0
    assert {"kl_mean", "top1_flip", "nll_suffix"} <= set(candidate["metrics"])
    assert "kl_mean" not in reference["metrics"]
    rows = RunReader(folders[0]).examples()
    assert [len(row["series"]["nll"]) for row in rows] == [32, 32]


def test_a_run_alone_compares_only_where_asked(tmp_path, loaded, engine, books):
    for shadow in ("none", "dense"):
        options = {"corpus": books, "shadow": shadow, "longest": 300}
        batch = specs(books, "naive", samples=1, task_options=options)
        (folder,) = execute(tmp_path / shadow, engine, batch, model=loaded)
        assert ("kl_mean" in RunReader(folder).cells()[0]["metrics"]) == (shadow == "dense")


def test_a_run_that_was_stopped_ends_with_the_same_rows(tmp_path, loaded, books):
    class Stopping(Engine):
        stop = True

        def decode(self, prefill, sample, mode, options, *, audit=0.0):
            if mode.name == "naive" and self.stop:
                raise KeyboardInterrupt
            return super().decode(prefill, sample, mode, options, audit=audit)

    engine, batch = Stopping(loaded, backend="reference"), specs(books, "dense", "naive", samples=1)
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path / "a", engine, batch, model=loaded)
    engine.stop = False
    resumed = execute(tmp_path / "a", engine, batch, model=loaded, resume=True)
    at_once = execute(tmp_path / "b", engine, batch, model=loaded)
    for one, other in zip(resumed, at_once, strict=True):
        assert RunReader(one).examples() == RunReader(other).examples()


def test_stored_rows_can_be_scored_again(tmp_path, loaded, engine, books):
    (folder, _) = execute(tmp_path / "out", engine, specs(books, "dense", "naive"), model=loaded)
    again = RunReader(rescore(folder, tmp_path / "again"))
    assert [row["scores"] for row in again.examples()] == [
        row["scores"] for row in RunReader(folder).examples()
    ]


def test_nan_in_a_logit_ends_in_an_incomplete_run(tmp_path, books):
    model = tiny_model()
    engine = Engine(tiny_loaded(model), backend="reference")
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    (folder,) = execute(tmp_path / "out", engine, specs(books, "dense"), model=tiny_loaded(model))
    reader = RunReader(folder)
    assert [row["status"] for row in reader.examples()] == ["nan", "nan"]
    assert [problem["code"] for problem in reader.summary["problems"]] == [6]


@pytest.mark.slow
def test_the_real_model_decodes_what_it_predicts():
    from rcq_cli.models import smollm2_135m

    loaded = smollm2_135m.SOURCE.load("smollm2-135m", device="cpu", dtype="auto")
    engine = Engine(loaded, backend="reference")
    request = TaskRequest("", 1024, 1, 0, Options(target_tokens=64))
    (sample,) = TASK.samples(request, loaded.tokenizer)
    prefill = engine.prefill(sample.prompt_ids[: sample.context_len])
    found = engine.decode(prefill, sample, dense.MODE, dense.Options()).completion.series["nll"]
    expected = nll_of_one_forward(loaded.model, sample)[-64:]
    assert math.fsum(found) == pytest.approx(float(expected.sum()), rel=1e-3)
    assert max(abs(f - float(e)) for f, e in zip(found, expected, strict=True)) < 1e-3
    print(f"mean NLL {math.fsum(found) / 64:.6f} nats, one forward pass {float(expected.mean()):.6f}")  # noqa: T201
