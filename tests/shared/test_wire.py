"""Batches as bytes: they come back bit for bit, and invalid bytes are refused."""

import hashlib
import json
import math
import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import wire
from shared.batch import Batch, BatchError, StepRewards, TokenGroup
from shared.sampling_mask import SamplingMask

ID = "01890a5d-ac96-774b-bcce-b302099a8057"

Tensors = dict[str, Any]
Metadata = dict[str, Any]


def valid(*, scored: bool = True) -> tuple[Tensors, Metadata]:
    """A batch written only from API.md, with all optional parts."""
    tensors: Tensors = {
        "prompt_ids": np.array([5, 6, 7], np.int64),
        "teacher_prompt_ids": np.array([6, 7], np.int64),
        "completion_ids": np.array([1, 2, 3, 4, 5], np.int64),
        "completion_lengths": np.array([2, 3], np.int64),
        "rewards": np.array([0.5, np.nan], np.float32),
        "finished": np.array([True, False]),
        "sampler_logps": np.array([-1, -2, -3, -4, -5], np.float32),
        "loss_mask": np.array([True, True, False, True, True]),
        "sampling_mask_ids": np.array([9, 1, 2, 4, 5, 3], np.int32),
        "sampling_mask_counts": np.array([2, 1, 0, 1, 2], np.int64),
        "policy_versions": np.array([7, 8], np.int64),
        "reward/format": np.array([1, 0], np.float32),
        "step_rewards": np.array([1, np.nan, 0], np.float32),
        "step_ends": np.array([1, 0, 2], np.int64),
        "step_counts": np.array([1, 2], np.int64),
    }
    metadata: Metadata = {
        "format": "rollout-batch/1",
        "id": ID,
        "run": "a run",
        "epoch": "2",
        "policy_version": "7",
        "temperature": "0.9",
        "top_p": "0.95",
        "top_k": "50",
        "task": "gsm8k",
        "index": "17",
        "sample": '{"seed": 1}',
    }
    if scored:
        tensors["ref_logps"] = np.array([-1, -2, -3, -4, -6], np.float32)
        tensors["teacher_logps"] = np.array([-2, -1, -3, -5, -7], np.float32)
        metadata |= {"format": "scored-batch/1", "reference_version": "0"}
    return tensors, metadata


def raw(header: dict[str, Any] | bytes, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def parts(body: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(body[:8], "little")
    return json.loads(body[8 : 8 + size]), body[8 + size :]


def refusal(body: bytes) -> BatchError:
    """The BatchError with which `decode` refuses a body."""
    with pytest.raises(BatchError) as caught:
        wire.decode(body)
    str(caught.value).encode()  # can be reported as UTF-8
    return caught.value


# ---------------------------------------------------------------- round trips

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(str.isprintable)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
rewards = st.floats(-1e6, 1e6, width=32) | st.just(math.nan)
logps = st.floats(max_value=0, width=32, allow_infinity=False)
versions = st.integers(0, 2**63 - 1)


def arrays(elements: Any, size: int, dtype: Any) -> Any:
    return st.lists(elements, min_size=size, max_size=size).map(lambda values: np.array(values, dtype))


IMAGE_NAMES = st.from_regex(r"\A[a-z][a-z0-9_]{0,39}\Z")


@st.composite
def images(draw: Any) -> dict[str, np.ndarray]:
    """Tensors of one to five dimensions, of every dtype."""
    shapes = st.lists(st.integers(1, 3), min_size=1, max_size=5)
    values = {np.float32: floats, np.uint8: st.integers(0, 255), np.int64: st.integers(-(2**63), 2**63 - 1)}
    tensors = {}
    for name in draw(st.lists(IMAGE_NAMES, max_size=8, unique=True)):
        shape, dtype = draw(shapes), draw(st.sampled_from([*values]))
        tensors[name] = draw(arrays(values[dtype], math.prod(shape), dtype)).reshape(shape)
    return tensors


@st.composite
def groups(draw: Any) -> TokenGroup:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    tokens = st.integers(0, 2**31 - 1)
    prompt = draw(st.integers(1, 6))
    completion = draw(arrays(tokens, sum(lengths), np.int64))
    return TokenGroup(
        draw(arrays(tokens, prompt, np.int64)),
        completion,
        np.array(lengths, np.int64),
        draw(st.just({}) | images()),
        draw(st.none() | sampling_masks(completion)),
        draw(st.none() | arrays(tokens, 3, np.int64)),
    )


@st.composite
def sampling_masks(draw: Any, completion: np.ndarray) -> SamplingMask:
    others = st.lists(st.integers(0, 2**31 - 1), max_size=3)
    kept = [[*draw(others), token, *draw(others)] if draw(st.booleans()) else [] for token in completion.tolist()]
    return SamplingMask.of([np.array(ids, np.int32) for ids in kept])


@st.composite
def step_rewards(draw: Any, group: TokenGroup) -> StepRewards:
    ends = [sorted(draw(st.sets(st.integers(0, int(n) - 1), max_size=3))) for n in group.completion_lengths]
    flat = [end for row in ends for end in row]
    return StepRewards(
        rewards=draw(arrays(rewards, len(flat), np.float32)),
        ends=np.array(flat, np.int64),
        counts=np.array([len(row) for row in ends], np.int64),
    )


@st.composite
def rollouts(draw: Any) -> Batch:
    group = draw(groups())
    size, tokens = group.size, len(group.completion_ids)
    policy_versions = draw(st.none() | arrays(versions, size, np.int64))
    return Batch(
        id=str(draw(st.uuids(version=4))),
        run=draw(names),
        epoch=draw(versions),
        policy_version=draw(versions) if policy_versions is None else int(policy_versions.min()),
        temperature=draw(st.floats(1e-3, 1e3)),
        group=group,
        rewards=draw(arrays(rewards, size, np.float32)),
        finished=draw(arrays(st.booleans(), size, np.bool_)),
        sampler_logps=draw(st.none() | arrays(logps, tokens, np.float32)),
        loss_mask=draw(st.none() | arrays(st.booleans(), tokens, np.bool_)),
        policy_versions=policy_versions,
        reward_parts=draw(st.dictionaries(names, arrays(rewards, size, np.float32), max_size=3)),
        steps=draw(st.none() | step_rewards(group)),
        top_p=draw(st.none() | st.floats(0, 1, exclude_min=True)),
        top_k=draw(st.none() | versions),
        lineage=draw(st.just("") | st.from_regex(r"\A[A-Za-z0-9._-]{1,40}\Z")),
        task=draw(st.none() | names),
        index=draw(st.none() | st.integers(0, 10**12)),
        sample=draw(st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3).map(json.dumps)),
    )


@st.composite
def batches(draw: Any) -> Batch:
    batch = draw(rollouts())
    logp_arrays = arrays(logps, len(batch.group.completion_ids), np.float32)
    scores = {"ref_logps": logp_arrays, "reference_version": names, "teacher_logps": st.none() | logp_arrays}
    return draw(st.just(batch) | st.builds(replace, st.just(batch), **scores))


def flat(value: Any) -> Any:
    """A batch as plain values that compare bit for bit, NaN and -0.0 included."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Batch | TokenGroup | SamplingMask | StepRewards):
        return type(value), {name: flat(getattr(value, name)) for name in value.__dataclass_fields__}
    if hasattr(value, "items"):
        return {name: flat(item) for name, item in value.items()}
    return type(value), repr(value)


@settings(max_examples=150, deadline=None)
@given(batches())
def test_comes_back_bit_for_bit(batch: Batch) -> None:
    body = wire.encode(batch)
    again = wire.decode(body)
    assert flat(again) == flat(batch)
    assert wire.content_hash(wire.encode(again)) == wire.content_hash(body)


@settings(max_examples=100, deadline=None)
@given(batches())
def test_scores_are_added_without_decoding(batch: Batch) -> None:
    body = wire.encode(batch.without_scores())
    scores = None
    if batch.ref_logps is not None and batch.reference_version is not None:
        scores = wire.encode_scores(
            batch.ref_logps, batch.reference_version, batch.teacher_logps, images=bool(batch.group.images)
        )
    joined = wire.with_scores(body, scores)
    assert flat(wire.decode(joined)) == flat(batch)
    assert wire.content_hash(joined) == wire.content_hash(wire.encode(batch))
    check_alignment(joined)


def check_alignment(body: bytes) -> None:
    """Readers that map a file need each tensor at a multiple of its item size."""
    sizes = {"I64": 8, "F32": 4}
    start = 8 + int.from_bytes(body[:8], "little")
    header, _ = parts(body)
    assert start % 8 == 0
    offsets = [
        (part["data_offsets"][0], sizes.get(part["dtype"], 1)) for name, part in header.items() if name[0] != "_"
    ]
    assert [place for place, size in offsets if place % size] == []


def test_other_libraries_read_what_was_joined(tmp_path: Path) -> None:
    """With pictures of bytes, which have no alignment and follow the scores; an odd number of log-probs; any text."""
    sample = '"é \\u2028"'
    upload = wire.decode(with_images({"mask": np.arange(3, dtype=np.uint8)}, sample=sample))
    logps = np.array([-1, -2, -3, -4, -6], np.float32)
    file = tmp_path / "joined"
    file.write_bytes(wire.with_scores(wire.encode(upload), wire.encode_scores(logps, "7", images=True)))
    check_alignment(file.read_bytes())
    expected = safetensors.numpy.load(wire.encode(replace(upload, ref_logps=logps, reference_version="7")))
    for read in (safetensors.numpy.load_file(file), safetensors.torch.load_file(file)):
        assert {name: flat(np.asarray(tensor)) for name, tensor in read.items()} == {
            name: flat(tensor) for name, tensor in expected.items()
        }
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata()["sample"] == sample


@pytest.mark.parametrize("bad", [np.nan, -np.inf, 1.0])
def test_scores_that_are_no_log_probs_are_refused(bad: float) -> None:
    good, bad_logps = np.zeros(2, np.float32), np.array([0, bad], np.float32)
    with pytest.raises(BatchError, match="ref_logps"):
        wire.encode_scores(bad_logps, "7")
    with pytest.raises(BatchError, match="teacher_logps"):
        wire.encode_scores(good, "7", bad_logps)


def test_arrays_that_do_not_lie_together() -> None:
    tensors, metadata = valid(scored=False)
    batch = wire.decode(safetensors.numpy.save(tensors, metadata))
    assert batch.ref_logps is None
    ids = np.repeat(batch.group.completion_ids, 2)[::2]
    strided = replace(batch, group=replace(batch.group, completion_ids=ids))
    assert flat(wire.decode(wire.encode(strided))) == flat(batch)


@pytest.mark.parametrize("scored", [True, False])
def test_reads_what_other_libraries_write(tmp_path: Path, scored: bool) -> None:
    tensors, metadata = valid(scored=scored)
    safetensors.numpy.save_file(tensors, tmp_path / "numpy", metadata)
    by_torch = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    safetensors.torch.save_file(by_torch, tmp_path / "torch", metadata)
    for name in ("numpy", "torch"):
        batch = wire.decode((tmp_path / name).read_bytes())
        assert (batch.ref_logps is not None) == scored
        assert (batch.epoch, batch.policy_version, batch.top_k, batch.top_p) == (2, 7, 50, 0.95)
        assert batch.temperature == 0.9
        assert batch.group.completions()[1].tolist() == [3, 4, 5]
        assert batch.sample == '{"seed": 1}'


def test_others_read_what_is_written() -> None:
    tensors, metadata = valid()
    body = wire.encode(wire.decode(safetensors.numpy.save(tensors, metadata)))
    read = safetensors.numpy.load(body)
    assert {name: flat(tensor) for name, tensor in read.items()} == {n: flat(t) for n, t in tensors.items()}
    assert parts(body)[0]["__metadata__"] == metadata


@pytest.mark.parametrize("text", ["1", "1.0", "0.7", "1e-3", "1E+2", "1.", "007"])
def test_numbers_of_other_languages(text: str) -> None:
    tensors, metadata = valid(scored=False)
    batch = wire.decode(safetensors.numpy.save(tensors, metadata | {"temperature": text}))
    assert batch.ref_logps is None
    assert batch.temperature == float(text)


def test_encode_refuses_what_decode_would() -> None:
    tensors, metadata = valid(scored=False)
    batch = wire.decode(safetensors.numpy.save(tensors, metadata))
    assert batch.ref_logps is None
    many = {f"{index:0200}": tensors["rewards"] for index in range(400)}
    with pytest.raises(BatchError) as caught:
        wire.encode(replace(batch, reward_parts=many))
    assert caught.value.field == "header"


def test_whatever_is_admitted_can_be_scored() -> None:
    """A header of the largest size grows by what scoring adds: it would be taken, and then never scored."""
    tensors, metadata = valid(scored=False)
    parts = {f"reward/{index:0190}": tensors["rewards"] for index in range(230)}
    plain = safetensors.numpy.save(tensors | parts, metadata | {"temperature": "1e-3", "sample": '""'})
    room = wire.MAX_HEADER_BYTES - int.from_bytes(plain[:8], "little")
    assert 0 < room < 16 * 1024
    sample = '"' + "x" * room + '"'
    largest = safetensors.numpy.save(tensors | parts, metadata | {"temperature": "1e-3", "sample": sample})
    assert int.from_bytes(largest[:8], "little") == wire.MAX_HEADER_BYTES
    rollout = wire.decode(largest)
    assert rollout.ref_logps is None
    scored = replace(rollout, ref_logps=np.zeros(5, np.float32), reference_version="x" * 200)
    assert flat(wire.decode(wire.encode(scored))) == flat(scored)
    assert scored.ref_logps is not None
    scores = wire.encode_scores(scored.ref_logps, "x" * 200, scored.ref_logps)
    assert flat(wire.decode(wire.with_scores(largest, scores))) == flat(replace(scored, teacher_logps=scored.ref_logps))
    too_large = safetensors.numpy.save(tensors | parts, metadata | {"sample": '"' + "x" * (room + 8) + '"'})
    assert refusal(too_large).field == "header"


# ---------------------------------------------------------------- images


def with_images(more: Tensors, *, scored: bool = False, **about: str) -> bytes:
    """A batch with two image tensors, and more of these names, written only from API.md."""
    tensors, metadata = valid(scored=scored)
    given = {
        "pixel_values": np.arange(24, dtype=np.float32).reshape(4, 6),
        "image_grid_thw": np.array([[1, 2, 2]]),
        **more,
    }
    tensors |= {f"image/{name}": tensor for name, tensor in given.items()}
    kind = "scored" if scored else "rollout"
    return safetensors.numpy.save(tensors, metadata | about | {"format": f"{kind}-batch/2"})


@pytest.mark.parametrize("scored", [True, False])
def test_images_come_back(scored: bool) -> None:
    body = with_images({"mask": np.arange(8, dtype=np.uint8).reshape(2, 1, 2, 1, 2)}, scored=scored)
    group = wire.decode(body).group
    assert set(group.images) == {"image_grid_thw", "mask", "pixel_values"}
    assert (group.images["pixel_values"].dtype, group.images["mask"].shape) == (np.float32, (2, 1, 2, 1, 2))
    assert group.images["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert group.image_bytes == 96 + 24 + 8
    again = wire.encode(wire.decode(body))
    assert wire.content_hash(again) == wire.content_hash(body)
    assert parts(again)[0]["__metadata__"]["format"] == f"{'scored' if scored else 'rollout'}-batch/2"


def test_both_halves_of_a_group_have_its_images() -> None:
    group = wire.decode(with_images({})).group
    for half in group.halves():
        assert half.size == 1 and flat(half.images) == flat(group.images)


def test_a_batch_without_images_is_written_as_before() -> None:
    """Byte for byte: the metadata's order is the only thing that safetensors does not fix."""
    tensors, metadata = valid()
    body = safetensors.numpy.save(tensors, metadata)
    again = wire.encode(wire.decode(body))
    assert len(again) == len(body) and parts(again) == parts(body)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"format": "rollout-batch/1"}, "'rollout-batch/2' with images"),
        ({"format": "scored-batch/1"}, "'scored-batch/2' with images"),
    ],
)
def test_images_need_their_format(change: Metadata, remedy: str) -> None:
    header, data = parts(with_images({}))
    header["__metadata__"] |= change
    error = refusal(raw(header, data))
    assert error.field == "format" and remedy in str(error)


@pytest.mark.parametrize("kind", ["rollout", "scored"])
def test_their_format_needs_images(kind: str) -> None:
    tensors, metadata = valid(scored=kind == "scored")
    error = refusal(safetensors.numpy.save(tensors, metadata | {"format": f"{kind}-batch/2"}))
    assert error.field == "format" and f"'{kind}-batch/1' without images" in str(error)


@pytest.mark.parametrize(
    ("field", "tensors"),
    [
        ("image/pixel_values", {"pixel_values": np.zeros((4, 6))}),
        ("image/pixel_values", {"pixel_values": np.zeros((4, 6), np.float16)}),
        ("image/pixel_values", {"pixel_values": np.zeros((4, 6), np.bool_)}),
        ("image/pixel_values", {"pixel_values": np.zeros((4, 0), np.float32)}),
        ("image/pixel_values", {"pixel_values": np.zeros((), np.float32)}),
        ("image/pixel_values", {"pixel_values": np.zeros((1,) * 6, np.float32)}),
        ("image/pixel_values", {"pixel_values": np.array([[1, np.nan]], np.float32)}),
        ("image/pixel_values", {"pixel_values": np.array([[1, -np.inf]], np.float32)}),
        ("image", {f"more_{number}": np.zeros(1, np.uint8) for number in range(7)}),
        *(
            (f"image/{name}"[:80], {name: np.zeros(1, np.uint8)})
            for name in (
                "../etc/passwd",
                "",
                "A",
                "0",
                "a/b",
                "a.b",
                "a b",
                "a\n",
                "\N{LATIN SMALL LETTER E WITH ACUTE}",
                "a" * 41,
            )
        ),
    ],
)
def test_refuses_image_tensors(field: str, tensors: dict[str, np.ndarray]) -> None:
    assert refusal(with_images(tensors)).field == field


def memory_to_decode(body: bytes) -> int:
    """Most bytes that were allocated at once."""
    tracemalloc.start()
    try:
        wire.decode(body)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_large_picture_is_held_at_most_thrice() -> None:
    body = with_images({"pixel_values": np.ones((2000, 1176), np.float32)})
    assert memory_to_decode(body) < 3 * len(body)


# ---------------------------------------------------------------- content


def test_content_does_not_depend_on_order() -> None:
    tensors, metadata = valid()
    body = safetensors.numpy.save(tensors, metadata)
    header, data = parts(body)
    hashes = {wire.content_hash(body)}
    for seed in range(5):
        shuffled, order = random.Random(seed), list(tensors)
        shuffled.shuffle(order)
        # Other places in the file, other order in the header, other white space, padding.
        offset, chunks, entries = 0, [], []
        for name in order:
            begin, end = header[name]["data_offsets"]
            chunks.append(data[begin:end])
            entries.append((name, header[name] | {"data_offsets": [offset, offset + end - begin]}))
            offset += end - begin
        pairs = list(metadata.items())
        shuffled.shuffle(pairs)
        entries.insert(seed, ("__metadata__", dict(pairs)))
        text = json.dumps(dict(entries), indent=seed or None).encode() + b" " * seed
        other = raw(text, b"".join(chunks))
        assert flat(wire.decode(other)) == flat(wire.decode(body))
        hashes.add(wire.content_hash(other))
    assert len(hashes) == 1


def test_content_hash_is_the_same_in_every_process_and_version() -> None:
    """Stored hashes outlive processes and releases: a new formula would turn every repeated upload into a conflict."""
    tensors, metadata = valid()
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(json.dumps([name, tensors[name].dtype.str, tensors[name].shape]).encode())
        digest.update(tensors[name].tobytes())
    assert wire.content_hash(safetensors.numpy.save(tensors, metadata)) == digest.digest()


# ---------------------------------------------------------------- breaches


def tensor(name: str, value: Any, dtype: Any = None) -> Callable[[Tensors, Metadata], None]:
    def change(tensors: Tensors, _: Metadata) -> None:
        tensors[name] = np.array(value, tensors[name].dtype if dtype is None else dtype)

    return change


def pair(name: str, value: str) -> Callable[[Tensors, Metadata], None]:
    return lambda _, metadata: metadata.update({name: value})


def without(name: str) -> Callable[[Tensors, Metadata], None]:
    def change(tensors: Tensors, metadata: Metadata) -> None:
        tensors.pop(name, None)
        metadata.pop(name, None)

    return change


def unscored_but_for(kept: str) -> Callable[[Tensors, Metadata], None]:
    def change(tensors: Tensors, metadata: Metadata) -> None:
        metadata["format"] = "rollout-batch/1"
        for name in {"ref_logps", "teacher_logps", "reference_version"} - {kept}:
            without(name)(tensors, metadata)

    return change


DTYPES = [(name, tensor(name, np.zeros(tensor_value.shape), np.float64)) for name, tensor_value in valid()[0].items()]
SHAPES = [(name, lambda tensors, _, name=name: tensors.update({name: tensors[name][None]})) for name in valid()[0]]
MISSING = [
    (name, without(name))
    for name in (
        *("prompt_ids", "completion_ids", "completion_lengths", "rewards", "finished", "ref_logps"),
        *("step_rewards", "step_ends", "step_counts", "sampling_mask_ids", "sampling_mask_counts"),
        *("format", "id", "run", "epoch", "policy_version", "temperature", "reference_version"),
    )
]
SHORT = [
    (name, tensor(name, valid()[0][name][:1]))
    for name in (
        *("rewards", "finished", "sampler_logps", "loss_mask", "policy_versions", "reward/format"),
        *("ref_logps", "teacher_logps", "sampling_mask_counts"),
    )
]
ARABIC_ONE = "\N{ARABIC-INDIC DIGIT ONE}"
BAD_INTEGERS = ("", "-1", "1_0", " 1", "1 ", "1\n", "+1", "1.0", "0x1", ARABIC_ONE, "1e3", "true", "9" * 19, "1" * 5000)
BAD_NUMBERS = (
    *("", "1_0", " 1", "1 ", "1\n", "+1", "0x1p0", ARABIC_ONE, "nan", "NaN", "inf", "Infinity", "1e999", "1e-999", "0"),
    *("-1", "-0.0", "1,0", ".", "1e", "1e1.5", "9" * 400),
)
BREACHES: list[tuple[str, Callable[[Tensors, Metadata], None]]] = [
    *DTYPES,
    *SHAPES,
    *MISSING,
    *SHORT,
    ("prompt_ids", tensor("prompt_ids", [])),
    ("teacher_prompt_ids", tensor("teacher_prompt_ids", [])),
    ("completion_ids", tensor("completion_ids", [])),
    ("completion_lengths", tensor("completion_lengths", [])),
    ("completion_lengths", tensor("completion_lengths", [2, 2])),
    ("completion_lengths", tensor("completion_lengths", [5, 0])),
    ("completion_lengths", tensor("completion_lengths", [6, -1])),
    ("completion_lengths", tensor("completion_lengths", [2**62] * 4 + [5])),
    ("completion_lengths", tensor("completion_lengths", [2**63 - 1, -(2**63), 6])),
    ("rewards", tensor("rewards", [1, np.inf])),
    ("reward/format", tensor("reward/format", [1, -np.inf])),
    ("reward/", lambda tensors, _: tensors.update({"reward/": tensors["rewards"]})),
    ("reward/a\n", lambda tensors, _: tensors.update({"reward/a\n": tensors["rewards"]})),
    ("sampler_logps", tensor("sampler_logps", [-1, -2, -3, -4, np.nan])),
    ("sampler_logps", tensor("sampler_logps", [-1, -2, -3, -4, -np.inf])),
    ("ref_logps", tensor("ref_logps", [-1, -2, -3, -4, np.nan])),
    ("ref_logps", tensor("ref_logps", [-1, -2, -3, -4, 0.01])),
    ("teacher_logps", tensor("teacher_logps", [-1, -2, -3, -4, np.nan])),
    ("teacher_logps", tensor("teacher_logps", [-1, -2, -3, -4, 0.1])),
    ("policy_versions", tensor("policy_versions", [8, 8])),
    ("sampling_mask_counts", tensor("sampling_mask_counts", [2, 1, 0, 1, 1])),
    ("sampling_mask_counts", tensor("sampling_mask_counts", [2, 1, -1, 2, 2])),
    ("sampling_mask_counts", tensor("sampling_mask_counts", [2**62] * 4 + [6])),
    ("sampling_mask_ids", tensor("sampling_mask_ids", [9, 8, 2, 4, 5, 3])),
    ("sampling_mask_ids", tensor("sampling_mask_ids", [9, 1, 2, 5, 4, 3])),
    ("step_rewards", tensor("step_rewards", [1, np.inf, 0])),
    ("step_ends", tensor("step_ends", [1, 2, 0])),
    ("step_ends", tensor("step_ends", [2, 0, 2])),
    ("step_ends", tensor("step_ends", [1, -1, 2])),
    ("step_ends", tensor("step_ends", [1, 0])),
    ("step_counts", tensor("step_counts", [1, 1])),
    ("step_counts", tensor("step_counts", [4, -1])),
    ("step_counts", tensor("step_counts", [3])),
    ("unknown", lambda tensors, _: tensors.update({"unknown": tensors["rewards"]})),
    ("unknown", pair("unknown", "x")),
    ("format", pair("format", "rollout-batch/2")),
    ("ref_logps", pair("format", "rollout-batch/1")),
    ("teacher_logps", unscored_but_for("teacher_logps")),
    ("reference_version", unscored_but_for("reference_version")),
    ("reference_version", pair("reference_version", "")),
    ("id", pair("id", "1")),
    ("id", pair("id", ID.upper())),
    ("run", pair("run", "")),
    ("run", pair("run", "a\0b")),
    ("task", pair("task", "")),
    ("lineage", pair("lineage", "")),
    ("lineage", pair("lineage", "a b")),
    ("sample", pair("sample", "{")),
    ("sample", pair("sample", '"' + "x" * 16384 + '"')),
    ("top_p", pair("top_p", "1.5")),
    *[(name, pair(name, text)) for name in ("epoch", "policy_version", "top_k", "index") for text in BAD_INTEGERS],
    *[(name, pair(name, text)) for name in ("temperature", "top_p") for text in BAD_NUMBERS],
]


@pytest.mark.parametrize(("field", "change"), BREACHES)
def test_refuses_naming_the_field(field: str, change: Callable[[Tensors, Metadata], None]) -> None:
    tensors, metadata = valid()
    change(tensors, metadata)
    assert refusal(safetensors.numpy.save(tensors, metadata)).field == field


def test_refuses_a_truth_value_that_is_neither() -> None:
    body = bytearray(safetensors.numpy.save(*valid()))
    header, data = parts(bytes(body))
    for name in ("finished", "loss_mask"):
        changed = bytearray(data)
        changed[header[name]["data_offsets"][0] + 1] = 2
        assert refusal(raw(header, bytes(changed))).field == name


# ---------------------------------------------------------------- bytes that lie


def altered(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A valid body whose header was tampered with."""
    header, data = parts(safetensors.numpy.save(*valid()))
    change(header)
    return raw(header, data)


def header_text(old: str, new: str) -> bytes:
    header, data = parts(safetensors.numpy.save(*valid()))
    text = json.dumps(header)
    assert old in text
    return raw(text.replace(old, new, 1).encode("utf-8", "surrogatepass"), data)


PROMPT = {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]}
BODIES: list[tuple[str, bytes]] = [
    ("body", b""),
    ("body", b"{}"),
    ("body", b"\0" * 7),
    ("header", b"\0" * 8),
    ("body", raw({}, size=2**64 - 1)),
    ("body", raw({}, size=2**63)),
    ("body", raw({}, size=3)),
    ("header", raw(b" " * (wire.MAX_HEADER_BYTES + 1))),
    ("header", raw(b"{}" + b" " * wire.MAX_HEADER_BYTES)),
    ("header", raw(b"[]")),
    ("header", raw(b"\xff\xfe{}")),
    ("header", raw(b"[" * 60_000)),
    ("header", raw(b'{"a":' * 10_000 + b"1" + b"}" * 10_000)),
    ("body", raw(b'{"rewards":' + b"[" * 500 + b"]" * 500 + b"}")),
    ("header", raw(b'{"rewards": {}, "rewards": {}}')),
    ("header", raw(b'{"__metadata__": {"id": "1", "id": "2"}}')),
    ("header", raw(b'{"rewards": {"dtype": "F32", "dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}')),
    ("header", raw(b'{"\\ud800": {}}')),
    ("header", raw(b'{"__metadata__": {"\\udfff": ""}}')),
    ("body", header_text('"a run"', '"\ud800"')),  # not UTF-8 at all
    ("header", header_text('"run"', '"\ud800"')),
    ("body", header_text('"a run"', '"\\ud800"')),
    ("body", header_text('"{\\"seed\\": 1}"', '"\\"\\ud800\\""')),
    ("__metadata__", altered(lambda header: header.update(__metadata__=None))),
    ("__metadata__", altered(lambda header: header.update(__metadata__=[]))),
    ("__metadata__", altered(lambda header: header["__metadata__"].update(epoch=1))),
    ("__metadata__", altered(lambda header: header["__metadata__"].update(run=None))),
    ("__metadata__", altered(lambda header: header["__metadata__"].update(sample={"seed": 1}))),
    ("format", altered(lambda header: header.pop("__metadata__"))),
    ("body", altered(lambda header: header.update(rewards=1))),
    ("body", altered(lambda header: header["rewards"].update(data_offsets=[0, 2**63]))),
    ("body", altered(lambda header: header["rewards"].update(data_offsets=header["prompt_ids"]["data_offsets"]))),
    ("body", altered(lambda header: header["rewards"].update(shape=[2**62]))),
    ("body", altered(lambda header: header["rewards"].update(dtype="I99"))),
    ("rewards", altered(lambda header: header["rewards"].update(dtype="I32"))),
    # Python writes each number with 18 digits: with scores the header would be beyond the limit.
    ("rewards", header_text('"rewards": {', '"rewards": {"x": [' + ", ".join(["1e15"] * 8000) + "], ")),
    ("rewards", altered(lambda header: header["rewards"].update(shape=[1, 2]))),
    ("rewards", altered(lambda header: header["rewards"].update(shape=[1] * 100 + [2]))),
    ("rewards", raw({"rewards": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, b"1234")),
    ("rewards", raw({"rewards": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}})),
    ("body", raw({"rewards": {"dtype": "F32", "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}})),
    ("body", raw({"prompt_ids": PROMPT}, b"\0" * 23)),
    ("body", raw({"prompt_ids": PROMPT}, b"\0" * 25)),
    ("format", raw({"prompt_ids": PROMPT}, b"\0" * 24)),
    ("body", safetensors.numpy.save(*valid()) + b"\0"),
    ("body", raw(json.dumps({"prompt_ids": PROMPT}).encode("utf-16"), b"\0" * 24)),
]


@pytest.mark.parametrize(("field", "body"), BODIES)
def test_refuses_bytes_that_lie(field: str, body: bytes) -> None:
    assert refusal(body).field == field
    if field != "format":  # a plain safetensors file without metadata has a content, but is no batch
        with pytest.raises(BatchError):
            wire.content_hash(body)


def test_a_long_header_is_refused_before_it_is_parsed() -> None:
    assert str(refusal(raw(b"[" * (wire.MAX_HEADER_BYTES + 2000)))).startswith("header must be at most ")


def test_every_truncation_is_refused() -> None:
    body = safetensors.numpy.save(*valid())
    for length in range(len(body)):
        refusal(body[:length])


def test_nothing_is_allocated_by_a_claimed_length() -> None:
    lengths = valid()
    lengths[0]["completion_lengths"] = np.array([2**62, 2**62], np.int64)
    counts = valid()
    counts[0]["step_counts"] = np.array([2**62, 3], np.int64)
    bodies = [body for _, body in BODIES]
    bodies += [safetensors.numpy.save(*lengths), safetensors.numpy.save(*counts)]
    with pytest.raises(BatchError):  # warm up, so that caches are not counted
        wire.decode(bodies[-1])
    tracemalloc.start()
    try:
        for body in bodies:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            refusal(body)
            assert tracemalloc.get_traced_memory()[1] - before < 64 * len(body) + 2**20
    finally:
        tracemalloc.stop()


def test_a_large_body_is_held_at_most_thrice() -> None:
    tensors, metadata = valid(scored=False)
    size = 500_000
    tensors = {name: tensors[name] for name in ("prompt_ids", "rewards", "finished")}
    tensors |= {
        "completion_ids": np.arange(2 * size, dtype=np.int64),
        "completion_lengths": np.array([size, size], np.int64),
    }
    body = safetensors.numpy.save(tensors, metadata)
    assert memory_to_decode(body) < 3 * len(body)


def test_a_large_mask_is_held_at_most_thrice() -> None:
    tensors, metadata = valid(scored=False)
    tensors["sampling_mask_counts"] = np.array([10**6, 0, 0, 0, 2 * 10**6], np.int64)
    ids = np.zeros(3 * 10**6, np.int32)
    ids[[17, -1]] = [1, 5]
    body = safetensors.numpy.save(tensors | {"sampling_mask_ids": ids}, metadata)
    assert memory_to_decode(body) < 3 * len(body)


def test_a_hostile_group_takes_no_time() -> None:
    """A body may hold as many rows as tokens."""
    tensors, metadata = valid(scored=False)
    size = 100_000
    ones = np.ones(size, np.int64)
    body = safetensors.numpy.save(
        {
            "prompt_ids": tensors["prompt_ids"],
            "completion_ids": ones,
            "completion_lengths": ones,
            "rewards": np.zeros(size, np.float32),
            "finished": np.ones(size, bool),
            "step_rewards": np.zeros(size, np.float32),
            "step_ends": np.zeros(size, np.int64),
            "step_counts": ones,
        },
        metadata,
    )
    start = time.thread_time()
    wire.decode(body)
    assert time.thread_time() - start < 5
