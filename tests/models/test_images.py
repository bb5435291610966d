"""Images: blobs and their checks, a LLaVA in engine, learner and transformers, and exact mode."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vision_kit import TEMPLATES, llava, picture, seeing_model  # noqa: F401

from actors.engine import Completion, CompletionRequest
from actors.engine_generic import GenericEngine
from asyncrl.contract.blobs import images
from asyncrl.contract.errors import BadMessage, ConfigError
from asyncrl.contract.messages import ModelShape, Prompt, TrainingSequence
from asyncrl.contract.versions import Label
from asyncrl.models import image_tokens, pictures, policy
from asyncrl.models.tokenizer import encode_prompt, load_tokenizer
from asyncrl.supervise import exact_check
from asyncrl.transport import arrays

CONTEXT = 32
SHOWN = ((picture(0),), (picture(1), picture(2)), ())  # the images of three prompts


def encoded(kind: str, mode: str = "RGB", size: tuple[int, int] = (5, 3), **more: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, **more)
    return file.getvalue()


def test_a_file_becomes_one_png_with_the_same_pixels() -> None:
    plain = encoded("PNG")
    assert pictures.build_blob(plain) is plain  # it is one
    for file in (encoded("JPEG"), encoded("PNG", "P"), encoded("PNG", "L"), encoded("PNG", "RGBA")):
        blob = pictures.build_blob(file)
        assert images.read_size(blob) == (5, 3)
        shown = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
        assert np.array_equal(pictures.decode_pixels(blob), shown)
    turned = Image.Exif()
    turned[0x0112] = 6  # a camera held upright
    assert images.read_size(pictures.build_blob(encoded("JPEG", exif=turned))) == (3, 5)
    url = images.to_data_url(plain)
    assert pictures.decode_data_url(url) == plain and url.startswith("data:image/png;base64,")
    small = pictures.build_thumbnail_url(picture(0, 200))
    assert images.read_size(pictures.decode_data_url(small)) == (96, 96)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "neither a PNG nor a JPEG"),
        (b"GIF89a" + bytes(40), "neither a PNG nor a JPEG"),
        (encoded("PNG")[:60], "it is damaged"),
        (encoded("JPEG")[:60], "it is damaged|neither"),
        (encoded("PNG", size=(4097, 1)), "4097 x 1 pixels; a side has at most 4096"),
        (bytes(pictures.MOST_FILE_BYTES + 1), "20971521 bytes; an image has at most"),
    ],
    ids=["empty", "gif", "cut png", "cut jpeg", "wide", "large"],
)
def test_what_is_no_image_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pictures.build_blob(data)


def test_a_blob_is_checked_by_its_head_and_its_digest() -> None:
    blob = picture(0)
    images.check_blobs(images.index_by_digest([blob]))
    assert images.read_size(blob[: 8 + images.HEADER.size]) == images.read_size(blob)
    largest = blob[:16] + b"\0\0\x10\0" * 2 + blob[24:]
    assert images.read_size(largest) == (images.MOST_SIDE, 4096)
    damaged = blob[:60] + bytes([blob[60] ^ 1]) + blob[61:]
    for bad, said in (
        ({images.digest(blob): damaged}, f"digest {images.digest(blob)[:32]!r} that has another"),
        (images.index_by_digest([encoded("JPEG")]), "^an image that is not a PNG$"),
        (images.index_by_digest([encoded("PNG", "L")]), "not a PNG of 8-bit RGB pixels$"),
        (images.index_by_digest([blob[: 7 + images.HEADER.size]]), "^an image that is not a PNG$"),
        (images.index_by_digest([blob[:16] + b"\0" * 7 + b"\1" + blob[24:]]), "0 x 1 pixels"),
        (images.index_by_digest([blob[:19] + b"\1\0\0\0\0" + blob[24:]]), "1 x 0 pixels"),
        (images.index_by_digest([blob[:18] + b"\x10\1\0\0\0\1" + blob[24:]]), "4097 x 1 pixels"),
        (images.index_by_digest([bytes((8 << 20) + 1)]), "at most 8388608"),
        (images.index_by_digest([bytes(8 << 20)]), "^an image that is not a PNG$"),
        (images.index_by_digest([blob[:19] + b"\1\0\0\x10\1" + blob[24:]]), "1 x 4097 pixels"),
    ):
        with pytest.raises(ValueError, match=said):
            images.check_blobs(bad)
    with pytest.raises(ValueError, match="a damaged image"):
        pictures.decode_pixels(blob[:100])
    for url in ("data:image/png,xx", "data:text/plain;base64,xx", "data:image/png;base64,?"):
        with pytest.raises(ValueError, match="base64"):
            pictures.decode_data_url(url)


def test_prompts_have_the_tokens_of_their_images(llava: Path, small_model: Path) -> None:
    tokenizer = load_tokenizer(llava)
    token, length = tokenizer.image_shape
    assert length == 9

    def ids(text: str, count: int = 0, **more: Any) -> list[int]:
        prompt = Prompt(7, text, images=[picture(n) for n in range(count)], **more)
        return [int(x) for x in encode_prompt(tokenizer, prompt)]

    g = tokenizer.encode("g=", add_special_tokens=False)
    assert ids("g=") == g and ids("g=", 1) == ids("<image>g=", 1) == [token] * 9 + g
    assert ids("<image>g=<image>", 2) == [token] * 9 + g + [token] * 9
    contracted = image_tokens.contract(ids("<image>g=<image>", 2), tokenizer.image_shape)
    assert contracted.tolist() == [token, *g, token]
    for text, count in (("<image>g=", 0), ("<image>g=", 2)):
        with pytest.raises(ConfigError, match=rf"prompt 7 has {count} images and 1 image tokens"):
            ids(text, count)
    with pytest.raises(ConfigError, match="prompt 7 has 65 images; at most 64"):
        ids("g=", 65)
    with pytest.raises(ConfigError, match=r"prompt 7 has an image, and the model in .* only text"):
        encode_prompt(load_tokenizer(small_model), Prompt(7, "g=", images=[picture(0)]))


@pytest.mark.parametrize("kind", TEMPLATES)
def test_chat_templates_of_text_and_of_parts_place_images(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(seeing_model(tmp_path / "m", template=kind, hidden=16, layers=1))
    token, _ = tokenizer.image_shape
    turns = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    shown = encode_prompt(tokenizer, Prompt(0, "", messages=turns, images=[picture(0)]))
    text = tokenizer.decode(image_tokens.contract(shown, tokenizer.image_shape))
    assert text == "user:one;user:<image>two;assistant:"
    plain = encode_prompt(tokenizer, Prompt(0, "", messages=turns))
    assert tokenizer.decode(plain) == "user:one;user:two;assistant:" and token not in plain


def test_arrays_with_other_images_than_tokens_are_refused(llava: Path) -> None:
    shape = images.ImageShape(9, 2)
    name = images.digest(picture(0))

    def row(prompt: list[int], tokens: list[int], names: list[str], mask: bytes) -> Any:
        ids = [np.array(x, "<i4").tobytes() for x in (prompt, tokens)]
        return TrainingSequence(*ids, (b"\0" * len(ids[1])), mask, [], images=names)

    arrays.check_sequence_numbers(
        row([9, 9, 1], [2, 9, 9], [name, name], b"\1\0\0"), "it", ModelShape(12, None, shape)
    )
    for bad, read, said in (
        (row([9, 9], [1], [], b"\1"), shape, "it has 2 image tokens and 0 images, each of 2 tok"),
        (row([9, 9], [1], [name] * 2, b"\1"), shape, "it has 2 image tokens and 2 images"),
        (row([1], [9, 9], [name], b"\0\1"), shape, "an image token was sampled"),
        (row([9, 9], [1], ["x"], b"\1"), shape, "a digest of an image has another form"),
        (row([1], [1], [name], b"\1"), None, "it has 1 images, of a model of text"),
    ):
        with pytest.raises(BadMessage, match=said) as refused:
            arrays.check_sequence_numbers(bad, "it", ModelShape(12, None, read))
        assert refused.value.reason == "image"


def generate(model: policy.PolicyModel, *, fixed: bool) -> list[Completion]:
    """Three prompts: with one image, with two, and with none."""
    assert model.vision is not None
    token, length = model.vision.shape
    engine = GenericEngine(model, slots=4, context=CONTEXT, fixed=fixed)
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "one")
    shown = ([token] * length + [3, 4], [token] * 2 * length + [5], [6, 7, 8])
    hows = [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8)]  # temperature and top-p
    engine.add(
        CompletionRequest((n, s, 1), prompt, n, 5, *hows[n], 0, (1,), seed=s, images=SHOWN[n])
        for n, prompt in enumerate(np.array(ids, np.int32) for ids in shown)
        for s in range(3)
    )
    found = engine.step(2)
    while engine.active:
        found += engine.step(1)
    return sorted(found, key=lambda one: one.key)


def relogged(model: policy.PolicyModel, found: list[Completion]) -> torch.Tensor:
    temperature = torch.tensor([(1.0, 0.7, 1.3)[one.key[0]] for one in found])
    return model.logprobs(
        [one.prompt for one in found],
        [one.tokens for one in found],
        temperature,
        supports=[one.support for one in found],
        images=[SHOWN[one.key[0]] for one in found],
    ).logprobs


def test_engine_learner_and_transformers_agree(llava: Path) -> None:
    model = policy.load_policy(llava, "float32", "cpu")
    assert model.fast is None and model.vision is not None
    found = generate(model, fixed=False)
    assert len(found) == 9
    ours = relogged(model, found).detach()
    sampled = torch.from_numpy(np.concatenate([x.logprobs for x in found]))
    assert float((ours - sampled).abs().max()) < 1e-5
    token, _ = model.vision.shape
    assert not any((one.tokens == token).any() for one in found)
    at = 0
    for one in found:
        if one.support is None:  # transformers by itself, with pixel_values
            pixels = [model.vision.load_pixels(x) for x in SHOWN[one.key[0]]]
            ids = torch.from_numpy(np.concatenate([one.prompt, one.tokens]).astype(np.int64))
            with torch.no_grad():
                logits = model.hf(input_ids=ids[None], pixel_values=torch.stack(pixels)).logits[0]
            scale = (1.0, 0.7)[one.key[0]]
            logits[:, token] = -1e30
            own = torch.log_softmax(logits / scale, -1)[len(one.prompt) - 1 : -1]
            own = own.gather(1, torch.from_numpy(one.tokens.astype(np.int64))[:, None])[:, 0]
            torch.testing.assert_close(ours[at : at + len(own)], own, atol=1e-5, rtol=0)
        at += len(one.tokens)


def test_the_images_decide_and_the_vision_tower_learns(llava: Path) -> None:
    """Other pixels give other log-probabilities. The gradient reaches the tower, once for each
    distinct image, and is the finite difference."""
    model = policy.load_policy(llava, "float32", "cpu")
    found = generate(model, fixed=False)
    before = relogged(model, found)
    named = dict(model.hf.named_parameters())
    weight = named["model.vision_tower.embeddings.patch_embedding.weight"]
    loss = (before * torch.linspace(-1, 2, len(before))).sum()
    (gradient,) = torch.autograd.grad(loss, [weight])
    direction = gradient / gradient.norm()
    ends = []
    for step in (1, -1):
        with torch.no_grad():
            kept = weight.clone()
            weight += step * 1e-2 * direction
            after = relogged(model, found).double()
            ends.append(float((after * torch.linspace(-1, 2, len(after))).sum()))
            weight.copy_(kept)
    assert (ends[0] - ends[1]) / 2e-2 == pytest.approx(float(gradient.norm()), rel=2e-2)
    calls = []
    encode = model.hf.get_image_features

    def count(pixel_values: torch.Tensor, **more: Any) -> Any:
        calls.append(len(pixel_values))
        return encode(pixel_values=pixel_values, **more)

    model.hf.get_image_features = count
    with torch.no_grad():
        relogged(model, [one for one in found if one.key[0] == 1])
    assert calls == [2]  # for three rows of two images each
    other = [one for one in found if one.key[0] == 0]
    rows = [one.prompt for one in other], [one.tokens for one in other], torch.ones(len(other))
    swapped = model.logprobs(*rows, images=[(picture(9),)] * len(other)).logprobs
    length = sum(len(one.tokens) for one in other)
    assert float((swapped - before[:length]).detach().abs().max()) > 1e-4


def test_exact_mode_is_bitwise_equal(llava: Path) -> None:
    model = policy.load_policy(llava, "float32", "cpu")
    row = exact_check.check_generation(model, slots=8, longest=8, context=CONTEXT, micro=5)
    assert row.values > 100 and row.differ == 0 and exact_check.check_operators(model) == []
    # with a gradient the learner's forward runs twice, and still gives the engine's bits
    found = generate(model, fixed=True)
    model.exact, model.exact_length = True, CONTEXT
    exact = relogged(model, found)
    exact.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(exact, torch.from_numpy(np.concatenate([one.logprobs for one in found])))


def test_a_swap_encodes_the_images_again(llava: Path, tmp_path: Path) -> None:
    model = policy.load_policy(llava, "float32", "cpu")
    other = policy.load_policy(seeing_model(tmp_path / "m", layers=1, seed=4), "float32", "cpu")
    engine = GenericEngine(model, slots=4, context=CONTEXT)
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "one")
    assert model.vision is not None
    token, length = model.vision.shape
    prompt = np.array([token] * length + [3], np.int32)
    more = {"seed": 0, "images": (picture(0),)}
    asked = CompletionRequest((0, 0, 1), prompt, 0, 6, 1.0, 1.0, 0, (), **more)
    engine.add([asked])
    engine.step(2)
    engine.load(dict(policy.list_named_weights(other)), Label(1, 1), "two")
    (one,) = engine.step(4)
    assert [(s.label.number, s.start, s.end) for s in one.spans] == [(0, 0, 2), (1, 2, 6)]
    after = other.logprobs([prompt], [one.tokens], torch.ones(1), images=[(picture(0),)]).logprobs
    sampled = torch.from_numpy(one.logprobs[2:])
    torch.testing.assert_close(after[2:].detach(), sampled, atol=1e-5, rtol=0)
    engine.add([asked])
    engine.step(1)
    engine.abort([asked.key])
    engine.step(1)
    with pytest.raises(ConfigError, match="a prompt with an image cannot be scored"):
        engine.score([prompt])


def test_an_export_keeps_the_image_processor(llava: Path, tmp_path: Path) -> None:
    model = policy.load_policy(llava, "float32", "cpu")
    policy.export(model, tmp_path / "out")
    again = policy.load_policy(tmp_path / "out", "float32", "cpu")
    found = generate(model, fixed=False)
    assert torch.equal(relogged(again, found), relogged(model, found))


def test_directories_that_do_not_fit_are_refused(llava: Path, tmp_path: Path) -> None:
    shutil.copytree(llava, tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"image_seq_length": 10}))
    model = policy.load_policy(tmp_path / "m", "float32", "cpu")
    assert model.vision is not None
    blobs = images.index_by_digest([picture(0)])
    with pytest.raises(ConfigError, match="makes 9 features of an image, and image_seq_length"):
        model.vision.compute_features(blobs, single=True)
    (tmp_path / "m" / "preprocessor_config.json").unlink()
    model = policy.load_policy(tmp_path / "m", "float32", "cpu")
    assert model.vision is not None
    with pytest.raises(ConfigError, match=r"the image processor in .* cannot be loaded"):
        model.vision.compute_features(blobs, single=True)
    file.write_text(json.dumps({k: x for k, x in raw.items() if k != "image_token_index"}))
    with pytest.raises(ConfigError, match="has no image_token_index"):
        image_tokens.read_shape(tmp_path / "m")
